"""The parts of a product of many rows, each made for one launch shape: the shape, multiply, swap sums, finish.

Straight-line device code but for the launch shape; `linear_wide.py` puts it together and says what it is for.
"""

from __future__ import annotations

from typing import Any

from kernels.device_code import traced
from kernels.intrinsics import (
    less,
    load_shared_128,
    load_shared_f32x4,
    map_shared,
    mma,
    quotient,
    remainder,
    same,
    select,
    select_int,
    store_async_f32x4,
)
from kernels.linear_parts import scale_pair
from kernels.linear_shapes import WideLaunch
from kernels.warpgroup import descriptor, make_added_product


def check(launch: WideLaunch) -> None:
    shape = launch.shape
    if launch.tiles % launch.warps or launch.column_tiles % launch.column_warps:
        raise ValueError(f"{launch} does not divide over its warps")
    if launch.warp_tiles * launch.warp_columns % launch.parts:
        raise ValueError(f"{launch.parts} parts cannot share what a warp makes")
    if shape.k_steps % launch.steps or launch.steps % 2:
        raise ValueError(f"chains of {shape.k_steps} steps do not divide into {launch.steps}")
    if launch.is_by_warpgroups and (launch.warps % 4 or launch.column_warps > 1):
        raise ValueError(f"{launch}: four warps are a warpgroup, each with all columns")
    if launch.tiles > 32:
        raise ValueError(f"one warp cannot fetch {launch.tiles} tiles")


# --- straight-line parts ---------------------------------------------------------------------------


def make_zeros(launch: WideLaunch) -> Any:
    count = 4 * launch.warp_tiles * launch.warp_columns

    @traced("f" * count)
    def zeros() -> Any:
        return (0.0,) * count

    return zeros


def make_add(launch: WideLaunch) -> Any:
    count = 4 * launch.warp_tiles * launch.warp_columns

    @traced("f" * count)
    def add(total: Any, more: Any) -> Any:
        return tuple(a + b for a, b in zip(total, more, strict=True))

    return add


def make_multiply(launch: WideLaunch) -> Any:
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


def make_warpgroup_multiply(launch: WideLaunch) -> Any:
    """The same for a warpgroup, whose warps have all columns of their tiles."""
    tiles, steps, columns = launch.warp_tiles, launch.steps, launch.column_tiles
    product = make_added_product(8 * columns, steps, columns * 512, tiles)

    @traced("f" * (4 * tiles * columns))
    def multiply(acc: Any, weights: Any, x: Any) -> Any:
        a = [
            word
            for place in range(tiles * steps)
            for word in load_shared_128(weights + place * 512)
        ]
        return product(*acc, *a, descriptor(x))

    return multiply


def make_swap(launch: WideLaunch) -> Any:
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
    parts, owned, warps = launch.parts, launch.owned, launch.num_warps

    def collect(mine: Any, i: Any, sums: Any, warp: Any, part: Any, lane: Any) -> Any:
        """The i-th own product plus what the other parts sent, in the order of K."""
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
        return total

    return collect


def _pick(values: Any, i: Any, kinds: str) -> list[Any]:
    """The i-th of several runs of values of these kinds."""
    width = len(kinds)
    chosen = list(values[:width])
    for other in range(1, len(values) // width):
        is_other = same(i, other)
        for at, kind in enumerate(kinds):
            choose = select if kind == "f" else select_int
            chosen[at] = choose(values[other * width + at], chosen[at], is_other)
    return chosen


def make_ends(launch: WideLaunch, is_normed: bool, prepare: Any, finish: Any) -> Any:
    """`prepare` for all that a warp owns, `finish` for one product of it: a lane has pairs of two rows of each.

    `finish` is a loop at run time: what runs once must be fetched first, and code that nobody has run lately comes from far away.
    """
    parts, owned, columns = launch.parts, launch.owned, launch.warp_columns
    num_tiles, warp_tiles = launch.num_tiles, launch.warp_tiles
    kinds = prepare.device_traced.returns
    collect = _make_collect(launch)

    def place(i: Any, odd: int, tile0: Any, column0: Any, part: Any, lane: Any, rows: Any) -> Any:
        number = part + i * parts
        tile, column = tile0, column0 + number
        if warp_tiles > 1:
            tile = tile0 + quotient(number, columns)
            column = column0 + remainder(number, columns)
        row = column * 8 + (lane & 3) * 2 + odd
        return row, tile, lane >> 2, less(row, rows) & less(tile, num_tiles)

    @traced(kinds * (2 * owned), is_tuple=True, num_star=8)
    def prepare_all(
        tile0: Any, column0: Any, part: Any, lane: Any, rows: Any, first_row: Any, *e: Any
    ) -> Any:
        out: list[Any] = []
        for i in range(owned):
            for odd in range(2):
                row, tile, g, is_real = place(i, odd, tile0, column0, part, lane, rows)
                # Rows that are not there may lie outside of what `prepare` reads.
                m = first_row + select_int(row, 0, is_real)
                ready = prepare(m, tile, g, is_real, *e)
                out += ready if isinstance(ready, tuple) else [ready]
        return tuple(out)

    @traced(num_star=8)
    def finish_one(
        i: Any, ready: Any, own: Any, sums: Any, table: Any, warp: Any, tile0: Any, column0: Any,
        part: Any, lane: Any, rows: Any, first_row: Any, *e: Any,
    ) -> None:  # fmt: skip
        total = collect(_pick(own, i, "ffff"), i, sums, warp, part, lane)
        mine = _pick(ready, i, kinds * 2)
        for odd in range(2):
            row, tile, g, is_real = place(i, odd, tile0, column0, part, lane, rows)
            a, b = total[odd], total[odd + 2]
            if is_normed:
                a, b = scale_pair(a, b, table + row * 4)
            given = tuple(mine[len(kinds) * odd : len(kinds) * (odd + 1)])
            finish(given, a, b, first_row + row, tile, g, is_real, *e)

    return prepare_all, finish_one
