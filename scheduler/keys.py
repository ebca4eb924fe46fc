"""CURVE keys: who may speak to the scheduler when its sockets leave the machine.

Owns the key directory (`python -m scheduler.keys DIR` fills one), the two allow-lists, and the ZAP handler that lets a key in
and stamps every frame of its connection with the key's fingerprint. Knows no messages. `transport` calls it; with no key
directory nothing here runs.

    DIR/scheduler.key, .key_secret     the scheduler's pair; every peer needs the public half
    DIR/client.key, .key_secret        this host's client pair (frontends, batch); likewise worker.key
    DIR/clients/*.key                  public keys that may submit and subscribe
    DIR/workers/*.key                  public keys that may register as workers
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.auth
import zmq.utils.z85

log = logging.getLogger(__name__)

Role = Literal["scheduler", "client", "worker"]
ROLES: tuple[Role, ...] = ("scheduler", "client", "worker")
FINGERPRINT_BYTES = 8
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_MAX_KEY_FILE_BYTES = 1 << 16


class BadKeys(Exception):
    """The key directory cannot be used; the text says what is missing and how to make it."""


@dataclass(frozen=True, slots=True)
class Keys:
    """One role's pair and the scheduler's public key (Z85), and where the allow-lists are."""

    directory: Path
    public: bytes
    secret: bytes
    scheduler_public: bytes

    @property
    def fingerprint(self) -> bytes:
        return fingerprint(self.public)


def fingerprint(public_z85: bytes) -> bytes:
    """The first half of every id that the owner of this public key may use. Never starts with a zero byte (a ROUTER reserves those)."""
    digest = hashlib.blake2b(
        zmq.utils.z85.decode(public_z85), digest_size=FINGERPRINT_BYTES
    ).digest()
    return bytes([digest[0] or 1]) + digest[1:]


def load(directory: Path, role: Role) -> Keys:
    """The pair of `role`.

    Raises:
        BadKeys: a file is missing, or is not a key.
    """
    public, secret = _read_key(directory / f"{role}.key_secret")
    if secret is None:
        raise BadKeys(
            f"{directory / f'{role}.key_secret'} holds no secret key; {_remedy(directory)}"
        )
    scheduler_public, _ = _read_key(directory / "scheduler.key")
    return Keys(directory, public, secret, scheduler_public)


def create(directory: Path) -> list[Path]:
    """Make the pairs that the directory lacks and admit this host's client and worker. Returns what was written."""
    written = []
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in ROLES:
        if not (directory / f"{role}.key_secret").exists():
            public_file, secret_file = zmq.auth.create_certificates(directory, role)
            os.chmod(secret_file, 0o600)
            written += [Path(public_file), Path(secret_file)]
    for role in ("client", "worker"):
        allowed = directory / f"{role}s"
        allowed.mkdir(mode=0o700, exist_ok=True)
        if not (allowed / f"{role}.key").exists():
            written.append(
                Path(shutil.copyfile(directory / f"{role}.key", allowed / f"{role}.key"))
            )
    return written


def _read_key(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as ex:
        raise BadKeys(f"{path}: {ex}; {_remedy(path.parent)}") from None


def _remedy(directory: Path) -> str:
    return f"make the keys with: python -m scheduler.keys {directory}"


class Gate:
    """Answers ZAP for the sockets of one context, in a thread of its own.

    A socket's ZAP domain (`clients` or `workers`) is the allow-list that counts for it. The lists are read again
    for every handshake, so admitting or barring a key needs no restart (a barred key keeps the connections it has).
    """

    def __init__(self, context: zmq.Context[Any], directory: Path) -> None:
        self._directory = directory
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.rcvtimeo = 200
        self._socket.bind(_ZAP_ENDPOINT)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2.0)

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    request = self._socket.recv_multipart()
                except zmq.Again:
                    continue
                self._socket.send_multipart(self._answer(request))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """A ZAP 1.0 reply: version, request id, status, text, User-Id, metadata."""
        version, request_id, domain, address, _, mechanism, *credentials = request
        if version == b"1.0" and mechanism == b"CURVE" and len(credentials) == 1:
            public = zmq.utils.z85.encode(credentials[0])
            if public in self._admitted(domain):
                return [version, request_id, b"200", b"OK", fingerprint(public).hex().encode(), b""]
        log.warning("refused a connection from %s to %s: key not admitted", address, domain)
        return [version, request_id, b"400", b"key not admitted", b"", b""]

    def _admitted(self, domain: bytes) -> set[bytes]:
        if domain not in (b"clients", b"workers"):
            return set()
        admitted = set()
        for path in (self._directory / domain.decode()).glob("*.key"):
            try:
                if path.stat().st_size <= _MAX_KEY_FILE_BYTES:
                    admitted.add(zmq.auth.load_certificate(path)[0])
            except (OSError, ValueError) as ex:
                log.warning("allow-list: %s: %s", path, ex)
        return admitted


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler.keys", description="Make what TINYLOOP_CURVE_DIR needs."
    )
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    for path in create(args.directory):
        print(path)
    print(f"set TINYLOOP_CURVE_DIR={args.directory} for scheduler, web and worker on this host.")
    print(
        "Another host: copy scheduler.key there, run this command there, and copy its client.key and"
    )
    print("worker.key into this directory's clients/ and workers/ under names of their own.")


if __name__ == "__main__":
    main()
