"""A request, its sequences, and the one function that moves a request from state to state.

Owns `RequestState`, the table of legal moves and `transition()`, the only writer of a request's state: it stamps every
move, and all counters and histograms are made from the moves alone. Knows no sockets, workers or queue.
A *request* is what a client asked; a *sequence* is one line of tokens of it (one per choice and per prompt of a batch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NewType, Protocol

from scheduler.messages import (
    BLOCK_SIZE,
    FinishStats,
    Params,
    SequenceSpec,
    TokenEvent,
    TokenLogprob,
    Tokens,
)

Clock = Callable[[], float]  # monotonic, seconds
SequenceId = NewType("SequenceId", int)
RequestKey = tuple[bytes, int]  # client id, that client's request id


class RequestState(IntEnum):
    """Ordered: everything from COMPLETED on is the end."""

    NEW = 0
    QUEUED = 1
    DISPATCHED = 2
    RUNNING = 3
    COMPLETED = 4
    CANCELLED = 5
    ERRORED = 6
    REJECTED = 7

    @property
    def is_ended(self) -> bool:
        return self >= RequestState.COMPLETED


_S = RequestState
_ENDS = frozenset({_S.COMPLETED, _S.CANCELLED, _S.ERRORED})

# A queued request can complete: the client finds a stop string in what it holds while the sequence waits for a new worker.
MOVES: dict[RequestState, frozenset[RequestState]] = {
    _S.NEW: frozenset({_S.QUEUED, _S.REJECTED}),
    _S.QUEUED: _ENDS | {_S.DISPATCHED},
    _S.DISPATCHED: _ENDS | {_S.RUNNING, _S.QUEUED},
    _S.RUNNING: _ENDS | {_S.QUEUED},
    _S.COMPLETED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.ERRORED: frozenset(),
    _S.REJECTED: frozenset(),
}


class IllegalMove(AssertionError):
    """The scheduler's own books are wrong; never a peer's doing."""


class Books(Protocol):
    """What is told of every move, after it was made."""

    def moved(self, request: Request, old: RequestState) -> None: ...


def transition(request: Request, state: RequestState, now: float, books: Books) -> None:
    """Move `request` to `state` at `now` (clock seconds), stamp it, and tell the books.

    Raises:
        IllegalMove: the table has no such move.
    """
    old = request.state
    if state not in MOVES[old]:
        raise IllegalMove(f"{request.label!r}: {old.name} -> {state.name}")
    request.state = state
    request.stamps.setdefault(state, now)
    request.num_moves[state] = request.num_moves.get(state, 0) + 1
    if not request.is_internal:
        books.moved(request, old)


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens. `tokens` is all that was generated, kept whole because a new worker replays it;
    `logprobs[i]` belongs to token `logprobs_base + i`, those before it are acknowledged and gone.
    """

    sequence_id: SequenceId
    request: Request
    index: int
    prompt: Tokens
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs_base: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    attempt: int = 0
    worker_id: bytes | None = None  # who runs it; None: it waits, or has ended
    numerics_id: str = ""  # of the worker whose arithmetic made its tokens
    run_number: int = 0  # of its last dispatch, among the worker's
    heard_at: float = 0.0  # last dispatch or output
    prefix_id: bytes = b""  # the pool entry its last dispatch named
    preemptions: int = 0
    restarts: int = 0
    finish_reason: str = ""
    error_code: str = ""
    error_message: str = ""
    first_token_at: float | None = None
    ended_at: float = 0.0
    cached_tokens: int = 0
    core_loops: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    kv_cache_mode: str = ""
    num_published: int = 0  # tokens that went out at least once
    num_due: int = 0  # tokens that had gone out one client beat ago: missing now means lost
    is_end_published: bool = False
    is_end_due: bool = False

    @property
    def is_waiting(self) -> bool:
        return self.worker_id is None and not self.finish_reason

    @property
    def num_remaining(self) -> int:
        """Tokens it may still generate."""
        return self.request.params.max_tokens - len(self.tokens)

    def event(self, first: int) -> TokenEvent:
        """All that is known from generated token `first` on, with the end if it has ended."""
        skipped = max(0, first - self.logprobs_base)
        return TokenEvent(
            request_id=self.request.request_id,
            index=self.index,
            first_index=first,
            tokens=Tokens(self.tokens[first:]),
            logprobs=tuple(self.logprobs[skipped:]) if first >= self.logprobs_base else (),
            prompt_logprobs=self.prompt_logprobs if first == 0 else (),
            finish_reason=self.finish_reason,
            error_code=self.error_code,
            error_message=self.error_message,
            stats=self.stats() if self.finish_reason else None,
        )

    def publish(self) -> TokenEvent:
        """The event with what did not go out yet."""
        event = self.event(self.num_published)
        self.num_published = len(self.tokens)
        self.is_end_published = bool(self.finish_reason)
        return event

    def stats(self) -> FinishStats:
        stamps = self.request.stamps
        submitted = stamps[RequestState.QUEUED]
        dispatched = stamps.get(RequestState.DISPATCHED, self.ended_at)
        first = self.ended_at if self.first_token_at is None else self.first_token_at
        return FinishStats(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.tokens),
            cached_tokens=self.cached_tokens,
            queue_wait_ms=(dispatched - submitted) * 1e3,
            first_token_ms=(first - submitted) * 1e3,
            wall_ms=(self.ended_at - submitted) * 1e3,
            core_loops=self.core_loops,
            kv_cache_mode=self.kv_cache_mode,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            rounds=self.rounds,
            restarts=self.restarts,
        )

    def acknowledge(self, num_held: int) -> None:
        """The client holds `num_held` tokens: their log-probabilities are not needed again."""
        num_gone = min(num_held - self.logprobs_base, len(self.logprobs))
        if num_gone > 0:
            del self.logprobs[:num_gone]
            self.logprobs_base += num_gone
        if num_held > 0:
            self.prompt_logprobs = ()

    def truncate(self, num_tokens: int) -> None:
        """Forget what was generated past `num_tokens`; the client found its stop string before it."""
        del self.tokens[num_tokens:]
        del self.logprobs[max(0, num_tokens - self.logprobs_base) :]
        self.num_published = min(self.num_published, num_tokens)
        self.num_due = min(self.num_due, num_tokens)


