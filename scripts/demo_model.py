"""The demo model's arithmetic in compact PyTorch, for training and for evaluating an artifact in parallel.

Exactly the format-1 arithmetic for the demo's choices: pre-norm blocks, RMS norm, ALiBi, MHA, gated SiLU, concat
injection, a norm after every loop, factorised tied embeddings. Tensor names are the artifact's.
Used by train_demo.py and eval_demo.py; serving never imports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

BLOCK = 64  # positions of one KV block: the granularity of last-loop sharing

CONFIG: dict[str, Any] = {
    "format": 1,
    "name": "demo",
    "arch": {
        "d_model": 512, "n_heads": 8, "n_kv_heads": 8, "head_dim": 64, "d_ff": 1024, "vocab": 50257, "max_pos": 2048,
        "act": "silu_glu", "norm": "rms", "norm_eps": 1e-6, "block": "pre",
        "pos": {"kind": "alibi", "theta": 10000.0, "pairing": "half", "scaling": None},
        "q_bias": False, "k_bias": False, "v_bias": False, "o_bias": False, "mlp_bias": False,
        "qk_bias": False, "qk_norm": False, "embed_scale": 32.0, "embed_rank": 128, "tied_head": True,
    },
    "stages": {"prelude": 1, "core": 4, "coda": 1},
    "loop": {
        "default": 8, "trained_max": 8, "hard_max": 16, "inject": "concat",
        "state_init": {"kind": "zeros", "std": 0.0, "cut": 3.0},
        "norm_each": True, "norm_after_core": False, "warm_start": "raw",
    },
    "exit": {"kind": "latent", "threshold": None, "min_loops": 2},
    "tokens": {"bos": None, "eos": [50256], "pad": None},
    "dtype": "int8",
}  # fmt: skip


class BlockWeights(NamedTuple):
    """One block's tensors, in the artifact's names and shapes ([out, in])."""

    norm1: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    norm3: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Earlier(NamedTuple):
    """Last-loop K and V (batch, heads, length, head_dim) of one core layer, read for blocks before the query's own."""

    k: Tensor
    v: Tensor


def alibi_slopes(heads: int) -> Tensor:
    return torch.tensor([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)])


