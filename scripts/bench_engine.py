"""Times an engine on its own, without HTTP: decode steps at several row counts, the share of a step that the GPU idles, and prefill.

    python scripts/bench_engine.py [--artifact FILE] [--rows 1,8,64] [--context 1024] [--tokens 64] [--prefill 8192]

Without an artifact it makes one with random weights in the shapes of the 1B-effective reference model (docs/kernels.md). A step's time
is the median over the decode steps after all prompts are in; the device's own time is that of the same graph replayed without a host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_worker import artifact  # noqa: E402
from gpu_worker.engine import Engine, EngineOptions  # noqa: E402
from gpu_worker.graphed_model import GraphedModel  # noqa: E402
from scheduler.messages import Params, Run, Tokens  # noqa: E402
from scripts.make_toy_artifact import make  # noqa: E402

REFERENCE = {
    "d_model": 1536, "n_heads": 12, "n_kv_heads": 12, "head_dim": 128, "d_ff": 4096, "vocab": 50257, "max_pos": 16384, "core": 4,
    "default": 8, "trained_max": 8, "hard_max": 8, "dtype": "fp16",
}  # fmt: skip


def make_runs(
    engine: Engine, rows: int, context: int, tokens: int, loops: list[int], **params: Any
) -> list[Run]:
    """Requests with random prompts of `context` tokens; row r has the depth loops[r % len(loops)]."""
    make_tokens = np.random.default_rng(1)
    vocab = engine.artifact.config.arch.vocab
    return [
        Run(
            1, r, 1, Tokens(make_tokens.integers(0, vocab, context).tolist()), Tokens(), r,
            Params(loops=loops[r % len(loops)], max_tokens=tokens, **params),
        )
        for r in range(rows)
    ]  # fmt: skip


def measure(engine: Engine, runs: list[Run], *, with_device: bool = False) -> dict[str, float]:
    """Runs them together; medians over the steps that only decode. `with_device`: also the device's own time, in the middle."""
    for run in runs:
        engine.add(run)
    began = time.perf_counter()
    first_token_s, alone_ms, steps, tokens, last = 0.0, 0.0, [], 0, began
    while engine.has_work():
        result = engine.step()
        now = time.perf_counter()
        made = sum(len(output.tokens) for output in result.outputs)
        tokens += made
        if made and not first_token_s:
            first_token_s = now - began
        if made == len(runs):
            steps.append(1000 * (now - last))
        last = now
        if with_device and len(steps) == runs[0].params.max_tokens // 2:
            alone_ms = device_ms(engine, len(runs), runs[0].params.loops)
            last = time.perf_counter()
    steady = steps[2:-1] or steps
    step_ms = statistics.median(steady)
    alone = (
        {"device_ms": alone_ms, "idle_percent": 100 * (1 - alone_ms / step_ms)}
        if with_device
        else {}
    )
    return {
        "step_ms": step_ms,
        "tokens_per_s": len(runs) * 1000 / step_ms,
        "first_token_ms": 1000 * first_token_s,
    } | alone


def device_ms(engine: Engine, rows: int, loops: int, repeats: int = 20) -> float:
    """A plain step on the device alone: its graph, replayed on the rows of the step under way."""
    assert isinstance(engine.model, GraphedModel) and engine.model.graphs is not None
    graphs = engine.model.graphs
    step = graphs.captured("step", graphs.bucket(rows), loops)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step.replay()
    start.record()
    for _ in range(repeats):
        step.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--make", type=Path, help="only write that artifact to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kv-format", default="fp16")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefill", default="8192", help="prompt lengths")
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--build-dir", default="build")
    options = parser.parse_args()
    if options.make is not None:
        make(options.make, variant="pure", tokenizer=False, **REFERENCE)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    with tempfile.TemporaryDirectory() as folder:
        path = options.artifact
        if path is None:
            path = Path(folder, "reference.tinyloop")
            make(path, variant="pure", tokenizer=False, **REFERENCE)
        loaded = artifact.load(path)
        rows = [int(n) for n in options.rows.split(",") if n]
        prompts = [int(n) for n in options.prefill.split(",") if n]
        longest = max([options.context + options.tokens, *(n + 2 for n in prompts)])
        config = loaded.config
        per_block = -(-(options.context + options.tokens) // 64) * (config.loop.default + 2)
        num_blocks = max(max(rows) * per_block, -(-longest // 64) * (config.loop.default + 2)) + 64
        engine = Engine(
            loaded,
            EngineOptions(
                device=options.device, kv_format=options.kv_format, max_rows=max(64, *rows), num_blocks=num_blocks,
                max_seq_len=min(longest, config.arch.max_pos), prefill_chunk=options.prefill_chunk,
                build_dir=options.build_dir, is_graphed=options.device == "cuda",
            ),
        )  # fmt: skip
    print(f"{type(engine.model).__name__}, {engine.numerics_id}", flush=True)
    report: dict[str, Any] = {}
    default = config.loop.default

    def note(name: str, found: dict[str, float]) -> None:
        report[name] = found
        print(f"{name:<32} " + "  ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)

    measure(engine, make_runs(engine, 1, 70, 4, [default]))  # compiles and captures
    for count in rows:
        runs = make_runs(engine, count, options.context, options.tokens, [default])
        measure(engine, make_runs(engine, count, 64, 6, [default]))
        found = measure(engine, runs, with_device=engine.options.is_graphed)
        note(f"{count} rows, context {options.context}", found)
    if 64 in rows and default >= 8:
        mixed = [2, 3, 4, 5, 6, 7, 8]
        measure(engine, make_runs(engine, 64, 64, 6, mixed))
        note(
            "64 rows, depths 2 to 8",
            measure(engine, make_runs(engine, 64, options.context, options.tokens, mixed)),
        )
    for length in prompts:
        measure(engine, make_runs(engine, 1, length, 1, [default]))
        found = measure(engine, make_runs(engine, 1, length, 1, [default]))
        note(f"prefill of {length}", {"first_token_ms": found["first_token_ms"]})
    out = os.environ.get("OUT")
    if out:
        Path(out, "bench_engine.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
