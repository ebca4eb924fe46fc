"""How general paged attention adds up what its streams found: a stream's own end, a block's running sums in shared memory, the parts that
several blocks leave to `cuda_attend.merge`.

A result is the values of a thread's dims, the largest score and the sum of weights. Always four streams in order, then the four sums.
"""

from __future__ import annotations

from typing import Any

from kernels.cuda_attend_parts import MASKED, Shape, gathered, kept_index
from kernels.device_code import traced
from kernels.intrinsics import (
    divide,
    exp2,
    fma,
    fmax,
    less,
    less_f32,
    load_f32,
    load_f32x2,
    load_shared_f32,
    quotient,
    select,
    select_int,
    store_f32_if,
    store_f32x2_if,
    store_shared_f32,
    sum_of_warp,
    wide,
)


def make_finish(shape: Shape) -> Any:
    """A stream's end: for each query the lane's `keep` values, the maximum, the sum."""
    n = shape.queries
    in_place = shape.is_int4 and shape.has_keys

    @traced("f" * (n * (shape.keep + 2)))
    def finish(total: Any, state: Any, lane: Any) -> Any:
        results: list[Any] = []
        for g in range(n):
            values = list(total[8 * g : 8 * g + 8])
            if in_place:
                values = [x * (1.0 / scale) for x, scale in zip(values, NIBBLE_SCALES, strict=True)]
            values = gathered(values, lane, shape.part_masks)
            if in_place:
                zero = sum_of_warp(state[2 * n + g])
                values = [x + zero for x in values]
            # rounded to fp32 on the emulator too, before they go one way or another
            results += [fma(x, 1.0, 0.0) for x in (*values, state[g], sum_of_warp(state[n + g]))]
        return tuple(results)

    return finish


# What a number of 4 bits that stays at its place in a word is too large by, in the order of a lane's dims.
NIBBLE_SCALES = (1.0, 256.0, 1.0, 256.0, 16.0, 4096.0, 16.0, 4096.0)


def make_reset(shape: Shape) -> Any:
    """Empties a thread's sums; they lie a block's threads apart."""
    count, stride = shape.keep + 2, 32 * shape.num_warps * 4

    @traced()
    def reset(sums: Any) -> None:
        for i in range(shape.queries * count):
            store_shared_f32(sums + i * stride, MASKED if i % count == shape.keep else 0.0)

    return reset


def added(values: Any, more: Any) -> list[Any]:
    """Two results (values, maximum, sum) as one. Empty ones change no bit."""
    top = fmax(values[-2], more[-2])
    mine, other = exp2(values[-2] - top), exp2(more[-2] - top)
    both = [fma(a, mine, b * other) for a, b in zip(values, more, strict=True)]
    both[-2] = top
    return both


def make_fold(shape: Shape) -> Any:
    count, stride = shape.keep + 2, 32 * shape.num_warps * 4

    @traced()
    def fold(sums: Any, results: Any) -> None:
        for g in range(shape.queries):
            at = sums + g * count * stride
            mine = [load_shared_f32(at + i * stride) for i in range(count)]
            for i, x in enumerate(added(mine, results[g * count : (g + 1) * count])):
                store_shared_f32(at + i * stride, x)

    return fold


def make_read(shape: Shape) -> Any:
    count, stride = shape.queries * (shape.keep + 2), 32 * shape.num_warps * 4

    @traced("f" * count)
    def read(sums: Any) -> Any:
        return tuple(load_shared_f32(sums + i * stride) for i in range(count))

    return read


@traced("f")
def average(value: Any, total: Any) -> Any:
    """value / total, 0 where nothing was summed."""
    return select(divide(value, total), 0.0, less_f32(0.0, total))


def make_dim(shape: Shape) -> Any:
    """The first of the dims whose sums a lane keeps."""
    half = shape.group // 2

    @traced("r")
    def dim(warp: Any, lane: Any) -> Any:
        kept = kept_index(lane, 8, shape.part_masks)
        place = lane & (shape.lanes - 1)
        if not shape.is_int4:
            return warp * shape.slice_dim + place * 8 + kept
        at = warp * (shape.slice_dim // 2) + place * 4
        return nibble_dim(at, half) + (kept & 3) + select_int(half, 0, kept & 4)

    return dim


def nibble_dim(byte: Any, half: int) -> Any:
    """The dim in the low half of a stored byte; its high half has the one `half` further."""
    return byte + quotient(byte, half) * half


def make_merge(num_parts: int) -> Any:
    """(value, sum) of one dim out of `num_parts` parts of a row's result; parts from `count` on hold anything."""

    @traced("ff")
    def merge(values: Any, stride: Any, totals: Any, count: Any) -> Any:
        parts = []
        for i in range(num_parts):
            is_there = less(i, count)
            top, total = load_f32x2(totals + i * 8)
            found = [load_f32(values + i * stride), top, total]
            nothing = [0.0, MASKED, 0.0]
            parts.append([select(x, y, is_there) for x, y in zip(found, nothing, strict=True)])
        size = num_parts // 4
        sums = [0.0, MASKED, 0.0]
        for first in range(0, num_parts, size):
            four = parts[first]
            if size > 1:
                four = [0.0, MASKED, 0.0]
                for part in parts[first : first + size]:
                    four = added(four, part)
            sums = added(sums, four)
        return sums[0], sums[2]

    return merge


def make_put(shape: Shape) -> Any:
    """Leaves a thread's results as part `at` of its queries."""
    count = shape.keep + 2

    @traced()
    def put(
        results: Any, parts: Any, totals: Any, at: Any, num_parts: Any, d: Any, num_heads: Any, num_here: Any, num_rows: Any
    ) -> None:  # fmt: skip
        for g in range(shape.queries):
            r, h = divmod(g, shape.heads)
            is_there = less(h, num_here) & less(r, num_rows)
            where = wide(at + (num_heads * r + h) * num_parts)
            *values, top, total = results[g * count : (g + 1) * count]
            for i, x in enumerate(values):
                store_f32_if(parts + (where * shape.dim + (d + i)) * 4, x, is_there)
            store_f32x2_if(totals + where * 8, top, total, is_there & less(d, 1))

    return put


def make_write(shape: Shape) -> Any:
    count = shape.keep + 2

    @traced()
    def write(
        results: Any, out: Any, at: Any, num_heads: Any, num_here: Any, num_rows: Any
    ) -> None:
        for g in range(shape.queries):
            r, h = divmod(g, shape.heads)
            is_there = less(h, num_here) & less(r, num_rows)
            *values, _, total = results[g * count : (g + 1) * count]
            for i, x in enumerate(values):
                place = out + wide(at + (num_heads * r + h) * shape.dim + i) * 4
                store_f32_if(place, average(x, total), is_there)

    return write
