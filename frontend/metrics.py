"""The web processes' own series: requests by route and status, their duration, how many are in progress.

With several processes they live in prometheus-client's multiprocess directory, so that any of them answers for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class HttpMetrics:
    """Counted once per exchange, at its end. `multiproc_dir` None: this process stands alone."""

    def __init__(self, multiproc_dir: str | None = None) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._multiproc_dir = multiproc_dir
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tinyloop_http_requests_total",
            "HTTP requests answered, by route, method and status (499: the client left).",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "tinyloop_http_request_seconds",
            "Duration of HTTP requests from their first byte to the last byte of the answer.",
            ("route",),
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._in_progress = Gauge(
            "tinyloop_http_requests_in_progress",
            "HTTP requests being answered.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        with self._in_progress.track_inprogress():
            yield

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        known = method if method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS") else "other"
        self._requests.labels(route, known, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def exposition(self) -> str:
        """All processes' series as Prometheus text."""
        registry = self._registry
        if self._multiproc_dir is not None:
            registry = CollectorRegistry()
            MultiProcessCollector(registry, self._multiproc_dir)  # type: ignore[no-untyped-call]
        return generate_latest(registry).decode()
