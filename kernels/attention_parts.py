"""The parts of paged attention, each made for one shape: scores, softmax, weighted values, handing over, merging.

Straight-line device code of one warp; `attention.py` puts it together and says what it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernels.device_code import device_function, traced
from kernels.fragments import packed_place
from kernels.intrinsics import (
    exp2,
    fma,
    fmax,
    int_to_f32,
    less,
    load_128_if,
    load_f32_if,
    load_f32x4_if,
    load_shared_32,
    load_shared_128,
    load_shared_f32,
    map_shared,
    mma,
    pack_half2,
    reciprocal,
    select,
    select_int,
    shuffle_xor_f32,
    store_16_if,
    store_async_f32,
    store_f32,
    store_shared_f32_if,
    transpose_8x8,
    wide,
)
from kernels.layout import NUM_SINKS

if TYPE_CHECKING:
    from kernels.attention_shapes import AttentionLaunch, AttentionShape

LOG2E = 1.4426950408889634
NEVER = -1.0e30  # the score of a masked position: finite, so that an empty stream merges as nothing


# --- one block of 64 positions ---------------------------------------------------------------------


def make_load_query(shape: AttentionShape, is_float: bool) -> Any:
    """The group's query heads; `is_float`: float32, to be scaled and rounded here, else fp16 and scaled."""
    size = 4 if is_float else 2

    @traced("r" * (shape.head_dim // 8))
    def load_query(q: Any, lane: Any, scale: Any) -> Any:
        """B fragments of the group's query heads; columns past the group are zero."""
        column, t = lane >> 2, lane & 3
        is_real = less(column, shape.group)
        regs: list[Any] = []
        for part in range(shape.head_dim // 32):
            address = q + (column * shape.head_dim + part * 32 + t * 8) * size
            if not is_float:
                regs += load_128_if(address, is_real)
                continue
            for half in range(2):
                x = [v * scale for v in load_f32x4_if(address + 16 * half, is_real)]
                regs += [pack_half2(x[0], x[1]), pack_half2(x[2], x[3])]
        return tuple(regs)

    return load_query


def make_scores(shape: AttentionShape) -> Any:
    steps, tiles = shape.head_dim // 16, 8 // shape.exact_parts

    @traced("f" * 16)
    def scores(old: Any, chunk: Any, query: Any, part: Any) -> Any:
        """q.k of a chunk's tiles of 16 positions, put into their place among those of the block."""
        acc = [(0.0, 0.0, 0.0, 0.0)] * tiles
        for step in range(steps):
            for tile in range(tiles):
                a = load_shared_128(chunk + (tile * steps + step) * 512)
                acc[tile] = mma(*acc[tile], *a, query[2 * step], query[2 * step + 1])
        new = [value for values in acc for value in values]
        is_here = [1 - (less(part, i) | less(i, part)) for i in range(4 // tiles)]
        return tuple(
            select(new[i % len(new)], value, is_here[i // len(new)]) for i, value in enumerate(old)
        )

    return scores


def make_softmax(shape: AttentionShape, is_masked: bool) -> Any:
    columns = range(shape.num_columns)

    @traced("r" * 8 + "f" * 6)
    def softmax(
        scores: Any, state: Any, first: Any, position: Any, window: Any, slopes: Any, lane: Any
    ) -> Any:  # fmt: skip
        """p of 64 positions as B fragments, the new (max, sum) x 2 and both corrections.

        `first` is the block's first position; a position is seen if it is not after the query and is inside the
        window or a sink.
        """
        g = lane >> 2
        low = int_to_f32(0) + NEVER
        shown: list[list[Any]] = []
        for i in range(8):
            key = first + 8 * i + g
            row = [scores[2 * i + c] for c in columns]
            if shape.has_alibi:
                row = [fma(int_to_f32(key - position), slopes[c], row[c]) for c in columns]
            if is_masked:
                is_seen = less(key, position + 1) & (
                    less(position - window, key) | less(key, NUM_SINKS)
                )
                row = [select(score, low, is_seen) for score in row]
            shown.append(row)
        new_max, sums, fix = [state[0], state[1]], [state[2], state[3]], [state[0], state[1]]
        for c in columns:
            top = shown[0][c]
            for row in shown[1:]:
                top = fmax(top, row[c])
            for mask in (4, 8, 16):
                top = fmax(top, shuffle_xor_f32(top, mask))
            new_max[c] = fmax(state[c], top)
            fix[c] = exp2(state[c] - new_max[c])
            sums[c] = sums[c] * fix[c]
        regs: list[Any] = []
        for row in shown:
            p = [int_to_f32(0), int_to_f32(0)]
            for c in columns:
                p[c] = exp2(row[c] - new_max[c])
                sums[c] = sums[c] + p[c]
            regs.append(transpose_8x8(pack_half2(p[0], p[1])))
        return (*regs, *new_max, *sums, *fix)

    return softmax


def make_sinks(shape: AttentionShape, tiles: int) -> Any:
    """Reading the exact sinks, then what they come to; `tiles`: how many times 16 dims of the values."""
    columns, dim = range(shape.num_columns), shape.head_dim

    @traced("f" * 4 + "r" * (2 * tiles))
    def read_sinks(keys: Any, values: Any, query: Any, lane: Any) -> Any:
        """q.k, and the values' fragments; the keys lie in rows, the values by dim."""
        g, t = lane >> 2, lane & 3
        acc: Any = (0.0, 0.0, 0.0, 0.0)
        for part in range(dim // 32):
            # rows past the sinks repeat them: their products are not used
            address = keys + ((g & (NUM_SINKS - 1)) * dim + part * 32 + t * 8) * 2
            low_0, high_0, low_1, high_1 = load_shared_128(address)
            acc = mma(*acc, low_0, 0, high_0, 0, query[4 * part], query[4 * part + 1])
            acc = mma(*acc, low_1, 0, high_1, 0, query[4 * part + 2], query[4 * part + 3])
        words: list[Any] = []
        for tile in range(tiles):
            at = values + ((16 * tile + g) * NUM_SINKS + 2 * (t & 1)) * 2
            words += [load_shared_32(at + i * 16 * NUM_SINKS) for i in range(2)]
        return (*acc, *words)

    @traced("f" * 4 + "f" * (4 * tiles))
    def sink_step(seen: Any, position: Any, slopes: Any, lane: Any) -> Any:
        """The (max, sum) x 2 and p.v of the sinks alone."""
        g = lane >> 2
        tops, sums = [int_to_f32(0) + NEVER] * 2, [int_to_f32(0)] * 2
        for c in columns:
            score = seen[c]
            if shape.has_alibi:
                score = fma(int_to_f32(g - position), slopes[c], score)
            score = select(score, int_to_f32(0) + NEVER, less(g, NUM_SINKS))
            top = score
            for mask in (4, 8, 16):
                top = fmax(top, shuffle_xor_f32(top, mask))
            tops[c], sums[c] = top, exp2(score - top)
        p = transpose_8x8(pack_half2(sums[0], sums[1]))
        out: list[Any] = []
        for tile in range(tiles):
            # p is 0 past the sinks
            low, high = seen[4 + 2 * tile : 6 + 2 * tile]
            out += mma(0.0, 0.0, 0.0, 0.0, low, high, 0, 0, p, 0)
        return (*tops, *sums, *out)

    return read_sinks, sink_step


def make_values(shape: AttentionShape, part: int, steps: Sequence[int] = range(4)) -> Any:
    """Of the dims in chunk `part` of the values; `steps`: which 16 positions."""
    tiles = shape.head_dim // 16
    count = 2 * tiles // shape.exact_parts

    @traced("f" * (4 * tiles))
    def values(out: Any, p: Any, chunk: Any) -> Any:
        """Add p.v for a chunk's dims (out was corrected before)."""
        new = [out[4 * tile : 4 * tile + 4] for tile in range(tiles)]
        for step in steps:
            for tile in range(part * count, (part + 1) * count):
                a = load_shared_128(chunk + ((tile - part * count) * 4 + step) * 512)
                new[tile] = mma(*new[tile], *a, p[2 * step], p[2 * step + 1])
        return tuple(value for acc in new for value in acc)

    return values


def make_some_values(shape: AttentionShape, part: int) -> Any:
    """`make_values` for the first `tiles` times 16 positions: what lies after them is not read."""
    values = make_values(shape, part)
    values_0, values_1, values_2 = (make_values(shape, part, (i,)) for i in range(3))

    @device_function
    def some_values(out: Any, p: Any, chunk: Any, tiles: Any) -> Any:
        if tiles == 4:
            out = values(out, p, chunk)
        else:
            out = values_0(out, p, chunk)
            if tiles > 1:
                out = values_1(out, p, chunk)
            if tiles > 2:
                out = values_2(out, p, chunk)
        return out

    return some_values


def make_correct(shape: AttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 4))
    def correct(out: Any, first: Any, second: Any) -> Any:
        factors = (first, second)[: shape.num_columns]
        return tuple(v * factors[i % 2] if i % 2 < len(factors) else v for i, v in enumerate(out))

    return correct


def make_zeros(shape: AttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 4))
    def zeros() -> Any:
        return tuple(int_to_f32(0) for _ in range(shape.head_dim // 4))

    return zeros


@traced("f" * 4)
def start() -> Any:
    """(max, sum) x 2 of no positions."""
    low, zero = int_to_f32(0) + NEVER, int_to_f32(0)
    return low, low, zero, zero


# --- merging ---------------------------------------------------------------------------------------


def put_result(
    launch: AttentionLaunch, local: Any, rank: Any, value: Any, bar: Any, condition: Any
) -> None:
    """A number of a stream's result to the block of rank `rank`, where `condition` is 1."""
    if launch.cluster > 1:
        store_async_f32(map_shared(local, rank), value, map_shared(bar, rank), condition)
    else:
        store_shared_f32_if(local, value, condition)


def make_send(launch: AttentionLaunch) -> Any:
    shape, width = launch.shape, launch.result_floats
    owned = shape.head_dim // launch.cluster

    @traced()
    def send(out: Any, state: Any, stream: Any, results: Any, lane: Any, bar: Any) -> None:
        """Give a stream's result to the blocks that merge it, each its dims."""
        g, t = lane >> 2, lane & 3
        sums = [state[2], state[3]]
        for mask in (4, 8, 16):
            sums = [x + shuffle_xor_f32(x, mask) for x in sums]
        for odd in range(shape.num_columns):
            column = 2 * t + odd
            is_real = less(column, shape.group)
            row = results + (stream * shape.group + column) * (width * 4)
            for tile in range(shape.head_dim // 16):
                for high in range(2):
                    d = 16 * tile + 8 * high
                    value = out[4 * tile + 2 * high + odd]
                    put_result(launch, row + (d % owned + g) * 4, d // owned, value, bar, is_real)
            # lane g tells rank g
            is_told = is_real & less(g, launch.cluster)
            rank = select_int(g, 0, is_told)
            put_result(launch, row + owned * 4, rank, state[odd], bar, is_told)
            put_result(launch, row + owned * 4 + 4, rank, sums[odd], bar, is_told)

    return send


def make_merge(launch: AttentionLaunch) -> Any:
    shape, width = launch.shape, launch.result_floats
    owned = shape.head_dim // launch.cluster

    @traced("f")
    def merge(results: Any, column: Any, d: Any) -> Any:
        rows = [results + (s * shape.group + column) * (width * 4) for s in range(launch.results)]
        tops = [load_shared_f32(row + owned * 4) for row in rows]
        top = tops[0]
        for other in tops[1:]:
            top = fmax(top, other)
        total, out = int_to_f32(0), int_to_f32(0)
        for s, row in enumerate(rows):
            weight = exp2(tops[s] - top)
            total = fma(weight, load_shared_f32(row + owned * 4 + 4), total)
            out = fma(weight, load_shared_f32(row + d * 4), out)
        return out * reciprocal(fmax(total, int_to_f32(1) * 1.0e-30))

    return merge


@traced("f" * 16)
def no_scores() -> Any:
    return tuple(int_to_f32(0) for _ in range(16))


@traced("r" * 8)
def no_weights() -> Any:
    return (0,) * 8


def make_slopes(shape: AttentionShape) -> Any:
    @traced("ff")
    def load_slopes(slopes: Any, unit_head: Any, lane: Any) -> Any:
        if not shape.has_alibi:
            return int_to_f32(0), int_to_f32(0)
        column = (lane & 3) * 2
        address = slopes + (unit_head * shape.group + column) * 4
        first = load_f32_if(address, less(column, shape.group))
        second = load_f32_if(address + 4, less(column + 1, shape.group))
        return first * LOG2E, second * LOG2E

    return load_slopes


def make_write(launch: AttentionLaunch) -> Any:
    target, shape = launch.target, launch.shape

    @traced()
    def write(out: Any, row: Any, column: Any, value: Any) -> None:
        """One output in the order and precision that the launch says."""
        if target is not None:
            place = packed_place(row, column, target, launch.column_tiles)
        else:
            place = wide(row) * (shape.units * shape.group * shape.head_dim) + column
        if launch.is_float_out:
            store_f32(out + place * 4, value)
        else:
            store_16_if(out + place * 2, pack_half2(value, value), 1)

    return write
