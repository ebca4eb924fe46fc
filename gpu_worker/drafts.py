"""What speculation keeps of a sequence between steps: guessed tokens in flight, and how far ahead guessing pays.

Plain data and arithmetic on counts; runs nothing and knows no cache. `speculative.py` fills it, a `Sequence` holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

MAX_AHEAD = 16  # tokens that the adaptive length drafts at most
_FADE = 0.9  # weight of the comparisons so far, against one more
_PROBE_EVERY = 12  # rounds without a draft after which one is tried


@dataclass(slots=True)
class Node:
    """One token whose row is in flight: the last committed token (the root), or a guess after it.

    Attributes:
        path: the guessed tokens from the root's child to this one; () for the root.
        place: where its K and V go.
        parent: index of the node before it, -1 for the root.
        deviation: how far from the best guesses its path is, the sum of their ranks.
        ends: the sequence would end with this token, so that no row is run for it.
        loop: loops done so far; `state` and `embedded` (d,) are what the next one starts from.
    """

    token: int
    position: int
    place: int
    path: tuple[int, ...] = ()
    parent: int = -1
    deviation: int = 0
    ends: bool = False
    loop: int = 0
    state: Tensor | None = None
    embedded: Tensor | None = None
    children: list[int] = field(default_factory=list)


class Pace:
    """How many tokens to draft, learnt from how often drafts of this sequence held.

    Depends on the sequence's own rounds alone, so a request drafts the same in any company; tokens never depend on it.

    Args:
        draft_loops, loops: core passes of one drafted token, and of the verification.
    """

    def __init__(self, draft_loops: int, loops: int) -> None:
        self._draft_loops, self._loops = draft_loops, loops
        self._hits, self._misses = 3.0, 1.0  # a guess to begin with
        self._idle = 0

    @property
    def hit_rate(self) -> float:
        return self._hits / (self._hits + self._misses)

    def note(self, hits: int, is_missed: bool) -> None:
        """The outcome of a round: so many drafts held, and whether one then failed."""
        for _ in range(hits):
            self._hits, self._misses = self._hits * _FADE + 1, self._misses * _FADE
        if is_missed:
            self._hits, self._misses = self._hits * _FADE, self._misses * _FADE + 1

    def ahead(self) -> int:
        """The length with the most tokens per core pass: a chain of n commits 1 + a + .. + a^n for n draft_loops + loops passes."""
        best, best_rate, tokens, power = 0, 0.0, 0.0, 1.0
        for n in range(MAX_AHEAD + 1):
            tokens += power
            power *= self.hit_rate
            rate = tokens / (n * self._draft_loops + self._loops)
            if rate > best_rate:
                best, best_rate = n, rate
        self._idle = 0 if best else self._idle + 1
        return 1 if self._idle and self._idle % _PROBE_EVERY == 0 else best
