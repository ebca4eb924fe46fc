"""scripts/setup.sh with a stand-in for Python: what it looks for, what it installs, and when it does not install again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "sh", "cat", "cksum", "dirname", "basename", "flock", "mkdir")
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> {calls}
case "$1" in
-c) exit 0 ;;
-m) [ -n "$FAIL" ] && exit 1; exit 0 ;;
esac
"""


class Tree:
    def __init__(self, path: Path) -> None:
        (path / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup.sh", path / "scripts" / "setup.sh")
        for file in ROOT.glob("requirements*.txt"):
            shutil.copy(file, path / file.name)
        (path / "bin").mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            if found:
                (path / "bin" / tool).symlink_to(found)
        self.path = path
        self.calls = path / "calls"

    def add_python(self, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(FAKE_PYTHON.format(calls=self.calls))
        place.chmod(0o755)

    def ensure_venv(self, *extras: str, **env: str) -> subprocess.CompletedProcess[str]:
        script = (
            f"set -euo pipefail; source scripts/setup.sh; ensure_venv {' '.join(extras)}; echo done"
        )
        self.calls.unlink(missing_ok=True)
        return subprocess.run(
            [str(self.path / "bin" / "bash"), "-c", script],
            cwd=self.path,
            env={"PATH": str(self.path / "bin"), **env},
            capture_output=True,
            text=True,
            timeout=30,
        )

    def installed(self) -> list[str]:
        """What pip was asked to install, by file, in order."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [call.rpartition("/")[2] for call in calls if call.startswith("-m pip install")]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path / "tree")
    tree.add_python(tree.path / ".venv" / "bin" / "python")
    return tree


def test_it_installs_once_and_says_first_how_much(tree: Tree) -> None:
    first = tree.ensure_venv()
    assert first.stdout == "done\n"
    assert "about 320 MB" in first.stderr
    assert tree.installed() == ["requirements.txt", "requirements-nodeps.txt"]
    second = tree.ensure_venv()
    assert second.stdout == "done\n" and second.stderr == ""
    assert tree.installed() == []


def test_it_installs_again_when_a_pin_changed(tree: Tree) -> None:
    tree.ensure_venv("dev")
    with (tree.path / "requirements-dev.txt").open("a") as file:
        file.write("another==1\n")
    tree.ensure_venv("dev")
    assert tree.installed() == ["requirements-dev.txt"]


def test_extras_come_on_top(tree: Tree) -> None:
    tree.ensure_venv()
    tree.ensure_venv("dev", "cuda")
    assert tree.installed() == ["requirements-dev.txt", "requirements-cuda.txt"]


def test_a_failed_installation_is_named_and_tried_again(tree: Tree) -> None:
    failed = tree.ensure_venv(FAIL="1")
    assert failed.returncode == 1 and "Could not install requirements.txt" in failed.stderr
    assert tree.ensure_venv().returncode == 0
    assert tree.installed() == ["requirements.txt", "requirements-nodeps.txt"]


def test_without_a_python_it_says_what_is_needed(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    done = tree.ensure_venv()
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("TinyLoop needs Python 3.11 or newer")
    assert done.stderr.count("\n") == 1


def test_it_makes_a_virtual_environment_with_the_python_it_finds(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    (tree.path / "bin" / "python3").symlink_to(sys.executable)
    script = 'source scripts/setup.sh; install_pinned() { :; }; ensure_venv; "$VENV_PYTHON" -c "import sys; print(sys.prefix)"'
    done = subprocess.run(
        [str(tree.path / "bin" / "bash"), "-c", script],
        cwd=tree.path,
        env={"PATH": str(tree.path / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{tree.path / '.venv'}\n", done.stderr


def test_every_pin_is_exact() -> None:
    for file in ROOT.glob("requirements*.txt"):
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
        assert all("==" in line and "*" not in line for line in lines if line), file.name
    assert "torch==2.13.0\n" in (ROOT / "requirements.txt").read_text()


@pytest.mark.parametrize("name", ["up", "test", "start.sh", "keep"])
def test_the_scripts_can_be_run(name: str) -> None:
    assert os.access(ROOT / "scripts" / name, os.X_OK)
