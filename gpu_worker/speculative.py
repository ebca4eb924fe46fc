"""Self-speculation: the model with fewer loops guesses tokens, the full depth decides, and its cache entries are used again.

    chain      draft_ahead tokens at `draft_loops`, one after the other; then all are taken on to the last loop as one batch of rows
    tree       the same with the best `branches` of every guess; each row reads its own path through a position -> place map
    pipelined  a wave: the guess after a token starts when that token has run `draft_loops`, and both go on in the same passes; every
               depth that is read checks the guesses so far, and the deeper word counts

A guess holds if it is the token that the full-depth logits choose with the noise, penalties and biases of its own path. So the tokens are
those of plain decoding, whatever is drafted. What a guess leaves in the cache beyond the committed tokens is written again
before it is read. Owns the rows of guesses and their acceptance; the engine finds blocks, draws and reports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker import sampler
from gpu_worker.batch import Batch, Work
from gpu_worker.drafts import Node
from gpu_worker.exits import has_exit
from gpu_worker.kv_cache import KVCache
from gpu_worker.kv_sizes import is_absorbed
from gpu_worker.model import Model
from gpu_worker.rows import Rows
from gpu_worker.sampler import Draw
from gpu_worker.sequence import Sequence
from kernels.layout import BLOCK_SIZE, NUM_SINKS

LEVEL_WIDTH = 4  # nodes per level of a tree; 8 would be twice the rows for 7 % fewer passes
MAX_NODES = 63  # of a tree beside its root: with it, no more than two blocks


class Guess(Work, ABC):
    """A work whose rows include guessed tokens. The root is the last committed token, the only one not yet in the cache."""

    def __init__(self, sequence: Sequence) -> None:
        end = len(sequence.tokens)
        super().__init__(sequence, end - 1, end)
        self.nodes = [Node(sequence.tokens[-1], end - 1, end - 1)]

    @property
    @abstractmethod
    def reach(self) -> int:
        """Places that the rows may write to are below this."""

    @abstractmethod
    def shrink(self, num_places: int) -> None:
        """Makes do with places below `num_places`, which are more than the root's."""

    @property
    def running(self) -> list[int]:
        """Indices of the nodes that have rows, in their order."""
        return [i for i, node in enumerate(self.nodes) if not node.ends]

    def rows(self) -> Rows:
        return self._rows_of(self.running, [self.sequence.params.loops] * len(self.running))

    def draws(self) -> list[Draw]:
        """The draw after each running node."""
        return [self._draw(self.nodes[i]) for i in self.running]

    def take(self, batch: Batch, part: slice) -> None:
        """Notes what the batch made of the rows."""
        loops = batch.computed_loops[part] - batch.rows.first_loop[part] + 1
        self.sequence.core_loops += int(loops.sum())

    @abstractmethod
    def follow(self, tokens: Ordered[int]) -> list[int]:
        """Given the token drawn after each running node: which of these tokens are the sequence's next, in order, by index."""

    def commit(self, cache: KVCache, num_tokens: int) -> None:
        """The first `num_tokens` rows that counted are final: puts their K and V in order."""
        sequence = self.sequence
        sequence.num_computed += num_tokens
        cache.settle(sequence.slot, sequence.num_computed)
        cache.fold(sequence.slot, sequence.num_computed)

    def _draw(self, node: Node) -> Draw:
        sequence = self.sequence
        num_generated = sequence.num_generated + len(node.path)
        return Draw(sequence.sampling, node.position + 1, num_generated, node.path)

    def _is_last(self, token: int, depth: int) -> bool:
        """Whether the sequence would end with a token that is the `depth`-th after the committed ones."""
        params, num_generated = self.sequence.params, self.sequence.num_generated + depth
        is_stop = num_generated > params.min_tokens and token in self.sequence.stop_ids
        return is_stop or num_generated >= params.max_tokens

    def _rows_of(self, indices: list[int], last_loops: list[int]) -> Rows:
        nodes = [self.nodes[i] for i in indices]
        rows = self.rows_at([n.token for n in nodes], [n.position for n in nodes])
        rows.places[:] = [n.place for n in nodes]
        rows.first_loop[:] = [n.loop + 1 for n in nodes]
        rows.last_loop[:] = last_loops
        brought = next((n for n in nodes if n.loop), None)
        if brought is not None:
            assert brought.state is not None and brought.embedded is not None
            none = torch.zeros_like(brought.state)
            rows.states = torch.stack([none if n.state is None else n.state for n in nodes])
            rows.embedded = torch.stack([none if n.embedded is None else n.embedded for n in nodes])
        return rows


