"""Starts the real processes of a stack for a test, on a run directory and a port of its own, and ends every one of them.

The commands come from the Procfile, run bare (a killed process stays dead until `restart`) or under scripts/keep.
Used by end-to-end and kill tests of all parts; nothing in it is faked.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from scheduler.config import Settings

ROOT = Path(__file__).resolve().parent.parent
READY_S = 120.0  # a first start may compile kernels
STOP_S = 20.0


class StackError(AssertionError):
    """The stack did not do what the test waited for; the message ends with its logs."""


class Stack:
    """A running stack: `with Stack(artifact) as stack: requests to stack.url`.

    Args:
        model_path: the artifact to serve.
        env: further variables; they win over what the harness sets.
        num_workers: worker processes, `worker-0` and so on.
        num_web: web processes under one Gunicorn master.
        keep: run each line of the Procfile under its keeper.
        roles: the lines of the Procfile to start.
        wait: wait until /healthz says ok before the block begins.
    """

    def __init__(
        self,
        model_path: Path | str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        num_workers: int = 1,
        num_web: int = 1,
        keep: bool = False,
        roles: tuple[str, ...] = ("scheduler", "worker", "web"),
        wait: bool = True,
    ) -> None:
        self.keep = keep
        self.roles = roles
        self.num_workers = num_workers
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._wait = wait
        self._dir = Path(tempfile.mkdtemp(prefix="tl-"))  # short: socket paths are limited
        self._log = self._dir / "log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "TINYLOOP_DEVICE": os.environ.get("TINYLOOP_TEST_DEVICE", "cpu"),
            "TINYLOOP_RUN_DIR": str(self._dir / "run"),
            "TINYLOOP_WORKERS": str(num_workers),
            "TINYLOOP_WEB_PROCESSES": str(num_web),
            "TINYLOOP_GRACE_S": "10",
            **({"TINYLOOP_MODEL_PATH": str(model_path)} if model_path is not None else {}),
            **(env or {}),
        }

    @property
    def settings(self) -> Settings:
        """The settings that the processes run under, for clients in the test itself."""
        return Settings.from_env(self.env)

    def __enter__(self) -> Stack:
        try:
            for role in self.roles:
                for name in self._names(role):
                    self.restart(name)
            if self._wait:
                self.wait_ready()
        except BaseException:
            print(self.logs())  # pytest shows it with the failure
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if value is not None:
            print(self.logs())  # pytest shows it with the failure
        self.stop()

    def _names(self, role: str) -> list[str]:
        if role == "worker" and not self.keep:
            return [f"worker-{index}" for index in range(self.num_workers)]
        return [role]

    def restart(self, name: str) -> None:
        """Starts `name` (scheduler, web, worker-N; under keep: worker) again; what ran before must have ended."""
        role, _, index = name.partition("-")
        command = procfile()[role]
        if not self.keep:
            command = [*command, *(["--index", index] if index else [])]
        else:
            command = [sys.executable, str(ROOT / "scripts" / "keep"), role, *command]
        with self._log.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def pids(self, name: str) -> list[int]:
        """Process ids, keepers left out: scheduler, worker-N, web-master, or web (Gunicorn's web processes)."""
        role, _, rest = name.partition("-")
        if role == "worker" and not self.keep:
            return [self.processes[name].pid]
        pid = self.processes[role].pid
        started = children(pid) if self.keep else [pid]
        if role == "worker":
            return [p for p in started if command_line(p)[-2:] == ["--index", rest]]
        if name == "web":
            return [web for master in started for web in children(master)]
        return started

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to the (first) process of `name`, see `pids`; returns its pid."""
        pids = self.pids(name)
        if not pids:
            raise StackError(f"{name} is not running\n{self.logs()}")
        os.kill(pids[0], number)
        return pids[0]

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 15) -> None:
        """Waits until `condition` is true.

        Raises:
            StackError: it was not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise StackError(f"waited {timeout_s:g} s for {what}\n{self.logs()}")
            time.sleep(0.02)

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Waits until /healthz says ok (with several web processes: every time, for a second).

        Raises:
            StackError: a process ended by itself, or the time is up.
        """
        steady_s = 1.0 if int(self.env["TINYLOOP_WEB_PROCESSES"]) > 1 else 0.0
        ok_since: float | None = None

        def is_ready() -> bool:
            nonlocal ok_since
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise StackError(f"{name} ended: {process.returncode}\n{self.logs()}")
            is_ok = self.health()[0] == 200
            ok_since = (ok_since or time.monotonic()) if is_ok else None
            return ok_since is not None and time.monotonic() - ok_since >= steady_s

        self.wait_until(is_ready, "/healthz to say ok", timeout_s)

    def health(self) -> tuple[int, str]:
        """Status and text of /healthz; (0, "") while nothing answers."""
        try:
            return self.get("/healthz")
        except (OSError, http.client.HTTPException):
            return 0, ""

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a GET."""
        return self._exchange("GET", path, None)

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and decoded JSON of a POST."""
        status, text = self._exchange("POST", path, body)
        return status, json.loads(text)

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """The JSON frames of a streamed answer, as they come, up to [DONE].

        Raises:
            StackError: the status is not 200, or the stream broke off before [DONE].
        """
        with contextlib.closing(self._connection()) as connection:
            answer = self._send(connection, "POST", path, body)
            if answer.status != 200:
                raise StackError(f"{path}: {answer.status} {answer.read()!r}")
            while line := answer.readline():
                text = line.decode().strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data: "):
                    yield json.loads(text.removeprefix("data: "))
        raise StackError(f"{path}: the stream broke off\n{self.logs()}")

    def _exchange(self, method: str, path: str, body: object) -> tuple[int, str]:
        with contextlib.closing(self._connection()) as connection:
            answer = self._send(connection, method, path, body)
            return answer.status, answer.read().decode()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    @staticmethod
    def _send(
        connection: http.client.HTTPConnection, method: str, path: str, body: object
    ) -> http.client.HTTPResponse:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def logs(self) -> str:
        """All that the processes have written."""
        return self._log.read_text("utf-8", "replace") if self._log.exists() else ""

    def stop(self) -> None:
        """Ends every process: TERM, then after a while KILL; leaves nothing behind, children included."""
        known = [child for p in self.processes.values() for child in descendants(p.pid)]
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait(10)
        for child in known:  # Gunicorn's web processes after their master was killed
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(known, timeout=10)
        shutil.rmtree(self._dir, ignore_errors=True)


def procfile() -> dict[str, list[str]]:
    """The commands of the Procfile by name, without their keepers."""
    commands = {}
    for line in (ROOT / "Procfile").read_text(encoding="utf-8").splitlines():
        name, _, command = line.partition(":")
        words = shlex.split(command)
        commands[name] = words[words.index(name) + 1 :]  # after: exec scripts/keep NAME
    return commands


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return found
    return []


def children(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        words: list[str] = psutil.Process(pid).cmdline()
        return words
    return []
