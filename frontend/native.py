"""TinyLoop's own endpoints: /generate, its speculative kinds, and the prefix pool."""

from __future__ import annotations

from typing import Any

import falcon
from falcon.asgi import Request, Response

from frontend import schemas
from frontend.bodies import context, json_body
from frontend.errors import ApiError, from_rejection
from frontend.fields import Fields
from frontend.generation import Delta, Generation
from frontend.requests import encode
from frontend.service import Service
from frontend.streaming import answer, finite, rate, set_json
from scheduler.client import Rejection
from scheduler.messages import PrefixInfo, PrefixReply

_PREFIX_STATUS = {"not_found": 404, "exists": 409, "pool_full": 409, "engine_down": 503}


class NativeShape:
    """`{"id", "text", "tokens", ..., "usage", "stats"}`; streamed as `{"text", "tokens"}` and one last frame with the rest."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._choice = generation.choices[0]

    def whole(self) -> dict[str, Any]:
        choice = self._choice
        body = {"text": choice.text, "tokens": choice.tokens, **self._rest()}
        if self._generation.request.asked.returns_logprobs:
            body["logprobs"] = self._logprobs(0, len(choice.tokens))
        return body

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        tokens = delta.choice.tokens[delta.first : delta.end]
        if not tokens and not delta.text:
            return []
        frame: dict[str, Any] = {"text": delta.text, "tokens": tokens}
        if self._generation.request.asked.returns_logprobs:
            frame["logprobs"] = self._logprobs(delta.first, delta.end)
        return [frame]

    def last(self) -> list[dict[str, Any]]:
        return [self._rest()]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        finish_reason = "cancelled" if error.code == "timeout" else "error"
        return [{**self._rest(), "finish_reason": finish_reason, **error.body()}]

    def _rest(self) -> dict[str, Any]:
        generation, choice = self._generation, self._choice
        asked = generation.request.asked
        return {
            "id": asked.label,
            "model": asked.model,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "sample_seed": asked.seed,
            "loops": generation.request.params.loops,
            "usage": {
                "prompt_tokens": len(choice.prompt),
                "completion_tokens": len(choice.tokens),
                "cached_tokens": generation.num_cached_tokens,
            },
            "stats": self._stats(),
            "warnings": list(asked.warnings),
        }

    def _stats(self) -> dict[str, Any]:
        stats, num_tokens = self._choice.stats, len(self._choice.tokens)
        params = self._generation.request.params
        if stats is None:
            return {}
        body = {
            "queue_wait_ms": stats.queue_wait_ms,
            "first_token_ms": stats.first_token_ms,
            "wall_ms": stats.wall_ms,
            "tokens_per_second": rate(num_tokens, (stats.wall_ms - stats.queue_wait_ms) / 1000),
            "mean_loops": rate(stats.core_loops, stats.completion_tokens),
            "kv_cache_mode": stats.kv_cache_mode,
            "restarts": stats.restarts,
        }
        if params.speculation != "none":
            body |= {
                "drafted_tokens": stats.drafted_tokens,
                "accepted_tokens": stats.accepted_tokens,
                "rounds": stats.rounds,
                "acceptance_rate": rate(stats.accepted_tokens, stats.drafted_tokens),
                "tokens_per_round": rate(num_tokens, stats.rounds),
            }
        return body

    def _logprobs(self, first: int, end: int) -> list[dict[str, Any]]:
        choice, text = self._choice, self._generation.text
        return [
            {
                "id": token,
                "token": text.token_text(token),
                "logprob": finite(entry.logprob),
                "top": [
                    {"id": i, "token": text.token_text(i), "logprob": finite(value)}
                    for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            }
            for token, entry in zip(
                choice.tokens[first:end], choice.logprobs[first:end], strict=True
            )
        ]


class Generate:
    """POST /generate; with `speculation` chain or tree, /generate/speculative and /generate/tree_speculative."""

    def __init__(self, service: Service, speculation: str = "none") -> None:
        self._service = service
        self._speculation = speculation

    async def on_post(self, req: Request, resp: Response) -> None:
        body = await json_body(req, self._service)
        asked = schemas.native(body, context(req, self._service), self._speculation)
        await answer(self._service, resp, asked, NativeShape)


class Prefixes:
    """/prefixes: the registered entries of the prefix pool, seen by their own tenant and salt alone."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        body = await json_body(req, self._service)
        ctx = context(req, self._service)
        name, loops, asked = schemas.prefix(body, ctx)
        tokens = (await encode(asked, ctx.model, 0.0)).prompts[0]
        reply = await self._ask(
            "register", asked.prompt_param, salt=asked.salt, name=name, tokens=tokens, loops=loops
        )
        resp.status = falcon.HTTP_201
        entries = [_entry(e) for e in reply.entries if e.name == name]
        set_json(resp, entries[0] if entries else {"name": name, "tokens": len(tokens)})

    async def on_get(self, req: Request, resp: Response) -> None:
        reply = await self._ask("list", salt=_salt(req, self._service))
        set_json(resp, {"object": "list", "data": [_entry(e) for e in reply.entries]})

    async def on_delete_named(self, req: Request, resp: Response, name: str) -> None:
        named = schemas.prefix_name(Fields({"name": name}))
        await self._ask("delete", salt=_salt(req, self._service), name=named)
        resp.status = falcon.HTTP_204

    async def _ask(self, op: str, prompt: str = "prompt", **named: Any) -> PrefixReply:
        """What the scheduler replies; `prompt`: the field that gave the prompt."""
        self._service.served_model()
        try:
            reply = await self._service.engine.prefix(op, **named)
        except Rejection as rejection:
            raise from_rejection(rejection) from None
        if reply.code:
            status = _PREFIX_STATUS.get(reply.code, 400)
            field = reply.message.lstrip("'").partition("'")[0].partition(":")[0]
            param = field if field in ("prompt", "loops", "salt") else "name"
            message = reply.message or reply.code
            if param == "prompt":
                param, message = prompt, message.replace("prompt", prompt, 1)
            raise ApiError(status, message, code=reply.code, param=param)
        return reply


def _salt(req: Request, service: Service) -> str:
    return context(req, service).salted(Fields({"cache_salt": req.get_param("cache_salt")}))


def _entry(info: PrefixInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "tokens": info.num_tokens,
        "loops": info.loops,
        "hits": info.hits,
        "workers": list(info.workers),
        "bytes": info.num_bytes,
        "idle_s": info.idle_s,
        "is_pinned": info.is_pinned,
    }
