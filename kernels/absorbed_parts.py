"""The parts of attention over cached inputs, each made for one shape: scores, softmax, weighted sums, joining chains.

Straight-line device code of one warp, which owns one group of 128 values of the input; `absorbed.py` puts it together,
says what it is for and what lies where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.device_code import traced
from kernels.intrinsics import (
    any_lane,
    bits_of,
    byte_permute,
    copy_async_16,
    copy_async_16_if,
    divide,
    exp2,
    f32_of,
    fma,
    fmax,
    int_to_f32,
    less,
    less_f32,
    load_32_if,
    load_128_if,
    load_f32_if,
    load_matrices,
    load_matrices_transposed,
    load_shared_32,
    load_shared_32x2,
    load_shared_128,
    load_shared_f32,
    load_shared_f32x2,
    load_shared_f32x4,
    load_shared_half,
    mma,
    mul_half2,
    nearest_int,
    pack_half2,
    reciprocal,
    select,
    select_int,
    shuffle_xor_f32,
    smaller,
    store_32_if,
    store_f32x2_if,
    store_shared_32,
    store_shared_128_if,
    store_shared_f32,
    store_shared_f32_if,
    store_shared_f32x2_if,
    sum_of_warp,
    unpack_half2,
    warp_max,
    wide,
)
from kernels.layout import NUM_SINKS
from kernels.warpgroup import descriptor, make_byte_product

if TYPE_CHECKING:
    from kernels.absorbed import AbsorbedShape

GROUP = 128  # values of the input that share a scale, and that one warp owns
SCALES_AT = (
    64 * GROUP // 2
)  # in a stage: first the codes of 64 positions, then their scales, then their zeros
STAGE_BYTES = SCALES_AT + 256
PIECE = 16  # positions of a piece of an exact block, which fills a stage as 64 stored ones do
SCORE_ROW = (
    68  # floats from head to head of a share of 64 scores: stores of a warp meet no bank twice
)
_NEVER = -1.0e30  # the maximum of nothing: finite, so that an empty chain joins as nothing
_MASKED = -2.0e30  # the score of a masked position: its weight is 0 even beside nothing
# How far (as an exponent of 2) scores may pass the maximum that sums are relative to before it is brought up to date. The largest
# scale times 2^2 is a half.
_SLACK = 2.0

_SIGN = 1 << 31
_LOW, _BOTH = 0x000F000F, 0x00FF00FF
_HIGH_BITS = 0xF0F0F0F0
# A code n goes to the matrix unit as the subnormal half n / 2^24 or (of the high four bits) n / 2^20.
_UNDO = (float(1 << 24), float(1 << 20))
# The queries of low and high codes are stored times these, so that both give n q / 2^22.
QUERY_FACTORS = (4.0, 0.25)
_TOP_QUERY = 32512.0  # what fits two signed bytes


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
    chunk = (lane & 3) ^ ((lane >> 3) & 3)
    source = codes + wide((lane >> 2) * row_bytes + (lane & 3) * 16)
    target = stage + (lane >> 2) * 64 + chunk * 16
    for i in range(8):
        copy_async_16(target + i * 512, source + wide(row_bytes * (8 * i)))
    copy_async_16_if(stage + SCALES_AT + lane * 16, scales + wide(lane * 16), less(lane, 16))


@traced()
def copy_exact(stage: Any, source: Any, last: Any, wrap: Any, row_bytes: Any, lane: Any) -> None:
    """A group's 16 exact positions; rows after `last` repeat others, so that nothing unwritten is read."""
    chunk = lane & 15
    for i in range(8):
        row = (lane >> 4) + 2 * i
        key = _exact_key(row)
        from_row = smaller(row & wrap, last)
        copy_async_16(
            stage + row * 256 + (chunk ^ key) * 16,
            source + wide(from_row * row_bytes + chunk * 16),
        )


def _exact_key(row: Any) -> Any:
    """What a row's chunks of 16 bytes are swizzled by: both readers' rows meet no bank twice."""
    return ((row & 3) ^ ((row >> 2) & 1)) * 2


