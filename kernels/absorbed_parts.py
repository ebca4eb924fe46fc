"""The parts of attention over cached inputs, each made for one shape: scores, softmax, weighted sums, joining chains.

Straight-line device code of one warp, which owns one group of 128 values of the input; `absorbed.py` puts it together,
says what it is for and what lies where.
"""

from __future__ import annotations

from typing import Any

from kernels.absorbed_shape import SCALES_AT, SCORE_ROW, AbsorbedShape
from kernels.device_code import traced
from kernels.intrinsics import (
    bits_of,
    byte_permute,
    copy_async_16,
    copy_async_16_if,
    exp2,
    f32_of,
    fma,
    fmax,
    int_to_f32,
    less,
    load_128_if,
    load_f32_if,
    load_matrices,
    load_matrices_transposed,
    load_shared_32,
    load_shared_32x2,
    load_shared_128,
    load_shared_f32x2,
    load_shared_half,
    mma,
    mul_half2,
    pack_half2,
    select,
    select_int,
    smaller,
    store_shared_128_if,
    store_shared_f32,
    store_shared_f32_if,
    store_shared_f32x2_if,
    warp_max,
    wide,
)
from kernels.layout import NUM_SINKS

_NEVER = -1.0e30  # the score of a masked position: finite, so that an empty chain joins as nothing

_SIGN = 1 << 31
_LOW, _HIGH = 0x000F000F, 0x00F000F0
# A code n goes to the matrix unit as the subnormal half n / 2^24 or (of the high four bits) n / 2^20.
UNDO = (float(1 << 24), float(1 << 20))
# The queries of low and high codes are stored times these, so that both give n q / 2^22.
QUERY_FACTORS = (4.0, 0.25)
_SCORE_UNDO = float(1 << 22)
_ONES = (0x34003400, 0x44004400)  # pairs of halves that undo the factors: 1/4 and 4


def columns_of(shape: AbsorbedShape, tile: int) -> int:
    """Columns of a column tile that hold heads (4 or 8); with 4 the others repeat them."""
    return min(8, shape.columns - 8 * tile)


def _lane_of(shape: AbsorbedShape, tile: int, lane: Any) -> Any:
    return lane & (4 * columns_of(shape, tile) - 1)


@traced("r")
def narrow(x: Any) -> Any:
    """An integer of 32 bits: what a loop carries in one register."""
    return x


# --- into shared memory ----------------------------------------------------------------------------


@traced()
def copy_stored(stage: Any, codes: Any, scales: Any, row_bytes: Any, lane: Any) -> None:
    """A group's 64 positions: codes (64, 64 bytes at `row_bytes` each), chunks of 16 bytes swizzled, and its two rows of scales."""
    target, source = _stored_places(stage, codes, row_bytes, lane)
    for part in range(8):
        copy_async_16(target + part * 512, source + wide(row_bytes * (8 * part)))
    copy_async_16_if(stage + SCALES_AT + lane * 16, scales + wide(lane * 16), less(lane, 16))


def _stored_places(stage: Any, codes: Any, row_bytes: Any, lane: Any) -> Any:
    chunk = (lane & 3) ^ ((lane >> 3) & 3)
    source = codes + wide((lane >> 2) * row_bytes + (lane & 3) * 16)
    return stage + (lane >> 2) * 64 + chunk * 16, source


@traced()
def copy_exact(stage: Any, source: Any, last: Any, row_bytes: Any, lane: Any) -> None:
    """A group's 16 exact positions; those after `last` repeat it, so that nothing unwritten is read."""
    chunk = lane & 15
    for i in range(8):
        row = (lane >> 4) + 2 * i
        key = _exact_key(row)
        from_row = smaller(row, last)
        copy_async_16(
            stage + row * 256 + (chunk ^ key) * 16,
            source + wide(from_row * row_bytes + chunk * 16),
        )


def _exact_key(row: Any) -> Any:
    """What a row's chunks of 16 bytes are swizzled by: both readers' rows meet no bank twice."""
    return ((row & 3) ^ ((row >> 2) & 1)) * 2


