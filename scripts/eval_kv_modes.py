#!/usr/bin/env python3
"""KV modes of the demo model on held-out text: bytes per token, perplexity and CPU time per step, through the engine's own cache.

Rows of full context are read token by token as if generated (the first 64 are the prompt), so each mode reads exactly what it
would in service. Bytes are the allocator's, of one sequence, taken when its last block is still open: blocks with scales, exact
copies, sinks and tables. CPU time is that of one decode step of one sequence at the full context. Cuts and perplexities are
against fp16 with one K/V per loop. Prints a table and one JSON line. The corpus is made by demo_corpus.py.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from teacher_forcing import held_out, make_engine, read  # noqa: E402

from gpu_worker.artifact import load  # noqa: E402
from gpu_worker.kv_sizes import FORMATS, SHARES, mode_name, unusable_reason  # noqa: E402
from scheduler.messages import Params  # noqa: E402

BASE = "fp16"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, default=Path("gpu_worker/data/demo.tinyloop"))
    parser.add_argument("--corpus", type=Path, default=Path(".demo/corpus.npz"))
    parser.add_argument(
        "--length", type=int, default=2048, help="tokens of a row: the full context"
    )
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--modes", nargs="+", help="names as in the model card; fp16 is always run")
    args = parser.parse_args()
    artifact = load(args.artifact)
    rows = held_out(args.corpus, args.length, args.rows)
    middle = args.length // 2
    wanted = {mode_name(f, s): (f, s) for s in SHARES for f in FORMATS}
    names = [BASE, *(n for n in wanted if n != BASE and (args.modes is None or n in args.modes))]
    params = Params(loops=args.loops, max_tokens=args.length)
    print(
        f"{artifact.config.name} {artifact.digest[:12]}, {args.loops} loops, {args.rows} rows of {args.length} held-out tokens"
    )
    print(f"{'mode':18}{'B/token at':>11} {middle:<6}{'cut':>7}{'at':>9} {args.length:<6}{'cut':>7}{'perplexity':>12}{'change':>9}{'ms/step':>9}")  # fmt: skip
    figures: dict[str, dict[str, float]] = {}
    for name in names:
        reason = unusable_reason(artifact.config, *wanted[name])
        if reason:
            print(f"{name:18}{reason}")
            continue
        engine = make_engine(artifact, args.length, *wanted[name])
        results = [read(engine, row, params, (middle, args.length)) for row in rows]
        losses = [loss for result in results for loss in result.losses]
        one = {
            "bytes_middle": results[0].bytes_at[middle] / middle,
            "bytes_full": results[0].bytes_at[args.length] / args.length,
            "perplexity": math.exp(sum(losses) / len(losses)),
            "step_ms": min(result.step_ms_at[args.length] for result in results),
        }
        figures[name] = one
        base = figures[BASE]
        cuts = [100 * (1 - one[k] / base[k]) for k in ("bytes_middle", "bytes_full")]
        change = 100 * (one["perplexity"] / base["perplexity"] - 1)
        print(f"{name:18}{one['bytes_middle']:>18,.0f}{cuts[0]:>6.1f}%{one['bytes_full']:>16,.0f}{cuts[1]:>6.1f}%"
              f"{one['perplexity']:>12.3f}{change:>+8.2f}%{one['step_ms']:>9.1f}", flush=True)  # fmt: skip
    print(
        json.dumps(
            {"rows": args.rows, "length": args.length, "loops": args.loops, "modes": figures}
        )
    )


if __name__ == "__main__":
    main()
