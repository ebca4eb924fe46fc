"""Checks and times everything on one GPU in one go: parity, determinism, speed.

    python scripts/gpu_check.py [--peer] [--only sampling,parity,speed,core,...] [--rows 1,8,64] [--context 1024]

Sampling, parity and speed of the fused decode step are checked here; the other subjects (see OTHERS) by their own scripts and tests, each
in a process of its own, whose output is passed on and whose failure is this one's.

Parity is against plain PyTorch in float32 on the same fp16 weights and cache; determinism compares the bits of a
row alone with those of the same row among others; speed is the 1B-effective reference model (random weights) in
CUDA graphs, beside the floor from the bytes that must move and, with --peer, beside a torch.compile + CUDA graph
decode of the same model. The short table comes last; full numbers go to $OUT/gpu_check.json if OUT is set.
Without a GPU it says so and leaves with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_worker.graphs import (  # noqa: E402
    REFERENCE,
    DecodeCache,
    DecodeRunner,
    DecodeSpec,
    DecodeWeights,
    launches_to_try,
)
from gpu_worker.persistent import PersistentRunner, is_built  # noqa: E402
from kernels import fragments, reference, sampling  # noqa: E402
from kernels.launch import Library  # noqa: E402
from kernels.layout import NUM_SINKS  # noqa: E402

READ_TB_S = 4.43  # measured read bandwidth of an H200
ROOT = Path(__file__).resolve().parents[1]
REPEATED_ROWS = (1, 2, 8, 9, 16, 32, 64)
# The engine's tests: those of one KV format, and those that say the same of each.
_ENGINE = ["test_engine.py", "test_exits.py", "test_kv_modes.py", "test_graphed.py", "test_gpu_engine.py"]  # fmt: skip
_EACH_FORMAT = ["test_determinism.py", "test_speculative.py", "test_waves.py", "test_engine_pressure.py", "test_rows.py"]  # fmt: skip
_PYTEST = ["-m", "pytest", "-q", "-n", "8"]
OTHERS = {
    "general": ["scripts/bench_dense.py"],
    "fragments": ["scripts/bench_fragments.py"],
    "absorbed": ["scripts/gpu_check_absorbed.py", "--shares"],
    "prompt": ["scripts/bench_prompt.py"],
    "engine": [*_PYTEST, *(f"tests/gpu_worker/{name}" for name in _ENGINE)],
    "formats": [*_PYTEST, *(f"tests/gpu_worker/{name}" for name in _EACH_FORMAT)],
    "stack": [*_PYTEST, "tests/integration/test_kill_roles.py"],
    "steps": ["scripts/bench_engine.py"],
}


def random_model(spec: DecodeSpec, device: str = "cuda") -> dict[str, Tensor]:
    """Random fp16 weights at the usual scale, gains near one."""
    make = torch.Generator(device=device).manual_seed(0)

    def matrix(n: int, k: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(n, k, device=device, generator=make) * (gain / k**0.5)).half()

    def gains() -> Tensor:
        return 1 + 0.1 * torch.randn(spec.d_model, device=device, generator=make)

    d, wide = spec.d_model, (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
    tensors = {"embed": matrix(spec.vocab, d, d**0.5), "norm": gains()}
    tensors["head"] = tensors["embed"] / d**0.5
    for i in range(spec.layers):
        tensors |= {
            f"{i}.qkv": matrix(wide, d),
            f"{i}.o": matrix(d, spec.n_heads * spec.head_dim, 0.3),
            f"{i}.gate_up": matrix(2 * spec.d_ff, d),
            f"{i}.down": matrix(d, spec.d_ff, 0.3),
            f"{i}.norm1": gains(),
            f"{i}.norm3": gains(),
        }
    return tensors


def fill_cache(spec: DecodeSpec, cache: DecodeCache) -> None:
    """Random keys and values (int4: random numbers with scales that make them about as large)."""
    make = torch.Generator(device="cuda").manual_seed(1)
    if spec.kv_format == "fp16":
        flat = cache.stored.view(-1).view(torch.half)
        for part in flat.split(1 << 28):
            part.normal_(generator=make)
        return
    for pool in (cache.exact, cache.sinks):
        pool.view(-1).view(torch.half).normal_(generator=make)
    cache.stored.random_(0, 256, generator=make)
    part = spec.attention.stored_bytes
    blocks = cache.stored.view(cache.stored.shape[0], -1, part)[..., part - 256 :]
    pairs = torch.tensor([0.2, -1.5], dtype=torch.half, device="cuda").view(torch.uint8)
    blocks.copy_(pairs.repeat(64))


def make_runner(
    spec: DecodeSpec,
    weights: DecodeWeights,
    rows: int,
    context: int,
    library: Library,
    **options: Any,
) -> DecodeRunner:
    """A runner whose every row has `context` positions before its own, in blocks of its own."""
    blocks = context // 64 + 1
    cache = DecodeCache(spec, rows * spec.loops * blocks, rows * spec.loops, "cuda")
    fill_cache(spec, cache)
    runner = DecodeRunner(weights, cache, rows, blocks, library, **options)
    order = torch.randperm(rows * spec.loops * blocks, device="cuda")
    runner.tables.copy_(order.view(rows, spec.loops, blocks))
    each = torch.arange(rows * spec.loops, device="cuda")
    runner.exact_blocks.copy_(each.view(rows, -1, 1).expand_as(runner.exact_blocks))
    if len(cache.sink_of):
        owners = runner.tables[:, :, 0].flatten().long()
        cache.sink_of[owners] = torch.arange(rows * spec.loops, device="cuda", dtype=torch.int32)
    runner.positions.fill_(context)
    runner.row_info[:, 0] = context // 64
    runner.tokens.copy_(torch.arange(rows, device="cuda") * 37 % spec.vocab)
    return runner


def share_cache(big: DecodeRunner, row: int, library: Library) -> DecodeRunner:
    """A one-row runner on the same sequence as `row` of `big`."""
    one = DecodeRunner(big.weights, big.cache, 1, big.tables.shape[2], library)
    for name in ("tables", "exact_blocks", "positions", "row_info", "tokens"):
        getattr(one, name).copy_(getattr(big, name)[row : row + 1])
    return one


def cached(runner: DecodeRunner, row: int, loop: int, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values (kv heads, positions, dim) float32 of what a row reads."""
    spec = runner.spec
    dim, heads = spec.head_dim, spec.n_kv_heads
    length = int(runner.positions[row]) + 1
    blocks = runner.tables[row, loop].long()

    def exact(pool: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        data = pool[ids].view(torch.half).view(len(ids), spec.layers, heads, 2, 64 * dim)[:, layer]
        return (
            fragments.unpack_keys(data[:, :, 0], dim).float(),
            fragments.unpack_values(data[:, :, 1], dim).float(),
        )

    if spec.kv_format == "fp16":
        parts = [exact(runner.cache.exact, blocks)]
    else:
        part = spec.attention.stored_bytes
        data = runner.cache.stored[blocks[:-1]].view(-1, spec.layers, heads, 2, part)[:, layer]
        own = runner.exact_blocks[row, loop, -1:].long()
        keys = fragments.unpack_int4(data[:, :, 0], dim, is_value=False)
        values = fragments.unpack_int4(data[:, :, 1], dim, is_value=True)
        if len(blocks) > 1:
            sinks = runner.cache.sinks[int(runner.cache.sink_of[blocks[0]])].view(torch.half)
            sinks = sinks.view(spec.layers, heads, 2, -1)[layer].float()
            keys[0, :, :NUM_SINKS] = sinks[:, 0].view(heads, NUM_SINKS, dim)
            values[0, :, :NUM_SINKS] = sinks[:, 1].view(heads, dim, NUM_SINKS).transpose(1, 2)
        parts = [(keys, values), exact(runner.cache.exact, own)]
    k, v = (torch.cat([p[i] for p in parts]).transpose(0, 1).flatten(1, 2) for i in (0, 1))
    return k[:, :length], v[:, :length]


def reference_step(runner: DecodeRunner, tensors: dict[str, Tensor], row: int) -> Tensor:
    """The logits of one row in float32 (products in float64), by plain PyTorch."""
    spec = runner.spec
    dim, group = spec.head_dim, spec.n_heads // spec.n_kv_heads
    position = int(runner.positions[row])
    cos, sin = runner.rope_table[position].unbind(-1)

    def times(x: Tensor, name: str) -> Tensor:
        return (tensors[name].double() @ x.double()).float()

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + spec.norm_eps) * gain

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = tensors["embed"][int(runner.tokens[row])].float()
    for loop in range(spec.loops):
        for layer in range(spec.layers):
            qkv = times(norm(x, tensors[f"{layer}.norm1"]), f"{layer}.qkv").view(-1, dim)
            q, k, v = qkv.split([spec.n_heads, spec.n_kv_heads, spec.n_kv_heads])
            keys, values = cached(runner, row, loop, layer)
            keys, values = keys.clone(), values.clone()
            keys[:, position], values[:, position] = turn(k), v
            keys, values = (t.repeat_interleave(group, 0) for t in (keys, values))
            scores = torch.einsum("hd,hjd->hj", turn(q), keys) / dim**0.5
            mixed = torch.einsum("hj,hjd->hd", scores.softmax(-1), values).flatten()
            x = x + times(mixed, f"{layer}.o")
            gate, up = times(norm(x, tensors[f"{layer}.norm3"]), f"{layer}.gate_up").chunk(2)
            x = x + times(torch.nn.functional.silu(gate) * up, f"{layer}.down")
    return times(norm(x, tensors["norm"]), "head")


