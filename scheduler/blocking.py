"""The client library without async: a `Client` in a thread and loop of its own, for batch jobs and scripts.

Owns the thread and the window of `submit_stream`; everything on the wire is `client.py`'s. Knows no text.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from scheduler.client import Client
from scheduler.config import Settings
from scheduler.messages import FinishStats, PrefixReply, TokenEvent, TokenLogprob
from scheduler.stream import Rejection, RequestSpec, TokenStream

T = TypeVar("T")
Watch = Callable[[int, TokenEvent], int | None]

WINDOW = 32
_FINAL_CODES = ("invalid_request", "context_length_exceeded")  # asking again cannot help
_MIN_RETRY_S = 0.1


@dataclass(slots=True)
class SequenceResult:
    """One sequence, whole. `finish_reason` is stop, length, cancelled or error."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str = "stop"
    error_code: str = ""
    error_message: str = ""
    stats: FinishStats | None = None


@dataclass(slots=True)
class RequestResult:
    """What became of a request: its sequences, or why it was not admitted."""

    sequences: tuple[SequenceResult, ...] = ()
    rejection: Rejection | None = None


class BlockingStream:
    """The events of one request, for plain `for` loops."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], stream: TokenStream) -> None:
        self._run = run
        self._stream = stream

    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        event: TokenEvent | None = self._run(_next(self._stream))
        if event is None:
            raise StopIteration
        return event

    def finish(self, index: int, num_tokens: int) -> None:
        self._run(self._stream.finish(index, num_tokens))

    def cancel(self) -> None:
        self._run(self._stream.cancel())


class BlockingClient:
    """`Client`'s verbs without async. A context manager; may be shared by threads."""

    def __init__(self, settings: Settings) -> None:
        self._client = Client(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client", daemon=True)

    def __enter__(self) -> BlockingClient:
        self._thread.start()
        try:
            self._run(self._client.start())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        ex: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run(self._client.close())
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # KeyboardInterrupt among them: the coroutine must not go on alone
            future.cancel()
            raise

    @property
    def card(self) -> dict[str, Any] | None:
        return self._client.card

    @property
    def state(self) -> str:
        return self._client.state

    @property
    def reason(self) -> str:
        return self._client.reason

    @property
    def queue_depth(self) -> int:
        return self._client.queue_depth

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until a worker serves a model.

        Raises:
            Rejection: engine_down with the reason, not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while not self._client.is_ready:
            if time.monotonic() > deadline:
                raise Rejection("engine_down", f"{self._client.state}: {self._client.reason}")
            time.sleep(0.02)

    def submit(self, spec: RequestSpec) -> BlockingStream:
        """Submit and wait for admission.

        Raises:
            Rejection: not admitted.
        """
        return BlockingStream(self._run, self._run(self._client.submit(spec)))

    def stats(self, timeout_s: float = 1.0) -> str | None:
        return self._run(self._client.stats(timeout_s))

    def prefix(
        self, op: str, *, salt: str = "", name: str = "", tokens: Sequence[int] = (), loops: int = 0
    ) -> PrefixReply:
        return self._run(self._client.prefix(op, salt=salt, name=name, tokens=tokens, loops=loops))

    def submit_stream(
        self,
        specs: Iterable[RequestSpec],
        window: int = WINDOW,
        *,
        watch: Watch | None = None,
        give_up_s: float = 600.0,
    ) -> Iterator[tuple[int, RequestResult]]:
        """Keep `window` requests in flight; yield (position in `specs`, result) as they end.

        A request that is not admitted is tried again after the scheduler's `retry_after_s`, for `give_up_s` at most, unless
        trying again cannot help. `watch(position, event)` sees every event in the client's thread; a number that it returns
        finishes that sequence after so many tokens (a stop string was found).
        """
        todo = enumerate(specs)
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        running: dict[int, concurrent.futures.Future[RequestResult]] = {}
        try:
            while True:
                while len(running) < window and (following := next(todo, None)) is not None:
                    position, spec = following
                    job = self._run_to_end(position, spec, watch, give_up_s)
                    future = asyncio.run_coroutine_threadsafe(job, self._loop)
                    running[position] = future
                    future.add_done_callback(lambda _, position=position: ended.put(position))  # type: ignore[misc]
                if not running:
                    return
                position = ended.get()
                yield position, running.pop(position).result()
        finally:
            for future in running.values():
                future.cancel()

    async def _run_to_end(
        self, position: int, spec: RequestSpec, watch: Watch | None, give_up_s: float
    ) -> RequestResult:
        try:
            stream = await self._submit_until(spec, time.monotonic() + give_up_s)
        except Rejection as rejection:
            return RequestResult(rejection=rejection)
        sequences = tuple(SequenceResult() for _ in spec.sequences)
        try:
            async for event in stream:
                _collect(sequences[event.index], event)
                num_tokens = watch(position, event) if watch is not None else None
                if num_tokens is not None:
                    del sequences[event.index].tokens[num_tokens:]
                    del sequences[event.index].logprobs[num_tokens:]
                    await stream.finish(event.index, num_tokens)
                    sequences[event.index].finish_reason = "stop"
        finally:
            await stream.cancel()  # no effect at its end
        return RequestResult(sequences)

    async def _submit_until(self, spec: RequestSpec, deadline: float) -> TokenStream:
        while True:
            try:
                return await self._client.submit(spec)
            except Rejection as rejection:
                if rejection.code in _FINAL_CODES or time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(max(rejection.retry_after_s, _MIN_RETRY_S))


def _collect(sequence: SequenceResult, event: TokenEvent) -> None:
    sequence.tokens += event.tokens
    sequence.logprobs += event.logprobs
    sequence.prompt_logprobs += event.prompt_logprobs
    if event.finish_reason:
        sequence.finish_reason = event.finish_reason
        sequence.error_code, sequence.error_message = event.error_code, event.error_message
        sequence.stats = event.stats


async def _next(stream: TokenStream) -> TokenEvent | None:
    with contextlib.suppress(StopAsyncIteration):
        return await anext(stream)
    return None
