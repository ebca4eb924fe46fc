"""The engine: sequences in, one step at a time, tokens out.

A step reads top-down: plan which rows each sequence runs, find their blocks (dropping prefixes, then preempting), run them through
the model, and hand out what came of them. Owns the sequences and the device; knows no sockets and no scheduler. `worker.py` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgpack
import torch
from torch import Tensor

from gpu_worker import limits, sampler, speculative
from gpu_worker.artifact import Artifact
from gpu_worker.batch import Batch, Work
from gpu_worker.decode_graphs import BUCKETS
from gpu_worker.drawing import Drawing, draw
from gpu_worker.exits import is_sequential
from gpu_worker.fused_model import fused_kind
from gpu_worker.graphed_model import GraphedModel
from gpu_worker.kv_cache import KVCache
from gpu_worker.kv_sizes import is_absorbed
from gpu_worker.limits import EngineOptions
from gpu_worker.model import Model
from gpu_worker.model_card import model_card
from gpu_worker.model_config import ModelConfig
from gpu_worker.plain_decode import STEPS_AHEAD, Flight, PlainDecode
from gpu_worker.prefixes import PrefixStore
from gpu_worker.sequence import Sequence
from gpu_worker.speculative import Guess
from gpu_worker.waves import Segment, Waves
from kernels import runtime
from kernels.layout import BLOCK_SIZE
from scheduler.messages import HeldPrefix, Run, SequenceOutput, TokenLogprob, Tokens

__all__ = ["Engine", "EngineOptions", "StepResult"]

HEAD_ROWS = 32  # prompt rows whose logits are made at a time


@dataclass(slots=True)
class StepResult:
    """What a step did. `core_passes` is how often the core's weights were read, `num_rows` the rows that entered."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    held_prefixes: list[HeldPrefix] = field(default_factory=list)
    dropped_prefixes: list[bytes] = field(default_factory=list)
    num_rows: int = 0
    cached_positions: int = 0
    core_passes: int = 0
    step_ms: float = 0.0


