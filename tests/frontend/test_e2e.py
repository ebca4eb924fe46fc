"""The real processes over HTTP: the official SDK, streams, stops, disconnects, and whatever a client may send."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.harness import ROOT, Stack, free_port

pytestmark = pytest.mark.e2e

CHAT: list[Any] = [{"role": "user", "content": "Tell me of loops"}]


@pytest.fixture(scope="module")
def stack(toy_artifact: Path) -> Iterator[Stack]:
    with Stack(toy_artifact, num_web=2, env={"TINYLOOP_CORS_ORIGINS": "*"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=30)


def call(stack: Stack, method: str, path: str, body: Any = None, raw: bytes | None = None) -> Any:
    """(status, headers, text) of one exchange on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=30)
    try:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, answer.read().decode()
    finally:
        connection.close()


def post(stack: Stack, path: str, **body: Any) -> Any:
    status, _, text = call(stack, "POST", path, body)
    assert status == 200, text
    return json.loads(text)


def series(stack: Stack, name: str) -> float:
    return sum(s.value for s in samples(stack) if s.name == name)


def samples(stack: Stack) -> list[Any]:
    """All samples of a scrape that the scheduler answered in time (on a busy machine it may not)."""
    for _ in range(5):
        status, _, text = call(stack, "GET", "/metrics")
        assert status == 200
        found = [s for family in text_string_to_metric_families(text) for s in family.samples]
        if any(s.name == "tinyloop_scheduler_up" and s.value == 1 for s in found):
            return found
    raise AssertionError("the scheduler does not answer scrapes")


# ------------------------------------------------------------------------------------------------------ the SDK


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "toy-pre" and model.owned_by == "tinyloop"
    assert client.models.retrieve("toy-pre") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "toy-pre",
        "messages": CHAT,
        "max_tokens": 24,
        "temperature": 1,
        "seed": 3,
    }
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=usage))
    text = "".join([c.choices[0].delta.content or "" for c in chunks if c.choices])
    assert text == choice.message.content
    assert len(chunks) > 10, "it was not streamed"
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}  # type: ignore[union-attr]
    )
    assert {c.choices[0].finish_reason for c in chunks[:-2]} == {None}
    assert chunks[-2].choices[0].finish_reason == "length"


def test_completions_with_everything(client: openai.OpenAI) -> None:
    asked: Any = {"model": "toy-pre", "max_tokens": 12, "temperature": 1, "seed": 5}
    whole = client.completions.create(**asked, prompt=["the way", "of loops"], n=2)
    texts = [c.text for c in whole.choices]
    assert [c.index for c in whole.choices] == [0, 1, 2, 3] and len(set(texts)) == 4
    streamed = [""] * 4
    for chunk in client.completions.create(
        **asked, prompt=["the way", "of loops"], n=2, stream=True
    ):
        for c in chunk.choices:
            streamed[c.index] += c.text
    assert streamed == texts
    alone = client.completions.create(**asked, prompt="the way")
    assert alone.choices[0].text == texts[0]


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    """What evaluation harnesses do: the log-probabilities of given ids, greedy ones recognisable to the bit."""
    made = client.completions.create(
        model="toy-pre", prompt="the way", max_tokens=8, temperature=0, logprobs=1,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice: Any = made.choices[0]
    prompt, generated = choice.prompt_token_ids, choice.token_ids
    scored = client.completions.create(
        model="toy-pre",
        prompt=prompt + generated,
        max_tokens=1,
        temperature=0,
        logprobs=1,
        echo=True,
    )
    logprobs: Any = scored.choices[0].logprobs
    assert len(logprobs.tokens) == len(prompt) + 8 + 1 == len(logprobs.top_logprobs)
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    given_, theirs = logprobs.token_logprobs[len(prompt) : -1], choice.logprobs.token_logprobs
    assert given_ == pytest.approx(theirs, abs=1e-4)
    for value, top in zip(given_, logprobs.top_logprobs[len(prompt) : -1], strict=True):
        assert value == max(top.values())  # greedy tokens: bit-equal to the best


def test_knobs_through_extra_body(client: openai.OpenAI) -> None:
    asked: Any = {"model": "toy-pre", "prompt": "the way", "max_tokens": 16, "temperature": 0}
    texts = {
        loops: client.completions.create(**asked, extra_body={"loops": loops}).choices[0].text
        for loops in (1, 4, 8)
    }
    assert len(set(texts.values())) == 3
    body = {"verify_loops": 4, "draft_loops": 1}
    assert client.completions.create(**asked, extra_body=body).choices[0].text == texts[4]


def test_errors_reach_the_sdk_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="toy-pre", messages=CHAT, temperature=9)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="toy-pre", prompt=[5] * 600, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-x", prompt="x")


