"""The request bodies of the three families, checked into `Asked`.

Chat and completions follow OpenAI's names with vLLM's and LM Studio's extensions and TinyLoop's knobs; what is not
known there is ignored, what is known but cannot be honoured is a 400. The native family refuses unknown fields.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from frontend.conversation import read_conversation
from frontend.errors import ApiError, invalid, unsupported
from frontend.fields import Fields, check_token_ids
from frontend.model import ServedModel
from frontend.requests import Asked, Prompt
from frontend.sampling import MAX_LOGPROBS, loop_warnings, read_params, read_seed, read_speculation
from scheduler.messages import MAX_SEQUENCES

MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
_UNSUPPORTED = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar", "json_schema",
    "allowed_token_ids", "use_beam_search", "audio", "web_search_options", "logits_processors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Context:
    """What validation needs besides the body."""

    model: ServedModel
    max_n: int
    request_id: str
    salt: str = ""  # of the API key; the body's cache_salt joins it

    def salted(self, fields: Fields) -> str:
        """The prefix-pool salt of a request: its tenant's, joined with its own `cache_salt`."""
        cache_salt = fields.string("cache_salt", "", 200)
        return f"{self.salt}/{cache_salt}" if self.salt or cache_salt else ""


def chat(body: dict[str, Any], context: Context) -> Asked:
    """POST .../chat/completions.

    Raises:
        ApiError: 400 naming the field, 404 for the model.
    """
    fields = Fields(body)
    model_name = context.model.resolve(fields.string("model"))
    conversation = read_conversation(fields)
    _refuse_formats(fields)
    has_logprobs = fields.boolean("logprobs")
    num_top = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if num_top and not has_logprobs:
        raise fields.wrong("top_logprobs", "needs logprobs: true")
    name = (
        "max_completion_tokens" if fields.raw("max_completion_tokens") is not None else "max_tokens"
    )
    asked = _shared(fields, context, model_name, num_top if has_logprobs else -1)
    return replace(
        asked,
        prompts=(conversation,),
        prompt_param="messages",
        max_tokens=_max_tokens(fields, name, None, least=1),
        add_special_tokens=False,
    )


def completion(body: dict[str, Any], context: Context) -> Asked:
    """POST .../completions.

    Raises:
        ApiError: 400 naming the field, 404 for the model.
    """
    fields = Fields(body)
    model_name = context.model.resolve(fields.string("model"))
    prompts = _prompts(fields, context.model)
    _refuse_formats(fields)
    fields.refuse("suffix")
    num_logprobs = -1
    if fields.raw("logprobs") is not None:
        num_logprobs = fields.integer("logprobs", -1, 0, MAX_LOGPROBS)
    asked = _shared(fields, context, model_name, num_logprobs)
    is_stream = asked.stream
    num_sequences = fields.integer("best_of", asked.n, 1, max(20, context.max_n))
    if num_sequences < asked.n:
        raise fields.wrong("best_of", f"must not be less than n ({asked.n})")
    if num_sequences > asked.n and is_stream:
        raise fields.wrong("best_of", "cannot be streamed")
    if len(prompts) * num_sequences > MAX_SEQUENCES:
        what = (
            f"prompts times n must be at most {MAX_SEQUENCES}, not {len(prompts) * num_sequences}"
        )
        raise invalid("prompt", what)
    params = asked.params
    if num_sequences > asked.n:
        params = replace(params, logprobs=max(0, params.logprobs))  # to rank by
    echo = fields.boolean("echo")
    if echo and num_logprobs >= 0:
        params = replace(params, prompt_logprobs=max(params.prompt_logprobs, num_logprobs))
    return replace(
        asked,
        prompts=prompts,
        prompt_param="prompt",
        params=params,
        max_tokens=_max_tokens(fields, "max_tokens", 16, least=0),
        num_sequences=num_sequences,
        echo=echo,
    )


