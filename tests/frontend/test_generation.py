"""From token events to answers: a stream adds up to the whole, stops and ends are right, failures are told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from frontend import generation as generation_module
from scheduler.messages import TokenEvent, TokenLogprob, Tokens
from scheduler.stream import Rejection, RequestSpec
from tests.frontend.conftest import Answer, Site
from tests.frontend.scripted import end, says

SMILE = [15496, 995, 30325, 232, 0]  # Hello world 😊!
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def streamed_text(path: str, answer: Answer) -> str:
    if "chat" in path:
        choices = [c for e in answer.events for c in e["choices"]]
        return "".join([c["delta"].get("content", "") for c in choices])
    if path == "/generate":
        return "".join([e.get("text", "") for e in answer.events])
    return "".join([c["text"] for e in answer.events for c in e["choices"]])


def whole_text(path: str, answer: Answer) -> str:
    if path == "/generate":
        return str(answer.json["text"])
    choice = answer.json["choices"][0]
    return str(choice["message"]["content"] if "chat" in path else choice["text"])


STOPS: list[tuple[list[str], str, str]] = [  # stops, text, finish_reason
    ([], "Hello world 😊!", "length"),
    (["wor"], "Hello ", "stop"),
    (["lo wor"], "Hel", "stop"),  # spans two tokens
    (["😊!"], "Hello world ", "stop"),  # spans a cut character
    (["zzz", " world 😊", "!"], "Hello", "stop"),
    (["world 😊?", "!?"], "Hello world 😊!", "length"),  # held back, then let go
    (["!"], "Hello world 😊", "stop"),  # on the very last token
]


@pytest.mark.parametrize("per_event", [1, 2, 5])
def test_stream_equals_whole_and_stops_never_leak(play: Any, per_event: int) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = lambda spec: says(SMILE, per_event=per_event)
        for path, base in [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "hi"}),
            ("/generate", {"prompt": "hi"}),
        ]:
            for stops, text, finish in STOPS:
                body = {**base, "stop": stops, "max_tokens": 5}
                whole = await site.post(path, body)
                assert whole.status == 200, whole.text
                stream = await site.post(path, {**body, "stream": True})
                assert whole_text(path, whole) == streamed_text(path, stream) == text
                first = whole.json if path == "/generate" else whole.json["choices"][0]
                assert first["finish_reason"] == finish
                last = stream.events[-1] if path == "/generate" else stream.events[-1]["choices"][0]
                assert last["finish_reason"] == finish
                assert whole.json["usage"]["completion_tokens"] <= 5

    play(scenario)


def test_a_stop_string_ends_the_sequence_in_the_engine(play: Any) -> None:
    async def scenario(site: Site) -> None:
        last = end([], "stop")[0]
        # the engine runs ahead by two tokens before it hears of the stop
        site.engine.script = lambda spec: [*says(SMILE, "")[:4], replace(last, first_index=4)]
        answer = await site.post("/generate", {"prompt": "hi", "stop": "world"})
        assert site.engine.finished == [(0, 2)]
        assert (answer.json["text"], answer.json["tokens"]) == ("Hello ", SMILE[:2])
        assert (answer.json["finish_reason"], answer.json["stop_reason"]) == ("stop", "world")
        assert site.engine.cancelled == []

    play(scenario)


def test_stop_options(play: Any) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = lambda spec: says(SMILE)

        async def choice(**body: Any) -> Any:
            answer = await site.post("/v1/completions", {"prompt": "hi", **body})
            return answer.json["choices"][0]

        assert (await choice(stop="wor", include_stop_str_in_output=True))["text"] == "Hello wor"
        found = await choice(stop=["Hello", "!"], min_tokens=2)
        assert (found["text"], found["stop_reason"]) == ("Hello world 😊", "!")
        site.engine.script = lambda spec: says([15496, 50256], "stop")
        found = await choice()
        assert (found["text"], found["finish_reason"], found["stop_reason"]) == (
            "Hello",
            "stop",
            None,
        )
        site.engine.script = lambda spec: says([15496, 995], "stop")
        found = await choice(stop_token_ids=[995])
        assert (found["text"], found["stop_reason"]) == ("Hello", 995)
        found = await choice(stop_token_ids=[995], include_stop_str_in_output=True)
        assert found["text"] == "Hello world"
        site.engine.script = lambda spec: says([15496, 50256, 995])
        found = await choice(ignore_eos=True)
        assert found["text"] == "Hello world"
        found = await choice(ignore_eos=True, skip_special_tokens=False)
        assert found["text"] == "Hello<|endoftext|> world"

    play(scenario)


def several(spec: RequestSpec) -> list[TokenEvent]:
    """Each sequence says its own prompt's first id and index, interleaved."""
    runs = [says([s.prompt[0], 1000 + i], index=i) for i, s in enumerate(spec.sequences)]
    return [run[step] for step in range(2) for run in reversed(runs)]


