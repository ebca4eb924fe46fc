"""KV bytes per token of a model in each cache mode, computed from its shapes, and the modes that it cannot use.

A mode is `FORMAT` or `FORMAT+last_loop`. These are the sizes of full blocks: the allocator's own counters add tables, the exact
copies of unfinished blocks and the unused part of each request's last block.
"""

from __future__ import annotations

from gpu_worker.model_config import Arch, ModelConfig

FORMATS = ("fp32", "fp16", "int8", "int4", "h", "h_int4")
SHARES = ("per_loop", "last_loop")
INT8_SCALE_BYTES = 2  # fp16 scale per group
INT4_SCALE_BYTES = 4  # fp16 scale and zero point per group


def mode_name(kv_format: str, kv_share: str) -> str:
    """The name of a mode in the model card, requests and answers."""
    return kv_format if kv_share == "per_loop" else f"{kv_format}+{kv_share}"


def slot_bytes_per_token(arch: Arch, kv_format: str) -> float:
    """Bytes that one token takes in one slot (one layer at one loop)."""
    kv_values = 2 * arch.kv_dim
    if kv_format == "fp32":
        return 4 * kv_values
    if kv_format == "fp16":
        return 2 * kv_values
    if kv_format == "int8":
        return kv_values * (1 + INT8_SCALE_BYTES / arch.head_dim)
    if kv_format == "int4":
        return kv_values * (0.5 + INT4_SCALE_BYTES / arch.head_dim)
    if kv_format == "h":
        return 2 * arch.d_model
    if kv_format == "h_int4":
        return arch.d_model * (0.5 + INT4_SCALE_BYTES / h_group(arch))
    raise ValueError(f"no KV format {kv_format!r}")


def h_group(arch: Arch) -> int:
    """Values per scale of `h_int4`: the largest even divisor of d_model up to 128 (two values share a byte)."""
    return max(n for n in range(2, 129, 2) if arch.d_model % n == 0)


def num_slots(config: ModelConfig, kv_share: str, loops: int) -> int:
    """Slots of a request: prelude + core at each loop (or once) + coda."""
    stages = config.stages
    return stages.prelude + stages.core * (loops if kv_share == "per_loop" else 1) + stages.coda


def kv_bytes_per_token(
    config: ModelConfig, kv_format: str, kv_share: str, loops: int | None = None
) -> int:
    """Bytes per cached token of a request at `loops` (the default if None)."""
    slots = num_slots(config, kv_share, loops or config.loop.default)
    return round(slots * slot_bytes_per_token(config.arch, kv_format))


def unusable_reason(config: ModelConfig, kv_format: str, kv_share: str) -> str:
    """Why the artifact cannot use a mode, or "" if it can."""
    arch = config.arch
    if kv_format in ("h", "h_int4") and arch.d_model >= 2 * arch.kv_dim:
        return f"the attention input ({arch.d_model} values) is not smaller than K and V together ({2 * arch.kv_dim})"
    if kv_format == "int4" and arch.head_dim % 2:
        return f"head_dim {arch.head_dim} is odd"
    if kv_format == "h_int4" and arch.d_model % 2:
        return f"d_model {arch.d_model} is odd"
    if kv_share == "last_loop" and config.loop.hard_max == 1:
        return "one loop: there is nothing to share"
    return ""


def is_absorbed(config: ModelConfig) -> bool:
    """Whether H is read as it is (K folded into q); otherwise K and V are rebuilt from it."""
    return config.arch.pos.kind != "rope" and not config.arch.qk_norm
