"""Quantising complete blocks to 4 bits and copying the first keys: what makes an int4 cache's stored form from its exact copies.

A position's numbers, scale and offset depend on its own vector alone (see `fragments.quantise_int4`): which warp makes them, and when,
changes nothing. A block of one kv head is 8 independent tasks: four tiles of 16 keys, four times 16 values.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.fragments import key_place, value_place
from kernels.intrinsics import (
    block_x,
    block_y,
    divide,
    f32_of,
    fmax,
    fmin,
    grid_dependency_launch,
    grid_dependency_wait,
    int_to_f32,
    less,
    less_f32,
    load_16,
    load_32,
    load_128_if,
    load_i32,
    nearest_int,
    pack_half2,
    quotient,
    remainder,
    select,
    shuffle_xor_f32,
    smaller,
    store_16,
    store_32,
    store_32_if,
    thread_id,
    unpack_half2,
    wide,
)
from kernels.layout import NUM_SINKS

TASKS = 8
_WARPS = 8
_INFINITY = 0x7F800000


@traced("ff")
def _unlimited() -> Any:
    """The smallest and largest of nothing."""
    return f32_of(_INFINITY), f32_of(_INFINITY) * -1.0


@traced("rff")
def _scale(low: Any, high: Any) -> Any:
    """(scale, offset) as the stored pair, then the divisor of this scale and the offset, in float32."""
    pair = pack_half2(divide(high - low, int_to_f32(15)), low)
    scale, offset = unpack_half2(pair)
    return pair, select(scale, f32_of(_INFINITY), less_f32(0.0, scale)), offset


def _word(halves: Any, divisors: Any, offsets: Any) -> Any:
    """Eight numbers of 4 bits from a lane's four pairs, each pair with its (divisors, offsets)."""
    word: Any = None
    for pair, bits in enumerate(halves):
        for half, x in enumerate(unpack_half2(bits)):
            number = nearest_int(divide(x - offsets[pair][half], divisors[pair][half]))
            number = smaller(number, 15)
            number = number - smaller(number, 0)
            number = number << (4 * pair + 16 * half)
            word = number if word is None else word | number
    return word


def make_commit(dim: int) -> Any:
    """The device function that stores task after task of an exact block of one kv head."""
    steps = dim // 16
    many = (
        4 if steps % 4 == 0 else 2
    )  # steps of keys, tiles of values that are on their way together
    part_bytes, rounds = 32 * dim + 256, steps // many

    def load(source: Any, first: Any, stride: int) -> list[Any]:
        return [load_128_if(source + (first + i * stride) * 512, 1) for i in range(many)]

    @traced("ffff")
    def key_range(source: Any, first: Any, low: Any, high: Any) -> Any:
        """Widen the ranges of the positions of a lane's low and high rows."""
        low, high = list(low), list(high)
        for quad in load(source, first, 1):
            for register, bits in enumerate(quad):
                for x in unpack_half2(bits):
                    low[register & 1] = fmin(low[register & 1], x)
                    high[register & 1] = fmax(high[register & 1], x)
        return (*low, *high)

    @traced("rrffff")
    def key_scales(low: Any, high: Any) -> Any:
        """Pairs, divisors and offsets of a lane's two positions, over all lanes that share them."""
        pairs, divisors, offsets = [], [], []
        for least, most in zip(low, high, strict=True):
            for mask in (1, 2):
                least = fmin(least, shuffle_xor_f32(least, mask))
                most = fmax(most, shuffle_xor_f32(most, mask))
            pair, divisor, offset = _scale(least, most)
            pairs.append(pair)
            divisors.append(divisor)
            offsets.append(offset)
        return (*pairs, *divisors, *offsets)

    @traced()
    def key_words(
        source: Any, target: Any, first: Any, lane: Any, divisors: Any, offsets: Any
    ) -> None:
        for i, quad in enumerate(load(source, first, 1)):
            by_pair = [[[t[r & 1]] * 2 for r in range(4)] for t in (divisors, offsets)]
            at = first + i
            place = ((at >> 2) * 32 + lane) * 4 + (at & 3)
            store_32(target + place * 4, _word(quad, *by_pair))

    @traced()
    def put_key_scales(target: Any, tile: Any, lane: Any, low: Any, high: Any) -> None:
        at, is_first = target + 32 * dim + (16 * tile + (lane >> 2)) * 4, less(lane & 3, 1)
        store_32_if(at, low, is_first)
        store_32_if(at + 32, high, is_first)

    @traced("f" * 8)
    def value_range(source: Any, first: Any, low: Any, high: Any) -> Any:
        """Widen the ranges of a lane's four positions: 2t, 2t + 1 and those 8 later."""
        low, high = list(low), list(high)
        for quad in load(source, 4 * first, 4):
            for register, bits in enumerate(quad):
                for half, x in enumerate(unpack_half2(bits)):
                    at = 2 * (register >> 1) + half
                    low[at], high[at] = fmin(low[at], x), fmax(high[at], x)
        return (*low, *high)

    @traced("rrrr" + "f" * 8)
    def value_scales(low: Any, high: Any) -> Any:
        pairs, divisors, offsets = [], [], []
        for least, most in zip(low, high, strict=True):
            for mask in (4, 8, 16):
                least = fmin(least, shuffle_xor_f32(least, mask))
                most = fmax(most, shuffle_xor_f32(most, mask))
            pair, divisor, offset = _scale(least, most)
            pairs.append(pair)
            divisors.append(divisor)
            offsets.append(offset)
        return (*pairs, *divisors, *offsets)

    @traced()
    def value_words(
        source: Any, target: Any, first: Any, step: Any, lane: Any, divisors: Any, offsets: Any
    ) -> None:
        for i, quad in enumerate(load(source, 4 * first, 4)):
            by_pair = [[t[2 * (r >> 1) :][:2] for r in range(4)] for t in (divisors, offsets)]
            place = ((first + i) * 32 + lane) * 4 + step
            store_32(target + place * 4, _word(quad, *by_pair))

    @traced()
    def put_value_scales(target: Any, step: Any, lane: Any, pairs: Any) -> None:
        is_first = less(lane, 4)
        for i, pair in enumerate(pairs):
            position = 16 * step + 8 * (i >> 1) + 2 * (lane & 3) + (i & 1)
            store_32_if(target + 32 * dim + position * 4, pair, is_first)

    @device_function
    def commit(exact: Any, stored: Any, first_task: Any, num_warps: Any, lane: Any) -> None:
        """Store the tasks first_task, + num_warps, ... of a block; a whole warp calls."""
        low, high = _unlimited()
        for task in range(first_task, TASKS, num_warps):
            if task < 4:
                source = exact + (task * steps * 32 + lane) * 16
                target = stored
                key_low, key_high = (low, low), (high, high)
                for i in range(rounds):
                    found = key_range(source, i * many, key_low, key_high)
                    key_low, key_high = found[0:2], found[2:4]
                pair_low, pair_high, d0, d1, o0, o1 = key_scales(key_low, key_high)
                for i in range(rounds):
                    key_words(
                        exact + lane * 16, target, task * steps + i * many, lane, (d0, d1), (o0, o1)
                    )
                put_key_scales(target, task, lane, pair_low, pair_high)
            else:
                step = task - 4
                source = exact + 128 * dim + (step * 32 + lane) * 16
                target = stored + part_bytes
                value_low, value_high = (low, low, low, low), (high, high, high, high)
                for i in range(rounds):
                    seen = value_range(source, i * many, value_low, value_high)
                    value_low, value_high = seen[0:4], seen[4:8]
                scales = value_scales(value_low, value_high)
                for i in range(rounds):
                    value_words(source, target, i * many, step, lane, scales[4:8], scales[8:12])
                put_value_scales(target, step, lane, scales[0:4])

    return commit


