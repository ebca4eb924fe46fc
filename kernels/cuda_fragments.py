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

from kernels import fragment_commit, fragment_rows
from kernels.attention import AttentionLaunch, AttentionShape, choose_launch
from kernels.attention import attention as decode_attention
from kernels.attention_parts import LOG2E
from kernels.compiler import Variant
from kernels.layout import BLOCK_SIZE, NUM_SINKS, FragmentCache, Paging
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
    num_sinks: int | None = None,
) -> FragmentCache:
    """A zeroed cache of `kind` fp16 or int4.

    Args:
        num_copies: exact copies of blocks (int4 alone has them).
        heads: kv heads of `head_dim` values, a multiple of 32 up to 256.
        exact_tables, sink_of: see `FragmentCache`; the cache keeps them as they are.
        num_sinks: exact copies of first keys; one for each block if None.
    """
    if head_dim % 32 or head_dim > 256:
        raise ValueError(f"heads of {head_dim} values: a multiple of 32 up to 256 is needed")

    def zeros(count: int, head_bytes: int) -> Tensor:
        return torch.zeros(count, layers, heads, head_bytes, dtype=torch.uint8, device=device)

    if kind == "fp16":
        stored = zeros(num_blocks, 256 * head_dim)
        return FragmentCache(kind, stored, stored, exact_tables, head_dim)
    stored = zeros(num_blocks, 2 * (32 * head_dim + 256))
    sinks = zeros(num_blocks if num_sinks is None else num_sinks, 4 * NUM_SINKS * head_dim)
    exact = zeros(num_copies, 256 * head_dim)
    return FragmentCache(kind, stored, exact, exact_tables, head_dim, sinks, sink_of)


