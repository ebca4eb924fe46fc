"""How a warp of decode attention finds the blocks of its row and fetches its own one: what the kernels of all formats share.

A kernel's arguments are listed in `attention.attention`.
"""

from __future__ import annotations

from typing import Any

from kernels.attention_shapes import AttentionLaunch
from kernels.device_code import device_function
from kernels.intrinsics import bulk_copy, load_i32, mbarrier_expect, wide

ARGS = "l" * 18 + "rrrrf"
NO_WINDOW = 1 << 30


def make_find(launch: AttentionLaunch) -> Any:
    """The device function that reads where a row's keys lie."""
    shape, is_paged = launch.shape, launch.is_paged
    is_int4, heads = shape.format == "int4", shape.n_kv_heads
    head_bytes = 256 * shape.head_dim

    @device_function
    def find(
        row: Any, kv_head: Any, exact_cache: Any, exact_blocks: Any, exact_block_bytes: Any, tables: Any,
        positions: Any, row_info: Any, windows: Any, loop_of: Any, row_map: Any, mapped: Any, loop: Any,
        max_loops: Any, max_blocks: Any,
    ) -> Any:  # fmt: skip
        """(position, blocks that nothing writes, table, own exact block, window, first block after block 0 that it shows)."""
        position = load_i32(positions + row * 4)
        own = position >> 6
        num_stable, table_row, this_map = 0, 0, -1
        if is_paged:
            table_row = load_i32(row_info + row * 4) * max_loops + load_i32(loop_of + row * 4)
            if row_map != 0:
                this_map = load_i32(row_map + row * 4)
        else:
            num_stable = load_i32(row_info + row * 8)
            table_row = row * max_loops + load_i32(row_info + row * 8 + 4) + loop
        table = tables + wide(table_row * max_blocks) * 4
        exact = exact_cache + kv_head * head_bytes
        if this_map >= 0:
            exact = mapped + wide(this_map * heads + kv_head) * head_bytes
        elif own >= 0:
            at = table + own * 4
            if is_int4:
                at = exact_blocks + wide(table_row * max_blocks + own) * 4
            exact += wide(load_i32(at)) * exact_block_bytes
        window, low = NO_WINDOW, 1
        if windows != 0:
            width = load_i32(windows + row * 4)
            if width > 0:
                window = width
                if position - width >= 127:
                    low = (position - width + 1) >> 6
        return position, num_stable, table, exact, window, low

    return find


def make_fetch_own(launch: AttentionLaunch) -> Any:
    """The device function that fetches a chunk of a row's own block: only tiles of 16 positions that hold a key."""
    shape = launch.shape
    half, chunk_tiles = shape.exact_parts // 2, 8 // shape.exact_parts
    chunk_bytes, tile_bytes, value_tiles = (
        shape.chunk_bytes,
        32 * shape.head_dim,
        shape.chunk_bytes // 2048,
    )

    @device_function
    def fetch_own(part: Any, own_tiles: Any, exact: Any, target: Any, bar: Any, lane: Any) -> Any:
        """1 if the copy was started, 0 if the chunk (of keys) has none."""
        source, is_started = exact + part * chunk_bytes, 1
        if own_tiles == 4:
            if lane == 0:
                mbarrier_expect(bar, chunk_bytes)
                bulk_copy(target, source, chunk_bytes, bar)
        elif part < half:
            here = min(own_tiles - part * chunk_tiles, chunk_tiles)
            if here <= 0:
                is_started = 0
            elif lane == 0:
                mbarrier_expect(bar, here * tile_bytes)
                bulk_copy(target, source, here * tile_bytes, bar)
        else:
            num_bytes = own_tiles * 512
            if lane == 0:
                mbarrier_expect(bar, value_tiles * num_bytes)
            if lane < value_tiles:
                bulk_copy(target + lane * 2048, source + lane * 2048, num_bytes, bar)
        return is_started

    return fetch_own
