"""A model's weights in the form its kernels want, made once from the artifact's tensors.

Owns names and packing; knows no rows and no caches. Products that share an input (q, k, v; gate and up) are joined into one. Weights
keep their stored dtype: the kernels read fp16, bf16 and int8 with the same result as if converted to fp32.
HAZARD: the artifact's tensors are a map of its file, and whoever overwrites the file changes them; nothing here may share their memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_worker.model_config import Arch, LinearScaling, Llama3Scaling, ModelConfig
from kernels.layout import Packed


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


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to look up: stored values, with a scale per row if they are int8."""

    data: Tensor
    scale: Tensor | None

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of `ids` in fp32."""
        found = self.data[ids].float()
        return found if self.scale is None else found * self.scale[ids][:, None]


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything. What a model lacks is None."""

    prelude: list[Layer]
    core: list[Layer]
    coda: list[Layer]
    embed: Table
    embed_proj: Packed | None
    pos: Tensor | None
    inject: Packed | None
    norm: Norm
    norm_core: Norm
    head: Packed | None
    head_proj: Packed | None
    exit_weight: Tensor | None
    exit_bias: Tensor | None
    rotary: Tensor | None
    slopes: Tensor | None


def pack_weights(
    config: ModelConfig, tensors: Mapping[str, Tensor], ops: Any, has_products: bool = True
) -> Weights:
    """The weights for the kernels `ops`, from the tensors by their artifact names (as stored with `.scale`s, or in fp32).

    Without `has_products` the layers and the head are left out, for a model that has them in another form.
    """
    return _Packing(config, tensors, ops).everything(has_products)


class _Packing:
    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], ops: Any) -> None:
        self.config, self.arch = config, config.arch
        self.tensors = tensors
        self.ops = ops

    def everything(self, has_products: bool) -> Weights:
        arch, stages = self.arch, self.config.stages
        norm = self.norm("norm")
        assert norm is not None
        has_rank = arch.embed_rank > 0
        return Weights(
            prelude=[self.layer(f"prelude.{i}", i % stages.core) for i in range(stages.prelude)],
            core=[self.layer(f"core.{i}", i) for i in range(stages.core * has_products)],
            coda=[
                self.layer(f"coda.{i}", (stages.prelude + i) % stages.core)
                for i in range(stages.coda)
            ],
            embed=self.table("embed.weight"),
            embed_proj=self.product("embed.proj") if has_rank else None,
            pos=self.matrix("pos.weight") if arch.pos.kind == "learned" else None,
            inject=self.product("inject") if self.config.loop.inject == "concat" else None,
            norm=norm,
            norm_core=self.norm("norm_core") or norm,
            head=self.product("embed" if arch.tied_head else "head") if has_products else None,
            head_proj=(
                self.ops.pack(self.matrix("embed.proj.weight").T.contiguous())
                if has_rank and arch.tied_head
                else None
            ),
            exit_weight=self.vector("exit.weight"),
            exit_bias=self.vector("exit.bias"),
            rotary=rotary_table(arch).to(self.ops.DEVICE) if arch.pos.kind == "rope" else None,
            slopes=alibi_slopes(arch.n_heads).to(self.ops.DEVICE)
            if arch.pos.kind == "alibi"
            else None,
        )

    def layer(self, at: str, index: int) -> Layer:
        norm1, norm3 = self.norm(f"{at}.norm1"), self.norm(f"{at}.norm3")
        assert norm1 is not None and norm3 is not None
        ups = (f"{at}.mlp.gate", f"{at}.mlp.up") if self.arch.is_gated else (f"{at}.mlp.up",)
        return Layer(
            index=index,
            qkv=self.product(*(f"{at}.attn.{x}" for x in "qkv")),
            o=self.product(f"{at}.attn.o"),
            up=self.product(*ups),
            down=self.product(f"{at}.mlp.down"),
            norm1=norm1,
            norm2=self.norm(f"{at}.norm2"),
            norm3=norm3,
            norm4=self.norm(f"{at}.norm4"),
            q_norm=self.vector(f"{at}.attn.q_norm.weight"),
            k_norm=self.vector(f"{at}.attn.k_norm.weight"),
            qk_bias=self.vector(f"{at}.attn.qk_bias"),
        )

    def product(self, *names: str) -> Packed:
        """Several products of one input as one; missing biases are zeros if any has one."""
        weights = [self.stored(f"{name}.weight") for name in names]
        scales = [self.optional(f"{name}.weight.scale") for name in names]
        biases = [self.optional(f"{name}.bias") for name in names]
        bias = scale = None
        if any(b is not None for b in biases):
            parts = [
                w.new_zeros(w.shape[0], dtype=torch.float32) if b is None else b.float()
                for w, b in zip(weights, biases, strict=True)
            ]
            bias = torch.cat(parts)
        if scales[0] is not None:
            scale = torch.cat([s for s in scales if s is not None])
        packed: Packed = self.ops.pack(torch.cat(weights), bias, scale)
        return packed

    def table(self, name: str) -> Table:
        scale = self.optional(f"{name}.scale")
        return Table(self.stored(name).clone(), None if scale is None else scale.clone())

    def matrix(self, name: str) -> Tensor:
        """A stored matrix in fp32."""
        scale = self.optional(f"{name}.scale")
        data = self.stored(name).to(torch.float32, copy=True)
        return data if scale is None else data * scale[:, None]

    def vector(self, name: str) -> Tensor | None:
        tensor = self.optional(name)
        return None if tensor is None else tensor.to(torch.float32, copy=True)

    def stored(self, name: str) -> Tensor:
        """A tensor as it is stored, on the kernels' device."""
        return self.tensors[name].to(self.ops.DEVICE)

    def optional(self, name: str) -> Tensor | None:
        return self.stored(name) if name in self.tensors else None

    def norm(self, name: str) -> Norm | None:
        weight = self.vector(f"{name}.weight")
        return None if weight is None else Norm(weight, self.vector(f"{name}.bias"))


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
