"""Caches in fragment order behind the engine's operations, on the emulator, against the plain twins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gpu_worker.kv_store import Form, make_store
from kernels import cuda_fragments, fragments, reference
from kernels.attention import attention
from kernels.attention_shapes import STREAMS, AttentionLaunch, AttentionShape, choose_launch
from kernels.compiler import Variant
from kernels.layout import BLOCK_SIZE, NUM_SINKS, CutCache, FragmentCache, PagedCache, Paging

LAYERS = 2
TABLE = [4, 0, 3, 1, 2]  # block ids of the only sequence
COPIES = [2, 3, 1, 4, 0]  # their exact copies
SINK = 1  # of the first block
CPU = torch.device("cpu")
# Launches of every kind: (blocks in a cluster, warps, stages). The emulator's time goes by threads: the first is the cheapest.
PLANS = [(1, 2, 2), (1, 8, 3), (4, 2, 3), (4, 4, 4)]
NONE = torch.full((0, 0, 0), -1, dtype=torch.int32)


def launch_by(monkeypatch: pytest.MonkeyPatch, plan: tuple[int, int, int]) -> None:
    def variant(shape: AttentionShape, rows: int) -> Variant:
        launch = AttentionLaunch(shape, *plan, is_float_out=True, is_paged=True)
        return attention("attention", launch)

    monkeypatch.setattr(cuda_fragments, "attention_variant", variant)


@pytest.fixture(autouse=True)
def cheap_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_by(monkeypatch, PLANS[0])


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


@pytest.mark.parametrize("kind", ["fp16", "int4"])
def test_a_row_has_the_bits_that_it_has_alone_in_every_launch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, positions = (2, 1, 32), [149, 70, 5]
    cache, _ = (filled if kind == "fp16" else filled_int4)(heads, 150)
    q = random_rows(len(positions), heads, 5)
    out = cuda_fragments.attention(q, heads, cache, 1, None, paging(positions), 0.3)
    assert not torch.equal(out[0], out[1])
    for row, plan in enumerate(PLANS[1:]):
        launch_by(monkeypatch, plan)
        some = [row, 0][: row + 1]
        at = paging([positions[i] for i in some])
        again = cuda_fragments.attention(q[some].contiguous(), heads, cache, 1, None, at, 0.3)
        assert torch.equal(again, out[some]), plan


def test_launches_fit_the_device() -> None:
    for kind in ("fp16", "int4"):
        for n_heads, kv_heads, dim in ((12, 12, 128), (64, 8, 256), (32, 2, 96), (71, 1, 64)):
            shape = AttentionShape.of(n_heads, kv_heads, dim, kind)
            assert shape.units * shape.group == n_heads
            for rows in (1, 8, 64, 300):
                plan, blocks = choose_launch(shape, rows)
                plan.check()
                assert plan.shared_bytes + 1024 <= 228 * 1024 // blocks
                assert 1 <= plan.warp_streams <= STREAMS


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


# --- int4 ------------------------------------------------------------------------------------------


def new_int4(heads: tuple[int, int, int]) -> tuple[FragmentCache, CutCache]:
    _, kv, dim = heads
    exact_tables = torch.full((2, 2, len(TABLE)), -1, dtype=torch.int32)
    exact_tables[1, 1] = torch.tensor(COPIES)
    sink_of = torch.full((len(TABLE),), -1, dtype=torch.int32)
    sink_of[TABLE[0]] = SINK
    cache = cuda_fragments.make_cache(
        "int4", len(TABLE), len(TABLE), LAYERS, kv, dim, exact_tables, sink_of, CPU, 3
    )
    twin = make_store(
        Form("int4", LAYERS, kv, dim, dim, True), len(TABLE), len(TABLE), exact_tables, sink_of, CPU
    )
    assert isinstance(twin, CutCache)
    return cache, twin


def filled_int4(
    heads: tuple[int, int, int], count: int, layer: int = 1
) -> tuple[FragmentCache, CutCache]:
    """Both caches with positions 0 .. count - 1 in one layer; ours gets those that make stored forms last, in one pass."""
    cache, twin = new_int4(heads)
    _, kv, dim = heads
    rows = random_rows(count, heads)
    rows[7] = 0.25  # without any spread
    reference.store_kv(rows, heads, twin, layer, paging(range(count)))
    halves = cache.exact.view(torch.half).view(len(TABLE), LAYERS, kv, 2, 64 * dim)
    keys = twin.exact_keys[:, layer].view(torch.half).transpose(2, 3)
    halves[:, layer, :, 0] = fragments.pack_keys(keys)
    halves[:, layer, :, 1] = fragments.pack_values(twin.exact_values[:, layer].view(torch.half))
    last = [*range(min(count, NUM_SINKS)), *range(63, count, 64), count - 1]
    for place in last:  # what store_kv is to write
        at = halves[COPIES[place // 64], layer]
        at[:, 0, fragments.key_place(place % 64, torch.arange(dim), dim)] = 9
        at[:, 1, fragments.value_place(place % 64, torch.arange(dim))] = 9
    cuda_fragments.store_kv(rows[last].contiguous(), heads, cache, layer, paging(last))
    return cache, twin


def numbers(packed: Tensor, dim: int, *, is_value: bool) -> Tensor:
    """The 4-bit numbers of stored parts, (..., 64, dim)."""
    plain = packed.clone()
    plain[..., 32 * dim :] = torch.tensor([1, 0], dtype=torch.half).view(torch.uint8).repeat(64)
    return fragments.unpack_int4(plain, dim, is_value=is_value).to(torch.uint8)


def cut_numbers(stored: Tensor) -> Tensor:
    """The same of a cut cache, (..., dim / 2, 64): a group's first half in the low bits."""
    return torch.cat([stored & 15, stored >> 4], -2).transpose(-1, -2)


