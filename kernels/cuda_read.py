"""Reads the paged cache on the GPU other than for scores: the blocks that rows read through a map, and inputs of whole sequences.

Every form that is not made for the matrix unit. Called by `cuda_attention`.
"""

from __future__ import annotations

from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    block_x,
    block_y,
    fma,
    grid_dependency_launch,
    grid_dependency_wait,
    int_to_f32,
    load_8,
    load_16,
    load_32,
    load_i32,
    quotient,
    remainder,
    store_8,
    store_16,
    store_32,
    store_f32,
    thread_id,
    unpack_half2,
    wide,
)
from kernels.layout import BLOCK_SIZE, NUM_SINKS

THREADS = 128


@traced("f")
def _float_of(half: Any) -> Any:
    return unpack_half2(half)[0]


def _make_gather(kind: str, has_keys: bool) -> Any:
    has_copies, size = kind in ("int8", "int4"), {"fp32": 4, "fp16": 2}.get(kind, 1)
    block_size, num_kinds = BLOCK_SIZE, 2 if has_keys else 1

    @device_function
    def columns(
        source: Any, target: Any, offset: Any, k: Any, lines: Any, width: Any, is_there: Any
    ) -> None:
        """Column `offset` of `lines` lines of 64 numbers to column k, by the two threads of a position."""
        for line in range(thread_id() >> 6, lines, 2):
            at, to = (
                source + wide(line * block_size + offset) * width,
                target + wide(line * block_size + k) * width,
            )
            if width == 4:
                store_32(to, load_32(at) if is_there else 0)
            elif width == 2:
                store_16(to, load_16(at) if is_there else 0)
            else:
                store_8(to, load_8(at) if is_there else 0)

    @device_function
    def line(source: Any, target: Any, num_bytes: Any, is_there: Any) -> None:
        for i in range((thread_id() >> 6) * 4, num_bytes, 8):
            store_32(target + i, load_32(source + i) if is_there else 0)

    def kernel(
        keys: Any, values: Any, scales: Any, exact_keys: Any, exact_values: Any, exact_tables: Any, near_keys: Any,
        near_values: Any, near_scales: Any, near_exact_keys: Any, near_exact_values: Any, slots: Any, tables: Any, positions: Any,
        row_map: Any, map_base: Any, maps: Any, block_tables: Any, layer: Any, layers: Any, heads: Any, dim: Any, stored_dim: Any,
        row_bytes: Any, num_scales: Any, num_tables: Any, max_blocks: Any, exact_num_tables: Any, exact_max_blocks: Any,
        map_width: Any, near_blocks: Any,
    ) -> None:  # fmt: skip
        grid_dependency_launch()
        grid_dependency_wait()
        unit, head = quotient(block_x(), heads), remainder(block_x(), heads)
        row, j = quotient(unit, near_blocks), remainder(unit, near_blocks)
        which, position = load_i32(row_map + row * 4), load_i32(positions + row * 4)
        block = (load_i32(map_base + row * 4) >> 6) + j
        if which >= 0 and block * block_size <= position:
            k = thread_id() & 63
            is_there = block * block_size + k <= position
            places = maps + wide(which * map_width) * 4
            place = load_i32(places + (j * block_size + k) * 4) if is_there else 0
            slot, table = load_i32(slots + row * 4), load_i32(tables + row * 4)
            copy = -1
            if has_copies:
                if block == position >> 6:
                    # a row's own block has exact copies of all its keys, or of none
                    own = load_i32(places + (position - (block - j) * block_size) * 4)
                    copies = (
                        exact_tables
                        + wide((slot * exact_num_tables + table) * exact_max_blocks) * 4
                    )
                    copy = load_i32(copies + (own >> 6) * 4)
                    if copy >= 0 and is_there:
                        copy = load_i32(copies + (place >> 6) * 4)
            offset = place & 63
            if has_copies and copy >= 0:
                at = wide((copy * layers + layer) * heads + head) * (block_size * dim * 2)
                to = wide(row * heads + head) * (block_size * dim * 2)
                if has_keys:
                    columns(exact_keys + at, near_exact_keys + to, offset, k, dim, 2, is_there)
                line(
                    exact_values + at + offset * dim * 2,
                    near_exact_values + to + k * dim * 2,
                    dim * 2,
                    is_there,
                )
            else:
                found = 0
                if is_there:
                    found = load_i32(
                        block_tables
                        + wide((slot * num_tables + table) * max_blocks + (place >> 6)) * 4
                    )
                at, to = wide((found * layers + layer) * heads + head), wide(unit * heads + head)
                key_bytes, scale_lines = stored_dim * block_size * size, num_kinds * num_scales
                if has_keys:
                    columns(
                        keys + at * key_bytes,
                        near_keys + to * key_bytes,
                        offset,
                        k,
                        stored_dim,
                        size,
                        is_there,
                    )
                if has_copies:
                    scale_bytes = scale_lines * block_size * 2
                    columns(
                        scales + at * scale_bytes,
                        near_scales + to * scale_bytes,
                        offset,
                        k,
                        scale_lines,
                        2,
                        is_there,
                    )
                line(
                    values + (at * block_size + offset) * row_bytes, near_values + (to * block_size + k) * row_bytes,
                    row_bytes, is_there,
                )  # fmt: skip

    return kernel


