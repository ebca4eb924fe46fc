"""The parts of the scheduler, made and joined in one place, and the few acts that concern several of them.

Holds no logic of its own beyond that: `loop` runs the steps over a hub, `client_desk` and `worker_desk` answer messages with it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from scheduler.admission import Admission
from scheduler.clients import Client, Clients
from scheduler.config import Settings
from scheduler.lifecycle import Lifecycle
from scheduler.messages import DropPrefixes, Params, SequenceSpec, Submit
from scheduler.metrics import Metrics
from scheduler.prefix_desk import PrefixDesk
from scheduler.prefix_pool import PrefixPool
from scheduler.priority_queue import PriorityQueue
from scheduler.request import Clock, Request
from scheduler.workers import Workers

MAX_LABEL = 128

ToClient = Callable[[bytes, object], None]
ToWorker = Callable[[bytes, object], bool]  # False: it cannot be reached


class Hub:
    """All parts of one scheduler; `Scheduler` says what the arguments are."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        to_client: ToClient,
        to_worker: ToWorker,
        epoch: int | None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.started_at = clock()
        self.epoch = time.time_ns() // 1_000_000 if epoch is None else epoch
        self.to_client = to_client
        self.to_worker = to_worker
        self.live: dict[int, Request] = {}  # by order: accepted and not ended
        self.is_draining = False
        self.metrics = Metrics()
        self.clients = Clients()
        self.workers = Workers()
        self.queue = PriorityQueue(settings.ageing_s)
        self.pool = PrefixPool(settings.prefix_pool_capacity)
        self.admission = Admission(settings, self.workers, self.queue)
        self.lifecycle = Lifecycle(
            self.epoch,
            self.metrics,
            self.queue,
            self.workers,
            self.pool,
            self.admission,
            to_worker,
            self._ended,
        )
        self.prefixes = PrefixDesk(
            self.pool, self.workers, self._build_prefix, self._cancel_build, to_client
        )
        self._orders, self._sequence_ids = itertools.count(1), itertools.count(1)

    def new_request(self, submit: Submit, now: float, *, is_internal: bool = False) -> Request:
        """A request in state NEW, without its sequences: they may be wrong still."""
        return Request(
            submit.client_id,
            submit.request_id,
            _for_logs(submit.label),
            submit.params,
            order=next(self._orders),
            rank=self.queue.rank(submit.priority, now),
            priority=submit.priority,
            slo_ms=submit.slo_ms,
            timeout_s=submit.timeout_s,
            salt=submit.salt,
            is_internal=is_internal,
        )

    def accept(self, request: Request, now: float) -> None:
        self.live[request.order] = request
        self.lifecycle.accept(request, now)

    def next_sequence_id(self) -> int:
        return next(self._sequence_ids)

    def state(self, now: float) -> tuple[str, str]:
        """(state, one line for people) as clients are told."""
        if self.is_draining:
            return "draining", "the engine is shutting down"
        return self.workers.state(now)

    def cancel_for(
        self, client: Client, request: Request, now: float, *, is_resumable: bool
    ) -> None:
        """End a request whose client does not want it any more; nothing is published of it."""
        self.lifecycle.end_all(request, "cancelled", now)
        client.requests.pop(request.request_id, None)
        self.clients.forget(request, now, is_resumable=is_resumable)

    def update_gauges(self) -> None:
        """Bring the gauges up to date that are not kept by moves."""
        metrics, limits = self.metrics, self.workers.limits
        metrics.num_workers.set(len(self.workers.ready))
        metrics.num_clients.set(len(self.clients))
        for is_pinned in (False, True):
            entries = sum(e.is_pinned == is_pinned for e in self.pool.entries())
            metrics.prefix_entries.labels(str(is_pinned).lower()).set(entries)
        if limits is not None:
            metrics.max_seq_len.set(limits.max_seq_len)
            metrics.default_loops.set(limits.loops_default)
        if self.admission.error.value is not None:
            metrics.predictor_error.set(self.admission.error.value)

    def drop_evicted(self) -> None:
        """Tell the workers which entries the prefix pool has given up."""
        by_worker: dict[bytes, list[bytes]] = {}
        for worker_id, prefix_id in self.pool.evicted:
            by_worker.setdefault(worker_id, []).append(prefix_id)
        self.pool.evicted.clear()
        for worker_id, prefix_ids in by_worker.items():
            self.to_worker(worker_id, DropPrefixes(self.epoch, tuple(prefix_ids)))

    def _ended(self, request: Request) -> None:
        del self.live[request.order]
        if request.is_internal:
            self.prefixes.ended(request)

    def _build_prefix(self, params: Params, spec: SequenceSpec, salt: str, label: str) -> Request:
        now = self.clock()
        request = self.new_request(
            Submit(b"", 0, label, params, (spec,), salt=salt), now, is_internal=True
        )
        request.add_sequences((spec,), self.next_sequence_id)
        self.accept(request, now)
        return request

    def _cancel_build(self, request: Request) -> None:
        self.lifecycle.end_all(request, "cancelled", self.clock())


def _for_logs(label: str) -> str:
    """A client's label as one short printable text; it goes nowhere but into logs."""
    label = label[:MAX_LABEL]
    return label if label.isprintable() else ascii(label)
