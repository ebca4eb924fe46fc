"""frontend/gunicorn_conf.py under a real Gunicorn, with a small application in place of the frontend."""

from __future__ import annotations

import http.client
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import children, free_port

ROOT = Path(__file__).parents[2]
APP = """
import asyncio, os
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, multiprocess
requests = Counter("toy_requests", "Requests.")
live = Gauge("toy_live", "Live processes.", multiprocess_mode="livesum")
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        live.set(1)
        while True:
            event = (await receive())["type"]
            await send({"type": event + ".complete"})
            if event == "lifespan.shutdown":
                return
    start = {"type": "http.response.start", "status": 200, "headers": []}
    if scope["path"] == "/pid":
        requests.inc()
        await send(start)
        await send({"type": "http.response.body", "body": str(os.getpid()).encode()})
    elif scope["path"] == "/metrics":
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        await send(start)
        await send({"type": "http.response.body", "body": generate_latest(registry)})
    else:
        await send(start)
        for i in range(8):
            await send({"type": "http.response.body", "body": b"%d " % i, "more_body": True})
            await asyncio.sleep(0.25)
        await send({"type": "http.response.body", "body": b"end"})
"""


class Web:
    def __init__(self, tmp_path: Path) -> None:
        (tmp_path / "toy_app.py").write_text(APP)
        self.run_dir = tmp_path / "run"
        self.home = tmp_path / "home"
        self.home.mkdir()
        self.port = free_port()
        self.environ = {
            **os.environ,
            "HOME": str(self.home),
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
            "TINYLOOP_RUN_DIR": str(self.run_dir),
            "TINYLOOP_GRACE_S": "5",
        }
        self.log = tmp_path / "log"
        self.master = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        conf = str(ROOT / "frontend" / "gunicorn_conf.py")
        with self.log.open("ab") as log:
            master = subprocess.Popen(
                [sys.executable, "-m", "gunicorn", "-c", conf, "toy_app:app"],
                env=self.environ,
                stdout=log,
                stderr=log,
            )
        self.master = master
        self.wait_until(lambda: self.log.read_text().count("server listening") >= 2)
        return master

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 15) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def metrics_dirs(self) -> list[Path]:
        return sorted(self.run_dir.glob("web-metrics-*"))

    def stop(self) -> int:
        if self.master.poll() is None:
            self.master.terminate()
        return self.master.wait(15)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    web = Web(tmp_path)
    yield web
    web.stop()


def test_a_killed_web_process_comes_back_and_its_counters_stay(web: Web) -> None:
    assert len(children(web.master.pid)) == 2
    for _ in range(5):
        web.get("/pid")
    killed = int(web.get("/pid"))
    killed_at = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    web.wait_until(
        lambda: killed not in children(web.master.pid) and len(children(web.master.pid)) == 2, 2
    )
    web.wait_until(lambda: web.log.read_text().count("server listening") == 3)
    assert time.monotonic() - killed_at < 3
    text = web.get("/metrics")
    assert "toy_requests_total 6.0" in text
    assert "toy_live 2.0" in text  # not 3: the gauge of the killed one is gone


def test_the_directory_of_series_is_private_and_fresh_for_each_master(web: Web) -> None:
    (first,) = web.metrics_dirs()
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert stat.S_IMODE(web.run_dir.stat().st_mode) == 0o700
    web.get("/pid")
    os.kill(web.master.pid, signal.SIGHUP)  # a reload keeps it
    web.wait_until(lambda: web.log.read_text().count("server listening") == 4)
    assert "toy_requests_total 1.0" in web.get("/metrics")
    web.master.kill()
    web.master.wait(10)
    web.wait_until(lambda: _is_port_free(web.port))  # the orphans notice and leave
    web.log.write_text("")
    web.start()
    (second,) = web.metrics_dirs()
    assert second != first
    assert "toy_requests_total 1.0" not in web.get("/metrics")
    assert web.stop() == 0
    assert web.metrics_dirs() == []


def test_a_running_stream_finishes_after_term_and_no_new_one_begins(web: Web) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=10)
    connection.request("GET", "/stream")
    answer = connection.getresponse()
    assert answer.read(2) == b"0 "
    web.master.terminate()
    assert answer.read() == b"1 2 3 4 5 6 7 end"
    assert web.master.wait(10) == 0
    with pytest.raises(OSError):
        web.get("/pid")


def test_no_control_socket_is_made(web: Web) -> None:
    sockets = [path for path in web.home.rglob("*") if path.is_socket()]
    assert sockets == [] and not any(path.is_socket() for path in web.run_dir.rglob("*"))


@pytest.mark.parametrize(
    ("env", "value", "line"),
    [
        ("TINYLOOP_WEB_PROCESSES", "0", "=0: expected an integer from 1 to 256"),
        ("TINYLOOP_API_KEYS_FILE", "/dev/null", "=/dev/null: expected a file with at least one key"),
        ("TINYLOOP_RUN_DIR", "/proc/no/such", " /proc/no/such cannot be made: No such file or directory"),
        ("TINYLOOP_RUN_DIR", "/dev/null", " /dev/null is not a directory"),
    ],
)  # fmt: skip
def test_a_bad_setting_ends_the_master_with_78_and_one_line(
    tmp_path: Path, env: str, value: str, line: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gunicorn", "-c", "frontend/gunicorn_conf.py", "none:app"],
        cwd=ROOT,
        env={**os.environ, "TINYLOOP_RUN_DIR": str(tmp_path / "run"), env: value},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (78, f"bad setting: {env}{line}\n")


def _is_port_free(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.connect()
    except OSError:
        return True
    finally:
        connection.close()
    return False
