"""Decode attention over cached inputs and the products around it, run on the emulator at tiny sizes against the plain twins."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import (
    absorbed,
    absorbed_plan,
    absorbed_products,
    absorbed_query,
    absorbed_values,
    emulator,
    fragments,
    reference,
)
from kernels.absorbed_products import ProductLaunch
from kernels.absorbed_shape import (
    COUNT_SHIFT,
    KIND,
    NOTHING,
    AbsorbedLaunch,
    AbsorbedShape,
    average_values,
    query_place,
)
from kernels.compiler import Variant
from kernels.fragments import PRESCALE, ProductShape
from kernels.layout import CutCache, Paging

LAYERS, LAYER = 2, 1
LOG2E = 1.4426950408889634


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    emulator.forget()


def _run(variant: Variant, grid: tuple[int, int], *args: object) -> None:
    flat = []
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.numel():
                emulator.register(arg)
            flat.append(arg.data_ptr())
        else:
            flat.append(arg)
    emulator.run(
        variant.function, grid, variant.num_threads, flat,
        cluster=variant.cluster, shared_bytes=variant.shared_bytes,
    )  # fmt: skip


def _empty_cache(kind: str, tables: Tensor, positions: list[int], d: int) -> CutCache:
    """Blocks for every row, an exact copy of its own block and of its sinks for each."""
    is_cut, rows, num = kind == "int4", len(positions), tables.numel()

    def zeros(*size: int, dtype: torch.dtype = torch.int16) -> Tensor:
        return torch.zeros(*size, dtype=dtype)

    cache = CutCache(
        kind, 128, zeros(0),
        zeros(num, LAYERS, 1, 64, d // 2, dtype=torch.uint8) if is_cut else zeros(num, LAYERS, 1, 64, d),
        zeros(num, LAYERS, 1, 1, 2 * (d // 128) * is_cut, 64), zeros(0), zeros(rows * is_cut, LAYERS, 1, 64, d),
        torch.full((rows, 1, tables.shape[2]) if is_cut else (0, 0, 0), -1, dtype=torch.int32), zeros(0),
        zeros(rows * is_cut, LAYERS, 1, 4, d), torch.full((num * is_cut,), -1, dtype=torch.int32),
    )  # fmt: skip
    for row, position in enumerate(positions):
        if is_cut:
            cache.exact_tables[row, 0, position // 64] = row
            cache.sink_of[tables[row, 0, 0]] = row
    return cache


def _paging(tables: Tensor, slots: list[int], positions: list[int], window: int = 0) -> Paging:
    n = len(positions)
    at, none = torch.tensor(positions, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    return Paging(
        torch.tensor(slots, dtype=torch.int32), none, at, at, none + window, none - 1, none,
        torch.zeros(0, 0, dtype=torch.int32), tables, torch.arange(n + 1),
    )  # fmt: skip


class Case:
    """Rows at `positions` with random inputs in the cache, and queries."""

    def __init__(self, shape: AbsorbedShape, positions: list[int], window: int = 0) -> None:
        torch.manual_seed(0)
        self.shape, self.positions, self.window = shape, positions, window
        rows, d, blocks = len(positions), shape.d_model, max(max(positions) // 64 + 1, 1)
        self.tables = torch.randperm(rows * blocks).int().view(rows, 1, blocks)
        self.cache = _empty_cache(shape.kind, self.tables, positions, d)
        for row, position in enumerate(positions):
            places = list(range(position + 1))
            paging = _paging(self.tables, [row] * len(places), places)
            inputs = torch.randn(len(places), d) * 1.3 + 0.2
            reference.store_inputs(inputs, self.cache, LAYER, paging)
        self.q = torch.randn(rows, shape.n_heads, d) * 0.3
        self.slopes = torch.rand(shape.n_heads) * 0.5

    def expected(self) -> Tensor:
        shape, rows = self.shape, len(self.positions)
        paging = _paging(self.tables, list(range(rows)), self.positions, self.window)
        slopes = self.slopes if shape.has_alibi else None
        heads = (shape.n_heads, 1, shape.d_model)
        out = reference.attention(
            self.q.flatten(1), heads, self.cache, LAYER, slopes, paging, 1 / math.sqrt(shape.head_dim)
        )  # fmt: skip
        return out.view(rows, shape.n_heads, shape.d_model)

    def averages(
        self, split: int, rows: list[int] | None = None, ahead: int = 1
    ) -> tuple[Tensor, Tensor]:
        """What the kernel gives for some rows."""
        shape, launch = self.shape, AbsorbedLaunch(self.shape, split, ahead)
        some = torch.tensor(range(len(self.positions)) if rows is None else rows)
        queries = torch.zeros(len(some), shape.query_bytes // 2)
        for head in range(shape.n_heads):
            for value in range(shape.d_model):
                place, is_high = query_place(shape, head, value)
                factor = shape.scale * (0.25 if is_high else 4.0)
                queries[:, place] = self.q[some, head, value] * factor
        positions = torch.tensor(self.positions, dtype=torch.int32)[some]
        info = torch.stack([positions.clamp(min=0) // 64, torch.zeros_like(positions)], 1)
        size = len(some), launch.slots, shape.n_heads
        out, meta = (
            torch.full((*size, shape.d_model), torch.nan).half(),
            torch.full((*size, 2), torch.nan),
        )
        windows = torch.full((len(some),), self.window, dtype=torch.int32)
        blocks = self.tables.shape[2]
        room = absorbed_plan.list_units(launch, blocks)
        lists = torch.full((len(some), split, room, 4), -1, dtype=torch.int32)
        _run(
            absorbed_plan.plan("t", launch), (len(some), 1), self.tables[some].contiguous(), self.cache.sink_of,
            some.int(), positions, info, windows, lists, 1, blocks, room,
        )  # fmt: skip
        _run(
            absorbed.attention("t", launch), (len(some) * split, 1), queries.half(), *_pools(self.cache), lists,
            positions, windows, self.slopes * LOG2E, out, meta, room,
        )  # fmt: skip
        return out, meta


def _pools(cache: CutCache) -> list[Tensor | int]:
    """The layer's part of each pool, with the bytes of a block."""
    found: list[Tensor | int] = []
    for pool in (cache.values, cache.scales, cache.exact_values, cache.sink_values):
        if pool.numel():
            emulator.register(pool)
            size = pool.element_size()
            found += [pool.data_ptr() + LAYER * pool.stride(1) * size, pool.stride(0) * size]
        else:
            found += [0, 0]
    return found


