"""Device code of the general products: how x is split into halves, and a product whose warps each own one slice of K.

A row of x is cut into 8 slices by K alone. A slice is scaled by the power of two that brings its largest value to 2^14 .. 2^15 and
written as two planes of halves, x s = high + low; one chain of `mma.sync` a slice, in the order of the columns, multiplies both
planes; the chains, scaled back, are added in order. Every kernel keeps to that, so that a row's bits do not depend on which one ran.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    grid_x,
    int_to_f32,
    less,
    load_128_if,
    load_f32_if,
    load_f32x4_if,
    load_shared_128,
    load_shared_f32,
    load_weight_128_if,
    mma,
    pack_half2,
    same,
    select,
    select_int,
    shared_base,
    shuffle_from,
    shuffle_xor_f32,
    store_128_if,
    store_f32_if,
    store_shared_128_if,
    store_shared_f32_if,
    sub_half2,
    sync_block,
    sync_warp,
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


# --- one slice a warp ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sliced:
    """A product whose block has 8 warps, one a slice, for `tiles` x 16 weight rows and `columns` x 8 rows of x.

    `max_groups`: with x staged by the block itself, in shared memory, for up to that many groups; 0: x was staged by a kernel before.
    """

    kind: str
    tiles: int
    columns: int
    chunk: int
    max_groups: int = 0
    blocks_per_sm: int = 1
    held: int = 4  # groups of x in registers while the block stages it

    @property
    def row_floats(self) -> int:
        """Floats from one row's partial sums to the next; no two lanes of a store meet in a bank."""
        return 16 * self.tiles + 4

    @property
    def partial_bytes(self) -> int:
        """Bytes of one slice's sums."""
        return 8 * self.columns * self.row_floats * 4

    @property
    def shared_bytes(self) -> int:
        zeros = 512 if self.max_groups else 0
        return SLICES * self.partial_bytes + zeros + self.max_groups * X_GROUP_BYTES


