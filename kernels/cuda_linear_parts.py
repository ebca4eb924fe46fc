"""Device code that the general products share: how x is split into halves, fragments of W, the one order of all sums.

A row of x is cut into 8 slices by K alone. A slice is scaled by the power of two that brings its largest value to 2^14 .. 2^15 and
written as two planes of halves, x s = high + low; one chain of `mma.sync` a slice, in the order of the columns, multiplies both
planes; the chains, scaled back, are added in order. Every kernel keeps to that, so that a row's bits do not depend on which one ran.
"""

from __future__ import annotations

from typing import Any

from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    bits_of,
    block_x,
    block_y,
    byte_permute,
    f32_of,
    fma,
    fmax,
    grid_dependency_launch,
    grid_dependency_wait,
    int_to_f32,
    less,
    load_f32_if,
    load_f32x4_if,
    load_shared_128,
    mma,
    pack_half2,
    same,
    select,
    select_int,
    shuffle_xor_f32,
    store_128_if,
    store_f32_if,
    store_shared_128_if,
    sub_half2,
    thread_id,
    unpack_half2,
    wide,
)

SLICES = 8
GROUP = 32  # columns that one 128-bit load of a lane covers
RUN = 8  # tiles of W or x whose pieces of a group lie side by side
X_GROUP_BYTES = 1024  # 8 rows, one group: the high plane's 512 bytes, then the low plane's
GROUP_BYTES = {"half": 1024, "pair": 2048, "int8": 512}  # 16 weight rows, one group


# --- splitting x -----------------------------------------------------------------------------------


@traced("ff")
def slice_scale(top: Any) -> Any:
    """(s, 1 / s) for a slice whose largest magnitude is `top`: powers of two, s top in 2^14 .. 2^15 where that can be."""
    exponent = bits_of(top) >> 23
    least = 15  # so that both are normal numbers
    exponent = select_int(least, exponent, less(exponent, least))
    return f32_of((268 - exponent) << 23), f32_of((exponent - 14) << 23)


def split_eight(values: Any, scale: Any) -> tuple[list[Any], list[Any]]:
    """Eight floats as four pairs of halves, twice: s x rounded, and what that leaves."""
    high, low = [], []
    for i in range(0, 8, 2):
        a, b = values[i] * scale, values[i + 1] * scale
        pair = pack_half2(a, b)
        rounded_a, rounded_b = unpack_half2(pair)
        high.append(pair)
        low.append(pack_half2(a - rounded_a, b - rounded_b))
    return high, low


def _load_eight(row: Any, column: Any, num_in: Any, is_row: Any, is_wide: bool) -> list[Any]:
    """Eight columns of a row of float32, zeros beyond its end. `is_wide`: num_in is a multiple of 4."""
    at = row + column * 4
    if is_wide:
        return [
            value
            for i in (0, 4)
            for value in load_f32x4_if(at + 4 * i, is_row & less(column + i, num_in))
        ]
    return [load_f32_if(at + 4 * i, is_row & less(column + i, num_in)) for i in range(8)]


