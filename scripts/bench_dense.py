"""Checks and times the general dense kernels on one GPU: parity with plain PyTorch, a row's bits, products at the reference shapes.

    python scripts/bench_dense.py [--only check,speed] [--rows 1,8,16,32,64,256,1024]

Parity of products is the error over |x| |w| of row and output, against float64. Bits are those of rows alone and in smaller runs at
other places, against the same rows among 257. Times are medians of CUDA graphs whose weights together pass the L2. The table comes last
on standard output. Without a GPU it says so and leaves with 0; a failed check leaves with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels import cuda_dense, reference  # noqa: E402
from kernels.layout import Packed  # noqa: E402

KINDS = ("fp16", "bf16", "int8", "fp32")
ODD_SHAPES = ((257, 32), (33, 85), (1, 300), (100, 7000), (5000, 512), (1536, 1536), (1536, 4096))
SHAPES = ((4608, 1536), (1536, 1536), (8192, 1536), (1536, 4096), (50257, 1536))
L2_BYTES = 150e6  # rotating weights of that size are always read from memory


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def weights(num_out: int, num_in: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """A random weight of the kind, and the scale that int8 comes with."""
    if kind == "int8":
        numbers = torch.randint(-128, 128, (num_out, num_in), device="cuda", dtype=torch.int8)
        return numbers, rand(num_out).abs() + 0.1
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    return (rand(num_out, num_in) / num_in**0.5).to(types[kind]), None


class Checks:
    """Prints each check's worst figure and remembers failures."""

    def __init__(self) -> None:
        self.num_failed = 0

    def expect(self, name: str, value: float, limit: float) -> None:
        is_good = value <= limit
        self.num_failed += not is_good
        print(
            f"{'ok  ' if is_good else 'FAIL'} {name:<36} {value:.1e} (limit {limit:.0e})",
            flush=True,
        )


def check_products(checks: Checks, kind: str) -> None:
    worst, differing = 0.0, 0
    for num_out, num_in in ODD_SHAPES:
        weight, scale = weights(num_out, num_in, kind)
        bias, x = rand(num_out), rand(257, num_in) * rand(257, 1).exp()
        packed = cuda_dense.pack(weight, bias, scale)
        whole = cuda_dense.linear(x, packed)
        exact = weight.double() if scale is None else weight.double() * scale.double()[:, None]
        size = x.double().norm(dim=1)[:, None] * exact.norm(dim=1) + bias.abs()
        worst = max(worst, float(((whole - (x.double() @ exact.T + bias)).abs() / size).max()))
        for n in (1, 3, 8, 9, 33, 64, 130):
            for at in (0, 5, 127):
                part = cuda_dense.linear(x[at : at + n].contiguous(), packed)
                differing += not torch.equal(part, whole[at : at + n])
        before, added = rand(33, num_out), torch.empty(33, num_out, device="cuda")
        added.copy_(before)
        cuda_dense.linear_add(x[:33].contiguous(), packed, added)
        differing += not torch.equal(added, before + whole[:33])
    checks.expect(f"products, {kind}", worst, 4e-7)
    checks.expect(f"products, {kind}: runs of other bits", differing, 0)


