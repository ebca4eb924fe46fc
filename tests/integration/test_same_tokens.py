"""One worker or three, a roomy KV pool or one that runs out: the same request gives the same tokens, in every KV mode served."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from scripts.make_toy_artifact import make
from tests.harness import Stack

NUM_REQUESTS = 12
TIGHT_BLOCKS = "48"  # two sequences start in it and outgrow it


def make_bodies() -> list[tuple[str, dict[str, Any]]]:
    rng = random.Random(5)
    shared = [rng.randrange(300) for _ in range(64)]
    bodies = []
    for number in range(NUM_REQUESTS):
        body: dict[str, Any] = {
            "prompt_tokens": shared[: rng.choice((0, 64))]
            + [rng.randrange(300) for _ in range(rng.randrange(1, 40))],
            "max_tokens": rng.randrange(140, 230),
            "sample_seed": number,
            "temperature": rng.choice((0.0, 0.9)),
            "repetition_penalty": rng.choice((1.0, 1.2)),
            "ignore_eos": True,
        }
        path = rng.choice(("/generate", "/generate/speculative", "/generate/tree_speculative"))
        if path == "/generate":
            body["loops"] = rng.randrange(1, 7)
        else:
            body |= {"verify_loops": rng.randrange(2, 7), "draft_loops": 1}
        bodies.append((path, body))
    return bodies


def served(artifact: Path, bodies: list[tuple[str, dict[str, Any]]], **stack: Any) -> list[Any]:
    """The token lists of all requests sent at once, and how often a sequence was preempted."""
    with Stack(artifact, **stack) as running, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda asked: running.post(*asked), bodies))
        assert [status for status, _ in answers] == [200] * len(bodies), answers
        metrics = running.get("/metrics")[1]
    preempted = next(
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("tinyloop_preemptions_total")
    )
    return [[answer["tokens"] for _, answer in answers], preempted]


CUT = {"TINYLOOP_KV_FORMAT": "h_int4", "TINYLOOP_KV_SHARE": "last_loop"}


@pytest.mark.parametrize("mode", [{}, pytest.param(CUT, marks=pytest.mark.slow)])
def test_three_workers_and_a_tight_pool_change_no_token(
    tmp_path: Path, mode: dict[str, str]
) -> None:
    artifact, bodies = make(tmp_path / "toy.tinyloop", variant="alibi"), make_bodies()
    roomy, _ = served(artifact, bodies, env=mode)
    assert [len(tokens) for tokens in roomy] == [body["max_tokens"] for _, body in bodies]
    assert served(artifact, bodies, env=mode, num_workers=3)[0] == roomy
    tight, preempted = served(artifact, bodies, env={**mode, "TINYLOOP_KV_BLOCKS": TIGHT_BLOCKS})
    assert tight == roomy
    if not mode:
        assert preempted > 0
