"""The workers: who is ready, what each has in flight, how much more it may be given, and who is lost.

Credits: a worker's last step says how much is free and how many runs it had seen by then; runs sent since count against that,
so nothing is ever sent beyond what it can hold. Knows no queue and sends nothing; `lifecycle` acts on what is found here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.messages import VERSION, Register, StepDone, WorkerBeat, WorkerLimits
from scheduler.predictor import PassFit
from scheduler.request import Sequence, SequenceId, num_blocks

DEAD_AFTER_S = 3.0  # without a beat
HUNG_AFTER_S = 30.0  # in one step
STUCK_AFTER_S = 5.0  # idle by its own word, though it has work: messages were lost
RETURN_S = 10.0  # submits are queued so long for the last worker to come back
FAILURE_SHOWN_S = 15.0  # a worker that fails is started again: its reason outlives each try
HEADROOM_TOKENS = 128  # generated tokens that a dispatch makes sure of


@dataclass(slots=True, eq=False)
class Worker:
    """One registered worker. `unseen` are runs on their way: (number, blocks promised)."""

    worker_id: bytes
    name: str
    numerics_id: str
    limits: WorkerLimits
    registered_at: float
    heard_at: float
    stepped_at: float
    free_rows: int
    free_blocks: int
    step_age_s: float = 0.0
    missing_since: float | None = None
    num_sent: int = 0
    unseen: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: dict[SequenceId, Sequence] = field(default_factory=dict)
    passes: PassFit = field(default_factory=PassFit)

    @property
    def available_rows(self) -> int:
        """Never more than are free by our own books: a report from before a repeated register may claim too much."""
        return min(self.free_rows - len(self.unseen), self.limits.max_rows - len(self.in_flight))

    @property
    def available_blocks(self) -> int:
        return self.free_blocks - sum(blocks for _, blocks in self.unseen)

    @property
    def is_idle(self) -> bool:
        """Nothing of ours is left there: aborts on their way arrive before any further run."""
        return not self.in_flight

    @property
    def is_exclusive(self) -> bool:
        """A suspect runs here, alone."""
        return any(s.request.is_suspect for s in self.in_flight.values())

    def need_blocks(self, sequence: Sequence) -> int:
        """Blocks for what the sequence has and some room to grow. Optimistic: it may grow past that and be preempted; each
        preemption doubles the room asked for, so that it does not come straight back to be preempted again."""
        headroom = min(sequence.num_remaining, HEADROOM_TOKENS << min(sequence.preemptions, 16))
        positions = len(sequence.prompt) + len(sequence.tokens) + headroom
        loops = sequence.request.params.loops
        return num_blocks(positions, loops, self.limits.extra_tables)

    def can_ever_run(self, sequence: Sequence) -> bool:
        """Whether it fits an empty worker and, if it has tokens already, whether the arithmetic here made them."""
        limits, params = self.limits, sequence.request.params
        positions = len(sequence.prompt) + params.max_tokens
        is_begun = bool(sequence.tokens and sequence.numerics_id)
        return (
            not (is_begun and sequence.numerics_id != self.numerics_id)
            and positions <= limits.max_seq_len
            and num_blocks(positions, params.loops, limits.extra_tables) <= limits.num_blocks
            and (not params.kv_cache_mode or params.kv_cache_mode in limits.kv_modes)
        )

    def has_room(self, sequence: Sequence) -> bool:
        """An idle worker always has: what it can ever run it can run now, its prefixes give way."""
        if self.is_idle:
            return True
        return self.available_rows > 0 and self.available_blocks >= self.need_blocks(sequence)

    def sent(self, sequence: Sequence) -> None:
        self.num_sent += 1
        sequence.run_number = self.num_sent
        self.unseen.append((self.num_sent, self.need_blocks(sequence)))
        self.in_flight[sequence.sequence_id] = sequence

    def stepped(self, step: StepDone, now: float) -> None:
        """Take over the credits and the timing of a step."""
        self.heard_at = self.stepped_at = now
        self.free_rows = min(step.free_rows, self.limits.max_rows)
        self.free_blocks = min(step.free_blocks, self.limits.num_blocks)
        while self.unseen and self.unseen[0][0] <= step.runs_seen:
            self.unseen.popleft()
        if step.core_passes > 0:
            self.passes.observe(
                step.num_rows, step.cached_positions, step.step_ms / step.core_passes
            )

    def compare(self, step: StepDone, now: float) -> None:
        """After a step's outputs: does the worker run fewer sequences than it should by our books?"""
        num_seen = sum(s.run_number <= step.runs_seen for s in self.in_flight.values())
        if self.limits.max_rows - step.free_rows >= num_seen:
            self.missing_since = None
        elif self.missing_since is None:
            self.missing_since = now

    def missing(self, now: float) -> list[Sequence]:
        """Sequences that it has not for a while, though nobody said that they ended: a report was lost, or not readable."""
        since = self.missing_since
        if since is None or now - since <= STUCK_AFTER_S:
            return []
        self.missing_since = None
        return [s for s in self.in_flight.values() if s.heard_at <= since]