class Engine:
    """See the module.

    Args:
        artifact: the model.
        options: how to run it.
        clock: seconds, for step times.

    Raises:
        ArtifactError: TL013, TL014: the artifact cannot run with these options.
    """

    def __init__(
        self,
        artifact: Artifact,
        options: EngineOptions,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config = artifact.config
        self._clock = clock
        self.artifact = artifact
        if options.device == "cuda" and options.build_dir:
            runtime.set_build_dir(Path(options.build_dir) / "ptx")
        weight_bytes = sum(tensor.nbytes for tensor in artifact.tensors().values())
        self.options = limits.resolve(config, options, weight_bytes)
        torch.set_num_threads(options.threads)
        keeps_inputs = options.kv_format in ("h", "h_int4")
        self.model = _model_kind(config, options)(
            config, artifact.tensors(), options.device, keeps_inputs, options.h_mode_fp16_attn_qkv
        )
        self.model.ops.set_threads(options.threads)
        self.cache = KVCache(
            config, self.options.num_blocks, options.max_rows, self.options.max_seq_len, options.kv_format,
            options.kv_share, limits.num_copies(config, options), self.model.device, options.is_graphed, options.device == "cuda",
        )  # fmt: skip
        self._plain: PlainDecode | None = None
        self._waves: Waves | None = None
        self._flights: list[Flight] = []  # on the device, the oldest first
        if isinstance(self.model, GraphedModel):
            self.model.bind(self.cache, max(BUCKETS))
            if not keeps_inputs or is_absorbed(config):
                self._plain = PlainDecode(self.model)
                has_chains = self.options.max_speculating == 0
                self._waves = Waves(self.model, self.cache, has_chains=has_chains)
        self._bytes_per_token = self.cache.bytes_per_token(
            config.loop.default, self.options.max_seq_len
        )
        self.prefixes = PrefixStore(self.cache.pool)
        self.limits = limits.worker_limits(config, self.options)
        self.numerics_id = limits.numerics_id(config, options)
        self.card: bytes = msgpack.packb(
            limits.card(
                model_card(artifact, options.hf_home),
                self.limits,
                self.options,
                self.numerics_id,
                self._bytes_per_token,
            )  # fmt: skip
        )
        self._waiting: list[Run] = []
        self._running: list[Sequence] = []  # in the order they came
        self._result = StepResult()
        self._totals = {
            "steps": 0,
            "core_passes": 0,
            "tokens": 0,
            "prompt_tokens": 0,
            "preemptions": 0,
            "core_loops": 0,
            "exit_head_reads": 0,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
            "speculation_rounds": 0,
        }

    # ---------------------------------------------------------------------------------------------------------- the face

    @property
    def free_rows(self) -> int:
        return max(0, self.options.max_rows - len(self._running) - len(self._waiting))

    @property
    def free_blocks(self) -> int:
        """Free and evictable blocks, less what running prompts still need and one more block per table of each sequence."""
        owed = self.cache.num_missing_of_all(
            [s.slot for s in self._running],
            [
                min(max(s.num_prompt, len(s.tokens)) + BLOCK_SIZE, self._max_positions(s))
                for s in self._running
            ],
        )
        return max(0, self.cache.pool.num_free + self.prefixes.num_evictable_blocks() - owed)

    def add(self, run: Run) -> None:
        """Takes a sequence; a run that this engine cannot do ends with an `error` at the next step."""
        refusal = limits.refusal(run, self.limits, self.artifact.config)
        if refusal is not None:
            self._result.outputs.append(_error(run, *refusal))
        else:
            self._waiting.append(run)

    def abort(self, sequence_id: int, attempt: int) -> None:
        """Forgets a sequence and frees its blocks; an unknown one is fine."""
        self._waiting = [
            r for r in self._waiting if (r.sequence_id, r.attempt) != (sequence_id, attempt)
        ]
        for sequence in self._running:
            if (sequence.run.sequence_id, sequence.run.attempt) == (sequence_id, attempt):
                self._end(sequence)
                return

    def drop_prefixes(self, prefix_ids: Iterable[bytes]) -> None:
        for prefix_id in prefix_ids:
            if self.prefixes.drop(prefix_id):
                self._result.dropped_prefixes.append(prefix_id)

    def held_prefixes(self) -> list[HeldPrefix]:
        return self.prefixes.held()

    def reset(self) -> None:
        """Drops all sequences and everything not yet reported; prefixes stay."""
        self._waiting.clear()
        for sequence in list(self._running):
            self._end(sequence)
        self._flights.clear()
        self._result = StepResult()

    def has_work(self) -> bool:
        return bool(
            self._running
            or self._waiting
            or self._result.outputs
            or self._result.dropped_prefixes
            or self._flights
        )

    def step(self) -> StepResult:
        """Runs one step."""
        began = self._clock()
        self._start_waiting()
        if self._waves is None or not self._ride(self._waves):
            self._decode()
        result, self._result = self._result, StepResult()
        result.cached_positions = sum(s.num_computed for s in self._running)
        result.step_ms = 1000 * (self._clock() - began)
        self._totals["steps"] += 1
        return result

    def series(self) -> dict[str, float]:
        """Numbers for the metrics."""
        pool = self.cache.pool
        return {
            **{f"{name}_total": float(value) for name, value in self._totals.items()},
            "late_steps_total": float(self._plain.num_late if self._plain is not None else 0),
            "rows": float(len(self._running)),
            "kv_blocks": float(pool.num_blocks),
            "kv_blocks_used": float(pool.num_used),
            "kv_bytes_used": float(self.cache.used_bytes),
            "kv_bytes_per_token": self._bytes_per_token,
            "prefix_entries": float(len(self.prefixes)),
        }

    # ---------------------------------------------------------------------------------------------------- planning a step

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self.options.max_rows:
            run = self._waiting.pop(0)
            slot = self.cache.open(run.params.loops)
            sequence = Sequence(run, slot, is_sequential(run.params, self.model.has_coda))
            self._running.append(sequence)
            self._adopt_prefix(sequence)

    def _adopt_prefix(self, sequence: Sequence) -> None:
        """Starts from the blocks of the entry that the run names, as far as its tokens are the prompt's and one is left to run."""
        run = sequence.run
        entry = (
            self.prefixes.find(run.prefix_id)
            if run.prefix_id and run.params.prompt_logprobs < 0
            else None
        )
        if entry is None:
            return
        length = (
            min(run.prefix_len, len(entry.held.tokens), sequence.num_prompt - 1)
            // BLOCK_SIZE
            * BLOCK_SIZE
        )
        loops = entry.held.key.loops
        fits = (
            loops == run.params.loops if self.model.has_coda else loops >= run.params.loops
        )  # a coda's K and V depend on the depth
        if length == 0 or not fits or entry.held.tokens[:length] != run.prompt[:length]:
            return
        self.cache.adopt(sequence.slot, entry.blocks[:, : length // BLOCK_SIZE])
        sequence.num_computed = sequence.cached_tokens = length

    def _plan(self) -> list[Work]:
        """Every sequence past its prompt, and prompts in order of arrival until the chunk is full."""
        budget = self.options.prefill_chunk
        works = []
        for sequence in self._running:
            end = sequence.next_end(budget)
            if sequence.is_prefilling:
                budget -= end - sequence.num_computed
            if end > sequence.num_computed:
                works.append(Work(sequence, sequence.num_computed, end))
        return speculative.with_guesses(works, self.model, self.cache, self._is_guessing)

    @property
    def _is_guessing(self) -> bool:
        """Whether guesses pay: with more sequences their rows cost more than they bring."""
        return len(self._running) <= self.options.max_speculating

    def _find_blocks(self, works: list[Work]) -> list[Work]:
        """Extends the tables of the planned sequences, oldest first; who finds no room makes the youngest leave."""
        if all(self.cache.covers(work.sequence.slot, work.reach) for work in works):
            return works
        found: list[Work] = []
        for work in works:
            if work.sequence not in self._running:
                continue  # preempted for an older one
            if self.cache.covers(work.sequence.slot, work.reach):
                found.append(work)
                continue
            while work.sequence in self._running:
                missing = self.cache.num_missing(work.sequence.slot, work.end)
                self._evict(missing, with_registered=False)
                if missing <= self.cache.pool.num_free:
                    self.cache.extend(work.sequence.slot, work.end)
                    found.append(work)
                    break
                if len(self._running) > 1:
                    self._preempt(self._running[-1])
                elif not self._evict(missing, with_registered=True):
                    self._fail(
                        work.sequence,
                        "kv_exhausted",
                        f"{missing} more blocks wanted, the pool has {self.cache.pool.num_blocks}",
                    )
        for work in found:
            if isinstance(work, Guess):
                self._find_blocks_to_guess(work)
        return found

    def _find_blocks_to_guess(self, work: Guess) -> None:
        """A guess takes free blocks alone; nobody leaves for it."""
        slot, cache = work.sequence.slot, self.cache
        is_short = cache.num_missing(slot, work.reach) > cache.pool.num_free
        if is_short or work.reach > cache.max_blocks * BLOCK_SIZE:
            work.shrink(-(-work.end // BLOCK_SIZE) * BLOCK_SIZE)
        cache.extend(slot, work.reach)

    def _evict(self, missing: int, with_registered: bool) -> bool:
        dropped = self.prefixes.evict(missing, with_registered)
        self._result.dropped_prefixes += dropped
        return bool(dropped)

    def _preempt(self, sequence: Sequence) -> None:
        self._totals["preemptions"] += 1
        self._report(sequence, [], [], "preempted")
        self._end(sequence)

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        self._end(sequence)
        self._result.outputs.append(_error(sequence.run, code, message))

    # ----------------------------------------------------------------------------------------------------- running a step

    def _decode(self) -> None:
        """A step of all sequences, ahead of the host where that can be."""
        works = self._find_blocks(self._plan())
        if self._plain is not None and self._plain.can_run(works, self._is_guessing):
            self._run_ahead(self._plain, works)
            return
        if self._flights:
            self._land_all()
            works = self._find_blocks(self._plan())
        if works:
            self._run(works)

    @torch.inference_mode()
    def _run(self, works: list[Work]) -> None:
        draft_passes = speculative.draft(works, self.model, self.cache)
        batch = Batch(works)
        batch.run(self.model, self.cache)
        core_passes = draft_passes + batch.core_passes
        self._result.num_rows += len(batch.rows)
        self._result.core_passes += core_passes
        self._totals["core_passes"] += core_passes
        self._totals["exit_head_reads"] += batch.num_head_reads
        drawings = []
        for work, part in batch.parts():
            if isinstance(work, Guess):
                work.take(batch, part)
                drawings.append(Drawing(work, work.draws(), list(range(part.start, part.stop))))
            elif self._take(work, batch, part):
                drawings.append(Drawing(work, [work.sequence.draw()], [part.stop - 1]))
        if drawings:
            logits = batch.logits(self.model, [row for d in drawings for row in d.rows])
            draw(self.model.ops, logits, drawings)
        for drawing in drawings:
            self._hand_out(drawing)

    @torch.inference_mode()
    def _run_ahead(self, plain: PlainDecode, works: list[Work]) -> None:
        """Puts a plain step on the device, then takes the tokens of the oldest one if enough are there."""
        self._flights.append(plain.launch(works, self._flights[-1] if self._flights else None))
        for work in works:
            sequence = work.sequence
            sequence.num_computed = work.end
            if work.end % BLOCK_SIZE == 0:
                self.cache.settle(sequence.slot, work.end)
                self.cache.fold(sequence.slot, work.end)
        if len(self._flights) > STEPS_AHEAD:
            self._land()

    def _land_all(self) -> None:
        while self._flights:
            self._land()

    def _land(self) -> None:
        """Takes the tokens of the oldest flight; those of sequences that have left meanwhile count for nothing."""
        flight = self._flights.pop(0)
        self._result.num_rows += len(flight.sequences)
        self._result.core_passes += flight.core_passes
        self._totals["core_passes"] += flight.core_passes
        running = set(map(id, self._running))
        for sequence, token in zip(flight.sequences, flight.wait(), strict=True):
            sequence.pending -= 1
            if id(sequence) in running:
                sequence.core_loops += sequence.params.loops
                self._append(sequence, token)

    @torch.inference_mode()
    def _ride(self, waves: Waves) -> bool:
        """Lets all that runs go on in waves that need no host, where it can; whether it did."""
        is_few = len(self._running) <= self.options.max_waves
        can_carry = is_few and waves.can_carry(self._running)
        if can_carry and waves.can_go_on(self._running):
            waves.launch()
            self._take_segments(waves.land())
            return True
        self._take_segments(waves.land_all())
        waves.stop(self._running)
        if not can_carry:
            return False
        self._land_all()
        return waves.can_carry(self._running) and waves.start(self._running)

    def _take_segments(self, segments: list[Segment]) -> None:
        """Takes the tokens of segments, but for those of sequences that have left."""
        for segment in segments:
            self._result.num_rows += segment.num_rows
            self._result.core_passes += segment.num_passes
            self._totals["core_passes"] += segment.num_passes
            for sequence, token in segment.tokens:
                if sequence in self._running:
                    sequence.num_computed += 1
                    self.cache.settle(sequence.slot, sequence.num_computed)
                    self._append(sequence, token)

    def _append(self, sequence: Sequence, token: int) -> None:
        """Takes, reports and perhaps ends with a token that the device has chosen."""
        reason = sequence.append(token)
        self._report(sequence, [token], [], reason)
        if reason:
            self._end(sequence)

    def _take(self, work: Work, batch: Batch, part: slice) -> bool:
        """The tokens of a plain work are in the cache; whether the next one is to be drawn."""
        sequence = work.sequence
        sequence.num_computed = work.end
        if work.start < sequence.num_prompt:
            self._totals["prompt_tokens"] += work.end - work.start
            self._score_prompt(work, batch.y[part])
            self._store_prefix(sequence)
        self.cache.settle(sequence.slot, work.end)
        if not sequence.is_prefilling:
            self.cache.fold(sequence.slot, work.end)
        if work.end < len(sequence.tokens) or self._is_complete(sequence):
            return False
        sequence.core_loops += int(batch.computed_loops[part.stop - 1])
        return True

    def _hand_out(self, drawing: Drawing) -> None:
        """Reports a sequence's new tokens, ends it or makes its cache fit them."""
        sequence = drawing.work.sequence
        if drawing.tokens:
            self._report(sequence, drawing.tokens, drawing.logprobs, drawing.reason)
        if drawing.reason:
            self._end(sequence)
        elif isinstance(drawing.work, Guess):
            drawing.work.commit(self.cache, len(drawing.tokens))

    def _is_complete(self, sequence: Sequence) -> bool:
        """Ends a sequence that needs no further token: nothing was asked for, or a replay was already at its end."""
        reason = sequence.finish_reason()
        if reason:
            self._report(sequence, [], [], reason)
            self._end(sequence)
        return bool(reason)

    def _score_prompt(self, work: Work, y: Tensor) -> None:
        """Log-probabilities of the prompt's tokens from the rows before them; the first token has none."""
        sequence, num_top = work.sequence, work.sequence.params.prompt_logprobs
        if num_top < 0:
            return
        if work.start == 0:
            sequence.prompt_logprobs.append(None)
        last = min(work.end, sequence.num_prompt - 1)
        for start in range(work.start, last, HEAD_ROWS):
            end = min(start + HEAD_ROWS, last)
            logits = self.model.logits(y[start - work.start : end - work.start])
            targets = sequence.tokens[start + 1 : end + 1]
            sequence.prompt_logprobs += sampler.log_probabilities(
                self.model.ops, logits, targets, [num_top] * len(targets)
            )

    def _store_prefix(self, sequence: Sequence) -> None:
        """Keeps the blocks that the run asked to keep, once the whole prompt is computed."""
        store = sequence.run.store
        if store is None or sequence.is_prefilling:
            return
        length = len(store.tokens) // BLOCK_SIZE * BLOCK_SIZE
        if (
            length == 0
            or length > sequence.num_prompt
            or store.tokens[:length] != sequence.run.prompt[:length]
        ):
            return
        blocks = self.cache.hold(sequence.slot, length)
        key = replace(store.key, loops=sequence.params.loops)
        held = replace(
            store,
            key=key,
            tokens=Tokens(store.tokens[:length]),
            num_blocks=blocks.size,
            num_bytes=blocks.size * self.cache.block_bytes,
        )
        self.prefixes.keep(held, blocks)
        self._result.held_prefixes.append(held)

    # --------------------------------------------------------------------------------------------------- ends and reports

    def _report(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprob], reason: str
    ) -> None:
        self._totals["tokens"] += len(tokens)
        self._totals["core_loops"] += sequence.core_loops
        self._totals["drafted_tokens"] += sequence.drafted_tokens
        self._totals["accepted_tokens"] += sequence.accepted_tokens
        self._totals["speculation_rounds"] += sequence.rounds
        self._result.outputs.append(
            SequenceOutput(
                sequence.run.sequence_id,
                sequence.run.attempt,
                sequence.num_generated - len(tokens),
                Tokens(tokens),
                tuple(logprobs),
                tuple(sequence.prompt_logprobs),
                reason,
                cached_tokens=sequence.cached_tokens,
                core_loops=sequence.core_loops,
                drafted_tokens=sequence.drafted_tokens,
                accepted_tokens=sequence.accepted_tokens,
                rounds=sequence.rounds,
            )
        )
        sequence.prompt_logprobs = []
        sequence.cached_tokens = sequence.core_loops = 0
        sequence.drafted_tokens = sequence.accepted_tokens = sequence.rounds = 0

    def _end(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.cache.close(sequence.slot)

    def _max_positions(self, sequence: Sequence) -> int:
        return sequence.num_prompt + sequence.params.max_tokens


def _model_kind(config: ModelConfig, options: EngineOptions) -> type[Model]:
    if not options.is_graphed:
        return Model
    return fused_kind(config, options.kv_format) if options.device == "cuda" else GraphedModel


def _error(run: Run, code: str, message: str) -> SequenceOutput:
    return SequenceOutput(
        run.sequence_id,
        run.attempt,
        len(run.emitted),
        Tokens(),
        finish_reason="error",
        error_code=code,
        error_message=message,
    )
