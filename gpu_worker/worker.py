"""One worker process: an engine between the scheduler's runs and its own steps.

Owns the DEALER, the registration and the loop `drain -> step -> report`, and in a thread of its own the heartbeat, which goes on
while the model loads and while a long step runs. Knows no tensors: the engine is a face (`Engine`), made by a function that is
called in here. The scheduler's word decides everything: a new connection, a new epoch or its silence empties the engine.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import zmq
import zmq.utils.monitor

from gpu_worker.artifact_errors import ArtifactError
from scheduler import transport
from scheduler.messages import (
    Abort,
    BadMessage,
    DropPrefixes,
    HeldPrefix,
    Register,
    Registered,
    Run,
    SchedulerBeat,
    SequenceOutput,
    StepDone,
    WorkerBeat,
    WorkerLimits,
    decode,
    encode,
)

log = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 3.0  # nothing heard for so long: what runs here has been given to others
IDLE_POLL_MS = 100
REGISTER_S = 1.0  # an unanswered Register is sent again
REFUSED_S = 5.0  # and a refused one
RETRY_FIRST_S, RETRY_LAST_S = 1.0, 15.0  # between attempts to load a faulty artifact

_FROM_SCHEDULER = (Registered, Run, Abort, DropPrefixes, SchedulerBeat)


class StepResult(Protocol):
    """What one engine step did."""

    @property
    def outputs(self) -> Sequence[SequenceOutput]: ...
    @property
    def held_prefixes(self) -> Sequence[HeldPrefix]: ...
    @property
    def dropped_prefixes(self) -> Sequence[bytes]: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def cached_positions(self) -> int: ...
    @property
    def core_passes(self) -> int: ...
    @property
    def step_ms(self) -> float: ...


class Engine(Protocol):
    """The engine's face. None of its methods raises for anything a peer can send."""

    @property
    def limits(self) -> WorkerLimits: ...
    @property
    def card(self) -> bytes: ...
    @property
    def free_rows(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    def add(self, run: Run) -> None: ...
    def abort(self, sequence_id: int, attempt: int) -> None: ...
    def drop_prefixes(self, prefix_ids: Iterable[bytes]) -> None: ...
    def held_prefixes(self) -> list[HeldPrefix]: ...
    def reset(self) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> StepResult: ...
    def series(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded engine and the device it runs on."""

    engine: Engine
    device: str


@dataclass(slots=True)
class Pulse:
    """What the heartbeat tells. Written by the loop alone, read by the beat thread; each field stands by itself."""

    epoch: int = 0
    state: str = "loading"
    reason: str = ""
    step_began_at: float | None = None
    series: dict[str, float] | None = None


class Heart(threading.Thread):
    """Beats until stopped, from a socket of its own that lives in this thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        wire: transport.Wire,
        worker_id: bytes,
        name: str,
        pulse: Pulse,
    ) -> None:
        super().__init__(name="beat", daemon=True)
        self._context, self._wire = context, wire
        self._worker_id, self._worker_name = worker_id, name
        self._pulse = pulse
        self._stopping = threading.Event()

    def run(self) -> None:
        socket = transport.connect_beats(self._context, self._wire)
        while not self._stopping.is_set():
            transport.send_now(socket, encode(self._beat()))
            # a first beat that found no connection yet should not wait for half a second
            self._stopping.wait(BEAT_S if socket.poll(0, zmq.POLLOUT) else BEAT_S / 10)
        if self._pulse.state == "failed":
            transport.send_now(socket, encode(self._beat()))  # the last word: why it ended
        socket.close()

    def _beat(self) -> WorkerBeat:
        pulse = self._pulse
        began = pulse.step_began_at
        age_s = 0.0 if began is None else time.monotonic() - began
        return WorkerBeat(
            self._worker_id,
            self._worker_name,
            pulse.epoch,
            pulse.state,
            pulse.reason,
            age_s,
            pulse.series,
        )

    def stop(self) -> None:
        self._stopping.set()
        self.join(2.0)


class Worker:
    """A worker of one stack. `run` belongs to one thread; `stop` may be called from any, or from a signal handler.

    Args:
        wire: addresses and keys, of role worker.
        name: for people and metric labels.
        load: makes the engine. An `ArtifactError` is reported and tried again, with growing pauses; anything else ends the worker.
    """

    def __init__(self, wire: transport.Wire, name: str, load: Callable[[], Loaded]) -> None:
        self.worker_id = transport.new_peer_id(wire.keys)
        self.name = name
        self.num_bad_frames = 0
        self.num_stale = 0
        self._wire = wire
        self._load = load
        self._pulse = Pulse()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Finish the step in progress and leave."""
        self._stopping.set()

    def run(self) -> None:
        """Load, serve, until stopped. Raises what the engine raises; the scheduler then moves its requests."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        heart = Heart(context, self._wire, self.worker_id, self.name, self._pulse)
        heart.start()
        try:
            loaded = self._load_until_it_works()
            if loaded is not None:
                _Service(self, context, loaded).serve()
        except Exception as ex:
            self._pulse.state = "failed"
            self._pulse.reason = f"{type(ex).__name__}: {' '.join(str(ex).split())}"[:500]
            raise
        finally:
            heart.stop()
            context.destroy(transport.CLOSE_LINGER_MS)

    def _load_until_it_works(self) -> Loaded | None:
        """None if stopped before. The state stays `failed`, with the last attempt's line, until an attempt succeeds."""
        pause_s = RETRY_FIRST_S
        while not self._stopping.is_set():
            try:
                return self._load()
            except ArtifactError as ex:
                log.error("%s", ex)
                self._pulse.state, self._pulse.reason = "failed", str(ex)
            gc.collect()  # what a failed attempt holds in circles, the device's memory above all
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, RETRY_LAST_S)
        return None


