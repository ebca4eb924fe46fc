"""SIGTERM to all keepers at once, as honcho sends it: the frontends turn lame, streams finish, then everything leaves."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.harness import Stack

LONG = {"prompt": "the river", "max_tokens": 250, "ignore_eos": True, "sample_seed": 3}


def test_a_lame_stack_refuses_new_requests_and_finishes_running_ones(toy_artifact: Path) -> None:
    env = {"TINYLOOP_LAME_DUCK_S": "1.5", "TINYLOOP_GRACE_S": "20"}
    with Stack(toy_artifact, keep=True, env=env) as stack:
        status, whole = stack.post("/generate", LONG)
        assert status == 200
        stream = stack.stream("/generate", {**LONG, "stream": True})
        tokens = list(next(stream)["tokens"])
        told_at = time.monotonic()
        for keeper in stack.processes.values():
            keeper.send_signal(signal.SIGTERM)

        stack.wait_until(lambda: stack.health()[0] == 503, "/healthz to say 503", 1)
        status, answer = stack.post("/generate", LONG)
        assert status == 503 and answer["error"]["code"] == "draining"
        for frame in stream:
            tokens += frame.get("tokens", [])
        assert tokens == whole["tokens"]
        for keeper in stack.processes.values():
            assert keeper.wait(20) == 0
        assert time.monotonic() - told_at >= 1.5
        assert not (Path(stack.env["TINYLOOP_RUN_DIR"]) / "lame").exists()


def test_an_idle_stack_leaves_soon(toy_artifact: Path) -> None:
    with Stack(toy_artifact, keep=True) as stack:
        told_at = time.monotonic()
        for keeper in stack.processes.values():
            keeper.send_signal(signal.SIGTERM)
        for keeper in stack.processes.values():
            assert keeper.wait(15) == 0
        assert time.monotonic() - told_at < 10
