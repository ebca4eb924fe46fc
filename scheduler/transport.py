"""Sockets and addresses: every ZeroMQ socket of TinyLoop is made here, with all of its options, and nowhere else.

Owns the run directory of an `ipc://` stack (made 0700, checked, locked by the scheduler), the rule that `tcp://` beyond
loopback needs keys, peer ids, and what the scheduler may believe about who sent a frame. Knows no messages: it moves bytes.
Works on plain `zmq` and on `zmq.asyncio` contexts alike. A socket belongs to the thread or loop that made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import zmq

from scheduler.keys import FINGERPRINT_BYTES, BadKeys, Keys, Role, load
from scheduler.messages import CLIENT_ID_BYTES, MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from scheduler.config import Settings

SocketT = TypeVar("SocketT", bound="zmq.Socket[Any]")

MAX_IPC_PATH_BYTES = 107  # sun_path without its final zero
SEND_TIMEOUT_MS = 1000
SEND_HWM = 10_000
RECEIVE_HWM = 10_000
EVENTS_HWM = 20_000  # frames per client process; one per step, and a client that stalls is dropped in seconds
CLOSE_LINGER_MS = 200  # enough for a last Cancel or StepDone to leave, too short to hold up an exit
BEAT_MAX_BYTES = 1 << 20


class TransportError(Exception):
    """An address, run directory or key directory that cannot be used; one line that says what to change."""


# ------------------------------------------------------------------------------------------- addresses, run directory


@dataclass(frozen=True, slots=True)
class Wire:
    """What one process needs to open its sockets: the four addresses of a stack, and its keys if CURVE is on."""

    submit: str
    events: str
    workers: str
    beats: str
    keys: Keys | None = None

    @classmethod
    def from_settings(cls, settings: Settings, role: Role) -> Wire:
        """Addresses (checked) and keys for `role`; makes the run directory if any address needs it.

        Raises:
            TransportError: a path too long, a directory that is not ours, a public address without keys, no keys there.
        """
        addresses = {
            "submit": settings.submit_addr,
            "events": settings.events_addr,
            "workers": settings.workers_addr,
            "beats": settings.beats_addr,
        }
        try:
            keys = load(Path(settings.curve_dir), role) if settings.curve_dir else None
        except BadKeys as ex:
            raise TransportError(f"TINYLOOP_CURVE_DIR: {ex}") from None
        for name, address in addresses.items():
            _check_address(f"TINYLOOP_{name.upper()}_ADDR", address, has_keys=keys is not None)
        if any(a.startswith(f"ipc://{settings.run_dir}/") for a in addresses.values()):
            prepare_run_dir(Path(settings.run_dir))
        return cls(**addresses, keys=keys)


def prepare_run_dir(path: Path) -> None:
    """Make the run directory (0700) or check that the one there is ours alone. Peers check too: they send prompts into it.

    Raises:
        TransportError: it cannot be made, is a link, belongs to someone else or is open to others.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        found = path.lstat()
    except OSError as ex:
        raise TransportError(f"TINYLOOP_RUN_DIR {path} cannot be made: {ex.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise TransportError(f"TINYLOOP_RUN_DIR {path} is not a directory")
    if found.st_uid != os.geteuid():
        raise TransportError(
            f"TINYLOOP_RUN_DIR {path} belongs to user {found.st_uid}, not to {os.geteuid()}"
        )
    if found.st_mode & 0o077:
        raise TransportError(f"TINYLOOP_RUN_DIR {path} is open to others; run: chmod 700 {path}")


def lock_run_dir(path: Path) -> IO[str]:
    """Take the scheduler's lock; held until the returned file is closed or the process ends, however it ends.

    A second bind on the same ipc path would succeed and steal new connections, so the lock comes before any bind.

    Raises:
        TransportError: another scheduler holds it, or nothing can be written there.
    """
    prepare_run_dir(path)
    try:
        lock = open(path / "scheduler.lock", "a+", encoding="ascii")  # noqa: SIM115 (the caller holds it)
    except OSError as ex:
        raise TransportError(f"TINYLOOP_RUN_DIR {path} cannot be used: {ex.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read(32).strip() or "unknown"
        lock.close()
        raise TransportError(
            f"another scheduler (pid {holder}) holds {path}; choose another PORT or TINYLOOP_RUN_DIR"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _check_address(name: str, address: str, *, has_keys: bool) -> None:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        if len(os.fsencode(rest)) > MAX_IPC_PATH_BYTES:
            raise TransportError(
                f"{name}: {rest} is longer than the {MAX_IPC_PATH_BYTES} bytes of a socket path; choose a shorter TINYLOOP_RUN_DIR"
            )
    elif scheme == "tcp":
        if not has_keys and not _is_loopback(rest.rpartition(":")[0].strip("[]")):
            raise TransportError(
                f"{name}: {address} can be reached from outside and has no keys; make them with "
                "`python -m scheduler.keys DIR` and set TINYLOOP_CURVE_DIR=DIR on every host, or use 127.0.0.1 or ipc://"
            )
    else:
        raise TransportError(f"{name}: {address} must start with ipc:// or tcp://")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---------------------------------------------------------------------------------------------------- who is speaking


def new_peer_id(keys: Keys | None) -> bytes:
    """A fresh id (16 bytes) for a client or worker process: random, or under CURVE the key's fingerprint and a random rest.

    Make it after any fork. It never starts with a zero byte, which a ROUTER keeps for itself.
    """
    if keys is not None:
        return keys.fingerprint + os.urandom(CLIENT_ID_BYTES - FINGERPRINT_BYTES)
    return bytes([os.urandom(1)[0] or 1]) + os.urandom(CLIENT_ID_BYTES - 1)


def user_id(frame: zmq.Frame) -> str:
    """The fingerprint (hex) of the key behind a received frame (`copy=False`); "" without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def owns_id(wire: Wire, frame: zmq.Frame, peer_id: bytes) -> bool:
    """Whether the sender of `frame` may speak as `peer_id`. A message for which it may not is dropped."""
    if len(peer_id) != CLIENT_ID_BYTES:
        return False
    return wire.keys is None or user_id(frame) == peer_id[:FINGERPRINT_BYTES].hex()


def grant_subscription(
    wire: Wire, events: zmq.Socket[Any], frame: zmq.Frame
) -> tuple[bytes, bool] | None:
    """Act on one frame received (`copy=False`) from the events XPUB: let a peer have its own topic, or take it back.

    HAZARD: call it before the next receive on `events`; a manual XPUB applies it to the peer of the last frame.

    Returns:
        (topic, is_subscribed), or None if it was refused: not a subscription, not an id, or another peer's.
    """
    body = frame.bytes
    topic = body[1:]
    if body[:1] not in (b"\0", b"\1") or not owns_id(wire, frame, topic):
        return None
    is_subscribed = body[:1] == b"\1"
    events.setsockopt(zmq.SUBSCRIBE if is_subscribed else zmq.UNSUBSCRIBE, topic)
    return topic, is_subscribed


def send_now(socket: zmq.Socket[Any], frame: bytes) -> bool:
    """Send without waiting. False: nobody there, or their queue is full. For plain (not asyncio) sockets."""
    try:
        socket.send(frame, zmq.DONTWAIT)
    except zmq.Again:
        return False
    return True


# ----------------------------------------------------------------------------------------------------- scheduler's end


def bind_submit(context: zmq.Context[SocketT], wire: Wire) -> SocketT:
    """PULL: what clients send. One frame per message; more is garbage."""
    socket = _make(context, zmq.PULL, MAX_MESSAGE_BYTES)
    return _bind(socket, wire.submit, wire.keys, b"clients")


def bind_events(context: zmq.Context[SocketT], wire: Wire) -> SocketT:
    """Manual XPUB: send `[client_id, message]`; give each received frame to `grant_subscription` at once."""
    socket = _make(context, zmq.XPUB, BEAT_MAX_BYTES)
    socket.setsockopt(zmq.XPUB_MANUAL, 1)
    socket.setsockopt(zmq.SNDHWM, EVENTS_HWM)
    return _bind(socket, wire.events, wire.keys, b"clients")


def bind_workers(context: zmq.Context[SocketT], wire: Wire) -> SocketT:
    """ROUTER: send and receive `[worker_id, message]`. A send to a worker that has gone raises `EHOSTUNREACH`.

    Handover: a worker that reconnects before its old connection is seen dead takes its id over.
    """
    socket = _make(context, zmq.ROUTER, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return _bind(socket, wire.workers, wire.keys, b"workers")


def bind_beats(context: zmq.Context[SocketT], wire: Wire) -> SocketT:
    """PULL: `WorkerBeat`s, apart from step outputs so that neither delays the other."""
    socket = _make(context, zmq.PULL, BEAT_MAX_BYTES)
    return _bind(socket, wire.beats, wire.keys, b"workers")


# ------------------------------------------------------------------------------------------------- clients' and workers'


def connect_submit(context: zmq.Context[SocketT], wire: Wire) -> SocketT:
    """PUSH to the scheduler; holds nothing for one that is not there."""
    return _connect(_make(context, zmq.PUSH, BEAT_MAX_BYTES), wire.submit, wire.keys)


def connect_events(context: zmq.Context[SocketT], wire: Wire, client_id: bytes) -> SocketT:
    """SUB to the one topic of this client process; receives `[client_id, message]`."""
    socket = _make(context, zmq.SUB, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RCVHWM, EVENTS_HWM)
    socket.setsockopt(zmq.SUBSCRIBE, client_id)
    return _connect(socket, wire.events, wire.keys)


def connect_workers(
    context: zmq.Context[SocketT], wire: Wire, worker_id: bytes
) -> tuple[SocketT, SocketT]:
    """DEALER to the scheduler's ROUTER, known there as `worker_id`; one frame per message.

    Returns:
        (socket, monitor); the monitor, for `zmq.utils.monitor`, tells of each connection made and lost, the first included.
    """
    socket = _make(context, zmq.DEALER, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.ROUTING_ID, worker_id)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    return _connect(socket, wire.workers, wire.keys), monitor


def connect_beats(context: zmq.Context[SocketT], wire: Wire) -> SocketT:
    """PUSH for a worker's heartbeats; a beat that cannot leave at once is not worth keeping."""
    return _connect(_make(context, zmq.PUSH, BEAT_MAX_BYTES), wire.beats, wire.keys)


# ------------------------------------------------------------------------------------------------------------- options


def _make(context: zmq.Context[SocketT], kind: int, max_message_bytes: int) -> SocketT:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return socket


def _bind(socket: SocketT, address: str, keys: Keys | None, zap_domain: bytes) -> SocketT:
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.ZAP_DOMAIN, zap_domain)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as ex:
        socket.close(0)
        raise TransportError(f"cannot bind {address}: {ex}") from None
    return socket


def _connect(socket: SocketT, address: str, keys: Keys | None) -> SocketT:
    if socket.type != zmq.SUB:  # HAZARD: an immediate SUB never sends its subscriptions
        socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.scheduler_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.connect(address)
    return socket
