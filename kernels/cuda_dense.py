"""The general kernels for rows on the GPU: norms, activations, q and k, embeddings.

Like `kernels.cuda_linear` they serve every architecture: activations are fp32, shapes are run-time numbers. One block or warp does one
row (or one head of it) by itself and in an order that depends on the row's width alone, so a row's bits depend on nothing else.
Called through `kernels.cuda`; launches through `kernels.runtime`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.compiler import Variant
from kernels.cuda_dense_parts import (
    THREADS,
    WARPS,
    gelu,
    gelu_tanh,
    make_block_sums,
    make_load,
    relu_squared,
    silu_times,
)
from kernels.cuda_exits import divergence, relative_change
from kernels.cuda_exits import variants as exit_variants
from kernels.cuda_linear import linear, linear_add, pack
from kernels.cuda_linear import variants as product_variants
from kernels.device_code import traced
from kernels.intrinsics import (
    block_x,
    block_y,
    divide,
    f32_of,
    fma,
    grid_dependency_launch,
    grid_dependency_wait,
    int_to_f32,
    less,
    load_f32,
    load_f32_if,
    load_i32,
    load_i64,
    load_s8,
    load_u16,
    select,
    shared_base,
    sqrt,
    store_f32_if,
    sum_of_warp,
    thread_id,
    unpack_half2,
    wide,
)
from kernels.runtime import launch

__all__ = [
    "activate", "divergence", "embed_rows", "linear", "linear_add", "norm", "pack", "prepare_qkv", "relative_change", "variants",
]  # fmt: skip

_AT_ONCE = 4  # values of a thread that are loaded together
_STRIDE = THREADS * _AT_ONCE
_NORM_AT_ONCE = 8
_NORM_STRIDE = THREADS * _NORM_AT_ONCE
_load_normed = make_load(_NORM_AT_ONCE, THREADS)
_block_sum, _ = make_block_sums(WARPS)


# ---------------------------------------------------------------------------------------------------------------- norms


@traced("f")
def _add_some(total: Any, values: Any) -> Any:
    for value in values:
        total = total + value
    return total


@traced("f")
def _add_squares(total: Any, values: Any, mean: Any, first: Any, width: Any) -> Any:
    for i, value in enumerate(values):
        moved = value - mean
        square = fma(moved, moved, total)
        total = select(square, total, less(first + i * THREADS, width))
    return total


@traced("f")
def _mean(total: Any, width: Any) -> Any:
    return divide(total, int_to_f32(width))


@traced("f")
def _scale(squares: Any, width: Any, eps: Any) -> Any:
    return divide(int_to_f32(1), sqrt(divide(squares, int_to_f32(width)) + eps))


@traced()
def _write_normed(
    values: Any, gains: Any, shifts: Any, mean: Any, scale: Any, y: Any, first: Any, width: Any,
    is_layer: Any,
) -> None:  # fmt: skip
    for i, (value, gain, shift) in enumerate(zip(values, gains, shifts, strict=True)):
        column = first + i * THREADS
        scaled = (value - mean) * scale
        plain, layer = scaled * gain, fma(scaled, gain, shift)
        store_f32_if(y + column * 4, select(layer, plain, is_layer), less(column, width))


def _norm_kernel(
    x: Any, weight: Any, bias: Any, y: Any, width: Any, is_layer: Any, eps: Any
) -> None:
    thread = thread_id()
    rest = thread + _NORM_STRIDE  # up to here a row stays in registers
    gains = _load_normed(weight, thread, width)
    shifts = _load_normed(bias, thread, width * is_layer)
    grid_dependency_launch()
    grid_dependency_wait()
    row, out = x + wide(block_x()) * (width * 4), y + wide(block_x()) * (width * 4)
    values = _load_normed(row, thread, width)
    mean = int_to_f32(0)
    if is_layer:
        total = _add_some(int_to_f32(0), values)
        for first in range(rest, width, _NORM_STRIDE):
            total = _add_some(total, _load_normed(row, first, width))
        mean = _mean(_block_sum(total, shared_base()), width)
    squares = _add_squares(int_to_f32(0), values, mean, thread, width)
    for first in range(rest, width, _NORM_STRIDE):
        squares = _add_squares(squares, _load_normed(row, first, width), mean, first, width)
    scale = _scale(_block_sum(squares, shared_base() + 32), width, eps)
    _write_normed(values, gains, shifts, mean, scale, out, thread, width, is_layer)
    for first in range(rest, width, _NORM_STRIDE):
        values = _load_normed(row, first, width)
        gains = _load_normed(weight, first, width)
        shifts = _load_normed(bias, first, width * is_layer)
        _write_normed(values, gains, shifts, mean, scale, out, first, width, is_layer)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMS norm of each row of fp32 (n, d) times `weight`; with a `bias` LayerNorm."""
    y = torch.empty_like(x)
    launch(_norm(), (len(x), 1), x, weight, bias, y, x.shape[1], int(bias is not None), eps)
    return y


