"""Caches in fragment order behind the engine's operations, on the emulator, against the plain twins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import cuda_fragments, fragments, reference
from kernels.layout import BLOCK_SIZE, FragmentCache, PagedCache, Paging

LAYERS = 2
TABLE = [4, 0, 3, 1, 2]  # block ids of the only sequence
CPU = torch.device("cpu")
NONE = torch.full((0, 0, 0), -1, dtype=torch.int32)


def paging(
    positions: Sequence[int],
    places: Sequence[int] | None = None,
    windows: Sequence[int] | None = None,
    maps: Tensor | None = None,
    base: int = 0,
) -> Paging:
    """Rows of slot 1, table 1 of two each."""
    n = len(positions)
    ones = torch.ones(n, dtype=torch.int32)
    tables = torch.full((2, 2, len(TABLE)), -1, dtype=torch.int32)
    tables[1, 1] = torch.tensor(TABLE)
    return Paging(
        ones, ones, torch.tensor(positions, dtype=torch.int32),
        torch.tensor(positions if places is None else places, dtype=torch.int32),
        torch.tensor([0] * n if windows is None else windows, dtype=torch.int32),
        -ones if maps is None else torch.arange(n, dtype=torch.int32), ones * base,
        torch.zeros(0, 0, dtype=torch.int32) if maps is None else maps, tables, torch.tensor([0, n]),
    )  # fmt: skip


def random_rows(count: int, heads: tuple[int, int, int], seed: int = 3) -> Tensor:
    """q, k and v that fp16 holds exactly."""
    make = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, (heads[0] + 2 * heads[1]) * heads[2], generator=make)
    return rows.half().float()


def new_caches(heads: tuple[int, int, int]) -> tuple[FragmentCache, PagedCache]:
    _, kv, dim = heads
    cache = cuda_fragments.make_cache(
        "fp16", len(TABLE), 0, LAYERS, kv, dim, NONE, torch.full((0,), -1, dtype=torch.int32), CPU
    )
    keys = torch.zeros(len(TABLE), LAYERS, kv, dim, BLOCK_SIZE)
    return cache, PagedCache(keys, keys.transpose(3, 4).clone())


def filled(
    heads: tuple[int, int, int], count: int, layer: int = 1
) -> tuple[FragmentCache, PagedCache]:
    """Both caches with the same positions 0 .. count - 1 in one layer, ours from plain packing."""
    cache, twin = new_caches(heads)
    reference.store_kv(random_rows(count, heads), heads, twin, layer, paging(range(count)))
    _, kv, dim = heads
    halves = cache.stored.view(torch.half).view(len(TABLE), LAYERS, kv, 2, 64 * dim)
    halves[:, layer, :, 0] = fragments.pack_keys(twin.keys[:, layer].transpose(2, 3)).half()
    halves[:, layer, :, 1] = fragments.pack_values(twin.values[:, layer]).half()
    return cache, twin


@pytest.mark.parametrize("heads", [(2, 1, 64), (3, 3, 32), (4, 2, 96)])
def test_rows_are_written_where_the_packing_puts_them(heads: tuple[int, int, int]) -> None:
    cache, _ = new_caches(heads)
    positions = [0, 1, 9, 62, 63, 64, 130]
    expected, twin = new_caches(heads)
    qkv = random_rows(len(positions), heads)
    at = paging(positions)
    cuda_fragments.store_kv(qkv, heads, cache, 1, at)
    reference.store_kv(qkv, heads, twin, 1, at)
    _, kv, dim = heads
    halves = expected.stored.view(torch.half).view(len(TABLE), LAYERS, kv, 2, 64 * dim)
    halves[:, 1, :, 0] = fragments.pack_keys(twin.keys[:, 1].transpose(2, 3)).half()
    halves[:, 1, :, 1] = fragments.pack_values(twin.values[:, 1]).half()
    assert halves.any() and torch.equal(cache.stored, expected.stored)


@pytest.mark.parametrize(
    ("heads", "positions", "windows", "has_alibi"),
    [
        pytest.param((2, 1, 64), [0, 63, 150], [0, 0, 0], False, id="group_of_2"),
        pytest.param((3, 3, 32), [64, 5], [0, 3], True, id="windows_alibi"),
        pytest.param((2, 2, 96), [250], [70], False, id="a_window_over_blocks"),
        pytest.param((10, 1, 32), [70], [0], True, id="group_of_10"),
        pytest.param((2, 1, 256), [70], [0], False, id="wide_heads", marks=pytest.mark.slow),
    ],
)
def test_attention_matches_the_twin(
    heads: tuple[int, int, int], positions: list[int], windows: list[int], has_alibi: bool
) -> None:
    cache, twin = filled(heads, max(positions) + 1)
    slopes = 2.0 ** -torch.arange(1, heads[0] + 1) if has_alibi else None
    qkv = random_rows(len(positions), heads, 5)
    at = paging(positions, windows=windows)
    out = cuda_fragments.attention(qkv, heads, cache, 1, slopes, at)
    expected = reference.attention(qkv, heads, twin, 1, slopes, at)
    # q times its scale and the weights are rounded to fp16
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3)


def test_a_row_has_the_bits_that_it_has_alone_in_every_launch() -> None:
    heads = (2, 1, 32)
    cache, _ = filled(heads, 150)
    positions = [149, *range(40)]  # more units than the cluster's launch takes
    qkv = random_rows(len(positions), heads, 5)
    out = cuda_fragments.attention(qkv, heads, cache, 1, None, paging(positions), 0.3)
    alone = cuda_fragments.attention(
        qkv[:1].contiguous(), heads, cache, 1, None, paging([149]), 0.3
    )
    assert torch.equal(out[0], alone[0]) and not torch.equal(out[0], out[1])


def test_a_mapped_row_has_the_bits_of_a_plain_one() -> None:
    """A path 64, 65, 66, 67 whose last three keys lie at places 66, 70 and 130."""
    heads, count = (2, 2, 32), 68
    plain, _ = filled(heads, count)
    tree, _ = filled(heads, 65)
    qkv = random_rows(count, heads)
    places = [64, 66, 70, 130]
    at = paging([65, 66, 67], places[1:])
    cuda_fragments.store_kv(qkv[65:].contiguous(), heads, tree, 1, at)
    maps = torch.arange(64, 128, dtype=torch.int32).repeat(2, 1)
    maps[:, :4] = torch.tensor(places)
    q = random_rows(2, heads, 5)
    positions = [67, 65]
    expected = cuda_fragments.attention(q, heads, plain, 1, None, paging(positions))
    mapped = paging(positions, maps=maps, base=64)
    assert torch.equal(cuda_fragments.attention(q, heads, tree, 1, None, mapped), expected)
    unmapped = cuda_fragments.attention(q, heads, tree, 1, None, paging(positions))
    assert not torch.equal(unmapped, expected)


def test_places_and_blocks_are_copied_in_all_layers() -> None:
    heads = (2, 2, 32)
    cache, _ = filled(heads, 200, layer=0)
    cache.stored[:, 1] = cache.stored[:, 0].flip(0)
    before = cache.stored.clone()
    cuda_fragments.copy_blocks(cache, torch.tensor([4, 0]), torch.tensor([1, 2]))
    expected = before.clone()
    expected[[1, 2]] = before[[4, 0]]
    assert torch.equal(cache.stored, expected)

    def plain(stored: Tensor) -> tuple[Tensor, Tensor]:
        halves = stored.view(torch.half).view(len(TABLE), LAYERS, 2, 2, -1)
        return (
            fragments.unpack_keys(halves[:, :, :, 0], 32),
            fragments.unpack_values(halves[:, :, :, 1], 32),
        )

    wanted = [part.clone() for part in plain(cache.stored)]
    for part in wanted:
        part[[0, 3], :, :, 17] = part[4, :, :, 17].clone()
        part[[2, 0], :, :, 63] = part[[4, 3], :, :, 5].clone()
    cuda_fragments.copy_place(cache, 17, [4, 0, 3], [], [])
    cuda_fragments.move_places(cache, 5, 63, torch.tensor([[4, 3], [2, 0]]), None)
    for part, want in zip(plain(cache.stored), wanted, strict=True):
        assert torch.equal(part, want)
