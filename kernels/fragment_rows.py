"""Rows of K and V in and out of cache blocks in fragment order: writing them, gathering a tree's own block, moving places.

Each kernel handles exact fp16 blocks of one pool and knows nothing of stored forms; `cuda_fragments` launches them. Nothing is
computed but the rounding of float32 to fp16, so there is no order to keep.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kernels.compiler import Variant
from kernels.device_code import traced
from kernels.fragments import key_place, value_place
from kernels.intrinsics import (
    block_x,
    block_y,
    grid_dependency_launch,
    grid_dependency_wait,
    load_16,
    load_32,
    load_f32x2,
    load_i32,
    pack_finite_half2,
    quotient,
    remainder,
    store_16,
    store_32,
    thread_id,
    wide,
)

THREADS = 128


def _make_store(heads: int, dim: int) -> Any:
    pairs, head_bytes = dim // 2, 256 * dim

    @traced()
    def put_key(row: Any, block: Any, offset: Any, head: Any, pair: Any) -> None:
        first, second = load_f32x2(row + (head * dim + 2 * pair) * 4)
        place = key_place(offset, 2 * pair, dim)
        store_32(block + head * head_bytes + place * 2, pack_finite_half2(first, second))

    @traced()
    def put_value(row: Any, block: Any, offset: Any, head: Any, pair: Any) -> None:
        halves = pack_finite_half2(*load_f32x2(row + (head * dim + 2 * pair) * 4))
        values = block + head * head_bytes + 128 * dim
        store_16(values + value_place(offset, 2 * pair) * 2, halves)
        store_16(values + value_place(offset, 2 * pair + 1) * 2, halves >> 16)

    def kernel(
        rows: Any, pool: Any, block_bytes: Any, tables: Any, slots: Any, row_tables: Any, places: Any,
        num_tables: Any, max_blocks: Any, row_width: Any, first_key: Any, first_value: Any,
    ) -> None:  # fmt: skip
        row = block_x()
        grid_dependency_launch()
        grid_dependency_wait()
        place = load_i32(places + row * 4)
        if place >= 0:
            table = load_i32(slots + row * 4) * num_tables + load_i32(row_tables + row * 4)
            block = load_i32(tables + wide(table * max_blocks + (place >> 6)) * 4)
            item = block_y() * THREADS + thread_id()
            if block >= 0 and item < 2 * heads * pairs:
                at, offset = pool + wide(block) * block_bytes, place & 63
                source = rows + wide(row) * (row_width * 4)
                if item < heads * pairs:
                    head, pair = quotient(item, pairs), remainder(item, pairs)
                    put_key(source + first_key * 4, at, offset, head, pair)
                else:
                    item -= heads * pairs
                    head, pair = quotient(item, pairs), remainder(item, pairs)
                    put_value(source + first_value * 4, at, offset, head, pair)

    return kernel


@cache
def store_rows(heads: int, dim: int) -> Variant:
    """Write rows' keys and values to their places, as fp16.

    Grid: (rows, heads * dim / THREADS, rounded up). Kernel arguments: float32 rows; the pool with its layer offset and bytes of
    a block; tables int32 (num_slots, num_tables, max_blocks) of its blocks; the rows' slots, tables and places int32
    (a place or block of -1: nothing is written); num_tables, max_blocks, numbers in a row, its first key's and value's.
    """
    return Variant(
        name=f"store_rows_h{heads}d{dim}",
        function=_make_store(heads, dim),
        args="lllllllrrrrr",
        num_threads=THREADS,
        constants=(heads, dim),
    )


def _make_move_place(dim: int) -> Any:
    @traced()
    def move_place(source: Any, read: Any, target: Any, written: Any, pair: Any) -> None:
        """Two dims of a key and value from one place of a block to one of another."""
        from_key, to_key = (key_place(at, 2 * pair, dim) * 2 for at in (read, written))
        store_32(target + to_key, load_32(source + from_key))
        for d in (2 * pair, 2 * pair + 1):
            from_value, to_value = (128 * dim + value_place(at, d) * 2 for at in (read, written))
            store_16(target + to_value, load_16(source + from_value))

    return move_place


def _make_gather(heads: int, dim: int) -> Any:
    pairs, head_bytes = dim // 2, 256 * dim

    move_place = _make_move_place(dim)

    @traced()
    def clear(target: Any, position: Any, pair: Any) -> None:
        store_32(target + key_place(position, 2 * pair, dim) * 2, 0)
        for d in (2 * pair, 2 * pair + 1):
            store_16(target + 128 * dim + value_place(position, d) * 2, 0)

    def kernel(
        pool: Any, block_bytes: Any, tables: Any, slots: Any, row_tables: Any, positions: Any, row_map: Any,
        map_base: Any, maps: Any, gathered: Any, num_tables: Any, max_blocks: Any, map_width: Any,
    ) -> None:  # fmt: skip
        row, head = block_x(), block_y()
        grid_dependency_launch()
        grid_dependency_wait()
        this_map = load_i32(row_map + row * 4)
        position = load_i32(positions + row * 4)
        if this_map >= 0 and position >= 0:
            table = load_i32(slots + row * 4) * num_tables + load_i32(row_tables + row * 4)
            blocks = tables + wide(table * max_blocks) * 4
            base, first = load_i32(map_base + row * 4), position & ~63
            target = gathered + wide(this_map * heads + head) * head_bytes
            for item in range(thread_id(), 64 * pairs, THREADS):
                key, pair = quotient(item, pairs), remainder(item, pairs)
                at = first + key
                if at <= position:
                    place = at
                    if at >= base:
                        place = load_i32(maps + wide(this_map * map_width + at - base) * 4)
                    block = load_i32(blocks + (place >> 6) * 4)
                    source = pool + wide(block) * block_bytes + head * head_bytes
                    move_place(source, place & 63, target, key, pair)
                else:
                    clear(target, key, pair)

    return kernel


@cache
def gather_own(heads: int, dim: int) -> Variant:
    """Bring the keys of mapped rows' own blocks into position order; what lies after a row is zero.

    Grid: (rows, heads). Kernel arguments: pool, bytes of a block, tables, slots and tables of the rows as in `store_rows`;
    positions, row_map (-1: no mapped row), map_base int32 (rows,); maps int32 (num_maps, map_width); gathered, written:
    (num_maps, heads, 256 * dim) bytes; num_tables, max_blocks, map_width.
    """
    return Variant(
        name=f"gather_own_h{heads}d{dim}",
        function=_make_gather(heads, dim),
        args="llllllllllrrr",
        num_threads=THREADS,
        constants=(heads, dim),
    )


def _make_move(dim: int) -> Any:
    pairs, head_bytes = dim // 2, 256 * dim

    move_place = _make_move_place(dim)

    def kernel(
        pool: Any, block_bytes: Any, sources: Any, targets: Any, read: Any, written: Any
    ) -> None:
        pair = thread_id()
        grid_dependency_launch()
        grid_dependency_wait()
        source = load_i32(sources + block_x() * 4)
        target = load_i32(targets + block_x() * 4)
        if pair < pairs and source >= 0 and target >= 0:
            at = pool + block_y() * head_bytes
            source_block = at + wide(source) * block_bytes
            move_place(source_block, read, at + wide(target) * block_bytes, written, pair)

    return kernel


@cache
def move_rows(dim: int) -> Variant:
    """Copy one place of blocks to one place of others.

    Grid: (pairs of blocks, layers * heads). Kernel arguments: pool, bytes of a block; int32 ids of the blocks that are read and
    written (-1: nothing happens); the offsets there.
    """
    return Variant(
        name=f"move_rows_d{dim}",
        function=_make_move(dim),
        args="llllrr",
        num_threads=THREADS,
        constants=(dim,),
    )


def variants() -> dict[str, Variant]:
    """Representative kernels, to be compiled and assembled."""
    kernels = (store_rows(12, 128), gather_own(12, 128), move_rows(256))
    return {kernel.name: kernel for kernel in kernels}
