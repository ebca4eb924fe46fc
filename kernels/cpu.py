"""The CPU kernels: products, norms, activations, rotary positions and paged attention over rows, in fp32.

Each row's result has one fixed order of operations whatever the other rows, the row's place, the chunk or the threads: that is
the whole point of having kernels of our own here (a library's products change bits with the number of rows). Threads split
columns, rows or heads, never a sum. The functions have the names and arguments of `kernels.reference`; they know no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from kernels import cpu_attention, cpu_sampling
from kernels.cpu_intrinsics import (
    HAS_WIDE_REGISTERS,
    LANES,
    address,
    exp,
    fma,
    tile_1x2,
    tile_2x2,
    tile_4x1,
    tile_4x2,
    tile_8x2,
)
from kernels.layout import Packed, PagedCache, Paging

PANEL = 2 * LANES  # output columns that one product tile makes
_F0, _F1 = np.float32(0.0), np.float32(1.0)

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
    data, scale = weight.arrays
    split(_product, data.shape[0], x.numpy(), data, scale, y.numpy())


@njit(nogil=True, cache=True)
def _product(low, high, x, w, scale, y):  # type: ignore[no-untyped-def]
    n, depth = x.shape
    num_out = y.shape[1]
    edge = np.zeros((8, PANEL), dtype=np.float32)
    for panel in range(low, high):
        first = panel * PANEL
        width = min(PANEL, num_out - first)
        at_w = address(w) + panel * depth * PANEL * w.itemsize
        scales = address(scale) + first * 4
        row = 0
        while row < n:
            rows = 4 if n - row >= 4 else 2 if n - row >= 2 else 1
            if HAS_WIDE_REGISTERS and n - row >= 8:
                rows = 8
            if width == PANEL:
                out, ldo = address(y) + (row * num_out + first) * 4, num_out
            else:
                edge[:rows, :width] = y[row : row + rows, first:]
                out, ldo = address(edge), PANEL
            at_x = address(x) + row * depth * 4
            if rows == 8:
                tile_8x2(at_x, depth, at_w, PANEL, depth, out, ldo, scales, w)
            elif rows == 4 and not HAS_WIDE_REGISTERS:  # 4 x 2 would not fit in 16 registers of 8
                right = at_w + LANES * w.itemsize
                tile_4x1(at_x, depth, at_w, PANEL, depth, out, ldo, scales, w)
                tile_4x1(
                    at_x, depth, right, PANEL, depth, out + LANES * 4, ldo, scales + LANES * 4, w
                )
            elif rows == 4:
                tile_4x2(at_x, depth, at_w, PANEL, depth, out, ldo, scales, w)
            elif rows == 2:
                tile_2x2(at_x, depth, at_w, PANEL, depth, out, ldo, scales, w)
            else:
                tile_1x2(at_x, depth, at_w, PANEL, depth, out, ldo, scales, w)
            if width < PANEL:
                y[row : row + rows, first:] = edge[:rows, :width]
            row += rows


# ---------------------------------------------------------------------------------------------------- norms, activations


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMS norm of each row times `weight`; with a `bias` LayerNorm (the mean is taken off first, the bias added last)."""
    y = torch.empty_like(x)
    split(
        _norm,
        x.shape[0],
        x.numpy(),
        weight.numpy(),
        (weight if bias is None else bias).numpy(),
        bias is not None,
        eps,
        y.numpy(),
    )
    return y


@njit(nogil=True, cache=True)
def _norm(low, high, x, weight, bias, is_layer, eps, y):  # type: ignore[no-untyped-def]
    d = x.shape[1]
    lanes = np.empty(LANES, dtype=np.float32)
    count = np.float32(d)
    for r in range(low, high):
        row, out = x[r], y[r]
        mean = _F0
        if is_layer:
            mean = _sum(row, lanes) / count
        for i in range(d):
            out[i] = row[i] - mean
        scale = _F1 / np.sqrt(_sum_squares(out, lanes) / count + np.float32(eps))
        if is_layer:
            for i in range(d):
                out[i] = fma(out[i] * scale, weight[i], bias[i])
        else:
            for i in range(d):
                out[i] = out[i] * scale * weight[i]


@njit(nogil=True, cache=True)
def _sum(row, lanes):  # type: ignore[no-untyped-def]
    lanes[:] = _F0
    whole = row.shape[0] // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] += row[i + j]
    for i in range(whole, row.shape[0]):
        lanes[i - whole] += row[i]
    total = _F0
    for j in range(LANES):
        total += lanes[j]
    return total


@njit(nogil=True, cache=True)
def _sum_squares(row, lanes):  # type: ignore[no-untyped-def]
    lanes[:] = _F0
    whole = row.shape[0] // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] = fma(row[i + j], row[i + j], lanes[j])
    for i in range(whole, row.shape[0]):
        lanes[i - whole] = fma(row[i], row[i], lanes[i - whole])
    total = _F0
    for j in range(LANES):
        total += lanes[j]
    return total


