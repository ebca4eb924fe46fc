"""`python -m scheduler`: settings, lock, sockets, signals, loop.

Owns the sockets and the drain boundary: whatever arrives is decoded, checked for its sender and handed to the core; what is bad is
counted, logged and dropped, so that nothing a peer sends ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from scheduler import transport
from scheduler.config import EXIT_BAD_SETTING, Settings
from scheduler.keys import Gate
from scheduler.loop import Scheduler, run
from scheduler.messages import (
    FROM_CLIENT,
    BadMessage,
    Register,
    StepDone,
    WorkerBeat,
    decode,
    encode,
)

log = logging.getLogger("scheduler")

POLL_MS = 50
MAX_DRAIN = (
    2000  # messages of one socket in one round, so that no peer keeps the loop from its other work
)


class Sockets:
    """The scheduler's four sockets. They belong to the thread that runs the loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], wire: transport.Wire) -> None:
        self._wire = wire
        self._submit = transport.bind_submit(context, wire)
        self._events = transport.bind_events(context, wire)
        self._workers = transport.bind_workers(context, wire)
        self._beats = transport.bind_beats(context, wire)
        self._poller = zmq.Poller()
        self._num_bad = 0
        for socket in (self._submit, self._events, self._workers, self._beats):
            self._poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        for socket in (self._submit, self._events, self._workers, self._beats):
            socket.close()

    def drain(self, scheduler: Scheduler) -> None:
        """Wait for messages, at most 50 ms, and hand over all that came."""
        ready = dict(self._poller.poll(POLL_MS))
        handlers: list[
            tuple[zmq.Socket[bytes], str, Callable[[Scheduler, list[zmq.Frame]], None]]
        ] = [
            (self._events, "events", self._take_subscription),
            (self._beats, "beats", self._take_beat),
            (self._workers, "workers", self._take_worker),
            (self._submit, "submit", self._take_client),
        ]
        for socket, name, take in handlers:
            if socket in ready:
                self._drain_socket(scheduler, socket, name, take)

    def _drain_socket(
        self,
        scheduler: Scheduler,
        socket: zmq.Socket[bytes],
        name: str,
        take: Callable[[Scheduler, list[zmq.Frame]], None],
    ) -> None:
        for _ in range(MAX_DRAIN):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            try:
                take(scheduler, frames)
            except BadMessage as ex:
                self._note_bad(scheduler, name, ex)
            except Exception as ex:  # a fault of ours in one message must not take the others down
                log.exception("a message on %s could not be handled", name)
                self._note_bad(scheduler, name, ex)

    def _note_bad(self, scheduler: Scheduler, name: str, ex: Exception) -> None:
        scheduler.hub.metrics.bad_messages.labels(name).inc()
        self._num_bad += 1
        if self._num_bad.bit_count() == 1:  # 1, 2, 4, 8, ...: a flood must not fill the log
            log.warning("dropped a bad message on %s (%d so far): %.200s", name, self._num_bad, ex)

    def _take_client(self, scheduler: Scheduler, frames: list[zmq.Frame]) -> None:
        message: Any = decode(_only(frames).bytes, FROM_CLIENT)
        if not transport.owns_id(self._wire, frames[0], message.client_id):
            raise BadMessage("a client that names another's id")
        scheduler.on_client(message)

    def _take_worker(self, scheduler: Scheduler, frames: list[zmq.Frame]) -> None:
        if len(frames) != 2:
            raise BadMessage(f"{len(frames)} frames")
        worker_id = frames[0].bytes
        if not transport.owns_id(self._wire, frames[1], worker_id):
            raise BadMessage("a worker that names another's id")
        message: Any = decode(frames[1].bytes, (Register, StepDone))
        scheduler.on_worker(worker_id, message)

    def _take_beat(self, scheduler: Scheduler, frames: list[zmq.Frame]) -> None:
        beat = decode(_only(frames).bytes, (WorkerBeat,))
        if not transport.owns_id(self._wire, frames[0], beat.worker_id):
            raise BadMessage("a worker that names another's id")
        scheduler.on_worker(beat.worker_id, beat)

    def _take_subscription(self, scheduler: Scheduler, frames: list[zmq.Frame]) -> None:
        if transport.grant_subscription(self._wire, self._events, _only(frames)) is None:
            raise BadMessage("a subscription to another's topic")

    def send_to_client(self, client_id: bytes, message: object) -> None:
        try:
            self._events.send_multipart([client_id, encode(message)], zmq.DONTWAIT)
        except zmq.Again:
            pass  # its next beat shows what it lacks

    def send_to_worker(self, worker_id: bytes, message: object) -> bool:
        try:
            self._workers.send_multipart([worker_id, encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as ex:  # gone (EHOSTUNREACH), or its queue is full (EAGAIN)
            log.debug("worker %s: %s", worker_id.hex(), ex)
            return False
        return True


def _only(frames: list[zmq.Frame]) -> zmq.Frame:
    if len(frames) != 1:
        raise BadMessage(f"{len(frames)} frames")
    return frames[0]


def main() -> int:
    settings = Settings.from_env_or_exit(os.environ)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        wire = transport.Wire.from_settings(settings, "scheduler")
        lock = transport.lock_run_dir(Path(settings.run_dir))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate = Gate(context, wire.keys.directory) if wire.keys is not None else None
        sockets = Sockets(context, wire)
    except transport.TransportError as ex:
        print(f"bad setting: {ex}", file=sys.stderr, flush=True)
        return EXIT_BAD_SETTING
    scheduler = Scheduler(settings, time.monotonic, sockets.send_to_client, sockets.send_to_worker)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    log.info("scheduler ready, epoch %d; %s", scheduler.hub.epoch, settings.summary())
    run(scheduler, sockets, stopping.is_set)
    sockets.close()
    if gate is not None:
        gate.close()
    context.term()
    lock.close()
    log.info("scheduler left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
