"""The scheduler: drain -> expire -> dispatch -> publish, over and over. Start reading here.

`Scheduler` is the whole core without sockets: messages come in through `on_client` and `on_worker`, time through a clock, and
answers leave through two functions. The parts are joined in `hub`; messages are answered in `client_desk` and `worker_desk`, what
happens to a request is in `lifecycle`, delivery in `clients`, room on workers in `placement`. `run` joins the core to sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from scheduler.client_desk import ClientDesk, FromClient
from scheduler.clients import Client
from scheduler.config import Settings
from scheduler.hub import Hub, ToClient, ToWorker
from scheduler.messages import Events, SchedulerBeat, Submit, TokenEvent
from scheduler.placement import Placement
from scheduler.request import Clock, Request, RequestState
from scheduler.worker_desk import FromWorker, WorkerDesk

log = logging.getLogger(__name__)

BEAT_S = 0.5
EXPIRE_S = 0.05
STRANDED_S = 60.0  # a request that no worker there is could run ends after this


class Scheduler:
    """The core, without sockets.

    Args:
        settings: queue cap, ageing, SLO, pool capacity, prefill chunk, grace.
        clock: seconds, monotonic.
        send_to_client: (client id, message).
        send_to_worker: (worker id, message); False if the worker cannot be reached.
        epoch: told apart from every other life of a scheduler by all peers; from the time of day if None.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        send_to_client: ToClient,
        send_to_worker: ToWorker,
        epoch: int | None = None,
    ) -> None:
        self.hub = Hub(settings, clock, send_to_client, send_to_worker, epoch)
        self._client_desk = ClientDesk(self.hub)
        self._worker_desk = WorkerDesk(self.hub)
        self._clock = clock
        self._expired_at = self._beaten_at = clock() - BEAT_S
        self._drain_until: float | None = None

    def on_client(self, message: FromClient) -> None:
        """Take one message of a client.

        Raises:
            BadMessage: a value is out of range; the message is dropped.
        """
        now = self._clock()
        is_full = self.hub.metrics.queue_depth >= self.hub.settings.max_queue_depth
        if is_full and isinstance(message, Submit):
            self.dispatch(now)  # what there is room for does not count as waiting
        self._client_desk.handle(message, now)

    def on_worker(self, worker_id: bytes, message: FromWorker) -> None:
        """Take one message of a worker, known by its socket as `worker_id`.

        Raises:
            BadMessage: a value is out of range; the message is dropped.
        """
        self._worker_desk.handle(worker_id, message, self._clock())

    def tick(self) -> None:
        """Everything that follows the draining of messages."""
        now = self._clock()
        self.expire(now)
        self.dispatch(now)
        self.publish()

    # ---------------------------------------------------------------------------------------------- expire

    def expire(self, now: float) -> None:
        """Act on what did not come in time: beats of workers and clients, ends of requests, workers for the stranded."""
        if now - self._expired_at < EXPIRE_S:
            return
        self._expired_at = now
        hub = self.hub
        for worker, reason in hub.workers.find_lost(now):
            hub.lifecycle.lose_worker(worker, reason, now)
        for worker in hub.workers.ready.values():
            hub.lifecycle.lose_sequences(worker.missing(now), worker, now)
        for client in hub.clients.expire(now):
            self._drop_client(client, now)
        for request in list(hub.live.values()):
            self._expire_request(request, now)
        hub.prefixes.tick(now)
        if now - self._beaten_at >= BEAT_S:
            self._beaten_at = now
            for worker in list(hub.workers.ready.values()):
                if not hub.to_worker(worker.worker_id, SchedulerBeat(hub.epoch)):
                    hub.lifecycle.lose_worker(worker, "its connection is gone", now)

    def _drop_client(self, client: Client, now: float) -> None:
        log.warning(
            "client %s is silent; %d requests", client.client_id.hex(), len(client.requests)
        )
        for request in list(client.requests.values()):
            self.hub.cancel_for(client, request, now, is_resumable=True)

    def _expire_request(self, request: Request, now: float) -> None:
        lifecycle, workers = self.hub.lifecycle, self.hub.workers
        age = now - request.stamps[RequestState.QUEUED]
        if request.timeout_s and age >= request.timeout_s:
            message = f"not done within {request.timeout_s:g} s"
            lifecycle.end_all(request, "cancelled", now, "timeout", message)
            return
        waiting = [s for s in request.sequences if s.is_waiting]
        has_hope = workers.is_loading or all(
            any(w.can_ever_run(s) for w in workers.ready.values()) for s in waiting
        )
        if has_hope:
            request.stranded_since = None
        elif request.stranded_since is None:
            request.stranded_since = now
        elif now - request.stranded_since >= STRANDED_S:
            message = (
                f"no engine that can run or continue this request came within {STRANDED_S:g} s"
            )
            lifecycle.end_all(request, "error", now, "engine_down", message)

    # -------------------------------------------------------------------------------------------- dispatch

    def dispatch(self, now: float) -> None:
        """Send waiting sequences to workers, best request first, as far as there is room."""
        hub = self.hub
        placement = Placement(hub.workers, hub.pool)
        for request in hub.queue:
            if placement.is_over or not self._dispatch_request(request, placement, now):
                break
        hub.drop_evicted()

    def _dispatch_request(self, request: Request, placement: Placement, now: float) -> bool:
        """False if a worker was lost on the way: the queue has changed, the round is over."""
        lifecycle = self.hub.lifecycle
        for sequence in [s for s in request.sequences if s.is_waiting]:
            placed = placement.place(sequence)
            if placed is None and request.reserved_id is None:
                continue  # no worker may ever run this one; its siblings may have one
            if placed is None:
                break
            worker, match = placed
            if not lifecycle.run(sequence, worker, match, now):
                lifecycle.lose_worker(worker, "it cannot be reached", now)
                return False
            placement.note_full(worker)
        return True

    # --------------------------------------------------------------------------------------------- publish

    def publish(self) -> None:
        """One frame for each client with news: new tokens and ends, and what it lacked."""
        hub = self.hub
        news: dict[bytes, list[TokenEvent]] = {}
        for sequence in hub.lifecycle.dirty.values():
            request = sequence.request
            client = hub.clients.get(request.client_id)
            if client is not None and client.requests.get(request.request_id) is request:
                news.setdefault(client.client_id, []).append(sequence.publish())
        hub.lifecycle.dirty.clear()
        for client_id, events in hub.clients.take_resends():
            news.setdefault(client_id, []).extend(events)
        for client_id, published in news.items():
            hub.to_client(client_id, Events(hub.epoch, tuple(published)))

    # ----------------------------------------------------------------------------------------------- drain

    def begin_drain(self) -> None:
        """Take nothing new; what runs or waits has the grace to end. Repeats do nothing."""
        if self._drain_until is None:
            hub = self.hub
            hub.is_draining = True
            self._drain_until = self._clock() + hub.settings.grace_s
            log.info("draining: %d requests, at most %g s", len(hub.live), hub.settings.grace_s)

    @property
    def is_over(self) -> bool:
        """Drained: nothing is left, or the grace has passed."""
        if self._drain_until is None:
            return False
        is_empty = all(request.is_internal for request in self.hub.live.values())
        return is_empty or self._clock() >= self._drain_until

    def end(self) -> None:
        """The grace has passed: what is left ends as cancelled, and clients hear of it."""
        now = self._clock()
        for request in list(self.hub.live.values()):
            message = "the engine was shut down"
            self.hub.lifecycle.end_all(request, "cancelled", now, "draining", message)
        self.publish()


class Wires(Protocol):
    """The sockets, as the loop sees them."""

    def drain(self, scheduler: Scheduler) -> None:
        """Wait a little for messages and hand over those that came; drops what is bad."""


def run(scheduler: Scheduler, wires: Wires, is_stopping: Callable[[], bool]) -> None:
    """Serve until asked to stop, and then until drained."""
    while not scheduler.is_over:
        wires.drain(scheduler)
        if is_stopping():
            scheduler.begin_drain()
        scheduler.tick()
    scheduler.end()