def make_load_query(shape: AbsorbedShape) -> Any:
    @traced("r" * 16)
    def load_query(source: Any, rest: Any, lane: Any) -> Any:
        """The group's part of a row's query as B fragments: the first 8 heads in registers, others to the warp's `rest`."""
        found: list[list[Any]] = []
        for tile in range(shape.tiles):
            width = columns_of(shape, tile) * 4
            place = wide(tile * 2048 + _lane_of(shape, tile, lane) * 16)
            found.append([])
            for step in range(4):
                found[tile] += load_128_if(source + place + step * width * 16, 1)
        for step in range(4 * (shape.tiles - 1)):
            width = columns_of(shape, 1) * 4
            words = found[1][4 * step : 4 * step + 4]
            store_shared_128_if(rest + (step * width + lane) * 16, *words, less(lane, width))
        return tuple(found[0])

    return load_query


def _query(shape: AbsorbedShape, query: Any, rest: Any, tile: int, step: int, lane: Any) -> Any:
    """B fragments of 16 low and 16 high codes: two words each."""
    if tile == 0:
        return query[4 * step : 4 * step + 4]
    width = columns_of(shape, tile) * 4
    return load_shared_128(rest + (step * width + _lane_of(shape, tile, lane)) * 16)


def _load_pair(shape: AbsorbedShape, table: Any, tile: int, lane: Any) -> Any:
    """Of a table by head, a lane's two columns of a column tile."""
    column = (lane & 3) * 2 & (columns_of(shape, tile) - 1)
    return load_shared_f32x2(table + (8 * tile + column) * 4)


# --- scores ----------------------------------------------------------------------------------------


