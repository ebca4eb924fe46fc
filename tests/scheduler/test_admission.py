"""Queue cap, SLO, retry advice, and the predictor behind them."""

from __future__ import annotations

import random

import pytest

from scheduler.messages import Accepted, Rejected
from scheduler.predictor import Capacity, PassFit, Work, completion_ms, drain_ms
from tests.scheduler.rig import BenchClient, Delivered, Rig, tokens


def code(client: BenchClient, got: Delivered) -> str:
    client.read()
    assert got.answer is not None
    return got.answer.code if isinstance(got.answer, Rejected) else ""


def warm(rig: Rig, client: BenchClient, step_ms: float = 10.0, max_tokens: int = 20) -> None:
    """Let the predictor see a worker whose passes take step_ms / 2."""
    got = client.submit(seed=1, max_tokens=max_tokens)
    for _ in range(max_tokens):
        rig.tick()
        for worker in rig.workers.values():
            worker.read()
            worker.step(step_ms=step_ms)
        rig.clock.advance(step_ms / 1e3)
    rig.tick()
    client.read()
    assert got.is_over


def test_the_queue_has_a_cap() -> None:
    rig = Rig(max_queue_depth=2)
    rig.worker(max_rows=1)
    client = rig.client()
    answers = [client.submit(seed=s, max_tokens=5) for s in range(5)]
    assert [code(client, got) for got in answers] == ["", "", "", "queue_full", "queue_full"]
    assert rig.count("tinyloop_requests_rejected_total") == 2
    assert rig.count("tinyloop_requests_submitted_total") == 3
    rig.run(20)
    assert [got.tokens for got in answers[:3]] == [[tokens(s, 5)] for s in range(3)]
    rig.check_books()


def test_without_data_every_slo_is_accepted() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    assert code(client, client.submit(slo_ms=0.001)) == ""


def test_an_slo_that_cannot_be_met_is_refused_with_advice() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    warm(rig, client)  # 2 loops of 5 ms: 10 ms per token
    assert code(client, client.submit(max_tokens=20, slo_ms=2000)) == ""
    refused = client.submit(max_tokens=20, slo_ms=100)
    assert code(client, refused) == "slo_unattainable"
    assert isinstance(refused.answer, Rejected) and refused.answer.retry_after_s >= 1


def test_the_default_slo_is_inherited() -> None:
    rig = Rig(default_slo_ms=100.0)
    rig.worker()
    client = rig.client()
    warm(rig, client, max_tokens=20)
    assert code(client, client.submit(max_tokens=50)) == "slo_unattainable"
    assert code(client, client.submit(max_tokens=50, slo_ms=60_000)) == ""
    assert code(client, client.submit(max_tokens=2)) == ""


def test_deeper_requests_take_longer() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    warm(rig, client)
    assert code(client, client.submit(max_tokens=20, loops=2, slo_ms=400)) == ""
    assert code(client, client.submit(max_tokens=20, loops=8, slo_ms=400)) == "slo_unattainable"


def test_a_backlog_makes_an_slo_unattainable_and_priority_goes_around_it() -> None:
    rig = Rig(ageing_s=100.0)
    rig.worker(max_rows=1)
    client = rig.client()
    warm(rig, client)
    for seed in range(8):
        client.submit(seed=seed, max_tokens=50)
    rig.tick()
    assert code(client, client.submit(max_tokens=20, slo_ms=1500)) == "slo_unattainable"
    assert code(client, client.submit(max_tokens=20, slo_ms=1500, priority=-5)) == ""


def test_expected_lengths_are_learned() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    warm(rig, client)
    assert code(client, client.submit(max_tokens=500, slo_ms=1000)) == "slo_unattainable"
    for _ in range(60):  # answers stop after one token of the hundred that they may have
        client.submit(max_tokens=100)
        rig.tick()
        worker.read()
        worker.step(dict.fromkeys(worker.running, "stop"))
        rig.clock.advance(0.01)
    assert code(client, client.submit(max_tokens=500, slo_ms=1000)) == ""


def test_retry_advice_follows_the_backlog() -> None:
    advice = []
    for length in (10, 400):
        rig = Rig(max_queue_depth=1)
        rig.worker(max_rows=1)
        client = rig.client()
        warm(rig, client, step_ms=50.0)
        for seed in range(2):
            client.submit(seed=seed, max_tokens=length)
            rig.tick()
        refused = client.submit(max_tokens=5)
        assert code(client, refused) == "queue_full"
        assert isinstance(refused.answer, Rejected)
        advice.append(refused.answer.retry_after_s)
    assert 1.0 <= advice[0] < advice[1] <= 60.0


def test_what_exceeds_the_whole_pool_is_invalid() -> None:
    rig = Rig()
    rig.worker(num_blocks=20)
    client = rig.client()
    assert code(client, client.submit(size=300, max_tokens=20, loops=4)) == ""  # 5 x 4 blocks
    assert code(client, client.submit(size=301, max_tokens=20, loops=4)) == "invalid_request"
    assert (
        code(client, client.submit(size=1000, max_tokens=25, loops=1)) == "context_length_exceeded"
    )