def native(body: dict[str, Any], context: Context, speculation: str = "none") -> Asked:
    """POST /generate, /generate/speculative (`chain`, by `mode` pipelined), /generate/tree_speculative (`tree`).

    Raises:
        ApiError: 400 naming the field, unknown ones included.
    """
    fields = Fields(body)
    model = context.model
    model_name = model.resolve(fields.string("model"))
    prompt, param = _native_prompt(fields, model)
    params = read_params(fields, model, is_native=True)
    if speculation != "none":
        params = read_speculation(fields, model, params, speculation)
    num_logprobs = fields.optional_integer("logprobs", 0, MAX_LOGPROBS)
    stops, stop_tokens = _stops(fields, model)
    seed = read_seed(fields)
    asked = Asked(
        model=model_name,
        label=_label(fields, context),
        prompts=(prompt,),
        prompt_param=param,
        params=replace(
            params,
            logprobs=-1 if num_logprobs is None else num_logprobs,
            stop_token_ids=_with(params.stop_token_ids, stop_tokens),
        ),
        seed=_drawn() if seed is None else seed,
        max_tokens=_max_tokens(fields, "max_tokens", 128, least=1),
        stops=stops,
        stop_tokens=stop_tokens,
        include_stop=fields.boolean("include_stop_str_in_output"),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        add_special_tokens=fields.boolean("add_special_tokens", True),
        stream=fields.boolean("stream"),
        returns_logprobs=num_logprobs is not None,
        stream_interval=fields.integer("stream_interval", 1, 1, 4096),
        priority=fields.integer("priority", 0, -100, 100),
        slo_ms=fields.optional_number("slo_ms", 1.0, 86_400_000.0),
        salt=context.salted(fields),
        warnings=loop_warnings(params, model),
    )
    fields.refuse_unknown()
    return asked


def prefix(body: dict[str, Any], context: Context) -> tuple[str, int, Asked]:
    """POST /prefixes: the entry's name, its loops (0: any), and its prompt.

    Raises:
        ApiError: 400 naming the field.
    """
    fields = Fields(body)
    model = context.model
    model.resolve(fields.string("model"))
    name = prefix_name(fields)
    prompt, param = _native_prompt(fields, model)
    loops = fields.integer("loops", model.loops_default, model.loops_min, model.loops_max)
    asked = Asked(
        model=model.name,
        label=context.request_id,
        prompts=(prompt,),
        prompt_param=param,
        params=read_params(Fields({}), model, is_native=True),
        seed=0,
        max_tokens=1,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        salt=context.salted(fields),
    )
    fields.refuse_unknown()
    return name, loops, asked


def prefix_name(fields: Fields) -> str:
    """The name of a prefix-pool entry; one path segment, so that it can be deleted."""
    name = fields.string("name", "", 200)
    if not name or "/" in name or not name.isprintable():
        raise fields.wrong("name", "must be a name of 1 to 200 printable characters without '/'")
    return name


def _shared(fields: Fields, context: Context, model_name: str, num_logprobs: int) -> Asked:
    """What chat and completions have in common; prompts and length are filled in by the caller."""
    model = context.model
    params = read_params(fields, model)
    params, draft_model = _speculation(fields, context, params)
    stops, stop_tokens = _stops(fields, model)
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise fields.wrong("stream_options", "needs stream: true")
    prompt_logprobs = fields.optional_integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise fields.wrong("prompt_logprobs", "cannot be streamed")
    truncate_to = fields.optional_integer("truncate_prompt_tokens", -1, model.max_seq_len)
    if truncate_to == 0:
        raise fields.wrong("truncate_prompt_tokens", "must be -1 or at least 1")
    fields.refuse(*_UNSUPPORTED)
    for name in ("user", "service_tier"):  # accepted for the type alone
        fields.string(name)
    n = fields.integer("n", 1, 1, context.max_n)
    seed = read_seed(fields)
    return Asked(
        model=model_name,
        label=_label(fields, context),
        prompts=(),
        prompt_param="",
        params=replace(
            params,
            logprobs=num_logprobs,
            prompt_logprobs=-1 if prompt_logprobs is None else prompt_logprobs,
            stop_token_ids=_with(params.stop_token_ids, stop_tokens),
        ),
        seed=_drawn() if seed is None else seed,
        max_tokens=None,
        n=n,
        num_sequences=n,
        stops=stops,
        stop_tokens=stop_tokens,
        include_stop=fields.boolean("include_stop_str_in_output"),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        add_special_tokens=fields.boolean("add_special_tokens", True),
        truncate_to=model.max_seq_len - 1 if truncate_to == -1 else truncate_to,
        truncates_left=fields.choice("truncation_side", "left", ("left", "right")) == "left",
        stream=stream,
        include_usage=options is not None and options.boolean("include_usage"),
        continuous_usage=options is not None and options.boolean("continuous_usage_stats"),
        stream_interval=fields.integer("stream_interval", 1, 1, 4096),
        returns_logprobs=num_logprobs >= 0,
        returns_prompt_logprobs=prompt_logprobs is not None,
        returns_token_ids=fields.boolean("return_token_ids"),
        names_tokens_by_id=fields.boolean("return_tokens_as_token_ids"),
        draft_model=draft_model,
        priority=fields.integer("priority", 0, -100, 100),
        slo_ms=fields.optional_number("slo_ms", 1.0, 86_400_000.0),
        salt=context.salted(fields),
        warnings=loop_warnings(params, model),
    )


