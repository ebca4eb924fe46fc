"""Writes rows to their places in the paged cache on the GPU, in every form that is not made for the matrix unit.

A position is rounded alone, with the operations of the CPU's kernels in their order, so that both devices store the same codes. Called
by `cuda_attention`.
"""

from __future__ import annotations

from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    below,
    bits_of,
    block_x,
    block_y,
    divide,
    f32_of,
    fma,
    fmax,
    fmin,
    grid_dependency_launch,
    grid_dependency_wait,
    less_f32,
    load_f32,
    load_i32,
    nearest_int,
    pack_half2,
    quotient,
    remainder,
    select,
    select_int,
    store_8,
    store_16,
    store_f32,
    thread_id,
    unpack_half2,
    warp_max,
    warp_min,
    wide,
)
from kernels.layout import BLOCK_SIZE, NUM_SINKS

STORE_THREADS = 64
_LARGEST = 65504.0  # of fp16


@traced("r")
def _half_of(x: Any) -> Any:
    """Bits of fp16, values beyond its range as the largest."""
    return pack_half2(fmax(fmin(x, _LARGEST), -_LARGEST), 0.0) & 0xFFFF


@traced("r")
def _ordered(x: Any) -> Any:
    """Bits that order as unsigned numbers like the floats."""
    bits = bits_of(x)
    return bits ^ select_int(0xFFFFFFFF, 0x80000000, bits >> 31)


@traced("f")
def _unordered(order: Any) -> Any:
    return f32_of(order ^ select_int(0x80000000, 0xFFFFFFFF, order >> 31))


@traced("r")
def _scale_of_8(least: Any, most: Any) -> Any:
    return _half_of(divide(fmax(least * -1.0, most), 127.0))


@traced("r")
def _scale_of_4(least: Any, most: Any) -> Any:
    return _half_of(divide(fma(least, -1.0, most), 15.0))


def _make_code(bottom: float, top: float) -> Any:
    @traced("r")
    def code(x: Any, scale: Any, zero: Any) -> Any:
        """The whole number nearest to (x - zero) / scale, 0 without a scale."""
        factor = unpack_half2(scale)[0]
        has_scale = less_f32(0.0, factor)
        exact = divide(fma(unpack_half2(zero)[0], -1.0, x), select(factor, 1.0, has_scale))
        return select_int(nearest_int(fmin(fmax(exact, bottom), top)), 0, has_scale)

    return code


