"""Queries, keys and values of prompt rows after their product: rotary positions, the cache, the stored form of full blocks.

Queries leave scaled and K and V enter the cache in the form of the decode path (`linear_parts.make_qkv`): float32 until the last rounding
to fp16. A row's bits depend on its own numbers and its position alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.compiler import Variant
from kernels.device_code import traced
from kernels.fragment_commit import make_commit, make_sink_copy
from kernels.fragments import key_place, value_place
from kernels.intrinsics import (
    block_x,
    fma,
    grid_dependency_launch,
    grid_dependency_wait,
    less,
    load_128_if,
    load_f32x4_if,
    load_i32,
    quotient,
    remainder,
    store_16_if,
    store_32_if,
    store_64_if,
    store_128_if,
    thread_id,
    wide,
)
from kernels.layout import NUM_SINKS
from kernels.prompt_attention import TILE_FIELDS
from kernels.prompt_gather import key_unit, value_unit
from kernels.prompt_rows import octet_of, words_of

_LOG2E = 1.4426950408889634


_SPLIT_THREADS = 128


@dataclass(frozen=True)
class SplitShape:
    """head_dim is a multiple of 32; pairs of rotary positions are (i, i + head_dim / 2) or (2i, 2i + 1).

    `is_gathered`: K and V of full tiles also go to the blocks that `prompt_gather` would gather.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_rotary: bool
    is_half_pairing: bool
    is_gathered: bool = False

    @property
    def parts(self) -> int:
        """Heads of q, k and v."""
        return self.num_heads + 2 * self.num_kv_heads


