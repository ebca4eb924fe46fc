"""Measures a stack over loopback HTTP beside its engine alone: time to first token, time per token, tokens/s.

    python scripts/bench_http.py [--model FILE] [--streams 1 8 32] [--prompt 64] [--tokens 64] [--url URL]

In one run, with one torch thread each: the engine alone in a process of its own (no sockets), then the same prompts through real
processes (2 web, scheduler, worker), then frontends and scheduler alone with a worker that answers at once. Closed loop: each
stream sends its next request when the last has ended. Prompts are random and all different, so no prefix is ever reused.
What bounds it: the engine's share of a core. On 2 cores the worker has one; load generator, web and scheduler share the other,
so HTTP falls behind the engine when their work per token passes the engine's; the column of CPU shares shows who is busy.
Prints a table and, last, one line of JSON.
With `--url` only that server is measured. The device is the CPU unless TINYLOOP_DEVICE says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from tests.harness import Stack

DEMO = ROOT / "gpu_worker" / "data" / "demo.tinyloop"
WARM_TOKENS = 4
BEAT_S = 1.5  # after which a worker has told what it counted
INSTANT_CONNECTIONS = 32
INSTANT_TOKENS = 32
INSTANT_S = 5.0


@dataclass
class Load:
    """What each stream sends."""

    vocab: int
    num_prompt: int
    num_tokens: int
    num_rounds: int
    loops: int

    def prompt(self, stream: int, round_: int) -> list[int]:
        rng = random.Random(1000 * stream + round_)
        return [rng.randrange(self.vocab) for _ in range(self.num_prompt)]


@dataclass
class Figures:
    """One measurement: medians in ms, rates per second. `engine_cpu_ms` is the CPU time that the engine's process takes for a
    token: unlike the rates it hardly moves when other programs keep the machine busy."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    requests_per_s: float
    engine_cpu_ms: float | None = None


@dataclass
class Times:
    """When the tokens of each request came, and the wall time of all."""

    first_s: list[float] = field(default_factory=list)  # request -> first token
    per_token_s: list[float] = field(default_factory=list)  # after the first
    num_tokens: int = 0
    wall_s: float = 0.0

    def add(self, began: float, first: float, last: float, num_tokens: int) -> None:
        self.first_s.append(first - began)
        self.num_tokens += num_tokens
        if num_tokens > 1:
            self.per_token_s.append((last - first) / (num_tokens - 1))

    def figures(self) -> Figures:
        return Figures(
            ttft_ms=1000 * statistics.median(self.first_s),
            tpot_ms=1000 * statistics.median(self.per_token_s or [0.0]),
            tokens_per_s=self.num_tokens / self.wall_s,
            requests_per_s=len(self.first_s) / self.wall_s,
        )


# ------------------------------------------------------------------------------------------------------- engine alone


def measure_engine(load: Load, num_streams: int) -> Figures:
    """The engine of the settings in the environment, stepped in a loop with nothing around it."""
    from gpu_worker.__main__ import load as load_engine
    from scheduler.config import Settings
    from scheduler.messages import Params, Run, Tokens

    engine = load_engine(Settings.from_env_or_exit(os.environ)).engine
    params = Params(loops=load.loops, max_tokens=load.num_tokens)
    short = replace(params, max_tokens=WARM_TOKENS)
    times = Times()
    began: dict[int, float] = {}
    came: dict[int, list[float]] = {}

    def send(stream: int, round_: int) -> None:
        sequence_id = stream * load.num_rounds + round_
        began[sequence_id], came[sequence_id] = time.perf_counter(), []
        prompt = Tokens(load.prompt(stream, round_))
        engine.add(Run(0, sequence_id, 1, prompt, Tokens(), 0, params))

    for stream in range(num_streams):  # what is compiled or captured at first use
        prompt = Tokens(load.prompt(stream, load.num_rounds))
        engine.add(Run(0, stream, 1, prompt, Tokens(), 0, short))
    while engine.has_work():
        engine.step()
    started, cpu_started = time.perf_counter(), time.process_time()
    for stream in range(num_streams):
        send(stream, 0)
    while engine.has_work():
        result = engine.step()
        now = time.perf_counter()
        for output in result.outputs:
            stamps = came[output.sequence_id]
            stamps += [now] * len(output.tokens)
            if output.finish_reason:
                times.add(began[output.sequence_id], stamps[0], stamps[-1], len(stamps))
                stream, round_ = divmod(output.sequence_id, load.num_rounds)
                if round_ + 1 < load.num_rounds:
                    send(stream, round_ + 1)
    times.wall_s = time.perf_counter() - started
    figures = times.figures()
    figures.engine_cpu_ms = 1000 * (time.process_time() - cpu_started) / times.num_tokens
    return figures


def engine_in_a_process(env: dict[str, str], load: Load, num_streams: int) -> Figures:
    command = [sys.executable, __file__, "--engine-only", json.dumps([asdict(load), num_streams])]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


