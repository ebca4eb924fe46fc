"""The benchmark runs, its books are right, and its last line is JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT


@pytest.mark.slow
def test_bench_measures_engine_http_and_instant_worker(toy_artifact: Path) -> None:
    args = ["--model", str(toy_artifact), "--streams", "1", "3", "--tokens", "6", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "scripts/bench_http.py", *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [(r["what"], r["streams"]) for r in report["rows"]] == [
        ("engine alone", 1),
        ("HTTP, streamed", 1),
        ("engine alone", 3),
        ("HTTP, streamed", 3),
        ("instant worker, whole", 32),
        ("instant worker, streamed", 32),
    ]
    for row in report["rows"]:
        assert row["tokens_per_s"] > 0 and row["ttft_ms"] > 0
        num_tokens = row["tokens_per_s"] / row["requests_per_s"]
        assert round(num_tokens, 6) == (32 if "instant" in row["what"] else 6)