def _joined(averages: Tensor, meta: Tensor) -> Tensor:
    """Averages of all of a row's slots, weighted by their (maximum, sum)."""
    weights = meta[..., 1] * torch.exp2(meta[..., 0] - meta[..., 0].amax(1, keepdim=True))
    weights = weights / weights.sum(1, keepdim=True)
    found = (averages.float() * weights[..., None]).sum(1).unflatten(-1, (-1, 128))
    values = torch.empty_like(found)
    values[..., average_values()] = found
    return values.flatten(-2)


def _shape(kind: str, d: int = 128, heads: int = 3, has_alibi: bool = False) -> AbsorbedShape:
    return AbsorbedShape(d, heads, heads, 64, kind, has_alibi)


@pytest.mark.parametrize(
    ("shape", "positions", "split", "window"),
    [
        (_shape("int4", 256), [70], 10, 0),
        (_shape("int4"), [0, 63], 2, 0),
        (_shape("int4", heads=9), [130], 5, 0),
        (_shape("int4", has_alibi=True), [150], 10, 40),
        (_shape("fp16", 256), [70], 8, 0),
        (_shape("fp16", has_alibi=True), [150, 16], 2, 40),
    ],
    ids=[
        "stored",
        "own_block",
        "two_column_tiles",
        "window_alibi",
        "inputs",
        "inputs_window_alibi",
    ],
)
def test_attention_reads_what_the_twin_reads(
    shape: AbsorbedShape, positions: list[int], split: int, window: int
) -> None:
    case = Case(shape, positions, window)
    got = _joined(*case.averages(split))
    # queries, p and averages are rounded to fp16
    torch.testing.assert_close(got, case.expected(), rtol=2e-3, atol=2e-3)


