"""How general paged attention reads inputs, which are keys and values at once: lines of one position each, stored as fp16 or in 4 bits
with a scale and a zero point per group, exact copies as fp16.

A lane has the same 8 dims of its warp's slice in queries, products and sums; `BATCH` lines of its part at a time.
"""

from __future__ import annotations

from typing import Any

from kernels.cuda_attend_parts import (
    WEIGHTS_BYTES,
    Shape,
    gathered,
    halves,
    kept_index,
    shared_floats,
)
from kernels.device_code import traced
from kernels.intrinsics import (
    f32_of,
    fma,
    less,
    load_32,
    load_64,
    load_128,
    load_f32x4_if,
    load_shared_f32,
    quotient,
    select,
    shuffle_xor_f32,
    smaller,
    store_shared_f32,
    store_shared_f32_if,
    unpack_half2,
    wide,
)
from kernels.layout import BLOCK_SIZE, NUM_SINKS

_BIG = float(1 << 23)
_BIG_BITS = 0x4B000000
_LOG2E = 1.4426950408889634


def batch_of(shape: Shape) -> int:
    """Lines that a lane loads together."""
    return min(8, shape.part_rows)


def make_load_query(shape: Shape) -> Any:
    """The queries' numbers at a lane's dims, from 0 on those that there are."""
    n, first = shape.queries, make_first_dim(shape)
    second = shape.group // 2 if shape.is_int4 else 4

    @traced("f" * (8 * n))
    def load_query(q: Any, count: Any, scale: Any, warp: Any, lane: Any) -> Any:
        found: list[Any] = []
        for g in range(n):
            at = q + wide((first(warp, lane) + g * shape.dim) * 4)
            is_there = less(g, count)
            values = [*load_f32x4_if(at, is_there), *load_f32x4_if(at + second * 4, is_there)]
            found += [x * scale * _LOG2E for x in values]
        return tuple(found)

    return load_query