@pytest.mark.parametrize("heads", [(2, 1, 64), (2, 2, 96)])
def test_complete_blocks_are_stored_as_the_cut_cache_stores_them(
    heads: tuple[int, int, int],
) -> None:
    cache, twin = filled_int4(heads, 150)
    _, kv, dim = heads
    parts = cache.stored[:, 1].view(len(TABLE), kv, 2, 32 * dim + 256)
    done = TABLE[:2]
    for part, stored in ((0, twin.keys), (1, twin.values.transpose(3, 4))):
        ours = numbers(parts[done, :, part], dim, is_value=part == 1)
        assert torch.equal(ours, cut_numbers(stored[done, 1]))
        pairs = parts[done, :, part, 32 * dim :].contiguous().view(torch.int16).view(2, kv, 64, 2)
        assert torch.equal(pairs.transpose(2, 3), twin.scales[done, 1, :, part])
    sinks = cache.sinks[SINK, 1].view(torch.int16).view(kv, 2, -1)
    assert torch.equal(sinks[:, 0].view(kv, NUM_SINKS, dim), twin.sink_keys[SINK, 1])
    values = sinks[:, 1].view(kv, dim, NUM_SINKS).transpose(1, 2)
    assert torch.equal(values, twin.sink_values[SINK, 1])
    assert not cache.stored[TABLE[2]].any() and not cache.stored[:, 0].any()


@pytest.mark.parametrize(
    ("heads", "positions", "windows", "has_alibi"),
    [
        pytest.param((2, 1, 64), [149, 3, 64], [0, 0, 0], False, id="group_of_2"),
        pytest.param((1, 1, 96), [127], [70], True, id="window_alibi"),
        pytest.param((2, 2, 32), [140], [30], False, id="a_window_and_the_sinks"),
    ],
)
def test_int4_attention_matches_the_twin(
    heads: tuple[int, int, int], positions: list[int], windows: list[int], has_alibi: bool
) -> None:
    cache, twin = filled_int4(heads, 150)
    slopes = 2.0 ** -torch.arange(6, heads[0] + 6) if has_alibi else None
    q = random_rows(len(positions), heads, 5)
    # the sinks must weigh
    key = twin.sink_keys[SINK, 1, 0, 2].view(torch.half).float()
    q[:, : heads[2]] = key
    at = paging(positions, windows=windows)
    out = cuda_fragments.attention(q, heads, cache, 1, slopes, at)
    expected = reference.attention(q, heads, twin, 1, slopes, at)
    torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)
    twin.sink_of[:] = -1
    other = reference.attention(q, heads, twin, 1, slopes, at)
    assert (other - expected).abs().max() > 2 * (out - expected).abs().max()


def test_an_int4_row_has_the_same_bits_mapped() -> None:
    heads = (1, 1, 32)
    plain, _ = filled_int4(heads, 150)
    tree, _ = filled_int4(heads, 148)
    q, places = random_rows(1, heads, 5), [148, 200]
    rows = random_rows(150, heads)[148:]
    cuda_fragments.store_kv(rows.contiguous(), heads, tree, 1, paging([148, 149], places))
    maps = torch.arange(128, 192, dtype=torch.int32)[None].clone()
    maps[0, 20:22] = torch.tensor(places)
    mapped = paging([149], maps=maps, base=128)
    expected = cuda_fragments.attention(q, heads, plain, 1, None, paging([149]))
    assert torch.equal(cuda_fragments.attention(q, heads, tree, 1, None, mapped), expected)
    unmapped = cuda_fragments.attention(q, heads, tree, 1, None, paging([149]))
    assert not torch.equal(unmapped, expected)


def test_copied_and_moved_places_reach_exact_copies_sinks_and_stored_blocks() -> None:
    heads = (1, 1, 32)
    cache, _ = filled_int4(heads, 130)

    def exact(copy: int) -> Tensor:
        halves = cache.exact[copy, 1, 0].view(torch.half).view(2, -1)
        return torch.cat(
            [fragments.unpack_keys(halves[0], 32), fragments.unpack_values(halves[1], 32)], 1
        )

    wanted = exact(COPIES[2])
    wanted[2], sinks = exact(COPIES[0])[2], cache.sinks.clone()
    cuda_fragments.copy_place(cache, 2, [TABLE[0], TABLE[2]], [COPIES[0], COPIES[2]], [SINK, 2])
    assert torch.equal(exact(COPIES[2]), wanted)
    assert torch.equal(cache.sinks[SINK], sinks[SINK])
    moved = cache.sinks[2, 1, 0].view(torch.int16)
    kept = sinks[SINK, 1, 0].view(torch.int16)
    assert torch.equal(moved[64:96], kept[64:96]) and torch.equal(moved[130::4], kept[130::4])
    assert not moved[:64].any() and not moved[131::4].any()

    wanted[63] = exact(COPIES[0])[5]
    ids = torch.tensor([[TABLE[0]], [TABLE[2]]]), torch.tensor([[COPIES[0]], [COPIES[2]]])
    cuda_fragments.move_places(cache, 5, 63, *ids)
    assert torch.equal(exact(COPIES[2]), wanted)
    keys, _ = fragments.pack_int4(wanted[:, :32].float(), is_value=False)
    values, _ = fragments.pack_int4(wanted[:, 32:].float(), is_value=True)
    assert torch.equal(cache.stored[TABLE[2], 1, 0], torch.cat([keys, values]))
    before = cache.stored[TABLE[1]].clone()
    cuda_fragments.copy_place(cache, 63, [TABLE[2], TABLE[1]], [COPIES[2], COPIES[1]], [-1, -1])
    assert not torch.equal(cache.stored[TABLE[1]], before)