def test_sinks_without_an_exact_copy_are_read_as_stored() -> None:
    case = Case(_shape("int4"), [200], 60)
    case.cache.sink_of.fill_(-1)
    got = _joined(*case.averages(10))
    torch.testing.assert_close(got, case.expected(), rtol=2e-3, atol=2e-3)


def test_no_row_gives_zeros() -> None:
    case = Case(_shape("int4"), [5])
    case.positions = [-1]
    averages, meta = case.averages(10)
    assert not averages.any() and not meta[..., 1].any()


def test_a_row_without_blocks_has_no_sinks() -> None:
    """A row that leaves before a loop has no table there, and nobody reads what is listed for it."""
    launch = AbsorbedLaunch(_shape("int4"), 2)
    room = absorbed_plan.list_units(launch, 2)
    lists = torch.full((1, 2, room, 4), -1, dtype=torch.int32)
    number = torch.tensor([70], dtype=torch.int32)
    none, info = torch.full((2,), -1, dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)
    _run(
        absorbed_plan.plan("t", launch), (1, 1), none, torch.zeros(1, dtype=torch.int32), none, number, info,
        number * 0, lists, 1, 2, room,
    )  # fmt: skip
    last = int(lists[0, 1, 0, 2]) >> COUNT_SHIFT
    assert int(lists[0, 1, last - 1, 2]) & KIND == NOTHING


