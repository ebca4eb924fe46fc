"""Prompt rows through a layer: library products at fixed row counts, with our own kernels between them and for attention.

The class of prompt rows promises that a row's bits depend on its position and the prompt before it alone, not on the chunk or on the
other rows of the pass. Our kernels treat rows (and tiles of an aligned block) alone; a library product may add in
another order at another row count, so that products run only at row counts which `keep_equal` found to give equal bits. Models: pre-norm, RMS, SwiGLU,
rotary, learned or ALiBi positions; the engine owns embedding, loops, exits and the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import prompt_rows
from kernels.compiler import Variant
from kernels.layout import FragmentCache
from kernels.prompt_attention import PromptAttentionShape, prompt_attention
from kernels.prompt_gather import GatherShape, cache_arguments, gather
from kernels.prompt_rows import SplitShape
from kernels.prompt_tiles import PromptTiles
from kernels.runtime import launch

CANDIDATES = (
    64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168,
    8192,
)  # fmt: skip


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


# --- products --------------------------------------------------------------------------------------


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = x W^T, fp16 with float32 sums."""
    torch.mm(x, weight.t(), out=out)


def add_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """float32 out += x W^T of fp16 factors, never rounded to fp16."""
    if out.is_cuda:
        torch.addmm(out, x, weight.t(), out_dtype=torch.float32, out=out)
    else:
        out += x.float() @ weight.float().t()


Product = Callable[[Tensor, Tensor, Tensor], None]


def keep_equal(
    products: Sequence[tuple[Product, Tensor]], candidates: Sequence[int] = CANDIDATES
) -> tuple[int, ...]:
    """The row counts, ascending, at which all `products` give a row the bits that it has at the largest, wherever it lies.

    Runs random rows; each shape of weight once. The largest candidate is always among the results.

    Raises:
        RuntimeError: a row's bits depend on its place even at the largest count.
    """
    kept = sorted(candidates)
    done = set()
    for product, weight in products:
        key = (product, weight.shape)
        if key not in done:
            done.add(key)
            kept = _equal_counts(product, weight, kept)
    return tuple(kept)


