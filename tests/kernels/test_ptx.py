"""Kernels compile for sm_90 and assemble without spills, calls or double precision; needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _check(*arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_ptx.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=1400,
    )
    if "skipped" in run.stdout:
        pytest.skip(run.stdout.strip())
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("kernel", ["begin", "o"])
def test_kernels_assemble_for_hopper(kernel: str) -> None:
    table = _check("--only", kernel, "--rows", "1")
    assert "0 faults" in table and " 0 faults" in table


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_kernel_assembles_for_hopper() -> None:
    assert " 0 faults" in _check()
