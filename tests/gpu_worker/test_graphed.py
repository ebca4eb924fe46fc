"""Decode rows in buckets and plain steps ahead of the host give the tokens of the engine that runs step by step.

On the CPU the stretches that a GPU captures in graphs are called one by one: same buffers, same spare rows, same order of events.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.fused_model import spec_of
from scheduler.messages import Run
from scripts.make_toy_artifact import toy_config
from tests.gpu_worker.engine_helpers import DEVICE, collect, make_engine, make_run, random_prompt

ASKS: list[dict[str, Any]] = [
    {"loops": 4, "max_tokens": 30},
    {"loops": 2, "max_tokens": 41, "temperature": 0.9},
    {"loops": 3, "max_tokens": 17, "temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"loops": 4, "max_tokens": 25, "frequency_penalty": 0.9},
    {"loops": 4, "max_tokens": 20, "logprobs": 2},
    {"loops": 1, "max_tokens": 1},
    {"loops": 4, "max_tokens": 70, "cache_window": 40},
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


def runs_of(asks: list[dict[str, Any]], lengths: tuple[int, ...] = (5, 70, 64, 33)) -> list[Run]:
    rng = random.Random(4)
    return [
        make_run(i, random_prompt(rng, 512, lengths[i % len(lengths)]), seed=i, **ask)
        for i, ask in enumerate(asks)
    ]


def both(shared: Path, variant: str, runs: list[Run], arrivals: Any = (), **options: Any) -> Any:
    found = []
    for is_graphed in (False, True):
        engine = make_engine(shared, variant, is_graphed=is_graphed, device=DEVICE, **options)
        got = collect(engine, runs, arrivals=arrivals)
        assert engine.cache.pool.num_used == 0 and not engine.has_work()
        found.append({i: (g.tokens, g.finish_reason, g.logprobs) for i, g in got.items()})
    return found


# On a GPU models like `pure` have kernels of their own for steps in graphs, and so other bits.
MODELS = ["huginn", "ouro", "alibi"] + ["pure"] * (DEVICE == "cpu")


@pytest.mark.parametrize("variant", MODELS)
def test_a_mixed_batch_has_the_same_tokens(shared: Path, variant: str) -> None:
    runs = runs_of(ASKS)
    plain, ahead = both(shared, variant, runs[:4], [(3 * i, run) for i, run in enumerate(runs[4:])])
    assert plain == ahead


def test_plain_depths_leave_one_after_the_other(shared: Path) -> None:
    asks = [{"loops": loops, "max_tokens": 20, "temperature": 0.7} for loops in (1, 4, 3, 3, 2, 4)]
    for variant in ("pre", "huginn"):
        plain, ahead = both(shared, variant, runs_of(asks))
        assert plain == ahead


@pytest.mark.parametrize("exit_kv", ["copy", "complete"])
def test_rows_that_exit_early(shared: Path, exit_kv: str) -> None:
    how = {"exit_kind": "latent", "exit_threshold": 0.4, "exit_kv": exit_kv}
    asks = [
        {"loops": 4, "max_tokens": 24} | how,
        {"loops": 4, "max_tokens": 24},
        {"loops": 3, "max_tokens": 24} | how,
    ]
    plain, ahead = both(shared, "pre", runs_of(asks))
    assert plain == ahead


@pytest.mark.parametrize("speculation", ["chain", "tree", "pipelined"])
def test_guesses_start_when_they_pay(shared: Path, speculation: str) -> None:
    asks = [
        {"loops": 4, "max_tokens": 40, "speculation": speculation, "draft_loops": 2, "branches": 2},
        {"loops": 4, "max_tokens": 12},
        {"loops": 4, "max_tokens": 8},
    ]
    plain, ahead = both(shared, "pre", runs_of(asks), max_speculating=1)
    assert plain == ahead


def test_rows_that_left_name_no_table_that_is_not_there(shared: Path) -> None:
    """A draft's rows start at later loops: they leave at the last table while others run on beside them."""
    how = {"speculation": "tree", "branches": 3, "draft_loops": 2, "draft_ahead": 1}
    plain, ahead = both(shared, "pre", runs_of([{"loops": 8, "max_tokens": 30} | how]))
    assert plain == ahead


def test_fused_attention_is_told_of_alibi() -> None:
    for pos in ("alibi", "rope"):
        spec = spec_of(toy_config("pure", pos=pos), "fp16")
        assert spec.attention.has_alibi == (pos == "alibi") and spec.is_rotary == (pos == "rope")


def test_books_hold_what_was_taken(shared: Path) -> None:
    """Rows in flight for a sequence that had ended count for nobody; every pass counts once, also where steps of both kinds meet."""
    for at in (1, 2, 5):
        asks = [{"loops": 4, "max_tokens": 30}, {"loops": 3, "max_tokens": 20}]
        loops = []
        for is_graphed in (False, True):
            engine = make_engine(
                shared, "pre", is_graphed=is_graphed, max_waves=0, max_speculating=0
            )
            free = collect(engine, runs_of(asks))[0].tokens
            stopped = runs_of([asks[0] | {"stop_token_ids": (free[at],)}, asks[1]])
            told = engine.series()["core_passes_total"]
            passes = 0
            step = engine.step

            def counted(step: Any = step) -> Any:
                nonlocal passes
                result = step()
                passes += result.core_passes
                return result

            engine.step = counted  # type: ignore[method-assign]
            late = make_run(9, [7] * 40, loops=2, max_tokens=6)
            got = collect(engine, stopped, arrivals=[(3, late)])
            assert passes == engine.series()["core_passes_total"] - told
            loops.append({i: g.core_loops for i, g in got.items()})
        assert loops[0] == loops[1]


def test_a_stop_token_and_a_tight_pool(shared: Path) -> None:
    runs = runs_of([{"loops": 2, "max_tokens": 60, "temperature": 1.0} for _ in range(5)])
    free, _ = both(shared, "pre", runs)
    stops = tuple({tokens[7] for tokens, _, _ in free.values()})
    asks = [
        {"loops": 2, "max_tokens": 60, "temperature": 1.0, "stop_token_ids": stops}
        for _ in range(5)
    ]
    plain, ahead = both(shared, "pre", runs_of(asks), num_blocks=26)
    assert plain == ahead
    assert {reason for _, reason, _ in ahead.values()} == {"stop"}


def test_aborting_between_steps_loses_nobody_else(shared: Path) -> None:
    runs = runs_of([{"loops": 2, "max_tokens": 30}] * 4)
    alone = {
        run.sequence_id: collect(make_engine(shared, "pre"), [run])[run.sequence_id].tokens
        for run in runs
    }
    engine = make_engine(shared, "pre", is_graphed=True)
    tokens: dict[int, list[int]] = {run.sequence_id: [] for run in runs}
    for run in runs:
        engine.add(run)
    for step in range(200):
        if step == 9:
            engine.abort(runs[1].sequence_id, runs[1].attempt)
        for output in engine.step().outputs:
            tokens[output.sequence_id] += output.tokens
        if not engine.has_work():
            break
    cut = tokens.pop(1)
    assert cut == alone[1][: len(cut)] and len(cut) < 30
    assert tokens == {i: t for i, t in alone.items() if i != 1}
    assert engine.cache.pool.num_used == 0
