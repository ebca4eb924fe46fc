"""The outermost layer of the web application: what holds for every HTTP exchange, whatever server runs us.

A client that leaves ends its handler at once (Gunicorn cancels it, Uvicorn does not: here both do), HEAD is GET
without the body, and each exchange is counted and timed by route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from frontend.metrics import HttpMetrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]

_CLIENT_LEFT = 499  # as proxies log it; never sent


class Edge:
    """An ASGI application around another."""

    def __init__(
        self, app: App, metrics: HttpMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # none is served; closed before it is accepted: 403
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        started = self._clock()
        with self._metrics.in_progress():
            try:
                await exchange.run(self.app)
            finally:
                self._metrics.observe(
                    exchange.route, scope["method"], exchange.status, self._clock() - started
                )


class _Exchange:
    """One request and its answer. `status` is the one sent, 499 if the client left first."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.status = 500
        self._is_head = scope["method"] == "HEAD"
        self._scope = {**scope, "method": "GET"} if self._is_head else dict(scope)
        self._receive = receive
        self._send = send
        self._handler = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._has_left = False

    @property
    def route(self) -> str:
        return self._scope.get("tinyloop.route") or "none"

    async def run(self, app: App) -> None:
        try:
            await app(self._scope, self._take, self._give)
        except asyncio.CancelledError:
            self.status = _CLIENT_LEFT
            if not self._has_left:
                raise  # not ours: the server is closing, or noticed it first
        finally:
            if self._watcher is not None:
                self._watcher.cancel()

    async def _take(self) -> Message:
        message = await self._receive()
        is_whole = message["type"] == "http.request" and not message.get("more_body", False)
        if is_whole and self._scope["method"] == "POST" and self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        return message

    async def _watch(self) -> None:
        """After the whole body only the disconnect can still come."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and self._handler is not None:
            self._has_left = True
            self._handler.cancel()

    async def _give(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self._is_head:
            message = {**message, "body": b""}
        elif not message.get("more_body", False) and self._watcher is not None:
            self._watcher.cancel()  # the answer is complete: a disconnect is now the normal end
        await self._send(message)
