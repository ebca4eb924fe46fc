"""Checks and times decode steps over cached inputs (KV formats h and h_int4) on one GPU: parity, determinism, speed.

    python scripts/gpu_check_absorbed.py [--kinds int4,fp16] [--rows 1,8,64] [--context 1024] [--shares] [--try]

As `gpu_check.py`, for the reference model with learned positions: parity against plain PyTorch in float32 (products in
float64) on the same weights and cache, the bits of a row alone and among others, the time of a step in a CUDA graph beside the floor of its
bytes. Without a GPU it says so and leaves with 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_check import (  # noqa: E402
    READ_TB_S,
    REPEATED_ROWS,
    Report,
    check_replays,
    random_model,
    time_graph,
)

from gpu_worker.absorbed_graphs import (  # noqa: E402
    REFERENCE,
    AbsorbedRunner,
    AbsorbedWeights,
    make_cache,
    shape_of,
    step_kernels,
)
from gpu_worker.graphs import DecodeSpec  # noqa: E402
from kernels.absorbed_shape import GROUP  # noqa: E402
from kernels.compiler import ptx_of  # noqa: E402
from kernels.launch import Library  # noqa: E402
from kernels.layout import NUM_SINKS, CutCache  # noqa: E402

KERNELS = ("query", "attention", "values", "o", "gate_up", "down", "head")


def compile_all(
    kinds: list[str], row_counts: list[int], splits: list[int], build_dir: Path
) -> None:
    """Compile what a run needs, side by side, the longest first."""
    jobs: dict[Any, tuple[str, int, int, str]] = {}
    for kind, rows, split in product(kinds, row_counts, splits):
        for name, variant in step_kernels(REFERENCE, kind, rows, split)[0].items():
            jobs[variant.name, variant.constants] = (kind, rows, split, name)
    ordered = sorted(jobs.values(), key=lambda job: job[3] != "attention")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, ordered, [build_dir] * len(ordered)))


def _compile(job: tuple[str, int, int, str], build_dir: Path) -> None:
    kind, rows, split, name = job
    ptx_of(step_kernels(REFERENCE, kind, rows, split)[0][name], build_dir)


def fill_cache(cache: CutCache) -> None:
    """Random inputs (int4: random codes with scales that make them about as large)."""
    make = torch.Generator(device=cache.values.device).manual_seed(1)
    for pool in (cache.exact_values, cache.sink_values):
        pool.view(torch.half).normal_(generator=make)
    if cache.kind == "fp16":
        for part in cache.values.view(torch.half).view(-1).split(1 << 28):
            part.normal_(generator=make)
        return
    cache.values.random_(0, 256, generator=make)
    scales = cache.scales.view(torch.half)
    scales[..., 0::2, :] = 0.2
    scales[..., 1::2, :] = -1.5


def make_runner(
    weights: AbsorbedWeights, rows: int, context: int, library: Library, **options: Any
) -> AbsorbedRunner:
    """A runner whose every row has `context` positions before its own, in blocks of its own."""
    spec, blocks = weights.spec, context // 64 + 1
    num, tables = rows * spec.loops * blocks, rows * spec.loops
    cache = make_cache(weights.shape, spec.layers, num, tables, tables, "cuda")
    fill_cache(cache)
    runner = AbsorbedRunner(weights, cache, rows, blocks, library, **options)
    order = torch.randperm(num, device="cuda").int()
    runner.tables.copy_(order.view(rows, spec.loops, blocks))
    each = torch.arange(tables, device="cuda", dtype=torch.int32)
    runner.exact_blocks.copy_(each.view(rows, -1))
    if cache.kind != "fp16":
        cache.sink_of[runner.tables[:, :, 0].flatten().long()] = each
    runner.positions.fill_(context)
    runner.row_info[:, 0] = context // 64
    runner.tokens.copy_(torch.arange(rows, device="cuda") * 37 % spec.vocab)
    return runner


def share_cache(big: AbsorbedRunner, row: int, library: Library, **options: Any) -> AbsorbedRunner:
    """A one-row runner on the same sequence as `row` of `big`."""
    one = AbsorbedRunner(big.weights, big.cache, 1, big.tables.shape[2], library, **options)
    for name in ("tables", "exact_blocks", "positions", "row_info", "tokens", "windows"):
        getattr(one, name).copy_(getattr(big, name)[row : row + 1])
    return one


def cached(runner: AbsorbedRunner, row: int, loop: int, layer: int) -> Tensor:
    """The inputs (positions, d) float32 that a row reads, its own position's included."""
    cache, d = runner.cache, runner.spec.d_model
    length = int(runner.positions[row]) + 1
    blocks = runner.tables[row, loop].long()
    if cache.kind == "fp16":
        return cache.values[blocks, layer, 0].view(torch.half).float().flatten(0, 1)[:length]
    codes = cache.values[blocks, layer, 0].unflatten(-1, (-1, GROUP // 2))
    numbers = torch.cat([codes & 15, codes >> 4], -1).float()  # (blocks, 64, groups, 128)
    scales = cache.scales[blocks, layer, 0, 0].view(torch.half).float().transpose(1, 2)
    scale, zero = scales.unflatten(2, (-1, 2)).unbind(-1)
    x = (numbers * scale[..., None] + zero[..., None]).flatten(2)
    sink = int(cache.sink_of[blocks[0]])
    if sink >= 0:
        x[0, :NUM_SINKS] = cache.sink_values[sink, layer, 0].view(torch.half).float()
    own = int(runner.exact_blocks[row, loop])
    x[-1] = cache.exact_values[own, layer, 0].view(torch.half).float()
    return x.reshape(-1, d)[:length]


def reference_step(runner: AbsorbedRunner, tensors: dict[str, Tensor], row: int) -> Tensor:
    """The logits of one row in float32 (products in float64), by plain PyTorch with K and V made from the inputs."""
    spec = runner.spec
    dim, heads, kv = spec.head_dim, spec.n_heads, spec.n_kv_heads
    position = int(runner.positions[row])

    def times(x: Tensor, weight: Tensor) -> Tensor:
        return (x.double() @ weight.double().T).float()

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + spec.norm_eps) * gain

    x = tensors["embed"][int(runner.tokens[row])].float() + tensors["pos"][position].float()
    for loop in range(spec.loops):
        for layer in range(spec.layers):
            q_weight, k_weight, v_weight = tensors[f"{layer}.qkv"].split(
                [heads * dim, kv * dim, kv * dim]
            )
            normed = norm(x, tensors[f"{layer}.norm1"])
            inputs = cached(runner, row, loop, layer).clone()
            inputs[position] = normed
            q = times(normed, q_weight).view(heads, dim)
            keys, values = (
                times(inputs, w).view(-1, kv, dim).repeat_interleave(heads // kv, 1)
                for w in (k_weight, v_weight)
            )
            scores = torch.einsum("hd,jhd->hj", q, keys) / dim**0.5
            mixed = torch.einsum("hj,jhd->hd", scores.softmax(-1), values).flatten()
            x = x + times(mixed, tensors[f"{layer}.o"])
            gate, up = times(norm(x, tensors[f"{layer}.norm3"]), tensors[f"{layer}.gate_up"]).chunk(
                2
            )
            x = x + times(torch.nn.functional.silu(gate) * up, tensors[f"{layer}.down"])
    return times(norm(x, tensors["norm"]), tensors["head"])


def floor_ms(spec: DecodeSpec, kind: str, rows: int, context: int) -> float:
    """The bytes that a step must move over the measured read bandwidth."""
    d, shape = spec.d_model, shape_of(spec, kind)
    layer = 2 * (spec.n_heads + spec.n_kv_heads) * spec.head_dim * d + 3 * spec.d_ff * d
    weights = spec.loops * spec.layers * layer * 2 + spec.vocab * d * 2
    full, part = divmod(context, 64)
    block = 64 * (shape.row_bytes + 4 * shape.groups * shape.is_cut)
    inputs = full * block + (part + 1) * 2 * d
    return (weights + rows * spec.loops * spec.layers * inputs) / (READ_TB_S * 1e9)


def check_step(
    report: Report, weights: AbsorbedWeights, tensors: dict[str, Tensor], library: Library,
    contexts: list[int], many: int,
) -> None:  # fmt: skip
    """Parity with PyTorch and bit-equality between 1 row and many, at several lengths."""
    kind = "h_int4" if weights.shape.is_cut else "h"
    for context in contexts:
        big = make_runner(weights, many, context, library)
        big.logits.fill_(float("nan"))
        stream = torch.cuda.current_stream()
        big.launch_step(stream.cuda_stream)
        torch.cuda.synchronize()
        first = big.logits.clone()
        for row in (0, many - 1):
            one = share_cache(big, row, library)
            one.logits.fill_(float("nan"))
            one.launch_step(stream.cuda_stream)
            torch.cuda.synchronize()
            gap = float((one.logits[0] - first[row]).abs().max())
            report.check(
                f"{kind} bits, row {row} of {many}, context {context}",
                torch.equal(one.logits[0], first[row]),
                f"max gap {gap:.1e}",
            )
        want = reference_step(big, tensors, many - 1)
        error = float((first[many - 1] - want).norm() / want.norm())
        same = int(first[many - 1].argmax()) == int(want.argmax())
        # 32 layer calls on fp16 operands
        report.check(
            f"{kind} parity, context {context}",
            error < 1e-2,
            f"rel {error:.1e}, same argmax {same}",
        )
        is_same = True
        for _ in range(5):
            big.launch_step(stream.cuda_stream)
            torch.cuda.synchronize()
            is_same = is_same and torch.equal(first, big.logits)
        report.check(f"{kind} repeats, context {context}", is_same, "6 runs, same bits")


def measure(
    report: Report, weights: AbsorbedWeights, library: Library, rows: int, context: int,
    shares: bool, split: int = 0,
) -> float:  # fmt: skip
    """Time a step, and (with `shares`) the step without each kernel."""
    spec, kind = weights.spec, weights.shape.kind
    name = "h_int4" if weights.shape.is_cut else "h"
    runner = make_runner(weights, rows, context, library, split=split)
    full = time_graph(runner.capture())
    floor = floor_ms(spec, kind, rows, context)
    report.note(
        f"{name} step, {rows} rows x{runner.attend.split}, context {context}", f"{full:.3f} ms",
        f"floor {floor:.3f}, {full / floor:.2f} x floor",
    )  # fmt: skip
    if shares:
        calls = spec.loops * spec.layers
        for kernel in KERNELS:
            share = full - time_graph(runner.capture((kernel,)), 20)
            count = 1 if kernel == "head" else calls
            report.note(
                f"   {kernel}, {rows} rows", f"{share / count * 1e3:.2f} us",
                f"of {count}: {share:.3f} ms",
            )  # fmt: skip
    return full


def model(spec: DecodeSpec) -> dict[str, Tensor]:
    """Random weights, learned positions included."""
    tensors = random_model(spec)
    make = torch.Generator(device="cuda").manual_seed(2)
    tensors["pos"] = (
        torch.randn(spec.max_pos, spec.d_model, device="cuda", generator=make).half() * 0.5
    )
    return tensors


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="parity,speed")
    parser.add_argument(
        "--kinds", default="int4,fp16", help="of the cache: int4 is h_int4, fp16 is h"
    )
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--contexts", default="0,63,64,1000", help="lengths for parity")
    parser.add_argument("--replays", type=int, default=300, help="of each row bucket, for parity")
    parser.add_argument(
        "--shares", action="store_true", help="also time the step without each kernel"
    )
    parser.add_argument(
        "--try", dest="splits", default="", help="other numbers of blocks a row to time"
    )
    parser.add_argument("--build-dir", type=Path, default=Path("build/ptx"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check_absorbed: no CUDA device, nothing checked")
        return 0
    started = time.monotonic()
    report, library = Report(), Library(options.build_dir)
    rows = [int(r) for r in options.rows.split(",")]
    splits = [int(s) for s in options.splits.split(",") if s]
    kinds = options.kinds.split(",")
    compile_all(kinds, sorted({*REPEATED_ROWS, *rows}), [0, *splits], options.build_dir)
    print(f"compiled after {time.monotonic() - started:.0f} s")
    tensors = model(REFERENCE)
    for kind in kinds:
        weights = AbsorbedWeights(REFERENCE, kind, tensors)
        if "parity" in options.only:
            contexts = [int(c) for c in options.contexts.split(",")]
            check_step(report, weights, tensors, library, contexts, max(rows))
            name = "h_int4" if weights.shape.is_cut else "h"
            for count in REPEATED_ROWS:
                runner = make_runner(weights, count, 1000, library)
                one = share_cache(runner, 0, library)
                check_replays(report, f"{name}, {count} rows", runner, one, options.replays)
        if "speed" in options.only:
            for count in rows:
                measure(report, weights, library, count, options.context, options.shares)
                for split in splits:
                    measure(report, weights, library, count, options.context, False, split)
    print(f"took {time.monotonic() - started:.0f} s")
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
