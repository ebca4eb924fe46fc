"""The CPU kernels: products, norms, activations, rotary positions and paged attention over rows, in fp32.

Each row's result has one fixed order of operations whatever the other rows, the row's place, the chunk or the threads: that is
the whole point of having kernels of our own here (a library's products change bits with the number of rows). Threads split
columns, rows or heads, never a sum. The functions have the names and arguments of `kernels.reference`; they know no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import cpu_attention, cpu_cut, cpu_dense, cpu_exits, cpu_sampling
from kernels.cpu_dense import PANEL
from kernels.cpu_wave import advance_wave as advance_wave
from kernels.layout import CutCache, HostPaging, Packed, PagedCache, Paging

DEVICE = torch.device("cpu")
_pool: ThreadPoolExecutor | None = None
_num_threads = 1


def set_threads(num_threads: int) -> None:
    """Use that many threads from now on. Results do not depend on it."""
    global _pool, _num_threads
    _pool = ThreadPoolExecutor(num_threads - 1) if num_threads > 1 else None
    _num_threads = num_threads


def split(kernel: Callable[..., Any], total: int, *args: Any) -> None:
    """Runs kernel(low, high, *args) over [0, total), in equal parts on all threads."""
    if _pool is None or total <= 1:
        kernel(0, total, *args)
        return
    parts = min(_num_threads, total)
    bounds = [total * i // parts for i in range(parts + 1)]
    futures = [
        _pool.submit(kernel, low, high, *args)
        for low, high in zip(bounds[1:-1], bounds[2:], strict=True)
    ]
    kernel(0, bounds[1], *args)
    for future in futures:
        future.result()


# ------------------------------------------------------------------------------------------------------------- products


def pack(weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Packed:
    """A weight (num_out, num_in) repacked into panels (num_out / 32, num_in, 32), padded with zeros.

    It keeps its dtype (fp32, fp16, bf16, or int8 with fp32 `scale` (num_out,)): what is read at each step is what was stored, and
    the result has the same bits as with the weight converted to fp32 first.
    """
    num_out, num_in = weight.shape
    panels = -(-num_out // PANEL)
    if weight.dtype in (torch.float16, torch.bfloat16):
        weight = weight.contiguous().view(_RAW[weight.dtype])
    data = torch.zeros(panels * PANEL, num_in, dtype=weight.dtype)
    data[:num_out] = weight
    data = data.view(panels, PANEL, num_in).transpose(1, 2).contiguous()
    padded = torch.zeros(panels * PANEL)
    if scale is not None:
        padded[:num_out] = scale
    bias = None if bias is None else bias.float().contiguous()
    return Packed(data, num_out, num_in, bias, padded, (data.numpy(), padded.numpy()))


_RAW = {torch.float16: torch.int16, torch.bfloat16: torch.uint16}


def linear(x: Tensor, weight: Packed) -> Tensor:
    """y = x W^T (+ bias), (n, num_in) -> (n, num_out): one chain per element, from the bias, in ascending input order."""
    n = x.shape[0]
    if weight.bias is None:
        y = torch.zeros(n, weight.num_out)
    else:
        y = weight.bias.repeat(n, 1)
    _multiply(x, weight, y)
    return y


def linear_add(x: Tensor, weight: Packed, y: Tensor) -> None:
    """y += x W^T (+ bias) in place, each element one chain that starts from y (+ bias)."""
    if weight.bias is not None:
        y += weight.bias
    _multiply(x, weight, y)


def _multiply(x: Tensor, weight: Packed, y: Tensor) -> None:
    assert x.is_contiguous() and y.is_contiguous(), "the kernel goes by addresses"
    data, scale = weight.arrays
    split(cpu_dense.product, data.shape[0], x.numpy(), data, scale, y.numpy())


# ---------------------------------------------------------------------------------------------------- norms, activations


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMS norm of each row times `weight`; with a `bias` LayerNorm (the mean is taken off first, the bias added last)."""
    y = torch.empty_like(x)
    split(
        cpu_dense.norm,
        x.shape[0],
        x.numpy(),
        weight.numpy(),
        (weight if bias is None else bias).numpy(),
        bias is not None,
        eps,
        y.numpy(),
    )
    return y


