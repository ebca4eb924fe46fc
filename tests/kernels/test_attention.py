"""The logic of paged decode attention, run on the emulator at tiny sizes against plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from kernels import attention, emulator, fragments
from kernels.attention import AttentionLaunch, AttentionShape
from kernels.fragments import ProductShape
from kernels.layout import NUM_SINKS

LOG2E = 1.4426950408889634


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    emulator.forget()


def _run(launch: AttentionLaunch, rows: int, *args: object) -> None:
    variant = attention.attention("t", launch)
    flat = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            emulator.register(arg)
            flat.append(arg.data_ptr())
        else:
            flat.append(arg)
    flat += [0] * (len(variant.args) - len(flat))
    grid = (rows * launch.shape.n_kv_heads * launch.cluster, 1)
    emulator.run(
        variant.function, grid, variant.num_threads, flat,
        cluster=launch.cluster, shared_bytes=variant.shared_bytes,
    )  # fmt: skip


def _expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, window: int, slopes: torch.Tensor | None
) -> torch.Tensor:  # fmt: skip
    """q (heads, dim), k and v (kv heads, positions, dim): plain softmax attention in float64."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("hd,hjd->hj", q.double(), k) / q.shape[1] ** 0.5
    j = torch.arange(k.shape[1])
    if slopes is not None:
        scores -= slopes[:, None].double() * (position - j)
    seen = (j <= position) & ((j > position - (window or 1 << 30)) | (j < NUM_SINKS))
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("hj,hjd->hd", scores.softmax(-1), v)


