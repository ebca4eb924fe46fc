"""The life of requests through the whole scheduler: order, credits, cancel and finish in every state, timeouts, drain."""

from __future__ import annotations

import pytest

from scheduler.messages import Accepted, Cancel, Events, Finish, Rejected, Status
from scheduler.request import RequestState
from tests.scheduler.rig import Rig, prompt, token, tokens


def test_a_request_runs_streams_and_ends() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=3, max_tokens=4)
    rig.run(4)
    assert isinstance(got.answer, Accepted)
    assert got.tokens == [tokens(3, 4)]
    assert got.ends[0].finish_reason == "length"
    assert (got.stats.prompt_tokens, got.stats.completion_tokens, got.stats.core_loops) == (
        10,
        4,
        8,
    )
    assert got.stats.kv_cache_mode == "fp32"
    assert worker.aborts == []
    rig.check_books()
    assert rig.count("tinyloop_requests_completed_total") == 1


def test_one_frame_per_client_and_step_however_many_rows() -> None:
    rig = Rig()
    rig.worker()
    clients = [rig.client(0), rig.client(1)]
    for client in clients:
        client.submit(num_sequences=2, max_tokens=3)
    rig.run(3)
    for client in clients:
        frames = [m for m in client.seen if isinstance(m, Events)]
        assert [len(f.events) for f in frames] == [2, 2, 2]


def test_a_request_with_many_sequences_runs_in_turns_when_rows_are_few() -> None:
    rig = Rig()
    worker, client = rig.worker(max_rows=2), rig.client()
    got = client.submit(num_sequences=5, seed=10, max_tokens=2)
    rig.run(12)
    assert got.tokens == [tokens(10 + i, 2) for i in range(5)]
    assert rig.count("tinyloop_requests_completed_total") == 1
    assert rig.count("tinyloop_queue_wait_ms_count") == 1
    assert len(worker.runs) == 5


def test_lower_priority_numbers_run_first_and_ties_by_arrival() -> None:
    rig = Rig()
    worker, client = rig.worker(max_rows=1), rig.client()
    for seed, priority in ((1, 0), (2, 5), (3, -5), (4, 0), (5, 5)):
        client.submit(seed=seed, priority=priority, max_tokens=1)
    rig.run(8)
    assert [run.seed for run in worker.runs] == [3, 1, 4, 2, 5]


def test_waiting_outweighs_priority_after_the_ageing_time() -> None:
    rig = Rig(ageing_s=10.0)
    worker, client = rig.worker(max_rows=1), rig.client()
    blocker = client.submit(seed=9, max_tokens=500)
    rig.run(1)
    client.submit(seed=1, priority=2, max_tokens=1)  # worth 20 s of waiting
    rig.elapse(19)
    client.submit(seed=2, priority=0, max_tokens=1)
    rig.elapse(2)
    client.submit(seed=3, priority=0, max_tokens=1)
    rig.run(1)
    client.send(Cancel(client.client_id, blocker.submit.request_id))
    del client.requests[blocker.submit.request_id]
    rig.run(6)
    assert [run.seed for run in worker.runs] == [9, 2, 1, 3]


def test_nothing_is_sent_beyond_free_rows() -> None:
    rig = Rig()
    worker, client = rig.worker(max_rows=3), rig.client()
    for seed in range(6):
        client.submit(seed=seed, max_tokens=50)
    for _ in range(5):
        rig.tick()
    assert len([m for m in worker.inbox if hasattr(m, "seed")]) == 3
    assert rig.scheduler.hub.metrics.queue_depth == 3


def test_credits_of_an_old_report_do_not_count_runs_on_their_way_twice() -> None:
    rig = Rig()
    worker, client = rig.worker(max_rows=4), rig.client()
    for seed in range(2):
        client.submit(seed=seed, max_tokens=50)
    rig.tick()
    worker.step()  # made before either run was read: 4 rows free, 0 runs seen
    for seed in range(2, 8):
        client.submit(seed=seed, max_tokens=50)
    rig.tick()
    worker.read()  # the bench worker asserts that its rows suffice
    assert len(worker.running) == 4


def test_nothing_is_sent_beyond_free_blocks() -> None:
    rig = Rig(prefix_pool_capacity=0)
    worker, client = rig.worker(max_rows=64, num_blocks=20), rig.client()
    for seed in range(10):
        client.submit(
            seed=seed, size=100, max_tokens=20, loops=2
        )  # 120 positions: 2 blocks x 2 loops
    rig.tick()
    worker.read()
    assert len(worker.running) == 5


