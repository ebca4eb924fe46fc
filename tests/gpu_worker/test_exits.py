"""Adaptive exits and warm start against a slow restatement: one token at a time, every earlier K and V recomputed from its rule."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from scheduler.messages import Tokens
from tests.gpu_worker.engine_helpers import collect, make_engine, make_run, random_prompt
from tests.gpu_worker.slow_decoder import retell
from tests.gpu_worker.test_engine_pressure import prefix_of
from tests.gpu_worker.test_goldens_engine import GOLDENS, run_prompts
from tests.gpu_worker.test_goldens_engine import make_engine as make_golden_engine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


CASES = [
    ("ouro", {"exit_kind": "gate", "exit_threshold": 0.6}),
    ("gate_coda", {"exit_kind": "gate", "exit_threshold": 0.7, "min_loops": 2}),
    ("pre", {"exit_kind": "latent", "exit_threshold": 0.36}),
    ("learned", {"exit_kind": "latent", "exit_threshold": 0.9, "min_loops": 3}),
    ("relu2", {"exit_kind": "kl", "exit_threshold": 0.7}),
    ("gelu_tanh", {"exit_kind": "kl", "exit_threshold": 0.08, "min_loops": 2}),
    ("learned", {"warm_start": True}),
    ("huginn", {"warm_start": True}),
    ("huginn", {"warm_start": True, "exit_kind": "latent", "exit_threshold": 0.95}),
]


# the whole matrix takes minutes on a busy machine; these reach every line
QUICK = [
    case if i in (1, 6, 8) else pytest.param(*case, marks=pytest.mark.slow)
    for i, case in enumerate(CASES)
]


@pytest.mark.parametrize("exit_kv", ["complete", "copy"])
@pytest.mark.parametrize(("variant", "how"), CASES)
def test_tokens_and_loops_are_those_of_the_definition(
    shared: Path, variant: str, how: dict[str, Any], exit_kv: str
) -> None:
    engine = make_engine(shared, variant)
    prompt = random_prompt(random.Random(variant), 512, 20)
    run = make_run(1, prompt, loops=5, max_tokens=12, exit_kv=exit_kv, **how)
    got = collect(engine, [run])[1]
    told = retell(engine, run, got.tokens)
    assert max(told.margins) < 2e-3
    assert got.core_loops == told.loops
    if "exit_kind" in how:
        full = len(got.tokens) * 5
        assert got.core_loops < full if exit_kv == "copy" else got.core_loops == full


@pytest.mark.parametrize(("variant", "how"), QUICK)
def test_exits_and_warm_starts_are_the_same_alone_in_batches_and_after_preemption(
    shared: Path, variant: str, how: dict[str, Any]
) -> None:
    rng = random.Random(variant)
    runs = []
    for i, length in enumerate((64, 30, 127, 128)):
        settings = {
            "loops": 4,
            "max_tokens": rng.randrange(20, 50),
            **how,
            "exit_kv": ("copy", "complete")[i // 2],
        }
        settings |= {"temperature": 0.8, "frequency_penalty": 0.3} if i % 2 else {}
        runs.append(make_run(i, random_prompt(rng, 512, length), seed=i, **settings))
    plain = make_run(9, random_prompt(rng, 512, 40), loops=3, max_tokens=30)
    engine = make_engine(shared, variant)
    together = collect(engine, [*runs, plain])
    assert together[9].tokens == collect(engine, [plain])[9].tokens
    tight = collect(make_engine(shared, variant, num_blocks=26, prefill_chunk=64), runs)
    for run in runs:
        tokens = together[run.sequence_id].tokens
        assert collect(engine, [run])[run.sequence_id].tokens == tokens
        assert tight[run.sequence_id].tokens == tokens
        done = len(tokens) // 2
        rest = collect(engine, [replace(run, emitted=Tokens(tokens[:done]))])[run.sequence_id]
        assert rest.tokens == tokens[done:]


@pytest.mark.parametrize(("variant", "how"), CASES)
def test_what_a_prompt_leaves_behind_knows_nothing_of_exits(
    shared: Path, variant: str, how: dict[str, Any]
) -> None:
    """Its last token may have been read early; a later prompt that starts from its blocks has the tokens of a cold one."""
    prompt = random_prompt(random.Random(variant), 512, 128)
    engine = make_engine(shared, variant)
    keeper = make_run(1, prompt, loops=4, max_tokens=3, store=prefix_of(prompt, 128), **how)
    collect(engine, [keeper])
    for settings in ({}, how):
        run = make_run(2, [*prompt, 7, 8, 9], loops=4, max_tokens=12, logprobs=2, **settings)
        cold = collect(make_engine(shared, variant), [run])[2]
        warm = collect(engine, [replace(run, prefix_id=bytes(16), prefix_len=128)])[2]
        assert warm.cached_tokens == 128
        assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)


def test_upstreams_tokens_with_exits(shared: Path) -> None:
    """Ouro's own early exit at 0.5: every K and V at full depth, each token read at its exit loop."""
    expected = load_file(GOLDENS / "ouro-tiny" / "expected.safetensors")
    engine = make_golden_engine(shared, "ouro-tiny")
    how = {"loops": 4, "exit_kind": "gate", "exit_threshold": 0.5}
    for row, got in enumerate(run_prompts(engine, expected["input_ids"].tolist(), **how)):
        assert got.tokens == expected["greedy_ids.q0.5"][row].tolist()
    off = run_prompts(engine, expected["input_ids"].tolist(), **how | {"exit_threshold": 1.0})
    for row, got in enumerate(off):
        assert got.tokens == expected["greedy_ids.loops4"][row].tolist()


@pytest.mark.parametrize(
    ("variant", "how", "word"),
    [
        ("pre", {"exit_kind": "gate", "exit_threshold": 0.5}, "exit gate"),
        ("pre", {"warm_start": True}, "warm start"),
        ("ouro", {"warm_start": True}, "warm start"),
        ("learned", {"warm_start": True, "speculation": "chain"}, "side by side"),
        ("pre", {"exit_kind": "kl", "exit_threshold": 0.1, "speculation": "tree"}, "side by side"),
        ("pre", {"min_loops": 5}, "min_loops"),
        ("pre", {"exit_kv": "keep"}, "exit_kv"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(
    shared: Path, variant: str, how: dict[str, Any], word: str
) -> None:
    engine = make_engine(shared, variant)
    engine.add(make_run(1, [1, 2, 3], loops=4, **how))
    (output,) = engine.step().outputs
    assert output.error_code == "invalid_request" and word in output.error_message
