"""What TinyLoop knows of each family of checkpoints: how its configuration reads and how its tensors are called.

One function per family, from the source's configuration and tensor names to a `Plan`. Whatever would change the arithmetic and is not
known here is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.convert_plan import Part, Plan
from gpu_worker.convert_source import SourceConfig, WeightSource
from gpu_worker.model_config import (
    Arch,
    Exit,
    LinearScaling,
    Llama3Scaling,
    Loop,
    ModelConfig,
    Pos,
    SpecialTokens,
    Stages,
    StateInit,
)

# Keys that mean another arithmetic unless they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "clip_qkv": (None,),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "mlp_only_layers": (None, []),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "use_mrope": (None, False),
    "hidden_act": ("silu", "swish"),
}

# Keys without influence on the result, kept out of the summary.
_HARMLESS = {
    "architectures", "architecture_class_name", "attention_dropout", "auto_map", "dtype", "initializer_range", "model_type",
    "name_or_path", "_name_or_path", "pretraining_tp", "torch_dtype", "transformers_version", "use_cache", "layer_types",
    "activation_checkpoint_impl", "effective_expected_depth", "init_orthogonal", "init_strategy", "mean_backprop_depth",
    "n_layers", "padding_multiple", "sampling_scheme", "vocab_size", "max_window_layers", "is_llama_config", "rope_interleaved",
    "test_time_noise_type", "block_class_name", "_attn_implementation_autoset", "return_dict", "head_dim",
}  # fmt: skip


def plan(config: SourceConfig, source: WeightSource) -> Plan:
    """The plan for a checkpoint, not yet checked against its tensors.

    Raises:
        ArtifactError: TL021 for an unknown model type, TL022 for an option that is not supported.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ArtifactError(
            "TL021",
            f"model_type is {model_type!r:.60}",
            "supported: " + ", ".join(sorted(FAMILIES)),
        )
    for key, allowed in _NEUTRAL.items():
        config.require(key, allowed, allowed[0])
    try:
        made = family(config, source)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as ex:
        raise ArtifactError(
            "TL022",
            f"a value in the configuration is of a kind that upstream never writes: {ex}",
            "correct config.json",
        ) from None
    unseen = [key for key in config.unseen() if key not in _HARMLESS]
    if unseen:
        made.notes.append("keys of config.json without effect here: " + ", ".join(unseen))
    return made


# ------------------------------------------------------------------------------------------------------------ Llama


def _llama(config: SourceConfig, source: WeightSource) -> Plan:
    """Llama, Mistral, Qwen 2 and 3 (dense), SmolLM: pre-norm blocks, one loop."""
    num_layers = config.layers("num_hidden_layers")
    arch = _llama_arch(config, source, num_layers, block="pre")
    loop = Loop(default=1, trained_max=1, hard_max=1, norm_each=True)
    made = Plan(
        _model(config, arch, Stages(0, num_layers, 0), loop, Exit()), str(config.get("model_type"))
    )
    made.ignored |= _rotary_buffers(source)
    _llama_parts(
        made, source, norms={"norm1": "input_layernorm", "norm3": "post_attention_layernorm"}
    )
    return made


