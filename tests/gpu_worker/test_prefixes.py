"""Prefix entries: which blocks would be free without those that may be dropped, and in what order these go."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.kv_cache import BlockPool
from gpu_worker.prefixes import PrefixStore
from scheduler.messages import HeldPrefix, PrefixKey, Tokens

# (entry, how many blocks of the entry before it begins with, more blocks, whether it has a name, whether a sequence holds it too)
KEEPS = st.lists(
    st.tuples(
        st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans()
    ),
    max_size=20,
)


def _held(number: int, is_named: bool) -> HeldPrefix:
    key = PrefixKey(name=f"n{number}" if is_named else "")
    return HeldPrefix(bytes([number]) * 16, key, Tokens(), 0, 0)


@settings(max_examples=100, deadline=None)
@given(KEEPS)
def test_evictable_blocks_are_those_that_only_droppable_entries_hold(
    keeps: list[tuple[int, int, int, bool, bool]],
) -> None:
    pool = BlockPool(200)
    store = PrefixStore(pool)
    entries: dict[int, tuple[np.ndarray, bool]] = {}
    elsewhere: Counter[int] = Counter()
    last = np.empty((1, 0), dtype=np.int32)
    for number, begin, more, is_named, is_held in keeps:
        shared = last[:, :begin] if store else last[:, :0]
        alive = shared[pool.refs[shared] > 0].reshape(1, -1)
        pool.share(alive)
        blocks = np.concatenate([alive, pool.take(more).reshape(1, -1)], 1)
        if is_held:
            pool.share(blocks)
            elsewhere.update(blocks.ravel().tolist())
        store.keep(_held(number, is_named), blocks)
        entries[number] = (blocks, is_named)
        last = blocks
        of_entries = {b for found, _ in entries.values() for b in found.ravel().tolist()}
        named = {b for found, is_n in entries.values() if is_n for b in found.ravel().tolist()}
        assert store.num_evictable_blocks() == len(of_entries - named - set(elsewhere))
    free, evictable = pool.num_free, store.num_evictable_blocks()
    assert store.evict(free, with_registered=True) == []
    store.evict(pool.num_blocks + 1, with_registered=False)
    assert pool.num_free == free + evictable
    assert {int(e.prefix_id[0]) for e in store.held()} == {n for n, (_, is_n) in entries.items() if is_n}  # fmt: skip
