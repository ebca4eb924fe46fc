"""How general paged attention reads keys and values: scores of a warp's slice of dims with a lane's 8 positions, and weighted sums of
a lane's 8 dims over its part of the positions.

Stored numbers stay at their place in a word and become floats by a mask alone: n at bit b of a float 2^23 + n 2^b. What they are too large
by leaves through the queries and at the end. Scales of int8 and int4 leave through the scores and the weights.
"""

from __future__ import annotations

from typing import Any

from kernels.cuda_attend_parts import (
    WEIGHTS_BYTES,
    Shape,
    gathered,
    halves,
    shared_floats,
)
from kernels.cuda_attend_sums import NIBBLE_SCALES
from kernels.device_code import traced
from kernels.intrinsics import (
    byte_permute,
    f32_of,
    fma,
    less,
    load_16,
    load_32,
    load_32_if,
    load_64,
    load_128,
    load_128_if,
    load_f32_if,
    load_shared_f32,
    quotient,
    remainder,
    select,
    select_int,
    shuffle_xor_f32,
    smaller,
    store_shared_f32_if,
    store_shared_f32x2,
    unpack_half2,
    wide,
)
from kernels.layout import BLOCK_SIZE, NUM_SINKS

_BIG = float(1 << 23)
_BIG_BITS = 0x4B000000
_ONES = 0x3C003C00  # two halves of 1.0
_LOG2E = 1.4426950408889634


def _in_place(word: Any, mask: int) -> Any:
    """The masked bits of a word as a float, at their place."""
    return f32_of((word & mask) | _BIG_BITS) - _BIG


def _signed_bytes(word: Any) -> list[Any]:
    shifted = word ^ 0x80808080
    return [f32_of(byte_permute(shifted, _BIG_BITS, 0x7440 | t)) - (_BIG + 128.0) for t in range(4)]


# ------------------------------------------------------------------------------------------------------------------- queries