def time_graph(graph: torch.cuda.CUDAGraph, repeats: int = 40) -> float:
    """Median milliseconds of a replay."""
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in times)[repeats // 2]


def floor_ms(spec: DecodeSpec, rows: int, context: int) -> float:
    """The bytes that a step must move over the measured read bandwidth."""
    d = spec.d_model
    layer = (
        (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim * d
        + spec.n_heads * spec.head_dim * d
        + 3 * spec.d_ff * d
    )
    weights = spec.loops * spec.layers * layer * 2 + spec.vocab * d * 2
    full, part = divmod(context, 64)
    block = spec.stored_block_bytes * full + spec.exact_block_bytes * (part + 1) / 64
    return (weights + rows * spec.loops * block) / (READ_TB_S * 1e9)


class Report:
    """Collects rows of the table and everything for the JSON."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self.data: dict[str, Any] = {}
        self.failed = 0

    def check(self, name: str, is_good: bool, detail: str) -> None:
        self.failed += not is_good
        self.note(name, "ok" if is_good else "FAIL", detail)

    def note(self, name: str, result: str, detail: str) -> None:
        self.lines.append((name, result, detail))
        self.data[name] = {"result": result, "detail": detail}
        print(f"{name:<38} {result:<12} {detail}", flush=True)

    def close(self) -> int:
        out = os.environ.get("OUT")
        if out:
            Path(out, "gpu_check.json").write_text(json.dumps(self.data, indent=1))
        print(f"\n{'check':<38} {'result':<12} detail")
        for line in self.lines:
            print(f"{line[0]:<38} {line[1]:<12} {line[2]}")
        return 1 if self.failed else 0


def check_step(report: Report, spec: DecodeSpec, weights: DecodeWeights, tensors: dict[str, Tensor],
               library: Library, contexts: list[int], many: int) -> None:  # fmt: skip
    """Parity with PyTorch and bit-equality between 1 row and many, at several lengths."""
    kind = spec.kv_format
    for context in contexts:
        big = make_runner(spec, weights, many, context, library)
        big.logits.fill_(float("nan"))
        stream = torch.cuda.current_stream()
        big.launch_step(stream.cuda_stream)
        torch.cuda.synchronize()
        for row in (0, many - 1):
            one = share_cache(big, row, library)
            one.logits.fill_(float("nan"))
            one.launch_step(stream.cuda_stream)
            torch.cuda.synchronize()
            is_equal = torch.equal(one.logits[0], big.logits[row])
            gap = float((one.logits[0] - big.logits[row]).abs().max())
            report.check(
                f"{kind} bits, row {row} of {many}, context {context}",
                is_equal,
                f"max gap {gap:.1e}",
            )
        want = reference_step(big, tensors, many - 1)
        error = float((big.logits[many - 1] - want).norm() / want.norm())
        same = int(big.logits[many - 1].argmax()) == int(want.argmax())
        # 32 layer calls on fp16 operands
        report.check(
            f"{kind} parity, context {context}",
            error < 1e-2,
            f"rel {error:.1e}, same argmax {same}",
        )


def check_repeats(
    report: Report, spec: DecodeSpec, weights: DecodeWeights, library: Library, replays: int
) -> None:
    """Many replays of the step of each row bucket: the same bits every time, and those of the first row alone."""
    for rows in REPEATED_ROWS:
        runner = make_runner(spec, weights, rows, 1000, library)
        check_replays(
            report,
            f"{spec.kv_format}, {rows} rows",
            runner,
            share_cache(runner, 0, library),
            replays,
        )


def check_replays(report: Report, name: str, runner: Any, one: Any, replays: int) -> None:
    """`replays` of the step of `runner`, half of them one by one, against the first and against `one`, its first row alone."""
    one.launch_step(torch.cuda.current_stream().cuda_stream)
    graph = runner.capture()
    graph.replay()
    first, alone = runner.logits.clone(), one.logits[0]
    changed = torch.zeros((), dtype=torch.int32, device="cuda")
    for i in range(replays):
        graph.replay()
        changed += (runner.logits != first).any()
        if i % 2:
            torch.cuda.synchronize()
    wrong, is_equal = int(changed), torch.equal(first[0], alone)
    report.check(
        f"{name}: {replays} replays", wrong == 0 and is_equal,
        f"{wrong} differ, the first row as alone: {is_equal}",
    )  # fmt: skip


def check_sampling(report: Report, library: Library, vocab: int) -> None:
    """Tokens and log-probabilities of the device against the plain twins, and the time for 64 rows."""
    cases = [
        (0.0, 0, 1.0, 0.0),
        (0.8, 0, 1.0, 0.0),
        (1.0, 50, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (0.7, 40, 0.8, 0.02),
    ]
    rows = len(cases)
    torch.manual_seed(3)
    logits = torch.randn(rows, vocab) * 3
    temperature, top_k, top_p, min_p = (torch.tensor(x) for x in zip(*cases, strict=True))
    keys = torch.randint(0, 1 << 32, (rows, 2))
    want = reference.choose(logits, temperature, top_k, top_p, min_p, keys).tolist()
    stream = torch.cuda.current_stream().cuda_stream
    variant = sampling.choose("choose", vocab, is_shaped=False)
    chooser = library.get(variant)

    def choose(some: Tensor, settings: list[Tensor], tokens: Tensor) -> None:
        addresses = [t.data_ptr() for t in settings]
        args = (some.data_ptr(), 0, 0, *addresses, tokens.data_ptr())
        stream = torch.cuda.current_stream().cuda_stream
        chooser.launch((len(some) * variant.cluster, 1), args, stream, is_overlapped=False)

    packed = [
        t.cuda() for t in sampling.pack_settings(temperature, top_k, top_p.double(), min_p, keys)
    ]
    on_device, tokens = logits.cuda(), torch.zeros(rows, dtype=torch.int32, device="cuda")
    choose(on_device, packed, tokens)
    got = tokens.tolist()
    report.check("sampling, 5 settings", got == want, f"{got}")
    own, ids = (
        torch.zeros(rows, device="cuda"),
        torch.zeros(rows, 5, dtype=torch.int32, device="cuda"),
    )
    tops = torch.zeros(rows, 5, device="cuda")
    scorer = library.get(sampling.log_probabilities("log_probabilities"))
    args = [t.data_ptr() for t in (on_device, tokens, own, ids, tops)]
    scorer.launch((rows, 1), (*args, vocab, 5), stream, is_overlapped=False)
    expected = reference.log_probabilities(logits, tokens.cpu().long(), 5)
    gap = float((own.cpu() - expected[0]).abs().max())
    same = ids.tolist() == expected[1].tolist()
    report.check("log-probabilities", gap < 1e-4 and same, f"max gap {gap:.1e}, same ids {same}")
    many, out = (
        torch.randn(64, vocab, device="cuda"),
        torch.zeros(64, dtype=torch.int32, device="cuda"),
    )
    for name, case in (("greedy", 0), ("noise", 1), ("top-k", 2), ("top-p", 3), ("all", 4)):
        settings = [
            t[case : case + 1].repeat(64, *[1] * (t.dim() - 1)).contiguous() for t in packed
        ]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            choose(many, settings, out)
        report.note(f"choose, 64 rows, {name}", f"{time_graph(graph) * 1e3:.1f} us", "")


def measure(report: Report, spec: DecodeSpec, weights: DecodeWeights, library: Library, rows: int,
            context: int, shares: bool) -> float:  # fmt: skip
    """Time a step, and (with `shares`) the step without each kernel."""
    runner = make_runner(spec, weights, rows, context, library)
    full = time_graph(runner.capture())
    floor = floor_ms(spec, rows, context)
    report.note(f"{spec.kv_format} step, {rows} rows, context {context}", f"{full:.3f} ms",
                f"floor {floor:.3f}, {full / floor:.2f} x floor")  # fmt: skip
    clusters = {
        name: library.get(variant).max_active_clusters()
        for name, variant in runner.variants.items()
        if variant.cluster > 1
    }
    report.data[f"clusters at a time, {spec.kv_format}, {rows} rows"] = clusters
    print(f"clusters at a time: {clusters}")
    if shares:
        calls = spec.loops * spec.layers
        for name in ("qkv", "attention", "o", "gate_up", "down", "head"):
            share = full - time_graph(runner.capture((name,)), 20)
            count = 1 if name == "head" else calls
            report.note(
                f"   {name}, {rows} rows",
                f"{share / count * 1e3:.2f} us",
                f"of {count}: {share:.3f} ms",
            )
    return full


def mix_rows(runner: DecodeRunner) -> None:
    """Eight rows as an engine has them: four neighbouring positions of one sequence, three other lengths, no row."""
    for table in (runner.tables, runner.exact_blocks):
        table[1:4] = table[0]
    # with int4 the rows of one sequence are in one block
    first = 1022 if runner.spec.kv_format == "fp16" else 1020
    runner.positions.copy_(torch.tensor([*range(first, first + 4), 63, 64, 0, -1]))
    runner.row_info[:, 0] = torch.tensor([15, 15, 15, 15, 0, 1, 0, 0])


def check_core(
    report: Report, spec: DecodeSpec, tensors: dict[str, Tensor], library: Library, replays: int
) -> None:
    """The one kernel of few rows beside the kernels one by one: the same bits in many replays, and its time."""
    weights, kind = DecodeWeights(spec, tensors), spec.kv_format
    num_blocks = torch.cuda.get_device_properties(0).multi_processor_count
    cases: list[tuple[int, int | None]] = [(rows, at) for rows in (1, 3, 8) for at in (1024, 0, 63, 1000, 1900)]  # fmt: skip
    for rows, context in [*cases, (8, None)]:
        if not is_built(spec, rows, num_blocks):
            report.note(f"{kind}, one kernel, {rows} rows", "not built", "")
            continue
        plain = make_runner(spec, weights, rows, 1100 if context is None else context, library)
        if context is None:
            mix_rows(plain)
        blocks, cache = plain.tables.shape[2], plain.cache
        core = PersistentRunner(weights, cache, rows, blocks, library, num_blocks)
        for name in ("tables", "exact_blocks", "positions", "row_info", "tokens"):
            getattr(core, name).copy_(getattr(plain, name))
        graphs, real = (plain.capture(), core.capture()), plain.positions >= 0
        pools = [cache.exact, cache.stored, cache.sinks] if kind == "int4" else [cache.stored]
        for pool in pools:
            pool.view(-1, 2)[:, 0] ^= 1  # so that what is not written is seen
        before = [pool.clone() for pool in pools]
        graphs[0].replay()
        want, written = plain.logits[real], [pool.clone() for pool in pools]
        wrong = 0
        for _ in range(replays):
            for pool, old in zip(pools, before, strict=True):
                pool.copy_(old)
            graphs[1].replay()
            same = torch.equal(core.logits[real], want)
            same &= all(torch.equal(a, b) for a, b in zip(pools, written, strict=True))
            wrong += not same
        what = "mixed" if context is None else f"context {context}"
        report.check(f"{kind}, one kernel, {rows} rows, {what}", wrong == 0, f"{wrong} of {replays} replays differ")  # fmt: skip
        if context == 1024:
            times = [f"{time_graph(graph):.4f}" for graph in (*graphs, graphs[0])]
            report.note(f"{kind}, one kernel, {rows} rows", f"{times[1]} ms", f"one by one {times[0]}, {times[2]} ms")  # fmt: skip


def run_others(report: Report, only: list[str], build_dir: Path) -> None:
    """The subjects that have scripts or tests of their own; `formats` once for each of four KV formats."""
    for name in [subject for subject in OTHERS if subject in only]:
        for kv_format in ("fp32", "fp16", "int4", "h_int4") if name == "formats" else ("",):
            env = os.environ | {
                "TINYLOOP_TEST_DEVICE": "cuda",
                "TINYLOOP_TEST_KV_FORMAT": kv_format or "fp32",
                "TINYLOOP_TEST_BUILD_DIR": str(build_dir),
            }
            began = time.monotonic()
            status = subprocess.run([sys.executable, *OTHERS[name]], cwd=ROOT, env=env, check=False)
            took = f"{time.monotonic() - began:.0f} s"
            report.check(f"{name} {kv_format}".strip(), status.returncode == 0, took)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(["sampling", "parity", "speed", "core", *OTHERS])
    )
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--formats", default="fp16,int4")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--contexts", default="0,63,1000", help="lengths for parity")
    parser.add_argument(
        "--replays", type=int, default=300, help="of each row bucket, for parity and core"
    )
    parser.add_argument(
        "--peer", action="store_true", help="also time the torch.compile decode (minutes)"
    )
    parser.add_argument(
        "--shares", action="store_true", help="also time the step without each kernel"
    )
    parser.add_argument(
        "--try", dest="try_others", action="store_true", help="time other launch shapes"
    )
    parser.add_argument("--build-dir", type=Path, default=Path("build/ptx"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device, nothing checked")
        return 0
    started = time.monotonic()
    report = Report()
    report.note("device", torch.cuda.get_device_name(), f"torch {torch.__version__}")
    library = Library(options.build_dir)
    tensors = random_model(REFERENCE)
    only = options.only.split(",")
    rows = [int(r) for r in options.rows.split(",")]
    if "sampling" in only:
        check_sampling(report, library, REFERENCE.vocab)
    for kind in options.formats.split(","):
        spec = replace(REFERENCE, kv_format=kind)
        weights = DecodeWeights(spec, tensors)
        if "parity" in only:
            check_step(
                report,
                spec,
                weights,
                tensors,
                library,
                [int(c) for c in options.contexts.split(",")],
                max(rows),
            )
            check_repeats(report, spec, weights, library, options.replays)
        if "speed" in only:
            for count in rows:
                measure(report, spec, weights, library, count, options.context, options.shares)
    if "core" in only:
        for kind in options.formats.split(","):
            spec = replace(REFERENCE, kv_format=kind)
            check_core(report, spec, tensors, library, options.replays)
    run_others(report, only, options.build_dir)
    if options.try_others:
        for count in rows:
            spec = replace(REFERENCE, kv_format=options.formats.split(",")[0])
            weights = DecodeWeights(spec, tensors)
            for name, instead in launches_to_try(spec, count).items():
                runner = make_runner(
                    spec, weights, count, options.context, library, instead=instead
                )
                report.note(f"{count} rows, {name}", f"{time_graph(runner.capture()):.3f} ms", "")
            runner = make_runner(
                spec, weights, count, options.context, library, is_overlapped=False
            )
            report.note(
                f"{count} rows, kernels in turn", f"{time_graph(runner.capture()):.3f} ms", ""
            )
    if options.peer:
        import peer_decode

        for count in rows:
            took = peer_decode.measure(REFERENCE, tensors, count, options.context)
            report.note(
                f"peer step, {count} rows", f"{took:.3f} ms", "torch.compile + CUDA graph, fp16 KV"
            )
    print(f"took {time.monotonic() - started:.0f} s")
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