class Attend:
    """Causal ALiBi attention over `length` positions: flex attention on a GPU, an explicit bias elsewhere.

    `shared` widens the keys to twice the length: own-loop keys for the query's own 64-block, then last-loop keys for
    the blocks before it.
    """

    def __init__(
        self, heads: int, length: int, device: torch.device, shared: bool, flex: bool
    ) -> None:
        slopes = alibi_slopes(heads).to(device)
        num_keys = 2 * length if shared else length

        def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
            if not shared:
                return q >= kv
            own = (kv < length) & (q >= kv) & (q // BLOCK == kv // BLOCK)
            return own | ((kv >= length) & ((kv - length) // BLOCK < q // BLOCK))

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s + slopes[h] * (kv % length - q)

        self.flex, self.score = flex, score
        self.mask: BlockMask | None = None
        self.bias: Tensor | None = None
        if flex:
            self.mask = create_block_mask(visible, None, None, length, num_keys, device=device)
        else:
            q = torch.arange(length, device=device)[:, None]
            kv = torch.arange(num_keys, device=device)[None, :]
            bias = slopes[:, None, None] * (kv % length - q)
            self.bias = bias.masked_fill(~visible(None, None, q, kv), float("-inf"))[None]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flex:
            return flex_attention(q, k, v, score_mod=self.score, block_mask=self.mask)  # type: ignore[return-value]
        assert self.bias is not None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.to(q.dtype))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def block(
    x: Tensor,
    w: BlockWeights,
    heads: int,
    attend: Attend,
    dtype: torch.dtype,
    dropout: float,
    earlier: Earlier | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One pre-norm block on an fp32 residual x (batch, length, d); products in `dtype`. Returns x, k, v."""
    batch, length, d = x.shape
    h = rms(x, w.norm1).to(dtype)
    qkv = F.linear(h, torch.cat([w.q, w.k, w.v]).to(dtype)).view(batch, length, 3, heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous()
    keys, values = k, v
    if earlier is not None:
        keys, values = torch.cat([k, earlier.k], 2), torch.cat([v, earlier.v], 2)
    out = attend(q, keys, values).transpose(1, 2).reshape(batch, length, d)
    x = x + F.dropout(F.linear(out, w.o.to(dtype)), dropout, dropout > 0)
    h = rms(x, w.norm3).to(dtype)
    gate, up = F.linear(h, torch.cat([w.gate, w.up]).to(dtype)).chunk(2, -1)
    x = x + F.dropout(F.linear(F.silu(gate) * up, w.down.to(dtype)), dropout, dropout > 0)
    return x, k, v


def token_losses(
    y: Tensor, embed: Tensor, proj: Tensor, targets: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cross-entropy (tokens,) of normed states y (tokens, d), and the most likely token ids (tokens,)."""
    logits = F.linear(F.linear(y.to(dtype), proj.t().to(dtype)), embed.to(dtype)).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.detach().argmax(-1)


class LoopedModel(nn.Module):
    """Parameters under the artifact's tensor names (dots become a flat ParameterDict key with '/')."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        compile_parts: bool = False,
        flex: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        torch._dynamo.config.recompile_limit = (
            32  # one graph per shape, gradient mode and attention
        )
        arch, stages = config["arch"], config["stages"]
        d, ff, vocab, rank = arch["d_model"], arch["d_ff"], arch["vocab"], arch["embed_rank"]
        self.heads = arch["n_heads"]
        eye = torch.eye(d) * 0.7
        weights = {
            "embed.weight": torch.randn(vocab, rank) * 0.02,
            "embed.proj.weight": torch.randn(d, rank) / math.sqrt(rank),
            "inject.weight": torch.cat([eye, eye], 1) + torch.randn(d, 2 * d) * 0.02,
            "norm.weight": torch.ones(d),
        }
        for stage, count in stages.items():
            for i in range(count):
                base = f"{stage}.{i}."
                weights |= {
                    f"{base}attn.{n}.weight": torch.randn(d, d) / math.sqrt(d) for n in "qkv"
                }
                weights |= {
                    f"{base}mlp.{n}.weight": torch.randn(ff, d) / math.sqrt(d)
                    for n in ("gate", "up")
                }
                weights |= {
                    f"{base}attn.o.weight": torch.zeros(d, d),
                    f"{base}mlp.down.weight": torch.zeros(d, ff),
                }
                weights |= {
                    f"{base}norm1.weight": torch.ones(d),
                    f"{base}norm3.weight": torch.ones(d),
                }
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(w) for name, w in weights.items()}
        )
        self.attends: dict[tuple[int, bool], Attend] = {}
        self.block = torch.compile(block, dynamic=False) if compile_parts else block
        self.losses = torch.compile(token_losses, dynamic=False) if compile_parts else token_losses
        self.flex = flex

    def get(self, name: str) -> nn.Parameter:
        return self.weights[name.replace(".", "/")]  # type: ignore[return-value]

    def tensors(self) -> dict[str, Tensor]:
        """Artifact name -> parameter."""
        return {name.replace("/", "."): p for name, p in self.weights.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.tensors().items():
            parameter.data.copy_(tensors[name])

    def attend(self, length: int, shared: bool) -> Attend:
        key = (length, shared)
        if key not in self.attends:
            device = self.get("norm.weight").device
            self.attends[key] = Attend(self.heads, length, device, shared, self.flex)
        return self.attends[key]

    def stage(
        self, x: Tensor, stage: str, dropout: float, earlier: list[Earlier] | None = None
    ) -> tuple[Tensor, list[Earlier]]:
        """All blocks of one stage; returns x and each layer's K and V."""
        attend = self.attend(x.shape[1], earlier is not None)
        kept = []
        for i in range(self.config["stages"][stage]):
            parts = [
                "norm1",
                "attn.q",
                "attn.k",
                "attn.v",
                "attn.o",
                "norm3",
                "mlp.gate",
                "mlp.up",
                "mlp.down",
            ]
            w = BlockWeights(*(self.get(f"{stage}.{i}.{part}.weight") for part in parts))
            x, k, v = self.block(
                x, w, self.heads, attend, self.dtype, dropout, earlier[i] if earlier else None
            )
            kept.append(Earlier(k, v))
        return x, kept

    def embed(self, tokens: Tensor) -> Tensor:
        rows = F.embedding(tokens, self.get("embed.weight"))
        return F.linear(rows, self.get("embed.proj.weight")) * self.config["arch"]["embed_scale"]

    def unroll(
        self,
        tokens: Tensor,
        loops: int,
        *,
        initial: Tensor | None = None,
        earlier: list[Earlier] | None = None,
        dropout: float = 0.0,
    ) -> Iterator[tuple[Tensor, list[Earlier]]]:
        """After each loop: the state (batch, length, d), and that loop's K and V of each core layer."""
        e, _ = self.stage(self.embed(tokens), "prelude", dropout)
        s = torch.zeros_like(e) if initial is None else initial
        for _ in range(loops):
            x = F.linear(
                torch.cat([s, e], -1).to(self.dtype), self.get("inject.weight").to(self.dtype)
            ).float()
            x, kept = self.stage(x, "core", dropout, earlier)
            s = rms(x, self.get("norm.weight"))
            yield s, kept

    def states(self, tokens: Tensor, loops: int, **options: Any) -> tuple[Tensor, list[Earlier]]:
        """The last of `unroll`."""
        *_, last = self.unroll(tokens, loops, **options)
        return last

    def readout(self, s: Tensor, dropout: float = 0.0, at: Tensor | None = None) -> Tensor:
        """Normed states ready for the head, (batch * length, d); of the positions `at` alone, if given."""
        y, _ = self.stage(s, "coda", dropout)
        y = rms(y, self.get("norm.weight"))
        return (y if at is None else y[:, at]).flatten(0, 1)

    def loss(self, y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Per-token cross-entropy and argmax for `readout`'s y, both (batch * length,)."""
        return self.losses(
            y,
            self.get("embed.weight"),
            self.get("embed.proj.weight"),
            targets.flatten(),
            self.dtype,
        )

    @torch.no_grad()
    def logits(self, tokens: Tensor, loops: int) -> Tensor:
        """(batch, length, vocab), for comparisons on small inputs."""
        y = self.readout(self.states(tokens, loops)[0])
        flat = F.linear(F.linear(y, self.get("embed.proj.weight").t()), self.get("embed.weight"))
        return flat.view(*tokens.shape, -1)


def shift_states(s: Tensor, start: Tensor | int = 0) -> Tensor:
    """Warm start in parallel: each position's initial state is the one before it; zeros up to `start` (batch, 1)."""
    moved = torch.cat([torch.zeros_like(s[:, :1]), s[:, :-1]], 1)
    position = torch.arange(s.shape[1], device=s.device)[None]
    return moved * (position > start)[..., None]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and fp32 scale [out], symmetric per output row."""
    scale = weight.float().abs().amax(1).clamp_min(1e-8) / 127.0
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def fake_quantise(weight: Tensor) -> Tensor:
    q, scale = quantise(weight)
    return q.float() * scale[:, None]
