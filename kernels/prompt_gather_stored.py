"""Reading 4-bit blocks for prompt attention: back to fp16 while they are gathered, with the exact first keys put over them.

A stored number n stands for scale x n + offset, rounded once to fp16. `fragments.pack_int4` gives the order; what `restore` returns has
that of an fp16 block, so that both take the same way from there. Straight-line device code of `prompt_gather`.
"""

from __future__ import annotations

from typing import Any

from kernels.device_code import traced
from kernels.intrinsics import (
    byte_permute,
    fma_half2,
    less,
    load_32,
    load_32_if,
    load_64,
    load_128_if,
    store_32_if,
    store_128_if,
    sub_half2,
)
from kernels.layout import NUM_SINKS
from kernels.prompt_shapes import GatherShape
from kernels.warpgroup import swizzled

_THOUSANDS = 0x64006400  # two halves of 1024: their low bits count ones
_FIRST, _SECOND, _FIRSTS, _SECONDS = (
    0x1010,
    0x3232,
    0x5410,
    0x7632,
)  # halves of one word or two, for byte_permute


def stored_words(shape: GatherShape, is_value: bool) -> int:
    """Words that a thread loads of a stored K or V."""
    return shape.head_dim // 16 + (8 if is_value else 2)


def make_load_stored(shape: GatherShape, is_value: bool) -> Any:
    dim = shape.head_dim

    @traced("r" * stored_words(shape, is_value))
    def load(source: Any, warp: Any, lane: Any) -> Any:
        """A thread's numbers of a block's K or V, then the (scale, offset) pairs of its positions."""
        regs: list[Any] = []
        for i in range(dim // 32):
            pair = warp + 4 * i if is_value else warp * (dim // 32) + i
            at = source + ((pair >> 1) * 512 + lane * 16 + (pair & 1) * 8)
            regs += load_64(at)
        if is_value:
            first = (warp & 1) * 32 + (lane & 3) * 2
            for ahead in (0, 8, 16, 24):
                regs += load_64(source + (32 * dim + (first + ahead) * 4))
        else:
            first = warp * 16 + (lane >> 2)
            for ahead in (0, 8):
                regs.append(load_32(source + (32 * dim + (first + ahead) * 4)))
        return tuple(regs)

    return load


def make_restore(shape: GatherShape, is_value: bool) -> Any:
    count = shape.head_dim // 16

    @traced("r" * (shape.head_dim // 4))
    def restore(stored: Any) -> Any:
        """What `load` of an fp16 block would have brought."""
        pairs = stored[count:]
        factors = []
        for i in range(4 if is_value else 2):
            if is_value:
                a, b = pairs[2 * i : 2 * i + 2]
                factors.append((byte_permute(a, b, _FIRSTS), byte_permute(a, b, _SECONDS)))
            else:
                a = pairs[i]
                factors.append((byte_permute(a, a, _FIRST), byte_permute(a, a, _SECOND)))
        regs = []
        for i, word in enumerate(stored[:count]):
            for pair in range(4):
                at = 2 * (i & 1) + (pair >> 1) if is_value else pair & 1
                bits = ((word >> 4 * pair) & 0x000F000F) | _THOUSANDS
                regs.append(fma_half2(sub_half2(bits, _THOUSANDS), *factors[at]))
        return tuple(regs)

    return restore


def make_put_sinks(shape: GatherShape, is_value: bool) -> Any:
    dim = shape.head_dim

    @traced()
    def put_keys(sinks: Any, target: Any, warp: Any, lane: Any) -> None:
        """Over the first keys, which this thread's warp has written if it is the first."""
        for i in range(-(-NUM_SINKS * dim // 256)):
            item = lane + 32 * i
            position, octet = item & (NUM_SINKS - 1), item >> 2
            is_mine = less(octet, dim // 8) & less(warp, 1)
            # `key_row` of the first keys
            row = (position >> 1) * 8 + (position & 1)
            at = target + (octet >> 2) * 4096 + row * 64 + swizzled(octet & 3, row & 7) * 16
            words = load_128_if(sinks + (position * dim + octet * 8) * 2, is_mine)
            store_128_if(at, *words, is_mine)

    @traced()
    def put_values(sinks: Any, target: Any, warp: Any, lane: Any) -> None:
        """Over the first values, which are in the first word of two units of each dim."""
        for i in range(dim // 32):
            tile = (warp + 4 * i) >> 1
            row, unit = tile * 16 + (lane >> 1), lane & 1
            is_mine = 1 - (warp & 1)
            at = target + row * 64 + swizzled(unit, row & 7) * 16
            word = load_32_if(sinks + (NUM_SINKS * dim + row * NUM_SINKS + unit * 2) * 2, is_mine)
            store_32_if(at, word, is_mine)

    return put_values if is_value else put_keys
