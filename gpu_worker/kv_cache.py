"""The KV cache: a pool of reference-counted blocks, and block tables per sequence.

A block is 64 positions of one loop for all core layers. A sequence has one table of blocks per loop, plus `num_extra_tables` for
prelude and coda layers, laid out as if they were further core layers:

    table 0 .. extra-1        prelude and coda layers, `core` of them per block
    table extra + t - 1       loop t

In cut KV formats the blocks of a sequence that are not settled yet have exact copies, from a pool of their own, and first blocks
have exact sinks, which live as long as the block. With `last_loop` sharing, `fold` lets the last loop's block stand for all loops.

Owns who holds which block; knows no requests, tokens or arithmetic. Sizes come from its counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.kv_store import copy_blocks, copy_place, form_of, make_store, move_places
from gpu_worker.mirror import Mirror
from gpu_worker.model_config import ModelConfig
from kernels.layout import BLOCK_SIZE, NUM_SINKS

Blocks = NDArray[np.int32]


CPU = torch.device("cpu")


class OutOfBlocks(Exception):
    """The pool has not enough free blocks; nothing was taken."""


class BlockPool:
    """Which blocks are free, and how many hold each of the others. `on_free` is told of blocks that nobody holds any more."""

    on_free: Callable[[Blocks], None] | None = None

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, dtype=np.int32)
        self._free = np.arange(
            num_blocks - 1, -1, -1, dtype=np.int32
        )  # a stack; the first `num_free` entries count
        self.num_free = num_blocks

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def take(self, count: int) -> Blocks:
        """`count` blocks with one holder each.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        blocks = self._free[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self.refs[blocks] = 1
        return blocks

    def share(self, blocks: Blocks) -> None:
        """One more holder for each of these (distinct) blocks, which are held already."""
        flat = blocks.ravel()
        assert (self.refs[flat] > 0).all(), "only held blocks can be shared"
        self.refs[flat] += 1

    def release(self, blocks: Blocks) -> None:
        """One holder less for each of these (distinct) blocks; those without any are free again."""
        flat = blocks.ravel()
        assert (self.refs[flat] > 0).all(), "released more often than taken"
        self.refs[flat] -= 1
        freed = flat[self.refs[flat] == 0]
        if self.on_free is not None:
            self.on_free(freed)
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)


