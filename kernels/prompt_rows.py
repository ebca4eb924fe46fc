"""What happens to prompt rows between the products, each kernel one pass over memory: RMS norm and SwiGLU.

Rows are independent: a row's bits depend on its own numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.compiler import Variant
from kernels.device_code import traced
from kernels.intrinsics import (
    block_x,
    exp2,
    fma,
    grid_dependency_launch,
    grid_dependency_wait,
    int_to_f32,
    less,
    load_128_if,
    load_f32x4_if,
    load_shared_f32,
    pack_finite_half2,
    quotient,
    reciprocal,
    remainder,
    rsqrt,
    shared_base,
    store_64_if,
    store_128_if,
    store_shared_f32_if,
    sum_of_warp,
    sync_block,
    thread_id,
    unpack_half2,
    wide,
)

_LOG2E = 1.4426950408889634


def octet_of(words: Any) -> list[Any]:
    """Eight floats of four words of halves."""
    return [value for word in words for value in unpack_half2(word)]


def words_of(values: Any) -> list[Any]:
    """Words of halves of twice as many floats."""
    return [pack_finite_half2(values[i], values[i + 1]) for i in range(0, len(values), 2)]


# --- norm ------------------------------------------------------------------------------------------

_NORM_QUADS = 16  # of a lane, at most
_NORM_ROWS = 4  # rows of a block, where a row is one warp's


@dataclass(frozen=True)
class _NormShape:
    d: int

    @property
    def warps(self) -> int:
        """Of one row."""
        return -(-self.d // (128 * _NORM_QUADS))

    @property
    def quads(self) -> int:
        """Of one lane."""
        return -(-self.d // (128 * self.warps))


def _make_norm(shape: _NormShape) -> Any:
    d, warps, quads = shape.d, shape.warps, shape.quads
    step = 4 * 32 * warps
    rows_per_block = _NORM_ROWS if warps == 1 else 1
    is_spread = warps > 1

    @traced("f" * (8 * quads))
    def load(x: Any, gain: Any, row: Any, first: Any, is_row: Any) -> Any:
        """A lane's numbers, then their gains."""
        values: list[Any] = []
        gains: list[Any] = []
        for i in range(quads):
            column = first + i * step
            is_real = is_row & less(column, d)
            values += load_f32x4_if(x + wide(row) * (4 * d) + column * 4, is_real)
            gains += load_f32x4_if(gain + column * 4, is_real)
        return (*values, *gains)

    @traced("f")
    def squares(values: Any) -> Any:
        total = int_to_f32(0)
        for value in values[: 4 * quads]:
            total = fma(value, value, total)
        return sum_of_warp(total)

    @traced("f")
    def sum_of_warps(base: Any) -> Any:
        total = load_shared_f32(base)
        for i in range(1, warps):
            total = total + load_shared_f32(base + 4 * i)
        return total

    @traced()
    def put(values: Any, total: Any, h: Any, row: Any, first: Any, is_row: Any, eps: Any) -> None:
        scale = rsqrt(fma(total, 1.0 / d, eps))
        for i in range(quads):
            column = first + i * step
            quad = range(4 * i, 4 * i + 4)
            scaled = [values[j] * scale * values[4 * quads + j] for j in quad]
            at = h + wide(row) * (2 * d) + column * 2
            store_64_if(at, *words_of(scaled), is_row & less(column, d))

    def kernel(x: Any, gain: Any, h: Any, num_rows: Any, eps: Any) -> None:
        thread, base = thread_id(), shared_base()
        row, first = block_x() * rows_per_block, thread * 4
        if not is_spread:
            row += thread >> 5
            first = (thread & 31) * 4
        is_row = 1 if row < num_rows else 0
        grid_dependency_launch()
        grid_dependency_wait()
        values = load(x, gain, row, first, is_row)
        total = squares(values)
        if is_spread:
            store_shared_f32_if(base + (thread >> 5) * 4, total, 1 if thread & 31 == 0 else 0)
            sync_block()
            total = sum_of_warps(base)
        put(values, total, h, row, first, is_row, eps)

    return kernel


def norm_rows_per_block(d: int) -> int:
    """Rows of one block of `norm`."""
    return _NORM_ROWS if _NormShape(d).warps == 1 else 1


def norm(d: int) -> Variant:
    """fp16 h = RMS norm of x times gain; grid (rows / norm_rows_per_block, 1); d is a multiple of 8.

    Kernel arguments: x float32 (rows, d), gain float32 (d,), h fp16 (rows, d), number of rows, eps.
    """
    shape = _NormShape(d)
    return Variant(
        name=f"prompt_norm_{d}",
        function=_make_norm(shape),
        args="lllrf",
        num_threads=32 * (_NORM_ROWS if shape.warps == 1 else shape.warps),
        shared_bytes=4 * shape.warps if shape.warps > 1 else 0,
        blocks_per_sm=4 if shape.warps == 1 else 2,
        constants=(shape,),
    )


# --- SwiGLU ----------------------------------------------------------------------------------------

_GATE_THREADS = 256
_GATE_ITEMS = 2


def gate_grid(rows: int, d_ff: int) -> int:
    """Blocks of `gate` for some rows."""
    return -(-rows * (d_ff // 8) // (_GATE_THREADS * _GATE_ITEMS))


def gate(d_ff: int) -> Variant:
    """fp16 out (rows, d_ff) = silu(gate) * up; d_ff is a multiple of 8; grid (gate_grid(rows, d_ff), 1).

    Kernel arguments: gate_up fp16 (rows, 2 d_ff), gate first; out; number of rows.
    """
    units = d_ff // 8

    @traced()
    def one(gate_up: Any, out: Any, items: Any, num_items: Any) -> None:
        loads = []
        for i in range(_GATE_ITEMS):
            item = items + i * _GATE_THREADS
            row, unit = quotient(item, units), remainder(item, units)
            at = gate_up + wide(row) * (4 * d_ff) + unit * 16
            is_real = less(item, num_items)
            loads.append((load_128_if(at, is_real), load_128_if(at + 2 * d_ff, is_real)))
        for i, (gates, ups) in enumerate(loads):
            item = items + i * _GATE_THREADS
            values = []
            for a, b in zip(octet_of(gates), octet_of(ups), strict=True):
                values.append(a * reciprocal(exp2(a * -_LOG2E) + 1.0) * b)
            store_128_if(out + wide(item) * 16, *words_of(values), less(item, num_items))

    def kernel(gate_up: Any, out: Any, rows: Any) -> None:
        grid_dependency_launch()
        grid_dependency_wait()
        one(gate_up, out, block_x() * (_GATE_THREADS * _GATE_ITEMS) + thread_id(), rows * units)

    return Variant(
        name=f"prompt_gate_{d_ff}",
        function=kernel,
        args="llr",
        num_threads=_GATE_THREADS,
        blocks_per_sm=4,
        constants=(d_ff,),
    )
