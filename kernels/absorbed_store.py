"""x to the cache of inputs: its stored form, the exact copy of the block that is being filled, the exact sinks.

A warp writes some rows' groups of 128 values: all that they need is asked for before any of it is used.
"""

from __future__ import annotations

from typing import Any

from kernels.absorbed_products import ProductLaunch
from kernels.absorbed_shape import GROUP
from kernels.device_code import traced
from kernels.intrinsics import (
    divide,
    fma,
    fmax,
    fmin,
    int_to_f32,
    less,
    less_f32,
    load_constant_i32,
    load_f32_if,
    load_f32x4_if,
    load_i32,
    nearest_int,
    pack_half2,
    quotient,
    remainder,
    rsqrt,
    select,
    select_int,
    shuffle_from,
    shuffle_xor_f32,
    smaller,
    store_16_if,
    store_32_if,
    sum_of_warp,
    unpack_half2,
    wide,
)
from kernels.layout import NUM_SINKS

_PLACE = 6  # words that `places` gives for an item


def make_places(launch: ProductLaunch) -> Any:
    shape, count = launch.shape, launch.store_items
    groups, is_cut = shape.groups, shape.is_cut

    @traced("r" * (_PLACE * count))
    def places(
        sink_of: Any, tables: Any, exact_blocks: Any, positions: Any, row_info: Any, loop: Any, max_loops: Any,
        max_blocks: Any, first_row: Any, first: Any, stride: Any, rows: Any,
    ) -> Any:  # fmt: skip
        """Where a warp's items go: block, copy, sinks, whether there are such, the place in the block, whether there is an item."""
        told, out = [], []
        for i in range(count):
            item = first + stride * i
            row = first_row + smaller(quotient(item, groups), rows - 1)
            position = load_i32(positions + row * 4)
            depth = load_i32(row_info + row * 8 + 4)
            is_real = less(item, rows * groups) & less(-1, position)
            told.append((row * max_loops + depth + loop, select_int(position, 0, is_real), is_real))
        for place, position, is_real in told:
            at = wide(place * max_blocks + (position >> 6)) * 4
            block = select_int(load_constant_i32(tables + at), 0, is_real)
            copy = load_constant_i32(exact_blocks + wide(place) * 4) if is_cut else is_real
            sink = load_constant_i32(sink_of + wide(block) * 4) if is_cut else is_real
            is_sink = is_real & less(position, NUM_SINKS) & less(-1, sink)
            out += [block, copy, sink, is_sink, position & 63, is_real]
        return tuple(out)

    return places


def make_store(launch: ProductLaunch) -> Any:
    shape, count = launch.shape, launch.store_items
    d, groups = shape.d_model, shape.groups
    num_squares, inverse_d = d // 16, 1.0 / d

    @traced()
    def store(
        where: Any, x: Any, squares: Any, gain: Any, all_codes: Any, code_block_bytes: Any, all_scales: Any,
        scale_block_bytes: Any, all_exact: Any, exact_bytes: Any, all_sinks: Any, sink_bytes: Any, first_row: Any,
        first: Any, stride: Any, rows: Any, eps: Any, lane: Any,
    ) -> None:  # fmt: skip
        """A warp's items, each a group of a row's normed x in every form; lane i has its values 4 i to 4 i + 3."""
        asked = []
        for i in range(count):
            item = first + stride * i
            row = first_row + smaller(quotient(item, groups), rows - 1)
            group = remainder(item, groups)
            at = group * GROUP + lane * 4
            sums = [
                load_f32_if(
                    squares + wide(row * num_squares + lane + j) * 4, less(lane + j, num_squares)
                )
                for j in range(0, num_squares, 32)
            ]
            inputs = load_f32x4_if(x + wide(row * d + at) * 4, 1)
            gains = load_f32x4_if(gain + wide(at * 4), 1)
            asked.append((group, at, sums, inputs, gains, where[_PLACE * i : _PLACE * (i + 1)]))
        for group, at, sums, inputs, gains, place in asked:
            block, copy, sink, is_sink, offset, is_real = place
            total = sums[0]
            for more in sums[1:]:
                total = total + more
            factor = rsqrt(fma(sum_of_warp(total), inverse_d, eps))
            values = [v * factor * g for v, g in zip(inputs, gains, strict=True)]
            clamped = [fmax(fmin(v, 65504.0), -65504.0) for v in values]
            halves = [pack_half2(*clamped[i : i + 2]) for i in (0, 2)]
            codes = all_codes + wide(block) * code_block_bytes
            if not shape.is_cut:
                for i in range(2):
                    store_32_if(codes + wide((offset * d + at) * 2 + 4 * i), halves[i], is_real)
                continue
            exact = all_exact + wide(copy) * exact_bytes
            own_sinks = all_sinks + wide(sink) * sink_bytes
            for i in range(2):
                store_32_if(exact + wide((offset * d + at) * 2 + 4 * i), halves[i], is_real)
                store_32_if(own_sinks + wide((offset * d + at) * 2 + 4 * i), halves[i], is_sink)
            least = fmin(fmin(values[0], values[1]), fmin(values[2], values[3]))
            most = fmax(fmax(values[0], values[1]), fmax(values[2], values[3]))
            for mask in (1, 2, 4, 8, 16):
                least = fmin(least, shuffle_xor_f32(least, mask))
                most = fmax(most, shuffle_xor_f32(most, mask))
            pair = pack_half2(divide(most - least, 15.0), least)
            scale, zero = unpack_half2(pair)
            word: Any = None
            for i, value in enumerate(values):
                # a flat group has scale 0 and codes 0
                has_spread = less_f32(0.0, scale)
                code = divide(value - zero, select(scale, int_to_f32(1), has_spread))
                code = fmin(fmax(select(code, int_to_f32(0), has_spread), 0.0), 15.0)
                byte = nearest_int(code) << (8 * i)
                word = byte if word is None else word | byte
            # the second half of the group is the high four bits
            word = word | (shuffle_from(word, lane + 16) << 4)
            codes_at = codes + wide(offset * (d // 2) + group * 64 + lane * 4)
            store_32_if(codes_at, word, is_real & less(lane, 16))
            scales_at = all_scales + wide(block) * scale_block_bytes
            scales_at = scales_at + wide((2 * group * 64 + offset) * 2)
            store_16_if(scales_at, pair, is_real & less(lane, 1))
            store_16_if(scales_at + 128, pair >> 16, is_real & less(lane, 1))

    return store
