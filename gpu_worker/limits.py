"""What an engine can hold and what it accepts: options made whole, the limits told to the scheduler, the card, refusals.

Plain numbers and names; no tensors, no state.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numba
import torch

import kernels
from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.exits import has_exit, is_sequential
from gpu_worker.kv_cache import extra_tables
from gpu_worker.kv_sizes import (
    FORMATS,
    is_absorbed,
    kv_bytes_per_token,
    mode_name,
    unusable_reason,
)
from gpu_worker.kv_store import form_of
from gpu_worker.model_config import ModelConfig
from kernels.layout import BLOCK_SIZE
from scheduler.messages import MAX_BRANCHES, MAX_DRAFT_AHEAD, Params, Run, WorkerLimits

MEMORY_SHARE = 0.25  # of the free memory of a host, for the KV pool when its size is not given
WEIGHT_COPIES = 3  # on a GPU, at most: in the orders of several kernels
DEVICE_SHARE = 0.85  # of what a GPU has free beside the weights; the rest is for activations
# Running sequences up to which guesses pay, of the host's own and of the device's waves, by whether the device is the CPU. A step of guesses
# that the host plans takes a GPU longer than plain steps, which it replays from one graph.
MAX_SPECULATING = {True: (2, 2), False: (0, 16)}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine runs; see the settings of the same names.

    `num_blocks` 0: as many as memory and `max_rows` suggest. `max_speculating`: running sequences up to which the host makes guesses; with
    more, their rows cost more than they bring. `max_waves`: the same for waves that the device runs by itself. -1: what was measured of
    the device (docs/speculation.md). `is_graphed`: decode rows run in graphs of the device
    and plain steps one ahead of the host; same tokens, for devices that graphs pay on.
    """

    device: str = "cpu"
    kv_format: str = "fp32"
    kv_share: str = "per_loop"
    num_blocks: int = 0
    max_rows: int = 64
    prefill_chunk: int = 256
    max_seq_len: int = 0
    threads: int = 1
    build_dir: str = ""
    h_mode_fp16_attn_qkv: bool = False
    commit: str | None = None
    hf_home: str = ""
    max_speculating: int = -1
    max_waves: int = -1
    is_graphed: bool = False


