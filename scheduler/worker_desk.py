"""Answers every message of a worker. Called by the loop's drain; stale messages are counted and dropped here."""

from __future__ import annotations

import logging

from scheduler.hub import Hub
from scheduler.messages import (
    Abort,
    BadMessage,
    Register,
    Registered,
    SchedulerBeat,
    StepDone,
    WorkerBeat,
)
from scheduler.validate import check_held, check_register, check_step, check_worker_beat
from scheduler.workers import Worker

log = logging.getLogger(__name__)

FromWorker = Register | StepDone | WorkerBeat


class WorkerDesk:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def handle(self, worker_id: bytes, message: FromWorker, now: float) -> None:
        """`worker_id` is the sender by the socket's word; the message must not name another.

        Raises:
            BadMessage: a value is out of range, or the sender another.
        """
        if not isinstance(message, StepDone) and message.worker_id != worker_id:
            raise BadMessage("a worker that names another's id")
        match message:
            case Register():
                self._register(message, now)
            case StepDone():
                self._step(worker_id, message, now)
            case WorkerBeat():
                self._beat(message, now)

    def _register(self, message: Register, now: float) -> None:
        """Take a worker in, empty of requests: what it had by our books goes back to the queue."""
        hub, workers = self._hub, self._hub.workers
        check_register(message)
        reason = workers.refusal(message)
        if reason:
            log.warning("worker %s refused: %s", message.name, reason)
            hub.to_worker(message.worker_id, Registered(hub.epoch, reason))
            return
        old = workers.ready.get(message.worker_id)
        if old is not None:
            self._replace(old, now)
        worker = workers.register(message, now)
        hub.pool.has_coda = message.limits.has_coda
        hub.pool.default_mode = next(iter(message.limits.kv_modes), "")
        hub.to_worker(message.worker_id, Registered(hub.epoch))
        for held in message.prefixes:
            hub.pool.held(worker.worker_id, held, now)
        log.info(
            "worker %s registered: %s, %d rows, %d blocks, %d prefixes held",
            worker.name,
            message.device,
            message.limits.max_rows,
            message.limits.num_blocks,
            len(message.prefixes),
        )

    def _replace(self, old: Worker, now: float) -> None:
        """A worker that we know registers anew: a repeat, or a new connection. Ids are made per process, so no process died."""
        aborts = [Abort(self._hub.epoch, s.sequence_id, s.attempt) for s in old.in_flight.values()]
        self._hub.lifecycle.lose_worker(old, "it registered again", now, is_loss=False)
        for abort in aborts:
            self._hub.to_worker(old.worker_id, abort)

    def _step(self, worker_id: bytes, step: StepDone, now: float) -> None:
        hub = self._hub
        worker = hub.workers.ready.get(worker_id)
        if worker is None or step.epoch != hub.epoch:
            hub.metrics.stale.inc()
            return
        check_step(step)
        for held in step.held:
            check_held(held, worker.limits.vocab)
        hub.pool.dropped(worker_id, step.dropped)  # a step makes room first and stores then
        for held in step.held:
            hub.pool.held(worker_id, held, now)
        worker.stepped(step, now)
        for output in step.outputs:
            hub.lifecycle.take(worker, output, now)
        worker.compare(step, now)

    def _beat(self, beat: WorkerBeat, now: float) -> None:
        hub = self._hub
        check_worker_beat(beat)
        worker = hub.workers.beat(beat, now)
        if worker is None:
            if beat.state == "ready" and beat.epoch not in (0, hub.epoch):
                hub.to_worker(
                    beat.worker_id, SchedulerBeat(hub.epoch)
                )  # it serves a scheduler that is no more
        elif beat.series is not None and not hub.metrics.workers.update(
            worker.worker_id, worker.name, beat.series
        ):
            raise BadMessage("a beat with unusable series")
