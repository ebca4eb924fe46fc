"""The scheduler's Prometheus series, in a registry of their own.

Counters and histograms of requests are made from state moves alone (`Metrics.moved`), one HTTP request being one move each,
so they cannot drift from the states. Workers' numbers arrive with their heartbeats and are shown under the label `worker`;
their counters are summed over a worker's restarts, so none goes back while the scheduler lives.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.request import Request, RequestState

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

BUCKETS_MS = (1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000)
MAX_SERIES = 64  # names one worker may send
MAX_WORKER_NAMES = 1024  # labels kept; beyond them a worker has no series

_SERIES_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_S = RequestState


class Metrics:
    """All series. Bring `set_*` up to date before `exposition()`; counters count themselves."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.num_in: dict[RequestState, int] = dict.fromkeys(RequestState, 0)
        self._gauge("tinyloop_up_timestamp_seconds", "Unix timestamp at server start.").set(
            time.time()
        )
        self.max_seq_len = self._gauge(
            "tinyloop_max_seq_len", "Maximum sequence length the model was loaded with."
        )
        self.default_loops = self._gauge("tinyloop_default_loops", "Default loop depth.")
        self._queue_depth = self._gauge("tinyloop_queue_depth", "Requests waiting for a worker.")
        self._in_flight = self._gauge(
            "tinyloop_requests_in_flight", "Requests dispatched to a worker and not ended."
        )
        self.num_workers = self._gauge("tinyloop_workers", "Workers ready for requests.")
        self.num_clients = self._gauge("tinyloop_clients", "Client processes heard of lately.")
        self.prefix_entries = Gauge(
            "tinyloop_prefix_pool_entries", "Entries of the prefix pool.", ["pinned"], registry=self.registry
        )  # fmt: skip

        self.predictor_error = self._gauge(
            "tinyloop_predictor_error", "Mean relative error of predicted completion times (EMA)."
        )

        self.submitted = self._counter(
            "tinyloop_requests_submitted", "Total requests accepted by the scheduler."
        )
        self._ended = {
            _S.REJECTED: self._counter(
                "tinyloop_requests_rejected", "Total requests refused by admission."
            ),
            _S.COMPLETED: self._counter(
                "tinyloop_requests_completed", "Total requests that ran to their end."
            ),
            _S.ERRORED: self._counter(
                "tinyloop_requests_errored", "Total accepted requests that ended in an error."
            ),
            _S.CANCELLED: self._counter(
                "tinyloop_requests_cancelled",
                "Total accepted requests that were cancelled or timed out.",
            ),
        }
        self.prefix_hits = self._counter(
            "tinyloop_prefix_pool_hits", "Total sequences that began from a prefix-pool entry."
        )
        self.tokens = self._counter("tinyloop_generated_tokens", "Total tokens generated.")
        self.requeues = self._counter(
            "tinyloop_requeues", "Total sequences sent back to the queue by a lost worker."
        )
        self.preemptions = self._counter(
            "tinyloop_preemptions", "Total sequences sent back to the queue for lack of KV blocks."
        )
        self.worker_losses = self._counter("tinyloop_worker_losses", "Total workers lost.")
        self.stale = self._counter(
            "tinyloop_stale_messages", "Total worker messages of an earlier epoch or attempt."
        )
        self.bad_messages = Counter(
            "tinyloop_bad_messages", "Total messages dropped because they were not valid.",
            ["wire"], registry=self.registry,
        )  # fmt: skip
        for wire in ("submit", "events", "workers", "beats"):
            self.bad_messages.labels(wire)

        self._queue_wait = self._histogram(
            "tinyloop_queue_wait_ms", "Seconds-in-queue from submit to dispatch, in ms."
        )
        self._dispatch = self._histogram(
            "tinyloop_dispatch_ms", "Time from first dispatch to the end, in ms."
        )
        self._first_token = self._histogram(
            "tinyloop_first_token_ms", "Time from submit to the first token, in ms."
        )
        self._request_wall = self._histogram(
            "tinyloop_request_wall_ms", "Time from submit to the end, in ms."
        )
        self.workers = WorkerSeries()
        self.registry.register(self.workers)

    def moved(self, request: Request, old: RequestState) -> None:
        """Count one move of a client's request; the only place where request series change."""
        new, stamps = request.state, request.stamps
        self.num_in[new] += 1
        if old is not _S.NEW:
            self.num_in[old] -= 1
        if old is _S.NEW and new is _S.QUEUED:
            self.submitted.inc()
        if new in self._ended:
            self._ended[new].inc()
        first_moves = {_S.DISPATCHED: self._queue_wait, _S.RUNNING: self._first_token}
        if new in first_moves and request.num_moves[new] == 1:
            first_moves[new].observe((stamps[new] - stamps[_S.QUEUED]) * 1e3)
        if new.is_ended and new is not _S.REJECTED:
            self._request_wall.observe((stamps[new] - stamps[_S.QUEUED]) * 1e3)
            if _S.DISPATCHED in stamps:
                self._dispatch.observe((stamps[new] - stamps[_S.DISPATCHED]) * 1e3)

    @property
    def queue_depth(self) -> int:
        return self.num_in[_S.QUEUED]

    @property
    def in_flight(self) -> int:
        return self.num_in[_S.DISPATCHED] + self.num_in[_S.RUNNING]

    def exposition(self) -> str:
        """The text format, all series."""
        self._queue_depth.set(self.queue_depth)
        self._in_flight.set(self.in_flight)
        return generate_latest(self.registry).decode()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=BUCKETS_MS)


