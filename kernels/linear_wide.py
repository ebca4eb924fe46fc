"""Products of 2 to 64 rows: blocks with a half (or a quarter) of K that stream weights and x through one ring.

Adds the same chains of `mma.sync` in the same order as the few-row kernel in `linear.py`, so a row's bits are the same in
both: a block runs the GROUP neighbouring chains of its part of K one after the other and adds each to the sum in its
registers, and only the sums of the parts cross the cluster. One warp feeds the ring: weights before the kernel in
front has ended, x after it. One warp works out the rows' factors. The others multiply, swap sums with the warp of the same
number in each block of the cluster, and finish what they own. 64 rows are multiplied by warpgroups, four tiles of 16 outputs at a
time with x in shared memory as it came: `wgmma` rounds its sums as `mma.sync` does.
"""

from __future__ import annotations

from typing import Any

from kernels.device_code import device_function
from kernels.fragments import RANKS
from kernels.intrinsics import (
    at_run_time,
    block_x,
    block_y,
    bulk_copy,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    fence_async,
    grid_dependency_launch,
    grid_dependency_wait,
    keep_loop,
    map_shared,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    quotient,
    remainder,
    shared_base,
    sync_block,
    sync_warp,
    thread_id,
    wide,
)
from kernels.linear_parts import make_scales
from kernels.linear_shapes import GROUP, WideLaunch
from kernels.linear_wide_parts import (
    check,
    make_add,
    make_ends,
    make_multiply,
    make_swap,
    make_warpgroup_multiply,
    make_zeros,
)
from kernels.polling import bulk_copy_once
from kernels.reads import ends_of_sums, make_zero_once, never_of


