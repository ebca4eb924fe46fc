"""The parts of prompt attention, each made for one shape: queries, softmax, the rows that leave.

Straight-line device code of one warp; `prompt_attention.py` puts it together. Of a warp's 16 query rows a lane (g, t) holds rows
g and g + 8, of every 8 columns of a product 2t and 2t + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.device_code import traced
from kernels.intrinsics import (
    exp2,
    fma,
    fmax,
    int_to_f32,
    less,
    load_32_if,
    load_f32_if,
    pack_half2,
    reciprocal,
    select,
    shuffle_xor_f32,
    store_32_if,
    wide,
)
from kernels.layout import NUM_SINKS
from kernels.prompt_shapes import PromptAttentionShape

LOG2E = 1.4426950408889634
# The score of a masked key: finite, so that a row that has seen no key yet keeps finite numbers, which its first key wipes out.
_NEVER = -1.0e30


def make_load_query(shape: PromptAttentionShape) -> Any:
    row_bytes = shape.num_heads * shape.head_dim * 2

    @traced("r" * (shape.head_dim // 4))
    def load_query(q: Any, row: Any, rows: Any, lane: Any) -> Any:
        """A fragments of 16 rows from `row` of a tile of `rows`; rows past the end are zero."""
        regs = []
        first = row + (lane >> 2)
        at = q + wide(first) * row_bytes + (lane & 3) * 4
        for column in range(0, 2 * shape.head_dim, 16):
            for high in range(2):
                is_row = less(first + 8 * high, rows)
                regs.append(load_32_if(at + (8 * high * row_bytes + column), is_row))
        return tuple(regs)

    return load_query


def _in_pairs(values: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """All values joined, each pair first, then the pairs of pairs: short chains."""
    while len(values) > 1:
        values = [join(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


def _plus(a: Any, b: Any) -> Any:
    return a + b


def make_softmax(shape: PromptAttentionShape, is_masked: bool) -> Any:
    @traced("f" * 38)
    def softmax(
        scores: Any, top0: Any, top1: Any, sum0: Any, sum1: Any, first_key: Any, position: Any,
        window: Any, slope: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """The weights of a block's keys, the new maxima and sums of rows g and g + 8, and what corrects the old.

        `position` is that of row g; a row sees keys up to its own that are inside its window (0: all) or sinks. The sums are a
        lane's own share.
        """
        tops, sums = [top0, top1], [sum0, sum1]
        rows: list[list[Any]] = [[], []]
        offset = first_key - position + (lane & 3) * 8
        low = int_to_f32(0) + _NEVER
        for group in range(8):
            for high in range(2):
                for odd in range(2):
                    score = scores[4 * group + 2 * high + odd]
                    # how far the key lies after the row; it is the one of `prompt_gather.key_row` 8 * group + 2 * t + odd
                    place = (group & 4) * 8 + (group & 3) * 2 + odd
                    ahead = offset + (place - 8 * high)
                    if shape.has_alibi:
                        score = fma(int_to_f32(ahead), slope, score)
                    if is_masked:
                        key = first_key + (lane & 3) * 8 + place
                        is_near = less(window, 1) | less(0 - window, ahead) | less(key, NUM_SINKS)
                        score = select(score, low, less(ahead, 1) & is_near)
                    rows[high].append(score)
        fixes, weights = [], []
        for high in range(2):
            top = _in_pairs(rows[high], fmax)
            for mask in (1, 2):
                top = fmax(top, shuffle_xor_f32(top, mask))
            top = fmax(tops[high], top)
            fix = exp2(tops[high] - top)
            shares = [exp2(score - top) for score in rows[high]]
            tops[high], sums[high] = top, fma(sums[high], fix, _in_pairs(shares, _plus))
            fixes.append(fix)
            weights.append(shares)
        ordered = [weights[i // 2 % 2][i // 4 * 2 + i % 2] for i in range(32)]
        return (*ordered, *tops, *sums, *fixes)

    return softmax


@traced("r" * 16)
def pack_weights(weights: Any) -> Any:
    """A fragments of the product with V."""
    return tuple(pack_half2(weights[i], weights[i + 1]) for i in range(0, 32, 2))


def make_correct(shape: PromptAttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 2))
    def correct(out: Any, fix0: Any, fix1: Any) -> Any:
        """The sums over earlier keys, for the new maxima."""
        return tuple(value * (fix1 if i & 2 else fix0) for i, value in enumerate(out))

    return correct


def make_finish(shape: PromptAttentionShape) -> Any:
    row_bytes = shape.num_heads * shape.head_dim * 2

    @traced()
    def finish(out: Any, sum0: Any, sum1: Any, target: Any, row: Any, rows: Any, lane: Any) -> None:
        """Write the rows' fp16 results."""
        for high, total in enumerate((sum0, sum1)):
            for mask in (1, 2):
                total = total + shuffle_xor_f32(total, mask)
            inverse = reciprocal(total)
            mine = row + (lane >> 2) + 8 * high
            at = target + wide(mine) * row_bytes + (lane & 3) * 4
            for group in range(shape.head_dim // 8):
                # + 0: a sum that vanished has no sign, whether or not masked keys were added
                pair = [fma(out[4 * group + 2 * high + odd], inverse, 0.0) for odd in range(2)]
                store_32_if(at + group * 16, pack_half2(*pair), less(mine, rows))

    return finish


def make_zeros(shape: PromptAttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 2))
    def zeros() -> Any:
        return tuple(int_to_f32(0) for _ in range(shape.head_dim // 2))

    return zeros


@traced("ffff")
def start() -> Any:
    """Maxima and sums of rows that have seen no key."""
    low, zero = int_to_f32(0) + _NEVER, int_to_f32(0)
    return low, low, zero, zero


def make_slope(shape: PromptAttentionShape) -> Any:
    @traced("f")
    def load_slope(slopes: Any, head: Any) -> Any:
        """The head's slope for scores in units of log 2."""
        if not shape.has_alibi:
            return int_to_f32(0)
        return load_f32_if(slopes + head * 4, 1) * LOG2E

    return load_slope
