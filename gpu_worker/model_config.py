"""The artifact's configuration: frozen dataclasses that mirror its JSON, and the strict reader of that JSON.

Every key is required, unknown keys (but `x_...`) and values are refused by name, duplicate keys and NaN too.
Nothing here knows tensors or files.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gpu_worker.artifact_errors import ArtifactError

FORMAT = 1
MAX_CONFIG_BYTES = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary angles divided by `factor`."""

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rule: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_pos: int
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True, slots=True)
class Pos:
    """How positions enter. `theta`, `pairing` and `scaling` matter for `rope` alone."""

    kind: Literal["rope", "learned", "alibi", "none"] = "rope"
    theta: float = 10000.0
    pairing: Literal["half", "interleaved"] = "half"
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class Arch:
    """Shapes and kinds of one block and of the embedding. `d_ff` is the width between up and down."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    max_pos: int
    act: Literal["silu_glu", "gelu", "gelu_tanh", "relu2"] = "silu_glu"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    block: Literal["pre", "branch_post", "sum_post"] = "pre"
    pos: Pos = field(default_factory=Pos)
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_bias: bool = False
    qk_norm: bool = False
    embed_scale: float = 1.0
    embed_rank: int = 0
    tied_head: bool = True

    @property
    def is_gated(self) -> bool:
        return self.act.endswith("_glu")

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Stages:
    """Number of layers before, inside and after the loop."""

    prelude: int
    core: int
    coda: int


@dataclass(frozen=True, slots=True)
class StateInit:
    """The state before loop 1. `std` and `cut` (in sigmas) matter for `normal` alone."""

    kind: Literal["embed", "zeros", "normal"] = "embed"
    std: float = 0.0
    cut: float = 3.0


@dataclass(frozen=True, slots=True)
class Loop:
    """How often the core runs and what happens between two runs."""

    default: int
    trained_max: int
    hard_max: int
    inject: Literal["none", "concat", "add"] = "none"
    state_init: StateInit = field(default_factory=StateInit)
    norm_each: bool = False
    norm_after_core: bool = False
    warm_start: Literal["off", "post_norm", "raw"] = "off"


@dataclass(frozen=True, slots=True)
class Exit:
    """The adaptive exit that the model was made for; `threshold` None leaves it off unless a request asks."""

    kind: Literal["none", "gate", "latent", "kl"] = "none"
    threshold: float | None = None
    min_loops: int = 1


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids with a meaning; `eos` are all that end a text."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a model but its weights."""

    name: str
    arch: Arch
    stages: Stages
    loop: Loop
    exit: Exit = field(default_factory=Exit)
    tokens: SpecialTokens = field(default_factory=SpecialTokens)
    dtype: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    format: int = FORMAT

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; equal configurations give equal bytes."""
        return json.dumps(
            dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False
        )

    @staticmethod
    def from_json(text: str) -> ModelConfig:
        """The configuration in a JSON text, checked.

        Raises:
            ArtifactError: TL002, TL003, TL011 or TL012.
        """
        value = parse_json(text, "config", MAX_CONFIG_BYTES)
        if not isinstance(value, dict):
            raise _invalid("config", value, "an object")
        number = value.get("format")
        if type(number) is int and number != FORMAT:
            raise ArtifactError(
                "TL002",
                f"format {number}, this program reads format {FORMAT}",
                "convert the model again or upgrade",
            )
        config: ModelConfig = _read(ModelConfig, value, "")
        check(config)
        return config


def parse_json(text: str, what: str, max_bytes: int) -> Any:
    """Strict JSON: no duplicate keys, no NaN or Infinity, no more than `max_bytes` characters.

    Raises:
        ArtifactError: TL003.
    """
    if len(text) > max_bytes:
        raise ArtifactError(
            "TL003", f"{what} has {len(text)} characters, more than {max_bytes}", "make it smaller"
        )

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ArtifactError(
                "TL003", f"{what}: key `{twice}` occurs twice", "keep one of the two"
            )
        return found

    def no_constant(name: str) -> Any:
        raise ArtifactError("TL003", f"{what}: {name} is not a number", "use a finite number")

    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except (ValueError, RecursionError) as ex:
        raise ArtifactError("TL003", f"{what} is not JSON: {ex}", "write it again") from None


def check(config: ModelConfig) -> None:
    """What the types alone do not say.

    Raises:
        ArtifactError: TL003, TL011 (special token ids) or TL012 (loop counts).
    """
    arch, stages, loop = config.arch, config.stages, config.loop
    if config.format != FORMAT:
        raise ArtifactError(
            "TL002", f"format {config.format}, this program writes {FORMAT}", "use that number"
        )
    if not config.name or not config.name.isprintable():
        raise _invalid("name", config.name, "a printable name")
    for key in ("d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab", "max_pos"):
        if not 1 <= getattr(arch, key) < 1 << 31:
            raise _invalid(f"arch.{key}", getattr(arch, key), "1 or more, below 2^31")
    if arch.n_heads % arch.n_kv_heads:
        raise _invalid("arch.n_kv_heads", arch.n_kv_heads, f"a divisor of n_heads ({arch.n_heads})")
    if arch.qk_bias and arch.n_heads != arch.n_kv_heads:
        raise _invalid("arch.qk_bias", True, "false, as n_kv_heads differs from n_heads")
    if arch.pos.kind == "rope" and arch.head_dim % 2:
        raise _invalid("arch.head_dim", arch.head_dim, "even, as positions are rotary")
    if arch.pos.kind == "rope" and arch.pos.theta <= 0:
        raise _invalid("arch.pos.theta", arch.pos.theta, "above 0")
    _check_scaling(arch.pos)
    if not 0 < arch.norm_eps < 1:
        raise _invalid("arch.norm_eps", arch.norm_eps, "between 0 and 1")
    if arch.embed_scale == 0:
        raise _invalid("arch.embed_scale", arch.embed_scale, "anything but 0")
    if not 0 <= arch.embed_rank < arch.d_model:
        raise _invalid(
            "arch.embed_rank", arch.embed_rank, f"0 (off) to d_model - 1 ({arch.d_model - 1})"
        )
    for key, least in (("prelude", 0), ("core", 1), ("coda", 0)):
        if not least <= getattr(stages, key) <= 10_000:
            raise _invalid(f"stages.{key}", getattr(stages, key), f"{least} to 10000")
    if not 1 <= loop.default <= loop.trained_max <= loop.hard_max:
        raise ArtifactError(
            "TL012",
            f"loop.default {loop.default}, loop.trained_max {loop.trained_max}, loop.hard_max {loop.hard_max}",
            "they must satisfy 1 <= default <= trained_max <= hard_max",
        )
    if not 1 <= config.exit.min_loops <= loop.default:
        raise ArtifactError(
            "TL012",
            f"exit.min_loops {config.exit.min_loops}",
            f"must be 1 to loop.default ({loop.default})",
        )
    if loop.inject == "none" and loop.state_init.kind != "embed":
        raise _invalid(
            "loop.state_init.kind",
            loop.state_init.kind,
            "`embed`, as nothing else injects the embeddings",
        )
    if loop.inject == "none" and loop.warm_start != "off":
        raise _invalid(
            "loop.warm_start",
            loop.warm_start,
            "`off`, as the embeddings are not injected each loop",
        )
    if loop.state_init.kind == "normal" and not (
        loop.state_init.std > 0 and loop.state_init.cut > 0
    ):
        raise _invalid(
            "loop.state_init", dataclasses.asdict(loop.state_init), "std and cut above 0"
        )
    if config.exit.threshold is not None and config.exit.threshold < 0:
        raise _invalid("exit.threshold", config.exit.threshold, "null, 0 or more")
    _check_token_ids(config)


def _check_scaling(pos: Pos) -> None:
    scaling = pos.scaling
    if scaling is None:
        return
    if pos.kind != "rope":
        raise _invalid("arch.pos.scaling", scaling.kind, f"null, as positions are `{pos.kind}`")
    if scaling.factor < 1:
        raise _invalid("arch.pos.scaling.factor", scaling.factor, "1 or more")
    if isinstance(scaling, Llama3Scaling):
        if not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
            raise _invalid(
                "arch.pos.scaling.low_freq_factor",
                scaling.low_freq_factor,
                "above 0, below high_freq_factor",
            )
        if scaling.original_max_pos < 1:
            raise _invalid(
                "arch.pos.scaling.original_max_pos", scaling.original_max_pos, "1 or more"
            )


def _check_token_ids(config: ModelConfig) -> None:
    named = [("bos", config.tokens.bos), ("pad", config.tokens.pad)] + [
        ("eos", t) for t in config.tokens.eos
    ]
    for key, token in named:
        if token is not None and not 0 <= token < config.arch.vocab:
            raise ArtifactError(
                "TL011",
                f"tokens.{key} is {token}, the vocabulary has {config.arch.vocab} entries",
                "correct the id in the source's configuration and convert again",
            )


# ------------------------------------------------------------------------------------------------- JSON to dataclasses


def _invalid(path: str, value: Any, allowed: str) -> ArtifactError:
    return ArtifactError("TL003", f"`{path}` is {value!r:.80}", f"allowed: {allowed}")


def _read(kind: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type `kind`; `path` names it in errors."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, path)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise _invalid(path, value, ", ".join(args))
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in args:
            return None
        options = [a for a in args if a is not NoneType]
        return _read(
            options[0] if len(options) == 1 else _by_kind(options, value, path), value, path
        )
    if origin is tuple:
        if not isinstance(value, list):
            raise _invalid(path, value, "a list")
        return tuple(_read(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if kind is float and type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _invalid(
            path,
            value,
            {"int": "an integer", "float": "a number", "bool": "true or false"}.get(
                kind.__name__, "a string"
            ),
        )
    return value


def _read_dataclass(cls: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _invalid(path, value, "an object")
    prefix = f"{path}." if path else ""
    hints = get_type_hints(cls)
    unknown = [key for key in value if key not in hints and not key.startswith("x_")]
    if unknown:
        raise ArtifactError(
            "TL003",
            f"unknown key `{prefix}{unknown[0]}`",
            "remove it, or upgrade if a newer program wrote it",
        )
    missing = [key for key in hints if key not in value]
    if missing:
        raise ArtifactError(
            "TL003", f"key `{prefix}{missing[0]}` is missing", "convert the model again"
        )
    return cls(**{key: _read(hint, value[key], f"{prefix}{key}") for key, hint in hints.items()})


def _by_kind(options: list[Any], value: Any, path: str) -> Any:
    """The dataclass among `options` whose `kind` default is the value's `kind`."""
    kinds = {option.__dataclass_fields__["kind"].default: option for option in options}
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise _invalid(f"{path}.kind", kind, ", ".join(kinds) + " (or null)")
    return kinds[kind]
