"""What each block of attention over cached inputs reads, written once a step: a list of units by loop, row and block.

A unit is what fills a stage: a stored block of 64 positions, or 16 exact ones. Its entry has four words: the block (of the pool, the
copies or the sinks), its first position, flags, the end of its positions. A chain that reads nothing has one unit of nothing, so that
each chain has a first and a last unit. The flags' upper half is the number of units in the list, the byte below it the chain.
"""

from __future__ import annotations

from typing import Any

from kernels.absorbed_parts import narrow
from kernels.absorbed_shape import (
    CHAIN_SHIFT,
    COUNT_SHIFT,
    ENTRY_BYTES,
    EXACT,
    FIRST,
    LAST,
    NOTHING,
    PIECE,
    SINKS,
    SINKS_APART,
    STABLE,
    STORED,
    AbsorbedLaunch,
)
from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    block_x,
    block_y,
    fence_device,
    grid_dependency_wait,
    grid_x,
    load_i32,
    quotient,
    store_128_if,
    thread_id,
    wide,
)
from kernels.layout import NUM_SINKS

_EVERYTHING = 1 << 30
_CHAIN_THREADS = 8  # threads that write one chain's entries


def list_units(launch: AbsorbedLaunch, max_blocks: int) -> int:
    """Room in one block's list."""
    shape = launch.shape
    units = -(-max_blocks // shape.stored_chains) * (1 if shape.is_cut else 4) + 2
    return launch.block_chains * units + 4


@traced()
def _put(address: Any, block: Any, key: Any, flags: Any, end: Any) -> None:
    store_128_if(address, block, key, flags, end, 1)


def _make_kernel(launch: AbsorbedLaunch) -> Any:
    shape = launch.shape
    is_cut, stride, shift = shape.is_cut, shape.stored_chains, shape.stored_chains.bit_length() - 1
    half_stored, half_chains = shape.stored_chains // 2, shape.chains // 2
    num_chains, block_chains, split = shape.chains, launch.block_chains, launch.split
    piece, num_sinks, everything = PIECE, NUM_SINKS, _EVERYTHING
    stored, exact, sinks_only, nothing = STORED, EXACT, SINKS, NOTHING
    first_flag, last_flag, stable_flag, apart_flag = FIRST, LAST, STABLE, SINKS_APART
    chain_shift, count_shift, entry_bytes = CHAIN_SHIFT, COUNT_SHIFT, ENTRY_BYTES
    lanes = _CHAIN_THREADS

    @device_function
    def units_of(chain: Any, position: Any, first: Any, has_sinks: Any) -> Any:
        """What a chain reads: (whether block 0 comes before, its first block, how many units)."""
        half = quotient(chain, half_chains)
        place = chain - half * half_chains
        own = position >> 6
        pieces = ((position >> 4) & 3) + 1
        lead, block, units = 0, 0, 0
        if position >= 0:
            if place < half_stored:
                number = half * half_stored + place
                last = own if is_cut else own + 1
                lead = 1 if number == 0 and first > 0 and has_sinks == 0 else 0
                block = first + ((number - first) & (stride - 1))
                blocks = (last - block + stride - 1) >> shift if last > block else 0
                if is_cut:
                    units = lead + blocks
                else:
                    units = lead + 4 * blocks
                    if own & (stride - 1) == number:
                        units += pieces - 4
            elif half == 0:
                units = pieces
            else:
                units = has_sinks
        return narrow(lead), narrow(block), narrow(units)

    def kernel(
        tables: Any, sink_of: Any, exact_blocks: Any, positions: Any, row_info: Any, windows: Any, lists: Any,
        max_loops: Any, max_blocks: Any, room: Any,
    ) -> None:  # fmt: skip
        row, loop, chain = block_x(), block_y(), quotient(thread_id(), lanes)
        grid_dependency_wait()
        position = load_i32(positions + row * 4)
        num_stable = load_i32(row_info + row * 8)
        depth = load_i32(row_info + row * 8 + 4) + loop
        window = load_i32(windows + row * 4)
        if window == 0:
            window = narrow(everything)
        own = position >> 6
        first = position - window + 1
        first = first >> 6 if first > 0 else 0
        place = row * max_loops + depth
        table = tables + wide(place) * max_blocks * 4
        has_sinks, sink, copy = narrow(0), narrow(0), narrow(0)
        if is_cut and position >= 0:
            copy = load_i32(exact_blocks + place * 4)
            before_all = load_i32(table)
            if position >= 64 and before_all >= 0:  # a row that leaves earlier has no table here
                sink = load_i32(sink_of + wide(before_all) * 4)
                if sink >= 0:
                    has_sinks = narrow(1)
        if chain < num_chains:
            part = quotient(chain, block_chains)
            before, count = narrow(0), narrow(0)
            for other in range(part * block_chains, part * block_chains + block_chains):
                more = max(units_of(other, position, first, has_sinks)[2], 1)
                if other < chain:
                    before += more
                count += more
            lead, block, units = units_of(chain, position, first, has_sinks)
            half = quotient(chain, half_chains)
            is_stored_chain = chain - half * half_chains < half_stored
            all_units = max(units, 1)
            line = (loop * grid_x() + row) * split + part
            target = lists + wide(line * room + before) * entry_bytes
            for u in range(thread_id() - chain * lanes, all_units, lanes):
                source, key, kind, end, number, apart = 0, 0, nothing, 0, 0, 0
                if units == 0:
                    end = 0
                elif not is_stored_chain and half == 1:
                    kind, source, end = sinks_only, sink, num_sinks
                elif not is_stored_chain:
                    number = own
                    key = own * 64 + u * piece
                    kind, source, end = exact, copy, min(key + piece, position + 1)
                elif is_cut:
                    number = 0 if u < lead else block + stride * (u - lead)
                    key = number * 64
                    kind, source, end = stored, load_i32(table + number * 4), key + 64
                    if number == 0 and has_sinks > 0:
                        apart = apart_flag
                else:
                    after = u - lead
                    number = 0 if after < 0 else block + stride * (after >> 2)
                    key = number * 64 + (0 if after < 0 else (after & 3) * piece)
                    kind, source = exact, load_i32(table + number * 4)
                    end = min(key + piece, position + 1)
                flags = kind + apart + (chain << chain_shift) + (count << count_shift)
                if u == 0:
                    flags += first_flag
                if u == all_units - 1:
                    flags += last_flag
                if number < num_stable:
                    flags += stable_flag
                _put(target + u * entry_bytes, source, key, flags, end)
        fence_device()

    return kernel


def plan(name: str, launch: AbsorbedLaunch) -> Variant:
    """The lists of a step: grid (rows, loops). Nothing that follows may start before it has ended: attention reads them at once.

    Kernel arguments: tables, sink_of, exact_blocks, positions, row_info, windows as `absorbed.attention` and `absorbed_products.query`
    have them; lists int32 (loops, rows, split, room, 4), written; max_loops, max_blocks, room: `list_units`.
    """
    return Variant(
        name=f"{name}_{launch.shape.kind}_x{launch.split}",
        function=_make_kernel(launch),
        args="l" * 7 + "rrr",
        num_threads=-(-launch.shape.chains * _CHAIN_THREADS // 32) * 32,
        constants=(launch,),
    )
