"""Nothing lost, nothing doubled: the rule of beats, repeats of submits, acknowledgement, silence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.clients import KEY_KEPT_S, SILENT_AFTER_S
from scheduler.messages import (
    Accepted,
    Cancel,
    ClientBeat,
    Events,
    Hello,
    LiveRequest,
    Rejected,
    Status,
    Unknown,
    Welcome,
)
from tests.scheduler.rig import Rig, token, tokens


def test_hello_brings_the_card_once() -> None:
    rig = Rig(epoch=5)
    client = rig.client()
    client.send(Hello(client.client_id))
    (welcome,) = client.read()
    assert (welcome.epoch, welcome.state, welcome.card) == (5, "loading", b"")
    rig.worker()
    client.send(Hello(client.client_id))
    (welcome,) = client.read()
    assert welcome == Welcome(5, "ready", "", "a" * 64, b"card of " + b"a" * 64)
    client.send(Hello(client.client_id, card_digest="a" * 64))
    assert client.read()[0].card == b""


def test_status_tells_state_reason_and_depth() -> None:
    rig = Rig()
    client = rig.client()
    worker = rig.worker(is_ready=False)
    client.beat()
    assert [(m.state, m.reason) for m in client.read()] == [("loading", "waiting for a worker")]
    worker.beat("loading")
    client.beat()
    assert [(m.state, m.reason) for m in client.read()] == [("loading", "worker w0 is loading")]
    worker.beat("failed", reason="TL007: truncated")
    client.beat()
    assert [(m.state, m.reason) for m in client.read()] == [("failed", "TL007: truncated")]
    worker.beat("loading")  # another try: the reason stays in sight
    client.beat()
    assert [m.state for m in client.read()] == ["failed"]
    worker.register()
    worker.read()
    for seed in range(6):
        client.submit(seed=seed, max_tokens=50)
    rig.tick()
    client.beat()
    status = [m for m in client.read() if isinstance(m, Status)][-1]
    assert (status.state, status.reason, status.queue_depth, status.card_digest) == (
        "ready",
        "",
        2,
        "a" * 64,
    )


def test_a_lost_frame_is_sent_again() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=1, max_tokens=20, logprobs=0)
    rig.run(3)
    for _ in range(2):
        worker.step()
        rig.tick()
    client.inbox.clear()  # lost
    rig.run(1)  # token 5 arrives, and does not fit
    assert got.tokens == [tokens(1, 3)]
    client.beat()
    client.read()
    client.beat()
    rig.tick()
    client.read()
    assert got.tokens == [tokens(1, 6)]
    assert [p.logprob for p in got.logprobs[0]] == [-float(token(1, i)) for i in range(6)]


def test_a_lost_end_is_sent_again_with_its_stats() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=1, max_tokens=2)
    rig.tick()
    worker.read()
    worker.step()
    worker.step()
    rig.tick()
    client.inbox.clear()
    rig.elapse(1.0)
    client.read()
    assert got.tokens == [tokens(1, 2)]
    assert got.stats.completion_tokens == 2


def test_what_is_still_on_its_way_is_not_sent_twice() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    client.submit(seed=1, max_tokens=20)
    rig.run(3)
    client.beat()
    rig.run(1)
    events = len([m for m in client.seen if isinstance(m, Events)])
    client.beat()
    rig.tick()
    assert [m for m in client.read() if isinstance(m, Events)] == []
    assert events == 4


def test_a_repeated_submit_gets_the_same_answer_and_runs_once() -> None:
    rig = Rig(max_queue_depth=1)
    worker, client = rig.worker(max_rows=1), rig.client()
    got = client.submit(seed=1, max_tokens=2)
    client.send(got.submit)
    rig.run(4)
    assert [m for m in client.seen if isinstance(m, Accepted)] == [Accepted(1), Accepted(1)]
    assert got.is_over
    client.send(got.submit)  # ended, not acknowledged
    del client.requests[1]
    client.beat()
    client.send(got.submit)  # acknowledged
    rig.run(3)
    assert len(worker.runs) == 1
    assert [m for m in client.seen if isinstance(m, Accepted)] == [Accepted(1)] * 4
    assert rig.count("tinyloop_requests_submitted_total") == 1


def test_a_repeated_submit_that_was_rejected_is_rejected_again() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    got = client.submit(seed=1, loops=99)
    client.send(got.submit)
    answers = [m for m in client.read() if isinstance(m, Rejected)]
    assert len(answers) == 2 and answers[0] == answers[1]
    client.beat()  # it lists what it waits for: the answer may have been lost
    assert answers[0] in client.read()
    assert rig.count("tinyloop_requests_rejected_total") == 1


def test_keys_are_kept_for_a_minute() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=1, max_tokens=1)
    rig.run(2)
    client.requests.clear()
    client.beat()
    rig.elapse(KEY_KEPT_S - 1)
    client.send(got.submit)
    rig.run(2)
    assert len(worker.runs) == 1
    rig.elapse(2)
    client.send(got.submit)
    rig.run(2)
    assert len(worker.runs) == 2


def test_what_is_not_listed_is_cancelled() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    kept, dropped = client.submit(seed=1, max_tokens=50), client.submit(seed=2, max_tokens=50)
    rig.run(2)
    del client.requests[dropped.submit.request_id]
    client.beat()
    worker.read()
    assert len(worker.running) == 1
    assert rig.count("tinyloop_requests_cancelled_total") == 1
    rig.run(1)
    assert kept.tokens == [tokens(1, 3)]
    rig.check_books()


def test_an_overtaken_beat_costs_a_restart_and_no_token() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    old = ClientBeat(client.client_id, ())
    got = client.submit(seed=1, max_tokens=6)
    rig.run(2)
    client.send(old)  # made before the submit, arrives after it
    client.beat()
    unknown = next(m for m in client.read() if isinstance(m, Unknown))
    client.resubmit(unknown)
    rig.run(6)
    assert got.tokens == [tokens(1, 6)]
    rig.check_books()


def test_a_cancelled_key_stays_cancelled() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=1, max_tokens=50)
    listing = client.listing()
    rig.run(1)
    client.send(Cancel(client.client_id, 1))
    client.send(got.submit)  # a late repeat
    client.send(replace(got.submit, resumed=True))
    client.send(ClientBeat(client.client_id, listing))  # a late beat
    client.requests.clear()
    rig.run(2)
    assert not [m for m in client.seen if isinstance(m, Unknown)]
    assert len(worker.runs) == 1
    assert worker.running == {}


def test_ends_are_kept_until_acknowledged_by_listing_them() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    client.submit(seed=1, num_sequences=2, max_tokens=1)
    rig.run(2)
    held = rig.scheduler.hub.clients.get(client.client_id)
    assert held is not None
    client.send(ClientBeat(client.client_id, (LiveRequest(1, (1, 1), (0,)),)))
    assert 1 in held.requests
    client.send(ClientBeat(client.client_id, (LiveRequest(1, (1, 1), (0, 1)),)))
    assert 1 not in held.requests
    client.read()
    client.send(ClientBeat(client.client_id, (LiveRequest(1, (1, 1), (0, 1)),)))
    assert [type(m) for m in client.read()] == [Status]  # not unknown: it is done


def test_a_silent_client_is_cancelled_and_may_come_back() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=1, max_tokens=6)
    rig.run(2)
    quiet_s = 0.0
    while quiet_s <= SILENT_AFTER_S + 0.5:
        quiet_s += 0.5
        rig.clock.advance(0.5)
        worker.beat(step_age_s=0.1)
        rig.tick()
    assert rig.count("tinyloop_requests_cancelled_total") == 1
    worker.read()
    assert worker.running == {}
    client.beat()
    client.resubmit(next(m for m in client.read() if isinstance(m, Unknown)))
    rig.run(6)
    assert got.tokens == [tokens(1, 6)]
    rig.check_books()


def test_requests_of_two_clients_with_the_same_ids_do_not_mix() -> None:
    rig = Rig()
    rig.worker()
    one, two = rig.client(1), rig.client(2)
    first, second = one.submit(seed=1, max_tokens=4), two.submit(seed=2, max_tokens=4)
    rig.run(2)
    two.send(Cancel(two.client_id, 1))
    two.requests.clear()
    rig.run(3)
    assert first.tokens == [tokens(1, 4)]
    assert len(second.tokens[0]) == 2


@pytest.mark.parametrize(
    "live",
    [
        LiveRequest(1, (0,)),
        LiveRequest(1, (0, -1)),
        LiveRequest(1, (0, 0), (2,)),
        LiveRequest(1, (0, 0), (-1,)),
    ],
)
def test_a_beat_that_does_not_fit_is_dropped_whole(live: LiveRequest) -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    got = client.submit(num_sequences=2, max_tokens=3)
    rig.run(1)
    client.send(ClientBeat(client.client_id, (live,)))
    assert rig.num_bad == 1
    rig.run(3)
    assert got.is_over


def test_a_finishing_client_may_count_tokens_that_were_cut_off() -> None:
    from scheduler.messages import Finish

    rig = Rig()
    rig.worker()
    client = rig.client()
    client.submit(seed=1, max_tokens=50)
    rig.run(6)
    client.send(Finish(client.client_id, 1, 0, 2))
    rig.tick()
    client.inbox.clear()  # the end is lost
    for _ in range(3):
        client.send(ClientBeat(client.client_id, (LiveRequest(1, (6,)),)))
        rig.tick()
    client.read()
    assert client.requests[1].ends[0].finish_reason == "stop"