def _speculation(fields: Fields, context: Context, params: Any) -> tuple[Any, str]:
    """Chain speculation by `draft_loops`, tree by `K_branches`, LM Studio's by naming the served model as its own draft."""
    draft_model = fields.string("draft_model")
    if draft_model:
        context.model.resolve(draft_model, "draft_model")
    names = ("draft_loops", "verify_loops", "draft_ahead", "K_branches")
    if not draft_model and all(fields.raw(name) is None for name in names):
        return params, ""
    kind = "tree" if fields.raw("K_branches") is not None else "chain"
    return read_speculation(fields, context.model, params, kind), draft_model


def _label(fields: Fields, context: Context) -> str:
    """The client's own name of the request, which goes into ids and log lines."""
    label = fields.string("request_id", context.request_id, 200)
    if not label or not label.isprintable():
        raise fields.wrong("request_id", "must be printable text")
    return label


def _refuse_formats(fields: Fields) -> None:
    form = fields.object("response_format")
    if form is not None:
        kind = form.choice("type", "", ("text", "json_object", "json_schema", "structural_tag"))
        if kind != "text":
            raise unsupported(
                "response_format", f"'response_format': {kind} cannot be enforced here"
            )
    modalities = fields.array("modalities")
    if any(item != "text" for item in modalities):
        raise unsupported("modalities", "'modalities': this model writes text only")


def _max_tokens(fields: Fields, name: str, default: int | None, least: int) -> int | None:
    """The asked length; None, also for -1: as many as fit."""
    if fields.raw(name) is None:
        return default
    if fields.raw(name) == -1 and type(fields.raw(name)) is int:
        return None
    return fields.integer(name, 0, least, (1 << 31) - 1)


def _stops(fields: Fields, model: ServedModel) -> tuple[tuple[str, ...], dict[int, str]]:
    """Stop strings, and those of them that are one special token each (which never becomes text)."""
    stops = fields.strings("stop", MAX_STOPS, MAX_STOP_LENGTH)
    if stops and not model.text.has_tokenizer:
        raise fields.wrong("stop", f"needs text: {model.text.reason}; use stop_token_ids")
    ids = {model.text.special_id(stop): stop for stop in stops}
    return stops, {i: stop for i, stop in ids.items() if i is not None}


def _with(stop_token_ids: tuple[int, ...], stop_tokens: dict[int, str]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*stop_token_ids, *stop_tokens)))


def _prompts(fields: Fields, model: ServedModel) -> tuple[Prompt, ...]:
    """A string, an array of strings, an array of ids, or an array of arrays of ids."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        return (value,)
    if value is None or not isinstance(value, list):
        raise fields.wrong("prompt", "must be a string, an array of strings, or token ids")
    if not value:
        raise fields.wrong("prompt", "must not be empty", "empty_prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) for item in value):
        path = fields.path("prompt")
        return tuple(_ids(ids, model.vocab, f"{path}[{i}]") for i, ids in enumerate(value))
    return (_ids(value, model.vocab, fields.path("prompt")),)


def _ids(ids: list[Any], vocab: int, path: str) -> tuple[int, ...]:
    if not ids:
        raise invalid("prompt", f"'{path}' is empty", "empty_prompt")
    try:
        return check_token_ids(ids, vocab, path)
    except ApiError as error:
        error.param = "prompt"
        raise


def _native_prompt(fields: Fields, model: ServedModel) -> tuple[Prompt, str]:
    text, ids = fields.raw("prompt"), fields.raw("prompt_tokens")
    if (text is None) == (ids is None):
        param = "prompt" if text is None else "prompt_tokens"
        raise invalid(param, "exactly one of 'prompt' and 'prompt_tokens' is required")
    if text is not None:
        return fields.string("prompt"), "prompt"
    tokens = fields.token_ids("prompt_tokens", model.vocab)
    if not tokens:
        raise fields.wrong("prompt_tokens", "must not be empty", "empty_prompt")
    return tokens, "prompt_tokens"


def _drawn() -> int:
    return secrets.randbits(63)
