"""Makes a tiny artifact with random weights and a byte-level tokenizer: for tests, examples and a first look at the format.

    python scripts/make_toy_artifact.py OUT.tinyloop [--variant NAME] [--seed N] [--dtype int8] [--set d_model=128 ...]

The same arguments give the same bytes. The text it writes is noise; what matters is that every part of the path is real.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpu_worker import artifact, selfcheck
from gpu_worker.model_config import (
    Arch,
    Exit,
    Loop,
    ModelConfig,
    Pos,
    SpecialTokens,
    Stages,
    StateInit,
)
from gpu_worker.tensor_table import Shape, expected_tensors

SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")
VOCAB = 512
WORDS = (
    "the of and to in is was he for it with as his on be at by had are but from or have an they which one you were her all she "
    "there would their we him been has when who will more no if out so said what up its about into than them can only other new "
    "some could time these two may then do first any my now such like our over man me even most made after also did many before "
    "must through back years where much your way well down should because each just those people how too little state good very"
).split()
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Each variant is a set of overrides; together they reach every kind of block, position, injection and head.
VARIANTS: dict[str, dict[str, Any]] = {
    "pre": {},
    "pure": {
        "inject": "none", "state_init": "embed", "prelude": 0, "coda": 0, "d_model": 128, "head_dim": 64, "dtype": "fp16",
    },
    "plain": {"inject": "none", "state_init": "embed", "prelude": 0, "coda": 0, "default": 1, "trained_max": 1, "hard_max": 1},
    "ouro": {
        "block": "branch_post", "inject": "none", "state_init": "embed", "prelude": 0, "core": 3, "coda": 0, "norm_each": True,
        "exit": "gate", "tied_head": False,
    },
    "huginn": {
        "block": "sum_post", "pairing": "interleaved", "inject": "concat", "state_init": "normal", "norm_after_core": True,
        "qk_bias": True, "embed_scale": 8.0, "warm_start": "raw", "exit": "latent",
    },
    "interleaved": {"pairing": "interleaved"},
    "alibi": {"pos": "alibi", "inject": "add", "state_init": "zeros"},
    "learned": {"pos": "learned", "inject": "concat", "state_init": "zeros", "warm_start": "post_norm"},
    "nopos": {"pos": "none"},
    "gqa": {"n_kv_heads": 1, "qk_norm": True, "tied_head": False},
    "biases": {"q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True, "mlp_bias": True},
    "layer_norm": {"norm": "layer", "norm_eps": 1e-5, "act": "gelu", "pos": "learned"},
    "gelu_tanh": {"act": "gelu_tanh", "pos": "none", "coda": 0},
    "relu2": {"act": "relu2", "prelude": 0, "norm_each": True},
    "factorised": {"embed_rank": 16},
    "sum_post_learned": {"block": "sum_post", "pos": "learned", "exit": "kl", "norm_after_core": True},
    "branch_post_alibi": {"block": "branch_post", "pos": "alibi", "coda": 2, "prelude": 2},
    "gate_coda": {"exit": "gate", "norm_each": True, "coda": 1},
}  # fmt: skip


def make(
    path: str | Path,
    *,
    seed: int = 0,
    variant: str = "pre",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Writes a toy artifact.

    Args:
        path: the file to make.
        seed: of the weights.
        variant: a key of `VARIANTS`.
        tokenizer: embed the toy tokenizer and its chat template.
        **overrides: single fields over the variant's: those of `Arch`, `Stages`, `Loop` and `Pos` by their names (`pos`,
            `state_init` and `exit` mean their kinds), `exit_threshold`, `min_loops`, `dtype`, `name`.

    Returns:
        The path.
    """
    config = toy_config(variant, **overrides)
    weights = toy_weights(config, seed)
    blobs = {"probe.json": selfcheck.make(config, selfcheck.StoredForm(config, weights))}
    if tokenizer:
        blobs["tokenizer.json"] = toy_tokenizer()
        blobs["chat_template.jinja"] = CHAT_TEMPLATE.encode()
        blobs["generation.json"] = json.dumps({"temperature": 0.0}).encode()
    source = {"family": "toy", "variant": variant, "seed": seed}
    artifact.write(path, config, weights, blobs, source)
    return Path(path)


def toy_config(variant: str = "pre", **overrides: Any) -> ModelConfig:
    """The configuration of a variant with single fields replaced (see `make`)."""
    values: dict[str, Any] = {
        "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16, "d_ff": 128, "vocab": VOCAB, "max_pos": 512,
        "prelude": 1, "core": 2, "coda": 1, "default": 4, "trained_max": 4, "hard_max": 8,
        "inject": "add", "state_init": "zeros", "std": 0.6, "name": f"toy-{variant}",
    }  # fmt: skip
    values |= VARIANTS[variant] | overrides
    values["pos"] = Pos(kind=values.get("pos", "rope"), **_take(values, Pos, {"kind"}))
    values["state_init"] = StateInit(
        kind=values["state_init"], **_take(values, StateInit, {"kind"})
    )
    exit_ = Exit(
        values.pop("exit", "none"), values.pop("exit_threshold", None), values.pop("min_loops", 1)
    )
    arch = Arch(**_take(values, Arch, set()))
    stages = Stages(**_take(values, Stages, set()))
    loop = Loop(**_take(values, Loop, set()))
    eos = (256,) if arch.vocab >= VOCAB else ()
    config = ModelConfig(
        values.pop("name"),
        arch,
        stages,
        loop,
        exit_,
        SpecialTokens(None, eos, None),
        values.pop("dtype", "fp32"),
    )
    if values:
        raise ValueError(f"unknown override {next(iter(values))!r}")
    return config


def toy_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Random weights whose logits have a spread of about 2 and whose norms and biases all matter."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: Shape) -> torch.Tensor:
        if "norm" in name and name.endswith(".weight"):
            return torch.rand(shape, generator=generator) * 0.8 + 0.6
        if name in ("embed.weight", "pos.weight"):
            return torch.randn(shape, generator=generator) * 0.3
        if name.endswith("bias"):
            return torch.randn(shape, generator=generator) * 0.2
        return torch.randn(shape, generator=generator) * 1.2 / shape[1] ** 0.5

    return {name: draw(name, shape) for name, shape in expected_tensors(config).items()}


def toy_tokenizer() -> bytes:
    """A byte-level BPE of 512 entries: ids 0-255 are bytes, then the special tokens, then beginnings of common words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    vocab |= {token: len(alphabet) + i for i, token in enumerate(SPECIAL)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        left = "Ġ"
        for letter in word:
            if left + letter not in vocab and len(vocab) < VOCAB:
                merges.append((left, letter))
                vocab[left + letter] = len(vocab)
            left += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return tokenizer.to_str().encode()


def _take(values: dict[str, Any], cls: type[Any], without: set[str]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls) if f.name not in without and f.name in values]
    return {name: values.pop(name) for name in names}


def main(argv: Sequence[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="pre")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16", "int8"), default="fp32")
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="an artifact that serves token ids only"
    )
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="FIELD=VALUE",
        help="single fields; values are JSON or words",
    )
    args = parser.parse_args(argv)
    overrides = {key: _value(text) for key, _, text in (item.partition("=") for item in args.set)}
    make(
        args.out,
        seed=args.seed,
        variant=args.variant,
        tokenizer=not args.no_tokenizer,
        dtype=args.dtype,
        **overrides,
    )
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")
    return 0


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
