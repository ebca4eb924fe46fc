"""An engine without a model, behind the fault switch: `TINYLOOP_FAULT=instant_worker` or `paced_worker`. Never for service.

`instant_worker` answers every run whole in the next step, so that what is measured is frontends and scheduler alone.
`paced_worker` gives one token per sequence and step, and steps every 5 ms, for tests that need a stream to take its time.
It carries a real artifact's card and limits. Tokens depend on (seed, position) only, so a moved request goes on as it began.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgpack

from gpu_worker.artifact import Artifact
from gpu_worker.model_card import model_card
from scheduler.messages import (
    BLOCK_SIZE,
    HeldPrefix,
    Run,
    SequenceOutput,
    Tokens,
    WorkerLimits,
)

FAULTS = ("instant_worker", "paced_worker")
PACE_S = 0.005
_KV_MODE = "fp32"


@dataclass(slots=True)
class StepResult:
    outputs: list[SequenceOutput] = field(default_factory=list)
    held_prefixes: list[HeldPrefix] = field(default_factory=list)
    dropped_prefixes: list[bytes] = field(default_factory=list)
    num_rows: int = 0
    cached_positions: int = 0
    core_passes: int = 0
    step_ms: float = 0.0


@dataclass(slots=True)
class _Sequence:
    run: Run
    num_tokens: int
    num_blocks: int


class InstantEngine:
    """The engine's face over a counter.

    Args:
        artifact: gives the card and the vocabulary; its weights are not touched.
        max_seq_len: positions of the longest sequence.
        max_rows: sequences at a time.
        tokens_per_step: of each sequence; 0 is all it asks for.
        pace_s: least time of a step with work.
        hf_home: see `model_card`.
    """

    def __init__(
        self,
        artifact: Artifact,
        max_seq_len: int,
        max_rows: int,
        tokens_per_step: int = 0,
        pace_s: float = 0.0,
        hf_home: str = "",
    ) -> None:
        config = artifact.config
        self._tokens_per_step = tokens_per_step
        self._pace_s = pace_s
        self._running: dict[tuple[int, int], _Sequence] = {}
        self._dropped: list[bytes] = []
        self._num_steps = 0
        blocks_per_sequence = -(-max_seq_len // BLOCK_SIZE) * (config.loop.hard_max + 1)
        self.limits = WorkerLimits(
            max_rows=max_rows,
            num_blocks=max_rows * blocks_per_sequence,
            extra_tables=0,
            max_seq_len=max_seq_len,
            vocab=config.arch.vocab,
            loops_default=config.loop.default,
            loops_trained=config.loop.trained_max,
            loops_max=config.loop.hard_max,
            has_coda=config.stages.coda > 0,
            has_injection=config.loop.inject != "none",
            has_init_seed=False,
            exit_kinds=("none",),
            kv_modes=(_KV_MODE,),
        )
        self.card = instant_card(artifact, self.limits, hf_home)

    @property
    def free_rows(self) -> int:
        return self.limits.max_rows - len(self._running)

    @property
    def free_blocks(self) -> int:
        return self.limits.num_blocks - sum(s.num_blocks for s in self._running.values())

    def add(self, run: Run) -> None:
        positions = len(run.prompt) + run.params.max_tokens
        blocks = -(-positions // BLOCK_SIZE) * (run.params.loops + self.limits.extra_tables)
        self._running[run.sequence_id, run.attempt] = _Sequence(run, len(run.emitted), blocks)

    def abort(self, sequence_id: int, attempt: int) -> None:
        self._running.pop((sequence_id, attempt), None)

    def drop_prefixes(self, prefix_ids: Iterable[bytes]) -> None:
        self._dropped += prefix_ids  # none is ever held

    def held_prefixes(self) -> list[HeldPrefix]:
        return []

    def reset(self) -> None:
        self._running.clear()
        self._dropped.clear()

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> StepResult:
        began = time.monotonic()
        result = StepResult(num_rows=len(self._running), dropped_prefixes=self._dropped)
        self._dropped = []
        if self._running:
            self._num_steps += 1
            time.sleep(self._pace_s)
        for key, sequence in list(self._running.items()):
            result.outputs.append(self._advance(sequence))
            if result.outputs[-1].finish_reason:
                del self._running[key]
        result.core_passes = max((o.core_loops for o in result.outputs), default=0)
        result.step_ms = 1000 * (time.monotonic() - began)
        return result

    def _advance(self, sequence: _Sequence) -> SequenceOutput:
        run, first = sequence.run, sequence.num_tokens
        step = self._tokens_per_step or run.params.max_tokens
        upto = min(run.params.max_tokens, first + step)
        sequence.num_tokens = upto
        tokens = instant_tokens(run, first, upto, self.limits.vocab)
        return SequenceOutput(
            run.sequence_id,
            run.attempt,
            first,
            tokens,
            finish_reason="length" if upto == run.params.max_tokens else "",
            core_loops=run.params.loops * len(tokens),
        )

    def series(self) -> dict[str, float]:
        return {"steps": float(self._num_steps), "rows": float(len(self._running))}


def instant_tokens(run: Run, first: int, upto: int, vocab: int) -> Tokens:
    """Generated tokens [first, upto) of a run; never one of its stop tokens."""
    stops = frozenset(run.params.stop_token_ids)
    key = run.seed.to_bytes(8, "little")
    drawn = []
    for position in range(first, upto):
        digest = hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=8).digest()
        token = int.from_bytes(digest, "little") % vocab
        while token in stops:
            token = (token + 1) % vocab
        drawn.append(token)
    return Tokens(drawn)


def instant_card(artifact: Artifact, limits: WorkerLimits, hf_home: str) -> bytes:
    """The model card of this engine: the artifact's own entries with these limits."""
    card = model_card(artifact, hf_home)
    card.update(
        max_seq_len=limits.max_seq_len,
        kv_modes=list(limits.kv_modes),
        kv_mode_default=_KV_MODE,
        speculation=False,
        has_init_seed=False,
        exit_kind="none",
        numerics_id="instant",
        block_size=BLOCK_SIZE,
        max_rows=limits.max_rows,
        num_blocks=limits.num_blocks,
        commit=None,
    )
    packed: bytes = msgpack.packb(card)
    return packed