def _values(
    shape: AbsorbedShape, split: int, averages: Tensor, meta: Tensor, columns: int = 1
) -> Tensor:
    """(rows, heads * head_dim) of the product after attention."""
    torch.manual_seed(5)
    rows, width = len(averages), shape.n_heads * shape.head_dim
    weight = torch.randn(shape.n_kv_heads * shape.head_dim, shape.d_model) / shape.d_model**0.5
    launch, target = ProductLaunch(shape, columns), ProductShape(16, width, 1)
    out = torch.full((fragments.packed_size(rows, target, columns),), torch.nan).half()
    packed = absorbed_products.pack_values(weight.half(), shape)
    variant = absorbed_values.values("t", launch, AbsorbedLaunch(shape, split), target)
    chunks = -(-rows // launch.columns)
    _run(variant, (8 * shape.n_heads, chunks), packed, averages, meta, out, rows)
    place = fragments.packed_place(
        torch.arange(rows)[:, None], torch.arange(width), target, columns
    )
    return out[place]


def test_a_row_has_its_bits_in_any_company_and_spread() -> None:
    """Nine stored blocks, so that a chain has two; the last product joins what blocks of many rows join themselves."""
    case = Case(_shape("int4", heads=2), [580, 3])
    alone, many = case.averages(10, [0], 2), case.averages(2)
    joined = _values(case.shape, 2, *many)
    assert torch.equal(_values(case.shape, 10, *alone)[0], joined[0])
    torch.testing.assert_close(_joined(*many), case.expected(), rtol=2e-3, atol=2e-3)


def test_a_block_of_two_chains_gives_what_two_blocks_give() -> None:
    case = Case(_shape("int4", heads=2), [70, 3])
    alone, both = case.averages(10, [0]), case.averages(5, [1, 0], 2)
    assert torch.equal(both[0][1], alone[0][0]) and torch.equal(both[1][1], alone[1][0])


@pytest.mark.parametrize("rows", [1, 9])
def test_values_joins_and_multiplies(rows: int) -> None:
    heads = 1 if rows > 8 else 2
    shape = AbsorbedShape(256, heads, 1, 64, "int4")
    torch.manual_seed(rows)
    averages, meta = torch.randn(rows, 2, heads, 256).half(), torch.rand(rows, 2, heads, 2) * 5
    meta[0, 1, :, 0], meta[0, 1, :, 1] = -1e30, 0  # a chain that saw nothing
    got = _values(shape, 2, averages, meta)
    torch.manual_seed(5)
    weight = (torch.randn(64, 256) / 16).half().float()
    want = _joined(averages, meta) @ weight.T
    torch.testing.assert_close(got.float(), want.flatten(1), rtol=2e-3, atol=2e-3)


class QueryCase:
    """Rows of a residual stream before the product of queries."""

    def __init__(self, shape: AbsorbedShape, positions: list[int]) -> None:
        torch.manual_seed(1)
        self.shape, self.positions = shape, positions
        rows, d = len(positions), shape.d_model
        self.wq = (torch.randn(shape.n_heads * shape.head_dim, d) / d**0.5).half()
        self.wk = (torch.randn(shape.n_kv_heads * shape.head_dim, d) / d**0.5).half()
        self.x, self.gain = torch.randn(rows, d) * 2, torch.rand(d) + 0.5
        self.x[0, :128], self.gain[:128] = 0.7, 1  # a group without any spread
        self.tables = torch.randperm(rows * 2).int().view(rows, 1, 2)

    def run(self, rows: list[int], columns: int = 1) -> tuple[Tensor, CutCache]:
        shape, d = self.shape, self.shape.d_model
        x = self.x[rows].contiguous()
        positions, tables = [self.positions[r] for r in rows], self.tables[rows].contiguous()
        cache = _empty_cache(shape.kind, self.tables, self.positions, d)
        target = absorbed_products.product_shape(shape)
        packed = torch.zeros(fragments.packed_size(len(rows), target, columns)).half()
        place = fragments.packed_place(
            torch.arange(len(rows))[:, None], torch.arange(d), target, columns
        )
        packed[place] = (x * self.gain * PRESCALE).half()
        queries = torch.zeros(len(rows), shape.query_bytes // 2).half()
        at, launch = torch.tensor(positions, dtype=torch.int32), ProductLaunch(shape, columns, 1)
        grid = (8 * (shape.n_heads + 1), -(-len(rows) // launch.columns))
        _run(
            absorbed_query.query("t", launch), grid,
            absorbed_products.pack_heads(self.wq, shape), absorbed_products.pack_fold(self.wk, shape), packed,
            x.view(len(rows), -1, 16).square().sum(-1).contiguous(), queries, x, self.gain, *_pools(cache),
            cache.sink_of, tables, torch.tensor(rows, dtype=torch.int32), at, torch.stack([at // 64, at * 0], 1), len(rows),
            0, 1, 2, 1e-6,
        )  # fmt: skip
        return queries, cache

    def normed(self) -> Tensor:
        return self.x * torch.rsqrt(self.x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


@pytest.mark.parametrize("kind", ["int4", "fp16"])
def test_query_folds_keys_and_stores_the_input(kind: str) -> None:
    shape = AbsorbedShape(256, 2, 1, 64, kind)
    case = QueryCase(shape, [70, 2])
    queries, cache = case.run([0, 1])
    twin = _empty_cache(kind, case.tables, case.positions, 256)
    reference.store_inputs(case.normed(), twin, LAYER, _paging(case.tables, [0, 1], case.positions))
    for name in ("values", "scales", "exact_values", "sink_values"):
        assert torch.equal(getattr(cache, name), getattr(twin, name)), name
    q = (case.normed() @ case.wq.float().T * shape.scale).view(2, 2, 64)
    want = torch.einsum("rhe,ed->rhd", q, case.wk.float())
    got = torch.empty_like(want)
    for head in range(2):
        for value in range(256):
            place, is_high = query_place(shape, head, value)
            got[:, head, value] = queries[:, place].float() / (0.25 if is_high else 4.0)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=5e-4)


def test_a_query_has_its_bits_in_any_company() -> None:
    case = QueryCase(AbsorbedShape(128, 1, 1, 64, "int4"), [70, 2, 64, 5, 6, 7, 8, 9, 100])
    many, wide = case.run(list(range(9)))[0], case.run(list(range(9)), 2)[0]
    alone = case.run([8])[0]
    assert torch.equal(many[8], alone[0])
    assert torch.equal(many, wide)
    assert torch.equal(many, case.run(list(range(9)), fragments.WARPGROUP_TILES)[0])
