"""Checks and times the prompt class on one GPU: products by row count, attention, the kernels between, a whole prefill.

    python scripts/bench_prompt.py [--only parity,products,attention,rows,prefill] [--setting NAME]

The model is the 1B-effective reference model with random weights. Products list, for each row count, the time and whether rows have the
bits of the largest count (`!` if not). Determinism compares the bits of one pass of 8,192 tokens with those of several chunkings
beside another sequence. Without a GPU it says so and leaves with 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels import fragments, prompt_products, prompt_rows  # noqa: E402
from kernels.layout import NUM_SINKS, FragmentCache  # noqa: E402
from kernels.prompt import PromptLayer, PromptPass, PromptSpec  # noqa: E402
from kernels.prompt_attention import prompt_attention  # noqa: E402
from kernels.prompt_gather import STORED, WRITTEN, cache_arguments, gather  # noqa: E402
from kernels.prompt_shapes import GatherShape, PromptAttentionShape  # noqa: E402
from kernels.prompt_split import split_qkv  # noqa: E402
from kernels.prompt_tiles import PromptTiles, make_tiles  # noqa: E402
from kernels.runtime import launch, set_build_dir  # noqa: E402

SPEC = PromptSpec(1536, 12, 12, 128, 4096)
LAYERS, LOOPS, THETA = 4, 8, 10000.0
SETTINGS = ("plain", "no_splitk", "lt", "lt_no_splitk")
LOG2E = 1.4426950408889634
Span = tuple[int, int, int]
# shapes of attention to check, with their windows
CASES = [
    (PromptAttentionShape(4, 4, 128), 0),
    (PromptAttentionShape(8, 2, 64, True), 0),
    (PromptAttentionShape(4, 1, 96, False, True), 100),
    (PromptAttentionShape(8, 8, 32, True, True), 70),
    (PromptAttentionShape(4, 4, 128, kind="int4"), 0),
    (PromptAttentionShape(8, 2, 64, False, True, "int4"), 150),
]


def apply_setting(name: str) -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = (
        (False, False) if name.endswith("no_splitk") else False
    )
    if name.startswith("lt"):
        torch.backends.cuda.preferred_blas_library("cublaslt")


def time_captured(run: Callable[[], object], inside: int = 10) -> float:
    """Median milliseconds of `run` in a CUDA graph that has it several times."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inside):
            run()
    return time_ms(graph.replay, 7) / inside