_HELP = {
    "kv_bytes_per_token": "KV cache bytes per token at the default depth, with scales and exact copies.",
    "kv_blocks_used": "KV blocks in use.",
    "kv_blocks_total": "KV blocks of the pool.",
    "step_ms": "Duration of the last step, in ms.",
    "rows": "Rows of the last step.",
    "late_steps": "Decode steps for which the GPU had to wait: launched after it had finished the step before.",
}


class WorkerSeries(Collector):
    """Numbers of the workers, by series and worker name. A name that ends in `_total` is a counter."""

    def __init__(self) -> None:
        self._gauges: dict[str, dict[str, float]] = {}
        self._counters: dict[str, dict[str, float]] = {}
        self._last: dict[bytes, dict[str, float]] = {}  # counters as each process last told them
        self._names: set[str] = set()

    def update(self, worker_id: bytes, worker: str, series: Mapping[str, float]) -> bool:
        """Take one beat's numbers of the process `worker_id`. False if any of them was unusable (the others count)."""
        is_known = worker in self._names or len(self._names) < MAX_WORKER_NAMES
        if not is_known or len(series) > MAX_SERIES:
            return False
        self._names.add(worker)
        last = self._last.pop(worker_id, {})
        self._last[worker_id] = last  # at the end: heard of last
        if len(self._last) > MAX_WORKER_NAMES:
            del self._last[next(iter(self._last))]
        is_good = True
        for name, value in series.items():
            if not _SERIES_NAME.fullmatch(name) or not math.isfinite(value):
                is_good = False
            elif not name.endswith("_total"):
                self._gauges.setdefault(name, {})[worker] = value
            else:
                grown = max(0.0, value - last.get(name, 0.0))
                counter = self._counters.setdefault(name, {})
                counter[worker] = counter.get(worker, 0.0) + grown
                last[name] = max(value, last.get(name, 0.0))
        return is_good

    def remove(self, worker: str) -> None:
        """Forget the gauges of a lost worker; its counters stay."""
        for values in self._gauges.values():
            values.pop(worker, None)

    def collect(self) -> Iterator[Metric]:
        for name, values in sorted(self._gauges.items()):
            gauge = GaugeMetricFamily(f"tinyloop_worker_{name}", _help(name), labels=["worker"])
            for worker, value in sorted(values.items()):
                gauge.add_metric([worker], value)
            yield gauge
        for name, values in sorted(self._counters.items()):
            stem = name.removesuffix("_total")
            counter = CounterMetricFamily(f"tinyloop_worker_{stem}", _help(stem), labels=["worker"])
            for worker, value in sorted(values.items()):
                counter.add_metric([worker], value)
            yield counter


def _help(name: str) -> str:
    return _HELP.get(name, f"{name.replace('_', ' ').capitalize()}, as the worker reports it.")
