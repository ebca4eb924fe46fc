"""What the demo model is made of: the pointing task and its answers, our own tales and chats, and the artifact that ships."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from frontend.chat_template import ChatTemplate
from gpu_worker import artifact, naive, selfcheck
from gpu_worker.artifact import Artifact
from scripts import demo_texts
from scripts.demo_model import CONFIG, LoopedModel
from scripts.demo_texts import CHAINS, MAX_STEPS, NAMES, PointTask
from scripts.make_toy_artifact import toy_tokenizer

ARTIFACT = Path(__file__).parents[2] / "gpu_worker" / "data" / "demo.tinyloop"
LARGEST = 24 << 20
CHAIN_SETS = [CHAINS, (8, 6, 2), (1,), (3, 3), (8, 8, 8, 8)]


@pytest.fixture(scope="module")
def demo() -> Artifact:
    return artifact.load(ARTIFACT, verify=True)


@pytest.fixture(scope="module")
def tokenizer(demo: Artifact) -> Tokenizer:
    text = demo.blob("tokenizer.json")
    assert text is not None
    return Tokenizer.from_str(text.decode())


@pytest.fixture(scope="module")
def task(tokenizer: Tokenizer) -> PointTask:
    return PointTask.from_tokenizer(tokenizer)


def follow(pointed: dict[str, str], name: str) -> list[str]:
    """The names after `name`, up to the one that points at itself."""
    path = []
    while pointed[name] != name:
        name = pointed[name]
        path.append(name)
    return path


# ---------------------------------------------------------------- the pointing task


@pytest.mark.parametrize("chains", CHAIN_SETS)
def test_every_answer_is_the_end_of_the_chain_that_the_text_tells(
    task: PointTask, tokenizer: Tokenizer, chains: tuple[int, ...]
) -> None:
    batch = task.batch(np.random.default_rng(3), 12, 400, chains)
    for row in range(12):
        text = tokenizer.decode(batch.tokens[row, : batch.used].tolist())
        assert tokenizer.encode(text).ids == batch.tokens[row, : batch.used].tolist()
        facts = re.findall(r"(\w+) points at (\w+)\.", text)
        pointed = dict(facts)
        assert len(pointed) == len(facts) == sum(chains) + len(chains)
        questions = re.findall(r"From (\w+): (\w+)\.", text)
        asked = [name for name, _ in questions]
        assert len(set(asked)) == len(asked) == len(batch.asked_at)
        assert text == "Pointing." + "".join(f" {a} points at {b}." for a, b in facts) + "".join(
            f" From {a}: {b}." for a, b in questions
        )
        for i, (name, answer) in enumerate(questions):
            path = follow(pointed, name)
            assert answer == path[-1]
            assert batch.steps[row, i] == len(path)
            told = [tokenizer.decode([int(t)]).strip() for t in batch.path[row, i]]
            assert told == (path + [path[-1]] * MAX_STEPS)[:MAX_STEPS]
            at = int(batch.asked_at[i])
            assert tokenizer.decode(batch.tokens[row, at - 1 : at + 2].tolist()) == (
                f" {name}: {answer}"
            )
        lengths = [len(follow(pointed, name)) for name in pointed]
        assert sorted(lengths) == sorted(
            itertools.chain.from_iterable(range(c + 1) for c in chains)
        )


def test_a_question_is_asked_of_every_name_that_is_not_an_end(task: PointTask) -> None:
    batch = task.batch(np.random.default_rng(0), 4, 256)
    for steps in batch.steps:
        want = sorted(itertools.chain.from_iterable(range(1, c + 1) for c in CHAINS))
        assert sorted(steps.tolist()) == want
    assert task.batch(np.random.default_rng(0), 4, 256, most=2).steps.shape == (4, 2)


def test_the_order_of_facts_and_questions_says_nothing(task: PointTask) -> None:
    """Neither the place of a name's fact nor the turn of its question is tied to how far its end is."""
    batch = task.batch(np.random.default_rng(1), 400, 256)
    assert np.ptp(batch.steps.mean(axis=0)) < 1.0  # about 3.4 at every turn, +- 0.1
    first_fact = batch.tokens[:, len(task.head)]
    assert len(set(first_fact.tolist())) > 40  # any name may be told first


