"""Fixtures for all tests: a toy artifact to serve, and a clock that stands still until it is told to move.

Marks what scripts/test runs in stages of its own: tests/integration is `e2e`, its files named test_kill* are `kill`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "integration":
            item.add_marker("kill" if item.path.name.startswith("test_kill") else "e2e")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class FakeClock:
    """A monotonic clock in seconds that tests move by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def toy_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random artifact with a byte-level tokenizer and a chat template."""
    from scripts.make_toy_artifact import make

    return make(tmp_path_factory.mktemp("artifact") / "toy.tinyloop")