class _Service:
    """The life of a worker after loading: registered or not, and the loop."""

    def __init__(
        self, worker: Worker, context: zmq.Context[zmq.Socket[bytes]], loaded: Loaded
    ) -> None:
        self._worker = worker
        self._loaded = loaded
        self._engine = loaded.engine
        self._card: dict[str, Any] = msgpack.unpackb(loaded.engine.card)
        self._pulse = worker._pulse
        self._is_stopping = worker._stopping.is_set
        self._epoch = 0
        self._is_connected = False
        self._is_registered = False
        self._register_at = 0.0
        self._heard_at = time.monotonic()
        self._runs_seen = 0
        self._series_at = 0.0  # when the numbers of the beats are due again
        self._has_news = False  # credits or prefixes may have changed without a step
        self._socket, self._monitor = transport.connect_workers(
            context, worker._wire, worker.worker_id
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def serve(self) -> None:
        while not self._is_stopping():
            self._drain()
            self._keep_registered()
            self._step()
        log.info("worker %s leaves", self._worker.name)

    # ------------------------------------------------------------------------------------------------ registration

    def _keep_registered(self) -> None:
        now = time.monotonic()
        if self._is_registered and now - self._heard_at > SILENCE_S:
            self._leave(f"the scheduler was silent for {now - self._heard_at:.1f} s")
        if self._is_connected and not self._is_registered and now >= self._register_at:
            self._register_at = now + REGISTER_S
            engine, card = self._engine, self._card
            message = Register(
                self._worker.worker_id,
                self._worker.name,
                self._loaded.device,
                card["digest"],
                card["numerics_id"],
                engine.limits,
                engine.card,
                tuple(engine.held_prefixes()),
            )
            self._send(message)

    def _registered(self, message: Registered) -> None:
        """From here on the scheduler thinks this worker empty, so it is made so; repeated answers included."""
        self._empty()
        self._epoch = self._pulse.epoch = message.epoch
        self._is_registered = not message.reason
        if message.reason:
            log.error("the scheduler refused this worker: %s", message.reason)
            self._pulse.state, self._pulse.reason = "failed", message.reason
            self._register_at = time.monotonic() + REFUSED_S
        else:
            log.info("worker %s registered, epoch %d", self._worker.name, message.epoch)
            self._pulse.state, self._pulse.reason = "ready", ""

    def _leave(self, why: str) -> None:
        """Whatever runs here belongs to others by now; register again at once."""
        if self._is_registered:
            log.warning("%s: %s; registering again", self._worker.name, why)
        self._empty()
        self._is_registered = False
        self._register_at = 0.0

    def _empty(self) -> None:
        self._engine.reset()
        self._runs_seen = 0
        self._has_news = False

    # ------------------------------------------------------------------------------------------------ receive

    def _drain(self) -> None:
        """Take everything that has arrived; wait for it only when there is nothing to do."""
        ready = dict(self._poller.poll(0 if self._engine.has_work() else IDLE_POLL_MS))
        if self._monitor in ready:
            self._note_connection(zmq.utils.monitor.recv_monitor_message(self._monitor)["event"])
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise BadMessage(f"{len(frames)} frames")
                message = decode(frames[0], _FROM_SCHEDULER)
            except BadMessage as ex:
                self._worker.num_bad_frames += 1
                if self._worker.num_bad_frames.bit_count() == 1:  # 1, 2, 4, 8, ...
                    log.warning("dropped a bad frame (%d): %s", self._worker.num_bad_frames, ex)
                continue
            self._handle(message)

    def _note_connection(self, event: int) -> None:
        """A new connection is a new start: frames may have been lost with the old one, and its scheduler may be gone."""
        self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._is_connected:
            self._leave("a new connection to the scheduler")

    def _handle(self, message: Any) -> None:
        if isinstance(message, Registered):
            self._heard_at = time.monotonic()
            self._registered(message)
            return
        if (
            isinstance(message, SchedulerBeat)
            and self._is_registered
            and message.epoch != self._epoch
        ):
            self._leave(f"a new scheduler, epoch {message.epoch}")
            return
        if not self._is_registered or message.epoch != self._epoch:
            self._worker.num_stale += 1
            return
        self._heard_at = time.monotonic()
        match message:
            case Run():
                self._runs_seen += 1
                self._engine.add(message)
                self._has_news = True
            case Abort():
                self._engine.abort(message.sequence_id, message.attempt)
                self._has_news = True
            case DropPrefixes():
                self._engine.drop_prefixes(message.prefix_ids)
                self._has_news = True

    # ------------------------------------------------------------------------------------------------ step

    def _step(self) -> None:
        """One engine step and its report; without work, a report of the credits alone if they may have changed."""
        engine = self._engine
        if not engine.has_work() and not self._has_news:
            self._pulse.series = engine.series()
            return
        self._has_news = False
        self._pulse.step_began_at = time.monotonic()
        result = engine.step()
        self._pulse.step_began_at = None
        self._note_series()
        self._send(
            StepDone(
                self._epoch,
                tuple(result.outputs),
                self._runs_seen,
                engine.free_rows,
                engine.free_blocks,
                result.num_rows,
                result.cached_positions,
                result.core_passes,
                result.step_ms,
                tuple(result.held_prefixes),
                tuple(result.dropped_prefixes),
            )
        )

    def _note_series(self) -> None:
        """Brings the numbers of the next beat up to date, as often as beats need it."""
        now = time.monotonic()
        if now >= self._series_at:
            self._series_at = now + BEAT_S / 4
            self._pulse.series = self._engine.series()

    def _send(self, message: Any) -> None:
        try:
            self._socket.send(encode(message))
        except zmq.Again:
            self._leave("the scheduler takes nothing")
