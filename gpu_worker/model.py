"""The looped transformer over rows: weights in their kernels' form, and prelude, core passes, coda and head.

Owns the arithmetic of a step and nothing else: it knows no requests, allocates no blocks and samples nothing. The engine calls
`trunk` (prelude and loops), then `read_out` (coda) and `logits` for the rows that need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kernels
from gpu_worker.initial_state import initial_state
from gpu_worker.kv_cache import KVCache
from gpu_worker.model_config import Arch, LinearScaling, Llama3Scaling, ModelConfig
from gpu_worker.rows import Rows
from kernels.layout import Packed, Paging

# Told (indices of the rows that just ran, their loops, their new states); returns which of them leave, or None.
AfterPass = Callable[[NDArray[np.intp], NDArray[np.int32], Tensor], "NDArray[np.bool_] | None"]


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights. `norm2`, `norm4` are None for pre-norm blocks."""

    index: int  # which layer of its cache block it writes
    qkv: Packed
    o: Packed
    up: Packed  # gate and up together for gated activations
    down: Packed
    norm1: Norm
    norm2: Norm | None
    norm3: Norm
    norm4: Norm | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    qk_bias: Tensor | None


class Model:
    """A model's weights on one device, and its stages over rows. `core_passes` counts row passes through the core."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], device: str = "cpu"
    ) -> None:
        self.config = config
        self.arch = config.arch
        self.device = device
        self.ops = kernels.backend(device)
        self._tensors = tensors
        stages = config.stages
        self.prelude = [self._layer(f"prelude.{i}", i % stages.core) for i in range(stages.prelude)]
        self.core = [self._layer(f"core.{i}", i) for i in range(stages.core)]
        self.coda = [
            self._layer(f"coda.{i}", (stages.prelude + i) % stages.core) for i in range(stages.coda)
        ]
        self._embed = tensors["embed.weight"].float()
        self._embed_proj = self._pack("embed.proj.weight") if self.arch.embed_rank else None
        self._pos = self._vector("pos.weight")
        self._inject = self._pack("inject.weight") if config.loop.inject == "concat" else None
        norm, norm_core = self._norm("norm"), self._norm("norm_core")
        assert norm is not None
        self._norm_out = norm
        self._norm_core = norm_core or norm
        self.exit_weight, self.exit_bias = self._vector("exit.weight"), self._vector("exit.bias")
        self._head = self.ops.pack(
            tensors["embed.weight" if self.arch.tied_head else "head.weight"].float()
        )
        self._head_proj = None
        if self.arch.tied_head and self.arch.embed_rank:
            self._head_proj = self.ops.pack(tensors["embed.proj.weight"].float().T.contiguous())
        self._rotary = rotary_table(self.arch) if self.arch.pos.kind == "rope" else None
        self._slopes = alibi_slopes(self.arch.n_heads) if self.arch.pos.kind == "alibi" else None
        self._heads = (self.arch.n_heads, self.arch.n_kv_heads, self.arch.head_dim)
        self._tensors = {}

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
        embedded = self._enter(rows, cache)
        states = self._initial(rows, embedded)
        active = np.arange(len(rows))
        loops = rows.first_loop.copy()
        while len(active):
            is_all = len(active) == len(rows)
            part = rows if is_all else rows.select(active)
            index = None if is_all else torch.from_numpy(active)
            state, inject = (
                (states, embedded) if index is None else (states[index], embedded[index])
            )
            state = self._loop(state, inject, part, loops, cache)
            if index is None:
                states = state
            else:
                states[index] = state
            stays = loops < part.last_loop
            leaves = after_pass(active, loops, state) if after_pass else None
            if leaves is not None:
                stays &= ~leaves
            active, loops = active[stays], loops[stays] + 1
        return states, embedded

    def read_out(self, states: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """States (n, d) through norm and coda, writing the coda's K and V; what `logits` takes."""
        y = self._apply(self._norm_core, states) if self.config.loop.norm_after_core else states
        if self.coda:
            y = self._stage(
                self.coda, y.clone() if y is states else y, rows, cache, self.config.stages.prelude
            )
        return y

    def logits(self, y: Tensor) -> Tensor:
        """Final norm and head: (n, d) -> (n, vocab)."""
        if not (self.config.loop.norm_each and not self.coda):
            y = self._apply(self._norm_out, y)
        if self._head_proj is not None:
            y = self.ops.linear(y, self._head_proj)
        result: Tensor = self.ops.linear(y, self._head)
        return result

    def final_norm(self, states: Tensor) -> Tensor:
        """The final norm of states (n, d): what the exit gate reads when the loop does not norm them itself."""
        return self._apply(self._norm_out, states)

    # ------------------------------------------------------------------------------------------------------------ inside

    def _enter(self, rows: Rows, cache: KVCache) -> Tensor:
        """The prelude's output for every row: computed for those at loop 1, as brought for the others."""
        if rows.embedded is None:
            return self._stage(self.prelude, self._embedding(rows), rows, cache, 0)
        new = np.flatnonzero(rows.first_loop == 1)
        embedded = rows.embedded.clone()
        if len(new):
            part = rows.select(new)
            embedded[torch.from_numpy(new)] = self._stage(
                self.prelude, self._embedding(part), part, cache, 0
            )
        return embedded

    def _embedding(self, rows: Rows) -> Tensor:
        x = self._embed[torch.from_numpy(rows.tokens)]
        if self._embed_proj is not None:
            x = self.ops.linear(x, self._embed_proj)
        if self.arch.embed_scale != 1.0:
            x = x * self.arch.embed_scale
        if self._pos is not None:
            x = x + self._pos[torch.from_numpy(rows.positions)]
        return x

    def _initial(self, rows: Rows, embedded: Tensor) -> Tensor:
        """The state before each row's first loop."""
        init = self.config.loop.state_init
        if init.kind == "embed":
            states = embedded.clone()
        else:
            states = torch.zeros_like(embedded)
        if init.kind == "normal":
            for seed in np.unique(rows.init_seeds[rows.has_init_seed]):
                at = np.flatnonzero(rows.has_init_seed & (rows.init_seeds == seed))
                noise = initial_state(
                    int(seed), rows.positions[at].tolist(), self.arch.d_model, init
                )
                states[torch.from_numpy(at)] = noise
        if rows.states is not None:
            later = torch.from_numpy(np.flatnonzero(rows.first_loop > 1))
            states[later] = rows.states[later]
        return states

    def _loop(
        self, state: Tensor, embedded: Tensor, rows: Rows, loops: NDArray[np.int32], cache: KVCache
    ) -> Tensor:
        """One pass through the core, row r in its loop `loops[r]`."""
        if self._inject is not None:
            x: Tensor = self.ops.linear(torch.cat([state, embedded], dim=1), self._inject)
        else:
            x = state + embedded if self.config.loop.inject == "add" else state.clone()
        paging = rows.paging(cache.num_extra_tables + loops - 1, cache.block_tables)
        for layer in self.core:
            x = self._block(layer, x, cache, paging)
        return self._apply(self._norm_out, x) if self.config.loop.norm_each else x

    def _stage(
        self, layers: list[Layer], x: Tensor, rows: Rows, cache: KVCache, first: int
    ) -> Tensor:
        """Prelude or coda; its layers are the `first`-th and following of the extra tables. Overwrites x."""
        for i, layer in enumerate(layers):
            tables = np.full(len(rows), (first + i) // self.config.stages.core, dtype=np.int32)
            x = self._block(layer, x, cache, rows.paging(tables, cache.block_tables))
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
        qkv = self.ops.linear(x, layer.qkv)
        self.ops.prepare_qkv(
            qkv, self._heads, layer.q_norm, layer.k_norm, self.arch.norm_eps, layer.qk_bias, self._rotary,
            self.arch.pos.pairing == "interleaved", paging.positions,
        )  # fmt: skip
        self.ops.store_kv(qkv, self._heads, cache.paged, layer.index, paging)
        mixed: Tensor = self.ops.attention(
            qkv, self._heads, cache.paged, layer.index, self._slopes, paging
        )
        return mixed

    def _apply(self, norm: Norm, x: Tensor) -> Tensor:
        y: Tensor = self.ops.norm(x, norm.weight, norm.bias, self.arch.norm_eps)
        return y

    # ----------------------------------------------------------------------------------------------------------- weights

    def _layer(self, at: str, index: int) -> Layer:
        arch = self.arch
        norms = [self._norm(f"{at}.norm{i}") for i in (1, 2, 3, 4)]
        assert norms[0] is not None and norms[2] is not None
        ups = (f"{at}.mlp.gate", f"{at}.mlp.up") if arch.is_gated else (f"{at}.mlp.up",)
        return Layer(
            index=index,
            qkv=self._pack_joined(*(f"{at}.attn.{x}" for x in "qkv")),
            o=self._pack_joined(f"{at}.attn.o"),
            up=self._pack_joined(*ups),
            down=self._pack_joined(f"{at}.mlp.down"),
            norm1=norms[0],
            norm2=norms[1],
            norm3=norms[2],
            norm4=norms[3],
            q_norm=self._vector(f"{at}.attn.q_norm.weight"),
            k_norm=self._vector(f"{at}.attn.k_norm.weight"),
            qk_bias=self._vector(f"{at}.attn.qk_bias"),
        )

    def _pack(self, name: str) -> Packed:
        packed: Packed = self.ops.pack(self._tensors[name].float())
        return packed

    def _pack_joined(self, *names: str) -> Packed:
        """Several products of one input as one; missing biases are zeros if any has one."""
        weights = [self._tensors[f"{name}.weight"].float() for name in names]
        biases = [self._tensors.get(f"{name}.bias") for name in names]
        bias = None
        if any(b is not None for b in biases):
            parts = [
                torch.zeros(w.shape[0]) if b is None else b.float()
                for w, b in zip(weights, biases, strict=True)
            ]
            bias = torch.cat(parts)
        packed: Packed = self.ops.pack(torch.cat(weights), bias)
        return packed

    def _vector(self, name: str) -> Tensor | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.float().contiguous()

    def _norm(self, name: str) -> Norm | None:
        weight = self._vector(f"{name}.weight")
        return None if weight is None else Norm(weight, self._vector(f"{name}.bias"))


def rotary_table(arch: Arch) -> Tensor:
    """Cosines and sines (2, max_pos, head_dim / 2), fp32."""
    frequencies = arch.pos.theta ** -(torch.arange(0, arch.head_dim, 2).float() / arch.head_dim)
    scaling = arch.pos.scaling
    if isinstance(scaling, LinearScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_pos * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    angles = torch.arange(arch.max_pos).float()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def alibi_slopes(num_heads: int) -> Tensor:
    """The usual geometric slopes: 2^(-8 i / n) for a power of two, else those of the next lower one and every second of the next."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    lower = 1 << (num_heads.bit_length() - 1)
    slopes = powers(lower)
    if lower < num_heads:
        slopes += powers(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor(slopes)
