"""Device code that the general kernels for rows share: sums over a block in a fixed order, and functions good to about 1e-7.

Sums go over lanes by a butterfly, then over warps in ascending order: the order depends on the row's width alone.
"""

from __future__ import annotations

from typing import Any

from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    bits_of,
    divide,
    exp2,
    f32_of,
    fma,
    fmax,
    int_to_f32,
    less,
    less_f32,
    load_f32_if,
    load_shared_f32,
    log2,
    same,
    select,
    select_int,
    shuffle_xor_f32,
    store_32_if,
    store_shared_f32_if,
    sum_of_warp,
    sync_block,
    thread_id,
)

WARPS = 8
THREADS = 32 * WARPS
_LOG2E = 1.4426950408889634
_LOG2E_REST = _LOG2E - 1.44269502162933349609375  # what float32 leaves of it
_LN2 = 0.6931471805599453
# -log2 of the normal distribution's tail beyond t, less 1, over t: a fit on 0 .. 7, ascending powers
_TAIL = (
    1.15110681, 0.45919648, 0.052514061, -0.00704613738, 6.98893978e-05, 0.00025399579, -7.24961167e-05,
    1.12674054e-05, -1.06547126e-06, 5.74361493e-08, -1.35640839e-09,
)  # fmt: skip


@traced("f")
def fmin(a: Any, b: Any) -> Any:
    return fmax(a * -1.0, b * -1.0) * -1.0


@traced("f")
def magnitude(x: Any) -> Any:
    return f32_of(bits_of(x) & 0x7FFFFFFF)


@traced("f")
def exp(x: Any) -> Any:
    """e^x, relative error about 2e-7, for x up to 88; more counts as 88."""
    x = fmin(fmax(x, -150.0), 88.0)
    power = x * _LOG2E
    rest = fma(x, _LOG2E_REST, fma(x, _LOG2E, power * -1.0)) * _LN2
    value = exp2(power)
    return fma(value, rest, value)


@traced("f")
def log(x: Any) -> Any:
    """The natural logarithm of a positive normal number, one Newton step after the fast one."""
    y = log2(x) * _LN2
    return y + (x * exp(y * -1.0) - 1.0)


@traced("f")
def log_1p(x: Any) -> Any:
    """ln(1 + x) for 0 <= x <= 0.5."""
    s = divide(x, x + 2.0)
    q = s * s
    series = fma(fma(fma(fma(q, 1 / 9, 1 / 7), q, 1 / 5), q, 1 / 3), q, 1.0)
    return series * s * 2.0


@traced("f")
def exp_beyond_linear(d: Any) -> Any:
    """e^-d - 1 + d, never negative, without loss near 0; d below -60 counts as -60."""
    d = fmax(d, -60.0)
    series = 1 / 362880 * -1.0
    terms = (1 / 40320, -1 / 5040, 1 / 720, -1 / 120, 1 / 24, -1 / 6, 1 / 2)
    value = fma(d, series, terms[0])
    for term in terms[1:]:
        value = fma(d, value, term)
    return select(value * d * d, exp(d * -1.0) - 1.0 + d, less_f32(magnitude(d), 0.5))


@traced("f")
def sigmoid_times(x: Any, v: Any) -> Any:
    """x / (1 + e^-v)."""
    return divide(x, exp(v * -1.0) + 1.0)


@traced("f")
def gelu(x: Any) -> Any:
    """x times the normal distribution up to x, absolute error about 4e-7."""
    t = fmin(magnitude(x), int_to_f32(7))
    power = fma(t, _TAIL[-1], _TAIL[-2])
    for term in _TAIL[-3::-1]:
        power = fma(t, power, term)
    tail = exp2(fma(t * -1.0, power, -1.0))
    return x * select(tail, tail * -1.0 + 1.0, less_f32(x, 0.0))


@traced("f")
def gelu_tanh(x: Any) -> Any:
    v = fma(x * x * 0.044715, x, x) * 0.7978845608028654
    return sigmoid_times(x, v * 2.0)


@traced("f")
def silu_times(gate: Any, up: Any) -> Any:
    return sigmoid_times(gate, gate) * up


@traced("f")
def relu_squared(x: Any) -> Any:
    x = fmax(x, 0.0)
    return x * x


@traced("ff")
def add_exactly(total: Any, rest: Any, value: Any) -> Any:
    """total + value as a rounded sum, and `rest` plus what the rounding took."""
    after = total + value
    shown = after - total
    return after, rest + ((total - (after - shown)) + (value - shown))


@traced("f")
def _max_of_warp(value: Any) -> Any:
    for mask in (1, 2, 4, 8, 16):
        value = fmax(value, shuffle_xor_f32(value, mask))
    return value


def make_load(count: int, threads: int) -> Any:
    """Loads `count` columns of a row for each of a block's threads."""

    @traced("f" * count)
    def load(row: Any, first: Any, width: Any) -> Any:
        """Columns first, first + threads, ... of a row of float32, zeros beyond its end."""
        return tuple(
            load_f32_if(row + (first + i * threads) * 4, less(first + i * threads, width))
            for i in range(count)
        )

    return load


def make_block_sums(num_warps: int) -> tuple[Any, Any]:
    """(sum, maximum) over a block's threads, for all of them: of a value and 4 bytes of shared memory a warp, used by no other."""

    @traced("f")
    def sum_of_shared(shared: Any) -> Any:
        total = load_shared_f32(shared)
        for i in range(1, num_warps):
            total = total + load_shared_f32(shared + 4 * i)
        return total

    @traced("f")
    def max_of_shared(shared: Any) -> Any:
        top = load_shared_f32(shared)
        for i in range(1, num_warps):
            top = fmax(top, load_shared_f32(shared + 4 * i))
        return top

    @device_function
    def block_sum(value: Any, shared: Any) -> Any:
        total = sum_of_warp(value)
        store_shared_f32_if(shared + (thread_id() >> 5) * 4, total, int((thread_id() & 31) == 0))
        sync_block()
        return sum_of_shared(shared)

    @device_function
    def block_max(value: Any, shared: Any) -> Any:
        top = _max_of_warp(value)
        store_shared_f32_if(shared + (thread_id() >> 5) * 4, top, int((thread_id() & 31) == 0))
        sync_block()
        return max_of_shared(shared)

    return block_sum, block_max


@traced()
def store_as_f64(at: Any, value: Any, condition: Any) -> None:
    """Store a float32 as the float64 of the same value (subnormals as 0), by its bits."""
    bits = bits_of(value)
    exponent, fraction = (bits >> 23) & 255, bits & 0x7FFFFF
    is_zero = same(exponent, 0)
    wide_exponent = select_int(2047, exponent + 896, same(exponent, 255))
    high = (wide_exponent << 20) | (fraction >> 3)
    high = select_int(0, high, is_zero) | ((bits >> 31) << 31)
    store_32_if(at, select_int(0, fraction << 29, is_zero), condition)
    store_32_if(at + 4, high, condition)
