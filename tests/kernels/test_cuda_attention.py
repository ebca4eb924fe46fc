"""General paged attention of the GPU on the emulator: what is written bit by bit, what is read within rounding, equal bits in all company."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.kv_store import Form, make_store
from kernels import cpu, cuda_attention, reference
from kernels.cuda_attend_parts import Shape
from kernels.layout import BLOCK_SIZE, CutCache, PagedCache, Paging

FORMATS = ("fp32", "fp16", "int8", "int4", "h", "h_int4")
ARRAYS = ("keys", "values", "scales", "exact_keys", "exact_values", "sink_keys", "sink_values")
LAYERS, LENGTH, BLOCKS = 2, 140, 5


def heads_of(kv_format: str) -> tuple[int, int, int]:
    """The vectors of fp16 and h are those of three warps, the others of one."""
    return (2, 1, 48 if kv_format in ("fp16", "h") else 32)


def make(kv_format: str) -> PagedCache | CutCache:
    dim = heads_of(kv_format)[2]
    is_h = kv_format.startswith("h")
    form = Form(kv_format, LAYERS, 1, dim, 16 if is_h else dim, not is_h)
    tables = torch.tensor([[[2, 3, 1, 4, 0]]], dtype=torch.int32)
    owners = torch.tensor([-1, -1, -1, -1, 1], dtype=torch.int32)
    if not form.has_copies:
        tables, owners = tables[:0, :0, :0], owners[:0]
    cache = make_store(form, BLOCKS, BLOCKS, tables, owners, torch.device("cpu"))
    assert isinstance(cache, PagedCache | CutCache)
    if isinstance(cache, PagedCache):  # reading an unused place would show
        cache.keys.fill_(math.nan)
        cache.values.fill_(math.nan)
    return cache


def paging(
    positions: list[int],
    windows: int = 0,
    places: list[int] | None = None,
    maps: Tensor | None = None,
    base: int = 64,
) -> Paging:
    n = len(positions)
    zeros = torch.zeros(n, dtype=torch.int32)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Paging(
        zeros, zeros, ints(positions), ints(places or positions), ints([windows] * n), zeros if maps is not None else zeros - 1,
        ints([base] * n), torch.zeros(0, 0, dtype=torch.int32) if maps is None else maps, ints([4, 0, 3, 1, 2]).view(1, 1, 5),
        ints([*range(0, n, 16), n]),
    )  # fmt: skip


def vectors(kv_format: str, count: int) -> Tensor:
    num_heads, num_kv, dim = heads_of(kv_format)
    width = dim if kv_format.startswith("h") else (num_heads + 2 * num_kv) * dim
    return torch.randn(count, width, generator=torch.Generator().manual_seed(3))


def store(ops: object, kv_format: str, x: Tensor, cache: PagedCache | CutCache, at: Paging) -> None:
    if kv_format.startswith("h"):
        ops.store_inputs(x, cache, 1, at)  # type: ignore[attr-defined]
    else:
        ops.store_kv(x, heads_of(kv_format), cache, 1, at)  # type: ignore[attr-defined]


def filled(kv_format: str, places: list[int] | None = None) -> PagedCache | CutCache:
    cache = make(kv_format)
    x = vectors(kv_format, LENGTH)
    store(cpu, kv_format, x, cache, paging(list(range(LENGTH)), places=places))
    return cache


def queries(kv_format: str, count: int) -> Tensor:
    num_heads, _, dim = heads_of(kv_format)
    return torch.randn(count, num_heads * dim, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_form_is_written_as_the_cpu_writes_it(kv_format: str) -> None:
    x = vectors(kv_format, 5)
    x[1] = 0.25  # a group without any spread
    x[2] *= 1e5  # beyond the range of fp16
    x[3] *= 1e-6
    at = paging([0, 63, 64, 3, -1], places=[0, 63, 64, 3, -1])  # the last row is none
    ours, twin = make(kv_format), make(kv_format)
    store(cuda_attention, kv_format, x, ours, at)
    store(cpu, kv_format, x[:4].contiguous(), twin, paging([0, 63, 64, 3]))
    for name in ARRAYS[:2] if kv_format == "fp32" else ARRAYS:
        mine, expected = getattr(ours, name), getattr(twin, name)
        if kv_format == "fp32":
            mine, expected = mine.nan_to_num(7), expected.nan_to_num(7)
        assert torch.equal(mine, expected), name


@pytest.mark.parametrize("windows", [0, 30])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_attention_reads_what_the_twin_reads(kv_format: str, windows: int) -> None:
    cache, heads = filled(kv_format), heads_of(kv_format)
    positions = [0, 66] if windows else [63, 139]
    q = queries(kv_format, len(positions))
    slopes = torch.tensor([0.5, 0.1]) if windows else None
    at = paging(positions, windows)
    out = cuda_attention.attention(q, heads, cache, 1, slopes, at, 0.3)
    expected = reference.attention(q, heads, cache, 1, slopes, at, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kv_format", ["fp16", "int4", "h_int4"])
def test_a_row_has_the_same_bits_however_its_work_is_shared(
    kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, heads = filled(kv_format), heads_of(kv_format)
    q = queries(kv_format, 3)
    results = []
    for plan in ((1, 1, 16), (2, 1, 4), (2, 1, 1)):
        monkeypatch.setattr(cuda_attention, "plan", lambda *_, plan=plan: plan)
        at = paging([3, 139, -1] if plan[2] == 1 else [139, -1, 3])
        rows = q if plan[2] == 1 else q[[1, 2, 0]].contiguous()
        out = cuda_attention.attention(rows, heads, cache, 1, None, at, 0.3)
        results.append(out if plan[2] == 1 else out[[2, 0, 1]])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not results[0][2].any() and results[0][:2].all()  # a row at position -1 is none


def test_rows_that_share_their_reading_have_the_bits_of_rows_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rows of one block together, with windows; two across its end one by one; a last one without company."""
    cache, heads = filled("int8"), heads_of("int8")
    positions = [66, 67, 69, 127, 128, 70]
    q, slopes = queries("int8", 6), torch.tensor([0.5, 0.1])
    results = []
    for plan in ((2, 1, 4), (6, 3, 1), (3, 3, 1)):
        monkeypatch.setattr(cuda_attention, "plan", lambda *_, plan=plan: plan)
        at = paging(positions)
        at.windows[1:3] = torch.tensor([5, 60])
        results.append(cuda_attention.attention(q, heads, cache, 1, slopes, at, 0.3))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("kv_format", ["fp32", "int8", "h_int4"])
