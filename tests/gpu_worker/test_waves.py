"""Waves that run on the device without the host give the tokens of plain decoding, wherever they start and stop, and exact books.

On the CPU the segments that a GPU captures in graphs are called one by one, and as many are under way when the host reads the first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker import artifact, waves
from gpu_worker.engine import Engine, EngineOptions
from scheduler.messages import HeldPrefix, PrefixKey, Run, Tokens
from tests.gpu_worker.engine_helpers import (
    DEVICE,
    IS_GRAPHED,
    Got,
    collect,
    make_run,
    random_prompt,
)
from tests.gpu_worker.test_speculative import Toys, plainly, same

LOOPS = 4
WAVE: dict[str, Any] = {"speculation": "pipelined", "draft_loops": 1, "loops": LOOPS}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("artifacts"))


class Counted:
    """An engine whose segments are counted."""

    def __init__(self, toys: Toys, variant: str = "pre", calm: float = 0.3, **options: Any) -> None:
        self.engine = toys.engine(variant, calm, is_graphed=True, device=DEVICE, **options)
        self.num_segments = 0
        assert self.engine._waves is not None
        launch = self.engine._waves._graphs.segment

        def segment(*how: int) -> None:
            self.num_segments += 1
            launch(*how)

        self.engine._waves._graphs.segment = segment  # type: ignore[method-assign]


def check(
    toys: Toys, runs: list[Run], arrivals: list[tuple[int, Run]] | None = None, *, where: Any = ("pre", 0.3), **options: Any
) -> tuple[dict[int, Got], Counted]:  # fmt: skip
    """Serves the runs on the device alone and plainly step by step; both must give the same, and leave no block behind."""
    late = arrivals or []
    expected = collect(
        toys.engine(*where, device=DEVICE, is_graphed=IS_GRAPHED),
        [plainly(r) for r in runs],
        arrivals=[(n, plainly(r)) for n, r in late],
    )
    counted = Counted(toys, *where, **options)
    got = collect(counted.engine, runs, arrivals=late)
    for run_id, one in got.items():
        same(one, expected[run_id])
    cache = counted.engine.cache
    assert cache.pool.num_used == cache.copies.num_used == 0
    return got, counted


@pytest.mark.parametrize("calm", [0.3, 1.0])
@pytest.mark.parametrize("draft_loops", [1, 2])
@pytest.mark.parametrize("variant", ["pre", "huginn", "ouro", "alibi", "gelu_tanh"])
def test_every_architecture_gives_the_tokens_of_plain_decoding(
    toys: Toys, variant: str, draft_loops: int, calm: float
) -> None:
    rng = random.Random(variant)
    for i, ask in enumerate(({}, SAMPLED)):
        run = make_run(
            i,
            random_prompt(rng, 512, 50),
            seed=-i,
            max_tokens=40,
            **ask,
            **WAVE | {"draft_loops": draft_loops},
        )
        got, counted = check(toys, [run], where=(variant, calm))
        assert counted.num_segments > 0
        assert len(got[i].tokens) == got[i].accepted_tokens + got[i].rounds


@pytest.mark.parametrize(
    ("variant", "kv_format"),
    [("pre", "fp16"), ("pre", "int8"), ("pre", "int4"), ("pure", "fp16"), ("gelu_tanh", "h")],
)
def test_cut_caches(toys: Toys, variant: str, kv_format: str) -> None:
    """Over a block's edge, with a window and without, from the first tokens on."""
    rng = random.Random(kv_format)
    for i, length in enumerate((1, 40)):
        run = make_run(
            i,
            random_prompt(rng, 512, length),
            max_tokens=90,
            cache_window=50 * i,
            **SAMPLED,
            **WAVE,
        )
        expected = collect(
            toys.engine(variant, kv_format=kv_format, device=DEVICE, is_graphed=IS_GRAPHED),
            [plainly(run)],
        )
        counted = Counted(toys, variant, kv_format=kv_format)
        same(collect(counted.engine, [run])[i], expected[i])
        assert counted.num_segments > 60
        assert counted.engine.cache.copies.num_used == counted.engine.cache.pool.num_used == 0


def test_a_device_that_is_ahead_of_the_host_goes_on_with_its_wave(toys: Toys) -> None:
    """Where all queued segments have ended when the host looks, the wave is not begun anew: its guesses stay."""
    run = make_run(1, random_prompt(random.Random(14), 512, 30), max_tokens=50, **WAVE)
    expected = collect(Counted(toys).engine, [run])[1]
    counted = Counted(toys)
    riding = counted.engine._waves
    assert riding is not None
    riding.land = riding.land_all  # type: ignore[method-assign]
    got = collect(counted.engine, [run])[1]
    same(got, expected)
    assert (got.rounds, got.accepted_tokens) == (expected.rounds, expected.accepted_tokens)


