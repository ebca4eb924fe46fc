"""The parts of paged attention, each made for one shape: scores, softmax, weighted values, handing over, merging.

Straight-line device code of one warp; `attention.py` puts it together and says what it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernels.device_code import device_function, traced
from kernels.fragments import packed_place
from kernels.intrinsics import (
    exp2,
    fma,
    fmax,
    int_to_f32,
    less,
    load_128_if,
    load_f32_if,
    load_f32x4_if,
    load_shared_32,
    load_shared_128,
    load_shared_f32,
    map_shared,
    mma,
    pack_half2,
    reciprocal,
    select,
    select_int,
    shuffle_xor_f32,
    store_16_if,
    store_async_f32,
    store_f32,
    store_shared_f32_if,
    transpose_8x8,
    unpack_half2,
    wide,
)
from kernels.layout import NUM_SINKS

if TYPE_CHECKING:
    from kernels.attention import AttentionLaunch, AttentionShape

STREAMS = 16
LOG2E = 1.4426950408889634
_NEVER = (
    -1.0e30
)  # the score of a masked position: finite, so that an empty stream merges as nothing


# --- one block of 64 positions ---------------------------------------------------------------------


def make_load_query(shape: AttentionShape, is_float: bool) -> Any:
    """The group's query heads; `is_float`: float32, to be scaled and rounded here, else fp16 and scaled."""
    size = 4 if is_float else 2

    @traced("r" * (shape.head_dim // 8))
    def load_query(q: Any, lane: Any, scale: Any) -> Any:
        """B fragments of the group's query heads; columns past the group are zero."""
        column, t = lane >> 2, lane & 3
        is_real = less(column, shape.group)
        regs: list[Any] = []
        for part in range(shape.head_dim // 32):
            address = q + (column * shape.head_dim + part * 32 + t * 8) * size
            if not is_float:
                regs += load_128_if(address, is_real)
                continue
            for half in range(2):
                x = [v * scale for v in load_f32x4_if(address + 16 * half, is_real)]
                regs += [pack_half2(x[0], x[1]), pack_half2(x[2], x[3])]
        return tuple(regs)

    return load_query


def make_scores(shape: AttentionShape) -> Any:
    steps, tiles = shape.head_dim // 16, 8 // shape.exact_parts

    @traced("f" * 16)
    def scores(old: Any, chunk: Any, query: Any, part: Any) -> Any:
        """q.k of a chunk's tiles of 16 positions, put into their place among those of the block."""
        acc = [(0.0, 0.0, 0.0, 0.0)] * tiles
        for step in range(steps):
            for tile in range(tiles):
                a = load_shared_128(chunk + (tile * steps + step) * 512)
                acc[tile] = mma(*acc[tile], *a, query[2 * step], query[2 * step + 1])
        new = [value for values in acc for value in values]
        is_here = [1 - (less(part, i) | less(i, part)) for i in range(4 // tiles)]
        return tuple(
            select(new[i % len(new)], value, is_here[i // len(new)]) for i, value in enumerate(old)
        )

    return scores


def nibbles(word: Any) -> Any:
    """Eight 4-bit numbers n as halves of the same bits: n / 2^24 in the tile's low rows, n / 2^20 in its high ones.

    Such halves are subnormal, which the matrix unit takes exactly; the powers of two leave with the scales.
    """
    high = word >> 8
    low_mask, high_mask = 0x000F000F, 0x00F000F0
    return word & low_mask, word & high_mask, high & low_mask, high & high_mask


_UNDO = (float(1 << 24), float(1 << 20))


def make_scores_int4(shape: AttentionShape) -> Any:
    steps = shape.head_dim // 16

    @traced("f" * 16)
    def scores_int4(chunk: Any, scales: Any, query: Any, sums: Any, lane: Any) -> Any:
        """q.k of 64 stored positions; `sums` are the sums of q's columns 2t and 2t+1."""
        accs: list[Any] = [(0.0, 0.0, 0.0, 0.0)] * 4
        # step outside, tile inside: independent chains keep the matrix unit busy; more than two cost registers
        for some in ((0, 1), (2, 3)):
            quads: dict[int, Any] = {}
            for step in range(steps):
                for t in some:
                    quad, i = divmod(t * steps + step, 4)
                    if quad not in quads:
                        quads[quad] = load_shared_128(chunk + quad * 512)
                    numbers = nibbles(quads[quad][i])
                    accs[t] = mma(*accs[t], *numbers, query[2 * step], query[2 * step + 1])
        out: list[Any] = []
        for tile, acc in enumerate(accs):
            for high in range(2):
                pair = load_shared_32(scales + (16 * tile + 8 * high + (lane >> 2)) * 4)
                scale, offset = unpack_half2(pair)
                scale = scale * _UNDO[high]
                for column in range(2):
                    is_used = column < shape.num_columns
                    value = acc[2 * high + column]
                    out.append(fma(value, scale, offset * sums[column]) if is_used else value)
        return tuple(out)

    return scores_int4


def make_softmax(
    shape: AttentionShape, is_stored: bool, is_masked: bool, has_sinks: bool = False
) -> Any:
    """`has_sinks`: of a first block whose first NUM_SINKS scores are exact; the weights of those come as a ninth B fragment."""
    columns = range(shape.num_columns)

    @traced("r" * 8 + "f" * 8 + "r" * has_sinks)
    def softmax(
        scores: Any, state: Any, scales: Any, first: Any, position: Any, window: Any, sinks: Any,
        slopes: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """p of 64 positions as B fragments, and the new (max, sum, offset sum) x 2 and both corrections.

        `first` is the block's first position; a position is seen if it is not after the query and is
        inside the window or a sink. `scales` is where V's (scale, offset) lie (stored blocks only).
        """
        g = lane >> 2
        low = int_to_f32(0) + _NEVER
        shown: dict[tuple[int, int], list[Any]] = {}
        for tile in range(4):
            for high in range(2):
                key = first + 16 * tile + 8 * high + g
                row = [scores[4 * tile + 2 * high + c] for c in columns]
                if shape.has_alibi:
                    row = [fma(int_to_f32(key - position), slopes[c], row[c]) for c in columns]
                if is_masked:
                    is_seen = less(key, position + 1) & (
                        less(position - window, key) | less(key, sinks)
                    )
                    row = [select(score, low, is_seen) for score in row]
                shown[tile, high] = row
        new_max, fix = [state[0], state[1]], [state[0], state[1]]
        sums, offsets = [state[2], state[3]], [state[4], state[5]]
        for c in columns:
            rows = list(shown.values())
            top = rows[0][c]
            for row in rows[1:]:
                top = fmax(top, row[c])
            for mask in (4, 8, 16):
                top = fmax(top, shuffle_xor_f32(top, mask))
            new_max[c] = fmax(state[c], top)
            fix[c] = exp2(state[c] - new_max[c])
            sums[c], offsets[c] = sums[c] * fix[c], offsets[c] * fix[c]
        regs: list[Any] = []
        exact: list[Any] = []
        for (tile, high), row in shown.items():
            p = [int_to_f32(0), int_to_f32(0)]
            for c in columns:
                p[c] = exp2(row[c] - new_max[c])
                sums[c] = sums[c] + p[c]
            if has_sinks and (tile, high) == (0, 0):
                zero, is_sink = int_to_f32(0), less(g, NUM_SINKS)
                apart = [select(x, zero, is_sink) for x in p]
                exact = [transpose_8x8(pack_half2(apart[0], apart[1]))]
                p = [select(zero, x, is_sink) for x in p]
            if is_stored:
                pair = load_shared_32(scales + (16 * tile + 8 * high + g) * 4)
                scale, offset = unpack_half2(pair)
                for c in columns:
                    offsets[c] = fma(p[c], offset, offsets[c])
                    p[c] = p[c] * scale
            regs.append(transpose_8x8(pack_half2(p[0], p[1])))
        return (*regs, *new_max, *sums, *offsets, *fix, *exact)

    return softmax


def make_sink_scores(shape: AttentionShape) -> Any:
    @traced("f" * 16)
    def sink_scores(scores: Any, sinks: Any, query: Any, lane: Any) -> Any:
        """A first block's scores with the exact ones of the sinks, whose keys lie at `sinks` in rows."""
        g, t = lane >> 2, lane & 3
        acc: Any = (0.0, 0.0, 0.0, 0.0)
        for part in range(shape.head_dim // 32):
            # rows past the sinks repeat them: their products are not used
            address = sinks + ((g & (NUM_SINKS - 1)) * shape.head_dim + part * 32 + t * 8) * 2
            low_0, high_0, low_1, high_1 = load_shared_128(address)
            acc = mma(*acc, low_0, 0, high_0, 0, query[4 * part], query[4 * part + 1])
            acc = mma(*acc, low_1, 0, high_1, 0, query[4 * part + 2], query[4 * part + 3])
        is_sink = less(g, NUM_SINKS)
        first = [select(acc[c], scores[c], is_sink) for c in range(2)]
        return (*first, *scores[2:])

    return sink_scores


def make_sink_values(shape: AttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 4))
    def sink_values(sinks: Any, p: Any, lane: Any) -> Any:
        """p.v of the sinks, whose values lie at `sinks` by dim, before the powers of two of `nibbles` are taken out."""
        g, t = lane >> 2, lane & 1  # p is 0 past the sinks
        out: list[Any] = []
        for tile in range(shape.head_dim // 16):
            low, high = (
                load_shared_32(sinks + ((16 * tile + 8 * i + g) * NUM_SINKS + 2 * t) * 2)
                for i in range(2)
            )
            acc = mma(0.0, 0.0, 0.0, 0.0, low, high, 0, 0, p, 0)
            out += [value * (1 / _UNDO[i // 2]) for i, value in enumerate(acc)]
        return tuple(out)

    return sink_values


def make_values(shape: AttentionShape, part: int, steps: Sequence[int] = range(4)) -> Any:
    """Of the dims in chunk `part` of the values; `steps`: which 16 positions."""
    tiles = shape.head_dim // 16
    count = 2 * tiles // shape.exact_parts

    @traced("f" * (4 * tiles))
    def values(out: Any, p: Any, chunk: Any) -> Any:
        """Add p.v for a chunk's dims (out was corrected before)."""
        new = [out[4 * tile : 4 * tile + 4] for tile in range(tiles)]
        for step in steps:
            for tile in range(part * count, (part + 1) * count):
                a = load_shared_128(chunk + ((tile - part * count) * 4 + step) * 512)
                new[tile] = mma(*new[tile], *a, p[2 * step], p[2 * step + 1])
        return tuple(value for acc in new for value in acc)

    return values


def make_some_values(shape: AttentionShape, part: int) -> Any:
    """`make_values` for the first `tiles` times 16 positions: what lies after them is not read."""
    values = make_values(shape, part)
    values_0, values_1, values_2 = (make_values(shape, part, (i,)) for i in range(3))

    @device_function
    def some_values(out: Any, p: Any, chunk: Any, tiles: Any) -> Any:
        if tiles == 4:
            out = values(out, p, chunk)
        else:
            out = values_0(out, p, chunk)
            if tiles > 1:
                out = values_1(out, p, chunk)
            if tiles > 2:
                out = values_2(out, p, chunk)
        return out

    return some_values


def make_values_int4(shape: AttentionShape) -> Any:
    tiles = shape.head_dim // 16

    @traced("f" * (4 * tiles))
    def values_int4(out: Any, p: Any, chunk: Any) -> Any:
        new = [out[4 * tile : 4 * tile + 4] for tile in range(tiles)]
        for first in range(0, tiles, 2):
            some = range(first, min(first + 2, tiles))
            words = {tile: load_shared_128(chunk + tile * 512) for tile in some}
            for step in range(4):
                for tile in some:
                    numbers = nibbles(words[tile][step])
                    new[tile] = mma(*new[tile], *numbers, p[2 * step], p[2 * step + 1])
        return tuple(value for acc in new for value in acc)

    return values_int4


def make_correct(shape: AttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 4))
    def correct(out: Any, first: Any, second: Any) -> Any:
        factors = (first, second)[: shape.num_columns]
        return tuple(v * factors[i % 2] if i % 2 < len(factors) else v for i, v in enumerate(out))

    return correct


def make_undo(shape: AttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 4))
    def undo(out: Any) -> Any:
        """Take the powers of two of `nibbles` out of the sums over stored values."""
        return tuple(value * _UNDO[i % 4 // 2] for i, value in enumerate(out))

    return undo


def make_zeros(shape: AttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 4))
    def zeros() -> Any:
        return tuple(int_to_f32(0) for _ in range(shape.head_dim // 4))

    return zeros


@traced("f" * 6)
def start() -> Any:
    low, zero = int_to_f32(0) + _NEVER, int_to_f32(0)
    return low, low, zero, zero, zero, zero


@traced("ff")
def query_sums(query: Any) -> Any:
    """The sums of q's columns 2t and 2t+1, by a product with ones."""
    acc: Any = (0.0, 0.0, 0.0, 0.0)
    one = 0x3C003C00
    for step in range(len(query) // 2):
        acc = mma(*acc, one, one, one, one, query[2 * step], query[2 * step + 1])
    return acc[0], acc[1]


# --- merging ---------------------------------------------------------------------------------------


def make_send(launch: AttentionLaunch) -> Any:
    shape, cluster, width = launch.shape, launch.cluster, launch.result_floats
    owned = shape.head_dim // cluster

    def put(local: Any, rank: Any, value: Any, bar: Any, condition: Any) -> None:
        if cluster > 1:
            store_async_f32(map_shared(local, rank), value, map_shared(bar, rank), condition)
        else:
            store_shared_f32_if(local, value, condition)

    @traced()
    def send(out: Any, state: Any, stream: Any, results: Any, lane: Any, bar: Any) -> None:
        """Give a stream's result to the blocks that merge it, each its dims."""
        g, t = lane >> 2, lane & 3
        sums, offsets = [state[2], state[3]], [state[4], state[5]]
        for mask in (4, 8, 16):
            sums = [x + shuffle_xor_f32(x, mask) for x in sums]
            offsets = [x + shuffle_xor_f32(x, mask) for x in offsets]
        for odd in range(shape.num_columns):
            column = 2 * t + odd
            is_real = less(column, shape.group)
            row = results + (stream * shape.group + column) * (width * 4)
            for tile in range(shape.head_dim // 16):
                for high in range(2):
                    d = 16 * tile + 8 * high
                    value = out[4 * tile + 2 * high + odd] + offsets[odd]
                    put(row + (d % owned + g) * 4, d // owned, value, bar, is_real)
            # lane g tells rank g
            is_told = is_real & less(g, cluster)
            rank = select_int(g, 0, is_told)
            put(row + owned * 4, rank, state[odd], bar, is_told)
            put(row + owned * 4 + 4, rank, sums[odd], bar, is_told)

    return send


def make_merge(launch: AttentionLaunch) -> Any:
    shape, width = launch.shape, launch.result_floats
    owned = shape.head_dim // launch.cluster

    @traced("f")
    def merge(results: Any, column: Any, d: Any) -> Any:
        rows = [results + (s * shape.group + column) * (width * 4) for s in range(STREAMS)]
        tops = [load_shared_f32(row + owned * 4) for row in rows]
        top = tops[0]
        for other in tops[1:]:
            top = fmax(top, other)
        total, out = int_to_f32(0), int_to_f32(0)
        for s, row in enumerate(rows):
            weight = exp2(tops[s] - top)
            total = fma(weight, load_shared_f32(row + owned * 4 + 4), total)
            out = fma(weight, load_shared_f32(row + d * 4), out)
        return out * reciprocal(fmax(total, int_to_f32(1) * 1.0e-30))

    return merge


@traced("f" * 16)
def no_scores() -> Any:
    return tuple(int_to_f32(0) for _ in range(16))


@traced("r" * 8)
def no_weights() -> Any:
    return (0,) * 8


def make_slopes(shape: AttentionShape) -> Any:
    @traced("ff")
    def load_slopes(slopes: Any, unit_head: Any, lane: Any) -> Any:
        if not shape.has_alibi:
            return int_to_f32(0), int_to_f32(0)
        column = (lane & 3) * 2
        address = slopes + (unit_head * shape.group + column) * 4
        first = load_f32_if(address, less(column, shape.group))
        second = load_f32_if(address + 4, less(column + 1, shape.group))
        return first * LOG2E, second * LOG2E

    return load_slopes


def make_write(launch: AttentionLaunch) -> Any:
    target, shape = launch.target, launch.shape

    @traced()
    def write(out: Any, row: Any, column: Any, value: Any) -> None:
        """One output in the order and precision that the launch says."""
        if target is not None:
            place = packed_place(row, column, target, launch.column_tiles)
        else:
            place = wide(row) * (shape.units * shape.group * shape.head_dim) + column
        if launch.is_float_out:
            store_f32(out + place * 4, value)
        else:
            store_16_if(out + place * 2, pack_half2(value, value), 1)

    return write
