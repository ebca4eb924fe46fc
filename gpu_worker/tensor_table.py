"""Which tensors an artifact has: names, shapes and the storage each may use, all derived from the configuration.

Matrices (everything that a product or a look-up reads) are stored in the configuration's dtype; vectors (norms, biases, the
exit gate) always in fp32. An int8 matrix `X.weight` [out, in] comes with `X.weight.scale` [out]: value = int8 * scale.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

import torch

from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.model_config import ModelConfig

Shape = tuple[int, ...]

BLOBS = (
    "blob.tokenizer.json",
    "blob.chat_template.jinja",
    "blob.generation.json",
    "blob.probe.json",
)
SAMPLE_SIZE = 4096  # values per tensor that every load looks at; a verification looks at all
TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every weight, without scales and blobs, in the order of the forward pass."""
    arch, d = config.arch, config.arch.d_model
    table: dict[str, Shape] = {}
    if arch.embed_rank:
        table["embed.weight"] = (arch.vocab, arch.embed_rank)
        table["embed.proj.weight"] = (d, arch.embed_rank)
    else:
        table["embed.weight"] = (arch.vocab, d)
    if arch.pos.kind == "learned":
        table["pos.weight"] = (arch.max_pos, d)
    for stage in ("prelude", "core", "coda"):
        for i in range(getattr(config.stages, stage)):
            for name, shape in _block_tensors(config):
                table[f"{stage}.{i}.{name}"] = shape
    if config.loop.inject == "concat":
        table["inject.weight"] = (d, 2 * d)
    table.update(_norm(config, "norm"))
    if config.exit.kind == "gate":
        table["exit.weight"] = (1, d)
        table["exit.bias"] = (1,)
    if not arch.tied_head:
        table["head.weight"] = (arch.vocab, d)
    return table


def optional_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Tensors that may be there: the norm after the core, which is the final norm where it is absent."""
    return dict(_norm(config, "norm_core")) if config.loop.norm_after_core else {}


def is_matrix(name: str) -> bool:
    """Whether a tensor is stored in the configuration's dtype (else fp32)."""
    if name in ("embed.weight", "embed.proj.weight", "pos.weight", "inject.weight", "head.weight"):
        return True
    parts = name.split(".")
    return (
        len(parts) == 5
        and parts[-1] == "weight"
        and parts[3] in ("q", "k", "v", "o", "gate", "up", "down")
    )


def storage_dtype(config: ModelConfig, name: str) -> torch.dtype:
    """The dtype in which `write` stores a tensor."""
    return TORCH_DTYPES[config.dtype] if is_matrix(name) else torch.float32


def check_table(config: ModelConfig, found: dict[str, tuple[torch.dtype, Shape]]) -> None:
    """Compares the tensors of a file with the table.

    Raises:
        ArtifactError: TL004, TL005, TL006 or TL007.
    """
    expected = expected_tensors(config)
    known = expected | optional_tensors(config)
    scales = {
        f"{name}.scale": (found[name][1][0],)
        for name in known
        if name in found and found[name][0] is torch.int8
    }
    wanted = expected | scales
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in known and name not in scales]
    if missing:
        raise ArtifactError(
            "TL004", _listing(missing) + _nearest(missing[0], extra), _remedy(found)
        )
    if extra:
        raise ArtifactError("TL005", _listing(extra) + _nearest(extra[0], known), _remedy(found))
    for name, (dtype, shape) in found.items():
        want = scales.get(name) or known[name]
        if shape != want:
            raise ArtifactError(
                "TL006",
                f"`{name}` is {list(shape)}, expected {list(want)}",
                "correct the configuration or the weights",
            )
        allowed = _allowed_dtypes(config, name)
        if dtype not in allowed:
            names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
            raise ArtifactError(
                "TL007",
                f"`{name}` is {str(dtype).removeprefix('torch.')}, expected {names}",
                "convert the model again",
            )


def check_finite(name: str, tensor: torch.Tensor, sample: bool) -> None:
    """Refuses NaN and infinity; `sample` looks at some thousand values spread over the tensor.

    Raises:
        ArtifactError: TL008.
    """
    if not tensor.is_floating_point():
        return
    flat = tensor.reshape(-1)
    if sample and flat.numel() > SAMPLE_SIZE:
        flat = flat[:: flat.numel() // SAMPLE_SIZE]
    for part in torch.split(flat, 1 << 22):  # in pieces: bounds the memory of the mask
        num_bad = part.numel() - int(torch.isfinite(part).sum())
        if num_bad:
            raise ArtifactError(
                "TL008",
                f"`{name}` holds NaN or infinity ({num_bad} of {part.numel()} values looked at)",
                "convert again from sound weights (fp16 overflows above 65504: use --dtype bf16)",
            )


def _allowed_dtypes(config: ModelConfig, name: str) -> tuple[torch.dtype, ...]:
    if name.endswith(".scale") or not is_matrix(name):
        return (torch.float32,)
    if config.dtype == "int8":  # single matrices may stay unquantised
        return (torch.int8, torch.float32, torch.float16, torch.bfloat16)
    return (TORCH_DTYPES[config.dtype],)


def _block_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    arch, d = config.arch, config.arch.d_model
    yield from _norm(config, "norm1")
    for name, rows, has_bias in (
        ("q", arch.q_dim, arch.q_bias),
        ("k", arch.kv_dim, arch.k_bias),
        ("v", arch.kv_dim, arch.v_bias),
    ):
        yield f"attn.{name}.weight", (rows, d)
        if has_bias:
            yield f"attn.{name}.bias", (rows,)
    if arch.qk_norm:
        yield "attn.q_norm.weight", (arch.head_dim,)
        yield "attn.k_norm.weight", (arch.head_dim,)
    if arch.qk_bias:
        yield "attn.qk_bias", (2, arch.n_heads, arch.head_dim)
    yield "attn.o.weight", (d, arch.q_dim)
    if arch.o_bias:
        yield "attn.o.bias", (d,)
    if arch.block != "pre":
        yield from _norm(config, "norm2")
    yield from _norm(config, "norm3")
    for name, rows, columns in (
        ("gate", arch.d_ff, d),
        ("up", arch.d_ff, d),
        ("down", d, arch.d_ff),
    ):
        if name == "gate" and not arch.is_gated:
            continue
        yield f"mlp.{name}.weight", (rows, columns)
        if arch.mlp_bias:
            yield f"mlp.{name}.bias", (rows,)
    if arch.block != "pre":
        yield from _norm(config, "norm4")


def _norm(config: ModelConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (config.arch.d_model,)
    if config.arch.norm == "layer":
        yield f"{name}.bias", (config.arch.d_model,)


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more


def _nearest(name: str, candidates: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(candidates)[:5000], n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def _remedy(found: dict[str, tuple[torch.dtype, Shape]]) -> str:
    if any(name.startswith(("model.", "transformer.", "lm_head.")) for name in found):
        return "this looks like an unconverted checkpoint: run python -m gpu_worker.convert"
    return "correct the configuration or the weights"