class KVCache:
    """Block tables of up to `num_slots` sequences over one pool, and the tensors that the blocks live in.

    Args:
        config: the model.
        num_blocks: in the pool.
        num_slots: sequences at a time.
        max_positions: of one sequence.
        kv_format, kv_share: see `kv_sizes`.
        num_copies: exact copies of blocks, in formats that need them; no more than `num_blocks` are ever used.
        device: where the blocks are; the host keeps the tables and tells the device.
        has_spare: one more slot, `spare_slot`, for rows that are there to fill up a batch: all its tables name one block of its own, whose
            content means nothing.
        is_fast: blocks lie as the GPU's kernels want them, where they have a layout of their own.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        num_slots: int,
        max_positions: int,
        kv_format: str = "fp32",
        kv_share: str = "per_loop",
        num_copies: int | None = None,
        device: torch.device = CPU,
        has_spare: bool = False,
        is_fast: bool = False,
    ) -> None:
        self.num_extra_tables = extra_tables(config)
        self.num_tables = self.num_extra_tables + config.loop.hard_max
        self.max_blocks = -(-max_positions // BLOCK_SIZE)
        self.is_folding = kv_share == "last_loop"
        self.form = form_of(config, kv_format)
        self.block_bytes = self.form.block_bytes
        self.pool = BlockPool(num_blocks)
        self.copies = BlockPool(min(num_copies or num_blocks, num_blocks))
        self.sinks = BlockPool(num_blocks)
        self.spare_slot = num_slots
        shape = (num_slots + has_spare, self.num_tables, self.max_blocks)
        has_copies = self.form.has_copies
        self._mirrors = [
            Mirror(shape, device),
            Mirror(shape if has_copies else (0, 0, 0), device),
            Mirror((num_blocks + has_spare if has_copies else 0,), device),
        ]
        self._tables, self._copy_tables, self._sink_of = (mirror.host for mirror in self._mirrors)
        self._block_tables, copy_tables, sink_of = (mirror.tensor for mirror in self._mirrors)
        self.paged = make_store(
            self.form,
            num_blocks + has_spare,
            self.copies.num_blocks + has_spare,
            copy_tables,
            sink_of,
            device,
            is_fast,
        )
        if has_spare:
            self._tables[num_slots] = num_blocks
            self._copy_tables[num_slots:] = self.copies.num_blocks
            self._touch()
        if has_copies:
            self.pool.on_free = self._free_sinks
        self._num_blocks = np.zeros(num_slots, dtype=np.int64)  # per table of the slot's sequence
        self._num_settled = np.zeros(
            num_slots, dtype=np.int64
        )  # of these, the first without copies
        self._num_folded = np.zeros(
            num_slots, dtype=np.int64
        )  # of these, the first with one for all loops
        self._num_loops = np.zeros(num_slots, dtype=np.int64)
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def block_tables(self) -> Tensor:
        """(num_slots, tables, max_blocks) on the device; that table and those of the copies are up to date for the next pass."""
        for mirror in self._mirrors:
            mirror.upload()
        return self._block_tables

    @property
    def host_tables(self) -> Blocks:
        """The same in host memory, to be read alone."""
        return self._tables

    @property
    def host_copy_tables(self) -> Blocks:
        """Which exact copy each block of each slot has, to be read alone; empty in formats without copies."""
        return self._copy_tables

    def _touch(self) -> None:
        for mirror in self._mirrors:
            mirror.touch()

    # ------------------------------------------------------------------------------------------------------------- slots

    def open(self, loops: int) -> int:
        """A slot for a sequence of that many loops, without blocks."""
        slot = self._free_slots.pop()
        self._num_loops[slot] = loops
        return slot

    def close(self, slot: int) -> None:
        """Gives back a slot and its hold on all its blocks."""
        self.truncate(slot, 0)
        self._num_loops[slot] = 0
        self._free_slots.append(slot)

    def covers(self, slot: int, num_positions: int) -> bool:
        """Whether the slot's tables reach that far."""
        return num_positions <= int(self._num_blocks[slot]) * BLOCK_SIZE

    def num_missing(self, slot: int, num_positions: int) -> int:
        """Blocks that `extend` to that many positions would take; more than there are if their exact copies have no room."""
        more = -(-num_positions // BLOCK_SIZE) - int(self._num_blocks[slot])
        count = max(more, 0) * self._height(slot)
        has_room = not self.form.has_copies or count <= self.copies.num_free
        return count if has_room else self.pool.num_blocks + 1

    def num_missing_of_all(self, slots: Sequence[int], num_positions: Sequence[int]) -> int:
        """The sum of `num_missing` of distinct slots, each with its number of positions."""
        columns = -(-np.array(num_positions, dtype=np.int64) // BLOCK_SIZE)
        more = np.maximum(columns - self._num_blocks[slots], 0)
        counts = more * (self.num_extra_tables + self._num_loops[slots])
        if self.form.has_copies:
            counts[counts > self.copies.num_free] = self.pool.num_blocks + 1
        return int(counts.sum())

    def extend(self, slot: int, num_positions: int) -> None:
        """Makes room for positions [0, num_positions) in all of the slot's tables.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        have, want = int(self._num_blocks[slot]), -(-num_positions // BLOCK_SIZE)
        if want <= have:
            return
        height = self._height(slot)
        count = (want - have) * height
        blocks = self.pool.take(count).reshape(height, want - have)
        if self.form.has_copies:
            try:
                copies = self.copies.take(count)
            except OutOfBlocks:
                self.pool.release(blocks)
                raise
            self._copy_tables[slot, :height, have:want] = copies.reshape(height, want - have)
            if have == 0:
                self._sink_of[blocks[:, 0]] = self.sinks.take(height)
        self._tables[slot, :height, have:want] = blocks
        self._num_blocks[slot] = want
        self._touch()

    def truncate(self, slot: int, num_positions: int) -> None:
        """Gives back the blocks beyond those that hold positions [0, num_positions)."""
        have, keep = int(self._num_blocks[slot]), -(-num_positions // BLOCK_SIZE)
        if keep >= have:
            return
        height = self._height(slot)
        self._drop_copies(slot, keep, have)
        self.pool.release(self._distinct(slot, keep, have))
        self._tables[slot, :height, keep:have] = -1
        self._num_blocks[slot] = keep
        self._touch()
        for counts in (self._num_settled, self._num_folded):
            counts[slot] = min(counts[slot], keep)

    def settle(self, slot: int, num_positions: int) -> None:
        """The full blocks in [0, num_positions) are final: no row in them runs again, their exact copies are given back."""
        full = num_positions // BLOCK_SIZE
        self._drop_copies(slot, 0, full)
        self._num_settled[slot] = max(self._num_settled[slot], full)

    def fold(self, slot: int, num_positions: int) -> None:
        """Lets the last loop's K and V of the full blocks in [0, num_positions) stand for those of all loops (`last_loop` sharing)."""
        first, full = int(self._num_folded[slot]), num_positions // BLOCK_SIZE
        height = self._height(slot)
        if not self.is_folding or full <= first:
            return
        loops = self._tables[slot, self.num_extra_tables : height, first:full]
        self.pool.release(loops[:-1])
        loops[:-1] = loops[-1]
        self._num_folded[slot] = full
        self._touch()

    def adopt(self, slot: int, blocks: Blocks) -> None:
        """Starts an empty slot with shared, full blocks (at least the slot's tables, num_blocks)."""
        assert self._num_blocks[slot] == 0, "only an empty slot can adopt"
        height, count = self._height(slot), blocks.shape[1]
        self.pool.share(blocks[:height])
        self._tables[slot, :height, :count] = blocks[:height]
        self._num_blocks[slot] = self._num_settled[slot] = count
        self._touch()

    def hold(self, slot: int, num_positions: int) -> Blocks:
        """Shares the slot's blocks of the full blocks in [0, num_positions): (tables, num_blocks), to be released later."""
        assert self._num_folded[slot] == 0, "what others start from is kept per loop"
        blocks = self._tables[slot, : self._height(slot), : num_positions // BLOCK_SIZE].copy()
        self.pool.share(blocks)
        return blocks

    def make_private(self, slot: int, first_position: int) -> None:
        """Copy on write: the slot's blocks from that position on get no other holder.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        height, first, have = (
            self._height(slot),
            first_position // BLOCK_SIZE,
            int(self._num_blocks[slot]),
        )
        part = self._tables[slot, :height, first:have]
        shared = self.pool.refs[part] > 1
        old = part[shared]
        new = self.pool.take(len(old))
        copy_blocks(self.paged, torch.from_numpy(old).long(), torch.from_numpy(new).long())
        part[shared] = new
        self._touch()
        self.pool.release(old)

    def copy_loop(self, slot: int, place: int, loop: int, last_loop: int) -> None:
        """Writes the K and V of one place at `loop` into the same place of the loops after it, up to `last_loop`."""
        block, offset = place // BLOCK_SIZE, place % BLOCK_SIZE
        first = self.num_extra_tables + loop - 1
        tables = slice(first, first + last_loop - loop + 1)
        blocks = self._tables[slot, tables, block]
        copies = self._copy_tables[slot, tables, block].tolist() if self.form.has_copies else []
        sunk = self._sink_of[blocks].tolist() if self.form.has_copies else []
        copy_place(self.paged, offset, blocks.tolist(), copies, sunk)

    def move_place(self, slot: int, source: int, target: int) -> None:
        """Copies the K and V of one place to another, at all loops; not to one of the sinks."""
        assert target >= NUM_SINKS or not self.form.has_copies
        tables = slice(0, self._height(slot))
        columns = [source // BLOCK_SIZE, target // BLOCK_SIZE]
        ids = torch.from_numpy(self._tables[slot][tables, columns].T).long()
        exact = None
        if self.form.has_copies:
            exact = torch.from_numpy(self._copy_tables[slot][tables, columns].T).long()
        move_places(self.paged, source % BLOCK_SIZE, target % BLOCK_SIZE, ids, exact)

    def _height(self, slot: int) -> int:
        return self.num_extra_tables + int(self._num_loops[slot])

    def _distinct(self, slot: int, first: int, last: int) -> Blocks:
        """The blocks in columns [first, last) of the slot's tables, each once."""
        height, folded = self._height(slot), min(max(int(self._num_folded[slot]), first), last)
        lower = np.delete(
            self._tables[slot, :height, first:folded],
            np.s_[self.num_extra_tables : height - 1],
            axis=0,
        )
        return np.concatenate([lower.ravel(), self._tables[slot, :height, folded:last].ravel()])

    def _drop_copies(self, slot: int, first: int, last: int) -> None:
        """Gives back the exact copies of columns [first, last)."""
        first = max(first, int(self._num_settled[slot]))
        if self.form.has_copies and first < last:
            part = self._copy_tables[slot, : self._height(slot), first:last]
            self.copies.release(part)
            part[:] = -1
            self._touch()

    def _free_sinks(self, freed: Blocks) -> None:
        owners = freed[self._sink_of[freed] >= 0]
        self.sinks.release(self._sink_of[owners])
        self._sink_of[owners] = -1
        self._touch()

    # ------------------------------------------------------------------------------------------------------------- sizes

    @property
    def used_bytes(self) -> int:
        """Bytes of all held blocks with their scales, exact copies and sinks, and of the tables."""
        tables = self._tables.nbytes
        if self.form.has_copies:
            tables += self._copy_tables.nbytes + self._sink_of.nbytes
        return (
            self.pool.num_used * self.block_bytes
            + self.copies.num_used * self.form.copy_bytes
            + self.sinks.num_used * self.form.sink_bytes
            + tables
        )

    def bytes_per_token(self, loops: int, num_positions: int) -> float:
        """Bytes per token of a sequence of that many positions whose last block is open; its blocks are taken and given back."""
        slot = self.open(loops)
        for end in (*range(BLOCK_SIZE, num_positions, BLOCK_SIZE), num_positions):
            self.extend(slot, end)
            self.settle(slot, end - 1)
            self.fold(slot, end - 1)
        total = self.slot_bytes(slot)
        self.close(slot)
        return total / num_positions

    def slot_bytes(self, slot: int) -> int:
        """Bytes that one sequence takes: blocks, exact copies, sinks and its part of the tables."""
        count, height = int(self._num_blocks[slot]), self._height(slot)
        blocks = self._distinct(slot, 0, count)
        num_copies = (count - int(self._num_settled[slot])) * height * self.form.has_copies
        num_sinks = int((self._sink_of[blocks] >= 0).sum()) if self.form.has_copies else 0
        return (
            len(blocks) * self.block_bytes
            + num_copies * self.form.copy_bytes
            + num_sinks * self.form.sink_bytes
            + height * count * 4 * (1 + self.form.has_copies)
        )

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)


def extra_tables(config: ModelConfig) -> int:
    """Tables that hold the layers before and after the loop."""
    return -(-(config.stages.prelude + config.stages.coda) // config.stages.core)
