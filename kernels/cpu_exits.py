"""How much a row changed from one loop to the next, on the CPU: what adaptive exits compare with their thresholds.

Each row is reduced alone, in ascending order and double precision, so the number does not depend on the batch. Called by
`gpu_worker.exits` through `kernels.cpu`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu_intrinsics import exp


@njit(nogil=True, cache=True)
def relative_change(low, high, before, after, out):  # type: ignore[no-untyped-def]
    for r in range(low, high):
        moved, size = 0.0, 0.0
        for i in range(after.shape[1]):
            step, value = np.float64(after[r, i]) - before[r, i], np.float64(after[r, i])
            moved += step * step
            size += value * value
        out[r] = np.sqrt(moved / size) if size > 0.0 else np.inf


@njit(nogil=True, cache=True)
def divergence(low, high, before, after, out):  # type: ignore[no-untyped-def]
    for r in range(low, high):
        top_p, top_q = before[r].max(), after[r].max()
        total_p, total_q, weighted = 0.0, 0.0, 0.0
        for i in range(after.shape[1]):
            p = exp(before[r, i] - top_p)
            total_p += p
            total_q += exp(after[r, i] - top_q)
            weighted += p * ((np.float64(before[r, i]) - top_p) - (np.float64(after[r, i]) - top_q))
        out[r] = max(weighted / total_p - np.log(total_p) + np.log(total_q), 0.0)
