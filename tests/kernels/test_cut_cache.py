"""The CPU kernels over cut caches against their plain twins: what is written bit by bit, what is read within rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.kv_store import Form, make_store
from kernels import cpu, reference
from kernels.cpu_attention import TILE_ROWS, make_tiles
from kernels.layout import CutCache, Paging

HEADS, DIM, LAYERS, LENGTH = 4, 16, 2, 150
FORMATS = ("fp16", "int8", "int4", "h", "h_int4")
ARRAYS = ("keys", "values", "scales", "exact_keys", "exact_values", "sink_keys", "sink_values")


def form(kv_format: str, kv_heads: int = 2) -> Form:
    if kv_format.startswith("h"):
        return Form(kv_format, LAYERS, 1, 48, 24, False)
    return Form(kv_format, LAYERS, kv_heads, DIM, DIM, True)


def make(kv_format: str) -> CutCache:
    has_copies = form(kv_format).has_copies
    tables = torch.full((1, 1, 5) if has_copies else (0, 0, 0), -1, dtype=torch.int32)
    owners = torch.full((5 * has_copies,), -1, dtype=torch.int32)
    cache = make_store(form(kv_format), 5, 5, tables, owners, torch.device("cpu"))
    assert isinstance(cache, CutCache)
    if len(cache.sink_of):
        cache.exact_tables[0, 0, 1:] = torch.tensor([3, 1, 4, 0])
        cache.exact_tables[0, 0, 0] = 2
        cache.sink_of[4] = 1
    return cache


def paging(positions: list[int], windows: int = 0, maps: Tensor | None = None) -> Paging:
    n = len(positions)
    zeros = torch.zeros(n, dtype=torch.int32)
    return Paging(
        zeros, zeros, torch.tensor(positions, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32),
        torch.full((n,), windows, dtype=torch.int32), zeros if maps is not None else zeros - 1,
        torch.full((n,), 64, dtype=torch.int32), torch.zeros(0, 0, dtype=torch.int32) if maps is None else maps,
        torch.tensor([[[4, 0, 3, 1, 2]]], dtype=torch.int32),
        torch.from_numpy(make_tiles(np.zeros(n, np.int32), np.zeros(n, np.int32), TILE_ROWS)),
    )  # fmt: skip


def fill(ops: object, cache: CutCache, kv_format: str, count: int = LENGTH) -> None:
    generator = torch.Generator().manual_seed(3)
    at = paging(list(range(count)))
    for layer in range(LAYERS):
        if kv_format.startswith("h"):
            x = torch.randn(count, 48, generator=generator)
            ops.store_inputs(x, cache, layer, at)  # type: ignore[attr-defined]
        else:
            qkv = torch.randn(count, (HEADS + 4) * DIM, generator=generator)
            qkv[7] = 0.25  # a group without any spread
            ops.store_kv(qkv, (HEADS, 2, DIM), cache, layer, at)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_form_is_written_as_the_twin_writes_it(kv_format: str) -> None:
    ours, twin = make(kv_format), make(kv_format)
    fill(cpu, ours, kv_format)
    fill(reference, twin, kv_format)
    for name in ARRAYS:
        assert torch.equal(getattr(ours, name), getattr(twin, name)), name


@pytest.mark.parametrize("windows", [0, 30])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_attention_reads_what_the_twin_reads(kv_format: str, windows: int) -> None:
    cache = make(kv_format)
    fill(cpu, cache, kv_format)
    heads = (HEADS, 1, 48) if kv_format.startswith("h") else (HEADS, 2, DIM)
    positions = [0, 3, 60, 63, 64, 66, 127, 128, 149]
    q = torch.randn(len(positions), HEADS * heads[2], generator=torch.Generator().manual_seed(5))
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    at = paging(positions, windows)
    out = cpu.attention(q, heads, cache, 1, slopes, at, 0.3)
    expected = reference.attention(q, heads, cache, 1, slopes, at, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)
    for r in range(len(positions)):
        alone = cpu.attention(
            q[r : r + 1].contiguous(),
            heads,
            cache,
            1,
            slopes,
            paging(positions[r : r + 1], windows),
            0.3,
        )
        assert torch.equal(alone[0], out[r])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_mapped_row_has_the_bits_of_the_plain_one(kv_format: str) -> None:
    """A tree row whose keys from position 64 on lie elsewhere: each key is read in the form that its position has."""
    plain, tree = make(kv_format), make(kv_format)
    fill(cpu, plain, kv_format, 140)
    fill(cpu, tree, kv_format, 70)
    width = 76
    places = [64, 65, 66, 67, 68, 69, *range(200, 200 + width - 6)]
    generator = torch.Generator().manual_seed(3)
    at = paging(list(range(140)))
    moved = paging(list(range(140)))
    moved.places = torch.tensor([*range(64), *places], dtype=torch.int32)
    for layer in range(LAYERS):
        if kv_format.startswith("h"):
            x = torch.randn(140, 48, generator=generator)
            cpu.store_inputs(x, plain, layer, at)
            cpu.store_inputs(x, tree, layer, moved)
        else:
            qkv = torch.randn(140, (HEADS + 4) * DIM, generator=generator)
            cpu.store_kv(qkv, (HEADS, 2, DIM), plain, layer, at)
            cpu.store_kv(qkv, (HEADS, 2, DIM), tree, layer, moved)
    heads = (HEADS, 1, 48) if kv_format.startswith("h") else (HEADS, 2, DIM)
    q = torch.randn(2, HEADS * heads[2], generator=generator)
    expected = cpu.attention(q, heads, plain, 1, None, paging([100, 139]), 0.3)
    mapped = paging([100, 139], maps=torch.tensor([places], dtype=torch.int32))
    assert torch.equal(cpu.attention(q, heads, tree, 1, None, mapped, 0.3), expected)
    torch.testing.assert_close(
        reference.attention(q, heads, tree, 1, None, mapped, 0.3), expected, rtol=1e-4, atol=2e-5
    )


@pytest.mark.parametrize("kv_format", ["h", "h_int4"])
def test_inputs_come_back(kv_format: str) -> None:
    cache = make(kv_format)
    fill(cpu, cache, kv_format)
    blocks = torch.tensor([4, 0, 3], dtype=torch.int32)
    copies = torch.tensor([-1, -1, 1 if kv_format == "h_int4" else -1], dtype=torch.int32)
    found = cpu.read_inputs(cache, 1, blocks, copies)
    expected = reference.read_inputs(cache, 1, blocks, copies)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
def test_how_far_a_row_moved(threads: int) -> None:
    cpu.set_threads(threads)
    before, after = torch.randn(2, 9, 37, generator=torch.Generator().manual_seed(1)).unbind(0)
    for name in ("relative_change", "divergence"):
        ours, twin = getattr(cpu, name)(before, after), getattr(reference, name)(before, after)
        torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-7)
        alone = getattr(cpu, name)(before[4:5].contiguous(), after[4:5].contiguous())
        assert alone[0] == ours[4]
    cpu.set_threads(1)
