"""The engine when memory is short: prefixes, preemption, cancels. Tokens never change, and nothing leaks."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_worker.engine import Engine
from kernels.layout import BLOCK_SIZE
from scheduler.messages import HeldPrefix, PrefixKey, Tokens
from tests.gpu_worker.engine_helpers import collect, make_engine, make_run, random_prompt


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


def prefix_of(prompt: list[int], length: int, name: str = "", tag: int = 0) -> HeldPrefix:
    return HeldPrefix(bytes([tag]) * 16, PrefixKey(name=name), Tokens(prompt[:length]), 0, 0)


def books_are_right(engine: Engine) -> None:
    pool = engine.cache.pool
    tables = engine.cache.host_tables[: engine.cache.spare_slot]
    owners = [0] * pool.num_blocks
    for block in tables[tables >= 0].tolist():
        owners[block] += 1
    for entry in engine.prefixes._entries.values():
        for block in entry.blocks.ravel().tolist():
            owners[block] += 1
    assert owners == pool.refs.tolist()
    assert pool.num_free == owners.count(0)


@pytest.mark.parametrize("variant", ["pre", "gelu_tanh", "huginn"])
def test_a_prefix_hit_changes_no_token_and_skips_the_work(shared: Path, variant: str) -> None:
    rng = random.Random(variant)
    engine = make_engine(shared, variant)
    prompt = random_prompt(rng, 512, 200)
    for length in (64, 128, 192):
        run = make_run(1, prompt, loops=3, temperature=0.9, logprobs=3)
        cold = collect(make_engine(shared, variant), [run])[1]
        collect(
            engine,
            [replace(make_run(2, prompt, loops=3, max_tokens=1), store=prefix_of(prompt, length))],
        )
        assert [len(h.tokens) for h in engine.held_prefixes()] == [length]
        engine.add(replace(run, prefix_id=bytes(16), prefix_len=length))
        rows = engine.step().num_rows
        assert rows == min(200 - length, 128)
        engine.reset()
        warm = collect(engine, [replace(run, prefix_id=bytes(16), prefix_len=length)])[1]
        assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
        assert (warm.cached_tokens, cold.cached_tokens) == (length, 0)
        books_are_right(engine)
    engine.drop_prefixes([bytes(16)])
    assert engine.step().dropped_prefixes == [bytes(16)] and engine.cache.pool.num_used == 0


def test_a_whole_prompt_in_the_pool_still_runs_its_last_block(shared: Path) -> None:
    engine = make_engine(shared)
    prompt = random_prompt(random.Random(1), 512, 128)
    first = collect(engine, [make_run(1, prompt, store=prefix_of(prompt, 128))])[1]
    again = collect(engine, [make_run(1, prompt, prefix_id=bytes(16), prefix_len=128)])[1]
    assert again.tokens == first.tokens and again.cached_tokens == 64


def test_the_depth_rule(shared: Path) -> None:
    """Without a coda a deeper entry serves fewer loops; with one it serves equal loops only; a shallower one never serves."""
    prompt = random_prompt(random.Random(2), 512, 100)
    for variant, loops, is_hit in [
        ("gelu_tanh", 2, True),
        ("gelu_tanh", 5, False),
        ("pre", 2, False),
        ("pre", 4, True),
    ]:
        engine = make_engine(shared, variant)
        collect(engine, [make_run(1, prompt, loops=4, store=prefix_of(prompt, 64))])
        run = make_run(2, prompt, loops=loops)
        got = collect(engine, [replace(run, prefix_id=bytes(16), prefix_len=64)])[2]
        assert (got.cached_tokens == 64) is is_hit
        assert got.tokens == collect(make_engine(shared, variant), [run])[2].tokens


def test_a_prefix_of_other_tokens_is_not_used(shared: Path) -> None:
    engine = make_engine(shared)
    prompt = random_prompt(random.Random(3), 512, 100)
    collect(engine, [make_run(1, prompt, store=prefix_of(prompt, 64))])
    other = [(prompt[0] + 1) % 512, *prompt[1:]]
    run = make_run(2, other, prefix_id=bytes(16), prefix_len=64)
    got = collect(engine, [run])[2]
    assert (
        got.cached_tokens == 0
        and got.tokens == collect(make_engine(shared), [make_run(2, other)])[2].tokens
    )


def test_eviction_takes_what_was_never_hit_first_and_registered_entries_last(shared: Path) -> None:
    engine = make_engine(
        shared, num_blocks=16, max_seq_len=192
    )  # three tables: 3 blocks per 64 positions
    prompts = [random_prompt(random.Random(i), 512, 65) for i in range(4)]
    for i, prompt in enumerate(prompts[:3]):
        collect(
            engine,
            [
                make_run(
                    i, prompt, store=prefix_of(prompt, 64, name="kept" if i == 0 else "", tag=i)
                )
            ],
        )
    collect(
        engine, [make_run(9, prompts[1], prefix_id=bytes([1]) * 16, prefix_len=64)]
    )  # 1 is hit: 2 goes first
    assert engine.free_blocks == 16 - 3
    engine.add(make_run(10, prompts[3] + prompts[3][:10], max_tokens=30))
    dropped = engine.step().dropped_prefixes
    assert dropped == []
    engine.add(make_run(11, prompts[3][1:], max_tokens=20))
    seen = []
    while engine.has_work():
        seen += engine.step().dropped_prefixes
        books_are_right(engine)
    assert seen[0] == bytes([2]) * 16 and bytes([0]) * 16 not in seen


def test_a_prefix_dropped_while_in_use_harms_nobody(shared: Path) -> None:
    prompt = random_prompt(random.Random(4), 512, 150)
    run = make_run(1, prompt, max_tokens=40)
    expected = collect(make_engine(shared), [run])[1].tokens
    engine = make_engine(shared)
    collect(engine, [make_run(5, prompt, store=prefix_of(prompt, 128))])
    engine.add(replace(run, prefix_id=bytes(16), prefix_len=128))
    engine.step()
    engine.drop_prefixes([bytes(16)])
    others = [
        make_run(i, random_prompt(random.Random(i), 512, 150), max_tokens=40) for i in range(2, 5)
    ]
    for other in others:
        engine.add(other)
    tokens = []
    while engine.has_work():
        for output in engine.step().outputs:
            tokens += output.tokens if output.sequence_id == 1 else []
    assert tokens == expected[-len(tokens) :] and len(tokens) >= 39
    assert engine.cache.pool.num_used == 0


@pytest.mark.parametrize("variant", ["pre", "huginn"])
def test_preemption_and_replay_change_no_token(shared: Path, variant: str) -> None:
    rng = random.Random(7)
    runs = [
        make_run(i, random_prompt(rng, 512, rng.randrange(20, 120)), loops=3, max_tokens=rng.randrange(40, 90), seed=i,
                 temperature=0.8 * (i % 2), presence_penalty=0.5 * (i % 3))
        for i in range(5)
    ]  # fmt: skip
    roomy = collect(make_engine(shared, variant), runs)
    tight = make_engine(shared, variant, num_blocks=25)  # a sequence may take up to 16
    got = collect(tight, runs)
    assert tight.series()["preemptions_total"] > 0
    for run in runs:
        assert got[run.sequence_id].tokens == roomy[run.sequence_id].tokens
        assert got[run.sequence_id].finish_reason == "length"
    assert tight.cache.pool.num_used == 0


def test_the_youngest_leaves_first(shared: Path) -> None:
    engine = make_engine(
        shared, num_blocks=18, max_seq_len=192
    )  # 3 tables per sequence: room for six blocks of 64 positions
    for i in range(3):
        engine.add(make_run(i, random_prompt(random.Random(i), 512, 100), max_tokens=60))
    preempted = []
    for _ in range(40):
        preempted += [
            o.sequence_id for o in engine.step().outputs if o.finish_reason == "preempted"
        ]
    assert preempted == [2]


def test_registered_prefixes_give_way_to_a_sequence_that_is_alone(shared: Path) -> None:
    engine = make_engine(shared, num_blocks=10, max_seq_len=128)
    prompt = random_prompt(random.Random(8), 512, 70)
    collect(engine, [make_run(1, prompt, max_tokens=1, store=prefix_of(prompt, 64, name="system"))])
    other = random_prompt(random.Random(9), 512, 70)
    got = collect(engine, [make_run(2, other, loops=4, max_tokens=50)])[2]
    assert got.finish_reason == "length" and len(got.tokens) == 50 and engine.held_prefixes() == []


@pytest.mark.parametrize("seed", range(4))
def test_nothing_leaks_whatever_happens(shared: Path, seed: int) -> None:
    """Random arrivals, cancels, prefix stores, drops and resets on a tight pool; the books are right after every step."""
    rng = random.Random(seed)
    engine = make_engine(shared, num_blocks=30, prefill_chunk=64)
    prompts = [random_prompt(rng, 512, rng.choice([10, 64, 130])) for _ in range(4)]
    live: list[int] = []
    for step in range(120):
        roll = rng.random()
        if roll < 0.3:
            prompt = rng.choice(prompts)
            length = len(prompt) // BLOCK_SIZE * BLOCK_SIZE
            tag = prompts.index(prompt)
            store = prefix_of(prompt, length, tag=tag) if length and rng.random() < 0.5 else None
            hit = (
                {"prefix_id": bytes([tag]) * 16, "prefix_len": length} if rng.random() < 0.5 else {}
            )
            engine.add(
                make_run(
                    step,
                    prompt,
                    loops=rng.choice([2, 2, 3]),
                    max_tokens=rng.randrange(0, 60),
                    store=store,
                    **hit,
                )
            )
            live.append(step)
        elif roll < 0.4 and live:
            engine.abort(live.pop(rng.randrange(len(live))), 1)
        elif roll < 0.44:
            engine.drop_prefixes([bytes([rng.randrange(4)]) * 16])
        elif roll < 0.46:
            engine.reset()
            live.clear()
        engine.step()
        books_are_right(engine)
        assert 0 <= engine.free_blocks <= 30
    engine.reset()
    engine.drop_prefixes([h.prefix_id for h in engine.held_prefixes()])
    assert (
        engine.cache.pool.num_used == 0
        and engine.free_rows == 8
        and engine.cache.num_free_slots == 8
    )