@cache
def _norm() -> Variant:
    return Variant("norm_rows", _norm_kernel, "llllrrf", THREADS, shared_bytes=64)


# ---------------------------------------------------------------------------------------------------------- activations


def _make_act(function: Any, is_gated: bool) -> Any:
    @traced()
    def act(row: Any, y: Any, first: Any, width: Any) -> None:
        columns = [first + i * THREADS for i in range(_AT_ONCE)]
        loads = []
        for column in columns:
            values = [load_f32_if(row + column * 4, less(column, width))]
            if is_gated:
                values.append(load_f32_if(row + (column + width) * 4, less(column, width)))
            loads.append(values)
        for column, values in zip(columns, loads, strict=True):
            store_f32_if(y + column * 4, function(*values), less(column, width))

    return act


_ACTS = {"silu_glu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}
_silu_glu, _gelu = _make_act(silu_times, True), _make_act(gelu, False)
_gelu_tanh, _relu2 = _make_act(gelu_tanh, False), _make_act(relu_squared, False)


def _activate_kernel(x: Any, y: Any, width: Any, act: Any) -> None:
    first = block_x() * _STRIDE + thread_id()
    grid_dependency_launch()
    grid_dependency_wait()
    row, out = x + wide(block_y()) * (width * 4), y + wide(block_y()) * (width * 4)
    if act == 0:
        _silu_glu(x + wide(block_y()) * (width * 8), out, first, width)
    elif act == 1:
        _gelu(row, out, first, width)
    elif act == 2:
        _gelu_tanh(row, out, first, width)
    else:
        _relu2(row, out, first, width)


def activate(x: Tensor, act: str) -> Tensor:
    """`silu_glu`: fp32 (n, 2 f), gate then up, -> (n, f); else `gelu`, `gelu_tanh` or `relu2`, elementwise."""
    n, width = x.shape[0], x.shape[1] // 2 if act == "silu_glu" else x.shape[1]
    y = torch.empty(n, width, device=x.device)
    launch(_activate(), (-(-width // _STRIDE), n), x, y, width, _ACTS[act])
    return y


@cache
def _activate() -> Variant:
    return Variant("activate_rows", _activate_kernel, "llrr", THREADS)


# -------------------------------------------------------------------------------------------------------------- q and k


@traced("f")
def _square(x: Any, column: Any, total: Any) -> Any:
    value = load_f32(x + column * 4)
    return fma(value, value, total)


@traced()
def _prepare_pair(
    x: Any, a: Any, b: Any, scale: Any, weight: Any, has_norm: Any, bias: Any, has_bias: Any,
    cos: Any, sin: Any, has_rotary: Any,
) -> None:  # fmt: skip
    """The values at columns a and b of a head (a == b: one value, not turned)."""
    found = []
    for column in (a, b):
        value = load_f32(x + column * 4)
        normed = value * scale * load_f32_if(weight + column * 4, has_norm)
        value = select(normed, value, has_norm)
        moved = value + load_f32_if(bias + column * 4, has_bias)
        found.append(select(moved, value, has_bias))
    first, second = found
    c, s = load_f32_if(cos, has_rotary), load_f32_if(sin, has_rotary)
    turned_a = fma(first, c, second * s * -1.0)
    turned_b = fma(second, c, first * s)
    store_f32_if(x + a * 4, select(turned_a, first, has_rotary), 1)
    store_f32_if(x + b * 4, select(turned_b, second, has_rotary), less(a, b))


def _prepare_kernel(
    qkv: Any, q_norm: Any, k_norm: Any, qk_bias: Any, rotary: Any, positions: Any, n: Any,
    num_heads: Any, num_kv: Any, dim: Any, max_pos: Any, has_norm: Any, has_bias: Any, has_rotary: Any,
    is_interleaved: Any, eps: Any,
) -> None:  # fmt: skip
    lane, item = thread_id() & 31, block_x() * WARPS + (thread_id() >> 5)
    grid_dependency_launch()
    grid_dependency_wait()
    both = num_heads + num_kv
    if item < n * both:
        row, head = item // both, item % both
        half = dim >> 1
        x = qkv + (wide(row) * (both + num_kv) + head) * (dim * 4)
        weight, bias = q_norm, qk_bias + head * (dim * 4)
        if head >= num_heads:
            weight = k_norm
        scale = int_to_f32(1)
        if has_norm:
            total = int_to_f32(0)
            for column in range(lane, dim, 32):
                total = _square(x, column, total)
            scale = _scale(sum_of_warp(total), dim, eps)
        angles = rotary
        if has_rotary:
            angles = rotary + wide(load_i32(positions + row * 4)) * (half * 4)
        for i in range(lane, half + (dim & 1), 32):
            a, b, is_turned = i, i + half, has_rotary
            if is_interleaved:
                a, b = 2 * i, 2 * i + 1
            if i == half:
                a, b, is_turned = dim - 1, dim - 1, 0
            cos = angles + i * 4
            _prepare_pair(
                x, a, b, scale, weight, has_norm, bias, has_bias, cos,
                cos + wide(max_pos) * (half * 4), is_turned,
            )  # fmt: skip


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
        rotary: (2, max_pos, Dh // 2), cosines and sines.
        is_interleaved: pairs are channels (2i, 2i + 1), else (i, i + Dh // 2).
        positions: (n,) int32.
    """
    if q_norm is None and qk_bias is None and rotary is None:
        return
    num_heads, num_kv, dim = heads
    n = len(qkv)
    launch(
        _prepare(), (-(-n * (num_heads + num_kv) // WARPS), 1), qkv, q_norm, k_norm, qk_bias, rotary, positions,
        n, num_heads, num_kv, dim, 0 if rotary is None else rotary.shape[1], int(q_norm is not None),
        int(qk_bias is not None), int(rotary is not None), int(is_interleaved), eps,
    )  # fmt: skip


@cache
def _prepare() -> Variant:
    return Variant("prepare_heads", _prepare_kernel, "llllll" + "rrrrrrrrr" + "f", THREADS)


# ----------------------------------------------------------------------------------------------------------- embeddings


@traced()
def _copy_half(row: Any, y: Any, column: Any, scale: Any) -> None:
    store_f32_if(y + column * 4, unpack_half2(load_u16(row + column * 2))[0], 1)


@traced()
def _copy_bfloat(row: Any, y: Any, column: Any, scale: Any) -> None:
    store_f32_if(y + column * 4, f32_of(load_u16(row + column * 2) << 16), 1)


@traced()
def _copy_float(row: Any, y: Any, column: Any, scale: Any) -> None:
    store_f32_if(y + column * 4, load_f32(row + column * 4), 1)


@traced()
def _copy_scaled(row: Any, y: Any, column: Any, scale: Any) -> None:
    store_f32_if(y + column * 4, int_to_f32(load_s8(row + column)) * load_f32(scale), 1)


_TABLES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.int8: 3}


def _embed_kernel(table: Any, scale: Any, ids: Any, y: Any, width: Any, kind: Any) -> None:
    thread, row = thread_id(), block_x()
    grid_dependency_launch()
    grid_dependency_wait()
    token = load_i64(ids + row * 8)
    out = y + wide(row) * (width * 4)
    for column in range(thread, width, THREADS):
        if kind == 0:
            _copy_half(table + token * (width * 2), out, column, scale)
        elif kind == 1:
            _copy_bfloat(table + token * (width * 2), out, column, scale)
        elif kind == 2:
            _copy_float(table + token * (width * 4), out, column, scale)
        else:
            _copy_scaled(table + token * width, out, column, scale + token * 4)


def embed_rows(table: Tensor, scale: Tensor | None, ids: Tensor) -> Tensor:
    """Rows `ids` int64 (n,) of a table (num_rows, d) in fp32 (n, d); int8 has a fp32 `scale` (num_rows,). Ids are not checked."""
    y = torch.empty(len(ids), table.shape[1], device=table.device)
    launch(_embed(), (len(ids), 1), table, scale, ids, y, table.shape[1], _TABLES[table.dtype])
    return y


@cache
def _embed() -> Variant:
    return Variant("embed_rows", _embed_kernel, "llllrr", THREADS)


def variants() -> dict[str, Variant]:
    """Every kernel here and of the products, by name."""
    found = (_norm(), _activate(), _prepare(), _embed())
    return {variant.name: variant for variant in found} | product_variants() | exit_variants()
