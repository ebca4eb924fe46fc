"""The knobs of decoding, read from a request's fields into `Params`: the same for every family of endpoints.

Names that mean the same in several dialects are all taken; what the served artifact cannot do is a 400.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from frontend.errors import invalid, unsupported
from frontend.fields import Fields
from frontend.model import ServedModel
from scheduler.messages import MAX_BRANCHES, MAX_DRAFT_AHEAD, Params

MAX_LOGPROBS = 20
_INT64 = (1 << 63) - 1
_EXIT_KV = ("complete", "copy")
_EXIT_KINDS = ("gate", "latent", "kl")
_LATENT_THRESHOLD = 0.03  # relative change of the state
_ID = re.compile(r"[0-9]{1,10}")


def read_params(fields: Fields, model: ServedModel, *, is_native: bool = False) -> Params:
    """All of `Params` but `max_tokens`, log-probabilities and speculation.

    `is_native`: greedy by default; else the artifact's own sampling defaults, then OpenAI's (temperature 1).

    Raises:
        ApiError: 400 naming the field.
    """
    default: dict[str, float] = (
        {"temperature": 0.0} if is_native else {"temperature": 1.0, **model.sampling}
    )
    repetition = "repetition_penalty"
    if fields.raw(repetition) is None and fields.raw("repeat_penalty") is not None:
        repetition = "repeat_penalty"
    stop_token_ids = fields.token_ids("stop_token_ids", model.vocab, max_items=256)
    end_ids = () if fields.boolean("ignore_eos") else model.eos
    loops = fields.integer("loops", model.loops_default, model.loops_min, model.loops_max)
    top_k = fields.integer("top_k", int(default.get("top_k", 0)), -1, _INT64)
    top_p = fields.number("top_p", default.get("top_p", 1.0), 0.0, 1.0)
    return Params(
        loops=loops,
        max_tokens=0,
        min_tokens=fields.integer("min_tokens", 0, 0, model.max_seq_len),
        temperature=fields.number("temperature", default["temperature"], 0.0, 2.0),
        top_k=0 if top_k >= model.vocab else max(0, top_k),
        top_p=max(top_p, 1e-9),  # 0 means: only the likeliest token
        min_p=fields.number("min_p", default.get("min_p", 0.0), 0.0, 1.0),
        repetition_penalty=fields.number(
            repetition, default.get("repetition_penalty", 1.0), 0.01, 100.0
        ),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields, model),
        stop_token_ids=tuple(dict.fromkeys((*end_ids, *stop_token_ids))),
        cache_window=fields.integer("cache_window", 0, 0, (1 << 31) - 1),
        warm_start=_warm_start(fields, model),
        init_seed=_init_seed(fields, model),
        kv_cache_mode=_kv_cache_mode(fields, model),
        **_adaptive_exit(fields, model, loops),
    )


def read_seed(fields: Fields) -> int | None:
    """`sample_seed` or `seed`; None if neither is given."""
    for name in ("sample_seed", "seed"):
        seed = fields.optional_integer(name, -_INT64 - 1, _INT64)
        if seed is not None:
            return seed
    return None


def read_speculation(
    fields: Fields, model: ServedModel, params: Params, kind: str, loops_name: str = "verify_loops"
) -> Params:
    """`params` with speculation: draft at `draft_loops`, verify at `verify_loops`.

    `kind`: chain, tree or pipelined; a chain may be asked to be pipelined by `mode`.

    Raises:
        ApiError: 400; a bad value, or a combination that makes tokens sequential in depth.
    """
    card = model.card
    if not card.get("speculation", True):
        raise unsupported("draft_loops", "this artifact cannot be decoded speculatively")
    loops = fields.integer(loops_name, params.loops, model.loops_min, model.loops_max)
    if loops < 2:
        raise fields.wrong(loops_name, "must be at least 2: a draft has fewer loops than its check")
    if kind == "chain":
        kind = fields.choice("mode", "chain", ("chain", "pipelined"))
    if params.warm_start:
        raise invalid("warm_start", "'warm_start' cannot be combined with speculation")
    if params.exit_kind == "kl" and card.get("has_coda"):
        raise invalid(
            "exit_threshold", "the KL exit of an artifact with a coda excludes speculation"
        )
    if params.exit_kind != "none" and kind == "pipelined":
        raise invalid("mode", "'mode' pipelined cannot be combined with an adaptive exit")
    values: dict[str, Any] = {
        "loops": loops,
        "speculation": kind,
        "draft_loops": fields.integer("draft_loops", max(1, loops // 4), 1, loops - 1),
        "draft_ahead": _draft_ahead(fields),
        "min_loops": min(params.min_loops, loops),
    }
    if kind == "tree":
        values["branches"] = fields.integer("K_branches", 2, 1, MAX_BRANCHES)
    return replace(params, **values)


def _draft_ahead(fields: Fields) -> int:
    """`draft_ahead` tokens, 0 for "auto" or if it is not given."""
    if fields.raw("draft_ahead") == "auto":
        return 0
    return fields.integer("draft_ahead", 0, 0, MAX_DRAFT_AHEAD)


def loop_warnings(params: Params, model: ServedModel) -> tuple[str, ...]:
    """What a client should know of the depth it asked for."""
    if params.loops <= model.loops_trained:
        return ()
    return (f"loops {params.loops} is above the trained maximum of {model.loops_trained}",)


def _logit_bias(fields: Fields, model: ServedModel) -> tuple[tuple[int, float], ...]:
    biases = fields.object("logit_bias")
    result: dict[int, float] = {}
    for name in biases.names() if biases is not None else ():
        assert biases is not None
        if not _ID.fullmatch(name) or int(name) >= model.vocab:
            what = f"has the key '{name:.40}': not a token id from 0 to {model.vocab - 1}"
            raise fields.wrong("logit_bias", what, "invalid_token_id")
        result[int(name)] = biases.number(name, 0.0, -100.0, 100.0)
    for word in fields.strings("bad_words", 64, 1000):
        for token in _single_tokens(word, model):
            result[token] = -100.0
    return tuple(result.items())


def _single_tokens(word: str, model: ServedModel) -> list[int]:
    """The ids that spell `word`, at a text's start and after a space."""
    if not model.text.has_tokenizer:
        raise invalid("bad_words", f"'bad_words' needs text: {model.text.reason}")
    spelled = [model.text.encode(form, False) for form in (word, f" {word.lstrip()}")]
    tokens = [ids[0] for ids in spelled if len(ids) == 1]
    if not tokens:
        raise unsupported("bad_words", f"'bad_words': '{word:.40}' is more than one token")
    return tokens