def _make_store(kind: str, has_keys: bool) -> Any:
    has_copies, is_int4 = kind in ("int8", "int4"), kind == "int4"
    is_fp32, is_fp16 = kind == "fp32", kind == "fp16"
    code = _make_code(0.0, 15.0) if is_int4 else _make_code(-127.0, 127.0)
    block_size, num_sinks, num_warps = BLOCK_SIZE, NUM_SINKS, STORE_THREADS // 32
    num_kinds = 2 if has_keys else 1

    @device_function
    def cut(
        vector: Any, group: Any, first: Any, out: Any, step: Any, scales: Any, lane: Any
    ) -> None:
        """One group of a vector, by a warp. `step`: bytes from one stored number to the next."""
        low, high = 0xFFFFFFFF, 0
        for i in range(lane, group, 32):
            order = _ordered(load_f32(vector + (first + i) * 4))
            low = order if below(order, low) else low
            high = order if below(high, order) else high
        least, most = _unordered(warp_min(low)), _unordered(warp_max(high))
        number = quotient(first, group)
        if is_int4:
            half = group >> 1
            scale, zero = _scale_of_4(least, most), _half_of(least)
            if lane == 0:
                store_16(scales + number * (4 * block_size), scale)
                store_16(scales + number * (4 * block_size) + 2 * block_size, zero)
            for i in range(lane, half, 32):
                a = code(load_f32(vector + (first + i) * 4), scale, zero)
                b = code(load_f32(vector + (first + half + i) * 4), scale, zero)
                store_8(out + wide((number * half + i) * step), a | (b << 4))
        else:
            scale = _scale_of_8(least, most)
            if lane == 0:
                store_16(scales + number * (2 * block_size), scale)
            for i in range(lane, group, 32):
                store_8(
                    out + wide((first + i) * step),
                    code(load_f32(vector + (first + i) * 4), scale, 0),
                )

    @device_function
    def copy(vector: Any, first: Any, last: Any, out: Any, step: Any, lane: Any) -> None:
        """Numbers of a vector in fp16, `step` of them apart."""
        for i in range(first + lane, last, 32):
            store_16(out + wide(i * step) * 2, _half_of(load_f32(vector + i * 4)))

    def kernel(
        rows: Any, keys: Any, values: Any, scales: Any, exact_keys: Any, exact_values: Any, exact_tables: Any, sink_keys: Any,
        sink_values: Any, sink_of: Any, slots: Any, tables: Any, places: Any, block_tables: Any, width: Any, first_key: Any,
        first_value: Any, layer: Any, layers: Any, heads: Any, dim: Any, group: Any, padded: Any, num_tables: Any, max_blocks: Any,
        exact_num_tables: Any, exact_max_blocks: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        grid_dependency_launch()
        grid_dependency_wait()
        # a block of threads has a row and a head; a warp a piece of its vectors, keys first
        row, head = quotient(block_x(), heads), remainder(block_x(), heads)
        place = load_i32(places + row * 4)
        if place >= 0:
            table = load_i32(slots + row * 4) * num_tables + load_i32(tables + row * 4)
            number, offset = place >> 6, place & 63
            block = load_i32(block_tables + wide(table * max_blocks + number) * 4)
            at = wide((block * layers + layer) * heads + head)
            exact_copy, sink = -1, -1
            if has_copies:
                table = load_i32(slots + row * 4) * exact_num_tables + load_i32(tables + row * 4)
                exact_copy = load_i32(exact_tables + wide(table * exact_max_blocks + number) * 4)
                if place < num_sinks:
                    sink = load_i32(sink_of + wide(block) * 4)
            exact_at = wide((exact_copy * layers + layer) * heads + head) * (block_size * dim)
            sink_at = wide((sink * layers + layer) * heads + head) * (num_sinks * dim)
            pieces = quotient(dim, group)
            piece = block_y() * num_warps + warp
            if piece < num_kinds * pieces:
                is_key = has_keys and piece < pieces
                first = (piece if is_key else piece - pieces * (num_kinds - 1)) * group
                vector = (
                    rows
                    + wide(row * width + head * dim + (first_key if is_key else first_value)) * 4
                )
                if is_fp32:
                    for i in range(first + lane, first + group, 32):
                        x = load_f32(vector + i * 4)
                        if is_key:
                            store_f32(keys + (at * dim + i) * (block_size * 4) + offset * 4, x)
                        else:
                            store_f32(values + (at * block_size + offset) * (padded * 4) + i * 4, x)
                elif is_fp16:
                    if is_key:
                        copy(
                            vector,
                            first,
                            first + group,
                            keys + at * (2 * block_size * dim) + offset * 2,
                            block_size,
                            lane,
                        )
                    else:
                        copy(
                            vector,
                            first,
                            first + group,
                            values + (at * block_size + offset) * (dim * 2),
                            1,
                            lane,
                        )
                else:
                    stored = dim >> 1 if is_int4 else dim
                    numbers = pieces * 2 if is_int4 else pieces
                    scale_at = scales + (at * num_kinds * numbers * block_size + offset) * 2
                    if is_key:
                        cut(
                            vector,
                            group,
                            first,
                            keys + at * (stored * block_size) + offset,
                            block_size,
                            scale_at,
                            lane,
                        )
                    else:
                        scale_at += wide((num_kinds - 1) * numbers * block_size) * 2
                        cut(
                            vector,
                            group,
                            first,
                            values + (at * block_size + offset) * stored,
                            1,
                            scale_at,
                            lane,
                        )
                    if exact_copy >= 0:
                        if is_key:
                            copy(
                                vector,
                                first,
                                first + group,
                                exact_keys + (exact_at + offset) * 2,
                                block_size,
                                lane,
                            )
                        else:
                            copy(
                                vector,
                                first,
                                first + group,
                                exact_values + (exact_at + offset * dim) * 2,
                                1,
                                lane,
                            )
                    if sink >= 0:
                        sinks = (sink_keys if is_key else sink_values) + (
                            sink_at + offset * dim
                        ) * 2
                        copy(vector, first, first + group, sinks, 1, lane)

    return kernel


def store(kind: str, has_keys: bool) -> Variant:
    """Rows to their places, in every form that a cache of `kind` keeps.

    Kernel arguments, addresses of int32 tensors where no other type is said: rows float32 (rows, width); the fields of a `CutCache` (for
    keys and values in float32 of a `PagedCache`); slots, tables, places and block_tables of a `Paging`, a place -1 stores nothing. Then
    counts: width; first columns of keys and of values; the layer; layers and heads of the cache; dim; values per group (with fp32 and
    fp16 those of a warp); floats of a line of fp32 values; tables per slot and blocks per table, and the same of exact_tables.

    Its grid is (rows * heads, pieces / 2 rounded up), pieces: groups of the vectors that a row and head write.
    """
    name = f"store_{'' if has_keys else 'h_'}{kind}"
    args = "l" * 14 + "r" * 13
    return Variant(
        name, _make_store(kind, has_keys), args, STORE_THREADS, constants=(kind, has_keys)
    )
