"""Models of the usual kind (pre-norm, RMS, SwiGLU) on a GPU: prompt rows as large library products, all others through the fused kernels.

A row belongs to one of two classes, by its token alone: the prompt's rows to the prompt class (`kernels.prompt`), generated ones, drafted
or replayed, to the generated class (`FusedGraphs`). Each class gives a row the same bits in any company; both write the same cache.
Owns which model can run so, and its weights in both orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.fused_graphs import FusedGraphs
from gpu_worker.graphed_model import GraphedModel
from gpu_worker.graphs import DecodeSpec
from gpu_worker.kv_cache import KVCache
from gpu_worker.model import AfterPass
from gpu_worker.model_config import ModelConfig
from gpu_worker.rows import Rows
from gpu_worker.weights import Weights, alibi_slopes, pack_weights, rotary_table
from kernels.layout import FragmentCache, HostPaging, Paging
from kernels.prompt import PromptLayer, PromptPass, PromptSpec
from kernels.prompt_tiles import make_tiles


def is_fusible(config: ModelConfig, kv_format: str) -> bool:
    """Whether a model is of the kind, and its cache in a format that the fused kernels read."""
    arch, loop, stages = config.arch, config.loop, config.stages
    has_biases = any(
        (
            arch.q_bias,
            arch.k_bias,
            arch.v_bias,
            arch.o_bias,
            arch.mlp_bias,
            arch.qk_bias,
            arch.qk_norm,
        )
    )
    is_usual = (arch.block, arch.norm, arch.act) == ("pre", "rms", "silu_glu") and not has_biases
    is_plain_loop = (loop.inject, loop.state_init.kind) == ("none", "embed") and not (
        loop.norm_each or loop.norm_after_core or stages.prelude or stages.coda
    )
    fits = (
        arch.head_dim % 32 == 0
        and arch.head_dim <= 256
        and arch.d_model % 16 == arch.d_ff % 16 == 0
    )
    is_fp16 = config.dtype == "fp16" and arch.embed_rank == 0
    return is_usual and is_plain_loop and fits and is_fp16 and kv_format in ("fp16", "int4")


class FusedModel(GraphedModel):
    """See the module; takes fp16 weights."""

    can_map_keys = False
    graphs: FusedGraphs | None

    def bind(self, cache: KVCache, max_rows: int) -> None:
        assert isinstance(cache.paged, FragmentCache)
        arch, pos = self.arch, self.arch.pos
        is_rotary = pos.kind == "rope"
        angles = None
        if is_rotary:
            angles = rotary_table(arch).to(self.device).permute(1, 2, 0).contiguous()
        slopes = alibi_slopes(arch.n_heads).to(self.device) if pos.kind == "alibi" else None
        spec = DecodeSpec(
            arch.d_model, arch.n_heads, arch.n_kv_heads, arch.head_dim, arch.d_ff, arch.vocab, self.config.stages.core,
            self.config.loop.hard_max, arch.norm_eps, is_rotary, pos.pairing == "half", kv_format=cache.paged.kind,
        )  # fmt: skip
        self.graphs = FusedGraphs(
            self, cache, max_rows, spec, self._fused_tensors(), angles, slopes, arch.embed_scale
        )
        prompt = PromptSpec(
            arch.d_model, arch.n_heads, arch.n_kv_heads, arch.head_dim, arch.d_ff, arch.norm_eps, is_rotary,
            pos.pairing == "half", pos.kind == "alibi",
        )  # fmt: skip
        self._prompts = PromptPass(
            prompt, self._layers, cache.paged, cache.block_tables, angles=angles, slopes=slopes
        )

    def _make_weights(self, tensors: Mapping[str, Tensor]) -> Weights:
        """Joined fp16 matrices for the prompt class; what the general kernels would read in their own order is left out."""
        self._embed = tensors["embed.weight"].to(self.device)
        tied = self.arch.tied_head
        self._head = self._embed if tied else tensors["head.weight"].to(self.device)
        self._pos = tensors["pos.weight"].to(self.device) if "pos.weight" in tensors else None
        self._layers = [self._layer(tensors, f"core.{i}") for i in range(self.config.stages.core)]
        self._final_gain = tensors["norm.weight"].to(self.device, torch.float32, copy=True)
        return pack_weights(self.config, tensors, self.ops, has_products=False)

    def _layer(self, tensors: Mapping[str, Tensor], at: str) -> PromptLayer:
        def matrix(*names: str) -> Tensor:
            parts = [tensors[f"{at}.{name}.weight"].to(self.device) for name in names]
            return torch.cat(parts).half().contiguous()

        def gain(name: str) -> Tensor:
            return tensors[f"{at}.{name}.weight"].to(self.device, torch.float32, copy=True)

        return PromptLayer(
            matrix("attn.q", "attn.k", "attn.v"), matrix("attn.o"), matrix("mlp.gate", "mlp.up"), matrix("mlp.down"),
            gain("norm1"), gain("norm3"),
        )  # fmt: skip

    def _fused_tensors(self) -> dict[str, Tensor]:
        found = {"embed": self._embed.half(), "head": self._head.half(), "norm": self._final_gain}
        if self._pos is not None:
            found["pos"] = self._pos.half()
        for i, layer in enumerate(self._layers):
            for name in ("qkv", "o", "gate_up", "down", "norm1", "norm3"):
                found[f"{i}.{name}"] = getattr(layer, name)
        return found

    # ----------------------------------------------------------------------------------------------------------- running

    @property
    def stays_in_block(self) -> bool:
        """Rows of one sequence in two blocks may not share a pass: with int4 the first block's stored form comes after it."""
        return self._prompts.cache.kind == "int4"

    def trunk(
        self, rows: Rows, cache: KVCache, after_pass: AfterPass | None = None
    ) -> tuple[Tensor, Tensor]:
        assert self.graphs is not None
        if rows.is_prompt.all():
            return super(GraphedModel, self).trunk(rows, cache, after_pass)
        if not rows.is_prompt.any() and len(rows) <= self.graphs.max_rows:
            return super().trunk(rows, cache, after_pass)
        prompt, generated = (np.flatnonzero(which) for which in (rows.is_prompt, ~rows.is_prompt))
        most = self.graphs.max_rows
        pieces = [prompt] * (len(prompt) > 0)
        pieces += [generated[i : i + most] for i in range(0, len(generated), most)]
        states = torch.empty(len(rows), self.arch.d_model, device=self.device)
        embedded = torch.empty_like(states)
        for piece in pieces:
            at = self.on_device(piece)
            found = self.trunk(rows.select(piece), cache, _of_part(after_pass, piece))
            states[at], embedded[at] = found
        return states, embedded

    def core_pass(self, state: Tensor, embedded: Tensor, paging: Paging, cache: KVCache) -> Tensor:
        """One pass of prompt rows."""
        host, count = HostPaging.of(paging), len(state)
        tiles = make_tiles(
            host.slots, host.tables, host.positions, host.windows, kind=self._prompts.cache.kind, device=self.device
        )  # fmt: skip
        x = self._prompts.new_state(count)
        x[:count] = state
        for index in range(len(self._layers)):
            self._prompts.layer(x, count, index, tiles)
        return x[:count]

    def logits(self, y: Tensor) -> Tensor:
        assert self.graphs is not None
        most = self.graphs.max_rows
        if len(y) <= most:
            return self.graphs.read(y)
        parts = [self.graphs.read(y[i : i + most]).clone() for i in range(0, len(y), most)]
        return torch.cat(parts)


def _of_part(after_pass: AfterPass | None, piece: np.ndarray[Any, Any]) -> AfterPass | None:
    if after_pass is None:
        return None
    return lambda active, *others: after_pass(piece[active], *others)
