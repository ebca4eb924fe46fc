"""Measures what a shared prefix saves: time to first token, cold and warm, over loopback HTTP.

    python scripts/bench_prefix.py [--model FILE] [--prefix 1500] [--rounds 5]

Starts a stack of its own (2 web, scheduler, worker). Each round draws a prefix that nobody has sent, asks with it once (cold), then
with five other endings (warm): all but the last tokens of the prefix come from the prefix pool. Cold is bounded by the prefill's
arithmetic, warm by one small chunk and the hops between the processes. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DEMO = ROOT / "gpu_worker" / "data" / "demo.tinyloop"
WARM_PER_ROUND = 5
ENDING = 8  # tokens of each request after the shared prefix


def first_token_ms(url: str, prompt: list[int]) -> tuple[float, int]:
    """Time from sending the request to its first token, and how many prompt tokens came from the pool."""
    body = {"prompt_tokens": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, cached = time.perf_counter(), None, 0
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            frame = json.loads(line[6:])
            if first is None and frame.get("tokens"):
                first = time.perf_counter()
            cached = frame.get("usage", {}).get("cached_tokens", cached)
    if first is None:
        raise SystemExit("no token came")
    return 1000 * (first - began), cached


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--prefix", type=int, default=1500, help="tokens shared by all requests")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from gpu_worker.artifact import load
    from tests.harness import Stack

    vocab = load(args.model).config.arch.vocab
    rng = random.Random(0)
    cold, warm, reused = [], [], 0

    def some(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    with Stack(args.model, num_web=2) as stack:
        first_token_ms(stack.url, some(ENDING))
        for _ in range(args.rounds):
            prefix = some(args.prefix)
            cold.append(first_token_ms(stack.url, prefix + some(ENDING))[0])
            for _ in range(WARM_PER_ROUND):
                took, reused = first_token_ms(stack.url, prefix + some(ENDING))
                warm.append(took)
    figures = {
        "prefix_tokens": args.prefix,
        "reused_tokens": reused,
        "cold_ms": round(statistics.median(cold), 1),
        "warm_ms": round(statistics.median(warm), 1),
        "ratio": round(statistics.median(cold) / statistics.median(warm), 1),
    }
    print(f"{'':6}{'first token, ms (median)':>26}{'requests':>10}")
    print(f"{'cold':6}{figures['cold_ms']:>26}{len(cold):>10}")
    print(f"{'warm':6}{figures['warm_ms']:>26}{len(warm):>10}")
    print(
        f"warm reuses {reused} of {args.prefix + ENDING} tokens and is {figures['ratio']} times faster"
    )
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
