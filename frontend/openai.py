"""The OpenAI family under /v1 (and without the prefix): models, chat completions, completions."""

from __future__ import annotations

import time
from typing import Any

from falcon.asgi import Request, Response

from frontend import schemas
from frontend.bodies import context, json_body
from frontend.errors import ApiError
from frontend.generation import Choice, Delta, Generation
from frontend.model import ServedModel
from frontend.service import Service
from frontend.streaming import answer, finite, set_json
from scheduler.messages import TokenLogprob


class OpenAIShape:
    """What chat and completions share: the envelope, usage, token names."""

    id_prefix, object_name, chunk_name = "", "", ""

    def __init__(
        self, generation: Generation, model: ServedModel, commit: str | None = None
    ) -> None:
        self.generation = generation
        self.model = model
        self.commit = commit
        self._asked = generation.request.asked
        self._created = int(time.time())

    def envelope(self, object_name: str) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self._asked.label}",
            "object": object_name,
            "created": self._created,
            "model": self._asked.model,
            "system_fingerprint": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        return f"fp_{str(self.model.card['digest'])[:10]}"

    def usage(self) -> dict[str, Any]:
        generation = self.generation
        num_prompt, num_completion = generation.num_prompt_tokens, generation.num_completion_tokens
        accepted = sum(c.stats.accepted_tokens for c in generation.choices if c.stats)
        drafted = sum(c.stats.drafted_tokens for c in generation.choices if c.stats)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(c, i) for i, c in enumerate(self.generation.best())]
        body = self.envelope(self.object_name)
        return {**body, "choices": choices, "usage": self.usage(), **self.extras()}

    def last(self) -> list[dict[str, Any]]:
        if not self._asked.include_usage:
            return []
        body = self.envelope(self.chunk_name)
        return [{**body, "choices": [], "usage": self.usage(), **self.extras()}]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.body()]

    def chunk(self, delta: Delta, choice: dict[str, Any]) -> dict[str, Any]:
        body = {
            **self.envelope(self.chunk_name),
            "choices": [{"index": delta.choice.index, **choice}],
        }
        if self._asked.continuous_usage:
            body["usage"] = self.usage()
        elif self._asked.include_usage:
            body["usage"] = None
        return body

    def choice(self, choice: Choice, index: int) -> dict[str, Any]:
        raise AssertionError("each shape words its own choices")

    def extras(self) -> dict[str, Any]:
        """What another family adds to a whole body and to the last frames."""
        return {}

    def finish_extras(self, choice: Choice) -> dict[str, Any]:
        """What another family adds to the chunk that ends a choice."""
        return {}

    def token_name(self, token: int) -> str:
        if self._asked.names_tokens_by_id:
            return f"token_id:{token}"
        return self.generation.text.token_text(token)

    def ids(self, choice: Choice, first: int, end: int, has_prompt: bool) -> dict[str, Any]:
        """vLLM's `return_token_ids`."""
        if not self._asked.returns_token_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": choice.tokens[first:end]}
        return {"prompt_token_ids": list(choice.prompt), **ids} if has_prompt else ids

    def prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None]:
        """vLLM's shape: for each prompt token but the first a map from id to logprob, rank (if known) and text."""
        result: list[dict[str, Any] | None] = []
        for token, entry in zip(choice.prompt, choice.prompt_logprobs, strict=True):
            if entry is None:
                result.append(None)
                continue
            ranked = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
            ranks = {i: rank for rank, i in enumerate(ranked, 1)}
            ranked.setdefault(token, entry.logprob)
            result.append(
                {
                    str(i): {
                        "logprob": finite(value),
                        "rank": ranks.get(i),
                        "decoded_token": self.token_name(i),
                    }
                    for i, value in ranked.items()
                }
            )
        return result


