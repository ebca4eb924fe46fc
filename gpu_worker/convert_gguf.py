"""A GGUF file of the Llama family as a checkpoint: upstream tensor names, rows in upstream order, values dequantised.

F32, F16, BF16, Q8_0, Q4_0 and Q4_1 are read, through the `gguf` library. GGUF stores the q and k rows of Llama models permuted for interleaved
rotary pairs; they are put back here, so that everything else is as for a folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.convert_source import SourceConfig
from gpu_worker.convert_tokenizer import Texts

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
_FLOAT_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_PERMUTED = {
    "llama": True,
    "qwen2": False,
    "qwen3": False,
}  # architecture -> q and k rows are permuted
_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight",
}  # fmt: skip

# How each vocabulary cuts a text before its merges: (single digits apart, or a pattern).
_SPLITS: dict[str, dict[str, Any]] = {
    "gpt-2": {"digits": False},
    "smollm": {"digits": True},
    "llama-bpe": {
        "pattern": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    },
    "qwen2": {
        "pattern": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    },
}


class GgufFile:
    """The tensors of a GGUF file under upstream names (a `WeightSource`), and its metadata as an upstream configuration."""

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            ArtifactError: TL020, TL021 or TL022.
        """
        try:
            import gguf
        except ModuleNotFoundError:
            raise ArtifactError(
                "TL020", "reading GGUF needs the `gguf` package", "pip install gguf"
            ) from None
        self._dequantize = gguf.quants.dequantize
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as ex:
            raise ArtifactError(
                "TL020", f"{path} is not readable as GGUF: {ex}", "download the file again"
            ) from None
        self.metadata: dict[str, Any] = {key: f.contents() for key, f in reader.fields.items()}
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in _PERMUTED:
            raise ArtifactError(
                "TL021",
                f"GGUF architecture is {self.architecture!r:.60}",
                "supported: " + ", ".join(_PERMUTED),
            )
        self._tensors: dict[str, Any] = {}
        for tensor in reader.tensors:
            kind = tensor.tensor_type.name
            if kind not in _TYPES:
                raise ArtifactError(
                    "TL022", f"`{tensor.name}` is {kind}", "supported: " + ", ".join(_TYPES)
                )
            self._tensors[_upstream_name(tensor.name)] = tensor
        self.is_quantised = any(t.tensor_type.name.startswith("Q") for t in self._tensors.values())

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> torch.dtype:
        """The type that holds the values exactly: fp32 for quantised ones."""
        return _FLOAT_DTYPES.get(self._tensors[name].tensor_type.name, torch.float32)

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        found = np.ascontiguousarray(
            self._dequantize(tensor.data, tensor.tensor_type), dtype=np.float32
        )
        values = torch.from_numpy(found if found.flags.writeable else found.copy())
        values = values.reshape(self.shape(name))
        if _PERMUTED[self.architecture] and ".self_attn." in name:
            if ".q_proj." in name:
                return _unpermute(values, self._number("attention.head_count"))
            if ".k_proj." in name:
                return _unpermute(values, self._kv_heads())
        return values

    def config(self) -> SourceConfig:
        """The metadata as the config.json that the model would have.

        Raises:
            ArtifactError: TL022.
        """
        heads, d_model = self._number("attention.head_count"), self._number("embedding_length")
        head_dim = self._number("attention.key_length", d_model // heads)
        if self._number("attention.value_length", head_dim) != head_dim:
            raise self._fault("attention.value_length", f"key_length ({head_dim})")
        if self._number("rope.dimension_count", head_dim) != head_dim:
            raise self._fault("rope.dimension_count", f"the head size ({head_dim})")
        if self._number("expert_count", 0):
            raise self._fault("expert_count", "0")
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise self._fault("rope.scaling.type", "none, linear")
        if any(name.startswith("rope_") for name in self._tensors):
            raise ArtifactError(
                "TL022",
                "the file has rotary frequencies of its own (rope_freqs)",
                "convert the model from its safetensors folder",
            )
        values: dict[str, Any] = {
            "model_type": self.architecture,
            "hidden_size": d_model,
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._kv_heads(),
            "head_dim": head_dim,
            "intermediate_size": self._number("feed_forward_length"),
            "vocab_size": self.shape("model.embed_tokens.weight")[0]
            if "model.embed_tokens.weight" in self._tensors
            else 0,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": _shortest(
                self.metadata[f"{self.architecture}.attention.layer_norm_rms_epsilon"]
            ),
            "rope_theta": _shortest(
                self.metadata.get(f"{self.architecture}.rope.freq_base", 10000.0)
            ),
            "sliding_window": self.metadata.get(f"{self.architecture}.attention.sliding_window"),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.metadata.get("tokenizer.ggml.padding_token_id"),
        }
        if kind == "linear":
            values["rope_scaling"] = {
                "rope_type": "linear",
                "factor": self.metadata[f"{self.architecture}.rope.scaling.factor"],
            }
        return SourceConfig(values, "the GGUF metadata")

    def texts(self) -> Texts:
        """Tokenizer and chat template from the metadata.

        Raises:
            ArtifactError: TL011 for a vocabulary of another kind.
        """
        texts, meta = Texts(), self.metadata
        if meta.get("tokenizer.chat_template"):
            texts.blobs["chat_template.jinja"] = str(meta["tokenizer.chat_template"]).encode()
        if not meta.get("tokenizer.ggml.tokens"):
            return texts
        kind, split = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or split not in _SPLITS:
            raise ArtifactError(
                "TL011",
                f"the GGUF tokenizer is of kind {kind!r} with splitting {split!r}",
                "give the model's tokenizer.json with --tokenizer",
            )
        tokens = meta["tokenizer.ggml.tokens"]
        bos = meta.get("tokenizer.ggml.bos_token_id")
        texts.add_tokenizer(
            _tokenizer_json(meta, _SPLITS[split]),
            bool(meta.get("tokenizer.ggml.add_bos_token", False)),
            None if bos is None else tokens[bos],
        )
        return texts

    def _kv_heads(self) -> int:
        return self._number("attention.head_count_kv", self._number("attention.head_count"))

    def _number(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._fault(key, "one integer")
        return value

    def _fault(self, key: str, allowed: str) -> ArtifactError:
        name = f"{self.architecture}.{key}"
        return ArtifactError(
            "TL022", f"`{name}` is {self.metadata.get(name)!r:.80}", f"supported: {allowed}"
        )


def _upstream_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return name


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows (heads x pairs x 2) of interleaved pairs back to halves (heads x 2 x pairs)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _shortest(value: float) -> float:
    """A float32 from the file as the decimal that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer_json(meta: dict[str, Any], split: dict[str, Any]) -> bytes:
    """A tokenizer.json from GGUF's byte-level BPE. Token types 3 (control) and 4 (user defined) are matched before the merges."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if "pattern" in split:
        first = {
            "type": "Split",
            "pattern": {"Regex": split["pattern"]},
            "behavior": "Isolated",
            "invert": False,
        }
        pre: dict[str, Any] = {
            "type": "Sequence",
            "pretokenizers": [first, byte_level | {"use_regex": False}],
        }
    elif split["digits"]:
        digits = {"type": "Digits", "individual_digits": True}
        pre = {"type": "Sequence", "pretokenizers": [digits, byte_level | {"use_regex": True}]}
    else:
        pre = byte_level | {"use_regex": True}
    added = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": kind == 3}
        for i, kind in enumerate(types)
        if kind in (3, 4)
    ]  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": "pattern" in split and "{1,3}" in split["pattern"],
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
    }  # fmt: skip
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": pre,
        "post_processor": None, "decoder": byte_level | {"use_regex": True}, "model": model,
    }  # fmt: skip
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()