@dataclass(slots=True)
class _Heard:
    """The last beat of any worker process, registered or not."""

    name: str
    state: str
    reason: str
    at: float


class Workers:
    """The registry. `limits` are those of the largest worker seen since the last one registered; they outlive a loss."""

    def __init__(self) -> None:
        self.ready: dict[bytes, Worker] = {}
        self.digest = ""
        self.card = b""
        self.limits: WorkerLimits | None = None
        self.kv_modes: set[str] = set()
        self.lost_last_at: float | None = None  # when the last ready worker was lost
        self._heard: dict[bytes, _Heard] = {}
        self._failure: _Heard | None = None  # the newest since a worker registered

    def refusal(self, register: Register) -> str:
        """Why this worker may not join; "" if it may."""
        if register.version != VERSION:
            return f"it speaks version {register.version}, this scheduler version {VERSION}"
        if self.digest and register.digest != self.digest:
            return f"its artifact is {register.digest:.12}, this scheduler serves {self.digest:.12}"
        return ""

    def register(self, message: Register, now: float) -> Worker:
        """Take a worker in, empty of requests. The first one decides artifact and model card."""
        limits = message.limits
        if not self.digest:
            self.digest, self.card = message.digest, message.card
        held_blocks = sum(p.num_blocks for p in message.prefixes if p.key.name)  # others give way
        worker = Worker(
            message.worker_id,
            message.name,
            message.numerics_id,
            limits,
            registered_at=now,
            heard_at=now,
            stepped_at=now,
            free_rows=limits.max_rows,
            free_blocks=max(0, limits.num_blocks - held_blocks),
        )
        self.ready[message.worker_id] = worker
        self._heard[message.worker_id] = _Heard(message.name, "ready", "", now)
        self.limits = max(
            (w.limits for w in self.ready.values()), key=lambda w: (w.num_blocks, w.max_seq_len)
        )
        self.kv_modes = {mode for w in self.ready.values() for mode in w.limits.kv_modes}
        self.lost_last_at = self._failure = None
        return worker

    def remove(self, worker: Worker, now: float) -> None:
        if self.ready.pop(worker.worker_id, None) is not None and not self.ready:
            self.lost_last_at = now

    def beat(self, beat: WorkerBeat, now: float) -> Worker | None:
        """Note a heartbeat; returns the worker if it is registered."""
        heard = self._heard[beat.worker_id] = _Heard(beat.name, beat.state, beat.reason, now)
        if beat.state == "failed":
            self._failure = heard
        worker = self.ready.get(beat.worker_id)
        if worker is not None:
            worker.heard_at = now
            worker.step_age_s = beat.step_age_s
        return worker

    def find_lost(self, now: float) -> list[tuple[Worker, str]]:
        """The workers that count as lost by now, each with the reason."""
        lost = []
        for worker in self.ready.values():
            if now - worker.heard_at > DEAD_AFTER_S:
                lost.append((worker, f"silent for {now - worker.heard_at:.1f} s"))
            elif worker.step_age_s > HUNG_AFTER_S:
                lost.append((worker, f"no step for {worker.step_age_s:.0f} s"))
            elif self._is_stuck(worker, now):
                lost.append((worker, "idle although it has work: messages were lost"))
        for worker_id, heard in list(self._heard.items()):
            if now - heard.at > DEAD_AFTER_S:
                del self._heard[worker_id]
        return lost

    def _is_stuck(self, worker: Worker, now: float) -> bool:
        newest = max((s.heard_at for s in worker.in_flight.values()), default=now)
        return worker.step_age_s == 0 and now - max(newest, worker.stepped_at) > STUCK_AFTER_S

    def state(self, now: float) -> tuple[str, str]:
        """(state, one line): ready, failed with a worker's own reason, or loading."""
        if self.ready:
            return "ready", ""
        loading = [h for h in self._heard.values() if h.state == "loading"]
        failure = self._failure
        if failure and (not loading or now - failure.at < FAILURE_SHOWN_S):
            return "failed", failure.reason or f"worker {failure.name} failed"
        if loading:
            return "loading", f"worker {loading[0].name} is loading"
        was_lost = self.lost_last_at is not None
        return "loading", "the worker was lost" if was_lost else "waiting for a worker"

    @property
    def is_loading(self) -> bool:
        return any(h.state == "loading" for h in self._heard.values())

    def may_return(self, now: float) -> bool:
        """Whether new requests are queued although no worker is ready: one was, moments ago."""
        return self.lost_last_at is not None and now - self.lost_last_at <= RETURN_S

    def in_flight(self) -> Iterable[Sequence]:
        return (s for w in self.ready.values() for s in w.in_flight.values())