def time_ms(run: Callable[[], object], repeats: int = 12) -> float:
    """Median milliseconds of `run`, whose launches are queued ahead of the GPU."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in times)[repeats // 2]


def random_layers(layers: int) -> list[PromptLayer]:
    make = torch.Generator(device="cuda").manual_seed(0)

    def matrix(n: int, k: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(n, k, device="cuda", generator=make) * (gain / k**0.5)).half()

    def gains() -> Tensor:
        return 1 + 0.1 * torch.randn(SPEC.d_model, device="cuda", generator=make)

    d, wide = SPEC.d_model, SPEC.num_heads * SPEC.head_dim
    return [
        PromptLayer(
            matrix(SPEC.split.parts * SPEC.head_dim, d), matrix(d, wide, 0.3), matrix(2 * SPEC.d_ff, d),
            matrix(d, SPEC.d_ff, 0.3), gains(), gains(),
        )
        for _ in range(layers)
    ]  # fmt: skip


def angles(max_pos: int) -> Tensor:
    pairs = torch.arange(SPEC.head_dim // 2, dtype=torch.float64)
    turns = torch.arange(max_pos, dtype=torch.float64)[:, None] * THETA ** (
        -2 * pairs / SPEC.head_dim
    )
    return torch.stack([turns.cos(), turns.sin()], -1).float().cuda()


def new_cache(num_blocks: int, layers: int) -> FragmentCache:
    shape = (num_blocks, layers, SPEC.num_kv_heads, 256 * SPEC.head_dim)
    stored = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    none = torch.zeros(0, dtype=torch.int32, device="cuda")
    return FragmentCache("fp16", stored, stored, none, SPEC.head_dim)


def tiles_of(spans: list[Span], window: int = 0, kind: str = "fp16") -> PromptTiles:
    """Tiles on the device of (slot, first, end) spans."""
    slots = np.concatenate([np.full(end - first, slot) for slot, first, end in spans])
    positions = np.concatenate([np.arange(first, end) for _, first, end in spans])
    zeros = np.zeros_like(slots)
    return make_tiles(slots, zeros, positions, zeros + window, kind=kind, device="cuda")


# --- parts -----------------------------------------------------------------------------------------


def bench_products(setting: str) -> None:
    layer = random_layers(1)[0]
    cases = [
        ("qkv", prompt_products.multiply, layer.qkv),
        ("o", prompt_products.add_product, layer.o),
        ("gate_up", prompt_products.multiply, layer.gate_up),
        ("down", prompt_products.add_product, layer.down),
        ("down fp16", prompt_products.multiply, layer.down),
    ]
    for name, product, weight in cases:
        n, k = weight.shape
        kept = prompt_products.keep_equal(product, weight)
        cells = []
        for rows in prompt_products.CANDIDATES:
            x = torch.randn(rows, k, device="cuda").half()
            out = torch.zeros(
                rows,
                n,
                device="cuda",
                dtype=torch.half if product is prompt_products.multiply else None,
            )
            ms = time_captured(partial(product, x, weight, out))
            tflops = 2 * rows * n * k / ms / 1e9
            cells.append(f"{rows}:{ms * 1e3:.0f}{'' if rows in kept else '!'}")
        print(f"{setting:<13}{name:<10} {' '.join(cells)} ({tflops:.0f} TFLOP/s)", flush=True)


def check_shapes() -> None:
    """Attention of each kind of kernel against float32, and the same bits in many runs."""
    for shape, window in CASES:
        attend, want = attention_case(shape, 700, window)
        first = attend()
        gap = float((first.float() - want).abs().nan_to_num(9.0).max())
        is_equal = all(torch.equal(first, attend()) for _ in range(30))
        print(
            f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim} {shape.kind} alibi {shape.has_alibi} "
            f"window {window}: max gap {gap:.1e}, 31 runs equal {is_equal}",
            flush=True,
        )


def attention_case(
    shape: PromptAttentionShape, length: int, window: int
) -> tuple[Callable[[], Tensor], Tensor]:
    """One sequence's attention over a random cache, and what it should be."""
    heads, kv, dim, blocks = shape.num_heads, shape.num_kv_heads, shape.head_dim, -(-length // 64)
    make = torch.Generator(device="cuda").manual_seed(dim)
    keys, values = (
        torch.randn(blocks, 1, kv, 64, dim, device="cuda", generator=make).half() for _ in range(2)
    )
    exact = torch.stack([fragments.pack_keys(keys), fragments.pack_values(values)], -2)
    exact = exact.flatten(-2).contiguous().view(torch.uint8)
    tables = torch.arange(blocks, device="cuda").int().view(1, 1, -1)
    cache = FragmentCache("fp16", exact, exact, tables, dim)
    old = keys, values
    if shape.kind == "int4":
        packed, restored = zip(
            fragments.pack_int4(keys.float(), is_value=False),
            fragments.pack_int4(values.float(), is_value=True),
            strict=True,
        )
        sinks = torch.zeros(1, 1, kv, 16 * dim, dtype=torch.uint8, device="cuda")
        none = torch.full((blocks,), -1, dtype=torch.int32, device="cuda")
        cache = FragmentCache("int4", torch.cat(packed, -1), exact, tables, dim, sinks, none)
        old = restored[0].half(), restored[1].half()
    q = torch.randn(length, heads, dim, device="cuda", generator=make)
    slopes = 2.0 ** -torch.arange(1, heads + 1, device="cuda") if shape.has_alibi else None
    scaled = (q * (LOG2E / dim**0.5)).half()
    tiles = tiles_of([(0, 0, length)], window, shape.kind)
    tiles.items[:, 3][tiles.items[:, 3] == WRITTEN] = STORED
    scratch = torch.full((tiles.num_items, kv, 256 * dim), 255, dtype=torch.uint8, device="cuda")
    out = torch.full_like(scaled, float("nan"))

    def attend() -> Tensor:
        launch(
            gather(GatherShape(kv, dim, shape.kind)), (tiles.num_items * kv, 1), *cache_arguments(cache, 0), tables,
            tables, tiles.counts, tiles.items, scratch, 1, blocks,
        )  # fmt: skip
        launch(
            prompt_attention(shape), (min(132, tiles.num_units * heads), 1), scaled, scratch, tiles.counts, tiles.tiles,
            slopes, out,
        )  # fmt: skip
        return out.clone()

    want = torch.empty(length, heads, dim, device="cuda")
    for block in range(blocks):
        rows = torch.arange(block * 64, min(block * 64 + 64, length), device="cuda")
        seen = torch.arange(block * 64 + 64, device="cuda")
        k, v = (
            torch.cat([a[:block], b[block : block + 1]])[:, 0].float().transpose(0, 1).flatten(1, 2)
            for a, b in zip(old, (keys, values), strict=True)
        )
        k, v = (x.repeat_interleave(heads // kv, 0) for x in (k, v))
        scores = torch.einsum("rhd,hpd->hrp", scaled[rows].float() / LOG2E, k)
        ahead = seen - rows[:, None]
        if slopes is not None:
            scores += slopes[:, None, None] * ahead
        hidden = ahead > 0
        if window:
            hidden |= (ahead <= -window) & (seen >= NUM_SINKS)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        want[rows] = torch.einsum("hrp,hpd->rhd", weights, v)
    return attend, want


def bench_attention(lengths: list[tuple[int, int]]) -> None:
    shape = SPEC.attention
    dim = shape.head_dim
    for sequences, length in lengths:
        blocks = -(-length // 64)
        cache = new_cache(sequences * blocks, 1)
        half = cache.stored.view(torch.half)
        for part in half.view(-1).split(1 << 28):
            part.normal_()
        tables = torch.randperm(sequences * blocks, device="cuda").int().view(sequences, 1, blocks)
        rows = sequences * length
        q = (torch.randn(rows, shape.num_heads, dim, device="cuda") * (LOG2E / dim**0.5)).half()
        out = torch.full_like(q, float("nan"))
        tiles = tiles_of([(s, 0, length) for s in range(sequences)])
        flops = 4 * sequences * shape.num_heads * dim * length * (length + 1) / 2
        first = None
        scratch = torch.empty(tiles.num_items, 12 * 256 * dim, device="cuda", dtype=torch.uint8)
        bring = partial(
            launch, gather(GatherShape(shape.num_kv_heads, dim)), (tiles.num_items * shape.num_kv_heads, 1),
            *cache_arguments(cache, 0), tables, tables, tiles.counts, tiles.items, scratch, 1, blocks,
        )  # fmt: skip
        tiles.items[:, 3] = STORED
        ms = time_captured(bring)
        moved = 2 * scratch.numel() / ms / 1e9
        print(f"gather {sequences}x{length}: {ms * 1e3:.1f} us, {moved:.2f} TB/s")
        work = tiles.num_units * shape.num_heads
        for stages in (3, 4):
            run = partial(
                launch, prompt_attention(shape, stages), (min(132, work), 1), q, scratch, tiles.counts, tiles.tiles, None,
                out,
            )  # fmt: skip
            ms = time_captured(run, 5)
            if first is None:
                first = out.clone()
                error = attention_error(q, half, tables[-1, 0].long(), out, length)
            same = torch.equal(first, out)
            for _ in range(10):
                run()
                same = same and torch.equal(first, out)
            print(
                f"attention {sequences}x{length} stages {stages}: {ms:.3f} ms, "
                f"{flops / ms / 1e9:.0f} TFLOP/s, error {error:.1e}, equal bits {same}",
                flush=True,
            )


def attention_error(q: Tensor, cache: Tensor, blocks: Tensor, out: Tensor, length: int) -> float:
    """The largest gap to float32 softmax attention over some rows of the last sequence."""
    heads, dim = q.shape[1:]
    data = cache[blocks, 0].view(len(blocks), heads, 2, 64 * dim)
    keys = fragments.unpack_keys(data[:, :, 0], dim).float().transpose(0, 1).flatten(1, 2)
    values = fragments.unpack_values(data[:, :, 1], dim).float().transpose(0, 1).flatten(1, 2)
    worst = 0.0
    for position in (0, 1, 63, 64, length // 2 + 5, length - 1):
        row = len(q) - length + position
        scores = torch.einsum("hd,hpd->hp", q[row].float(), keys[:, : position + 1]) / LOG2E
        want = torch.einsum("hp,hpd->hd", scores.softmax(-1), values[:, : position + 1])
        gap = float((out[row].float() - want).abs().nan_to_num(9.0).max())
        if gap > 1e-2:
            print(
                f"   position {position}: gap {gap:.3f}, {out[row, 0, :4].tolist()} for {want[0, :4].tolist()}"
            )
        worst = max(worst, gap)
    return worst


def bench_rows(rows: int) -> None:
    d, ff, split = SPEC.d_model, SPEC.d_ff, SPEC.split
    x, gain = torch.randn(rows, d, device="cuda"), torch.ones(d, device="cuda")
    h = torch.empty(rows, d, device="cuda", dtype=torch.half)
    blocks = -(-rows // prompt_rows.norm_rows_per_block(d))
    gate_up = torch.randn(rows, 2 * ff, device="cuda").half()
    out = torch.empty(rows, ff, device="cuda", dtype=torch.half)
    qkv = torch.randn(rows, split.parts * split.head_dim, device="cuda").half()
    q = torch.empty(rows, d, device="cuda", dtype=torch.half)
    cache, tiles = new_cache(rows // 64, 1), tiles_of([(0, 0, rows)])
    tables = torch.arange(rows // 64, device="cuda").int().view(1, 1, -1)
    grid = (prompt_rows.gate_grid(rows, ff), 1)
    split = replace(split, is_gathered=True)
    scratch = torch.empty(rows // 64, 12 * 128 * split.head_dim, device="cuda", dtype=torch.half)
    split_grid = (len(tiles.tiles) * split.parts, 1)
    runs = {
        "norm": (rows * d * 6, partial(launch, prompt_rows.norm(d), (blocks, 1), x, gain, h, rows, 1e-6)),
        "gate": (rows * ff * 6, partial(launch, prompt_rows.gate(ff), grid, gate_up, out, rows)),
        "split": (
            qkv.numel() * 4,
            partial(
                launch, split_qkv(split), split_grid, qkv, q, cache.exact, 0, cache.exact.stride(0),
                tables, tiles.counts, tiles.tiles, angles(rows), scratch, 1, rows // 64,
            ),
        ),
    }  # fmt: skip
    for name, (num_bytes, run) in runs.items():
        ms, direct = time_captured(run), time_ms(run)
        print(
            f"{name} {rows}: {ms * 1e3:.1f} us, {num_bytes / ms / 1e9:.2f} TB/s (launched alone {direct * 1e3:.1f} us)"
        )


class Prefill:
    """The reference model's core over random embeddings of two sequences."""

    def __init__(self, length: int, kind: str) -> None:
        blocks = length // 64
        self.length, self.kind = length, kind
        self.layers = random_layers(LAYERS)
        order = torch.randperm(2 * LOOPS * blocks, device="cuda").int()
        self.tables = order.view(2, LOOPS, blocks)
        self.cache = new_cache(2 * LOOPS * blocks, LAYERS)
        if kind == "int4":
            self.cache = self._int4_cache(self.cache)
        self.x = torch.randn(2, length, SPEC.d_model, device="cuda")
        self.angles = angles(length)
        self.passing = PromptPass(SPEC, self.layers, self.cache, self.tables, angles=self.angles)
        print(f"kept, least: {[counts[0] for counts in self.passing.counts.values()]}")

    def _int4_cache(self, exact: FragmentCache) -> FragmentCache:
        """With exact copies of all blocks, in another order, and sinks of all sequences."""
        shape = list(exact.stored.shape)
        stored = torch.zeros(*shape[:3], 64 * SPEC.head_dim + 512, dtype=torch.uint8, device="cuda")
        sink_of = torch.full((shape[0],), -1, dtype=torch.int32, device="cuda")
        first = self.tables[:, :, 0].flatten().long()
        sink_of[first] = torch.arange(2 * LOOPS, device="cuda").int()
        sinks = torch.zeros(
            2 * LOOPS, *shape[1:3], 16 * SPEC.head_dim, dtype=torch.uint8, device="cuda"
        )
        copies = torch.randperm(shape[0], device="cuda").int().view(self.tables.shape)
        return FragmentCache("int4", stored, exact.exact, copies, SPEC.head_dim, sinks, sink_of)

    def plain(self, length: int) -> Tensor:
        """The states of sequence 0 after all loops by PyTorch in float32, with keys and values as they are."""
        x, dim = self.x[0, :length], SPEC.head_dim
        cos, sin = self.angles[:length].unbind(-1)
        hidden = torch.ones(length, length, device="cuda").triu(1).bool()

        def norm(x: Tensor, gain: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SPEC.norm_eps) * gain

        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        for _ in range(LOOPS):
            for w in self.layers:
                qkv = (norm(x, w.norm1) @ w.qkv.float().t()).unflatten(1, (-1, dim)).transpose(0, 1)
                q, k, v = qkv.split([SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads])
                scores = (turn(q) @ turn(k).transpose(1, 2) / dim**0.5).masked_fill(
                    hidden, -torch.inf
                )
                x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w.o.float().t()
                gate, up = (norm(x, w.norm3) @ w.gate_up.float().t()).chunk(2, -1)
                x = x + (torch.nn.functional.silu(gate) * up) @ w.down.float().t()
        return x

    def run(self, spans: list[Span], tiles: PromptTiles, is_captured: bool = True) -> Tensor:
        """The states after all loops; by layers if they may not be captured."""
        state = torch.cat([self.x[s, first:end] for s, first, end in spans])
        for loop in range(LOOPS):
            tiles.use_table(loop)
            if is_captured:
                state = self.passing.core(state, tiles)
                continue
            x = self.passing.new_state(len(state))
            x[: len(state)] = state
            for index in range(LAYERS):
                self.passing.layer(x, len(state), index, tiles)
            state = x[: len(state)]
        return state

    def chunked(self, chunks: list[list[Span]]) -> Tensor:
        """The states of sequence 0 after passes over these spans, into an empty cache."""
        self.cache.stored.zero_()
        self.cache.exact.zero_()
        found = []
        for spans in chunks:
            states = self.run(spans, tiles_of(spans, kind=self.kind))
            at = 0
            for slot, first, end in spans:
                if slot == 0:
                    found.append(states[at : at + end - first].clone())
                at += end - first
        return torch.cat(found)


def bench_prefill(length: int, kind: str) -> None:
    model = Prefill(length, kind)
    tokens = length
    spans = [(0, 0, length)]
    ms = time_ms(partial(model.run, spans, tiles_of(spans, kind=kind)), 5)
    flops = 2 * tokens * LOOPS * LAYERS * sum(
        w.numel() for w in (model.layers[0].qkv, model.layers[0].o, model.layers[0].gate_up, model.layers[0].down)
    )  # fmt: skip
    flops += LOOPS * LAYERS * 2 * SPEC.num_heads * SPEC.head_dim * tokens * tokens
    print(f"{kind} prefill {length}: {ms:.2f} ms, {flops / ms / 1e9:.0f} TFLOP/s", flush=True)
    for rows in (64, 128, 512, 1024, 2048, 4096):
        spans = [(0, 0, rows)]
        run = partial(model.run, spans, tiles_of(spans, kind=kind))
        print(f"prefill {rows}: {time_ms(run, 5):.2f} ms", flush=True)
    few = [(0, 0, 300)]
    replayed, launched = (model.run(few, tiles_of(few, kind=kind), i == 0) for i in range(2))
    want = model.plain(300)
    error = float((launched - want).norm() / want.norm())
    print(f"{kind} parity with float32: rel {error:.1e}")
    print(f"captured: equal bits {torch.equal(replayed, launched)}")
    whole = model.chunked([[(0, 0, length)]])
    again = model.chunked([[(0, 0, length)]])
    print(f"repeat: equal bits {torch.equal(whole, again)}, finite {bool(whole.isfinite().all())}")
    quarter = length // 4
    cuts = {
        "4 chunks": [[(0, i * quarter, (i + 1) * quarter)] for i in range(4)],
        "odd chunks beside another": [
            [(1, 0, 100), (0, 0, 64)],
            [(0, 64, 64 * 39), (1, 100, 700)],
            [(0, 64 * 39, length - 192)],
            [(1, 700, 701), (0, length - 192, length)],
        ],
    }
    for name, chunks in cuts.items():
        got = model.chunked(chunks)
        equal = torch.equal(whole, got)
        detail = "" if equal else f", first row {int((whole != got).any(1).nonzero()[0])}"
        detail += "" if equal else f", max gap {float((whole - got).abs().max()):.1e}"
        print(f"{name}: equal bits {equal}{detail}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="parity,products,attention,rows,prefill")
    parser.add_argument("--setting", choices=SETTINGS, default="plain")
    parser.add_argument("--kinds", default="fp16,int4", help="of caches")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--build-dir", type=Path, default=Path("build/ptx"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_prompt: no CUDA device, nothing checked")
        return 0
    set_build_dir(options.build_dir)
    apply_setting(options.setting)
    only = options.only.split(",")
    if "products" in only:
        bench_products(options.setting)
    if "parity" in only:
        check_shapes()
    if "attention" in only:
        bench_attention([(1, 8192), (64, 1024)])
    if "rows" in only:
        bench_rows(options.length)
    if "prefill" in only:
        for kind in options.kinds.split(","):
            bench_prefill(options.length, kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
