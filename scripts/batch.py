"""Runs a file of requests through a running stack over ZeroMQ, without HTTP, and survives being interrupted.

    python scripts/batch.py requests.jsonl [-o results.jsonl] [--errors errors.jsonl] [--window 32] [--priority 10]

Each input line is a JSON object with the fields of `POST /generate` and, optionally, `custom_id` (default: its line number).
Each result is one line, `{"custom_id", "line", "response"}`, on disk before the next; what `response` holds is the answer that
`/generate` would give. Run it again after an interruption: it does what is missing. Lines that cannot be run, or failed, go to the
errors file with their number and are tried again by the next run. Requests go behind interactive ones (priority +10).
The stack is found as every client finds it: PORT, TINYLOOP_RUN_DIR or the TINYLOOP_*_ADDR variables.

Exit status: 0 all done, 1 some lines failed, 2 a file cannot be used, 3 no engine, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from frontend import schemas
from frontend.errors import ApiError, from_rejection
from frontend.fields import parse_object
from frontend.generation import Generation
from frontend.model import ServedModel
from frontend.native import NativeShape
from frontend.requests import Asked, encode
from scheduler.blocking import BlockingClient, RequestResult
from scheduler.client import Rejection, RequestSpec
from scheduler.config import Settings
from scheduler.messages import SequenceSpec, TokenEvent
from scheduler.seeds import sequence_seed
from scheduler.transport import TransportError

SOON_S = 2.0  # an engine that is there has answered by then
EXIT_FAILED, EXIT_USAGE, EXIT_NO_ENGINE, EXIT_INTERRUPTED = 1, 2, 3, 130


class Results:
    """The results file: appended line by line, each on disk before the next; locked against a second run.

    Raises:
        OSError: the file cannot be opened, or another run holds it (BlockingIOError).
        ValueError: a whole line in it is not one of ours.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115 (closed by `close`)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.done: set[str] = set()
        self._file.seek(0)
        end_of_whole_lines = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break  # a run was interrupted while it wrote: that request is run again
            try:
                self.done.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}: line {number} is not a result of this program") from None
            end_of_whole_lines += len(line)
        self._file.truncate(end_of_whole_lines)

    def append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(record["custom_id"])

    def close(self) -> None:
        self._file.close()


class EngineAway(Exception):
    """The engine has gone for longer than a restart takes."""


@dataclass(slots=True)
class Job:
    """One input line on its way."""

    line: int
    custom_id: str
    generation: Generation
    error: ApiError | None = None

    def spec(self) -> RequestSpec:
        asked, (choice,) = self.generation.request.asked, self.generation.choices
        return RequestSpec(
            asked.label,
            self.generation.request.params,
            (SequenceSpec(choice.prompt, sequence_seed(asked.seed, 0, 0)),),
            asked.priority,
            asked.slo_ms,
            0.0,  # however long it takes
            asked.salt,
        )

    def take(self, event: TokenEvent) -> int | None:
        """Add an event; the number of tokens if a stop string has just ended the text."""
        (choice,) = self.generation.choices
        was_stopped = choice.is_stopped
        try:
            choice.take(event)
        except ApiError as ex:
            self.error = ex
        if choice.is_stopped and not was_stopped and not event.finish_reason:
            return len(choice.tokens)
        return None

    def response(self, result: RequestResult) -> dict[str, Any]:
        """The answer.

        Raises:
            ApiError: the request was refused or failed.
        """
        if result.rejection is not None:
            raise from_rejection(result.rejection)
        if self.error is not None:
            raise self.error
        self.generation.choices[0].close()
        return NativeShape(self.generation).whole()


