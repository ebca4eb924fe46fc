"""Prompt rows through the layers: library products at fixed row counts, with our own kernels between them and for attention.

The class of prompt rows promises that a row's bits depend on its position and the prompt before it alone, not on the chunk or on the
other rows of the pass. Our kernels treat rows (and tiles of an aligned block) alone; products run at row counts that
`prompt_products` found to give equal bits. Models: pre-norm, RMS, SwiGLU, rotary, learned or ALiBi positions; the engine owns
embedding, loops, exits and the head. Passes of few rows are captured in CUDA graphs, as launching them costs more than running them.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import prompt_rows
from kernels.compiler import Variant
from kernels.layout import FragmentCache
from kernels.prompt_attention import TILE_ROWS, prompt_attention
from kernels.prompt_gather import cache_arguments, gather
from kernels.prompt_products import (
    CANDIDATES,
    Product,
    add_product,
    keep_equal,
    multiply,
    pieces,
)
from kernels.prompt_shapes import GatherShape, PromptAttentionShape
from kernels.prompt_split import SplitShape, commit_tiles, split_qkv
from kernels.prompt_tiles import PromptTiles
from kernels.runtime import launch

# Of larger passes the GPU's time is longer than that of launching; a graph keeps scratch memory of its own.
_CAPTURED_ROWS, _CAPTURED_ITEMS = 2048, 256
_MOST_GRAPHS = 16


@dataclass(frozen=True)
class PromptSpec:
    """The model's side; head_dim a multiple of 32, d_model and d_ff of 8."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    norm_eps: float = 1e-6
    is_rotary: bool = True
    is_half_pairing: bool = True
    has_alibi: bool = False

    @property
    def split(self) -> SplitShape:
        return SplitShape(
            self.num_heads, self.num_kv_heads, self.head_dim, self.is_rotary, self.is_half_pairing
        )

    @property
    def attention(self) -> PromptAttentionShape:
        return PromptAttentionShape(
            self.num_heads, self.num_kv_heads, self.head_dim, self.has_alibi
        )