def _warm_start(fields: Fields, model: ServedModel) -> bool:
    is_asked = fields.boolean("warm_start")
    if is_asked and (not model.card["has_injection"] or model.card["warm_start"] == "off"):
        raise unsupported(
            "warm_start", "this artifact cannot start a token from the last one's state"
        )
    return is_asked


def _init_seed(fields: Fields, model: ServedModel) -> int | None:
    seed = fields.optional_integer("init_seed", 0, _INT64)
    if seed is not None and not model.card["has_init_seed"]:
        raise unsupported("init_seed", "this artifact has no random initial state")
    return seed


def _kv_cache_mode(fields: Fields, model: ServedModel) -> str:
    mode = fields.string("kv_cache_mode")
    if mode and mode not in model.card["kv_modes"]:
        raise fields.wrong("kv_cache_mode", f"must be one of {', '.join(model.card['kv_modes'])}")
    return mode


def _adaptive_exit(fields: Fields, model: ServedModel, loops: int) -> dict[str, Any]:
    """exit_kind, exit_threshold, min_loops, exit_kv. The exit is on if a threshold or a kind is given."""
    threshold = fields.optional_number("exit_threshold", 0.0, 1e6)
    kind = fields.choice("exit_kind", "none", ("none", *_EXIT_KINDS))
    exit_kv = fields.choice("exit_kv", "complete", _EXIT_KV)
    min_loops = fields.integer("min_loops", 1, 1, loops)
    own_kind = model.card["exit_kind"]
    if kind == "gate" and own_kind != "gate":
        raise unsupported("exit_kind", "this artifact has no exit gate")
    if threshold is None and kind == "none":
        return {"min_loops": min_loops, "exit_kv": exit_kv}
    if model.loops_max == 1:
        named = "exit_threshold" if threshold is not None else "exit_kind"
        raise unsupported(named, "this artifact has one loop: there is nothing to leave early")
    if kind == "none":
        kind = own_kind if own_kind != "none" else "latent"
    if threshold is None:
        threshold = model.card.get("exit_threshold") if kind == own_kind else None
        threshold = _LATENT_THRESHOLD if threshold is None and kind == "latent" else threshold
    if threshold is None:
        raise fields.wrong("exit_threshold", f"is required with exit_kind {kind}")
    return {
        "exit_kind": kind,
        "exit_threshold": threshold,
        "min_loops": min_loops,
        "exit_kv": exit_kv,
    }