class Round(Guess):
    """Draft, then verify, within one step: a chain (`branches` 1) or a tree.

    Args:
        levels: tokens to draft one after the other.
        branches: guesses after each.
    """

    def __init__(self, sequence: Sequence, levels: int, branches: int) -> None:
        super().__init__(sequence)
        self._branches = branches
        self._widths = self._level_widths(levels, MAX_NODES)
        self._depth = 0
        self._kept = [0]  # the nodes that counted
        self.frontier = [0] if levels else []  # nodes whose next tokens are to be guessed

    @property
    def reach(self) -> int:
        return self.end + sum(self._widths)

    def shrink(self, num_places: int) -> None:
        self._widths = self._level_widths(len(self._widths), num_places - self.end)
        if not self._widths:
            self.frontier = []

    def rows(self) -> Rows:
        if has_exit(self.sequence.params):  # an exit is decided from all loops, from the first on
            for node in self.nodes:
                node.loop = 0
                node.state = node.embedded = None
        return self._with_maps(super().rows(), self.running)

    def frontier_rows(self) -> Rows:
        """The rows that draft, from loop 1 to `draft_loops`."""
        lasts = [self.sequence.params.draft_loops] * len(self.frontier)
        rows = self._rows_of(self.frontier, lasts)
        return self._with_maps(rows, self.frontier)

    def frontier_draws(self) -> list[Draw]:
        return [self._draw(self.nodes[i]) for i in self.frontier]

    @property
    def num_branches(self) -> int:
        return self._branches

    def grow(self, states: Tensor, embedded: Tensor, choices: list[list[int]]) -> None:
        """One more level: `choices` are the best tokens after each node of the frontier, whose rows left (n, d) states."""
        candidates = []
        for i, index in enumerate(self.frontier):
            node = self.nodes[index]
            node.loop, node.state, node.embedded = (
                self.sequence.params.draft_loops,
                states[i],
                embedded[i],
            )
            candidates += [
                (node.deviation + rank, index, token) for rank, token in enumerate(choices[i])
            ]
        candidates.sort(key=lambda candidate: candidate[0])
        self.sequence.core_loops += self.sequence.params.draft_loops * len(self.frontier)
        first = len(self.nodes)
        for deviation, index, token in candidates[: self._widths[self._depth]]:
            parent = self.nodes[index]
            place = self.end + len(self.nodes) - 1
            path = (*parent.path, token)
            ends = self._is_last(token, len(path))
            parent.children.append(len(self.nodes))
            self.nodes.append(Node(token, parent.position + 1, place, path, index, deviation, ends))
        self._depth += 1
        grown = range(first, len(self.nodes))
        self.sequence.drafted_tokens += len(grown)
        is_done = self._depth == len(self._widths)
        self.frontier = [] if is_done else [i for i in grown if not self.nodes[i].ends]

    def follow(self, tokens: Ordered[int]) -> list[int]:
        at_row = {node: row for row, node in enumerate(self.running)}
        node, num_hits = 0, 0
        while True:
            token = tokens[at_row[node]]
            hit = next((c for c in self.nodes[node].children if self.nodes[c].token == token), None)
            if hit is not None:
                num_hits += 1
            if hit is None or self.nodes[hit].ends:
                break
            node = hit
            self._kept.append(node)
        is_missed = hit is None and bool(self.nodes[node].children)
        self.sequence.rounds += 1
        self.sequence.accepted_tokens += num_hits
        if self.sequence.pace is not None:
            self.sequence.pace.note(num_hits, is_missed)
        return [at_row[node] for node in self._kept]

    def commit(self, cache: KVCache, num_tokens: int) -> None:
        for index in self._kept[:num_tokens]:
            node = self.nodes[index]
            if node.place != node.position:
                cache.move_place(self.sequence.slot, node.place, node.position)
        super().commit(cache, num_tokens)
        cache.truncate(self.sequence.slot, len(self.sequence.tokens))

    def _level_widths(self, levels: int, max_nodes: int) -> list[int]:
        """The nodes of each level, at most; as many levels as get any."""
        widths: list[int] = []
        for _ in range(levels):
            room = min(LEVEL_WIDTH, max_nodes - sum(widths))
            if room > 0:
                widths.append(min((widths[-1] if widths else 1) * self._branches, room))
        return widths

    def _with_maps(self, rows: Rows, indices: list[int]) -> Rows:
        """Tells rows of a tree where the keys of their own path lie; those of a chain lie in order."""
        if self._branches == 1:
            return rows
        base = self.start // BLOCK_SIZE * BLOCK_SIZE
        rows.row_map[:] = range(len(indices))
        rows.map_base[:] = base
        rows.maps = np.tile(np.arange(base, base + BLOCK_SIZE, dtype=np.int32), (len(indices), 1))
        for row, index in enumerate(indices):
            while index > 0:
                node = self.nodes[index]
                rows.maps[row, node.position - base] = node.place
                index = node.parent
        return rows


