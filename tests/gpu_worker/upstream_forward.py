"""Ouro, Huginn and Llama stated once more, in float64 and in upstream's own tensor names, straight from a checkpoint folder.

A second opinion for shapes of which there are no golden outputs; the tests hold it to the golden checkpoints first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Weights = dict[str, Tensor]


def logits_by_loop(folder: Path, tokens: list[int], loops: int) -> list[Tensor]:
    """Logits (len, vocab) after each loop."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
    if config["model_type"] == "huginn_raven":
        return _huginn(config, w, tokens, loops)
    return _ouro_or_llama(config, w, tokens, loops)


def _ouro_or_llama(
    config: dict[str, Any], w: Weights, tokens: list[int], loops: int
) -> list[Tensor]:
    is_ouro, eps = config["model_type"] == "ouro", config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    cos, sin = _angles(len(tokens), head_dim, theta)

    def turn(x: Tensor) -> Tensor:  # (heads, len, head_dim), halves
        a, b = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def project(name: str, x: Tensor, count: int) -> Tensor:
        y = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(1).double())
        return y.view(len(tokens), count, head_dim).transpose(0, 1)

    embedding = w["model.embed_tokens.weight"]
    head = embedding if config.get("tie_word_embeddings") else w["lm_head.weight"]
    h, out = embedding[tokens], []
    for _ in range(loops):
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            x = _norm(h, w[f"{at}.input_layernorm.weight"], eps)
            q, k = (
                project(f"{at}.self_attn.q_proj", x, heads),
                project(f"{at}.self_attn.k_proj", x, kv_heads),
            )
            if f"{at}.self_attn.q_norm.weight" in w:
                q, k = (
                    _norm(q, w[f"{at}.self_attn.q_norm.weight"], eps),
                    _norm(k, w[f"{at}.self_attn.k_norm.weight"], eps),
                )
            mixed = _attend(turn(q), turn(k), project(f"{at}.self_attn.v_proj", x, kv_heads))
            a = mixed @ w[f"{at}.self_attn.o_proj.weight"].T + w.get(
                f"{at}.self_attn.o_proj.bias", 0.0
            )
            h = h + (_norm(a, w[f"{at}.input_layernorm_2.weight"], eps) if is_ouro else a)
            x = _norm(h, w[f"{at}.post_attention_layernorm.weight"], eps)
            up = x @ w[f"{at}.mlp.up_proj.weight"].T
            m = (torch.nn.functional.silu(x @ w[f"{at}.mlp.gate_proj.weight"].T) * up) @ w[
                f"{at}.mlp.down_proj.weight"
            ].T
            h = h + (_norm(m, w[f"{at}.post_attention_layernorm_2.weight"], eps) if is_ouro else m)
        h = _norm(h, w["model.norm.weight"], eps)
        out.append(h @ head.T)
    return out


def _huginn(config: dict[str, Any], w: Weights, tokens: list[int], loops: int) -> list[Tensor]:
    d, heads, kv_heads, eps = (
        config["n_embd"],
        config["n_heads"],
        config["num_key_value_heads"],
        config["norm_eps"],
    )
    head_dim, width = d // heads, config["intermediate_size"]
    cos, sin = _angles(len(tokens), head_dim, config["rope_base"])

    def turn(x: Tensor) -> Tensor:  # (heads, len, head_dim), neighbours as complex numbers
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)

    def block(at: str, x: Tensor) -> Tensor:
        qkv = _norm(x, w[f"{at}.norm_1.weight"], eps) @ w[f"{at}.attn.Wqkv.weight"].T
        q, k, v = qkv.split([d, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        q, k, v = (t.reshape(len(tokens), -1, head_dim) for t in (q, k, v))
        if config["qk_bias"]:
            q, k = q + w[f"{at}.attn.qk_bias"][0], k + w[f"{at}.attn.qk_bias"][1]
        mixed = _attend(turn(q.transpose(0, 1)), turn(k.transpose(0, 1)), v.transpose(0, 1))
        x = _norm(mixed @ w[f"{at}.attn.proj.weight"].T + x, w[f"{at}.norm_2.weight"], eps)
        fc = _norm(x, w[f"{at}.norm_3.weight"], eps) @ w[f"{at}.mlp.fc.weight"].T
        hidden = torch.nn.functional.silu(fc[:, :width]) * fc[:, width:]
        return _norm(hidden @ w[f"{at}.mlp.proj.weight"].T + x, w[f"{at}.norm_4.weight"], eps)

    final = w["transformer.ln_f.weight"]
    embedded = w["transformer.wte.weight"][tokens] * config["init_values"]["embed_scale"]
    for i in range(config["n_layers_in_prelude"]):
        embedded = block(f"transformer.prelude.{i}", embedded)
    state, out = torch.zeros_like(embedded), []
    for _ in range(loops):
        state = torch.cat([state, embedded], 1) @ w["transformer.adapter.weight"].T
        for i in range(config["n_layers_in_recurrent_block"]):
            state = block(f"transformer.core_block.{i}", state)
        x = _norm(state, final, eps)
        for i in range(config["n_layers_in_coda"]):
            x = block(f"transformer.coda.{i}", x)
        out.append(_norm(x, final, eps) @ w.get("lm_head.weight", w["transformer.wte.weight"]).T)
    return out


def _angles(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    frequencies = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.outer(torch.arange(length).double(), frequencies)
    return angles.cos(), angles.sin()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(heads, len, head_dim) each, fewer heads in k and v repeated; gives (len, heads * head_dim)."""
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(0, 1).flatten(1)
