"""One sequence while it runs: its tokens, how far its cache reaches, and what is next.

    tokens    |  prompt  |  emitted  |  generated here  |
              0          num_prompt  num_prompt + num_replayed
    computed: K and V of [0, num_computed) are in the cache. A step computes [num_computed, end); the row of the last token gives
    the logits of the next one. Replay and decoding are the same: a token that is known is not drawn.

Owns no blocks and no tensors but what a token carries over to the next.
"""

from __future__ import annotations

from torch import Tensor

from gpu_worker.drafts import Node, Pace
from gpu_worker.sampler import Draw, Sampling
from kernels.layout import BLOCK_SIZE
from scheduler.messages import Run, TokenLogprob


class Sequence:
    """See the module. `slot` is its place in the cache.

    `runs_singly`: generated tokens, and the prompt's last, run one at a time also where they are known, because each needs what
    the one before left behind.
    """

    def __init__(self, run: Run, slot: int, runs_singly: bool = False) -> None:
        self.run = run
        self.params = run.params
        self.slot = slot
        self.runs_singly = runs_singly
        self.carried: Tensor | None = (
            None  # the state (d,) that the next token starts from, under warm start
        )
        self.tokens: list[int] = [*run.prompt, *run.emitted]
        self.num_prompt = len(run.prompt)
        self.num_computed = 0
        self.pending = (
            0  # tokens that the device has chosen, or will have, and the host has not seen
        )
        self.cached_tokens = 0  # of the prompt, from a prefix entry; reported once
        # since the last report: loops run for generated tokens and guesses, and the books of speculation
        self.core_loops = self.drafted_tokens = self.accepted_tokens = self.rounds = 0
        is_paced = run.params.speculation == "pipelined" or not run.params.draft_ahead
        self.pace = Pace(run.params.draft_loops, run.params.loops) if is_paced else None
        self.flight: list[Node] = []  # rows under way between steps, in pipelined speculation
        self.sampling = Sampling(run.params, run.seed, run.prompt)
        for token in run.emitted:
            self.sampling.add(token)
        self.stop_ids = frozenset(run.params.stop_token_ids)
        self.prompt_logprobs: list[TokenLogprob | None] = []

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens so far, those that only the device knows included."""
        return len(self.tokens) + self.pending

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prompt

    def next_end(self, budget: int) -> int:
        """Where this step's rows may end: in the prompt after at most `budget` tokens, else at the next block's start.

        A chunk of the prompt ends at a multiple of BLOCK_SIZE or with the prompt; if the budget reaches neither, there are no rows.
        """
        start = self.num_computed
        if not self.is_prefilling:
            if self.pending and self.num_generated + self.pending >= self.params.max_tokens:
                return start
            if self.runs_singly:
                return min(start + 1, self.num_known)
            return min(self.num_known, (start // BLOCK_SIZE + 1) * BLOCK_SIZE)
        if start + budget >= self.num_prompt:
            return max(self.num_prompt - self.runs_singly, start + 1)
        return max(start, (start + budget) // BLOCK_SIZE * BLOCK_SIZE)

    def draw(self) -> Draw:
        """The draw of the token that follows."""
        return Draw(self.sampling, len(self.tokens), self.num_generated)

    def append(self, token: int) -> str:
        """Takes a generated token; returns the finish reason, "" if it goes on."""
        self.tokens.append(token)
        self.sampling.add(token)
        return self.finish_reason()

    def finish_reason(self) -> str:
        """`stop` or `length` if the tokens so far are all, else ""."""
        if self.num_generated > self.params.min_tokens and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if self.num_generated >= self.params.max_tokens else ""
