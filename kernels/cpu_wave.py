"""The CPU's twin of `kernels.wave`: the same moves on the same buffers, one wave after the other in plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kernels.layout import BLOCK_SIZE, NUM_RECORDS, WaveBuffers
from kernels.wave import (
    AHEAD,
    BASE,
    COUNT,
    END,
    LOOPS,
    ROOT,
    SEED,
    SLOT,
    SPARE,
    TABLE,
    TURN,
    WINDOW,
    noise_key,
)


def advance_wave(
    buffers: WaveBuffers, columns: Mapping[str, Tensor], chosen: Tensor, settings: tuple[Tensor, ...], shape: tuple[int, int],
    num_passes: int, row_info: Tensor | None = None, num_tables: int = 0,
) -> None:  # fmt: skip
    """Draws the conclusions from the tokens that the waves' rows chose after `num_passes` more core passes.

    Args:
        buffers: the waves; moved on, and one record of each written.
        columns: int32, a number per row: `tokens`, `home`, `slots`, `tables`, `positions`, `places`, `windows`; made ready for the next passes.
        chosen: int32, a token per row.
        settings: as `pack_choices` returns them; the noise keys are written.
        shape: the number of waves and the rows of each; wave w has the rows from w * rows on.
        row_info: int32 (rows, 2), for kernels that want of each row the whole blocks before its root, and its table in the list of all slots'
            tables (`num_tables` a slot) less `num_tables` times the row. They know rows without a node by the position -1.
    """
    num_waves, rows = shape
    arrays = {name: column.numpy() for name, column in columns.items()}
    keys = settings[4].numpy()
    for wave in range(num_waves):
        _advance(buffers, wave, rows, arrays, chosen.numpy(), keys, num_passes)
    if row_info is not None:
        _tell(row_info.numpy(), buffers, rows, arrays, num_tables)


def _advance(
    buffers: WaveBuffers, wave: int, rows: int, columns: Mapping[str, Any], chosen: Any, keys: Any, num_passes: int
) -> None:  # fmt: skip
    words, first = buffers.states[wave].numpy(), wave * rows
    done, tokens = buffers.done.numpy(), columns["tokens"]
    state = words.tolist()
    root, end, base = state[ROOT], state[END], state[BASE]
    seed = int(words[SEED : SEED + 2].view("int64")[0])

    def row_of(position: int) -> int:
        return int(first + (position - base) % rows)

    nodes = [int(tokens[row_of(root + i)]) for i in range(state[COUNT])]
    running = max(0, min(len(nodes), end - 1 - root))
    at = {root + i: int(done[row_of(root + i)]) + num_passes for i in range(running)}
    is_final = at.get(root) == state[LOOPS]
    is_held, drafted, committed = True, 0, int(chosen[row_of(root)])
    for i in range(running):
        word = int(chosen[row_of(root + i)])
        if i + 1 < len(nodes) and nodes[i + 1] == word:
            continue
        del nodes[i + 1 :]
        is_held = i > 0
        if (is_final and i == 0) or i < state[AHEAD]:
            nodes.append(word)
            at[root + i + 1] = 0
            drafted = int(not (is_final and i == 0))
        break
    if is_final:
        nodes.pop(0)
        root += 1
    for offset in range(rows):
        row, i = first + offset, (base + offset - root) % rows
        is_alive = i < len(nodes) and root + i < end - 1
        position = root + i if is_alive else 0
        done[row] = at[position] if is_alive else 0
        if i < len(nodes):
            tokens[row] = nodes[i]
        buffers.is_new[row] = bool(done[row] == 0)
        columns["home"][row] = columns["slots"][row] = state[SLOT] if is_alive else state[SPARE]
        columns["tables"][row] = state[TABLE] + done[row] if is_alive else 0
        columns["positions"][row] = columns["places"][row] = position
        columns["windows"][row] = state[WINDOW]
        keys[row] = noise_key(seed, position + 1)
    words[ROOT], words[COUNT], words[TURN] = root, len(nodes), state[TURN] + 1
    record = [is_final, committed, is_final and is_held, drafted, running]
    buffers.records.numpy()[state[TURN] % NUM_RECORDS, wave, : len(record)] = record


def _tell(
    row_info: Any, buffers: WaveBuffers, rows: int, columns: Mapping[str, Any], num_tables: int
) -> None:
    """Fills in `row_info`, and marks the rows without a node."""
    states = buffers.states.numpy()
    for row in range(len(row_info)):
        state, slot = states[row // rows], int(columns["slots"][row])
        row_info[row] = 0
        if slot == state[SLOT]:
            table = (slot - row) * num_tables + columns["tables"][row]
            row_info[row] = state[ROOT] // BLOCK_SIZE, table
        else:
            columns["positions"][row] = -1
