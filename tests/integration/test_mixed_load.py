"""64 requests of all kinds at once on the real stack: every token is the oracle's or the request's own, the books balance."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_worker import artifact, naive
from tests.harness import Stack, StackError

NUM_REQUESTS = 64
NEAR_TIE = 2e-3  # logits; the oracle adds in another order
PHRASES = ("the light of the morning", "a small river", "what she had said", "zzz", "when it was")


@dataclass
class Job:
    """A request, how it is made, and what came of it."""

    body: dict[str, Any]
    is_streamed: bool
    leaves_after: int = 0  # tokens after which the client goes away; 0: it stays
    tokens: list[int] | None = None
    finish_reason: str = ""


def make_jobs(rng: random.Random) -> list[Job]:
    jobs = []
    for number in range(NUM_REQUESTS):
        words = " ".join(rng.choice(PHRASES) for _ in range(rng.choice((1, 2, 12))))
        body = {
            "prompt": words,
            "max_tokens": rng.randrange(1, 40),
            "loops": rng.randrange(1, 9),
            "priority": rng.randrange(-3, 4),
            "sample_seed": number,
            "temperature": rng.choice((0.0, 0.0, 0.9)),
            "ignore_eos": True,
        }
        leaves = number % 8 == 7
        if leaves:
            body |= {"max_tokens": 300, "loops": 4}
        jobs.append(Job(body, is_streamed=leaves or rng.random() < 0.5, leaves_after=5 * leaves))
    return jobs


def do(stack: Stack, job: Job, start: threading.Barrier) -> None:
    start.wait(30)
    if not job.is_streamed:
        status, answer = stack.post("/generate", job.body)
        assert status == 200, answer
        job.tokens, job.finish_reason = answer["tokens"], answer["finish_reason"]
        return
    tokens: list[int] = []
    frames = stack.stream("/generate", {**job.body, "stream": True})
    for frame in frames:
        tokens += frame.get("tokens", [])
        job.finish_reason = frame.get("finish_reason", "")
        if job.leaves_after and len(tokens) >= job.leaves_after:
            frames.close()  # closes the connection
            return
    job.tokens = tokens


def assert_oracle_agrees(weights: Any, config: Any, prompt: list[int], job: Job) -> None:
    assert job.tokens is not None
    logits = naive.forward(config, weights, prompt + job.tokens, job.body["loops"])
    for i, token in enumerate(job.tokens):
        row = logits[len(prompt) + i - 1]
        assert row[token] >= row.max() - NEAR_TIE, f"token {i} of {job.body}"


def series(stack: Stack) -> dict[str, float]:
    status, text = stack.get("/metrics")
    assert status == 200
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {words[0]: float(words[1]) for words in lines if "{" not in words[0]}


def test_64_mixed_requests_at_once(toy_artifact: Path) -> None:
    torch.set_num_threads(1)
    jobs = make_jobs(random.Random(5))
    with Stack(toy_artifact, num_web=2, num_workers=2) as stack:
        start = threading.Barrier(NUM_REQUESTS)
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            for outcome in [pool.submit(do, stack, job, start) for job in jobs]:
                outcome.result(120)

        def books() -> dict[str, float]:
            numbers = series(stack)
            states = ("completed", "errored", "cancelled")
            ended = {state: numbers[f"tinyloop_requests_{state}_total"] for state in states}
            waiting = numbers["tinyloop_queue_depth"] + numbers["tinyloop_requests_in_flight"]
            submitted = numbers["tinyloop_requests_submitted_total"]
            assert submitted == sum(ended.values()) + waiting
            return {**ended, "submitted": submitted, "waiting": waiting}

        stack.wait_until(lambda: books()["waiting"] == 0, "the cancelled ones to leave")
        num_left = sum(1 for job in jobs if job.leaves_after)
        assert books() == {
            "completed": NUM_REQUESTS - num_left,
            "errored": 0,
            "cancelled": num_left,
            "submitted": NUM_REQUESTS,
            "waiting": 0,
        }
        prompts = {job.body["prompt"]: tokenize(stack, job.body["prompt"]) for job in jobs}
        sampled = [job for job in jobs if job.tokens is not None and job.body["temperature"]]
        for job in sampled:  # alone, with the prefix pool warm: the same tokens
            status, alone = stack.post("/generate", job.body)
            assert status == 200 and alone["tokens"] == job.tokens

    loaded = artifact.load(toy_artifact)
    weights = loaded.tensors(dequantise=True)
    greedy = [job for job in jobs if job.tokens is not None and not job.body["temperature"]]
    assert len(sampled) > 5 and len(greedy) > 20
    for job in sampled + greedy:
        assert job.finish_reason == "length" and len(job.tokens or []) == job.body["max_tokens"]
    for job in greedy:
        assert_oracle_agrees(weights, loaded.config, prompts[job.body["prompt"]], job)


def tokenize(stack: Stack, text: str) -> list[int]:
    status, answer = stack.post("/tokenize", {"prompt": text})
    if status != 200:
        raise StackError(f"/tokenize: {answer}")
    return list(answer["tokens"])
