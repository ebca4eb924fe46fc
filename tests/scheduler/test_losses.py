"""Workers lost, hung, replaced; fencing by epoch and attempt; suspects; numerics; a scheduler that begins anew."""

from __future__ import annotations

import pytest

from scheduler.loop import STRANDED_S
from scheduler.messages import (
    Abort,
    Rejected,
    Run,
    SchedulerBeat,
    SequenceOutput,
    StepDone,
    Tokens,
    Unknown,
)
from scheduler.workers import HUNG_AFTER_S, RETURN_S
from tests.scheduler.rig import BenchWorker, Rig, prompt, token, tokens


def lose(rig: Rig, worker: BenchWorker) -> None:
    rig.kill(worker)
    rig.elapse(1.0)  # its connection is gone: the next beat to it fails


def test_a_lost_workers_sequences_go_on_elsewhere_with_the_same_tokens() -> None:
    rig = Rig()
    first, client = rig.worker("a"), rig.client()
    got = client.submit(num_sequences=2, seed=5, max_tokens=8, logprobs=0)
    rig.run(3)
    second = rig.worker("b")
    lose(rig, first)
    rig.run(6)
    assert got.tokens == [tokens(5, 8), tokens(6, 8)]
    assert [p.logprob for p in got.logprobs[1]] == [-float(token(6, i)) for i in range(8)]
    assert [(r.emitted, r.attempt) for r in second.runs] == [
        (tuple(tokens(5, 3)), 2),
        (tuple(tokens(6, 3)), 2),
    ]
    assert got.stats.restarts == 1
    assert rig.count("tinyloop_worker_losses_total") == 1
    assert rig.count("tinyloop_queue_wait_ms_count") == 1  # first dispatch alone
    assert rig.count("tinyloop_first_token_ms_count") == 1
    rig.check_books()


def test_a_lost_request_keeps_its_place_in_the_queue() -> None:
    rig = Rig()
    first, client = rig.worker("a", max_rows=1), rig.client()
    client.submit(seed=1, max_tokens=9)
    rig.run(1)
    client.submit(seed=2, max_tokens=9)
    lose(rig, first)
    second = rig.worker("b", max_rows=1)
    rig.run(12)
    assert [r.seed for r in second.runs] == [1, 2]


def test_silence_of_three_seconds_is_death() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    client.submit(max_tokens=50)
    rig.run(1)
    for _ in range(5):
        rig.clock.advance(0.5)
        rig.tick()
    assert rig.scheduler.hub.workers.ready
    rig.clock.advance(0.6)
    rig.tick()
    assert not rig.scheduler.hub.workers.ready
    assert rig.scheduler.hub.metrics.queue_depth == 1
    worker.inbox.clear()
    worker.step()  # it lives after all: what it says counts no more
    assert rig.count("tinyloop_stale_messages_total") == 1
    rig.clock.advance(1)
    rig.tick()
    assert worker.inbox == []  # no beat either, so that it registers again
    rig.check_books()


def test_a_step_that_takes_longer_than_half_a_minute_is_a_loss() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    client.submit(max_tokens=50)
    rig.run(1)
    worker.beat(step_age_s=HUNG_AFTER_S - 1)
    rig.clock.advance(0.1)
    rig.tick()
    assert rig.scheduler.hub.workers.ready
    worker.beat(step_age_s=HUNG_AFTER_S + 1)
    rig.clock.advance(0.1)
    rig.tick()
    assert not rig.scheduler.hub.workers.ready


def test_a_run_that_got_lost_is_sent_again() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=2, max_tokens=3)
    rig.tick()
    worker.inbox.clear()  # lost on the way
    rig.elapse(6.0)  # idle by its beats
    assert rig.count("tinyloop_worker_losses_total") == 1
    worker.inbox.clear()
    worker.register()
    worker.read()
    rig.run(4)
    assert got.tokens == [tokens(2, 3)]


