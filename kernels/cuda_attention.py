"""Paged attention on the GPU over a `PagedCache` or a `CutCache`, under the names and arguments of `kernels.cpu`.

Chooses the kernels of `cuda_attend` and `cuda_store` and their grids from shapes alone, so that a captured graph holds for all values. Nothing
here waits for the device. A row at position -1 is none: its result is 0; at place -1 it stores nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache as remembered

import torch
from torch import Tensor

from kernels import cuda_attend, cuda_read, cuda_store
from kernels.compiler import Variant
from kernels.cuda_attend import MERGE_THREADS
from kernels.cuda_attend_parts import SPLITS, Shape
from kernels.layout import BLOCK_SIZE, CutCache, PagedCache, Paging
from kernels.runtime import launch

Heads = tuple[int, int, int]
_Three = tuple[Tensor | None, Tensor | None, Tensor | None]

_MANY_BLOCKS = 2048  # of threads: the device is evenly full without splitting the streams of a row
_FEW_BLOCKS = 384  # by fours they leave it empty
_store = remembered(cuda_store.store)
_gather = remembered(cuda_read.gather)
_read = remembered(cuda_read.read)
_attend = remembered(cuda_attend.attend)
_merge = remembered(cuda_attend.merge)


def store_kv(
    qkv: Tensor, heads: Heads, cache: PagedCache | CutCache, layer: int, paging: Paging
) -> None:
    """Writes each row's K and V, from qkv (n, (H + 2 Hkv) Dh), to the row's place in layer `layer` of its block."""
    num_heads, num_kv, dim = heads
    _put(qkv, num_heads * dim, (num_heads + num_kv) * dim, num_kv, dim, cache, layer, paging)


def store_inputs(x: Tensor, cache: CutCache, layer: int, paging: Paging) -> None:
    """Writes each row's attention input, x (n, d), to its place in a cache that keeps inputs."""
    _put(x, 0, 0, 1, x.shape[1], cache, layer, paging)


