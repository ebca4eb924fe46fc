"""Matrix products of a warpgroup (four warps, 128 threads) on the matrix unit of Hopper: `wgmma`, with plain Python twins.

A warpgroup multiplies 64 rows, whose factors are in its registers (each warp has 16 of them, in the order of `mma.sync`), by a matrix
in shared memory: n rows of 32 columns each, in groups of 8 rows that lie 512 bytes apart, a row being 64 bytes; the 16-byte unit u of
row r lies at place `swizzled(u, r)` of its row. Such a matrix starts at a multiple of 512 bytes; wider ones are several such side by side.
The products run while the warps go on: what `start` returned may be used after `wait`, shared memory be written after it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from kernels import emulator
from kernels.device_code import op, traced
from kernels.intrinsics import wide

_GROUP_BYTES = 512
# Of a matrix descriptor: swizzle over 64 bytes, groups of 8 rows 512 bytes apart, a field without meaning here.
_DESCRIPTOR = (2 << 62) | (_GROUP_BYTES >> 4) << 32 | 1 << 16


@traced("r")
def swizzled(unit: Any, row: Any) -> Any:
    """The place of 16-byte unit `unit` (0 to 3) in row `row` of its group."""
    return unit ^ ((row >> 1) & 3)


@traced("l")
def descriptor(address: Any) -> Any:
    """Of a matrix at a shared address."""
    return (wide(address) & 0x3FFFF) >> 4 | _DESCRIPTOR


@cache
def make_registers(count: int, *, is_more: bool) -> Any:
    """For all warps of a warpgroup: have `count` registers a thread from here on (a multiple of 8); more wait until others gave up theirs."""

    @op("", "", f"setmaxnreg.{'inc' if is_more else 'dec'}.sync.aligned.u32 {count};", memory=True)
    def set_registers() -> None:
        pass

    return set_registers


def _registers(first: int, count: int) -> str:
    return "{" + ",".join(f"${i}" for i in range(first, first + count)) + "}"


def _chain(
    n: int, out: int, a: int, b: int, steps: int, matrix_bytes: int, is_added: bool
) -> list[str]:
    """Instructions of out (+)= A B over `steps` x 16 columns; operands by number, B's matrices of 32 columns apart by bytes."""
    lines = [f"mov.b64 {{low, high}}, ${b};"]
    for step in range(steps):
        ahead = (step // 2) * matrix_bytes // 16 + step % 2 * 2
        lines += [
            f"add.u32 place, low, {ahead};",
            "mov.b64 d, {place, high};",
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {_registers(out, n // 2)}, "
            f"{_registers(a + 4 * step, 4)}, d, {'on' if is_added or step else 'off'}, 1, 1, 0;",
        ]
    return lines


def _text(*lines: str) -> str:
    # the predicates say whether a product is added to what is there
    begin = "{.reg .pred on, off; .reg .b64 d; .reg .b32 low, high, place; setp.eq.s32 on, 0, 0; setp.ne.s32 off, 0, 0;"
    return " ".join([begin, *lines, "}"])


_FENCE = "wgmma.fence.sync.aligned;"
_COMMIT = "wgmma.commit_group.sync.aligned;"


@cache
def make_product(n: int, steps: int, matrix_bytes: int) -> Any:
    """(A of 4 x steps registers, descriptor of B) -> n / 2 sums: A B^T of n rows and 16 x steps columns, waited for.

    Args:
        matrix_bytes: from one matrix of 32 columns to the next.
    """
    sums = n // 2
    chain = _chain(n, 0, sums, sums + 4 * steps, steps, matrix_bytes, False)

    @op(
        "f" * sums,
        "r" * (4 * steps) + "l",
        _text(_FENCE, *chain, _COMMIT, "wgmma.wait_group.sync.aligned 0;"),
        memory=True,
    )
    def product(*values: Any) -> Any:
        return tuple(_multiply(values[:-1], values[-1], n, steps, matrix_bytes))

    return product


@cache
def make_two_products(
    n: int, steps: int, matrix_bytes: int, n2: int, steps2: int, matrix_bytes2: int
) -> Any:
    """Start A B^T and then out2 += A2 B2^T, and wait for the first alone.

    (out2 of n2 / 2, A, A2, descriptor of B, of B2) -> (n / 2 sums, out2, to be waited for).
    """
    sums, sums2 = n // 2, n2 // 2
    a = sums + 2 * sums2
    a2 = a + 4 * steps
    b = a2 + 4 * steps2
    first = _chain(n, 0, a, b, steps, matrix_bytes, False)
    second = _chain(n2, sums, a2, b + 1, steps2, matrix_bytes2, True)

    @op(
        "f" * (sums + sums2),
        "f" * sums2 + "r" * (4 * (steps + steps2)) + "ll",
        _text(_FENCE, *first, _COMMIT, *second, _COMMIT, "wgmma.wait_group.sync.aligned 1;"),
        memory=True,
        tied=sums2,
    )
    def two_products(*values: Any) -> Any:
        out, factors = values[:sums2], values[sums2:-2]
        new = _multiply(factors[: 4 * steps], values[-2], n, steps, matrix_bytes)
        more = _multiply(factors[4 * steps :], values[-1], n2, steps2, matrix_bytes2)
        return (*new, *(_f32(x + y) for x, y in zip(out, more, strict=True)))

    return two_products


@cache
def make_added_product(n: int, steps: int, matrix_bytes: int, tiles: int = 1) -> Any:
    """(out of n / 2, A, descriptor of B) -> out + A B^T, waited for; of several tiles A, with an out each, first all outs, then all A."""
    sums = n // 2
    a, b = 2 * sums * tiles, (2 * sums + 4 * steps) * tiles
    chains = [
        _chain(n, sums * i, a + 4 * steps * i, b, steps, matrix_bytes, True) for i in range(tiles)
    ]

    @op(
        "f" * (sums * tiles),
        "f" * (sums * tiles) + "r" * (4 * steps * tiles) + "l",
        _text(_FENCE, *(line for chain in chains for line in chain), _COMMIT, "wgmma.wait_group.sync.aligned 0;"),
        memory=True,
        tied=sums * tiles,
    )  # fmt: skip
    def added_product(*values: Any) -> Any:
        # rounded after each step, as the twin of `mma.sync` does it
        whole: list[Any] = []
        for i in range(tiles):
            out = values[sums * i : sums * (i + 1)]
            factors = values[sums * tiles + 4 * steps * i :][: 4 * steps]
            for more in _multiply_steps(factors, values[-1], n, steps, matrix_bytes):
                out = tuple(np.float32(x + y) for x, y in zip(out, more, strict=True))
            whole += out
        return tuple(whole)

    return added_product


@cache
def make_wait(sums: int) -> Any:
    """What was started, finished, and other numbers as they are.

    The registers of A may not be written before: what becomes the next A goes through here, and the wait must follow its start in
    straight-line code, where the assembler sees it.
    """

    @op("f" * sums, "f" * sums, "wgmma.wait_group.sync.aligned 0;", memory=True, tied=sums)
    def wait(*values: Any) -> Any:
        return values

    return wait


def _f32(x: float) -> float:
    return float(np.float32(x))


def _multiply(
    a: Sequence[int], described: int, n: int, steps: int, matrix_bytes: int
) -> list[float]:
    """This thread's share of A B^T."""
    parts = _multiply_steps(a, described, n, steps, matrix_bytes)
    with np.errstate(invalid="ignore"):
        return [_f32(x) for x in np.sum(parts, 0)]


def _multiply_steps(
    a: Sequence[int], described: int, n: int, steps: int, matrix_bytes: int
) -> list[Any]:
    """This thread's share of the product of each 16 columns, in float64."""
    thread = emulator.current()
    group = thread.block.warpgroups[thread.thread_id // 128]

    def make(fragments: list[Any]) -> Any:
        b = _matrix(described, n, steps, matrix_bytes).reshape(n, steps, 16)
        bits = np.array(fragments, dtype=np.int64).astype(np.uint32).view(np.float16)
        # (warp, g, t, step, high columns, high rows, half)
        parts = bits.reshape(4, 8, 4, steps, 2, 2, 2).astype(np.float64)
        rows = parts.transpose(0, 5, 1, 3, 4, 2, 6).reshape(64, steps, 16)
        # rows of A that stand for none may be NaN; they must not reach others
        with np.errstate(invalid="ignore"):
            return [rows[:, step] @ b[:, step].T for step in range(steps)]

    whole = group.collective(tuple(a), make)
    row = thread.thread_id % 128 // 32 * 16 + thread.lane // 4
    columns = [8 * i + thread.lane % 4 * 2 for i in range(n // 8)]
    places = [(row + high, column + odd) for column in columns for high in (0, 8) for odd in (0, 1)]
    return [np.array([product[place] for place in places]) for product in whole]


def _matrix(described: int, n: int, steps: int, matrix_bytes: int) -> Any:
    """B (n, 16 x steps) in float64 from shared memory."""
    address = (described & 0x3FFF) << 4
    assert described == _DESCRIPTOR | address >> 4, "not a descriptor of these kernels"
    assert address % _GROUP_BYTES == 0, "a matrix starts at a multiple of 512 bytes"
    out = np.zeros((n, 16 * steps))
    for row in range(n):
        for unit in range(2 * steps):
            at = address + unit // 4 * matrix_bytes + row // 8 * _GROUP_BYTES + row % 8 * 64
            at += ((unit % 4) ^ (row % 8 // 2)) * 16
            data = emulator.read_shared(at, 16)
            out[row, 8 * unit : 8 * unit + 8] = np.frombuffer(data, np.float16)
    return out
