"""A stack over TCP with CURVE keys: it serves those whose keys are admitted and nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler import keys
from scheduler.blocking import BlockingClient
from scheduler.client import Rejection, RequestSpec
from scheduler.config import SOCKETS
from scheduler.messages import Params, SequenceSpec, Tokens
from tests.harness import Stack, free_port


def test_stack_over_tcp_serves_admitted_keys_alone(toy_artifact: Path, tmp_path: Path) -> None:
    keys.create(tmp_path / "keys")
    env = {f"TINYLOOP_{s.upper()}_ADDR": f"tcp://127.0.0.1:{free_port()}" for s in SOCKETS}
    env |= {"TINYLOOP_FAULT": "instant_worker", "TINYLOOP_CURVE_DIR": str(tmp_path / "keys")}
    request = RequestSpec("", Params(2, 8), (SequenceSpec(Tokens((1, 2, 3)), 5),))
    with Stack(toy_artifact, env=env, roles=("scheduler", "worker"), wait=False) as stack:
        with BlockingClient(stack.settings) as client:
            client.wait_ready(60)
            assert sum(len(e.tokens) for e in client.submit(request)) == 8

        keys.create(tmp_path / "others")  # the scheduler's public key is no secret
        (tmp_path / "others/scheduler.key").write_bytes(
            (tmp_path / "keys/scheduler.key").read_bytes()
        )
        stranger = replace(stack.settings, curve_dir=str(tmp_path / "others"))
        with BlockingClient(stranger) as client:
            with pytest.raises(Rejection, match="engine_down"):
                client.submit(request)
            assert client.state == "connecting"
        stack.wait_until(lambda: "key not admitted" in stack.logs(), "the refusal in the log")
