"""The CPU kernels against their plain twins, and their promise: a row's bits depend on that row alone.

Tolerances: both sides are fp32 and differ in the order of their sums alone.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import cpu, reference
from kernels.cpu_attention import TILE_ROWS, make_tiles
from kernels.layout import BLOCK_SIZE, PagedCache, Paging


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request: pytest.FixtureRequest):
    cpu.set_threads(request.param)
    yield request.param
    cpu.set_threads(1)


SHAPES = [(1, 1), (31, 7), (32, 16), (33, 40), (96, 512), (200, 1408), (513, 160)]


@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(threads: int, num_out: int, num_in: int, has_bias: bool) -> None:
    weight, bias = rand(num_out, num_in, seed=1), rand(num_out, seed=2) if has_bias else None
    packed, plain = cpu.pack(weight, bias), reference.pack(weight, bias)
    for n in (0, 1, 2, 3, 8, 9, 65):
        x, y = rand(n, num_in, seed=n), rand(n, num_out, seed=3)
        torch.testing.assert_close(
            cpu.linear(x, packed), reference.linear(x, plain), rtol=1e-5, atol=2e-4
        )
        expected = y.clone()
        reference.linear_add(x, plain, expected)
        cpu.linear_add(x, packed, y)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(("num_out", "num_in"), [(33, 40), (96, 512), (512, 1408), (2000, 160)])
def test_a_rows_product_has_the_same_bits_for_every_row_count_place_and_thread_count(
    num_out: int, num_in: int
) -> None:
    packed, x = cpu.pack(rand(num_out, num_in), rand(num_out, seed=5)), rand(96, num_in, seed=6)
    whole = cpu.linear(x, packed)
    for threads in (1, 2, 3):
        cpu.set_threads(threads)
        for n in range(1, 34):
            for at in (0, 1, 5, 60):
                assert torch.equal(
                    cpu.linear(x[at : at + n].contiguous(), packed), whole[at : at + n]
                )
    cpu.set_threads(1)


@pytest.mark.parametrize("d", [1, 15, 16, 64, 100])
def test_norms(threads: int, d: int) -> None:
    x, weight, bias = rand(13, d) * 3 + 1, rand(d, seed=1), rand(d, seed=2)
    for b in (None, bias):
        y = cpu.norm(x, weight, b, 1e-5)
        torch.testing.assert_close(y, reference.norm(x, weight, b, 1e-5), rtol=2e-5, atol=2e-5)
        assert torch.equal(y[3:4], cpu.norm(x[3:4].contiguous(), weight, b, 1e-5))


@pytest.mark.parametrize("act", ["silu_glu", "gelu", "gelu_tanh", "relu2"])
def test_activations(threads: int, act: str) -> None:
    x = torch.cat([rand(9, 94) * 4, torch.linspace(-100, 100, 94)[None]])
    y = cpu.activate(x, act)
    torch.testing.assert_close(y, reference.activate(x, act), rtol=2e-5, atol=2e-6)
    assert torch.equal(y[5:6], cpu.activate(x[5:6].contiguous(), act))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("parts", ["rotary", "norm", "bias", "all"])
def test_heads_are_prepared(is_interleaved: bool, parts: str) -> None:
    heads = (4, 4, 24) if parts != "norm" else (4, 2, 24)
    n, dim = 7, heads[2]
    angles = torch.rand(50, dim // 2) * 6
    rotary = torch.stack([angles.cos(), angles.sin()]) if parts in ("rotary", "all") else None
    q_norm, k_norm = (
        (rand(dim, seed=1), rand(dim, seed=2)) if parts in ("norm", "all") else (None, None)
    )
    bias = rand(2, 4, dim, seed=3) if parts in ("bias", "all") else None
    qkv = rand(n, (heads[0] + 2 * heads[1]) * dim)
    expected, positions = qkv.clone(), torch.tensor([0, 1, 2, 49, 3, 3, 20], dtype=torch.int32)
    reference.prepare_qkv(
        expected, heads, q_norm, k_norm, 1e-6, bias, rotary, is_interleaved, positions
    )
    cpu.prepare_qkv(qkv, heads, q_norm, k_norm, 1e-6, bias, rotary, is_interleaved, positions)
    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- attention


class Paged:
    """Sequences with keys everywhere in a cache whose unused places hold NaN, so that reading one would show."""

    def __init__(self, heads: tuple[int, int, int], lengths: list[int], spare: int = 0) -> None:
        self.heads, self.layers = heads, 2
        _, num_kv, dim = heads
        per = -(-(max(lengths) + spare) // BLOCK_SIZE)
        num_blocks = per * len(lengths)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).int()
        self.block_tables = order.view(len(lengths), 1, per).contiguous()
        self.cache = PagedCache(
            torch.full((num_blocks, self.layers, num_kv, dim, BLOCK_SIZE), math.nan),
            torch.full((num_blocks, self.layers, num_kv, BLOCK_SIZE, -(-dim // 16) * 16), math.nan),
        )
        self.cache.values[..., dim:] = 0

    def paging(self, slots: list[int], positions: list[int], **others: list) -> Paging:
        def ints(values: list) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        n = len(slots)
        tables = ints([0] * n)
        return Paging(
            slots=ints(slots), tables=tables, positions=ints(positions), places=ints(others.get("places", positions)),
            windows=ints(others.get("windows", [0] * n)), row_map=ints(others.get("row_map", [-1] * n)),
            map_base=ints(others.get("map_base", [0] * n)), maps=ints(others.get("maps", [[]])), block_tables=self.block_tables,
            tiles=torch.from_numpy(make_tiles(np.array(slots, dtype=np.int32), tables.numpy(), TILE_ROWS)),
        )  # fmt: skip

    def qkv(self, n: int, seed: int) -> Tensor:
        num_heads, num_kv, dim = self.heads
        return rand(n, (num_heads + 2 * num_kv) * dim, seed=seed)

    def fill(self, slot: int, length: int) -> None:
        paging = self.paging([slot] * length, list(range(length)))
        cpu.store_kv(self.qkv(length, slot), self.heads, self.cache, 1, paging)


HEADS = [(4, 4, 16), (4, 2, 24), (8, 1, 64), (2, 2, 128)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("has_slopes", [False, True])
def test_attention(threads: int, heads: tuple[int, int, int], has_slopes: bool) -> None:
    lengths = [1, 64, 65, 200]
    paged = Paged(heads, lengths)
    for slot, length in enumerate(lengths):
        paged.fill(slot, length)
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(heads[0])]) if has_slopes else None
    slots = [0, 1, 1, 1, 2, *[3] * 40]
    positions = [0, 0, 1, 63, 64, *range(160, 200)]
    windows = [0, 1, 0, 10, 64, *[0, 70] * 20]
    paging, qkv = paged.paging(slots, positions, windows=windows), paged.qkv(len(slots), 99)
    out = cpu.attention(qkv, heads, paged.cache, 1, slopes, paging)
    torch.testing.assert_close(
        out, reference.attention(qkv, heads, paged.cache, 1, slopes, paging), rtol=1e-4, atol=2e-5
    )
    for r in range(len(slots)):  # alone
        one = paged.paging(slots[r : r + 1], positions[r : r + 1], windows=windows[r : r + 1])
        assert torch.equal(
            out[r : r + 1],
            cpu.attention(qkv[r : r + 1].contiguous(), heads, paged.cache, 1, slopes, one),
        )


def test_stored_keys_are_where_the_reference_puts_them() -> None:
    heads = (4, 2, 24)
    mine, plain = Paged(heads, [70, 70]), Paged(heads, [70, 70])
    paging, qkv = mine.paging([0, 0, 1], [3, 64, 69]), mine.qkv(3, 5)
    cpu.store_kv(qkv, heads, mine.cache, 1, paging)
    reference.store_kv(qkv, heads, plain.cache, 1, paging)
    assert torch.equal(mine.cache.keys.nan_to_num(7), plain.cache.keys.nan_to_num(7))
    assert torch.equal(mine.cache.values.nan_to_num(7), plain.cache.values.nan_to_num(7))


@pytest.mark.parametrize("heads", HEADS)
def test_a_mapped_row_has_the_bits_of_the_plain_one(heads: tuple[int, int, int]) -> None:
    """The same keys at other places, read through a map: as if they lay at their positions."""
    length, base = 150, 128
    plain, tree = Paged(heads, [length]), Paged(heads, [length], spare=100)
    plain.fill(0, length)
    tree.fill(0, base)
    spare = [230, 190, *range(200, 220)]  # where positions 128.. 149 lie
    keys = plain.qkv(length, 0)[base:].contiguous()
    cpu.store_kv(
        keys, heads, tree.cache, 1, tree.paging([0] * 22, list(range(base, length)), places=spare)
    )
    qkv, positions = plain.qkv(22, 50), list(range(base, length))
    expected = cpu.attention(qkv, heads, plain.cache, 1, None, plain.paging([0] * 22, positions))
    mapped = tree.paging(
        [0] * 22, positions, places=spare, row_map=[0] * 22, map_base=[base] * 22, maps=[spare]
    )
    assert torch.equal(cpu.attention(qkv, heads, tree.cache, 1, None, mapped), expected)
    torch.testing.assert_close(
        reference.attention(qkv, heads, tree.cache, 1, None, mapped), expected, rtol=1e-4, atol=2e-5
    )


# ----------------------------------------------------------------------------------------------------------- sampling


def settings(
    n: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> tuple:
    keys = np.random.default_rng(seed).integers(0, 1 << 32, (n, 2), dtype=np.uint32)
    return (
        torch.full((n,), temperature), torch.full((n,), top_k), torch.full((n,), top_p, dtype=torch.float64),
        torch.full((n,), min_p), torch.from_numpy(keys),
    )  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 15, 257, 3000])
@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 7}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 0.9, "min_p": 0.05},
     {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.01}, {"temperature": 1.0, "top_p": 1e-9}, {"temperature": 1.0, "top_k": 1}],
)  # fmt: skip
def test_chosen_tokens(threads: int, vocab: int, how: dict) -> None:
    logits = (rand(24, vocab) * 3).round(decimals=1)  # rounded: ties happen
    logits[3] = 0.0
    logits[4, (vocab + 1) // 2 :] = -math.inf
    arguments = settings(24, **how)
    assert torch.equal(cpu.choose(logits, *arguments), reference.choose(logits, *arguments))


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).expand(20_000, -1).contiguous()
    tokens = cpu.choose(logits, *settings(20_000, temperature=0.8, seed=3))
    counts = torch.bincount(tokens, minlength=5) / 20_000
    expected = (logits[0] / 0.8).softmax(-1)
    assert (counts - expected).abs().max() < 0.015


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3])).expand(3000, -1).contiguous()
    for top_p, kept in (
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 2, 3}),
        (0.95, {0, 1, 2, 3}),
    ):
        assert (
            set(cpu.choose(logits, *settings(3000, temperature=1.0, top_p=top_p)).tolist()) == kept
        )


def test_log_probabilities(threads: int) -> None:
    logits = (rand(9, 1000) * 4).round(decimals=1)
    chosen = torch.arange(9) * 50
    for num_top in (0, 1, 20):
        mine, plain = (
            cpu.log_probabilities(logits, chosen, num_top),
            reference.log_probabilities(logits, chosen, num_top),
        )
        torch.testing.assert_close(mine[0], plain[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(mine[1], plain[1])
        torch.testing.assert_close(mine[2], plain[2], rtol=1e-5, atol=1e-5)
    own, ids, tops = cpu.log_probabilities(logits, logits.argmax(-1), 1)
    assert torch.equal(own, tops[:, 0])  # bit-identical to the token's own