_ACTS = {"silu_glu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}


def activate(x: Tensor, act: str) -> Tensor:
    """The MLP's activation, (n, d_ff) -> (n, d_ff); for `silu_glu` x is (n, 2 d_ff), gate first, then up."""
    y = torch.empty(x.shape[0], x.shape[1] // 2 if act == "silu_glu" else x.shape[1])
    split(cpu_dense.activate, x.shape[0], x.numpy(), _ACTS[act], y.numpy())
    return y


# ------------------------------------------------------------------------------------------------ positions, K and V, q


def prepare_qkv(
    qkv: Tensor,
    heads: tuple[int, int, int],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    qk_bias: Tensor | None,
    rotary: Tensor | None,
    is_interleaved: bool,
    positions: Tensor,
) -> None:
    """In place on the q and k parts of qkv (n, (H + 2 Hkv) Dh): RMS norm per head, bias, rotary positions, each if given.

    Args:
        heads: (H, Hkv, Dh).
        qk_bias: (2, H, Dh).
        rotary: (2, max_pos, Dh / 2), cosines and sines.
        is_interleaved: pairs are channels (2i, 2i + 1), else (i, i + Dh / 2).
        positions: (n,) int32.
    """
    if q_norm is None and qk_bias is None and rotary is None:
        return
    num_heads, num_kv, dim = heads
    none1, none3 = _NONE1, _NONE3
    split(
        cpu_dense.prepare, qkv.shape[0], qkv.numpy(), num_heads, num_kv, dim,
        none1 if q_norm is None else q_norm.numpy(), none1 if k_norm is None else k_norm.numpy(), eps,
        none3 if qk_bias is None else qk_bias.numpy(), none3 if rotary is None else rotary.numpy(),
        is_interleaved, positions.numpy(),
    )  # fmt: skip


_NONE1, _NONE3 = np.empty(0, dtype=np.float32), np.empty((0, 0, 0), dtype=np.float32)


def store_kv(
    qkv: Tensor,
    heads: tuple[int, int, int],
    cache: PagedCache | CutCache,
    layer: int,
    paging: Paging,
) -> None:
    """Writes each row's K and V, from qkv (n, (H + 2 Hkv) Dh), to the row's place in layer `layer` of its block."""
    num_heads, num_kv, dim = heads
    if isinstance(cache, CutCache):
        _store_cut(
            qkv, num_heads * dim, (num_heads + num_kv) * dim, num_kv, dim, cache, layer, paging
        )
        return
    arrays = HostPaging.of(paging)
    split(
        cpu_attention.store, qkv.shape[0], qkv.numpy(), num_heads, dim, *_stored(cache), layer,
        arrays.slots, arrays.tables, arrays.places, arrays.block_tables,
    )  # fmt: skip


def store_inputs(x: Tensor, cache: CutCache, layer: int, paging: Paging) -> None:
    """Writes each row's attention input, x (n, d), to its place in a cache that keeps inputs."""
    _store_cut(x, 0, 0, 1, x.shape[1], cache, layer, paging)


def read_inputs(cache: CutCache, layer: int, blocks: Tensor, copies: Tensor) -> Tensor:
    """The inputs (num_blocks, BLOCK_SIZE, d) of a sequence's first blocks, block ids int32 (num_blocks,) in one of its tables.

    Where `copies` int32 (num_blocks,) is 0 or more they come from that exact copy, else from the stored form with exact sinks.
    """
    kind, group, arrays, exact, sinks = _cut_arrays(cache)
    dim = cache.sink_values.shape[-1]
    out = torch.zeros(len(blocks), cache.values.shape[3], dim)
    cpu_cut.read_inputs(  # type: ignore[call-arg]
        blocks.numpy(), copies.numpy(), dim, kind, group, *arrays, *exact[:2], *sinks, layer, out.numpy()
    )  # fmt: skip
    return out


def attention(
    qkv: Tensor,
    heads: tuple[int, int, int],
    cache: PagedCache | CutCache,
    layer: int,
    slopes: Tensor | None,
    paging: Paging,
    scale: float | None = None,
) -> Tensor:
    """Attention of each row's q over the keys up to its own position, read through its tables. Returns (n, H Dh).

    The keys of a block are reduced together, the blocks in ascending order from block 0 with a running maximum, so a row's result
    depends on its position and keys alone. `slopes` (H,) are ALiBi's; scores are times `scale`, 1 / sqrt(Dh) if None (a cut
    cache may ask for another). Of qkv only q is read.
    """
    num_heads, num_kv, dim = heads
    out = torch.empty(qkv.shape[0], num_heads * dim)
    a = HostPaging.of(paging)
    biases = _NONE1 if slopes is None else slopes.numpy()
    where = (
        a.tiles, a.slots, a.tables, a.positions, a.windows, a.row_map, a.map_base, a.maps, a.block_tables, out.numpy(),
    )  # fmt: skip
    items = (a.tiles.shape[0] - 1) * num_kv
    if isinstance(cache, CutCache):
        kind, group, arrays, exact, sinks = _cut_arrays(cache)
        factor = np.float32(1.0 / np.sqrt(dim) if scale is None else scale)
        split(
            cpu_cut.attend, items, qkv.numpy(), num_heads, num_kv, dim, factor, kind, group, *arrays, *exact,
            *sinks, layer, biases, *where,
        )  # fmt: skip
    else:
        split(
            cpu_attention.attend, items, qkv.numpy(), num_heads, num_kv, dim, *_stored(cache), layer, biases, *where,
        )  # fmt: skip
    return out


def _store_cut(
    rows: Tensor, first_key: int, first_value: int, heads: int, dim: int, cache: CutCache, layer: int, paging: Paging
) -> None:  # fmt: skip
    a = HostPaging.of(paging)
    kind, group, arrays, exact, sinks = _cut_arrays(cache)
    split(
        cpu_cut.store, rows.shape[0], rows.numpy(), first_key, first_value, heads, dim, kind, group, *arrays, *exact, *sinks,
        layer, a.slots, a.tables, a.places, a.block_tables,
    )  # fmt: skip


_CUT_KINDS = {"fp16": cpu_cut.FP16, "int8": cpu_cut.INT8, "int4": cpu_cut.INT4}


def _cut_arrays(cache: CutCache) -> Any:
    """(kind, group, stored arrays, exact copies, sinks) in the order of the kernels' arguments."""
    if cache.arrays is None:
        cache.arrays = (
            _CUT_KINDS[cache.kind],
            cache.group,
            (cache.keys.numpy(), cache.values.numpy(), cache.scales.numpy()),
            (cache.exact_keys.numpy(), cache.exact_values.numpy(), cache.exact_tables.numpy()),
            (cache.sink_keys.numpy(), cache.sink_values.numpy(), cache.sink_of.numpy()),
        )
    return cache.arrays


def _stored(cache: PagedCache) -> Any:
    if cache.arrays is None:
        cache.arrays = (cache.keys.numpy(), cache.values.numpy())
    return cache.arrays


# -------------------------------------------------------------------------------------------------------------- sampling


def choose(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """One token per row of logits (n, vocab), int64 (n,).

    Temperature 0 takes the largest logit. Otherwise z = logit / temperature goes through top-k (0: off), top-p (1: off) and min-p (0:
    off), in that order, and the token with the largest z + Gumbel noise wins. The noise is -log(-log(u)) with u hashed from (key,
    token id). All ties go to the lowest id. Top-p adds integers: a token weighs floor(2**30 exp(z - max)) and stays while the
    weights ahead of it are below floor(top_p * total).

    Args:
        temperature, min_p: fp32 (n,).
        top_k: int64 (n,).
        top_p: fp64 (n,).
        keys: uint32 (n, 2), the low and high halves of the noise key of (seed, position).
    """
    tokens = torch.empty(len(logits), dtype=torch.int32)
    choose_packed(logits, pack_choices(temperature, top_k, top_p, min_p, keys), tokens)
    return tokens.long()


def pack_choices(
    temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> tuple[Tensor, ...]:
    """The settings of `choose` as its kernel reads them, in host memory, one row each."""
    return temperature, top_k, top_p, min_p, keys.to(torch.uint32)


def choose_packed(logits: Tensor, settings: Sequence[Tensor], tokens: Tensor) -> None:
    """`choose` into int32 `tokens` (n,), with settings that are packed, and on the device of the logits."""
    temperature, top_k, top_p, min_p, keys = settings
    split(
        cpu_sampling.choose, logits.shape[0], logits.numpy(), temperature.numpy(), top_k.numpy(), top_p.numpy(), min_p.numpy(),
        keys.numpy(), tokens.numpy(),
    )  # fmt: skip


def log_probabilities(
    logits: Tensor, chosen: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of each row of logits (n, vocab) at `chosen` int64 (n,), and its `num_top` largest, ties to the lowest id.

    Returns:
        logprobs fp32 (n,), top ids int64 (n, num_top), their logprobs fp32 (n, num_top).
    """
    n = logits.shape[0]
    logprobs, top_ids, top_logprobs = (
        torch.empty(n),
        torch.zeros(n, num_top, dtype=torch.int64),
        torch.empty(n, num_top),
    )
    split(
        cpu_sampling.log_probabilities,
        n,
        logits.numpy(),
        chosen.numpy(),
        logprobs.numpy(),
        top_ids.numpy(),
        top_logprobs.numpy(),
    )
    return logprobs, top_ids, top_logprobs


# -------------------------------------------------------------------------------------------------------- adaptive exits


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """|after - before| / |after| of each row, fp64 (n,); infinite where `after` is zero."""
    out = torch.empty(after.shape[0], dtype=torch.float64)
    split(cpu_exits.relative_change, after.shape[0], before.numpy(), after.numpy(), out.numpy())
    return out


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL(softmax(before) || softmax(after)) of each row of logits (n, vocab), fp64 (n,)."""
    out = torch.empty(after.shape[0], dtype=torch.float64)
    split(cpu_exits.divergence, after.shape[0], before.numpy(), after.numpy(), out.numpy())
    return out
