"""A generation request between its validation and its submit, the same for all families of endpoints.

`Asked` is what a body said, checked; `encode` turns it into a `GenerationRequest`: token ids and lengths that fit.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frontend.errors import ApiError, invalid
from frontend.model import ServedModel
from frontend.text import TextUnavailable
from scheduler.messages import Params, Tokens

LONG_TEXT = 16_384  # characters; more is encoded in a thread, so that the loop goes on


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages, checked, with what the template is told besides."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(str(m.get("content"))) for m in self.messages)


Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request body. `prompt_param` names the field that the prompts came from.

    `max_tokens` None: as many as fit. `params` holds everything but `max_tokens`. `stop_tokens` are stop strings that
    are one special token each. `num_sequences` (best_of) are run per prompt, `n` of them are answered.
    """

    model: str
    label: str
    prompts: tuple[Prompt, ...]
    prompt_param: str
    params: Params
    seed: int
    max_tokens: int | None
    n: int = 1
    num_sequences: int = 1
    stops: tuple[str, ...] = ()
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    include_stop: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    truncate_to: int | None = None
    truncates_left: bool = True
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stream_interval: int = 1
    returns_logprobs: bool = False
    returns_prompt_logprobs: bool = False
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False
    draft_model: str = ""
    priority: int = 0
    slo_ms: float | None = None
    salt: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Ready to submit. `max_tokens` is what the client gets; the engine always makes at least one (`params`)."""

    asked: Asked
    prompts: tuple[Tokens, ...]
    params: Params
    max_tokens: int
    timeout_s: float

    @property
    def fills_context(self) -> bool:
        """The length was not asked for: it is what the context leaves."""
        return self.asked.max_tokens is None


async def encode(asked: Asked, model: ServedModel, timeout_s: float) -> GenerationRequest:
    """Token ids for all prompts, and a length that fits the context.

    Raises:
        ApiError: 400; no text for this model, an empty prompt, or prompt + max_tokens above the maximum.
    """
    num_chars = sum(len(p) for p in asked.prompts if not isinstance(p, tuple))
    if num_chars > LONG_TEXT:
        prompts = await asyncio.to_thread(_encode_all, asked, model)
    else:
        prompts = _encode_all(asked, model)
    longest = max(len(p) for p in prompts)
    max_tokens = asked.max_tokens
    needed = longest + max(1, max_tokens or 0)
    if needed > model.max_seq_len:
        raise _too_long(asked, longest, max_tokens, model.max_seq_len)
    if max_tokens is None:
        max_tokens = model.max_seq_len - longest
    if asked.params.min_tokens > max_tokens:
        raise invalid("min_tokens", f"'min_tokens' must not exceed max_tokens ({max_tokens})")
    params = dataclasses.replace(asked.params, max_tokens=max(1, max_tokens))
    return GenerationRequest(asked, prompts, params, max_tokens, timeout_s)


def _encode_all(asked: Asked, model: ServedModel) -> tuple[Tokens, ...]:
    return tuple(_encode(p, asked, model) for p in asked.prompts)


def _encode(prompt: Prompt, asked: Asked, model: ServedModel) -> Tokens:
    """One prompt's ids, truncated if the client asked for it.

    Raises:
        ApiError: 400 naming the prompt's field.
    """
    text, param = model.text, asked.prompt_param
    limit = model.max_seq_len if asked.truncate_to is None else None
    try:
        if isinstance(prompt, Conversation):
            tools = list(prompt.tools) if prompt.tools is not None else None
            prompt = text.render_chat(prompt.messages, tools, dict(prompt.options))
        if isinstance(prompt, str):
            ids = text.encode(prompt, asked.add_special_tokens, limit)
        else:
            ids = list(prompt)
    except TextUnavailable as ex:
        raise invalid(param, str(ex), "text_unavailable") from None
    highest = max(ids, default=0)
    if highest >= model.vocab:
        raise invalid(
            param, f"the text has token {highest}, which the model has not", "invalid_token_id"
        )
    if not ids and text.bos is not None:
        ids = [text.bos]
    length = asked.truncate_to
    if length is not None and len(ids) > length:
        ids = ids[-length:] if asked.truncates_left else ids[:length]
    if not ids:
        raise invalid(param, f"'{param}' is empty", "empty_prompt")
    return Tokens(ids)


def _too_long(asked: Asked, num_prompt: int, max_tokens: int | None, max_seq_len: int) -> ApiError:
    is_prompt = num_prompt + 1 > max_seq_len
    bound = "at least " if num_prompt > 2 * max_seq_len else ""
    what = f"the prompt has {bound}{num_prompt} tokens"
    if not is_prompt:
        what += f" and max_tokens is {max_tokens}, together {num_prompt + (max_tokens or 0)}"
    message = f"{what}; this model's maximum is {max_seq_len} tokens in all"
    return invalid(
        asked.prompt_param if is_prompt else "max_tokens", message, "context_length_exceeded"
    )
