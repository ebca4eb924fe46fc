"""The block allocator under any sequence of operations: free + used = total, no block with two owners, nothing leaks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.kv_cache import BlockPool, KVCache, OutOfBlocks
from kernels.layout import BLOCK_SIZE
from scripts.make_toy_artifact import toy_config

OPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "extend", "truncate", "close", "hold", "adopt", "release", "private"]
        ),
        st.integers(0, 7),
        st.integers(0, 400),
    ),
    max_size=60,
)


class Model:
    """What each holder should have, as plain sets, beside the cache under test."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = KVCache(toy_config("pre"), num_blocks, 6, 400)
        self.loops: dict[int, int] = {}
        self.held: list[np.ndarray] = []

    def check(self) -> None:
        pool, tables = self.cache.pool, self.cache.block_tables.numpy()
        owners = np.zeros(pool.num_blocks, dtype=np.int64)
        for blocks in [tables[tables >= 0], *self.held]:
            np.add.at(owners, blocks.ravel(), 1)
        assert (owners == pool.refs).all()
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert pool.num_used == int((owners > 0).sum())
        for slot in self.loops:
            own = tables[slot][tables[slot] >= 0]
            assert len(set(own.tolist())) == own.size, "a block twice in one slot"
        slots = sorted(self.loops)
        reach = [70 * (i + 1) for i in range(len(slots))]
        each = [self.cache.num_missing(s, n) for s, n in zip(slots, reach, strict=True)]
        assert self.cache.num_missing_of_all(slots, reach) == sum(each)

    def apply(self, op: str, which: int, positions: int) -> None:
        slots = sorted(self.loops)
        slot = slots[which % len(slots)] if slots else None
        if op == "open" and self.cache.num_free_slots:
            loops = 1 + which
            self.loops[self.cache.open(loops)] = loops
        elif op == "release" and self.held:
            self.cache.pool.release(self.held.pop(which % len(self.held)))
        elif op == "adopt" and self.held and self.cache.num_free_slots:
            blocks = self.held[which % len(self.held)]
            loops = max(1, len(blocks) - self.cache.num_extra_tables)
            new = self.cache.open(loops)
            self.loops[new] = loops
            self.cache.adopt(new, blocks)
        elif slot is None:
            return
        elif op == "extend":
            missing, free = self.cache.num_missing(slot, positions), self.cache.pool.num_free
            try:
                self.cache.extend(slot, positions)
                assert self.cache.pool.num_free == free - missing
            except OutOfBlocks:
                assert missing > free == self.cache.pool.num_free
        elif op == "truncate":
            self.cache.truncate(slot, positions)
        elif op == "close":
            self.cache.close(slot)
            del self.loops[slot]
        elif op == "hold":
            have = int((self.cache.block_tables[slot, 0] >= 0).sum()) * BLOCK_SIZE
            self.held.append(self.cache.hold(slot, min(positions, have)))
        elif op == "private":
            try:
                self.cache.make_private(slot, positions)
            except OutOfBlocks:
                return
            first = positions // BLOCK_SIZE
            own = self.cache.block_tables[slot, :, first:].numpy()
            assert (self.cache.pool.refs[own[own >= 0]] == 1).all()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 60), OPS)
def test_any_sequence_of_operations_keeps_the_books(
    num_blocks: int, ops: list[tuple[str, int, int]]
) -> None:
    model = Model(num_blocks)
    for op, which, positions in ops:
        model.apply(op, which, positions)
        model.check()
    for slot in list(model.loops):
        model.cache.close(slot)
    for blocks in model.held:
        model.cache.pool.release(blocks)
    assert model.cache.pool.num_free == num_blocks and not model.cache.pool.refs.any()
    assert (model.cache.block_tables == -1).all()


def test_copy_on_write_copies_what_others_hold_and_nothing_else() -> None:
    cache = KVCache(toy_config("pre"), 40, 3, 400)
    slot = cache.open(2)
    cache.extend(slot, 130)
    kept = cache.hold(slot, 128)
    before = cache.block_tables[slot].clone()
    marked = int(before[1, 1])
    cache.paged.keys[marked] = 3.0
    cache.paged.values[marked] = 4.0
    cache.make_private(slot, 64)
    after = cache.block_tables[slot]
    assert (after[:, 0] == before[:, 0]).all() and (after[:3, 2] == before[:3, 2]).all()
    assert not (after[:3, 1] == before[:3, 1]).any()
    assert (cache.paged.keys[int(after[1, 1])] == 3.0).all() and (
        cache.paged.values[int(after[1, 1])] == 4.0
    ).all()
    cache.pool.release(kept)
    cache.close(slot)
    assert cache.pool.num_used == 0


def test_a_block_cannot_be_released_more_often_than_it_was_taken() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.share(blocks)
    pool.release(blocks)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)
    with pytest.raises(OutOfBlocks):
        pool.take(5)
    assert pool.num_free == 4
