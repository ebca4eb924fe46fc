"""Decode steps of models without rotary positions whose cache keeps the attention's inputs (KV formats h and h_int4).

As `graphs.DecodeRunner`, with three kernels for attention instead of two: queries in terms of the input and the
input to the cache, attention over inputs, values. The cache is a `CutCache` on the device, in the layout that all kernels share.
Owns the launches and nothing of requests: whoever drives it writes tokens, positions and tables into the buffers and replays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpu_worker import graphs
from gpu_worker.graphs import DecodeSpec, DecodeWeights, column_tiles_for
from kernels import (
    absorbed,
    absorbed_plan,
    absorbed_products,
    absorbed_query,
    absorbed_values,
    fragments,
    step,
)
from kernels.absorbed_products import ProductLaunch
from kernels.absorbed_shape import GROUP, AbsorbedLaunch, AbsorbedShape
from kernels.compiler import Variant
from kernels.fragments import RANKS
from kernels.launch import Library
from kernels.layout import BLOCK_SIZE, NUM_SINKS, CutCache

# The reference model with learned positions.
REFERENCE = replace(graphs.REFERENCE, is_rotary=False)
_SHARED_STEP = ("o", "gate_up", "down", "head")


def shape_of(spec: DecodeSpec, kind: str) -> AbsorbedShape:
    """The attention of a model; `kind` is the cache's, fp16 (h) or int4 (h_int4)."""
    return AbsorbedShape(spec.d_model, spec.n_heads, spec.n_kv_heads, spec.head_dim, kind)


