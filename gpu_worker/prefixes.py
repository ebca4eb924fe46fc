"""Prefix entries that this worker holds: full blocks of prompts, kept for later requests with the same beginning.

Owns the entries and their hold on blocks; which prompt may use which entry is the scheduler's decision (`Run.prefix_id`). An entry
can be dropped at any time: sequences that use its blocks hold them on their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu_worker.kv_cache import BlockPool, Blocks
from scheduler.messages import HeldPrefix


@dataclass(slots=True)
class Entry:
    held: HeldPrefix
    blocks: Blocks  # (tables, num_blocks)
    hits: int
    used_at: int  # by the store's own count of uses

    @property
    def is_registered(self) -> bool:
        return self.held.key.name != ""


class PrefixStore:
    """Entries by id."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[bytes, Entry] = {}
        # of the entries alone, and of those registered by name
        self._holds, self._named = np.zeros((2, pool.num_blocks), dtype=np.int32)
        self._uses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def held(self) -> list[HeldPrefix]:
        return [entry.held for entry in self._entries.values()]

    def keep(self, held: HeldPrefix, blocks: Blocks) -> None:
        """Makes an entry of blocks whose hold passes to the store; one with the same id is replaced."""
        self.drop(held.prefix_id)
        self._uses += 1
        self._entries[held.prefix_id] = entry = Entry(held, blocks, 0, self._uses)
        self._count(entry, 1)

    def find(self, prefix_id: bytes) -> Entry | None:
        """The entry, marked as used now."""
        entry = self._entries.get(prefix_id)
        if entry is not None:
            self._uses += 1
            entry.hits += 1
            entry.used_at = self._uses
        return entry

    def drop(self, prefix_id: bytes) -> bool:
        """Lets an entry go; False if there is none."""
        entry = self._entries.pop(prefix_id, None)
        if entry is None:
            return False
        self._count(entry, -1)
        self._pool.release(entry.blocks)
        return True

    def evict(self, num_wanted: int, with_registered: bool) -> list[bytes]:
        """Drops entries, those never hit and longest unused first, until that many blocks are free or none is left to drop.

        Entries registered by name stay unless `with_registered`. Returns the ids dropped.
        """
        if self._pool.num_free >= num_wanted:
            return []
        victims = [e for e in self._entries.values() if with_registered or not e.is_registered]
        victims.sort(key=lambda e: (e.is_registered, e.hits > 0, e.used_at))
        dropped = []
        for entry in victims:
            if self._pool.num_free >= num_wanted:
                break
            self.drop(entry.held.prefix_id)
            dropped.append(entry.held.prefix_id)
        return dropped

    def num_evictable_blocks(self) -> int:
        """Blocks that would be free without the entries that `evict` may drop first."""
        if not self._entries:
            return 0
        only_here = (self._holds > 0) & (self._holds == self._pool.refs) & (self._named == 0)
        return int(np.count_nonzero(only_here))

    def _count(self, entry: Entry, change: int) -> None:
        """Blocks of an entry (each once) get one hold more, or less."""
        for counts in (self._holds, self._named)[: 1 + entry.is_registered]:
            counts[entry.blocks.ravel()] += change
