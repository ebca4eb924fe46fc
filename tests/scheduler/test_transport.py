from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from scheduler import keys, transport
from scheduler.config import Settings
from tests.wire import bounded_context, run, stack_directory


@pytest.fixture
def settings() -> Iterator[Settings]:
    with stack_directory() as settings:
        yield settings


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with bounded_context() as context:
        yield context


@pytest.fixture
def wire(settings: Settings) -> transport.Wire:
    return transport.Wire.from_settings(settings, "scheduler")


def receive(socket: zmq.Socket, timeout_ms: int = 3000) -> list[zmq.Frame]:
    assert socket.poll(timeout_ms), "nothing came"
    return socket.recv_multipart(copy=False)


# ---------------------------------------------------------------------------------------- run directory, lock, addresses


def test_run_directory_is_made_for_its_owner_alone(
    settings: Settings, wire: transport.Wire
) -> None:
    assert os.stat(settings.run_dir).st_mode & 0o777 == 0o700


def test_run_directory_open_to_others_is_refused(settings: Settings) -> None:
    os.mkdir(settings.run_dir, 0o755)
    os.chmod(settings.run_dir, 0o755)
    for role in keys.ROLES:
        with pytest.raises(transport.TransportError, match="chmod 700"):
            transport.Wire.from_settings(settings, role)


def test_run_directory_behind_a_link_is_refused(settings: Settings, tmp_path: Path) -> None:
    os.symlink(tmp_path, settings.run_dir)
    with pytest.raises(transport.TransportError, match="not a directory"):
        transport.Wire.from_settings(settings, "client")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_run_directory_of_someone_else_is_refused(settings: Settings) -> None:
    os.mkdir(settings.run_dir, 0o700)
    os.chown(settings.run_dir, 12345, 12345)
    with pytest.raises(transport.TransportError, match="belongs to user 12345"):
        transport.Wire.from_settings(settings, "client")


def test_lock_is_held_by_one_and_freed_by_its_death(settings: Settings) -> None:
    lock = transport.lock_run_dir(Path(settings.run_dir))
    with pytest.raises(transport.TransportError, match=f"pid {os.getpid()}"):
        transport.lock_run_dir(Path(settings.run_dir))
    lock.close()
    code = (
        "import sys, time; from pathlib import Path; from scheduler.transport import lock_run_dir\n"
        "held = lock_run_dir(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, settings.run_dir], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(transport.TransportError, match=f"pid {holder.pid}"):
            transport.lock_run_dir(Path(settings.run_dir))
        holder.kill()
        holder.wait()
    transport.lock_run_dir(Path(settings.run_dir)).close()


@pytest.mark.parametrize(
    "address", ["tcp://*:7000", "tcp://0.0.0.0:7000", "tcp://10.0.0.1:7000", "tcp://[::]:7000"]
)
def test_public_address_without_keys_is_refused_and_says_how(address: str) -> None:
    with (
        stack_directory(submit_addr=address) as settings,
        pytest.raises(transport.TransportError, match=r"TINYLOOP_SUBMIT_ADDR.*scheduler\.keys DIR"),
    ):
        transport.Wire.from_settings(settings, "scheduler")


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:7000", "tcp://localhost:7000", "tcp://[::1]:7000"]
)
def test_loopback_needs_no_keys(address: str) -> None:
    with stack_directory(submit_addr=address) as settings:
        assert transport.Wire.from_settings(settings, "client").submit == address


def test_long_socket_path_is_refused_with_its_limit() -> None:
    with stack_directory() as settings:
        object.__setattr__(settings, "submit_addr", "ipc:///tmp/" + "x" * 120)
        with pytest.raises(transport.TransportError, match="107 bytes"):
            transport.Wire.from_settings(settings, "client")


def test_bind_where_one_cannot_is_one_line(settings: Settings, context: zmq.Context) -> None:
    wire = transport.Wire("ipc:///nowhere/at/all.ipc", "", "", "")
    with pytest.raises(transport.TransportError, match="cannot bind ipc:///nowhere/at/all.ipc"):
        transport.bind_submit(context, wire)


# ------------------------------------------------------------------------------------------------------------- behaviour