def test_batches_are_seeded_and_padded_with_full_stops(task: PointTask) -> None:
    first, again, other = (task.batch(np.random.default_rng(s), 3, 256) for s in (5, 5, 6))
    assert np.array_equal(first.tokens, again.tokens) and not np.array_equal(
        first.tokens, other.tokens
    )
    assert first.tokens.shape == (3, 256) and first.used < 256
    assert (first.tokens[:, first.used :] == task.stop).all()


def test_names_are_different_single_tokens(task: PointTask, tokenizer: Tokenizer) -> None:
    assert len(NAMES) == len(set(NAMES)) == len(set(task.names.tolist()))
    assert [tokenizer.decode([int(t)]) for t in task.names] == [f" {name}" for name in NAMES]


def test_what_does_not_fit_is_an_error(task: PointTask) -> None:
    with pytest.raises(ValueError, match="no room"):
        task.batch(np.random.default_rng(0), 1, 100)
    with pytest.raises(ValueError, match="not one"):
        PointTask.from_tokenizer(
            Tokenizer.from_str(toy_tokenizer().decode())
        )  # bytes: a name is several tokens


# ---------------------------------------------------------------- tales and chats


def test_tales_are_seeded_and_every_gap_is_filled() -> None:
    tales = [demo_texts.tale(random.Random(seed)) for seed in range(200)]
    assert tales == [demo_texts.tale(random.Random(seed)) for seed in range(200)]
    assert len(set(tales)) == 200
    for text in tales:
        assert "{" not in text and "  " not in text and text.count("\n\n") == 1
        assert sum(wish in text for wish in demo_texts.WISHES) == 1  # one tale, one wish


def test_chats_are_seeded_and_each_turn_is_answered_in_kind() -> None:
    groups = [demo_texts.GREETINGS, *demo_texts.SUBJECTS, *demo_texts.GOODBYES]
    answers = {question: replies for questions, replies in groups for question in questions}
    num_stories = 0
    for seed in range(200):
        turns = demo_texts.own_chat(random.Random(seed))
        assert turns == demo_texts.own_chat(random.Random(seed))
        assert turns and len(turns) % 2 == 0
        for said, reply in zip(turns[::2], turns[1::2], strict=True):
            if said in demo_texts.STORY_REQUESTS:
                num_stories += 1
                assert len(reply) > 200 and "\n" not in reply
            else:
                assert reply in answers[said]
    assert 40 < num_stories < 120  # two chats in five


def test_capital_chats_name_the_state_and_its_capital() -> None:
    for seed in range(20):
        question, answer = demo_texts.capital_chat(random.Random(seed), "Ohio", "Columbus")
        assert "Ohio" in question and "Columbus" in answer and "{" not in question + answer


# ---------------------------------------------------------------- the artifact that ships


def test_the_demo_artifact_is_whole_and_small(demo: Artifact) -> None:
    assert ARTIFACT.stat().st_size <= LARGEST
    assert json.loads(demo.config.to_json()) == CONFIG  # what the script would train today
    assert demo.config.loop.default == 8 and demo.config.arch.pos.kind == "alibi"

    def logits(tokens: list[int], loops: int) -> torch.Tensor:
        return naive.forward(demo.config, demo.tensors(dequantise=True), tokens, loops)

    worst = selfcheck.verify(demo, logits)
    assert worst is not None and worst < 1e-4  # it carries its own logits, and they hold


def test_the_chat_template_renders_what_the_demo_was_trained_on(
    demo: Artifact, tokenizer: Tokenizer
) -> None:
    source = demo.blob("chat_template.jinja")
    assert source is not None
    template = ChatTemplate(source.decode(), {})
    talk = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye!"},
    ]
    text = template.render(talk, None, {})
    assert text == "Be kind.\n\nUser: Hello!\nAssistant: Hi.<|endoftext|>\nUser: Bye!\nAssistant:"
    assert list(demo.config.tokens.eos) == [tokenizer.token_to_id("<|endoftext|>")]
    assert tokenizer.encode(text).ids.count(demo.config.tokens.eos[0]) == 1


@torch.no_grad()
def test_training_and_serving_compute_the_same_logits(demo: Artifact, tokenizer: Tokenizer) -> None:
    weights = demo.tensors(dequantise=True)
    model = LoopedModel(CONFIG)
    model.load(weights)
    tokens = tokenizer.encode("It was a dark night, and the wind").ids
    want = naive.forward(demo.config, weights, tokens, 2)
    got = model.logits(torch.tensor([tokens]), 2)[0]
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5  # fp32, in another order