def _llama_arch(config: SourceConfig, source: WeightSource, num_layers: int, block: Any) -> Arch:
    d_model, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    max_pos = config.integer("max_position_embeddings")
    _refuse_windows(config, num_layers, max_pos)
    _refuse_nope(config)
    names = source.names()

    def has(name: str) -> bool:
        return f"model.layers.0.{name}" in names

    has_all_biases = bool(config.get("attention_bias", False))
    return Arch(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", n_heads),
        head_dim=config.integer("head_dim", d_model // n_heads),
        d_ff=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        max_pos=max_pos,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        block=block,
        pos=_rotary(config),
        q_bias=has_all_biases or has("self_attn.q_proj.bias"),
        k_bias=has_all_biases or has("self_attn.k_proj.bias"),
        v_bias=has_all_biases or has("self_attn.v_proj.bias"),
        o_bias=has("self_attn.o_proj.bias")
        or (has_all_biases and config.get("model_type") != "qwen2"),
        mlp_bias=bool(config.get("mlp_bias", False)) or has("mlp.up_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
        tied_head=_is_tied(config, source, "lm_head.weight"),
    )


def _llama_parts(made: Plan, source: WeightSource, norms: dict[str, str]) -> None:
    arch, parts = made.config.arch, made.parts
    parts["embed.weight"] = Part("model.embed_tokens.weight")
    parts["norm.weight"] = Part("model.norm.weight")
    if not arch.tied_head:
        parts["head.weight"] = Part("lm_head.weight")
    elif "lm_head.weight" in source.names():
        _check_tied_copy(source, "lm_head.weight", "model.embed_tokens.weight")
        made.ignored.add("lm_head.weight")
    for i in range(made.config.stages.core):
        at, to = f"model.layers.{i}", f"core.{i}"
        for name in ("q", "k", "v", "o"):
            parts[f"{to}.attn.{name}.weight"] = Part(f"{at}.self_attn.{name}_proj.weight")
            if getattr(arch, f"{name}_bias"):
                parts[f"{to}.attn.{name}.bias"] = Part(f"{at}.self_attn.{name}_proj.bias")
        for name in ("gate", "up", "down"):
            parts[f"{to}.mlp.{name}.weight"] = Part(f"{at}.mlp.{name}_proj.weight")
            if arch.mlp_bias:
                parts[f"{to}.mlp.{name}.bias"] = Part(f"{at}.mlp.{name}_proj.bias")
        if arch.qk_norm:
            parts[f"{to}.attn.q_norm.weight"] = Part(f"{at}.self_attn.q_norm.weight")
            parts[f"{to}.attn.k_norm.weight"] = Part(f"{at}.self_attn.k_norm.weight")
        for target, name in norms.items():
            parts[f"{to}.{target}.weight"] = Part(f"{at}.{name}.weight")


# ------------------------------------------------------------------------------------------------------------- Ouro


def _ouro(config: SourceConfig, source: WeightSource) -> Plan:
    """Ouro: all layers are the core, each loop ends with the final norm, a gate tells when to leave."""
    num_layers, loops = config.layers("num_hidden_layers"), config.layers("total_ut_steps")
    arch = _llama_arch(config, source, num_layers, block="branch_post")
    loop = Loop(default=loops, trained_max=loops, hard_max=2 * loops, norm_each=True)
    threshold = config.number("early_exit_threshold", 1.0)
    exit_ = Exit("gate", threshold if threshold < 1 else None)
    made = Plan(_model(config, arch, Stages(0, num_layers, 0), loop, exit_), "ouro")
    made.ignored |= _rotary_buffers(source)
    norms = (
        "input_layernorm",
        "input_layernorm_2",
        "post_attention_layernorm",
        "post_attention_layernorm_2",
    )
    _llama_parts(made, source, {f"norm{n}": name for n, name in enumerate(norms, 1)})
    made.parts["exit.weight"] = Part("model.early_exit_gate.weight")
    made.parts["exit.bias"] = Part("model.early_exit_gate.bias")
    tokens = made.config.tokens
    if (tokens.bos, tokens.eos, tokens.pad) == (0, (0,), 0) and arch.vocab > 2:
        made.config = dataclasses.replace(made.config, tokens=SpecialTokens(bos=1, eos=(2,), pad=0))
        made.notes.append(
            "special tokens corrected: the published config says bos = eos = pad = 0; now bos 1, eos 2, pad 0"
        )
    if threshold >= 1:
        made.notes.append("exit threshold 1.0 means never: exits are off unless a request asks")
    return made


# ----------------------------------------------------------------------------------------------------------- Huginn


def _huginn(config: SourceConfig, source: WeightSource) -> Plan:
    """Huginn: prelude, core with injected embeddings, coda; the final norm before and after the coda."""
    config.require("injection_type", ("linear",), "linear")
    config.require("block_class_name", ("SandwichBlock",), "SandwichBlock")
    config.require("mlp_class_name", ("GatedMLP",), "GatedMLP")
    config.require("norm_class_name", ("RMSNorm_llama", "RMSNorm"), "RMSNorm_llama")
    config.require("nonlin_name", ("SiLU",), "SiLU")
    config.require("state_init", ("like-init", "zero"), "like-init")
    config.require("bias", (False,), False)
    config.require("test_time_noise", (0, 0.0), 0)
    d_model = config.integer("n_embd")
    n_heads = config.integer("num_attention_heads", config.get("n_heads"))
    init = config.get("init_values", {})
    if not isinstance(init, dict) or not all(
        isinstance(init.get(k), int | float) for k in ("std", "embed_scale")
    ):
        raise config.fault("init_values", init or None, "an object with std and embed_scale")
    arch = Arch(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", n_heads),
        head_dim=d_model // n_heads,
        d_ff=config.integer("intermediate_size"),
        vocab=config.integer("padded_vocab_size"),
        max_pos=config.integer("block_size"),
        norm_eps=config.number("norm_eps", 1e-6),
        block="sum_post",
        pos=Pos("rope", config.number("rope_base", 50000.0), "interleaved"),
        qk_bias=bool(config.get("qk_bias", False)),
        embed_scale=float(init["embed_scale"]),
        tied_head=_is_tied(config, source, "lm_head.weight", key="tie_embeddings"),
    )
    if arch.qk_bias and arch.n_kv_heads != arch.n_heads:
        raise config.fault(
            "qk_bias", True, "false where num_key_value_heads differs from the number of heads"
        )
    stages = Stages(
        config.layers("n_layers_in_prelude"),
        config.layers("n_layers_in_recurrent_block"),
        config.layers("n_layers_in_coda"),
    )
    loops = config.layers("mean_recurrence")
    std = float(init["std"]) * float(init["embed_scale"])
    state = (
        StateInit("normal", std, 3.0)
        if std > 0 and config.get("state_init") != "zero"
        else StateInit("zeros")
    )
    loop = Loop(
        loops, loops, 2 * loops, "concat", state, norm_after_core=True, warm_start="post_norm"
    )
    made = Plan(_model(config, arch, stages, loop, Exit("latent", None, min(4, loops))), "huginn")
    _huginn_parts(made, source)
    made.notes.append(
        "initial state: zeros unless a request gives init_seed (upstream draws a new random one each time)"
    )
    return made


def _huginn_parts(made: Plan, source: WeightSource) -> None:
    arch, parts = made.config.arch, made.parts
    parts["embed.weight"] = Part("transformer.wte.weight")
    parts["inject.weight"] = Part("transformer.adapter.weight")
    parts["norm.weight"] = Part("transformer.ln_f.weight")
    if not arch.tied_head:
        parts["head.weight"] = Part("lm_head.weight")
    elif "lm_head.weight" in source.names():
        _check_tied_copy(source, "lm_head.weight", "transformer.wte.weight")
        made.ignored.add("lm_head.weight")
    made.ignored.add("freqs_cis")
    q, kv = arch.q_dim, arch.kv_dim
    for stage, name in (("prelude", "prelude"), ("core", "core_block"), ("coda", "coda")):
        for i in range(getattr(made.config.stages, stage)):
            at, to = f"transformer.{name}.{i}", f"{stage}.{i}"
            fused = f"{at}.attn.Wqkv.weight"
            parts[f"{to}.attn.q.weight"] = Part(fused, 0, q)
            parts[f"{to}.attn.k.weight"] = Part(fused, q, q + kv)
            parts[f"{to}.attn.v.weight"] = Part(fused, q + kv, q + 2 * kv)
            if arch.qk_bias:
                parts[f"{to}.attn.qk_bias"] = Part(f"{at}.attn.qk_bias")
            parts[f"{to}.attn.o.weight"] = Part(f"{at}.attn.proj.weight")
            parts[f"{to}.mlp.gate.weight"] = Part(f"{at}.mlp.fc.weight", 0, arch.d_ff)
            parts[f"{to}.mlp.up.weight"] = Part(f"{at}.mlp.fc.weight", arch.d_ff, 2 * arch.d_ff)
            parts[f"{to}.mlp.down.weight"] = Part(f"{at}.mlp.proj.weight")
            for n in (1, 2, 3, 4):
                parts[f"{to}.norm{n}.weight"] = Part(f"{at}.norm_{n}.weight")


FAMILIES: dict[str, Callable[[SourceConfig, WeightSource], Plan]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "smollm3": _llama,
    "ouro": _ouro,
    "huginn_raven": _huginn,
}


# ------------------------------------------------------------------------------------------------- what they share


def _model(
    config: SourceConfig, arch: Arch, stages: Stages, loop: Loop, exit_: Exit
) -> ModelConfig:
    eos = config.get("eos_token_id", [])
    eos = eos if isinstance(eos, list) else [eos]
    bos, pad = config.get("bos_token_id"), config.get("pad_token_id")
    for key, ids in (("eos_token_id", eos), ("bos_token_id", [bos]), ("pad_token_id", [pad])):
        if not all(token is None or type(token) is int for token in ids):
            raise config.fault(key, ids, "token ids")
    tokens = SpecialTokens(bos, tuple(eos), pad)
    return ModelConfig("model", arch, stages, loop, exit_, tokens)


def _rotary(config: SourceConfig) -> Pos:
    nested = config.get("rope_parameters", {})
    scaling = config.get("rope_scaling", nested)
    theta = nested.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float) or not isinstance(scaling, dict):
        raise config.fault("rope_theta", theta, "a number")
    config.seen |= {"rope_theta", "rope_scaling"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    part = SourceConfig(scaling, "the rope scaling of config.json")
    if kind == "default":
        return Pos("rope", float(theta))
    if kind == "linear":
        return Pos("rope", float(theta), scaling=LinearScaling(part.number("factor")))
    if kind == "llama3":
        original = part.integer("original_max_position_embeddings")
        factor, low, high = (
            part.number(k) for k in ("factor", "low_freq_factor", "high_freq_factor")
        )
        return Pos("rope", float(theta), scaling=Llama3Scaling(factor, low, high, original))
    raise config.fault("rope_scaling", kind, "default, linear, llama3")


def _refuse_windows(config: SourceConfig, num_layers: int, max_pos: int) -> None:
    kinds = config.get("layer_types", [])
    if any(kind != "full_attention" for kind in kinds):
        odd = next(kind for kind in kinds if kind != "full_attention")
        raise config.fault("layer_types", odd, "full_attention in every layer")
    window = config.get("sliding_window")
    is_used = config.get("use_sliding_window", config.get("model_type") in ("mistral", "llama"))
    if window is None or not is_used or window >= max_pos:
        return
    if not kinds and config.integer("max_window_layers", 0) >= num_layers:
        return
    raise config.fault("sliding_window", window, "null, or at least max_position_embeddings")


def _refuse_nope(config: SourceConfig) -> None:
    layers = config.get("no_rope_layers")
    if layers is None and config.get("model_type") == "smollm3":
        raise config.fault(
            "no_rope_layer_interval",
            config.get("no_rope_layer_interval", 4),
            "rotary positions in every layer",
        )
    if layers is not None and not all(layers):
        raise config.fault("no_rope_layers", layers, "rotary positions in every layer (all ones)")
    config.get("no_rope_layer_interval")


def _is_tied(
    config: SourceConfig, source: WeightSource, head: str, key: str = "tie_word_embeddings"
) -> bool:
    tied = config.get(key)
    return bool(tied) if tied is not None else head not in source.names()


def _check_tied_copy(source: WeightSource, head: str, embedding: str) -> None:
    if source.shape(head) != source.shape(embedding) or not source.tensor(head).equal(
        source.tensor(embedding)
    ):
        raise ArtifactError(
            "TL023",
            f"the head is tied, but `{head}` differs from `{embedding}`",
            "set tie_word_embeddings to false if the head is its own",
        )


def _rotary_buffers(source: WeightSource) -> set[str]:
    return {name for name in source.names() if name.endswith("rotary_emb.inv_freq")}