def test_small_requests_do_not_overtake_a_large_one_that_waits_for_room() -> None:
    rig = Rig(prefix_pool_capacity=0)
    worker, client = rig.worker(max_rows=8, num_blocks=16), rig.client()
    first = client.submit(seed=1, size=100, max_tokens=20, loops=4)  # 8 blocks
    rig.run(1)
    client.submit(seed=2, size=200, max_tokens=20, loops=4)  # 16 blocks: waits for the first to end
    for seed in (3, 4, 5):
        client.submit(seed=seed, size=10, max_tokens=5, loops=1)  # 1 block each: would fit
    rig.run(3)
    assert [run.seed for run in worker.runs] == [1]
    rig.run(18)
    assert first.is_over
    assert [run.seed for run in worker.runs][1] == 2


def test_small_requests_use_another_worker_while_one_is_kept_for_a_large_one() -> None:
    rig = Rig(prefix_pool_capacity=0)
    big = rig.worker("big", max_rows=8, num_blocks=16)
    client = rig.client()
    client.submit(seed=1, size=100, max_tokens=20, loops=4)
    rig.run(1)
    small = rig.worker("small", max_rows=8, num_blocks=4)
    client.submit(seed=2, size=200, max_tokens=20, loops=4)
    for seed in (3, 4, 5):
        client.submit(seed=seed, size=10, max_tokens=5, loops=1)
    rig.run(2)
    assert [run.seed for run in small.runs] == [3, 4, 5]
    assert [run.seed for run in big.runs] == [1]


def test_a_preempted_sequence_comes_back_and_asks_for_more_room() -> None:
    rig = Rig(prefix_pool_capacity=0)
    worker, client = rig.worker(num_blocks=16), rig.client()
    got = client.submit(seed=1, size=60, max_tokens=600, loops=1)
    rig.run(3)
    (sequence_id,) = worker.running
    sequence = rig.scheduler.hub.live[1].sequences[0]
    ready = next(iter(rig.scheduler.hub.workers.ready.values()))
    before = ready.need_blocks(sequence)
    worker.step({sequence_id: "preempted"})
    rig.scheduler.hub.workers.ready.clear()  # hold it in the queue for a look
    rig.tick()
    assert rig.scheduler.hub.metrics.queue_depth == 1
    assert ready.need_blocks(sequence) > before
    rig.scheduler.hub.workers.ready[worker.worker_id] = ready
    rig.run(2)
    assert worker.runs[1].emitted == tuple(tokens(1, 3))
    assert worker.runs[1].attempt == 2
    assert got.tokens == [tokens(1, 5)]
    assert rig.count("tinyloop_preemptions_total") == 1
    rig.check_books()


@pytest.mark.parametrize("state", ["queued", "dispatched", "running"])
def test_cancel_in_every_state(state: str) -> None:
    rig = Rig()
    worker, client = rig.worker(max_rows=1), rig.client()
    blocker = client.submit(seed=8, max_tokens=3) if state == "queued" else None
    rig.tick()
    got = client.submit(seed=1, max_tokens=100)
    if state != "queued":
        rig.tick()
    if state == "running":
        rig.run(2)
    expected = RequestState[state.upper()]
    assert [r.state for r in rig.scheduler.hub.live.values()][-1] is expected
    client.send(Cancel(client.client_id, got.submit.request_id))
    client.send(Cancel(client.client_id, got.submit.request_id))  # a repeat does nothing
    del client.requests[got.submit.request_id]
    rig.run(4)
    assert rig.count("tinyloop_requests_cancelled_total") == 1
    rig.check_books()
    assert worker.running == {}
    if state == "queued":
        assert blocker is not None and blocker.is_over
        assert [run.seed for run in worker.runs] == [8]  # it never reached the worker
    else:
        assert [a.attempt for a in worker.aborts] == [1]


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_stop_string_completes_and_does_not_cancel(state: str) -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=1, max_tokens=100)
    rig.run(5)
    if state == "queued":  # its worker is lost
        rig.kill(worker)
        rig.elapse(4)
        assert rig.scheduler.hub.metrics.queue_depth == 1
    client.send(Finish(client.client_id, got.submit.request_id, 0, 3))
    client.send(Finish(client.client_id, got.submit.request_id, 0, 3))
    rig.run(2)
    assert got.ends[0].finish_reason == "stop"
    assert got.stats.completion_tokens == 3
    assert got.ends[0].first_index == 3
    assert rig.count("tinyloop_requests_completed_total") == 1
    assert rig.count("tinyloop_requests_cancelled_total") == 0
    assert worker.running == {}
    rig.check_books()


def test_a_finish_of_one_sequence_leaves_the_others_running() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    got = client.submit(num_sequences=2, seed=1, max_tokens=6)
    rig.run(2)
    client.send(Finish(client.client_id, got.submit.request_id, 1, 1))
    rig.run(4)
    assert got.tokens[0] == tokens(1, 6)
    assert [got.ends[i].finish_reason for i in (0, 1)] == ["length", "stop"]
    assert rig.count("tinyloop_requests_completed_total") == 1


