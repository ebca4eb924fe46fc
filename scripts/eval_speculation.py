#!/usr/bin/env python3
"""Speculation of the demo model on held-out text: acceptance, tokens per round and core passes per token, beside plain decoding.

The prompts are decoded plainly and with every way of guessing, and the tokens must be the same. Core passes are readings of the
core's weights after the prompt, rejected guesses included; rows are tokens times loops, what arithmetic grows with; time is that of this
process. Prints a Markdown table and one JSON line. The corpus is made by demo_corpus.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from teacher_forcing import held_out  # noqa: E402

from gpu_worker.artifact import load  # noqa: E402
from gpu_worker.engine import Engine, EngineOptions  # noqa: E402
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
    for first in range(0, len(prompts), at_once):
        group = range(first, min(first + at_once, len(prompts)))
        for i in group:
            engine.add(Run(1, i, 1, Tokens(prompts[i]), Tokens(), i, params))
        while engine.has_work():
            is_counted = all(result.tokens[i] for i in group)
            began = time.process_time()
            step = engine.step()
            spent = time.process_time() - began
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, default=Path("gpu_worker/data/demo.tinyloop"))
    parser.add_argument("--corpus", type=Path, default=Path(".demo/corpus.npz"))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--draft-loops", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--draft-ahead", type=int, default=0, help="of chain and tree; 0 adapts")
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["chain", "tree", "pipelined"])
    parser.add_argument("--at-once", type=int, default=1, help="prompts that run together (1)")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    args = parser.parse_args()
    artifact = load(args.artifact)
    prompts = held_out(args.corpus, args.prompt_tokens, args.prompts)
    length = args.prompt_tokens + args.tokens
    options = EngineOptions(
        max_rows=args.at_once,
        max_speculating=args.at_once,
        max_seq_len=length + 64,
        prefill_chunk=args.at_once * args.prompt_tokens,
    )
    engine = Engine(artifact, options)
    ways: list[dict[str, Any]] = [{}]
    ways += [
        {"speculation": kind, "draft_loops": d, "draft_ahead": 0 if kind == "pipelined" else args.draft_ahead,
         "branches": args.branches if kind == "tree" else 0}
        for kind in args.kinds for d in args.draft_loops
    ]  # fmt: skip
    print(f"{artifact.config.name} {artifact.digest[:12]}, {args.prompts} prompts of {args.prompt_tokens} held-out tokens, "
          f"{args.tokens} tokens each, {args.loops} loops\n")  # fmt: skip
    print(
        "| temperature | way | draft loops | acceptance | tokens per round | core passes per token | of plain | row loops per token | ms per token |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    figures: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        plain = None
        for way in ways:
            params = Params(
                loops=args.loops, max_tokens=args.tokens, temperature=temperature, **way
            )
            got = decode(engine, prompts, params, args.at_once)
            plain = plain or got
            if got.tokens != plain.tokens:
                raise SystemExit(f"{way} at temperature {temperature} changed the tokens")
            name, n = way.get("speculation", "plain"), got.num_tokens
            figure = {
                "temperature": temperature, "way": name, "draft_loops": way.get("draft_loops", 0),
                "acceptance": got.accepted / got.drafted if got.drafted else None,
                "tokens_per_round": n / got.rounds if got.rounds else None,
                "passes_per_token": got.passes / n, "of_plain": got.passes / plain.passes,
                "row_loops_per_token": got.core_loops / n, "ms_per_token": 1000 * got.spent_s / n,
            }  # fmt: skip
            figures.append(figure)
            shown = ["-" if v is None or v == 0 and i == 2 else v if isinstance(v, str) else f"{v:.3g}"
                     for i, v in enumerate(figure.values())]  # fmt: skip
            print(f"| {' | '.join(shown)} |", flush=True)
    print()
    print(
        json.dumps(
            {
                "digest": artifact.digest,
                "loops": args.loops,
                "tokens": args.tokens,
                "points": figures,
            }
        )
    )


if __name__ == "__main__":
    main()