def make_load_query(shape: AbsorbedShape) -> Any:
    count = shape.columns // 2

    @traced()
    def load_query(source: Any, target: Any, lane: Any) -> None:
        """Bring the group's part of a row's query into shared memory."""
        words = [load_128_if(source + wide(lane * 16 + i * 512), 1) for i in range(count)]
        for i, four in enumerate(words):
            store_shared_128_if(target + lane * 16 + i * 512, *four, 1)

    return load_query


def _load_query(shape: AbsorbedShape, query: Any, tile: int, step: int, lane: Any) -> Any:
    """B fragments of steps (low, high codes) `step` of 4: four words."""
    width = columns_of(shape, tile) * 4
    return load_shared_128(query + tile * 2048 + (step * width + _lane_of(shape, tile, lane)) * 16)


def make_query_sums(shape: AbsorbedShape) -> Any:
    @traced()
    def query_sums(query: Any, sums: Any, lane: Any) -> None:
        """The sums of the group's part of each query head, to `sums` (columns,)."""
        column = (lane & 3) * 2
        for tile in range(shape.tiles):
            acc: Any = (0.0, 0.0, 0.0, 0.0)
            for step in range(4):
                b = _load_query(shape, query, tile, step, lane)
                for part, one in enumerate(_ONES):
                    acc = mma(*acc, one, one, one, one, *b[2 * part : 2 * part + 2])
            is_real = less(lane, 4) & less(column, columns_of(shape, tile))
            store_shared_f32x2_if(sums + (8 * tile + column) * 4, *acc[:2], is_real)

    return query_sums


def _load_pair(shape: AbsorbedShape, table: Any, tile: int, lane: Any) -> Any:
    """Of a table by head, a lane's two columns of a column tile."""
    column = (lane & 3) * 2 & (columns_of(shape, tile) - 1)
    return load_shared_f32x2(table + (8 * tile + column) * 4)


# --- scores ----------------------------------------------------------------------------------------


