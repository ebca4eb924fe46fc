"""Real sockets for tests: a short-lived stack directory, contexts that must end in time, and a hub that does as it is told.

`ScriptedHub` is the scheduler's end of the client wire. It grants topics, logs what arrives, answers hellos and beats while
`is_answering`, and leaves every other reply to the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from scheduler import transport
from scheduler.config import Settings
from scheduler.messages import (
    FROM_CLIENT,
    BadMessage,
    ClientBeat,
    Hello,
    Status,
    Submit,
    Welcome,
    decode,
    encode,
)

DIGEST = "d" * 64
CARD = msgpack.packb({"name": "toy", "digest": DIGEST})


@contextlib.contextmanager
def stack_directory(**overrides: Any) -> Iterator[Settings]:
    """Settings of a stack in a temporary directory whose socket paths are short."""
    directory = tempfile.mkdtemp(prefix="tl")
    try:
        yield Settings(run_dir=f"{directory}/run", **overrides)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def bounded_context(
    kind: type[zmq.Context[Any]] = zmq.Context, limit_s: float = 5.0
) -> Iterator[zmq.Context[Any]]:
    """A context that closes what it made with linger 0; one that does not end in time fails the test instead of hanging it."""
    context = kind()
    try:
        yield context
    finally:
        ending = threading.Thread(target=context.destroy, args=(0,), daemon=True)
        ending.start()
        ending.join(limit_s)
        assert not ending.is_alive(), "a socket was left open in another context or thread"


def run(scenario: Awaitable[None], limit_s: float = 30.0) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, limit_s)

    asyncio.run(bounded())


async def until(is_so: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait for a condition; fails when it does not come."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while not is_so():
        assert asyncio.get_running_loop().time() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


class ScriptedHub:
    """One life of a scheduler; an async context manager. A restart is a second one with another `epoch`."""

    def __init__(self, settings: Settings, epoch: int = 1) -> None:
        self.settings = settings
        self.epoch = epoch
        self.state, self.reason, self.digest, self.card = "ready", "", DIGEST, CARD
        self.queue_depth = 0
        self.is_answering = True
        self.client_id = b""
        self.hellos: list[Hello] = []
        self.beats: list[ClientBeat] = []
        self.submits: list[Submit] = []
        self.others: list[Any] = []
        self.num_garbage = 0
        self.on_message: Callable[[Any], None] | None = None

    async def __aenter__(self) -> ScriptedHub:
        wire = transport.Wire.from_settings(self.settings, "scheduler")
        self._lock = transport.lock_run_dir(Path(self.settings.run_dir))
        self._wire = wire
        self._context = zmq.asyncio.Context()
        self._submit = transport.bind_submit(self._context, wire)
        self._events = transport.bind_events(self._context, wire)
        self._tasks = [asyncio.create_task(t) for t in (self._grant(), self._receive())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(0)
        self._lock.close()
        for result in results:
            if not isinstance(result, asyncio.CancelledError):
                raise result

    async def _grant(self) -> None:
        while True:
            frame = await self._events.recv(copy=False)
            if transport.grant_subscription(self._wire, self._events, frame) is None:
                self.num_garbage += 1

    async def _receive(self) -> None:
        while True:
            frame = await self._submit.recv()
            try:
                message: Any = decode(frame, FROM_CLIENT)
            except BadMessage:
                self.num_garbage += 1
                continue
            await self._take(message)

    async def _take(self, message: Any) -> None:
        self.client_id = message.client_id
        match message:
            case Hello():
                self.hellos.append(message)
                if self.is_answering:
                    card = b"" if message.card_digest == self.digest else self.card
                    await self.send(Welcome(self.epoch, self.state, self.reason, self.digest, card))
            case ClientBeat():
                self.beats.append(message)
                if self.is_answering:
                    await self.send(
                        Status(self.epoch, self.state, self.reason, self.digest, self.queue_depth)
                    )
            case Submit():
                self.submits.append(message)
            case _:
                self.others.append(message)
        if self.on_message is not None:
            self.on_message(message)

    async def send(self, message: Any) -> None:
        await self.send_raw(encode(message))

    async def send_raw(self, *frames: bytes) -> None:
        await self._events.send_multipart([self.client_id, *frames])

    async def submitted(self, number: int = 1) -> Submit:
        """The `number`th submit."""
        await until(lambda: len(self.submits) >= number)
        return self.submits[number - 1]

    async def next_beat(self) -> ClientBeat:
        """A beat that is sent from now on."""
        seen = len(self.beats)
        await until(lambda: len(self.beats) > seen)
        return self.beats[seen]
