"""A scheduler on a bench: a clock held by the test, clients and workers made of messages, no sockets.

`BenchWorker` obeys the worker's side of the protocol (epochs, attempts, credits, replay) with made-up tokens; `BenchClient` the
client's (order by first index, beats, resubmission of the unknown). Neither gets or sends anything unless the test moves it,
so a test decides what is lost, doubled, late or out of order. Every message passes through its encoding.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from scheduler.config import Settings
from scheduler.loop import Scheduler
from scheduler.messages import (
    FROM_CLIENT,
    FROM_WORKER,
    Abort,
    Accepted,
    BadMessage,
    ClientBeat,
    DropPrefixes,
    Events,
    FinishStats,
    HeldPrefix,
    LiveRequest,
    Params,
    Register,
    Registered,
    Rejected,
    Run,
    SchedulerBeat,
    SequenceOutput,
    SequenceSpec,
    StepDone,
    Submit,
    TokenEvent,
    TokenLogprob,
    Tokens,
    Unknown,
    WorkerBeat,
    WorkerLimits,
    decode,
    encode,
)
from scheduler.request import RequestState, num_blocks
from tests.conftest import FakeClock

VOCAB = 1000
DIGEST = "a" * 64

LIMITS = WorkerLimits(
    max_rows=4,
    num_blocks=100,
    extra_tables=0,
    max_seq_len=1024,
    vocab=VOCAB,
    loops_default=2,
    loops_trained=4,
    loops_max=8,
    has_coda=False,
    has_injection=True,
    has_init_seed=False,
    exit_kinds=("gate",),
    kv_modes=("fp32", "fp16"),
)


def token(seed: int, index: int) -> int:
    """What every worker generates as token `index` of a sequence with this seed."""
    return (seed * 7919 + index * 104729 + 13) % VOCAB


def tokens(seed: int, num_tokens: int) -> list[int]:
    return [token(seed, i) for i in range(num_tokens)]


def prompt(num_tokens: int, start: int = 0) -> Tokens:
    return Tokens((start + i) % VOCAB for i in range(num_tokens))


def client_id(number: int) -> bytes:
    return bytes([1 + number]) * 16


class BenchWorker:
    """One worker process. `inbox` holds what the scheduler sent and it has not read; `step` runs one step over all its rows."""

    def __init__(
        self, rig: Rig, name: str, limits: WorkerLimits, numerics_id: str, process: int
    ) -> None:
        self.rig = rig
        self.name = name
        self.limits = limits
        self.numerics_id = numerics_id
        self.worker_id = bytes([200 + process]) + name.encode().ljust(15, b".")
        self.inbox: list[Any] = []
        self.is_alive = True
        self.epoch = 0
        self.refused = ""
        self.runs_seen = 0
        self.running: dict[
            int, tuple[Run, list[int]]
        ] = {}  # by sequence id: what it has generated, replayed included
        self.fresh: set[int] = set()  # prefilled in the next step
        self.prefixes: dict[bytes, HeldPrefix] = {}
        self.dropped: list[bytes] = []
        self.cached: dict[int, int] = {}
        self.runs: list[Run] = []  # all that ever came
        self.aborts: list[Abort] = []

    @property
    def free_rows(self) -> int:
        return self.limits.max_rows - len(self.running)

    @property
    def free_blocks(self) -> int:
        """Unregistered prefixes count as free: they give way."""
        registered = sum(p.num_blocks for p in self.prefixes.values() if p.key.name)
        return max(0, self.limits.num_blocks - self._used(0) - registered)

    def _used(self, num_more: int) -> int:
        return sum(
            num_blocks(
                len(run.prompt) + len(made) + num_more, run.params.loops, self.limits.extra_tables
            )
            for run, made in self.running.values()
        )

    def _make_room(self) -> list[SequenceOutput]:
        """Drop prefixes, then preempt the newest, until every row can grow by one token."""
        preempted = []
        while (
            self._used(1) + sum(p.num_blocks for p in self.prefixes.values())
            > self.limits.num_blocks
        ):
            if self.prefixes:
                gone = min(self.prefixes, key=lambda p: self.prefixes[p].key.name != "")
                del self.prefixes[gone]
                self.dropped.append(gone)
            elif len(self.running) > 1:
                sequence_id = max(self.running)
                run, made = self.running.pop(sequence_id)
                self.fresh.discard(sequence_id)
                preempted.append(
                    SequenceOutput(
                        sequence_id, run.attempt, len(made), Tokens(), finish_reason="preempted"
                    )
                )
            else:
                break
        return preempted

    def register(self, digest: str = DIGEST, **fields: Any) -> None:
        held = tuple(self.prefixes.values())
        message = Register(
            self.worker_id, self.name, "bench", digest, self.numerics_id, self.limits, b"card of " + digest.encode(), held
        )  # fmt: skip
        self.send(replace(message, **fields))

    def beat(self, state: str = "ready", **fields: Any) -> None:
        fields.setdefault("step_age_s", 0.1 if self.running else 0.0)
        self.send(WorkerBeat(self.worker_id, self.name, self.epoch, state, **fields))

    def send(self, message: Any) -> None:
        self.rig.from_worker(self.worker_id, message)

    def read(self, count: int | None = None) -> None:
        """Act on the first `count` messages of the inbox, all if None."""
        taken, self.inbox = self.inbox[:count], self.inbox[len(self.inbox[:count]) :]
        for message in taken:
            self._handle(message)

    def _handle(self, message: Any) -> None:
        if isinstance(message, Registered):
            self.running.clear()
            self.fresh.clear()
            self.runs_seen = 0
            self.epoch, self.refused = message.epoch, message.reason
        elif message.epoch != self.epoch:
            assert isinstance(message, SchedulerBeat), f"a stale {message}"
        elif isinstance(message, Run):
            self._add(message)
        elif isinstance(message, Abort):
            self.aborts.append(message)
            held = self.running.get(message.sequence_id)
            if held is not None and held[0].attempt == message.attempt:
                del self.running[message.sequence_id]
        elif isinstance(message, DropPrefixes):
            for prefix_id in message.prefix_ids:
                self.prefixes.pop(prefix_id, None)

    def _add(self, run: Run) -> None:
        self.runs_seen += 1
        self.runs.append(run)
        assert list(run.emitted) == tokens(run.seed, len(run.emitted)), (
            "emitted tokens that were never generated"
        )
        assert len(self.running) < self.limits.max_rows, "more runs than rows"
        self.running[run.sequence_id] = (run, list(run.emitted))
        self.fresh.add(run.sequence_id)
        entry = self.prefixes.get(run.prefix_id)
        assert not run.prefix_len or run.prefix_len % 64 == 0 and run.prefix_len < len(run.prompt)
        if entry is not None:
            assert entry.tokens[: run.prefix_len] == run.prompt[: run.prefix_len]
            self.cached[run.sequence_id] = run.prefix_len

    def outputs(self, ending: dict[int, str] | None = None) -> list[SequenceOutput]:
        """One token of each row; a sequence ends at max_tokens, or as `ending` says by sequence id."""
        results = []
        for sequence_id, (run, made) in list(self.running.items()):
            reason = (ending or {}).get(sequence_id, "")
            first, count = len(made), 0
            if reason in ("", "stop", "length") and len(made) < run.params.max_tokens:
                count = 1
                made.append(token(run.seed, first))
            if not reason and len(made) >= run.params.max_tokens:
                reason = "length"
            new = Tokens(made[first : first + count])
            logprobs = (
                tuple(TokenLogprob(-float(t)) for t in new) if run.params.logprobs >= 0 else ()
            )
            results.append(
                SequenceOutput(
                    sequence_id, run.attempt, first, new, logprobs, finish_reason=reason,
                    error_code="engine_fault" if reason == "error" else "",
                    cached_tokens=self.cached.pop(sequence_id, 0), core_loops=run.params.loops * count,
                )
            )  # fmt: skip
            if reason:
                del self.running[sequence_id]
        return results

    def step(
        self, ending: dict[int, str] | None = None, *, deliver: bool = True, step_ms: float = 10.0
    ) -> StepDone:
        """Run one step over what has been read; `deliver` False loses the report."""
        outputs = self._make_room()
        num_rows = len(self.running)
        held = []
        for sequence_id in self.fresh & set(self.running):
            store = self.running[sequence_id][0].store
            if store is not None:
                blocks = num_blocks(len(store.tokens), store.key.loops, self.limits.extra_tables)
                kept = replace(store, num_blocks=blocks, num_bytes=blocks * 1000)
                self.prefixes[store.prefix_id] = kept
                held.append(kept)
        self.fresh.clear()
        outputs += self.outputs(ending)
        done = StepDone(
            self.epoch, tuple(outputs), self.runs_seen, self.free_rows, self.free_blocks, num_rows, 0, 2, step_ms,
            tuple(held), tuple(self.dropped),
        )  # fmt: skip
        self.dropped = []
        if deliver:
            self.send(done)
        return done


class Delivered:
    """One request as its client sees it."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.tokens: list[list[int]] = [list(s.emitted) for s in submit.sequences]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in submit.sequences]
        self.ends: dict[int, TokenEvent] = {}
        self.answer: Accepted | Rejected | None = None

    @property
    def is_over(self) -> bool:
        return len(self.ends) == len(self.tokens)

    @property
    def stats(self) -> FinishStats:
        stats = self.ends[0].stats
        assert stats is not None
        return stats

    def take(self, event: TokenEvent) -> None:
        held = self.tokens[event.index]
        if event.index in self.ends or event.first_index > len(held):
            return
        num_known = len(held) - event.first_index
        held += event.tokens[num_known:]
        self.logprobs[event.index] += event.logprobs[num_known:]
        if event.finish_reason:
            self.ends[event.index] = event