def make_sink_copy(dim: int) -> Any:
    """The device function that copies one of the first keys and its value out of an exact block of one kv head."""
    rounds = -(-dim // 64)

    @traced()
    def copy_pair(exact: Any, sink: Any, place: Any, pair: Any) -> None:
        store_32(
            sink + (place * dim + 2 * pair) * 2,
            load_32(exact + key_place(place, 2 * pair, dim) * 2),
        )
        for d in (2 * pair, 2 * pair + 1):
            half = load_16(exact + 128 * dim + value_place(place, d) * 2)
            store_16(sink + 2 * NUM_SINKS * dim + (d * NUM_SINKS + place) * 2, half)

    @device_function
    def copy_sink(exact: Any, sink: Any, place: Any, lane: Any) -> None:
        """A whole warp calls; `sink` is where this kv head's sinks lie."""
        for i in range(rounds):
            pair = lane + 32 * i
            if 2 * pair < dim:
                copy_pair(exact, sink, place, pair)

    return copy_sink


def _make_keep(dim: int) -> Any:
    """The device function that does for a row's last place in one kv head what has to be done, if anything."""
    exact_bytes, stored_bytes, sink_bytes = 256 * dim, 64 * dim + 512, 16 * dim
    commit, copy_sink = make_commit(dim), make_sink_copy(dim)

    @device_function
    def keep(
        exact: Any, stored: Any, sinks: Any, sinks_bytes: Any, sink_of: Any, place: Any, block: Any, head: Any, thread: Any
    ) -> None:  # fmt: skip
        """`exact` and `stored` are where the heads of the block begin."""
        lane, warp = thread & 31, thread >> 5
        source = exact + head * exact_bytes
        if place & 63 == 63:
            commit(source, stored + head * stored_bytes, warp, _WARPS, lane)
        elif warp == 0:
            sink = load_i32(sink_of + block * 4)
            if sink >= 0:
                target = sinks + wide(sink) * sinks_bytes + head * sink_bytes
                copy_sink(source, target, place, lane)

    return keep


def _make_rows(dim: int) -> Any:
    keep = _make_keep(dim)

    def kernel(
        exact: Any, exact_block_bytes: Any, stored: Any, stored_block_bytes: Any, sinks: Any, sinks_bytes: Any,
        sink_of: Any, block_tables: Any, exact_tables: Any, slots: Any, row_tables: Any, places: Any,
        num_tables: Any, max_blocks: Any,
    ) -> None:  # fmt: skip
        row, head = block_x(), block_y()
        grid_dependency_launch()
        grid_dependency_wait()
        place = load_i32(places + row * 4)
        if place >= 0 and (place & 63 == 63 or place < NUM_SINKS):
            table = load_i32(slots + row * 4) * num_tables + load_i32(row_tables + row * 4)
            at = wide(table * max_blocks + (place >> 6)) * 4
            block, copy = load_i32(block_tables + at), load_i32(exact_tables + at)
            if block >= 0 and copy >= 0:
                keep(
                    exact + wide(copy) * exact_block_bytes, stored + wide(block) * stored_block_bytes, sinks, sinks_bytes,
                    sink_of, place, block, head, thread_id(),
                )  # fmt: skip

    return kernel


@cache
def commit_rows(dim: int) -> Variant:
    """Make the stored form of what a pass has finished, from the exact copies: of the blocks whose last place a row wrote, and of sinks.

    Grid: (rows, kv heads); the blocks of other rows leave at once. Kernel arguments: exact pool with its layer offset, bytes of its
    blocks; the same of the stored pool and of the sinks; sink_of int32 (num_blocks,); block_tables and exact_tables
    int32 (num_slots, num_tables, max_blocks); the rows' slots, tables and places int32; num_tables, max_blocks.
    """
    return Variant(
        name=f"commit_rows_d{dim}",
        function=_make_rows(dim),
        args="llllllllllllrr",
        num_threads=32 * _WARPS,
        constants=(dim,),
    )


def _make_passes(dim: int, heads: int) -> Any:
    keep = _make_keep(dim)

    def kernel(
        exact: Any, exact_block_bytes: Any, stored: Any, stored_block_bytes: Any, sinks: Any, sinks_bytes: Any,
        sink_of: Any, tables: Any, own_tables: Any, positions: Any, row_info: Any, layers: Any, max_loops: Any, max_blocks: Any,
    ) -> None:  # fmt: skip
        row, loop, layer = block_x(), quotient(block_y(), layers), remainder(block_y(), layers)
        grid_dependency_launch()
        grid_dependency_wait()
        place = load_i32(positions + row * 4)
        if place >= 0 and (place & 63 == 63 or place < NUM_SINKS):
            table = row * max_loops + load_i32(row_info + row * 8 + 4) + loop
            at = wide(table * max_blocks + (place >> 6)) * 4
            block, first = load_i32(tables + at), layer * heads
            own = exact + wide(load_i32(own_tables + at)) * exact_block_bytes
            target = stored + wide(block) * stored_block_bytes
            for head in range(first, first + heads):
                keep(own, target, sinks, sinks_bytes, sink_of, place, block, head, thread_id())

    return kernel


@cache
def commit_passes(dim: int, heads: int) -> Variant:
    """As `commit_rows`, for all layers of some passes.

    Grid: (rows, passes * layers). Kernel arguments: exact pool, bytes of its blocks; the same of the stored pool and of the
    sinks; sink_of int32 (num_blocks,); tables int32 (rows, max_loops, max_blocks) of the stored and of the exact blocks; positions
    int32 (rows,), -1: no row; row_info int32 (rows, 2), [1] = the row's loop before these passes; layers, max_loops, max_blocks.
    """
    return Variant(
        name=f"commit_passes_d{dim}",
        function=_make_passes(dim, heads),
        args="lllllllllllrrr",
        num_threads=32 * _WARPS,
        constants=(dim, heads),
    )


def _make_blocks(dim: int) -> Any:
    exact_bytes, stored_bytes = 256 * dim, 64 * dim + 512
    commit = make_commit(dim)

    def kernel(
        exact: Any, exact_block_bytes: Any, stored: Any, stored_block_bytes: Any, copies: Any, blocks: Any
    ) -> None:  # fmt: skip
        head = block_y()
        grid_dependency_launch()
        grid_dependency_wait()
        copy, block = load_i32(copies + block_x() * 4), load_i32(blocks + block_x() * 4)
        if block >= 0 and copy >= 0:
            source = exact + wide(copy) * exact_block_bytes + head * exact_bytes
            target = stored + wide(block) * stored_block_bytes + head * stored_bytes
            commit(source, target, thread_id() >> 5, _WARPS, thread_id() & 31)

    return kernel


@cache
def commit_blocks(dim: int) -> Variant:
    """Make the stored form of whole blocks, all layers.

    Grid: (blocks, layers * kv heads). Kernel arguments: exact pool and bytes of its blocks, the same of the stored pool; int32 ids of
    the exact copies and of the blocks (-1: nothing happens).
    """
    return Variant(
        name=f"commit_blocks_d{dim}",
        function=_make_blocks(dim),
        args="llllll",
        num_threads=32 * _WARPS,
        constants=(dim,),
    )


def variants() -> dict[str, Variant]:
    """Representative kernels, to be compiled and assembled."""
    kernels = (commit_rows(128), commit_rows(96), commit_passes(128, 12), commit_blocks(256))
    return {kernel.name: kernel for kernel in kernels}