def test_all_sequences_or_none() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    from scheduler.messages import SequenceSpec
    from tests.scheduler.rig import prompt

    specs = (SequenceSpec(prompt(5), 1), SequenceSpec(prompt(1020), 2))
    assert code(client, client.submit(sequences=specs, max_tokens=5)) == "context_length_exceeded"
    rig.run(2)
    assert worker.runs == []


def test_a_kv_mode_that_no_worker_serves() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    assert code(client, client.submit(kv_cache_mode="int4")) == "invalid_request"
    got = client.submit(kv_cache_mode="fp16")
    rig.run(6)
    assert isinstance(got.answer, Accepted) and got.stats.kv_cache_mode == "fp16"


def test_a_request_goes_to_a_worker_that_serves_its_mode() -> None:
    rig = Rig()
    plain, int4 = rig.worker("a"), rig.worker("b", kv_modes=("int4",))
    client = rig.client()
    client.submit(kv_cache_mode="int4")
    client.submit(kv_cache_mode="fp32")
    rig.run(1)
    assert [r.params.kv_cache_mode for r in plain.runs] == ["fp32"]
    assert [r.params.kv_cache_mode for r in int4.runs] == ["int4"]


# ------------------------------------------------------------------------------------------------------- the predictor


def fit(
    base: float, per_row: float, per_cached: float, noise: float = 0.0, steps: int = 200
) -> PassFit:
    made, dice = PassFit(), random.Random(3)
    for _ in range(steps):
        rows = dice.randint(1, 64)
        cached = rows * dice.randint(0, 1000)
        exact = base + per_row * rows + per_cached * cached
        made.observe(rows, cached, exact * (1 + dice.uniform(-noise, noise)))
    return made


@pytest.mark.parametrize(
    "weights", [(5.0, 0.1, 0.001), (5.0, 0.0, 0.0), (0.0, 0.3, 0.0), (1.0, 0.0, 0.002)]
)
def test_the_fit_finds_what_made_the_steps(weights: tuple[float, float, float]) -> None:
    made = fit(*weights, noise=0.02)
    for rows, cached in ((1, 100), (32, 10_000), (64, 60_000)):
        exact = weights[0] + weights[1] * rows + weights[2] * cached
        assert made.pass_ms(rows, cached) == pytest.approx(exact, rel=0.1, abs=0.1)


def test_the_fit_of_equal_steps_is_no_negative_time_elsewhere() -> None:
    made = PassFit()
    for _ in range(50):
        made.observe(4, 1000, 10.0)
    assert made.pass_ms(4, 1000) == pytest.approx(10.0, rel=0.01)
    for rows, cached in ((0, 0), (1, 0), (64, 0), (1, 100_000)):
        made_ms = made.pass_ms(rows, cached)
        assert made_ms is not None and made_ms >= 0


def test_first_steps_and_outliers_do_not_count_much() -> None:
    made = PassFit()
    for _ in range(3):
        made.observe(4, 0, 30_000.0)  # compiling
        assert made.pass_ms(4, 0) is None
    for _ in range(50):
        made.observe(4, 0, 10.0)
    made.observe(4, 0, 60_000.0)
    for _ in range(20):
        made.observe(4, 0, 10.0)
    found = made.pass_ms(4, 0)
    assert found is not None and found < 15


def test_it_follows_a_worker_that_becomes_slower() -> None:
    made = fit(5.0, 0.0, 0.0)
    for _ in range(300):
        made.observe(8, 0, 20.0)
    assert made.pass_ms(8, 0) == pytest.approx(20.0, rel=0.1)


def test_a_free_engine_takes_prefill_and_its_own_tokens() -> None:
    capacity = [Capacity(fit(10.0, 0.0, 0.0), 4, 0.0)]
    own = Work()
    own.add(2, 256, 20)
    # 256 rows x 2 loops in chunks of 256 are 2 passes, 20 tokens x 2 loops are 40.
    predicted = completion_ms(own, 2, 20, Work(), capacity, 256)
    assert predicted == pytest.approx(420, rel=0.02)


def test_behind_full_slots_it_waits_for_its_share_of_the_backlog() -> None:
    capacity = [Capacity(fit(10.0, 0.0, 0.0), 2, 0.0)]
    own, ahead = Work(), Work()
    own.add(1, 0, 10)
    for _ in range(4):
        ahead.add(1, 0, 10)
    # Two at a time: all four take 200 ms, and three of them must have ended.
    assert drain_ms(ahead, capacity, 256) == pytest.approx(200, rel=0.02)
    assert completion_ms(own, 1, 10, ahead, capacity, 256) == pytest.approx(150 + 100, rel=0.02)


def test_two_workers_share_a_backlog() -> None:
    capacity = [Capacity(fit(10.0, 0.0, 0.0), 1, 0.0), Capacity(fit(10.0, 0.0, 0.0), 1, 0.0)]
    work = Work()
    for _ in range(4):
        work.add(1, 0, 10)
    assert drain_ms(work, capacity, 256) == pytest.approx(200, rel=0.02)


def test_one_worker_without_data_is_no_data() -> None:
    capacity = [Capacity(fit(10.0, 0.0, 0.0), 1, 0.0), Capacity(PassFit(), 1, 0.0)]
    own = Work()
    own.add(1, 1, 1)
    assert completion_ms(own, 1, 1, Work(), capacity, 256) is None
