"""Blocks stored in 4 bits in the persistent kernel's attention (`persistent_attention.py`): the bits are those of `attention_int4.py`.

A group of four warps either shares one stream's blocks (a warp scores a tile of 16 positions; then each makes all weights and adds its
quarter of the dims), or has four neighbouring streams, one a warp: which is quicker for one item, and which for many. It makes the query's
integers together. A warp fetches its keys of a block, then the (scale, offset) pairs of all its keys and values, then its values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.attention_blocks import NO_WINDOW
from kernels.attention_int4_parts import (
    NUMBERS,
    add,
    factor_of,
    heads_of,
    make_load_pairs,
    make_stored_softmax,
    over_head,
    own_of,
    pair_sums,
    place_of,
    query_bytes,
    query_sum,
    scaled_scores,
    slot_of,
    start_stored,
    tile_sums,
    weight_bytes,
)
from kernels.attention_parts import make_sinks
from kernels.attention_shapes import STREAMS
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    bits_of,
    fma,
    fmax,
    int_to_f32,
    less,
    load_constant_i32,
    load_shared_32,
    load_shared_128,
    mma_u8s8,
    same,
    select_int,
    store_shared_32,
    sync_some,
    unpack_half2,
    wide,
)
from kernels.layout import NUM_SINKS
from kernels.persistent_parts import result_words
from kernels.persistent_ring import make_ring
from kernels.persistent_rows import entry_of
from kernels.polling import max_halves, narrow, store_tagged_if, thread_id_again
from kernels.reads import any_bits, make_zero_once

if TYPE_CHECKING:
    from kernels.attention_shapes import AttentionShape
    from kernels.persistent_shapes import CoreLaunch

_PIECE_BYTES = 2048  # at most
_SIGN = 0x80000000


def make_stored(launch: CoreLaunch) -> Any:
    """What a producer warp and what its group do for streams of stored blocks, and for the exact sinks; None without."""
    shape, at_once = launch.shape.attention, launch.at_once
    dim, group = shape.head_dim, shape.group
    if shape.format != "int4":
        return (None,) * 7
    if launch.team > 1 or dim not in (64, 128):
        raise ValueError(f"{shape} is not built for teams of {launch.team} groups")
    warps_a_stream = 4 // at_once
    fetch, fetch_two, arrived, release = make_ring(launch)
    # a warp's tiles of 16 positions of keys and of 16 dims of values, and of those a piece's
    key_bytes, key_tiles, value_tiles = 8 * dim, at_once, dim // 16 // warps_a_stream
    key_piece, value_piece = min(key_tiles, _PIECE_BYTES // key_bytes), min(value_tiles, 4)
    key_pieces, value_pieces = key_tiles // key_piece, value_tiles // value_piece
    stored_bytes, pairs_at, values_bytes = shape.stored_bytes, 32 * dim, 512 * value_tiles
    key_piece_bytes, value_piece_bytes = key_piece * key_bytes, 512 * value_piece
    sink_keys_bytes, sink_values_bytes = 2 * NUM_SINKS * dim, NUM_SINKS * dim // 2
    scores_bytes, result_bytes = launch.scores_bytes, 8 * group * result_words(shape)
    no_window, num_sinks, read_at = NO_WINDOW, NUM_SINKS, 2 * heads_of(shape)
    no_sums = _make_no_sums(shape)
    convert, load_integers = _make_integers(shape)
    keys_0, keys_1 = (_make_keys(shape, at_once, i, key_piece) for i in range(2))
    give, take = _make_share(shape)
    load_pairs, score = make_load_pairs(shape), _make_scores(shape)
    softmax, softmax_masked = (make_stored_softmax(shape, masked) for masked in (False, True))
    spread, read_weights = _make_spread(shape)
    kept = value_pieces * _kept(shape, value_piece)
    values_0, values_1 = (_make_values(shape, i, kept, value_piece) for i in range(2))
    zeros, send = _make_zeros(kept), _make_send(shape, value_pieces, value_piece)
    kept_query, (look_sinks, sink_step) = _make_kept_query(shape), make_sinks(shape, dim // 64)
    read_values = make_zero_once(range(2 * kept))

    @traced("r")
    def read_sinks(seen: Any, never: Any) -> Any:
        return any_bits([*(bits_of(x) for x in seen[:4]), *seen[4:]]) & never

    @traced("f" * 4 + "r" * (dim // 32))
    def no_sinks() -> Any:
        return (*(int_to_f32(0) for _ in range(4)), *(0 for _ in range(dim // 32)))

    @device_function
    def sink_for(
        sink_of: Any, tables: Any, row_info: Any, loop: Any, max_loops: Any, max_blocks: Any, row: Any, own: Any
    ) -> Any:  # fmt: skip
        """Where a row's first keys have exact copies, -1: they have none, or are in its own block."""
        sink = narrow(-1)
        if sink_of != 0 and own > 0:
            entry = entry_of(tables, row_info, loop, max_loops, max_blocks, row, 0)
            sink = load_constant_i32(sink_of + wide(entry) * 4)
        return sink

    @device_function
    def feed(
        base: Any, warp: Any, lane: Any, stored: Any, block_bytes: Any, tables: Any, row_info: Any, loop: Any, max_loops: Any,
        max_blocks: Any, row: Any, first: Any, own: Any, low: Any, slot: Any, turn: Any,
    ) -> Any:  # fmt: skip
        """Fetch the blocks of the streams from `first` on; `stored` is where the kv head's part of a block lies in block 0."""
        quarter = narrow(warp & 3)
        mine, stream = quarter, narrow(0)
        if at_once > 1:
            mine, stream = stream, quarter
        for start in range(first, own, narrow(STREAMS)):
            block = start + stream
            is_there = narrow(block < own and (block == 0 or block >= low))
            source = stored
            if is_there:
                entry = entry_of(tables, row_info, loop, max_loops, max_blocks, row, block)
                source += wide(entry) * block_bytes
            keys = source + mine * (key_tiles * key_bytes)
            for i in range(key_pieces):
                slot, turn = fetch(
                    base, warp, lane, keys + i * key_piece_bytes, key_piece_bytes, slot, turn, is_there
                )  # fmt: skip
            slot, turn = fetch_two(
                base, warp, lane, source + pairs_at, 256, source + stored_bytes + pairs_at, 256, slot, turn, is_there
            )  # fmt: skip
            values = source + stored_bytes + mine * values_bytes
            for i in range(value_pieces):
                slot, turn = fetch(
                    base, warp, lane, values + i * value_piece_bytes, value_piece_bytes, slot, turn, is_there
                )  # fmt: skip
        return slot, turn

    @device_function
    def feed_sinks(base: Any, warp: Any, lane: Any, sinks: Any, slot: Any, turn: Any) -> Any:
        """Fetch the sinks of a kv head: all keys, the warp's dims of the values."""
        values = sinks + sink_keys_bytes + (warp & 3) * sink_values_bytes
        return fetch_two(
            base, warp, lane, sinks, sink_keys_bytes, values, sink_values_bytes, slot, turn, 1
        )

    @device_function
    def work(
        base: Any, area: Any, query_at: Any, integers_at: Any, is_odd: Any, name: Any, sink: Any, first: Any, position: Any,
        low: Any, window: Any, results: Any, result: Any, tag: Any, slot: Any, turn: Any, never: Any,
    ) -> Any:  # fmt: skip
        """All blocks of the streams from `first` on; `result` is the number of the first one's result."""
        own = narrow(position >> 6)
        thread = thread_id_again()
        warp, lane = narrow(thread >> 5), narrow(thread & 31)
        quarter = narrow(warp & 3)
        unit = convert(query_at, integers_at, quarter, lane)
        sync_some(name, 128)
        query = load_integers(integers_at, unit, lane)
        mine, stream = quarter, narrow(0)
        if at_once > 1:
            mine, stream = stream, quarter
        state = start_stored()
        total = zeros()
        for block in range(narrow(first + stream), own, narrow(STREAMS)):
            if block == 0 or block >= low:
                sums = keys_0(arrived(base, warp, slot, turn), query[1:], no_sums(), lane)
                slot, turn = release(base, warp, lane, slot, turn, sums[read_at] & never)
                if key_pieces > 1:
                    sums = keys_1(arrived(base, warp, slot, turn), query[1:], sums, lane)
                    slot, turn = release(base, warp, lane, slot, turn, sums[read_at] & never)
                if at_once == 1:
                    scores = area + is_odd * scores_bytes
                    is_odd = narrow(is_odd ^ 1)
                    give(sums, scores, quarter, lane)
                    sync_some(name, 128)
                    sums = take(scores, lane)
                pairs = arrived(base, warp, slot, turn)
                shown = score(sums, pairs, unit, query[0], lane)
                value_pairs = load_pairs(pairs + 256, lane)
                hidden = narrow(num_sinks if block == 0 and sink >= 0 else 0)
                if hidden > 0 or window < no_window:
                    step = softmax_masked(
                        shown, state, value_pairs, block * 64, position, window, hidden, 0, lane
                    )
                else:
                    step = softmax(
                        shown, state, value_pairs, block * 64, position, window, hidden, 0, lane
                    )
                state = step[0:3]
                b = spread(step[5:], lane)
                slot, turn = release(base, warp, lane, slot, turn, read_weights(b, never))
                total = values_0(total, b, arrived(base, warp, slot, turn), step[3], step[4], lane)
                slot, turn = release(base, warp, lane, slot, turn, read_values(total, never))
                if value_pieces > 1:
                    total = values_1(
                        total, b, arrived(base, warp, slot, turn), step[3], step[4], lane
                    )
                    slot, turn = release(base, warp, lane, slot, turn, read_values(total, never))
        if first + stream < own:
            send(total, state, results + wide(result + stream) * result_bytes, mine, tag, lane)
        return slot, turn, is_odd

    @device_function
    def work_sinks(base: Any, query_at: Any, slot: Any, turn: Any, never: Any) -> Any:
        """The ring's place and turn, then what `sink_step` takes."""
        thread = thread_id_again()
        warp, lane = narrow(thread >> 5), narrow(thread & 31)
        sinks = arrived(base, warp, slot, turn)
        seen = look_sinks(sinks, sinks + sink_keys_bytes, kept_query(query_at, lane), lane)
        slot, turn = release(base, warp, lane, slot, turn, read_sinks(seen, never))
        return slot, turn, seen

    return sink_for, feed, work, feed_sinks, work_sinks, no_sinks, sink_step


