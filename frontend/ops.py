"""Endpoints for operators and tools: health, metrics, version, load, tokenizing, and the chat page."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import falcon
from falcon.asgi import Request, Response

from frontend.bodies import context, json_body
from frontend.conversation import read_conversation
from frontend.errors import ApiError, invalid
from frontend.fields import Fields
from frontend.metrics import HttpMetrics
from frontend.model import ServedModel
from frontend.requests import Conversation
from frontend.service import Service
from frontend.streaming import set_json
from frontend.text import TextModel, TextUnavailable

VERSION = "0.1.0"
OPEN_PATHS = frozenset(  # no API key is asked for
    ("/", "/healthz", "/health", "/ping", "/version", "/metrics", "/load")
)

_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """GET /healthz, /health, /ping: readiness. `ok`, or 503 with the reason in one line."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response) -> None:
        trouble = self._service.trouble()
        resp.content_type = "text/plain; charset=utf-8"
        resp.set_header("Cache-Control", "no-store")
        resp.text = "ok\n" if trouble is None else trouble[1].replace("\n", " ") + "\n"
        if trouble is not None:
            resp.status = falcon.HTTP_503


class Version:
    """GET /version."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response) -> None:
        set_json(resp, {"version": VERSION, "commit": self._service.settings.commit})


class Metrics:
    """GET /metrics: the scheduler's series, fetched over the wire, and this web server's own."""

    def __init__(self, service: Service, metrics: HttpMetrics) -> None:
        self._service = service
        self._metrics = metrics

    async def on_get(self, req: Request, resp: Response) -> None:
        exposition = await self._service.engine.stats()
        up = (
            "# HELP tinyloop_scheduler_up Whether the scheduler answered this scrape.\n"
            "# TYPE tinyloop_scheduler_up gauge\n"
            f"tinyloop_scheduler_up {int(exposition is not None)}\n"
        )
        resp.content_type = _EXPOSITION
        resp.text = (exposition or "") + up + self._metrics.exposition()


class Load:
    """GET /load: requests that this process serves just now, and the scheduler's queue."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response) -> None:
        queued = self._service.engine.queue_depth
        set_json(resp, {"server_load": len(self._service.live), "queue_depth": queued})


class Tokenize:
    """POST /tokenize: `prompt` or `messages` (vLLM), or `content` (llama.cpp), to ids."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        fields = Fields(await json_body(req, self._service))
        model = context(req, self._service).model
        model.resolve(fields.string("model"))
        await asyncio.to_thread(self._answer, resp, fields, model)  # a body may hold millions

    def _answer(self, resp: Response, fields: Fields, model: ServedModel) -> None:
        text = model.text
        given = [n for n in ("prompt", "content", "messages") if fields.raw(n) is not None]
        if len(given) != 1:
            raise invalid("prompt", "exactly one of 'prompt', 'content' and 'messages' is required")
        ids = self._encode(fields, text, given[0])
        pieces = {i: text.token_text(i) for i in set(ids)}
        body: dict[str, Any] = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": model.max_seq_len,
        }
        if fields.boolean("return_token_strs"):
            body["token_strs"] = [pieces[i] for i in ids]
        if fields.boolean("with_pieces"):
            body["tokens"] = [{"id": i, "piece": pieces[i]} for i in ids]
        set_json(resp, body)

    def _encode(self, fields: Fields, text: TextModel, name: str) -> list[int]:
        special = "add_special" if fields.raw("add_special") is not None else "add_special_tokens"
        adds_special = fields.boolean(special, name != "content")
        try:
            if name == "messages":
                chat: Conversation = read_conversation(fields)
                tools = list(chat.tools) if chat.tools is not None else None
                prompt = text.render_chat(chat.messages, tools, dict(chat.options))
                adds_special = False
            else:
                prompt = fields.string(name)
            return text.encode(prompt, adds_special)
        except TextUnavailable as ex:
            raise invalid(name, str(ex), "text_unavailable") from None


class Detokenize:
    """POST /detokenize: ids to text, under both names that clients know."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        fields = Fields(await json_body(req, self._service))
        model = context(req, self._service).model
        model.resolve(fields.string("model"))
        await asyncio.to_thread(self._answer, resp, fields, model)

    def _answer(self, resp: Response, fields: Fields, model: ServedModel) -> None:
        if fields.raw("tokens") is None:
            raise fields.wrong("tokens", "is required", "missing_required_parameter")
        ids = fields.token_ids("tokens", model.vocab)
        text = model.text.decode(ids, skip_special_tokens=False)
        set_json(resp, {"prompt": text, "content": text})


class TokenizerInfo:
    """GET /tokenizer_info, for evaluation tools that count on the server's own tokenizer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response) -> None:
        model = self._service.served_model()
        text, tokens = model.text, model.card["tokens"]
        if not text.has_tokenizer:
            raise ApiError(404, text.reason, code="no_tokenizer")
        named = {name: tokens.get(name) for name in ("bos", "pad")}
        named["eos"] = text.eos[0] if text.eos else None
        info = {f"{k}_token": None if i is None else text.token_text(i) for k, i in named.items()}
        set_json(
            resp,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **info,
                **{f"{k}_token_id": i for k, i in named.items()},
                "vocab_size": model.vocab,
                "model_max_length": model.max_seq_len,
                "chat_template": model.card.get("chat_template"),
            },
        )


class ChatPage:
    """GET /: one page to talk to the model in a browser."""

    def __init__(self) -> None:
        self._page = Path(__file__).with_name("chat.html").read_bytes()

    async def on_get(self, req: Request, resp: Response) -> None:
        resp.content_type = "text/html; charset=utf-8"
        resp.set_header("Cache-Control", "no-cache")
        resp.set_header("Content-Security-Policy", _PAGE_POLICY)
        resp.data = self._page
