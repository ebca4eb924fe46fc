"""scripts/keep with real processes: restart, death with the keeper, and the order in which a stack leaves."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEEP = ROOT / "scripts" / "keep"


class Keepers:
    """Starts keepers on one run directory; each command notes its pid in `starts`."""

    def __init__(self, tmp_path: Path) -> None:
        self.run_dir = tmp_path / "run"
        self.starts = tmp_path / "starts"
        self.output = tmp_path / "output"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, script: str, **env: str) -> subprocess.Popen[bytes]:
        """A keeper for `sh -c script` in which `note` writes the pid to `starts`."""
        note = f"echo {role} $$ >> {shlex.quote(str(self.starts))}"
        command = ["sh", "-c", script.replace("note", note)]
        environ = dict(os.environ, TINYLOOP_RUN_DIR=str(self.run_dir), **env)
        with self.output.open("ab") as output:
            keeper = subprocess.Popen(
                [sys.executable, str(KEEP), role, *command],
                env=environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.started.append(keeper)
        return keeper

    def pids(self, role: str) -> list[int]:
        lines = self.starts.read_text().splitlines() if self.starts.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(role + " ")]

    def all_pids(self) -> list[int]:
        return [pid for role in ("web", "scheduler", "worker") for pid in self.pids(role)]

    def wait_for_starts(self, role: str, count: int, timeout_s: float = 10) -> list[int]:
        wait_until(lambda: len(self.pids(role)) >= count, timeout_s)
        return self.pids(role)

    def end(self) -> None:
        for keeper in self.started:
            if keeper.poll() is None:
                keeper.kill()
            keeper.wait(10)
        wait_until(lambda: not any(map(is_alive, self.all_pids())))


@pytest.fixture
def keepers(tmp_path: Path) -> Iterator[Keepers]:
    keepers = Keepers(tmp_path)
    yield keepers
    keepers.end()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_killed_command_is_back_within_a_second(keepers: Keepers) -> None:
    keepers.start("scheduler", "note; exec sleep 60")
    (first,) = keepers.wait_for_starts("scheduler", 1)
    os.kill(first, signal.SIGKILL)
    killed_at = time.monotonic()
    pids = keepers.wait_for_starts("scheduler", 2)
    assert time.monotonic() - killed_at < 1
    assert is_alive(pids[1]) and not is_alive(first)


def test_restarts_slow_down_while_the_command_goes_on_failing(keepers: Keepers) -> None:
    keepers.start("scheduler", "note; exit 1")
    time.sleep(2.5)
    # 0.1, 0.2, 0.4, 0.8 s between them: the fifth comes after 1.5 s, the sixth after 3.1 s
    assert 4 <= len(keepers.pids("scheduler")) <= 5
    assert "ended with status 1: starting it again in 0.4 s" in keepers.output.read_text()


def test_a_command_that_ends_well_is_started_again_too(keepers: Keepers) -> None:
    keepers.start("scheduler", "note; exit 0")
    keepers.wait_for_starts("scheduler", 2)


def test_the_command_dies_with_its_keeper(keepers: Keepers) -> None:
    keeper = keepers.start("worker", "note; exec sleep 60")
    (pid,) = keepers.wait_for_starts("worker", 1)
    keeper.kill()
    wait_until(lambda: not is_alive(pid), 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_command_for_good(keepers: Keepers, number: signal.Signals) -> None:
    keeper = keepers.start("web", "trap 'exit 5' TERM; note; while :; do sleep 0.05; done")
    (pid,) = keepers.wait_for_starts("web", 1)
    keeper.send_signal(number)
    assert keeper.wait(10) == 0
    assert not is_alive(pid) and keepers.pids("web") == [pid]
    assert not (keepers.run_dir / "lame").exists()


def test_a_stop_signal_ends_a_keeper_that_waits_to_restart(keepers: Keepers) -> None:
    keeper = keepers.start("web", "note; exit 1")
    keepers.wait_for_starts("web", 4)
    keeper.terminate()
    assert keeper.wait(3) == 0


def test_a_bad_setting_is_handed_on_and_not_tried_again(keepers: Keepers) -> None:
    keeper = keepers.start("worker", "note; echo the line >&2; exit 78")
    assert keeper.wait(10) == 78
    assert len(keepers.pids("worker")) == 1
    assert "the line\n" in keepers.output.read_text()


def test_a_bad_setting_of_the_keeper_itself_is_one_line(keepers: Keepers) -> None:
    keeper = keepers.start("worker", "note", TINYLOOP_GRACE_S="long")
    assert keeper.wait(10) == 78
    assert keepers.output.read_text() == (
        "bad setting: TINYLOOP_GRACE_S=long: expected a number from 0 to 3600\n"
    )


def test_a_command_that_does_not_exist_is_not_tried_again(keepers: Keepers) -> None:
    keepers.run_dir.mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, str(KEEP), "web", "no-such-program-here"],
        env=dict(os.environ, TINYLOOP_RUN_DIR=str(keepers.run_dir)),
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 78
    assert "cannot run no-such-program-here" in done.stderr


def test_a_run_directory_that_others_can_read_is_refused(keepers: Keepers) -> None:
    keepers.run_dir.mkdir(mode=0o755)
    keepers.run_dir.chmod(0o755)
    keeper = keepers.start("web", "note; exec sleep 60")
    assert keeper.wait(10) == 78
    assert "TINYLOOP_RUN_DIR=" in keepers.output.read_text()


def test_a_run_directory_that_cannot_be_made_is_one_line(keepers: Keepers) -> None:
    keepers.run_dir = Path("/proc/no/such")
    keeper = keepers.start("web", "note; exec sleep 60")
    assert keeper.wait(10) == 78
    (line,) = keepers.output.read_text().splitlines()
    assert line.startswith("bad setting: TINYLOOP_RUN_DIR=/proc/no/such: expected a directory")


def test_what_ignores_term_is_killed_with_all_its_children(keepers: Keepers) -> None:
    script = f"trap '' TERM; note; sleep 60 & echo worker $! >> {keepers.starts}; wait"
    keeper = keepers.start("worker", script)
    pids = keepers.wait_for_starts("worker", 2)
    began = time.monotonic()
    keeper.terminate()
    assert keeper.wait(15) == 0
    assert 2 < time.monotonic() - began < 8  # the patience with a worker, plus the look for a web
    assert not any(map(is_alive, pids))


def test_a_second_signal_ends_it_at_once(keepers: Keepers) -> None:
    keeper = keepers.start("web", "trap '' TERM; note; while :; do sleep 0.05; done")
    keepers.wait_for_starts("web", 1)
    keeper.terminate()
    wait_until(lambda: (keepers.run_dir / "lame").exists())
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.wait(0.5)
    keeper.terminate()
    assert keeper.wait(2) == 0


def test_every_worker_gets_its_own_index(keepers: Keepers) -> None:
    keepers.start("worker", "note; echo $0 $1; exec sleep 60", TINYLOOP_WORKERS="3")
    pids = keepers.wait_for_starts("worker", 3)
    os.kill(pids[1], signal.SIGKILL)
    keepers.wait_for_starts("worker", 4)
    assert is_alive(pids[0]) and is_alive(pids[2])

    def indices() -> list[str]:
        lines = keepers.output.read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith("--index ")]

    wait_until(lambda: len(indices()) == 4)
    assert set(indices()) == {"0", "1", "2"}  # the one that was killed appears twice


def test_the_web_is_lame_before_it_is_told_to_stop(keepers: Keepers) -> None:
    lame = keepers.run_dir / "lame"
    script = (
        f"trap 'test -e {lame} && echo was lame; exit 0' TERM; note; while :; do sleep 0.05; done"
    )
    keeper = keepers.start("web", script, TINYLOOP_LAME_DUCK_S="0.6")
    (pid,) = keepers.wait_for_starts("web", 1)
    keeper.terminate()
    began = time.monotonic()
    wait_until(lame.exists, 1)
    assert is_alive(pid)
    assert keeper.wait(10) == 0
    assert time.monotonic() - began >= 0.6
    assert "was lame" in keepers.output.read_text()
    assert not lame.exists()


def test_the_mark_of_a_web_that_was_killed_while_draining_is_removed(keepers: Keepers) -> None:
    keepers.run_dir.mkdir(mode=0o700)
    (keepers.run_dir / "lame").touch()
    keepers.start("web", "note; exec sleep 60")
    keepers.wait_for_starts("web", 1)
    assert not (keepers.run_dir / "lame").exists()


def test_scheduler_and_worker_outlive_the_drain_of_the_web(keepers: Keepers) -> None:
    slow = "trap 'sleep 2.5; exit 0' TERM; note; while :; do sleep 0.05; done"
    web = keepers.start("web", slow, TINYLOOP_GRACE_S="10")
    others = [
        keepers.start(role, "note; exec sleep 60", TINYLOOP_GRACE_S="10")
        for role in ("scheduler", "worker")
    ]
    for role in ("web", "scheduler", "worker"):
        keepers.wait_for_starts(role, 1)
    for keeper in (*others, web):  # all at once, the web last
        keeper.terminate()
    pids = keepers.pids("scheduler") + keepers.pids("worker")
    while web.poll() is None:
        is_web_there = is_alive(keepers.pids("web")[0])
        assert all(map(is_alive, pids)) or not is_web_there
        time.sleep(0.02)
    gone_at = time.monotonic()
    assert [keeper.wait(5) for keeper in (web, *others)] == [0, 0, 0]
    assert time.monotonic() - gone_at < 3  # honcho kills 5 s after the first has ended


def test_a_web_that_outstays_the_grace_is_killed_and_the_others_follow(keepers: Keepers) -> None:
    web = keepers.start(
        "web", "trap '' TERM; note; while :; do sleep 0.05; done", TINYLOOP_GRACE_S="0"
    )
    scheduler = keepers.start("scheduler", "note; exec sleep 60", TINYLOOP_GRACE_S="0")
    keepers.wait_for_starts("web", 1)
    keepers.wait_for_starts("scheduler", 1)
    web.terminate()
    scheduler.terminate()
    assert web.wait(12) == 0
    assert scheduler.wait(5) == 0


def test_under_honcho_the_stack_shares_the_port_of_the_first_line(keepers: Keepers) -> None:
    keepers.start(
        "scheduler",
        "echo port=$PORT; note; exec sleep 60",
        PORT="5100",
        HONCHO_PROCESS_NAME="scheduler.1",
    )
    keepers.start(
        "worker",
        "echo port=$PORT; note; exec sleep 60",
        PORT="5200",
        HONCHO_PROCESS_NAME="worker.1",
    )
    keepers.wait_for_starts("scheduler", 1)
    keepers.wait_for_starts("worker", 1)
    assert keepers.output.read_text().splitlines() == ["port=5000"] * 2
