"""What every request passes: health, errors, keys, CORS, limits; and the tools' endpoints."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontend.api_keys import read_keys
from scheduler.config import BadSetting, Settings
from tests.frontend.conftest import Site
from tests.frontend.scripted import card, says

GET_ROUTES = [
    "/healthz", "/health", "/ping", "/version", "/metrics", "/load", "/tokenizer_info", "/v1/models", "/v1/models/demo",
    "/models", "/api/v0/models", "/api/v0/models/demo", "/prefixes", "/",
]  # fmt: skip
POST_ROUTES = [
    "/v1/chat/completions", "/v1/completions", "/chat/completions", "/completions", "/api/v0/chat/completions",
    "/api/v0/completions", "/generate", "/generate/speculative", "/generate/tree_speculative", "/tokenize", "/detokenize",
]  # fmt: skip


def test_health_tells_the_reason_and_recovers(play: Any) -> None:
    async def scenario(site: Site) -> None:
        health = await site.get("/healthz")
        assert (health.status, health.text) == (503, "loading: no worker yet\n")
        refused = await site.post("/generate", {"prompt": "x"})
        assert (refused.status, refused.error["code"]) == (503, "not_loaded")
        assert refused.headers["retry-after"] == "1" and "no worker yet" in refused.error["message"]
        assert (await site.get("/v1/models")).status == 503
        assert (await site.get("/version")).status == 200
        site.engine.state, site.engine.reason = "failed", "TL003 truncated: the file ends early"
        assert "TL003" in (await site.get("/health")).text
        site.engine.load(card())
        while (health := await site.get("/healthz")).status != 200:
            await asyncio.sleep(0.01)
        assert health.text == "ok\n" and health.headers["content-type"].startswith("text/plain")
        site.engine.state, site.engine.reason = "engine_down", "no answer for 4 s"
        assert (await site.get("/healthz")).status == 503
        assert (await site.get("/v1/models")).status == 200  # still known
        state = (await site.get("/api/v0/models/demo")).json
        assert state["state"] == "not-loaded" and "loaded_context_length" not in state

    play(scenario, is_loaded=False)


def test_a_lame_server_takes_nothing_new_and_finishes_what_runs(
    play: Any, settings: Settings
) -> None:
    async def scenario(site: Site) -> None:
        gate = asyncio.Event()
        site.engine.script = lambda spec: [gate, *says([15496])]
        running = asyncio.create_task(site.post("/generate", {"prompt": "x"}))
        while not (await site.get("/load")).json["server_load"]:
            await asyncio.sleep(0.01)
        settings.path_in_run_dir("lame").touch()
        health = await site.get("/healthz")
        assert (health.status, "shutting down" in health.text) == (503, True)
        refused = await site.post("/v1/completions", {"prompt": "x"})
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        gate.set()
        assert (await running).json["text"] == "Hello"

    play(scenario)


def test_every_route_answers_its_methods(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for path in GET_ROUTES:
            whole = await site.get(path)
            assert whole.status == 200, path
            head = await site.request("HEAD", path)
            assert (head.status, head.body) == (200, b""), path
            assert head.headers["content-type"] == whole.headers["content-type"]
        for path in POST_ROUTES:
            for method in ("GET", "HEAD", "PUT", "DELETE"):
                wrong = await site.request(method, path)
                assert wrong.status == 405 and "POST" in wrong.headers["allow"]
                assert method == "HEAD" or wrong.error["code"] == "method_not_allowed"
        wrong = await site.post("/v1/models", {})
        assert wrong.status == 405 and "GET, HEAD" in wrong.headers["allow"]
        for path in ("/nope", "/v1/nope", "/api/v0/embeddings", "/generate/x/y"):
            missing = await site.post(path, {})
            assert (missing.status, missing.error["code"]) == (404, "not_found")
        assert (await site.get("/v1/models/a/b")).error["code"] == "model_not_found"

    play(scenario)


def test_request_ids_are_echoed_if_they_are_sane(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for given, kept in [("abc-1", True), ("x" * 129, False), ("a b", False), ("", False)]:
            answer = await site.get("/version", headers={"X-Request-Id": given})
            assert (answer.headers["x-request-id"] == given) is kept
            assert answer.headers["x-request-id"]
        native = await site.post("/generate", {"prompt": "x"}, headers={"X-Request-Id": "mine"})
        assert native.json["id"] == "mine"
        assert (await site.get("/nope", headers={"X-Request-Id": "e"})).headers[
            "x-request-id"
        ] == "e"

    play(scenario)


def test_api_keys_guard_and_separate_tenants(play: Any, settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\nalpha\n\nbeta\n")

    async def scenario(site: Site) -> None:
        body = {"prompt": "x", "cache_salt": "s"}
        for bad in ("", "Bearer", "Bearer gamma", "Basic alpha", "alpha", "Bearer alphabeta"):
            refused = await site.post("/generate", body, headers={"Authorization": bad})
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert refused.error["type"] == "authentication_error"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await site.get("/v1/models")).status == 401
        for key in ("alpha", "beta", "alpha"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await site.post("/generate", body, headers=headers)).status == 200
        salts = [spec.salt for spec in site.engine.specs]
        assert salts[0] == salts[2] != salts[1]
        assert not any("alpha" in salt for salt in salts)
        await site.post("/generate", {"prompt": "x"}, headers={"Authorization": "Bearer alpha"})
        assert site.engine.specs[-1].salt not in ("", salts[0])
        for open_path in ("/healthz", "/health", "/ping", "/metrics", "/version", "/"):
            assert (await site.get(open_path)).status == 200
        preflight = await site.request("OPTIONS", "/v1/chat/completions")
        assert preflight.status == 204

    play(scenario, settings=replace(settings, api_keys_file=str(path)))


@pytest.mark.parametrize("content", [None, b"", b"# only a comment\n", b"\xff"])
def test_a_keys_file_that_guards_nothing_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadSetting, match="TINYLOOP_API_KEYS_FILE"):
        read_keys(str(path))


def test_cors(play: Any, settings: Settings) -> None:
    origin = {"Origin": "https://app.example"}

    async def listed(site: Site) -> None:
        asked = {**origin, "Access-Control-Request-Headers": "authorization, content-type"}
        preflight = await site.request("OPTIONS", "/v1/chat/completions", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert (await site.get("/v1/models", headers=origin)).headers["vary"] == "Origin"
        error = await site.post("/generate", {}, headers=origin)
        assert error.status == 400 and "access-control-allow-origin" in error.headers
        other = await site.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert "access-control-allow-credentials" not in preflight.headers

    async def none(site: Site) -> None:
        answer = await site.get("/v1/models", headers=origin)
        assert "access-control-allow-origin" not in answer.headers

    async def any_(site: Site) -> None:
        answer = await site.get("/v1/models", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "*"

    play(listed, settings=replace(settings, cors_origins=("https://app.example",)))
    play(none)
    play(any_, settings=replace(settings, cors_origins=("*",)))


def test_bodies_are_bounded(play: Any, settings: Settings) -> None:
    async def scenario(site: Site) -> None:
        big = b'{"prompt": "' + b"x" * 2000 + b'"}'
        for body, headers in [
            (big, {"Content-Length": str(len(big))}),
            ([big[:500], big[500:1500], big[1500:]], {}),  # chunked: no length is told
            (b"", {"Content-Length": str(9 << 10)}),  # so large that it is not even read
            ([big] * 6, {}),
        ]:
            refused = await site.request("POST", "/generate", body, headers)
            assert (refused.status, refused.error["code"]) == (413, "body_too_large")
            assert refused.headers["connection"] == "close"

    play(scenario, settings=replace(settings, body_limit_bytes=1024))


def test_a_bug_is_a_500_without_details(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: Site) -> None:
        def broken(spec: Any) -> Any:
            raise RuntimeError("secret detail")

        site.engine.script = broken
        answer = await site.post("/generate", {"prompt": "x"})
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert "secret" not in answer.text and "secret detail" in caplog.text
        assert answer.headers["x-should-retry"] == "false"

    play(scenario)


def test_metrics_join_the_schedulers_and_our_own(play: Any) -> None:
    async def scenario(site: Site) -> None:
        site.engine.exposition = "# HELP tinyloop_queue_depth Waiting.\n# TYPE tinyloop_queue_depth gauge\ntinyloop_queue_depth 3\n"
        await site.get("/nope")
        await site.post("/generate", {"prompt": "x"})
        metrics = await site.get("/metrics")
        assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = metrics.text.splitlines()
        assert "tinyloop_queue_depth 3" in lines and "tinyloop_scheduler_up 1" in lines
        assert 'tinyloop_http_requests_total{method="GET",route="none",status="404"} 1.0' in lines
        assert (
            'tinyloop_http_requests_total{method="POST",route="/generate",status="200"} 1.0'
            in lines
        )
        assert "tinyloop_http_requests_in_progress 1.0" in lines
        assert not [line for line in lines if "_created" in line]
        site.engine.exposition = None
        down = await site.get("/metrics")
        assert down.status == 200 and "tinyloop_scheduler_up 0" in down.text.splitlines()

    play(scenario)


def test_tokenizing(play: Any) -> None:
    async def scenario(site: Site) -> None:
        answer = (await site.post("/tokenize", {"prompt": "Hello world"})).json
        assert answer == {"tokens": [15496, 995], "count": 2, "max_model_len": 256}
        answer = (await site.post("/tokenize", {"content": "Hello", "with_pieces": True})).json
        assert answer["tokens"] == [{"id": 15496, "piece": "Hello"}]
        chat = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
        answer = (await site.post("/tokenize", chat)).json
        assert "".join(answer["token_strs"]) == "user: hi\nassistant:"
        answer = (await site.post("/detokenize", {"tokens": [15496, 995, 50256]})).json
        assert answer["prompt"] == answer["content"] == "Hello world<|endoftext|>"
        for path, body, param in [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"prompt": "x", "content": "x"}, "prompt"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
        ]:
            wrong = await site.post(path, body)
            assert (wrong.status, wrong.error["param"]) == (400, param)
        info = (await site.get("/tokenizer_info")).json
        assert info["eos_token"] == "<|endoftext|>" and info["bos_token"] is None

    play(scenario)


def test_prefixes(play: Any) -> None:
    async def scenario(site: Site) -> None:
        body = {"name": "sys", "prompt": "Hello world", "loops": 3, "cache_salt": "s"}
        made = await site.post("/prefixes", body)
        assert made.status == 201 and made.json["name"] == "sys" and made.json["bytes"] == 4096
        op, named = site.engine.commands[0]
        assert op == "register" and list(named["tokens"]) == [15496, 995]
        assert (named["loops"], named["salt"]) == (3, "/s")
        listed = await site.get("/prefixes?cache_salt=s")
        assert listed.json["data"][0]["hits"] == 3
        gone = await site.request("DELETE", "/prefixes/sys?cache_salt=s")
        assert (gone.status, gone.body) == (204, b"")
        assert site.engine.commands[-1] == ("delete", {"salt": "/s", "name": "sys"})
        for code, status in [
            ("not_found", 404),
            ("exists", 409),
            ("pool_full", 409),
            ("invalid_request", 400),
            ("engine_down", 503),
        ]:
            site.engine.prefix_code = code
            refused = await site.post("/prefixes", body)
            assert (refused.status, refused.error["code"]) == (status, code)
        for field, value in [
            ("name", ""),
            ("name", None),
            ("name", "a/b"),
            ("prompt", None),
            ("loops", 99),
            ("oops", 1),
        ]:
            wrong = await site.post("/prefixes", {**body, field: value})
            assert (wrong.status, wrong.error["param"]) == (400, field)
        site.engine.commands.clear()
        for method, path, param in [
            ("DELETE", "/prefixes/" + "x" * 201, "name"),
            ("DELETE", "/prefixes/a\nb", "name"),
            ("DELETE", "/prefixes/sys?cache_salt=" + "s" * 201, "cache_salt"),
            ("GET", "/prefixes?cache_salt=" + "s" * 201, "cache_salt"),
        ]:
            wrong = await site.request(method, path)
            assert (wrong.status, wrong.error["param"]) == (400, param)
        assert site.engine.commands == []

    play(scenario)


def test_a_websocket_is_turned_away(play: Any) -> None:
    async def scenario(site: Site) -> None:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        for path in ("/generate", "/nowhere"):
            await site.app({"type": "websocket", "path": path, "headers": []}, receive, send)
        assert sent == [{"type": "websocket.close"}] * 2  # before it was accepted: HTTP 403

    play(scenario)


def test_the_chat_page_is_one_file_that_calls_routes_we_have(play: Any) -> None:
    async def scenario(site: Site) -> None:
        page = await site.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.findall(r"https?://|<link|src=|@import|innerHTML", page.text)
        called = set(re.findall(r'"((?:v1|api/v0)/[a-z/]+|metrics)"', page.text))
        assert called == {"v1/models", "api/v0/chat/completions", "api/v0/completions", "metrics"}
        meta = (await site.get("/v1/models")).json["data"][0]["meta"]
        assert (
            meta["loops"] == {"default": 4, "trained": 8, "max": 16} and meta["has_chat_template"]
        )

    play(scenario)