def test_choices_are_ordered_by_prompt_and_each_has_its_own_noise(play: Any) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = several
        body = {"prompt": [[11], [12]], "n": 2, "return_token_ids": True, "seed": 7}
        answer = await site.post("/v1/completions", body)
        choices = answer.json["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        assert [c["token_ids"] for c in choices] == [[11, 1000], [11, 1001], [12, 1002], [12, 1003]]
        assert [c["prompt_token_ids"] for c in choices] == [[11], [11], [12], [12]]
        seeds = [s.seed for s in site.engine.specs[0].sequences]
        assert seeds[0] == 7 and len(set(seeds)) == 4
        assert answer.json["usage"]["prompt_tokens"] == 2
        assert answer.json["usage"]["completion_tokens"] == 8
        stream = await site.post("/v1/completions", {**body, "stream": True})
        texts, ends = [""] * 4, [0] * 4
        for event in stream.events:
            for c in event["choices"]:
                texts[c["index"]] += c["text"]
                ends[c["index"]] += c["finish_reason"] is not None
        assert texts == [c["text"] for c in choices] and ends == [1] * 4

    play(scenario)


def test_best_of_answers_with_the_likeliest(play: Any) -> None:
    def script(spec: RequestSpec) -> list[TokenEvent]:
        assert spec.params.logprobs == 0
        result = []
        for i, value in enumerate([-3.0, -1.0, -2.0]):
            event = TokenEvent(0, i, 0, Tokens([1000 + i]), (TokenLogprob(value),))
            result += end([event], "length", i)
        return result

    async def scenario(site: Site) -> None:
        site.engine.script = script
        body = {"prompt": [5], "n": 2, "best_of": 3, "return_token_ids": True}
        answer = await site.post("/v1/completions", body)
        choices = answer.json["choices"]
        assert [(c["index"], c["token_ids"]) for c in choices] == [(0, [1001]), (1, [1002])]
        assert choices[0]["logprobs"] is None
        assert answer.json["usage"]["completion_tokens"] == 3
        answer = await site.post("/v1/completions", {**body, "stream": True})
        assert (answer.status, answer.error["param"]) == (400, "best_of")

    play(scenario)


def with_prompt(spec: RequestSpec) -> list[TokenEvent]:
    """The prompt's log-probabilities come by themselves, before the first token."""
    num_prompt = len(spec.sequences[0].prompt)
    entries = tuple(
        TokenLogprob(-0.5 * i, Tokens([i]), (-0.25,)) if i else None for i in range(num_prompt)
    )
    ahead = TokenEvent(0, 0, 0, Tokens(), prompt_logprobs=entries)
    return [ahead, *says(SMILE[: spec.params.max_tokens])]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_with_logprobs(play: Any, max_tokens: int) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = with_prompt
        prompt = [30325, 232, 995]  # " 😊 world"
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        answer = await site.post("/v1/completions", body)
        choice = answer.json["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
        assert text == " 😊 world" + ("Hello world 😊!" if max_tokens else "")
        assert len(logprobs["tokens"]) == 3 + max_tokens
        assert {len(v) for v in logprobs.values()} == {3 + max_tokens}
        assert logprobs["token_logprobs"][:3] == [None, -0.5, -1.0]
        assert logprobs["top_logprobs"][0] is None and " world" in logprobs["top_logprobs"][2]
        assert logprobs["text_offset"][:3] == [0, 1, 2]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert text[offset : offset + len(token)] == token
        assert answer.json["usage"]["completion_tokens"] == max_tokens
        assert choice["finish_reason"] == "length"
        stream = await site.post("/v1/completions", {**body, "stream": True})
        parts = [c for e in stream.events for c in e["choices"]]
        assert "".join([c["text"] for c in parts]) == text
        assert sum([c["logprobs"]["tokens"] for c in parts], []) == logprobs["tokens"]
        assert sum([c["logprobs"]["text_offset"] for c in parts], []) == logprobs["text_offset"]

    play(scenario)


def test_missing_prompt_logprobs_are_an_error_not_a_guess(play: Any) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = lambda spec: says(SMILE)
        answer = await site.post("/v1/completions", {"prompt": [1, 2], "echo": True, "logprobs": 1})
        assert (answer.status, answer.error["code"]) == (500, "engine_error")

    play(scenario)


def test_prompt_logprobs_in_vllms_shape(play: Any) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = with_prompt
        answer = await site.post("/v1/completions", {"prompt": [5, 1, 9], "prompt_logprobs": 1})
        first, second, third = answer.json["choices"][0]["prompt_logprobs"]
        assert first is None
        assert second["1"] == {"logprob": -0.25, "rank": 1, "decoded_token": '"'}
        assert third["9"]["logprob"] == -1.0 and third["9"]["rank"] is None

    play(scenario)


def test_chat_stream_is_worded_as_clients_expect(play: Any) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = lambda spec: says(SMILE, "stop")
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        answer = await site.post("/v1/chat/completions", body)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        *chunks, usage = answer.events
        deltas = [c["choices"][0]["delta"] for c in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in d for d in deltas[1:]) and deltas[-1] == {}
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert set(reasons[:-1]) == {None} and reasons[-1] == "stop"
        assert all(c["usage"] is None for c in chunks)
        assert len({(c["id"], c["created"], c["model"]) for c in answer.events}) == 1
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        plain = await site.post("/v1/chat/completions", {**CHAT, "stream": True})
        assert all("usage" not in c for c in plain.events)
        body["stream_options"]["continuous_usage_stats"] = True
        running = await site.post("/v1/chat/completions", body)
        counts = [c["usage"]["completion_tokens"] for c in running.events]
        assert counts == sorted(counts) and counts[-1] == 5

    play(scenario)


def test_lmstudio_adds_its_objects_in_both_ways(play: Any) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = lambda spec: says(SMILE, "stop")
        whole = (await site.post("/api/v0/chat/completions", CHAT)).json
        assert whole["stats"]["tokens_per_second"] == 10.0  # 5 tokens in 0.6 - 0.1 s
        assert whole["stats"]["time_to_first_token"] == 0.1
        assert whole["stats"]["generation_time"] == 0.5
        assert whole["stats"]["stop_reason"] == "eosFound"
        assert whole["model_info"]["kv_cache_mode"] == "fp32"
        assert whole["model_info"]["runtime"]["commit"] is None
        assert whole["runtime"]["supported_formats"] == ["tinyloop"]
        assert whole["system_fingerprint"] == "demo"
        stream = (await site.post("/api/v0/completions", {"prompt": "x", "stream": True})).events
        assert stream[-1]["stats"]["stop_reason"] == "eosFound" and "usage" in stream[-1]
        assert all("stats" not in e for e in stream[:-1])
        stopped = (await site.post("/api/v0/completions", {"prompt": "x", "stop": "wor"})).json
        assert stopped["stats"]["stop_reason"] == "stopStringFound"
        openai = (await site.post("/v1/chat/completions", CHAT)).json
        assert "stats" not in openai and "model_info" not in openai
        body = {"prompt": "x", "loops": 12, "draft_loops": 3}
        deep = (await site.post("/api/v0/completions", body)).json
        assert deep["warnings"] and deep["stats"]["rejected_draft_tokens_count"] == 0

    play(scenario)


def test_native_frames(play: Any) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = lambda spec: says(SMILE)
        body = {"prompt": "x", "logprobs": 1, "loops": 12, "sample_seed": 5, "request_id": "r1"}
        whole = (await site.post("/generate", body)).json
        assert whole["tokens"] == SMILE and whole["id"] == "r1"
        assert whole["sample_seed"] == 5 and whole["loops"] == 12 and whole["warnings"]
        assert [e["logprob"] for e in whole["logprobs"]] == [-1.0, -2.0, -3.0, -4.0, -5.0]
        assert whole["stats"]["mean_loops"] == 4.0
        *frames, last = (await site.post("/generate", {**body, "stream": True})).events
        assert sum([f["tokens"] for f in frames], []) == SMILE
        assert "text" not in last and "tokens" not in last and last["usage"] == whole["usage"]
        drawn = [(await site.post("/generate", {"prompt": "x"})).json["sample_seed"] for _ in "ab"]
        assert drawn[0] != drawn[1]
        assert site.engine.specs[-1].sequences[0].seed == drawn[1]
        tree = (
            await site.post("/generate/tree_speculative", {"prompt": "x", "K_branches": 3})
        ).json
        assert tree["stats"]["rounds"] == 0 and tree["stats"]["acceptance_rate"] is None
        params = site.engine.specs[-1].params
        assert (params.speculation, params.branches, params.draft_loops) == ("tree", 3, 1)

    play(scenario)


def test_stream_interval_joins_tokens(play: Any) -> None:
    async def scenario(site: Site) -> None:
        site.engine.script = lambda spec: says(SMILE)
        body = {"prompt": "x", "stream": True, "stream_interval": 3}
        *frames, _ = (await site.post("/generate", body)).events
        assert [f["tokens"] for f in frames] == [SMILE[:1], SMILE[1:4], SMILE[4:]]

    play(scenario)


def test_refusals_come_before_the_stream(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for code, status, retry in [
            ("queue_full", 503, "3"),
            ("slo_unattainable", 503, "3"),
            ("engine_down", 503, "3"),
            ("draining", 503, "3"),
            ("invalid_request", 400, None),
            ("context_length_exceeded", 400, None),
        ]:
            site.engine.rejection = Rejection(code, "loops: at most 4", 2.4)
            for stream in (False, True):
                answer = await site.post("/v1/completions", {"prompt": "x", "stream": stream})
                assert (answer.status, answer.error["code"]) == (status, code)
                assert answer.headers.get("retry-after") == retry
                assert answer.error["param"] == (None if retry else "loops")
        assert (await site.get("/load")).json["server_load"] == 0

    play(scenario)


def failing(reason: str, code: str = "") -> list[TokenEvent]:
    failure = TokenEvent(0, 0, 2, Tokens(), (), (), reason, code, "the worker was lost twice")
    return [*says(SMILE, "")[:2], failure]


def test_failures_while_running(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for reason, code, status in [
            ("error", "worker_lost", 500),
            ("error", "engine_down", 503),
            ("cancelled", "", 504),
        ]:
            site.engine.script = lambda spec, r=reason, c=code: failing(r, c)  # type: ignore[misc]
            answer = await site.post("/v1/completions", {"prompt": "x"})
            assert answer.status == status
            assert answer.error["code"] == (code or "timeout")
            stream = await site.post("/v1/completions", {"prompt": "x", "stream": True})
            assert stream.status == 200
            assert stream.events[-1]["error"]["code"] == (code or "timeout")
            native = (await site.post("/generate", {"prompt": "x", "stream": True})).events
            assert native[-1]["finish_reason"] == ("error" if code else "cancelled")
            assert native[-1]["error"]["code"] == (code or "timeout")

    play(scenario)


def test_a_reader_who_leaves_cancels(play: Any) -> None:
    async def scenario(site: Site) -> None:
        for stream, path in [
            (True, "/v1/completions"),
            (False, "/v1/completions"),
            (True, "/generate"),
        ]:
            site.engine.cancelled.clear()
            leaves, first = asyncio.Event(), asyncio.Event()
            site.engine.script = lambda spec: [*says(SMILE, "")[:2], 60.0]
            body = {"prompt": "x", "stream": stream}
            call = asyncio.create_task(
                site.post(path, body, leaves=leaves, on_body=lambda _, f=first: f.set())  # type: ignore[misc]
            )
            if stream:
                await first.wait()
            else:
                while not (await site.get("/load")).json["server_load"]:
                    await asyncio.sleep(0.01)
            leaves.set()
            await call  # ends at once, without an error for the server to log
            assert len(site.engine.cancelled) == 1
            assert (await site.get("/load")).json["server_load"] == 0
        metrics = (await site.get("/metrics")).text
        assert (
            'tinyloop_http_requests_total{method="POST",route="/v1/completions",status="499"} 2.0'
            in metrics
        )

    play(scenario)


def test_a_waiting_stream_says_so(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "KEEP_ALIVE_S", 0.02)

    async def scenario(site: Site) -> None:
        site.engine.script = lambda spec: [0.1, *says(SMILE)]
        answer = await site.post("/v1/completions", {"prompt": "x", "stream": True})
        assert answer.text.startswith(": keep-alive\n\n")
        assert streamed_text("/v1/completions", answer) == "Hello world 😊!"

    play(scenario)


def test_a_finish_that_is_never_confirmed_still_ends_well(play: Any) -> None:
    """The client library gives up waiting after 2 s and ends the stream without a last event."""

    async def scenario(site: Site) -> None:
        site.engine.script = lambda spec: [*says(SMILE, "")[:2], 60.0]
        finish = site.engine.finish_sequence

        def unconfirmed(delivery: Any, index: int, num_tokens: int) -> None:
            finish(delivery, index, num_tokens)
            delivery.expire_finishes(2e9)

        site.engine.finish_sequence = unconfirmed  # type: ignore[method-assign]
        answer = await site.post("/v1/chat/completions", {**CHAT, "stop": "world", "stream": True})
        assert streamed_text("chat", answer) == "Hello "
        assert answer.events[-1]["choices"][0]["finish_reason"] == "stop"
        native = (await site.post("/generate", {"prompt": "x", "stop": "world"})).json
        assert (native["finish_reason"], native["stats"]) == ("stop", {})

    play(scenario)


def test_only_so_many_requests_at_a_time(play: Any, settings: Any) -> None:
    async def scenario(site: Site) -> None:
        gate = asyncio.Event()
        site.engine.script = lambda spec: [gate, *says(SMILE)]
        calls = [asyncio.create_task(site.post("/generate", {"prompt": "x"})) for _ in range(2)]
        while (await site.get("/load")).json["server_load"] < 2:
            await asyncio.sleep(0.01)
        refused = await site.post("/generate", {"prompt": "x", "stream": True})
        assert (refused.status, refused.error["code"]) == (503, "too_many_streams")
        assert refused.headers["retry-after"] == "1"
        gate.set()
        assert [(await call).status for call in calls] == [200, 200]
        assert (await site.post("/generate", {"prompt": "x"})).status == 200

    play(scenario, settings=replace(settings, max_streams=2))