def test_a_report_that_got_lost_is_noticed_and_replayed() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=2, max_tokens=6)
    rig.run(2)
    worker.step(deliver=False)
    worker.step()
    rig.run(5)
    assert got.tokens == [tokens(2, 6)]
    assert [(r.attempt, len(r.emitted)) for r in worker.runs] == [(1, 0), (2, 2)]
    assert worker.aborts[0].attempt == 1
    rig.check_books()


def test_an_end_that_got_lost_is_noticed_although_the_worker_goes_on_with_others() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    long, short = client.submit(seed=1, max_tokens=900), client.submit(seed=2, max_tokens=3)
    rig.run(2)
    worker.step(deliver=False)  # the last token of one, and the third of the other
    for _ in range(14):
        rig.run(1)
        rig.elapse(0.5)
    rig.run(2)
    client.read()
    assert short.tokens == [tokens(2, 3)]
    assert long.tokens[0] == tokens(1, len(long.tokens[0]))
    assert {r.seed: r.attempt for r in worker.runs} == {1: 2, 2: 2}
    rig.check_books()


def test_a_doubled_report_changes_nothing() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=2, max_tokens=6)
    rig.tick()
    worker.read()
    for _ in range(6):
        done = worker.step()
        worker.send(done)
        rig.tick()
    client.read()
    assert got.tokens == [tokens(2, 6)]
    assert rig.count("tinyloop_generated_tokens_total") == 6
    rig.check_books()


def test_outputs_of_an_earlier_attempt_or_epoch_are_dropped() -> None:
    rig = Rig(epoch=7)
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=2, max_tokens=6)
    rig.run(1)
    (sequence_id,) = worker.running
    wrong = Tokens([1])
    worker.send(StepDone(7, (SequenceOutput(sequence_id, 2, 1, wrong),), 1, 3, 90))
    worker.send(StepDone(7, (SequenceOutput(sequence_id, 0, 1, wrong),), 1, 3, 90))
    worker.send(StepDone(6, (SequenceOutput(sequence_id, 1, 1, wrong),), 1, 3, 90))
    worker.send(StepDone(7, (SequenceOutput(99, 1, 1, wrong),), 1, 3, 90))
    assert rig.count("tinyloop_stale_messages_total") == 4
    rig.run(6)
    assert got.tokens == [tokens(2, 6)]


def test_a_worker_cannot_speak_of_anothers_sequence() -> None:
    rig = Rig()
    first, other, client = rig.worker("a"), rig.worker("b"), rig.client()
    got = client.submit(seed=2, max_tokens=3)
    rig.tick()
    runner, bystander = (
        (first, other) if any(isinstance(m, Run) for m in first.inbox) else (other, first)
    )
    runner.read()
    (sequence_id,) = runner.running
    bystander.send(StepDone(1, (SequenceOutput(sequence_id, 1, 0, Tokens([9])),), 0, 4, 100))
    rig.run(4)
    assert got.tokens == [tokens(2, 3)]


def test_two_losses_make_a_suspect_which_runs_alone_and_a_third_ends_it() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    poison = client.submit(seed=1, max_tokens=50)
    bystander = client.submit(seed=2, max_tokens=50, priority=1)
    for number in range(2):  # each time both were there
        worker = rig.worker(f"v{number}") if number else worker
        rig.run(1)
        assert {run.seed for run in worker.runs} == {1, 2}
        lose(rig, worker)
    # Both are suspects now: one at a time, each alone.
    third = rig.worker("w2")
    rig.run(1)
    assert [run.seed for run in third.runs] == [1]
    rig.run(2)
    assert [run.seed for run in third.runs] == [1]
    lose(rig, third)
    client.read()
    assert (poison.ends[0].finish_reason, poison.ends[0].error_code) == ("error", "worker_lost")
    assert rig.count("tinyloop_requests_errored_total") == 1
    fourth = rig.worker("w3")
    rig.run(60)
    assert [run.seed for run in fourth.runs] == [2]
    assert bystander.tokens == [tokens(2, 50)]
    rig.check_books()


