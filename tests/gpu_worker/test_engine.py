"""The engine against the oracle: every architecture, any chunking, batch mix and order of arrival give the same, right tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_worker import naive
from gpu_worker.model import Model
from kernels import cpu
from scripts.make_toy_artifact import VARIANTS
from tests.gpu_worker.engine_helpers import (
    DEVICE,
    assert_greedy,
    collect,
    engine_weights,
    make_engine,
    make_run,
    random_prompt,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


def mixed_runs(rng: random.Random, vocab: int, max_loops: int, count: int = 6) -> list:
    """Runs of all lengths (block edges included) and depths, half of them sampled."""
    lengths = [1, 63, 64, 65, 130] + [rng.randrange(1, 180) for _ in range(count)]
    rng.shuffle(lengths)
    runs = []
    for i in range(count):
        how = (
            {}
            if i % 2
            else {"temperature": 0.8, "top_k": rng.choice([0, 20]), "top_p": rng.choice([1.0, 0.9])}
        )
        loops = rng.randrange(1, max_loops + 1)
        runs.append(
            make_run(
                i,
                random_prompt(rng, vocab, lengths[i]),
                seed=rng.getrandbits(64),
                loops=loops,
                max_tokens=rng.randrange(1, 12),
                **how,
            )
        )
    return runs


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_gives_the_oracles_tokens_in_any_batch(
    shared: Path, variant: str
) -> None:
    rng = random.Random(variant)
    engine = make_engine(shared, variant)
    config = engine.model.config
    runs = mixed_runs(rng, config.arch.vocab, min(4, config.loop.hard_max))
    if config.loop.state_init.kind == "normal":
        runs = [replace(r, params=replace(r.params, init_seed=7 + r.sequence_id % 2)) for r in runs]
    together = collect(engine, runs)
    for run in runs:
        if run.params.temperature == 0:
            assert_greedy(engine, run, together[run.sequence_id].tokens)
    other = make_engine(shared, variant, prefill_chunk=64, max_rows=3)
    arrivals = [(rng.randrange(8), run) for run in runs]
    for run_id, got in collect(other, arrivals=arrivals).items():
        assert got.tokens == together[run_id].tokens
    assert other.cache.pool.num_used == 0


@pytest.mark.parametrize("variant", ["pre", "huginn", "ouro"])
def test_a_sequence_alone_and_in_a_batch_has_the_same_bits(shared: Path, variant: str) -> None:
    """Log-probabilities too, which are made of all logits."""
    rng = random.Random(3)
    engine = make_engine(shared, variant)
    runs = [
        replace(r, params=replace(r.params, logprobs=4))
        for r in mixed_runs(rng, engine.model.config.arch.vocab, 4, 5)
    ]
    together = collect(engine, runs)
    for run in runs:
        alone = collect(make_engine(shared, variant, prefill_chunk=rng.choice([64, 192])), [run])[
            run.sequence_id
        ]
        assert alone.tokens == together[run.sequence_id].tokens
        assert alone.logprobs == together[run.sequence_id].logprobs
        assert len(alone.logprobs) == len(alone.tokens) and all(
            len(t.top_ids) == 4 for t in alone.logprobs
        )


def test_threads_change_no_bit(shared: Path) -> None:
    runs = [
        replace(r, params=replace(r.params, logprobs=2))
        for r in mixed_runs(random.Random(4), 512, 4)
    ]
    one = collect(make_engine(shared, "learned"), runs)
    try:
        three = collect(make_engine(shared, "learned", threads=3), runs)
    finally:
        cpu.set_threads(1)
        torch.set_num_threads(1)
    for run in runs:
        got, expected = three[run.sequence_id], one[run.sequence_id]
        assert (got.tokens, got.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_stored_weights_give_the_bits_of_converted_ones(shared: Path, dtype: str) -> None:
    """Weights are read as they are stored; the logits are those of the weights in fp32, and the oracle's.

    On a GPU a channel's int8 scale multiplies its finished sum, so that the last bits may differ there.
    """
    for variant in ("learned", "factorised", "ouro"):
        engine = make_engine(shared, variant, {"dtype": dtype})
        run = make_run(1, random_prompt(random.Random(1), 512, 70), loops=3, logprobs=3)
        got = collect(engine, [run])[1]
        assert_greedy(engine, run, got.tokens)
        engine.model = Model(engine.model.config, engine_weights(engine), DEVICE)
        again = collect(engine, [run])[1]
        assert again.tokens == got.tokens
        if (dtype, DEVICE) != ("int8", "cuda"):
            assert again.logprobs == got.logprobs


def test_log_probabilities_are_the_oracles(shared: Path) -> None:
    engine = make_engine(shared, "gqa")
    prompt = random_prompt(random.Random(5), 512, 150)
    run = make_run(1, prompt, loops=3, max_tokens=3, logprobs=2, prompt_logprobs=1)
    got = collect(engine, [run])[1]
    logits = naive.forward(engine.model.config, engine_weights(engine), [*prompt, *got.tokens], 3)
    expected = logits.log_softmax(-1)
    assert got.prompt_logprobs[0] is None and len(got.prompt_logprobs) == len(prompt)
    for i, scored in enumerate([*got.prompt_logprobs, *got.logprobs]):
        if scored is not None:
            token = [*prompt, *got.tokens][i]
            assert scored.logprob == pytest.approx(float(expected[i - 1, token]), abs=1e-4)
            assert scored.top_logprobs[0] == pytest.approx(float(expected[i - 1].max()), abs=1e-4)


def test_replay_goes_on_where_the_sequence_was(shared: Path) -> None:
    """Whatever had been emitted when a worker was lost, the rest is the same, and only the rest is sent."""
    rng = random.Random(11)
    for variant in ("pre", "huginn"):
        engine = make_engine(shared, variant)
        prompt = random_prompt(rng, 512, 100)
        whole = make_run(
            1, prompt, loops=3, max_tokens=80, temperature=0.7, frequency_penalty=0.4, seed=99
        )
        tokens = collect(engine, [whole])[1].tokens
        assert len(tokens) == 80
        for done in (1, 27, 28, 29, 63, 79):
            rest = collect(engine, [replace(whole, emitted=type(whole.emitted)(tokens[:done]))])[1]
            assert rest.tokens == tokens[done:]


def test_a_window_hides_what_lies_before_it(shared: Path) -> None:
    """Against the oracle under the same visibility: the last `cache_window` keys and the first four."""
    for variant in ("pre", "alibi"):
        engine = make_engine(shared, variant)
        prompt = random_prompt(random.Random(2), 512, 140)
        run = make_run(1, prompt, loops=2, max_tokens=6, cache_window=20, prompt_logprobs=0)
        got = collect(engine, [run])[1]
        tokens = [*prompt, *got.tokens]
        i, j = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))[None, :]
        visible = (j > i - 20) | (j < 4)
        expected = naive.forward(
            engine.model.config, engine_weights(engine), tokens, 2, visible=visible
        ).log_softmax(-1)
        for p in range(1, 140):
            scored = got.prompt_logprobs[p]
            assert scored is not None and scored.logprob == pytest.approx(
                float(expected[p - 1, tokens[p]]), abs=1e-4
            )
        for n, token in enumerate(got.tokens):
            row = expected[139 + n]
            assert row[token] >= row.max() - 1e-3


def test_ends(shared: Path) -> None:
    engine = make_engine(shared, "pre")
    prompt = random_prompt(random.Random(1), 512, 30)
    free = collect(engine, [make_run(1, prompt, max_tokens=10)])[1]
    assert free.finish_reason == "length" and len(free.tokens) == 10 and free.core_loops == 20
    stop = free.tokens[4]
    first = free.tokens.index(stop)
    stopped = collect(engine, [make_run(1, prompt, max_tokens=10, stop_token_ids=(stop,))])[1]
    assert stopped.finish_reason == "stop" and stopped.tokens == free.tokens[: first + 1]
    later = collect(
        engine, [make_run(1, prompt, max_tokens=10, stop_token_ids=(stop,), min_tokens=10)]
    )[1]
    assert later.finish_reason == "length" and stop not in later.tokens
    nothing = collect(engine, [make_run(1, prompt, max_tokens=0, prompt_logprobs=0)])[1]
    assert (
        nothing.finish_reason == "length"
        and nothing.tokens == []
        and len(nothing.prompt_logprobs) == 30
    )


@pytest.mark.parametrize(
    "change",
    [
        {"loops": 9},
        {"loops": 0},
        {"max_tokens": 254},
        {"kv_cache_mode": "int3"},
        {"logit_bias": ((512, 1.0),)},
        {"exit_kind": "kl9"},
    ],
)
def test_a_run_that_cannot_be_done_ends_with_an_error_and_harms_nobody(
    shared: Path, change: dict
) -> None:
    engine = make_engine(shared, "pre")
    good = make_run(1, [5, 6, 7])
    got = collect(engine, [good, make_run(2, [1, 2, 3], **change)])
    assert got[2].finish_reason == "error" and got[2].error_code in (
        "invalid_request",
        "context_length_exceeded",
    )
    assert got[1].tokens == collect(engine, [good])[1].tokens
    assert engine.cache.pool.num_used == 0 and engine.free_rows == 8
