"""The fast caches of the GPU behind the engine's operations: K and V in fragment order, as fp16 or in 4 bits.

Same names and meanings as in `kernels.cpu` and `gpu_worker.kv_store`, on a `FragmentCache`. Each row's result has the bits that it has
alone: `kernels.attention` reduces the same 16 streams whatever the launch, and a mapped row reads a block that has its keys
in position order. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as remember

import torch
from torch import Tensor

from kernels import fragment_rows
from kernels.attention import AttentionLaunch, AttentionShape, choose_launch
from kernels.attention import attention as decode_attention
from kernels.attention_parts import LOG2E
from kernels.compiler import Variant
from kernels.layout import FragmentCache, Paging
from kernels.runtime import launch

Heads = tuple[int, int, int]


def make_cache(
    kind: str,
    num_blocks: int,
    num_copies: int,
    layers: int,
    heads: int,
    head_dim: int,
    exact_tables: Tensor,
    sink_of: Tensor,
    device: torch.device,
) -> FragmentCache:
    """A zeroed cache of `kind` fp16.

    Args:
        num_copies: exact copies of blocks.
        heads: kv heads of `head_dim` values, a multiple of 32 up to 256.
        exact_tables, sink_of: see `FragmentCache`; the cache keeps them as they are.
    """
    if head_dim % 32 or head_dim > 256:
        raise ValueError(f"heads of {head_dim} values: a multiple of 32 up to 256 is needed")
    stored = torch.zeros(
        num_blocks, layers, heads, 256 * head_dim, dtype=torch.uint8, device=device
    )
    return FragmentCache(kind, stored, stored, exact_tables, head_dim)


def store_kv(qkv: Tensor, heads: Heads, cache: FragmentCache, layer: int, paging: Paging) -> None:
    """Writes each row's K and V, from float32 qkv (n, (H + 2 Hkv) Dh), to its place, rounded to fp16."""
    num_heads, num_kv, dim = heads
    tables = paging.block_tables
    grid = (len(qkv), -(-num_kv * dim // fragment_rows.THREADS))
    launch(
        fragment_rows.store_rows(num_kv, dim), grid, qkv, _at(cache.stored, layer), _bytes(cache.stored), tables,
        paging.slots, paging.tables, paging.places, tables.shape[1], tables.shape[2], qkv.shape[1], num_heads * dim,
        (num_heads + num_kv) * dim,
    )  # fmt: skip


def attention(
    qkv: Tensor,
    heads: Heads,
    cache: FragmentCache,
    layer: int,
    slopes: Tensor | None,
    paging: Paging,
    scale: float | None = None,
) -> Tensor:
    """Attention of each row's q over the keys up to its own position, float32 (n, H Dh); see `kernels.cpu.attention`.

    q and the weights of the values are rounded to fp16.
    """
    num_heads, num_kv, dim = heads
    n = len(qkv)
    out = qkv.new_empty(n, num_heads * dim)
    if n == 0:
        return out
    shape = AttentionShape.of(num_heads, num_kv, dim, cache.kind, slopes is not None)
    variant = _variant(shape, n)
    tables = paging.block_tables
    has_maps = paging.maps.shape[0] > 0
    gathered = _gather(cache, num_kv, layer, paging) if has_maps else None
    factor = (1 / dim**0.5 if scale is None else scale) * LOG2E
    launch(
        variant, (n * shape.units * variant.cluster, 1), qkv, _at(cache.exact, layer), cache.exact_tables,
        _bytes(cache.exact), _at(cache.stored, layer), _bytes(cache.stored), tables, paging.positions, paging.slots,
        slopes, paging.windows, paging.tables, paging.row_map if has_maps else None, gathered, out, 0,
        tables.shape[1], tables.shape[2], qkv.shape[1], factor,
    )  # fmt: skip
    return out


def _variant(shape: AttentionShape, rows: int) -> Variant:
    return _kernel(*choose_launch(shape, rows, is_float_out=True, is_paged=True))


@remember
def _kernel(plan: AttentionLaunch, blocks_per_sm: int) -> Variant:
    return decode_attention("attention", plan, blocks_per_sm)


def _gather(cache: FragmentCache, num_kv: int, layer: int, paging: Paging) -> Tensor:
    """The exact own blocks of mapped rows, in position order: (num_maps, kv heads, 256 * dim) bytes."""
    exact, dim, tables = cache.exact, cache.head_dim, paging.block_tables
    num_maps, width = paging.maps.shape
    gathered = exact.new_empty(num_maps, num_kv, 256 * dim)
    launch(
        fragment_rows.gather_own(num_kv, dim), (len(paging.slots), num_kv), _at(exact, layer), _bytes(exact), tables,
        paging.slots, paging.tables, paging.positions, paging.row_map, paging.map_base, paging.maps, gathered,
        tables.shape[1], tables.shape[2], width,
    )  # fmt: skip
    return gathered


# --- blocks ----------------------------------------------------------------------------------------


def copy_blocks(cache: FragmentCache, source: Tensor, target: Tensor) -> None:
    """Copies whole blocks (ids) in their stored form."""
    read, written = (_ids(cache, ids).long() for ids in (source, target))
    cache.stored.index_copy_(0, written, cache.stored.index_select(0, read))


def copy_place(
    cache: FragmentCache, offset: int, blocks: Sequence[int], copies: Sequence[int], sunk: Sequence[int]
) -> None:  # fmt: skip
    """Copies one position of the first of `blocks` to the others, in every form; `copies` and `sunk` are their exact copies and sinks, if
    they have any."""
    others = len(blocks) - 1
    _move(cache, offset, offset, _ids(cache, [[blocks[0]] * others, blocks[1:]]))


def move_places(
    cache: FragmentCache, source: int, target: int, blocks: Tensor, copies: Tensor | None
) -> None:
    """Copies offset `source` of blocks[0] to offset `target` of blocks[1], ids (2, n), and the same in their exact copies."""
    _move(cache, source, target, _ids(cache, blocks))


def _move(cache: FragmentCache, source: int, target: int, ids: Tensor) -> None:
    """In the exact copies `ids` (2, n), or in the blocks themselves."""
    exact = cache.exact
    grid = (ids.shape[1], exact.shape[1] * exact.shape[2])
    variant = fragment_rows.move_rows(cache.head_dim)
    launch(variant, grid, exact, _bytes(exact), ids[0], ids[1], source, target)


def _ids(cache: FragmentCache, ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Block ids, int32 on the cache's device, sent there without waiting for it."""
    ids = torch.as_tensor(ids, dtype=torch.int32).contiguous()
    if ids.device == cache.stored.device:
        return ids
    return ids.pin_memory().to(cache.stored.device, non_blocking=True)


def _bytes(pool: Tensor) -> int:
    """Of a block with all its layers."""
    return pool.stride(0)


def _at(pool: Tensor, layer: int) -> Tensor:
    """The pool from `layer` of its first block on."""
    return pool.view(-1)[layer * pool.stride(1) :]


def variants() -> dict[str, Variant]:
    """Representative kernels, to be compiled and assembled."""
    shapes = (
        AttentionShape.of(12, 12, 128),
        AttentionShape.of(64, 8, 256, has_alibi=True),
        AttentionShape.of(32, 2, 96),
    )
    kernels = [_variant(shape, rows) for shape in shapes for rows in (1, 8, 64)]
    return {f"{kernel.name}_{i}": kernel for i, kernel in enumerate(kernels)}
