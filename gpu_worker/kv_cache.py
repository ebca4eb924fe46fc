"""The KV cache: a pool of reference-counted blocks, and block tables per sequence.

A block is 64 positions of one loop for all core layers. A sequence has one table of blocks per loop, plus `num_extra_tables` for
prelude and coda layers, laid out as if they were further core layers:

    table 0 .. extra-1        prelude and coda layers, `core` of them per block
    table extra + t - 1       loop t

Owns who holds which block; knows no requests, tokens or arithmetic. Sizes come from its counters.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_worker.model_config import ModelConfig
from kernels.layout import BLOCK_SIZE, PagedCache

Blocks = NDArray[np.int32]
LANES = 16  # values per head are padded to a multiple of this


class OutOfBlocks(Exception):
    """The pool has not enough free blocks; nothing was taken."""


class BlockPool:
    """Which blocks are free, and how many hold each of the others."""

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
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)


class KVCache:
    """Block tables of up to `num_slots` sequences over one pool, and the tensors that the blocks live in."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, num_slots: int, max_positions: int
    ) -> None:
        arch, stages = config.arch, config.stages
        self.num_extra_tables = extra_tables(config)
        self.num_tables = self.num_extra_tables + config.loop.hard_max
        self.pool = BlockPool(num_blocks)
        self.paged = PagedCache(
            torch.zeros(num_blocks, stages.core, arch.n_kv_heads, arch.head_dim, BLOCK_SIZE),
            torch.zeros(num_blocks, stages.core, arch.n_kv_heads, BLOCK_SIZE, _padded_dim(config)),
        )
        self.block_bytes = block_bytes(config)
        self.max_blocks = -(-max_positions // BLOCK_SIZE)
        self.block_tables = torch.full(
            (num_slots, self.num_tables, self.max_blocks), -1, dtype=torch.int32
        )
        self._tables: Blocks = self.block_tables.numpy()
        self._num_blocks = np.zeros(num_slots, dtype=np.int64)  # per table of the slot's sequence
        self._num_loops = np.zeros(num_slots, dtype=np.int64)
        self._free_slots = list(range(num_slots - 1, -1, -1))

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

    def num_missing(self, slot: int, num_positions: int) -> int:
        """Blocks that `extend` to that many positions would take."""
        more = -(-num_positions // BLOCK_SIZE) - int(self._num_blocks[slot])
        return max(more, 0) * self._height(slot)

    def extend(self, slot: int, num_positions: int) -> None:
        """Makes room for positions [0, num_positions) in all of the slot's tables.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        have, want = int(self._num_blocks[slot]), -(-num_positions // BLOCK_SIZE)
        if want <= have:
            return
        height = self._height(slot)
        blocks = self.pool.take((want - have) * height)
        self._tables[slot, :height, have:want] = blocks.reshape(height, want - have)
        self._num_blocks[slot] = want

    def truncate(self, slot: int, num_positions: int) -> None:
        """Gives back the blocks beyond those that hold positions [0, num_positions)."""
        have, keep = int(self._num_blocks[slot]), -(-num_positions // BLOCK_SIZE)
        if keep >= have:
            return
        height = self._height(slot)
        self.pool.release(self._tables[slot, :height, keep:have])
        self._tables[slot, :height, keep:have] = -1
        self._num_blocks[slot] = keep

    def adopt(self, slot: int, blocks: Blocks) -> None:
        """Starts an empty slot with shared, full blocks (at least the slot's tables, num_blocks)."""
        assert self._num_blocks[slot] == 0, "only an empty slot can adopt"
        height, count = self._height(slot), blocks.shape[1]
        self.pool.share(blocks[:height])
        self._tables[slot, :height, :count] = blocks[:height]
        self._num_blocks[slot] = count

    def hold(self, slot: int, num_positions: int) -> Blocks:
        """Shares the slot's blocks of the full blocks in [0, num_positions): (tables, num_blocks), to be released later."""
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
        for stored in (self.paged.keys, self.paged.values):
            stored[torch.from_numpy(new).long()] = stored[torch.from_numpy(old).long()]
        part[shared] = new
        self.pool.release(old)

    def copy_loop(self, slot: int, place: int, loop: int, last_loop: int) -> None:
        """Writes the K and V of one place at `loop` into the same place of the loops after it, up to `last_loop`."""
        block, offset = place // BLOCK_SIZE, place % BLOCK_SIZE
        first = self.num_extra_tables + loop - 1
        source, *others = self._tables[slot, first : first + last_loop - loop + 1, block].tolist()
        self.paged.keys[others, ..., offset] = self.paged.keys[source, ..., offset]
        self.paged.values[others, :, :, offset] = self.paged.values[source, :, :, offset]

    def _height(self, slot: int) -> int:
        return self.num_extra_tables + int(self._num_loops[slot])

    # ------------------------------------------------------------------------------------------------------------- sizes

    @property
    def used_bytes(self) -> int:
        """Bytes of all held blocks, and of the tables."""
        return self.pool.num_used * self.block_bytes + self.block_tables.nbytes

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)


def extra_tables(config: ModelConfig) -> int:
    """Tables that hold the layers before and after the loop."""
    return -(-(config.stages.prelude + config.stages.coda) // config.stages.core)


def block_bytes(config: ModelConfig) -> int:
    """Bytes of one block: K and V of 64 positions in all core layers, fp32."""
    per_position = config.arch.n_kv_heads * (config.arch.head_dim + _padded_dim(config))
    return config.stages.core * BLOCK_SIZE * per_position * 4


def _padded_dim(config: ModelConfig) -> int:
    return -(-config.arch.head_dim // LANES) * LANES