def test_push_holds_nothing_for_an_absent_scheduler(
    context: zmq.Context, wire: transport.Wire
) -> None:
    push = transport.connect_submit(context, wire)
    assert not transport.send_now(push, b"stale")
    pull = transport.bind_submit(context, wire)
    deadline = time.monotonic() + 3
    while not transport.send_now(push, b"fresh"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [f.bytes for f in receive(pull)] == [b"fresh"]


def test_subscriber_gets_its_own_topic_and_no_other(
    context: zmq.Context, wire: transport.Wire
) -> None:
    events = transport.bind_events(context, wire)
    client_id = transport.new_peer_id(None)
    subscriber = transport.connect_events(context, wire, client_id)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")  # everything
    subscriber.setsockopt(zmq.SUBSCRIBE, client_id[:4])  # a prefix
    granted = [transport.grant_subscription(wire, events, receive(events)[0]) for _ in range(3)]
    assert sorted(granted, key=str) == sorted([(client_id, True), None, None], key=str)
    events.send_multipart([transport.new_peer_id(None), b"foreign"])
    events.send_multipart([client_id, b"own"])
    assert [f.bytes for f in receive(subscriber)] == [client_id, b"own"]
    subscriber.setsockopt(zmq.UNSUBSCRIBE, client_id)
    assert transport.grant_subscription(wire, events, receive(events)[0]) == (client_id, False)


@pytest.mark.parametrize("garbage", [b"", b"\x02" + bytes(16), b"hello", b"\x01", os.urandom(500)])
def test_garbage_on_the_events_socket_is_refused(
    context: zmq.Context, wire: transport.Wire, garbage: bytes
) -> None:
    events = transport.bind_events(context, wire)
    peer = context.socket(zmq.XSUB)
    peer.connect(wire.events)
    peer.send(garbage)
    peer.send(b"\x01" + b"i" * 16)
    answers = []
    while not answers or answers[-1] is None:
        answers.append(transport.grant_subscription(wire, events, receive(events)[0]))
        assert len(answers) < 5
    assert answers[-1] == (b"i" * 16, True)


def test_send_to_a_worker_that_is_not_there_raises(
    context: zmq.Context, wire: transport.Wire
) -> None:
    router = transport.bind_workers(context, wire)
    with pytest.raises(zmq.ZMQError) as ex:
        router.send_multipart([b"w" * 16, b"run"])
    assert ex.value.errno == zmq.EHOSTUNREACH


def test_worker_that_connects_again_takes_its_id_over(
    context: zmq.Context, wire: transport.Wire
) -> None:
    router = transport.bind_workers(context, wire)
    worker_id = transport.new_peer_id(None)
    old, _ = transport.connect_workers(context, wire, worker_id)
    old.send(b"old")
    assert [f.bytes for f in receive(router)] == [worker_id, b"old"]
    new, _ = transport.connect_workers(context, wire, worker_id)
    new.send(b"new")
    assert [f.bytes for f in receive(router)] == [worker_id, b"new"]
    router.send_multipart([worker_id, b"run"])
    assert [f.bytes for f in receive(new)] == [b"run"]


def test_oversized_beat_cuts_its_sender_off_and_nobody_else(
    context: zmq.Context, wire: transport.Wire
) -> None:
    beats = transport.bind_beats(context, wire)
    bad, good = (transport.connect_beats(context, wire) for _ in range(2))
    bad.send(bytes(transport.BEAT_MAX_BYTES + 1))
    good.send(b"fine")
    assert [f.bytes for f in receive(beats)] == [b"fine"]
    assert not beats.poll(100)


def test_cancelled_receive_eats_no_message(wire: transport.Wire) -> None:
    async def scenario() -> None:
        with bounded_context(zmq.asyncio.Context) as context:
            events = transport.bind_events(context, wire)
            client_id = transport.new_peer_id(None)
            subscriber = transport.connect_events(context, wire, client_id)
            transport.grant_subscription(wire, events, await events.recv(copy=False))
            for _ in range(20):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(subscriber.recv_multipart(), 0.002)
            receiving = asyncio.ensure_future(subscriber.recv_multipart())
            await asyncio.sleep(0)
            await events.send_multipart([client_id, b"1"])
            receiving.cancel()
            await events.send_multipart([client_id, b"2"])
            got = [(await subscriber.recv_multipart())[1]]
            if got == [b"1"]:
                got.append((await subscriber.recv_multipart())[1])
            assert got == [b"1", b"2"]

    run(scenario())


# ----------------------------------------------------------------------------------------------------------------- CURVE


class Curve:
    """A stack with keys on a context of its own, and peers of each role."""

    def __init__(self, settings: Settings, context: zmq.Context) -> None:
        self.hub = transport.Wire.from_settings(settings, "scheduler")
        self.client = transport.Wire.from_settings(settings, "client")
        self.worker = transport.Wire.from_settings(settings, "worker")
        assert self.hub.keys is not None
        self.gate = keys.Gate(context, self.hub.keys.directory)


@pytest.fixture
def curve(context: zmq.Context, tmp_path: Path) -> Iterator[Curve]:
    keys.create(tmp_path / "keys")
    with stack_directory(curve_dir=str(tmp_path / "keys")) as settings:
        stack = Curve(settings, context)
        yield stack
        stack.gate.close()


def test_key_directory_is_private_and_made_once(tmp_path: Path) -> None:
    written = keys.create(tmp_path / "keys")
    assert {p.name for p in written} >= {"scheduler.key", "client.key_secret", "worker.key"}
    assert all(p.stat().st_mode & 0o077 == 0 for p in written if p.suffix == ".key_secret")
    assert keys.create(tmp_path / "keys") == []
    done = subprocess.run(
        [sys.executable, "-m", "scheduler.keys", str(tmp_path / "more")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "TINYLOOP_CURVE_DIR" in done.stdout and (tmp_path / "more/clients/client.key").exists()


def test_missing_keys_say_how_to_make_them(tmp_path: Path) -> None:
    with (
        stack_directory(curve_dir=str(tmp_path / "none")) as settings,
        pytest.raises(
            transport.TransportError, match=r"TINYLOOP_CURVE_DIR.*python -m scheduler\.keys"
        ),
    ):
        transport.Wire.from_settings(settings, "client")


def test_ids_carry_the_key_and_frames_prove_it(context: zmq.Context, curve: Curve) -> None:
    assert curve.client.keys is not None
    pull = transport.bind_submit(context, curve.hub)
    push = transport.connect_submit(context, curve.client)
    client_id = transport.new_peer_id(curve.client.keys)
    assert client_id != transport.new_peer_id(curve.client.keys)
    push.send(b"hello")
    frame = receive(pull)[0]
    assert transport.user_id(frame) == curve.client.keys.fingerprint.hex()
    assert transport.owns_id(curve.hub, frame, client_id)
    assert not transport.owns_id(curve.hub, frame, transport.new_peer_id(curve.worker.keys))
    assert not transport.owns_id(curve.hub, frame, client_id[:8])


def test_topics_of_another_key_are_not_granted(context: zmq.Context, curve: Curve) -> None:
    events = transport.bind_events(context, curve.hub)
    client_id = transport.new_peer_id(curve.client.keys)
    foreign = transport.new_peer_id(curve.worker.keys)
    subscriber = transport.connect_events(context, curve.client, client_id)
    subscriber.setsockopt(zmq.SUBSCRIBE, foreign)
    granted = [transport.grant_subscription(curve.hub, events, receive(events)[0]) for _ in "12"]
    assert sorted(granted, key=str) == sorted([(client_id, True), None], key=str)
    events.send_multipart([foreign, b"foreign"])
    events.send_multipart([client_id, b"own"])
    assert receive(subscriber)[1].bytes == b"own"
    assert not subscriber.poll(100)


def test_allow_lists_are_separate_and_read_again(context: zmq.Context, curve: Curve) -> None:
    assert curve.hub.keys is not None
    router = transport.bind_workers(context, curve.hub)
    intruder, _ = transport.connect_workers(context, curve.client, b"c" * 16)  # a client's key
    intruder.sndtimeo = 300
    with pytest.raises(zmq.Again):
        intruder.send(b"register")
    worker, _ = transport.connect_workers(context, curve.worker, b"w" * 16)
    worker.send(b"register")
    assert receive(router)[1].bytes == b"register"
    directory = curve.hub.keys.directory
    os.link(directory / "client.key", directory / "workers" / "also.key")
    later, _ = transport.connect_workers(context, curve.client, b"l" * 16)
    later.send(b"admitted now")
    assert receive(router)[1].bytes == b"admitted now"


def test_a_peer_without_keys_does_not_get_in(context: zmq.Context, curve: Curve) -> None:
    pull = transport.bind_submit(context, curve.hub)
    plain = transport.Wire(curve.hub.submit, curve.hub.events, curve.hub.workers, curve.hub.beats)
    push = transport.connect_submit(context, plain)
    push.sndtimeo = 300
    with pytest.raises(zmq.Again):
        push.send(b"let me in")
    assert not pull.poll(50)