class Wave(Guess):
    """Pipelined: one segment of `draft_loops` for all rows in flight; the sequence keeps them from step to step.

    Node i + 1 guesses what follows node i. After a segment every row is read out: the first one that no longer agrees with its
    successor drops all that came after it, and its word is the next node. At the last loop the root's word is the token. A round
    is a wave that no token of full depth has broken.
    """

    def __init__(self, sequence: Sequence, stays_in_block: bool) -> None:
        super().__init__(sequence)
        self._stays_in_block = stays_in_block
        if sequence.flight:
            self.nodes = sequence.flight
        else:
            sequence.rounds += 1
        sequence.flight = self.nodes

    @property
    def reach(self) -> int:
        return max(node.place for node in self.nodes) + 1

    def shrink(self, num_places: int) -> None:
        del self.nodes[num_places - self.start :]

    def rows(self) -> Rows:
        params, running = self.sequence.params, self.running
        lasts = [min(self.nodes[i].loop + params.draft_loops, params.loops) for i in running]
        return self._rows_of(running, lasts)

    def take(self, batch: Batch, part: slice) -> None:
        super().take(batch, part)
        states, embedded = batch.states[part].clone(), batch.embedded[part].clone()
        for row, i in enumerate(self.running):
            node = self.nodes[i]
            node.loop = int(batch.computed_loops[part.start + row])
            node.state, node.embedded = states[row], embedded[row]

    def follow(self, tokens: Ordered[int]) -> list[int]:
        nodes, sequence = self.nodes, self.sequence
        is_final = nodes[0].loop == sequence.params.loops
        is_held = True  # the root's word is what was guessed
        for i, token in enumerate(tokens):
            if i + 1 < len(nodes) and nodes[i + 1].token == token:
                continue
            del nodes[i + 1 :]
            is_held = i > 0
            if (is_final and i == 0) or self._has_room(i, is_final):
                self._add(token)
                sequence.drafted_tokens += not (is_final and i == 0)
            break
        if not is_final:
            return []
        nodes.pop(0)
        for node in nodes:
            node.path = node.path[1:]
        sequence.accepted_tokens += is_held
        sequence.rounds += not is_held
        return [0]

    def _has_room(self, i: int, is_final: bool) -> bool:
        """Whether a guess may follow node i."""
        if i >= (self.sequence.params.draft_ahead or MAX_NODES):
            return False
        root = self.nodes[0].position + is_final
        is_same_block = (self.nodes[i].position + 1) // BLOCK_SIZE == root // BLOCK_SIZE
        return is_same_block or not self._stays_in_block

    def _add(self, token: int) -> None:
        last = self.nodes[-1]
        path = (*last.path, token)
        at = last.position + 1
        self.nodes.append(Node(token, at, at, path, ends=self._is_last(token, len(path))))


