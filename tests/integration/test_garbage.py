"""Garbage on every socket of a running scheduler is counted and dropped, and requests go on."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from scheduler import transport
from scheduler.blocking import BlockingClient
from scheduler.client import RequestSpec
from scheduler.messages import (
    ClientBeat,
    Hello,
    Params,
    SequenceSpec,
    Submit,
    Tokens,
    WorkerBeat,
    encode,
)
from tests.harness import Stack
from tests.wire import bounded_context


def nonsense() -> list[bytes]:
    """Frames that are no message, almost messages, and messages with impossible values."""
    rng = random.Random(3)
    fine = encode(
        Submit(b"c" * 16, 1, "", Params(2, 4), (SequenceSpec(Tokens((1, 2)), 1),), slo_ms=5.0)
    )
    frames = [b"", b"\xc1", os.urandom(200), b"\x93\x01\x02", b"\x90", b"{}", fine[:-3]]
    frames += [encode(Hello(b"short")), encode(Hello(b"")), encode(ClientBeat(b"x" * 400))]
    frames += [encode(WorkerBeat(b"", "n" * 5000, -1, "no state", step_age_s=float("nan")))]
    for _ in range(300):
        flipped = bytearray(fine)
        for _ in range(rng.randrange(1, 4)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        frames.append(bytes(flipped))
    return frames


@pytest.fixture(scope="module")
def stack(toy_artifact: Path) -> Iterator[Stack]:
    env = {"TINYLOOP_FAULT": "instant_worker"}
    with Stack(toy_artifact, env=env, roles=("scheduler", "worker"), wait=False) as stack:
        yield stack


def counted(client: BlockingClient) -> dict[str, float]:
    """Bad messages so far by socket."""
    exposition = client.stats(5.0)
    assert exposition is not None
    lines = [x for x in exposition.splitlines() if x.startswith("tinyloop_bad_messages_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


def test_garbage_on_every_socket_is_counted_and_ends_nothing(stack: Stack) -> None:
    request = RequestSpec("", Params(2, 8), (SequenceSpec(Tokens((1, 2, 3)), 5),))
    wire = transport.Wire.from_settings(stack.settings, "client")
    with BlockingClient(stack.settings) as client, bounded_context() as context:
        client.wait_ready(60)
        tokens = [t for event in client.submit(request) for t in event.tokens]
        before = counted(client)
        peers = {
            "submit": transport.connect_submit(context, wire),
            "beats": transport.connect_beats(context, wire),
            "workers": transport.connect_workers(context, wire, b"g" * 16)[0],
            "events": context.socket(zmq.XSUB),
        }
        peers["events"].connect(wire.events)
        for frame in nonsense():
            for name, peer in peers.items():
                if name != "events" or frame[:1] not in (b"\0", b"\1"):
                    peer.send(frame)
        for name in ("submit", "beats", "workers"):
            peers[name].send_multipart([b"one", b"two", b"three"])
        deadline = time.monotonic() + 15
        while any(counted(client).get(name, 0) < before.get(name, 0) + 8 for name in peers):
            assert time.monotonic() < deadline, counted(client)
            time.sleep(0.05)
        assert [t for event in client.submit(request) for t in event.tokens] == tokens
    assert all(p.poll() is None for p in stack.processes.values())
    assert "Traceback" not in stack.logs()
