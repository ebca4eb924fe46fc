"""One batch: the rows of a step's works, and what the model makes of them.

A work is a run of one sequence's tokens. Owns the order of the rows; knows no blocks, no sampling and no reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker import sequence as sequences
from gpu_worker.kv_cache import KVCache
from gpu_worker.model import AfterPass, Model
from gpu_worker.rows import Rows


@dataclass(slots=True)
class Work:
    """A sequence's rows of a step: tokens [start, end), from loop 1 to the sequence's last."""

    sequence: sequences.Sequence
    start: int
    end: int

    def rows(self) -> Rows:
        """One row per token, at its own position and place."""
        sequence, params = self.sequence, self.sequence.params
        rows = Rows.empty(self.end - self.start)
        rows.tokens[:] = sequence.tokens[self.start : self.end]
        rows.slots[:] = sequence.slot
        rows.positions[:] = range(self.start, self.end)
        rows.places[:] = rows.positions
        rows.last_loop[:] = params.loops
        rows.windows[:] = params.cache_window
        if params.init_seed is not None:
            rows.has_init_seed[:] = True
            rows.init_seeds[:] = params.init_seed & (1 << 64) - 1
        return rows


class Batch:
    """Works that run together.

    Attributes:
        rows: all rows, work by work.
        states: (n, d) after each row's last loop.
        embedded: (n, d) the prelude's output.
        y: (n, d) what `Model.logits` takes.
    """

    states: Tensor
    embedded: Tensor
    y: Tensor

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        parts = [work.rows() for work in works]
        self.rows = Rows.join(parts)
        self._bounds = np.cumsum([0] + [len(part) for part in parts]).tolist()

    def run(self, model: Model, cache: KVCache, after_pass: AfterPass | None = None) -> None:
        """Runs all rows through the model."""
        self.states, self.embedded = model.trunk(self.rows, cache, after_pass)
        self.y = model.read_out(self.states, self.rows, cache)

    def parts(self) -> Iterator[tuple[Work, slice]]:
        """Each work with its rows."""
        for work, first, last in zip(self.works, self._bounds, self._bounds[1:], strict=False):
            yield work, slice(first, last)

    def logits(self, model: Model, rows: Sequence[int]) -> Tensor:
        """Logits (len(rows), vocab) of some of the rows."""
        return model.logits(self.y[torch.tensor(rows)])

    @property
    def core_passes(self) -> int:
        """How often the core's weights are read."""
        return int((self.rows.last_loop - self.rows.first_loop).max()) + 1
