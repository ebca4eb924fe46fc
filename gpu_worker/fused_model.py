"""Models of the usual kind (pre-norm, RMS, SwiGLU) on a GPU, whose generated rows run through fused kernels.

A row belongs to one of two classes, by its token alone: the prompt's rows to the prompt class, generated ones, drafted or replayed, to
the generated class (`FusedGraphs`, `AbsorbedDecode`). Each class gives a row the same bits in any company; both write the same cache.
The prompt class is large library products (`kernels.prompt`) where K and V are cached, and the general kernels where inputs are.
Owns which model can run so, and its weights in the orders of both classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker import absorbed_graphs
from gpu_worker.absorbed_decode import AbsorbedDecode
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


def fused_kind(config: ModelConfig, kv_format: str) -> type[GraphedModel]:
    """The class of a model that its kernels are made for, `GraphedModel` if it is not of the usual kind."""
    if not _is_usual(config):
        return GraphedModel
    is_over_inputs = kv_format in ("h", "h_int4")
    if is_over_inputs and config.arch.pos.kind == "learned":
        try:
            absorbed_graphs.step_kernels(spec_of(config, "fp16"), "int4", 1)
        except ValueError:  # other shapes than the kernels are made for
            return GraphedModel
        return AbsorbedModel
    return FusedModel if kv_format in ("fp16", "int4") else GraphedModel


def _is_usual(config: ModelConfig) -> bool:
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
    fits = arch.head_dim in (32, 64, 96, 128) and arch.d_model % 16 == arch.d_ff % 16 == 0
    return is_usual and is_plain_loop and fits and config.dtype == "fp16" and arch.embed_rank == 0


def spec_of(config: ModelConfig, kv_format: str) -> DecodeSpec:
    """What the fused kernels are made for."""
    arch = config.arch
    return DecodeSpec(
        arch.d_model, arch.n_heads, arch.n_kv_heads, arch.head_dim, arch.d_ff, arch.vocab, config.stages.core,
        config.loop.hard_max, arch.norm_eps, arch.pos.kind == "rope", arch.pos.pairing == "half", kv_format=kv_format,
        has_alibi=arch.pos.kind == "alibi",
    )  # fmt: skip


class ClassedModel(GraphedModel):
    """A model with two classes of rows; takes fp16 weights."""

    can_map_keys = False
    graphs: FusedGraphs | None
    _decode_kind: type[FusedGraphs] = FusedGraphs

    def bind(self, cache: KVCache, max_rows: int) -> None:
        arch = self.arch
        self._angles = self._slopes = None
        if arch.pos.kind == "rope":
            self._angles = rotary_table(arch).to(self.device).permute(1, 2, 0).contiguous()
        if arch.pos.kind == "alibi":
            self._slopes = alibi_slopes(arch.n_heads).to(self.device)
        self.graphs = self._decode_kind(
            self, cache, max_rows, spec_of(self.config, cache.form.kind), self._fused_tensors(), self._angles, self._slopes,
            arch.embed_scale,
        )  # fmt: skip
        self._has_copies = cache.form.has_copies

    def _make_weights(self, tensors: Mapping[str, Tensor]) -> Weights:
        self._embed = tensors["embed.weight"].to(self.device)
        tied = self.arch.tied_head
        self._head = self._embed if tied else tensors["head.weight"].to(self.device)
        self._pos = tensors["pos.weight"].to(self.device) if "pos.weight" in tensors else None
        self._layers = [self._layer(tensors, f"core.{i}") for i in range(self.config.stages.core)]
        self._final_gain = tensors["norm.weight"].to(self.device, torch.float32, copy=True)
        return self._pack(tensors)

    def _pack(self, tensors: Mapping[str, Tensor]) -> Weights:
        """What the prompt class and the ends of the model read."""
        return pack_weights(self.config, tensors, self.ops)

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
        return self._has_copies

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

    def logits(self, y: Tensor) -> Tensor:
        assert self.graphs is not None
        most = self.graphs.max_rows
        if len(y) <= most:
            return self.graphs.read(y)
        parts = [self.graphs.read(y[i : i + most]).clone() for i in range(0, len(y), most)]
        return torch.cat(parts)


class FusedModel(ClassedModel):
    """K and V in the cache; prompts through the prompt class's own kernels."""

    def bind(self, cache: KVCache, max_rows: int) -> None:
        super().bind(cache, max_rows)
        assert isinstance(cache.paged, FragmentCache)
        arch = self.arch
        prompt = PromptSpec(
            arch.d_model, arch.n_heads, arch.n_kv_heads, arch.head_dim, arch.d_ff, arch.norm_eps, arch.pos.kind == "rope",
            arch.pos.pairing == "half", arch.pos.kind == "alibi",
        )  # fmt: skip
        self._prompts = PromptPass(
            prompt, self._layers, cache.paged, cache.block_tables, angles=self._angles, slopes=self._slopes
        )  # fmt: skip

    def _pack(self, tensors: Mapping[str, Tensor]) -> Weights:
        return pack_weights(self.config, tensors, self.ops, has_products=False)

    def core_pass(self, state: Tensor, embedded: Tensor, paging: Paging, cache: KVCache) -> Tensor:
        """One pass of prompt rows."""
        host = HostPaging.of(paging)
        tiles = make_tiles(
            host.slots, host.tables, host.positions, host.windows, kind=self._prompts.cache.kind, device=self.device
        )  # fmt: skip
        return self._prompts.core(state, tiles)


class AbsorbedModel(ClassedModel):
    """The attention's inputs in the cache; prompts through the general kernels."""

    _decode_kind = AbsorbedDecode


def _of_part(after_pass: AfterPass | None, piece: np.ndarray[Any, Any]) -> AfterPass | None:
    if after_pass is None:
        return None
    return lambda active, *others: after_pass(piece[active], *others)
