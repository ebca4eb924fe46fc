"""GGUF files of the Llama family: dequantised, rows put back in order, tokenizer and template read from the metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from gpu_worker import artifact, naive
from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.convert import Options, convert
from gpu_worker.convert_gguf import GgufFile
from scripts.make_toy_artifact import SPECIAL, toy_tokenizer

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
Weights = dict[str, torch.Tensor]

TO_GGUF = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
}  # fmt: skip


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As llama.cpp stores q and k rows: channel i and i + half of a head become neighbours."""
    heads = weight.view(num_heads, 2, -1, weight.shape[-1] if weight.ndim > 1 else 1)
    return torch.stack([heads[:, 0], heads[:, 1]], dim=2).reshape(weight.shape)


def write_gguf(path: Path, name: str, kind: str = "F32", **metadata: Any) -> Weights:
    """A golden checkpoint as a GGUF file; returns the weights it holds (rounded by `kind`) under upstream names."""
    folder = GOLDENS / name
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, str: writer.add_string, float: writer.add_float32}[
            type(value)
        ]
        add(key.replace("__", "."), value)
    held = {}
    for upstream, weight in load_file(folder / "model.safetensors").items():
        target = upstream
        for old, new in TO_GGUF.items():
            target = target.replace(old, new)
        quantisation = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        heads = config["num_attention_heads" if "q_proj" in upstream else "num_key_value_heads"]
        is_moved = arch == "llama" and ("q_proj" in upstream or "k_proj" in upstream)
        stored = permuted(weight.float(), heads) if is_moved else weight.float()
        raw = gguf.quants.quantize(stored.numpy(), quantisation)
        writer.add_tensor(target, raw, raw_dtype=quantisation)
        rows = gguf.quants.quantize(
            weight.float().numpy(), quantisation
        )  # rounding is per row: order does not matter
        held[upstream] = torch.from_numpy(
            np.array(gguf.quants.dequantize(rows, quantisation), dtype=np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_unquantised_files_give_upstreams_logits(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "a.gguf", name)
    convert(tmp_path / "a.gguf", tmp_path / "a.tinyloop")
    loaded = artifact.load(tmp_path / "a.tinyloop", verify=True)
    expected = load_file(GOLDENS / name / "expected.safetensors")
    weights = loaded.tensors(dequantise=True)
    for tokens, logits in zip(expected["input_ids"].tolist(), expected["logits"], strict=True):
        torch.testing.assert_close(
            naive.forward(loaded.config, weights, tokens, 1), logits, rtol=0.0, atol=1e-4
        )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_files_are_dequantised_exactly(tmp_path: Path, kind: str) -> None:
    held = write_gguf(tmp_path / "a.gguf", "llama-tiny", kind)
    convert(tmp_path / "a.gguf", tmp_path / "a.tinyloop")
    loaded = artifact.load(tmp_path / "a.tinyloop", verify=True)
    assert loaded.config.dtype == {"F16": "fp16", "BF16": "bf16"}.get(kind, "fp32")
    original = load_file(GOLDENS / "llama-tiny" / "model.safetensors")
    for target, source in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("core.0.attn.q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("core.1.attn.k.weight", "model.layers.1.self_attn.k_proj.weight"),
        ("core.1.mlp.down.weight", "model.layers.1.mlp.down_proj.weight"),
    ):
        assert torch.equal(loaded.tensor(target), held[source])
        assert not torch.equal(held[source], original[source])  # the format did round
    assert loaded.config.tokens.eos == (2,) and loaded.config.arch.norm_eps == 1e-5


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama__rope__scaling__type": "yarn"}, ("TL022", "`llama.rope.scaling.type` is 'yarn'")),
        ({"llama__expert_count": 8}, ("TL022", "`llama.expert_count` is 8")),
        ({"llama__rope__dimension_count": 8}, ("TL022", "`llama.rope.dimension_count` is 8")),
    ],
)
def test_options_that_change_the_arithmetic_are_refused(
    tmp_path: Path, metadata: dict[str, Any], words: tuple[str, str]
) -> None:
    write_gguf(tmp_path / "a.gguf", "llama-tiny", **metadata)
    with pytest.raises(ArtifactError, match=words[0]) as caught:
        convert(tmp_path / "a.gguf", tmp_path / "a.tinyloop")
    assert words[1] in str(caught.value) and not (tmp_path / "a.tinyloop").exists()


def test_other_quantisations_and_architectures_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama-tiny", "Q5_0")
    with pytest.raises(ArtifactError, match="TL022 .* is Q5_0"):
        convert(tmp_path / "a.gguf", tmp_path / "a.tinyloop")
    write_gguf(tmp_path / "b.gguf", "mistral-tiny")  # llama.cpp calls it llama
    with pytest.raises(ArtifactError, match="TL021 .*'mistral'"):
        convert(tmp_path / "b.gguf", tmp_path / "b.tinyloop")


def with_tokenizer(path: Path, pre: str, model: str = "gpt2") -> Tokenizer:
    """Writes a llama file whose metadata hold the toy tokenizer; returns that tokenizer."""
    spec = json.loads(toy_tokenizer())
    vocab = spec["model"]["vocab"] | {t["content"]: t["id"] for t in spec["added_tokens"]}
    tokens = [t for t, _ in sorted(vocab.items(), key=lambda item: item[1])]
    original = gguf.GGUFWriter.write_header_to_file

    def add(writer: gguf.GGUFWriter, *args: Any) -> None:
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if t in SPECIAL else 1 for t in tokens])
        writer.add_token_merges([" ".join(m) for m in spec["model"]["merges"]])
        writer.add_chat_template("{{ messages }}")
        original(writer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", add)
        write_gguf(path, "llama-tiny")
    return Tokenizer.from_str(toy_tokenizer().decode())


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_the_tokenizer_is_rebuilt(tmp_path: Path, pre: str) -> None:
    toy = with_tokenizer(tmp_path / "a.gguf", pre)
    texts = GgufFile(tmp_path / "a.gguf").texts()
    rebuilt = Tokenizer.from_str(texts.blobs["tokenizer.json"].decode())
    text = "<|user|>Through the  very good\n\nyears — état 😀 we'll"
    assert rebuilt.encode(text).ids == toy.encode(text).ids
    assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == text
    assert texts.blobs["chat_template.jinja"] == b"{{ messages }}"


def test_a_tokenizer_of_another_kind_asks_for_one(tmp_path: Path) -> None:
    with_tokenizer(tmp_path / "a.gguf", "default", model="llama")
    with pytest.raises(ArtifactError, match="TL011 .*'llama'.* --tokenizer"):
        convert(tmp_path / "a.gguf", tmp_path / "a.tinyloop")
    (tmp_path / "tokenizer.json").write_text(
        '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    )
    convert(
        tmp_path / "a.gguf", tmp_path / "a.tinyloop", Options(tokenizer=tmp_path / "tokenizer.json")
    )
    assert artifact.load(tmp_path / "a.tinyloop").blob("tokenizer.json")