def make_wide_kernel(launch: WideLaunch, is_normed: bool, prepare: Any, finish: Any) -> Any:
    """The kernel of `launch`; arguments as those of the few-row kernel."""
    check(launch)
    shape, parts, rounds = launch.shape, launch.parts, launch.rounds
    tiles, clusters, stages, steps = launch.tiles, launch.clusters, launch.stages, launch.steps
    num_warps, columns = launch.num_warps, launch.columns
    chains, group, tile_bytes = shape.sub_slices, shape.group, shape.tile_bytes
    num_tiles, x_stages, is_x_kept = launch.num_tiles, launch.x_stages, launch.is_x_kept
    pieces, block_steps = shape.k_steps // steps, launch.block_steps
    all_steps = rounds * block_steps
    weight_stage, x_stage = launch.weight_stage_bytes, launch.x_stage_bytes
    x_at, sums_at, scales_at = stages * weight_stage, launch.sums_at, launch.scales_at
    full_at = launch.bars_at
    empty_at, x_full_at = full_at + 8 * stages, full_at + 16 * stages
    sums_bar_at = x_full_at + 8 * x_stages
    free_bar_at = sums_bar_at + 16 * num_warps
    scales_bar_at = free_bar_at + 16 * num_warps
    sums_bytes, warp_sums_bytes = launch.sums_bytes, (parts - 1) * launch.owned * 512
    column_warps, warp_tiles, warp_columns = (
        launch.column_warps, launch.warp_tiles, launch.warp_columns,
    )  # fmt: skip
    tile_stride = steps * 512
    is_by_warpgroups = launch.is_by_warpgroups
    # Whoever asks for everything at once lets the next kernel ask after it.
    is_late = is_by_warpgroups and rounds == 1 and stages == block_steps
    multiply_of = make_warpgroup_multiply if is_by_warpgroups else make_multiply
    zeros, add, multiply = make_zeros(launch), make_add(launch), multiply_of(launch)
    swap, owned = make_swap(launch), launch.owned
    # A warpgroup's product ends as a whole.
    zero_once = make_zero_once([0] if is_by_warpgroups else ends_of_sums(warp_tiles, warp_columns))
    prepare_all, finish_one = make_ends(launch, is_normed, prepare, finish)
    # The rows whose factors a block needs: all, or those of its own column tiles.
    is_split = warp_columns % parts == 0
    apart = 8 * parts if is_split else 8
    together = min(columns, 2 * apart)
    scales = make_scales(shape.k, 8 * (together // apart), apart)

    # Few rows read little but weights, more than the L2 cache holds: none of them are there when the next loop comes.
    copy = bulk_copy_once if launch.column_tiles == 1 else bulk_copy

    @device_function
    def first_tile(at: Any) -> Any:
        """The first tile of this block in the round of ring step `at`."""
        turn = quotient(at, block_steps)
        return (quotient(block_x(), parts) + turn * clusters) * tiles

    @device_function
    def weight_place(at: Any, tile: Any, part: Any) -> Any:
        in_round = remainder(at, block_steps)
        chain = part * GROUP + quotient(in_round, pieces)
        rank, sub = quotient(chain, chains), remainder(chain, chains)
        piece = (quotient(tile, group) * RANKS + rank) * group + remainder(tile, group)
        step = sub * (pieces * steps) + remainder(in_round, pieces) * steps
        return wide(piece) * tile_bytes + step * 512

    @device_function
    def fetch_weights(weights: Any, at: Any, part: Any, lane: Any) -> None:
        base, slot = shared_base(), remainder(at, stages)
        tile0 = first_tile(at)
        count = min(max(num_tiles - tile0, 0), tiles)
        bar = base + full_at + slot * 8
        if lane == 0:
            mbarrier_expect(bar, count * tile_stride)
        sync_warp()
        if lane < count:
            place = weight_place(at, tile0 + lane, part)
            there = base + slot * weight_stage + lane * tile_stride
            copy(there, weights + place, tile_stride, bar)

    @device_function
    def fetch_x(x: Any, at: Any, part: Any, lane: Any) -> None:
        base, slot = shared_base(), remainder(at, x_stages)
        bar = base + x_full_at + slot * 8
        if lane == 0:
            mbarrier_expect(bar, x_stage)
            piece = (block_y() * parts + part) * block_steps + remainder(at, block_steps)
            bulk_copy(base + x_at + slot * x_stage, x + wide(piece) * x_stage, x_stage, bar)

    @device_function
    def feed(weights: Any, x: Any, part: Any, lane: Any) -> None:
        grid_dependency_wait()
        cluster_wait()
        fence_async()
        for at in range(at_run_time(min(x_stages, all_steps))):
            keep_loop()
            fetch_x(x, at, part, lane)
        if is_late:
            grid_dependency_launch()
        for at in range(stages, at_run_time(all_steps)):
            keep_loop()
            emptied = shared_base() + empty_at + remainder(at, stages) * 8
            mbarrier_wait(emptied, (quotient(at, stages) - 1) & 1)
            fetch_weights(weights, at, part, lane)
            if not is_x_kept:
                fetch_x(x, at, part, lane)

    @device_function
    def factor(squares: Any, first_row: Any, rows: Any, eps: Any, part: Any, lane: Any) -> None:
        grid_dependency_wait()
        cluster_wait()
        if is_normed:
            base = shared_base()
            for row in range(part * 8 if is_split else 0, rows, together):
                keep_loop()
                scales(squares, base + scales_at, first_row, row, rows, eps, lane)
            sync_warp()
            if lane == 0:
                mbarrier_arrive(base + scales_bar_at)

    @device_function
    def wait_full(at: Any) -> None:
        """Weights and x of ring step `at` have come."""
        base = shared_base()
        x_turn = 0 if is_x_kept else quotient(at, x_stages)
        mbarrier_wait(base + x_full_at + remainder(at, x_stages) * 8, x_turn & 1)
        mbarrier_wait(base + full_at + remainder(at, stages) * 8, quotient(at, stages) & 1)

    @device_function
    def add_all(at: Any, weights_in: Any, x_in: Any, never: Any, lane: Any) -> Any:
        """The sum over the block's part of K, whose first ring step is `at`."""
        total = zeros()
        for _ in range(at_run_time(GROUP)):
            keep_loop()
            acc = zeros()
            for _ in range(at_run_time(pieces)):
                keep_loop()
                wait_full(at)
                acc = multiply(
                    acc,
                    weights_in + remainder(at, stages) * weight_stage,
                    x_in + remainder(at, x_stages) * x_stage,
                )
                sync_warp()
                if lane == 0 and at + stages < all_steps:
                    place = shared_base() + empty_at + remainder(at, stages) * 8
                    mbarrier_arrive(place + zero_once(acc, never))
                at += 1
            total = add(total, acc)
        return total

    def kernel(
        weights: Any, x: Any, squares: Any, num_rows: Any, eps: Any,
        e0: Any, e1: Any, e2: Any, e3: Any, e4: Any, e5: Any, e6: Any, e7: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        part, base = cluster_rank(), shared_base()
        first_row = block_y() * columns
        rows = min(num_rows - first_row, columns)
        sums_bars, free_bars = base + sums_bar_at + warp * 16, base + free_bar_at + warp * 16
        if warp == num_warps:
            if lane == 0:
                for i in range(at_run_time(stages)):
                    mbarrier_init(base + full_at + 8 * i, 1)
                    mbarrier_init(base + empty_at + 8 * i, num_warps)
                for i in range(at_run_time(x_stages)):
                    mbarrier_init(base + x_full_at + 8 * i, 1)
                mbarrier_init_fence()
            sync_warp()
            for at in range(at_run_time(min(stages, all_steps))):
                keep_loop()
                fetch_weights(weights, at, part, lane)
        elif lane == 0:
            if warp < num_warps:
                for i in range(2):
                    mbarrier_init(sums_bars + 8 * i, 1)
                    mbarrier_init(free_bars + 8 * i, parts - 1)
            else:
                mbarrier_init(base + scales_bar_at, 1)
            mbarrier_init_fence()
            if warp < num_warps:
                for i in range(2):
                    mbarrier_expect(sums_bars + 8 * i, warp_sums_bytes)
        sync_block()
        if not is_late:
            grid_dependency_launch()
        cluster_arrive_relaxed()
        if warp == num_warps:
            feed(weights, x, part, lane)
        elif warp > num_warps:
            factor(squares, first_row, rows, eps, part, lane)
        else:
            grid_dependency_wait()
            cluster_wait()
            tile_at = quotient(warp, column_warps) * warp_tiles
            column0 = remainder(warp, column_warps) * warp_columns
            weights_in = base + tile_at * tile_stride + lane * 16
            x_in, never = base + x_at, never_of(num_rows)
            if not is_by_warpgroups:
                x_in += column0 * 512 + lane * 16
            for turn in range(rounds):
                tile0 = first_tile(turn * block_steps) + tile_at
                if rounds == 1:
                    ready = prepare_all(
                        tile0, column0, part, lane, rows, first_row, e0, e1, e2, e3, e4, e5, e6, e7
                    )
                total = add_all(turn * block_steps, weights_in, x_in, never, lane)
                half = turn & 1
                sums = base + sums_at + half * sums_bytes
                if turn > 1:
                    mbarrier_wait(free_bars + half * 8, ((turn >> 1) - 1) & 1)
                own = swap(total, sums, sums_bars + half * 8, warp, part, lane)
                if rounds > 1:
                    ready = prepare_all(
                        tile0, column0, part, lane, rows, first_row, e0, e1, e2, e3, e4, e5, e6, e7
                    )
                if is_normed and turn == 0:
                    mbarrier_wait(base + scales_bar_at, 0)
                mbarrier_wait(sums_bars + half * 8, (turn >> 1) & 1)
                for i in range(at_run_time(owned)):
                    keep_loop()
                    finish_one(
                        i, ready, own, sums, base + scales_at, warp, tile0, column0, part, lane, rows, first_row,
                        e0, e1, e2, e3, e4, e5, e6, e7,
                    )  # fmt: skip
                if turn + 2 < rounds:
                    # What came is read: arm the barrier for the round after next and let the others send.
                    sync_warp()
                    if lane == 0:
                        mbarrier_expect(sums_bars + half * 8, warp_sums_bytes)
                    if 0 < lane < parts:
                        other = remainder(part + lane, parts)
                        mbarrier_arrive_cluster(map_shared(free_bars + half * 8, other))
                    sync_warp()

    return kernel