def test_a_mapped_row_has_the_bits_of_the_plain_one(kv_format: str) -> None:
    """Keys from position 64 on lie elsewhere, each read in the form that its position has."""
    elsewhere = [64 + (i * 29) % 128 for i in range(LENGTH - 64)]
    plain, tree = filled(kv_format), filled(kv_format, [*range(64), *elsewhere])
    q, heads = queries(kv_format, 1), heads_of(kv_format)
    maps = torch.tensor([elsewhere], dtype=torch.int32)
    for position in (70, 139) if kv_format == "fp32" else (139,):
        expected = cuda_attention.attention(q, heads, plain, 1, None, paging([position]), 0.3)
        mapped = paging([position], maps=maps)
        assert torch.equal(cuda_attention.attention(q, heads, tree, 1, None, mapped, 0.3), expected)


@pytest.mark.parametrize("kv_format", ["h", "h_int4"])
def test_inputs_come_back(kv_format: str) -> None:
    cache = filled(kv_format)
    assert isinstance(cache, CutCache)
    blocks = torch.tensor([4, 3], dtype=torch.int32)
    copies = torch.tensor([-1, 1 if kv_format == "h_int4" else -1], dtype=torch.int32)
    found = cuda_attention.read_inputs(cache, 1, blocks, copies)
    assert torch.equal(found, cpu.read_inputs(cache, 1, blocks, copies))


def test_plans_fill_the_device_and_leave_no_head_out() -> None:
    for rows in (1, 12, 64, 65, 256):
        for group in (1, 3, 5, 8, 12):
            queries, together, splits = cuda_attention.plan(
                rows, 12, group, Shape("fp16", 128, 1, True)
            )
            heads, blocks = queries // together, -(-rows // together)
            assert 1 <= queries <= 4 and queries == heads * together
            assert splits == 16 or blocks * 12 * -(-group // heads) * splits >= 384


@pytest.mark.parametrize(
    "shape", [("fp16", 20, 1, True), ("int4", 24, 1, True, 12), ("int4", 48, 1, False, 20)]
)
def test_what_does_not_fit_is_refused(shape: tuple) -> None:
    with pytest.raises(ValueError, match="needed|one scale"):
        Shape(*shape)
    assert BLOCK_SIZE == 64
