"""kill -9 the scheduler and workers, over and over, under a client of the library: every stream has exactly its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_worker import artifact
from gpu_worker.instant_engine import instant_tokens
from scheduler.client import Client, RequestSpec
from scheduler.messages import Params, Run, SequenceSpec, Tokens
from tests.harness import Stack
from tests.wire import run, until

NUM_STREAMS = 16
NUM_TOKENS = 120


def request(seed: int) -> RequestSpec:
    rng = random.Random(seed)
    prompt = Tokens([rng.randrange(1, 200) for _ in range(rng.randrange(1, 40))])
    params = Params(loops=1 + seed % 3, max_tokens=NUM_TOKENS, temperature=0.9)
    return RequestSpec(f"r{seed}", params, (SequenceSpec(prompt, seed),), timeout_s=100.0)


async def tokens_of(client: Client, seed: int, held: dict[int, int]) -> list[int]:
    stream = await client.submit(request(seed))
    tokens: list[int] = []
    async for event in stream:
        assert event.first_index == len(tokens)
        tokens += event.tokens
        held[seed] = len(tokens)
        if event.finish_reason:
            assert (event.finish_reason, event.error_message) == ("length", "")
            assert event.stats is not None and event.stats.completion_tokens == NUM_TOKENS
    return tokens


async def all_streams(client: Client, held: dict[int, int]) -> list[list[int]]:
    return await asyncio.gather(*(tokens_of(client, seed, held) for seed in range(NUM_STREAMS)))


@contextlib.asynccontextmanager
async def stack_and_client(artifact_path: Path, fault: str) -> AsyncIterator[tuple[Stack, Client]]:
    """A scheduler and two workers under their keepers, and a client that is ready."""
    env, roles = {"TINYLOOP_FAULT": fault}, ("scheduler", "worker")
    with Stack(artifact_path, env=env, num_workers=2, keep=True, roles=roles, wait=False) as stack:
        client = Client(stack.settings)
        await client.start()
        try:
            await until(lambda: client.is_ready, 60)
            yield stack, client
            assert "Traceback" not in stack.logs()
        finally:
            await client.close()


def made_up(artifact_path: Path) -> list[Tokens]:
    """What the paced worker answers to all streams."""
    vocab = artifact.load(artifact_path).config.arch.vocab
    runs = [
        Run(0, 0, 0, Tokens(), Tokens(), seed, request(seed).params) for seed in range(NUM_STREAMS)
    ]
    return [instant_tokens(r, 0, NUM_TOKENS, vocab) for r in runs]


@pytest.mark.parametrize("fault", [pytest.param("paced_worker", marks=pytest.mark.slow), ""])
def test_kills_change_no_token(toy_artifact: Path, fault: str) -> None:
    """Made-up tokens by a known rule, then the real engine against a run of its own without kills."""

    async def scenario() -> None:
        async with stack_and_client(toy_artifact, fault) as (stack, client):
            if fault:
                expected = made_up(toy_artifact)
            else:
                expected = [Tokens(t) for t in await all_streams(client, {})]
            held: dict[int, int] = {}
            streaming = asyncio.create_task(all_streams(client, held))
            await until(lambda: len(held) >= 8, 30)
            for name in ("worker-0", "scheduler", "worker-1", "scheduler"):
                before = sum(held.values())
                stack.kill(name)
                # worth killing again only once it goes on
                await until(lambda: streaming.done() or sum(held.values()) > before + 50, 40)  # noqa: B023
            assert [Tokens(t) for t in await streaming] == expected
            assert stack.logs().count("killed by signal 9") >= 3

    run(scenario(), 110)


@pytest.mark.parametrize("name", ["scheduler", pytest.param("worker-0", marks=pytest.mark.slow)])
def test_a_process_that_stands_still_for_a_while_changes_no_token(
    toy_artifact: Path, name: str
) -> None:
    """Long enough for everyone else to think it dead; then it comes back with what it believed before."""

    async def scenario() -> None:
        async with stack_and_client(toy_artifact, "paced_worker") as (stack, client):
            held: dict[int, int] = {}
            streaming = asyncio.create_task(all_streams(client, held))
            await until(lambda: len(held) == NUM_STREAMS, 30)
            stack.kill(name, signal.SIGSTOP)
            try:
                await asyncio.sleep(4.5)
                assert client.state == ("engine_down" if name == "scheduler" else "ready")
            finally:
                stack.kill(name, signal.SIGCONT)
            assert [Tokens(t) for t in await streaming] == made_up(toy_artifact)
            await until(lambda: client.is_ready)

    run(scenario(), 60)
