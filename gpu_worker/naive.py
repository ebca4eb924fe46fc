"""The oracle: a looped transformer computed from scratch, in fp32, without cache, batch or kernels, to be obviously right.

It recomputes every token at every loop. The engine is held to it by tests, artifacts carry a few of its logits as their self-check,
and the converters are proven by comparing it with upstream outputs. It shares no code with `model.py`, on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from gpu_worker.initial_state import initial_state
from gpu_worker.model_config import Arch, LinearScaling, Llama3Scaling, ModelConfig

Weights = Mapping[
    str, Tensor
]  # fp32 (int8 weights already dequantised); looked up one by one, so it may load lazily


@dataclass(frozen=True, slots=True)
class Trace:
    """All that a forward computes; the first axis of the lists of loops is loop 1, 2, ...

    Attributes:
        prelude_out: (len, d) what the prelude gives and the loops get injected.
        states: (loops, len, d) the state after each loop (normed if the model norms each loop).
        latents: (loops, len, d) what the coda gets.
        logits: (loops, len, vocab) the readout after each loop.
        gate: (loops, len) the exit gate's lambda, None without a gate.
    """

    prelude_out: Tensor
    states: Tensor
    latents: Tensor
    logits: Tensor
    gate: Tensor | None


@overload
def forward(
    config: ModelConfig, tensors: Weights, tokens: Sequence[int], loops: int, *, init_seed: int | None = None,
    input_state: Tensor | None = None, visible: Tensor | None = None, want: Literal["logits"] = "logits",
) -> Tensor: ...  # fmt: skip


@overload
def forward(
    config: ModelConfig, tensors: Weights, tokens: Sequence[int], loops: int, *, init_seed: int | None = None,
    input_state: Tensor | None = None, visible: Tensor | None = None, want: Literal["all"],
) -> Trace: ...  # fmt: skip


@torch.no_grad()
def forward(
    config: ModelConfig,
    tensors: Weights,
    tokens: Sequence[int],
    loops: int,
    *,
    init_seed: int | None = None,
    input_state: Tensor | None = None,
    visible: Tensor | None = None,
    want: Literal["logits", "all"] = "logits",
) -> Tensor | Trace:
    """Logits of every position of one sequence after `loops` loops.

    Args:
        config: the model.
        tensors: its weights in fp32 by their artifact names.
        tokens: the ids, at positions 0, 1, ...
        loops: how often the core runs, at least 1.
        init_seed: keys the random initial state of models that have one; None starts them from zeros.
        input_state: (len, d) the state before loop 1, as it stands, instead of the model's own.
        visible: (len, len) bool, which keys (columns) a query (row) may read besides being causal; None is all.
        want: `logits` for (len, vocab), `all` for a `Trace` of every loop.
    """
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    model = _Model(config, tensors, causal if visible is None else causal & visible)
    embedded = model.stage("prelude", model.embed(tokens))
    state = _initial(config, embedded, init_seed) if input_state is None else input_state.float()
    states, latents, logits, gates = [], [], [], []
    for loop in range(1, loops + 1):
        state = model.loop(state, embedded)
        if want == "all" or loop == loops:
            latent = model.norm_core(state) if config.loop.norm_after_core else state
            states.append(state)
            latents.append(latent)
            logits.append(model.read_out(latent))
        if want == "all" and config.exit.kind == "gate":
            gates.append(model.gate(state))
    if want == "logits":
        return logits[-1]
    return Trace(
        embedded,
        torch.stack(states),
        torch.stack(latents),
        torch.stack(logits),
        torch.stack(gates) if gates else None,
    )


def exit_distribution(gate: Tensor) -> Tensor:
    """The probability of leaving at each loop, (loops, len), from the gate's lambdas: the last loop takes the remainder."""
    remaining = torch.ones_like(gate[0])
    parts = []
    for lam in gate[:-1]:
        parts.append(lam * remaining)
        remaining = remaining * (1 - lam)
    return torch.stack([*parts, remaining])


def exit_loops(gate: Tensor, threshold: float) -> Tensor:
    """The loop (1 = first) at which each position leaves: the first whose cumulative probability reaches the threshold.

    A threshold of 1 or more is off: every position runs all loops, whatever rounding makes of the sum.
    """
    num_loops = gate.shape[0]
    if threshold >= 1.0:
        return torch.full(gate.shape[1:], num_loops)
    reached = exit_distribution(gate).cumsum(0) >= threshold
    reached[-1] = True
    return reached.int().argmax(0) + 1


def _initial(config: ModelConfig, embedded: Tensor, init_seed: int | None) -> Tensor:
    init = config.loop.state_init
    if init.kind == "embed":
        return embedded
    if init.kind == "normal" and init_seed is not None:
        return initial_state(init_seed, range(embedded.shape[0]), config.arch.d_model, init)
    return torch.zeros_like(embedded)