def make_stage_slice(is_shared: bool, held: int) -> Any:
    """One warp splits groups low .. end of 8 rows of x; the scale's inverse of row lane / 4 comes back.

    Group i goes to `place` + i * 1024 in shared memory, where x itself waits for its scale, or to + i * 8192 in global memory. `held`
    groups are in registers at a time; without shared memory a slice of more is read twice.
    """
    stride = X_GROUP_BYTES if is_shared else RUN * X_GROUP_BYTES
    store = store_shared_128_if if is_shared else store_128_if

    def make_load(is_wide: bool) -> Any:
        @traced("f" * (8 * held))
        def load(row: Any, group: Any, end: Any, t: Any, num_in: Any, is_row: Any) -> Any:
            found: list[Any] = []
            for i in range(held):
                column, is_there = (group + i) * GROUP + t * 8, is_row & less(group + i, end)
                found += _load_eight(row, column, num_in, is_there, is_wide)
            return tuple(found)

        return load

    load_wide, load_narrow = make_load(True), make_load(False)

    @device_function
    def load(row: Any, group: Any, end: Any, t: Any, num_in: Any, is_row: Any) -> Any:
        if num_in & 3:
            return load_narrow(row, group, end, t, num_in, is_row)
        return load_wide(row, group, end, t, num_in, is_row)

    @traced("f")
    def top_of(top: Any, values: Any) -> Any:
        for value in values:
            top = fmax(top, f32_of(bits_of(value) & 0x7FFFFFFF))
        return top

    @traced("f")
    def top_of_row(top: Any) -> Any:
        for mask in (1, 2):
            top = fmax(top, shuffle_xor_f32(top, mask))
        return top

    @traced()
    def write(values: Any, group: Any, end: Any, scale: Any, place: Any) -> None:
        for i in range(held):
            for plane, halves in enumerate(split_eight(values[8 * i : 8 * i + 8], scale)):
                at = place + (group + i) * stride + plane * 512
                store(at, *halves, less(group + i, end))

    @traced()
    def keep(values: Any, group: Any, end: Any, place: Any) -> None:
        for i in range(2 * held):
            bits = [bits_of(value) for value in values[4 * i : 4 * i + 4]]
            at = place + (group + i // 2) * stride + i % 2 * 512
            store_shared_128_if(at, *bits, less(group + i // 2, end))

    @traced("f" * (8 * held))
    def kept(group: Any, end: Any, place: Any) -> Any:
        found = []
        for i in range(2 * held):
            inside = select_int(group + i // 2, end - 1, less(group + i // 2, end))
            found += [
                f32_of(word) for word in load_shared_128(place + inside * stride + i % 2 * 512)
            ]
        return tuple(found)

    @device_function
    def stage_shared(
        x: Any, first_row: Any, n: Any, num_in: Any, low: Any, end: Any, lane: Any, place: Any
    ) -> Any:
        t = lane & 3
        row = x + wide(first_row + (lane >> 2)) * (num_in * 4)
        is_row = less(first_row + (lane >> 2), n)
        top = int_to_f32(0)
        for group in range(low, end, held):
            values = load(row, group, end, t, num_in, is_row)
            top = top_of(top, values)
            keep(values, group, end, place)
        scale, inverse = slice_scale(top_of_row(top))
        for group in range(low, end, held):
            write(kept(group, end, place), group, end, scale, place)
        return inverse

    @device_function
    def stage_global(
        x: Any, first_row: Any, n: Any, num_in: Any, low: Any, end: Any, lane: Any, place: Any
    ) -> Any:
        t = lane & 3
        row = x + wide(first_row + (lane >> 2)) * (num_in * 4)
        is_row = less(first_row + (lane >> 2), n)
        values = load(row, low, end, t, num_in, is_row)
        top = top_of(int_to_f32(0), values)
        for group in range(low + held, end, held):
            top = top_of(top, load(row, group, end, t, num_in, is_row))
        scale, inverse = slice_scale(top_of_row(top))
        write(values, low, end, scale, place)
        for group in range(low + held, end, held):
            write(load(row, group, end, t, num_in, is_row), group, end, scale, place)
        return inverse

    return stage_shared if is_shared else stage_global


@traced("l")
def run_place(tile: Any, groups: Any, group_bytes: Any) -> Any:
    """Where a tile's first group lies: pieces of 8 tiles lie side by side, then the next group's."""
    return (wide(tile >> 3) * (groups * RUN) + (tile & (RUN - 1))) * group_bytes


def make_stage_kernel() -> Any:
    """x float32 (n, num_in) -> planes [64 rows][group][8 rows][high, low][lane][8 halves] and 1 / s float32 (n, 8).

    One warp a block; grid (row tiles, SLICES).
    """
    stage = make_stage_slice(is_shared=False, held=6)

    def kernel(x: Any, planes: Any, inverse: Any, n: Any, num_in: Any, groups: Any) -> None:
        lane = thread_id()
        grid_dependency_launch()
        grid_dependency_wait()
        per = (groups + SLICES - 1) >> 3
        low = block_y() * per
        first_row = block_x() * 8
        place = planes + run_place(block_x(), groups, X_GROUP_BYTES) + lane * 16
        end = min(groups, low + per)
        own = stage(x, first_row, n, num_in, low, end, lane, place)
        row = first_row + (lane >> 2)
        store_f32_if(
            inverse + (row * SLICES + block_y()) * 4, own, less(row, n) & less(lane & 3, 1)
        )

    return kernel


# --- fragments of W --------------------------------------------------------------------------------


def load_words(kind: str) -> int:
    """Registers of one lane that hold 16 weight rows of one group."""
    return GROUP_BYTES[kind] // 128


def unpack_weights(kind: str, words: Any, step: int) -> list[Any]:
    """The registers of A, for each plane, of one of the group's two steps."""
    if kind != "int8":
        return [words[i + 4 * step :][:4] for i in range(0, len(words), 8)]
    # 0x64uu is the half 1024 + u, and u is the number plus 128
    return [
        [
            sub_half2(byte_permute(word, 0x64646464, selector), 0x64806480)
            for word in words[2 * step : 2 * step + 2]
            for selector in (0x4140, 0x4342)
        ]
    ]


def accumulate(acc: Any, weights: Any, x: Any, step: int) -> None:
    """acc[tile][column] += one step of 16 columns, of all planes. weights[tile][plane], x[column][plane] with both steps."""
    for w_plane, x_plane in ((0, 0), (0, 1), (1, 0)):
        for tile, planes in enumerate(weights):
            if w_plane < len(planes):
                for column, halves in enumerate(x):
                    pair = halves[x_plane][2 * step : 2 * step + 2]
                    acc[tile][column] = mma(*acc[tile][column], *planes[w_plane], *pair)


@traced()
def store_result(at: Any, total: Any, ready: Any, is_there: Any, is_add: Any) -> None:
    """y = or += total s + bias; ready = (s, bias or 0, y or 0)."""
    value = fma(total, ready[0], ready[1])
    store_f32_if(at, select(value, ready[2] + value, same(is_add, 0)), is_there)