def _put_scores(
    shape: AbsorbedShape, partials: Any, row: int, tile: int, position: Any, values: Any, lane: Any
) -> None:
    """Store a lane's scores of a tile of 16 positions: `values` are those of row g, then row g + 8, of columns 2t and 2t + 1.

    With 4 heads in the column tile the lanes t and t + 2 hold the same: the first stores row g, the other row g + 8.
    """
    t = lane & 3
    address = partials + (8 * tile * row + position) * 4
    if columns_of(shape, tile) == 8:
        for i, value in enumerate(values):
            place = (2 * t + i % 2) * (row * 4) + 32 * (i // 2)
            store_shared_f32(address + place, value)
        return
    for odd in range(2):
        place = ((t & 1) * 2 + odd) * (row * 4) + (t >> 1) * 32
        store_shared_f32(address + place, select(values[2 + odd], values[odd], t >> 1))


def _query_items(shape: AbsorbedShape, lane: Any) -> list[tuple[int, Any, Any]]:
    """Of each 16 bytes that a lane has of a query: the column tile, the head, which four codes' bytes (their low and high dims)."""
    found: list[tuple[int, Any, Any]] = []
    for tile in range(shape.tiles):
        width = columns_of(shape, tile)
        for i in range(width // 2):
            step = i if width == 8 else 2 * i + (lane >> 4)
            head = 8 * tile + ((lane >> 2) & (width - 1))
            found.append((tile, head, step * 4 + (lane & 3)))
    return found


def _over_tile(shape: AbsorbedShape, combine: Any, tile: int, value: Any) -> Any:
    """`value` combined over the lanes with the same head."""
    for mask in (1, 2) if columns_of(shape, tile) == 8 else (1, 2, 16):
        value = combine(value, shuffle_xor_f32(value, mask))
    return value


def make_read_query(shape: AbsorbedShape) -> Any:
    @traced("r" * (2 * shape.columns))
    def read_query(source: Any, lane: Any) -> Any:
        """The group's part of a row's query, as it lies."""
        words: list[Any] = []
        for i in range(shape.columns // 2):
            words += load_128_if(source + wide(lane * 16 + i * 512), 1)
        return tuple(words)

    return read_query


def make_tell_tops(shape: AbsorbedShape) -> Any:
    @traced()
    def tell_tops(words: Any, tops: Any, lane: Any) -> None:
        """The largest value of the group's part of each head's query, to `tops` (columns,)."""
        found: list[Any] = [int_to_f32(0)] * shape.tiles
        heads: list[Any] = [0] * shape.tiles
        for i, (tile, head, _) in enumerate(_query_items(shape, lane)):
            heads[tile] = head
            for j, word in enumerate(words[4 * i : 4 * i + 4]):
                for value in unpack_half2(word):
                    real = value * (1 / QUERY_FACTORS[j // 2])
                    found[tile] = fmax(found[tile], fmax(real, real * -1.0))
        for tile in range(shape.tiles):
            store_shared_f32_if(
                tops + heads[tile] * 4, _over_tile(shape, fmax, tile, found[tile]), 1
            )

    return tell_tops


def _bytes_of(numbers: list[Any]) -> tuple[Any, Any]:
    """The low and the high bytes of four numbers of 16 bits, both signed."""
    more = [number + 128 for number in numbers]
    low = [byte_permute(*numbers[i : i + 2], 0x0040) for i in (0, 2)]
    high = [byte_permute(*more[i : i + 2], 0x0051) for i in (0, 2)]
    return byte_permute(*low, 0x5410), byte_permute(*high, 0x5410)


def make_integer_query(shape: AbsorbedShape) -> Any:
    full, rows = shape.columns // 8, 8 * -(-shape.columns // 8)

    @traced()
    def integer_query(
        words: Any, tops: Any, matrices: Any, sums: Any, units: Any, lane: Any
    ) -> None:
        """The group's part of the queries as integers of 16 bits, two bytes in two rows of B's two matrices.

        The first meets 16 times the low codes, the second low + 16 high ones, so q of the high codes is in the second,
        16 times less, and the first makes good what that does to the low ones. `sums` (rows,) get the sums of the group, `units` (rows,) what
        scores are multiplied by.
        """
        items = _query_items(shape, lane)
        totals: list[Any] = [0] * shape.tiles
        factors: dict[int, Any] = {}
        for i, (tile, head, quad) in enumerate(items):
            if tile not in factors:
                top = load_shared_f32(tops + head * 4)
                for group in range(1, shape.groups):
                    top = fmax(top, load_shared_f32(tops + (group * shape.columns + head) * 4))
                limit = int_to_f32(1) * (_TOP_QUERY * 16 / 17)
                factor = select(divide(limit, top), int_to_f32(0), less_f32(0.0, top))
                factors[tile] = factor, top * (1 / (_TOP_QUERY * 256 / 17)), head
            factor = factors[tile][0]
            halves = [unpack_half2(word) for word in words[4 * i : 4 * i + 4]]
            low = [halves[j & 1][j >> 1] for j in range(4)]
            high = [halves[2 + (j & 1)][j >> 1] for j in range(4)]
            second = [nearest_int(b * (factor * 4.0)) for b in high]
            first = [nearest_int((a - b) * (factor * 0.25)) for a, b in zip(low, high, strict=True)]
            for number in first:
                totals[tile] = totals[tile] + number * 16
            for number in second:
                totals[tile] = totals[tile] + number * 17
            in_full = tile < full
            places = [head, head + rows if in_full else head + 4]
            for matrix, numbers in enumerate((first, second)):
                for place, word in zip(places, _bytes_of(numbers), strict=True):
                    at = (place >> 3) * 512 + (place & 7) * 64
                    at = at + (((quad >> 2) ^ ((place >> 1) & 3)) * 16 + (quad & 3) * 4)
                    store_shared_32(matrices + at + matrix * shape.matrix_bytes, word)
        for tile, (_, unit, head) in factors.items():
            total = _over_tile(shape, _add, tile, int_to_f32(totals[tile]))
            store_shared_f32(sums + head * 4, total)
            store_shared_f32(units + head * 4, unit)
            if tile >= full:
                store_shared_f32(sums + head * 4 + 16, int_to_f32(0))
                store_shared_f32(units + head * 4 + 16, unit * 256.0)

    return integer_query


def _add(a: Any, b: Any) -> Any:
    return a + b


def make_no_scores(shape: AbsorbedShape) -> Any:
    @traced("f" * (4 * shape.tiles))
    def no_scores() -> Any:
        return tuple(int_to_f32(0) for _ in range(4 * shape.tiles))

    return no_scores


def make_add_scores(shape: AbsorbedShape) -> Any:
    tiles, full, n = shape.tiles, shape.columns // 8, 2 * shape.columns
    product = make_byte_product(n, 4, shape.matrix_bytes)

    @traced("f" * (4 * tiles))
    def add_scores(shares: Any, stage: Any, matrices: Any, sums: Any, first: Any, lane: Any) -> Any:
        """Add a group's share of the scores of 64 stored positions, of which the warp has 16 from `first` on."""
        g, t, key = lane >> 2, lane & 3, (lane >> 1) & 3
        words: list[Any] = []
        for step in range(2):
            row = stage + (first + (lane & 15)) * 64
            words += load_matrices(row + (((2 * step + (lane >> 4)) ^ key) * 16))
        lows = [(word << 4) & _HIGH_BITS for word in words]
        acc = product(*lows, *words, descriptor(matrices))
        out = list(shares)
        at = stage + SCALES_AT + (first + g) * 2
        scales = [load_shared_half(at + 16 * high) for high in range(2)]
        zeros = [load_shared_half(at + 128 + 16 * high) for high in range(2)]
        for tile in range(tiles):
            q = load_shared_f32x2(sums + (8 * tile + 2 * t) * 4)
            for i in range(4):
                number = acc[4 * tile + i]
                if tile < full:
                    number = acc[4 * (tile + tiles) + i] * 256 + number
                share = fma(zeros[i >> 1], q[i & 1], out[4 * tile + i])
                out[4 * tile + i] = fma(int_to_f32(number), scales[i >> 1], share)
        return tuple(out)

    return add_scores


def make_put_scores(shape: AbsorbedShape) -> Any:
    @traced()
    def put_scores(shares: Any, units: Any, partials: Any, first: Any, lane: Any) -> None:
        """A warpgroup's shares of scores, to `partials` (columns, SCORE_ROW)."""
        for tile in range(shape.tiles):
            unit = load_shared_f32x2(units + (8 * tile + 2 * (lane & 3)) * 4)
            values = [shares[4 * tile + i] * unit[i & 1] for i in range(4)]
            if columns_of(shape, tile) == 4:
                # low bytes in two lanes, high ones in the others
                values = [value + shuffle_xor_f32(value, 2) for value in values]
            _put_scores(shape, partials, SCORE_ROW, tile, first + (lane >> 2), values, lane)

    return put_scores


def make_scores_exact(shape: AbsorbedShape) -> Any:
    tiles = shape.tiles

    @traced()
    def scores(stage: Any, query: Any, rest: Any, partials: Any, lane: Any) -> None:
        """The group's share of the scores of 16 exact positions."""
        g, t = lane >> 2, lane & 3
        key = _exact_key(g)
        # low and high codes' dims apart: their queries have different factors
        acc: list[Any] = [[(0.0, 0.0, 0.0, 0.0)] * tiles for _ in range(2)]
        for step in range(4):
            b = [_query(shape, query, rest, tile, step, lane) for tile in range(tiles)]
            for part in range(2):
                chunk = (2 * step + 8 * part + (t >> 1)) ^ key
                at = stage + g * 256 + chunk * 16 + (t & 1) * 8
                rows = [load_shared_32x2(at), load_shared_32x2(at + 8 * 256)]
                a = [byte_permute(*row, order) for order in (0x5410, 0x7632) for row in rows]
                for tile in range(tiles):
                    acc[part][tile] = mma(*acc[part][tile], *a, *b[tile][2 * part :][:2])
        low, high = (1 / factor for factor in QUERY_FACTORS)
        for tile in range(tiles):
            pairs = zip(acc[0][tile], acc[1][tile], strict=True)
            values = [fma(first, low, second * high) for first, second in pairs]
            _put_scores(shape, partials, shape.exact_row, tile, g, values, lane)

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
        heads = [warp + shape.num_warps * i for i in range(shape.warp_heads)]
        return tuple(load_f32_if(slopes + head * 4, less(head, shape.n_heads)) for head in heads)

    return load_slopes


def _largest(x: Any) -> Any:
    """The maximum over the warp, by way of integers in the same order (one instruction instead of five shuffles)."""
    bits = bits_of(x)
    ordered = warp_max(bits ^ ((0 - (bits >> 31)) | _SIGN))
    return f32_of(ordered ^ (((ordered >> 31) - 1) | _SIGN))


def make_gather(shape: AbsorbedShape, is_stored: bool) -> Any:
    columns = shape.columns
    row, count = (SCORE_ROW, shape.warpgroups) if is_stored else (shape.exact_row, shape.groups)

    @traced("f" * (2 * shape.warp_heads), is_tuple=True)
    def gather(partials: Any, warp: Any, lane: Any) -> Any:
        """A lane's two scores of each of the warp's heads: all shares added in order."""
        out: list[Any] = []
        place = lane if is_stored else lane & 7
        for i in range(shape.warp_heads):
            head = smaller(warp + shape.num_warps * i, columns - 1)
            at = partials + (head * row + place * 2) * 4
            parts = [load_shared_f32x2(at + part * (columns * row * 4)) for part in range(count)]
            scores = list(parts[0])
            for part in parts[1:]:
                scores = [a + b for a, b in zip(scores, part, strict=True)]
            out += scores
        return tuple(out)

    return gather


def make_softmax(shape: AbsorbedShape) -> Any:
    columns = shape.columns

    @traced("f" * (2 * shape.warp_heads), is_tuple=True)
    def softmax(
        state: Any, is_first: Any, scores: Any, weights: Any, factors: Any, slopes: Any, first: Any,
        low: Any, high: Any, position: Any, window: Any, warp: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """Of the warp's heads: p of 64 positions as B fragments, what to correct sums by, the new (maximum, sum).

        `first` is the positions' first key; keys in [low, high) count, of which the row sees those after
        position - window and the sinks. Sums are relative to a maximum that scores may pass by `_SLACK`.
        """
        out: list[Any] = []
        keys = [first + lane * 2 + odd for odd in range(2)]
        seen = [
            less(low - 1, key) & less(key, high)
            & (less(position - window, key) | less(key, NUM_SINKS))
            for key in keys
        ]  # fmt: skip
        for i in range(shape.warp_heads):
            head = warp + shape.num_warps * i
            is_head = less(head, columns)
            head = smaller(head, columns - 1)
            shown = list(scores[2 * i : 2 * i + 2])
            for odd in range(2):
                if shape.has_alibi:
                    distance = int_to_f32(keys[odd] - position)
                    shown[odd] = fma(distance, slopes[i], shown[odd])
                shown[odd] = select(shown[odd], int_to_f32(0) + _MASKED, seen[odd])
            old_top = select(int_to_f32(0) + _NEVER, state[2 * i], is_first)
            top = _largest(fmax(shown[0], shown[1]))
            new_top = select(top, old_top, less_f32(old_top + _SLACK, top))
            fix = exp2(old_top - new_top)
            p = [exp2(score - new_top) for score in shown]
            old_total = select(int_to_f32(0), state[2 * i + 1], is_first)
            out += [new_top, fma(old_total, fix, p[0] + p[1])]
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


def make_is_corrected(shape: AbsorbedShape) -> Any:
    @traced("r")
    def is_corrected(factors: Any, lane: Any) -> Any:
        """Whether any head's sums are to be corrected."""
        one, found = int_to_f32(1), None
        for tile in range(shape.tiles):
            for fix in _load_pair(shape, factors, tile, lane):
                found = less_f32(fix, one) if found is None else found | less_f32(fix, one)
        return any_lane(found)

    return is_corrected


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


def _tuples(shape: AbsorbedShape, values: Any) -> list[Any]:
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
        """Add p n s of 64 stored positions, and p z to the last sums.

        Of each pair of sums the second is that of low codes and high ones together: low + 16 high.
        """
        t, key = lane & 3, (lane >> 1) & 3
        acc, rest = _tuples(shape, sums), list(sums[32 * tiles :])
        for pair in range(2):
            p = [_weights(shape, weights, tile, pair, lane) for tile in range(tiles)]
            scaled: dict[tuple[int, int], list[Any]] = {}
            for step in range(2):
                first = stage + SCALES_AT + (32 * pair + 16 * step + 2 * t) * 2
                factors = [load_shared_32(first + 16 * b) for b in range(2)]
                zeros = [load_shared_32(first + 16 * b + 128) for b in range(2)]
                for tile in range(tiles):
                    own = p[tile][2 * step : 2 * step + 2]
                    scaled[step, tile] = [mul_half2(own[b], factors[b]) for b in range(2)]
                    # the low 8 rows are the zeros, so that a lane's first two results are its columns'
                    more = mma(*rest[2 * tile :][:2], 0.0, 0.0, zeros[0], 0, zeros[1], 0, *own)
                    rest[2 * tile : 2 * tile + 2] = more[:2]
            for chunk in range(4):
                words = load_matrices_transposed(
                    stage + (pair * 32 + lane) * 64 + ((key ^ chunk) * 16)
                )
                for step in range(2):
                    both = []
                    for word in words[2 * step : 2 * step + 2]:
                        both += [word & _BOTH, byte_permute(word, 0, 0x4341)]
                    for part in range(2):
                        a = both if part else [word & _LOW for word in both]
                        for tile in range(tiles):
                            at_sum = (2 * chunk + part) * tiles + tile
                            acc[at_sum] = mma(*acc[at_sum], *a, *scaled[step, tile])
        return (*(value for four in acc for value in four), *rest)

    return values


def make_values_exact(shape: AbsorbedShape) -> Any:
    tiles = shape.tiles

    @traced("f" * shape.num_sums)
    def values(sums: Any, stage: Any, weights: Any, lane: Any) -> Any:
        """Add p x of 16 exact positions."""
        g, t = lane >> 2, lane & 3
        acc, rest = _tuples(shape, sums), list(sums[32 * tiles :])
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
    tiles = shape.tiles

    @traced("f" * shape.num_sums)
    def undo(sums: Any) -> Any:
        """Sums over stored positions as what they stand for: high codes apart, without the powers of two."""
        out = list(sums)
        for i in range(0, 32 * tiles, 8 * tiles):
            for low in range(i, i + 4 * tiles):
                high = low + 4 * tiles
                out[low] = sums[low] * _UNDO[0]
                out[high] = (sums[high] - sums[low]) * _UNDO[1]
        return tuple(out)

    return undo


# --- joining chains --------------------------------------------------------------------------------


def join_factors(top: Any, total: Any, more_top: Any, more_total: Any) -> Any:
    """Of two averages with their (maximum, sum): the new maximum and sum, and the shares of both in the new average."""
    new_top = fmax(top, more_top)
    first, second = total * exp2(top - new_top), more_total * exp2(more_top - new_top)
    new_total = first + second
    safe = fmax(new_total, int_to_f32(1) * 1.0e-30)
    return new_top, new_total, divide(first, safe), divide(second, safe)


def join_halves(old: Any, more: Any, old_share: Any, share: Any) -> Any:
    """Two averages of two values each, rounded to halves."""
    pairs = zip(unpack_half2(old), unpack_half2(more), strict=True)
    return pack_half2(*(fma(share, b, old_share * a) for a, b in pairs))


def make_close(shape: AbsorbedShape, is_joined: bool) -> Any:
    @traced("f" * (2 * shape.warp_heads), is_tuple=True)
    def close(
        state: Any, joined: Any, is_first: Any, shares: Any, meta: Any, is_told: Any, warp: Any, lane: Any
    ) -> Any:  # fmt: skip
        """End a chain: to `shares` (columns, 4) go 1 / sum and the shares of what is kept and of this chain.

        `joined` is the (maximum, sum) of what is kept of each of the warp's heads; it is returned brought up to date. Where `is_told`,
        that of the whole goes to `meta` (heads, 2).
        """
        out: list[Any] = []
        for i in range(shape.warp_heads):
            head = warp + shape.num_warps * i
            is_lane = less(head, shape.columns) & less(lane, 1)
            column = smaller(head, shape.columns - 1)
            top, total = state[2 * i], sum_of_warp(state[2 * i + 1])
            inverse = reciprocal(fmax(total, int_to_f32(1) * 1.0e-30))
            store_shared_f32_if(shares + column * 16, inverse, is_lane)
            if is_joined:
                both = join_factors(joined[2 * i], joined[2 * i + 1], top, total)
                store_shared_f32x2_if(shares + column * 16 + 8, both[2], both[3], is_lane)
                top, total = select(top, both[0], is_first), select(total, both[1], is_first)
            out += [top, total]
            is_told_here = is_told & is_lane & less(head, shape.n_heads)
            store_f32x2_if(meta + wide(head * 8), top, total, is_told_here)
        return tuple(out)

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
    def results(sums: Any, shares: Any, lane: Any) -> Any:
        """The chain's averages as pairs of halves: 8 tiles x the lane's heads."""
        acc, zeros, is_odd = _tuples(shape, sums), sums[32 * shape.tiles :], (lane & 3) >> 1
        places = _places(shape, lane)
        factors, rests = [], []
        for tile, odd, head in places:
            factors.append(load_shared_f32x4(shares + head * 16)[0])
            if shape.is_cut:
                both = zeros[2 * tile : 2 * tile + 2]
                zero = select(both[1], both[0], is_odd) if odd is None else both[odd]
                rests.append(zero * factors[-1])
        words: list[Any] = []
        for at in range(8):
            for i, (tile, odd, _) in enumerate(places):
                values, pair = acc[at * shape.tiles + tile], []
                for both in (values[:2], values[2:]):
                    value = select(both[1], both[0], is_odd) if odd is None else both[odd]
                    pair.append(fma(value, factors[i], rests[i]) if rests else value * factors[i])
                words.append(pack_half2(*pair))
        return tuple(words)

    return results


def _targets(shape: AbsorbedShape, out: Any, warp: Any, lane: Any) -> list[tuple[Any, Any]]:
    """Where a lane's words lie in `out` (heads, d) fp16, and whether their head is one."""
    bases = []
    for _, _, head in _places(shape, lane):
        value = head * shape.d_model + warp * GROUP + (lane >> 2) * 2
        bases.append((out + wide(value) * 2, less(head, shape.n_heads)))
    return [
        (base + ((at & 1) * 64 + (at >> 1) * 16) * 2, is_head)
        for at in range(8)
        for base, is_head in bases
    ]


def make_join(shape: AbsorbedShape) -> Any:
    @traced("r" * shape.num_words)
    def join(words: Any, out: Any, shares: Any, warp: Any, lane: Any) -> Any:
        """The averages of what this lane put into `out` before and this chain."""
        olds = [load_32_if(*target) for target in _targets(shape, out, warp, lane)]
        factors = [load_shared_f32x4(shares + head * 16) for _, _, head in _places(shape, lane)]
        return tuple(
            join_halves(old, word, *factors[i % len(factors)][2:])
            for i, (old, word) in enumerate(zip(olds, words, strict=True))
        )

    return join


def make_put(shape: AbsorbedShape) -> Any:
    @traced()
    def put(words: Any, out: Any, warp: Any, lane: Any) -> None:
        """Write averages to `out` (heads, d) fp16."""
        for word, (address, is_head) in zip(words, _targets(shape, out, warp, lane), strict=True):
            store_32_if(address, word, is_head)

    return put
