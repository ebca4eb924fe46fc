"""Which worker a waiting sequence goes to, in strict order of the queue.

Owns the rules of room: credits, a reservation for who is first and does not fit yet (so that small requests cannot starve a large
one), suspects alone, equal numerics for what has begun, and the preference for a worker that holds the prefix. Decides, does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.prefix_pool import Match, PrefixPool
from scheduler.request import Sequence
from scheduler.workers import Worker, Workers

MUCH_BUSIER = 0.25  # of a worker's rows: then a held prefix no longer outweighs an emptier worker


class Placement:
    """One round of dispatch. A *closed* worker takes nothing more in it: full, reserved, or left to a suspect."""

    def __init__(self, workers: Workers, pool: PrefixPool) -> None:
        self._workers = workers
        self._pool = pool
        self._closed = {
            worker_id
            for worker_id, worker in workers.ready.items()
            if (worker.available_rows <= 0 and not worker.is_idle)
        }

    @property
    def is_over(self) -> bool:
        """No worker takes anything more."""
        return len(self._closed) >= len(self._workers.ready)

    def note_full(self, worker: Worker) -> None:
        """Close a worker that was just given its last row."""
        if worker.available_rows <= 0:
            self._closed.add(worker.worker_id)

    def place(self, sequence: Sequence) -> tuple[Worker, Match | None] | None:
        """The worker to run it on now and the prefix to begin from; None if it must wait.

        A None reserves the worker that will most likely have room for it first.
        """
        ready = self._workers.ready.values()
        still_open = [w for w in ready if w.worker_id not in self._closed]
        candidates = [w for w in still_open if w.can_ever_run(sequence)]
        roomy = [w for w in candidates if self._has_room(w, sequence)]
        if not roomy:
            self._reserve(candidates, sequence)
            return None
        sequence.request.reserved_id = None
        request = sequence.request
        matches = self._pool.matches(sequence.prompt, request.params, request.salt)
        worker = _choose(roomy, matches)
        return worker, matches.get(worker.worker_id)

    def _has_room(self, worker: Worker, sequence: Sequence) -> bool:
        others = any(s.request is not sequence.request for s in worker.in_flight.values())
        if others and (sequence.request.is_suspect or worker.is_exclusive):
            return False
        return worker.has_room(sequence)

    def _reserve(self, candidates: list[Worker], sequence: Sequence) -> None:
        """Keep one worker for it; the same one in the next round, so that it does run empty."""
        request = sequence.request
        by_id = {w.worker_id: w for w in candidates}
        kept = by_id.get(request.reserved_id or b"")
        if kept is None and candidates:
            if request.is_suspect:
                kept = min(candidates, key=lambda w: len(w.in_flight))
            else:
                kept = max(candidates, key=lambda w: w.available_blocks)
        request.reserved_id = None if kept is None else kept.worker_id
        if kept is not None:
            self._closed.add(kept.worker_id)


def _choose(workers: list[Worker], matches: Mapping[bytes, Match]) -> Worker:
    """The one with the longest prefix, unless it is much busier than the least busy one."""
    least = min(workers, key=_busyness)
    holders = [w for w in workers if w.worker_id in matches]
    if not holders:
        return least
    holder = max(holders, key=lambda w: (matches[w.worker_id].length, -_busyness(w)))
    return holder if _busyness(holder) - _busyness(least) <= MUCH_BUSIER else least


def _busyness(worker: Worker) -> float:
    return len(worker.in_flight) / worker.limits.max_rows