class _Model:
    """The parts of one forward over one sequence; every method maps (len, ...) to (len, ...)."""

    def __init__(self, config: ModelConfig, weights: Weights, visible: Tensor) -> None:
        self.config = config
        self.arch: Arch = config.arch
        self.w = weights
        self.visible = visible

    def embed(self, tokens: Sequence[int]) -> Tensor:
        x = self.w["embed.weight"][torch.tensor(list(tokens))].float()
        if self.arch.embed_rank:
            x = x @ self.w["embed.proj.weight"].T
        x = x * self.arch.embed_scale
        if self.arch.pos.kind == "learned":
            x = x + self.w["pos.weight"][: len(tokens)]
        return x

    def loop(self, state: Tensor, embedded: Tensor) -> Tensor:
        inject = self.config.loop.inject
        if inject == "add":
            state = state + embedded
        elif inject == "concat":
            state = torch.cat([state, embedded], dim=1) @ self.w["inject.weight"].T
        state = self.stage("core", state)
        return self.norm("norm", state) if self.config.loop.norm_each else state

    def read_out(self, latent: Tensor) -> Tensor:
        y = self.stage("coda", latent)
        if not (self.config.loop.norm_each and self.config.stages.coda == 0):
            y = self.norm("norm", y)
        if not self.arch.tied_head:
            return y @ self.w["head.weight"].T
        if self.arch.embed_rank:
            y = y @ self.w["embed.proj.weight"]
        return y @ self.w["embed.weight"].T

    def norm_core(self, state: Tensor) -> Tensor:
        return self.norm("norm_core" if "norm_core.weight" in self.w else "norm", state)

    def gate(self, state: Tensor) -> Tensor:
        normed = state if self.config.loop.norm_each else self.norm("norm", state)
        return torch.sigmoid(normed @ self.w["exit.weight"][0] + self.w["exit.bias"])

    def stage(self, stage: str, x: Tensor) -> Tensor:
        for i in range(getattr(self.config.stages, stage)):
            x = self.block(f"{stage}.{i}", x)
        return x

    def block(self, at: str, x: Tensor) -> Tensor:
        if self.arch.block == "pre":
            x = x + self.attention(at, self.norm(f"{at}.norm1", x))
            return x + self.mlp(at, self.norm(f"{at}.norm3", x))
        if self.arch.block == "branch_post":
            x = x + self.norm(f"{at}.norm2", self.attention(at, self.norm(f"{at}.norm1", x)))
            return x + self.norm(f"{at}.norm4", self.mlp(at, self.norm(f"{at}.norm3", x)))
        x = self.norm(f"{at}.norm2", x + self.attention(at, self.norm(f"{at}.norm1", x)))
        return self.norm(f"{at}.norm4", x + self.mlp(at, self.norm(f"{at}.norm3", x)))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, eps = self.w[f"{name}.weight"], self.arch.norm_eps
        if self.arch.norm == "rms":
            return _rms(x, eps) * weight
        centred = x - x.mean(-1, keepdim=True)
        return _rms(centred, eps) * weight + self.w[f"{name}.bias"]

    def linear(self, name: str, x: Tensor, has_bias: bool) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if has_bias else y

    def mlp(self, at: str, x: Tensor) -> Tensor:
        up = self.linear(f"{at}.mlp.up", x, self.arch.mlp_bias)
        if self.arch.act == "silu_glu":
            gate = self.linear(f"{at}.mlp.gate", x, self.arch.mlp_bias)
            hidden = gate * torch.sigmoid(gate) * up
        elif self.arch.act == "relu2":
            hidden = up.clamp(min=0) ** 2
        elif self.arch.act == "gelu":
            hidden = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
        else:
            hidden = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        return self.linear(f"{at}.mlp.down", hidden, self.arch.mlp_bias)

    def attention(self, at: str, x: Tensor) -> Tensor:
        arch, length = self.arch, x.shape[0]
        q = self.linear(f"{at}.attn.q", x, arch.q_bias).view(length, arch.n_heads, arch.head_dim)
        k = self.linear(f"{at}.attn.k", x, arch.k_bias).view(length, arch.n_kv_heads, arch.head_dim)
        v = self.linear(f"{at}.attn.v", x, arch.v_bias).view(length, arch.n_kv_heads, arch.head_dim)
        if arch.qk_norm:
            q = _rms(q, arch.norm_eps) * self.w[f"{at}.attn.q_norm.weight"]
            k = _rms(k, arch.norm_eps) * self.w[f"{at}.attn.k_norm.weight"]
        if arch.qk_bias:
            q = q + self.w[f"{at}.attn.qk_bias"][0]
            k = k + self.w[f"{at}.attn.qk_bias"][1]
        if arch.pos.kind == "rope":
            angles = rotary_angles(arch, length)
            q, k = rotate(q, angles, arch.pos.pairing), rotate(k, angles, arch.pos.pairing)
        heads = []
        for head in range(arch.n_heads):
            kv_head = head * arch.n_kv_heads // arch.n_heads
            scores = q[:, head] @ k[:, kv_head].T / math.sqrt(arch.head_dim)
            if arch.pos.kind == "alibi":
                distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
                scores = scores - alibi_slopes(arch.n_heads)[head] * distance
            scores = scores.masked_fill(~self.visible, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, kv_head])
        return self.linear(f"{at}.attn.o", torch.cat(heads, dim=1), arch.o_bias)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotary_angles(arch: Arch, length: int) -> Tensor:
    """Angles (length, head_dim / 2) in fp32, with the model's scaling of frequencies."""
    frequencies = 1.0 / arch.pos.theta ** (
        torch.arange(0, arch.head_dim, 2).float() / arch.head_dim
    )
    scaling = arch.pos.scaling
    if isinstance(scaling, LinearScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        turns = (
            scaling.original_max_pos * frequencies / (2 * math.pi)
        )  # whole turns within the original context
        kept = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        kept = kept.clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    return torch.arange(length).float()[:, None] * frequencies[None, :]


def rotate(x: Tensor, angles: Tensor, pairing: str) -> Tensor:
    """Turns each pair of channels of (len, heads, head_dim) by its position's angle.

    Pair i is channels (i, i + head_dim/2) for `half`, (2i, 2i + 1) for `interleaved`.
    """
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    if pairing == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


def alibi_slopes(num_heads: int) -> list[float]:
    """The slopes of Press et al. 2022: geometric for a power of two, filled up from the next power's odd ones otherwise."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2 ** (-4 * (2 * h + 1) / power) for h in range(num_heads - power)]