def draft(works: Iterable[Work], model: Model, cache: KVCache) -> int:
    """Lets the rounds among the works guess their tokens, level by level and all together; returns the core passes that it took."""
    rounds = [work for work in works if isinstance(work, Round)]
    passes = 0
    while growing := [r for r in rounds if r.frontier]:
        rows = Rows.join([r.frontier_rows() for r in growing])
        states, embedded = model.trunk(rows, cache)
        logits = model.logits(model.read_out(states, rows, cache))
        draws = [draw for r in growing for draw in r.frontier_draws()]
        counts = [r.num_branches for r in growing for _ in r.frontier]
        choices = _best(model.ops, logits, draws, counts)
        first = 0
        for r in growing:
            part = slice(first, first + len(r.frontier))
            first = part.stop
            r.grow(states[part], embedded[part], choices[part])
        passes += int(rows.last_loop.max())
    return passes


def _best(ops: Any, logits: Tensor, draws: list[Draw], counts: list[int]) -> list[list[int]]:
    """For each draw its first choices: the best token, the best without that, and so on. Overwrites the logits."""
    chosen: list[list[int]] = [[] for _ in draws]
    for k in range(max(counts)):
        at = [i for i, count in enumerate(counts) if count > k]
        tokens = sampler.choose(ops, logits[at], [draws[i] for i in at])
        for i, token in zip(at, tokens, strict=True):
            chosen[i].append(token)
            logits[i, token] = -torch.inf
    return chosen


def with_guesses(works: list[Work], model: Model, cache: KVCache, is_paying: bool) -> list[Work]:
    """The plan of a step with guesses in place of the plain works of sequences that asked for them and are ready.

    A sequence guesses from its second generated token on: the prompt's last row runs as part of the prompt. Waves need company that
    pauses with them after every segment, which plain rows do not: beside others, a pipelined sequence guesses in chains. If it is
    not `is_paying`, nobody guesses and waves under way are dropped.
    """
    ready = [is_paying and _is_ready(work) for work in works]
    if all(ready) and all(w.sequence.params.speculation == "pipelined" for w in works):
        return [Wave(work.sequence, cache.is_folding or model.stays_in_block) for work in works]
    for work in works:
        work.sequence.flight = []
    return [
        _round(work.sequence, model, cache) if is_ready else work
        for work, is_ready in zip(works, ready, strict=True)
    ]


def _is_ready(work: Work) -> bool:
    sequence = work.sequence
    is_next = sequence.num_prompt <= work.start == len(sequence.tokens) - 1
    return sequence.params.speculation != "none" and is_next and not sequence.finish_reason()


def _round(sequence: Sequence, model: Model, cache: KVCache) -> Round:
    params = sequence.params
    is_tree = params.speculation == "tree" and params.branches > 1 and _can_map(model, cache)
    room = BLOCK_SIZE - 1 - sequence.num_computed % BLOCK_SIZE  # to the end of the root's block
    levels = sequence.pace.ahead() if sequence.pace else params.draft_ahead
    levels = min(levels, params.max_tokens - sequence.num_generated - 1)
    if is_tree or cache.is_folding or model.stays_in_block:
        levels = min(levels, room)
    if is_tree and sequence.num_computed < NUM_SINKS:
        levels = 0  # the first keys of a sequence have copies of their own, which places are not moved to
    return Round(sequence, levels, params.branches if is_tree else 1)


def _can_map(model: Model, cache: KVCache) -> bool:
    """Whether rows can read keys by a map: not where K and V are rebuilt, block by block, from inputs. A tree is then a chain."""
    return model.can_map_keys and (cache.form.has_keys or is_absorbed(model.config))
