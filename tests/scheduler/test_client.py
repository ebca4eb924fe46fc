from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from scheduler import client as client_module
from scheduler.blocking import BlockingClient
from scheduler.client import Client, Rejection, RequestSpec, TokenStream
from scheduler.config import Settings
from scheduler.messages import (
    Accepted,
    Cancel,
    ClientBeat,
    Events,
    Finish,
    FinishStats,
    Params,
    PrefixCommand,
    PrefixReply,
    Rejected,
    SequenceSpec,
    StatsQuery,
    StatsReply,
    Submit,
    TokenEvent,
    TokenLogprob,
    Tokens,
    Unknown,
    encode,
)
from tests.wire import CARD, DIGEST, ScriptedHub, run, stack_directory, until


@pytest.fixture
def settings() -> Iterator[Settings]:
    with stack_directory() as settings:
        yield settings


@contextlib.asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[tuple[ScriptedHub, Client]]:
    """A hub and a client that is ready."""
    async with ScriptedHub(settings) as hub, started(settings) as client:
        await until(lambda: client.is_ready)
        yield hub, client


@contextlib.asynccontextmanager
async def started(settings: Settings, **kwargs: Any) -> AsyncIterator[Client]:
    client = Client(settings, **kwargs)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def spec(num_sequences: int = 1, max_tokens: int = 100, **kwargs: Any) -> RequestSpec:
    sequences = tuple(SequenceSpec(Tokens((1, 2, i)), seed=i) for i in range(num_sequences))
    return RequestSpec("label", Params(loops=2, max_tokens=max_tokens), sequences, **kwargs)


def event(
    request_id: int, first_index: int, *tokens: int, index: int = 0, **kwargs: Any
) -> TokenEvent:
    return TokenEvent(request_id, index, first_index, Tokens(tokens), **kwargs)


def last(request_id: int, first_index: int, *tokens: int, index: int = 0) -> TokenEvent:
    stats = FinishStats(3, first_index + len(tokens))
    return event(request_id, first_index, *tokens, index=index, finish_reason="length", stats=stats)


async def admitted(hub: ScriptedHub, client: Client, request: RequestSpec) -> TokenStream:
    number = len(hub.submits) + 1
    submitting = asyncio.create_task(client.submit(request))
    await hub.send(Accepted((await hub.submitted(number)).request_id))
    return await submitting


async def read(stream: TokenStream) -> list[TokenEvent]:
    return [e async for e in stream]


def tokens_of(events: list[TokenEvent], index: int = 0) -> list[int]:
    return [t for e in events if e.index == index for t in e.tokens]


# ----------------------------------------------------------------------------------------------------------------- hello


def test_ready_only_after_the_hello_came_back_with_a_card(settings: Settings) -> None:
    async def scenario() -> None:
        cards: list[dict[str, Any]] = []
        async with started(settings) as client:
            client.on_card = cards.append
            assert (client.state, client.is_ready) == ("connecting", False)
            assert "submit.ipc" in client.reason
            async with ScriptedHub(settings) as hub:
                hub.is_answering = False
                await until(lambda: len(hub.hellos) >= 2)  # repeated while unanswered
                assert client.state == "connecting"
                hub.state, hub.reason, hub.digest, hub.card = "loading", "worker-0 loads", "", b""
                hub.is_answering = True
                await until(lambda: client.state == "loading")
                assert (client.reason, client.is_ready, client.card) == (
                    "worker-0 loads",
                    False,
                    None,
                )
                hub.state, hub.reason, hub.digest, hub.card = "ready", "", DIGEST, CARD
                await until(lambda: client.is_ready)
                assert client.card is not None and client.card["name"] == "toy"
                assert cards == [client.card]
                seen = len(hub.hellos)
                await hub.next_beat()
                await hub.next_beat()
                assert len(hub.hellos) == seen  # and no more once it is welcome

    run(scenario())