# -------------------------------------------------------------------------------------------- streams and stops


@pytest.mark.parametrize("seed", range(6))
def test_stream_equals_whole_and_stops_span_tokens(stack: Stack, seed: int) -> None:
    asked = {"prompt": "the way", "max_tokens": 40, "temperature": 1.0, "sample_seed": seed}
    whole = post(stack, "/generate", **asked, ignore_eos=True)
    text = whole["text"]
    stop = text[12:17]  # the toy's tokens are one to five bytes: this spans some
    first = text.index(stop)
    completed = series(stack, "tinyloop_requests_completed_total")
    stopped = post(stack, "/generate", **asked, ignore_eos=True, stop=[stop, "no such text"])
    assert stopped["text"] == text[:first] and stopped["stop_reason"] == stop
    assert stopped["finish_reason"] == "stop"
    assert stopped["tokens"] == whole["tokens"][: len(stopped["tokens"])]
    assert len(stopped["tokens"]) < 40
    assert series(stack, "tinyloop_requests_completed_total") == completed + 1  # not cancelled
    body = {**asked, "ignore_eos": True, "stop": stop, "stream": True}
    status, headers, stream = call(stack, "POST", "/generate", body)
    assert status == 200 and headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = [f.removeprefix("data: ") for f in stream.split("\n\n") if f and f[0] != ":"]
    assert frames.pop() == "[DONE]"
    pieces = [json.loads(f) for f in frames]
    assert "".join([p["text"] for p in pieces[:-1]]) == text[:first]
    assert pieces[-1]["usage"]["completion_tokens"] == len(stopped["tokens"])


def test_the_same_knobs_give_the_same_tokens_in_every_family(stack: Stack) -> None:
    asked = {"prompt": "the way", "max_tokens": 10, "temperature": 0.8, "top_k": 40, "loops": 3}
    native = post(stack, "/generate", **asked, sample_seed=11)
    for path in ("/v1/completions", "/api/v0/completions"):
        other = post(stack, path, **asked, seed=11, return_token_ids=True)
        assert other["choices"][0]["token_ids"] == native["tokens"]
    lm = post(stack, "/api/v0/completions", **asked, seed=11)
    assert lm["stats"]["mean_loops"] == 3.0 and lm["stats"]["time_to_first_token"] > 0


def test_a_second_sight_of_a_prompt_is_cached(stack: Stack) -> None:
    asked = {"prompt": list(range(300, 440)), "max_tokens": 2, "cache_salt": "second sight"}
    usages = [post(stack, "/v1/completions", **asked)["usage"] for _ in range(3)]
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usages]
    assert cached[0] == 0 and cached[-1] == 128  # whole blocks of 64 positions


def test_prefixes_are_registered_hit_listed_and_deleted(stack: Stack) -> None:
    tokens = list(range(300, 370))
    made = {"name": "system", "prompt_tokens": tokens, "cache_salt": "p"}
    status, _, text = call(stack, "POST", "/prefixes", made | {"prompt_tokens": tokens[:63]})
    refused = json.loads(text)["error"]
    assert (status, refused["param"]) == (400, "prompt_tokens") and "64" in refused["message"]
    status, _, text = call(stack, "POST", "/prefixes", made)
    assert status == 201, text
    hit = post(stack, "/generate", prompt_tokens=[*tokens, 7], max_tokens=1, cache_salt="p")
    assert hit["usage"]["cached_tokens"] == 64
    other = post(stack, "/generate", prompt_tokens=[*tokens, 7], max_tokens=1, cache_salt="q")
    assert other["usage"]["cached_tokens"] == 0  # another tenant
    listed = json.loads(call(stack, "GET", "/prefixes?cache_salt=p")[2])["data"]
    assert [(e["name"], e["hits"]) for e in listed if e["name"]] == [("system", 1)]
    assert call(stack, "DELETE", "/prefixes/system?cache_salt=q")[0] == 404
    assert call(stack, "DELETE", "/prefixes/system?cache_salt=p")[0] == 204
    assert call(stack, "DELETE", "/prefixes/system?cache_salt=p")[0] == 404


