"""Upstream's numbers come out of the engine too: golden checkpoints through the converter, the artifact and the paged cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker import artifact
from gpu_worker.convert import convert
from gpu_worker.engine import Engine, EngineOptions
from scheduler.messages import TokenLogprob
from tests.gpu_worker.engine_helpers import Got, collect, make_run

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
NUM_GREEDY = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("goldens")


def make_engine(folder: Path, name: str) -> Engine:
    path = folder / f"{name}.tinyloop"
    if not path.exists():
        convert(GOLDENS / name, path)
    options = EngineOptions(max_rows=8, num_blocks=200, max_seq_len=128, prefill_chunk=64)
    return Engine(artifact.load(path), options)


def run_prompts(engine: Engine, prompts: list[list[int]], **params: object) -> list[Got]:
    """All prompts in one batch, with the log-probabilities of the whole vocabulary at every position."""
    everything = engine.artifact.config.arch.vocab
    settings = {
        "max_tokens": NUM_GREEDY,
        "logprobs": everything,
        "prompt_logprobs": everything,
    } | params
    got = collect(engine, [make_run(i, p, **settings) for i, p in enumerate(prompts)])
    return [got[i] for i in range(len(prompts))]


def distribution(scored: TokenLogprob) -> torch.Tensor:
    found = torch.empty(len(scored.top_ids))
    found[list(scored.top_ids)] = torch.tensor(scored.top_logprobs)
    return found


def assert_logits(got: Got, expected: torch.Tensor) -> None:
    """The engine's log-probabilities after each prompt position against upstream's logits (len, vocab)."""
    assert got.prompt_logprobs[0] is None and len(got.prompt_logprobs) == len(expected)
    scored = [*got.prompt_logprobs[1:], got.logprobs[0]]
    found = torch.stack([distribution(s) for s in scored if s is not None])
    torch.testing.assert_close(found, expected.log_softmax(-1), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_ouro(folder: Path, loops: int) -> None:
    expected = load_file(GOLDENS / "ouro-tiny" / "expected.safetensors")
    engine = make_engine(folder, "ouro-tiny")
    for row, got in enumerate(run_prompts(engine, expected["input_ids"].tolist(), loops=loops)):
        assert_logits(got, expected[f"logits.loop{loops}"][row])
        if loops in (2, 4):
            assert got.tokens == expected[f"greedy_ids.loops{loops}"][row].tolist()


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_huginn(folder: Path, steps: int) -> None:
    expected = load_file(GOLDENS / "huginn-tiny" / "expected.safetensors")
    engine = make_engine(folder, "huginn-tiny")
    for row, got in enumerate(run_prompts(engine, expected["input_ids"].tolist(), loops=steps)):
        assert_logits(got, expected[f"logits.steps{steps}"][row])
        if steps == 8:
            assert got.tokens == expected["greedy_ids.steps8"][row].tolist()


LLAMA_LIKE = sorted(p.name for p in GOLDENS.iterdir() if p.name not in ("ouro-tiny", "huginn-tiny"))


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_llama_family(folder: Path, name: str) -> None:
    expected = load_file(GOLDENS / name / "expected.safetensors")
    engine = make_engine(folder, name)
    for row, got in enumerate(run_prompts(engine, expected["input_ids"].tolist(), loops=1)):
        assert_logits(got, expected["logits"][row])
        assert got.tokens == expected["greedy_ids"][row].tolist()


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_ouro_with_its_exit_gate(folder: Path, threshold: float) -> None:
    """Upstream computes all loops of all positions and reads each token at its exit loop: `exit_kv` complete. 1.0 is off."""
    expected = load_file(GOLDENS / "ouro-tiny" / "expected.safetensors")
    engine = make_engine(folder, "ouro-tiny")
    exits = {"exit_kind": "gate", "exit_threshold": threshold, "exit_kv": "complete", "loops": 4}
    want = expected["greedy_ids.q0.5" if threshold < 1 else "greedy_ids.loops4"].tolist()
    assert want != expected["greedy_ids.loops2"].tolist()
    for row, got in enumerate(run_prompts(engine, expected["input_ids"].tolist(), **exits)):
        assert got.tokens == want[row]
