"""The LM Studio family under /api/v0: OpenAI's shapes with `stats`, `model_info` and `runtime`."""

from __future__ import annotations

from typing import Any

from falcon.asgi import Request, Response

from frontend import openai, schemas
from frontend.bodies import context, json_body
from frontend.generation import Choice
from frontend.model import ServedModel
from frontend.ops import VERSION
from frontend.service import Service
from frontend.streaming import answer, rate


class _Extras(openai.OpenAIShape):
    """Adds LM Studio's three objects to whole bodies, to the chunk that ends a choice, and to the usage chunk."""

    def fingerprint(self) -> str:
        return self.model.name

    def extras(self) -> dict[str, Any]:
        return self._about(self.generation.choices)

    def finish_extras(self, choice: Choice) -> dict[str, Any]:
        return {"usage": self.usage(), **self._about([choice])}

    def _about(self, choices: list[Choice]) -> dict[str, Any]:
        card, asked = self.model.card, self.generation.request.asked
        modes = [c.stats.kv_cache_mode for c in choices if c.stats]
        runtime = {"name": "tinyloop", "version": VERSION, "supported_formats": ["tinyloop"]}
        about: dict[str, Any] = {
            "stats": self._stats(choices),
            "model_info": {
                "arch": card["arch_name"],
                "quant": card["quant"],
                "format": "tinyloop",
                "context_length": self.model.max_seq_len,
                "kv_cache_mode": modes[0] if modes else card["kv_mode_default"],
                "runtime": {**runtime, "commit": self.commit},
            },
            "runtime": runtime,
        }
        if asked.warnings:
            about["warnings"] = list(asked.warnings)
        return about

    def _stats(self, choices: list[Choice]) -> dict[str, Any]:
        """Over all `choices`: the first one's first token, the slowest one's end."""
        known = [c.stats for c in choices if c.stats is not None]
        first_ms = min((s.first_token_ms for s in known), default=0.0)
        seconds = max(0.0, max((s.wall_ms for s in known), default=0.0) - first_ms) / 1000
        num_tokens = sum(len(c.tokens) for c in choices)
        core_loops = sum(s.core_loops for s in known)
        stats: dict[str, Any] = {
            "tokens_per_second": rate(num_tokens, seconds),
            "time_to_first_token": first_ms / 1000,
            "generation_time": seconds,
            "stop_reason": self._stop_reason(choices[0]),
            "mean_loops": rate(core_loops, sum(s.completion_tokens for s in known)),
        }
        asked, params = self.generation.request.asked, self.generation.request.params
        if params.speculation != "none":
            drafted = sum(s.drafted_tokens for s in known)
            accepted = sum(s.accepted_tokens for s in known)
            stats |= {
                "draft_model": asked.draft_model or self.model.name,
                "total_draft_tokens_count": drafted,
                "accepted_draft_tokens_count": accepted,
                "rejected_draft_tokens_count": drafted - accepted,
                "ignored_draft_tokens_count": 0,
            }
        return stats

    def _stop_reason(self, choice: Choice) -> str:
        if choice.finish_reason == "length":
            fills = len(choice.prompt) + len(choice.tokens) >= self.model.max_seq_len
            return "contextLengthReached" if fills else "maxPredictedTokensReached"
        return "stopStringFound" if isinstance(choice.stop_reason, str) else "eosFound"


class ChatShape(_Extras, openai.ChatShape):
    pass


class CompletionShape(_Extras, openai.CompletionShape):
    pass


def model_entry(service: Service, model: ServedModel, name: str) -> dict[str, Any]:
    card = model.card
    is_loaded = service.trouble() is None
    entry = {
        "id": name,
        "object": "model",
        "type": "llm",
        "publisher": "tinyloop",
        "arch": card["arch_name"],
        "compatibility_type": "safetensors",
        "quantization": card["quant"],
        "state": "loaded" if is_loaded else "not-loaded",
        "max_context_length": max(card.get("max_pos") or 0, model.max_seq_len),
        "capabilities": [],
        "n_parallel": card["max_rows"],
        "created": model.created,
        "owned_by": "tinyloop",
    }
    return {**entry, "loaded_context_length": model.max_seq_len} if is_loaded else entry


class Models(openai.Models):
    """GET /api/v0/models."""

    entry = staticmethod(model_entry)


class Model(openai.Model):
    """GET /api/v0/models/{name}."""

    entry = staticmethod(model_entry)


class ChatCompletions:
    """POST /api/v0/chat/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        body = await json_body(req, self._service)
        ctx = context(req, self._service)
        asked = schemas.chat(body, ctx)
        commit = self._service.settings.commit
        await answer(self._service, resp, asked, lambda g: ChatShape(g, ctx.model, commit))


class Completions:
    """POST /api/v0/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        body = await json_body(req, self._service)
        ctx = context(req, self._service)
        asked = schemas.completion(body, ctx)
        commit = self._service.settings.commit
        await answer(self._service, resp, asked, lambda g: CompletionShape(g, ctx.model, commit))
