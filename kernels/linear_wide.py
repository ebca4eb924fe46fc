"""Products of 2 to 64 rows: blocks with a half (or a quarter) of K that stream weights and x through one ring.

Adds the same chains of `mma.sync` in the same order as the few-row kernel in `linear.py`, so a row's bits are the same in
both: a block runs the GROUP neighbouring chains of its part of K one after the other and adds each to the sum in its
registers, and only the sums of the parts cross the cluster. One warp feeds the ring: weights before the kernel in
front has ended, x after it. One warp works out the rows' factors. The
others multiply, swap sums with the warp of the same number in each block of the cluster, and finish what they own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.device_code import device_function, traced
from kernels.fragments import RANKS, ProductShape
from kernels.intrinsics import (
    block_x,
    block_y,
    bulk_copy,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    fence_async,
    grid_dependency_launch,
    grid_dependency_wait,
    less,
    load_shared_128,
    load_shared_f32x4,
    map_shared,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    mma,
    quotient,
    remainder,
    same,
    select,
    select_int,
    shared_base,
    store_async_f32x4,
    sync_block,
    sync_warp,
    thread_id,
    wide,
)
from kernels.linear_parts import GROUP, make_scales, scale_pair


@dataclass(frozen=True)
class WideLaunch:
    """One launch shape of a product of many rows.

    A block has `tiles` tiles of 16 outputs at a time and all 8 x `column_tiles` rows, over `warps` x `column_warps`
    multiplying warps. The ring has `stages` places of `steps` x 16 columns of K. `is_x_kept`: the block's whole part of x
    stays in shared memory (for clusters that take turns, `max_clusters` of them); else x comes through the ring too.
    """

    shape: ProductShape
    tiles: int
    warps: int
    column_warps: int
    column_tiles: int
    stages: int
    steps: int
    is_x_kept: bool = False
    max_clusters: int = 1 << 20

    @property
    def parts(self) -> int:
        """Pieces of K, one a block."""
        return RANKS * self.shape.sub_slices // GROUP

    @property
    def num_tiles(self) -> int:
        """Tiles that hold outputs."""
        return -(-self.shape.n // 16)

    @property
    def clusters(self) -> int:
        return min(self.max_clusters, -(-self.num_tiles // self.tiles))

    @property
    def rounds(self) -> int:
        return -(-self.num_tiles // (self.tiles * self.clusters))

    @property
    def columns(self) -> int:
        return 8 * self.column_tiles

    @property
    def num_warps(self) -> int:
        """Multiplying warps."""
        return self.warps * self.column_warps

    @property
    def warp_tiles(self) -> int:
        return self.tiles // self.warps

    @property
    def warp_columns(self) -> int:
        """Column tiles of a warp."""
        return self.column_tiles // self.column_warps

    @property
    def owned(self) -> int:
        """Products of a tile and a column tile that a warp finishes."""
        return self.warp_tiles * self.warp_columns // self.parts

    @property
    def block_steps(self) -> int:
        """Ring places that a block's part of K takes."""
        return GROUP * self.shape.k_steps // self.steps

    @property
    def x_stages(self) -> int:
        return self.block_steps if self.is_x_kept else self.stages

    @property
    def weight_stage_bytes(self) -> int:
        return self.tiles * self.steps * 512

    @property
    def x_stage_bytes(self) -> int:
        return self.column_tiles * self.steps * 256

    @property
    def sums_bytes(self) -> int:
        """What one block receives of one round."""
        return (self.parts - 1) * self.num_warps * self.owned * 512

    @property
    def sums_at(self) -> int:
        return self.stages * self.weight_stage_bytes + self.x_stages * self.x_stage_bytes

    @property
    def scales_at(self) -> int:
        return self.sums_at + min(2, self.rounds) * self.sums_bytes

    @property
    def bars_at(self) -> int:
        return self.scales_at + 4 * self.columns

    @property
    def shared_bytes(self) -> int:
        """Barriers: a weight and an `emptied` one a stage, one an x stage, four a warp, one of the factors."""
        return self.bars_at + 8 * (2 * self.stages + self.x_stages + 4 * self.num_warps + 1)


def _check(launch: WideLaunch) -> None:
    shape = launch.shape
    if launch.tiles % launch.warps or launch.column_tiles % launch.column_warps:
        raise ValueError(f"{launch} does not divide over its warps")
    if launch.warp_tiles * launch.warp_columns % launch.parts:
        raise ValueError(f"{launch.parts} parts cannot share what a warp makes")
    if shape.k_steps % launch.steps or launch.steps % 2:
        raise ValueError(f"chains of {shape.k_steps} steps do not divide into {launch.steps}")
    if launch.tiles > 32:
        raise ValueError(f"one warp cannot fetch {launch.tiles} tiles")


# --- straight-line parts ---------------------------------------------------------------------------


