"""The products around attention over cached inputs: x W_q and W_k^T q by head before it, W_v by head after it.

`query`: a cluster of 8 blocks owns a head. Each block multiplies one eighth of K for the head's q (8 chains, added as
`linear_parts.add_chains` does), the finished q goes to all blocks, each makes one eighth of W_k^T q (one chain over head_dim). Both
weights are on their way before the kernel in front has ended. Further clusters of the same launch write x to the cache: its stored form,
the exact copy of the block that is being filled, the exact sinks. `values` is the product after: its input is joined from the chains'
averages while it is staged. A row's bits depend on neither the row count nor its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.absorbed import attention
from kernels.absorbed_parts import QUERY_FACTORS, join_factors, join_halves, twice
from kernels.absorbed_plan import plan
from kernels.absorbed_shape import GROUP, AbsorbedLaunch, AbsorbedShape
from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.fragments import (
    RANKS,
    ProductShape,
    is_for_warpgroups,
    pack_weight,
    packed_place,
    plain_rows,
)
from kernels.intrinsics import (
    block_x,
    block_y,
    bulk_copy,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    divide,
    f32_of,
    fence_async,
    fma,
    fmax,
    fmin,
    grid_dependency_launch,
    grid_dependency_wait,
    grid_x,
    int_to_f32,
    less,
    less_f32,
    load_128_if,
    load_constant_i32,
    load_f32_if,
    load_f32x2_if,
    load_f32x4_if,
    load_i32,
    load_matrices,
    load_shared_128,
    load_shared_f32,
    load_shared_f32x2,
    map_shared,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    mma,
    nearest_int,
    pack_half2,
    quotient,
    remainder,
    rsqrt,
    select,
    select_int,
    shared_base,
    shuffle_from,
    shuffle_xor_f32,
    smaller,
    store_16_if,
    store_32_if,
    store_async_f32,
    store_async_f32x2,
    store_shared_128_if,
    sum_of_warp,
    sync_block,
    thread_id,
    unpack_half2,
    wide,
)
from kernels.layout import NUM_SINKS
from kernels.linear_parts import add_chains, make_scales
from kernels.warpgroup import swizzled

_BARS = 32  # bytes: x has come, sums have come, q has come


def product_shape(shape: AbsorbedShape) -> ProductShape:
    """How W_q, and W_v by query head, are cut: a head's tiles for a cluster."""
    return ProductShape(shape.n_heads * shape.head_dim, shape.d_model, shape.head_dim // 16)


@dataclass(frozen=True)
class ProductLaunch:
    """`column_tiles` is the batch in eights; `store_clusters` write x to the cache (in `query` alone)."""

    shape: AbsorbedShape
    column_tiles: int
    store_clusters: int = 1

    @property
    def columns(self) -> int:
        return 8 * self.column_tiles

    @property
    def tiles(self) -> int:
        """Of a head's outputs."""
        return self.shape.head_dim // 16

    @property
    def num_warps(self) -> int:
        return max(self.tiles, self.shape.groups)

    @property
    def weight_bytes(self) -> int:
        return self.tiles * product_shape(self.shape).tile_bytes

    @property
    def fold_tile_bytes(self) -> int:
        return self.shape.head_dim * 32

    @property
    def x_bytes(self) -> int:
        return product_shape(self.shape).k_slice * self.columns * 2

    @property
    def sum_slots(self) -> int:
        """Pairs of 8 that one block sends to one owner."""
        return -(-self.tiles * self.columns // RANKS)

    @property
    def staged_items(self) -> int:
        """Eights of averages whose loads a thread of `values` has under way at a time."""
        return 3 if self.column_tiles > 2 else 1

    @property
    def q_bytes(self) -> int:
        return self.shape.head_dim * self.columns * 2


# --- weights ---------------------------------------------------------------------------------------


def pack_heads(weight: torch.Tensor, shape: AbsorbedShape) -> torch.Tensor:
    """W_q, or W_v with its kv heads repeated for their query heads: (n_heads * head_dim, d) fp16 in the order of the products."""
    product = product_shape(shape)
    return pack_weight(weight, product, plain_rows(product.n, product).to(weight.device))


def repeat_heads(weight: torch.Tensor, shape: AbsorbedShape) -> torch.Tensor:
    """(n_kv_heads * head_dim, d) -> (n_heads * head_dim, d)."""
    heads = weight.view(shape.n_kv_heads, shape.head_dim, -1)
    return heads.repeat_interleave(shape.n_heads // shape.n_kv_heads, 0).flatten(0, 1)


def fold_values(shape: AbsorbedShape) -> torch.Tensor:
    """Which value of x each row of the packed W_k^T is: (d / 16, 16); rows g and g + 8 of a tile are one word of the query."""
    tile = torch.arange(shape.d_model // 16).view(-1, 1)
    g = torch.arange(8)
    t, word = (tile & 1) * 2 + (g >> 2), g & 3
    value = (tile >> 3) * GROUP + ((tile & 7) >> 1) * 16 + t * 4 + (word & 1) + 64 * (word >> 1)
    return torch.cat([value, value + 2], 1)


def pack_fold(weight: torch.Tensor, shape: AbsorbedShape) -> torch.Tensor:
    """W_k (n_kv_heads * head_dim, d), transposed by head, as [kv head][tile of 16 values][step][lane][8] halves."""
    heads = weight.half().view(shape.n_kv_heads, shape.head_dim, shape.d_model).transpose(1, 2)
    rows = heads[:, fold_values(shape).flatten().to(weight.device)]
    parts = rows.view(shape.n_kv_heads, -1, 2, 8, shape.head_dim // 32, 4, 2, 2, 2)
    # axes: 0 head 1 tile 2 high row 3 g 4 32 columns 5 t 6 step 7 high column 8 half
    return parts.permute(0, 1, 4, 6, 3, 5, 7, 2, 8).contiguous().view(-1)


# --- pieces ----------------------------------------------------------------------------------------


def _make_multiply(num_pairs: int, column_tiles: int, *, is_ordered: bool = False) -> Any:
    """`is_ordered`: x has the order of warpgroups."""
    load = load_matrices if is_ordered else load_shared_128

    @traced("f" * (4 * column_tiles))
    def multiply(weights: Any, x: Any, lane: Any) -> Any:
        """acc[column tile][4] of one tile of 16 outputs over steps of 16 columns, taken in pairs."""
        row = lane & 7
        x += row * 64 + swizzled(lane >> 3, row) * 16 if is_ordered else lane * 16
        acc: list[Any] = [(0.0, 0.0, 0.0, 0.0)] * column_tiles
        for pair in range(num_pairs):
            a = [load_shared_128(weights + (2 * pair + step) * 512) for step in range(2)]
            for c in range(column_tiles):
                b = load(x + (pair * column_tiles + c) * 512)
                for step in range(2):
                    acc[c] = mma(*acc[c], *a[step], *b[2 * step : 2 * step + 2])
        return tuple(value for part in acc for value in part)

    return multiply


def _make_send(launch: ProductLaunch) -> Any:
    tiles, slots = launch.tiles, launch.sum_slots

    @traced()
    def send(acc: Any, sums: Any, tile: Any, rank: Any, lane: Any, rows: Any, bar: Any) -> None:
        """Give a tile's partial sums to the blocks that finish them: (row, tile) belongs to rank (row * tiles + tile) % 8."""
        g, t = lane >> 2, lane & 3
        for c in range(launch.column_tiles):
            for odd in range(2):
                m = 8 * c + 2 * t + odd
                unit = m * tiles + tile
                there = map_shared(sums + (rank * slots + (unit >> 3)) * 64 + g * 8, unit & 7)
                pair = acc[4 * c + odd], acc[4 * c + odd + 2]
                store_async_f32x2(there, *pair, map_shared(bar, unit & 7), rows - m)

    return send


def _make_collect(launch: ProductLaunch) -> Any:
    slots = launch.sum_slots

    @traced("ff")
    def collect(sums: Any, unit: Any, g: Any) -> Any:
        local = sums + (unit >> 3) * 64 + g * 8
        return add_chains([load_shared_f32x2(local + i * slots * 64) for i in range(RANKS)])

    return collect


# --- x to the cache --------------------------------------------------------------------------------


def _make_store(shape: AbsorbedShape) -> Any:
    d = shape.d_model
    num_squares, inverse_d = d // 16, 1.0 / d

    @traced()
    def store(
        x: Any, squares: Any, gain: Any, codes: Any, scales: Any, exact: Any, sink: Any, is_sink: Any, offset: Any,
        group: Any, eps: Any, lane: Any,
    ) -> None:  # fmt: skip
        """One warp: a group of a row's normed x in every form; lane i has its values 4 i to 4 i + 3."""
        sums = [
            load_f32_if(squares + wide((lane + i) * 4), less(lane + i, num_squares))
            for i in range(0, num_squares, 32)
        ]
        total = sums[0]
        for more in sums[1:]:
            total = total + more
        factor = rsqrt(fma(sum_of_warp(total), inverse_d, eps))
        place = group * GROUP + lane * 4
        values = [
            v * factor * g
            for v, g in zip(
                load_f32x4_if(x + wide(place * 4), 1),
                load_f32x4_if(gain + wide(place * 4), 1),
                strict=True,
            )
        ]
        clamped = [fmax(fmin(v, 65504.0), -65504.0) for v in values]
        halves = [pack_half2(*clamped[i : i + 2]) for i in (0, 2)]
        if not shape.is_cut:
            for i in range(2):
                store_32_if(codes + wide((offset * d + place) * 2 + 4 * i), halves[i], 1)
            return
        for i in range(2):
            store_32_if(exact + wide((offset * d + place) * 2 + 4 * i), halves[i], 1)
            store_32_if(sink + wide((offset * d + place) * 2 + 4 * i), halves[i], is_sink)
        least = fmin(fmin(values[0], values[1]), fmin(values[2], values[3]))
        most = fmax(fmax(values[0], values[1]), fmax(values[2], values[3]))
        for mask in (1, 2, 4, 8, 16):
            least = fmin(least, shuffle_xor_f32(least, mask))
            most = fmax(most, shuffle_xor_f32(most, mask))
        pair = pack_half2(divide(most - least, 15.0), least)
        scale, zero = unpack_half2(pair)
        word: Any = None
        for i, value in enumerate(values):
            # a flat group has scale 0 and codes 0
            has_spread = less_f32(0.0, scale)
            code = divide(value - zero, select(scale, int_to_f32(1), has_spread))
            code = fmin(fmax(select(code, int_to_f32(0), has_spread), 0.0), 15.0)
            byte = nearest_int(code) << (8 * i)
            word = byte if word is None else word | byte
        # the second half of the group is the high four bits
        word = word | (shuffle_from(word, lane + 16) << 4)
        store_32_if(codes + wide(offset * (d // 2) + group * 64 + lane * 4), word, less(lane, 16))
        at = scales + wide((2 * group * 64 + offset) * 2)
        store_16_if(at, pair, less(lane, 1))
        store_16_if(at + 128, pair >> 16, less(lane, 1))

    return store


# --- query -----------------------------------------------------------------------------------------

_QUERY_ARGS = "l" * 20 + "rrrrf"


def _make_query(launch: ProductLaunch) -> Any:
    shape, product = launch.shape, product_shape(launch.shape)
    is_cut, d, groups, n_heads = shape.is_cut, shape.d_model, shape.groups, shape.n_heads
    kv_group = shape.n_heads // shape.n_kv_heads
    tiles, columns, num_warps = launch.tiles, launch.columns, launch.num_warps
    weight_bytes, tile_bytes, fold_bytes = (
        launch.weight_bytes,
        product.tile_bytes,
        launch.fold_tile_bytes,
    )
    x_bytes, head_dim, slots, query_bytes = (
        launch.x_bytes, shape.head_dim, launch.sum_slots, shape.query_bytes,
    )  # fmt: skip
    fold_at = weight_bytes
    x_at = fold_at + groups * fold_bytes
    sums_at = x_at + x_bytes
    q_at = sums_at + RANKS * slots * 64
    scales_at = q_at + launch.q_bytes
    bars_at = scales_at + columns * 4
    warp_bars_at = bars_at + _BARS
    num_squares = d // 16
    is_ordered = is_for_warpgroups(launch.column_tiles)
    multiply = _make_multiply(product.k_steps // 2, launch.column_tiles, is_ordered=is_ordered)
    multiply_fold = _make_multiply(head_dim // 32, launch.column_tiles)
    send, collect, store, row_scales = (
        _make_send(launch), _make_collect(launch), _make_store(shape), make_scales(d, 1),
    )  # fmt: skip
    column_tiles, group_bytes, ranks, num_sinks = (
        launch.column_tiles,
        shape.group_bytes,
        RANKS,
        NUM_SINKS,
    )

    @traced()
    def share(
        a: Any, b: Any, table: Any, q: Any, bar: Any, m: Any, tile: Any, g: Any, is_real: Any
    ) -> None:
        """Finish two values of q and give them to all blocks, as B fragments."""
        factor = load_shared_f32(table + m * 4) * shape.scale
        pair = f32_of(pack_half2(a * factor, b * factor))
        k = tile * 16 + 2 * g
        place = ((k >> 5) * column_tiles + (m >> 3)) * 512 + ((m & 7) * 4 + ((k >> 3) & 3)) * 16
        for rank in range(RANKS):
            there = map_shared(q + place + (k & 7) * 2, rank)
            store_async_f32(there, pair, map_shared(bar, rank), is_real)

    @traced()
    def finish(
        acc: Any, queries: Any, head: Any, tile: Any, first_row: Any, rows: Any, lane: Any
    ) -> None:
        """Write a tile of 16 values of W_k^T q, two a word, in the order of `absorbed.query_place`."""
        g, t = lane >> 2, lane & 3
        is_high = (g >> 1) & 1
        factor = select(int_to_f32(1) * QUERY_FACTORS[1], int_to_f32(1) * QUERY_FACTORS[0], is_high)
        width: Any = min(8, shape.columns)
        if shape.tiles > 1:
            width = select_int(shape.columns - 8, 8, head >> 3)
        step, to = (tile & 7) >> 1, (tile & 1) * 2 + (g >> 2)
        word = ((step * width + (head & 7)) * 4 + to) * 4 + (g & 3)
        place = (tile >> 3) * group_bytes + (head >> 3) * 2048 + word * 4
        for c in range(column_tiles):
            for odd in range(2):
                m = 8 * c + 2 * t + odd
                pair = [
                    fmax(fmin(acc[4 * c + odd + 2 * high] * factor, 65504.0), -65504.0)
                    for high in range(2)
                ]
                address = queries + wide(first_row + m) * query_bytes + place
                store_32_if(address, pack_half2(*pair), less(m, rows))

    @device_function
    def write(
        x: Any, squares: Any, gain: Any, codes: Any, code_block_bytes: Any, scales: Any, scale_block_bytes: Any,
        exact: Any, exact_bytes: Any, sinks: Any, sink_bytes: Any, sink_of: Any, tables: Any, exact_blocks: Any,
        positions: Any, row_info: Any, loop: Any, max_loops: Any, max_blocks: Any, row: Any, group: Any, eps: Any,
        lane: Any,
    ) -> None:  # fmt: skip
        position = load_i32(positions + row * 4)
        if position >= 0:
            place = row * max_loops + load_i32(row_info + row * 8 + 4) + loop
            block = load_constant_i32(tables + wide(place * max_blocks + (position >> 6)) * 4)
            copy, sink, is_sink = 0, 0, 0
            if is_cut:
                copy = load_constant_i32(exact_blocks + place * 4)
                if position < num_sinks:
                    sink = load_constant_i32(sink_of + wide(block) * 4)
                    is_sink = 1 if sink >= 0 else 0
            store(
                x + wide(row) * (d * 4), squares + wide(row) * (num_squares * 4), gain,
                codes + wide(block) * code_block_bytes, scales + wide(block) * scale_block_bytes,
                exact + wide(copy) * exact_bytes, sinks + wide(sink) * sink_bytes, is_sink, position & 63,
                group, eps, lane,
            )  # fmt: skip

    def kernel(
        weights: Any, folds: Any, packed: Any, squares: Any, queries: Any, x: Any, gain: Any, codes: Any,
        code_block_bytes: Any, scales: Any, scale_block_bytes: Any, exact: Any, exact_bytes: Any, sinks: Any,
        sink_bytes: Any, sink_of: Any, tables: Any, exact_blocks: Any, positions: Any, row_info: Any,
        num_rows: Any, loop: Any, max_loops: Any, max_blocks: Any, eps: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        rank, head, base = cluster_rank(), block_x() >> 3, shared_base()
        first_row = block_y() * columns
        rows = min(num_rows - first_row, columns)
        if head < n_heads:
            x_bar, sums_bar, q_bar = base + bars_at, base + bars_at + 8, base + bars_at + 16
            weight_bar = base + warp_bars_at + warp * 16
            if lane == 0:
                mbarrier_init(weight_bar, 1)
                mbarrier_init(weight_bar + 8, 1)
                if warp == 0:
                    mbarrier_init(x_bar, 1)
                    mbarrier_init(sums_bar, 1)
                    mbarrier_init(q_bar, 1)
                mbarrier_init_fence()
                if warp < tiles:
                    piece = (head * ranks + rank) * tiles + warp
                    mbarrier_expect(weight_bar, tile_bytes)
                    bulk_copy(
                        base + warp * tile_bytes,
                        weights + wide(piece) * tile_bytes,
                        tile_bytes,
                        weight_bar,
                    )
                if warp < groups:
                    piece = (quotient(head, kv_group) * ranks + rank) * groups + warp
                    mbarrier_expect(weight_bar + 8, fold_bytes)
                    bulk_copy(
                        base + fold_at + warp * fold_bytes, folds + wide(piece) * fold_bytes, fold_bytes,
                        weight_bar + 8,
                    )  # fmt: skip
            sync_block()
            grid_dependency_launch()
            cluster_arrive_relaxed()
            if thread_id() == 0:
                mbarrier_expect(sums_bar, ((rows * tiles - rank + ranks - 1) >> 3) * (ranks * 64))
                mbarrier_expect(q_bar, rows * (head_dim * 2))
            grid_dependency_wait()
            if thread_id() == 0:
                fence_async()
                mbarrier_expect(x_bar, x_bytes)
                bulk_copy(
                    base + x_at, packed + wide(block_y() * ranks + rank) * x_bytes, x_bytes, x_bar
                )
            for i in range(warp, rows, num_warps):
                row_scales(squares, base + scales_at, first_row, i, rows, eps, lane)
            mbarrier_wait(x_bar, 0)
            cluster_wait()
            if warp < tiles:
                mbarrier_wait(weight_bar, 0)
                acc = multiply(base + warp * tile_bytes + lane * 16, base + x_at, lane)
                send(acc, base + sums_at, warp, rank, lane, rows, sums_bar)
            sync_block()
            mbarrier_wait(sums_bar, 0)
            for i in range(warp * 4, (rows * tiles + ranks - 1) >> 3, num_warps * 4):
                unit = rank + ranks * (i + (lane >> 3))
                is_real = less(unit, rows * tiles)
                unit = unit if unit < rows * tiles else 0
                a, b = collect(base + sums_at, unit, lane & 7)
                share(
                    a, b, base + scales_at, base + q_at, q_bar, quotient(unit, tiles), remainder(unit, tiles),
                    lane & 7, is_real,
                )  # fmt: skip
            mbarrier_wait(q_bar, 0)
            if warp < groups:
                mbarrier_wait(weight_bar + 8, 0)
                folded = multiply_fold(
                    base + fold_at + warp * fold_bytes + lane * 16, base + q_at, lane
                )
                finish(folded, queries, head, rank * groups + warp, first_row, rows, lane)
        else:
            grid_dependency_launch()
            grid_dependency_wait()
            block, blocks = block_x() - n_heads * ranks, grid_x() - n_heads * ranks
            for item in range(block * num_warps + warp, rows * groups, blocks * num_warps):
                write(
                    x, squares, gain, codes, code_block_bytes, scales, scale_block_bytes, exact, exact_bytes,
                    sinks, sink_bytes, sink_of, tables, exact_blocks, positions, row_info, loop, max_loops,
                    max_blocks, first_row + quotient(item, groups), remainder(item, groups), eps, lane,
                )  # fmt: skip

    return kernel


def query(name: str, launch: ProductLaunch) -> Variant:
    """W_k^T (W_q norm(x)) of each row and head, and norm(x) to the cache: grid (8 * (heads + store_clusters), chunks of columns).

    Kernel arguments: W_q (`pack_heads`), W_k (`pack_fold`), the packed norm input, its squares, queries (rows, query_bytes / 2)
    fp16 written; x float32 (rows, d), the norm's gain float32 (d,); the cache as `absorbed.attention` has it: values, bytes, scales,
    bytes, exact, bytes, sinks, bytes, sink_of, tables, exact_blocks, positions, row_info; num_rows, loop, max_loops, max_blocks, eps.
    """
    columns, groups = launch.columns, launch.shape.groups
    shared = (
        launch.weight_bytes + groups * launch.fold_tile_bytes + launch.x_bytes + RANKS * launch.sum_slots * 64
        + launch.q_bytes + columns * 4 + _BARS + 16 * launch.num_warps
    )  # fmt: skip
    return Variant(
        name=f"{name}_{launch.shape.kind}_m{columns}",
        function=_make_query(launch),
        args=_QUERY_ARGS,
        num_threads=32 * launch.num_warps,
        cluster=RANKS,
        shared_bytes=shared,
        constants=(launch,),
    )


# --- values ----------------------------------------------------------------------------------------

_VALUE_WARPS = 8


def _make_stage(launch: ProductLaunch, slots: int) -> Any:
    shape, k_slice = launch.shape, product_shape(launch.shape).k_slice
    d, n_heads, units = shape.d_model, shape.n_heads, product_shape(launch.shape).k_slice // 8
    column_tiles = launch.column_tiles

    def join(parts: list[Any]) -> Any:
        """Averages with their (maximum, sum), joined in order."""
        top, total, words = parts[0]
        for more_top, more_total, more in parts[1:]:
            top, total, *both = join_factors(top, total, more_top, more_total)
            shares = [twice(share) for share in both]
            words = [join_halves(a, b, *shares) for a, b in zip(words, more, strict=True)]
        return top, total, words

    @traced()
    def stage(
        averages: Any, meta: Any, head: Any, x: Any, first_item: Any, first_row: Any, rank: Any, rows: Any
    ) -> None:  # fmt: skip
        """Join 8 values of some rows' averages each and put them into their place as B fragments; all are asked for before any is used."""
        asked: list[Any] = []
        for i in range(launch.staged_items):
            item = first_item + i * 32 * _VALUE_WARPS
            row, unit = quotient(item, units), remainder(item, units)
            column = rank * k_slice + unit * 8
            is_row = less(row, rows)
            is_real = is_row & less(column, d)
            parts = []
            for slot in range(slots):
                place = ((first_row + smaller(row, rows - 1)) * slots + slot) * n_heads + head
                told = load_f32x2_if(meta + wide(place) * 8, 1)
                words = load_128_if(averages + (wide(place) * d + column) * 2, is_real)
                parts.append((*told, list(words)))
            asked.append((row, unit, is_row, parts))
        for row, unit, is_row, parts in asked:
            if slots > 2:
                parts = [join(parts[: slots // 2]), join(parts[slots // 2 :])]
            words = join(parts)[2]
            place = ((unit >> 2) * column_tiles + (row >> 3)) * 512
            place = place + ((row & 7) * 4 + (unit & 3)) * 16
            store_shared_128_if(x + place, *words, is_row)

    return stage


def _make_values(launch: ProductLaunch, slots: int, target: ProductShape) -> Any:
    shape, product = launch.shape, product_shape(launch.shape)
    tiles, columns, num_threads = launch.tiles, launch.columns, 32 * _VALUE_WARPS
    tile_bytes, units, ranks, num_warps = (
        product.tile_bytes,
        product.k_slice // 8,
        RANKS,
        _VALUE_WARPS,
    )
    x_at, sums_at = launch.weight_bytes, launch.weight_bytes + launch.x_bytes
    bars_at, head_dim = sums_at + RANKS * launch.sum_slots * 64, shape.head_dim
    warp_bars_at, column_tiles, staged_items = (
        bars_at + 8, launch.column_tiles, launch.staged_items,
    )  # fmt: skip
    multiply = _make_multiply(product.k_steps // 2, launch.column_tiles)
    send, collect, stage = _make_send(launch), _make_collect(launch), _make_stage(launch, slots)

    @traced()
    def finish(a: Any, b: Any, out: Any, row: Any, column: Any, is_real: Any) -> None:
        place = packed_place(row, column, target, column_tiles)
        store_32_if(out + wide(place) * 2, pack_half2(a, b), is_real)

    def kernel(weights: Any, averages: Any, meta: Any, out: Any, num_rows: Any) -> None:
        lane, warp = thread_id() & 31, thread_id() >> 5
        rank, head, base = cluster_rank(), block_x() >> 3, shared_base()
        first_row = block_y() * columns
        rows = min(num_rows - first_row, columns)
        sums_bar, weight_bar = base + bars_at, base + warp_bars_at + warp * 8
        if lane == 0:
            mbarrier_init(weight_bar, 1)
            if warp == 0:
                mbarrier_init(sums_bar, 1)
            mbarrier_init_fence()
            if warp < tiles:
                piece = (head * ranks + rank) * tiles + warp
                mbarrier_expect(weight_bar, tile_bytes)
                bulk_copy(
                    base + warp * tile_bytes,
                    weights + wide(piece) * tile_bytes,
                    tile_bytes,
                    weight_bar,
                )
        sync_block()
        grid_dependency_launch()
        cluster_arrive_relaxed()
        if thread_id() == 0:
            mbarrier_expect(sums_bar, ((rows * tiles - rank + ranks - 1) >> 3) * (ranks * 64))
        grid_dependency_wait()
        for item in range(thread_id(), rows * units, num_threads * staged_items):
            stage(averages, meta, head, base + x_at, item, first_row, rank, rows)
        sync_block()
        cluster_wait()
        if warp < tiles:
            mbarrier_wait(weight_bar, 0)
            acc = multiply(base + warp * tile_bytes + lane * 16, base + x_at, lane)
            send(acc, base + sums_at, warp, rank, lane, rows, sums_bar)
        mbarrier_wait(sums_bar, 0)
        for i in range(warp * 4, (rows * tiles + ranks - 1) >> 3, num_warps * 4):
            unit = rank + ranks * (i + (lane >> 3))
            is_real = less(unit, rows * tiles)
            unit = unit if unit < rows * tiles else 0
            a, b = collect(base + sums_at, unit, lane & 7)
            column = head * head_dim + remainder(unit, tiles) * 16 + (lane & 7) * 2
            finish(a, b, out, first_row + quotient(unit, tiles), column, is_real)

    return kernel


def values(
    name: str, launch: ProductLaunch, attend: AbsorbedLaunch, target: ProductShape
) -> Variant:
    """W_v of the joined averages, fp16 in the order in which `target` reads it: grid (8 * heads, chunks of columns).

    Kernel arguments: W_v (`repeat_heads`, `pack_heads`), averages and meta of `absorbed.attention`, out, num_rows.
    """
    shared = (
        launch.weight_bytes + launch.x_bytes + RANKS * launch.sum_slots * 64 + 8 + 8 * _VALUE_WARPS
    )
    return Variant(
        name=f"{name}_m{launch.columns}_x{attend.split}",
        function=_make_values(launch, attend.slots, target),
        args="llllr",
        num_threads=32 * _VALUE_WARPS,
        cluster=RANKS,
        shared_bytes=shared,
        constants=(launch, attend, target),
    )


def variants() -> dict[str, Variant]:
    """The kernels of the 1B reference model with learned positions, for a check of the compiler's work."""
    found: dict[str, Variant] = {}
    target = ProductShape(1536, 1536, 4)
    for kind in ("int4", "fp16"):
        shape = AbsorbedShape(1536, 12, 12, 128, kind)
        for split in (shape.chains, 2):
            attend = AbsorbedLaunch(shape, split)
            launch = ProductLaunch(shape, 8 if split == 2 else 1)
            for variant in (
                plan("absorbed_plan", attend),
                attention("absorbed", attend),
                query("absorbed_query", launch),
                values("absorbed_values", launch, attend, target),
            ):
                found[variant.name] = variant
    return found