def _case(positions: list[int], heads: int, kv: int, dim: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(len(positions))
    rows, blocks = len(positions), max(max(positions) // 64 + 1, 1)
    q = torch.randn(rows, heads, dim).half()
    k = torch.randn(rows, kv, blocks * 64, dim).half()
    v = torch.randn(rows, kv, blocks * 64, dim).half()
    tables = torch.randperm(rows * blocks).int().view(rows, 1, blocks)
    return q, k, v, tables


@pytest.mark.parametrize(
    ("positions", "cluster", "warps", "stages", "kind"),
    [
        pytest.param([70, -1, 0], 8, 2, 4, "plain", id="odd_rows"),
        pytest.param([63], 1, 4, 3, "plain", id="block_edge"),
        pytest.param([63], 1, 4, 3, "window_alibi", id="block_edge_window_alibi"),
        pytest.param([1100], 2, 4, 3, "plain", id="second_turn", marks=pytest.mark.slow),
        pytest.param(
            [1100], 2, 4, 3, "window_alibi", id="second_turn_window", marks=pytest.mark.slow
        ),
        pytest.param([70, -1, 0], 8, 2, 4, "window_alibi", id="odd_window", marks=pytest.mark.slow),
    ],
)
def test_fp16_matches_softmax_attention(
    positions: list[int], cluster: int, warps: int, stages: int, kind: str
) -> None:
    heads, kv, dim, rows = 2, 1, 64, len(positions)
    q, k, v, tables = _case(positions, heads, kv, dim)
    blocks = tables.shape[2]
    cache = torch.empty(rows * blocks, kv, 2, 64 * dim).half()
    for row in range(rows):
        for b in range(blocks):
            cache[tables[row, 0, b], :, 0] = fragments.pack_keys(k[row, :, b * 64 : b * 64 + 64])
            cache[tables[row, 0, b], :, 1] = fragments.pack_values(v[row, :, b * 64 : b * 64 + 64])
    window = 40 if kind == "window_alibi" else 0
    slopes = torch.tensor([0.25, 0.0625]) if kind == "window_alibi" else None
    shape = AttentionShape(kv, heads // kv, dim, "fp16", slopes is not None)
    target = ProductShape(16, heads * dim, 1)
    out = torch.full((fragments.packed_size(rows, target, 1),), float("nan")).half()
    scaled = (q.float() * (LOG2E / dim**0.5)).half()
    info = torch.tensor([[max(p, 0) >> 6, 0] for p in positions], dtype=torch.int32)
    _run(
        AttentionLaunch(shape, cluster, warps, stages, target, 1), rows, scaled, cache, 0,
        cache.stride(0) * 2, cache,
        cache.stride(0) * 2, tables, torch.tensor(positions, dtype=torch.int32), info,
        0 if slopes is None else slopes, torch.full((rows,), window, dtype=torch.int32), 0, 0, 0, out, 0, 0, 0, 0, 1, blocks,
    )  # fmt: skip
    place = fragments.packed_place(
        torch.arange(rows)[:, None], torch.arange(heads * dim), target, 1
    )
    out = out[place]
    for row, position in enumerate(positions):
        if position < 0:
            assert not out[row].any()
            continue
        want = _expected(q[row], k[row], v[row], position, window, slopes).flatten()
        # p and q are rounded to fp16
        torch.testing.assert_close(out[row].double(), want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("cluster", [1, 4])
def test_int4_reads_stored_blocks_sinks_and_the_own_block_and_stores_what_ends(
    cluster: int,
) -> None:
    """Two rows: one ends its third block, one is at its third position; sinks are kept for both."""
    heads, kv, dim, position, rows = 2, 2, 64, 191, 2
    q, k, v, _ = _case([position, position], heads, kv, dim)
    tables = torch.tensor([[[1, 0, 2]], [[3, 0, 0]]], dtype=torch.int32)
    size = 32 * dim + 256
    stored = torch.zeros(4, kv, 2 * size, dtype=torch.uint8)
    sinks = torch.zeros(2, kv, 2, NUM_SINKS * dim).half()
    sink_of = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    exact = torch.empty(3, kv, 2, 64 * dim).half()
    sinks[1, :, 0] = k[0, :, :NUM_SINKS].flatten(1)
    sinks[1, :, 1] = v[0, :, :NUM_SINKS].transpose(1, 2).flatten(1)
    for row, copy, first in ((0, 2, 128), (1, 0, 0)):
        exact[copy, :, 0] = fragments.pack_keys(k[row, :, first : first + 64])
        exact[copy, :, 1] = fragments.pack_values(v[row, :, first : first + 64])
    for b in range(2):
        for part, x in ((0, k), (1, v)):
            block = x[0, :, b * 64 : b * 64 + 64]
            packed, restored = fragments.pack_int4(block.float(), is_value=part == 1)
            stored[tables[0, 0, b], :, part * size : (part + 1) * size] = packed
            kept = NUM_SINKS if b == 0 else 0
            block[:, kept:] = restored[:, kept:].half()
    shape = AttentionShape(kv, heads // kv, dim, "int4")
    target = ProductShape(16, heads * dim, 1)
    out = torch.full((8 * 256,), float("nan")).half()
    scaled = (q.float() * (LOG2E / dim**0.5)).half()
    _run(
        AttentionLaunch(shape, cluster, 4, 3, target, 1), rows, scaled, exact,
        torch.tensor([[[9, 9, 2]], [[0, 9, 9]]], dtype=torch.int32), exact.stride(0) * 2, stored, stored.stride(0), tables,
        torch.tensor([position, 2], dtype=torch.int32), torch.tensor([[2, 0], [0, 0]], dtype=torch.int32),
        0, 0, 0, 0, 0, out, sinks, sink_of, sinks.stride(0) * 2, 0, 1, 3,
    )  # fmt: skip
    for row, at in enumerate((position, 2)):
        want = _expected(q[row], k[row], v[row], at, 0, None).flatten()
        place = fragments.packed_place(row, torch.arange(heads * dim), target, 1)
        torch.testing.assert_close(out[place].double(), want, rtol=5e-3, atol=5e-3)
    keys, _ = fragments.pack_int4(k[0, :, 128:].float(), is_value=False)
    values, _ = fragments.pack_int4(v[0, :, 128:].float(), is_value=True)
    assert torch.equal(stored[2], torch.cat([keys, values], -1)) and not stored[3].any()
    written = sinks[0, :, 0].view(kv, NUM_SINKS, dim)
    assert torch.equal(written[:, 2], k[1, :, 2]) and not written[:, [0, 1, 3]].any()
    assert torch.equal(sinks[0, :, 1].view(kv, dim, NUM_SINKS)[:, :, 2], v[1, :, 2])
