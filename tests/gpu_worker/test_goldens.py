"""Upstream's numbers come out: converter, artifact and naive forward against every field of the golden checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker import artifact, naive
from gpu_worker.artifact import Artifact
from gpu_worker.convert import convert
from gpu_worker.model_config import ModelConfig

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("goldens")
    made = {}
    for source in sorted(GOLDENS.iterdir()):
        convert(source, folder / f"{source.name}.tinyloop")
        made[source.name] = artifact.load(folder / f"{source.name}.tinyloop", verify=True)
    return made


def load(converted: dict[str, Artifact], name: str) -> tuple[ModelConfig, Weights, Weights]:
    found = converted[name]
    return (
        found.config,
        found.tensors(dequantise=True),
        load_file(GOLDENS / name / "expected.safetensors"),
    )


def greedy(
    config: ModelConfig, weights: Weights, prompt: list[int], loops: int, count: int
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(naive.forward(config, weights, tokens, loops)[-1].argmax()))
    return tokens[len(prompt) :]


def test_ouro_states_logits_and_gate(converted: dict[str, Artifact]) -> None:
    config, weights, expected = load(converted, "ouro-tiny")
    assert (config.loop.default, config.loop.trained_max, config.loop.hard_max) == (4, 4, 8)
    assert (config.tokens.bos, config.tokens.eos, config.tokens.pad) == (1, (2,), 0)
    assert config.exit.kind == "gate" and config.exit.threshold is None
    for row, tokens in enumerate(expected["input_ids"].tolist()):
        trace = naive.forward(config, weights, tokens, 4, want="all")
        for loop in range(1, 5):
            torch.testing.assert_close(
                trace.states[loop - 1], expected[f"hidden.loop{loop}"][row], **TOLERANCE
            )
            torch.testing.assert_close(
                trace.logits[loop - 1], expected[f"logits.loop{loop}"][row], **TOLERANCE
            )
        assert trace.gate is not None
        torch.testing.assert_close(trace.gate, expected["exit_lambda"][:, row], **TOLERANCE)
        torch.testing.assert_close(
            naive.exit_distribution(trace.gate), expected["exit_pdf"][:, row], **TOLERANCE
        )
        for threshold in (0.5, 0.9):
            assert torch.equal(
                naive.exit_loops(trace.gate, threshold), expected[f"exit_loop.q{threshold}"][row]
            )
        assert (naive.exit_loops(trace.gate, 1.0) == 4).all()


def test_ouro_greedy_continuations(converted: dict[str, Artifact]) -> None:
    config, weights, expected = load(converted, "ouro-tiny")
    for row, prompt in enumerate(expected["input_ids"].tolist()):
        for loops in (2, 4):
            assert (
                greedy(config, weights, prompt, loops, 16)
                == expected[f"greedy_ids.loops{loops}"][row].tolist()
            )


def test_ouro_greedy_with_exits(converted: dict[str, Artifact]) -> None:
    config, weights, expected = load(converted, "ouro-tiny")
    for row, prompt in enumerate(expected["input_ids"].tolist()):
        tokens = list(prompt)
        for _ in range(16):
            trace = naive.forward(config, weights, tokens, 4, want="all")
            assert trace.gate is not None
            loop = int(naive.exit_loops(trace.gate, 0.5)[-1])
            tokens.append(int(trace.logits[loop - 1, -1].argmax()))
        assert tokens[len(prompt) :] == expected["greedy_ids.q0.5"][row].tolist()


def test_huginn_states_and_logits(converted: dict[str, Artifact]) -> None:
    config, weights, expected = load(converted, "huginn-tiny")
    assert (config.loop.default, config.tokens.bos, config.tokens.eos, config.tokens.pad) == (
        8,
        504,
        (505,),
        509,
    )
    assert config.loop.state_init.std == pytest.approx(0.632, abs=1e-3)
    for row, tokens in enumerate(expected["input_ids"].tolist()):
        trace = naive.forward(config, weights, tokens, 8, want="all")
        torch.testing.assert_close(trace.prelude_out, expected["prelude_out"][row], **TOLERANCE)
        for steps in (1, 4, 8):
            torch.testing.assert_close(
                trace.states[steps - 1], expected[f"core_state.steps{steps}"][row], **TOLERANCE
            )
            torch.testing.assert_close(
                trace.latents[steps - 1], expected[f"latent.steps{steps}"][row], **TOLERANCE
            )
            torch.testing.assert_close(
                trace.logits[steps - 1], expected[f"logits.steps{steps}"][row], **TOLERANCE
            )


def test_huginn_from_an_explicit_state(converted: dict[str, Artifact]) -> None:
    config, weights, expected = load(converted, "huginn-tiny")
    for row, tokens in enumerate(expected["input_ids"].tolist()):
        for steps in (1, 4):
            found = naive.forward(
                config, weights, tokens, steps, input_state=expected["explicit.input_state"][row]
            )
            torch.testing.assert_close(
                found, expected[f"explicit.logits.steps{steps}"][row], **TOLERANCE
            )


def test_huginn_greedy_continuations(converted: dict[str, Artifact]) -> None:
    config, weights, expected = load(converted, "huginn-tiny")
    for row, prompt in enumerate(expected["input_ids"].tolist()):
        assert greedy(config, weights, prompt, 8, 16) == expected["greedy_ids.steps8"][row].tolist()


LLAMA_LIKE = sorted(p.name for p in GOLDENS.iterdir() if p.name not in ("ouro-tiny", "huginn-tiny"))


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_llama_family(converted: dict[str, Artifact], name: str) -> None:
    config, weights, expected = load(converted, name)
    assert config.loop.hard_max == 1
    for row, prompt in enumerate(expected["input_ids"].tolist()):
        torch.testing.assert_close(
            naive.forward(config, weights, prompt, 1), expected["logits"][row], **TOLERANCE
        )
        assert greedy(config, weights, prompt, 1, 16) == expected["greedy_ids"][row].tolist()