def resolve(config: ModelConfig, options: EngineOptions, weight_bytes: int) -> EngineOptions:
    """The options with the sequence length and the number of blocks decided. `weight_bytes` are those of the stored weights.

    Raises:
        ArtifactError: TL013 if the artifact cannot use the KV mode, TL014 if not even one longest sequence fits in the pool.
    """
    reason = unusable_reason(config, options.kv_format, options.kv_share)
    if reason:
        raise ArtifactError(
            "TL013",
            f"KV mode {kv_mode(config, options)}: {reason}",
            "choose another TINYLOOP_KV_FORMAT or TINYLOOP_KV_SHARE",
        )
    max_seq_len = min(options.max_seq_len or config.arch.max_pos, config.arch.max_pos)
    one = -(-max_seq_len // BLOCK_SIZE) * (extra_tables(config) + config.loop.default)
    form = form_of(config, options.kv_format)
    budget = _kv_budget(options, weight_bytes)
    for_stored = budget - num_copies(config, options) * form.copy_bytes
    block_bytes = form.block_bytes + form.sink_bytes  # there is room for sinks beside every block
    fitting = max(for_stored // block_bytes, budget // (block_bytes + form.copy_bytes))
    num_blocks = max(options.num_blocks or min(one * options.max_rows, fitting), 0)
    if num_blocks < one:
        raise ArtifactError(
            "TL014",
            f"the KV pool has {num_blocks} blocks of {form.block_bytes} bytes, one sequence of {max_seq_len} positions takes {one}; "
            f"{budget} bytes of memory are free for it: {_what_would_fit(config, options, budget)}",
            "raise TINYLOOP_KV_BLOCKS, lower TINYLOOP_MAX_SEQ_LEN, or choose another TINYLOOP_KV_FORMAT",
        )
    if options.num_blocks and options.device != "cpu" and num_blocks > fitting:
        raise ArtifactError(
            "TL014",
            f"{num_blocks} KV blocks take {num_blocks * form.block_bytes} bytes, {budget} are free for them: "
            f"{_what_would_fit(config, options, budget)}",
            f"TINYLOOP_KV_BLOCKS up to {max(fitting, 0)}, or another TINYLOOP_KV_FORMAT",
        )
    by_host, by_device = MAX_SPECULATING[options.device == "cpu"]
    return replace(
        options,
        max_seq_len=max_seq_len,
        num_blocks=num_blocks,
        max_speculating=by_host if options.max_speculating < 0 else options.max_speculating,
        max_waves=by_device if options.max_waves < 0 else options.max_waves,
    )


def kv_mode(config: ModelConfig, options: EngineOptions) -> str:
    """The name of the mode that a worker runs; where K and V are rebuilt in fp16, that is part of it."""
    name = mode_name(options.kv_format, options.kv_share)
    is_rebuilt = options.kv_format in ("h", "h_int4") and not is_absorbed(config)
    return f"{name}+fp16_qkv" if is_rebuilt and options.h_mode_fp16_attn_qkv else name


def num_copies(config: ModelConfig, options: EngineOptions) -> int:
    """Exact copies of blocks that can be in use at once: two blocks of each sequence's tables and the chunk of a prompt."""
    num_tables = extra_tables(config) + config.loop.hard_max
    return num_tables * (2 * options.max_rows + options.prefill_chunk // BLOCK_SIZE + 1)


def _kv_budget(options: EngineOptions, weight_bytes: int) -> int:
    """Bytes that the KV pool may take."""
    if options.device == "cpu" or not torch.cuda.is_available():
        return int(free_memory() * MEMORY_SHARE)
    torch.cuda.empty_cache()  # what an earlier attempt has left
    free, _ = torch.cuda.mem_get_info()
    return max(0, int((free - WEIGHT_COPIES * weight_bytes) * DEVICE_SHARE))


def _what_would_fit(config: ModelConfig, options: EngineOptions, budget: int) -> str:
    """For each KV format that the artifact can use: bytes per token at its default loops, and the tokens that fit."""
    found = []
    for kv_format in FORMATS:
        if not unusable_reason(config, kv_format, options.kv_share):
            size = kv_bytes_per_token(config, kv_format, options.kv_share)
            found.append(f"{kv_format} {size} bytes per token, {budget // size} tokens")
    return "; ".join(found)


def free_memory() -> int:
    """Bytes of memory that this process could still get."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        free = min(free, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        pass  # no such limit
    return free


def worker_limits(config: ModelConfig, options: EngineOptions) -> WorkerLimits:
    return WorkerLimits(
        max_rows=options.max_rows,
        num_blocks=options.num_blocks,
        extra_tables=extra_tables(config),
        max_seq_len=options.max_seq_len,
        vocab=config.arch.vocab,
        loops_default=config.loop.default,
        loops_trained=config.loop.trained_max,
        loops_max=config.loop.hard_max,
        has_coda=config.stages.coda > 0,
        has_injection=config.loop.inject != "none",
        has_init_seed=config.loop.state_init.kind == "normal",
        exit_kinds=("none", "latent", "kl") + ("gate",) * (config.exit.kind == "gate"),
        kv_modes=(kv_mode(config, options),),
    )


def card(
    card: dict[str, Any],
    limits: WorkerLimits,
    options: EngineOptions,
    numerics: str,
    kv_bytes_per_token: float,
) -> dict[str, Any]:
    """The artifact's card entries completed with the engine's own; `kv_bytes_per_token` is what its allocator says at full context."""
    computed = card["kv_bytes_per_token"]
    return card | {
        "kv_bytes_per_token": computed | {limits.kv_modes[0]: round(kv_bytes_per_token)},
        "max_seq_len": limits.max_seq_len,
        "kv_modes": list(limits.kv_modes),
        "kv_mode_default": limits.kv_modes[0],
        "speculation": limits.loops_max > 1,
        "numerics_id": numerics,
        "block_size": BLOCK_SIZE,
        "max_rows": limits.max_rows,
        "num_blocks": limits.num_blocks,
        "commit": options.commit,
    }


def numerics_id(config: ModelConfig, options: EngineOptions) -> str:
    """Names all that the bits of a result may depend on, beside the artifact and the request: no sequence moves between two of them."""
    if options.device == "cuda" and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return (
            f"cuda-{device.name.replace(' ', '_')}-sm{device.major}{device.minor}-{device.multi_processor_count}"
            f"-torch{torch.__version__}-cuda{torch.version.cuda}-kernels{kernels.version()}"
            f"-{config.dtype}-kv_{kv_mode(config, options)}"
        )
    isa = torch.backends.cpu.get_cpu_capability().lower()
    return (
        f"{options.device}-{platform.machine()}-{isa}-t{options.threads}"
        f"-torch{torch.__version__.split('+')[0]}-numba{numba.__version__}-{config.dtype}-kv_{kv_mode(config, options)}"
    )


def refusal(run: Run, limits: WorkerLimits, config: ModelConfig) -> tuple[str, str] | None:
    """Code and message of why a run cannot be done here, None if it can. The scheduler has checked most of it before."""
    params = run.params
    tokens = (*run.prompt, *run.emitted)
    named = [i for i, _ in params.logit_bias] + list(params.stop_token_ids)
    if not run.prompt:
        return "invalid_request", "the prompt is empty"
    if max(tokens) >= limits.vocab or any(not 0 <= i < limits.vocab for i in named):
        return "invalid_request", f"a token id is outside the vocabulary of {limits.vocab}"
    if not 1 <= params.loops <= limits.loops_max:
        return "invalid_request", f"loops {params.loops}, allowed: 1 to {limits.loops_max}"
    positions = max(len(run.prompt) + params.max_tokens, len(tokens))
    if positions > limits.max_seq_len:
        return "context_length_exceeded", f"{positions} positions, at most {limits.max_seq_len}"
    blocks = -(-positions // BLOCK_SIZE) * (params.loops + limits.extra_tables)
    if blocks > limits.num_blocks:
        return "context_length_exceeded", f"{blocks} KV blocks, the pool has {limits.num_blocks}"
    if params.kv_cache_mode and params.kv_cache_mode not in limits.kv_modes:
        return (
            "invalid_request",
            f"KV mode {params.kv_cache_mode}, this worker has {', '.join(limits.kv_modes)}",
        )
    if params.exit_kind not in limits.exit_kinds:
        return (
            "invalid_request",
            f"exit {params.exit_kind}, this worker has {', '.join(limits.exit_kinds)}",
        )
    if not 1 <= params.min_loops <= params.loops:
        return "invalid_request", f"min_loops {params.min_loops}, allowed: 1 to {params.loops}"
    if params.exit_kv not in ("complete", "copy"):
        return "invalid_request", f"exit_kv {params.exit_kv}, allowed: complete, copy"
    if params.warm_start and (config.loop.inject == "none" or config.loop.warm_start == "off"):
        return (
            "invalid_request",
            "warm start needs a model that injects the embeddings at each loop and was trained to start from carried states",
        )
    if params.speculation != "none" and is_sequential(params, limits.has_coda):
        return (
            "invalid_request",
            "speculation needs tokens that can run side by side: not with warm start, nor with a KL exit before a coda",
        )
    reason = speculation_refusal(params)
    if reason:
        return "invalid_request", reason
    if params.top_p <= 0 or params.repetition_penalty <= 0 or params.temperature < 0:
        return (
            "invalid_request",
            "top_p and repetition_penalty must be above 0, temperature not below",
        )
    return None


def speculation_refusal(params: Params) -> str:
    """Why a speculation cannot be done as asked, "" if it can."""
    if params.speculation == "none":
        return ""
    if params.loops < 2:
        return f"loops {params.loops}: speculation drafts with fewer loops than it verifies with, so that needs at least 2"
    if not 1 <= params.draft_loops < params.loops:
        return f"draft_loops {params.draft_loops}, allowed: 1 to {params.loops - 1}"
    if not 0 <= params.draft_ahead <= MAX_DRAFT_AHEAD:
        return f"draft_ahead {params.draft_ahead}, allowed: 1 to {MAX_DRAFT_AHEAD}, or 0 to adapt"
    if params.speculation == "tree" and not 1 <= params.branches <= MAX_BRANCHES:
        return f"K_branches {params.branches}, allowed: 1 to {MAX_BRANCHES}"
    if params.speculation == "pipelined" and has_exit(params):
        return "pipelined speculation reads tokens at fixed loops: not with an adaptive exit"
    return ""
