"""When what was read of a place in shared memory has come, so that the place may be filled again.

A load from shared memory may wait behind others (of global memory, too), and neither an arrival at a memory barrier nor the start of a bulk
copy waits for it: the device orders them by data alone. So whoever gives a place back, or fills it, adds to its address a zero
that is made of what was read. `scripts/check_ptx.py` looks for loads that an arrival or a copy does not wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kernels.device_code import traced
from kernels.intrinsics import bits_of
from kernels.polling import narrow


@traced("r")
def never_of(count: Any) -> Any:
    """0, of which the compiler knows nothing: the bits that no count of rows or blocks has."""
    return narrow(count >> 28)


def make_zero_once(places: Iterable[int]) -> Any:
    """A function of (floats, `never_of` some count): 0, once the floats at `places` are there."""
    indices = tuple(places)

    @traced("r")
    def zero_once(values: Any, never: Any) -> Any:
        return any_bits([bits_of(values[i]) for i in indices]) & never

    return zero_once


def any_bits(words: list[Any]) -> Any:
    """The bits of all words together: it is there when all of them are."""
    bits = words[0]
    for word in words[1:]:
        bits = bits | word
    return bits


def ends_of_sums(tiles: int, columns: int) -> list[int]:
    """Of the sums [tile][column][4] that a warp makes of its tiles and columns: some that take all loads of both."""
    last = {(t, columns - 1) for t in range(tiles)} | {(tiles - 1, c) for c in range(columns)}
    return sorted(4 * (t * columns + c) for t, c in last)