@dataclass(frozen=True)
class PromptLayer:
    """One layer's weights: fp16 (num_out, num_in) matrices, [q; k; v] and [gate; up] joined; float32 (d_model,) gains."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norm1: Tensor
    norm3: Tensor


class PromptPass:
    """Runs prompt rows through layers; owns its scratch memory, which grows to the largest pass. For one thread and stream at a time.

    Args:
        layers: the weights by layer; the cache's layer index counts the same way unless `layer` is told otherwise.
        angles: float32 (max_pos, head_dim / 2, 2), cos and sin; None without rotary positions.
        block_tables: int32 (num_slots, num_tables, max_blocks).
        slopes: float32 (num_heads,), ALiBi only.
        candidates: row counts of products, of which each product keeps those with equal bits; None: those that suit a GPU, or one block.
    """

    def __init__(
        self,
        spec: PromptSpec,
        layers: Sequence[PromptLayer],
        cache: FragmentCache,
        block_tables: Tensor,
        *,
        angles: Tensor | None = None,
        slopes: Tensor | None = None,
        candidates: Sequence[int] | None = None,
    ) -> None:
        self.spec, self.layers, self.cache = spec, layers, cache
        self.block_tables, self.angles, self.slopes = block_tables, angles, slopes
        self.device = block_tables.device
        if candidates is None:
            candidates = CANDIDATES if self.device.type == "cuda" else (TILE_ROWS,)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.candidates = sorted(candidates)
        products = {(p, w.shape): (p, w) for p, w in self._products()}
        self.counts = {key: keep_equal(*of, self.candidates) for key, of in products.items()}
        self._norm = prompt_rows.norm(spec.d_model)
        self._gate = prompt_rows.gate(spec.d_ff)
        self._split = split_qkv(replace(spec.split, is_gathered=cache.kind == "fp16"))
        shape = replace(spec.attention, kind=cache.kind)
        self._attention = prompt_attention(shape)
        self._windowed = prompt_attention(replace(shape, has_windows=True))
        self._commit = commit_tiles(spec.head_dim, spec.num_kv_heads)
        self._gather = gather(GatherShape(spec.num_kv_heads, spec.head_dim, cache.kind))
        self._multiprocessors = 2
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self._multiprocessors = properties.multi_processor_count
        self._scratch: dict[str, Tensor] = {}
        self._graphs: dict[_GraphKey, _CapturedPass | None] = {}

    def _products(self) -> list[tuple[Product, Tensor]]:
        found: list[tuple[Product, Tensor]] = []
        for layer in self.layers:
            found += [(multiply, layer.qkv), (multiply, layer.gate_up)]
            found += [(add_product, layer.o), (add_product, layer.down)]
        return found

    def padded_rows(self, rows: int) -> int:
        """Rows of the buffers of a pass of `rows` rows: some products may compute as many."""
        return max(sum(pieces(rows, counts)[-1]) for counts in self.counts.values())

    def new_state(self, rows: int) -> Tensor:
        """Zeros, float32 (padded rows, d_model): the state of a pass, whose first rows the caller fills."""
        return torch.zeros(self.padded_rows(rows), self.spec.d_model, device=self.device)

    def core(self, state: Tensor, tiles: PromptTiles) -> Tensor:
        """Put the state (rows, d_model) float32 of a pass through all layers; the new state, and K and V in the cache."""
        rows = len(state)
        some = next((count for count in self.candidates if count >= rows), rows)
        key = (some, tiles.tile_capacity, tiles.item_capacity, tiles.has_windows)
        if some <= _CAPTURED_ROWS and tiles.item_capacity <= _CAPTURED_ITEMS and state.is_cuda:
            # The first pass of a shape runs as it is: what is loaded or allocated on first use cannot be captured.
            if key in self._graphs:
                graph = self._graphs[key]
                if graph is None:
                    graph = self._graphs[key] = _CapturedPass(self, some, tiles)
                return graph.run(state, tiles)
            if len(self._graphs) == _MOST_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = None
        x = self.new_state(rows)
        x[:rows] = state
        for index in range(len(self.layers)):
            self.layer(x, rows, index, tiles)
        return x[:rows]

    def layer(
        self,
        x: Tensor,
        rows: int,
        index: int,
        tiles: PromptTiles,
        cache_layer: int | None = None,
    ) -> None:
        """Put the state of `rows` prompt rows through one layer, in place, and their K and V into the cache.

        Args:
            x: float32 (padded_rows(rows), d_model), contiguous; rows past `rows` may be computed and mean nothing.
            index: which of the layers' weights.
            tiles: of the rows, with the table of this call.
            cache_layer: the cache's layer index, if it is another.
        """
        spec, weights, cache = self.spec, self.layers[index], self.cache
        padded, num_tiles, num_items = len(x), tiles.num_tiles, tiles.num_items
        assert padded == self.padded_rows(rows) and x.is_contiguous(), "make x by new_state"
        where = cache_arguments(cache, index if cache_layer is None else cache_layer)
        is_int4 = cache.kind == "int4"
        exact_tables = cache.exact_tables if is_int4 else self.block_tables
        _, num_tables, max_blocks = self.block_tables.shape
        width = spec.num_heads * spec.head_dim
        h, q = self._buffer("h", padded, spec.d_model), self._buffer("q", padded, width)
        qkv = self._buffer("qkv", padded, spec.split.parts * spec.head_dim)
        gathered = self._buffer("gathered", num_items, spec.num_kv_heads * 128 * spec.head_dim)
        self._normalise(x, weights.norm1, h, rows)
        self._multiply(multiply, h, weights.qkv, qkv, rows)
        launch(
            self._split, (num_tiles * spec.split.parts, 1), qkv, q, *where[3:6], exact_tables, tiles.counts, tiles.tiles,
            self.angles, gathered, num_tables, max_blocks,
        )  # fmt: skip
        if is_int4:
            launch(
                self._commit, (num_tiles * spec.num_kv_heads, 1), *where, self.block_tables, exact_tables, tiles.counts,
                tiles.tiles, num_tables, max_blocks,
            )  # fmt: skip
        launch(
            self._gather, (num_items * spec.num_kv_heads, 1), *where, self.block_tables, exact_tables, tiles.counts,
            tiles.items, gathered, num_tables, max_blocks,
        )  # fmt: skip
        mixed = self._buffer("mixed", padded, width)
        num_blocks = min(tiles.num_units * spec.num_heads, self._multiprocessors)
        launch(
            self._windowed if tiles.has_windows else self._attention, (num_blocks, 1), q, gathered, tiles.counts,
            tiles.tiles, self.slopes, mixed,
        )  # fmt: skip
        self._multiply(add_product, mixed, weights.o, x, rows)
        self._normalise(x, weights.norm3, h, rows)
        gate_up = self._buffer("gate_up", padded, 2 * spec.d_ff)
        self._multiply(multiply, h, weights.gate_up, gate_up, rows)
        hidden = self._buffer("hidden", padded, spec.d_ff)
        blocks = prompt_rows.gate_grid(rows, spec.d_ff)
        launch(self._gate, (blocks, 1), gate_up, hidden, rows)
        self._multiply(add_product, hidden, weights.down, x, rows)

    def _buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """Scratch memory fp16; it may move, so that a captured pass allocates its own."""
        held = self._scratch.get(name)
        if held is None or len(held) < rows:
            held = torch.empty(rows, columns, dtype=torch.half, device=self.device)
            self._scratch[name] = held
        return held[:rows]

    def _multiply(
        self, product: Product, x: Tensor, weight: Tensor, out: Tensor, rows: int
    ) -> None:
        for first, count in pieces(rows, self.counts[product, weight.shape]):
            product(x[first : first + count], weight, out[first : first + count])

    def _normalise(self, x: Tensor, gain: Tensor, h: Tensor, rows: int) -> None:
        blocks = -(-rows // prompt_rows.norm_rows_per_block(self.spec.d_model))
        launch(self._norm, (blocks, 1), x, gain, h, rows, self.spec.norm_eps)

    def capture(
        self, x: Tensor, rows: int, tiles: PromptTiles
    ) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
        """A graph of all layers over x, for any tiles of up to `rows` rows within the capacities, and the memory that it must keep."""
        kept, self._scratch = self._scratch, {}
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # an older graph that is collected while this one is captured would spoil it
        try:
            with torch.cuda.graph(graph):
                for index in range(len(self.layers)):
                    self.layer(x, rows, index, tiles)
            return graph, self._scratch
        finally:
            gc.enable()
            self._scratch = kept


_GraphKey = tuple[int, int, int, bool]


class _CapturedPass:
    """All layers for up to so many rows and a capacity of tiles, replayed over its own state and tiles."""

    def __init__(self, owner: PromptPass, rows: int, tiles: PromptTiles) -> None:
        self._x = owner.new_state(rows)
        self._tiles = replace(
            tiles,
            packed=tiles.packed.clone(),
            num_tiles=tiles.tile_capacity,
            num_items=tiles.item_capacity,
        )
        self._graph, self._kept = owner.capture(self._x, rows, self._tiles)

    def run(self, state: Tensor, tiles: PromptTiles) -> Tensor:
        rows = len(state)
        self._x[:rows] = state
        self._x[rows:].zero_()
        self._tiles.packed.copy_(tiles.packed)
        self._graph.replay()
        return self._x[:rows].clone()


def variants() -> dict[str, Variant]:
    """What `scripts/check_ptx.py` compiles."""
    found: dict[str, Any] = {f"prompt_norm_{d}": prompt_rows.norm(d) for d in (768, 1536, 4096)}
    found["prompt_gate"] = prompt_rows.gate(4096)
    found["prompt_gather"] = gather(GatherShape(12, 128))
    found["prompt_gather_int4"] = gather(GatherShape(12, 128, "int4"))
    found["prompt_commit"] = commit_tiles(128, 12)
    found["prompt_split_half"] = split_qkv(SplitShape(12, 12, 128, True, True, True))
    found["prompt_split_pairs"] = split_qkv(SplitShape(16, 2, 64, True, False))
    found["prompt_split_plain"] = split_qkv(SplitShape(8, 8, 96, False, True))
    return found
