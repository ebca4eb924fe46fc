#!/usr/bin/env python3
"""Adaptive exits of the demo model on held-out text: perplexity and computed loops for a sweep of thresholds, `exit_kv` copy.

Rows are read token by token as if generated (the first 64 are the prompt, at all loops), so what a token reads of an earlier one is
what that one left in the cache. A KL exit reads coda and head after each pass: `--pass-cost` says what one such read counts in
loops (by default by weights read). Prints a table and one JSON line. The corpus is made by demo_corpus.py.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from teacher_forcing import NUM_PROMPT, held_out, make_engine, read  # noqa: E402

from gpu_worker.artifact import load  # noqa: E402
from gpu_worker.model_config import ModelConfig  # noqa: E402
from scheduler.messages import Params  # noqa: E402

SWEEPS = {
    "latent": (0.02, 0.05, 0.1, 0.15, 0.2, 0.3),
    "kl": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "gate": (0.5, 0.7, 0.9),
}


def head_cost(config: ModelConfig) -> float:
    """Weights that one readout (coda and head) reads, in units of those of one core pass."""
    arch, stages = config.arch, config.stages
    width = arch.head_dim * (2 * arch.n_heads + 2 * arch.n_kv_heads)
    layer = arch.d_model * (width + arch.d_ff * (3 if arch.is_gated else 2))
    head = arch.vocab * (arch.embed_rank or arch.d_model) + arch.embed_rank * arch.d_model
    inject = 2 * arch.d_model**2 * (config.loop.inject == "concat")
    return (stages.coda * layer + head) / (stages.core * layer + inject)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, default=Path("gpu_worker/data/demo.tinyloop"))
    parser.add_argument("--corpus", type=Path, default=Path(".demo/corpus.npz"))
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--min-loops", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=tuple(SWEEPS), default=["latent"])
    parser.add_argument(
        "--thresholds", nargs="+", type=float, help="in place of each kind's own sweep"
    )
    parser.add_argument(
        "--fixed", nargs="+", type=int, default=[], help="also: no exit, at these numbers of loops"
    )
    parser.add_argument("--pass-cost", type=float)
    args = parser.parse_args()
    artifact = load(args.artifact)
    rows = held_out(args.corpus, args.length, args.rows)
    cost = head_cost(artifact.config) if args.pass_cost is None else args.pass_cost
    engine = make_engine(artifact, args.length, "fp32", "per_loop")
    points: list[tuple[str, float, int]] = [("none", 0.0, args.loops)]
    points += [("none", 0.0, loops) for loops in args.fixed]
    points += [(k, t, args.loops) for k in args.kinds for t in (args.thresholds or SWEEPS[k])]
    print(
        f"{artifact.config.name} {artifact.digest[:12]}, {args.rows} rows of {args.length} held-out tokens; one head read = {cost:.2f} loops"
    )
    print(
        f"{'exit':8}{'threshold':>10}{'perplexity':>12}{'change':>9}{'loops':>8}{'head reads':>12}{'in all':>8}{'saved':>8}{'s':>7}"
    )
    figures: list[dict[str, Any]] = []
    for kind, threshold, loops in points:
        params = Params(
            loops=loops, max_tokens=args.length, exit_kind=kind, exit_threshold=threshold, exit_kv="copy",
            min_loops=min(args.min_loops, loops),
        )  # fmt: skip
        began = time.process_time()
        results = [read(engine, row, params) for row in rows]
        spent = time.process_time() - began
        losses = [loss for result in results for loss in result.losses]
        count = args.rows * (args.length - NUM_PROMPT)
        mean = sum(result.computed_loops for result in results) / count
        reads = sum(result.head_reads for result in results) / count
        perplexity, total = math.exp(sum(losses) / len(losses)), mean + cost * reads
        figures.append({"kind": kind, "threshold": threshold, "loops": mean, "head_reads": reads, "total": total,
                        "perplexity": perplexity})  # fmt: skip
        change = 100 * (perplexity / figures[0]["perplexity"] - 1)
        saved = 100 * (1 - total / args.loops)
        label = kind if kind != "none" else f"{loops} loops"
        print(f"{label:8}{threshold:>10.4g}{perplexity:>12.3f}{change:>+8.2f}%{mean:>8.2f}{reads:>12.2f}{total:>8.2f}{saved:>7.1f}%"
              f"{spent:>7.1f}", flush=True)  # fmt: skip
    print(
        json.dumps(
            {"rows": args.rows, "length": args.length, "loops": args.loops, "points": figures}
        )
    )


if __name__ == "__main__":
    main()
