"""The random initial state of models that were trained with one: keyed noise, the same on every machine.

Value at (position, channel) depends on `init_seed`, position and channel alone, so a state can be made again for any token at any
time (chunks, replay, prefix hits), in any batch. It is independent of the sampling seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.model_config import StateInit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def initial_state(
    init_seed: int, positions: Sequence[int], d_model: int, init: StateInit
) -> torch.Tensor:
    """Truncated normal noise, fp32 (len(positions), d_model), on the CPU.

    A 64-bit counter (key of seed and position, plus channel) is mixed, its top 23 bits and a half give a uniform u in (0, 1), and the
    inverse of the normal distribution cut at `init.cut` sigmas maps u to the value, all in double precision until the end.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.uint64(init_seed & (1 << 64) - 1) + _GOLDEN)
        rows = _mix(key ^ _mix(np.asarray(positions, dtype=np.uint64) + _GOLDEN))
        bits = _mix(rows[:, None] + (np.arange(1, d_model + 1, dtype=np.uint64) * _GOLDEN)[None, :])
    uniform = ((bits >> np.uint64(41)).astype(np.float64) + 0.5) / (1 << 23)
    cut = torch.special.ndtr(torch.tensor(-init.cut, dtype=torch.float64))
    noise: torch.Tensor = init.std * torch.special.ndtri(
        cut + torch.from_numpy(uniform) * (1 - 2 * cut)
    )
    return noise.float()


def _mix(x: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): each output bit depends on each input bit."""
    x = np.asarray(x, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)