@dataclass(slots=True, eq=False)
class Request:
    """`order` numbers the requests of this scheduler's life; `rank` is the static queue key, lower first."""

    client_id: bytes
    request_id: int
    label: str
    params: Params
    order: int
    rank: float = 0.0
    priority: int = 0
    slo_ms: float | None = None
    timeout_s: float = 0.0
    salt: str = ""
    is_internal: bool = False  # a prefix being built: not a client's, so not in the books
    state: RequestState = RequestState.NEW
    stamps: dict[RequestState, float] = field(default_factory=dict)  # first time in each state
    num_moves: dict[RequestState, int] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    losses: int = 0  # workers that were lost with a sequence of it
    reserved_id: bytes | None = None  # the worker kept free for it
    stranded_since: float | None = None  # since when no worker there is could run it
    predicted_ms: float | None = None

    @property
    def key(self) -> RequestKey:
        return self.client_id, self.request_id

    @property
    def is_suspect(self) -> bool:
        """Two workers were lost with it: it may be what ends them, so it runs alone."""
        return self.losses >= 2

    @property
    def is_in_flight(self) -> bool:
        return any(s.worker_id is not None for s in self.sequences)

    @property
    def has_waiting(self) -> bool:
        return any(s.is_waiting for s in self.sequences)

    def add_sequences(self, specs: tuple[SequenceSpec, ...], next_id: Callable[[], int]) -> None:
        for index, spec in enumerate(specs):
            sequence = Sequence(
                SequenceId(next_id()), self, index, spec.prompt, spec.seed, list(spec.emitted)
            )
            # The client has these already: neither the tokens nor their log-probabilities go out again.
            sequence.logprobs_base = sequence.num_published = sequence.num_due = len(spec.emitted)
            self.sequences.append(sequence)

    def end_state(self) -> RequestState:
        """Where the ends of all its sequences lead."""
        reasons = {s.finish_reason for s in self.sequences}
        if "error" in reasons:
            return RequestState.ERRORED
        return RequestState.CANCELLED if "cancelled" in reasons else RequestState.COMPLETED


def num_blocks(positions: int, loops: int, extra_tables: int) -> int:
    """KV blocks that `positions` take at this depth; see `WorkerLimits`."""
    return -(-positions // BLOCK_SIZE) * (loops + extra_tables)
