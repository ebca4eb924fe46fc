"""How much a row changed from one loop to the next, on the GPU: what adaptive exits compare with their thresholds.

One block a row, in an order that depends on the row's width alone; sums keep what rounding takes, so that fp32 loses no more than its last
digits. Called by `gpu_worker.exits` through `kernels.cuda`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.compiler import Variant
from kernels.cuda_dense_parts import (
    add_exactly,
    exp,
    exp_beyond_linear,
    log,
    log_1p,
    make_block_sums,
    make_load,
    store_as_f64,
)
from kernels.device_code import traced
from kernels.intrinsics import (
    block_x,
    divide,
    f32_of,
    fmax,
    grid_dependency_launch,
    grid_dependency_wait,
    less,
    less_f32,
    select,
    shared_base,
    sqrt,
    thread_id,
    wide,
)
from kernels.runtime import launch

_THREADS, _AT_ONCE = 512, 8  # rows of logits are long: many threads, many loads in flight
_STRIDE = _THREADS * _AT_ONCE
_SUM_BYTES = 4 * _THREADS // 32  # shared memory of one sum
_block_sum, _block_max = make_block_sums(_THREADS // 32)
_load_some = make_load(_AT_ONCE, _THREADS)


@traced("ffff")
def _add_change(sums: Any, before: Any, after: Any) -> Any:
    moved, moved_rest, size, size_rest = sums
    for old, new in zip(before, after, strict=True):
        step = new - old
        moved, moved_rest = add_exactly(moved, moved_rest, step * step)
        size, size_rest = add_exactly(size, size_rest, new * new)
    return moved, moved_rest, size, size_rest


@traced("f")
def _ratio(moved: Any, size: Any) -> Any:
    ratio = sqrt(divide(moved, size))
    return select(ratio, f32_of(0x7F800000), less_f32(0.0, size))


@traced("ffff")
def _no_sums() -> Any:
    return 0.0, 0.0, 0.0, 0.0


@traced("f")
def _whole(total: Any, rest: Any) -> Any:
    return total + rest


def _change_kernel(before: Any, after: Any, out: Any, width: Any) -> None:
    thread, place = thread_id(), wide(block_x()) * (width * 4)
    grid_dependency_launch()
    grid_dependency_wait()
    sums = _no_sums()
    for first in range(thread, width, _STRIDE):
        old = _load_some(before + place, first, width)
        sums = _add_change(sums, old, _load_some(after + place, first, width))
    moved = _block_sum(_whole(sums[0], sums[1]), shared_base())
    size = _block_sum(_whole(sums[2], sums[3]), shared_base() + _SUM_BYTES)
    store_as_f64(out + block_x() * 8, _ratio(moved, size), int(thread == 0))


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """|after - before| / |after| of each row of fp32 (n, d), fp64 (n,) good to fp32; infinite where `after` is zero."""
    out = torch.empty(len(after), dtype=torch.float64, device=after.device)
    launch(_change(), (len(after), 1), before, after, out, after.shape[1])
    return out


@cache
def _change() -> Variant:
    return Variant("relative_change", _change_kernel, "lllr", _THREADS, shared_bytes=2 * _SUM_BYTES)


@traced("f")
def _top_of(top: Any, values: Any, first: Any, width: Any) -> Any:
    for i, value in enumerate(values):
        top = select(fmax(top, value), top, less(first + i * _THREADS, width))
    return top


@traced("ffffff")
def _add_masses(
    sums: Any, before: Any, after: Any, top_p: Any, top_q: Any, first: Any, width: Any
) -> Any:
    """Sums of p, q and p (before - after), each with its rest."""
    total_p, rest_p, total_q, rest_q, moved, rest_moved = sums
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        is_there = less(first + i * _THREADS, width)
        p = select(exp(old - top_p), 0.0, is_there)
        total_p, rest_p = add_exactly(total_p, rest_p, p)
        total_q, rest_q = add_exactly(total_q, rest_q, select(exp(new - top_q), 0.0, is_there))
        moved, rest_moved = add_exactly(moved, rest_moved, p * (old - new))
    return total_p, rest_p, total_q, rest_q, moved, rest_moved


@traced("ff")
def _add_spread(
    sums: Any, before: Any, after: Any, top_p: Any, mean: Any, first: Any, width: Any
) -> Any:
    total, rest = sums
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        value = exp(old - top_p) * exp_beyond_linear(old - new - mean)
        value = select(value, 0.0, less(first + i * _THREADS, width))
        total, rest = add_exactly(total, rest, value)
    return total, rest


@traced("ffffff")
def _no_masses() -> Any:
    return (0.0,) * 6


@traced("ff")
def _no_spread() -> Any:
    return 0.0, 0.0


@traced("f")
def _quotient(a: Any, b: Any) -> Any:
    return divide(a, b)


@traced("f")
def _kl(spread: Any, mean: Any, total_p: Any, total_q: Any, top_p: Any, top_q: Any) -> Any:
    """ln(1 + spread), or for large ones the plain formula."""
    plain = mean + (top_q - top_p) + log(divide(total_q, total_p))
    return select(log_1p(spread), fmax(plain, 0.0), less_f32(spread, 0.5))


def _divergence_kernel(before: Any, after: Any, out: Any, width: Any) -> None:
    """With e = before - after and m its mean under p: KL = ln(1 + E_p[exp(m - e) - 1 + (e - m)]), a sum without cancellation."""
    thread, place = thread_id(), wide(block_x()) * (width * 4)
    shared = shared_base()
    grid_dependency_launch()
    grid_dependency_wait()
    before += place
    after += place
    top_p, top_q = f32_of(0xFF7FFFFF), f32_of(0xFF7FFFFF)
    for first in range(thread, width, _STRIDE):
        top_p = _top_of(top_p, _load_some(before, first, width), first, width)
        top_q = _top_of(top_q, _load_some(after, first, width), first, width)
    top_p, top_q = _block_max(top_p, shared), _block_max(top_q, shared + _SUM_BYTES)
    sums = _no_masses()
    for first in range(thread, width, _STRIDE):
        old, new = _load_some(before, first, width), _load_some(after, first, width)
        sums = _add_masses(sums, old, new, top_p, top_q, first, width)
    total_p = _block_sum(_whole(sums[0], sums[1]), shared + 2 * _SUM_BYTES)
    total_q = _block_sum(_whole(sums[2], sums[3]), shared + 3 * _SUM_BYTES)
    mean = _quotient(_block_sum(_whole(sums[4], sums[5]), shared + 4 * _SUM_BYTES), total_p)
    spread = _no_spread()
    for first in range(thread, width, _STRIDE):
        old, new = _load_some(before, first, width), _load_some(after, first, width)
        spread = _add_spread(spread, old, new, top_p, mean, first, width)
    found = _quotient(_block_sum(_whole(spread[0], spread[1]), shared + 5 * _SUM_BYTES), total_p)
    kl = _kl(found, mean, total_p, total_q, top_p, top_q)
    store_as_f64(out + block_x() * 8, kl, int(thread == 0))


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL(softmax(before) || softmax(after)) of each row of logits fp32 (n, vocab), fp64 (n,) good to fp32."""
    out = torch.empty(len(after), dtype=torch.float64, device=after.device)
    launch(_divergence(), (len(after), 1), before, after, out, after.shape[1])
    return out


@cache
def _divergence() -> Variant:
    return Variant("divergence", _divergence_kernel, "lllr", _THREADS, shared_bytes=6 * _SUM_BYTES)


def variants() -> dict[str, Variant]:
    """Every kernel here, by name."""
    return {variant.name: variant for variant in (_change(), _divergence())}
