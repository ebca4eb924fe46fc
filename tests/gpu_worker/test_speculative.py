"""Speculation gives the tokens of plain decoding, in every way of guessing, sampling and keeping K and V, and its books are exact.

Random models of many loops hardly ever agree with themselves at fewer, so most cases run on calm ones, whose core moves the
state little: there drafts hold often enough that every outcome occurs.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker import artifact
from gpu_worker.drafts import MAX_AHEAD, Pace
from gpu_worker.engine import Engine, EngineOptions
from scheduler.messages import HeldPrefix, PrefixKey, Run, Tokens
from scripts.make_toy_artifact import VARIANTS, make
from tests.gpu_worker.engine_helpers import DEVICE, Got, collect, make_run, random_prompt

WAYS: dict[str, dict[str, Any]] = {
    "chain": {"speculation": "chain", "draft_loops": 1, "draft_ahead": 3},
    "adaptive": {"speculation": "chain", "draft_loops": 2, "draft_ahead": 0},
    "tree": {"speculation": "tree", "draft_loops": 2, "draft_ahead": 3, "branches": 3},
    "pipelined": {"speculation": "pipelined", "draft_loops": 1},
}  # fmt: skip
ASKS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    "biased": {"frequency_penalty": 1.0, "logit_bias": ((5, 2.0), (9, -3.0))},
    "stopping": {"temperature": 1.0, "stop_token_ids": tuple(range(0, 512, 20)), "min_tokens": 6},
}  # fmt: skip
LOOPED = [name for name in VARIANTS if name != "plain" and (name != "pure" or DEVICE == "cuda")]
LOOPS = 4


def cases(names: str, *axes: Iterable[Any], one_in: int) -> Any:
    """All combinations of the axes as parameters `names`; one in so many runs each time, diagonally, the rest under `--all`."""
    listed = []
    for picked in itertools.product(*(list(enumerate(axis)) for axis in axes)):
        values = [
            v for _, value in picked for v in (value if isinstance(value, tuple) else (value,))
        ]
        marks = () if sum(i for i, _ in picked) % one_in == 0 else pytest.mark.slow
        listed.append(pytest.param(*values, marks=marks))
    return pytest.mark.parametrize(names, listed)


way = pytest.mark.parametrize("way", WAYS)


class Toys:
    """Calm toy artifacts, made once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, variant: str, calm: float, **overrides: Any) -> Path:
        path = self._folder / f"{variant}-{calm}-{'-'.join(map(str, overrides.values()))}.tinyloop"
        if not path.exists():
            loaded = artifact.load(make(path, variant=variant, **overrides))
            tensors = {name: tensor.clone() for name, tensor in loaded.tensors().items()}
            for name, tensor in tensors.items():
                if name.startswith("core.") and ("attn.o.weight" in name or "down.weight" in name):
                    tensor *= calm
                if name == "inject.weight":
                    tensor[:, : tensor.shape[0]] *= calm
            artifact.write(path, loaded.config, tensors, {}, {})
        return path

    def engine(
        self, variant: str = "pre", calm: float = 0.3, overrides: Any = None, **options: Any
    ) -> Engine:
        options = {
            "max_rows": 8, "num_blocks": 600, "max_seq_len": 256, "prefill_chunk": 64, "max_speculating": 8, "max_waves": 8,
            **options,
        }  # fmt: skip
        path = self.path(variant, calm, **(overrides or {}))
        return Engine(artifact.load(path), EngineOptions(**options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("artifacts"))


def plainly(run: Run) -> Run:
    return replace(run, params=replace(run.params, speculation="none"))


def same(got: Got, expected: Got) -> None:
    assert got.error_code == ""
    assert got.tokens == expected.tokens
    assert got.logprobs == expected.logprobs
    assert got.finish_reason == expected.finish_reason


def check(
    make_engine: Any, runs: list[Run], arrivals: list[tuple[int, Run]] | None = None
) -> dict[int, Got]:
    """Serves the runs as they are and without speculation; both must give the same, and leave no block behind."""
    late = arrivals or []
    expected = collect(
        make_engine(), [plainly(r) for r in runs], arrivals=[(n, plainly(r)) for n, r in late]
    )
    engine = make_engine()
    got = collect(engine, runs, arrivals=late)
    for run_id, one in got.items():
        same(one, expected[run_id])
    assert engine.cache.pool.num_used == engine.cache.copies.num_used == 0
    return got


@cases("variant,way", LOOPED, WAYS, one_in=5)
def test_every_architecture_gives_the_tokens_of_plain_decoding(
    toys: Toys, variant: str, way: str
) -> None:
    """In a batch with plain rows, other depths, and prompts that arrive meanwhile."""
    rng = random.Random(f"{variant} {way}")
    seeded = {"init_seed": 5} if variant == "huginn" else {}
    asks = list(ASKS.values())
    runs = [
        make_run(i, random_prompt(rng, 512, rng.choice([1, 40, 63, 64, 100])), seed=i,
                 **{"loops": loops, "max_tokens": 24, **asks[(i + len(variant)) % len(asks)], **guessed, **seeded})
        for i, (loops, guessed) in enumerate([(LOOPS, WAYS[way]), (3, {}), (3, WAYS[way]), (LOOPS, WAYS["chain"])])
    ]  # fmt: skip
    late = [
        (
            3,
            make_run(
                9, random_prompt(rng, 512, 130), loops=LOOPS, max_tokens=12, **seeded, **WAYS[way]
            ),
        )
    ]
    got = check(lambda: toys.engine(variant), runs, late)
    assert sum(one.drafted_tokens for one in got.values()) > 0


@cases("variant", LOOPED, one_in=3)
def test_waves_of_every_architecture_give_the_tokens_of_plain_decoding(
    toys: Toys, variant: str
) -> None:
    """Segments that divide the loops and such that do not; rejected at every depth, in a calm and in a lively model."""
    rng = random.Random(variant)
    runs = [
        make_run(i, random_prompt(rng, 512, 55), seed=i, loops=LOOPS, max_tokens=24, speculation="pipelined", draft_loops=1 + i,
                 draft_ahead=i, logprobs=1, **ASKS[ask])
        for i, ask in enumerate(["sampled", "greedy", "penalties"])
    ]  # fmt: skip
    for calm in (0.3, 1.0):
        got = check(lambda calm=calm: toys.engine(variant, calm, prefill_chunk=192), runs)
        for one in got.values():
            assert len(one.tokens) == one.accepted_tokens + one.rounds
        assert any(one.rounds > 1 for one in got.values())


def test_a_wave_gives_a_token_per_segment_and_counts_its_rows(toys: Toys) -> None:
    rng = random.Random(8)
    num_late = 0
    for i, calm in enumerate((0.02, 0.3, 1.0)):
        engine = toys.engine(
            "gelu_tanh", calm
        )  # no coda: depth changes little more than the state's length
        run = make_run(
            1,
            random_prompt(rng, 512, 30),
            loops=LOOPS,
            max_tokens=50,
            temperature=0.8 * (i == 1),
            **WAYS["pipelined"],
        )
        engine.add(run)
        first = engine.step()
        assert [len(o.tokens) for o in first.outputs] == [1] and first.core_passes == LOOPS
        steps = num_rows = core_loops = tokens = accepted = rounds = drafted = 0
        while engine.has_work():
            result = engine.step()
            assert result.core_passes == 1
            steps += 1
            num_rows += result.num_rows
            num_late += not result.outputs
            for output in result.outputs:
                assert len(output.tokens) == 1
                tokens, accepted = tokens + 1, accepted + output.accepted_tokens
                rounds, drafted = rounds + output.rounds, drafted + output.drafted_tokens
                core_loops += output.core_loops
        assert tokens == 49 and core_loops == num_rows  # each row of a step ran one loop
        assert 1 + tokens == accepted + rounds and drafted >= accepted
        if calm == 0.02:
            assert rounds == 1 and steps <= 49 + LOOPS  # nothing was dropped: one pass per token
        if calm == 1.0:
            assert rounds > 1 and steps < 49 * LOOPS
    assert num_late > 0


def test_waves_end_where_plain_rows_come_and_begin_again_after_them(toys: Toys) -> None:
    rng = random.Random(9)
    waves = [
        make_run(i, random_prompt(rng, 512, 20), seed=i, loops=LOOPS, max_tokens=60, temperature=0.8, **WAYS["pipelined"])
        for i in range(2)
    ]  # fmt: skip
    plain = [(10, make_run(5, random_prompt(rng, 512, 70), loops=3, max_tokens=6))]
    crowd = [
        (25, make_run(20 + i, random_prompt(rng, 512, 5), loops=2, max_tokens=5)) for i in range(9)
    ]
    check(lambda: toys.engine(max_rows=12), waves, plain + crowd)


@cases("ask,way", ASKS, WAYS, one_in=2)
def test_every_way_of_sampling_gives_the_tokens_of_plain_decoding(
    toys: Toys, ask: str, way: str
) -> None:
    rng = random.Random(ask)
    runs = [
        make_run(i, random_prompt(rng, 512, 50 + i), seed=rng.getrandbits(64), loops=LOOPS, max_tokens=40, logprobs=2, **ASKS[ask],
                 **WAYS[way])
        for i in range(4)
    ]  # fmt: skip
    got = check(toys.engine, runs)
    assert sum(one.accepted_tokens for one in got.values()) > 0
    if ask == "stopping":
        assert "stop" in {one.finish_reason for one in got.values()}


@pytest.mark.parametrize(("way", "calm"), [("chain", 0.3), ("tree", 0.8), ("chain", 0.8)])
def test_all_outcomes_of_a_round_occur_and_the_books_are_exact(
    toys: Toys, way: str, calm: float
) -> None:
    rng = random.Random(way)
    engine = toys.engine(calm=calm)
    outcomes: Counter[str] = Counter()
    ahead = WAYS[way]["draft_ahead"]
    for i in range(3):
        ask = {"temperature": 0.8} if i else {}
        run = make_run(
            i, random_prompt(rng, 512, 4), seed=i, loops=LOOPS, max_tokens=60, **ask, **WAYS[way]
        )
        engine.add(run)
        num_tokens = accepted = drafted = rounds = core_loops = 0
        while engine.has_work():
            result = engine.step()
            for output in result.outputs:
                num_tokens += len(output.tokens)
                accepted += output.accepted_tokens
                drafted += output.drafted_tokens
                rounds += output.rounds
                core_loops += output.core_loops
                if output.rounds:
                    assert output.rounds == 1 and len(output.tokens) == output.accepted_tokens + 1
                    kind = {0: "none", ahead: "full"}.get(output.accepted_tokens, "partial")
                    outcomes[kind] += 1
                    levels = {"chain": 3, "tree": 3 + 4 + 4}[way]
                    if num_tokens < 60 - ahead:
                        assert output.drafted_tokens == levels
                        assert result.core_passes == ahead * WAYS[way]["draft_loops"] + LOOPS
        assert num_tokens == 60 == 1 + accepted + rounds
        assert core_loops == LOOPS * (
            1 + drafted + rounds
        )  # every row, drafted or not, ran all loops once
    assert outcomes["full"] and outcomes["none"] and outcomes["partial"], outcomes


@cases("way", WAYS, one_in=3)
def test_speculation_survives_preemption_prefix_hits_and_replay(toys: Toys, way: str) -> None:
    rng = random.Random(7)
    prompts = [random_prompt(rng, 512, 90) for _ in range(4)]
    runs = [
        make_run(i, prompt, seed=i, loops=3, max_tokens=60, temperature=0.8, **WAYS[way]) for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    expected = collect(toys.engine(), [plainly(r) for r in runs])
    tight = toys.engine(num_blocks=8 * 4)
    got = collect(tight, runs)
    assert tight.series()["preemptions_total"] > 0
    for run, done in zip(runs, (1, 20, 38, 59), strict=True):
        same(got[run.sequence_id], expected[run.sequence_id])
        resumed = replace(run, emitted=Tokens(expected[run.sequence_id].tokens[:done]))
        after = collect(toys.engine(), [resumed])[run.sequence_id]
        assert after.tokens == expected[run.sequence_id].tokens[done:]
    engine = toys.engine()
    held = HeldPrefix(bytes(16), PrefixKey(), Tokens(prompts[0][:64]), 0, 0)
    collect(engine, [replace(runs[0], store=held)])
    hit = collect(engine, [replace(runs[0], prefix_id=bytes(16), prefix_len=64)])[0]
    assert hit.cached_tokens == 64
    same(hit, expected[0])


MODES = [
    ("pre", "fp16", "per_loop"), ("pre", "int8", "last_loop"), ("pre", "h_int4", "per_loop"), ("alibi", "h_int4", "last_loop"),
    ("huginn", "int4", "per_loop"), ("alibi", "h", "per_loop"), ("ouro", "fp32", "last_loop"),
]  # fmt: skip


@cases("variant,kv_format,kv_share,way", MODES, WAYS, one_in=3)
def test_cut_and_folded_caches_give_the_tokens_of_plain_decoding(
    toys: Toys, variant: str, kv_format: str, kv_share: str, way: str
) -> None:
    """Over block edges, with a window too; sequences that begin among the sinks included."""
    rng = random.Random(variant + kv_format)
    runs = [
        make_run(i, random_prompt(rng, 512, length), seed=i, loops=3, max_tokens=40, cache_window=50 * (i % 2), **ASKS["sampled"],
                 **WAYS[way])
        for i, length in enumerate([1, 40, 100])
    ]  # fmt: skip
    got = check(lambda: toys.engine(variant, kv_format=kv_format, kv_share=kv_share), runs)
    assert sum(one.drafted_tokens for one in got.values()) > 0


EXITS = [
    ("pre", {"exit_kind": "latent", "exit_threshold": 0.5, "min_loops": 2}),
    ("gate_coda", {"exit_kind": "gate", "exit_threshold": 0.7}),
    ("gelu_tanh", {"exit_kind": "kl", "exit_threshold": 0.05}),  # without a coda
]


@cases("variant,leaving,exit_kv,way", EXITS, ["complete", "copy"], ["chain", "tree"], one_in=3)
def test_adaptive_exits_give_the_tokens_of_plain_decoding(
    toys: Toys, variant: str, leaving: dict[str, Any], exit_kv: str, way: str
) -> None:
    rng = random.Random(variant)
    runs = [
        make_run(i, random_prompt(rng, 512, 50), seed=i, loops=LOOPS, max_tokens=25, exit_kv=exit_kv, **leaving, **ASKS[ask], **WAYS[way])
        for i, ask in enumerate(["greedy", "sampled"])
    ]  # fmt: skip
    check(lambda: toys.engine(variant), runs)


@way
def test_nothing_is_left_when_a_sequence_is_aborted(toys: Toys, way: str) -> None:
    rng = random.Random(5)
    for steps in range(2, 9, 2):
        engine = toys.engine()
        for i in range(3):
            engine.add(
                make_run(i, random_prompt(rng, 512, 62), loops=LOOPS, max_tokens=60, **WAYS[way])
            )
        for _ in range(steps):
            engine.step()
            held = sum(
                -(-(len(s.tokens)) // 64) * (LOOPS + engine.cache.num_extra_tables)
                for s in engine._running
            )
            assert engine.cache.pool.num_used <= held + 3 * (LOOPS + engine.cache.num_extra_tables)
        for i in range(3):
            engine.abort(i, 1)
        assert engine.cache.pool.num_used == 0 and engine.cache.num_free_slots == 8


@pytest.mark.parametrize("num_columns", [4, 100])
def test_a_guess_makes_nobody_leave(toys: Toys, num_columns: int) -> None:
    """The pool holds just what both sequences need, or all it wants: a sequence at its longest has no places beyond."""
    rng = random.Random(6)
    tables = LOOPS + toys.engine().cache.num_extra_tables
    engine = toys.engine(num_blocks=num_columns * tables, max_seq_len=128)
    runs = [
        make_run(i, random_prompt(rng, 512, 90), loops=LOOPS, max_tokens=38, **WAYS["tree"])
        for i in range(2)
    ]
    got = collect(engine, runs)
    assert engine.series()["preemptions_total"] == 0
    expected = collect(toys.engine(), [plainly(run) for run in runs])
    for run in runs:
        same(got[run.sequence_id], expected[run.sequence_id])
        assert got[run.sequence_id].drafted_tokens > 38


def test_guessing_stops_where_it_does_not_pay(toys: Toys) -> None:
    rng = random.Random(12)
    runs = [
        make_run(i, random_prompt(rng, 512, 20), loops=LOOPS, max_tokens=length, **WAYS["chain"])
        for i, length in enumerate((12, 12, 40))
    ]
    crowded = collect(toys.engine(max_speculating=2), runs)
    assert [crowded[i].drafted_tokens for i in range(2)] == [0, 0]
    assert crowded[2].drafted_tokens > 0  # when the others were done
    free = collect(toys.engine(max_speculating=3), runs)
    for run in runs:
        assert free[run.sequence_id].drafted_tokens > 0
        same(crowded[run.sequence_id], free[run.sequence_id])


def test_the_pace_follows_acceptance() -> None:
    sure, unsure = Pace(1, 8), Pace(4, 8)
    for _ in range(40):
        sure.note(5, False)
        unsure.note(0, True)
    assert sure.ahead() == MAX_AHEAD
    lengths = [unsure.ahead() for _ in range(30)]
    assert set(lengths) == {0, 1} and 1 <= lengths.count(1) <= 3  # it goes on trying, rarely
    for _ in range(40):
        sure.note(1, True)
    assert 0.4 < sure.hit_rate < 0.6 and 1 <= sure.ahead() <= 3


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"speculation": "chain", "draft_loops": 0}, "1 to 3"),
        ({"speculation": "chain", "draft_loops": 4}, "1 to 3"),
        ({"speculation": "chain", "draft_loops": 1, "loops": 1}, "at least 2"),
        ({"speculation": "chain", "draft_loops": 1, "draft_ahead": 65}, "1 to 64"),
        ({"speculation": "tree", "draft_loops": 1, "branches": 0}, "1 to 16"),
        ({"speculation": "tree", "draft_loops": 1, "branches": 17}, "1 to 16"),
        (
            {
                "speculation": "pipelined",
                "draft_loops": 1,
                "exit_kind": "latent",
                "exit_threshold": 0.1,
            },
            "adaptive exit",
        ),
        ({"speculation": "pipelined", "draft_loops": 1, "warm_start": True}, "side by side"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    toys: Toys, params: dict[str, Any], words: str
) -> None:
    engine = toys.engine("learned")
    engine.add(make_run(1, [1, 2, 3], **({"loops": LOOPS} | params)))
    (output,) = engine.step().outputs
    assert output.error_code == "invalid_request" and words in output.error_message
