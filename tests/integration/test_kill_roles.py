"""kill -9 each role of a supervised stack in turn: it comes back, and running streams finish with the same text."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Stack

BACK_S = 2.0  # a process is there again
NUM_TOKENS = 300
REQUEST = {
    "prompt": "the light of the morning",
    "max_tokens": NUM_TOKENS,
    "temperature": 0.8,
    "sample_seed": 7,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def stack(toy_artifact: Path) -> Iterator[Stack]:
    with Stack(toy_artifact, keep=True, num_web=2) as stack:
        yield stack


class Reader(threading.Thread):
    """Reads one stream to its end; `error` holds what went wrong."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self.stack = stack
        self.text = ""
        self.tokens: list[int] = []
        self.last: dict[str, Any] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for frame in self.stack.stream("/generate", {**REQUEST, "stream": True}):
                self.text += frame.get("text", "")
                self.tokens += frame.get("tokens", [])
                self.last = frame
        except BaseException as ex:
            self.error = ex

    def wait_for_tokens(self, count: int) -> None:
        self.stack.wait_until(lambda: len(self.tokens) >= count or self.error, f"{count} tokens")
        assert self.error is None

    def finish(self) -> None:
        self.join(60)
        assert not self.is_alive(), "the stream did not end"
        assert self.error is None, repr(self.error)


def expected(stack: Stack) -> dict[str, Any]:
    status, answer = stack.post("/generate", REQUEST)
    assert status == 200
    assert len(answer["tokens"]) == NUM_TOKENS
    return dict(answer)


@pytest.mark.parametrize("role", ["worker-0", "scheduler"])
def test_a_killed_process_comes_back_and_streams_finish_with_the_same_text(
    stack: Stack, role: str
) -> None:
    whole = expected(stack)
    readers = [Reader(stack) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.wait_for_tokens(20)
    killed = stack.kill(role)
    killed_at = time.monotonic()
    stack.wait_until(lambda: stack.pids(role) not in ([], [killed]), f"{role} to be back", BACK_S)
    assert time.monotonic() - killed_at < BACK_S
    assert any(len(reader.tokens) < NUM_TOKENS for reader in readers), "killed too late to matter"
    for reader in readers:
        reader.finish()
        assert reader.tokens == whole["tokens"]
        assert reader.text == whole["text"]
        assert reader.last["finish_reason"] == "length"
    stack.wait_ready(15)


def test_a_killed_web_process_comes_back_and_streams_of_the_other_finish(stack: Stack) -> None:
    whole = expected(stack)
    readers = [Reader(stack) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.wait_for_tokens(5)
    before = stack.pids("web")
    killed = stack.kill("web")
    stack.wait_until(
        lambda: len(stack.pids("web")) == 2 and killed not in stack.pids("web"),
        "the web process to be back",
        BACK_S,
    )
    for reader in readers:
        reader.join(60)
    finished = [reader for reader in readers if reader.error is None]
    assert len(before) == 2 and finished, "no stream was on the process that lived"
    for reader in finished:
        assert reader.tokens == whole["tokens"] and reader.text == whole["text"]
    stack.wait_ready(15)
    assert expected(stack)["tokens"] == whole["tokens"]


def test_a_killed_gunicorn_master_comes_back_and_streams_finish(stack: Stack) -> None:
    whole = expected(stack)
    reader = Reader(stack)
    reader.start()
    reader.wait_for_tokens(20)
    stack.kill("web-master")
    reader.finish()
    assert reader.tokens == whole["tokens"] and reader.text == whole["text"]
    stack.wait_ready(15)


def test_the_books_are_right_after_a_worker_was_lost(stack: Stack) -> None:
    reader = Reader(stack)
    reader.start()
    reader.wait_for_tokens(10)
    stack.kill("worker-0")
    reader.finish()
    numbers = series(stack)
    ended = ("completed", "errored", "cancelled")
    submitted = numbers["tinyloop_requests_submitted_total"]
    assert submitted >= 1
    assert submitted == (
        sum(numbers[f"tinyloop_requests_{state}_total"] for state in ended)
        + numbers["tinyloop_queue_depth"]
        + numbers["tinyloop_requests_in_flight"]
    )
    assert numbers["tinyloop_requests_errored_total"] == 0


def series(stack: Stack) -> dict[str, float]:
    status, text = stack.get("/metrics")
    assert status == 200
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {words[0]: float(words[1]) for words in lines if "{" not in words[0]}
