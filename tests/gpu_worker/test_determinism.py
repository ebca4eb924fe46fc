"""The determinism contract, engine by engine: the same request gives the same tokens and log-probabilities however it is served.

Each case is a way to decode (`ASKS`) on a model (`MODELS`). It is served alone, in a batch, under other chunkings, after a prefix hit,
through preemptions, and replayed from every kind of place; all must equal the first. A new way of decoding is one more entry.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.messages import HeldPrefix, PrefixKey, Run, Tokens
from tests.gpu_worker.engine_helpers import (
    DEVICE,
    Got,
    collect,
    make_engine,
    make_run,
    random_prompt,
)

ASKS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9},
    "nucleus": {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    "greedy penalties": {"frequency_penalty": 1.5, "logit_bias": ((5, 2.0), (9, -3.0))},
    "window": {"cache_window": 50, "temperature": 0.8},
}  # fmt: skip
MODELS = ["pre", "huginn", "ouro", "alibi"] + ["pure"] * (
    DEVICE == "cuda"
)  # that has kernels of its own
PROMPT, LENGTH = 150, 40


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


def cases() -> list[Any]:
    """Every way on every model; a quarter of them and all that is sampled run each time, the rest under `--all`."""
    listed = []
    for i, model in enumerate(MODELS):
        for j, name in enumerate(ASKS):
            is_quick = (i + j) % len(MODELS) == 0 or name == "sampled"
            listed.append(
                pytest.param(
                    model,
                    ASKS[name],
                    id=f"{model}-{name}",
                    marks=() if is_quick else pytest.mark.slow,
                )
            )
    return listed


both = pytest.mark.parametrize(("model", "ask"), cases())


class Case:
    """One request and what it gives when it is alone; every other service is compared with that."""

    def __init__(self, shared: Path, model: str, ask: dict[str, Any]) -> None:
        self.shared, self.model = shared, model
        self.rng = random.Random(f"{model} {ask}")
        settings = {"loops": 3, "max_tokens": LENGTH, "logprobs": 2} | ask
        if model == "huginn":
            settings["init_seed"] = 11
        self.run = make_run(
            1, random_prompt(self.rng, 512, PROMPT), seed=self.rng.getrandbits(64), **settings
        )
        self.expected = self.serve([self.run])

    def serve(
        self, runs: list[Run], arrivals: list[tuple[int, Run]] | None = None, **options: Any
    ) -> Got:
        return collect(
            make_engine(self.shared, self.model, **options), runs, arrivals=arrivals or []
        )[1]

    def others(self, count: int) -> list[Run]:
        """Neighbours of all depths, lengths and ways."""
        asks = list(ASKS.values())
        return [
            make_run(
                10 + i, random_prompt(self.rng, 512, self.rng.choice([1, 30, 64, 129])), seed=i,
                **{"loops": self.rng.randrange(1, 6), "max_tokens": self.rng.randrange(1, 30), **asks[i % len(asks)]},
            )
            for i in range(count)
        ]  # fmt: skip

    def check(self, got: Got) -> None:
        assert got.tokens == self.expected.tokens
        assert got.logprobs == self.expected.logprobs
        assert got.finish_reason == self.expected.finish_reason


@both
def test_the_same_request_gives_the_same_answer(
    shared: Path, model: str, ask: dict[str, Any]
) -> None:
    case = Case(shared, model, ask)
    assert len(case.expected.tokens) == LENGTH
    for chunk in (64, 192):
        case.check(case.serve([case.run], prefill_chunk=chunk))
    others = case.others(6)
    case.check(case.serve([*others[:3], case.run, *others[3:]]))
    arrivals = [(case.rng.randrange(25), run) for run in others]
    case.check(case.serve([case.run], arrivals, max_rows=4))
    case.check(case.serve([], [(3, case.run), *arrivals], prefill_chunk=64))


@both
def test_a_prefix_hit_gives_the_same_answer(shared: Path, model: str, ask: dict[str, Any]) -> None:
    case = Case(shared, model, ask)
    length = case.rng.choice([64, 128])
    held = HeldPrefix(bytes(16), PrefixKey(), Tokens(case.run.prompt[:length]), 0, 0)
    engine = make_engine(shared, model)
    writer = replace(
        case.run, sequence_id=5, params=replace(case.run.params, max_tokens=2), store=held
    )
    collect(engine, [writer, *case.others(2)])
    got = collect(
        engine, [*case.others(2), replace(case.run, prefix_id=bytes(16), prefix_len=length)]
    )[1]
    case.check(got)
    assert got.cached_tokens == length


@both
def test_preemption_gives_the_same_answer(shared: Path, model: str, ask: dict[str, Any]) -> None:
    case = Case(shared, model, ask)
    tables = make_engine(shared, model).cache.num_extra_tables + 3
    engine = make_engine(
        shared, model, num_blocks=7 * tables
    )  # until one of the older two reaches 128
    older = [
        make_run(10 + i, random_prompt(case.rng, 512, 100 + i), seed=i, loops=3, max_tokens=60)
        for i in range(2)
    ]
    got = collect(engine, [*older, case.run])
    assert engine.series()["preemptions_total"] > 0
    case.check(got[1])


@both
def test_replay_gives_the_same_answer(shared: Path, model: str, ask: dict[str, Any]) -> None:
    """Emitted tokens are taken in, neither drawn nor sent again: from the first to the last, and at a block's edges."""
    case = Case(shared, model, ask)
    edge = 192 - PROMPT
    for done in {1, case.rng.randrange(2, LENGTH - 1), min(edge, LENGTH) - 1, LENGTH - 1}:
        run = replace(case.run, emitted=Tokens(case.expected.tokens[:done]))
        got = case.serve([*case.others(1), run])
        assert got.tokens == case.expected.tokens[done:]
        assert got.logprobs == case.expected.logprobs[done:]
