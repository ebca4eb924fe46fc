"""The client library's asyncio core: one `Client` per process, used by the frontend and, through `blocking`, by batch jobs.

Owns the process's id, its PUSH and SUB, the hello, the heartbeat and every request in flight. One rule makes delivery exact:
each beat lists what is held, the scheduler resends what is missing, and what it calls unknown is submitted again. Never waits on
a send: whatever does not leave at once is repeated by the next beat or by its own timer. Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from scheduler import transport
from scheduler.config import Settings
from scheduler.messages import (
    Accepted,
    BadMessage,
    Cancel,
    ClientBeat,
    Events,
    Hello,
    PrefixCommand,
    PrefixReply,
    Rejected,
    StatsQuery,
    StatsReply,
    Status,
    Tokens,
    Unknown,
    Welcome,
    decode,
    encode,
)
from scheduler.stream import Delivery, Rejection, RequestSpec, TokenStream

__all__ = ["Client", "Rejection", "RequestSpec", "TokenStream"]

log = logging.getLogger(__name__)

BEAT_S = 0.25
SILENCE_S = 3.0  # nothing heard for so long: the engine counts as down
REPEAT_S = 0.25  # an unanswered submit is sent again
REASK_S = 0.05  # a gap is asked for at once, but not again with every frame until it is closed
ANSWER_S = 2.0  # and given up after this
FINISH_S = 2.0  # a finished sequence's last event is awaited for so long
GIVE_UP_S = 30.0  # a running request whose scheduler stays away, or stays without its model, fails after this
REGISTER_S = 60.0  # a prefix must be prefilled by a worker

_FROM_SCHEDULER = (Welcome, Status, Accepted, Rejected, Unknown, Events, StatsReply, PrefixReply)


class Client:
    """One client process of a scheduler. All methods belong to the loop that ran `start`.

    Args:
        settings: addresses and keys.
        clock: seconds, monotonic.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_card: Callable[[dict[str, Any]], None] | None = None
        self.card: dict[str, Any] | None = None
        self.card_digest = ""
        self.queue_depth = 0
        self.num_bad_frames = 0
        self._settings = settings
        self._clock = clock
        self._status: tuple[str, str, str] | None = (
            None  # state, reason, digest: the scheduler's last word
        )
        self._epoch = 0
        self._welcomed_epoch: int | None = None
        self._heard_at = clock()
        self._asked_at = 0.0
        self._live: dict[int, Delivery] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the sockets and start to listen and beat. Call it after any fork; it never waits for the scheduler.

        Raises:
            TransportError: the addresses or keys cannot be used.
        """
        wire = transport.Wire.from_settings(self._settings, "client")
        self._loop = asyncio.get_running_loop()
        self.client_id = transport.new_peer_id(wire.keys)
        self._context = zmq.asyncio.Context()
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._submit = transport.connect_submit(plain, wire)
        self._events = transport.connect_events(self._context, wire, self.client_id)
        self._submit_addr = wire.submit
        self._tasks = [self._spawn(self._pump()), self._spawn(self._beat())]

    async def close(self) -> None:
        """Cancel what is live, as far as it can be sent, and close. Takes at most about 0.3 s; idempotent."""
        if not self._tasks:
            return
        for delivery in list(self._live.values()):
            self.cancel_request(delivery)
        self._send(ClientBeat(self.client_id))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for future in self._queries.values():
            future.cancel()
        self._events.close(0)
        self._submit.close()
        await asyncio.to_thread(self._context.term)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        task.add_done_callback(_log_failure)
        return task

    @property
    def state(self) -> str:
        """connecting, loading, ready, failed, draining or engine_down."""
        if self._status is None:
            return "connecting"
        return "engine_down" if self._is_silent() else self._status[0]

    @property
    def reason(self) -> str:
        """One line for people; "" when ready."""
        if self._status is None:
            return f"waiting for the scheduler at {self._submit_addr}"
        if self._is_silent():
            return f"no answer from the scheduler for {self._clock() - self._heard_at:.0f} s"
        return self._status[1]

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and self.card is not None

    def _is_silent(self) -> bool:
        return self._clock() - self._heard_at > SILENCE_S

    # ------------------------------------------------------------------------------------------------ verbs

    async def submit(self, spec: RequestSpec) -> TokenStream:
        """Submit a request and wait for its admission.

        Raises:
            Rejection: not admitted; code engine_down if nothing answered within 2 s.
        """
        delivery = Delivery(next(self._ids), spec, self._clock())
        self._live[delivery.request_id] = delivery
        try:
            for _ in range(round(ANSWER_S / REPEAT_S)):
                self._send(delivery.submit_message(self.client_id, self._clock(), is_resumed=False))
                await asyncio.wait({delivery.answer}, timeout=REPEAT_S)
                if delivery.answer.done():
                    delivery.answer.result()  # raises the Rejection
                    break
            else:
                raise Rejection(
                    "engine_down", f"the scheduler did not answer within {ANSWER_S:g} s", 1.0
                )
        except BaseException:
            self.cancel_request(delivery)
            raise
        stream = TokenStream(self, delivery)
        weakref.finalize(stream, self._abandon, delivery).atexit = False
        return stream

    async def stats(self, timeout_s: float = 1.0) -> str | None:
        """The scheduler's Prometheus exposition; None if it does not answer in time."""
        query_id = next(self._ids)
        reply = await self._ask(StatsQuery(self.client_id, query_id), query_id, timeout_s)
        return None if reply is None else str(reply.exposition)

    async def prefix(
        self, op: str, *, salt: str = "", name: str = "", tokens: Sequence[int] = (), loops: int = 0
    ) -> PrefixReply:
        """Register, list or delete prefix-pool entries.

        Raises:
            Rejection: engine_down, no answer in time.
        """
        query_id = next(self._ids)
        command = PrefixCommand(self.client_id, query_id, op, salt, name, Tokens(tokens), loops)
        timeout_s = REGISTER_S if op == "register" else ANSWER_S
        reply: PrefixReply | None = await self._ask(command, query_id, timeout_s)
        if reply is None:
            raise Rejection(
                "engine_down", f"the scheduler did not answer within {timeout_s:g} s", 1.0
            )
        return reply

    async def _ask(self, message: Any, query_id: int, timeout_s: float) -> Any:
        """The reply, None if none came in time. Asked again of a scheduler that has started meanwhile."""
        future = self._queries[query_id] = self._loop.create_future()
        asked_epoch: int | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while not future.done():
                    if asked_epoch != self._epoch and self._send(message):
                        asked_epoch = self._epoch
                    await asyncio.wait({future}, timeout=REPEAT_S)
                return future.result()
        except TimeoutError:
            return None
        finally:
            del self._queries[query_id]

    def finish_sequence(self, delivery: Delivery, index: int, num_tokens: int) -> None:
        delivery.finish(index, num_tokens, self._clock() + FINISH_S)
        self._send_finishes(delivery)

    def cancel_request(self, delivery: Delivery) -> None:
        if self._live.pop(delivery.request_id, None) is not None:
            self._send(Cancel(self.client_id, delivery.request_id))
        delivery.events.clear()
        delivery.close()

    def _abandon(self, delivery: Delivery) -> None:
        """The caller let go of a stream; collection may run in any thread."""
        if not delivery.is_over:
            with contextlib.suppress(RuntimeError):  # the loop has closed, and with it the client
                self._loop.call_soon_threadsafe(self.cancel_request, delivery)

    # ------------------------------------------------------------------------------------------------ beat

    async def _beat(self) -> None:
        while True:
            self._tick()
            await asyncio.sleep(BEAT_S)

    def _tick(self) -> None:
        now = self._clock()
        for delivery in list(self._live.values()):
            delivery.expire_finishes(now)
            lost_at = self._heard_at if delivery.unknown_since is None else delivery.unknown_since
            if delivery.answer.done() and now - lost_at > GIVE_UP_S:
                delivery.fail("engine_down", f"the engine was away for more than {GIVE_UP_S:g} s")
            self._forget_if_over(delivery)
            self._send_finishes(delivery)
        if self._welcomed_epoch != self._epoch or self._needs_card():
            self._send(Hello(self.client_id, card_digest=self.card_digest))
        self._send_beat()

    def _needs_card(self) -> bool:
        return self._status is None or self._status[2] not in ("", self.card_digest)

    def _send_beat(self) -> None:
        self._send(ClientBeat(self.client_id, tuple(d.listing() for d in self._live.values())))

    def _send_finishes(self, delivery: Delivery, *, with_ended: bool = False) -> None:
        for message in delivery.finish_messages(self.client_id, with_ended=with_ended):
            self._send(message)

    def _send(self, message: Any) -> bool:
        return not self._submit.closed and transport.send_now(self._submit, encode(message))

    # ------------------------------------------------------------------------------------------------ pump

    async def _pump(self) -> None:
        while True:
            frames = await self._events.recv_multipart()
            try:
                if len(frames) != 2 or frames[0] != self.client_id:
                    raise BadMessage(f"{len(frames)} frames, or another's topic")
                message = decode(frames[1], _FROM_SCHEDULER)
            except BadMessage as ex:
                self.num_bad_frames += 1
                if self.num_bad_frames.bit_count() == 1:  # 1, 2, 4, 8, ...
                    log.warning("dropped a bad frame (%d so far): %s", self.num_bad_frames, ex)
                continue
            self._heard_at = self._clock()
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case Events():
                self._note_epoch(message.epoch)
                self._take_events(message)
            case Status():
                self._note_epoch(message.epoch)
                self.queue_depth = message.queue_depth
                self._status = (message.state, message.reason, message.card_digest)
            case Welcome():
                self._take_welcome(message)
            case Accepted():
                if delivery := self._live.get(message.request_id):
                    delivery.accept(self.card_digest)
            case Rejected():
                self._take_rejection(message)
            case Unknown():
                self._note_epoch(message.epoch)
                for request_id in message.request_ids:
                    if delivery := self._live.get(request_id):
                        self._resubmit(delivery)
            case StatsReply() | PrefixReply():
                future = self._queries.get(message.query_id)
                if future is not None and not future.done():
                    future.set_result(message)

    def _take_events(self, message: Events) -> None:
        has_gap = False
        for event in message.events:
            if delivery := self._live.get(event.request_id):
                delivery.accept(self.card_digest)
                has_gap |= not delivery.take(event)
                self._forget_if_over(delivery)
        if has_gap and self._clock() - self._asked_at >= REASK_S:
            self._asked_at = self._clock()
            self._send_beat()  # asks for what is missing; if this is lost too, the next beat asks again

    def _take_welcome(self, message: Welcome) -> None:
        self._epoch = self._welcomed_epoch = message.epoch
        self._status = (message.state, message.reason, message.card_digest)
        if not message.card or message.card_digest == self.card_digest:
            return
        try:
            card = msgpack.unpackb(message.card, strict_map_key=True)
        except (ValueError, TypeError, msgpack.UnpackException) as ex:
            log.error("the model card cannot be read: %s", ex)
            return
        if not isinstance(card, dict):
            log.error("the model card is not a map")
            return
        self.card, self.card_digest = card, message.card_digest
        log.info("model card %s", self.card_digest[:12])
        if self.on_card is not None:
            try:
                self.on_card(card)
            except Exception:  # the caller's fault must not end the pump, and with it every stream
                log.exception("on_card failed")

    def _take_rejection(self, message: Rejected) -> None:
        delivery = self._live.get(message.request_id)
        if delivery is None:
            return
        if not delivery.answer.done():
            rejection = Rejection(message.code, message.message, message.retry_after_s)
            del self._live[message.request_id]  # nothing to cancel
            delivery.answer.set_exception(rejection)
            return
        delivery.fail(message.code, message.message)
        self._forget_if_over(delivery)

    def _resubmit(self, delivery: Delivery) -> None:
        """A scheduler that has started since knows nothing of a running request: give it the tokens held.

        Only to the same model; while the new scheduler has none yet, the next beat's `Unknown` brings us here again.
        """
        if not delivery.answer.done():
            return  # `submit` repeats it by itself
        if delivery.unknown_since is None:
            delivery.unknown_since = self._clock()
        digest = self._status[2] if self._status and self._welcomed_epoch == self._epoch else ""
        if digest and delivery.card_digest in ("", digest):
            log.info("request %d %s: submitted again", delivery.request_id, delivery.spec.label)
            self._send(delivery.submit_message(self.client_id, self._clock(), is_resumed=True))
            self._send_finishes(delivery, with_ended=True)
        elif digest:
            delivery.fail("engine_down", "the engine came back with another model")
            self._forget_if_over(delivery)

    def _note_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            log.info("scheduler epoch %d", epoch)
            self._epoch = epoch
            self._send(Hello(self.client_id, card_digest=self.card_digest))

    def _forget_if_over(self, delivery: Delivery) -> None:
        """The next beat no longer lists it, which acknowledges its end."""
        if delivery.is_over:
            self._live.pop(delivery.request_id, None)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("client task ended", exc_info=task.exception())