def _put(
    rows: Tensor, first_key: int, first_value: int, heads: int, dim: int, cache: PagedCache | CutCache, layer: int, paging: Paging
) -> None:  # fmt: skip
    tensors = _Tensors(cache)
    group = tensors.group
    if tensors.kind in ("fp32", "fp16"):
        group = next(n for n in (128, dim) if dim % n == 0)
    pieces = (1 + tensors.has_keys) * dim // group
    launch(
        _store(tensors.kind, tensors.has_keys), (len(rows) * heads, -(-pieces * 32 // cuda_store.STORE_THREADS)),
        rows, *tensors.stored, *tensors.exact, *tensors.sinks, paging.slots, paging.tables, paging.places, paging.block_tables,
        rows.shape[1], first_key, first_value, layer, tensors.layers, heads, dim, group, cache.values.shape[-1],
        *paging.block_tables.shape[1:], *tensors.exact_shape,
    )  # fmt: skip


def read_inputs(cache: CutCache, layer: int, blocks: Tensor, copies: Tensor) -> Tensor:
    """The inputs (num_blocks, BLOCK_SIZE, d) of a sequence's first blocks, block ids int32 (num_blocks,) in one of its tables.

    Where `copies` int32 (num_blocks,) is 0 or more they come from that exact copy, else from the stored form with exact sinks.
    """
    tensors = _Tensors(cache)
    dim = cache.sink_values.shape[-1]
    out = torch.empty(len(blocks), BLOCK_SIZE, dim, device=cache.values.device)
    launch(
        _read(tensors.kind), (len(blocks), BLOCK_SIZE // cuda_read.READ_ROWS),
        cache.values, cache.scales, cache.exact_values, cache.sink_values, cache.sink_of, blocks, copies, out, layer, tensors.layers,
        dim, cache.group,
    )  # fmt: skip
    return out


def attention(
    qkv: Tensor,
    heads: Heads,
    cache: PagedCache | CutCache,
    layer: int,
    slopes: Tensor | None,
    paging: Paging,
    scale: float | None = None,
) -> Tensor:
    """Attention of each row's q over the keys up to its own position, read through its tables. Returns (n, H Dh).

    Of qkv (n, H Dh or more) only q is read. `slopes` (H,) are ALiBi's; scores are times `scale`, 1 / sqrt(Dh) if None. How a row's
    sums are ordered: `kernels.cuda_attend`.
    """
    num_heads, num_kv, dim = heads
    tensors = _Tensors(cache)
    rows = len(qkv)
    group = num_heads // num_kv
    padded = cache.values.shape[-1] if tensors.kind == "fp32" else 0
    shape = Shape(tensors.kind, dim, 1, tensors.has_keys, tensors.group, padded)
    queries, together, splits = plan(rows, num_kv, group, shape)
    subs = -(-group // (queries // together))
    shape = replace(shape, queries=queries, rows=together)
    out = torch.empty(rows, num_heads * dim, device=qkv.device)
    parts = totals = None
    if splits > 1:
        parts = torch.empty(rows, num_heads, splits, dim, device=qkv.device)
        totals = torch.empty(rows, num_heads, splits, 2, device=qkv.device)
    mapped, num_mapped = _mapped(tensors, rows, num_kv, dim, layer, paging)
    launch(
        _attend(shape), (-(-rows // together) * splits, num_kv * subs),
        qkv, *tensors.stored, *tensors.exact, *tensors.sinks, *mapped, paging.slots, paging.tables, paging.positions, paging.windows,
        paging.row_map, paging.map_base, paging.maps, paging.block_tables, slopes, out, parts, totals, qkv.shape[1], layer,
        tensors.layers, num_kv, group, subs, *paging.block_tables.shape[1:], *tensors.exact_shape, paging.maps.shape[1], num_mapped,
        splits.bit_length() - 1, rows, 1 / math.sqrt(dim) if scale is None else scale,
    )  # fmt: skip
    if splits > 1:
        launch(
            _merge(splits), (-(-num_heads * dim // MERGE_THREADS), rows),
            parts, totals, paging.positions, out, num_heads, dim,
        )  # fmt: skip
    return out


def plan(rows: int, num_kv: int, group: int, shape: Shape) -> tuple[int, int, int]:
    """(queries of a block of threads, of how many rows they are, into how many blocks the streams of a row are split).

    None of them changes a bit of the result. More than 64 rows are taken for those of prompts, which read the same keys.
    """
    # what the registers of that many warps hold, and with few rows of inputs what fills the device
    most = 4 if shape.num_warps <= 12 else 3 if shape.num_warps <= 16 else 1
    if not shape.has_keys and rows <= 2:
        most = min(most, 2)
    heads = -(-group // -(-group // most))
    together = max(1, most // heads) if shape.has_keys and rows > 64 else 1
    blocks = -(-rows // together) * num_kv * -(-group // heads)
    splits = 1 if blocks >= _MANY_BLOCKS else 4 if 4 * blocks >= _FEW_BLOCKS else 16
    return heads * together, together, splits


def _mapped(
    tensors: _Tensors, rows: int, heads: int, dim: int, layer: int, paging: Paging
) -> tuple[list[Tensor | None], int]:
    """The blocks that rows read through maps: as keys, values, scales, exact keys and values; and how many a row may have."""
    if not paging.maps.numel():
        return [None] * 5, 0
    device, width = paging.maps.device, paging.maps.shape[1]
    num = -(-width // BLOCK_SIZE)
    keys, values, scales = tensors.stored
    exact_keys, exact_values, exact_tables = tensors.exact
    near: list[Tensor | None] = [
        None if part is None or not part.numel() else
        torch.empty(rows * count, heads, *part.shape[3:], dtype=part.dtype, device=device)
        for part, count in ((keys, num), (values, num), (scales, num), (exact_keys, 1), (exact_values, 1))
    ]  # fmt: skip
    value_bytes = values.shape[-1] * values.element_size()
    stored_dim = keys.shape[3] if tensors.has_keys else dim
    num_scales = 0 if scales is None else scales.shape[4]
    launch(
        _gather(tensors.kind, tensors.has_keys), (rows * num * heads, 1),
        *tensors.stored, *tensors.exact, *near, paging.slots, paging.tables, paging.positions, paging.row_map, paging.map_base,
        paging.maps, paging.block_tables, layer, tensors.layers, heads, dim, stored_dim, value_bytes, num_scales,
        *paging.block_tables.shape[1:], *tensors.exact_shape, width, num,
    )  # fmt: skip
    return near, num


class _Tensors:
    """A cache's tensors in the order of the kernels' arguments, and what they say of its form."""

    def __init__(self, cache: PagedCache | CutCache) -> None:
        self.layers = cache.values.shape[1]
        self.exact: _Three = (None, None, None)
        self.sinks: _Three = (None, None, None)
        self.exact_shape = [0, 0]
        if isinstance(cache, PagedCache):
            self.kind, self.group, self.has_keys = "fp32", 0, True
            self.stored: tuple[Tensor, Tensor, Tensor | None] = (cache.keys, cache.values, None)
            return
        self.kind, self.has_keys = cache.kind, len(cache.keys) > 0
        self.group = cache.group if cache.kind in ("int8", "int4") else 0
        self.stored = (cache.keys, cache.values, cache.scales)
        self.exact = (cache.exact_keys, cache.exact_values, cache.exact_tables)
        self.sinks = (cache.sink_keys, cache.sink_values, cache.sink_of)
        self.exact_shape = list(cache.exact_tables.shape[1:])


def variants() -> dict[str, Variant]:
    """Kernels of representative models: 12 heads of 128, 16 heads of 64 on 4, inputs of 1536 values, a toy of 16."""
    found = [_merge(n) for n in SPLITS[1:]] + [_read("fp16"), _read("int4")]
    for kind in ("fp32", "fp16", "int8", "int4"):
        has_scales = kind in ("int8", "int4")
        found += [_store(kind, True), _gather(kind, True)]
        for dim, queries, rows in ((128, 1, 1), (128, 4, 4), (64, 4, 1), (16, 2, 1)):
            group, padded = dim * has_scales, dim * (kind == "fp32")
            found.append(_attend(Shape(kind, dim, queries, True, group, padded, rows)))
    for kind in ("fp16", "int4"):
        found += [_store(kind, False), _gather(kind, False)]
        group = 128 if kind == "int4" else 0
        found += [_attend(Shape(kind, 1536, queries, False, group)) for queries in (2, 4)]
        found.append(_attend(Shape(kind, 48, 4, False, 24 if kind == "int4" else 0)))
    return {variant.name: variant for variant in found}