def check_rows(checks: Checks) -> None:
    def alone(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
        whole = run(x)
        return sum(not torch.equal(run(x[i : i + 1].contiguous())[0], whole[i]) for i in (0, 7, 40))

    for d in (32, 1536, 5000):
        x, weight, shift = rand(64, d) * 3 + 1, rand(d), rand(d)
        for bias in (None, shift):
            run = partial(cuda_dense.norm, weight=weight, bias=bias, eps=1e-5)
            exact = reference.norm(x.double(), weight, bias, 1e-5)
            error = float(((run(x) - exact).abs() / (1 + exact.abs())).max())
            checks.expect(f"norm of {d}{'' if bias is None else ' with bias'}", error, 1e-6)
            checks.expect("  rows of other bits", alone(run, x), 0)
    x = rand(64, 8192) * 4
    for act in ("silu_glu", "gelu", "gelu_tanh", "relu2"):
        run = partial(cuda_dense.activate, act=act)
        exact = reference.activate(x.double(), act)
        checks.expect(act, float(((run(x) - exact).abs() / (0.1 + exact.abs())).max()), 1e-6)
        checks.expect("  rows of other bits", alone(run, x), 0)
    before = rand(64, 50257) * 3
    for size in (1e-3, 0.1, 3.0):
        after = before + rand(64, 50257) * size
        for name in ("divergence", "relative_change"):
            ratio = getattr(cuda_dense, name)(before, after) / getattr(reference, name)(
                before, after
            )
            checks.expect(f"{name} at {size}", float((ratio - 1).abs().max()), 2e-6)
    angles = torch.rand(2048, 64, device="cuda") * 6
    rotary = torch.stack([angles.cos(), angles.sin()]).contiguous()
    positions = torch.randint(0, 2048, (33,), device="cuda", dtype=torch.int32)
    for is_interleaved in (False, True):
        qkv = rand(33, 20 * 128)
        rest = (rand(128), rand(128), 1e-6, None, rotary, is_interleaved, positions)
        exact = qkv.clone()
        reference.prepare_qkv(exact, (12, 4, 128), *rest)
        cuda_dense.prepare_qkv(qkv, (12, 4, 128), *rest)
        checks.expect("q and k", float(((qkv - exact).abs() / (1 + exact.abs())).max()), 1e-6)
    table, ids = rand(1000, 1537).half(), torch.randint(0, 1000, (33,), device="cuda")
    wrong = (cuda_dense.embed_rows(table, None, ids) != table[ids].float()).sum()
    checks.expect("embeddings", float(wrong), 0)


def timed(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Median microseconds of one of `calls`, captured one after the other in a graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in times[2:])[repeats // 2] * 1e3 / len(calls)


def rotating(weight: Packed) -> list[Packed]:
    copies = max(1, int(L2_BYTES / weight.data.nbytes))
    return [weight, *(replace(weight, data=weight.data.clone()) for _ in range(copies))]


def speed(row_counts: Sequence[int], kinds: Sequence[str]) -> None:
    for kind in kinds:
        print(f"us a product, {kind:<6}" + "".join(f"{n:>14}" for n in row_counts))
        for num_out, num_in in SHAPES:
            packs = rotating(cuda_dense.pack(*_with_scale(weights(num_out, num_in, kind))))
            line = f"{num_out:>12} x {num_in:<6}"
            for n in row_counts:
                if n * num_out > 64 * 50257:
                    line += f"{'':>14}"
                    continue
                x, y = rand(n, num_in), torch.zeros(n, num_out, device="cuda")
                count = 24 if n < 256 else 6
                calls = [
                    partial(cuda_dense.linear_add, x, packs[i % len(packs)], y)
                    for i in range(count)
                ]
                us = timed(calls)
                rate = f" {2 * n * num_out * num_in / us / 1e6:4.0f}T" if n >= 64 else " " * 6
                line += f"{us:8.1f}{rate}"
            print(line, flush=True)
    one, many, gain = rand(1, 1536), rand(64, 1536), rand(1536)
    wide, logits = rand(64, 8192), rand(64, 50257)
    for name, call in (
        ("norm, 1 row", partial(cuda_dense.norm, one, gain, None, 1e-5)),
        ("norm, 64 rows", partial(cuda_dense.norm, many, gain, None, 1e-5)),
        ("LayerNorm, 64 rows", partial(cuda_dense.norm, many, gain, gain, 1e-5)),
        ("SwiGLU, 64 rows of 4096", partial(cuda_dense.activate, wide, "silu_glu")),
        ("divergence, 64 rows of 50257", partial(cuda_dense.divergence, logits, logits)),
    ):
        print(f"{name:<32} {timed([call] * 20):6.1f} us")


def _with_scale(made: tuple[Tensor, Tensor | None]) -> tuple[Tensor, None, Tensor | None]:
    return made[0], None, made[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="check,speed")
    parser.add_argument("--kinds", default="fp16,int8", help="of the weights that are timed")
    parser.add_argument("--rows", default="1,8,16,32,64,256,1024", help="row counts that are timed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_dense: no CUDA device: skipped")
        return 0
    torch.manual_seed(0)
    checks = Checks()
    if "check" in options.only:
        for kind in KINDS:
            check_products(checks, kind)
        check_rows(checks)
        print(f"{checks.num_failed} checks failed")
    if "speed" in options.only:
        speed([int(n) for n in options.rows.split(",")], options.kinds.split(","))
    return 1 if checks.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
