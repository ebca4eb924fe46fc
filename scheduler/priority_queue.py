"""The queue of requests that have a sequence to place: a heap by (rank, arrival order), with removal by id.

rank = priority x ageing + arrival, in seconds of the scheduler's clock: lower first. It never changes, so the heap stays
valid, a request that comes back keeps its place, and a step of priority outweighs `ageing_s` of waiting and no more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduler.request import Request

_MIN_DEAD = 64  # rebuild the heap only past this many removed entries

_Entry = tuple[float, int, Request]  # `order` is unique, so two requests are never compared


class PriorityQueue:
    """While it is iterated requests may be removed, but not added."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._heap: list[_Entry] = []
        self._known: set[int] = set()  # orders in the heap, the removed ones too
        self._live: set[int] = set()

    def rank(self, priority: int, arrival_s: float) -> float:
        return priority * self._ageing_s + arrival_s

    def push(self, request: Request) -> None:
        """Add it under its rank; nothing happens if it is there."""
        order = request.order
        self._live.add(order)
        if order not in self._known:
            self._known.add(order)
            heapq.heappush(self._heap, (request.rank, order, request))

    def remove(self, request: Request) -> None:
        """Take it out; nothing happens if it is not there."""
        self._live.discard(request.order)
        if len(self._heap) > 2 * len(self._live) + _MIN_DEAD:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
            self._known = set(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.order in self._live

    def __iter__(self) -> Iterator[Request]:
        """Best first, without unmaking the heap: a second heap holds the frontier of what was not yielded."""
        heap = self._heap
        while heap and heap[0][1] not in self._live:
            self._known.discard(heapq.heappop(heap)[1])
        frontier: list[tuple[_Entry, int]] = [(heap[0], 0)] if heap else []
        while frontier:
            entry, at = heapq.heappop(frontier)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))
            if entry[1] in self._live:
                yield entry[2]
