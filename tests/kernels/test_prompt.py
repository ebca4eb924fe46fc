"""The prompt class at tiny sizes on the emulator: attention, the kernels between the products, and whole layers, against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import fragments, prompt_products, prompt_rows, reference
from kernels.layout import FragmentCache, PagedCache, Paging
from kernels.prompt import PromptLayer, PromptPass, PromptSpec
from kernels.prompt_attention import prompt_attention
from kernels.prompt_gather import STORED, WRITTEN, cache_arguments, gather
from kernels.prompt_shapes import GatherShape, PromptAttentionShape
from kernels.prompt_split import SplitShape, commit_tiles, split_qkv
from kernels.prompt_tiles import PromptTiles, make_tiles
from kernels.runtime import launch

LOG2E = 1.4426950408889634
LAYERS, LAYER = 2, 1


def _caches(num_blocks: int, kv_heads: int, dim: int) -> tuple[FragmentCache, PagedCache]:
    """The same random keys and values in both forms."""
    make = torch.Generator().manual_seed(dim)
    shape = (num_blocks, LAYERS, kv_heads, 64, dim)
    keys, values = (torch.randn(shape, generator=make).half() for _ in range(2))
    parts = torch.stack([fragments.pack_keys(keys), fragments.pack_values(values)], -2)
    stored = parts.flatten(-2).contiguous().view(torch.uint8)
    none = torch.zeros(0, dtype=torch.int32)
    cache = FragmentCache("fp16", stored, stored, none, dim)
    return cache, PagedCache(keys.transpose(-1, -2).float(), values.float())


def _ints(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def _tiles(
    slots: list[int], positions: list[int], window: int = 0, kind: str = "fp16"
) -> PromptTiles:
    n = len(slots)
    zeros = np.zeros(n, dtype=np.int32)
    return make_tiles(np.array(slots), zeros, np.array(positions), zeros + window, kind=kind)


def _attend(
    shape: PromptAttentionShape, q: Tensor, cache: FragmentCache, block_tables: Tensor, tiles: PromptTiles,
    slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.full(q.shape, float("nan")).half()
    kv_heads, dim = shape.num_kv_heads, shape.head_dim
    tiles.items[:, 3][tiles.items[:, 3] == WRITTEN] = STORED
    scratch = torch.full((len(tiles.items), kv_heads, 256 * dim), 255, dtype=torch.uint8)
    launch(
        gather(GatherShape(kv_heads, dim, cache.kind)), (len(tiles.items) * kv_heads, 1),
        *cache_arguments(cache, LAYER), block_tables, cache.exact_tables, tiles.counts, tiles.items, scratch,
        *block_tables.shape[1:],
    )  # fmt: skip
    launch(
        prompt_attention(shape), (min(tiles.num_units * shape.num_heads, 2), 1), q, scratch, tiles.counts,
        tiles.tiles, slopes, out,
    )  # fmt: skip
    return out


def _queries(rows: int, shape: PromptAttentionShape) -> tuple[Tensor, Tensor]:
    """Scaled fp16 queries as the kernel takes them, and what they were before."""
    scale = LOG2E / shape.head_dim**0.5
    make = torch.Generator().manual_seed(rows)
    q = (torch.randn(rows, shape.num_heads, shape.head_dim, generator=make) * scale).half()
    return q, q.float() / scale


@pytest.mark.parametrize(
    ("shape", "spans", "window"),
    [
        pytest.param(PromptAttentionShape(1, 1, 32), [(0, 0, 1), (1, 64, 128)], 0, id="sequences"),
        pytest.param(PromptAttentionShape(2, 1, 32, True), [(0, 150, 171)], 0, id="gqa_alibi"),
        pytest.param(
            PromptAttentionShape(1, 1, 64, False, True),
            [(0, 187, 205)],
            60,
            id="window_skips_blocks",
        ),
        pytest.param(
            PromptAttentionShape(1, 1, 96, False, True), [(0, 63, 65)], 20, id="block_edge_window"
        ),
        pytest.param(
            PromptAttentionShape(8, 1, 128), [(0, 70, 75)], 0, id="dim_128", marks=pytest.mark.slow
        ),
    ],
)
def test_attention_matches_the_reference(
    shape: PromptAttentionShape, spans: list[tuple[int, int, int]], window: int
) -> None:
    cache, paged = _caches(9, shape.num_kv_heads, shape.head_dim)
    block_tables = _ints([[[3, 0, 7, 5]], [[1, 8, 2, 4]]])
    slots = [slot for slot, first, end in spans for _ in range(first, end)]
    positions = [p for _, first, end in spans for p in range(first, end)]
    q, plain = _queries(len(slots), shape)
    slopes = torch.tensor([0.25, 0.0625]) if shape.has_alibi else None
    out = _attend(shape, q, cache, block_tables, _tiles(slots, positions, window), slopes)
    zeros = torch.zeros(len(slots), dtype=torch.int32)
    paging = Paging(
        _ints(slots), zeros, _ints(positions), _ints(positions), zeros + window, zeros - 1, zeros,
        torch.zeros(0, 0, dtype=torch.int32), block_tables, zeros,
    )  # fmt: skip
    qkv = torch.cat([plain, torch.zeros(len(slots), 2 * shape.num_kv_heads, shape.head_dim)], 1)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    want = reference.attention(qkv.flatten(1), heads, paged, LAYER, slopes, paging)
    # weights and results are rounded to fp16
    torch.testing.assert_close(out.flatten(1).float(), want, rtol=4e-3, atol=4e-3)


def _int4_caches(dim: int) -> tuple[FragmentCache, PagedCache, PagedCache]:
    """A cache of 4 blocks in 4 bits with exact copies (in another order) and sinks, and its keys and values, exact and as stored."""
    _, exact = _caches(4, 1, dim)
    keys, values = exact.keys.transpose(-1, -2), exact.values
    (packed_keys, restored_keys), (packed_values, restored_values) = (
        fragments.pack_int4(x, is_value=i == 1) for i, x in enumerate((keys, values))
    )
    copies = torch.stack([fragments.pack_keys(keys), fragments.pack_values(values)], -2)
    copies = copies.flatten(-2).half().view(torch.uint8)[[1, 3, 0, 2]]
    sinks = torch.zeros(1, LAYERS, 1, 16 * dim, dtype=torch.uint8)
    sinks[0] = torch.cat(
        [keys[2, :, :, :4].flatten(-2), values[2, :, :, :4].transpose(-1, -2).flatten(-2)], -1
    ).half().view(torch.uint8)  # fmt: skip
    restored_keys, restored_values = restored_keys.half().float(), restored_values.half().float()
    restored_keys[2, :, :, :4], restored_values[2, :, :, :4] = (
        x[2, :, :, :4] for x in (keys, values)
    )
    cache = FragmentCache(
        "int4", torch.cat([packed_keys, packed_values], -1), copies.contiguous(),
        _ints([[[3, 2, 1, 0]]]), dim, sinks, _ints([-1, -1, 0, -1]),
    )  # fmt: skip
    as_stored = PagedCache(restored_keys.transpose(-1, -2).contiguous(), restored_values)
    return cache, exact, as_stored


@pytest.mark.parametrize(
    ("dim", "first", "end", "window"),
    [(64, 62, 66, 0), (32, 180, 195, 0), (96, 190, 193, 30), (64, 3, 5, 2)],
)
def test_int4_attention_reads_its_own_block_exactly(
    dim: int, first: int, end: int, window: int
) -> None:
    shape = PromptAttentionShape(1, 1, dim, False, window > 0, "int4")
    cache, exact, as_stored = _int4_caches(dim)
    block_tables = _ints([[[2, 0, 3, 1]]])
    positions = list(range(first, end))
    n = len(positions)
    q, plain = _queries(n, shape)
    out = _attend(shape, q, cache, block_tables, _tiles([0] * n, positions, window, "int4"))
    zeros = torch.zeros(1, dtype=torch.int32)
    for row, position in enumerate(positions):
        own = int(block_tables[0, 0, position // 64])
        keys, values = as_stored.keys.clone(), as_stored.values.clone()
        keys[own], values[own] = exact.keys[own], exact.values[own]
        at = _ints([position])
        paging = Paging(
            zeros, zeros, at, at, zeros + window, zeros - 1, zeros, torch.zeros(0, 0, dtype=torch.int32),
            block_tables, zeros,
        )  # fmt: skip
        qkv = torch.cat([plain[row], torch.zeros(2, dim)]).view(1, -1)
        want = reference.attention(qkv, (1, 1, dim), PagedCache(keys, values), LAYER, None, paging)
        torch.testing.assert_close(out[row].float(), want, rtol=4e-3, atol=4e-3)


def test_a_row_has_the_same_bits_in_every_tile() -> None:
    shape = PromptAttentionShape(1, 1, 32)
    cache, _ = _caches(4, 1, 32)
    block_tables = _ints([[[2, 0]], [[1, 3]]])
    q, _ = _queries(24, shape)
    whole = _attend(shape, q, cache, block_tables, _tiles([0] * 24, list(range(100, 124))))
    assert whole.isfinite().all()
    late = _attend(shape, q[19:], cache, block_tables, _tiles([0] * 5, list(range(119, 124))))
    assert torch.equal(whole[19:], late)
    mixed = torch.cat([q[:3], q[7:9]])
    beside = _attend(
        shape, mixed, cache, block_tables, _tiles([1] * 3 + [0] * 2, [5, 6, 7, 107, 108])
    )
    assert torch.equal(whole[7:9], beside[3:])


@pytest.mark.parametrize("d", [64, 200, 2056])
def test_norm(d: int) -> None:
    torch.manual_seed(d)
    x, gain = torch.randn(9, d), torch.randn(d)
    h = torch.full((9, d), float("nan")).half()
    blocks = -(-9 // prompt_rows.norm_rows_per_block(d))
    launch(prompt_rows.norm(d), (blocks, 1), x, gain, h, 9, 1e-6)
    torch.testing.assert_close(h.float(), reference.norm(x, gain, None, 1e-6), rtol=2e-3, atol=1e-3)
    alone = torch.zeros(1, d).half()
    launch(prompt_rows.norm(d), (1, 1), x[8:].contiguous(), gain, alone, 1, 1e-6)
    assert torch.equal(alone, h[8:])


@pytest.mark.parametrize("rows", [1, 5])
def test_gate(rows: int) -> None:
    torch.manual_seed(rows)
    gate_up = torch.randn(rows, 2 * 40).half()
    out = torch.full((rows, 40), float("nan")).half()
    launch(prompt_rows.gate(40), (prompt_rows.gate_grid(rows, 40), 1), gate_up, out, rows)
    want = reference.activate(gate_up.float(), "silu_glu")
    torch.testing.assert_close(out.float(), want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SplitShape(2, 1, 32, True, True, True), id="half_gathered"),
        pytest.param(SplitShape(1, 1, 64, True, False), id="interleaved"),
        pytest.param(SplitShape(1, 1, 96, False, True, True), id="plain_gathered"),
    ],
)
def test_split_turns_scales_and_stores(shape: SplitShape) -> None:
    torch.manual_seed(shape.head_dim)
    dim, kv = shape.head_dim, shape.num_kv_heads
    positions = list(range(120, 197)) + [3]
    slots = [0] * 77 + [1]
    qkv = torch.randn(len(slots), shape.parts * dim).half()
    angles = torch.rand(200, dim // 2) * 6
    table = torch.stack([angles.cos(), angles.sin()], -1)
    block_tables = _ints([[[0, 1, 2, 3]], [[4, 0, 0, 0]]])
    tiles = _tiles(slots, positions)
    cache, _ = _caches(5, kv, dim)
    before = cache.stored.clone()
    q = torch.full((len(slots), shape.num_heads * dim), float("nan")).half()
    scratch = torch.zeros(tiles.num_items, kv, 256 * dim, dtype=torch.uint8)
    launch(
        split_qkv(shape), (len(tiles.tiles) * shape.parts, 1), qkv, q, cache.exact,
        LAYER * cache.exact.stride(1), cache.exact.stride(0), block_tables, tiles.counts, tiles.tiles,
        table if shape.is_rotary else None, scratch, *block_tables.shape[1:],
    )  # fmt: skip
    heads = (shape.num_heads, kv, dim)
    want = qkv.float().clone()
    reference.prepare_qkv(
        want, heads, None, None, 1e-6, None, table.movedim(-1, 0) if shape.is_rotary else None,
        not shape.is_half_pairing, torch.tensor(positions),
    )  # fmt: skip
    want_q, want_k, want_v = (
        part.unflatten(1, (-1, dim))
        for part in want.split([h * dim for h in (heads[0], kv, kv)], 1)
    )
    torch.testing.assert_close(
        q.unflatten(1, (-1, dim)).float(), want_q * (LOG2E / dim**0.5), rtol=1e-3, atol=1e-3
    )
    parts = cache.stored.view(torch.half).view(5, LAYERS, kv, 2, 64 * dim)
    old = before.view(torch.half).view(5, LAYERS, kv, 2, 64 * dim)
    assert torch.equal(parts[:, 0], old[:, 0]), "another layer was written"
    keys = fragments.unpack_keys(parts[:, LAYER, :, 0], dim)
    values = fragments.unpack_values(parts[:, LAYER, :, 1], dim)
    old_keys = fragments.unpack_keys(old[:, LAYER, :, 0], dim)
    old_values = fragments.unpack_values(old[:, LAYER, :, 1], dim)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        block, offset = int(block_tables[slot, 0, position // 64]), position % 64
        torch.testing.assert_close(
            keys[block, :, offset].float(), want_k[row], rtol=1e-3, atol=1e-3
        )
        assert torch.equal(values[block, :, offset].float(), want_v[row])
        old_keys[block, :, offset] = keys[block, :, offset]
        old_values[block, :, offset] = values[block, :, offset]
    assert torch.equal(keys, old_keys) and torch.equal(values, old_values), "others were written"
    if shape.is_gathered:
        written = tiles.items[:, 3] == WRITTEN
        assert written.sum() == 1
        tiles.items[:, 3] = STORED
        gathered = scratch.clone()
        launch(
            gather(GatherShape(kv, dim)), (tiles.num_items * kv, 1), *cache_arguments(cache, LAYER), block_tables,
            None, tiles.counts, tiles.items, gathered, *block_tables.shape[1:],
        )  # fmt: skip
        assert torch.equal(scratch[written], gathered[written])
        assert not scratch[~written].any()


def test_full_blocks_are_stored_in_4_bits_and_first_keys_kept() -> None:
    dim = 32
    cache, exact, _ = _int4_caches(dim)
    packed = cache.stored.clone()
    cache.stored.zero_()
    assert cache.sinks is not None
    kept = cache.sinks.clone()
    cache.sinks.zero_()
    block_tables = _ints([[[2, 0, 3, 1]]])
    # block 0 ends here, block 1 is whole, block 2 is not full
    positions = list(range(2, 140))
    tiles = _tiles([0] * len(positions), positions, kind="int4")
    launch(
        commit_tiles(dim, 1), (len(tiles.tiles), 1), *cache_arguments(cache, LAYER),
        block_tables, cache.exact_tables, tiles.counts, tiles.tiles, *block_tables.shape[1:],
    )  # fmt: skip
    for index in range(4):
        block = int(block_tables[0, 0, index])
        want = packed[block, LAYER] if index < 2 else torch.zeros_like(packed[0, 0])
        assert torch.equal(cache.stored[block, LAYER], want)
    assert not cache.stored[:, 0].any()
    keys, values = (x.view(torch.half) for x in kept[0, LAYER, 0].split(8 * dim))
    got_keys, got_values = (x.view(torch.half) for x in cache.sinks[0, LAYER, 0].split(8 * dim))
    assert torch.equal(got_keys.view(4, dim)[2:], keys.view(4, dim)[2:])
    assert torch.equal(got_values.view(dim, 4)[:, 2:], values.view(dim, 4)[:, 2:])
    assert not got_keys.view(4, dim)[:2].any()


def test_tiles_end_at_blocks_tables_and_sequences() -> None:
    slots = np.array([1, 1, 1, 0, 0, 0])
    tables = np.array([0, 0, 0, 0, 0, 1])
    tiles = make_tiles(slots, tables, np.array([62, 63, 64, 9, 10, 11]), np.array([0] * 5 + [4]))
    nothing = [0] * 6
    assert tiles.tiles[:, :6].tolist() == [
        [1, 0, 62, 0, 2, 0],
        [1, 0, 64, 2, 1, 0],
        [0, 1, 11, 5, 1, 4],
        nothing,
        [0, 0, 9, 3, 2, 0],
        nothing,
    ]


def test_products_are_cut_into_kept_row_counts() -> None:
    assert prompt_products.pieces(130, (64, 128)) == [(0, 128), (128, 64)]
    assert prompt_products.pieces(1, (64, 128)) == [(0, 64)]
    assert prompt_products.pieces(300, (64, 128)) == [(0, 128), (128, 128), (256, 64)]


def test_a_count_whose_bits_differ_is_not_kept() -> None:
    def product(x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(x.float() @ weight.float().t() + (0.5 if len(x) == 16 else 0))

    weight = torch.randn(8, 32).half()
    assert prompt_products.keep_equal(product, weight, (8, 16, 32)) == (8, 32)


def _layer(spec: PromptSpec) -> PromptLayer:
    make = torch.Generator().manual_seed(5)

    def matrix(n: int, k: int) -> Tensor:
        return (torch.randn(n, k, generator=make) / k**0.5).half()

    def gain() -> Tensor:
        return 1 + 0.1 * torch.randn(spec.d_model, generator=make)

    d, wide = spec.d_model, spec.num_heads * spec.head_dim
    qkv, o = matrix(spec.split.parts * spec.head_dim, d), matrix(d, wide)
    return PromptLayer(qkv, o, matrix(2 * spec.d_ff, d), matrix(d, spec.d_ff), gain(), gain())


def _plain_layer(spec: PromptSpec, w: PromptLayer, x: Tensor, table: Tensor) -> Tensor:
    """One sequence from position 0 in float32."""
    dim, group, n = spec.head_dim, spec.num_heads // spec.num_kv_heads, len(x)
    heads = (spec.num_heads, spec.num_kv_heads, dim)
    qkv = reference.norm(x, w.norm1, None, spec.norm_eps) @ w.qkv.float().t()
    reference.prepare_qkv(
        qkv, heads, None, None, 0.0, None, table.movedim(-1, 0), not spec.is_half_pairing, torch.arange(n)
    )  # fmt: skip
    q, k, v = (
        part.unflatten(1, (-1, dim)).transpose(0, 1)
        for part in qkv.split([h * dim for h in (heads[0], heads[1], heads[1])], 1)
    )
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) / dim**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w.o.float().t()
    gate_up = reference.norm(x, w.norm3, None, spec.norm_eps) @ w.gate_up.float().t()
    return x + reference.activate(gate_up, "silu_glu") @ w.down.float().t()


@pytest.mark.parametrize("kind", ["fp16", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_layer_matches_plain_pytorch_and_does_not_depend_on_chunks(kind: str) -> None:
    spec = PromptSpec(64, 2, 1, 32, 48)
    weights = _layer(spec)
    angles = torch.rand(200, 16) * 6
    table = torch.stack([angles.cos(), angles.sin()], -1)
    block_tables = _ints([[[3, 0]], [[1, 2]]])
    cache, _ = _caches(4, 1, 32)
    if kind == "int4":
        cache, _, _ = _int4_caches(32)
        cache.exact_tables = _ints([[[0, 1]], [[2, 3]]])
    torch.manual_seed(0)
    x = torch.randn(69, 64)
    candidates = (64, 128)

    def run(chunks: list[list[tuple[int, int, int]]]) -> Tensor:
        """The states of slot 0 after a layer, for passes of (slot, first, end) spans."""
        stored = torch.zeros_like(cache.stored)
        exact = stored if kind == "fp16" else torch.zeros_like(cache.exact)
        fresh = replace(cache, stored=stored, exact=exact)
        passing = PromptPass(
            spec, [weights], fresh, block_tables, angles=table, candidates=candidates
        )
        out = torch.empty_like(x)
        for spans in chunks:
            slots = [slot for slot, first, end in spans for _ in range(first, end)]
            positions = [p for _, first, end in spans for p in range(first, end)]
            state = passing.new_state(len(slots))
            state[: len(slots)] = x[positions]
            passing.layer(state, len(slots), 0, _tiles(slots, positions, 0, kind), LAYER)
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
                if slot == 0:
                    out[position] = state[row]
        return out

    whole = run([[(0, 0, 69)]])
    want = _plain_layer(spec, weights, x, table)
    torch.testing.assert_close(whole[:64], want[:64], rtol=2e-2, atol=2e-2)
    # after the first block with keys of 4 bits
    gap = 2e-2 if kind == "fp16" else 0.15
    torch.testing.assert_close(whole[64:], want[64:], rtol=gap, atol=gap)
    cut = run([[(1, 0, 3), (0, 0, 64)], [(0, 64, 69), (1, 3, 5)]])
    assert torch.equal(whole, cut)