@pytest.mark.parametrize(("index", "num_tokens"), [(2, 1), (-1, 1), (0, 50), (0, -1)])
def test_a_finish_out_of_range_is_dropped(index: int, num_tokens: int) -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    got = client.submit(num_sequences=2, max_tokens=4)
    rig.run(2)
    client.send(Finish(client.client_id, got.submit.request_id, index, num_tokens))
    assert rig.num_bad == 1
    rig.run(3)
    assert [got.ends[i].finish_reason for i in (0, 1)] == ["length", "length"]


def test_an_error_ends_the_whole_request_and_aborts_the_rest() -> None:
    rig = Rig()
    worker, client = rig.worker(max_rows=2), rig.client()
    got = client.submit(num_sequences=3, max_tokens=10)
    rig.run(2)
    victim = min(worker.running)
    worker.step({victim: "error"})
    rig.run(1)
    assert [got.ends[i].finish_reason for i in range(3)] == ["error"] * 3
    assert got.ends[2].error_code == "engine_fault"
    assert worker.running == {}
    assert rig.count("tinyloop_requests_errored_total") == 1
    rig.check_books()


def test_a_timeout_cancels_and_tells_the_client() -> None:
    rig = Rig()
    worker, client = rig.worker(max_rows=1), rig.client()
    running = client.submit(seed=1, max_tokens=500, timeout_s=2.0)
    queued = client.submit(seed=2, max_tokens=5, timeout_s=1.0)
    rig.run(1)
    rig.elapse(2.5)
    for got in (running, queued):
        client.read()
        assert got.ends[0].finish_reason == "cancelled"
        assert got.ends[0].error_code == "timeout"
    worker.read()
    assert worker.running == {}
    assert [run.seed for run in worker.runs] == [1]
    assert rig.count("tinyloop_requests_cancelled_total") == 2
    rig.check_books()


def test_draining_refuses_new_requests_and_lets_the_old_ones_end() -> None:
    rig = Rig(grace_s=5.0)
    rig.worker()
    client = rig.client()
    old = client.submit(seed=1, max_tokens=6)
    rig.run(2)
    rig.scheduler.begin_drain()
    new = client.submit(seed=2)
    client.beat()
    rig.run(1)
    assert isinstance(new.answer, Rejected) and new.answer.code == "draining"
    assert [m.state for m in client.seen if isinstance(m, Status)] == ["draining"]
    assert not rig.scheduler.is_over
    rig.run(4)
    assert old.tokens == [tokens(1, 6)]
    assert rig.scheduler.is_over


def test_what_outlives_the_grace_is_cancelled_and_told() -> None:
    rig = Rig(grace_s=2.0)
    rig.worker()
    client = rig.client()
    got = client.submit(max_tokens=1000)
    rig.run(1)
    rig.scheduler.begin_drain()
    rig.elapse(1.5)
    assert not rig.scheduler.is_over
    rig.elapse(1.0)
    assert rig.scheduler.is_over
    rig.scheduler.end()
    client.read()
    assert (got.ends[0].finish_reason, got.ends[0].error_code) == ("cancelled", "draining")
    rig.check_books()


def test_no_token_at_all_is_a_request_too() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    got = client.submit(max_tokens=0)
    rig.run(1)
    assert got.tokens == [[]]
    assert got.ends[0].finish_reason == "length"
    assert rig.count("tinyloop_first_token_ms_count") == 0
    assert rig.count("tinyloop_request_wall_ms_count") == 1


def test_log_probabilities_travel_with_their_tokens() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    got = client.submit(seed=4, max_tokens=3, logprobs=0)
    rig.run(3)
    assert [p.logprob for p in got.logprobs[0]] == [-float(token(4, i)) for i in range(3)]


def test_a_burst_larger_than_the_queue_is_taken_as_far_as_there_are_rows() -> None:
    rig = Rig(max_queue_depth=2)
    rig.worker(max_rows=3)
    client = rig.client()
    got = [client.submit(seed=i, max_tokens=50) for i in range(7)]
    client.read()
    assert [isinstance(g.answer, Accepted) for g in got] == [True] * 5 + [False] * 2


def test_worker_sends_tokens_past_what_was_asked_for() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(sequences=(), max_tokens=2)
    client.read()
    assert isinstance(got.answer, Rejected) and got.answer.code == "invalid_request"
    got = client.submit(max_tokens=2, size=5)
    rig.tick()
    worker.read()
    done = worker.step(deliver=False)
    bad = done.outputs[0].__class__(done.outputs[0].sequence_id, 1, 0, prompt(3))
    worker.send(done.__class__(1, (bad,), 1, 4, 100))
    rig.run(1)
    assert got.ends[0].error_code == "internal_error"
    assert rig.count("tinyloop_requests_errored_total") == 1
    rig.check_books()
