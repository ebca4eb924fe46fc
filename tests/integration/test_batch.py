"""The batch script against real processes: the answers of /generate, bad lines by number, nothing done twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.batch import Results
from tests.harness import ROOT, Stack


@pytest.fixture(scope="module")
def stack(toy_artifact: Path) -> Iterator[Stack]:
    with Stack(toy_artifact) as stack:
        yield stack


@pytest.fixture(scope="module")
def paced(toy_artifact: Path) -> Iterator[Stack]:
    env = {"TINYLOOP_FAULT": "paced_worker"}
    with Stack(toy_artifact, env=env, roles=("scheduler", "worker"), wait=False) as stack:
        yield stack


def start(stack: Stack, source: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "scripts/batch.py", str(source), *args]
    return subprocess.Popen(command, cwd=ROOT, env=stack.env, stderr=subprocess.PIPE, text=True)


def batch(stack: Stack, source: Path, *args: str) -> tuple[int, str]:
    process = start(stack, source, *args)
    _, said = process.communicate(timeout=100)
    return process.returncode, said


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_those_of_generate_and_bad_lines_are_named(
    stack: Stack, tmp_path: Path
) -> None:
    sampled = {"prompt": "the light", "max_tokens": 40, "temperature": 0.9, "sample_seed": 5}
    _, whole = stack.post("/generate", sampled)
    stop = whole["text"][8:11]
    bodies = {
        "sampled": sampled,
        "stopped": {**sampled, "stop": [stop]},
        "ids": {"prompt_tokens": [1, 2, 3], "max_tokens": 5, "logprobs": 2, "loops": 1},
    }
    lines: list[Any] = [{"custom_id": name, **body} for name, body in bodies.items()]
    lines += [
        "{not json",
        {"custom_id": "typo", "prompt": "a", "max_tokenz": 5},
        "",
        {"custom_id": "ids", "prompt": "a"},
        {"custom_id": 7, "prompt": "a"},
        {"custom_id": "long", "prompt_tokens": [1] * 5000},
        {"prompt": "a", "max_tokens": 2},
    ]
    source = write(tmp_path / "in.jsonl", lines)
    status, said = batch(stack, source)
    assert status == 1, said
    results = {r["custom_id"]: r for r in read(tmp_path / "in.results.jsonl")}
    assert sorted(results) == ["10", "ids", "sampled", "stopped"]
    for name, body in bodies.items():
        _, expected = stack.post("/generate", body)
        response = results[name]["response"]
        for key in ("text", "tokens", "finish_reason", "loops", "usage", "logprobs"):
            assert response.get(key) == expected.get(key), (name, key)
    assert results["stopped"]["response"]["finish_reason"] == "stop"
    assert results["stopped"]["line"] == 2
    errors = {e["line"]: e["error"] for e in read(tmp_path / "in.errors.jsonl")}
    assert sorted(errors) == [4, 5, 7, 8, 9]
    assert "max_tokenz" in errors[5]["message"] and errors[4]["code"] == "invalid_json"
    assert errors[9]["code"] == "context_length_exceeded"
    assert "in.errors.jsonl" in said

    repaired = [line for line in lines if not isinstance(line, str)][:3]
    write(source, [*repaired, {"custom_id": "typo", "prompt": "a", "max_tokens": 5}])
    status, said = batch(stack, source)
    assert status == 0 and "1 new results" in said
    assert not (tmp_path / "in.errors.jsonl").exists()
    assert [r["custom_id"] for r in read(tmp_path / "in.results.jsonl")].count("sampled") == 1


def test_interrupted_run_goes_on_with_what_is_missing(paced: Stack, tmp_path: Path) -> None:
    num_lines = 60
    lines = [
        {"custom_id": f"c{i}", "prompt": "x", "max_tokens": 40, "sample_seed": i}
        for i in range(num_lines)
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "in.results.jsonl"
    process = start(paced, source, "--window", "4")
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < 8:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    status, said = batch(paced, source)
    assert status == 2 and "in use by another run" in said
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 130 and "run again" in said
    num_done = len(read(output))
    assert 8 <= num_done < num_lines
    with output.open("ab") as file:
        file.write(b'{"custom_id": "c59", "resp')  # as a power cut leaves it
    status, said = batch(paced, source)
    assert status == 0, said
    assert f"{num_lines - num_done} new results" in said
    results = read(output)
    assert sorted(r["custom_id"] for r in results) == sorted(x["custom_id"] for x in lines)
    assert all(len(r["response"]["tokens"]) == 40 for r in results)


def test_without_an_engine_it_says_so(paced: Stack, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "x"}])
    env = {**paced.env, "TINYLOOP_RUN_DIR": str(tmp_path / "r")}
    done = subprocess.run(
        [sys.executable, "scripts/batch.py", str(source), "--wait", "0.3"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3 and "no engine" in done.stderr


def test_results_file_with_foreign_lines_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nmore\n")
    with pytest.raises(ValueError, match="line 1 is not a result"):
        Results(path)
    assert path.read_text() == "my notes\nmore\n"


def test_results_forget_a_partial_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"custom_id": "a"}\n{"custom_id": "b"}\n{"custom_id": "c"}')
    results = Results(path)
    assert results.done == {"a", "b"}
    results.append({"custom_id": "c"})
    results.close()
    assert [r["custom_id"] for r in read(path)] == ["a", "b", "c"]
