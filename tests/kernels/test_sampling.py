"""The sampling kernels on the emulator, against the plain PyTorch twins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import emulator, reference, sampling
from kernels.compiler import Variant

VOCAB = 150


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sampling, "THREADS", 64)
    yield
    emulator.forget()


def _run(variant: Variant, rows: int, *args: object) -> None:
    flat = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            emulator.register(arg)
            flat.append(arg.data_ptr())
        else:
            flat.append(arg)
    emulator.run(
        variant.function, (rows * variant.cluster, 1), variant.num_threads, flat, cluster=variant.cluster,
        shared_bytes=variant.shared_bytes,
    )  # fmt: skip


CASES = [
    # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (0.8, 0, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (1.3, 0, 0.7, 0.0),
    (0.7, 40, 0.9, 0.05),
    (2.0, 3, 0.5, 0.0),
]


@pytest.mark.parametrize("cluster", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_ties", [False, True])
def test_choose_follows_the_order_of_the_design(has_ties: bool, cluster: int) -> None:
    torch.manual_seed(int(has_ties))
    rows = len(CASES)
    logits = torch.randn(rows, VOCAB) * 3
    if has_ties:
        logits = logits.round()
    temperature, top_k, top_p, min_p = (torch.tensor(x) for x in zip(*CASES, strict=True))
    keys = torch.randint(0, 1 << 32, (rows, 2))
    want = reference.choose(logits, temperature, top_k, top_p, min_p, keys)
    tokens = torch.full((rows,), -1, dtype=torch.int32)
    packed = sampling.pack_settings(temperature, top_k, top_p.double(), min_p, keys)
    variant = sampling.choose("t", VOCAB, is_shaped=False, cluster=cluster)
    _run(variant, rows, logits, 0, 0, *packed, tokens)
    assert tokens.tolist() == want.tolist()


def test_top_p_keeps_nobody_whom_top_k_has_cut_among_equals() -> None:
    logits = torch.tensor([[1.0, 5, 5, 5, 0, 5, 5, 5]]).repeat(4, 1)
    rows, vocab = logits.shape
    keys = torch.randint(0, 1 << 32, (rows, 2), generator=torch.Generator().manual_seed(3))
    settings = torch.ones(rows), torch.full((rows,), 2), torch.full((rows,), 0.9).double(), torch.zeros(rows)  # fmt: skip
    want = reference.choose(logits, *settings, keys)
    tokens = torch.full((rows,), -1, dtype=torch.int32)
    packed = sampling.pack_settings(*settings, keys)
    _run(sampling.choose("t", vocab, is_shaped=False), rows, logits, 0, 0, *packed, tokens)
    assert tokens.tolist() == want.tolist() and set(want.tolist()) <= {1, 2}


def test_penalties_and_bias_come_first() -> None:
    torch.manual_seed(5)
    logits, bias = torch.randn(1, VOCAB), torch.zeros(1, VOCAB)
    counts = torch.zeros(1, VOCAB, dtype=torch.int32)
    counts[0, 3], counts[0, 4] = 2, -(1 << 31)
    logits[0, 3], logits[0, 4], logits[0, 5] = 8.0, 7.0, 5.0
    bias[0, 6] = 6.5 - logits[0, 6]
    settings = sampling.pack_settings(
        torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64),
        torch.zeros(1), torch.zeros(1, 2, dtype=torch.int64),
        penalties=torch.tensor([[1.25, 0.5, 0.75]]),
    )  # fmt: skip
    # 3: 8 / 1.25 - 0.5 - 1.5 = 4.4; 4: 7 / 1.25 = 5.6; 6: 6.5
    tokens = torch.full((1,), -1, dtype=torch.int32)
    variant = sampling.choose("t", VOCAB, is_shaped=True)
    _run(variant, 1, logits, counts, bias, *settings, tokens)
    assert tokens.tolist() == [6]
    bias[0, 6] = -10
    _run(variant, 1, logits, counts, bias, *settings, tokens)
    assert tokens.tolist() == [4]


def test_log_probabilities_match_log_softmax() -> None:
    torch.manual_seed(6)
    rows, num_top = 2, 4
    logits = (torch.randn(rows, VOCAB) * 2).round(decimals=1)
    logits[1, 10] = logits[1, 90] = 9.0
    chosen = torch.tensor([5, 90], dtype=torch.int32)
    own, ids, tops = torch.zeros(rows), torch.zeros(rows, num_top).int(), torch.zeros(rows, num_top)
    variant = sampling.log_probabilities("t")
    _run(variant, rows, logits, chosen, own, ids, tops, VOCAB, num_top)
    want = reference.log_probabilities(logits, chosen.long(), num_top)
    torch.testing.assert_close(own, want[0], rtol=1e-5, atol=1e-5)
    assert ids.tolist() == want[1].tolist()
    torch.testing.assert_close(tops, want[2], rtol=1e-5, atol=1e-5)