def store_kv(qkv: Tensor, heads: Heads, cache: FragmentCache, layer: int, paging: Paging) -> None:
    """Writes each row's K and V, from float32 qkv (n, (H + 2 Hkv) Dh), to its place, rounded to fp16.

    With int4 that is a place of an exact copy. A block whose last place is among them then gets its stored form, and sinks get theirs:
    a row of the same pass may read them.
    """
    num_heads, num_kv, dim = heads
    rows = (paging.slots, paging.tables, paging.places)
    num_tables, max_blocks = paging.block_tables.shape[1:]
    grid = (len(qkv), -(-num_kv * dim // fragment_rows.THREADS))
    launch(
        fragment_rows.store_rows(num_kv, dim), grid, qkv, *_pool(cache.exact, layer), _exact_tables(cache, paging),
        *rows, num_tables, max_blocks, qkv.shape[1], num_heads * dim, (num_heads + num_kv) * dim,
    )  # fmt: skip
    if cache.sinks is not None:
        launch(
            fragment_commit.commit_rows(dim), (len(qkv), num_kv), *_pool(cache.exact, layer), *_pool(cache.stored, layer),
            *_pool(cache.sinks, layer), cache.sink_of, paging.block_tables, cache.exact_tables, *rows, num_tables,
            max_blocks,
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
    variant = attention_variant(shape, n)
    tables = paging.block_tables
    has_maps = paging.maps.shape[0] > 0
    gathered = _gather(cache, num_kv, layer, paging) if has_maps else None
    factor = (1 / dim**0.5 if scale is None else scale) * LOG2E
    sinks = (None, 0) if cache.sinks is None else _pool(cache.sinks, layer)
    launch(
        variant, (n * shape.units * variant.cluster, 1), qkv, _at(cache.exact, layer), cache.exact_tables,
        _bytes(cache.exact), *_pool(cache.stored, layer), tables, paging.positions, paging.slots, slopes,
        paging.windows, paging.tables, paging.row_map if has_maps else None, gathered, out, sinks[0],
        cache.sink_of, sinks[1], 0, tables.shape[1], tables.shape[2], qkv.shape[1], factor,
    )  # fmt: skip
    return out


def attention_variant(shape: AttentionShape, rows: int) -> Variant:
    """The attention kernel for so many rows."""
    return _kernel(*choose_launch(shape, rows, is_float_out=True, is_paged=True))


@remember
def _kernel(plan: AttentionLaunch, blocks_per_sm: int) -> Variant:
    return decode_attention("attention", plan, blocks_per_sm)


def _gather(cache: FragmentCache, num_kv: int, layer: int, paging: Paging) -> Tensor:
    """The exact own blocks of mapped rows, in position order: (num_maps, kv heads, 256 * dim) bytes."""
    dim, tables = cache.head_dim, _exact_tables(cache, paging)
    num_maps, width = paging.maps.shape
    gathered = cache.exact.new_empty(num_maps, num_kv, 256 * dim)
    launch(
        fragment_rows.gather_own(num_kv, dim), (len(paging.slots), num_kv), *_pool(cache.exact, layer), tables,
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
    if others < 1:
        return
    parts = [blocks, copies or blocks, sunk or blocks]
    at = _ids(cache, [part for ids in parts for part in ([ids[0]] * others, ids[1:])])
    _move(cache, offset, offset, at[2:4] if copies else at[:2])
    if cache.sinks is None:
        return
    if offset == BLOCK_SIZE - 1:
        _commit(cache, at[3], at[1])
    if offset < NUM_SINKS and sunk[0] >= 0:
        _move_sinks(cache, offset, at[4], at[5])


def move_places(
    cache: FragmentCache, source: int, target: int, blocks: Tensor, copies: Tensor | None
) -> None:
    """Copies offset `source` of blocks[0] to offset `target` of blocks[1], ids (2, n), and the same in their exact copies."""
    at = _ids(cache, blocks)
    if copies is None:
        _move(cache, source, target, at)
        return
    exact_at = _ids(cache, copies)
    _move(cache, source, target, exact_at)
    if target == BLOCK_SIZE - 1:
        _commit(cache, exact_at[1], at[1])


def _commit(cache: FragmentCache, copies: Tensor, blocks: Tensor) -> None:
    """Makes the stored form of blocks whose last place was written."""
    grid = (len(blocks), cache.exact.shape[1] * cache.exact.shape[2])
    variant = fragment_commit.commit_blocks(cache.head_dim)
    launch(
        variant, grid, cache.exact, _bytes(cache.exact), cache.stored, _bytes(cache.stored), copies, blocks
    )  # fmt: skip


def _move_sinks(cache: FragmentCache, offset: int, sources: Tensor, targets: Tensor) -> None:
    """Copies one of the first keys, and its value, from sinks to sinks."""
    assert cache.sinks is not None
    pairs = cache.sinks.view(torch.int16).view(
        *cache.sinks.shape[:3], 2, NUM_SINKS * cache.head_dim
    )
    keys = pairs[..., 0, :].unflatten(-1, (NUM_SINKS, cache.head_dim))[:, :, :, offset]
    values = pairs[..., 1, :].unflatten(-1, (cache.head_dim, NUM_SINKS))[..., offset]
    for part in (keys, values):
        part.index_copy_(0, targets.long(), part.index_select(0, sources.long()))


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


def _exact_tables(cache: FragmentCache, paging: Paging) -> Tensor:
    """Where the exact form of a row's own block is found."""
    return paging.block_tables if cache.sinks is None else cache.exact_tables


def _pool(pool: Tensor, layer: int) -> tuple[Tensor, int]:
    """A pool from `layer` of its first block on, and the bytes of a block."""
    return _at(pool, layer), _bytes(pool)


def _bytes(pool: Tensor) -> int:
    """Of a block with all its layers."""
    return pool.stride(0)


def _at(pool: Tensor, layer: int) -> Tensor:
    """The pool from `layer` of its first block on."""
    return pool.view(-1)[layer * pool.stride(1) :]


def variants() -> dict[str, Variant]:
    """Representative kernels, to be compiled and assembled."""
    shapes = [
        (AttentionShape.of(heads, kv_heads, dim, kind, has_alibi), rows)
        for kind in ("fp16", "int4")
        for heads, kv_heads, dim, has_alibi, row_counts in (
            (12, 12, 128, False, (1, 8, 64)),
            (64, 8, 256, True, (64,)),
            (32, 2, 96, False, (1,)),
        )
        for rows in row_counts
    ]
    kernels = {
        f"{attention_variant(*shape).name}_{i}": attention_variant(*shape)
        for i, shape in enumerate(shapes)
    }
    return kernels | fragment_rows.variants() | fragment_commit.variants()
