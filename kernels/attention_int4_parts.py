"""The parts of attention over blocks stored in 4 bits: integer scores, softmax, weighted values, handing over.

A stored word's bytes have one row's number in their low half and that of the row 8 later in their high half. The matrix unit takes
the masked word and the word as it is: the second product less the first is 16 times that of the high halves, exactly. Queries and
weights are integers of 16 bits, two bytes each, in two columns of the other operand; every pair of columns whose head is not
needed repeats one that is, so that each lane has all tiles and keeps its share: nothing is computed twice after the products.

G is the group rounded up to 1, 2 or 4. Lane (g, t) has head t % G and, of every 4 / G tiles, number t // G.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.attention_parts import LOG2E, NEVER, put_result
from kernels.device_code import traced
from kernels.intrinsics import (
    bits_of,
    byte_permute,
    divide,
    exp2,
    f32_of,
    fma,
    fmax,
    int_to_f32,
    less,
    less_f32,
    load_128_if,
    load_f32_if,
    load_f32x4_if,
    load_shared_32,
    load_shared_128,
    mma_u8s8,
    mma_u8u8,
    nearest_int,
    pack_half2,
    quotient,
    remainder,
    same,
    select,
    select_int,
    shuffle_from,
    shuffle_xor_f32,
    unpack_half2,
    warp_max,
)
from kernels.layout import NUM_SINKS

if TYPE_CHECKING:
    from kernels.attention_shapes import AttentionLaunch, AttentionShape

NUMBERS = 0x0F0F0F0F
_TOP_QUERY = 32512.0  # what the largest value of a query becomes: both its bytes fit their signs


def heads_of(shape: AttentionShape) -> int:
    """G: how many heads the columns tell apart."""
    return 1 if shape.group == 1 else 2 if shape.group == 2 else 4


def kept_tiles(shape: AttentionShape) -> int:
    """Tiles of 16 dims that a lane keeps, at most."""
    return -(-shape.head_dim // 16 * heads_of(shape) // 4)


def slot_of(shape: AttentionShape, lane: Any) -> Any:
    """Which of every 4 / G tiles a lane keeps."""
    return (lane & 3) >> (heads_of(shape).bit_length() - 1)


def own_of(candidates: list[Any], slot: Any) -> list[Any]:
    """The lane's own of some tiles' registers."""
    chosen = list(candidates[0])
    for i, registers in enumerate(candidates[1:], 1):
        is_own = same(slot, i)
        chosen = [select_int(new, old, is_own) for new, old in zip(registers, chosen, strict=True)]
    return chosen


def pair_sums(accs: Any) -> tuple[Any, Any]:
    """The sums of a low and (16 times) of a high row from their bytes' sums."""
    low = accs[0] * 256 + accs[1]
    return low, accs[2] * 256 + accs[3] - low


def over_head(shape: AttentionShape, combine: Any, value: Any) -> Any:
    """`value` combined over all lanes of a head."""
    for mask in (1, 2, 4, 8, 16):
        if mask >= heads_of(shape):
            value = combine(value, shuffle_xor_f32(value, mask))
    return value


def add(a: Any, b: Any) -> Any:
    return a + b


def _top_score(shape: AttentionShape, value: Any) -> Any:
    if heads_of(shape) > 1:
        return over_head(shape, fmax, value)
    # all lanes have one head: the warp's own maximum, of bits in the order of the floats
    bits = bits_of(value)
    top = warp_max(bits ^ select_int(0xFFFFFFFF, 0x80000000, (bits >> 31) & 1))
    return f32_of(top ^ select_int(0x80000000, 0xFFFFFFFF, (top >> 31) & 1))


def _top_weight(shape: AttentionShape, value: Any) -> Any:
    if heads_of(shape) > 1:
        return over_head(shape, fmax, value)
    return f32_of(warp_max(bits_of(value)))


