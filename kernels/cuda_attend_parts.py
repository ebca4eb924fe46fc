"""The straight-line parts of general paged attention that every form of the cache shares: its shapes, the softmax of a block, the
running sums of a stream and how they are added up. `cuda_attend` puts them together; `cuda_attend_pairs` and `cuda_attend_rows` read keys,
values and inputs.

A block of threads has a few query heads of one row and cache head. Its warps share the dims of a vector: warp w has those of slice w. In
products with values a lane has 8 dims of its warp's slice and some of the 64 positions (its part).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.device_code import traced
from kernels.intrinsics import (
    bits_of,
    exp2,
    f32_of,
    fma,
    fmax,
    int_to_f32,
    less,
    load_32_if,
    load_i32,
    load_shared_f32,
    load_shared_f32x2,
    load_shared_f32x4,
    same,
    select,
    select_int,
    select_wide,
    shuffle_from,
    shuffle_xor_f32,
    smaller,
    store_shared_f32_if,
    store_shared_f32x2,
    unpack_half2,
    warp_max,
    wide,
)
from kernels.layout import BLOCK_SIZE, NUM_SINKS

STREAMS = 16  # of one row and cache head; stream s has blocks s, s + 16, ...
SPLITS = (1, 4, 16)  # blocks of threads that may share them
MASKED = -1e30
WEIGHTS_BYTES = 4 * (
    BLOCK_SIZE + NUM_SINKS
)  # a query's weights of one block, then those of exact sinks
_KINDS = {"fp32": 4, "fp16": 2, "int8": 1, "int4": 1}  # bytes of a stored element


@dataclass(frozen=True)
class Shape:
    """What a kernel is made for.

    Attributes:
        kind: of the stored numbers: fp32, fp16, int8 or int4.
        dim: values of a vector, a multiple of 8.
        queries: queries of a block of threads: `rows` rows of as many query heads each.
        has_keys: keys and values, or inputs that are both.
        group: values that share a scale (int8, int4): `dim` where there are keys, else a multiple of 8.
        padded: floats of a line of fp32 values.
        rows: that are reduced together where they read the same keys; 1 of inputs.
    """

    kind: str
    dim: int
    queries: int
    has_keys: bool
    group: int = 0
    padded: int = 0
    rows: int = 1

    def __post_init__(self) -> None:
        if self.dim % 8 or self.num_warps > 32:
            raise ValueError(
                f"vectors of {self.dim} values: a multiple of 8, not too odd, is needed"
            )
        if self.has_scales and (self.group % 8 or self.dim % self.group):
            raise ValueError(
                f"groups of {self.group} in {self.dim} values: a multiple of 8 is needed"
            )
        if self.has_scales and self.has_keys and self.group != self.dim:
            raise ValueError("keys and values have one scale a vector")

    @property
    def heads(self) -> int:
        """Query heads of a row."""
        return self.queries // self.rows

    @property
    def is_int4(self) -> bool:
        return self.kind == "int4"

    @property
    def has_scales(self) -> bool:
        return self.kind in ("int8", "int4")

    @property
    def slice_dim(self) -> int:
        """Dims of one warp."""
        widest = 128 if not self.has_keys else 16 if self.kind == "fp32" else 32
        return next(n for n in (128, 64, 32, 16, 8) if n <= widest and self.dim % n == 0)

    @property
    def num_warps(self) -> int:
        return self.dim // self.slice_dim

    @property
    def lanes(self) -> int:
        """Lanes that share a line of values in a warp's slice, 8 dims each."""
        return self.slice_dim // 8

    @property
    def parts(self) -> int:
        """Into how many parts the lanes divide the positions of a block."""
        return 32 // self.lanes

    @property
    def part_rows(self) -> int:
        return BLOCK_SIZE // self.parts

    @property
    def keep(self) -> int:
        """Of a lane's 8 dims those whose sums it keeps at the end."""
        return max(1, 8 // self.parts)

    @property
    def part_masks(self) -> list[int]:
        """The bits of a lane's number that tell its part, highest first."""
        return [m for m in (16, 8, 4, 2, 1) if m >= self.lanes]

    @property
    def stored_dim(self) -> int:
        return self.dim // 2 if self.is_int4 else self.dim

    @property
    def key_bytes(self) -> int:
        """Of one block, layer and head."""
        return self.stored_dim * BLOCK_SIZE * _KINDS[self.kind]

    @property
    def value_row_bytes(self) -> int:
        return self.padded * 4 if self.kind == "fp32" else self.stored_dim * _KINDS[self.kind]

    @property
    def value_bytes(self) -> int:
        return BLOCK_SIZE * self.value_row_bytes

    @property
    def num_scales(self) -> int:
        return self.dim // self.group * (2 if self.is_int4 else 1) if self.has_scales else 0

    @property
    def scale_bytes(self) -> int:
        return (1 + self.has_keys) * self.num_scales * BLOCK_SIZE * 2

    @property
    def key_rows(self) -> int:
        """Stored lines of keys that a lane multiplies: every fourth of its warp's."""
        return self.slice_dim // (8 if self.is_int4 else 4)

    @property
    def nibbles(self) -> int:
        return 2 if self.is_int4 else 1

    @property
    def query_stride(self) -> int:
        """Floats of what one lane in four reads of the queries; shifted by 4 against bank conflicts."""
        return self.key_rows * self.nibbles * self.queries + 4

    @property
    def state_floats(self) -> int:
        """Of a query: maximum, sum, and with int4 keys the sum of zero points."""
        return 3 if self.is_int4 and self.has_keys else 2

    # shared memory: queries, two turns of scores, weights of each warp, a thread's sums on two levels

    @property
    def scores_at(self) -> int:
        return self.num_warps * 4 * self.query_stride * 4 if self.has_keys else 0

    @property
    def turn_bytes(self) -> int:
        return self.num_warps * self.queries * BLOCK_SIZE * 4

    @property
    def weights_at(self) -> int:
        return self.scores_at + 2 * self.turn_bytes

    @property
    def sums_at(self) -> int:
        return self.weights_at + self.num_warps * self.queries * WEIGHTS_BYTES

    @property
    def level_bytes(self) -> int:
        return self.queries * (2 + self.keep) * 32 * self.num_warps * 4

    @property
    def shared_bytes(self) -> int:
        return self.sums_at + 2 * self.level_bytes


def gathered(values: list[Any], lane: Any, masks: list[int]) -> list[Any]:
    """Sums over the lanes that differ in `masks`: while several values are left each lane keeps one half of them."""
    for mask in masks:
        if len(values) == 1:
            values = [values[0] + shuffle_xor_f32(values[0], mask)]
            continue
        half, is_upper = len(values) // 2, lane & mask
        low, high = values[:half], values[half:]
        kept = [select(b, a, is_upper) for a, b in zip(low, high, strict=True)]
        given = [select(a, b, is_upper) for a, b in zip(low, high, strict=True)]
        values = [a + shuffle_xor_f32(b, mask) for a, b in zip(kept, given, strict=True)]
    return values


def kept_index(lane: Any, count: int, masks: list[int]) -> Any:
    """The first of the values that `gathered` leaves to a lane."""
    index = lane & 0
    for mask in masks:
        if count > 1:
            count //= 2
            index = index + select_int(count, 0, lane & mask)
    return index


def shared_floats(address: Any, count: int) -> list[Any]:
    """`count` floats of shared memory, by vectors where the count allows."""
    found: list[Any] = []
    for i in range(0, count, 4 if count % 4 == 0 else 1):
        found += (
            load_shared_f32x4(address + i * 4)
            if count % 4 == 0
            else [load_shared_f32(address + i * 4)]
        )
    return found


def halves(words: Any) -> list[Any]:
    """fp32 values of packed fp16 pairs."""
    return [x for word in words for x in unpack_half2(word)]


def _warp_max_f32(x: Any) -> Any:
    bits = bits_of(x)
    most = warp_max(bits ^ select_int(0xFFFFFFFF, 0x80000000, bits >> 31))
    return f32_of(most ^ select_int(0x80000000, 0xFFFFFFFF, most >> 31))


def make_together(shape: Shape) -> Any:
    """How many of `count` rows are reduced together: all, if they read the same keys in the same form, else one by one."""

    @traced("r")
    def together(
        slots: Any, tables: Any, positions: Any, row_map: Any, row: Any, count: Any
    ) -> Any:
        if shape.rows == 1:
            return 1
        places = [wide(row + smaller(r, count - 1)) * 4 for r in range(shape.rows)]
        same_all = less(load_i32(row_map + places[0]), 0)
        for place in places:
            for field in (slots, tables):
                same_all = same_all & same(load_i32(field + place), load_i32(field + places[0]))
            blocks = [load_i32(positions + where) >> 6 for where in (place, places[0])]
            same_all = same_all & same(*blocks) & less(load_i32(row_map + place), 0)
        return select_int(count, 1, same_all)

    return together


def make_load_fields(shape: Shape) -> Any:
    """What a `Paging` says of the rows that are reduced together, a number a lane: one load that nothing waits for until it is used."""
    count = shape.rows

    @traced("r")
    def load_fields(
        slots: Any, tables: Any, row_map: Any, map_base: Any, positions: Any, windows: Any, row: Any, num_rows: Any, lane: Any
    ) -> Any:  # fmt: skip
        is_position, is_window = less(lane, count), less(lane, 2 * count)
        which = select_int(lane, select_int(lane - count, 0, is_window), is_position)
        at = map_base
        for i, field in enumerate((slots, tables, row_map)):
            at = select_wide(field, at, same(lane, 2 * count + i))
        at = select_wide(positions, select_wide(windows, at, is_window), is_position)
        return load_i32(at + wide(row + smaller(which, num_rows - 1)) * 4)

    return load_fields


def make_positions(shape: Shape) -> Any:
    @traced("r" * shape.rows, is_tuple=True)
    def positions_of(fields: Any) -> Any:
        return tuple(shuffle_from(fields, r) for r in range(shape.rows))

    return positions_of


def make_hidden(shape: Shape) -> Any:
    """The last position that a row's window hides, or -1."""

    @traced("r" * shape.rows, is_tuple=True)
    def hidden_of(fields: Any, positions: Any) -> Any:
        windows = [shuffle_from(fields, shape.rows + r) for r in range(shape.rows)]
        pairs = zip(positions, windows, strict=True)
        return tuple(select_int(x - window, -1, less(0, window)) for x, window in pairs)

    return hidden_of


def make_tables(shape: Shape) -> Any:
    """Slot, table, map and first mapped position."""

    @traced("rrrr")
    def tables_of(fields: Any) -> Any:
        return tuple(shuffle_from(fields, 2 * shape.rows + i) for i in range(4))

    return tables_of


@traced("r")
def load_entries(table: Any, block: Any, last: Any, lane: Any) -> Any:
    """Entries of a table for the blocks of a stream from `block` on, one a lane; 0 after `last`."""
    block = block + lane * STREAMS
    return load_32_if(table + wide(block) * 4, 1 - less(last, block))


@traced("r")
def load_copies(table: Any, block: Any, lane: Any) -> Any:
    """The entry of a table for `block`, in lane 0."""
    return load_i32(table + wide(block - smaller(lane, block)) * 4)


@traced("r")
def least(values: Any) -> Any:
    found = values[0]
    for value in values[1:]:
        found = smaller(found, value)
    return found


@traced("r")
def greatest(values: Any) -> Any:
    found = values[0]
    for value in values[1:]:
        found = select_int(value, found, less(found, value))
    return found


def make_start(shape: Shape) -> Any:
    @traced("f" * (shape.state_floats * shape.queries), is_tuple=True)
    def start() -> Any:
        return tuple(
            MASKED if i < shape.queries else 0.0 for i in range(shape.state_floats * shape.queries)
        )

    return start


def make_zeros(shape: Shape) -> Any:
    @traced("f" * (8 * shape.queries))
    def zeros() -> Any:
        return (0.0,) * (8 * shape.queries)

    return zeros


def make_softmax(shape: Shape) -> Any:
    """Scores of a block to weights: the new state, then each query's correction of what it had before."""
    n, count = shape.queries, shape.state_floats * shape.queries
    has_scales, is_int4 = shape.has_scales and shape.has_keys, shape.is_int4 and shape.has_keys

    @traced("f" * (count + n))
    def softmax(
        state: Any, scales: Any, slopes: Any, query_sums: Any, scores: Any, weights: Any, base: Any, positions: Any, firsts: Any,
        is_sink: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """A lane has positions `base` + 2 lane and the next.

        scales: packed scales of the keys, their zero points, and the same of the values.
        positions, firsts: of each row, and the last position that its window hides, or -1.
        is_sink: whether the lane's positions are read exactly beside a stored block.
        """
        keys = [base + 2 * lane, base + 2 * lane + 1]
        all_seen = [
            [less(k, position + 1) & (less(first, k) | less(k, NUM_SINKS)) for k in keys]
            for position, first in zip(positions, firsts, strict=True)
        ]
        all_behind = [[int_to_f32(k - position) for k in keys] for position in positions]
        if has_scales:
            key_scale, value_scale = unpack_half2(scales[0]), unpack_half2(scales[2])
        if is_int4:
            key_zero, value_zero = unpack_half2(scales[1]), unpack_half2(scales[3])
        tops, totals, zeros, corrections = [], [], [], []
        for g in range(n):
            seen, behind = all_seen[g // shape.heads], all_behind[g // shape.heads]
            parts = [
                load_shared_f32x2(scores + (w * n + g) * 256 + lane * 8)
                for w in range(shape.num_warps)
            ]
            s = list(parts[0])
            for part in parts[1:]:
                s = [a + b for a, b in zip(s, part, strict=True)]
            for i in range(2):
                if has_scales:
                    s[i] = s[i] * key_scale[i]
                if is_int4:
                    s[i] = fma(key_zero[i], query_sums[g], s[i])
                s[i] = select(fma(slopes[g % shape.heads], behind[i], s[i]), MASKED, seen[i])
            top = fmax(state[g], _warp_max_f32(fmax(s[0], s[1])))
            correction = exp2(state[g] - top)
            p = [select(exp2(x - top), 0.0, yes) for x, yes in zip(s, seen, strict=True)]
            tops.append(top)
            corrections.append(correction)
            totals.append(fma(state[n + g], correction, p[0] + p[1]))
            at = weights + g * WEIGHTS_BYTES
            if shape.has_scales:
                for i in range(2):
                    store_shared_f32_if(at + 4 * BLOCK_SIZE + lane * 8 + i * 4, p[i], is_sink)
            if is_int4:
                zero = fma(p[1], value_zero[1], p[0] * value_zero[0])
                zeros.append(fma(state[2 * n + g], correction, zero))
            if has_scales:
                p = [x * scale for x, scale in zip(p, value_scale, strict=True)]
            elif shape.has_scales:
                p = [select(0.0, x, is_sink) for x in p]
            store_shared_f32x2(at + lane * 8, p[0], p[1])
        return tuple(tops + totals + zeros + corrections)

    return softmax


def make_state_of(shape: Shape) -> Any:
    count = shape.state_floats * shape.queries

    @traced("f" * count, is_tuple=True)
    def state_of(step: Any) -> Any:
        return tuple(step[:count])

    return state_of


def make_correct(shape: Shape) -> Any:
    count = shape.state_floats * shape.queries

    @traced("f" * (8 * shape.queries))
    def correct(total: Any, step: Any) -> Any:
        return tuple(x * step[count + i // 8] for i, x in enumerate(total))

    return correct
