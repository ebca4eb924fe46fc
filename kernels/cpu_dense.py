"""Products, norms, activations and head preparation on the CPU, compiled.

Each works on a range of panels or rows, so that threads can share one call; each row's arithmetic is its own. Called by
`kernels.cpu` with plain arrays.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

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

PANEL = 2 * LANES  # output columns that one product tile makes
_F0, _F1 = np.float32(0.0), np.float32(1.0)


@njit(nogil=True, cache=True)
def product(low, high, x, w, scale, y):  # type: ignore[no-untyped-def]
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


@njit(nogil=True, cache=True)
def norm(low, high, x, weight, bias, is_layer, eps, y):  # type: ignore[no-untyped-def]
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


@njit(nogil=True, cache=True)
def activate(low, high, x, act, y):  # type: ignore[no-untyped-def]
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


@njit(nogil=True, cache=True)
def prepare(
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