def make_first_dim(shape: Shape) -> Any:
    half = shape.group // 2

    def first_dim(warp: Any, lane: Any) -> Any:
        place = lane & (shape.lanes - 1)
        if not shape.is_int4:
            return warp * shape.slice_dim + place * 8
        byte = warp * (shape.slice_dim // 2) + place * 4
        return byte + quotient(byte, half) * half

    return first_dim


def make_row_offset(shape: Shape, is_exact: bool) -> Any:
    """Where a lane's dims begin in a line."""
    first = make_first_dim(shape)

    @traced("r")
    def row_offset(warp: Any, lane: Any) -> Any:
        if is_exact or not shape.is_int4:
            return first(warp, lane) * 2
        return warp * (shape.slice_dim // 2) + (lane & (shape.lanes - 1)) * 4

    return row_offset


def make_scale_offset(shape: Shape) -> Any:
    """Where the scales of a lane's group begin in those of a block."""

    @traced("r")
    def scale_offset(warp: Any, lane: Any) -> Any:
        if not shape.is_int4:
            return 0
        byte = warp * (shape.slice_dim // 2) + (lane & (shape.lanes - 1)) * 4
        return quotient(byte, shape.group // 2) * (2 * BLOCK_SIZE * 2)

    return scale_offset


def _exact_line(shape: Shape, at: Any) -> list[Any]:
    return [*load_64(at), *load_64(at + shape.group)] if shape.is_int4 else list(load_128(at))


def _load(
    shape: Shape, is_exact: bool, at: Any, scales: Any, first: Any, last: Any
) -> list[list[Any]]:
    """Lines `first` .. as 8 floats each; instead of those after `last`, which may hold anything, that one."""
    batch = batch_of(shape)
    rows = [smaller(first + i, last) for i in range(batch)]
    if is_exact or not shape.is_int4:
        words = [_exact_line(shape, at + wide(row * (shape.dim * 2))) for row in rows]
        return [halves(line) for line in words]
    packed = [load_32(at + wide(row * shape.stored_dim)) for row in rows]
    scale, zero = (
        _load_halves(scales + wide(first * 2) + i * (BLOCK_SIZE * 2), batch) for i in range(2)
    )
    lines = []
    for i, word in enumerate(packed):
        line = []
        for nibble in range(2):
            for t in range(4):
                part = word >> (4 * nibble + 8 * t) if nibble + t else word
                code = f32_of((part & 0xF) | _BIG_BITS) - _BIG
                line.append(fma(code, scale[i], zero[i]))
        lines.append(line)
    return lines


def _load_halves(at: Any, count: int) -> list[Any]:
    if count == 8:
        return halves(load_128(at))
    return halves(load_64(at)) if count == 4 else list(unpack_half2(load_32(at)))


def make_dots(shape: Shape, is_exact: bool) -> Any:
    """Scores of a batch of lines over a warp's dims."""
    n, batch = shape.queries, batch_of(shape)
    masks = [m for m in (8, 4, 2, 1) if m < shape.lanes]

    @traced()
    def dots(
        at: Any, scales: Any, query: Any, scores: Any, first: Any, last: Any, lane: Any
    ) -> None:
        lines = _load(shape, is_exact, at, scales, first, last)
        kept = first + kept_index(lane, batch, masks)
        for g in range(n):
            products = [_dot(query[8 * g : 8 * g + 8], line) for line in lines]
            for i, score in enumerate(gathered(products, lane, masks)):
                store_shared_f32(scores + g * (BLOCK_SIZE * 4) + (kept + i) * 4, score)

    return dots


def _dot(query: Any, line: list[Any]) -> Any:
    total: Any = 0.0
    for x, y in zip(query, line, strict=True):
        total = fma(x, y, total)
    return total


def make_add_rows(shape: Shape, is_exact: bool) -> Any:
    """Adds a batch of lines times their weights."""
    n, batch = shape.queries, batch_of(shape)

    @traced("f" * (8 * n))
    def add_rows(total: Any, at: Any, scales: Any, weights: Any, first: Any, last: Any) -> Any:
        sums = list(total)
        lines = _load(shape, is_exact, at, scales, first, last)
        for g in range(n):
            p = shared_floats(weights + g * WEIGHTS_BYTES + first * 4, batch)
            for weight, line in zip(p, lines, strict=True):
                for a in range(8):
                    sums[8 * g + a] = fma(weight, line[a], sums[8 * g + a])
        return tuple(sums)

    return add_rows


def _sinks_of(shape: Shape, lane: Any) -> list[tuple[Any, Any]]:
    """(place, whether it is one) of the exact first keys that a lane's part has."""
    part = lane >> (shape.lanes.bit_length() - 1)
    places = [part + i * shape.parts for i in range(-(-NUM_SINKS // shape.parts))]
    return [(smaller(place, NUM_SINKS - 1), less(place, NUM_SINKS)) for place in places]


def make_sink_dots(shape: Shape) -> Any:
    """Overwrites the scores of the first keys by those of their exact copies."""

    @traced()
    def sink_dots(sinks: Any, query: Any, scores: Any, lane: Any) -> None:
        is_first = 1 - less(0, lane & (shape.lanes - 1))
        for place, is_one in _sinks_of(shape, lane):
            line = halves(_exact_line(shape, sinks + wide(place * (shape.dim * 2))))
            for g in range(shape.queries):
                score = _dot(query[8 * g : 8 * g + 8], line)
                for mask in (1, 2, 4, 8):
                    if mask < shape.lanes:
                        score = score + shuffle_xor_f32(score, mask)
                at = scores + g * (BLOCK_SIZE * 4) + place * 4
                store_shared_f32_if(at, score, is_first & is_one)

    return sink_dots


def make_add_sinks(shape: Shape) -> Any:
    """Adds the exact values of the first keys, each by the lanes of one part."""

    @traced("f" * (8 * shape.queries))
    def add_sinks(total: Any, sinks: Any, weights: Any, lane: Any) -> Any:
        sums = list(total)
        for place, is_one in _sinks_of(shape, lane):
            line = halves(_exact_line(shape, sinks + wide(place * (shape.dim * 2))))
            for g in range(shape.queries):
                at = weights + g * WEIGHTS_BYTES + (BLOCK_SIZE + place) * 4
                weight = select(load_shared_f32(at), 0.0, is_one)
                for a in range(8):
                    sums[8 * g + a] = fma(weight, line[a], sums[8 * g + a])
        return tuple(sums)

    return add_sinks
