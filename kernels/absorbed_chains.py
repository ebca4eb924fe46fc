"""The ends of chains of attention over cached inputs: averages, and how they are joined. Straight-line device code of one warp."""

from __future__ import annotations

from typing import Any

from kernels.absorbed_parts import UNDO, columns_of, tuples
from kernels.absorbed_shape import GROUP, AbsorbedShape
from kernels.device_code import traced
from kernels.intrinsics import (
    exp2,
    f32_of,
    fma,
    fma_half2,
    fmax,
    int_to_f32,
    less,
    load_shared_128,
    load_shared_f32x2,
    load_shared_f32x4,
    mul_half2,
    pack_half2,
    reciprocal,
    select,
    smaller,
    store_128_if,
    store_f32x2_if,
    store_shared_128_if,
    store_shared_f32_if,
    store_shared_f32x2_if,
    sum_of_warp,
    wide,
)


def join_factors(top: Any, total: Any, more_top: Any, more_total: Any) -> Any:
    """Of two averages with their (maximum, sum): the new maximum and sum, and the shares of both in the new average."""
    new_top = fmax(top, more_top)
    first, second = total * exp2(top - new_top), more_total * exp2(more_top - new_top)
    new_total = first + second
    inverse = reciprocal(fmax(new_total, int_to_f32(1) * 1.0e-30))
    return new_top, new_total, first * inverse, second * inverse


def join_halves(old: Any, more: Any, old_share: Any, share: Any) -> Any:
    """Two averages of two values each, in halves; shares as `twice` gives them."""
    return fma_half2(more, share, mul_half2(old, old_share))


def twice(share: Any) -> Any:
    return pack_half2(share, share)


def make_close(shape: AbsorbedShape, is_joined: bool) -> Any:
    @traced()
    def close(
        state: Any, joined: Any, is_first: Any, shares: Any, meta: Any, is_told: Any, warp: Any, lane: Any
    ) -> None:  # fmt: skip
        """End a chain: to `shares` (columns, 4) go 1 / sum and the shares of what is kept and of this chain.

        `joined` (columns, 2) is the (maximum, sum) of what is kept, brought up to date. Where `is_told`, that of the whole goes
        to `meta` (heads, 2).
        """
        for i in range(shape.warp_heads):
            head = warp + shape.groups * i
            is_lane = less(head, shape.columns) & less(lane, 1)
            column = smaller(head, shape.columns - 1)
            top, total = state[2 * i], sum_of_warp(state[2 * i + 1])
            inverse = reciprocal(fmax(total, int_to_f32(1) * 1.0e-30))
            store_shared_f32_if(shares + column * 16, inverse, is_lane)
            if is_joined:
                before = load_shared_f32x2(joined + column * 8)
                both = join_factors(before[0], before[1], top, total)
                first, second = (f32_of(twice(share)) for share in both[2:])
                store_shared_f32x2_if(shares + column * 16 + 8, first, second, is_lane)
                top, total = select(top, both[0], is_first), select(total, both[1], is_first)
                store_shared_f32x2_if(joined + column * 8, top, total, is_lane)
            is_told_here = is_told & is_lane & less(head, shape.n_heads)
            store_f32x2_if(meta + wide(head * 8), top, total, is_told_here)

    return close


def _places(shape: AbsorbedShape, lane: Any) -> list[tuple[int, Any, Any]]:
    """A lane's words of a tile of 16 values: (column tile, its odd column or None for a choice, head).

    With 4 heads in a column tile the lanes t and t + 2 hold the same: each keeps one of the two columns.
    """
    t = lane & 3
    places: list[tuple[int, Any, Any]] = []
    for tile in range(shape.tiles):
        if columns_of(shape, tile) == 8:
            places += [(tile, odd, 8 * tile + 2 * t + odd) for odd in range(2)]
        else:
            places.append((tile, None, 8 * tile + (t & 1) * 2 + (t >> 1)))
    return places


def make_results(shape: AbsorbedShape) -> Any:
    @traced("r" * shape.num_words)
    def results(sums: Any, shares: Any, is_undone: Any, lane: Any) -> Any:
        """The chain's averages as pairs of halves: 8 tiles x the lane's heads."""
        acc, zeros, is_odd = tuples(shape, sums), sums[32 * shape.tiles :], (lane & 3) >> 1
        places = _places(shape, lane)
        factors, rests = [], []
        for tile, odd, head in places:
            inverse = load_shared_f32x4(shares + head * 16)[0]
            powers = [select(inverse, inverse * power, is_undone) for power in UNDO]
            factors.append(powers if shape.is_cut else [inverse] * 2)
            if shape.is_cut:
                both = zeros[2 * tile : 2 * tile + 2]
                zero = select(both[1], both[0], is_odd) if odd is None else both[odd]
                rests.append(zero * inverse)
        words: list[Any] = []
        for at in range(8):
            for i, (tile, odd, _) in enumerate(places):
                values, pair = acc[at * shape.tiles + tile], []
                for both in (values[:2], values[2:]):
                    value = select(both[1], both[0], is_odd) if odd is None else both[odd]
                    factor = factors[i][at & 1]
                    pair.append(fma(value, factor, rests[i]) if rests else value * factor)
                words.append(pack_half2(*pair))
        return tuple(words)

    return results


def make_keep(shape: AbsorbedShape) -> Any:
    @traced()
    def keep(words: Any, kept: Any, lane: Any) -> None:
        """Put averages aside in the warp's memory, each lane its own."""
        for i in range(0, len(words), 4):
            store_shared_128_if(kept + lane * 16 + i * 128, *words[i : i + 4], 1)

    return keep


def make_join(shape: AbsorbedShape) -> Any:
    @traced("r" * shape.num_words)
    def join(words: Any, kept: Any, shares: Any, lane: Any) -> Any:
        """The averages of what was put aside and this chain."""
        places = _places(shape, lane)
        factors = [load_shared_128(shares + head * 16)[2:] for _, _, head in places]
        olds: list[Any] = []
        for i in range(0, len(words), 4):
            olds += load_shared_128(kept + lane * 16 + i * 128)
        return tuple(
            join_halves(old, word, *factors[i % len(factors)])
            for i, (old, word) in enumerate(zip(olds, words, strict=True))
        )

    return join


def make_put(shape: AbsorbedShape) -> Any:
    @traced()
    def put(words: Any, out: Any, warp: Any, lane: Any) -> None:
        """Write averages to `out` (heads, d) fp16, a group's values in the order of `average_values`."""
        places = _places(shape, lane)
        for i, (_, _, head) in enumerate(places):
            for four in range(2):
                mine = words[
                    i + 4 * four * len(places) : i + 4 * (four + 1) * len(places) : len(places)
                ]
                at = head * shape.d_model + warp * GROUP + four * 64 + (lane >> 2) * 8
                store_128_if(out + wide(at) * 2, *mine, less(head, shape.n_heads))

    return put
