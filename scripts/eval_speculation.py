#!/usr/bin/env python3
"""Speculation of the demo model on held-out text: acceptance, tokens per round and core passes per token, beside plain decoding.

The prompts are decoded plainly and with every way of guessing, and the tokens must be the same. Core passes are readings of the
core's weights after the prompt, rejected guesses included; rows are tokens times loops, what arithmetic grows with; time is that of this
process, or on a GPU the clock's. Prints a Markdown table and one JSON line. The corpus is made by demo_corpus.py; without it the
prompts are tales and chats like those that the model has seen in training.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from demo_corpus import chat_text  # noqa: E402
from demo_texts import own_chat, tale  # noqa: E402
from teacher_forcing import held_out  # noqa: E402

from gpu_worker.artifact import Artifact, load  # noqa: E402
from gpu_worker.engine import Engine, EngineOptions  # noqa: E402
from gpu_worker.graphed_model import GraphedModel  # noqa: E402
from gpu_worker.rows import Rows  # noqa: E402
from scheduler.messages import Params, Run, Tokens  # noqa: E402


@dataclass
class Decoded:
    """What came of some prompts; counts are those of the steps after all that run together have their first token."""

    tokens: list[list[int]]
    num_tokens: int = 0
    passes: int = 0
    core_loops: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    spent_s: float = 0.0


def decode(engine: Engine, prompts: list[list[int]], params: Params, at_once: int) -> Decoded:
    """Decodes the prompts, `at_once` of them together."""
    result = Decoded([[] for _ in prompts])
    clock = time.process_time if engine.options.device == "cpu" else time.perf_counter
    for first in range(0, len(prompts), at_once):
        group = range(first, min(first + at_once, len(prompts)))
        for i in group:
            engine.add(Run(1, i, 1, Tokens(prompts[i]), Tokens(), i, params))
        while engine.has_work():
            is_counted = all(result.tokens[i] for i in group)
            began = clock()
            step = engine.step()
            spent = clock() - began
            for output in step.outputs:
                if output.error_message:
                    raise SystemExit(output.error_message)
                result.tokens[output.sequence_id] += output.tokens
                if is_counted:
                    result.num_tokens += len(output.tokens)
                    result.rounds += output.rounds
                    result.drafted += output.drafted_tokens
                    result.accepted += output.accepted_tokens
                    result.core_loops += output.core_loops
            if is_counted:
                result.passes += step.core_passes
                result.spent_s += spent
    return result


def own_prompts(artifact: Artifact, length: int, count: int) -> list[list[int]]:
    """The beginnings of tales and chats, in turn, of the model's own kind."""
    file = artifact.blob("tokenizer.json")
    if file is None:
        raise SystemExit(
            "the artifact has no tokenizer; make the corpus with scripts/demo_corpus.py"
        )
    tokenizer, rng = Tokenizer.from_buffer(file), random.Random(1)
    prompts = []
    for i in range(count):
        tokens: list[int] = []
        while len(tokens) < length:
            text = chat_text(own_chat(rng)) if i % 2 else tale(rng)
            tokens += tokenizer.encode(f"{text}\n\n").ids
        prompts.append(tokens[:length])
    return prompts


