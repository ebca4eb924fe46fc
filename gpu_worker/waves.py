"""Pipelined self-speculation without the host: segments of waves run on the device one after the other, and the host reads what they did.

The same waves as `speculative.Wave`: a segment is `draft_loops` core passes of all rows in flight, after which every row's word checks
its guess. What follows from the words is decided on the device (`kernels.wave`), so the next segment needs nothing from the
host; some segments are always queued. Each leaves a record in memory that the host reads once the segment has ended. Segments
that turn out to lie beyond a sequence's end have run for nobody: they write only to its own blocks, before anyone else can.

Waves go on while the same sequences run and nothing is asked of the host between two tokens. Then all records are read, and the
sequences stand where plain decoding would have left them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_worker.exits import has_exit
from gpu_worker.graphed_model import GraphedModel
from gpu_worker.kv_cache import KVCache
from gpu_worker.plain_decode import choices_of
from gpu_worker.rows import Rows
from gpu_worker.sequence import Sequence
from gpu_worker.speculative import MAX_NODES
from kernels import wave
from kernels.layout import NUM_RECORDS, WAVE_WORDS

DEPTH = 3  # segments that are queued on the device


@dataclass(slots=True)
class Segment:
    """What a segment did; `tokens` are those of roots that reached their full depth, with their sequences."""

    num_rows: int = 0
    num_passes: int = 0
    tokens: list[tuple[Sequence, int]] = field(default_factory=list)


class Waves:
    """Runs waves of sequences of a model that is bound to its cache; the engine takes their tokens.

    `has_chains`: also of sequences that asked for chains of guesses, where the host's own chains do not pay.
    """

    def __init__(self, model: GraphedModel, cache: KVCache, *, has_chains: bool = False) -> None:
        assert model.graphs is not None, "a model without buffers"
        self._model, self._graphs, self._cache = model, model.graphs, cache
        self._kinds = ("pipelined", "chain") if has_chains else ("pipelined",)
        self._is_able = self._graphs.has_segments and not (cache.is_folding or model.stays_in_block)
        self._records = self._graphs.waves.records.numpy()
        self._group: list[Sequence] = []
        self._num_rows = self._num_passes = 0  # of a wave, of a segment
        self._num_launched = 0
        self._flights: deque[torch.cuda.Event | None] = deque()

    def can_carry(self, running: Ordered[Sequence]) -> bool:
        """Whether all that runs could go on in waves, as far as the requests are concerned."""
        if not (self._is_able and running and all(map(self._is_wave, running))):
            return False
        num_rows = max(map(_rows_of, running)) * len(running)
        is_even = len({s.params.draft_loops for s in running}) == 1
        return is_even and num_rows <= self._graphs.max_rows

    def can_go_on(self, running: Ordered[Sequence]) -> bool:
        """Whether the waves under way are just those of `running`, and there are blocks for more segments."""
        is_same = [*map(id, self._group)] == [*map(id, running)]
        return is_same and self._find_blocks(running)

    def start(self, running: Ordered[Sequence]) -> bool:
        """Begins a wave at the last token of each of these sequences; False if there are no blocks to guess in."""
        assert not self._flights, "waves are under way"
        self._num_rows = max(map(_rows_of, running))
        self._num_passes = running[0].params.draft_loops
        if not self._find_blocks(running):
            return False
        self._group, self._num_launched = list(running), 0
        self._graphs.load(self._root_rows())
        rowed = [s for s in running for _ in range(self._num_rows)]
        self._graphs.set_choices(choices_of(self._model.ops, rowed))
        self._graphs.start_waves(torch.from_numpy(self._states()))
        for sequence in running:
            sequence.flight = []
            sequence.rounds += 1
        self.launch()
        return True

    def launch(self) -> None:
        """Fills the device's queue."""
        while len(self._flights) < DEPTH:
            self._cache.block_tables  # noqa: B018 (brings the device's tables up to date)
            self._graphs.segment(len(self._group), self._num_rows, self._num_passes)
            has_ended = None
            if self._model.device.type == "cuda":
                has_ended = torch.cuda.Event()
                has_ended.record()
            self._flights.append(has_ended)
            self._num_launched += 1

    def land(self) -> list[Segment]:
        """What the oldest segment did, for which it waits, and those after it that have ended as well."""
        found = [self._land_one()]
        while self._flights and self._flights[0] is not None and self._flights[0].query():
            found.append(self._land_one())
        return found

    def land_all(self) -> list[Segment]:
        """What all segments did that are under way."""
        return [self._land_one() for _ in range(len(self._flights))]

    def stop(self, running: Ordered[Sequence]) -> None:
        """The waves have landed: those of their sequences that still run give back what they do not need for their tokens."""
        for sequence in self._group:
            if any(sequence is other for other in running):
                self._cache.truncate(sequence.slot, len(sequence.tokens))
        self._group = []

    def _land_one(self) -> Segment:
        has_ended = self._flights.popleft()
        if has_ended is not None:
            has_ended.synchronize()
        turn = (self._num_launched - len(self._flights) - 1) % NUM_RECORDS
        segment = Segment(num_passes=self._num_passes)
        records = self._records[turn, : len(self._group)].tolist()
        for sequence, record in zip(self._group, records, strict=True):
            is_committed, token, is_accepted, drafted, num_rows, *_ = record
            segment.num_rows += num_rows
            sequence.core_loops += num_rows * self._num_passes
            sequence.drafted_tokens += drafted
            if is_committed:
                sequence.accepted_tokens += is_accepted
                sequence.rounds += not is_accepted
                segment.tokens.append((sequence, token))
        return segment

    def _is_wave(self, sequence: Sequence) -> bool:
        """Whether a sequence asked for waves, has nothing to say between two tokens, and goes on with one token."""
        params, start = sequence.params, sequence.num_computed
        return (
            params.speculation in self._kinds
            and params.loops % params.draft_loops == 0
            and _rows_of(sequence) <= wave.MAX_ROWS
            and sequence.num_prompt <= start == sequence.num_known - 1
            and params.logprobs < 0
            and params.init_seed is None
            and not (params.warm_start or has_exit(params))
            and not sequence.sampling.is_shaping(sequence.num_generated + sequence.pending)
            and not sequence.finish_reason()
        )

    def _find_blocks(self, sequences: Ordered[Sequence]) -> bool:
        """Makes room for all that the queued segments may write; takes free blocks alone."""
        for sequence in sequences:
            reach = min(len(sequence.tokens) + DEPTH + self._num_rows, _end_of(sequence) - 1)
            if not self._cache.covers(sequence.slot, reach):
                if self._cache.num_missing(sequence.slot, reach) > self._cache.pool.num_free:
                    return False
                self._cache.extend(sequence.slot, reach)
        return True

    def _root_rows(self) -> Rows:
        """The first row of each wave is its root's, the others are spare."""
        rows = Rows.empty(len(self._group) * self._num_rows)
        rows.slots[:] = self._cache.spare_slot
        roots = slice(None, None, self._num_rows)
        rows.slots[roots] = [s.slot for s in self._group]
        rows.tokens[roots] = [s.tokens[-1] for s in self._group]
        rows.positions[roots] = rows.places[roots] = [s.num_computed for s in self._group]
        rows.windows[roots] = [s.params.cache_window for s in self._group]
        return rows

    def _states(self) -> NDArray[np.int32]:
        """The waves' words (see `kernels.wave`); those beyond the group's have no nodes."""
        count = self._graphs.bucket(len(self._group) * self._num_rows) // self._num_rows
        states = np.zeros((count, WAVE_WORDS), dtype=np.int32)
        states[:, wave.SPARE] = self._cache.spare_slot
        for state, sequence in zip(states, self._group, strict=False):
            params = sequence.params
            state[wave.ROOT] = state[wave.BASE] = sequence.num_computed
            state[wave.COUNT] = 1
            state[wave.LOOPS] = params.loops
            state[wave.AHEAD] = params.draft_ahead or MAX_NODES
            state[wave.END] = _end_of(sequence)
            state[wave.SLOT] = sequence.slot
            state[wave.TABLE] = self._cache.num_extra_tables
            state[wave.WINDOW] = params.cache_window
            state[wave.SEED : wave.SEED + 2] = np.array(
                [sequence.sampling.seed_key], dtype=np.uint64
            ).view(np.int32)
        return states


def _rows_of(sequence: Sequence) -> int:
    """The rows of its wave: at most so many nodes are in flight, as each is at another depth; a power of 2."""
    params = sequence.params
    guesses = params.draft_ahead or MAX_NODES
    nodes = min(params.loops // params.draft_loops, guesses + 1)
    return 1 << (nodes - 1).bit_length()


def _end_of(sequence: Sequence) -> int:
    """The number of tokens at which it ends at the latest."""
    return sequence.num_prompt + sequence.params.max_tokens