def make_sliced(shape: Sliced) -> Any:
    """y float32 (n, num_out) = or += x W^T s [+ bias]; grid (any number of blocks, runs of rows).

    Kernel arguments: packed W, s float32, bias (0: none), x (float32, or planes), 1 / s of x, y; n, num_out, num_in, groups,
    num_tiles, is_add.
    """
    kind, tiles, columns, chunk = shape.kind, shape.tiles, shape.columns, shape.chunk
    words, group_bytes = load_words(kind), GROUP_BYTES[kind]
    w_stride, x_stride = RUN * group_bytes, RUN * X_GROUP_BYTES
    row_floats, partial_bytes = shape.row_floats, shape.partial_bytes
    assert RUN % tiles == 0 and RUN % columns == 0, "a block's tiles lie in one run"
    is_direct = shape.max_groups > 0
    width_shift = (16 * tiles).bit_length() - 1
    zeros_at, x_at = SLICES * partial_bytes, SLICES * partial_bytes + 512
    num_acc = 4 * tiles * columns
    stage = make_stage_slice(is_shared=True, held=shape.held)

    @traced("r" * (chunk * tiles * words))
    def load_weights(at: Any, group: Any, end: Any, num_tiles: Any) -> Any:
        found = []
        for i in range(chunk):
            for tile in range(tiles):
                is_there = less(group + i, end) & less(tile, num_tiles)
                place = at + (i * RUN + tile) * group_bytes
                for q in range(words // 4):
                    found += load_weight_128_if(place + q * 512, is_there)
        return tuple(found)

    @traced("r" * 2)
    def no_x() -> Any:
        return 0, 0

    @traced("r" * (chunk * columns * 8))
    def load_x(at: Any, group: Any, end: Any, num_columns: Any) -> Any:
        found = []
        for i in range(chunk):
            for column in range(columns):
                is_there = less(group + i, end) & less(column, num_columns)
                place = at + (i * RUN + column) * X_GROUP_BYTES
                for plane in range(2):
                    found += load_128_if(place + plane * 512, is_there)
        return tuple(found)

    @traced("f" * num_acc)
    def no_sums() -> Any:
        return (0.0,) * num_acc

    @traced("f" * num_acc)
    def multiply(acc: Any, weights: Any, x: Any, shared: Any, group: Any, end: Any) -> Any:
        sums = [
            [acc[4 * (t * columns + c) : 4 * (t * columns + c) + 4] for c in range(columns)]
            for t in range(tiles)
        ]
        for i in range(chunk):
            if is_direct:
                # beyond the end the weights are any numbers, x is zeros
                is_there = less(group + i, end)
                places = [shared + x_at + (group + i) * X_GROUP_BYTES + p * 512 for p in range(2)]
                parts = [
                    [
                        load_shared_128(select_int(place, shared + zeros_at, is_there))
                        for place in places
                    ]
                ]
            else:
                parts = [
                    [x[8 * (i * columns + c) + 4 * plane :][:4] for plane in range(2)]
                    for c in range(columns)
                ]
            own = [
                weights[(i * tiles + t) * words : (i * tiles + t + 1) * words] for t in range(tiles)
            ]
            for step in range(2):
                accumulate(sums, [unpack_weights(kind, w, step) for w in own], parts, step)
        return tuple(value for row in sums for part in row for value in part)

    @traced("f" * (2 * columns))
    def load_inverses(inverse: Any, row: Any, n: Any, warp: Any) -> Any:
        """1 / s of this slice of the rows that a lane's sums belong to."""
        return tuple(
            load_f32_if(
                inverse + ((row + 8 * c + odd) * SLICES + warp) * 4, less(row + 8 * c + odd, n)
            )
            for c in range(columns)
            for odd in range(2)
        )

    @traced("ff")
    def share_inverses(own: Any, lane: Any) -> Any:
        bits, t = bits_of(own), lane & 3
        return tuple(f32_of(shuffle_from(bits, 8 * t + 4 * odd)) for odd in range(2))

    @traced()
    def keep(acc: Any, inverses: Any, place: Any, lane: Any) -> None:
        g, t = lane >> 2, lane & 3
        for tile in range(tiles):
            for c in range(columns):
                part = acc[4 * (tile * columns + c) :][:4]
                for odd in range(2):
                    at = place + ((8 * c + 2 * t + odd) * row_floats + 16 * tile + g) * 4
                    factor = inverses[2 * c + odd]
                    store_shared_f32_if(at, part[odd] * factor, 1)
                    store_shared_f32_if(at + 32, part[odd + 2] * factor, 1)

    @traced("fff")
    def prepare(
        scale: Any, bias: Any, y: Any, row: Any, out: Any, num_out: Any, is_there: Any, is_add: Any,
        has_bias: Any,
    ) -> Any:  # fmt: skip
        is_there = is_there & less(out, num_out)
        return (
            load_f32_if(scale + out * 4, is_there),
            load_f32_if(bias + out * 4, is_there & has_bias),
            load_f32_if(y + (wide(row) * num_out + out) * 4, is_there & is_add),
        )

    @traced()
    def finish(
        ready: Any, shared: Any, in_tile: Any, y: Any, row: Any, out: Any, num_out: Any, is_add: Any
    ) -> None:
        at = shared + ((in_tile >> width_shift) * row_floats + (in_tile & (16 * tiles - 1))) * 4
        total = int_to_f32(0)
        for i in range(SLICES):
            total = total + load_shared_f32(at + i * partial_bytes)
        store_result(y + (wide(row) * num_out + out) * 4, total, ready, less(out, num_out), is_add)

    def kernel(
        weights: Any, scale: Any, bias: Any, x: Any, inverse: Any, y: Any, n: Any, num_out: Any,
        num_in: Any, groups: Any, num_tiles: Any, is_add: Any, has_bias: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        shared = shared_base()
        per = (groups + SLICES - 1) >> 3
        low = warp * per
        end = min(groups, low + per)
        weights += low * w_stride + lane * 16
        own = load_weights(
            weights + run_place(block_x() * tiles, groups, group_bytes), low, end,
            num_tiles - block_x() * tiles,
        )  # fmt: skip
        grid_dependency_launch()
        grid_dependency_wait()
        first_row = block_y() * (8 * columns)
        num_columns = (n - first_row + 7) >> 3
        if is_direct:
            at_x = shared + lane * 16
            store_shared_128_if(at_x + zeros_at, 0, 0, 0, 0, 1)
            mine = stage(x, first_row, n, num_in, low, end, lane, at_x + x_at)
            sync_warp()
            inverses = share_inverses(mine, lane)
            parts = no_x()
        else:
            at_x = shared
            x += run_place(block_y() * columns, groups, X_GROUP_BYTES) + lane * 16
            parts = load_x(x + low * x_stride, low, end, num_columns)
            inverses = load_inverses(inverse, first_row + 2 * (lane & 3), n, warp)
        num_sums = min(n - first_row, 8 * columns) * (16 * tiles)
        for tile in range(block_x() * tiles, num_tiles, grid_x() * tiles):
            acc = no_sums()
            for group in range(low, end, chunk):
                following, next_tile = group + chunk, tile
                if following >= end:
                    following, next_tile = low, tile + grid_x() * tiles
                later = load_weights(
                    weights + run_place(next_tile, groups, group_bytes) + (following - low) * w_stride,
                    following, end, num_tiles - next_tile,
                )  # fmt: skip
                if is_direct:
                    acc = multiply(acc, own, parts, at_x, group, end)
                else:
                    later_x = load_x(x + following * x_stride, following, end, num_columns)
                    acc = multiply(acc, own, parts, at_x, group, end)
                    parts = later_x
                own = later
            in_tile = thread_id()
            row = first_row + (in_tile >> width_shift)
            out = tile * 16 + (in_tile & (16 * tiles - 1))
            ready = prepare(
                scale, bias, y, row, out, num_out, less(in_tile, num_sums), is_add, has_bias
            )
            keep(acc, inverses, shared + warp * partial_bytes, lane)
            sync_block()
            for i in range(thread_id(), num_sums, 32 * SLICES):
                finish(ready, shared, i, y, row, out, num_out, is_add)
                row = first_row + ((i + 32 * SLICES) >> width_shift)
                ready = prepare(
                    scale, bias, y, row, out, num_out, less(i + 32 * SLICES, num_sums), is_add, has_bias
                )  # fmt: skip
            sync_block()

    return kernel
