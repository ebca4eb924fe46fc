"""One batch: the rows of a step's works, and what the model makes of them.

A work is a run of one sequence's tokens. Owns the order of the rows; knows no blocks, no sampling and no reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker import sequence as sequences
from gpu_worker.exits import Exits, has_exit
from gpu_worker.kv_cache import KVCache
from gpu_worker.model import Model
from gpu_worker.rows import Rows


@dataclass(slots=True)
class Work:
    """A sequence's rows of a step: tokens [start, end), from loop 1 to the sequence's last."""

    sequence: sequences.Sequence
    start: int
    end: int

    @property
    def reach(self) -> int:
        """Places that the rows write to are below this."""
        return self.end

    def rows(self) -> Rows:
        """One row per token, at its own position and place."""
        sequence = self.sequence
        rows = self.rows_at(
            sequence.tokens[self.start : self.end], list(range(self.start, self.end))
        )
        if sequence.params.warm_start and self.start >= sequence.num_prompt:
            assert sequence.carried is not None and len(rows) == 1
            rows.is_warm[:] = True
            rows.states = sequence.carried[None]
        return rows

    def rows_at(self, tokens: list[int], positions: list[int]) -> Rows:
        """Rows of the sequence for tokens at these positions, which are their places too."""
        params = self.sequence.params
        rows = Rows.empty(len(tokens))
        rows.tokens[:] = tokens
        rows.slots[:] = self.sequence.slot
        rows.positions[:] = rows.places[:] = positions
        rows.last_loop[:] = params.loops
        rows.is_prompt[:] = rows.positions < self.sequence.num_prompt
        rows.windows[:] = params.cache_window
        if params.init_seed is not None:
            rows.has_init_seed[:] = True
            rows.init_seeds[:] = params.init_seed & (1 << 64) - 1
        return rows


class Batch:
    """Works that run together.

    Attributes:
        rows: all rows, work by work.
        states: (n, d) after the loop that each row is read at.
        embedded: (n, d) the prelude's output.
        y: (n, d) what `Model.logits` takes.
        computed_loops: (n,) the loop after which each row left.
        num_head_reads: rows whose logits were made to decide on exits.
    """

    states: Tensor
    embedded: Tensor
    y: Tensor
    computed_loops: NDArray[np.int32]
    num_head_reads = 0

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        parts = [work.rows() for work in works]
        self.rows = Rows.join(parts)
        self._bounds = np.cumsum([0] + [len(part) for part in parts]).tolist()

    def run(self, model: Model, cache: KVCache) -> None:
        """Runs all rows through the model, those with adaptive exits to where they leave."""
        exits = self._exits(model, cache)
        final, self.embedded = model.trunk(
            self.rows, cache, exits.after_pass if exits is not None else None
        )
        self.states, self.computed_loops = final, self.rows.last_loop
        if exits is not None:
            self.states, self.computed_loops = exits.read_states(final), exits.computed_loops
            self.num_head_reads = exits.num_head_reads
        self._carry(model)
        if exits is None or not model.has_coda:
            self.y = model.read_out(self.states, self.rows, cache)
        else:
            self._read_out_twice(model, cache, final, exits.is_early & self._is_prompt())

    def _exits(self, model: Model, cache: KVCache) -> Exits | None:
        if not any(has_exit(work.sequence.params) for work in self.works):
            return None
        params = [
            work.sequence.params for work, part in self.parts() for _ in range(len(self.rows))[part]
        ]
        is_prompt = self._is_prompt()
        is_last = np.zeros(len(self.rows), dtype=np.bool_)
        for work, part in self.parts():
            is_last[part.stop - 1] = work.end == work.sequence.num_prompt
        may_leave = ~is_prompt & np.array([p.exit_kv == "copy" for p in params])
        exits = Exits(model, cache, self.rows, params, ~is_prompt | is_last, may_leave)
        return exits if exits.is_active else None

    def _is_prompt(self) -> NDArray[np.bool_]:
        is_prompt = np.zeros(len(self.rows), dtype=np.bool_)
        for work, part in self.parts():
            is_prompt[part] = work.start < work.sequence.num_prompt
        return is_prompt

    def _carry(self, model: Model) -> None:
        """Keeps what the next token of each warm sequence starts from."""
        warm = [(w.sequence, p.stop - 1) for w, p in self.parts() if w.sequence.params.warm_start]
        if warm:
            carried = model.carried(self.states[[row for _, row in warm]])
            for (sequence, _), state in zip(warm, carried, strict=True):
                sequence.carried = state

    def _read_out_twice(
        self, model: Model, cache: KVCache, final: Tensor, is_early_prompt: NDArray[np.bool_]
    ) -> None:
        """The readout where prompt rows are read early: what the coda keeps of a prompt is always that of full depth."""
        states = self.states.clone()
        early = np.flatnonzero(is_early_prompt)
        at = model.on_device(early)
        states[at] = final[at]
        self.y = model.read_out(states, self.rows, cache)
        if len(early):
            part = self.rows.select(early)
            self.y[at] = model.read_out(self.states[at], part, cache)
            model.read_out(final[at], part, cache)

    def parts(self) -> Iterator[tuple[Work, slice]]:
        """Each work with its rows."""
        for work, first, last in zip(self.works, self._bounds, self._bounds[1:], strict=False):
            yield work, slice(first, last)

    def logits(self, model: Model, rows: Sequence[int]) -> Tensor:
        """Logits (len(rows), vocab) of some of the rows."""
        return model.logits(self.y[model.on_device(np.array(rows))])

    @property
    def core_passes(self) -> int:
        """How often the core's weights are read."""
        return int((self.computed_loops - self.rows.first_loop).max()) + 1