class ChatShape(OpenAIShape):
    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Choice, index: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        body = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice, 0, len(choice.tokens)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self.ids(choice, 0, len(choice.tokens), has_prompt=True),
        }
        if self._asked.returns_prompt_logprobs:
            body["prompt_logprobs"] = self.prompt_logprobs(choice)
        return body

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        choice, parts = delta.choice, []
        if delta.is_first:
            parts.append(
                {"delta": {"role": "assistant", "content": ""}, **self.ids(choice, 0, 0, True)}
            )
        has_news = delta.end > delta.first and (
            self._asked.returns_logprobs or self._asked.returns_token_ids
        )
        if delta.text or has_news:
            parts.append(
                {
                    "delta": {"content": delta.text},
                    "logprobs": self._logprobs(choice, delta.first, delta.end),
                    **self.ids(choice, delta.first, delta.end, False),
                }
            )
        frames = [
            self.chunk(delta, {"logprobs": None, **part, "finish_reason": None}) for part in parts
        ]
        if delta.finish_reason:
            last: dict[str, Any] = {
                "delta": {},
                "logprobs": None,
                "finish_reason": delta.finish_reason,
            }
            last["stop_reason"] = choice.stop_reason
            frames.append({**self.chunk(delta, last), **self.finish_extras(choice)})
        return frames

    def _logprobs(self, choice: Choice, first: int, end: int) -> dict[str, Any] | None:
        if not self._asked.returns_logprobs:
            return None
        pairs = zip(choice.tokens[first:end], choice.logprobs[first:end], strict=True)
        content = [
            {
                **self._entry(token, entry.logprob),
                "top_logprobs": [
                    self._entry(i, value)
                    for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            }
            for token, entry in pairs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = list(self.generation.text.token_bytes(token))
        return {"token": self.token_name(token), "logprob": finite(logprob), "bytes": raw}


class CompletionShape(OpenAIShape):
    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def choice(self, choice: Choice, index: int) -> dict[str, Any]:
        end = len(choice.tokens)
        body = {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(choice, 0, end, has_prompt=self._asked.echo),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self.ids(choice, 0, end, has_prompt=True),
        }
        if self._asked.returns_prompt_logprobs:
            body["prompt_logprobs"] = self.prompt_logprobs(choice)
        return body

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        choice = delta.choice
        has_news = delta.end > delta.first and (
            self._asked.returns_logprobs or self._asked.returns_token_ids
        )
        if not (delta.text or has_news or delta.finish_reason):
            return []
        has_prompt = delta.is_first and self._asked.echo
        part: dict[str, Any] = {
            "text": delta.text,
            "logprobs": self._logprobs(choice, delta.first, delta.end, has_prompt),
            "finish_reason": delta.finish_reason or None,
            **self.ids(choice, delta.first, delta.end, delta.is_first),
        }
        if not delta.finish_reason:
            return [self.chunk(delta, part)]
        part["stop_reason"] = choice.stop_reason
        return [{**self.chunk(delta, part), **self.finish_extras(choice)}]

    def _logprobs(
        self, choice: Choice, first: int, end: int, has_prompt: bool
    ) -> dict[str, Any] | None:
        """OpenAI's legacy shape; with the prompt's tokens first, of which the first has none."""
        if not self._asked.returns_logprobs:
            return None
        tokens: list[int] = list(choice.prompt) if has_prompt else []
        entries: list[TokenLogprob | None] = list(choice.prompt_logprobs) if has_prompt else []
        offsets = list(choice.prompt_offsets) if has_prompt else []
        tokens += choice.tokens[first:end]
        entries += choice.logprobs[first:end]
        offsets += choice.offsets[first:end]
        top: list[dict[str, float] | None] = []
        for token, entry in zip(tokens, entries, strict=True):
            if entry is None:
                top.append(None)
                continue
            named: dict[str, float] = {}
            for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
                named.setdefault(self.token_name(i), finite(value))
            named.setdefault(self.token_name(token), finite(entry.logprob))
            top.append(named)
        return {
            "tokens": [self.token_name(token) for token in tokens],
            "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def model_entry(service: Service, model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "tinyloop",
        "root": model.name,
        "max_model_len": model.max_seq_len,
        "meta": {
            "n_ctx": model.max_seq_len,
            "n_vocab": model.vocab,
            "n_params": model.card["num_parameters"],
            "loops": {
                "default": model.loops_default,
                "trained": model.loops_trained,
                "max": model.loops_max,
            },
            "has_chat_template": model.text.template is not None,
        },
    }


class Models:
    """GET /v1/models."""

    entry = staticmethod(model_entry)

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response) -> None:
        model = self._service.served_model()
        data = [self.entry(self._service, model, name) for name in model.listed_names]
        set_json(resp, {"object": "list", "data": data})


class Model:
    """GET /v1/models/{name}; names may hold slashes."""

    entry = staticmethod(model_entry)

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response, name: str) -> None:
        model = self._service.served_model()
        set_json(resp, self.entry(self._service, model, model.resolve(name)))


class ChatCompletions:
    """POST /v1/chat/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        body = await json_body(req, self._service)
        ctx = context(req, self._service)
        asked = schemas.chat(body, ctx)
        await answer(self._service, resp, asked, lambda g: ChatShape(g, ctx.model))


class Completions:
    """POST /v1/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        body = await json_body(req, self._service)
        ctx = context(req, self._service)
        asked = schemas.completion(body, ctx)
        await answer(self._service, resp, asked, lambda g: CompletionShape(g, ctx.model))
