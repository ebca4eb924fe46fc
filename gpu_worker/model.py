"""The looped transformer over rows: weights in their kernels' form, and prelude, core passes, coda and head.

Owns the arithmetic of a step and nothing else: it knows no requests, allocates no blocks and samples nothing. The engine calls
`trunk` (prelude and loops), then `read_out` (coda) and `logits` for the rows that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kernels
from gpu_worker.initial_state import initial_state
from gpu_worker.input_attention import InputAttention
from gpu_worker.kv_cache import KVCache
from gpu_worker.model_config import ModelConfig
from gpu_worker.rows import Rows, on_device
from gpu_worker.weights import Layer, Norm, Weights, pack_weights
from kernels.layout import Packed, Paging

PagingAt = Callable[[int], Paging]  # that of some rows in one of the tables before the loops
# Told (indices of the rows that just ran, their loops, their states before and after); returns which of them leave, or None.
AfterPass = Callable[
    [NDArray[np.intp], NDArray[np.int32], Tensor, Tensor], "NDArray[np.bool_] | None"
]


class Model:
    """A model on one device.

    Attributes:
        can_map_keys: rows may read keys by a map of their own (trees of guesses).

    Args:
        config: the model.
        tensors: its weights by their artifact names, as stored or in fp32.
        device: whose kernels run it.
        keeps_inputs: its cache keeps the attention's inputs instead of K and V.
        is_half: where K and V are made again from inputs, round them and q to fp16.
    """

    can_map_keys = True

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: str = "cpu",
        keeps_inputs: bool = False,
        is_half: bool = False,
    ) -> None:
        self.config = config
        self.arch = config.arch
        self.ops = kernels.backend(device)
        self.device: torch.device = self.ops.DEVICE
        self.weights = self._make_weights(tensors)
        self.has_coda = config.stages.coda > 0
        self._over_inputs = (
            InputAttention(config, tensors, self.weights, self.ops, is_half)
            if keeps_inputs
            else None
        )
        self._gate = (
            None
            if self.weights.exit_weight is None
            else self.ops.pack(self.weights.exit_weight, self.weights.exit_bias)
        )
        self._heads = (self.arch.n_heads, self.arch.n_kv_heads, self.arch.head_dim)

    def _make_weights(self, tensors: Mapping[str, Tensor]) -> Weights:
        return pack_weights(self.config, tensors, self.ops)

    @property
    def stays_in_block(self) -> bool:
        """Whether rows of one sequence in two blocks may not share a pass."""
        return False

    def warm_up(self, loops: int) -> None:
        """Prepares what steps of few rows at that depth use."""

    # ------------------------------------------------------------------------------------------------------- the stages

    def trunk(
        self, rows: Rows, cache: KVCache, after_pass: AfterPass | None = None
    ) -> tuple[Tensor, Tensor]:
        """Embedding, prelude and each row's loops, writing the rows' K and V on the way.

        Returns:
            The state after each row's last loop and the prelude's output, both (n, d). Rows that start at a later loop enter with
            the state and prelude output that `rows` brings. In pass i every row is i loops beyond its first; a row leaves after
            its `last_loop`, or when `after_pass` says so.
        """
        embedded = self._embedded(rows, cache)
        states = self._initial(rows, embedded)
        active = np.arange(len(rows))
        loops = rows.first_loop.copy()
        while len(active):
            is_all = len(active) == len(rows)
            part = rows if is_all else rows.select(active)
            index = None if is_all else self.on_device(active)
            state, inject = (
                (states, embedded) if index is None else (states[index], embedded[index])
            )
            paging = part.paging(cache.num_extra_tables + loops - 1, cache)
            before, state = state, self.core_pass(state, inject, paging, cache)
            if index is None:
                states = state
            else:
                states[index] = state
            stays = loops < part.last_loop
            leaves = after_pass(active, loops, before, state) if after_pass else None
            if leaves is not None:
                stays &= ~leaves
            active, loops = active[stays], loops[stays] + 1
        return states, embedded

    def read_out(self, states: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """States (n, d) through norm and coda, writing the coda's K and V; what `logits` takes."""
        return self.leave(states, rows.paging_at(cache), cache)

    def leave(self, states: Tensor, paging_at: PagingAt, cache: KVCache) -> Tensor:
        """`read_out` of rows that are on the device already."""
        y = states
        if self.config.loop.norm_after_core:
            y = self._apply(self.weights.norm_core, states)
        elif self.has_coda:
            y = states.clone()
        return self._stage(self.weights.coda, y, paging_at, cache, self.config.stages.prelude)

    def logits(self, y: Tensor) -> Tensor:
        """Final norm and head: (n, d) -> (n, vocab)."""
        if not (self.config.loop.norm_each and not self.has_coda):
            y = self._apply(self.weights.norm, y)
        if self.weights.head_proj is not None:
            y = self.ops.linear(y, self.weights.head_proj)
        result: Tensor = self.ops.linear(y, self.weights.head)
        return result

    def final_norm(self, states: Tensor) -> Tensor:
        """The final norm of states (n, d): what the exit gate reads when the loop does not norm them itself."""
        return self._apply(self.weights.norm, states)

    def gate(self, states: Tensor) -> Tensor:
        """The exit gate's logits (n,) of states (n, d) as the loop left them."""
        assert self._gate is not None, "a model without an exit gate"
        normed = states if self.config.loop.norm_each else self.final_norm(states)
        logits: Tensor = self.ops.linear(normed, self._gate)
        return logits[:, 0]

    def carried(self, states: Tensor) -> Tensor:
        """What the next token starts from under warm start: the states themselves, or normed as the artifact says."""
        loop = self.config.loop
        if loop.warm_start == "raw" or loop.norm_each:
            return states
        return self._apply(self.weights.norm_core, states)

    def on_device(self, array: NDArray[Any]) -> Tensor:
        """A host array as a tensor of the model's device."""
        return on_device(array, self.device)

    # ------------------------------------------------------------------------------------------------------------ inside

    def _embedded(self, rows: Rows, cache: KVCache) -> Tensor:
        """The prelude's output for every row: computed for those at loop 1, as brought for the others."""
        if rows.embedded is None:
            return self.enter(*self._ids(rows), rows.paging_at(cache), cache)
        new = np.flatnonzero(rows.first_loop == 1)
        embedded = rows.embedded.clone()
        if len(new):
            part = rows.select(new)
            embedded[self.on_device(new)] = self.enter(
                *self._ids(part), part.paging_at(cache), cache
            )
        return embedded

    def _ids(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return self.on_device(rows.tokens), self.on_device(rows.positions)

    def enter(
        self, tokens: Tensor, positions: Tensor, paging_at: PagingAt, cache: KVCache
    ) -> Tensor:
        """The prelude's output (n, d) of token ids at positions, both (n,), that are on the device already."""
        x = self.weights.embed.rows(tokens)
        if self.weights.embed_proj is not None:
            x = self.ops.linear(x, self.weights.embed_proj)
        if self.arch.embed_scale != 1.0:
            x = x * self.arch.embed_scale
        if self.weights.pos is not None:
            x = x + self.weights.pos[positions]
        return self._stage(self.weights.prelude, x, paging_at, cache, 0)

    def _initial(self, rows: Rows, embedded: Tensor) -> Tensor:
        """The state before each row's first loop."""
        states = self.cold_states(embedded)
        self.put_brought_states(states, rows)
        return states

    def cold_states(self, embedded: Tensor) -> Tensor:
        """What tokens start from that bring nothing: the prelude's output (n, d) or zeros."""
        is_embedded = self.config.loop.state_init.kind == "embed"
        return embedded.clone() if is_embedded else torch.zeros_like(embedded)

    def put_brought_states(self, states: Tensor, rows: Rows) -> None:
        """Overwrites the states (n, d) of rows that have a seed of their own or bring theirs."""
        init = self.config.loop.state_init
        if init.kind == "normal":
            for seed in np.unique(rows.init_seeds[rows.has_init_seed]):
                at = np.flatnonzero(rows.has_init_seed & (rows.init_seeds == seed))
                noise = initial_state(
                    int(seed), rows.positions[at].tolist(), self.arch.d_model, init
                )
                states[self.on_device(at)] = noise.to(self.device)
        if rows.states is not None:
            later = self.on_device(np.flatnonzero((rows.first_loop > 1) | rows.is_warm))
            states[later] = rows.states[later]

    def core_pass(self, state: Tensor, embedded: Tensor, paging: Paging, cache: KVCache) -> Tensor:
        """One pass through the core from states and the prelude's output (n, d), each row in the loop that its table says."""
        if self.weights.inject is not None:
            x: Tensor = self.ops.linear(torch.cat([state, embedded], dim=1), self.weights.inject)
        else:
            x = state + embedded if self.config.loop.inject == "add" else state.clone()
        for layer in self.weights.core:
            x = self._block(layer, x, cache, paging)
        return self._apply(self.weights.norm, x) if self.config.loop.norm_each else x

    def _stage(
        self, layers: list[Layer], x: Tensor, paging_at: PagingAt, cache: KVCache, first: int
    ) -> Tensor:
        """Layers that are the `first`-th and following of the extra tables. Overwrites x."""
        for i, layer in enumerate(layers):
            x = self._block(layer, x, cache, paging_at((first + i) // self.config.stages.core))
        return x

    def _block(self, layer: Layer, x: Tensor, cache: KVCache, paging: Paging) -> Tensor:
        """One transformer block; x may be overwritten."""
        mixed = self._attention(layer, self._apply(layer.norm1, x), cache, paging)
        x = self._join(x, mixed, layer.o, layer.norm2)
        hidden = self.ops.activate(
            self.ops.linear(self._apply(layer.norm3, x), layer.up), self.arch.act
        )
        return self._join(x, hidden, layer.down, layer.norm4)

    def _join(self, x: Tensor, hidden: Tensor, weight: Packed, norm: Norm | None) -> Tensor:
        """x plus the branch that ends with `weight`, with the second norm where the block's kind has it."""
        if self.arch.block == "branch_post":
            assert norm is not None
            return x + self._apply(norm, self.ops.linear(hidden, weight))
        self.ops.linear_add(hidden, weight, x)
        return x if norm is None else self._apply(norm, x)

    def _attention(self, layer: Layer, x: Tensor, cache: KVCache, paging: Paging) -> Tensor:
        """The heads' outputs (n, H Dh) of the normed input x; writes K and V first, so that rows of one pass see each other."""
        if self._over_inputs is not None:
            return self._over_inputs.attend(layer, x, cache, paging)
        qkv = self.ops.linear(x, layer.qkv)
        self.ops.prepare_qkv(
            qkv, self._heads, layer.q_norm, layer.k_norm, self.arch.norm_eps, layer.qk_bias, self.weights.rotary,
            self.arch.pos.pairing == "interleaved", paging.positions,
        )  # fmt: skip
        self.ops.store_kv(qkv, self._heads, cache.paged, layer.index, paging)
        mixed: Tensor = self.ops.attention(
            qkv, self._heads, cache.paged, layer.index, self.weights.slopes, paging
        )
        return mixed

    def _apply(self, norm: Norm, x: Tensor) -> Tensor:
        y: Tensor = self.ops.norm(x, norm.weight, norm.bias, self.arch.norm_eps)
        return y