def test_a_suspect_waits_for_an_empty_worker_and_keeps_the_others_out() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    suspect = client.submit(seed=1, max_tokens=30)
    for number in range(2):
        worker = rig.worker(f"v{number}") if number else worker
        rig.run(1)
        lose(rig, worker)
    # Its third worker is busy with a request that outranks it.
    other = client.submit(seed=2, max_tokens=4, priority=-50)
    third = rig.worker("w2")
    late = client.submit(seed=3, max_tokens=2)
    rig.run(2)
    assert [run.seed for run in third.runs] == [2]
    rig.run(4)
    assert [run.seed for run in third.runs] == [2, 1]
    rig.run(32)
    assert [run.seed for run in third.runs] == [2, 1, 3]
    assert suspect.tokens == [tokens(1, 30)] and other.is_over and late.is_over


def test_a_worker_that_registers_again_is_empty() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=4, max_tokens=6)
    rig.run(2)
    worker.register()
    rig.run(6)
    assert got.tokens == [tokens(4, 6)]
    assert [r.attempt for r in worker.runs] == [1, 2]
    assert rig.scheduler.hub.workers.ready[worker.worker_id].num_sent == 1
    rig.check_books()


def test_a_doubled_register_does_no_harm_and_makes_nobody_suspect() -> None:
    rig = Rig()
    worker, client = rig.worker(is_ready=False), rig.client()
    worker.register()
    got = client.submit(seed=4, max_tokens=30)
    rig.tick()
    for _ in range(4):
        worker.register()
        rig.tick()
    worker.read()
    assert len(worker.running) == 1
    rig.run(30)
    assert got.tokens == [tokens(4, 30)]
    assert rig.count("tinyloop_worker_losses_total") == 0


def test_another_artifact_or_version_is_refused_with_the_reason() -> None:
    rig = Rig()
    rig.worker("a")
    other = rig.worker("b", is_ready=False)
    other.register(digest="b" * 64)
    other.read()
    assert "bbbb" in other.refused and "aaaa" in other.refused
    other.register(version=2)
    other.read()
    assert "version 2" in other.refused
    assert len(rig.scheduler.hub.workers.ready) == 1
    rig.client().submit(seed=1)
    rig.run(1)
    assert other.runs == []


def test_a_running_request_moves_only_between_equal_numerics() -> None:
    rig = Rig()
    first, client = rig.worker("a", numerics_id="n1"), rig.client()
    started = client.submit(seed=1, max_tokens=6)
    rig.run(2)
    fresh = client.submit(seed=2, max_tokens=2)
    lose(rig, first)
    other = rig.worker("b", numerics_id="n2")
    rig.run(4)
    assert [run.seed for run in other.runs] == [2]  # it has no tokens yet
    assert fresh.is_over and not started.is_over
    same = rig.worker("c", numerics_id="n1")
    rig.run(6)
    assert [run.seed for run in same.runs] == [1]
    assert started.tokens == [tokens(1, 6)]


def test_a_sequence_that_waits_for_its_numerics_does_not_hold_up_its_siblings() -> None:
    rig = Rig()
    first, client = rig.worker("a", numerics_id="n1", max_rows=1), rig.client()
    got = client.submit(num_sequences=2, seed=1, max_tokens=6)
    rig.run(2)
    assert [len(t) for t in got.tokens] == [2, 0]
    lose(rig, first)
    rig.worker("b", numerics_id="n2")
    rig.run(7)
    assert [len(t) for t in got.tokens] == [2, 6]


def test_without_equal_numerics_it_ends_with_a_code_after_a_bound() -> None:
    rig = Rig()
    first, client = rig.worker("a", numerics_id="n1"), rig.client()
    got = client.submit(seed=1, max_tokens=6)
    rig.run(2)
    lose(rig, first)
    rig.worker("b", numerics_id="n2")
    rig.elapse(STRANDED_S - 2)
    assert not got.is_over
    rig.elapse(3)
    client.read()
    assert (got.ends[0].finish_reason, got.ends[0].error_code) == ("error", "engine_down")
    rig.check_books()


