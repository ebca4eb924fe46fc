"""The noise seed of each sequence of a request: choice `k` of prompt `j` draws with hash(seed, j, k)."""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1


def sequence_seed(seed: int, prompt_index: int, choice: int) -> int:
    """The uint64 seed of one sequence. The first choice of the first prompt keeps the request's own seed (64 low bits)."""
    if prompt_index == 0 and choice == 0:
        return seed & _MASK
    key = b"".join(part.to_bytes(8, "little") for part in (seed & _MASK, prompt_index, choice))
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
