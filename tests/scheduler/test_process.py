"""The real process on real sockets, with a worker and a client of a few lines each that speak `messages`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from scheduler import keys, transport
from scheduler.config import EXIT_BAD_SETTING, Settings
from scheduler.messages import (
    Abort,
    Accepted,
    Cancel,
    ClientBeat,
    DropPrefixes,
    Events,
    Hello,
    LiveRequest,
    Params,
    Register,
    Registered,
    Rejected,
    Run,
    SchedulerBeat,
    SequenceOutput,
    SequenceSpec,
    StatsQuery,
    StatsReply,
    Status,
    StepDone,
    Submit,
    TokenEvent,
    Tokens,
    Unknown,
    Welcome,
    WorkerBeat,
    decode,
    encode,
)
from tests.scheduler.rig import DIGEST, LIMITS, prompt, token, tokens
from tests.wire import bounded_context, stack_directory

LIMIT_S = 10.0
TO_CLIENT = (Welcome, Status, Accepted, Rejected, Unknown, Events, StatsReply)
TO_WORKER = (Registered, Run, Abort, DropPrefixes, SchedulerBeat)


class Process:
    """`python -m scheduler` with an environment of its own."""

    def __init__(self, settings: Settings, **env: str) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TINYLOOP_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "scheduler"],
            env=clean | {"TINYLOOP_RUN_DIR": settings.run_dir} | env,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()

    def wait(self) -> tuple[int, str]:
        _, text = self.popen.communicate(timeout=LIMIT_S)
        return self.popen.returncode, text


class TinyWorker:
    """One token per row and step, rows in a dict; beats come with every turn."""

    def __init__(self, context: zmq.Context[Any], wire: transport.Wire, name: str = "w") -> None:
        self.worker_id = transport.new_peer_id(wire.keys)
        self.name = name
        self.socket, self.monitor = transport.connect_workers(context, wire, self.worker_id)
        self.beats = transport.connect_beats(context, wire)
        self.epoch = 0
        self.runs_seen = 0
        self.rows: dict[int, tuple[Run, int]] = {}

    def turn(self) -> None:
        """Read what there is, run one step, report."""
        beat = WorkerBeat(
            self.worker_id, self.name, self.epoch, "ready", series={"steps_total": 1.0}
        )
        transport.send_now(self.beats, encode(beat))
        if not self.epoch:
            register = Register(self.worker_id, self.name, "test", DIGEST, "n0", LIMITS, b"a card")
            transport.send_now(self.socket, encode(register))
        while self.socket.poll(5):
            self._handle(decode(self.socket.recv(), TO_WORKER))
        outputs = []
        for sequence_id, (run, count) in list(self.rows.items()):
            is_last = count + 1 >= run.params.max_tokens
            new = Tokens([token(run.seed, count)])
            outputs.append(
                SequenceOutput(
                    sequence_id, run.attempt, count, new, finish_reason="length" if is_last else ""
                )
            )
            self.rows[sequence_id] = (run, count + 1)
            if is_last:
                del self.rows[sequence_id]
        if outputs:
            free = LIMITS.max_rows - len(self.rows)
            transport.send_now(
                self.socket, encode(StepDone(self.epoch, tuple(outputs), self.runs_seen, free, 100))
            )

    def _handle(self, message: Any) -> None:
        if isinstance(message, Registered):
            self.epoch, self.runs_seen = message.epoch, 0
            self.rows.clear()
        elif isinstance(message, SchedulerBeat) and message.epoch != self.epoch:
            self.epoch = 0
            self.rows.clear()
        elif isinstance(message, Run):
            self.runs_seen += 1
            self.rows[message.sequence_id] = (message, len(message.emitted))
        elif isinstance(message, Abort):
            self.rows.pop(message.sequence_id, None)


class TinyClient:
    def __init__(self, context: zmq.Context[Any], wire: transport.Wire) -> None:
        self.client_id = transport.new_peer_id(wire.keys)
        self.push = transport.connect_submit(context, wire)
        self.sub = transport.connect_events(context, wire, self.client_id)
        self.seen: list[Any] = []
        self.events: list[TokenEvent] = []

    def send(self, message: Any) -> bool:
        return transport.send_now(self.push, encode(message))

    def turn(self) -> None:
        while self.sub.poll(1):
            topic, frame = self.sub.recv_multipart()
            assert topic == self.client_id
            message: Any = decode(frame, TO_CLIENT)
            self.seen.append(message)
            if isinstance(message, Events):
                self.events += message.events

    def of(self, kind: type[Any]) -> list[Any]:
        return [m for m in self.seen if isinstance(m, kind)]

    def received(self, request_id: int) -> list[int]:
        return [t for e in self.events if e.request_id == request_id for t in e.tokens]

    def submit(self, request_id: int, seed: int, num_tokens: int = 5) -> None:
        spec = SequenceSpec(prompt(10), seed)
        params = Params(loops=2, max_tokens=num_tokens)
        assert self.send(Submit(self.client_id, request_id, f"r{request_id}", params, (spec,)))


def turn_until(is_so: Callable[[], bool], *peers: TinyWorker | TinyClient) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, "did not happen in time"
        for peer in peers:
            peer.turn()


def connect(client: TinyClient, *others: TinyWorker) -> None:
    """Say hello until it is answered: the client's topic is subscribed then."""

    def is_ready() -> bool:
        if not any(w.state == "ready" for w in client.of(Welcome)):
            client.send(Hello(client.client_id))
            return False
        return True

    turn_until(is_ready, client, *others)