def make_integer_query(shape: AttentionShape, is_float: bool) -> Any:
    """As `attention_parts.make_load_query`: what a query's unit stands for, its sum, and the B fragments of the scores."""
    size = 4 if is_float else 2

    @traced("ff" + "r" * (shape.head_dim // 16))
    def integer_query(q: Any, lane: Any, scale: Any) -> Any:
        def load(head: Any, is_real: Any, part: int, t: Any) -> list[Any]:
            address = q + (head * shape.head_dim + part * 32 + t * 8) * size
            if not is_float:
                return list(load_128_if(address, is_real))
            x = [v * scale for i in (0, 16) for v in load_f32x4_if(address + i, is_real)]
            return [pack_half2(x[i], x[i + 1]) for i in range(0, 8, 2)]

        return integers_of(shape, load, lane)

    return integer_query


def integers_of(shape: AttentionShape, load: Any, lane: Any) -> Any:
    """What a query's unit stands for, its sum, and its B fragments; `load` gives 8 halves at 32 part + 8 t of a head."""
    column, t = lane >> 2, lane & 3
    head = (column >> 1) & (heads_of(shape) - 1)
    is_real = less(head, shape.group)
    values: list[Any] = []
    for part in range(shape.head_dim // 32):
        values += [v for pair in load(head, is_real, part, t) for v in unpack_half2(pair)]
    top = int_to_f32(0)
    for value in values:
        top = fmax(top, fmax(value, value * -1.0))
    factor, unit = factor_of(shape, top, t)
    words = query_bytes(values, factor, column)
    return (unit, query_sum(words) * unit, *words)


def factor_of(shape: AttentionShape, top: Any, t: Any) -> tuple[Any, Any]:
    """What turns a head's query into integers, and (of the lane's head in sums) back; `top`: the largest value that the lane has."""
    for mask in (1, 2):
        top = fmax(top, shuffle_xor_f32(top, mask))
    factor = select(divide(_TOP_QUERY, top), int_to_f32(0), less_f32(0.0, top))
    unit = divide(top, int_to_f32(1) * _TOP_QUERY)
    source = 8 * (t & (heads_of(shape) - 1))
    return factor, f32_of(shuffle_from(bits_of(unit), source))


def query_bytes(values: list[Any], factor: Any, column: Any) -> list[Any]:
    """The high or the low bytes of a query's integers, as the column says, four a word."""
    data = []
    for value in values:
        number = nearest_int(value * factor)
        high = ((number + 0x8080) >> 8) - 128
        data.append(select_int(number - high * 256, high, column & 1) & 0xFF)
    words = []
    for first in range(0, len(data), 4):
        a, b, c, d = data[first : first + 4]
        words.append(a | (c << 8) | (b << 16) | (d << 24))
    return words


def query_sum(words: list[Any]) -> Any:
    """The sum of a query's integers."""
    acc: Any = (0, 0, 0, 0)
    ones = (0x01010101,) * 4
    for i in range(0, len(words), 2):
        acc = mma_u8s8(*acc, *ones, words[i], words[i + 1])
    return int_to_f32(acc[0] * 256 + acc[1])


def place_of(shape: AttentionShape, i: int, lane: Any) -> Any:
    """The position of a lane's i-th score in its block."""
    heads = heads_of(shape)
    return (slot_of(shape, lane) * heads + (i >> 1)) * 16 + 8 * (i & 1) + (lane >> 2)


def make_load_pairs(shape: AttentionShape) -> Any:
    """The (scale, offset) pairs of the positions of a lane's scores."""
    count = 2 * heads_of(shape)

    @traced("r" * count)
    def load_pairs(scales: Any, lane: Any) -> Any:
        return tuple(load_shared_32(scales + place_of(shape, i, lane) * 4) for i in range(count))

    return load_pairs


def scaled_scores(sums: Any, pairs: Any, unit: Any, total: Any) -> Any:
    """Scores from the sums of low and high rows in turn; `unit` and `total`: of the query."""
    out: list[Any] = []
    for i, (number, pair) in enumerate(zip(sums, pairs, strict=True)):
        scale, offset = unpack_half2(pair)
        part = unit * (1 / 16) if i & 1 else unit
        out.append(fma(int_to_f32(number), scale * part, offset * total))
    return tuple(out)


def make_stored_scores(shape: AttentionShape) -> Any:
    heads, steps = heads_of(shape), shape.head_dim // 16

    @traced("f" * (2 * heads))
    def stored_scores(chunk: Any, pairs: Any, query: Any, unit: Any, total: Any, lane: Any) -> Any:
        """q.k of the lane's share of 64 stored positions: (low row, high row) of each of its G tiles."""
        accs: list[Any] = [(0, 0, 0, 0)] * 4
        quads: dict[int, Any] = {}
        for step in range(0, steps, 2):
            for tile in range(4):
                words = []
                for at in (tile * steps + step, tile * steps + step + 1):
                    if at >> 2 not in quads:
                        quads[at >> 2] = load_shared_128(chunk + (at >> 2) * 512)
                    words.append(quads[at >> 2][at & 3])
                a = [x for word in words for x in (word & NUMBERS, word)]
                accs[tile] = mma_u8s8(*accs[tile], *a, query[step], query[step + 1])
        sums: list[Any] = []
        for j in range(heads):
            sums += pair_sums(own_of([accs[i] for i in range(j, 4, heads)], slot_of(shape, lane)))
        return scaled_scores(sums, pairs, unit, total)

    return stored_scores


def make_stored_softmax(shape: AttentionShape, is_masked: bool) -> Any:
    heads = heads_of(shape)

    @traced("f" * 5 + "r" * heads)
    def stored_softmax(
        scores: Any, state: Any, pairs: Any, first: Any, position: Any, window: Any, hidden: Any,
        slope: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """The new (max, sum, offset sum); the correction of older sums; the weights' unit; the weights as pairs of 16 bits.

        `first` is the block's first position; positions below `hidden` are read elsewhere. `pairs` are V's (scale,
        offset). Sums are those of a lane's own positions.
        """
        shown = list(scores)
        for i in range(2 * heads):
            place = place_of(shape, i, lane)
            if shape.has_alibi:
                shown[i] = fma(int_to_f32(first + place - position), slope, shown[i])
            if is_masked:
                key = first + place
                is_seen = less(position - window, key) | less(key, NUM_SINKS)
                is_seen = is_seen & less(hidden - 1, key)
                shown[i] = select(shown[i], int_to_f32(0) + NEVER, is_seen)
        top = shown[0]
        for score in shown[1:]:
            top = fmax(top, score)
        new_max = fmax(state[0], _top_score(shape, top))
        fix = exp2(state[0] - new_max)
        total, offsets = state[1] * fix, state[2] * fix
        weights: list[Any] = []
        for pair, score in zip(pairs, shown, strict=True):
            p = exp2(score - new_max)
            total = total + p
            scale, offset = unpack_half2(pair)
            offsets = fma(p, offset, offsets)
            weights.append(p * scale)
        top = weights[0]
        for weight in weights[1:]:
            top = fmax(top, weight)
        # the largest weight has 15 bits
        exponent = bits_of(_top_weight(shape, top)) >> 23
        exponent = select_int(exponent, 15, less(15, exponent))
        factor = f32_of((268 - exponent) << 23)
        numbers = [nearest_int(weight * factor) for weight in weights]
        packed = [numbers[i] | (numbers[i + 1] << 16) for i in range(0, 2 * heads, 2)]
        return (new_max, total, offsets, fix, f32_of((exponent - 14) << 23), *packed)

    return stored_softmax


def weight_bytes(shape: AttentionShape, weights: Any, lane: Any) -> list[Any]:
    """The weights of 64 positions as B fragments of bytes."""
    heads, column, t = heads_of(shape), lane >> 2, lane & 3
    selector = select_int(0x6420, 0x7531, column & 1)
    source = 8 * t + ((column >> 1) & (heads - 1))
    words = []
    for step in range(4):
        pairs = [
            shuffle_from(weights[step % heads], source + step // heads * heads + 4 * i)
            for i in range(2)
        ]
        words.append(byte_permute(pairs[0], pairs[1], selector))
    return words


def tile_sums(chunk: Any, b: list[Any]) -> Any:
    """The bytes' sums of 16 stored dims over 64 positions."""
    quad, acc = load_shared_128(chunk), (0, 0, 0, 0)
    for i in (0, 2):
        a = [x for word in quad[i : i + 2] for x in (word & NUMBERS, word)]
        acc = mma_u8u8(*acc, *a, b[i], b[i + 1])
    return acc


def make_stored_values(shape: AttentionShape) -> Any:
    heads, tiles = heads_of(shape), shape.head_dim // 16
    many = 4 // heads  # tiles of which a lane keeps one

    @traced("f" * (2 * kept_tiles(shape)))
    def stored_values(out: Any, weights: Any, chunk: Any, fix: Any, unit: Any, lane: Any) -> Any:
        """Correct the sums of the lane's dims and add the block's p.v."""
        slot, b = slot_of(shape, lane), weight_bytes(shape, weights, lane)
        new, unit_high = list(out), unit * (1 / 16)
        for k in range(kept_tiles(shape)):
            accs: list[Any] = []
            for tile in range(k * many, min((k + 1) * many, tiles)):
                accs.append(tile_sums(chunk + tile * 512, b))
            low, high = pair_sums(own_of(accs, slot))
            new[2 * k] = fma(new[2 * k], fix, int_to_f32(low) * unit)
            new[2 * k + 1] = fma(new[2 * k + 1], fix, int_to_f32(high) * unit_high)
        return tuple(new)

    return stored_values


def make_stored_zeros(shape: AttentionShape) -> Any:
    @traced("f" * (2 * kept_tiles(shape)))
    def stored_zeros() -> Any:
        return tuple(int_to_f32(0) for _ in range(2 * kept_tiles(shape)))

    return stored_zeros


@traced("fff")
def start_stored() -> Any:
    return int_to_f32(0) + NEVER, int_to_f32(0), int_to_f32(0)


def make_head_slope(shape: AttentionShape) -> Any:
    @traced("f")
    def head_slope(slopes: Any, unit_head: Any, lane: Any) -> Any:
        if not shape.has_alibi:
            return int_to_f32(0)
        head = lane & (heads_of(shape) - 1)
        address = slopes + (unit_head * shape.group + head) * 4
        return load_f32_if(address, less(head, shape.group)) * LOG2E

    return head_slope


def make_send_stored(launch: AttentionLaunch) -> Any:
    shape, width = launch.shape, launch.result_floats
    owned, many = shape.head_dim // launch.cluster, 4 // heads_of(shape)

    @traced()
    def send_stored(out: Any, state: Any, stream: Any, results: Any, lane: Any, bar: Any) -> None:
        """Give a stream's result to the blocks that merge it, each its dims."""
        g, slot = lane >> 2, slot_of(shape, lane)
        head = lane & (heads_of(shape) - 1)
        total, offset = (over_head(shape, add, x) for x in state[1:])
        is_real = less(head, shape.group)
        row = results + (stream * shape.group + head) * (width * 4)
        for k in range(kept_tiles(shape)):
            tile = k * many + slot
            is_tile = is_real & less(tile, shape.head_dim // 16)
            for high in range(2):
                d = 16 * tile + 8 * high
                rank = select_int(quotient(d, owned), 0, is_tile)
                local = row + (remainder(d, owned) + g) * 4
                put_result(launch, local, rank, out[2 * k + high] + offset, bar, is_tile)
        # lane g tells rank g
        is_told = is_real & less(slot, 1) & less(g, launch.cluster)
        rank = select_int(g, 0, is_told)
        put_result(launch, row + owned * 4, rank, state[0], bar, is_told)
        put_result(launch, row + owned * 4 + 4, rank, total, bar, is_told)

    return send_stored
