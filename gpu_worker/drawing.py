"""From a batch's logits to the next tokens of its sequences: one for a plain work, of a guess as many as the full depth confirms.

Owns the order between choosing, accepting and scoring; the sampler chooses, a `Guess` says what counts, the engine reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu_worker import sampler
from gpu_worker.batch import Work
from gpu_worker.sampler import Draw
from gpu_worker.speculative import Guess
from scheduler.messages import TokenLogprob


@dataclass(slots=True, eq=False)
class Drawing:
    """A work with the draws that its rows are for, one token each; `rows` are theirs in the batch.

    Attributes:
        kept: by index, those of the drawn tokens that come next in the sequence, in order.
        tokens, logprobs: the tokens kept, and their log-probabilities if the request wants them.
        reason: set if the last of them ends the sequence.
    """

    work: Work
    draws: list[Draw]
    rows: list[int]
    kept: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""

    def accept(self, drawn: Sequence[int]) -> None:
        """Appends what counts of the drawn tokens to the sequence, up to one that ends it."""
        order = self.work.follow(drawn) if isinstance(self.work, Guess) else [0]
        for i in order:
            self.kept.append(i)
            self.tokens.append(drawn[i])
            self.reason = self.work.sequence.append(drawn[i])
            if self.reason:
                return


def draw(ops: Any, logits: Tensor, drawings: Sequence[Drawing]) -> None:
    """Draws from logits (n, vocab), one row for each draw in order, and appends to every sequence what counts."""
    drawn = sampler.choose(ops, logits, [draw for d in drawings for draw in d.draws])
    rows, tokens, num_top = [], [], []  # of the kept tokens that are to be scored
    first = 0
    for d in drawings:
        d.accept(drawn[first : first + len(d.draws)])
        if d.work.sequence.params.logprobs >= 0:
            rows += [first + i for i in d.kept]
            tokens += d.tokens
            num_top += [d.work.sequence.params.logprobs] * len(d.kept)
        first += len(d.draws)
    if not rows:
        return
    scored = iter(
        sampler.log_probabilities(
            ops, logits[torch.tensor(rows, device=logits.device)], tokens, num_top
        )
    )
    for d in drawings:
        if d.work.sequence.params.logprobs >= 0:
            d.logprobs = [next(scored) for _ in d.kept]
