"""Every message on TinyLoop's wires, in both directions.

A message is a frozen dataclass; `codec.py` says how it travels. This module knows no sockets and no state; clients,
scheduler and workers all import it. Fields may be appended with defaults; anything that does not decode raises
`BadMessage`: the receiver counts, logs and drops it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from scheduler.codec import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from scheduler.codec import VERSION as VERSION
from scheduler.codec import BadMessage as BadMessage
from scheduler.codec import Tokens as Tokens
from scheduler.codec import pack, unpack

CLIENT_ID_BYTES = 16
BLOCK_SIZE = 64  # positions per KV block; prefixes match at its multiples
MAX_SEQUENCES = 256  # of one request: every event of one of them looks at all
MAX_DRAFT_AHEAD = 64  # tokens drafted in a round
MAX_BRANCHES = 16  # of a draft tree, after each token

# ---------------------------------------------------------------------------------------------- parameters of a request


@dataclass(frozen=True, slots=True)
class Params:
    """How a request's sequences are decoded. Defaults are greedy, at no particular depth (`loops` is always set).

    `logprobs` and `prompt_logprobs` are the number of alternatives per token, -1 for none at all. `stop_token_ids`
    already holds the artifact's end tokens unless the client asked to ignore them. `draft_ahead` 0 means adaptive.
    `exit_kind` is one of none, gate, latent, kl; `speculation` one of none, chain, tree, pipelined.
    """

    loops: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1
    cache_window: int = 0
    warm_start: bool = False
    exit_kind: str = "none"
    exit_threshold: float = 0.0
    min_loops: int = 1
    exit_kv: str = "complete"
    init_seed: int | None = None
    kv_cache_mode: str = ""
    speculation: str = "none"
    draft_loops: int = 0
    draft_ahead: int = 0
    branches: int = 0


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence of a submit: its prompt, its noise seed, and what it has already emitted (after a scheduler's restart)."""

    prompt: Tokens
    seed: int
    emitted: Tokens = Tokens()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the raw logits, and of the most likely ones, best first."""

    logprob: float
    top_ids: Tokens = Tokens()
    top_logprobs: tuple[float, ...] = ()


# ------------------------------------------------------------------------------------------------- client -> scheduler


@dataclass(frozen=True, slots=True)
class Hello:
    """A client process is here; answered by `Welcome` on its topic. `card_digest` is the card it already has."""

    client_id: bytes
    version: int = VERSION
    card_digest: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request with all its sequences, admitted all or none; answered by `Accepted` or `Rejected`. Repeats are harmless.

    `timeout_s` counts from submit; 0 is none. `resumed` marks a repeat after an `Unknown`: it passes no admission.
    """

    client_id: bytes
    request_id: int
    label: str
    params: Params
    sequences: tuple[SequenceSpec, ...]
    priority: int = 0
    slo_ms: float | None = None
    timeout_s: float = 0.0
    salt: str = ""
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that a client still waits for, with the number of tokens it holds of each sequence.

    `ended` are the sequences (indices) whose end the client has seen.
    """

    request_id: int
    num_tokens: tuple[int, ...]
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientBeat:
    """A client's heartbeat: everything it waits for. What it does not list it no longer wants. Answered by `Status`."""

    client_id: bytes
    live: tuple[LiveRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client no longer wants this request."""

    client_id: bytes
    request_id: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The client found a stop string: sequence `index` is complete after `num_tokens` tokens."""

    client_id: bytes
    request_id: int
    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StatsQuery:
    """Asks for the scheduler's Prometheus exposition; answered by `StatsReply`."""

    client_id: bytes
    query_id: int


@dataclass(frozen=True, slots=True)
class PrefixCommand:
    """`op` is register, list or delete; answered by `PrefixReply` (register: once the entry is held by a worker)."""

    client_id: bytes
    query_id: int
    op: str
    salt: str = ""
    name: str = ""
    tokens: Tokens = Tokens()
    loops: int = 0


# ------------------------------------------------------------------------------------------------- scheduler -> client


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to `Hello`. `card` (msgpack map, see the artifact module) is empty if the client has it or there is none yet."""

    epoch: int
    state: str
    reason: str
    card_digest: str = ""
    card: bytes = b""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Status:
    """Answer to `ClientBeat`. `state` is ready, loading, failed or draining; `reason` is one line for people."""

    epoch: int
    state: str
    reason: str
    card_digest: str = ""
    queue_depth: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """`code` is queue_full, slo_unattainable, engine_down, draining, invalid_request or context_length_exceeded."""

    request_id: int
    code: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Unknown:
    """The scheduler knows nothing of these requests: submit them again with the tokens held."""

    epoch: int
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishStats:
    """The books of one sequence, with its last event. Times in ms by the scheduler's clock."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_wait_ms: float = 0.0
    first_token_ms: float = 0.0
    wall_ms: float = 0.0
    core_loops: int = 0
    kv_cache_mode: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one sequence. `first_index` counts generated tokens from 0, so that gaps and repeats show.

    `finish_reason` is "" while running, then stop, length, cancelled or error; `stats` comes with it.
    """

    request_id: int
    index: int
    first_index: int
    tokens: Tokens
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: str = ""
    error_code: str = ""
    error_message: str = ""
    stats: FinishStats | None = None


@dataclass(frozen=True, slots=True)
class Events:
    """All that one step brought for one client process."""

    epoch: int
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class StatsReply:
    query_id: int
    exposition: str


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    name: str
    num_tokens: int
    loops: int
    hits: int
    workers: tuple[str, ...]
    num_bytes: int
    idle_s: float
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class PrefixReply:
    """`code` is "" when done, else not_found, exists, pool_full, invalid_request or engine_down."""

    query_id: int
    code: str
    message: str
    entries: tuple[PrefixInfo, ...] = ()


# ------------------------------------------------------------------------------------------------- worker -> scheduler


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one worker can hold, in its own units. A request of `positions` takes
    ceil(positions / BLOCK_SIZE) * (loops + extra_tables) blocks."""

    max_rows: int
    num_blocks: int
    extra_tables: int
    max_seq_len: int
    vocab: int
    loops_default: int
    loops_trained: int
    loops_max: int
    has_coda: bool
    has_injection: bool
    has_init_seed: bool
    exit_kinds: tuple[str, ...]
    kv_modes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """All that must be equal for K/V of a prefix to be reusable (tokens and artifact apart)."""

    salt: str = ""
    kv_cache_mode: str = ""
    init_seed: int | None = None
    cache_window: int = 0
    loops: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """A prefix-pool entry that a worker holds: `tokens` is a multiple of BLOCK_SIZE long."""

    prefix_id: bytes
    key: PrefixKey
    tokens: Tokens
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Register:
    """A worker is ready (empty of requests). Answered by `Registered`; repeated until then."""

    worker_id: bytes
    name: str
    device: str
    digest: str
    numerics_id: str
    limits: WorkerLimits
    card: bytes
    prefixes: tuple[HeldPrefix, ...] = ()
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step did for one sequence. Counters are since the last output. `finish_reason`: "" | stop | length | error | preempted.

    A preempted sequence has given all its blocks back; the scheduler queues it again.
    """

    sequence_id: int
    attempt: int
    first_index: int
    tokens: Tokens
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: str = ""
    error_code: str = ""
    error_message: str = ""
    cached_tokens: int = 0
    core_loops: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """One engine step. `runs_seen` is how many `Run`s of this epoch the worker had received, so that the credits
    `free_rows` and `free_blocks` can be read against what is still on its way."""

    epoch: int
    outputs: tuple[SequenceOutput, ...]
    runs_seen: int
    free_rows: int
    free_blocks: int
    num_rows: int = 0
    cached_positions: int = 0
    core_passes: int = 0
    step_ms: float = 0.0
    held: tuple[HeldPrefix, ...] = ()
    dropped: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    """From a thread and socket of its own, every 0.5 s. `state` is loading, ready or failed (with `reason`, one line).

    `step_age_s` is how long the step in progress has been running, 0 when idle. `series` are numbers for the metrics.
    """

    worker_id: bytes
    name: str
    epoch: int
    state: str
    reason: str = ""
    step_age_s: float = 0.0
    series: dict[str, float] | None = None


# ------------------------------------------------------------------------------------------------- scheduler -> worker


@dataclass(frozen=True, slots=True)
class Registered:
    """`reason` is "" when accepted; else why not (another digest, another version)."""

    epoch: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Run one sequence: prefill `prompt`, replay `emitted` (neither sampled nor sent again), go on.

    `prefix_id`/`prefix_len`: reuse that many tokens of a held entry. `store`: keep the prompt's first `len(store.tokens)`
    tokens as an entry once prefilled.
    """

    epoch: int
    sequence_id: int
    attempt: int
    prompt: Tokens
    emitted: Tokens
    seed: int
    params: Params
    prefix_id: bytes = b""
    prefix_len: int = 0
    store: HeldPrefix | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    epoch: int
    sequence_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class DropPrefixes:
    epoch: int
    prefix_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SchedulerBeat:
    """The scheduler lives, every 0.5 s. A worker that sees a new epoch, or hears nothing for 3 s, drops its sequences and registers again."""

    epoch: int


# ------------------------------------------------------------------------------------------------------------- encoding

_TAGS: dict[int, type[Any]] = {
    1: Hello, 2: Submit, 3: ClientBeat, 4: Cancel, 5: Finish, 6: StatsQuery, 7: PrefixCommand,
    20: Welcome, 21: Status, 22: Accepted, 23: Rejected, 24: Unknown, 25: Events, 26: StatsReply, 27: PrefixReply,
    40: Register, 41: StepDone, 42: WorkerBeat,
    60: Registered, 61: Run, 62: Abort, 63: DropPrefixes, 64: SchedulerBeat,
}  # fmt: skip

FROM_CLIENT = (Hello, Submit, ClientBeat, Cancel, Finish, StatsQuery, PrefixCommand)
FROM_WORKER = (Register, StepDone, WorkerBeat)

_TAG_OF = {cls: tag for tag, cls in _TAGS.items()}
_MessageT = TypeVar("_MessageT")


def encode(message: Any) -> bytes:
    """A message as one frame."""
    return pack(_TAG_OF[type(message)], message)


def decode(frame: bytes, allowed: tuple[type[_MessageT], ...]) -> _MessageT:
    """The message in a frame.

    Raises:
        BadMessage: it is not one, its version is another, or its type is not among `allowed`.
    """
    return unpack(frame, _TAGS, allowed)
