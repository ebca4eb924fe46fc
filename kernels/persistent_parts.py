"""The straight-line parts of the persistent core kernel that other kernels do not have; `persistent.py` says what they are for.

What other blocks of the running kernel make is polled (`polling.py`): x and its sums of squares, queries and new keys
and values, the streams' results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.attention_parts import NEVER
from kernels.attention_shapes import STREAMS
from kernels.device_code import traced
from kernels.fragments import RANKS, ProductShape, key_place, packed_place, value_place
from kernels.intrinsics import (
    bits_of,
    exp2,
    f32_of,
    fma,
    fmax,
    int_to_f32,
    less,
    load_shared_128,
    load_shared_f32,
    load_shared_f32x2,
    mma,
    pack_half2,
    quotient,
    reciprocal,
    remainder,
    same,
    select,
    select_int,
    shuffle_from,
    shuffle_xor_f32,
    smaller,
    store_16_if,
    store_shared_32,
    store_shared_128_if,
    store_shared_f32_if,
    store_shared_f32x2_if,
    wide,
)
from kernels.linear_parts import add_chains, row_factor
from kernels.polling import (
    NOTHING,
    lacks_any_half,
    lacks_any_word,
    poll_32_again,
    poll_32_if,
    poll_128_again,
    poll_128_if,
    poll_tagged_again,
    store_shared_16_if,
    store_tagged_if,
)
from kernels.reads import any_bits

if TYPE_CHECKING:
    from kernels.attention_shapes import AttentionShape


# --- products --------------------------------------------------------------------------------------


def num_chains(shape: ProductShape) -> int:
    return RANKS * shape.sub_slices


def make_look_x(shape: ProductShape, is_normed: bool) -> Any:
    """A chain's activations as B fragments (x is fp16 in the order of `fragments.packed_place`), with `is_normed` a row's
    sums of squares, and whether anything of that has not come."""
    pairs, num_squares = shape.k_steps // 2, shape.k // 16
    is_padded = shape.k != num_chains(shape) * shape.k_steps * 16
    squares_words = -(-num_squares // 32) if is_normed else 0

    count = 4 * pairs + squares_words

    @traced("r" * (count + 1))
    def unseen(chain: Any, row: Any, lane: Any, rows: Any) -> Any:
        """As `look`, of what has not been asked for: NOTHING, or zeros where there is no row or column."""
        words: list[Any] = []
        for pair in range(pairs):
            is_there = less(lane >> 2, rows)
            if is_padded:
                column = chain * (pairs * 32) + pair * 32 + (lane & 3) * 8
                is_there = is_there & less(column, shape.k)
            words += [select_int(NOTHING, 0, is_there)] * 4
        sums = [
            select_int(NOTHING, 0, less(row, rows) & less(lane + 32 * i, num_squares))
            for i in range(squares_words)
        ]
        return (*words, *sums, 1)

    @traced("r" * (count + 1))
    def look(seen: Any, x: Any, squares: Any, chain: Any, row: Any, lane: Any) -> Any:
        """What had not come when it was `seen` is asked for."""
        words: list[Any] = []
        for pair in range(pairs):
            old = seen[4 * pair : 4 * pair + 4]
            at = x + (chain * pairs * 512 + lane * 16) + pair * 512
            words += poll_128_again(*old, at, lacks_any_half(old))
        sums = [
            poll_32_again(
                old, squares + (row * num_squares + lane + 32 * i) * 4, same(old, NOTHING)
            )
            for i, old in enumerate(seen[4 * pairs : count])
        ]
        is_missing = lacks_any_half(words)
        if sums:
            is_missing = is_missing | lacks_any_word(sums)
        return (*words, *sums, is_missing)

    return unseen, look


def make_look_some_x(shape: ProductShape) -> Any:
    """Whether a word of a chain's x has come, of those that are asked for: two of row 0 and each 32 columns."""
    pairs = shape.k_steps // 2

    @traced("r")
    def look(x: Any, chain: Any, lane: Any) -> Any:
        is_there = less(lane, 2 * pairs) & less(chain * (pairs * 32) + lane * 16, shape.k)
        place = (chain * pairs + (lane >> 1)) * 512 + (lane & 1) * 8
        is_missing = lacks_any_half([poll_32_if(x + place, is_there)])
        has_none = 1 - less(chain * (pairs * 32), shape.k)
        return (is_there & (1 - is_missing)) | has_none

    return look


