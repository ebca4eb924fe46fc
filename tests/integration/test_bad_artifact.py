"""A faulty artifact: the stack says why, steadily, and serves once the file is put right."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tests.harness import Stack


def test_healthz_names_the_fault_until_the_file_is_put_right(
    toy_artifact: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.tinyloop"
    path.write_bytes(b"no artifact")
    with Stack(path, wait=False) as stack:
        stack.wait_until(lambda: "TL001" in stack.health()[1], "the fault in /healthz", 40)
        seen = set()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            seen.add(stack.health())
            time.sleep(0.05)
        ((status, text),) = seen
        assert (
            status == 503
            and text.count("\n") <= 1
            and "cannot be read as a safetensors file" in text
        )
        status, answer = stack.post("/generate", {"prompt": "x"})
        assert status == 503 and "TL001" in answer["error"]["message"]
        shutil.copyfile(toy_artifact, tmp_path / "new")
        (tmp_path / "new").rename(path)
        stack.wait_ready()
        assert stack.post("/generate", {"prompt": "x", "max_tokens": 2})[0] == 200