def _make_integers(shape: AttentionShape) -> Any:
    heads, group, parts = heads_of(shape), shape.group, shape.head_dim // 32

    @traced("f")
    def convert(area: Any, integers_at: Any, quarter: Any, lane: Any) -> Any:
        """A quarter of a query that `make_query` has left in shared memory, as bytes; what the unit of all of it stands for."""
        column, t = lane >> 2, lane & 3
        head = (column >> 1) & (heads - 1)
        at = area + select_int(head, 0, less(head, group)) * 64 + t * 16
        most: Any = 0
        for part in range(parts):
            for word in load_shared_128(at + part * (group * 64)):
                most = max_halves(most, word & 0x7FFF7FFF)
        factor, unit = factor_of(shape, fmax(*unpack_half2(most)), t)
        part = quarter & (parts - 1)
        halves = load_shared_128(at + part * (group * 64))
        first, second = query_bytes([v for h in halves for v in unpack_half2(h)], factor, column)
        # columns past the heads' repeat them
        target = integers_at + (((column & (2 * heads - 1)) * 4 + t) * parts + part) * 8
        store_shared_32(target, first)
        store_shared_32(target + 4, second)
        return unit

    @traced("f" + "r" * (2 * parts))
    def load_integers(integers_at: Any, unit: Any, lane: Any) -> Any:
        """The query's sum, and the B fragments of the scores."""
        at = integers_at + (((lane >> 2) & (2 * heads - 1)) * 4 + (lane & 3)) * (8 * parts)
        words = [word for i in range(parts // 2) for word in load_shared_128(at + 16 * i)]
        return (query_sum(words) * unit, *words)

    return convert, load_integers


def _make_kept_query(shape: AttentionShape) -> Any:
    @traced("r" * (shape.head_dim // 8))
    def kept_query(area: Any, lane: Any) -> Any:
        """B fragments of such a query; columns past the group repeat the first."""
        place = area + select_int(lane, lane & 3, less(lane, 4 * shape.group)) * 16
        parts = range(shape.head_dim // 32)
        return tuple(w for i in parts for w in load_shared_128(place + i * (shape.group * 64)))

    return kept_query


def _make_no_sums(shape: AttentionShape) -> Any:
    count = 2 * heads_of(shape) + 1

    @traced("r" * count)
    def no_sums() -> Any:
        return (0,) * count

    return no_sums


def _make_keys(shape: AttentionShape, at_once: int, index: int, count: int) -> Any:
    heads, quads = heads_of(shape), shape.head_dim // 64

    @traced("r" * (2 * heads + 1))
    def keys(piece: Any, query: Any, old: Any, lane: Any) -> Any:
        """Sums of the `index`-th piece's tiles, and bits of all that was read: of the lane's own tiles, or the warp's only one's."""
        sums = list(old[: 2 * heads])
        for i in range(count):
            acc: Any = (0, 0, 0, 0)
            for quad in range(quads):
                words = load_shared_128(piece + lane * 16 + (i * quads + quad) * 512)
                for half in (0, 2):
                    a = [x for word in words[half : half + 2] for x in (word & NUMBERS, word)]
                    at = 4 * quad + half
                    acc = mma_u8s8(*acc, *a, query[at], query[at + 1])
            tile = index * count + i
            if at_once == 1:
                sums[:2] = pair_sums(acc)
                continue
            is_own, first = same(slot_of(shape, lane), tile // heads), 2 * (tile % heads)
            for at, number in enumerate(pair_sums(acc), first):
                sums[at] = select_int(number, sums[at], is_own)
        return (*sums, any_bits(sums))

    return keys


def _make_share(shape: AttentionShape) -> Any:
    heads, group = heads_of(shape), shape.group

    def head_of(lane: Any) -> Any:
        """A lane's head in sums; what is past the group repeats the first."""
        head = lane & (heads - 1)
        return select_int(head, 0, less(head, group))

    @traced()
    def give(sums: Any, area: Any, tile: Any, lane: Any) -> None:
        """Leave the sums of a warp's tile in shared memory: all lanes of a head have them."""
        for high in range(2):
            place = tile * 16 + 8 * high + (lane >> 2)
            store_shared_32(area + (place * group + head_of(lane)) * 4, sums[high])

    @traced("r" * (2 * heads + 1))
    def take(area: Any, lane: Any) -> Any:
        """The sums of a lane's own tiles."""
        places = [place_of(shape, i, lane) for i in range(2 * heads)]
        words = [load_shared_32(area + (p * group + head_of(lane)) * 4) for p in places]
        # with their signs, on the emulator too
        return (*((word ^ _SIGN) - _SIGN for word in words), 0)

    return give, take


def _make_scores(shape: AttentionShape) -> Any:
    load_pairs = make_load_pairs(shape)

    @traced("f" * (2 * heads_of(shape)))
    def score(sums: Any, pairs: Any, unit: Any, total: Any, lane: Any) -> Any:
        return scaled_scores(sums[:-1], load_pairs(pairs, lane), unit, total)

    return score


def _make_spread(shape: AttentionShape) -> Any:
    @traced("rrrr")
    def spread(weights: Any, lane: Any) -> Any:
        return tuple(weight_bytes(shape, weights, lane))

    @traced("r")
    def read_weights(words: Any, never: Any) -> Any:
        """0, once there is what the weights are made of."""
        return any_bits(list(words)) & never

    return spread, read_weights


def _kept(shape: AttentionShape, count: int) -> int:
    """Of `count` tiles of values, how many a lane keeps at most."""
    return -(-count * heads_of(shape) // 4)


def _make_values(shape: AttentionShape, index: int, kept: int, count: int) -> Any:
    many, own = 4 // heads_of(shape), _kept(shape, count)

    @traced("f" * (2 * kept))
    def values(out: Any, b: Any, piece: Any, fix: Any, unit: Any, lane: Any) -> Any:
        """Correct the sums of the lane's dims of the `index`-th piece and add the block's p.v."""
        new, unit_high = list(out), unit * (1 / 16)
        for k in range(own):
            tiles = range(k * many, min((k + 1) * many, count))
            accs = [tile_sums(piece + lane * 16 + tile * 512, b) for tile in tiles]
            low, high = pair_sums(own_of(accs, slot_of(shape, lane)))
            at = 2 * (index * own + k)
            new[at] = fma(new[at], fix, int_to_f32(low) * unit)
            new[at + 1] = fma(new[at + 1], fix, int_to_f32(high) * unit_high)
        return tuple(new)

    return values


def _make_zeros(kept: int) -> Any:
    @traced("f" * (2 * kept))
    def zeros() -> Any:
        return tuple(int_to_f32(0) for _ in range(2 * kept))

    return zeros


def _make_send(shape: AttentionShape, pieces: int, count: int) -> Any:
    heads, width, own = heads_of(shape), result_words(shape), _kept(shape, count)

    @traced()
    def send(out: Any, state: Any, results: Any, share: Any, tag: Any, lane: Any) -> None:
        """Write the warp's share of a stream's result, in global memory, as `persistent_parts.make_send`."""
        g, head, slot = lane >> 2, lane & (heads - 1), slot_of(shape, lane)
        total, offset = (over_head(shape, add, x) for x in state[1:])
        is_real = less(head, shape.group)
        row = results + head * (width * 8)
        for i in range(pieces * own):
            tile = i % own * (4 // heads) + slot
            first = (share * pieces + i // own) * count + tile
            for high in range(2):
                at = row + (first * 16 + 8 * high + g) * 8
                store_tagged_if(at, out[2 * i + high] + offset, tag, is_real & less(tile, count))
        is_told = is_real & less(slot + g + share, 1)
        store_tagged_if(row + shape.head_dim * 8, state[0], tag, is_told)
        store_tagged_if(row + shape.head_dim * 8 + 8, total, tag, is_told)

    return send
