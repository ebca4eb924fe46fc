"""Waves of guesses between two segments of core passes: what follows from the words that were just chosen, without the host.

One warp per wave, a lane per node. The meaning is that of `gpu_worker.speculative.Wave.follow`: the first node whose word is not its
successor's token drops all after it, and its word becomes the next node; at full depth the root's word is committed and the root moves
on. The warp then writes all that the next segment reads of the wave's rows, their noise keys included. Integers alone; a wave's result
depends on its own rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kernels.compiler import Variant
from kernels.device_code import traced
from kernels.intrinsics import (
    block_x,
    grid_dependency_launch,
    grid_dependency_wait,
    load_i32,
    load_i64,
    shuffle_from,
    smaller,
    store_8,
    store_32,
    thread_id,
    warp_min,
)
from kernels.layout import NUM_RECORDS, RECORD_WORDS, WAVE_WORDS, WaveBuffers
from kernels.runtime import launch

# The words of a wave's state: the root's position and the number of nodes; the position of row 0 at the start; the depth; how many
# guesses may follow the root; the number of tokens at which the sequence ends; its slot, the spare one, the table of loop 1 and the
# window; segments so far; the noise key of its seed.
ROOT, COUNT, BASE, LOOPS, AHEAD, END, SLOT, SPARE, TABLE, WINDOW, TURN = range(11)
SEED = 12
COLUMNS = ("tokens", "home", "slots", "tables", "positions", "places", "windows")
MAX_ROWS = 32  # of a wave

_LANES = 32
_NONE = 64
_MASK = (1 << 64) - 1


@traced("rr")
def noise_key(seed: Any, position: Any) -> Any:
    """Low and high word of the key of a position: one golden-ratio step, then the finaliser of splitmix64."""
    x = (seed + position + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x = x ^ (x >> 31)
    return x & 0xFFFFFFFF, x >> 32


def _make_advance(rows: int) -> Any:
    wrap = rows - 1
    state_bytes, record_bytes, last_record = WAVE_WORDS * 4, RECORD_WORDS * 4, NUM_RECORDS - 1

    def kernel(
        states: Any, all_done: Any, is_new: Any, records: Any, chosen: Any, tokens: Any, home: Any, slots: Any, tables: Any,
        positions: Any, places: Any, windows: Any, numbers: Any, row_info: Any, num_passes: Any, max_waves: Any,
        num_tables: Any,
    ) -> None:  # fmt: skip
        wave, lane = block_x(), thread_id()
        grid_dependency_launch()
        grid_dependency_wait()
        state, first = states + wave * state_bytes, wave * rows
        root, count, base = (
            load_i32(state + ROOT * 4),
            load_i32(state + COUNT * 4),
            load_i32(state + BASE * 4),
        )
        loops, ahead, end = (
            load_i32(state + LOOPS * 4),
            load_i32(state + AHEAD * 4),
            load_i32(state + END * 4),
        )
        slot, spare, table = (
            load_i32(state + SLOT * 4),
            load_i32(state + SPARE * 4),
            load_i32(state + TABLE * 4),
        )
        window, turn, seed = (
            load_i32(state + WINDOW * 4),
            load_i32(state + TURN * 4),
            load_i64(state + SEED * 4),
        )
        own = first + (lane & wrap)  # the row that this lane writes
        done = load_i32(all_done + own * 4)
        # Lane i follows node i; a node that ends the sequence has no row.
        running = smaller(count, end - 1 - root)
        if running < 0:
            running = 0
        row = first + ((root + lane - base) & wrap)
        token, word = load_i32(tokens + row * 4), load_i32(chosen + row * 4)
        depth = shuffle_from(load_i32(all_done + row * 4), 0) + num_passes
        following = shuffle_from(token, lane + 1)
        is_held = lane + 1 < count and following == word
        at = warp_min(lane if lane < running and not is_held else _NONE)
        is_final = running > 0 and depth == loops
        committed, made = shuffle_from(word, 0), shuffle_from(word, at)
        kept, drafted, added = count, 0, _NONE
        if at < _NONE:
            kept = at + 1
            if is_final and at == 0:
                kept, added = 2, 1
            elif at < ahead:
                kept, added, drafted = at + 2, at + 1, 1
        moved, accepted = 0, 0
        if is_final:
            moved = 1
            accepted = 1 if at > 0 else 0
        root += moved
        kept -= moved
        node = (base + lane - root) & wrap
        if lane < rows:
            is_alive = node < kept and root + node < end - 1
            position, done_now, where, at_table = 0 if row_info == 0 else -1, 0, spare, 0
            if node + moved == added:
                store_32(tokens + own * 4, made)
            elif is_alive:
                done_now = done + num_passes
            if is_alive:
                position, where, at_table = root + node, slot, table + done_now
            store_32(all_done + own * 4, done_now)
            store_8(is_new + own, 1 if done_now == 0 else 0)
            store_32(home + own * 4, where)
            store_32(slots + own * 4, where)
            store_32(tables + own * 4, at_table)
            store_32(positions + own * 4, position)
            store_32(places + own * 4, position if is_alive else 0)
            store_32(windows + own * 4, window)
            if row_info != 0:
                store_32(row_info + own * 8, (root >> 6) if is_alive else 0)
                store_32(
                    row_info + own * 8 + 4, (where - own) * num_tables + at_table if is_alive else 0
                )
            low, high = noise_key(seed, position + 1)
            store_32(numbers + own * 16 + 4, low)
            store_32(numbers + own * 16 + 8, high)
        if lane == 0:
            store_32(state + ROOT * 4, root)
            store_32(state + COUNT * 4, kept)
            store_32(state + TURN * 4, turn + 1)
            record = records + ((turn & last_record) * max_waves + wave) * record_bytes
            store_32(record, moved)
            store_32(record + 4, committed)
            store_32(record + 8, accepted)
            store_32(record + 12, drafted)
            store_32(record + 16, running)

    return kernel


def advance(rows: int) -> Variant:
    """Moves waves of `rows` rows on, one block each.

    Kernel arguments: the four buffers of `WaveBuffers`; chosen int32 (waves * rows,); the COLUMNS
    int32, one number per row, written (tokens are read too); numbers int32 (rows, 4) as `sampling.choose` reads them, the key's
    words written; row_info int32 (rows, 2) or absent, written: the whole blocks before the root, and the row's table as the fused kernels
    count them (then rows without a node have position -1, else 0); num_passes that the rows have run since the last time; max_waves
    of the records; num_tables of a slot.
    """
    return Variant("advance_wave", _make_advance(rows), "l" * 14 + "rrr", _LANES, constants=(rows,))


def advance_wave(
    buffers: WaveBuffers, columns: Mapping[str, Tensor], chosen: Tensor, settings: tuple[Tensor, ...], shape: tuple[int, int],
    num_passes: int, row_info: Tensor | None = None, num_tables: int = 0,
) -> None:  # fmt: skip
    """See `kernels.cpu_wave.advance_wave`."""
    num_waves, rows = shape
    launch(
        advance(rows), (num_waves, 1), buffers.states, buffers.done, buffers.is_new, buffers.records, chosen,
        *(columns[name] for name in COLUMNS), settings[2], row_info, num_passes,
        buffers.records.shape[1], num_tables,
    )  # fmt: skip


def variants() -> dict[str, Variant]:
    """Every kernel of this module by name."""
    return {f"advance_wave, {rows} rows": advance(rows) for rows in (2, 8, 32)}