def _equal_counts(product: Product, weight: Tensor, candidates: Sequence[int]) -> list[int]:
    n, k = weight.shape
    most = candidates[-1]
    make = torch.Generator(device=weight.device).manual_seed(1)
    x = torch.randn(most, k, generator=make, device=weight.device).half()
    dtype = torch.float32 if product is add_product else torch.half
    start = torch.randn(most, n, generator=make, device=weight.device).to(dtype)

    def run(first: int, rows: int, shift: int = 0) -> Tensor:
        out = start[first : first + rows].roll(shift, 0).contiguous()
        product(x[first : first + rows].roll(shift, 0).contiguous(), weight, out)
        return out.roll(-shift, 0)

    whole = run(0, most)
    if not torch.equal(whole, run(0, most, most // 2 + 1)):
        raise RuntimeError(f"products of {most} rows with {n} x {k} weights depend on the place")
    kept = []
    for rows in candidates[:-1]:
        firsts = sorted({0, most - rows})
        if all(
            torch.equal(whole[first : first + rows], run(first, rows, shift))
            for first in firsts
            for shift in (0, rows // 2 + 1)
        ):
            kept.append(rows)
    return [*kept, most]


def pieces(rows: int, buckets: Sequence[int]) -> list[tuple[int, int]]:
    """(first row, row count) of the products that cover `rows` rows, each count one of `buckets` (ascending)."""
    found = []
    first = 0
    while first < rows:
        count = next((b for b in buckets if b >= rows - first), buckets[-1])
        found.append((first, count))
        first += count
    return found


# --- the pass --------------------------------------------------------------------------------------


class PromptPass:
    """Runs prompt rows through layers; owns its scratch memory, which grows to the largest pass.

    Args:
        layers: the weights by layer; the cache's layer index counts the same way unless `layer` is told otherwise.
        angles: float32 (max_pos, head_dim / 2, 2), cos and sin; None without rotary positions.
        block_tables: int32 (num_slots, num_tables, max_blocks).
        slopes: float32 (num_heads,), ALiBi only.
        buckets: row counts of `keep_equal`; found here if None.
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
        buckets: Sequence[int] | None = None,
    ) -> None:
        self.spec, self.layers, self.cache = spec, layers, cache
        self.block_tables, self.angles, self.slopes = block_tables, angles, slopes
        self.buckets = tuple(sorted(buckets or keep_equal(self._products())))
        self._norm = prompt_rows.norm(spec.d_model)
        self._gate = prompt_rows.gate(spec.d_ff)
        self._split = prompt_rows.split_qkv(spec.split)
        shape = replace(spec.attention, kind=cache.kind)
        self._attention = prompt_attention(shape)
        self._windowed = prompt_attention(replace(shape, has_windows=True))
        self._commit = prompt_rows.commit_tiles(spec.head_dim, spec.num_kv_heads)
        self._gather = gather(GatherShape(spec.num_kv_heads, spec.head_dim, cache.kind))
        self._gathered = torch.empty(0, dtype=torch.uint8, device=block_tables.device)
        self._multiprocessors = 2
        if block_tables.is_cuda:
            properties = torch.cuda.get_device_properties(block_tables.device)
            self._multiprocessors = properties.multi_processor_count
        self._scratch: dict[str, Tensor] = {}

    def _products(self) -> list[tuple[Product, Tensor]]:
        found: list[tuple[Product, Tensor]] = []
        for layer in self.layers:
            found += [(multiply, layer.qkv), (multiply, layer.gate_up)]
            found += [(add_product, layer.o), (add_product, layer.down)]
        return found

    def padded_rows(self, rows: int) -> int:
        """Rows that a pass of `rows` rows computes."""
        first, count = pieces(rows, self.buckets)[-1]
        return first + count

    def new_state(self, rows: int) -> Tensor:
        """Zeros, float32 (padded rows, d_model): the state of a pass, whose first rows the caller fills."""
        size = (self.padded_rows(rows), self.spec.d_model)
        return torch.zeros(size, device=self.block_tables.device)

    def _buffer(self, name: str, rows: int, columns: int) -> Tensor:
        held = self._scratch.get(name)
        if held is None or len(held) < rows:
            held = torch.zeros(rows, columns, dtype=torch.half, device=self.block_tables.device)
            self._scratch[name] = held
        return held[:rows]

    def _multiply(self, product: Product, x: Tensor, weight: Tensor, out: Tensor) -> None:
        for first, count in pieces(len(x), self.buckets):
            product(x[first : first + count], weight, out[first : first + count])

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
            x: float32 (padded_rows(rows), d_model), contiguous; rows past `rows` are computed and mean nothing.
            index: which of the layers' weights.
            tiles: of the rows, with the table of this call.
            cache_layer: the cache's layer index, if it is another.
        """
        spec, weights, cache = self.spec, self.layers[index], self.cache
        padded, num_tiles = len(x), len(tiles.tiles)
        assert padded == self.padded_rows(rows) and x.is_contiguous(), "make x by new_state"
        layer = index if cache_layer is None else cache_layer
        h = self._buffer("h", padded, spec.d_model)
        q = self._buffer("q", padded, spec.num_heads * spec.head_dim)
        mixed = self._buffer("mixed", padded, spec.num_heads * spec.head_dim)
        qkv = self._buffer("qkv", padded, spec.split.parts * spec.head_dim)
        gate_up = self._buffer("gate_up", padded, 2 * spec.d_ff)
        hidden = self._buffer("hidden", padded, spec.d_ff)
        _, num_tables, max_blocks = self.block_tables.shape
        where = cache_arguments(cache, layer)
        is_int4 = cache.kind == "int4"
        exact_tables = cache.exact_tables if is_int4 else self.block_tables
        self._normalise(x, weights.norm1, h, rows)
        self._multiply(multiply, h, weights.qkv, qkv)
        launch(
            self._split, (num_tiles * spec.split.parts, 1), qkv, q, *where[3:6], exact_tables, tiles.tiles, self.angles, num_tables, max_blocks,
        )  # fmt: skip
        if is_int4:
            launch(
                self._commit, (num_tiles * spec.num_kv_heads, 1), *where, self.block_tables, exact_tables,
                tiles.tiles, num_tables, max_blocks,
            )  # fmt: skip
        num_items, num_work = len(tiles.items), tiles.num_units * spec.num_heads
        item_bytes = spec.num_kv_heads * 256 * spec.head_dim
        if self._gathered.numel() < num_items * item_bytes:
            self._gathered = self._gathered.new_empty(num_items * item_bytes)
        launch(
            self._gather, (num_items * spec.num_kv_heads, 1), *where, self.block_tables, exact_tables, tiles.items,
            self._gathered, num_tables, max_blocks,
        )  # fmt: skip
        launch(
            self._windowed if tiles.has_windows else self._attention, (min(num_work, self._multiprocessors), 1),
            q, self._gathered, tiles.tiles, self.slopes, mixed, num_work,
        )  # fmt: skip
        self._multiply(add_product, mixed, weights.o, x)
        self._normalise(x, weights.norm3, h, rows)
        self._multiply(multiply, h, weights.gate_up, gate_up)
        blocks = prompt_rows.gate_grid(rows, spec.d_ff)
        launch(self._gate, (blocks, 1), gate_up, hidden, rows)
        self._multiply(add_product, hidden, weights.down, x)

    def _normalise(self, x: Tensor, gain: Tensor, h: Tensor, rows: int) -> None:
        blocks = -(-rows // prompt_rows.norm_rows_per_block(self.spec.d_model))
        launch(self._norm, (blocks, 1), x, gain, h, rows, self.spec.norm_eps)


def variants() -> dict[str, Variant]:
    """What `scripts/check_ptx.py` compiles."""
    found: dict[str, Any] = {f"prompt_norm_{d}": prompt_rows.norm(d) for d in (768, 1536, 4096)}
    found["prompt_gate"] = prompt_rows.gate(4096)
    found["prompt_gather"] = gather(GatherShape(12, 128))
    found["prompt_gather_int4"] = gather(GatherShape(12, 128, "int4"))
    found["prompt_commit"] = prompt_rows.commit_tiles(128, 12)
    found["prompt_split_half"] = prompt_rows.split_qkv(SplitShape(12, 12, 128, True, True))
    found["prompt_split_pairs"] = prompt_rows.split_qkv(SplitShape(16, 2, 64, True, False))
    found["prompt_split_plain"] = prompt_rows.split_qkv(SplitShape(8, 8, 96, False, True))
    return found
