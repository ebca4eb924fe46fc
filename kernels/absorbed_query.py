"""Before attention over cached inputs: x W_q and W_k^T q by head, and x to the cache.

A cluster of 8 blocks owns a head: each block multiplies one eighth of K for the head's q, the finished q goes to all blocks, each makes one
eighth of W_k^T q. Both weights are on their way before the kernel in front has ended. Further clusters of the same launch write x to
the cache (`absorbed_store`).
"""

from __future__ import annotations

from typing import Any

from kernels.absorbed_parts import QUERY_FACTORS
from kernels.absorbed_products import (
    ProductLaunch,
    make_collect,
    make_multiply,
    make_send,
    product_shape,
)
from kernels.absorbed_store import make_places, make_store
from kernels.compiler import Variant
from kernels.device_code import traced
from kernels.fragments import RANKS, is_for_warpgroups
from kernels.intrinsics import (
    block_x,
    block_y,
    bulk_copy,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    f32_of,
    fence_async,
    fmax,
    fmin,
    grid_dependency_launch,
    grid_dependency_wait,
    grid_x,
    int_to_f32,
    less,
    load_shared_f32,
    map_shared,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    pack_half2,
    quotient,
    remainder,
    select,
    select_int,
    shared_base,
    store_32_if,
    store_async_f32,
    sync_block,
    thread_id,
    wide,
)
from kernels.linear_parts import make_scales

_BARS = 32  # bytes: x has come, sums have come, q has come
_ARGS = "l" * 20 + "rrrrf"


def _make_query(launch: ProductLaunch) -> Any:
    shape, product = launch.shape, product_shape(launch.shape)
    d, groups, n_heads = shape.d_model, shape.groups, shape.n_heads
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
    places = make_places(launch)
    is_ordered = is_for_warpgroups(launch.column_tiles)
    multiply = make_multiply(product.k_steps // 2, launch.column_tiles, is_ordered=is_ordered)
    multiply_fold = make_multiply(head_dim // 32, launch.column_tiles)
    send, collect, store, row_scales = (
        make_send(launch), make_collect(launch), make_store(launch), make_scales(d, 8),
    )  # fmt: skip
    column_tiles, group_bytes, ranks = launch.column_tiles, shape.group_bytes, RANKS

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
            for i in range(8 * warp, rows, 8 * num_warps):
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
            first = (block_x() - n_heads * ranks) * num_warps + warp
            stride = (grid_x() - n_heads * ranks) * num_warps
            where = places(
                sink_of, tables, exact_blocks, positions, row_info, loop, max_loops, max_blocks, first_row, first,
                stride, rows,
            )  # fmt: skip
            grid_dependency_wait()
            store(
                where, x, squares, gain, codes, code_block_bytes, scales, scale_block_bytes, exact, exact_bytes,
                sinks, sink_bytes, first_row, first, stride, rows, eps, lane,
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
        args=_ARGS,
        num_threads=32 * launch.num_warps,
        cluster=RANKS,
        shared_bytes=shared,
        constants=(launch,),
    )