def make_cache(
    shape: AbsorbedShape,
    layers: int,
    num_blocks: int,
    num_copies: int,
    num_sinks: int,
    device: torch.device | str,
) -> CutCache:
    """A zeroed cache of inputs on a device; `exact_tables` stay with the caller (runners have a copy for each row)."""

    def zeros(*size: int, dtype: torch.dtype = torch.int16) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    d, is_cut = shape.d_model, shape.is_cut
    stored = (num_blocks, layers, 1, BLOCK_SIZE)
    return CutCache(
        kind=shape.kind,
        group=GROUP,
        keys=zeros(0),
        values=zeros(*stored, d // 2, dtype=torch.uint8) if is_cut else zeros(*stored, d),
        scales=zeros(num_blocks, layers, 1, 1, 2 * shape.groups * is_cut, BLOCK_SIZE),
        exact_keys=zeros(0),
        exact_values=zeros(num_copies * is_cut, layers, 1, BLOCK_SIZE, d),
        exact_tables=zeros(0, 0, 0, dtype=torch.int32),
        sink_keys=zeros(0),
        sink_values=zeros(num_sinks * is_cut, layers, 1, NUM_SINKS, d),
        sink_of=zeros(num_blocks * is_cut, dtype=torch.int32) - 1,
    )


def split_for(shape: AbsorbedShape, rows: int) -> int:
    """Blocks that share a row's attention: about as many in all as there are multiprocessors."""
    most = shape.chains
    return most if rows * most <= 132 else most // 2 if rows * most <= 264 else 2


def step_kernels(
    spec: DecodeSpec, kind: str, rows: int, split: int = 0
) -> tuple[dict[str, Variant], dict[str, tuple[int, int]], AbsorbedLaunch]:
    """The kernels of a step of `rows` rows, their grids, and how attention is spread (over `split` blocks a row, 0: as fits)."""
    variants, grids = graphs.step_kernels(spec, rows)
    variants = {name: variants[name] for name in _SHARED_STEP}
    grids = {name: grids[name] for name in _SHARED_STEP}
    shapes, tiles = graphs.product_shapes(spec), column_tiles_for(rows)
    shape = shape_of(spec, kind)
    if absorbed_products.product_shape(shape).k_slice != shapes["qkv"].k_slice:
        raise ValueError(f"no absorbed step for {spec}")
    split = split or split_for(shape, rows)
    # beside the blocks of `query` there is room for about this many
    attend = AbsorbedLaunch(shape, split, 2 if rows * split <= 28 else 1)
    product = ProductLaunch(shape, tiles, 1 if rows <= 16 else 3)
    begin = step.StepShape(spec.d_model, 0, shapes["qkv"], tiles, has_learned_positions=True)
    variants |= {
        "begin": step.begin_step(begin),
        "query": absorbed_query.query("absorbed_query", product),
        "plan": absorbed_plan.plan("absorbed_plan", attend),
        "attention": absorbed.attention("absorbed_attention", attend),
        "values": absorbed_values.values("absorbed_values", product, attend, shapes["o"]),
    }
    chunks = -(-rows // product.columns)
    grids |= {
        "begin": (rows, 1),
        "plan": (rows, spec.loops),
        "query": (RANKS * (spec.n_heads + product.store_clusters), chunks),
        "attention": (rows * attend.split, 1),
        "values": (RANKS * spec.n_heads, chunks),
    }
    return variants, grids, attend


class AbsorbedWeights:
    """A model's weights in the order of the kernels.

    Takes what `graphs.DecodeWeights` takes, and `pos` (max_pos, d) fp16, the learned positions.
    """

    def __init__(self, spec: DecodeSpec, kind: str, tensors: Mapping[str, Tensor]) -> None:
        self.spec, self.shape = spec, shape_of(spec, kind)
        shape, width = self.shape, spec.head_dim
        plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(".qkv")}
        self.others = DecodeWeights(spec, plain)
        self.packed: dict[str, Tensor] = {}
        for layer in range(spec.layers):
            weight = tensors[f"{layer}.qkv"]
            first, second = spec.n_heads * width, (spec.n_heads + spec.n_kv_heads) * width
            q, k, v = weight[:first], weight[first:second], weight[second:]
            self.packed[f"{layer}.q"] = absorbed_products.pack_heads(q, shape)
            self.packed[f"{layer}.k"] = absorbed_products.pack_fold(k, shape)
            self.packed[f"{layer}.v"] = absorbed_products.pack_values(v, shape)

    def address(self, name: str) -> int:
        if name in self.packed:
            return self.packed[name].data_ptr()
        return self.others.address(name)


class AbsorbedRunner:
    """One row bucket: its static buffers, its launches and its graph."""

    def __init__(
        self,
        weights: AbsorbedWeights,
        cache: CutCache,
        rows: int,
        max_blocks: int,
        library: Library,
        *,
        is_overlapped: bool = True,
        split: int = 0,
    ) -> None:
        spec = weights.spec
        self.spec, self.weights, self.cache, self.rows = spec, weights, cache, rows
        self._max_blocks, self._library, self._is_overlapped = max_blocks, library, is_overlapped
        device = cache.values.device
        d, tiles, shape = spec.d_model, column_tiles_for(rows), weights.shape
        self.variants, self.grids, self.attend = step_kernels(spec, shape.kind, rows, split)

        def ints(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.int32, device=device)

        def halves(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.half, device=device)

        self.tokens, self.positions = ints(rows), ints(rows) - 1
        self.row_info, self.windows = ints(rows, 2), ints(rows)
        self.tables = ints(rows, spec.loops, max_blocks)
        self.exact_blocks = ints(rows, spec.loops)
        self.slots = ints(spec.loops, rows)
        self.x = torch.zeros(rows, d, device=device)
        self.squares = torch.zeros(rows, d // 16, device=device)
        self.normed, self.mixed, self.hidden = (
            halves(fragments.packed_size(rows, weights.others.shapes[name], tiles))
            for name in ("qkv", "o", "down")
        )
        self.queries = halves(rows, shape.query_bytes // 2)
        self.averages = halves(rows, self.attend.slots, spec.n_heads, d)
        self.meta = torch.zeros(rows, self.attend.slots, spec.n_heads, 2, device=device)
        self._room = absorbed_plan.list_units(self.attend, max_blocks)
        self.lists = ints(spec.loops, rows, self.attend.split, self._room, 4)
        self.logits = torch.zeros(rows, spec.vocab, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _launch(self, name: str, stream: int, *args: Any) -> None:
        kernel = self._library.get(self.variants[name])
        is_overlapped = self._is_overlapped and name not in ("plan", "begin")
        kernel.launch(self.grids[name], args, stream, is_overlapped=is_overlapped)

    def _cache_args(self, layer: int) -> list[int]:
        """Addresses of a layer's part of the cache's pools, each with the bytes of one of its blocks."""
        cache = self.cache
        args: list[int] = []
        for pool in (cache.values, cache.scales, cache.exact_values, cache.sink_values):
            size = pool.element_size()
            args += [pool.data_ptr() + layer * pool.stride(1) * size, pool.stride(0) * size]
        return args

    def launch_step(self, stream: int, skip: Collection[str] = ()) -> None:
        """Put one whole step on a raw stream; `skip` leaves kernels out (to see their share of the time)."""
        spec, w, rows, eps = self.spec, self.weights, self.rows, self.spec.norm_eps
        x, squares, normed = self.x.data_ptr(), self.squares.data_ptr(), self.normed.data_ptr()
        mixed, hidden, queries = (
            self.mixed.data_ptr(),
            self.hidden.data_ptr(),
            self.queries.data_ptr(),
        )
        averages, meta = self.averages.data_ptr(), self.meta.data_ptr()
        tables = [
            table.data_ptr()
            for table in (self.cache.sink_of, self.tables, self.exact_blocks, self.positions, self.row_info)
        ]  # fmt: skip
        self._launch(
            "plan", stream, tables[1], tables[0], *tables[2:], self.windows.data_ptr(), self.lists.data_ptr(),
            spec.loops, self._max_blocks, self._room,
        )  # fmt: skip
        self._launch(
            "begin", stream, self.tokens.data_ptr(), w.address("embed"), w.address("pos"), x, squares,
            self.positions.data_ptr(), self.row_info.data_ptr(), self.tables.data_ptr(),
            self.slots.data_ptr(), 0, 0, w.address("0.norm1"), normed, 0, 0, 0, 0, 0, spec.loops, spec.loops,
            self._max_blocks, 1.0,
        )  # fmt: skip
        for loop in range(spec.loops):
            for layer in range(spec.layers):
                cache = self._cache_args(layer)
                sizes = loop, spec.loops, self._max_blocks
                is_last = (loop, layer) == (spec.loops - 1, spec.layers - 1)
                following = "norm" if is_last else f"{(layer + 1) % spec.layers}.norm1"
                calls: dict[str, tuple[float, ...]] = {
                    "query": (
                        w.address(f"{layer}.q"), w.address(f"{layer}.k"), normed, squares, queries, x,
                        w.address(f"{layer}.norm1"), *cache, *tables, rows, *sizes, eps,
                    ),
                    "attention": (
                        queries, *cache, self.lists[loop].data_ptr(), self.positions.data_ptr(),
                        self.windows.data_ptr(), 0, averages, meta, self._room,
                    ),
                    "values": (w.address(f"{layer}.v"), averages, meta, mixed, rows),
                    "o": (
                        w.address(f"{layer}.o"), mixed, 0, rows, eps, x, squares,
                        w.address(f"{layer}.norm3"), normed,
                    ),
                    "gate_up": (w.address(f"{layer}.gate_up"), normed, squares, rows, eps, hidden),
                    "down": (
                        w.address(f"{layer}.down"), hidden, 0, rows, eps, x, squares,
                        w.address(following), normed,
                    ),
                }  # fmt: skip
                for name, args in calls.items():
                    if name not in skip:
                        self._launch(name, stream, *args)
        if "head" not in skip:
            self._launch(
                "head",
                stream,
                w.address("head"),
                normed,
                squares,
                rows,
                eps,
                self.logits.data_ptr(),
            )

    def capture(self, skip: Collection[str] = ()) -> torch.cuda.CUDAGraph:
        """Capture the step; later replays take no Python launch."""
        stream = torch.cuda.Stream()
        stream.wait_stream(
            torch.cuda.current_stream()
        )  # whoever fills the buffers may still be at it
        self.launch_step(stream.cuda_stream, skip)  # loads the kernels outside the capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.launch_step(stream.cuda_stream, skip)
        self.graph = graph
        return graph
