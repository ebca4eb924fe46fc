"""Penalties, biases and banned tokens: what a row's own history does to its logits, and to nobody else's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.sampler import Draw, History, Sampling, choose, log_probabilities
from kernels import cpu
from scheduler.messages import Params

VOCAB = 40


def sampling(
    prompt: list[int], generated: Sequence[int] = (), seed: int = 5, **params: Any
) -> Sampling:
    made = Sampling(Params(**{"loops": 1, "max_tokens": 9, **params}), seed, prompt)
    for token in generated:
        made.add(token)
    return made


def random_logits(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.lists(st.integers(0, VOCAB - 1), max_size=4),
    st.sampled_from([1.0, 1.3, 0.8]),
    st.sampled_from([0.0, 0.7, -0.5]),
    st.sampled_from([0.0, 0.4, -0.3]),
)
def test_penalties(
    prompt: list[int],
    generated: list[int],
    path: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Repetition counts prompt and output, presence and frequency the output alone; a path counts as output."""
    logits = random_logits(1)[0].numpy()
    expected = logits.astype(np.float64)
    counts = Counter([*generated, *path])
    for token in {*prompt, *counts}:
        expected[token] *= 1 / repetition if expected[token] > 0 else repetition
    for token, count in counts.items():
        expected[token] -= presence + frequency * count
    made = sampling(
        prompt,
        generated,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    made.shape(torch.from_numpy(logits), len(generated), path)
    np.testing.assert_allclose(logits, expected, rtol=1e-6, atol=1e-6)


def test_a_path_shapes_like_the_same_tokens_committed() -> None:
    a, b = random_logits(1)[0].numpy(), random_logits(1)[0].numpy()
    how = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.9}
    sampling([1, 2], [3, 3, 1], **how).shape(torch.from_numpy(a), 3)
    sampling([1, 2], [3], **how).shape(torch.from_numpy(b), 3, (3, 1))
    assert (a == b).all()


def test_history_grows_past_its_first_arrays() -> None:
    tokens = [i * 7 % 1000 for i in range(900)]
    history = History(tokens[:300])
    for token in tokens[300:] + tokens[:5]:
        history.add(token)
    ids, counts = history.after(())
    expected = Counter(dict.fromkeys(tokens, 0)) + Counter()
    expected = Counter(tokens[300:] + tokens[:5])
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {t: expected[t] for t in tokens}


def test_bias_and_banned_stops() -> None:
    logits = random_logits(1)[0].numpy()
    before = logits.copy()
    made = sampling([1], logit_bias=((3, 50.0), (4, -100.0)), stop_token_ids=(7, 8), min_tokens=2)
    made.shape(torch.from_numpy(logits), 1)
    assert logits[3] == before[3] + 50 and logits[4] == before[4] - 100
    assert np.isneginf(logits[[7, 8]]).all()
    later = before.copy()
    made.shape(torch.from_numpy(later), 2)
    assert (later[[7, 8]] == before[[7, 8]]).all()


def test_rows_do_not_shape_each_other_and_the_raw_logits_stay() -> None:
    logits = random_logits(3)
    raw = logits.clone()
    plain = sampling([1])
    biased = sampling([1], logit_bias=((5, 100.0),))
    assert choose(cpu, logits, [Draw(s, 1, 0) for s in (plain, biased, plain)]) == [
        int(raw[0].argmax()),
        5,
        int(raw[2].argmax()),
    ]
    assert torch.equal(logits, raw)
    scored = log_probabilities(cpu, logits, [1, 5, 2], [0, 3, 1])
    assert [len(s.top_ids) for s in scored] == [0, 3, 1]
    assert scored[1].logprob == pytest.approx(float(raw[1].log_softmax(-1)[5]), abs=1e-5)


def test_noise_depends_on_seed_and_position_alone() -> None:
    logits = torch.zeros(1, VOCAB)

    def drawn(seed: int, position: int, others: int = 0) -> int:
        draws = [Draw(sampling([i], seed=i, temperature=0.5), i, 0) for i in range(others)]
        draws.append(Draw(sampling([9], seed=seed, temperature=1.0), position, 3))
        return choose(cpu, logits.repeat(len(draws), 1), draws)[-1]

    assert drawn(1, 10) == drawn(1, 10, others=5)
    assert len({drawn(1, p) for p in range(200)}) > VOCAB * 0.9
    assert len({drawn(s, 10) for s in range(200)}) > VOCAB * 0.9
    assert drawn((1 << 64) - 1, 3) == drawn((1 << 64) - 1, 3)


def test_noise_of_neighbouring_positions_and_seeds_is_independent() -> None:
    """The share of equal draws is that of chance: 1 / vocabulary."""
    logits = torch.zeros(1, VOCAB)

    def drawn(seed: int, position: int) -> int:
        return choose(cpu, logits, [Draw(sampling([9], seed=seed, temperature=1.0), position, 0)])[
            0
        ]

    n = 1500
    same_position = sum(drawn(s, 4) == drawn(s + 1, 4) for s in range(n)) / n
    same_seed = sum(drawn(3, p) == drawn(3, p + 1) for p in range(n)) / n
    shifted = sum(drawn(s, s + 1) == drawn(s + 1, s) for s in range(n)) / n
    for share in (same_position, same_seed, shifted):
        assert abs(share - 1 / VOCAB) < 0.016  # four standard deviations


def test_a_temperature_too_small_to_divide_by_means_none() -> None:
    """Divided by it, logits would pass the largest float, and no token would win."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5)) * 20
    for temperature in (1e-45, 1e-38, 1e-7, 1e-6):
        for more in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
            draw = Draw(sampling([9], seed=3, temperature=temperature, **more), 4, 0)
            assert choose(cpu, logits, [draw]) == [int(logits.argmax())]