def test_chains_go_on_as_waves_where_the_host_makes_no_guesses(toys: Toys) -> None:
    rng = random.Random(15)
    runs = [
        make_run(i, random_prompt(rng, 512, 30), max_tokens=30, **WAVE | ask)
        for i, ask in enumerate(
            ({"speculation": "chain", "draft_ahead": 3}, {"speculation": "tree", "branches": 2})
        )
    ]
    got, counted = check(toys, runs[:1], max_speculating=0)
    assert counted.num_segments > 0 and got[0].accepted_tokens > 0
    got, counted = check(toys, runs[1:], max_speculating=0)
    assert counted.num_segments == 0 and got[1].drafted_tokens == 0
    _, counted = check(toys, runs[:1], max_speculating=0, max_waves=0)
    assert counted.num_segments == 0


def test_the_books_are_those_of_waves_that_the_host_runs(toys: Toys) -> None:
    rng = random.Random(8)
    for calm in (0.02, 0.3, 1.0):
        run = make_run(
            1, random_prompt(rng, 512, 30), max_tokens=50, temperature=0.8 * (calm == 0.3), **WAVE
        )
        by_host = collect(
            toys.engine("gelu_tanh", calm, device=DEVICE, is_graphed=IS_GRAPHED), [run]
        )[1]
        counted = Counted(toys, "gelu_tanh", calm)
        alone = collect(counted.engine, [run])[1]
        same(alone, by_host)
        assert (alone.rounds, alone.accepted_tokens) == (by_host.rounds, by_host.accepted_tokens)
        assert (alone.drafted_tokens, alone.core_loops) == (
            by_host.drafted_tokens,
            by_host.core_loops,
        )
        if calm == 0.02:  # nothing was dropped: a token per segment
            assert counted.num_segments <= 49 + LOOPS + waves.DEPTH
    totals = counted.engine.series()
    assert totals["drafted_tokens_total"] == alone.drafted_tokens
    assert totals["core_passes_total"] <= counted.num_segments + LOOPS


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 33, 34, 35, 97, 98])
def test_the_last_tokens(toys: Toys, max_tokens: int) -> None:
    """Around the first tokens, and where the sequence ends at a block's edge."""
    run = make_run(0, random_prompt(random.Random(2), 512, 31), max_tokens=max_tokens, **WAVE)
    got, counted = check(toys, [run])
    assert len(got[0].tokens) == max_tokens and got[0].finish_reason == "length"
    assert (counted.num_segments > 0) == (max_tokens > 1)
    longest = replace(run, params=replace(run.params, max_tokens=97))
    check(toys, [longest], max_seq_len=128)  # the sequence fills its tables


def test_stop_tokens(toys: Toys) -> None:
    rng, reasons = random.Random(3), []
    for i in range(6):
        run = make_run(
            i, random_prompt(rng, 512, 20), seed=i, max_tokens=60, stop_token_ids=tuple(range(0, 512, 9)), min_tokens=5 * (i % 2),
            **SAMPLED, **WAVE,
        )  # fmt: skip
        got, _ = check(toys, [run])
        reasons.append(got[i].finish_reason)
    assert reasons.count("stop") > 2


@pytest.mark.parametrize("draft_ahead", [1, 2, 3, 9])
def test_no_more_guesses_than_asked_for(toys: Toys, draft_ahead: int) -> None:
    run = make_run(
        0, random_prompt(random.Random(4), 512, 20), max_tokens=40, draft_ahead=draft_ahead, **WAVE
    )
    got, counted = check(toys, [run])
    by_host = collect(toys.engine(device=DEVICE, is_graphed=IS_GRAPHED), [run])[0]
    assert got[0].core_loops == by_host.core_loops and counted.num_segments > 0


def test_others_come_and_go(toys: Toys) -> None:
    """Waves stop for a prompt and for plain rows, begin again after them, and go on beside other waves."""
    rng = random.Random(5)
    runs = [make_run(0, random_prompt(rng, 512, 20), max_tokens=120, **SAMPLED, **WAVE)]
    late = [
        (20, make_run(1, random_prompt(rng, 512, 70), max_tokens=12, loops=LOOPS)),
        (50, make_run(2, random_prompt(rng, 512, 33), max_tokens=20, **WAVE)),
        (51, make_run(3, random_prompt(rng, 512, 33), max_tokens=25, **WAVE | {"draft_loops": 2})),
        (90, make_run(4, random_prompt(rng, 512, 33), max_tokens=9, frequency_penalty=0.5, **WAVE)),
    ]
    got, counted = check(toys, runs, late)
    assert counted.num_segments > 40
    assert all(len(one.tokens) <= one.accepted_tokens + one.rounds for i, one in got.items() if i != 1)  # fmt: skip


def test_waves_of_several_sequences_share_their_passes(toys: Toys) -> None:
    rng = random.Random(6)
    runs = [
        make_run(i, random_prompt(rng, 512, 20 + i), seed=i, max_tokens=30 + 9 * i, temperature=0.8 * (i % 2), **WAVE)
        for i in range(3)
    ]  # fmt: skip
    got, counted = check(toys, runs, prefill_chunk=256)
    assert counted.num_segments < sum(one.core_loops for one in got.values()) / LOOPS


