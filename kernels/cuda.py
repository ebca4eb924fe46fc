"""The GPU kernels under the names and arguments of `kernels.cpu`, on tensors of PyTorch's current device and stream.

One class of arithmetic for all rows: each row's result has one fixed order of operations whatever the other rows, its place or the
chunk. Nothing here waits for the device. Without a GPU the same functions take tensors in host memory and run on the emulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kernels import cuda_attention, cuda_fragments, sampling
from kernels.compiler import Variant
from kernels.cuda_attention import read_inputs, store_inputs
from kernels.cuda_dense import (
    activate,
    divergence,
    embed_rows,
    norm,
    prepare_qkv,
    relative_change,
)
from kernels.cuda_linear import linear, linear_add, pack
from kernels.layout import CutCache, FragmentCache, PagedCache, Paging
from kernels.runtime import launch
from kernels.sampling import pack_settings as pack_choices
from kernels.wave import advance_wave

__all__ = [
    "DEVICE", "activate", "advance_wave", "attention", "choose", "choose_packed", "divergence", "embed_rows", "linear", "linear_add",
    "log_probabilities",
    "norm", "pack", "pack_choices", "prepare_qkv", "read_inputs", "relative_change", "set_threads", "store_inputs", "store_kv",
]  # fmt: skip

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Cache = PagedCache | CutCache | FragmentCache

_LOG_PROBABILITIES = sampling.log_probabilities("log_probabilities")


def set_threads(num_threads: int) -> None:
    """Threads of the host play no part in GPU kernels."""


def store_kv(
    qkv: Tensor, heads: tuple[int, int, int], cache: Cache, layer: int, paging: Paging
) -> None:
    """Writes each row's K and V, from qkv (n, (H + 2 Hkv) Dh), to the row's place in layer `layer` of its block."""
    if isinstance(cache, FragmentCache):
        cuda_fragments.store_kv(qkv, heads, cache, layer, paging)
    else:
        cuda_attention.store_kv(qkv, heads, cache, layer, paging)


def attention(
    qkv: Tensor,
    heads: tuple[int, int, int],
    cache: Cache,
    layer: int,
    slopes: Tensor | None,
    paging: Paging,
    scale: float | None = None,
) -> Tensor:
    """Attention of each row's q over the keys up to its own position, (n, H Dh); see `kernels.cpu.attention`."""
    if isinstance(cache, FragmentCache):
        return cuda_fragments.attention(qkv, heads, cache, layer, slopes, paging, scale)
    return cuda_attention.attention(qkv, heads, cache, layer, slopes, paging, scale)


def choose(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """One token per row of logits (n, vocab), int64 (n,) on their device; see `kernels.cpu.choose`. The settings are in host memory."""
    packed = pack_choices(temperature, top_k, top_p, min_p, keys)
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    choose_packed(logits, [part.to(logits.device) for part in packed], tokens)
    return tokens.long()


def choose_packed(logits: Tensor, settings: Sequence[Tensor], tokens: Tensor) -> None:
    """`choose` into int32 `tokens` (n,), with settings that are packed, and on the device of the logits."""
    variant = _chooser(logits.shape[1])
    grid = len(logits) * variant.cluster, 1
    launch(variant, grid, logits, None, None, *settings, tokens)


@cache
def _chooser(vocab: int) -> Variant:
    return sampling.choose("choose", vocab, is_shaped=False)


def log_probabilities(
    logits: Tensor, chosen: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of each row of logits (n, vocab) at `chosen` (n,), and its `num_top` largest; see `kernels.cpu`."""
    n = len(logits)
    logprobs, top_logprobs = logits.new_empty(n), logits.new_empty(n, num_top)
    top_ids = torch.zeros(n, num_top, dtype=torch.int32, device=logits.device)
    launch(
        _LOG_PROBABILITIES, (n, 1), logits, chosen.int(), logprobs, top_ids, top_logprobs, logits.shape[1], num_top,
    )  # fmt: skip
    return logprobs, top_ids.long(), top_logprobs
