"""What all routes of one web process share: the client of the scheduler, the served model, the requests in flight.

Decides whether a request may start at all; everything else about it is `generation.py`'s. Made in the process that
serves (after any fork) and free of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from frontend.api_keys import digest, read_keys
from frontend.errors import ApiError, unavailable
from frontend.generation import Generation
from frontend.model import ServedModel
from frontend.requests import Asked, encode
from scheduler.client import Client, RequestSpec, TokenStream
from scheduler.config import Settings
from scheduler.messages import PrefixReply

_log = logging.getLogger(__name__)

_STATE_CODES = {"failed": "model_failed", "draining": "draining", "engine_down": "engine_down"}


class Engine(Protocol):
    """The client of the scheduler, as this process uses it."""

    card: dict[str, Any] | None
    queue_depth: int
    on_card: Callable[[dict[str, Any]], None] | None

    @property
    def is_ready(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def submit(self, spec: RequestSpec) -> TokenStream: ...
    async def stats(self, timeout_s: float = 1.0) -> str | None: ...
    async def prefix(
        self,
        op: str,
        *,
        salt: str = "",
        name: str = "",
        tokens: tuple[int, ...] = (),
        loops: int = 0,
    ) -> PrefixReply: ...


class Service:
    """One web process's state. `engine` exists from `start` to `close`."""

    def __init__(
        self, settings: Settings, make_engine: Callable[[Settings], Engine] = Client
    ) -> None:
        self.settings = settings
        self.model: ServedModel | None = None
        self.keys = read_keys(settings.api_keys_file)
        self.live: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._make_engine = make_engine
        self._num_encoding = 0
        self._lame = settings.path_in_run_dir("lame")
        self._loading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens the wire; never waits for the scheduler."""
        self.engine = self._make_engine(self.settings)
        self.engine.on_card = self._take_card
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.close()
        if self._loading is not None:
            self._loading.cancel()

    def trouble(self) -> tuple[str, str] | None:
        """Why no request can be served now, as (code, one line for people); None if all is well."""
        if self._lame.exists():
            return "draining", "this server is shutting down"
        if not self.engine.is_ready:
            state, reason = self.engine.state, self.engine.reason
            if state == "ready":
                state, reason = "loading", "the model card"
            return _STATE_CODES.get(state, "not_loaded"), f"{state}: {reason}" if reason else state
        if self.model is None:
            return "not_loaded", "loading: the tokenizer"
        return None

    def served_model(self) -> ServedModel:
        """The model to validate against; it stays known while the engine is down.

        Raises:
            ApiError: 503, no model has been announced yet.
        """
        if self.model is None:
            code, reason = self.trouble() or ("not_loaded", "loading")
            raise unavailable(code, f"no model is loaded ({reason})")
        return self.model

    async def generate(self, asked: Asked) -> Generation:
        """Encodes and submits; returns once the scheduler has admitted it.

        Raises:
            ApiError: 400 or 503.
        """
        model = self.served_model()
        if self._lame.exists():
            raise unavailable("draining", "this server is shutting down", 2.0)
        if len(self.live) + self._num_encoding >= self.settings.max_streams:
            raise unavailable("too_many_streams", "this process serves as many requests as it may")
        self._num_encoding += 1
        try:
            request = await encode(asked, model, self.settings.request_timeout_s)
        finally:
            self._num_encoding -= 1
        generation = Generation(request, model.text)
        self.live.add(generation)
        try:
            await generation.start(self.engine.submit)
        except BaseException:
            self.live.discard(generation)
            raise
        return generation

    def tenant_salt(self, authorization: str | None) -> str:
        """The prefix-pool salt of a request's API key; "" where no keys are set.

        Raises:
            ApiError: 401.
        """
        if not self.keys:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        salt = self.keys.get(digest(key.strip())) if scheme.lower() == "bearer" else None
        if salt is None:
            raise ApiError(
                401,
                "a valid API key is required: Authorization: Bearer KEY",
                code="invalid_api_key",
                kind="authentication_error",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return salt

    def _take_card(self, card: dict[str, Any]) -> None:
        """A model was announced: make its text model, off the loop. Until then the old one, if any, goes on."""
        if self._loading is not None:
            self._loading.cancel()
        self._loading = asyncio.get_running_loop().create_task(self._load(card))

    async def _load(self, card: dict[str, Any]) -> None:
        try:
            self.model = await asyncio.to_thread(
                ServedModel.from_card, card, self.settings.model_aliases
            )
        except Exception:
            _log.exception("the model card cannot be used")
            return
        _log.info("serving %s", self.model.name)
