"""Upstream's numbers come out of the HTTP server: golden checkpoints by token ids, through every process of a stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.convert import convert
from tests.harness import Stack

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
NUM_TOP = 20

pytestmark = pytest.mark.e2e


def complete(
    stack: Stack, prompts: list[list[int]], loops: int, **more: Any
) -> list[dict[str, Any]]:
    body = {
        "model": "*",
        "prompt": prompts,
        "loops": loops,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    status, answer = stack.post(
        "/v1/completions", body | {"echo": True, "logprobs": NUM_TOP} | more
    )
    assert status == 200, answer
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def token(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def assert_choice(
    choice: dict[str, Any], prompt: list[int], logits: torch.Tensor, greedy: list[int] | None
) -> None:
    """Echoed prompt, log-probabilities of every prompt token and of the likeliest ones, and the greedy continuation."""
    found = choice["logprobs"]
    tokens = [token(t) for t in found["tokens"]]
    assert tokens[: len(prompt)] == prompt
    if greedy is not None:
        assert tokens[len(prompt) :] == greedy
    expected = logits.log_softmax(-1)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for position in range(
        1, len(prompt) + 1
    ):  # the token at `position` is scored by the logits before it
        scored = {token(name): value for name, value in found["top_logprobs"][position].items()}
        scored[tokens[position]] = found["token_logprobs"][position]
        assert len(scored) >= NUM_TOP
        want = expected[position - 1, list(scored)]
        torch.testing.assert_close(torch.tensor(list(scored.values())), want, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("name", ["ouro-tiny", "huginn-tiny", "llama-tiny"])
def test_goldens_through_the_whole_stack(tmp_path: Path, name: str) -> None:
    artifact = tmp_path / f"{name}.tinyloop"
    convert(GOLDENS / name, artifact)
    expected = load_file(GOLDENS / name / "expected.safetensors")
    prompts = expected["input_ids"].tolist()
    cases: list[tuple[int, str, str]] = {
        "ouro-tiny": [(n, f"logits.loop{n}", f"greedy_ids.loops{n}") for n in (1, 2, 3, 4)],
        "huginn-tiny": [(n, f"logits.steps{n}", f"greedy_ids.steps{n}") for n in (1, 4, 8)],
        "llama-tiny": [(1, "logits", "greedy_ids")],
    }[name]
    with Stack(artifact, env={"TINYLOOP_MODEL_ALIASES": "*"}) as stack:
        for loops, logits, greedy in cases:
            for row, choice in enumerate(complete(stack, prompts, loops)):
                tokens = expected[greedy][row].tolist() if greedy in expected else None
                assert_choice(choice, prompts[row], expected[logits][row], tokens)
        if name == "ouro-tiny":
            for path, body in (
                ("/v1/completions", {"prompt": "a text"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a text"}]}),
            ):
                status, answer = stack.post(path, {"model": "*", "max_tokens": 4} | body)
                assert status == 400 and answer["error"]["code"] == "text_unavailable"
