"""Products y = x W^T of decode rows, the same bits for a row however many rows share the call; here the kernel for one row.

A cluster of 8 blocks owns a run of output rows; each block owns one eighth of K. A block starts all bulk copies
of its weights before it waits for the kernel in front of it (programmatic dependent launch), so the memory
stays busy across kernels. Then: its columns of x by one bulk copy, `mma.sync` with W as the A operand, partial
sums to the block that owns the outputs, the 8 x sub_slices partials added in the order of `add_chains`, finish there
(residual, activation, rotary and cache write, or a plain store). `linear_wide.py` has the kernel for more rows.

Every variant adds the same chains in the same order: neither the row count, nor the launch shape, nor the way the
sums travel changes a bit. x comes as fp16, times the norm's gain and PRESCALE where it is normed; its row's factor
joins the finished sums. `fragments.py` gives the order of the weights and of x.
"""

from __future__ import annotations

from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function
from kernels.fragments import RANKS, ProductShape
from kernels.intrinsics import (
    block_x,
    block_y,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    grid_dependency_launch,
    grid_dependency_wait,
    less,
    map_shared,
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
from kernels.linear_parts import (
    make_collect,
    make_gated,
    make_multiply,
    make_qkv,
    make_residual,
    make_scales,
    make_send,
    make_stage,
    make_store,
    scale_pair,
)
from kernels.linear_shapes import BARS, SHARED_BLOCK_BYTES, HeadShape, Launch, WideLaunch
from kernels.linear_wide import make_wide_kernel
from kernels.polling import bulk_copy_once
from kernels.reads import ends_of_sums, make_zero_once, never_of

# How the lanes that hold a tile's 8 pairs differ, here and in the wide kernel.
PAIR_MASKS, WIDE_PAIR_MASKS = (1, 2, 4), (4, 8, 16)


def _check(launch: Launch) -> None:
    shape = launch.shape
    spread = launch.tiles * shape.sub_slices
    if spread % launch.num_warps or (shape.sub_slices > 1 and launch.warp_tiles != 1):
        raise ValueError(f"{spread} chains do not divide over {launch.num_warps} warps")
    if shape.group % launch.warp_tiles or launch.tiles % launch.warp_tiles:
        raise ValueError(f"{launch.warp_tiles} tiles a warp do not fit groups of {shape.group}")


# --- the kernel ------------------------------------------------------------------------------------

ARGS = "lll" + "rf" + "l" * 8


def _make_kernel(launch: Launch, is_normed: bool, prepare: Any, finish: Any) -> Any:
    shape = launch.shape
    _check(launch)
    num_warps, tiles, rounds, stages = launch.num_warps, launch.tiles, launch.rounds, launch.stages
    clusters, chains, columns = launch.clusters, shape.sub_slices, launch.columns
    group, tile_bytes, num_tiles = shape.group, shape.tile_bytes, shape.num_tiles
    warp_tiles = launch.warp_tiles
    warp_bytes = tiles * tile_bytes // num_warps
    stage_bytes = tiles * tile_bytes
    x_at = launch.weight_bytes
    partials_at = x_at + launch.x_bytes
    buffer_bytes = RANKS * chains * launch.push_slots * 64
    bars_at = launch.scales_at + 4 * columns * num_warps
    x_bar_at = launch.shared_bytes - BARS
    sums_bar_at, free_bar_at = x_bar_at + 8, x_bar_at + 24
    stage, scales = make_stage(launch), make_scales(shape.k, min(8, columns))
    scales_at, warp_scales = launch.scales_at, 4 * columns
    zero_once = make_zero_once(ends_of_sums(warp_tiles, 1))
    chain_x_bytes = shape.k_steps // 2 * launch.column_tiles * 512
    multiply, send, collect = make_multiply(launch), make_send(launch), make_collect(launch)

    @device_function
    def fetch(base: Any, weights: Any, cluster: Any, turn: Any, warp: Any, rank: Any) -> None:
        tile = (cluster + turn * clusters) * tiles + quotient(warp, chains) * warp_tiles
        if tile < num_tiles:
            piece = (quotient(tile, group) * RANKS + rank) * group + remainder(tile, group)
            place = wide(piece) * tile_bytes + remainder(warp, chains) * warp_bytes
            slot = remainder(turn, stages)
            bar = base + bars_at + warp * (8 * stages) + slot * 8
            mbarrier_expect(bar, warp_bytes)
            there = base + slot * stage_bytes + warp * warp_bytes
            bulk_copy_once(there, weights + place, warp_bytes, bar)

    @device_function
    def owned(i: Any, rank: Any, rows: Any) -> Any:
        # The i-th (row, tile) of this rank; past the end a repeated one that is not stored.
        unit = rank + RANKS * i
        return unit if unit < rows * tiles else 0

    @device_function
    def reduce(
        base: Any, turn: Any, cluster: Any, rank: Any, rows: Any, first_row: Any,
        e0: Any, e1: Any, e2: Any, e3: Any, e4: Any, e5: Any, e6: Any, e7: Any,
    ) -> None:  # fmt: skip
        lane = thread_id() & 31
        first = (thread_id() >> 5) * 4 + (lane >> 3)
        table = shared_base() + scales_at + (thread_id() >> 5) * warp_scales
        tile0 = (cluster + turn * clusters) * tiles
        unit = owned(first, rank, rows)
        m, tile = quotient(unit, tiles), remainder(unit, tiles)
        is_real = less(rank + RANKS * first, rows * tiles) & less(tile0 + tile, num_tiles)
        ready = prepare(
            first_row + m, tile0 + tile, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7
        )
        mbarrier_wait(shared_base() + sums_bar_at + (turn & 1) * 8, (turn >> 1) & 1)
        # The loop's count is the same for the whole warp: lanes shuffle in `finish`.
        for i in range((thread_id() >> 5) * 4, (rows * tiles + RANKS - 1) >> 3, num_warps * 4):
            a, b = collect(base, unit, lane & 7)
            if is_normed:
                a, b = scale_pair(a, b, table + m * 4)
            finish(
                ready,
                a,
                b,
                first_row + m,
                tile0 + tile,
                lane & 7,
                is_real,
                e0,
                e1,
                e2,
                e3,
                e4,
                e5,
                e6,
                e7,
            )
            following = i + (lane >> 3) + num_warps * 4
            unit = owned(following, rank, rows)
            m, tile = quotient(unit, tiles), remainder(unit, tiles)
            is_real = less(rank + RANKS * following, rows * tiles) & less(tile0 + tile, num_tiles)
            ready = prepare(
                first_row + m, tile0 + tile, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7
            )

    def kernel(
        weights: Any, x: Any, squares: Any, num_rows: Any, eps: Any,
        e0: Any, e1: Any, e2: Any, e3: Any, e4: Any, e5: Any, e6: Any, e7: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        rank, cluster = cluster_rank(), block_x() >> 3
        base = shared_base()
        bars = base + bars_at + warp * (8 * stages)
        if lane == 0:
            for i in range(stages):
                mbarrier_init(bars + 8 * i, 1)
            if warp == 0:
                mbarrier_init(base + x_bar_at, 1)
            if warp == 0:
                for i in range(2):
                    mbarrier_init(base + sums_bar_at + 8 * i, 1)
                    mbarrier_init(base + free_bar_at + 8 * i, RANKS)
            mbarrier_init_fence()
            for turn in range(min(stages, rounds)):
                fetch(base, weights, cluster, turn, warp, rank)
        sync_block()
        grid_dependency_launch()
        cluster_arrive_relaxed()
        first_row = block_y() * columns
        rows = min(num_rows - first_row, columns)
        sum_bytes = ((rows * tiles - rank + RANKS - 1) >> 3) * (RANKS * chains * 64)
        if thread_id() == 0:
            mbarrier_expect(base + sums_bar_at, sum_bytes)
            if rounds > 1:
                mbarrier_expect(base + sums_bar_at + 8, sum_bytes)
        grid_dependency_wait()
        stage(x, base + x_at, rank)
        if is_normed:
            for first in range(0, rows, 8):
                scales(
                    squares,
                    base + scales_at + warp * warp_scales,
                    first_row,
                    first,
                    rows,
                    eps,
                    lane,
                )
            sync_warp()
        mbarrier_wait(base + x_bar_at, 0)
        cluster_wait()
        chain = remainder(warp, chains)
        tile_in_cluster = quotient(warp, chains) * warp_tiles
        sender = rank * chains + chain
        for turn in range(rounds):
            slot = remainder(turn, stages)
            place = base + slot * stage_bytes + warp * warp_bytes
            if (cluster + turn * clusters) * tiles + tile_in_cluster < num_tiles:
                mbarrier_wait(bars + slot * 8, quotient(turn, stages) & 1)
            acc = multiply(place + lane * 16, base + x_at + chain * chain_x_bytes + lane * 16)
            if turn + stages < rounds:
                sync_warp()
                if lane == 0:
                    free = base + zero_once(acc, never_of(num_rows))
                    fetch(free, weights, cluster, turn + stages, warp, rank)
            if turn > 0:
                before = (turn - 1) & 1
                reduce(
                    base + partials_at + before * buffer_bytes, turn - 1, cluster, rank, rows, first_row,
                    e0, e1, e2, e3, e4, e5, e6, e7,
                )  # fmt: skip
                if turn + 1 < rounds:
                    # This block's buffer is read: arm it for the round after next and tell all who write it.
                    sync_block()
                    if thread_id() == 0:
                        mbarrier_expect(base + sums_bar_at + before * 8, sum_bytes)
                    if thread_id() < RANKS:
                        mbarrier_arrive_cluster(
                            map_shared(base + free_bar_at + before * 8, thread_id())
                        )
            if turn > 1:
                mbarrier_wait(base + free_bar_at + (turn & 1) * 8, ((turn >> 1) - 1) & 1)
            send(
                acc, base + partials_at + (turn & 1) * buffer_bytes, tile_in_cluster, sender, lane, rows,
                base + sums_bar_at + (turn & 1) * 8,
            )  # fmt: skip
        reduce(
            base + partials_at + ((rounds - 1) & 1) * buffer_bytes, rounds - 1, cluster, rank, rows, first_row,
            e0, e1, e2, e3, e4, e5, e6, e7,
        )  # fmt: skip
        if rounds > 1:
            # A block may not end while another may still tell it that a buffer is free.
            cluster_arrive_relaxed()
            cluster_wait()

    return kernel


def _variant(
    name: str,
    launch: Launch | WideLaunch,
    is_normed: bool,
    ends: Any,
    *constants: Any,
) -> Variant:
    if isinstance(launch, WideLaunch):
        return Variant(
            name=f"{name}_m{launch.columns}_t{launch.tiles}_wide{launch.parts}",
            function=make_wide_kernel(launch, is_normed, *ends),
            args=ARGS,
            num_threads=32 * (launch.num_warps + 2),
            cluster=launch.parts,
            shared_bytes=launch.shared_bytes,
            blocks_per_sm=1 if launch.shared_bytes > SHARED_BLOCK_BYTES else 2,
            constants=(launch, is_normed, *constants),
        )
    how = "_ring" if launch.rounds > 1 else ""
    return Variant(
        name=f"{name}_m{launch.max_rows}_t{launch.tiles}{how}",
        function=_make_kernel(launch, is_normed, *ends),
        args=ARGS,
        num_threads=32 * launch.num_warps,
        cluster=RANKS,
        shared_bytes=launch.shared_bytes,
        constants=(launch, is_normed, *constants),
    )


def store_product(
    name: str, launch: Launch | WideLaunch, *, is_normed: bool, has_bias: bool = False
) -> Variant:
    """float32 out = x W^T [+ bias]; `is_normed`: the RMS norm of x, else x as it is."""
    return _variant(name, launch, is_normed, make_store(launch.shape.n, has_bias), has_bias)


def residual_product(name: str, launch: Launch | WideLaunch, target: ProductShape) -> Variant:
    """x += h W^T in place, with what the next norm and its reader `target` need."""
    masks = PAIR_MASKS if isinstance(launch, Launch) else WIDE_PAIR_MASKS
    ends = make_residual(launch.shape.n, target, launch.column_tiles, masks)
    return _variant(name, launch, False, ends, target)


def gated_product(name: str, launch: Launch | WideLaunch, target: ProductShape) -> Variant:
    """fp16 silu(g) * u with [g; u] = norm(x) W^T, in the order of `target`; the shape's n is 2 d_ff."""
    ends = make_gated(launch.shape.n // 2, target, launch.column_tiles)
    return _variant(name, launch, True, ends, target)


def qkv_product(name: str, launch: Launch | WideLaunch, heads: HeadShape) -> Variant:
    """q, k, v = norm(x) W^T, turned; k and v go into the cache."""
    masks = PAIR_MASKS if isinstance(launch, Launch) else WIDE_PAIR_MASKS
    return _variant(name, launch, True, make_qkv(heads, masks[0]), heads)
