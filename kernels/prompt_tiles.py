"""How the rows of a prompt pass are cut into tiles for attention, and which blocks of keys must be gathered for them. On the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.layout import BLOCK_SIZE
from kernels.prompt_attention import TILE_FIELDS, UNIT_TILES
from kernels.prompt_gather import EXACT, ITEM_FIELDS, WRITTEN

Ints = NDArray[np.integer]


COUNTS = 4  # int32 before the tiles: tiles, units, items, one unused


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """The tiles of a pass, on the device, in one tensor, so that one copy brings all.

    Attributes:
        packed: int32, COUNTS numbers, then tile_capacity x TILE_FIELDS, then item_capacity x ITEM_FIELDS.
        num_tiles: tiles, two of every unit; units with most keys come first, one that lacks its second tile has one of no rows.
        num_items: blocks to gather.
        has_windows: whether any row has a window.
    """

    packed: Tensor
    num_tiles: int
    num_items: int
    tile_capacity: int
    item_capacity: int
    has_windows: bool

    @property
    def num_units(self) -> int:
        return self.num_tiles // UNIT_TILES

    @property
    def counts(self) -> Tensor:
        return self.packed[:COUNTS]

    @property
    def tiles(self) -> Tensor:
        """int32 (num_tiles, TILE_FIELDS)."""
        return self.packed[COUNTS:][: self.num_tiles * TILE_FIELDS].view(-1, TILE_FIELDS)

    @property
    def items(self) -> Tensor:
        """int32 (num_items, ITEM_FIELDS)."""
        first = COUNTS + self.tile_capacity * TILE_FIELDS
        return self.packed[first:][: self.num_items * ITEM_FIELDS].view(-1, ITEM_FIELDS)

    def use_table(self, table: int) -> None:
        """Let all rows write and read another table of their sequences, in place."""
        self.tiles[:, 1] = table
        self.items[:, 1] = table


def make_tiles(
    slots: Ints,
    tables: Ints,
    positions: Ints,
    windows: Ints,
    *,
    kind: str = "fp16",
    device: torch.device | str = "cpu",
) -> PromptTiles:
    """Tiles of rows of which those of a sequence follow each other in ascending position.

    Tiles end where the slot, the table or the block of 64 positions changes; two that follow each other in a sequence are a unit.

    Args:
        slots, tables, positions, windows: ints (num_rows,), at least one row; `windows` is 0 for rows that see all keys, and the same
            for all rows of a sequence.
        kind: the cache's.
    """
    keys = np.stack([slots, tables, positions // BLOCK_SIZE], 1)
    changes = keys[1:] != keys[:-1]
    firsts = np.flatnonzero(np.append(True, changes.any(1)))
    starts = np.flatnonzero(np.append(True, changes[:, :2].any(1))[firsts])
    lengths = np.diff(np.append(starts, len(firsts)))
    # how many tiles of its sequence come before each
    ordinals = np.arange(len(firsts)) - np.repeat(starts, lengths)
    units = np.cumsum(ordinals % UNIT_TILES == 0) - 1
    counts = np.diff(np.append(firsts, len(slots)))
    items, gathered = _items(slots, tables, positions, windows, firsts, starts, lengths, kind)
    if kind == "fp16":
        items[gathered[2][counts == BLOCK_SIZE], 3] = WRITTEN
    columns = (
        slots[firsts], tables[firsts], positions[firsts], firsts, counts, windows[firsts], *gathered,
    )  # fmt: skip
    tiles = np.zeros((units[-1] + 1, UNIT_TILES, TILE_FIELDS), dtype=np.int32)
    for i, column in enumerate(columns):
        tiles[units, ordinals % UNIT_TILES, i] = column
    first, window = tiles[:, 0, 2], tiles[:, 0, 5]
    seen = np.where(window > 0, np.minimum(first, window + 2 * BLOCK_SIZE), first)
    tiles = tiles[np.argsort(-seen, kind="stable")].reshape(-1, TILE_FIELDS)
    counts = np.array([len(tiles), len(tiles) // UNIT_TILES, len(items), 0], dtype=np.int32)
    tile_capacity, item_capacity = (1 << (len(part) - 1).bit_length() for part in (tiles, items))
    packed = np.zeros(
        COUNTS + tile_capacity * TILE_FIELDS + item_capacity * ITEM_FIELDS, dtype=np.int32
    )
    packed[:COUNTS] = counts
    packed[COUNTS:][: tiles.size] = tiles.ravel()
    packed[COUNTS + tile_capacity * TILE_FIELDS :][: items.size] = items.ravel()
    on_device = torch.from_numpy(packed).to(device)
    has_windows = bool(windows.any())
    return PromptTiles(on_device, len(tiles), len(items), tile_capacity, item_capacity, has_windows)


def _items(
    slots: Ints, tables: Ints, positions: Ints, windows: Ints, firsts: Ints, starts: Ints, lengths: Ints, kind: str
) -> tuple[NDArray[np.int32], tuple[Ints, Ints, Ints]]:  # fmt: skip
    """The blocks to gather, and for each tile which of them is block 0, block b > 0 less b, and its own."""
    parts: list[Ints] = []
    zeros, shifts, owns = (np.zeros(len(firsts), dtype=np.int64) for _ in range(3))
    num_items = 0
    for start, length in zip(starts, lengths, strict=True):
        row, of_sequence = firsts[start], slice(start, start + length)
        blocks = positions[firsts[of_sequence]] // BLOCK_SIZE
        # as in `prompt_attention`: the first block, then those from the first that the first row's window reaches
        hidden = positions[row] - windows[row] + 1
        skipped = hidden // BLOCK_SIZE - 1 if windows[row] > 0 and hidden >= 2 * BLOCK_SIZE else 0
        end = blocks[-1] + (0 if kind == "int4" else 1)
        read = np.append(np.zeros(min(end, 1), dtype=np.int64), np.arange(1 + skipped, end))
        zeros[of_sequence], shifts[of_sequence] = num_items, num_items - skipped
        owns[of_sequence] = np.where(blocks > 0, num_items - skipped + blocks, num_items)
        if kind == "int4":
            owns[of_sequence] = num_items + len(read) + np.arange(length)
            read = np.append(read, blocks)
        part = np.zeros((len(read), ITEM_FIELDS), dtype=np.int32)
        part[:, 0], part[:, 1], part[:, 2] = slots[row], tables[row], read
        part[len(read) - (length if kind == "int4" else 0) :, 3] = EXACT
        parts.append(part)
        num_items += len(read)
    return np.concatenate(parts).astype(np.int32), (zeros, shifts, owns)
