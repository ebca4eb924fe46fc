"""The import arrows between the packages, and what the light modules may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("frontend", "scheduler", "gpu_worker", "kernels")
LIGHT = {
    f"scheduler.{name}"
    for name in (
        "client",
        "messages",
        "codec",
        "config",
        "transport",
        "seeds",
        "keys",
        "stream",
        "blocking",
    )
}
ARROWS = {
    "frontend": LIGHT,
    "gpu_worker": LIGHT | {"kernels"},
    "scheduler": set(),
    "kernels": set(),
}


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of what a module imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_along_the_arrows(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules
    for path in modules:
        for name in imports_of(path):
            other = name.partition(".")[0]
            if other not in (*PACKAGES, "scripts", "tests") or other == package:
                continue
            is_allowed = name == other and any(a.startswith(f"{other}.") for a in ARROWS[package])
            is_allowed |= any(name == a or name.startswith(f"{a}.") for a in ARROWS[package])
            assert is_allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("module", ["messages", "config", "transport", "client"])
def test_the_shared_modules_stay_light(module: str) -> None:
    heavy = ["torch", "numba", "numpy", "falcon", "tokenizers", "prometheus_client"]
    code = f"import sys, scheduler.{module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_nothing_below_the_entry_points_reads_the_environment() -> None:
    entry_points = {
        "frontend/asgi.py",
        "frontend/gunicorn_conf.py",
        "scheduler/__main__.py",
        "gpu_worker/__main__.py",
    }
    for package in ("frontend", "scheduler", "gpu_worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if str(path.relative_to(ROOT)) in entry_points:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
                assert not is_read, f"{path.relative_to(ROOT)}:{node.lineno} reads the environment"
