"""Adaptive exit: at which loop each generated token is read out, decided after every pass from what its row just became.

A row is watched if its logits may give a generated token: rows of generated tokens, and the prompt's last one. It is read at the first
loop t >= min_loops, t < loops, at which its criterion holds, else at the last:

    gate    cumulative exit probability >= threshold (1 or more: off); lambda_t = sigmoid(w . s_t + b) of the normed state
    latent  |s_t - s_(t-1)| / |s_t| < threshold, with the state before the first loop as s_0
    kl      KL(p_(t-1) || p_t) < threshold, from the second loop on; p is the whole readout, so each pass reads coda and head

`exit_kv` says what later tokens read at the loops in between. `complete`: the row runs on, so K/V are those of full depth and only
the readout (and the coda) sees the earlier state. `copy`: the row leaves and its K/V of the exit loop stand for all later loops.
Prompt rows always run all loops. Owns the criteria; the model asks it after each pass, the engine reads the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.kv_cache import KVCache
from gpu_worker.model import Model
from gpu_worker.rows import Rows
from scheduler.messages import Params

_KINDS = {"none": 0, "gate": 1, "latent": 2, "kl": 3}
_GATE, _LATENT, _KL = 1, 2, 3


def has_exit(params: Params) -> bool:
    """Whether the parameters can make any token leave early."""
    if params.exit_kind == "none" or params.min_loops >= params.loops:
        return False
    return params.exit_kind != "gate" or params.exit_threshold < 1.0


def is_sequential(params: Params, has_coda: bool) -> bool:
    """Whether each generated token needs the one before to be finished: no two can run side by side, drafted or replayed."""
    return params.warm_start or (params.exit_kind == "kl" and has_coda and has_exit(params))


class Exits:
    """The exits of one step.

    Args:
        params: of each row.
        is_watched: rows whose readout may be early.
        may_leave: of those, the ones that stop computing there (`exit_kv` copy, not of the prompt).

    Attributes:
        computed_loops: (n,) the loop after which each row left.
        is_early: (n,) rows that are read before their last loop.
        num_head_reads: rows whose logits were made to decide.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        rows: Rows,
        params: Ordered[Params],
        is_watched: NDArray[np.bool_],
        may_leave: NDArray[np.bool_],
    ) -> None:
        self._model, self._cache, self._rows = model, cache, rows
        self._kinds = np.array([_KINDS[p.exit_kind] for p in params])
        self._thresholds = np.array([p.exit_threshold for p in params])
        self._min_loops = np.array([p.min_loops for p in params])
        self._watched = is_watched & np.array([has_exit(p) for p in params], dtype=np.bool_)
        self._may_leave = may_leave
        self._staying = np.ones(len(rows))  # probability of not having left, for the gate
        self._logits: Tensor | None = None  # of the pass before, for KL
        self._states: Tensor | None = None  # of the rows read early
        self.computed_loops = rows.last_loop.copy()
        self.is_early = np.zeros(len(rows), dtype=np.bool_)
        self.num_head_reads = 0

    @property
    def is_active(self) -> bool:
        return bool(self._watched.any())

    def read_states(self, final: Tensor) -> Tensor:
        """The state (n, d) that each row is read at, given those after the last loop of each."""
        if self._states is None:
            return final
        is_early = self._model.on_device(self.is_early)[:, None]
        return torch.where(is_early, self._states, final)

    def after_pass(
        self, active: NDArray[np.intp], loops: NDArray[np.int32], before: Tensor, states: Tensor
    ) -> NDArray[np.bool_] | None:
        """The model's hook: which of the rows `active` leave after their loop `loops`."""
        asked = self._watched[active] & (loops < self._rows.last_loop[active])
        if not asked.any():
            return None
        holds = np.zeros(len(active), dtype=np.bool_)
        for kind, criterion in ((_GATE, self._gate), (_LATENT, self._latent), (_KL, self._kl)):
            at = np.flatnonzero(asked & (self._kinds[active] == kind))
            if len(at):
                holds[at] = criterion(active[at], loops[at], before[at], states[at])
        holds &= loops >= self._min_loops[active]
        if not holds.any():
            return None
        return self._exit(active, loops, states, holds)

    def _exit(
        self,
        active: NDArray[np.intp],
        loops: NDArray[np.int32],
        states: Tensor,
        holds: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        if self._states is None:
            self._states = states.new_zeros(len(self._rows), states.shape[1])
        leaving = active[holds]
        self._states[leaving] = states[holds]
        self.is_early[leaving] = True
        self._watched[leaving] = False
        leaves = holds & self._may_leave[active]
        self.computed_loops[active[leaves]] = loops[leaves]
        for row, loop in zip(active[leaves].tolist(), loops[leaves].tolist(), strict=True):
            slot, place = int(self._rows.slots[row]), int(self._rows.places[row])
            self._cache.copy_loop(slot, place, loop, int(self._rows.last_loop[row]))
        return leaves

    def _gate(
        self, rows: NDArray[np.intp], loops: NDArray[np.int32], before: Tensor, states: Tensor
    ) -> NDArray[np.bool_]:
        for row, logit in zip(rows.tolist(), self._model.gate(states).tolist(), strict=True):
            self._staying[row] *= 1.0 - 1.0 / (1.0 + math.exp(-max(logit, -700.0)))
        return np.asarray(1.0 - self._staying[rows] >= self._thresholds[rows])

    def _latent(
        self, rows: NDArray[np.intp], loops: NDArray[np.int32], before: Tensor, states: Tensor
    ) -> NDArray[np.bool_]:
        change = self._model.ops.relative_change(before, states).cpu().numpy()
        return np.asarray(change < self._thresholds[rows])

    def _kl(
        self, rows: NDArray[np.intp], loops: NDArray[np.int32], before: Tensor, states: Tensor
    ) -> NDArray[np.bool_]:
        holds = np.zeros(len(rows), dtype=np.bool_)
        reads = np.flatnonzero(
            loops >= self._min_loops[rows] - 1
        )  # one before gives the comparison
        if not len(reads):
            return holds
        part = rows[reads]
        y = self._model.read_out(states[reads], self._rows.select(part), self._cache)
        logits = self._model.logits(y)
        self.num_head_reads += len(part)
        if self._logits is None:
            self._logits = logits.new_empty(len(self._rows), logits.shape[1])
        compared = loops[reads] > np.maximum(self._min_loops[part] - 1, 1)
        divergence = self._model.ops.divergence(self._logits[part], logits).cpu().numpy()
        holds[reads] = compared & (divergence < self._thresholds[part])
        self._logits[part] = logits
        return holds