def _put_scores(
    shape: AbsorbedShape, partials: Any, tile: int, position: Any, values: Any, lane: Any
) -> None:
    """Store a lane's scores of a tile of 16 positions: `values` are those of row g, then row g + 8, of columns 2t and 2t + 1.

    With 4 heads in the column tile the lanes t and t + 2 hold the same: the first stores row g, the other row g + 8.
    """
    t = lane & 3
    address = partials + (8 * tile * SCORE_ROW + position) * 4
    if columns_of(shape, tile) == 8:
        for i, value in enumerate(values):
            place = (2 * t + i % 2) * (SCORE_ROW * 4) + 32 * (i // 2)
            store_shared_f32(address + place, value)
        return
    for odd in range(2):
        place = ((t & 1) * 2 + odd) * (SCORE_ROW * 4) + (t >> 1) * 32
        store_shared_f32(address + place, select(values[2 + odd], values[odd], t >> 1))


def make_scores_stored(shape: AbsorbedShape) -> Any:
    tiles, row_bytes = shape.tiles, shape.row_bytes

    @traced()
    def scores(
        stage: Any, query: Any, sums: Any, partials: Any, next_stage: Any, codes: Any, scales: Any, has_next: Any, lane: Any
    ) -> None:  # fmt: skip
        """The group's share of the scores of 64 stored positions, to `partials` (columns, SCORE_ROW).

        Where `has_next`, the copies of the next unit, as `copy_stored` has them, start one by one between the products.
        """
        g, key = lane >> 2, (lane >> 1) & 3
        target, source = _stored_places(next_stage, codes, row_bytes, lane)
        is_scale = has_next & less(lane, 16)
        copy_async_16_if(next_stage + SCALES_AT + lane * 16, scales + wide(lane * 16), is_scale)

        def ask(part: int) -> Any:
            pair, step = part >> 2, part & 3
            words = load_matrices(stage + (pair * 32 + lane) * 64 + ((key ^ step) * 16))
            return words, [_load_query(shape, query, tile, step, lane) for tile in range(tiles)]

        asked = ask(0)
        for pair in range(2):  # of 16 positions each, two at a time
            acc: list[Any] = [[(0.0, 0.0, 0.0, 0.0)] * tiles for _ in range(2)]
            for step in range(4):
                part = 4 * pair + step
                (words, b), asked = asked, ask(part + 1) if part < 7 else asked
                copy_async_16_if(target + part * 512, source + wide(row_bytes * 8 * part), has_next)
                for m in range(2):
                    low, high = words[2 * m : 2 * m + 2]
                    shifted = low >> 8, high >> 8
                    for part, mask in enumerate((_LOW, _HIGH)):
                        a = low & mask, high & mask, shifted[0] & mask, shifted[1] & mask
                        for tile in range(tiles):
                            acc[m][tile] = mma(*acc[m][tile], *a, *b[tile][2 * part :][:2])
            q = [_load_pair(shape, sums, tile, lane) for tile in range(tiles)]
            for m in range(2):
                position = pair * 32 + m * 16 + g
                values: list[list[Any]] = [[] for _ in range(tiles)]
                for high in range(2):
                    at = stage + SCALES_AT + (position + 8 * high) * 2
                    scale = load_shared_half(at) * _SCORE_UNDO
                    zero = load_shared_half(at + 128)
                    for tile in range(tiles):
                        values[tile] += [
                            fma(acc[m][tile][2 * high + odd], scale, zero * q[tile][odd])
                            for odd in range(2)
                        ]
                for tile in range(tiles):
                    _put_scores(shape, partials, tile, position, values[tile], lane)

    return scores


def make_scores_exact(shape: AbsorbedShape) -> Any:
    tiles = shape.tiles

    @traced()
    def scores(stage: Any, query: Any, partials: Any, lane: Any) -> None:
        """The group's share of the scores of 16 exact positions."""
        g, t = lane >> 2, lane & 3
        key = _exact_key(g)
        # low and high codes' dims apart: their queries have different factors
        acc: list[Any] = [[(0.0, 0.0, 0.0, 0.0)] * tiles for _ in range(2)]
        for step in range(4):
            for part in range(2):
                chunk = (2 * step + 8 * part + (t >> 1)) ^ key
                at = stage + g * 256 + chunk * 16 + (t & 1) * 8
                rows = [load_shared_32x2(at), load_shared_32x2(at + 8 * 256)]
                a = [byte_permute(*row, order) for order in (0x5410, 0x7632) for row in rows]
                for tile in range(tiles):
                    b = _load_query(shape, query, tile, step, lane)
                    acc[part][tile] = mma(*acc[part][tile], *a, *b[2 * part : 2 * part + 2])
        low, high = (1 / factor for factor in QUERY_FACTORS)
        for tile in range(tiles):
            pairs = zip(acc[0][tile], acc[1][tile], strict=True)
            values = [fma(first, low, second * high) for first, second in pairs]
            _put_scores(shape, partials, tile, g, values, lane)

    return scores


# --- softmax ---------------------------------------------------------------------------------------


def make_start(shape: AbsorbedShape) -> Any:
    @traced("f" * (2 * shape.warp_heads), is_tuple=True)
    def start() -> Any:
        """(maximum, sum) of each of the warp's heads: nothing seen."""
        return (int_to_f32(0) + _NEVER, int_to_f32(0)) * shape.warp_heads

    return start


def make_slopes(shape: AbsorbedShape) -> Any:
    @traced("f" * shape.warp_heads, is_tuple=True)
    def load_slopes(slopes: Any, warp: Any) -> Any:
        if not shape.has_alibi:
            return (int_to_f32(0),) * shape.warp_heads
        heads = [warp + shape.groups * i for i in range(shape.warp_heads)]
        return tuple(load_f32_if(slopes + head * 4, less(head, shape.n_heads)) for head in heads)

    return load_slopes


def _largest(x: Any) -> Any:
    """The maximum over the warp, by way of integers in the same order (one instruction instead of five shuffles)."""
    bits = bits_of(x)
    ordered = warp_max(bits ^ ((0 - (bits >> 31)) | _SIGN))
    return f32_of(ordered ^ (((ordered >> 31) - 1) | _SIGN))


def make_softmax(shape: AbsorbedShape) -> Any:
    columns, groups = shape.columns, shape.groups

    @traced("f" * (2 * shape.warp_heads), is_tuple=True)
    def softmax(
        state: Any, partials: Any, weights: Any, factors: Any, slopes: Any, first: Any, low: Any,
        high: Any, position: Any, window: Any, warp: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """Of the warp's heads: add the groups' shares in order, p of 64 positions as B fragments, what to correct sums by.

        `first` is the positions' first key; keys in [low, high) count, of which the row sees those after
        position - window and the sinks.
        """
        out: list[Any] = []
        for i in range(shape.warp_heads):
            head = warp + groups * i
            is_head = less(head, columns)
            head = smaller(head, columns - 1)
            at = partials + (head * SCORE_ROW + lane * 2) * 4
            parts = [
                load_shared_f32x2(at + group * columns * SCORE_ROW * 4) for group in range(groups)
            ]
            scores = list(parts[0])
            for part in parts[1:]:
                scores = [a + b for a, b in zip(scores, part, strict=True)]
            for odd in range(2):
                key = first + lane * 2 + odd
                if shape.has_alibi:
                    scores[odd] = fma(int_to_f32(key - position), slopes[i], scores[odd])
                is_seen = less(low - 1, key) & less(key, high)
                is_seen = is_seen & (less(position - window, key) | less(key, NUM_SINKS))
                scores[odd] = select(scores[odd], int_to_f32(0) + _NEVER, is_seen)
            top = _largest(fmax(scores[0], scores[1]))
            new_top = fmax(state[2 * i], top)
            fix = exp2(state[2 * i] - new_top)
            p = [exp2(score - new_top) for score in scores]
            out += [new_top, fma(state[2 * i + 1], fix, p[0] + p[1])]
            width = 4 * columns_of(shape, shape.tiles - 1)
            if shape.tiles > 1:
                width = select_int(width, 32, head >> 3)
            place = ((lane >> 4) * width + (head & 7) * 4 + (lane & 3)) * 16
            place = place + (head >> 3) * 1024 + ((lane >> 3) & 1) * 8 + ((lane >> 2) & 1) * 4
            store_shared_f32_if(weights + place, f32_of(pack_half2(p[0], p[1])), is_head)
            store_shared_f32_if(factors + head * 4, fix, is_head & less(lane, 1))
        return tuple(out)

    return softmax


# --- weighted sums ---------------------------------------------------------------------------------


def make_zeros(shape: AbsorbedShape) -> Any:
    @traced("f" * shape.num_sums)
    def zeros() -> Any:
        return tuple(int_to_f32(0) for _ in range(shape.num_sums))

    return zeros


def make_correct(shape: AbsorbedShape) -> Any:
    @traced("f" * shape.num_sums)
    def correct(sums: Any, factors: Any, lane: Any) -> Any:
        """All of a lane's sums times their heads' factors."""
        fixes = [_load_pair(shape, factors, tile, lane) for tile in range(shape.tiles)]
        pairs = zip(sums, _columns(shape), strict=True)
        return tuple(value * fixes[tile][odd] for value, (tile, odd) in pairs)

    return correct


def _columns(shape: AbsorbedShape) -> list[tuple[int, int]]:
    """The column tile and the odd bit of each of a lane's sums."""
    found = [(tile, i % 2) for _ in range(8) for tile in range(shape.tiles) for i in range(4)]
    return found + [(tile, odd) for tile in range(shape.tiles * shape.is_cut) for odd in range(2)]


def tuples(shape: AbsorbedShape, values: Any) -> list[Any]:
    """Sums by 8 tiles of 16 values and column tiles, each (row g, row g; row g + 8, row g + 8), columns 2t and 2t + 1."""
    return [tuple(values[i : i + 4]) for i in range(0, 32 * shape.tiles, 4)]


def _weights(shape: AbsorbedShape, weights: Any, tile: int, pair: int, lane: Any) -> Any:
    width = columns_of(shape, tile) * 4
    return load_shared_128(
        weights + tile * 1024 + (pair * width + _lane_of(shape, tile, lane)) * 16
    )


def make_values_stored(shape: AbsorbedShape) -> Any:
    tiles = shape.tiles

    @traced("f" * shape.num_sums)
    def values(sums: Any, stage: Any, weights: Any, lane: Any) -> Any:
        """Add p n s of 64 stored positions, and p z to the last sums."""
        t, key = lane & 3, (lane >> 1) & 3
        acc, rest = tuples(shape, sums), list(sums[32 * tiles :])
        scaled: dict[tuple[int, int], list[Any]] = {}
        for step in range(4):
            at = [stage + SCALES_AT + (16 * step + 8 * b + 2 * t) * 2 for b in range(2)]
            scales = [load_shared_32(address) for address in at]
            zeros = [load_shared_32(address + 128) for address in at]
            for tile in range(tiles):
                p = _weights(shape, weights, tile, step >> 1, lane)[2 * (step & 1) :][:2]
                scaled[step, tile] = [mul_half2(p[b], scales[b]) for b in range(2)]
                # the low 8 rows are the zeros, so that a lane's first two results are its columns'
                more = mma(*rest[2 * tile :][:2], 0.0, 0.0, zeros[0], 0, zeros[1], 0, *p)
                rest[2 * tile : 2 * tile + 2] = more[:2]

        def ask(part: int) -> Any:
            return load_matrices_transposed(
                stage + ((part & 1) * 32 + lane) * 64 + ((key ^ (part >> 1)) * 16)
            )

        asked = ask(0)
        for chunk in range(4):
            for pair in range(2):
                part = 2 * chunk + pair
                words, asked = asked, ask(part + 1) if part < 7 else asked
                for step in range(2):
                    low, high = words[2 * step : 2 * step + 2]
                    shifted = low >> 8, high >> 8
                    for part, mask in enumerate((_LOW, _HIGH)):
                        a = (low & mask, shifted[0] & mask, high & mask, shifted[1] & mask)
                        for tile in range(tiles):
                            at_sum = (2 * chunk + part) * tiles + tile
                            acc[at_sum] = mma(*acc[at_sum], *a, *scaled[2 * pair + step, tile])
        return (*(value for four in acc for value in four), *rest)

    return values


def make_values_exact(shape: AbsorbedShape) -> Any:
    tiles = shape.tiles

    @traced("f" * shape.num_sums)
    def values(sums: Any, stage: Any, weights: Any, lane: Any) -> Any:
        """Add p x of 16 exact positions."""
        g, t = lane >> 2, lane & 3
        acc, rest = tuples(shape, sums), list(sums[32 * tiles :])
        p = [_weights(shape, weights, tile, 0, lane)[:2] for tile in range(tiles)]
        rows = [2 * t, 2 * t + 1]
        at = [stage + row * 256 + (g & 3) * 4 for row in rows]
        keys = [_exact_key(row) for row in rows]
        for chunk in range(4):
            for part in range(2):
                unit = 2 * chunk + 8 * part + (g >> 2)
                places = [a + (unit ^ key) * 16 for a, key in zip(at, keys, strict=True)]
                low = [load_shared_32(place) for place in places]
                high = [load_shared_32(place + 8 * 256) for place in places]
                a = [byte_permute(*two, order) for two in (low, high) for order in (0x5410, 0x7632)]
                for tile in range(tiles):
                    at_sum = (2 * chunk + part) * tiles + tile
                    acc[at_sum] = mma(*acc[at_sum], *a, *p[tile])
        return (*(value for four in acc for value in four), *rest)

    return values


def make_undo(shape: AbsorbedShape) -> Any:
    @traced("f" * shape.num_sums)
    def undo(sums: Any) -> Any:
        """Take the powers of two of the codes out of the sums over stored positions."""
        factors = [UNDO[i // (4 * shape.tiles) % 2] for i in range(32 * shape.tiles)]
        factors += [1.0] * (shape.num_sums - len(factors))
        return tuple(v if f == 1.0 else v * f for v, f in zip(sums, factors, strict=True))

    return undo