_ACTS = {"silu_glu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}


def activate(x: Tensor, act: str) -> Tensor:
    """The MLP's activation, (n, d_ff) -> (n, d_ff); for `silu_glu` x is (n, 2 d_ff), gate first, then up."""
    y = torch.empty(x.shape[0], x.shape[1] // 2 if act == "silu_glu" else x.shape[1])
    split(_activate, x.shape[0], x.numpy(), _ACTS[act], y.numpy())
    return y


@njit(nogil=True, cache=True)
def _activate(low, high, x, act, y):  # type: ignore[no-untyped-def]
    f = y.shape[1]
    for r in range(low, high):
        row, out = x[r], y[r]
        if act == 0:
            for i in range(f):
                out[i] = row[i] / (_F1 + exp(-row[i])) * row[f + i]
        elif act == 1:
            for i in range(f):
                out[i] = np.float32(0.5 * row[i] * (1.0 + math.erf(row[i] * 0.7071067811865476)))
        elif act == 2:
            for i in range(f):
                u = row[i]
                v = np.float32(0.7978845608028654) * fma(np.float32(0.044715) * u * u, u, u)
                out[i] = u / (_F1 + exp(np.float32(-2.0) * v))  # 0.5 u (1 + tanh v)
        else:
            for i in range(f):
                u = max(row[i], _F0)
                out[i] = u * u


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
        _prepare, qkv.shape[0], qkv.numpy(), num_heads, num_kv, dim,
        none1 if q_norm is None else q_norm.numpy(), none1 if k_norm is None else k_norm.numpy(), eps,
        none3 if qk_bias is None else qk_bias.numpy(), none3 if rotary is None else rotary.numpy(),
        is_interleaved, positions.numpy(),
    )  # fmt: skip


_NONE1, _NONE3 = np.empty(0, dtype=np.float32), np.empty((0, 0, 0), dtype=np.float32)


@njit(nogil=True, cache=True)
def _prepare(
    low,
    high,
    qkv,
    num_heads,
    num_kv,
    dim,
    q_norm,
    k_norm,
    eps,
    qk_bias,
    rotary,
    is_interleaved,
    positions,
):  # type: ignore[no-untyped-def]
    half = dim // 2
    lanes = np.empty(LANES, dtype=np.float32)
    for r in range(low, high):
        for h in range(num_heads + num_kv):
            x = qkv[r, h * dim : (h + 1) * dim]
            is_key = h >= num_heads
            if q_norm.shape[0]:
                scale = _F1 / np.sqrt(_sum_squares(x, lanes) / np.float32(dim) + np.float32(eps))
                weight = k_norm if is_key else q_norm
                for i in range(dim):
                    x[i] = x[i] * scale * weight[i]
            if qk_bias.shape[0]:
                bias = qk_bias[1, h - num_heads] if is_key else qk_bias[0, h]
                for i in range(dim):
                    x[i] += bias[i]
            if rotary.shape[0]:
                cos, sin = rotary[0, positions[r]], rotary[1, positions[r]]
                for i in range(half):
                    a, b = (2 * i, 2 * i + 1) if is_interleaved else (i, i + half)
                    first, second = x[a], x[b]
                    x[a] = fma(first, cos[i], -(second * sin[i]))
                    x[b] = fma(second, cos[i], first * sin[i])


def store_kv(
    qkv: Tensor, heads: tuple[int, int, int], cache: PagedCache, layer: int, paging: Paging
) -> None:
    """Writes each row's K and V, from qkv (n, (H + 2 Hkv) Dh), to the row's place in layer `layer` of its block."""
    arrays = _arrays(paging)
    split(
        cpu_attention.store, qkv.shape[0], qkv.numpy(), heads[0], heads[2], *_stored(cache), layer,
        arrays.slots, arrays.tables, arrays.places, arrays.block_tables,
    )  # fmt: skip


def attention(
    qkv: Tensor,
    heads: tuple[int, int, int],
    cache: PagedCache,
    layer: int,
    slopes: Tensor | None,
    paging: Paging,
) -> Tensor:
    """Attention of each row's q over the keys up to its own position, read through its tables. Returns (n, H Dh).

    The keys of a block are reduced together, the blocks in ascending order from block 0 with a running maximum, so a row's result
    depends on its position and keys alone. `slopes` (H,) are ALiBi's.
    """
    num_heads, num_kv, dim = heads
    out = torch.empty(qkv.shape[0], num_heads * dim)
    a = _arrays(paging)
    split(
        cpu_attention.attend, (a.tiles.shape[0] - 1) * num_kv, qkv.numpy(), num_heads, num_kv, dim, *_stored(cache),
        layer, _NONE1 if slopes is None else slopes.numpy(), a.tiles, a.slots, a.tables, a.positions,
        a.windows, a.row_map, a.map_base, a.maps, a.block_tables, out.numpy(),
    )  # fmt: skip
    return out


def _stored(cache: PagedCache) -> Any:
    if cache.arrays is None:
        cache.arrays = (cache.keys.numpy(), cache.values.numpy())
    return cache.arrays


class _Arrays:
    """The tensors of a `Paging` as NumPy arrays, made once for its many passes through the layers."""

    def __init__(self, paging: Paging) -> None:
        for name in _PAGING_FIELDS:
            setattr(self, name, getattr(paging, name).numpy())


_PAGING_FIELDS = (
    "slots", "tables", "positions", "places", "windows", "row_map", "map_base", "maps", "block_tables", "tiles",
)  # fmt: skip


def _arrays(paging: Paging) -> Any:
    if paging.arrays is None:
        paging.arrays = _Arrays(paging)
    return paging.arrays


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
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    split(
        cpu_sampling.choose, logits.shape[0], logits.numpy(), temperature.numpy(), top_k.numpy(), top_p.numpy(), min_p.numpy(),
        keys.numpy(), tokens.numpy(),
    )  # fmt: skip
    return tokens


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
