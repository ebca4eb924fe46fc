"""The series of the contract: names, help, buckets; counters from moves alone, none of which ever goes back."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.messages import Cancel, StatsQuery, StatsReply
from scheduler.metrics import MAX_SERIES, Metrics
from tests.scheduler.rig import Rig

CONTRACT = {
    "tinyloop_max_seq_len": ("gauge", "Maximum sequence length the model was loaded with."),
    "tinyloop_default_loops": ("gauge", "Default loop depth."),
    "tinyloop_up_timestamp_seconds": ("gauge", "Unix timestamp at server start."),
    "tinyloop_queue_depth": ("gauge", None),
    "tinyloop_requests_in_flight": ("gauge", None),
    "tinyloop_requests_submitted": ("counter", "Total requests accepted by the scheduler."),
    "tinyloop_requests_rejected": ("counter", None),
    "tinyloop_requests_completed": ("counter", None),
    "tinyloop_requests_errored": ("counter", None),
    "tinyloop_requests_cancelled": ("counter", None),
    "tinyloop_prefix_pool_hits": ("counter", None),
    "tinyloop_queue_wait_ms": ("histogram", "Seconds-in-queue from submit to dispatch, in ms."),
    "tinyloop_dispatch_ms": ("histogram", None),
    "tinyloop_first_token_ms": ("histogram", None),
    "tinyloop_request_wall_ms": ("histogram", None),
}
BUCKETS = ["1.0", "5.0", "10.0", "25.0", "50.0", "100.0", "250.0", "500.0", "1000.0", "2500.0", "5000.0",
           "10000.0", "30000.0", "60000.0", "+Inf"]  # fmt: skip


def exposition(rig: Rig) -> str:
    client = rig.client(9)
    client.send(StatsQuery(client.client_id, 4))
    (reply,) = [m for m in client.read() if isinstance(m, StatsReply)]
    assert reply.query_id == 4
    return str(reply.exposition)


def test_the_contract_is_exposed_from_the_first_scrape() -> None:
    text = exposition(Rig())
    families = {f.name: f for f in text_string_to_metric_families(text)}
    for name, (kind, help_) in CONTRACT.items():
        assert families[name].type == kind, name
        assert help_ is None or families[name].documentation == help_
        assert families[name].documentation
        if kind == "histogram":
            assert [
                s.labels["le"] for s in families[name].samples if s.name.endswith("_bucket")
            ] == BUCKETS
        if kind == "counter":
            assert f"\n{name}_total 0.0" in text
    assert "_created" not in text


def test_gauges_come_from_the_worker() -> None:
    rig = Rig()
    rig.worker()
    text = exposition(rig)
    assert "tinyloop_max_seq_len 1024.0" in text and "tinyloop_default_loops 2.0" in text
    assert "tinyloop_workers 1.0" in text


def test_one_http_request_counts_once_whatever_its_sequences() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    client.submit(num_sequences=3, max_tokens=2)
    rig.run(6)
    for name in ("requests_submitted_total", "requests_completed_total", "queue_wait_ms_count", "dispatch_ms_count",
                 "first_token_ms_count", "request_wall_ms_count"):  # fmt: skip
        assert rig.count(f"tinyloop_{name}") == 1, name


def test_the_stamps_are_those_of_the_moves() -> None:
    rig = Rig()
    worker, client = rig.worker(max_rows=1), rig.client()
    blocker = client.submit(seed=1, max_tokens=50)
    rig.run(1)
    got = client.submit(seed=2, max_tokens=2)
    rig.elapse(3.0)
    client.send(Cancel(client.client_id, blocker.submit.request_id))
    del client.requests[1]
    worker.read()
    worker.step()
    rig.tick()  # dispatched after 3 s
    worker.read()
    rig.clock.advance(0.2)
    worker.beat()
    worker.step()  # first token after 0.2 s
    rig.clock.advance(0.1)
    worker.step()
    rig.tick()
    client.read()
    assert (got.stats.queue_wait_ms, got.stats.first_token_ms, got.stats.wall_ms) == pytest.approx(
        (3000, 3200, 3300)
    )
    assert rig.count("tinyloop_queue_wait_ms_sum") == pytest.approx(3000)
    assert rig.count("tinyloop_first_token_ms_sum") == pytest.approx(3200)
    assert rig.count("tinyloop_request_wall_ms_sum") == pytest.approx(
        3300 + 3010
    )  # the cancelled one too
    assert rig.count("tinyloop_dispatch_ms_sum") == pytest.approx(300 + 3010)


def test_a_request_cancelled_in_the_queue_was_never_dispatched() -> None:
    rig = Rig()
    rig.worker(max_rows=1)
    client = rig.client()
    client.submit(max_tokens=50)
    rig.run(1)
    client.submit(max_tokens=50)
    client.send(Cancel(client.client_id, 2))
    assert rig.count("tinyloop_dispatch_ms_count") == 0
    assert rig.count("tinyloop_queue_wait_ms_count") == 1
    assert rig.count("tinyloop_request_wall_ms_count") == 1


def test_worker_series_carry_the_workers_name_and_its_counters_never_go_back() -> None:
    rig = Rig()
    worker = rig.worker("gpu0")
    worker.beat(series={"kv_bytes_per_token": 96.0, "steps_total": 10.0})
    worker.beat(series={"kv_bytes_per_token": 96.0, "steps_total": 15.0})
    assert rig.count_of("tinyloop_worker_steps_total", worker="gpu0") == 15
    assert rig.count_of("tinyloop_worker_kv_bytes_per_token", worker="gpu0") == 96
    rig.kill(worker)
    rig.elapse(1.0)
    assert rig.count_of("tinyloop_worker_steps_total", worker="gpu0") == 15
    assert rig.count_of("tinyloop_worker_kv_bytes_per_token", worker="gpu0") is None
    again = rig.worker("gpu0", process=1)
    again.beat(series={"steps_total": 30.0})
    assert rig.count_of("tinyloop_worker_steps_total", worker="gpu0") == 45
    again.beat(series={"steps_total": 29.0})
    assert rig.count_of("tinyloop_worker_steps_total", worker="gpu0") == 45
    again.register()  # the same process, after a lost connection
    again.beat(series={"steps_total": 31.0})
    assert rig.count_of("tinyloop_worker_steps_total", worker="gpu0") == 46


@pytest.mark.parametrize(
    "series",
    [
        {"a": float("nan")},
        {"A b": 1.0},
        {"": 1.0},
        {"x\n": 1.0},
        {f"s{i}": 1.0 for i in range(MAX_SERIES + 1)},
    ],
)
def test_unusable_series_are_counted_as_bad(series: dict[str, float]) -> None:
    rig = Rig()
    rig.worker().beat(series=series)
    assert rig.num_bad == 1
    assert list(text_string_to_metric_families(exposition(rig)))


def test_worker_names_are_escaped() -> None:
    metrics = Metrics()
    metrics.workers.update(b"w", 'a"b\nc', {"rows": 1.0})
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition())}
    assert families["tinyloop_worker_rows"].samples[0].labels == {"worker": 'a"b\nc'}


def test_series_of_one_name_as_gauge_and_counter_do_not_clash() -> None:
    metrics = Metrics()
    metrics.workers.update(b"w", "w", {"steps": 1.0, "steps_total": 2.0})
    samples = [s for f in text_string_to_metric_families(metrics.exposition()) for s in f.samples]
    names = [s.name for s in samples if "worker_steps" in s.name]
    assert sorted(names) == ["tinyloop_worker_steps", "tinyloop_worker_steps_total"]
