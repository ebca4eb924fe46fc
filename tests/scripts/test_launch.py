"""scripts/launch.py and honcho over keepers of small stand-ins: what is printed, what is returned, what is left behind.

The stand-ins are in a tree of their own, so that this says how a stack is started and stopped and nothing of the stack.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import free_port

ROOT = Path(__file__).parents[2]
WEB = """
import http.server, os, signal, sys, threading, time
begun = time.monotonic()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_ready = time.monotonic() - begun > 0.5
        self.send_response(200 if is_ready else 503)
        self.end_headers()
        self.wfile.write(b"ok\\n" if is_ready else b"loading the model\\n")
    def log_message(self, *args):
        pass
def stop(*args):
    print("web drains", flush=True)
    time.sleep(float(os.environ.get("DRAIN_S", "0")))
    print("web is done", time.monotonic(), flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
OTHER = """
import os, signal, sys, time
def stop(*args):
    print(sys.argv[1], "leaves", time.monotonic(), flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
print(sys.argv[1], "has port", os.environ["PORT"], flush=True)
print(sys.argv[1], "serves", os.environ.get("TINYLOOP_MODEL_PATH"), flush=True)
if os.environ.get("BAD") == sys.argv[1]:
    print("bad setting: X=1: expected 2", flush=True)
    sys.exit(78)
while True:
    time.sleep(0.1)
"""
PROCFILE = """web: exec scripts/keep web python web.py
scheduler: exec scripts/keep scheduler python other.py scheduler
worker: exec scripts/keep worker python other.py worker
"""


class Launch:
    def __init__(self, tree: Path) -> None:
        (tree / "scripts").mkdir()
        (tree / "scheduler").mkdir()
        for name in (
            "scripts/launch.py",
            "scripts/foreman.py",
            "scripts/keep",
            "scheduler/config.py",
        ):
            shutil.copy(ROOT / name, tree / name)
        (tree / "web.py").write_text(WEB)
        (tree / "other.py").write_text(OTHER)
        (tree / "Procfile").write_text(PROCFILE)
        (tree / ".env").write_text("PORT=1\nTINYLOOP_GRACE_S=never\n")
        self.tree = tree
        self.port = free_port()
        self.output = tree / "output"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str] | None = None, **env: str) -> subprocess.Popen[bytes]:
        environ = {"PATH": os.environ["PATH"], "HOST": "127.0.0.1", "PORT": str(self.port)}
        environ |= {"TINYLOOP_RUN_DIR": str(self.tree / "run"), **env}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command or [sys.executable, str(self.tree / "scripts" / "launch.py")],
                cwd="/" if command is None else self.tree,
                env={name: value for name, value in environ.items() if value},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self.process

    def wait_for(self, text: str, timeout_s: float = 15) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output.read_text():
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.output.read_text()}"
            time.sleep(0.02)

    def left_behind(self) -> list[psutil.Process]:
        """Processes of this tree that are alive, whoever their parent is."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("TINYLOOP_RUN_DIR") == str(self.tree / "run")
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    leftovers = launch.left_behind()
    for process in leftovers:
        process.kill()
    if launch.process is not None:
        launch.process.wait(10)


def test_it_says_why_it_waits_then_the_url_and_a_curl_line(launch: Launch) -> None:
    process = launch.start()
    launch.wait_for("TinyLoop is ready")
    lines = launch.output.read_text().splitlines()
    assert "TinyLoop is not ready yet: loading the model" in lines
    url = f"http://127.0.0.1:{launch.port}"
    assert any(line.startswith(f"TinyLoop is ready on {url} ") for line in lines)
    assert any(line.strip().startswith(f"curl -N {url}/generate ") for line in lines)
    for role in ("scheduler", "worker"):
        launch.wait_for(f"{role} has port {launch.port}")
    process.terminate()
    assert process.wait(15) == 0


@pytest.mark.parametrize(
    ("number", "drain_s"),
    [(signal.SIGTERM, "6"), (signal.SIGINT, "0.2")],  # 6: more than honcho's patience
)
def test_a_signal_drains_and_ends_with_0_and_leaves_nothing(
    launch: Launch, number: signal.Signals, drain_s: str
) -> None:
    process = launch.start(DRAIN_S=drain_s)
    launch.wait_for("TinyLoop is ready")
    process.send_signal(number)
    assert process.wait(30) == 0
    assert launch.left_behind() == []
    text = launch.output.read_text()
    when = {
        said: float(re.search(f"{said} ([0-9.]+)", text)[1])
        for said in ("web is done", "scheduler leaves", "worker leaves")
    }
    assert when["web is done"] < min(when["scheduler leaves"], when["worker leaves"])
    assert "SIGKILL" not in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_serves_and_stops_when_nobody_reads_its_output_any_more(
    launch: Launch, number: signal.Signals
) -> None:
    command = f"exec {sys.executable} scripts/launch.py > >(head -n 1 >&2) 2>&1"
    process = launch.start(["bash", "-c", command])
    deadline = time.monotonic() + 15
    while not is_ready(launch.port):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # it has said so, to nobody
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(15) == (0 if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 15
    while launch.left_behind():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_is_left_when_it_is_killed_itself(launch: Launch) -> None:
    process = launch.start()
    launch.wait_for("TinyLoop is ready")
    process.kill()
    deadline = time.monotonic() + 10
    while launch.left_behind():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "web is done" in launch.output.read_text()


def test_a_bad_setting_of_one_process_stops_the_stack_with_78(launch: Launch) -> None:
    process = launch.start(BAD="worker")
    assert process.wait(20) == 78
    assert launch.left_behind() == []
    assert "bad setting: X=1: expected 2" in launch.output.read_text()


def test_a_bad_setting_is_one_line_before_anything_starts(launch: Launch) -> None:
    process = launch.start(TINYLOOP_WORKERS="many")
    assert process.wait(10) == 78
    line = "bad setting: TINYLOOP_WORKERS=many: expected an integer from 0 to 64\n"
    assert launch.output.read_text() == line


def test_a_port_in_use_is_one_line(launch: Launch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", launch.port))
        other.listen()
        process = launch.start()
        assert process.wait(10) == 78
    text = launch.output.read_text()
    assert text.startswith(f"bad setting: PORT={launch.port}: expected a free port")
    assert text.count("\n") == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_that_is_not_ours_is_one_line_that_names_it(launch: Launch, host: str) -> None:
    process = launch.start(HOST=host)
    assert process.wait(20) == 78
    text = launch.output.read_text()
    assert text.startswith(f"bad setting: HOST={host}: expected an address of this machine")
    assert text.count("\n") == 1


def test_a_relative_path_is_one_of_the_caller_s(launch: Launch) -> None:
    process = launch.start(TINYLOOP_MODEL_PATH="models/mine.tinyloop")  # its folder is /
    launch.wait_for("worker serves /models/mine.tinyloop")
    process.terminate()
    assert process.wait(15) == 0


def test_honcho_start_works_by_itself_on_its_own_port(launch: Launch) -> None:
    (launch.tree / ".env").unlink()
    honcho = [sys.executable, "-m", "honcho", "start"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    base = 5000 if _is_free(5000) else launch.port
    process = launch.start(honcho, PORT="" if base == 5000 else str(base), PATH=path)
    launch.wait_for(f"scheduler has port {base}")
    launch.wait_for(f"worker has port {base}")
    process.terminate()
    assert process.wait(15) == 143
    assert launch.left_behind() == []


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2):
            return True
    except OSError:
        return False