def test_submits_queue_for_ten_seconds_after_the_last_worker_was_lost() -> None:
    rig = Rig()
    worker, client = rig.worker("a"), rig.client()
    rig.run(1)
    lose(rig, worker)
    soon = client.submit(seed=1, max_tokens=2)
    client.read()
    assert not isinstance(soon.answer, Rejected)
    rig.elapse(RETURN_S)
    late = client.submit(seed=2, max_tokens=2)
    client.read()
    assert isinstance(late.answer, Rejected) and late.answer.code == "engine_down"
    assert late.answer.retry_after_s >= 1
    rig.worker("b")
    rig.run(3)
    assert soon.tokens == [tokens(1, 2)]


def test_before_any_worker_a_submit_is_left_to_be_repeated_and_then_refused() -> None:
    rig = Rig()
    client = rig.client()
    got = client.submit(seed=1)
    assert client.read() == []
    rig.clock.advance(2.5)
    client.send(got.submit)
    client.read()
    assert isinstance(got.answer, Rejected) and got.answer.code == "engine_down"
    rig.check_books()


def test_a_new_scheduler_hears_that_it_is_unknown_and_goes_on() -> None:
    rig = Rig(epoch=1)
    worker, client = rig.worker(), rig.client()
    got = client.submit(num_sequences=2, seed=3, max_tokens=8)
    rig.run(3)
    rig.start(epoch=2)
    client.beat()
    unknown = next(m for m in client.read() if isinstance(m, Unknown))
    assert (unknown.epoch, unknown.request_ids) == (2, (1,))
    client.resubmit(unknown)  # before any worker is there: not taken, and not refused
    assert client.read() == []
    worker.beat()
    assert isinstance(worker.inbox[-1], SchedulerBeat) and worker.inbox[-1].epoch == 2
    worker.inbox.clear()
    worker.register()
    client.beat()
    client.resubmit(next(m for m in client.read() if isinstance(m, Unknown)))
    rig.run(6)
    assert got.tokens == [tokens(3, 8), tokens(4, 8)]
    assert [r.emitted for r in worker.runs[2:]] == [tuple(tokens(3, 3)), tuple(tokens(4, 3))]
    rig.check_books()


def test_resumed_requests_pass_no_admission() -> None:
    rig = Rig(max_queue_depth=1)
    rig.worker(max_rows=1)
    client = rig.client()
    for seed in range(4):
        client.submit(seed=seed, max_tokens=4, resumed=True)
    rig.run(20)
    assert all(d.is_over for d in client.requests.values())
    assert rig.count("tinyloop_requests_completed_total") == 4


@pytest.mark.parametrize(("held", "reason"), [(6, "length"), (3, "stop")])
def test_a_resumed_sequence_that_was_at_its_end_ends(held: int, reason: str) -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    stops = (token(1, 2),) if reason == "stop" else ()
    from scheduler.messages import SequenceSpec

    spec = SequenceSpec(prompt(5), 1, Tokens(tokens(1, held)))
    got = client.submit(sequences=(spec,), max_tokens=6, stop_token_ids=stops, resumed=True)
    rig.run(2)
    assert got.ends[0].finish_reason == reason
    assert worker.runs == []


def test_a_worker_that_cannot_be_reached_is_lost_at_dispatch() -> None:
    rig = Rig()
    worker, client = rig.worker("a"), rig.client()
    rig.kill(worker)
    got = client.submit(seed=1, max_tokens=2)
    rig.tick()
    assert not rig.scheduler.hub.workers.ready
    rig.worker("b")
    rig.run(3)
    assert got.tokens == [tokens(1, 2)]


def test_aborts_name_the_attempt() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    client.submit(seed=1, max_tokens=9)
    rig.run(2)
    rig.elapse(0.5)
    client.requests.clear()
    client.beat()  # no longer listed: not wanted
    aborts = [m for m in worker.inbox if isinstance(m, Abort)]
    assert [(a.epoch, a.attempt) for a in aborts] == [(1, 1)]
