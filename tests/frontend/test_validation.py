"""Every wrong field is a 400 that names it, in each family; what is right reaches the engine as asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frontend.text import TextModel
from scheduler.messages import Tokens
from tests.frontend.conftest import Site
from tests.frontend.scripted import says

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
FAMILIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", TEXT),
    ("/api/v0/chat/completions", CHAT),
    ("/api/v0/completions", TEXT),
    ("/generate", TEXT),
    ("/generate/speculative", TEXT),
    ("/generate/tree_speculative", TEXT),
]
HUGE = 10**400

# (field, wrong value): wrong in every family
WRONG: list[tuple[str, Any]] = [
    ("temperature", "hot"), ("temperature", -0.1), ("temperature", 2.1), ("temperature", True), ("temperature", HUGE),
    ("top_p", 1.5), ("top_p", []), ("top_k", -2), ("top_k", 1.0), ("top_k", HUGE), ("min_p", -1), ("min_p", {}),
    ("repetition_penalty", 0), ("presence_penalty", 2.5), ("frequency_penalty", "x"), ("max_tokens", -2), ("max_tokens", "3"),
    ("max_tokens", True), ("max_tokens", HUGE), ("min_tokens", -1), ("min_tokens", 300), ("stop", 5), ("stop", [""]),
    ("stop", ["a", 1]), ("stop", ["x"] * 17), ("stop", "x" * 1001), ("stop_token_ids", [-1]), ("stop_token_ids", [50257]),
    ("stop_token_ids", "x"), ("stop_token_ids", [1.0]), ("stop_token_ids", [True]), ("ignore_eos", 1), ("stream", "yes"),
    ("loops", 0), ("loops", 17), ("loops", 2.0), ("cache_window", -1), ("warm_start", "yes"), ("min_loops", 0), ("min_loops", 9),
    ("exit_threshold", -1), ("exit_threshold", "x"), ("exit_kind", "gate"), ("exit_kind", "clock"), ("exit_kv", "drop"),
    ("kv_cache_mode", "int2"), ("kv_cache_mode", 4), ("init_seed", 5), ("init_seed", -1), ("priority", 101), ("priority", "high"),
    ("slo_ms", 0), ("slo_ms", -5), ("cache_salt", 7), ("cache_salt", "x" * 201), ("request_id", 7), ("request_id", "a\nb"), ("request_id", ""), ("sample_seed", 1.5),
    ("sample_seed", HUGE), ("seed", "x"), ("logprobs", "x"), ("stream_interval", 0), ("draft_loops", 0), ("draft_loops", 17), ("draft_loops", 4),
    ("model", 5), ("logit_bias", {"-1": 1}), ("logit_bias", {"50257": 1}), ("logit_bias", {"x": 1}), ("logit_bias", [1]),
    ("bad_words", [1]), ("bad_words", ["a long row of words"]),
]  # fmt: skip
WRONG_CHAT: list[tuple[str, Any]] = [
    ("messages", None), ("messages", []), ("messages", "hi"), ("messages", [1]), ("messages", [{}]),
    ("messages", [{"role": "wizard", "content": "x"}]), ("messages", [{"role": "user"}]), ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]), ("messages", [{"role": "user", "content": [5]}]),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [5]}]), ("messages", [{"role": "assistant", "content": None}]),
    ("top_logprobs", 2), ("top_logprobs", 21), ("logprobs", 3), ("n", 0), ("n", 17), ("n", "2"),
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "json_object"}), ("response_format", {}),
    ("response_format", {"type": "xml"}), ("response_format", "text"), ("tool_choice", "required"), ("tool_choice", "maybe"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("tools", [1]), ("tools", {}), ("audio", {"voice": "x"}),
    ("modalities", ["audio"]), ("stream_options", {"include_usage": True}), ("guided_json", {"type": "object"}),
    ("max_completion_tokens", -2), ("truncate_prompt_tokens", 0), ("truncation_side", "middle"), ("structured_outputs", {"regex": "a"}),
    ("chat_template_kwargs", 5), ("draft_model", "other"),
]  # fmt: skip
WRONG_TEXT: list[tuple[str, Any]] = [
    ("prompt", None), ("prompt", []), ("prompt", [[]]), ("prompt", ""), ("prompt", [""]), ("prompt", 5), ("prompt", {}),
    ("prompt", [-1]), ("prompt", [50257]), ("prompt", [1, "a"]), ("prompt", [[1], [50257]]), ("prompt", [True]), ("prompt", [1.5]),
    ("prompt", ["x"] * 257), ("prompt", "word " * 300), ("logprobs", 21), ("logprobs", True), ("logprobs", -1), ("best_of", 0),
    ("best_of", 21), ("suffix", "end"), ("echo", "yes"), ("prompt_logprobs", 21), ("allowed_token_ids", [1]),
    ("use_beam_search", True), ("max_tokens", 256),
]  # fmt: skip
WRONG_NATIVE: list[tuple[str, Any]] = [
    ("prompt", None), ("prompt", [1]), ("prompt", ""), ("prompt_tokens", [1]), ("max_tokens", 0), ("unheard_of", 1), ("n", 2),
    ("logprobs", 21), ("logprobs", True), ("max_tokens", 256),
]  # fmt: skip

CASES = (
    [(path, base, f, v) for path, base in FAMILIES for f, v in WRONG]
    + [(path, base, f, v) for path, base in FAMILIES if "chat" in path for f, v in WRONG_CHAT]
    + [(path, base, f, v) for path, base in FAMILIES if "completions" in path and "chat" not in path for f, v in WRONG_TEXT]
    + [(path, base, f, v) for path, base in FAMILIES if "generate" in path for f, v in WRONG_NATIVE]
)  # fmt: skip


def test_each_wrong_field_is_named(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for path, base, field, value in CASES:
            answer = await site.post(path, {**base, field: value})
            where = f"{path} {field}={value!r:.60}: {answer.status} {answer.text:.200}"
            expected = 404 if field == "draft_model" and value == "other" else 400
            assert answer.status == expected, where
            param = answer.error["param"]
            assert param is not None and (param == field or param.startswith(f"{field}")), where
            assert answer.error["type"] == "invalid_request_error" and answer.error["message"], (
                where
            )
        assert site.engine.specs == []

    play(scenario)


NO_OBJECT = [
    b"", b"{", b"[]", b"42", b"null", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b'{"temperature": Infinity}', b"\xef\xbb\xbf{}",
    b'{"prompt": "\\ud800"}', b'{"\\udfff": 1}', b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 80 + b"1" + b"}" * 80,
    b'{"temperature": ' + b"9" * 5000 + b"}", b'{"prompt": "\xed\xa0\x80"}', b"{'prompt': 'x'}", b'{"prompt": "x"} trailing',
]  # fmt: skip


def test_what_is_no_proper_json_object_is_a_400(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for raw in NO_OBJECT:
            for path, _ in [*FAMILIES, ("/tokenize", 0), ("/detokenize", 0), ("/prefixes", 0)]:
                answer = await site.post(path, raw)
                assert answer.status == 400, (path, raw[:40], answer.text)
                assert answer.error["message"]
        assert site.engine.specs == []

    play(scenario)


def test_infinite_numbers_are_refused(play: Any) -> None:
    async def scenario(site: Site) -> None:
        answer = await site.post("/v1/completions", b'{"prompt": "x", "temperature": 1e999}')
        assert (answer.status, answer.error["param"]) == (400, "temperature")

    play(scenario)


def test_media_types(play: Any) -> None:
    async def scenario(site: Site) -> None:
        raw = json.dumps(TEXT).encode()
        for media_type, status in [
            ("application/json; charset=utf-8", 200),
            ("application/vnd.x+json", 200),
            ("", 200),
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
        ]:
            answer = await site.request("POST", "/generate", raw, {"Content-Type": media_type})
            assert answer.status == status, media_type
        assert (await site.request("POST", "/generate", raw)).status == 200

    play(scenario)


def test_params_reach_the_engine(play: Any) -> None:
    async def scenario(site: Site) -> None:
        body = {
            "prompt": [1, 2, 3], "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 9, "top_p": 0.25, "min_p": 0.125,
            "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"17": -100, "4": 2.5},
            "stop_token_ids": [11], "logprobs": 3, "cache_window": 128, "warm_start": True, "exit_threshold": 0.25, "min_loops": 2,
            "exit_kv": "copy", "kv_cache_mode": "int8", "loops": 6, "seed": -5, "priority": -3, "slo_ms": 250, "cache_salt": "s",
            "request_id": "mine",
        }  # fmt: skip
        answer = await site.post("/v1/completions", body)
        assert answer.status == 200, answer.text
        assert answer.json["id"] == "cmpl-mine"
        spec = site.engine.specs[0]
        p = spec.params
        assert (p.max_tokens, p.min_tokens, p.temperature, p.top_k) == (7, 2, 0.5, 9)
        assert (p.top_p, p.min_p, p.repetition_penalty) == (0.25, 0.125, 1.5)
        assert (p.presence_penalty, p.frequency_penalty) == (0.5, -0.5)
        assert dict(p.logit_bias) == {17: -100.0, 4: 2.5}
        assert p.stop_token_ids == (50256, 11)
        assert (p.logprobs, p.prompt_logprobs) == (3, -1)
        assert (p.cache_window, p.warm_start, p.kv_cache_mode, p.loops) == (128, True, "int8", 6)
        assert (p.exit_kind, p.exit_threshold, p.min_loops, p.exit_kv) == (
            "latent",
            0.25,
            2,
            "copy",
        )
        assert spec.sequences[0].prompt == Tokens((1, 2, 3))
        assert spec.sequences[0].seed == -5 & (1 << 64) - 1
        assert (spec.priority, spec.slo_ms, spec.label) == (-3, 250.0, "mine")
        assert spec.salt and spec.timeout_s == 600.0

    play(scenario)


def test_defaults_of_the_families(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for path, body in FAMILIES[:5]:
            assert (await site.post(path, body)).status == 200
        chat, text, _, _, native = [s.params for s in site.engine.specs]
        assert (chat.temperature, text.temperature, native.temperature) == (0.75, 0.75, 0.0)
        prompt = len(site.engine.specs[0].sequences[0].prompt)
        assert (chat.max_tokens, text.max_tokens, native.max_tokens) == (256 - prompt, 16, 128)
        assert chat.loops == 4 and chat.stop_token_ids == (50256,)
        assert site.engine.specs[0].salt == ""

    play(scenario, {"generation": {"temperature": 0.75, "top_p": "nonsense"}})


def test_dialects(play: Any) -> None:
    async def scenario(site: Site) -> None:
        async def params(**body: Any) -> Any:
            answer = await site.post("/api/v0/completions", {"prompt": [5], **body})
            assert answer.status == 200, answer.text
            return site.engine.specs[-1].params

        assert (await params(repeat_penalty=1.25)).repetition_penalty == 1.25
        assert (await params(max_tokens=-1)).max_tokens == 255
        assert (await params(top_k=-1)).top_k == 0
        assert (await params(top_k=10**9)).top_k == 0
        assert (await params(top_p=0)).top_p > 0
        assert (await params(temperature=None, stop=None, n=None)).temperature == 1.0
        assert (await params(ignore_eos=True)).stop_token_ids == ()
        assert (await params(stop="<|endoftext|>", ignore_eos=True)).stop_token_ids == (50256,)
        assert dict((await params(bad_words=["Hello"])).logit_bias) == {
            15496: -100.0,
            18435: -100.0,
        }
        assert (await params(draft_loops=2, verify_loops=6)).speculation == "chain"
        assert (await params(K_branches=3)).branches == 3
        assert (await params(draft_model="demo")).draft_loops == 1
        assert (await params(user="me", ttl=5, metadata={"a": 1}, verbosity="low")).loops == 4

    play(scenario)


def test_chat_messages_become_the_templates(play: Any, gpt2: Any) -> None:
    async def scenario(site: Site) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        messages = [
            {"role": "developer", "content": "be kind"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ]
        body = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
        answer = await site.post("/v1/chat/completions", {**body, "tool_choice": "auto"})
        assert answer.status == 200, answer.text
        prompt = gpt2.decode(site.engine.specs[0].sequences[0].prompt)
        assert prompt == "system: be kind\nuser: a\nb\nassistant: \ntool: 42\nassistant:"

    play(scenario)


def test_a_draft_needs_a_deeper_check(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for path in ("/generate/speculative", "/generate/tree_speculative", "/v1/completions"):
            for body in ({"loops": 1, "draft_loops": 1}, {"verify_loops": 1}):
                answer = await site.post(path, {**TEXT, **body})
                assert (answer.status, answer.error["param"]) == (400, "verify_loops"), path
        assert site.engine.specs == []

    play(scenario)


def test_a_chain_may_be_pipelined(play: Any) -> None:
    async def scenario(site: Site) -> None:
        body = {**TEXT, "mode": "pipelined", "draft_loops": 1, "draft_ahead": "auto"}
        for path in ("/generate/speculative", "/v1/completions"):
            assert (await site.post(path, body)).status == 200
            params = site.engine.specs[-1].params
            assert (params.speculation, params.draft_loops, params.draft_ahead) == (
                "pipelined",
                1,
                0,
            )
        for wrong, param in [
            ({"mode": "fast"}, "mode"),
            ({"exit_kind": "latent"}, "mode"),
            ({"draft_ahead": 65}, "draft_ahead"),
            ({"draft_ahead": "soon"}, "draft_ahead"),
        ]:
            answer = await site.post("/generate/speculative", {**body, **wrong})
            assert (answer.status, answer.error["param"]) == (400, param), answer.text
        answer = await site.post("/generate/tree_speculative", {**TEXT, "K_branches": 17})
        assert (answer.status, answer.error["param"]) == (400, "K_branches")
        for path in ("/generate", "/generate/tree_speculative"):
            answer = await site.post(path, {**TEXT, "mode": "pipelined"})
            assert (answer.status, answer.error["param"]) == (400, "mode")

    play(scenario)


def test_a_calls_arguments_that_are_no_unicode_text_are_a_400(play: Any) -> None:
    async def scenario(site: Site) -> None:
        call = {"function": {"name": "f", "arguments": '{"city": "\\ud800"}'}}
        body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await site.post(path, body)
            assert (answer.status, answer.error["param"]) == (400, "messages"), answer.text

    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    play(scenario, {"chat_template": template})


def test_truncation_and_long_prompts(play: Any) -> None:
    async def scenario(site: Site) -> None:
        ids = list(range(300))
        for side, expected in [("left", ids[-10:]), ("right", ids[:10])]:
            body = {"prompt": ids, "truncate_prompt_tokens": 10, "truncation_side": side}
            assert (await site.post("/v1/completions", body)).status == 200
            assert list(site.engine.specs[-1].sequences[0].prompt) == expected
        answer = await site.post("/v1/completions", {"prompt": ids})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "300" in answer.error["message"] and "256" in answer.error["message"]
        encode, encoded = TextModel._encode, []

        def counted(self: TextModel, text: str, add_special_tokens: bool) -> list[int]:
            encoded.append(len(text))
            return encode(self, text, add_special_tokens)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TextModel, "_encode", counted)
            answer = await site.post("/v1/completions", {"prompt": "word " * 200_000})
            assert "at least 820 tokens" in answer.error["message"]
            assert encoded == [16 * 256]  # not the million
            encoded.clear()
            answer = await site.post("/v1/completions", {"prompt": "-" * 60_000})
            assert "938 tokens" in answer.error["message"]
            assert encoded == [4096, 16384, 60_000]  # few ids so far: look further
        body = {"prompt": "word " * 20_000, "truncate_prompt_tokens": -1, "max_tokens": 1}
        assert (await site.post("/v1/completions", body)).status == 200  # long: encoded in a thread
        assert len(site.engine.specs[-1].sequences[0].prompt) == 255

    play(scenario)


def test_artifacts_refuse_what_they_cannot_do(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for body, param in [
            ({"warm_start": True}, "warm_start"),
            ({"prompt": "text"}, "prompt"),
            ({"stop": "x"}, "stop"),
            ({"draft_loops": 1}, "draft_loops"),
        ]:
            answer = await site.post("/v1/completions", {"prompt": [5], **body})
            assert (answer.status, answer.error["param"]) == (400, param)
        answer = await site.post("/v1/chat/completions", CHAT)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        site.engine.script = lambda spec: says([7, 8])
        answer = await site.post("/v1/completions", {"prompt": [5], "init_seed": 3})
        assert answer.json["choices"][0]["text"].split() == ["token_id:7", "token_id:8"]

    changes = {
        "has_injection": False, "tokenizer": None, "chat_template": None, "speculation": False, "has_init_seed": True,
    }  # fmt: skip
    play(scenario, changes)


def test_an_empty_prompt_is_the_bos_token_where_there_is_one(play: Any) -> None:
    async def scenario(site: Site) -> None:
        assert (await site.post("/v1/completions", {"prompt": ""})).status == 200
        assert site.engine.specs[0].sequences[0].prompt == Tokens((9,))

    play(scenario, {"tokens": {"bos": 9, "eos": [50256], "pad": None}})


def test_models_by_name(play: Any, settings: Any) -> None:
    from dataclasses import replace

    async def strict(site: Site) -> None:
        answer = await site.post("/v1/completions", {**TEXT, "model": "gpt-x"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        for name in ("demo", "other/name", "", None):
            answer = await site.post("/v1/completions", {**TEXT, "model": name})
            assert answer.json["model"] == (name or "demo")

    async def lenient(site: Site) -> None:
        answer = await site.post("/v1/completions", {**TEXT, "model": "gpt-x"})
        assert answer.json["model"] == "gpt-x"

    play(strict, settings=replace(settings, model_aliases=("other/name",)))
    play(lenient, settings=replace(settings, model_aliases=("*",)))