@pytest.fixture
def settings() -> Iterator[Settings]:
    with stack_directory() as settings:
        yield settings


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with bounded_context() as context:
        yield context


def test_submit_run_stream_end_on_real_sockets(
    settings: Settings, context: zmq.Context[Any]
) -> None:
    with Process(settings, TINYLOOP_GRACE_S="1") as process:
        wire = transport.Wire.from_settings(settings, "client")
        worker, client, other = (
            TinyWorker(context, wire),
            TinyClient(context, wire),
            TinyClient(context, wire),
        )
        connect(client, worker)
        connect(other, worker)
        assert client.of(Welcome)[-1].card == b"a card"
        for request_id in range(1, 9):
            client.submit(request_id, seed=request_id)
        other.submit(1, seed=77)
        turn_until(
            lambda: len([e for e in client.events if e.finish_reason]) == 8 and len(other.received(1)) == 5,
            worker, client, other,
        )  # fmt: skip
        assert [client.received(i) for i in range(1, 9)] == [tokens(i, 5) for i in range(1, 9)]
        assert other.received(1) == tokens(77, 5)
        client.send(StatsQuery(client.client_id, 1))
        turn_until(lambda: bool(client.of(StatsReply)), client)
        text = client.of(StatsReply)[0].exposition
        assert "tinyloop_requests_completed_total 9.0" in text
        assert 'tinyloop_worker_steps_total{worker="w"}' in text
        process.popen.send_signal(signal.SIGTERM)
        code, log = process.wait()
        assert (code, "Traceback" in log) == (0, False), log


def test_garbage_on_every_socket_is_counted_and_dropped(
    settings: Settings, context: zmq.Context[Any]
) -> None:
    with Process(settings) as process:
        wire = transport.Wire.from_settings(settings, "client")
        worker, client = TinyWorker(context, wire), TinyClient(context, wire)
        connect(client, worker)
        stranger, _ = transport.connect_workers(context, wire, b"stranger")
        garbage = [
            b"",
            b"\xc1",
            b"\x93\x01\x02",
            b"x" * 5000,
            encode(SchedulerBeat(1)),
            b"\xdd\xff\xff\xff\xff",
        ]
        for frame in garbage:
            for socket in (client.push, worker.beats, worker.socket, stranger):
                socket.send(frame)
            client.push.send_multipart([frame, frame])
            worker.socket.send_multipart([frame, frame])
        client.sub.subscribe(b"another's topic")
        other = transport.new_peer_id(None)
        stranger.send(encode(Register(other, "x", "test", DIGEST, "n0", LIMITS, b"")))
        client.submit(1, seed=3)
        turn_until(lambda: len(client.received(1)) == 5, worker, client)
        assert client.received(1) == tokens(3, 5)
        client.send(StatsQuery(client.client_id, 1))
        turn_until(lambda: bool(client.of(StatsReply)), client)
        bad = dict(
            line.split(" ")
            for line in client.of(StatsReply)[0].exposition.splitlines()
            if line.startswith("tinyloop_bad")
        )
        assert float(bad['tinyloop_bad_messages_total{wire="submit"}']) == 12
        assert float(bad['tinyloop_bad_messages_total{wire="beats"}']) == 6
        assert float(bad['tinyloop_bad_messages_total{wire="workers"}']) == 19
        assert float(bad['tinyloop_bad_messages_total{wire="events"}']) == 1
        assert process.popen.poll() is None