def _make_zeros(launch: WideLaunch) -> Any:
    count = 4 * launch.warp_tiles * launch.warp_columns

    @traced("f" * count)
    def zeros() -> Any:
        return (0.0,) * count

    return zeros


def _make_add(launch: WideLaunch) -> Any:
    count = 4 * launch.warp_tiles * launch.warp_columns

    @traced("f" * count)
    def add(total: Any, more: Any) -> Any:
        return tuple(a + b for a, b in zip(total, more, strict=True))

    return add


def _make_multiply(launch: WideLaunch) -> Any:
    """acc[tile][column tile][4] of a warp goes on by the `steps` of one ring place."""
    tiles, columns = launch.warp_tiles, launch.warp_columns
    tile_stride, pair_stride = launch.steps * 512, launch.column_tiles * 512

    @traced("f" * (4 * tiles * columns))
    def multiply(acc: Any, weights: Any, x: Any) -> Any:
        out = [tuple(acc[4 * i : 4 * i + 4]) for i in range(tiles * columns)]
        for pair in range(launch.steps // 2):
            a = [
                [
                    load_shared_128(weights + t * tile_stride + (2 * pair + s) * 512)
                    for s in range(2)
                ]
                for t in range(tiles)
            ]
            for c in range(columns):
                b = load_shared_128(x + pair * pair_stride + c * 512)
                for step in range(2):
                    for t in range(tiles):
                        i = t * columns + c
                        out[i] = mma(*out[i], *a[t][step], *b[2 * step : 2 * step + 2])
        return tuple(value for part in out for value in part)

    return multiply


def _make_swap(launch: WideLaunch) -> Any:
    """Send every other block its share of the sums; this block's own share comes back.

    The i-th product that part p owns of a warp's is number i x parts + p.
    """
    parts, owned, warps = launch.parts, launch.owned, launch.num_warps

    @traced("f" * (4 * owned))
    def swap(total: Any, sums: Any, bar: Any, warp: Any, part: Any, lane: Any) -> Any:
        def of(i: int, owner: Any) -> Any:
            chosen = total[4 * i * parts : 4 * i * parts + 4]
            for p in range(1, parts):
                at = 4 * (i * parts + p)
                is_p = same(owner, p)
                pairs = zip(total[at : at + 4], chosen, strict=True)
                chosen = [select(new, old, is_p) for new, old in pairs]
            return chosen

        for j in range(1, parts):
            owner = remainder(part + j, parts)
            there = map_shared(bar, owner)
            for i in range(owned):
                # Slot parts - 1 - j of the owner is that of the part which comes j before it.
                place = sums + (((parts - 1 - j) * warps + warp) * owned + i) * 512 + lane * 16
                store_async_f32x4(map_shared(place, owner), *of(i, owner), there)
        return tuple(value for i in range(owned) for value in of(i, part))

    return swap


def _make_collect(launch: WideLaunch) -> Any:
    """The own share plus what the other parts sent, in the order of K."""
    parts, owned, warps = launch.parts, launch.owned, launch.num_warps

    @traced("f" * (4 * owned))
    def collect(own: Any, sums: Any, warp: Any, part: Any, lane: Any) -> Any:
        out: list[Any] = []
        for i in range(owned):
            mine = own[4 * i : 4 * i + 4]
            pieces = []
            for source in range(parts):
                slot = remainder(source + parts - part - 1, parts)
                is_own = same(source, part)
                place = sums + (select_int(0, slot, is_own) * warps + warp) * (owned * 512)
                values = load_shared_f32x4(place + i * 512 + lane * 16)
                pieces.append([select(a, b, is_own) for a, b in zip(mine, values, strict=True)])
            total = pieces[0]
            for piece in pieces[1:]:
                total = [a + b for a, b in zip(total, piece, strict=True)]
            out += total
        return tuple(out)

    return collect


def _make_ends(launch: WideLaunch, is_normed: bool, prepare: Any, finish: Any) -> Any:
    """`prepare` and `finish` of all that a warp owns: a lane has pairs of two rows of each product."""
    parts, owned, columns = launch.parts, launch.owned, launch.warp_columns
    num_tiles = launch.num_tiles
    kinds = prepare.device_traced.returns
    count = len(kinds)

    def places(tile0: Any, column0: Any, part: Any, lane: Any, rows: Any, first_row: Any) -> Any:
        for i in range(owned):
            number = part + i * parts
            tile = tile0 + quotient(number, columns)
            column = column0 + remainder(number, columns)
            for odd in range(2):
                row = column * 8 + (lane & 3) * 2 + odd
                is_real = less(row, rows) & less(tile, num_tiles)
                yield i, odd, row, first_row + row, tile, lane >> 2, is_real

    @traced(kinds * (2 * owned), is_tuple=True, num_star=8)
    def prepare_all(
        tile0: Any, column0: Any, part: Any, lane: Any, rows: Any, first_row: Any, *e: Any
    ) -> Any:
        out: list[Any] = []
        for *_, m, tile, g, is_real in places(tile0, column0, part, lane, rows, first_row):
            # Rows that are not there may lie outside of what `prepare` reads.
            ready = prepare(select_int(m, first_row, is_real), tile, g, is_real, *e)
            out += ready if count > 1 else [ready[0] if isinstance(ready, tuple) else ready]
        return tuple(out)

    @traced(num_star=8)
    def finish_all(
        ready: Any, sums: Any, table: Any, tile0: Any, column0: Any, part: Any, lane: Any, rows: Any,
        first_row: Any, *e: Any,
    ) -> None:  # fmt: skip
        all_places = places(tile0, column0, part, lane, rows, first_row)
        for at, (i, odd, row, m, tile, g, is_real) in enumerate(all_places):
            a, b = sums[4 * i + odd], sums[4 * i + odd + 2]
            if is_normed:
                a, b = scale_pair(a, b, table + row * 4)
            finish(ready[count * at : count * (at + 1)], a, b, m, tile, g, is_real, *e)

    return prepare_all, finish_all


# --- the kernel ------------------------------------------------------------------------------------


def make_wide_kernel(launch: WideLaunch, is_normed: bool, prepare: Any, finish: Any) -> Any:
    """The kernel of `launch`; arguments as those of the few-row kernel."""
    _check(launch)
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
    zeros, add, multiply = _make_zeros(launch), _make_add(launch), _make_multiply(launch)
    swap, collect = _make_swap(launch), _make_collect(launch)
    prepare_all, finish_all = _make_ends(launch, is_normed, prepare, finish)
    # The rows whose factors a block needs: all, or those of its own column tiles.
    is_split = warp_columns % parts == 0
    batch = 8
    scales = make_scales(shape.k, batch)

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
            bulk_copy(there, weights + place, tile_stride, bar)

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
        for at in range(min(x_stages, all_steps)):
            fetch_x(x, at, part, lane)
        for at in range(stages, all_steps):
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
            first, step = (part * 8, parts * 8) if is_split else (0, 8)
            for row in range(first, rows, step):
                scales(squares, base + scales_at, first_row, row, rows, eps, lane)
            sync_warp()
            if lane == 0:
                mbarrier_arrive(base + scales_bar_at)

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
                for i in range(stages):
                    mbarrier_init(base + full_at + 8 * i, 1)
                    mbarrier_init(base + empty_at + 8 * i, num_warps)
                for i in range(x_stages):
                    mbarrier_init(base + x_full_at + 8 * i, 1)
                mbarrier_init_fence()
            sync_warp()
            for at in range(min(stages, all_steps)):
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
            x_in = base + x_at + column0 * 512 + lane * 16
            at = 0
            for turn in range(rounds):
                total = zeros()
                for _ in range(GROUP):
                    acc = zeros()
                    for _ in range(pieces):
                        slot, x_slot = remainder(at, stages), remainder(at, x_stages)
                        x_turn = 0 if is_x_kept else quotient(at, x_stages)
                        mbarrier_wait(base + x_full_at + x_slot * 8, x_turn & 1)
                        mbarrier_wait(base + full_at + slot * 8, quotient(at, stages) & 1)
                        acc = multiply(
                            acc, weights_in + slot * weight_stage, x_in + x_slot * x_stage
                        )
                        sync_warp()
                        if lane == 0 and at + stages < all_steps:
                            mbarrier_arrive(base + empty_at + slot * 8)
                        at += 1
                    total = add(total, acc)
                tile0 = first_tile(at - 1) + tile_at
                half = turn & 1
                sums = base + sums_at + half * sums_bytes
                if turn > 1:
                    mbarrier_wait(free_bars + half * 8, ((turn >> 1) - 1) & 1)
                own = swap(total, sums, sums_bars + half * 8, warp, part, lane)
                ready = prepare_all(
                    tile0, column0, part, lane, rows, first_row, e0, e1, e2, e3, e4, e5, e6, e7
                )
                if is_normed and turn == 0:
                    mbarrier_wait(base + scales_bar_at, 0)
                mbarrier_wait(sums_bars + half * 8, (turn >> 1) & 1)
                whole = collect(own, sums, warp, part, lane)
                if turn + 2 < rounds:
                    # What came is read: arm the barrier for the round after next and let the others send.
                    sync_warp()
                    if lane == 0:
                        mbarrier_expect(sums_bars + half * 8, warp_sums_bytes)
                    if 0 < lane < parts:
                        other = remainder(part + lane, parts)
                        mbarrier_arrive_cluster(map_shared(free_bars + half * 8, other))
                    sync_warp()
                finish_all(
                    ready, whole, base + scales_at, tile0, column0, part, lane, rows, first_row,
                    e0, e1, e2, e3, e4, e5, e6, e7,
                )  # fmt: skip

    return kernel