def test_queue_depth_and_failure_reason_come_with_the_status(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            hub.state, hub.reason, hub.queue_depth = "failed", "artifact.truncated: ...", 7
            await until(lambda: client.state == "failed")
            assert (client.reason, client.queue_depth) == ("artifact.truncated: ...", 7)
            assert client.card is not None and not client.is_ready

    run(scenario())


def test_silence_is_engine_down_and_heals_by_itself(settings: Settings) -> None:
    async def scenario() -> None:
        late = 0.0
        async with (
            ScriptedHub(settings) as hub,
            started(settings, clock=lambda: time.monotonic() + late) as client,
        ):
            await until(lambda: client.is_ready)
            hub.is_answering = False
            await asyncio.sleep(0.05)
            late = 2.9
            assert client.is_ready
            late = 3.5
            assert (client.state, client.is_ready) == ("engine_down", False)
            assert client.reason.startswith("no answer")
            assert client.card is not None  # kept: requests can still be validated
            hub.is_answering = True
            await until(lambda: client.is_ready)

    run(scenario())


def test_card_that_is_no_card_leaves_the_client_alive(settings: Settings) -> None:
    async def scenario() -> None:
        async with ScriptedHub(settings) as hub, started(settings) as client:
            hub.card = b"\xc1garbage"
            await until(lambda: client.state == "ready")
            assert not client.is_ready
            hub.card = CARD
            await until(lambda: client.is_ready)

    run(scenario())


# ------------------------------------------------------------------------------------------------------------- admission


def test_submit_returns_after_accepted(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            submitting = asyncio.create_task(
                client.submit(spec(2, priority=3, slo_ms=5.0, timeout_s=9.0, salt="s"))
            )
            submit = await hub.submitted()
            await asyncio.sleep(0.02)
            assert not submitting.done()
            assert submit.client_id == client.client_id
            assert (submit.priority, submit.slo_ms, submit.timeout_s, submit.salt) == (
                3,
                5.0,
                9.0,
                "s",
            )
            assert not submit.resumed and len(submit.sequences) == 2
            await hub.send(Accepted(submit.request_id))
            assert (await submitting).request_id == submit.request_id

    run(scenario())


def test_rejection_carries_its_advice(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            submitting = asyncio.create_task(client.submit(spec()))
            request_id = (await hub.submitted()).request_id
            await hub.send(Rejected(request_id, "queue_full", "128 wait", 2.5))
            with pytest.raises(Rejection) as ex:
                await submitting
            assert (ex.value.code, ex.value.message, ex.value.retry_after_s) == (
                "queue_full",
                "128 wait",
                2.5,
            )
            assert (await hub.next_beat()).live == ()

    run(scenario())


def test_lost_submit_or_lost_answer_is_repeated_and_listed(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            submitting = asyncio.create_task(client.submit(spec()))
            first, second = await hub.submitted(1), await hub.submitted(2)
            assert first == second
            assert [r.request_id for r in (await hub.next_beat()).live] == [first.request_id]
            await hub.send(Unknown(1, (first.request_id,)))  # the submit was lost: not a resume
            assert (await hub.submitted(3)).resumed is False
            await hub.send(Accepted(first.request_id))
            await submitting

    run(scenario())


def test_lost_accepted_is_made_up_for_by_an_event(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            submitting = asyncio.create_task(client.submit(spec()))
            request_id = (await hub.submitted()).request_id
            await hub.send(Events(1, (last(request_id, 0, 5, 6),)))
            assert tokens_of(await read(await submitting)) == [5, 6]

    run(scenario())


@pytest.mark.parametrize("is_there", [True, False])
def test_unanswered_submit_is_cancelled_after_two_seconds(
    settings: Settings, is_there: bool
) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            hub = ScriptedHub(settings)
            if is_there:
                await stack.enter_async_context(hub)
            client = await stack.enter_async_context(started(settings))
            began = time.monotonic()
            with pytest.raises(Rejection) as ex:
                await client.submit(spec())
            assert ex.value.code == "engine_down" and 1.8 < time.monotonic() - began < 5
            if is_there:
                assert 6 <= len(hub.submits) <= 8
                request_id = hub.submits[0].request_id
                await until(lambda: hub.others == [Cancel(client.client_id, request_id)])
                assert (await hub.next_beat()).live == ()

    run(scenario())


def test_caller_that_leaves_during_admission_cancels(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            submitting = asyncio.create_task(client.submit(spec()))
            request_id = (await hub.submitted()).request_id
            submitting.cancel()
            await until(lambda: hub.others == [Cancel(client.client_id, request_id)])
            await hub.send(Accepted(request_id))  # too late, and harmless
            assert (await hub.next_beat()).live == ()

    run(scenario())


# -------------------------------------------------------------------------------------------------------------- delivery


def test_repeats_overlaps_and_gaps_yield_each_token_once(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            rid = stream.request_id
            lps = tuple(TokenLogprob(-float(i)) for i in range(4))
            await hub.send(Events(1, (event(rid, 0, 10, 11, logprobs=lps[:2]),)))
            await hub.send(Events(1, (event(rid, 0, 10, 11, logprobs=lps[:2]),)))  # doubled
            await hub.send(Events(1, (event(rid, 1, 11, 12, logprobs=lps[1:3]),)))  # overlapping
            seen = len(hub.beats)
            await hub.send(Events(1, (last(rid, 5, 15),)))  # 13 and 14 are lost
            await until(lambda: len(hub.beats) > seen)
            assert hub.beats[seen].live[0].num_tokens == (3,)
            await hub.send(Events(1, (event(rid, 3, 13, 14), last(rid, 5, 15))))
            events = await read(stream)
            assert tokens_of(events) == [10, 11, 12, 13, 14, 15]
            assert [lp.logprob for e in events for lp in e.logprobs] == [0.0, -1.0, -2.0]
            assert events[-1].finish_reason == "length" and events[-1].stats is not None
            assert (await hub.next_beat()).live == ()  # acknowledged

    run(scenario())


def test_gap_asks_at_once_instead_of_waiting_for_the_beat(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            monkeypatch.setattr(client_module, "BEAT_S", 60.0)
            await hub.next_beat()  # the last one on time
            seen = len(hub.beats)
            await hub.send(Events(1, (event(stream.request_id, 4, 1),)))
            await until(lambda: len(hub.beats) > seen, 1.0)
            assert hub.beats[-1].live[0].num_tokens == (0,)

    run(scenario())


def test_sequences_end_one_by_one(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec(2))
            rid = stream.request_id
            await hub.send(Events(1, (last(rid, 0, 7, index=1), event(rid, 0, 8))))
            first, second = await anext(stream), await anext(stream)
            assert (first.index, second.index) == (1, 0)
            live = (await hub.next_beat()).live[0]
            assert (live.num_tokens, live.ended) == ((1, 1), (1,))
            await hub.send(Events(1, (last(rid, 1, 9),)))
            assert tokens_of(await read(stream)) == [9]

    run(scenario())


def test_prompt_logprobs_come_once(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            rid = stream.request_id
            scored = (None, TokenLogprob(-1.0))
            await hub.send(Events(1, (event(rid, 0, prompt_logprobs=scored),)))
            await hub.send(Events(1, (event(rid, 0, prompt_logprobs=scored),)))
            await hub.send(Events(1, (replace(last(rid, 0, 4), prompt_logprobs=scored),)))
            events = await read(stream)
            assert [e.prompt_logprobs for e in events] == [scored, ()]
            assert tokens_of(events) == [4]

    run(scenario())


def test_any_loss_doubling_and_reordering_gives_the_same_tokens(settings: Settings) -> None:
    """A hub that generates and, on the way, loses a third of its frames, doubles some and swaps others."""

    async def scenario() -> None:
        rng = random.Random(7)
        truth = {i: [rng.randrange(1000) for _ in range(rng.randrange(1, 60))] for i in range(8)}
        made: dict[int, int] = {}
        delayed: list[Events] = []

        def chunk(rid: int, index: int, held: int, upto: int) -> TokenEvent:
            tokens = truth[index][held:upto]
            make = last if upto == len(truth[index]) else event
            return make(rid, held, *tokens, index=index)

        async with connected(settings) as (hub, client):

            async def publish(message: Events) -> None:
                fate = rng.random()
                if fate < 0.33:
                    return
                if fate < 0.45:
                    delayed.append(message)
                    return
                for _ in range(2 if fate < 0.6 else 1):
                    await hub.send(message)
                while delayed:
                    await hub.send(delayed.pop())

            stream = await admitted(hub, client, spec(len(truth)))
            rid = stream.request_id

            async def resend(beat: ClientBeat) -> None:
                for live in beat.live:
                    missing = tuple(
                        chunk(rid, i, live.num_tokens[i], made.get(i, 0))
                        for i in truth
                        if i not in live.ended and live.num_tokens[i] < made.get(i, 0)
                    )
                    await publish(Events(1, missing))

            tasks: list[asyncio.Task[None]] = []

            def on_message(message: Any) -> None:
                if isinstance(message, ClientBeat):
                    tasks.append(asyncio.create_task(resend(message)))

            hub.on_message = on_message

            async def generate() -> None:
                while any(made.get(i, 0) < len(truth[i]) for i in truth):
                    step = []
                    for i in truth:
                        old = made.get(i, 0)
                        made[i] = min(len(truth[i]), old + rng.randrange(3))
                        if made[i] > old:
                            step.append(chunk(rid, i, old, made[i]))
                    await publish(Events(1, tuple(step)))
                    await asyncio.sleep(0.002)

            generating = asyncio.create_task(generate())
            events = await read(stream)
            await generating
            for i in truth:
                assert tokens_of(events, i) == truth[i]
                assert [e.finish_reason for e in events if e.index == i and e.finish_reason] == [
                    "length"
                ]

    run(scenario())


# -------------------------------------------------------------------------------------------------------- finish, cancel


def test_finish_yields_one_last_event_without_further_tokens(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            rid = stream.request_id
            await hub.send(Events(1, (event(rid, 0, 1, 2, 3), event(rid, 3, 4))))
            await anext(stream)
            await until(lambda: [r.num_tokens for r in hub.beats[-1].live] == [(4,)])
            await stream.finish(0, 2)
            await stream.finish(0, 2)
            finish = Finish(client.client_id, rid, 0, 2)
            await until(lambda: hub.others.count(finish) >= 3)  # repeated until the end comes
            await hub.send(Events(1, (event(rid, 4, 5, 6),)))  # was on its way
            await hub.send(Events(1, (last(rid, 6),)))
            events = await read(stream)
            assert [(e.finish_reason, e.tokens, e.first_index) for e in events] == [("stop", (), 2)]
            assert events[0].stats is not None

    run(scenario())


def test_finish_of_a_sequence_whose_end_is_already_queued(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            rid = stream.request_id
            await hub.send(Events(1, (event(rid, 0, 1, 2), event(rid, 2, 3), last(rid, 3, 4))))
            await anext(stream)
            await until(lambda: hub.beats[-1].live == ())
            await stream.finish(0, 1)
            events = await read(stream)
            assert [(e.finish_reason, e.tokens) for e in events] == [("stop", ())]

    run(scenario())


def test_finish_whose_last_event_never_comes_ends_after_two_seconds(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            await hub.send(Events(1, (event(stream.request_id, 0, 1, 2),)))
            await anext(stream)
            await stream.finish(0, 1)
            began = time.monotonic()
            assert await read(stream) == []
            assert 1.8 < time.monotonic() - began < 5
            assert (await hub.next_beat()).live == ()

    run(scenario())


def test_cancel_ends_the_stream_at_once_and_twice_is_once(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            reading = asyncio.create_task(read(stream))
            await asyncio.sleep(0.01)
            await stream.cancel()
            await stream.cancel()
            assert await reading == []
            await hub.next_beat()
            assert hub.others == [Cancel(client.client_id, stream.request_id)]

    run(scenario())


def test_stream_that_nobody_holds_is_cancelled(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            request_id = stream.request_id
            del stream
            gc.collect()
            await until(lambda: hub.others == [Cancel(client.client_id, request_id)])
            assert (await hub.next_beat()).live == ()

    run(scenario())


def test_close_cancels_what_is_live(settings: Settings) -> None:
    async def scenario() -> None:
        async with ScriptedHub(settings) as hub:
            async with started(settings) as client:
                await until(lambda: client.is_ready)
                stream = await admitted(hub, client, spec())
            await until(lambda: hub.others == [Cancel(client.client_id, stream.request_id)])
            await until(lambda: hub.beats[-1].live == ())
            assert await read(stream) == []

    run(scenario())


# -------------------------------------------------------------------------------------------------------------- restarts


def test_restarted_scheduler_gets_the_request_again_with_its_tokens(settings: Settings) -> None:
    async def scenario() -> None:
        async with started(settings) as client:
            async with ScriptedHub(settings, epoch=1) as hub:
                await until(lambda: client.is_ready)
                stream = await admitted(hub, client, spec(3, timeout_s=60.0))
                rid = stream.request_id
                await hub.send(
                    Events(
                        1,
                        (
                            event(rid, 0, 10, 11),
                            event(rid, 0, 20, 21, index=1),
                            last(rid, 0, 30, index=2),
                        ),
                    )
                )
                got = [await anext(stream) for _ in range(3)]
                await stream.finish(1, 1)
            async with ScriptedHub(settings, epoch=2) as hub:
                hub.digest, hub.card = "", b""  # its worker has not registered yet
                await until(lambda: len(hub.beats) > 0)
                assert hub.beats[0].live[0].num_tokens == (2, 2, 1)
                await hub.send(Unknown(2, (rid,)))
                await hub.next_beat()
                assert hub.submits == []  # not to a scheduler of no model
                hub.digest, hub.card = DIGEST, CARD
                await hub.next_beat()
                await hub.next_beat()
                await hub.send(Unknown(2, (rid,)))
                submit = await hub.submitted()
                assert submit.resumed and [tuple(s.emitted) for s in submit.sequences] == [
                    (10, 11),
                    (20, 21),
                    (30,),
                ]
                assert [s.seed for s in submit.sequences] == [0, 1, 2]
                assert 50 < submit.timeout_s < 60
                finishes = {
                    Finish(client.client_id, rid, 1, 1),
                    Finish(client.client_id, rid, 2, 1),
                }
                await until(lambda: finishes <= set(hub.others))
                await hub.send(Accepted(rid))
                await hub.send(Events(2, (last(rid, 1, index=1), last(rid, 2, 12, 13))))
                got += await read(stream)
            assert tokens_of(got) == [10, 11, 12, 13]
            assert [e.finish_reason for e in got if e.index == 1] == ["", "stop"]

    run(scenario())


def test_new_epoch_is_greeted_even_without_silence(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            hub.epoch = 2
            seen = len(hub.hellos)
            await until(lambda: len(hub.hellos) > seen)
            assert hub.hellos[-1].card_digest == DIGEST  # so that the card is not sent again
            assert client.is_ready

    run(scenario())


def test_another_model_ends_running_requests_with_an_error(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec(2))
            hub.epoch, hub.digest = 2, "e" * 64
            await until(lambda: client.card_digest == "e" * 64)
            await hub.send(Unknown(2, (stream.request_id,)))
            events = await read(stream)
            assert [(e.index, e.finish_reason, e.error_code) for e in events] == [
                (0, "error", "engine_down"),
                (1, "error", "engine_down"),
            ]
            assert len(hub.submits) == 1

    run(scenario())


def test_request_that_cannot_be_resumed_ends_with_the_reason(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            await hub.send(Unknown(1, (stream.request_id,)))
            assert (await hub.submitted(2)).resumed
            await hub.send(Rejected(stream.request_id, "draining", "going down"))
            (end,) = await read(stream)
            assert (end.finish_reason, end.error_code, end.error_message) == (
                "error",
                "draining",
                "going down",
            )

    run(scenario())


def test_scheduler_that_stays_away_ends_running_requests(settings: Settings) -> None:
    async def scenario() -> None:
        late = 0.0
        async with (
            ScriptedHub(settings) as hub,
            started(settings, clock=lambda: time.monotonic() + late) as client,
        ):
            await until(lambda: client.is_ready)
            stream = await admitted(hub, client, spec())
            hub.is_answering = False
            await hub.next_beat()
            late = 25.0
            await hub.next_beat()
            assert hub.beats[-1].live != ()
            late = 31.0
            (end,) = await read(stream)
            assert (end.finish_reason, end.error_code) == ("error", "engine_down")

    run(scenario())


# --------------------------------------------------------------------------------------------------------------- garbage


def test_garbage_is_counted_and_ends_nothing(settings: Settings) -> None:
    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            stream = await admitted(hub, client, spec())
            rid = stream.request_id
            wrong_version = bytearray(encode(Accepted(rid)))
            wrong_version[1] = 99
            garbage = [b"", b"\xc1", os.urandom(64), bytes(wrong_version)]
            garbage.append(encode(Submit(b"x" * 16, 1, "", Params(1, 1), ())))  # not for clients
            for frame in garbage:
                await hub.send_raw(frame)
            await hub.send_raw()
            await hub.send_raw(encode(Accepted(rid)), b"more")
            await until(lambda: client.num_bad_frames == len(garbage) + 2)
            await hub.send(Events(1, (event(rid, 0, 1, index=5), event(rid, 0, 1, index=-1))))
            await hub.send(Events(1, (event(999, 0, 1),)))
            await hub.send(Unknown(1, (999,)))
            await hub.send(StatsReply(999, "late"))
            await hub.send(Events(1, (last(rid, 0, 3),)))
            assert tokens_of(await read(stream)) == [3]

    run(scenario())


# --------------------------------------------------------------------------------------------------------------- queries


def test_stats_and_prefixes_are_asked_over_the_wire(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ANSWER_S", 0.5)

    async def scenario() -> None:
        async with connected(settings) as (hub, client):
            asking = asyncio.create_task(client.stats())
            await until(lambda: len(hub.others) == 1)
            query = hub.others[0]
            assert isinstance(query, StatsQuery)
            await hub.send(StatsReply(query.query_id, "tinyloop_up 1\n"))
            assert await asking == "tinyloop_up 1\n"
            assert await client.stats(timeout_s=0.05) is None

            asking = asyncio.create_task(
                client.prefix("register", salt="s", name="n", tokens=[1, 2], loops=3)
            )
            await until(lambda: isinstance(hub.others[-1], PrefixCommand))
            command = hub.others[-1]
            assert (command.op, command.salt, command.name, command.tokens, command.loops) == (
                "register",
                "s",
                "n",
                (1, 2),
                3,
            )
            await hub.send(PrefixReply(command.query_id, "exists", "n is there"))
            assert (await asking).code == "exists"
            with pytest.raises(Rejection, match="engine_down"):
                await client.prefix("list")

    run(scenario())


def test_registration_is_asked_again_of_a_restarted_scheduler(settings: Settings) -> None:
    async def scenario() -> None:
        async with started(settings) as client:
            async with ScriptedHub(settings, epoch=1) as hub:
                await until(lambda: client.is_ready)
                asking = asyncio.create_task(client.prefix("register", name="n", tokens=[1]))
                await until(lambda: len(hub.others) == 1)
            async with ScriptedHub(settings, epoch=2) as hub:
                await until(lambda: len(hub.others) == 1)
                await hub.send(PrefixReply(hub.others[0].query_id, "", ""))
                assert (await asking).code == ""

    run(scenario())


# -------------------------------------------------------------------------------------------------------------- blocking


@contextlib.contextmanager
def serving_hub(settings: Settings, busy_first: int = 0) -> Iterator[ScriptedHub]:
    """A hub in a thread that answers a request of seed s with tokens s, s+1, ..., after `busy_first` refusals."""
    closing = threading.Event()
    opened: list[ScriptedHub] = []
    is_open = threading.Event()

    async def serve() -> None:
        async with ScriptedHub(settings) as hub:
            refusals = busy_first

            async def answer(submit: Submit) -> None:
                nonlocal refusals
                if submit.params.max_tokens > 500:
                    await hub.send(Rejected(submit.request_id, "context_length_exceeded", "long"))
                    return
                if refusals:
                    refusals -= 1
                    await hub.send(Rejected(submit.request_id, "queue_full", "busy", 0.2))
                    return
                await hub.send(Accepted(submit.request_id))
                for i in range(submit.params.max_tokens):
                    make = last if i == submit.params.max_tokens - 1 else event
                    token = submit.sequences[0].seed + i
                    await hub.send(Events(1, (make(submit.request_id, i, token),)))

            tasks = []
            hub.on_message = lambda m: (
                tasks.append(asyncio.create_task(answer(m))) if isinstance(m, Submit) else None
            )
            opened.append(hub)
            is_open.set()
            while not closing.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_open.wait(5)
    try:
        yield opened[0]
    finally:
        closing.set()
        thread.join(5)


def seeded(seed: int, max_tokens: int = 3) -> RequestSpec:
    return RequestSpec("", Params(1, max_tokens), (SequenceSpec(Tokens((1,)), seed),))


def test_blocking_submit_iterates(settings: Settings) -> None:
    with serving_hub(settings), BlockingClient(settings) as client:
        client.wait_ready(5)
        assert client.card is not None and client.state == "ready"
        assert tokens_of(list(client.submit(seeded(40)))) == [40, 41, 42]
        stream = client.submit(seeded(40, 400))
        next(stream)
        stream.cancel()
        assert list(stream) == []
        with pytest.raises(Rejection, match="context_length_exceeded"):
            client.submit(seeded(0, 501))
        assert client.stats(timeout_s=0.05) is None


def test_submit_stream_keeps_its_window_and_obeys_retry_after(settings: Settings) -> None:
    taken = 0

    def specs() -> Iterator[RequestSpec]:
        nonlocal taken
        for i in range(20):
            taken += 1
            yield seeded(100 * i, 501 if i == 3 else 3)

    with serving_hub(settings, busy_first=5) as hub, BlockingClient(settings) as client:
        client.wait_ready(5)
        began = time.monotonic()
        ended = {}
        for position, result in client.submit_stream(specs(), window=4):
            ended[position] = result
            assert taken <= len(ended) + 4
        assert time.monotonic() - began > 0.2
        assert sorted(ended) == list(range(20)) and len(hub.submits) == 25
        rejection = ended.pop(3).rejection
        assert rejection is not None and rejection.code == "context_length_exceeded"
        for position, result in ended.items():
            (sequence,) = result.sequences
            assert sequence.tokens == [100 * position + i for i in range(3)]
            assert sequence.finish_reason == "length" and sequence.stats is not None


def test_submit_stream_finishes_where_the_watcher_says(settings: Settings) -> None:
    with serving_hub(settings), BlockingClient(settings) as client:
        client.wait_ready(5)

        def watch(position: int, event: TokenEvent) -> int | None:
            return 2 if 11 in event.tokens else None

        ((_, result),) = client.submit_stream([seeded(10, 50)], watch=watch)
        assert result.sequences[0].tokens == [10, 11]
        assert result.sequences[0].finish_reason == "stop"


def test_submit_stream_that_is_left_early_cancels_the_rest(settings: Settings) -> None:
    with serving_hub(settings) as hub, BlockingClient(settings) as client:
        client.wait_ready(5)
        results = client.submit_stream(
            (seeded(i, 1 if i == 0 else 400) for i in range(9)), window=3
        )
        next(results)
        results.close()
        deadline = time.monotonic() + 3
        while hub.beats[-1].live:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_submit_stream_gives_up_in_time(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ANSWER_S", 0.5)
    with BlockingClient(settings) as client:
        ((_, result),) = client.submit_stream([seeded(1)], give_up_s=0.1)
        assert result.rejection is not None and result.rejection.code == "engine_down"
        with pytest.raises(Rejection, match="connecting"):
            client.wait_ready(0.05)