def test_a_killed_scheduler_comes_back_and_the_stream_goes_on(
    settings: Settings, context: zmq.Context[Any]
) -> None:
    with Process(settings) as first:
        wire = transport.Wire.from_settings(settings, "client")
        worker, client = TinyWorker(context, wire), TinyClient(context, wire)
        connect(client, worker)
        client.submit(1, seed=5, num_tokens=200)
        turn_until(lambda: len(client.received(1)) > 20, worker, client)
        first.popen.kill()
        first.wait()
    client.turn()
    held = client.received(1)
    with Process(settings):
        client.seen.clear()

        def is_found_again() -> bool:
            """The new scheduler does not know the request, and has its worker back."""
            client.send(ClientBeat(client.client_id, (LiveRequest(1, (len(held),)),)))
            return bool(client.of(Unknown)) and any(s.state == "ready" for s in client.of(Status))

        turn_until(is_found_again, worker, client)
        spec, params = SequenceSpec(prompt(10), 5, Tokens(held)), Params(loops=2, max_tokens=200)
        client.send(Submit(client.client_id, 1, "r1", params, (spec,), resumed=True))
        turn_until(lambda: bool(client.events[-1].finish_reason), worker, client)
        assert client.received(1) == tokens(5, 200)


def test_a_second_scheduler_on_the_run_directory_leaves_with_one_line(
    settings: Settings, context: zmq.Context[Any]
) -> None:
    with Process(settings):
        wire = transport.Wire.from_settings(settings, "client")
        worker, client = TinyWorker(context, wire), TinyClient(context, wire)
        connect(client, worker)
        with Process(settings) as second:
            code, log = second.wait()
        assert code == EXIT_BAD_SETTING
        assert len(log.strip().splitlines()) == 1 and "another scheduler" in log
        client.submit(1, seed=1)  # the first one was not disturbed
        turn_until(lambda: len(client.received(1)) == 5, worker, client)


@pytest.mark.parametrize(
    "env",
    [
        {"TINYLOOP_AGEING_S": "soon"},
        {"TINYLOOP_SUBMIT_ADDR": "tcp://0.0.0.0:5555"},
        {"TINYLOOP_RUN_DIR": "/proc/no/such"},
    ],
    ids=["value", "keys", "directory"],
)
def test_a_bad_setting_is_one_line_and_78(settings: Settings, env: dict[str, str]) -> None:
    with Process(settings, **env) as process:
        code, log = process.wait()
    assert code == EXIT_BAD_SETTING
    (line,) = log.strip().splitlines()
    assert next(iter(env)) in line


def test_a_term_waits_for_the_running_stream(settings: Settings, context: zmq.Context[Any]) -> None:
    with Process(settings, TINYLOOP_GRACE_S="8") as process:
        wire = transport.Wire.from_settings(settings, "client")
        worker, client = TinyWorker(context, wire), TinyClient(context, wire)
        connect(client, worker)
        client.submit(1, seed=5, num_tokens=60)
        turn_until(lambda: len(client.received(1)) > 5, worker, client)
        process.popen.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        client.submit(2, seed=6)
        turn_until(lambda: len(client.received(1)) == 60, worker, client)
        assert [r.code for r in client.of(Rejected)] == ["draining"]
        assert process.wait()[0] == 0
        client.turn()
        assert client.events[-1].finish_reason == "length"


def test_under_curve_nobody_speaks_for_another(
    settings: Settings, context: zmq.Context[Any], tmp_path: Any
) -> None:
    keys.create(tmp_path)
    with (
        stack_directory(curve_dir=str(tmp_path)) as secured,
        Process(secured, TINYLOOP_CURVE_DIR=str(tmp_path)),
    ):
        wire = transport.Wire.from_settings(secured, "client")
        worker = TinyWorker(context, transport.Wire.from_settings(secured, "worker"))
        client = TinyClient(context, wire)
        connect(client, worker)
        client.submit(1, seed=5, num_tokens=40)
        thief = b"\x01" * 16
        client.send(Cancel(thief, 1))
        client.send(Hello(thief))
        turn_until(lambda: len(client.received(1)) == 40, worker, client)
        client.send(StatsQuery(client.client_id, 1))
        turn_until(lambda: bool(client.of(StatsReply)), client)
        text = client.of(StatsReply)[0].exposition
        assert 'tinyloop_bad_messages_total{wire="submit"} 2.0' in text
        assert "tinyloop_clients 1.0" in text
