"""Range checks of what peers send; the decoder has checked the types.

A submit that fails is answered (`Refusal`), so that one request's fault never reaches a batch; anything else that fails is
`BadMessage` and dropped. Pure functions: messages and limits in, an exception or nothing out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

from scheduler.messages import (
    BLOCK_SIZE,
    CLIENT_ID_BYTES,
    MAX_BRANCHES,
    MAX_DRAFT_AHEAD,
    MAX_SEQUENCES,
    BadMessage,
    HeldPrefix,
    Params,
    PrefixCommand,
    Register,
    SequenceOutput,
    SequenceSpec,
    StepDone,
    Submit,
    TokenLogprob,
    WorkerBeat,
    WorkerLimits,
)
from scheduler.request import num_blocks

MAX_TEXT = 1024  # characters of a label, salt or name
MAX_LIST = 65_536  # entries of a bias or stop list
MAX_HELD = 65_536
MAX_CARD_BYTES = 48 << 20
PREFIX_ID_BYTES = 16
UINT64_END = 1 << 64

EXIT_KINDS = ("none", "gate", "latent", "kl")
EXIT_KV = ("complete", "copy")
SPECULATIONS = ("none", "chain", "tree", "pipelined")
WORKER_STATES = ("loading", "ready", "failed")
FINISH_REASONS = ("", "stop", "length", "error", "preempted")
PREFIX_OPS = ("register", "list", "delete")


class Refusal(Exception):
    """A submit that is not accepted. `code` is one of `messages.Rejected`."""

    def __init__(self, code: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def _require(holds: bool, message: str, code: str = "invalid_request") -> None:
    if not holds:
        raise Refusal(code, message)


def _sane(holds: bool, what: str) -> None:
    if not holds:
        raise BadMessage(what)


def check_peer_id(peer_id: bytes) -> None:
    """Raises BadMessage unless it is one."""
    _sane(len(peer_id) == CLIENT_ID_BYTES, f"an id of {len(peer_id)} bytes")


# ------------------------------------------------------------------------------------------------------------- submits


def check_submit(submit: Submit, limits: WorkerLimits | None) -> None:
    """Whether a worker of these limits could run it; without limits, what can be told without them.

    Raises:
        Refusal: the first thing found wrong.
    """
    _require(0 < len(submit.sequences) <= MAX_SEQUENCES, f"sequences: 1 to {MAX_SEQUENCES}")
    _require(len(submit.label) <= MAX_TEXT, f"request_id: at most {MAX_TEXT} characters")
    _require(len(submit.salt) <= MAX_TEXT, f"cache_salt: at most {MAX_TEXT} characters")
    _require(-100 <= submit.priority <= 100, "priority: an integer from -100 to 100")
    slo_ms = submit.slo_ms
    _require(slo_ms is None or (math.isfinite(slo_ms) and slo_ms > 0), "slo_ms: more than 0")
    _require(math.isfinite(submit.timeout_s) and submit.timeout_s >= 0, "timeout_s: 0 or more")
    check_params(submit.params)
    for sequence in submit.sequences:
        _check_sequence(sequence, submit)
    if limits is not None:
        check_limits(submit.params, submit.sequences, limits)


def check_params(p: Params) -> None:
    """Everything about decoding parameters that needs no model.

    Raises:
        Refusal: the first field out of range.
    """
    _require(p.loops >= 1, "loops: 1 or more")
    _require(0 <= p.max_tokens <= 1 << 24, "max_tokens: 0 to 16777216")
    _require(0 <= p.min_tokens <= p.max_tokens, "min_tokens: 0 to max_tokens")
    _require(_within(p.temperature, 0, 1e6), "temperature: 0 or more")
    _require(0 <= p.top_k < 1 << 31, "top_k: 0 or more")
    _require(_within(p.top_p, 0, 1) and p.top_p > 0, "top_p: more than 0, at most 1")
    _require(_within(p.min_p, 0, 1), "min_p: 0 to 1")
    _require(
        _within(p.repetition_penalty, 0, 1e6) and p.repetition_penalty > 0,
        "repetition_penalty: more than 0",
    )
    _require(_within(p.presence_penalty, -1e6, 1e6), "presence_penalty: a finite number")
    _require(_within(p.frequency_penalty, -1e6, 1e6), "frequency_penalty: a finite number")
    _require(len(p.logit_bias) <= MAX_LIST, f"logit_bias: at most {MAX_LIST} entries")
    _require(all(_within(b, -1e9, 1e9) for _, b in p.logit_bias), "logit_bias: finite numbers")
    _require(len(p.stop_token_ids) <= MAX_LIST, f"stop_token_ids: at most {MAX_LIST} entries")
    _require(-1 <= p.logprobs < 1 << 20, "logprobs: 0 or more")
    _require(-1 <= p.prompt_logprobs < 1 << 20, "prompt_logprobs: 0 or more")
    _require(0 <= p.cache_window < 1 << 31, "cache_window: 0 or more")
    _require(p.exit_kind in EXIT_KINDS, f"exit_kind: one of {', '.join(EXIT_KINDS)}")
    _require(math.isfinite(p.exit_threshold), "exit_threshold: a finite number")
    _require(1 <= p.min_loops <= p.loops, "min_loops: 1 to loops")
    _require(p.exit_kv in EXIT_KV, f"exit_kv: one of {', '.join(EXIT_KV)}")
    _require(p.init_seed is None or 0 <= p.init_seed < UINT64_END, "init_seed: a 64-bit integer")
    _require(len(p.kv_cache_mode) <= MAX_TEXT, "kv_cache_mode: unknown")
    _require(p.speculation in SPECULATIONS, f"speculation: one of {', '.join(SPECULATIONS)}")
    _require(0 <= p.draft_loops <= p.loops, "draft_loops: at most the loops that verify")
    _require(0 <= p.draft_ahead <= MAX_DRAFT_AHEAD, f"draft_ahead: 0 to {MAX_DRAFT_AHEAD}")
    _require(0 <= p.branches <= MAX_BRANCHES, f"K_branches: 0 to {MAX_BRANCHES}")
    if p.speculation != "none":
        _require(p.loops >= 2, "verify_loops: 2 or more, drafts take fewer")
        _require(1 <= p.draft_loops < p.loops, f"draft_loops: 1 to {p.loops - 1}")
        _require(p.branches >= 1 or p.speculation != "tree", f"K_branches: 1 to {MAX_BRANCHES}")


def _check_sequence(sequence: SequenceSpec, submit: Submit) -> None:
    _require(len(sequence.prompt) > 0, "prompt: at least one token")
    _require(0 <= sequence.seed < UINT64_END, "seed: a 64-bit integer")
    _require(len(sequence.emitted) <= submit.params.max_tokens, "more emitted than max_tokens")
    _require(submit.resumed or not sequence.emitted, "emitted tokens in a new request")


def check_limits(p: Params, sequences: Items[SequenceSpec], limits: WorkerLimits) -> None:
    """Everything that depends on the model and on the size of the largest worker.

    Raises:
        Refusal: `context_length_exceeded` or `invalid_request`.
    """
    vocab = limits.vocab
    _require(p.loops <= limits.loops_max, f"loops: at most {limits.loops_max}")
    _require(all(0 <= i < vocab for i, _ in p.logit_bias), f"logit_bias: ids below {vocab}")
    _require(all(0 <= i < vocab for i in p.stop_token_ids), f"stop_token_ids: ids below {vocab}")
    _require(p.logprobs <= vocab and p.prompt_logprobs <= vocab, f"logprobs: at most {vocab}")
    known_exit = p.exit_kind == "none" or p.exit_kind in limits.exit_kinds
    _require(known_exit, f"exit_kind: this model has no {p.exit_kind!r} exit")
    _require(limits.has_injection or not p.warm_start, "warm_start: this model has no injection")
    for sequence in sequences:
        positions = len(sequence.prompt) + p.max_tokens
        _require(
            positions <= limits.max_seq_len,
            f"This model's maximum context length is {limits.max_seq_len} tokens. However, you requested {positions} "
            f"tokens ({len(sequence.prompt)} in the prompt, {p.max_tokens} for the completion).",
            "context_length_exceeded",
        )
        _require(max(sequence.prompt) < vocab, f"prompt: token ids below {vocab}")
        _require(max(sequence.emitted, default=0) < vocab, f"emitted: token ids below {vocab}")
        blocks = num_blocks(positions, p.loops, limits.extra_tables)
        _require(
            blocks <= limits.num_blocks,
            f"{positions} tokens at {p.loops} loops take {blocks} KV blocks; the whole pool has {limits.num_blocks}",
        )


def _within(number: float, low: float, high: float) -> bool:
    return low <= number <= high  # false for NaN


# ------------------------------------------------------------------------------------------------------ other messages


def check_prefix_command(command: PrefixCommand) -> None:
    """Raises BadMessage."""
    _sane(command.op in PREFIX_OPS, f"prefix op {command.op!r:.40}")
    _sane(max(len(command.salt), len(command.name)) <= MAX_TEXT, "a name too long")


def check_register(register: Register) -> None:
    """Raises BadMessage."""
    limits = register.limits
    check_peer_id(register.worker_id)
    _sane(len(register.name) <= MAX_TEXT and len(register.device) <= MAX_TEXT, "a name too long")
    _sane(0 < len(register.digest) <= MAX_TEXT, "no digest")
    _sane(len(register.card) <= MAX_CARD_BYTES, f"a card of {len(register.card)} bytes")
    _sane(1 <= limits.max_rows <= 1 << 20, f"max_rows {limits.max_rows}")
    _sane(1 <= limits.num_blocks <= 1 << 40, f"num_blocks {limits.num_blocks}")
    _sane(0 <= limits.extra_tables <= 1 << 20, f"extra_tables {limits.extra_tables}")
    _sane(1 <= limits.max_seq_len <= 1 << 30, f"max_seq_len {limits.max_seq_len}")
    _sane(1 <= limits.vocab <= 1 << 31, f"vocab {limits.vocab}")
    _sane(1 <= limits.loops_default <= limits.loops_max <= 1 << 20, "loops out of order")
    for held in register.prefixes:
        check_held(held, limits.vocab)


def check_held(held: HeldPrefix, vocab: int) -> None:
    """Raises BadMessage."""
    _sane(len(held.prefix_id) == PREFIX_ID_BYTES, "a prefix id of another length")
    _sane(held.num_blocks >= 0 and held.num_bytes >= 0, "a negative size")
    _sane(len(held.tokens) > 0 and len(held.tokens) % BLOCK_SIZE == 0, "a prefix of odd length")
    _sane(max(held.tokens) < vocab, "a prefix with ids past the vocabulary")
    _sane(held.key.loops >= 1 and held.key.cache_window >= 0, "a prefix key out of range")
    _sane(
        max(len(held.key.salt), len(held.key.name), len(held.key.kv_cache_mode)) <= MAX_TEXT,
        "a key too long",
    )


def check_step(step: StepDone) -> None:
    """The numbers of a step, without its outputs. Raises BadMessage."""
    counts = (
        step.runs_seen,
        step.free_rows,
        step.free_blocks,
        step.num_rows,
        step.cached_positions,
        step.core_passes,
    )
    _sane(all(0 <= n < 1 << 62 for n in counts), "a count out of range")
    _sane(_within(step.step_ms, 0, 1e9), f"step_ms {step.step_ms}")
    _sane(len(step.held) <= MAX_HELD and len(step.dropped) <= MAX_HELD, "too many prefixes")


def check_output(
    output: SequenceOutput, limits: WorkerLimits, want_logprobs: bool, room: int
) -> None:
    """One sequence's new tokens, of which at most `room` may be new to us. Raises BadMessage."""
    num_tokens = len(output.tokens)
    _sane(output.finish_reason in FINISH_REASONS, f"finish reason {output.finish_reason!r:.40}")
    _sane(output.first_index >= 0, "a negative index")
    _sane(num_tokens == 0 or max(output.tokens) < limits.vocab, "a token past the vocabulary")
    _sane(num_tokens <= room, f"{num_tokens} tokens where {room} were asked for")
    _sane(
        len(output.logprobs) == (num_tokens if want_logprobs else 0),
        "log-probabilities do not match the tokens",
    )
    for logprob in output.logprobs:
        _check_logprob(logprob)
    for prompt_logprob in output.prompt_logprobs:
        if prompt_logprob is not None:
            _check_logprob(prompt_logprob)
    counts = (
        output.cached_tokens,
        output.core_loops,
        output.drafted_tokens,
        output.accepted_tokens,
        output.rounds,
    )
    _sane(all(0 <= n < 1 << 62 for n in counts), "a count out of range")


def _check_logprob(logprob: TokenLogprob) -> None:
    _sane(not math.isnan(logprob.logprob), "a log-probability that is not a number")
    _sane(len(logprob.top_ids) == len(logprob.top_logprobs), "top ids without log-probabilities")
    _sane(
        not any(math.isnan(x) for x in logprob.top_logprobs),
        "a log-probability that is not a number",
    )


def check_worker_beat(beat: WorkerBeat) -> None:
    """Raises BadMessage."""
    check_peer_id(beat.worker_id)
    _sane(beat.state in WORKER_STATES, f"worker state {beat.state!r:.40}")
    _sane(_within(beat.step_age_s, 0, 1e9), f"step_age_s {beat.step_age_s}")
    _sane(len(beat.name) <= MAX_TEXT, "a name too long")