# ------------------------------------------------------------------------------------------------- disconnects


def open_stream(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


LONG = {"prompt": "the way", "max_tokens": 400, "ignore_eos": True, "loops": 8}


def assert_leaving_cancels(stack: Stack, port: int, stream: bool) -> None:
    cancelled = series(stack, "tinyloop_requests_cancelled_total")
    connection = open_stream(port, "/generate", {**LONG, "stream": stream})
    if stream:
        seen = b""
        while seen.count(b"data: ") < 3:
            seen += connection.recv(4096)
    else:
        stack.wait_until(
            lambda: series(stack, "tinyloop_requests_in_flight") > 0, "the request to run"
        )
    connection.close()
    left = time.monotonic()
    stack.wait_until(
        lambda: series(stack, "tinyloop_requests_cancelled_total") > cancelled, "the cancel", 3
    )
    assert time.monotonic() - left < 2.0
    stack.wait_until(lambda: series(stack, "tinyloop_requests_in_flight") == 0, "an idle engine", 3)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_cancels(stack: Stack, stream: bool) -> None:
    assert_leaving_cancels(stack, stack.port, stream)


def test_a_request_whose_client_left_while_it_waited_never_runs(stack: Stack) -> None:
    tokens = series(stack, "tinyloop_generated_tokens_total")
    running = open_stream(stack.port, "/v1/completions", {**LONG, "n": 16, "max_tokens": 300})
    more = [open_stream(stack.port, "/v1/completions", {**LONG, "n": 16}) for _ in range(5)]
    stack.wait_until(lambda: series(stack, "tinyloop_queue_depth") > 0, "a queue")
    cancelled = series(stack, "tinyloop_requests_cancelled_total")
    for connection in [*more, running]:
        connection.close()
    stack.wait_until(
        lambda: series(stack, "tinyloop_requests_cancelled_total") == cancelled + 6,
        "the cancels",
        5,
    )
    stack.wait_until(lambda: series(stack, "tinyloop_requests_in_flight") == 0, "an idle engine", 5)
    assert series(stack, "tinyloop_queue_depth") == 0
    assert series(stack, "tinyloop_generated_tokens_total") - tokens < 6 * 16 * 300


def test_under_uvicorn(stack: Stack) -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "frontend.asgi:app",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    env = {k: v for k, v in stack.env.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        other = type("Other", (), {"port": port})

        def is_ready() -> bool:
            try:
                return bool(call(other, "GET", "/healthz")[0] == 200)  # type: ignore[arg-type]
            except OSError:
                return False

        stack.wait_until(is_ready, "uvicorn to serve", 30)
        for stream in (True, False):
            assert_leaving_cancels(stack, port, stream)
        status, _, text = call(other, "POST", "/generate", {"prompt": "x", "max_tokens": 3})  # type: ignore[arg-type]
        assert (status, len(json.loads(text)["tokens"])) == (200, 3)
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors, errors


# ------------------------------------------------------------------------------------------------- operations


def test_metrics_are_the_same_from_every_process(stack: Stack) -> None:
    post(stack, "/generate", prompt="x", max_tokens=1)
    seen = set()
    for _ in range(12):  # connections fall on both processes
        named = {
            s.name: s.value
            for s in samples(stack)
            if s.name.startswith("tinyloop_requests_") and not s.labels
        }
        seen.add(tuple(sorted(named.items())))
    assert len(seen) == 1 and dict(seen.pop())["tinyloop_requests_completed_total"] >= 1
    routes = {s.labels["route"] for s in samples(stack) if s.name == "tinyloop_http_requests_total"}
    assert {"/generate", "/healthz", "/metrics"} <= routes
    _, _, text = call(stack, "GET", "/metrics")
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a series is declared twice"


def test_health_while_a_long_prompt_runs(stack: Stack) -> None:
    connection = open_stream(
        stack.port, "/generate", {"prompt_tokens": [5] * 480, "max_tokens": 20, "loops": 8}
    )
    slowest = 0.0
    for _ in range(20):
        began = time.monotonic()
        assert call(stack, "GET", "/healthz")[0] == 200
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 1.0
    connection.close()


def test_head_and_preflight(stack: Stack) -> None:
    status, headers, text = call(stack, "HEAD", "/v1/models")
    assert (status, text) == (200, "") and headers["content-type"].startswith("application/json")
    status, headers, _ = call(stack, "OPTIONS", "/v1/chat/completions")
    assert status == 204


# ---------------------------------------------------------------------------------------------------- bad input

PATHS = [
    "/v1/chat/completions", "/v1/completions", "/api/v0/chat/completions", "/api/v0/completions", "/generate",
    "/generate/speculative", "/generate/tree_speculative", "/tokenize", "/detokenize",
]  # fmt: skip
FIELDS = [
    "model", "prompt", "prompt_tokens", "messages", "tokens", "content", "temperature", "top_p", "top_k", "min_p", "n", "best_of",
    "stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "stream", "stream_options", "seed",
    "sample_seed", "loops", "draft_loops", "verify_loops", "draft_ahead", "K_branches", "cache_window", "warm_start", "exit_kind",
    "exit_threshold", "exit_kv", "min_loops", "min_tokens", "kv_cache_mode", "init_seed", "priority", "slo_ms", "cache_salt",
    "request_id", "response_format", "tools", "tool_choice", "functions", "modalities", "chat_template_kwargs", "ignore_eos",
    "truncate_prompt_tokens", "truncation_side", "bad_words", "repetition_penalty", "frequency_penalty", "suffix", "stream_interval",
]  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(
        [10**30, -(10**30), 2**63, -(2**63), 511, 512, 100000, 1.5, -0.0, 1e308, -1e308]
    )
    | st.text(max_size=8)
    | st.sampled_from(
        ["\ud800", "\udc00x", "\x00", "stop", "user", "text", "auto", "😊", "latent", "gate"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "function", "name", "0", "-1", "600", "a"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=bodies, is_based=st.booleans())
def test_any_json_is_an_answer_or_a_named_fault(
    stack: Stack, path: str, body: dict[str, Any], is_based: bool
) -> None:
    base: dict[str, Any] = {}
    if is_based:
        base = {"messages": CHAT} if "chat" in path else {"prompt": "x"}
    raw = json.dumps({**base, "max_tokens": 2, **body}).encode()
    status, headers, text = call(stack, "POST", path, raw=raw)
    if status != 200:
        assert 400 <= status < 500, (status, text)
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert error["param"], error
    elif headers["content-type"].startswith("text/event-stream"):
        assert text.endswith("data: [DONE]\n\n") and '"error"' not in text
    else:
        assert "NaN" not in text and "Infinity" not in text and json.loads(text)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(PATHS),
    raw=st.binary(max_size=40)
    | st.sampled_from(
        [
            b"[" * 50_000, b'{"a":' * 50_000, b'{"prompt": NaN}', b'{"prompt":"x","max_tokens":' + b"9" * 6000 + b"}",
            b'{"prompt": "\\ud83d"}', b'{"prompt":"x","temperature":-Infinity}', b"\x00", b'{"prompt": "x"',
        ]
    ),
)  # fmt: skip
def test_any_bytes_are_a_400(stack: Stack, path: str, raw: bytes) -> None:
    status, _, text = call(stack, "POST", path, raw=raw)
    assert status == 400, (status, text)
    assert json.loads(text)["error"]["message"]


def test_nobody_died_of_it(stack: Stack) -> None:
    """Runs last: every process is the one that was started, and serves."""
    for process in stack.processes.values():
        assert process.poll() is None
    assert len(stack.pids("web")) == 2 and all(
        os.path.exists(f"/proc/{p}") for p in stack.pids("web")
    )
    assert "Traceback" not in stack.logs(), stack.logs()
    assert stack.logs().count("Booting worker") <= 2
    assert post(stack, "/generate", prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2