class BenchClient:
    """One client process. `inbox` holds what was published to it and it has not read."""

    def __init__(self, rig: Rig, number: int) -> None:
        self.rig = rig
        self.client_id = client_id(number)
        self.inbox: list[Any] = []
        self.requests: dict[int, Delivered] = {}  # those it waits for
        self.seen: list[Any] = []  # all it ever read
        self.num_ids = 0

    def submit(
        self, num_sequences: int = 1, seed: int = 1, size: int = 10, **fields: Any
    ) -> Delivered:
        """Submit a request; fields of Params and of Submit by name."""
        self.num_ids += 1
        params = {
            name: fields.pop(name) for name in list(fields) if name in Params.__dataclass_fields__
        }
        specs = fields.pop(
            "sequences",
            tuple(SequenceSpec(prompt(size), seed + i) for i in range(num_sequences)),
        )
        message = Submit(
            self.client_id, self.num_ids, f"r{self.num_ids}", Params(**{"loops": 2, "max_tokens": 5} | params), specs, **fields
        )  # fmt: skip
        delivered = self.requests[self.num_ids] = Delivered(message)
        self.send(message)
        return delivered

    def send(self, message: Any) -> None:
        self.rig.from_client(message)

    def listing(self) -> tuple[LiveRequest, ...]:
        return tuple(
            LiveRequest(request_id, tuple(len(t) for t in d.tokens), tuple(sorted(d.ends)))
            for request_id, d in self.requests.items()
        )

    def beat(self) -> None:
        self.send(ClientBeat(self.client_id, self.listing()))

    def read(self, count: int | None = None) -> list[Any]:
        """Act on the first `count` frames of the inbox, all if None."""
        taken, self.inbox = self.inbox[:count], self.inbox[len(self.inbox[:count]) :]
        for message in taken:
            self.seen.append(message)
            if isinstance(message, Accepted | Rejected) and message.request_id in self.requests:
                self.requests[message.request_id].answer = message
            if isinstance(message, Events):
                for event in message.events:
                    delivered = self.requests.get(event.request_id)
                    if delivered is not None:
                        delivered.answer = delivered.answer or Accepted(event.request_id)
                        delivered.take(event)
        return taken

    def resubmit(self, unknown: Unknown) -> None:
        for request_id in unknown.request_ids:
            delivered = self.requests.get(request_id)
            if delivered is not None and isinstance(delivered.answer, Accepted):
                held = [
                    replace(s, emitted=Tokens(t))
                    for s, t in zip(delivered.submit.sequences, delivered.tokens, strict=True)
                ]
                self.send(replace(delivered.submit, sequences=tuple(held), resumed=True))