def test_aborting_and_a_sequence_in_the_same_place(toys: Toys) -> None:
    rng = random.Random(7)
    first = make_run(0, random_prompt(rng, 512, 62), max_tokens=60, **WAVE)
    second = make_run(1, random_prompt(rng, 512, 62), max_tokens=60, **SAMPLED, **WAVE)
    expected = collect(toys.engine(device=DEVICE, is_graphed=IS_GRAPHED), [plainly(first)])[
        0
    ].tokens
    for steps in range(1, 12, 2):
        counted = Counted(toys)
        engine = counted.engine
        engine.add(first)
        tokens: list[int] = []
        for _ in range(steps):
            tokens += [token for output in engine.step().outputs for token in output.tokens]
        assert tokens == expected[: len(tokens)]
        engine.abort(0, 1)
        assert engine.cache.pool.num_used == 0 and not engine.has_work()
        same(collect(engine, [second])[1], collect(toys.engine(device=DEVICE, is_graphed=IS_GRAPHED), [plainly(second)])[1])  # fmt: skip


def test_resetting_while_segments_are_under_way(toys: Toys) -> None:
    run = make_run(0, random_prompt(random.Random(8), 512, 62), max_tokens=60, **WAVE)
    engine = Counted(toys).engine
    engine.add(run)
    for _ in range(7):
        engine.step()
    engine.reset()
    assert engine.cache.pool.num_used == 0 and not engine.has_work()
    same(
        collect(engine, [run])[0],
        collect(toys.engine(device=DEVICE, is_graphed=IS_GRAPHED), [plainly(run)])[0],
    )


def test_a_tight_pool(toys: Toys) -> None:
    """Where there are no blocks to guess in, the host's own waves go on without them; nobody leaves for a guess."""
    rng = random.Random(9)
    height = LOOPS + 1
    run = make_run(0, random_prompt(rng, 512, 50), max_tokens=78, **WAVE)
    got, counted = check(toys, [run], num_blocks=2 * height, max_seq_len=128)
    assert counted.num_segments > 0
    pair = [
        make_run(i, random_prompt(rng, 512, 90), seed=i, max_tokens=60, **SAMPLED, **WAVE)
        for i in range(3)
    ]
    check(toys, pair, num_blocks=6 * height)


def test_prefix_hits_and_replay(toys: Toys) -> None:
    rng = random.Random(10)
    run = make_run(0, random_prompt(rng, 512, 90), max_tokens=60, **SAMPLED, **WAVE)
    expected = collect(toys.engine(device=DEVICE, is_graphed=IS_GRAPHED), [plainly(run)])[0]
    engine = Counted(toys).engine
    held = HeldPrefix(bytes(16), PrefixKey(), Tokens(run.prompt[:64]), 0, 0)
    collect(engine, [replace(run, store=held)])
    hit = collect(engine, [replace(run, prefix_id=bytes(16), prefix_len=64)])[0]
    assert hit.cached_tokens == 64
    same(hit, expected)
    for done in (1, 20, 38, 59):
        resumed = replace(run, emitted=Tokens(expected.tokens[:done]))
        assert collect(engine, [resumed])[0].tokens == expected.tokens[done:]


@pytest.mark.parametrize(
    "ask",
    [
        {"draft_loops": 3},
        {"logprobs": 1},
        {"repetition_penalty": 1.2},
        {"logit_bias": ((5, 2.0),)},
        {"speculation": "chain", "draft_ahead": 2},
    ],
)
def test_what_needs_the_host_keeps_it(toys: Toys, ask: dict[str, Any]) -> None:
    run = make_run(0, random_prompt(random.Random(11), 512, 20), max_tokens=20, **WAVE | ask)
    _, counted = check(toys, [run])
    assert counted.num_segments == 0


def test_folded_caches_keep_the_host(toys: Toys) -> None:
    run = make_run(0, random_prompt(random.Random(12), 512, 50), max_tokens=30, **WAVE)
    expected = collect(
        toys.engine(kv_share="last_loop", device=DEVICE, is_graphed=IS_GRAPHED), [plainly(run)]
    )[0]
    counted = Counted(toys, kv_share="last_loop")
    same(collect(counted.engine, [run])[0], expected)
    assert counted.num_segments == 0


def test_the_demo_model(toys: Toys) -> None:
    demo = artifact.load(Path(waves.__file__).parent / "data" / "demo.tinyloop")
    prompt = random_prompt(random.Random(13), 50000, 12)
    options: dict[str, Any] = {"max_rows": 2, "max_seq_len": 128, "device": DEVICE}
    made: list[Callable[[], Engine]] = [
        lambda: Engine(demo, EngineOptions(is_graphed=IS_GRAPHED, **options)),
        lambda: Engine(demo, EngineOptions(is_graphed=True, **options)),
    ]
    run = make_run(0, prompt, max_tokens=20, **WAVE | {"loops": 8})
    expected, got = collect(made[0](), [plainly(run)])[0], collect(made[1](), [run])[0]
    same(got, expected)
    assert got.accepted_tokens > 0