def gather(kind: str, has_keys: bool) -> Variant:
    """The blocks that rows read through their maps, key by key, as blocks of their own in the layout of the cache.

    Block j of a row has the keys of positions map_base + 64 j and on; what lies after the row's position is 0. A row's own block
    comes from exact copies if its key has one.

    Kernel arguments, addresses of int32 tensors where no other type is said: keys, values, scales, exact_keys, exact_values and exact_tables
    of the cache; the blocks to write (rows, near_blocks, heads, ...) as keys, values and scales, and the exact ones
    (rows, heads, ...); slots, tables, positions, row_map, map_base, maps and block_tables of a `Paging`. Then counts: the layer;
    layers and heads of the cache; dim; stored numbers of a vector; bytes of a line of values; scales per vector; tables per
    slot and blocks per table, the same of exact_tables; places per map; near_blocks.

    Its grid is (rows * near_blocks * heads, 1).
    """
    name = f"gather_{'' if has_keys else 'h_'}{kind}"
    args = "l" * 18 + "r" * 13
    return Variant(name, _make_gather(kind, has_keys), args, THREADS, constants=(kind, has_keys))


READ_ROWS = 4  # positions of a block of threads


@traced("f")
def _uncut(code: Any, scale: Any, zero: Any) -> Any:
    return fma(int_to_f32(code), unpack_half2(scale)[0], unpack_half2(zero)[0])


def _make_read(kind: str) -> Any:
    is_int4, threads, block_size, num_sinks = kind == "int4", THREADS, BLOCK_SIZE, NUM_SINKS
    read_rows = READ_ROWS

    def kernel(
        values: Any, scales: Any, exact_values: Any, sink_values: Any, sink_of: Any, blocks: Any, copies: Any, out: Any, layer: Any,
        layers: Any, dim: Any, group: Any,
    ) -> None:  # fmt: skip
        grid_dependency_launch()
        grid_dependency_wait()
        b = block_x()
        block, copy = load_i32(blocks + b * 4), load_i32(copies + b * 4)
        sink = -1
        if is_int4 and b == 0:
            sink = load_i32(sink_of + wide(block) * 4)
        for i in range(thread_id(), read_rows * dim, threads):
            k, d = block_y() * read_rows + quotient(i, dim), remainder(i, dim)
            stored = wide(block * layers + layer) * block_size + k
            if copy >= 0:
                x = _float_of(
                    load_16(
                        exact_values
                        + ((wide(copy * layers + layer) * block_size + k) * dim + d) * 2
                    )
                )
            elif sink >= 0 and k < num_sinks:
                x = _float_of(
                    load_16(
                        sink_values + ((wide(sink * layers + layer) * num_sinks + k) * dim + d) * 2
                    )
                )
            elif is_int4:
                half, number, within = group >> 1, quotient(d, group), remainder(d, group)
                upper = 1 if within >= half else 0
                byte = load_8(values + stored * (dim >> 1) + number * half + within - upper * half)
                lines = quotient(dim, group) * 2
                at = (
                    scales
                    + (
                        wide(block * layers + layer) * (lines * block_size)
                        + number * (2 * block_size)
                        + k
                    )
                    * 2
                )
                x = _uncut((byte >> (upper * 4)) & 15, load_16(at), load_16(at + block_size * 2))
            else:
                x = _float_of(load_16(values + (stored * dim + d) * 2))
            store_f32(out + (wide(b * block_size + k) * dim + d) * 4, x)

    return kernel


def read(kind: str) -> Variant:
    """Inputs of whole blocks in float32.

    Kernel arguments: values, scales, exact_values, sink_values and sink_of of a `CutCache` of `kind` without keys; blocks and copies int32
    (blocks,), a copy -1 for none; out float32 (blocks, 64, dim), written; the layer; layers of the cache; dim; values per
    group. The first block's sinks are exact. Its grid is (blocks, 16).
    """
    return Variant(f"read_{kind}", _make_read(kind), "l" * 8 + "r" * 4, THREADS, constants=(kind,))
