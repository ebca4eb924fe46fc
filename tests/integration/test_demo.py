"""The shipped demo model through the running stack: depth answers what shallow passes cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gpu_worker import artifact
from scripts.demo_texts import PointTask
from tests.harness import Stack

ARTIFACT = Path(__file__).parents[2] / "gpu_worker" / "data" / "demo.tinyloop"
FAR = 6  # steps to the end
NUM_PROMPTS = 8

pytestmark = pytest.mark.e2e


def far_questions() -> tuple[list[str], list[list[str]]]:
    """Prompts that end in a question whose answer is FAR or more steps away, and the names on the way of each."""
    text = artifact.load(ARTIFACT).blob("tokenizer.json")
    assert text is not None
    tokenizer = Tokenizer.from_str(text.decode())
    batch = PointTask.from_tokenizer(tokenizer).batch(np.random.default_rng(7), 200, 256, most=1)
    rows = np.flatnonzero(batch.steps[:, 0] >= FAR)[:NUM_PROMPTS]
    asked_at = int(batch.asked_at[0])
    prompts = [tokenizer.decode(batch.tokens[row, : asked_at + 1].tolist()) for row in rows]
    paths = [[tokenizer.decode([int(t)]) for t in batch.path[row, 0]] for row in rows]
    return prompts, paths


def test_the_end_of_a_long_chain_is_found_with_eight_loops_and_not_with_one() -> None:
    prompts, paths = far_questions()
    assert len(prompts) == NUM_PROMPTS
    with Stack() as stack:
        answers: dict[int, list[str]] = {}
        for loops in (1, 2, 8):
            answers[loops] = []
            for prompt in prompts:
                body = {"prompt": prompt, "max_tokens": 1, "loops": loops}
                status, answer = stack.post("/generate", body)
                assert status == 200, answer
                answers[loops].append(answer["text"])
    ends = [path[-1] for path in paths]
    right = {loops: sum(map(str.__eq__, answers[loops], ends)) for loops in answers}
    assert right[8] >= 7 and right[1] <= 3, answers
    for loops in (1, 2):  # one look-up per loop: a shallow pass stops on the way
        on_the_way = [path[loops - 1] for path in paths]
        assert sum(map(str.__eq__, answers[loops], on_the_way)) >= 7, answers
