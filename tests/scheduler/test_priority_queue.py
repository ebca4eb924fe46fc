"""The queue: order, stability, removal by id, against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.messages import Params
from scheduler.priority_queue import PriorityQueue
from scheduler.request import Request


def make(order: int, rank: float = 0.0) -> Request:
    return Request(
        b"c" * 16, order, f"r{order}", Params(loops=1, max_tokens=1), order=order, rank=rank
    )


def test_rank_is_priority_times_ageing_plus_arrival() -> None:
    queue = PriorityQueue(10.0)
    assert queue.rank(0, 100.0) == 100.0
    assert queue.rank(-2, 100.0) == 80.0
    assert PriorityQueue(0.0).rank(50, 100.0) == 100.0


def test_equal_ranks_leave_in_order_of_arrival() -> None:
    queue = PriorityQueue(1.0)
    for order in (3, 1, 2):
        queue.push(make(order))
    assert [r.order for r in queue] == [1, 2, 3]


def test_a_request_that_comes_back_has_its_old_place() -> None:
    queue = PriorityQueue(1.0)
    requests = [make(order) for order in range(5)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[1])
    assert requests[1] not in queue and len(queue) == 4
    queue.push(requests[1])
    queue.push(requests[1])
    assert [r.order for r in queue] == [0, 1, 2, 3, 4]


def test_removing_while_iterating() -> None:
    queue = PriorityQueue(1.0)
    for order in range(500):
        queue.push(make(order))
    seen = []
    for request in queue:
        queue.remove(request)
        seen.append(request.order)
    assert seen == list(range(500)) and len(queue) == 0 and list(queue) == []


@given(st.lists(st.tuples(st.sampled_from(["push", "remove"]), st.integers(0, 40)), max_size=300))
def test_it_is_a_sorted_set(acts: list[tuple[str, int]]) -> None:
    queue, expected = PriorityQueue(1.0), set()
    requests = [make(order, float(order * 7 % 5)) for order in range(41)]
    for act, at in acts:
        if act == "push":
            queue.push(requests[at])
            expected.add(requests[at])
        else:
            queue.remove(requests[at])
            expected.discard(requests[at])
        assert len(queue) == len(expected)
    assert list(queue) == sorted(expected, key=lambda r: (r.rank, r.order))


def test_removed_entries_do_not_pile_up() -> None:
    queue = PriorityQueue(1.0)
    queue.push(make(0, -1.0))
    for order in range(1, 10_000):
        request = make(order, float(order))
        queue.push(request)
        queue.remove(request)
    assert len(queue._heap) < 200