class Rig:
    def __init__(self, epoch: int = 1, **settings: Any) -> None:
        self.clock = FakeClock()
        self.settings = Settings(**settings)
        self.workers: dict[bytes, BenchWorker] = {}
        self.clients: dict[bytes, BenchClient] = {}
        self.others: dict[bytes, list[Any]] = defaultdict(
            list
        )  # sent to workers that are not on the bench
        self.num_bad = 0
        self.start(epoch)

    def start(self, epoch: int) -> None:
        """A new life of the scheduler."""
        self.scheduler = Scheduler(
            self.settings, self.clock, self._to_client, self._to_worker, epoch
        )

    # ------------------------------------------------------------------------------------------------ wires

    def _to_client(self, to: bytes, message: Any) -> None:
        from scheduler.messages import PrefixReply, StatsReply, Status, Welcome

        kinds = (Accepted, Rejected, Unknown, Events, Status, Welcome, StatsReply, PrefixReply)
        if to in self.clients:
            self.clients[to].inbox.append(decode(encode(message), kinds))

    def _to_worker(self, to: bytes, message: Any) -> bool:
        message = decode(encode(message), (Registered, Run, Abort, DropPrefixes, SchedulerBeat))
        worker = self.workers.get(to)
        if worker is None:
            self.others[to].append(message)
            return True
        if worker.is_alive:
            worker.inbox.append(message)
        return worker.is_alive

    def from_client(self, message: Any) -> None:
        try:
            self.scheduler.on_client(decode(encode(message), FROM_CLIENT))
        except BadMessage:
            self.num_bad += 1

    def from_worker(self, worker_id: bytes, message: Any) -> None:
        try:
            self.scheduler.on_worker(worker_id, decode(encode(message), FROM_WORKER))
        except BadMessage:
            self.num_bad += 1

    # ------------------------------------------------------------------------------------------------ people

    def worker(
        self,
        name: str = "w0",
        *,
        numerics_id: str = "n0",
        is_ready: bool = True,
        process: int = 0,
        **limits: Any,
    ) -> BenchWorker:
        worker = BenchWorker(self, name, replace(LIMITS, **limits), numerics_id, process)
        self.workers[worker.worker_id] = worker
        if is_ready:
            worker.register()
            worker.read()
        return worker

    def client(self, number: int = 0) -> BenchClient:
        client = self.clients[client_id(number)] = BenchClient(self, number)
        return client

    def kill(self, worker: BenchWorker) -> None:
        """The process is gone, and the scheduler does not know it yet."""
        worker.is_alive = False
        worker.inbox.clear()
        worker.running.clear()

    def elapse(self, seconds: float, *, beats: bool = True) -> None:
        """Let time pass in steps, with beats of all that are alive."""
        end = self.clock.now + seconds
        while self.clock.now < end - 1e-9:
            self.clock.advance(min(0.5, end - self.clock.now))
            if beats:
                for worker in self.workers.values():
                    if worker.is_alive:
                        worker.beat()
                for client in self.clients.values():
                    client.read()
                    client.beat()
            self.scheduler.tick()

    def tick(self) -> None:
        self.scheduler.tick()

    def run(self, steps: int = 1) -> None:
        """`steps` rounds in which everybody reads all, and every worker makes a step."""
        for _ in range(steps):
            self.tick()
            for worker in self.workers.values():
                if worker.is_alive and worker.epoch:
                    worker.read()
                    worker.step()
            self.clock.advance(0.01)
            self.tick()
            for client in self.clients.values():
                client.read()

    # ------------------------------------------------------------------------------------------------ books

    def count(self, name: str) -> float:
        value = self.scheduler.hub.metrics.registry.get_sample_value(name)
        assert value is not None, name
        return value

    def count_of(self, name: str, **labels: str) -> float | None:
        return self.scheduler.hub.metrics.registry.get_sample_value(name, labels)

    def check_books(self) -> None:
        """submitted = completed + errored + cancelled + queued + in flight, and every part agrees with the others."""
        hub = self.scheduler.hub
        ended = sum(
            self.count(f"tinyloop_requests_{end}_total")
            for end in ("completed", "errored", "cancelled")
        )
        metrics = hub.metrics
        assert (
            self.count("tinyloop_requests_submitted_total")
            == ended + metrics.queue_depth + metrics.in_flight
        )
        live = [r for r in hub.live.values() if not r.is_internal]
        assert metrics.queue_depth == sum(r.state is RequestState.QUEUED for r in live)
        assert metrics.in_flight == sum(
            r.state in (RequestState.DISPATCHED, RequestState.RUNNING) for r in live
        )
        for request in hub.live.values():
            assert not request.state.is_ended
            assert (request in hub.queue) == request.has_waiting
            assert request.is_in_flight == (request.state is not RequestState.QUEUED)
        for worker in hub.workers.ready.values():
            for sequence in worker.in_flight.values():
                assert sequence.worker_id == worker.worker_id and not sequence.finish_reason
                assert sequence.request.order in hub.live
