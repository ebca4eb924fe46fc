"""From logits to tokens: each row's own history shapes its logits, then the kernel chooses with keyed noise.

Owns penalties, biases, banned tokens, noise keys and log-probabilities. Knows nothing of caches or loops. The engine makes one
`Draw` per row that needs a token; the result depends on that draw and its logits alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.rows import on_device
from scheduler.messages import Params, TokenLogprob, Tokens

LEAST_TEMPERATURE = 1e-6  # what is less means 0
_MASK = (1 << 64) - 1


class History:
    """How often each token occurred in a sequence, for the penalties; grows with it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(256, dtype=np.int64)
        self._counts = np.zeros(
            256, dtype=np.float32
        )  # of generated tokens; 0 for those of the prompt alone
        for token in prompt:
            self._at(token)

    def add(self, token: int) -> None:
        """One more generated token."""
        at = self._at(token)
        self._counts[at] += 1  # after `_at`, which may replace the array

    def after(self, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Distinct token ids and their generated counts, `path` included."""
        size = len(self._index)
        ids, counts = self._ids[:size], self._counts[:size]
        if not path:
            return ids, counts
        counted = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        for token in path:
            counted[token] = counted.get(token, 0.0) + 1.0
        return np.fromiter(counted, dtype=np.int64), np.fromiter(counted.values(), dtype=np.float32)

    def _at(self, token: int) -> int:
        size = len(self._index)
        at = self._index.setdefault(token, size)
        if at == size:
            if size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[at] = token
        return at


class Sampling:
    """How one sequence draws its tokens: its parameters in the kernel's form, its seed and its history."""

    def __init__(self, params: Params, seed: int, prompt: Sequence[int]) -> None:
        # With less than that the likeliest token always wins, and logits divided by it might pass the largest float.
        self.temperature = params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0
        self.top_k, self.top_p, self.min_p = params.top_k, params.top_p, params.min_p
        self.num_logprobs = params.logprobs
        self.seed_key = _mix(seed & _MASK)
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.history = History(prompt) if has_penalties else None
        self._bias_ids = np.array([i for i, _ in params.logit_bias], dtype=np.int64)
        self._bias = np.array([b for _, b in params.logit_bias], dtype=np.float32)
        self._min_tokens = params.min_tokens
        self._stop_ids = np.array(
            params.stop_token_ids if params.min_tokens else (), dtype=np.int64
        )

    def add(self, token: int) -> None:
        """Note a generated token."""
        if self.history is not None:
            self.history.add(token)

    def is_shaping(self, num_generated: int) -> bool:
        """Whether `shape` would change anything after that many generated tokens."""
        return (
            self.history is not None or len(self._bias_ids) > 0 or num_generated < self._min_tokens
        )

    def shape(self, logits: Tensor, num_generated: int, path: Sequence[int] = ()) -> None:
        """Penalties, bias and banned stop tokens, in place on one row; `path` are tokens beyond the history."""
        device = logits.device
        if self.history is not None:
            host_ids, host_counts = self.history.after(path)
            ids, counts = on_device(host_ids, device), on_device(host_counts, device)
            z = logits[ids]
            z = torch.where(z > 0, z / self._repetition, z * self._repetition)
            z = z - self._presence * (counts > 0)
            logits[ids] = z - self._frequency * counts
        if len(self._bias_ids):
            logits[on_device(self._bias_ids, device)] += on_device(self._bias, device)
        if num_generated < self._min_tokens:
            logits[on_device(self._stop_ids, device)] = -torch.inf

    def key(self, position: int) -> int:
        """The 64-bit noise key of the token at an absolute position."""
        return _mix(self.seed_key + position)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be chosen: for `position`, after `num_generated` tokens, `path` of which are not in the history yet."""

    sampling: Sampling
    position: int
    num_generated: int
    path: tuple[int, ...] = ()


def choose(ops: Any, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token of each draw from its row of logits (n, vocab), which stay as they are."""
    shaped = [i for i, d in enumerate(draws) if d.sampling.is_shaping(d.num_generated)]
    if shaped:
        logits = logits.clone()
        for i in shaped:
            draws[i].sampling.shape(logits[i], draws[i].num_generated, draws[i].path)
    settings = [d.sampling for d in draws]
    keys = np.array(
        [d.sampling.key(d.position) if d.sampling.temperature > 0 else 0 for d in draws],
        dtype=np.uint64,
    )
    tokens = ops.choose(
        logits,
        torch.tensor([s.temperature for s in settings]),
        torch.tensor([s.top_k for s in settings]),
        torch.tensor([s.top_p for s in settings], dtype=torch.float64),
        torch.tensor([s.min_p for s in settings]),
        torch.from_numpy(keys.view(np.uint32).reshape(-1, 2)),
    )
    chosen: list[int] = tokens.tolist()
    return chosen


def log_probabilities(
    ops: Any, logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """The log-probability of each row's token under the raw logits, with that row's number of alternatives."""
    most = max(num_top, default=0)
    logprobs, top_ids, top_logprobs = ops.log_probabilities(
        logits, torch.tensor(list(tokens), device=logits.device), most
    )
    rows = zip(logprobs.tolist(), top_ids.tolist(), top_logprobs.tolist(), num_top, strict=True)
    return [TokenLogprob(own, Tokens(ids[:n]), tuple(tops[:n])) for own, ids, tops, n in rows]


def _mix(x: int) -> int:
    """A 64-bit hash: the finaliser of splitmix64 after one golden-ratio step."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