def _make_turn(shape: SplitShape) -> Any:
    """Octets o and o + head_dim / 16 of one row of q or k, turned to the row's position, as words."""
    dim, row_bytes = shape.head_dim, 2 * shape.parts * shape.head_dim
    octets = dim // 16

    def turn(head: Any, row: Any, octet: Any, angles: Any, position: Any, is_row: Any) -> Any:
        at = head + wide(row) * row_bytes + octet * 16
        a = octet_of(load_128_if(at, is_row))
        b = octet_of(load_128_if(at + 16 * octets, is_row))
        if not shape.is_rotary:
            return a, b
        table = angles + wide(position) * (4 * dim)
        # 16 pairs of (cos, sin): of octet o and o + octets, or of the pairs that lie in both
        places = [octet * 64 + 16 * i for i in range(4)]
        if not shape.is_half_pairing:
            places = [(octet + octets * (i // 2)) * 32 + 16 * (i % 2) for i in range(4)]
        found = [value for place in places for value in load_f32x4_if(table + place, is_row)]
        cos, sin = found[::2], found[1::2]
        if shape.is_half_pairing:
            first, second = a, b
        else:
            first, second = (a + b)[::2], (a + b)[1::2]
        turned_a = [
            fma(x, c, y * s * -1.0) for x, y, c, s in zip(first, second, cos, sin, strict=True)
        ]
        turned_b = [fma(y, c, x * s) for x, y, c, s in zip(first, second, cos, sin, strict=True)]
        if shape.is_half_pairing:
            return turned_a, turned_b
        both = [value for pair in zip(turned_a, turned_b, strict=True) for value in pair]
        return both[:8], both[8:]

    return turn


def _make_split(shape: SplitShape) -> Any:
    dim, parts, heads, kv_heads = shape.head_dim, shape.parts, shape.num_heads, shape.num_kv_heads
    octets = dim // 16
    turn = _make_turn(shape)
    scale = _LOG2E / dim**0.5
    row_bytes = 2 * parts * dim
    half_bytes = 128 * dim

    @traced()
    def put_query(head: Any, out: Any, angles: Any, first: Any, rows: Any, item: Any) -> None:
        row, octet = quotient(item, octets), remainder(item, octets)
        is_row = less(row, rows)
        for i, values in enumerate(turn(head, row, octet, angles, first + row, is_row)):
            at = out + wide(row) * (2 * dim * heads) + (octet + octets * i) * 16
            store_128_if(at, *words_of([value * scale for value in values]), is_row)

    @traced()
    def put_key(
        head: Any, out: Any, gathered: Any, angles: Any, first: Any, rows: Any, item: Any
    ) -> None:
        """Two rows, 8 positions apart: their words alternate in the cache. Those of a full tile go to the gathered blocks, too."""
        pair, octet = quotient(item, octets), remainder(item, octets)
        place = (pair >> 3) * 16 + (pair & 7)
        found = []
        for high in range(2):
            row = place + 8 * high - (first & 63)
            is_row = less(-1, row) & less(row, rows)
            found.append((turn(head, row, octet, angles, first + row, is_row), is_row))
        (low, is_low), (high, is_high) = found
        is_both = is_low & is_high
        is_full = less(63, rows)
        for i in range(2):
            words = [*words_of(low[i]), *words_of(high[i])]
            for j in range(2) if shape.is_gathered else ():
                at = gathered + key_unit(place + 8 * j, octet + octets * i)
                store_128_if(at, *words[4 * j : 4 * j + 4], is_full)
            for step in range(2):
                at = out + key_place(place, (octet + octets * i) * 8 + 4 * step, dim) * 2
                mixed = [
                    words[2 * step],
                    words[4 + 2 * step],
                    words[2 * step + 1],
                    words[5 + 2 * step],
                ]
                store_128_if(at, *mixed, is_both)
                for j, word in enumerate(mixed):
                    store_32_if(at + 4 * j, word, (1 - is_both) & (is_high if j % 2 else is_low))

    @traced()
    def put_values(head: Any, out: Any, gathered: Any, item: Any) -> None:
        """Positions 2t, 2t + 1, 2t + 8 and 2t + 9 of a step, 16 dims; all rows are there."""
        t, step, tile = item & 3, (item >> 2) & 3, item >> 4
        words = []
        for ahead in (0, 1, 8, 9):
            at = head + wide(step * 16 + t * 2 + ahead) * row_bytes + tile * 32
            words.append([*load_128_if(at, 1), *load_128_if(at + 16, 1)])
        for g in range(8):
            unit = []
            for pair in range(2):
                for high in range(2):
                    a, b = (words[2 * pair + i][4 * high + g // 2] for i in range(2))
                    unit.append(
                        (a >> 16 | b & 0xFFFF0000) if g % 2 else (a & 0xFFFF | (b & 0xFFFF) << 16)
                    )
            store_128_if(out + ((tile * 4 + step) * 32 + 4 * g + t) * 16, *unit, 1)
            for high in range(2) if shape.is_gathered else ():
                at = gathered + value_unit(tile * 16 + 8 * high + g, t, step >> 1, dim)
                store_64_if(at + (step & 1) * 8, unit[high], unit[2 + high], 1)

    @traced()
    def put_some_values(head: Any, out: Any, first: Any, rows: Any, item: Any) -> None:
        row, octet = quotient(item, 2 * octets), remainder(item, 2 * octets)
        is_row = less(row, rows)
        words = load_128_if(head + wide(row) * row_bytes + octet * 16, is_row)
        place = (first & 63) + row
        for i in range(8):
            at = out + value_place(place, octet * 8 + i) * 2
            store_16_if(at, words[i // 2] >> 16 * (i % 2), is_row)

    def kernel(
        qkv: Any, q: Any, cache: Any, layer_bytes: Any, block_bytes: Any, tables: Any, counts: Any, tiles: Any,
        angles: Any, scratch: Any, num_tables: Any, max_blocks: Any,
    ) -> None:  # fmt: skip
        tile = tiles + quotient(block_x(), parts) * (4 * TILE_FIELDS)
        part, thread = remainder(block_x(), parts), thread_id()
        grid_dependency_launch()
        grid_dependency_wait()
        if quotient(block_x(), parts) >= load_i32(counts):
            return
        slot, which, first = load_i32(tile), load_i32(tile + 4), load_i32(tile + 8)
        first_row, rows = load_i32(tile + 12), load_i32(tile + 16)
        head = qkv + wide(first_row) * row_bytes + part * (2 * dim)
        if part < heads:
            out = q + wide(first_row * heads + part) * (2 * dim)
            for item in range(thread, rows * octets, _SPLIT_THREADS):
                put_query(head, out, angles, first, rows, item)
        else:
            entry = load_i32(
                tables + (wide((slot * num_tables + which) * max_blocks) + (first >> 6)) * 4
            )
            block = cache + layer_bytes + wide(entry) * block_bytes
            own = scratch + wide(load_i32(tile + 32) * kv_heads) * (2 * half_bytes)
            if part < heads + kv_heads:
                head_at = (part - heads) * (2 * half_bytes)
                for item in range(thread, 32 * octets, _SPLIT_THREADS):
                    put_key(head, block + head_at, own + head_at, angles, first, rows, item)
            else:
                head_at = (part - heads - kv_heads) * (2 * half_bytes) + half_bytes
                out = block + head_at
                if rows == 64:
                    for item in range(thread, dim, _SPLIT_THREADS):
                        put_values(head, out, own + head_at, item)
                else:
                    for item in range(thread, rows * 2 * octets, _SPLIT_THREADS):
                        put_some_values(head, out, first, rows, item)

    return kernel


def split_qkv(shape: SplitShape) -> Variant:
    """Turn q and k, scale q by log2(e) / sqrt(head_dim), write q in rows and K and V into the cache; grid (tiles x parts, 1).

    Kernel arguments: qkv fp16 (rows, parts, head_dim); q fp16 (rows, num_heads, head_dim), written; the cache of exact blocks, bytes of
    the layer's offset and of a block over all layers; its tables int32 (slots, tables, max_blocks); counts and tiles of
    `PromptTiles` (blocks of threads past them leave at once);
    angles float32 (max_pos, head_dim / 2, 2), cos and sin; scratch of `prompt_gather`, written if `is_gathered`; num_tables, max_blocks.
    """
    return Variant(
        name=f"prompt_split_h{shape.num_heads}k{shape.num_kv_heads}d{shape.head_dim}"
        f"r{int(shape.is_rotary)}{int(shape.is_half_pairing)}g{int(shape.is_gathered)}",
        function=_make_split(shape),
        args="llllllllll" + "rr",
        num_threads=_SPLIT_THREADS,
        blocks_per_sm=4,
        constants=(shape,),
    )


# --- stored forms ----------------------------------------------------------------------------------

_COMMIT_WARPS = 8


def _make_commit_tiles(dim: int, kv_heads: int) -> Any:
    commit, copy_sink = make_commit(dim), make_sink_copy(dim)

    def kernel(
        stored: Any, stored_layer: Any, stored_block: Any, exact: Any, exact_layer: Any, exact_block: Any,
        sinks: Any, sink_layer: Any, sink_bytes: Any, sink_of: Any, block_tables: Any, exact_tables: Any,
        counts: Any, tiles: Any, num_tables: Any, max_blocks: Any,
    ) -> None:  # fmt: skip
        tile = tiles + quotient(block_x(), kv_heads) * (4 * TILE_FIELDS)
        head, lane, warp = remainder(block_x(), kv_heads), thread_id() & 31, thread_id() >> 5
        grid_dependency_launch()
        grid_dependency_wait()
        if quotient(block_x(), kv_heads) >= load_i32(counts):
            return
        first, rows = load_i32(tile + 8), load_i32(tile + 16)
        is_full, is_first = rows > 0 and (first & 63) + rows == 64, rows > 0 and first < NUM_SINKS
        if is_full or is_first:
            at = (
                wide((load_i32(tile) * num_tables + load_i32(tile + 4)) * max_blocks + (first >> 6))
                * 4
            )
            block, copy = load_i32(block_tables + at), load_i32(exact_tables + at)
            source = exact + exact_layer + wide(copy) * exact_block + head * (256 * dim)
            if is_full:
                target = (
                    stored + stored_layer + wide(block) * stored_block + head * (64 * dim + 512)
                )
                commit(source, target, warp, _COMMIT_WARPS, lane)
            if is_first:
                sink = load_i32(sink_of + block * 4)
                place = first + warp
                if sink >= 0 and place < NUM_SINKS and warp < rows:
                    to = sinks + sink_layer + wide(sink) * sink_bytes + head * (16 * dim)
                    copy_sink(source, to, place, lane)

    return kernel


def commit_tiles(dim: int, kv_heads: int) -> Variant:
    """Make the stored form of the blocks that tiles fill up, and of the sinks among their rows; grid (tiles x kv heads, 1).

    Kernel arguments: those of `prompt_attention.cache_arguments`; block_tables and exact_tables int32 (slots, tables, max_blocks); counts and
    tiles of `PromptTiles`; num_tables, max_blocks.
    """
    return Variant(
        name=f"prompt_commit_k{kv_heads}d{dim}",
        function=_make_commit_tiles(dim, kv_heads),
        args="l" * 14 + "rr",
        num_threads=32 * _COMMIT_WARPS,
        blocks_per_sm=2,
        constants=(dim, kv_heads),
    )