@torch.inference_mode()
def head_share(engine: Engine, rows: int, draft_loops: int) -> dict[str, float]:
    """Microseconds of the parts of a segment with that many rows on a GPU; `p` is what one costs beside its passes, in core passes."""
    assert isinstance(engine.model, GraphedModel) and engine.model.graphs is not None
    graphs = engine.model.graphs

    def of(run: Callable[[], None], times: int = 50) -> float:
        run()
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ends[0].record()
        for _ in range(times):
            run()
        ends[1].record()
        ends[1].synchronize()
        return 1000 * ends[0].elapsed_time(ends[1]) / times

    spare = Rows.empty(rows)
    spare.slots[:] = engine.cache.spare_slot
    spare.positions[:] = spare.places[:] = 150
    graphs.load(spare)
    # `passes` moves the rows' tables on: each run is a pass at the loop after the last.
    parts = {
        "enter": of(lambda: graphs.enter(rows)),
        "pass": of(lambda: graphs.passes(rows, 1), engine.artifact.config.loop.default - 1),
        "finish": of(lambda: graphs.finish(rows)),
    }
    if graphs.has_segments and rows > 1:
        parts["segment"] = of(lambda: graphs.segment(1, rows, draft_loops))
    parts["p"] = (parts["enter"] + parts["finish"]) / parts["pass"]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, default=Path("gpu_worker/data/demo.tinyloop"))
    parser.add_argument("--corpus", type=Path, default=Path(".demo/corpus.npz"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kv-format", default="", help="fp32 on the CPU, fp16 on a GPU")
    parser.add_argument("--build-dir", default="", help="for compiled kernels of a GPU")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--draft-loops", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--draft-ahead", type=int, default=0, help="of chain and tree; 0 adapts")
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["chain", "tree", "pipelined"])
    parser.add_argument(
        "--at-once", nargs="+", type=int, default=[1], help="prompts that run together (1)"
    )
    parser.add_argument(
        "--by-host", action="store_true", help="on a GPU too the host's own chains and trees"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs; the time is their median")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    args = parser.parse_args()
    if args.prompts < max(args.at_once):
        parser.error(f"{max(args.at_once)} at once need as many prompts")
    artifact = load(args.artifact)
    if args.corpus.is_file():
        kind, prompts = "held-out", held_out(args.corpus, args.prompt_tokens, args.prompts)
    else:
        kind, prompts = "seeded", own_prompts(artifact, args.prompt_tokens, args.prompts)
    is_on_gpu = args.device == "cuda"
    options = EngineOptions(
        device=args.device,
        kv_format=args.kv_format or ("fp16" if is_on_gpu else "fp32"),
        build_dir=args.build_dir,
        is_graphed=is_on_gpu,
        max_rows=max(args.at_once),
        max_speculating=0 if is_on_gpu and not args.by_host else max(args.at_once),
        max_waves=max(args.at_once),
        max_seq_len=args.prompt_tokens + args.tokens + 64,
        prefill_chunk=max(args.at_once) * args.prompt_tokens,
    )
    engine = Engine(artifact, options)
    ways: list[dict[str, Any]] = [{}]
    ways += [
        {"speculation": kind, "draft_loops": d, "draft_ahead": 0 if kind == "pipelined" else args.draft_ahead,
         "branches": args.branches if kind == "tree" else 0}
        for kind in args.kinds for d in args.draft_loops
    ]  # fmt: skip
    print(f"{artifact.config.name} {artifact.digest[:12]}, {args.prompts} prompts of {args.prompt_tokens} {kind} tokens, "
          f"{args.tokens} tokens each, {args.loops} loops\n")  # fmt: skip
    print(
        "| at once | temperature | way | draft loops | acceptance | tokens per round | core passes per token | of plain | "
        "row loops per token | ms per token | times as fast |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    figures: list[dict[str, Any]] = []
    for at_once in args.at_once:
        for temperature in args.temperatures:
            plain: Decoded | None = None
            for way in ways:
                params = Params(
                    loops=args.loops, max_tokens=args.tokens, temperature=temperature, **way
                )
                if is_on_gpu:  # what is captured and compiled at its first use
                    decode(engine, prompts[:at_once], params, at_once)
                runs = [decode(engine, prompts, params, at_once) for _ in range(args.repeats)]
                got = runs[0]
                got.spent_s = statistics.median(run.spent_s for run in runs)
                plain = plain or got
                if any(run.tokens != plain.tokens for run in runs):
                    raise SystemExit(f"{way} at temperature {temperature} changed the tokens")
                figure = figure_of(at_once, temperature, way, got, plain)
                figures.append(figure)
                shown = ["-" if v is None or v == 0 and i == 3 else v if isinstance(v, str) else f"{v:.3g}"
                         for i, v in enumerate(figure.values())]  # fmt: skip
                print(f"| {' | '.join(shown)} |", flush=True)
    print()
    report: dict[str, Any] = {
        "digest": artifact.digest, "loops": args.loops, "tokens": args.tokens, "points": figures,
    }  # fmt: skip
    if is_on_gpu:
        report["segment_us"] = {
            rows: head_share(engine, rows, args.draft_loops[0]) for rows in (1, 8)
        }
    print(json.dumps(report))


def figure_of(
    at_once: int, temperature: float, way: dict[str, Any], got: Decoded, plain: Decoded
) -> dict[str, Any]:
    n = got.num_tokens
    return {
        "at_once": at_once, "temperature": temperature, "way": way.get("speculation", "plain"),
        "draft_loops": way.get("draft_loops", 0), "acceptance": got.accepted / got.drafted if got.drafted else None,
        "tokens_per_round": n / got.rounds if got.rounds else None, "passes_per_token": got.passes / n,
        "of_plain": got.passes * plain.num_tokens / (plain.passes * n), "row_loops_per_token": got.core_loops / n,
        "ms_per_token": 1000 * got.spent_s / n, "times": plain.spent_s * n / (got.spent_s * plain.num_tokens),
    }  # fmt: skip


if __name__ == "__main__":
    main()
