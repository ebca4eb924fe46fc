"""scripts/up itself, on the real stack: ready soon, drains on SIGTERM, leaves nothing behind, starts again at once."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import ROOT, Stack

FIRST_READY_S = 120.0  # a first start may compile kernels
READY_S = 10.0  # a second start, the packages being there; for a machine with nothing else to do


def ready_s() -> float:
    """READY_S, stretched by what else this machine is doing."""
    num_cores = os.cpu_count() or 1
    return READY_S * max(1.0, os.getloadavg()[0] / num_cores)


class Up(Stack):
    """A stack that scripts/up starts rather than the harness."""

    def __enter__(self) -> Up:
        return self

    def begin(self) -> None:
        with self._log.open("wb") as log:
            self.processes["up"] = subprocess.Popen(
                [str(ROOT / "scripts" / "up")],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def left_behind(self) -> list[int]:
        run_dir = self.env["TINYLOOP_RUN_DIR"]
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("TINYLOOP_RUN_DIR") == run_dir
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def stop(self) -> None:
        super().stop()
        for pid in self.left_behind():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def up(toy_artifact: Path) -> Iterator[Up]:
    with Up(toy_artifact, num_web=2) as up:
        yield up


def test_it_serves_drains_and_starts_again_at_once(up: Up) -> None:
    up.begin()
    up.wait_until(lambda: "TinyLoop is ready" in up.logs(), "the ready line", FIRST_READY_S)
    body = {"prompt": "the river", "max_tokens": 200, "ignore_eos": True, "sample_seed": 1}
    status, whole = up.post("/generate", body)
    assert status == 200

    stream = up.stream("/generate", {**body, "stream": True})
    tokens = list(next(stream)["tokens"])
    up.processes["up"].send_signal(signal.SIGTERM)
    for frame in stream:
        tokens += frame.get("tokens", [])
    assert tokens == whole["tokens"]
    assert up.processes["up"].wait(20) == 0
    assert up.left_behind() == []

    up.begin()  # on the same port and run directory
    up.wait_until(lambda: "TinyLoop is ready" in up.logs(), "the ready line", ready_s())
    assert up.post("/generate", body)[1]["tokens"] == whole["tokens"]
    up.processes["up"].send_signal(signal.SIGINT)
    assert up.processes["up"].wait(20) == 0
    assert up.left_behind() == []


def test_the_detached_launch_outlives_its_shell_and_stops_on_term(up: Up) -> None:
    log = up._dir / "server.log"
    done = subprocess.run(
        [str(ROOT / "scripts" / "start.sh")],
        env={**up.env, "LOG": str(log)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0
    words = done.stdout.split()
    pid = int(words[2].removeprefix("pid="))
    assert done.stdout == f"TinyLoop server pid={pid} on 127.0.0.1:{up.port} — log {log}\n"
    up.wait_until(lambda: "TinyLoop is ready" in log.read_text(), "the ready line", FIRST_READY_S)
    assert up.health() == (200, "ok\n")
    os.kill(pid, signal.SIGTERM)
    up.wait_until(lambda: up.left_behind() == [], "the server to leave", 20)
