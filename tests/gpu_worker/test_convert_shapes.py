"""Checkpoints of other shapes than the golden ones: converter, naive forward and engine against a second statement of upstream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker import artifact, load_check, naive
from gpu_worker.convert import convert
from gpu_worker.engine import Engine, EngineOptions
from tests.gpu_worker.upstream_forward import logits_by_loop

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"


def ouro(
    d: int,
    layers: int,
    heads: int,
    kv: int,
    head_dim: int,
    width: int,
    vocab: int,
    loops: int,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "model_type": "ouro", "hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "head_dim": head_dim, "intermediate_size": width, "vocab_size": vocab, "total_ut_steps": loops, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 128, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        "sliding_window": None, "layer_types": ["full_attention"] * layers,
    }  # fmt: skip


def huginn(
    d: int,
    stages: tuple[int, int, int],
    heads: int,
    kv: int,
    width: int,
    vocab: int,
    loops: int,
    qk_bias: bool = True,
    tied: bool = True,
) -> dict[str, Any]:
    return {
        "model_type": "huginn_raven", "n_embd": d, "n_heads": heads, "num_key_value_heads": kv, "intermediate_size": width,
        "n_layers_in_prelude": stages[0], "n_layers_in_recurrent_block": stages[1], "n_layers_in_coda": stages[2], "padded_vocab_size": vocab,
        "block_size": 96, "rope_base": 50000, "norm_eps": 1e-6, "qk_bias": qk_bias, "mean_recurrence": loops, "tie_embeddings": tied,
        "init_values": {"std": 0.06, "embed_scale": d**0.5}, "bos_token_id": 4, "eos_token_id": 5, "pad_token_id": 9,
        "injection_type": "linear", "state_init": "like-init",
    }  # fmt: skip


SHAPES = {
    "ouro-5-layers-3-loops": ouro(48, 5, 3, 3, 16, 80, 130, 3),
    "ouro-1-layer-6-loops-gqa": ouro(32, 1, 4, 2, 8, 40, 77, 6),
    "ouro-wide-heads-tied": ouro(40, 2, 2, 1, 32, 64, 99, 2, tied=True),
    "huginn-2-4-2": huginn(60, (2, 4, 2), 5, 5, 100, 120, 4),
    "huginn-gqa-no-bias": huginn(64, (1, 3, 1), 4, 2, 72, 90, 5, qk_bias=False),
    "huginn-untied-no-coda": huginn(32, (1, 2, 0), 2, 2, 48, 60, 3, tied=False),
    "huginn-no-prelude": huginn(32, (0, 1, 2), 2, 2, 48, 60, 12),
}  # fmt: skip


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Random weights in upstream's layout for a configuration."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config["model_type"] == "ouro":
        d, width, wide = (
            config["hidden_size"],
            config["intermediate_size"],
            config["num_attention_heads"] * config["head_dim"],
        )
        kv = config["num_key_value_heads"] * config["head_dim"]
        shapes |= {
            "model.embed_tokens.weight": (config["vocab_size"], d),
            "model.norm.weight": (d,),
        }
        shapes |= {"model.early_exit_gate.weight": (1, d), "model.early_exit_gate.bias": (1,)}
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (config["vocab_size"], d)
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            for name, rows, columns in (("q", wide, d), ("k", kv, d), ("v", kv, d), ("o", d, wide)):
                shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, columns)
            for name, rows, columns in (("gate", width, d), ("up", width, d), ("down", d, width)):
                shapes[f"{at}.mlp.{name}_proj.weight"] = (rows, columns)
            for name in (
                "input_layernorm",
                "input_layernorm_2",
                "post_attention_layernorm",
                "post_attention_layernorm_2",
            ):
                shapes[f"{at}.{name}.weight"] = (d,)
    else:
        d, width, head_dim = (
            config["n_embd"],
            config["intermediate_size"],
            config["n_embd"] // config["n_heads"],
        )
        shapes |= {
            "transformer.wte.weight": (config["padded_vocab_size"], d),
            "transformer.adapter.weight": (d, 2 * d),
        }
        shapes |= {
            "transformer.ln_f.weight": (d,),
            "freqs_cis": (1, config["block_size"], 1, head_dim // 2, 2),
        }
        if not config["tie_embeddings"]:
            shapes["lm_head.weight"] = (config["padded_vocab_size"], d)
        stages = {
            "prelude": "n_layers_in_prelude",
            "core_block": "n_layers_in_recurrent_block",
            "coda": "n_layers_in_coda",
        }
        for stage, key in stages.items():
            for i in range(config[key]):
                at = f"transformer.{stage}.{i}"
                shapes[f"{at}.attn.Wqkv.weight"] = (
                    d + 2 * config["num_key_value_heads"] * head_dim,
                    d,
                )
                shapes |= {
                    f"{at}.attn.proj.weight": (d, d),
                    f"{at}.mlp.fc.weight": (2 * width, d),
                    f"{at}.mlp.proj.weight": (d, width),
                }
                shapes |= {f"{at}.norm_{n}.weight": (d,) for n in (1, 2, 3, 4)}
                if config["qk_bias"]:
                    shapes[f"{at}.attn.qk_bias"] = (2, 1, config["n_heads"], head_dim)
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name or "ln_f" in name:
            return torch.rand(shape, generator=generator) * 0.8 + 0.6
        return torch.randn(shape, generator=generator) * (
            0.3 if "bias" in name or "embed" in name or "wte" in name else shape[-1] ** -0.5
        )

    folder.mkdir()
    save_file(
        {n: draw(n, s).to(torch.bfloat16) for n, s in shapes.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "name", ["ouro-tiny", "huginn-tiny", "llama-tiny", "qwen2-tiny", "qwen3-tiny", "mistral-tiny"]
)
def test_the_second_statement_agrees_with_the_goldens(name: str) -> None:
    expected = load_file(GOLDENS / name / "expected.safetensors")
    keys = {"ouro-tiny": "logits.loop4", "huginn-tiny": "logits.steps8"}
    loops = {"ouro-tiny": 4, "huginn-tiny": 8}.get(name, 1)
    for tokens, want in zip(
        expected["input_ids"].tolist(), expected[keys.get(name, "logits")], strict=True
    ):
        found = logits_by_loop(GOLDENS / name, tokens, loops)[-1]
        torch.testing.assert_close(found.float(), want, rtol=0.0, atol=5e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes(tmp_path: Path, name: str) -> None:
    config = SHAPES[name]
    write_checkpoint(tmp_path / "source", config, seed=len(name))
    convert(tmp_path / "source", tmp_path / "a.tinyloop")
    loaded = artifact.load(tmp_path / "a.tinyloop", verify=True)
    vocab, loops = loaded.config.arch.vocab, loaded.config.loop.default
    tokens = torch.randint(0, vocab, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    want = logits_by_loop(tmp_path / "source", tokens, loops)
    trace = naive.forward(loaded.config, loaded.tensors(dequantise=True), tokens, loops, want="all")
    engine = Engine(loaded, EngineOptions(max_rows=4, num_blocks=100, max_seq_len=96))
    for loop in range(1, loops + 1):
        torch.testing.assert_close(
            trace.logits[loop - 1], want[loop - 1].float(), rtol=0.0, atol=1e-4
        )
        found = load_check.logits(engine, tokens, loop)
        torch.testing.assert_close(found, want[loop - 1].float(), rtol=0.0, atol=1e-4)