def make_stage_queries(shape: Shape) -> Any:
    """Puts the queries' numbers where the lanes that multiply them find them."""
    n, width = shape.queries, shape.slice_dim // shape.nibbles  # stored lines of a warp
    half, threads = shape.dim // 2, 32 * shape.num_warps

    @traced()
    def stage_queries(
        queries: Any, q: Any, q_width: Any, num_heads: Any, num_rows: Any, scale: Any, thread: Any
    ) -> None:
        """q: the first row's first head. Queries beyond `num_heads` of a row, or `num_rows`, are 0."""
        turns = -(-n * shape.slice_dim // 32)
        found = []
        for turn in range(turns):
            i = thread + turn * threads
            query, d = quotient(i, shape.dim), remainder(i, shape.dim)
            row, head = quotient(query, shape.heads), remainder(query, shape.heads)
            is_there = less(head, num_heads) & less(row, num_rows)
            x = load_f32_if(q + wide(row * q_width + head * shape.dim + d) * 4, is_there)
            found.append((query, d, x))
        for query, d, x in found:
            x = x * scale * _LOG2E
            at, nibble = d, 0
            if shape.is_int4:
                nibble = 1 - less(d, half)
                at = d - nibble * half
                x = x * select(0.0625, 1.0, nibble)
            warp, line = quotient(at, width), remainder(at, width)
            where = (warp * 4 + (line & 3)) * shape.query_stride
            where = where + (quotient(line, 4) * shape.nibbles + nibble) * n + query
            store_shared_f32_if(queries + where * 4, x, less(query, n))

    return stage_queries


def make_query_sums(shape: Shape) -> Any:
    """Sums of the queries' numbers over a lane's share, each query's in a lane; for the zero points of keys."""
    n, entries = shape.queries, shape.key_rows * 2

    @traced("f" * n, is_tuple=True)
    def query_sums(queries: Any, lane: Any) -> Any:
        """A lane in four has a quarter of each warp's dims; the others have nothing."""
        sums: list[Any] = [0.0] * n
        for w in range(shape.num_warps):
            at = queries + (w * 4 + (lane & 3)) * (shape.query_stride * 4)
            values = [load_shared_f32(at + i * 4) for i in range(entries * n)]
            for i, x in enumerate(values):
                sums[i % n] = fma(x, 16.0 if i // n % 2 else 1.0, sums[i % n])
        for mask in (1, 2):
            sums = [x + shuffle_xor_f32(x, mask) for x in sums]
        return tuple(sums)

    return query_sums


# ---------------------------------------------------------------------------------------------------------------------- keys


def num_key_words(shape: Shape) -> int:
    """Registers of a lane's keys, stored or exact."""
    widest = 8 if shape.kind == "fp32" else 4
    return shape.key_rows * shape.nibbles * widest


def make_key_offset(shape: Shape, is_exact: bool) -> Any:
    """Where a lane's keys begin in a block of one head."""
    row_bytes = BLOCK_SIZE * 2 if is_exact else shape.key_bytes // shape.stored_dim
    width = shape.slice_dim // shape.nibbles

    @traced("r")
    def key_offset(warp: Any, lane: Any) -> Any:
        return (warp * width + (lane >> 3)) * row_bytes + (lane & 7) * (row_bytes // 8)

    return key_offset


def make_load_keys(shape: Shape, is_exact: bool) -> Any:
    """A lane's stored lines, every fourth: 8 positions of each."""
    kind = "fp16" if is_exact else shape.kind
    count = num_key_words(shape)

    @traced("r" * count)
    def load_keys(at: Any) -> Any:
        words: list[Any] = []
        for i in range(shape.key_rows):
            if kind == "fp32":
                words += [*load_128(at + i * 1024), *load_128(at + i * 1024 + 16)]
            elif kind == "fp16":
                for nibble in range(shape.nibbles):
                    words += load_128(at + i * 512 + nibble * (shape.dim // 2 * 128))
            else:
                words += load_64(at + i * 256)
        return tuple(words + [0] * (count - len(words)))

    return load_keys


def make_scores(shape: Shape, is_exact: bool) -> Any:
    """Products of a lane's keys with the queries, 8 positions a query, over the lane's dims."""
    kind, n = "fp16" if is_exact else shape.kind, shape.queries
    nibbles = shape.nibbles

    def keys_of(words: Any, i: int, nibble: int) -> list[Any]:
        if kind == "fp32":
            return [f32_of(word) for word in words[8 * i : 8 * i + 8]]
        if kind == "fp16":
            first = 4 * (i * nibbles + nibble)
            return halves(words[first : first + 4])
        if kind == "int8":
            return [x for word in words[2 * i : 2 * i + 2] for x in _signed_bytes(word)]
        pairs = [part for word in words[2 * i : 2 * i + 2] for part in (word, word >> 16)]
        return [_in_place(part, 0xF << 4 * nibble + 8 * t) for part in pairs for t in range(2)]

    @traced("f" * (8 * n))
    def scores(words: Any, queries: Any) -> Any:
        """queries: where the lane's lie in shared memory."""
        total: list[Any] = [0.0] * (8 * n)
        q = shared_floats(queries, shape.key_rows * nibbles * n)
        for i in range(shape.key_rows):
            for nibble in range(nibbles):
                keys = keys_of(words, i, nibble)
                for g in range(n):
                    x = q[(i * nibbles + nibble) * n + g]
                    if is_exact and nibble:
                        x = x * 16.0
                    for p in range(8):
                        total[8 * g + p] = fma(x, keys[p], total[8 * g + p])
        if kind == "int4":
            total = [x * (1 / 256) if p % 2 else x for p, x in enumerate(total)]
        return tuple(total)

    return scores


def make_share(shape: Shape) -> Any:
    """Gives the scores of a warp's dims to the other warps."""

    @traced()
    def share(total: Any, scores: Any, lane: Any) -> None:
        for g in range(shape.queries):
            low, high = gathered(list(total[8 * g : 8 * g + 8]), lane, [16, 8])
            pair = 4 * (lane & 7) + (lane >> 3)
            store_shared_f32x2(scores + g * (BLOCK_SIZE * 4) + pair * 8, low, high)

    return share


def make_sink_scores(shape: Shape) -> Any:
    """Overwrites the scores of the first keys by those of their exact copies; a lane of the first four columns has one of them."""
    n, nibbles = shape.queries, shape.nibbles
    width = shape.slice_dim // nibbles

    @traced()
    def sink_scores(sinks: Any, queries: Any, scores: Any, warp: Any, lane: Any) -> None:
        which, first = lane & 3, lane >> 3
        at = sinks + wide((which * shape.dim + warp * width + first) * 2)
        totals: list[Any] = [0.0] * n
        q = shared_floats(queries, shape.key_rows * nibbles * n)
        places = [
            8 * i + nibble * shape.dim for i in range(shape.key_rows) for nibble in range(nibbles)
        ]
        keys = [unpack_half2(load_16(at + place))[0] for place in places]
        for i, key in enumerate(keys):
            for g in range(n):
                x = q[i * n + g] * 16.0 if i % nibbles else q[i * n + g]
                totals[g] = fma(x, key, totals[g])
        is_first = less(lane, NUM_SINKS)
        for g in range(n):
            total = totals[g]
            for mask in (8, 16):
                total = total + shuffle_xor_f32(total, mask)
            store_shared_f32_if(scores + g * (BLOCK_SIZE * 4) + which * 4, total, is_first)

    return sink_scores


def make_load_scales(shape: Shape) -> Any:
    """Scales of the keys, their zero points, and the same of the values, of two positions; nothing is scaled where all is exact."""
    step = shape.num_scales * BLOCK_SIZE * 2

    @traced("rrrr")
    def load_scales(at: Any, is_sink: Any) -> Any:
        if not shape.has_scales:
            return (_ONES, 0, _ONES, 0)
        zeros = [0, 0]
        if shape.is_int4:
            zeros = [load_32(at + BLOCK_SIZE * 2), load_32(at + step + BLOCK_SIZE * 2)]
        return (
            select_int(_ONES, load_32(at), is_sink), select_int(0, zeros[0], is_sink),
            select_int(0, load_32(at + step), is_sink), select_int(0, zeros[1], is_sink),
        )  # fmt: skip

    return load_scales


@traced("rrrr")
def exact_scales() -> Any:
    return (_ONES, 0, _ONES, 0)


# -------------------------------------------------------------------------------------------------------------------- values


def num_value_words(shape: Shape) -> int:
    """Registers of a lane's stored values."""
    return shape.part_rows * {"fp32": 8, "fp16": 4, "int8": 2, "int4": 1}[shape.kind]


def make_value_offset(shape: Shape, is_exact: bool) -> Any:
    """Where a lane's dims begin in a line of values."""
    kind = "fp16" if is_exact else shape.kind
    size = {"fp32": 4, "fp16": 2, "int8": 1, "int4": 1}[kind]

    @traced("r")
    def value_offset(warp: Any, lane: Any) -> Any:
        place = lane & (shape.lanes - 1)
        if shape.is_int4:
            return (warp * (shape.slice_dim // 2) + place * 4) * size
        return (warp * shape.slice_dim + place * 8) * size

    return value_offset


def _load_line(shape: Shape, kind: str, at: Any) -> list[Any]:
    if kind == "fp32":
        return [*load_128(at), *load_128(at + 16)]
    if kind == "fp16":
        return [*load_64(at), *load_64(at + shape.dim)] if shape.is_int4 else list(load_128(at))
    return list(load_64(at)) if kind == "int8" else [load_32(at)]


def _load_lines(shape: Shape, is_exact: bool, at: Any, last: Any, lane: Any) -> list[Any]:
    """A lane's dims of its part's positions; instead of lines after `last`, which may hold anything, that one."""
    kind = "fp16" if is_exact else shape.kind
    row_bytes = shape.dim * 2 if is_exact else shape.value_row_bytes
    first = (lane >> (shape.lanes.bit_length() - 1)) * shape.part_rows
    words: list[Any] = []
    for i in range(shape.part_rows):
        words += _load_line(shape, kind, at + wide(smaller(first + i, last) * row_bytes))
    return words


def make_load_values(shape: Shape) -> Any:
    """A lane's stored values, asked for together with the keys."""

    @traced("r" * num_value_words(shape))
    def load_values(at: Any, last: Any, lane: Any) -> Any:
        return tuple(_load_lines(shape, False, at, last, lane))

    return load_values


def make_no_values(shape: Shape) -> Any:
    @traced("r" * num_value_words(shape))
    def no_values() -> Any:
        return (0,) * num_value_words(shape)

    return no_values


def _line(shape: Shape, kind: str, words: Any, i: int) -> list[Any]:
    """The 8 values of a lane's line i, at their place in the word."""
    if kind == "fp32":
        return [f32_of(word) for word in words[8 * i : 8 * i + 8]]
    if kind == "fp16":
        return halves(words[4 * i : 4 * i + 4])
    if kind == "int8":
        return [x for word in words[2 * i : 2 * i + 2] for x in _signed_bytes(word)]
    parts = [words[i], words[i] >> 16]
    return [
        _in_place(part, 0xF << 4 * b + 8 * t) for b in range(2) for part in parts for t in range(2)
    ]


def _scaled(shape: Shape, weight: Any) -> list[Any]:
    """The weight of an exact value for each of a lane's dims: sums of stored ones are too large by that."""
    if not shape.is_int4:
        return [weight] * 8
    by_scale = {scale: weight * scale for scale in sorted(set(NIBBLE_SCALES))}
    return [by_scale[scale] for scale in NIBBLE_SCALES]


def _add_lines(
    shape: Shape, is_exact: bool, total: Any, words: Any, weights: Any, lane: Any
) -> Any:
    kind, n, rows = "fp16" if is_exact else shape.kind, shape.queries, shape.part_rows
    sums = list(total)
    at = weights + (lane >> (shape.lanes.bit_length() - 1)) * (rows * 4)
    p = [shared_floats(at + g * WEIGHTS_BYTES, rows) for g in range(n)]
    for i in range(rows):
        line = _line(shape, kind, words, i)
        for g in range(n):
            scaled = _scaled(shape, p[g][i]) if is_exact else [p[g][i]] * 8
            for a in range(8):
                sums[8 * g + a] = fma(scaled[a], line[a], sums[8 * g + a])
    return tuple(sums)


def make_values(shape: Shape) -> Any:
    @traced("f" * (8 * shape.queries))
    def values(total: Any, words: Any, weights: Any, lane: Any) -> Any:
        """Adds a lane's lines times their weights."""
        return _add_lines(shape, False, total, words, weights, lane)

    return values


def make_exact_values(shape: Shape) -> Any:
    @traced("f" * (8 * shape.queries))
    def exact_values(total: Any, at: Any, last: Any, weights: Any, lane: Any) -> Any:
        """The same of an exact copy, loaded only now: with its keys they would take half of all registers."""
        words = _load_lines(shape, True, at, last, lane)
        return _add_lines(shape, True, total, words, weights, lane)

    return exact_values


def make_sink_values(shape: Shape) -> Any:
    """Adds the exact values of the first keys, each by the lanes of one part."""
    n, shift = shape.queries, shape.lanes.bit_length() - 1

    @traced("f" * (8 * n))
    def sink_values(total: Any, sinks: Any, weights: Any, lane: Any) -> Any:
        """sinks: where the lane's dims begin."""
        sums = list(total)
        part = lane >> shift
        is_mine, which = less(part, NUM_SINKS), smaller(part, NUM_SINKS - 1)
        at = sinks + wide(which * (shape.dim * 2))
        if shape.is_int4:
            words = [load_32_if(at + place, is_mine) for place in (0, 4, shape.dim, shape.dim + 4)]
        else:
            words = list(load_128_if(at, is_mine))
        line = halves(words)
        for g in range(n):
            weight = load_shared_f32(weights + g * WEIGHTS_BYTES + BLOCK_SIZE * 4 + which * 4)
            for a, scaled in enumerate(_scaled(shape, weight)):
                sums[8 * g + a] = fma(scaled, line[a], sums[8 * g + a])
        return tuple(sums)

    return sink_values
