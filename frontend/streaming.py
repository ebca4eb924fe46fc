"""Answers of generating routes: one JSON body, or server-sent events as the text comes.

Both are made from the same deltas by a `Shape`, which knows how a family words them. Before the first byte every
fault is an HTTP error; after it, an error frame. A reader who leaves ends the iteration, and that cancels the request.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from falcon.asgi import Response

from frontend.errors import ApiError
from frontend.generation import Delta, Generation
from frontend.requests import Asked
from frontend.service import Service

_log = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Shape(Protocol):
    """How one family of endpoints words a generation."""

    def whole(self) -> dict[str, Any]:
        """The body of a finished generation."""
        ...

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The frames for one delta; may be none."""
        ...

    def last(self) -> list[dict[str, Any]]:
        """The frames after all deltas."""
        ...

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """The frames that end a stream which has failed."""
        ...


async def answer(
    service: Service, resp: Response, asked: Asked, make_shape: Callable[[Generation], Shape]
) -> None:
    """Runs `asked` and fills `resp`: whole, or with a stream that runs while it is sent.

    Raises:
        ApiError: refused, or (whole answers) failed.
    """
    generation = await service.generate(asked)
    shape = make_shape(generation)
    if asked.stream:
        resp.content_type = "text/event-stream; charset=utf-8"
        for name, value in _HEADERS.items():
            resp.set_header(name, value)
        resp.stream = EventStream(service, generation, shape)
        return
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for _ in deltas:
                pass
    finally:
        service.live.discard(generation)
    set_json(resp, shape.whole())


class EventStream:
    """The frames of one stream, for Falcon: it iterates, and calls `close` however that ended."""

    def __init__(self, service: Service, generation: Generation, shape: Shape) -> None:
        self._service = service
        self._generation = generation
        self._frames = self._run(generation, shape)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._frames)

    async def close(self) -> None:
        await self._frames.aclose()
        self._service.live.discard(self._generation)

    async def _run(self, generation: Generation, shape: Shape) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    frames = _KEEP_ALIVE if delta is None else _join(shape.chunks(delta))
                    if frames:
                        yield frames
            yield _join(shape.last())
        except ApiError as error:
            yield _join(shape.failed(error))
        except Exception:
            _log.exception("%s: the stream failed", generation.request.asked.label)
            bug = ApiError(500, "internal error", code="internal_error")
            yield _join(shape.failed(bug))
        yield _DONE


def _join(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join([b"data: " + dumps(chunk) + b"\n\n" for chunk in chunks])


def set_json(resp: Response, body: Any) -> None:
    resp.content_type = "application/json; charset=utf-8"
    resp.data = dumps(body)


def dumps(body: Any) -> bytes:
    """Compact UTF-8 JSON; a NaN or infinity in it is a bug of ours and raises ValueError."""
    return _encode(body).encode()


def finite(value: float) -> float:
    """A log-probability that JSON can hold; OpenAI writes -9999 for "as good as impossible"."""
    return value if math.isfinite(value) else -9999.0


def rate(count: float, seconds: float) -> float | None:
    """Per second; None where there is no time to divide by."""
    return count / seconds if seconds > 0 else None