def make_factor(shape: ProductShape) -> Any:
    inverse_k, words, first = 1.0 / shape.k, -(-shape.k // 16 // 32), 2 * shape.k_steps

    @traced()
    def factor(looked: Any, address: Any, eps: Any, lane: Any) -> None:
        """Leave in shared memory what a row's sums are multiplied by; `looked`: what `make_look_x` saw."""
        parts = [f32_of(looked[first + i]) for i in range(words)]
        store_shared_f32_if(address, row_factor(parts, inverse_k, eps), less(lane, 1))

    return factor


def make_multiply(steps: int, part: int) -> Any:
    """acc + W x over the `part`-th run of `steps` steps of a chain."""

    @traced("ffffr")
    def multiply(acc: Any, weights: Any, x: Any) -> Any:
        """The sums, and bits of all that was read: whoever has them has read the whole piece."""
        acc, read = acc[:4], []
        for step in range(steps):
            a = load_shared_128(weights + step * 512)
            read.append(a[0])
            at = 2 * (part * steps + step)
            acc = mma(*acc, *a, x[at], x[at + 1])
        return (*acc, any_bits(read))

    return multiply


@traced("ffffr")
def no_sum() -> Any:
    return (*(int_to_f32(0) for _ in range(4)), 0)


def make_put(rows: int) -> Any:
    """Leave a chain's sums of one tile in shared memory: pairs (row g, row g + 8), `pitch` bytes a column."""
    pitch = pitch_of(rows)

    @traced()
    def put(acc: Any, address: Any, lane: Any) -> None:
        g, t = lane >> 2, lane & 3
        for odd in range(min(rows, 2)):
            m = 2 * t + odd
            store_shared_f32x2_if(
                address + (m * pitch + g * 8), acc[odd], acc[odd + 2], less(m, rows)
            )

    return put


def pitch_of(rows: int) -> int:
    """Bytes of a column's 8 pairs, padded where several columns are stored at once."""
    return 72 if rows > 1 else 64


def make_collect(chains: int, chain_bytes: int) -> Any:
    @traced("ff")
    def collect(address: Any) -> Any:
        return add_chains([load_shared_f32x2(address + i * chain_bytes) for i in range(chains)])

    return collect


# --- attention: four warps a block -----------------------------------------------------------------


def make_query(shape: AttentionShape) -> Any:
    group = shape.group
    units = group * shape.head_dim // 8  # of 16 bytes
    loads = -(-units // 32)

    @traced("r" * (4 * loads))
    def look_query(q: Any, lane: Any, is_wanted: Any) -> Any:
        """A unit's query heads, spread over the warp, as far as they have come."""
        words: list[Any] = []
        for i in range(loads):
            at = lane + 32 * i
            words += poll_128_if(q + at * 16, less(at, units) & is_wanted)
        return tuple(words)

    @traced("r" * (4 * loads))
    def look_again(seen: Any, q: Any, lane: Any) -> Any:
        """What had not come when it was `seen`, too."""
        words: list[Any] = []
        for i in range(loads):
            old = seen[4 * i : 4 * i + 4]
            words += poll_128_again(*old, q + (lane + 32 * i) * 16, lacks_any_half(old))
        return tuple(words)

    @traced("r")
    def lacks_any(query: Any, new: Any) -> Any:
        """Whether a part of the query or of what `make_patch` looks for has not come."""
        return lacks_any_half([*query, *new])

    @traced()
    def keep_query(query: Any, area: Any, lane: Any) -> None:
        """Put it into shared memory as B fragments (every warp of a group puts the same)."""
        for i in range(loads):
            at = lane + 32 * i
            column, unit = quotient(at, shape.head_dim // 8), remainder(at, shape.head_dim // 8)
            place = area + ((unit >> 2) * group + column) * 64 + (unit & 3) * 16
            store_shared_128_if(place, *query[4 * i : 4 * i + 4], less(at, units))

    @traced("ffffr")
    def some_scores(acc: Any, keys: Any, area: Any, lane: Any) -> Any:
        """q.k of 16 positions over 64 dims, and bits of all keys; columns past the group repeat the first and are of no use."""
        acc, read = acc[:4], []
        place = area + select_int(lane, lane & 3, less(lane, 4 * group)) * 16
        for part in range(2):
            b = load_shared_128(place + part * (group * 64))
            for step in range(2):
                a = load_shared_128(keys + (2 * part + step) * 512)
                read.append(a[0])
                acc = mma(*acc, *a, b[2 * step], b[2 * step + 1])
        return (*acc, any_bits(read))

    return look_query, look_again, lacks_any, keep_query, some_scores


def make_share_scores(shape: AttentionShape) -> Any:
    columns, group = shape.num_columns, shape.group

    @traced()
    def give(scores: Any, area: Any, tile: Any, lane: Any) -> None:
        g, t = lane >> 2, lane & 3
        for high in range(2):
            row = area + (tile * 16 + high * 8 + g) * (group * 4)
            for odd in range(columns):
                column = 2 * t + odd
                store_shared_f32_if(row + column * 4, scores[2 * high + odd], less(column, group))

    @traced("f" * 16)
    def take(area: Any, lane: Any) -> Any:
        """The scores of the block as one warp has them: tile, high row, column."""
        g, t = lane >> 2, lane & 3
        out = []
        for row in range(8):
            pair = []
            for odd in range(columns):
                column = select_int(2 * t + odd, 0, less(2 * t + odd, group))
                pair.append(load_shared_f32(area + ((row * 8 + g) * group + column) * 4))
            out += [pair[0], pair[-1]]
        return tuple(out)

    return give, take


def make_tile_values(shape: AttentionShape, team: int) -> Any:
    tiles = shape.head_dim // (64 * team)

    def make_add(tile: int) -> Any:
        @traced("f" * (4 * tiles))
        def add(out: Any, p: Any, values: Any) -> Any:
            """Add p.v for the quarter's `tile`-th 16 dims (out was corrected before)."""
            acc = tuple(out[4 * tile : 4 * tile + 4])
            for step in range(4):
                a = load_shared_128(values + step * 512)
                acc = mma(*acc, *a, p[2 * step], p[2 * step + 1])
            return (*out[: 4 * tile], *acc, *out[4 * tile + 4 :])

        return add

    @traced("f" * (4 * tiles))
    def correct(out: Any, first: Any, second: Any) -> Any:
        factors = (first, second)[: shape.num_columns]
        return tuple(v * factors[i % 2] if i % 2 < len(factors) else v for i, v in enumerate(out))

    @traced("f" * (4 * tiles))
    def zeros() -> Any:
        return tuple(int_to_f32(0) for _ in range(4 * tiles))

    return [make_add(min(i, tiles - 1)) for i in range(4)], correct, zeros


def make_patch(shape: AttentionShape, team: int) -> Any:
    """Bring one position, whose key and value this step made, into the copies of a block's quarters in shared memory.

    Keys lie in pieces of 64 dims, values in pieces of 16, as they are fetched.
    """
    dim = shape.head_dim
    key_words, value_words, share = dim // 64, max(1, dim // (128 * team)), dim // (4 * team)
    count = key_words + value_words

    @traced("r" * count, is_tuple=True)
    def look_new(keys: Any, values: Any, quarter: Any, lane: Any, is_wanted: Any) -> Any:
        """Words of the new key and of the quarter of the new value, as far as they have come."""
        words = [poll_32_if(keys + (64 * i + lane * 2) * 2, is_wanted) for i in range(key_words)]
        for i in range(value_words):
            d = quarter * share + ((32 * i + lane) & (share - 1))
            words.append(poll_32_if(values + (d & 1022) * 2, is_wanted))
        return tuple(words)

    @traced()
    def patch_keys(words: Any, piece: Any, keys: Any, position: Any, lane: Any) -> None:
        """For the quarter that has this position: its `piece`-th 64 dims, which lie at `keys`."""
        # word i of the lane, i = piece
        word = words[0]
        for i in range(1, key_words):
            word = select_int(words[i], word, same(piece, i))
        at = key_place(position & 15, lane * 2, 64) * 2
        store_shared_32(keys + at, word)

    @traced()
    def patch_values(
        words: Any, piece: Any, values: Any, position: Any, quarter: Any, lane: Any
    ) -> None:
        """The quarter's `piece`-th 16 dims, which lie at `values`: by the lanes that have them."""
        for i in range(value_words):
            in_quarter = (32 * i + lane) & (share - 1)
            half = words[key_words + i] >> ((in_quarter & 1) * 16)
            at = value_place(position & 63, in_quarter & 15) * 2
            is_here = same(in_quarter >> 4, piece)
            store_shared_16_if(values + at, half, is_here)

    return look_new, patch_keys, patch_values


def num_streams(shape: AttentionShape) -> int:
    """Of a (row, unit): with int4 the exact keys are one more, the first."""
    return STREAMS + (shape.format == "int4")


def result_words(shape: AttentionShape) -> int:
    """Of one stream and query head: its dims, the maximum, the sum."""
    return shape.head_dim + 2


def make_send(shape: AttentionShape, team: int) -> Any:
    width, tiles = result_words(shape), shape.head_dim // (64 * team)

    @traced()
    def send(out: Any, state: Any, results: Any, quarter: Any, tag: Any, lane: Any) -> None:
        """Write a quarter of a stream's result, in global memory."""
        g, t = lane >> 2, lane & 3
        sums = [state[2], state[3]]
        for mask in (4, 8, 16):
            sums = [x + shuffle_xor_f32(x, mask) for x in sums]
        for odd in range(shape.num_columns):
            column = 2 * t + odd
            is_real = less(column, shape.group)
            row = results + column * (width * 8)
            for tile in range(tiles):
                for high in range(2):
                    d = (quarter * tiles + tile) * 16 + 8 * high + g
                    store_tagged_if(row + d * 8, out[4 * tile + 2 * high + odd], tag, is_real)
            is_told = is_real & less(g + quarter, 1)
            store_tagged_if(row + shape.head_dim * 8, state[odd], tag, is_told)
            store_tagged_if(row + shape.head_dim * 8 + 8, sums[odd], tag, is_told)

    return send


def make_merge(shape: AttentionShape, target: ProductShape) -> Any:
    """What a warp does for 32 neighbouring outputs of one (row, unit): the streams up to `own`'s, added in order."""
    dim, width, count = shape.head_dim, result_words(shape), num_streams(shape)
    # the exact keys come last, as in the kernels one by one
    order = [*range(count - STREAMS, count), *range(count - STREAMS)]

    def stream_of(lane: Any) -> Any:
        return lane & (STREAMS - 1) if count == STREAMS else select_int(lane, 0, less(lane, count))

    @traced("r")
    def look_some(results: Any, item: Any, own: Any, tag: Any, lane: Any) -> Any:
        """Whether the sum of stream `lane` has not come."""
        stream, column = stream_of(lane), quotient(item, dim)
        at = results + ((stream * shape.group + column) * width + dim + 1) * 8
        _, its_tag = poll_tagged_again(0, tag, at, less(stream, own + 1))
        return 1 - same(its_tag, tag)

    @traced("r" * (count + 3))
    def unseen(own: Any) -> Any:
        """As `look`, of what has not been asked for."""
        return (*[0] * (count + 2), (less(own, own + 1) << smaller(own + 1, count)) - 1)

    @traced("r" * (count + 3))
    def look(seen: Any, results: Any, item: Any, tag: Any, lane: Any) -> Any:
        """The outputs' parts, the maximum and the sum of stream `lane`, and a bit for each stream of which something lacks.

        What did not lack when it was `seen` is not asked for.
        """
        column, d = quotient(item, dim), remainder(item, dim)
        words, lacking = list[Any](), seen[count + 2]
        still: Any = less(lane, 0)
        for s in range(count):
            at = results + ((s * shape.group + column) * width + d) * 8
            word, its_tag = poll_tagged_again(seen[s], tag, at, (lacking >> s) & 1)
            words.append(word)
            still = still | (1 - same(its_tag, tag)) << s
        stream = stream_of(lane)
        top = results + ((stream * shape.group + column) * width + dim) * 8
        for i in range(2):
            is_wanted = (lacking >> stream) & 1
            word, its_tag = poll_tagged_again(seen[count + i], tag, top + 8 * i, is_wanted)
            words.append(word)
            still = still | (1 - same(its_tag, tag)) << stream
        return (*words, still)

    @traced()
    def merge(
        words: Any, out: Any, row: Any, unit_head: Any, item: Any, own: Any, lane: Any
    ) -> None:
        column, d = quotient(item, dim), remainder(item, dim)
        zero = int_to_f32(0)
        is_stream = less(stream_of(lane), own + 1)
        one = select(f32_of(words[count]), zero + NEVER, is_stream)
        top = one
        for mask in (1, 2, 4, 8, 16)[: (count - 1).bit_length()]:
            top = fmax(top, shuffle_xor_f32(top, mask))
        weight = bits_of(exp2(one - top))
        total, value = zero, zero
        for s in order:
            shared = f32_of(shuffle_from(weight, s))
            total = fma(shared, f32_of(shuffle_from(words[count + 1], s)), total)
            value = fma(shared, f32_of(words[s]), value)
        value = value * reciprocal(fmax(total, int_to_f32(1) * 1.0e-30))
        k = (unit_head * shape.group + column) * dim + d
        store_16_if(out + wide(packed_place(row, k, target, 1)) * 2, pack_half2(value, value), 1)

    return look_some, unseen, look, merge
