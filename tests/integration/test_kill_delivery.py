"""kill -9 the scheduler and workers, over and over, under a client of the library: every stream has exactly its tokens."""

from __future__ import annotations

import asyncio
import random
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


@pytest.mark.parametrize("fault", ["paced_worker", ""])
def test_kills_change_no_token(toy_artifact: Path, fault: str) -> None:
    """Made-up tokens by a known rule, then the real engine against a run of its own without kills."""

    async def scenario() -> None:
        env = {"TINYLOOP_FAULT": fault}
        with Stack(
            toy_artifact,
            env=env,
            num_workers=2,
            keep=True,
            roles=("scheduler", "worker"),
            wait=False,
        ) as stack:
            client = Client(stack.settings)
            await client.start()
            try:
                await until(lambda: client.is_ready, 60)
                if fault:
                    vocab = artifact.load(toy_artifact).config.arch.vocab
                    expected = [
                        instant_tokens(
                            Run(0, 0, 0, Tokens(), Tokens(), seed, request(seed).params),
                            0,
                            NUM_TOKENS,
                            vocab,
                        )
                        for seed in range(NUM_STREAMS)
                    ]
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
                got = await streaming
                assert [Tokens(t) for t in got] == expected
                log = stack.logs()
                assert log.count("killed by signal 9") >= 3 and "Traceback" not in log
            finally:
                await client.close()

    run(scenario(), 110)
