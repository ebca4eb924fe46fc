"""Plain decoding, ahead of the host: a step is put on the device before the tokens of those before have come back.

A row whose token is not known to the host takes it from the device, where the step before chose it. So the device does not wait for the
host, which reads each step's tokens while the next ones run and may be late by STEPS_AHEAD steps less its own work. A sequence that turns
out to have ended has as many rows too many in flight, whose tokens nobody takes and whose K and V nobody reads.

For sequences that need nothing from the host between two tokens; the engine runs all others step by step.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch import Work
from gpu_worker.exits import has_exit
from gpu_worker.graphed_model import GraphedModel
from gpu_worker.rows import Rows
from gpu_worker.sequence import Sequence

STEPS_AHEAD = 2


@dataclass(slots=True)
class Flight:
    """A step on the device: its sequences by row, and where their tokens come back."""

    sequences: list[Sequence]
    core_passes: int
    tokens: Tensor
    has_arrived: torch.cuda.Event | None

    @property
    def has_ended(self) -> bool:
        """Whether the device has done it: if nothing was put behind it, the device has nothing to do."""
        return self.has_arrived is not None and self.has_arrived.query()

    def wait(self) -> list[int]:
        """The chosen token of each row; waits for the device."""
        if self.has_arrived is not None:
            self.has_arrived.synchronize()
        found: list[int] = self.tokens[: len(self.sequences)].tolist()
        return found


class PlainDecode:
    """Launches plain steps of a model that is bound to its cache.

    Attributes:
        num_late: steps launched after the one before had ended: the device had to wait for the host.
    """

    def __init__(self, model: GraphedModel) -> None:
        assert model.graphs is not None, "a model without buffers"
        self._model, self._graphs = model, model.graphs
        self.num_late = 0
        is_on_gpu = model.device.type == "cuda"
        self._landings = [
            torch.zeros(self._graphs.max_rows, dtype=torch.int32, pin_memory=is_on_gpu)
            for _ in range(STEPS_AHEAD + 1)
        ]

    def can_run(self, works: Ordered[Work], is_guessing: bool) -> bool:
        """Whether all of these works are plain, and no more than fit one step."""
        return 0 < len(works) <= self._graphs.max_rows and all(
            _is_plain(work, is_guessing) for work in works
        )

    def launch(self, works: Ordered[Work], before: Flight | None) -> Flight:
        """Puts one token of each work on the device; `before` is the youngest flight that is still under way."""
        sequences = [work.sequence for work in works]
        at_row = {} if before is None else {id(s): r for r, s in enumerate(before.sequences)}
        sources = np.array([at_row[id(s)] if s.pending else -1 for s in sequences], dtype=np.int32)
        rows = _rows(works)
        graphs, count = self._graphs, len(works)
        graphs.load(rows, sources)
        graphs.set_choices(choices_of(self._model.ops, sequences))
        loops = rows.last_loop
        deepest = int(loops.max())
        if deepest == loops.min() and not rows.has_init_seed.any():
            graphs.step(count, deepest)
        else:
            graphs.enter(count)
            self._model.put_brought_states(graphs.states[:count], rows)
            graphs.descend(count, deepest)
            graphs.finish(count)
        self.num_late += before is not None and before.has_ended
        for sequence in sequences:
            sequence.pending += 1
        return self._land(sequences, deepest)

    def _land(self, sequences: list[Sequence], core_passes: int) -> Flight:
        self._landings.append(self._landings.pop(0))
        landing = self._landings[-1]
        landing.copy_(self._graphs.chosen, non_blocking=True)
        has_arrived = None
        if landing.is_pinned():
            has_arrived = torch.cuda.Event()
            has_arrived.record()
        return Flight(sequences, core_passes, landing, has_arrived)


def choices_of(ops: Any, sequences: Ordered[Sequence]) -> tuple[Tensor, ...]:
    """How the next token of each sequence is chosen, packed for the kernels of `ops`."""
    settings = [s.sampling for s in sequences]
    keys = np.array(
        [s.sampling.key(s.num_known) if s.sampling.temperature > 0 else 0 for s in sequences],
        dtype=np.uint64,
    )
    packed: tuple[Tensor, ...] = ops.pack_choices(
        torch.tensor([s.temperature for s in settings]),
        torch.tensor([s.top_k for s in settings]),
        torch.tensor([s.top_p for s in settings], dtype=torch.float64),
        torch.tensor([s.min_p for s in settings]),
        torch.from_numpy(keys.view(np.uint32).reshape(-1, 2)),
    )
    return packed


def _is_plain(work: Work, is_guessing: bool) -> bool:
    """Whether a work is one generated token whose successor is chosen from its logits alone."""
    sequence, params = work.sequence, work.sequence.params
    return (
        work.start >= sequence.num_prompt
        and work.end == work.start + 1 == sequence.num_known
        and params.logprobs < 0
        and not params.warm_start
        and not has_exit(params)
        and not (is_guessing and params.speculation != "none")
        and not sequence.sampling.is_shaping(sequence.num_generated + sequence.pending)
        and not sequence.finish_reason()
    )


def _rows(works: Ordered[Work]) -> Rows:
    """One row per plain work; its token is 0 where only the device knows it."""
    rows, sequences = Rows.empty(len(works)), [work.sequence for work in works]
    rows.tokens[:] = [0 if s.pending else s.tokens[-1] for s in sequences]
    rows.slots[:] = [s.slot for s in sequences]
    rows.positions[:] = rows.places[:] = [work.start for work in works]
    rows.last_loop[:] = [s.params.loops for s in sequences]
    rows.windows[:] = [s.params.cache_window for s in sequences]
    seeded = [
        (i, s.params.init_seed) for i, s in enumerate(sequences) if s.params.init_seed is not None
    ]
    for i, seed in seeded:
        rows.has_init_seed[i] = True
        rows.init_seeds[i] = seed & (1 << 64) - 1
    return rows