# --------------------------------------------------------------------------------------------------------------- HTTP


async def post(
    host: str, port: int, body: dict[str, Any], connection: Any = None
) -> tuple[Any, Any]:
    """Send one POST /generate; returns (connection, answer status checked). Reuses a kept-alive connection."""
    reader, writer = connection or await asyncio.open_connection(host, port)
    data = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read(2000)!r}")
    return reader, writer


async def stream_once(
    host: str, port: int, body: dict[str, Any], times: Times, connection: Any
) -> Any:
    """One streamed request on a kept-alive connection, read as it comes."""
    began = time.perf_counter()
    reader, writer = connection = await post(host, port, {**body, "stream": True}, connection)
    first = last = 0.0
    num_tokens = 0
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        if not line:
            raise RuntimeError("the stream broke off")
        if line.startswith(b'data: {"text"'):
            last = time.perf_counter()
            first = first or last
            num_tokens += len(json.loads(line[6:])["tokens"])
    if num_tokens != body["max_tokens"]:
        raise RuntimeError(f"{num_tokens} tokens came, {body['max_tokens']} were asked for")
    times.add(began, first, last, num_tokens)
    writer.close()  # event streams end with their connection or a last chunk: start afresh
    return None


async def whole_once(
    host: str, port: int, body: dict[str, Any], times: Times, connection: Any
) -> Any:
    """One whole answer on a kept-alive connection."""
    began = time.perf_counter()
    reader, _ = connection = await post(host, port, body, connection)
    length = 0
    while (line := await reader.readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    answer = json.loads(await reader.readexactly(length))
    now = time.perf_counter()
    times.add(began, now, now, len(answer["tokens"]))
    return connection


Once = Callable[[str, int, dict[str, Any], Times, Any], Awaitable[Any]]


def measure_http(
    url: str, load: Load, num_streams: int, once: Once, limit_s: float = float("inf"),
    begins: Callable[[], None] = lambda: None,
) -> Figures:  # fmt: skip
    """`num_streams` closed loops of `num_rounds` requests each, or as many as `limit_s` allows; `begins` is called after warming up."""
    at = urlsplit(url)
    host, port = at.hostname or "127.0.0.1", at.port or 80

    def body_of(stream: int, round_: int, num_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": load.prompt(stream, round_),
            "max_tokens": num_tokens,
            "loops": load.loops,
            "ignore_eos": True,
            "cache_salt": f"{stream}.{round_}.{time.time_ns()}",
        }

    async def one_stream(stream: int, times: Times, until: float) -> None:
        connection = None
        for round_ in range(load.num_rounds):
            if time.perf_counter() >= until:
                return
            body = body_of(stream, round_, load.num_tokens)
            connection = await once(host, port, body, times, connection)

    async def all_streams() -> Times:
        warm = [body_of(s, load.num_rounds, WARM_TOKENS) for s in range(num_streams)]
        await asyncio.gather(*(once(host, port, body, Times(), None) for body in warm))
        times = Times()
        begins()
        began = time.perf_counter()
        await asyncio.gather(*(one_stream(s, times, began + limit_s) for s in range(num_streams)))
        times.wall_s = time.perf_counter() - began
        return times

    return asyncio.run(all_streams()).figures()


# ------------------------------------------------------------------------------------------------------------- the run


class WorkerCounts:
    """What the worker counts: steps, and those for which the GPU had to wait. The worker tells a beat after it has ended."""

    NAMES = ("steps", "late_steps", "core_passes", "preemptions")

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.begin()

    def begin(self) -> None:
        """Counts from now on."""
        self._began = self._read()

    def _read(self) -> dict[str, float]:
        time.sleep(BEAT_S)
        _, text = self._stack.get("/metrics")
        found = dict(
            re.findall(r'^tinyloop_worker_(\w+)_total\{worker="[^"]*"\} (\S+)$', text, re.M)
        )
        return {name: float(found.get(name, 0)) for name in self.NAMES}

    def since(self) -> dict[str, float]:
        return {name: value - self._began[name] for name, value in self._read().items()}


class CpuShares:
    """CPU time of each role of a stack, and of this process, as shares of one core."""

    def __init__(self, stack: Stack) -> None:
        import psutil

        self._processes = {
            "web": [psutil.Process(pid) for pid in stack.pids("web")],
            "scheduler": [psutil.Process(stack.pids("scheduler")[0])],
            "worker": [psutil.Process(stack.pids("worker-0")[0])],
            "load": [psutil.Process()],
        }
        self.begin()

    def begin(self) -> None:
        """Counts from now on."""
        self._began_at, self._began = time.perf_counter(), self._used()

    def _used(self) -> dict[str, float]:
        return {
            role: sum(sum(p.cpu_times()[:2]) for p in processes)
            for role, processes in self._processes.items()
        }

    def since(self) -> dict[str, float]:
        wall_s = time.perf_counter() - self._began_at
        return {role: (used - self._began[role]) / wall_s for role, used in self._used().items()}


def measure(model: Path, load: Load, streams: list[int]) -> list[dict[str, Any]]:
    """All rows of the table, on processes of our own."""
    from tests.harness import Stack

    rows = []
    env = {"TINYLOOP_THREADS": "1", "TINYLOOP_DEVICE": os.environ.get("TINYLOOP_DEVICE", "cpu")}
    with Stack(model, num_web=2, env=env) as stack:
        for num_streams in streams:
            alone = engine_in_a_process(stack.env, load, num_streams)
            shares, counts = CpuShares(stack), WorkerCounts(stack)

            def begin(shares: CpuShares = shares, counts: WorkerCounts = counts) -> None:
                counts.begin()
                shares.begin()

            over_http = measure_http(stack.url, load, num_streams, stream_once, begins=begin)
            cpu = shares.since()
            over_http.engine_cpu_ms = 1000 * cpu["worker"] / over_http.tokens_per_s
            share = over_http.tokens_per_s / alone.tokens_per_s
            extras = {"of_engine": share, "cpu": cpu, "worker": counts.since()}
            rows.append(row("engine alone", num_streams, alone))
            rows.append(row("HTTP, streamed", num_streams, over_http) | extras)
    env = {"TINYLOOP_FAULT": "instant_worker"}
    instant = Load(load.vocab, 16, INSTANT_TOKENS, 1_000_000, load.loops)
    with Stack(model, num_web=2, env=env) as stack:
        kinds: list[tuple[str, Once]] = [("whole", whole_once), ("streamed", stream_once)]
        for name, once in kinds:
            shares = CpuShares(stack)
            figures = measure_http(
                stack.url, instant, INSTANT_CONNECTIONS, once, INSTANT_S, shares.begin
            )
            extras = {"cpu": shares.since()}
            rows.append(row(f"instant worker, {name}", INSTANT_CONNECTIONS, figures) | extras)
    return rows


def row(what: str, num_streams: int, figures: Figures) -> dict[str, Any]:
    return {"what": what, "streams": num_streams, **asdict(figures)}


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "| what | streams | TTFT ms | ms/token | tokens/s | requests/s | of engine "
        "| engine CPU ms/token | CPU |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        of_engine = f"{100 * r['of_engine']:.0f} %" if "of_engine" in r else ""
        engine_cpu = "" if r["engine_cpu_ms"] is None else f"{r['engine_cpu_ms']:.2f}"
        cpu = ", ".join(f"{role} {100 * share:.0f} %" for role, share in r.get("cpu", {}).items())
        if "worker" in r:
            cpu += "; " + ", ".join(f"{n:.0f} {name}" for name, n in r["worker"].items())
        print(
            f"| {r['what']} | {r['streams']} | {r['ttft_ms']:.1f} | {r['tpot_ms']:.2f} "
            f"| {r['tokens_per_s']:.0f} | {r['requests_per_s']:.1f} | {of_engine} | {engine_cpu} | {cpu} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="artifact (the demo, else a toy)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt (64)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated by each (64)")
    parser.add_argument("--rounds", type=int, default=2, help="requests of each stream (2)")
    parser.add_argument("--loops", type=int, default=0, help="depth (the artifact's default)")
    parser.add_argument("--url", help="measure this server only")
    parser.add_argument("--vocab", type=int, default=256, help="token ids used with --url (256)")
    parser.add_argument("--engine-only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine_only:
        load, num_streams = json.loads(args.engine_only)
        print(json.dumps(asdict(measure_engine(Load(**load), num_streams))))
        return 0
    load = Load(args.vocab, args.prompt, args.tokens, args.rounds, args.loops or 1)
    if args.url:
        rows = [
            row("HTTP, streamed", n, measure_http(args.url, load, n, stream_once))
            for n in args.streams
        ]
    else:
        rows = measure_own(args, load)
    print_table(rows)
    print(json.dumps({"bench": "http", "cpus": os.cpu_count(), **asdict(load), "rows": rows}))
    return 0


def measure_own(args: argparse.Namespace, load: Load) -> list[dict[str, Any]]:
    from gpu_worker import artifact
    from scripts.make_toy_artifact import make

    with tempfile.TemporaryDirectory(prefix="tl") as directory:
        model = args.model or (DEMO if DEMO.exists() else make(Path(directory) / "toy.tinyloop"))
        config = artifact.load(model).config
        load.vocab, load.loops = config.arch.vocab, args.loops or config.loop.default
        print(f"{model.name}: {config.arch.d_model} wide, {load.loops} loops, {load}", flush=True)
        return measure(model, load, args.streams)


if __name__ == "__main__":
    sys.exit(main())