@dataclass(slots=True)
class Batch:
    """All lines of one input: which are to run, what is in flight, what failed."""

    path: Path
    results: Results
    errors: IO[str]
    model: ServedModel
    priority: int
    speculation: str
    bar: tqdm[Any]
    jobs: dict[int, Job] = field(default_factory=dict)
    num_started: int = 0
    num_errors: int = 0

    def specs(self) -> Iterator[RequestSpec]:
        """The requests that are still to run, in the order of the file; job i belongs to the i-th."""
        seen: dict[str, int] = {}
        with self.path.open("rb") as lines, asyncio.Runner() as runner:
            for number, raw in enumerate(lines, 1):
                if not raw.strip():
                    continue
                custom_id = str(number)
                try:
                    body = parse_object(raw)
                    custom_id = _custom_id(body, number)
                    if custom_id in seen:
                        text = f"custom_id {custom_id!r:.80} is that of line {seen[custom_id]} too"
                        raise ApiError(400, text, code="invalid_value", param="custom_id")
                    seen[custom_id] = number
                    if custom_id in self.results.done:
                        self.bar.update()
                        continue
                    request = runner.run(encode(self._checked(body, number), self.model, 0.0))
                except ApiError as ex:
                    self.fail(number, custom_id, ex)
                    continue
                job = Job(number, custom_id, Generation(request, self.model.text))
                self.jobs[self.num_started] = job
                self.num_started += 1
                yield job.spec()

    def _checked(self, body: dict[str, Any], number: int) -> Asked:
        body.setdefault("priority", self.priority)
        context = schemas.Context(self.model, max_n=1, request_id=f"batch-{number}")
        return schemas.native(body, context, self.speculation)

    def watch(self, position: int, event: TokenEvent) -> int | None:
        return self.jobs[position].take(event)

    def finish(self, position: int, result: RequestResult) -> None:
        """Write down what became of a request.

        Raises:
            EngineAway: nothing did; it is not the request's fault, and the next run does it.
        """
        job = self.jobs.pop(position)
        try:
            response = job.response(result)
        except ApiError as ex:
            if ex.code == "engine_down":
                raise EngineAway(ex.message) from None
            self.fail(job.line, job.custom_id, ex)
            return
        record = {"custom_id": job.custom_id, "line": job.line, "response": response}
        self.results.append(record)
        self.bar.update()

    def fail(self, line: int, custom_id: str, ex: ApiError) -> None:
        self.num_errors += 1
        record = {"line": line, "custom_id": custom_id, **ex.body()}
        self.errors.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.errors.flush()
        self.bar.update()


def _custom_id(body: dict[str, Any], number: int) -> str:
    custom_id = body.pop("custom_id", str(number))
    if not isinstance(custom_id, str) or not custom_id:
        raise ApiError(400, "custom_id must be a text", code="invalid_value", param="custom_id")
    return custom_id


def run(args: argparse.Namespace, results: Results, errors: IO[str]) -> int:
    """One run over the input; returns the exit status."""
    with args.input.open("rb") as lines:
        num_lines = sum(1 for line in lines if line.strip())
    bar = tqdm(total=num_lines, unit="req", smoothing=0.05, disable=None if args.progress else True)
    with bar, BlockingClient(Settings.from_env_or_exit(os.environ)) as client:
        try:
            client.wait_ready(min(args.wait, SOON_S))
        except Rejection as ex:
            _say(0, f"waits up to {args.wait:g} s for an engine ({ex})")
            client.wait_ready(max(0.0, args.wait - SOON_S))
        assert client.card is not None
        model = ServedModel.from_card(client.card, ())
        batch = Batch(args.input, results, errors, model, args.priority, args.speculation, bar)
        ended = client.submit_stream(batch.specs(), args.window, watch=batch.watch)
        for position, result in ended:
            batch.finish(position, result)
    return EXIT_FAILED if batch.num_errors else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=Path, help="requests, one JSON object a line")
    parser.add_argument("-o", "--output", type=Path, help="results (INPUT.results.jsonl)")
    parser.add_argument("--errors", type=Path, help="lines that failed (INPUT.errors.jsonl)")
    parser.add_argument("--window", type=int, default=32, help="requests in flight (32)")
    parser.add_argument("--priority", type=int, default=10, help="of lines without one (10)")
    parser.add_argument(
        "--speculation", choices=("none", "chain", "tree", "pipelined"), default="none"
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, help="seconds to wait for an engine (60)"
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false")
    args = parser.parse_args()
    if args.window < 1:
        parser.error("--window must be at least 1")
    args.output = args.output or args.input.with_suffix(".results.jsonl")
    args.errors = args.errors or args.input.with_suffix(".errors.jsonl")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = Results(args.output)
        errors = args.errors.open("w", encoding="utf-8")
    except BlockingIOError:
        return _say(EXIT_USAGE, f"{args.output} is in use by another run")
    except (OSError, ValueError) as ex:
        return _say(EXIT_USAGE, str(ex))
    num_before = len(results.done)
    try:
        status = run(args, results, errors)
    except OSError as ex:
        status = _say(EXIT_USAGE, str(ex))
    except TransportError as ex:
        status = _say(EXIT_NO_ENGINE, str(ex))
    except (EngineAway, Rejection) as ex:
        status = _say(EXIT_NO_ENGINE, f"no engine: {ex}; run again to do what is missing")
    except KeyboardInterrupt:
        status = _say(EXIT_INTERRUPTED, "interrupted; run again to do what is missing")
    finally:
        results.close()
        errors.close()
    num_failed = sum(1 for _ in args.errors.open("rb"))
    _say(
        0, f"{len(results.done) - num_before} new results in {args.output}, {num_before} were there"
    )
    if num_failed:
        _say(0, f"{num_failed} lines failed, see {args.errors}")
    else:
        args.errors.unlink()
    return status


def _say(status: int, text: str) -> int:
    print(f"batch: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
