"""Paged attention of generated tokens: one query a row, keys and values in blocks of 64 positions.

The work of one (row, kv head) is always the same 16 streams: stream s reads blocks s, s+16, ... in order and
keeps a running softmax; the streams are merged in order. A stream is one warp's work. A few rows spread the
streams over a cluster of 8 blocks, many rows keep them in one block: the same bits either way.

Keys are the A operand of `mma.sync` and the query heads of a group its columns; the weights p, transposed in
registers, are the B operand for the transposed values. Each warp feeds itself by bulk copies through a ring.
Blocks that were complete before the step are fetched before the kernel in front has ended.

Formats: `fp16`; `int4` stores complete blocks as 4-bit numbers with a scale and an offset per position, k or v
and kv head, and reads the row's own block exactly (fp16, in its own pool).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    block_x,
    bulk_copy,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    exp2,
    fence_async,
    fma,
    fmax,
    grid_dependency_launch,
    grid_dependency_wait,
    int_to_f32,
    less,
    load_128_if,
    load_f32_if,
    load_i32,
    load_shared_32,
    load_shared_128,
    load_shared_f32,
    map_shared,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    mma,
    pack_half2,
    quotient,
    reciprocal,
    remainder,
    select,
    select_int,
    shared_base,
    shuffle_from,
    shuffle_xor_f32,
    store_16_if,
    store_async_f32,
    store_shared_f32_if,
    sync_block,
    sync_warp,
    thread_id,
    transpose_8x8,
    unpack_half2,
    wide,
)
from kernels.layouts import ProductShape, packed_place

STREAMS = 16
NO_WINDOW = 1 << 30
_NEVER = (
    -1.0e30
)  # the score of a masked position: finite, so that an empty stream merges as nothing


@dataclass(frozen=True)
class AttentionShape:
    """The model's side: group = query heads per kv head (at most 8)."""

    n_kv_heads: int
    group: int
    head_dim: int
    format: str = "fp16"
    has_alibi: bool = False

    @property
    def num_columns(self) -> int:
        """Columns of a lane's pair that hold query heads."""
        return 1 if self.group == 1 else 2

    @property
    def exact_parts(self) -> int:
        """In how many chunks an fp16 block is fetched: half of them K's, the rest V's."""
        return 8 if self.format == "int4" else 4

    @property
    def chunk_bytes(self) -> int:
        """A chunk of an fp16 block: some positions of K, or some dims of V."""
        return 256 * self.head_dim // self.exact_parts

    @property
    def stored_bytes(self) -> int:
        """K (or V) of one stored int4 block: the numbers, then (scale, offset) fp16 per position."""
        return 32 * self.head_dim + 256

    @property
    def stored_head_bytes(self) -> int:
        """One block of one layer and kv head in its stored format."""
        return 2 * self.stored_bytes if self.format == "int4" else 256 * self.head_dim


def _make_place(launch: AttentionLaunch) -> Any:
    @traced("r")
    def place(row: Any, column: Any) -> Any:
        return packed_place(row, column, launch.target, launch.column_tiles)

    return place


@dataclass(frozen=True)
class AttentionLaunch:
    """`cluster` blocks of `num_warps` share the 16 streams; each warp has a ring of `stages` chunks.

    The output is fp16 in the order in which the product `target` reads `column_tiles` x 8 rows.
    """

    shape: AttentionShape
    cluster: int
    num_warps: int
    stages: int
    target: ProductShape
    column_tiles: int

    @property
    def warp_streams(self) -> int:
        return STREAMS // (self.cluster * self.num_warps)

    @property
    def stage_bytes(self) -> int:
        return max(
            self.shape.chunk_bytes, self.shape.stored_bytes if self.shape.format == "int4" else 0
        )

    @property
    def result_floats(self) -> int:
        """Of one stream and query head in the block that merges them: its dims, the maximum, the sum."""
        return self.shape.head_dim // self.cluster + 2

    @property
    def ring_bytes(self) -> int:
        return self.num_warps * self.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        results = STREAMS * self.shape.group * self.result_floats * 4
        return self.ring_bytes + results + 8 * self.num_warps * self.stages + 8


# --- one block of 64 positions ---------------------------------------------------------------------


def _make_load_query(shape: AttentionShape) -> Any:
    @traced("r" * (shape.head_dim // 8))
    def load_query(q: Any, lane: Any) -> Any:
        """B fragments of the group's query heads; columns past the group are zero."""
        column, t = lane >> 2, lane & 3
        regs: list[Any] = []
        for part in range(shape.head_dim // 32):
            address = q + (column * shape.head_dim + part * 32 + t * 8) * 2
            regs += load_128_if(address, less(column, shape.group))
        return tuple(regs)

    return load_query


def _make_scores(shape: AttentionShape) -> Any:
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


def _nibbles(word: Any) -> Any:
    """Eight 4-bit numbers n as halves of the same bits: n / 2^24 in the tile's low rows, n / 2^20 in its high ones.

    Such halves are subnormal, which the matrix unit takes exactly; the powers of two leave with the scales.
    """
    high = word >> 8
    low_mask, high_mask = 0x000F000F, 0x00F000F0
    return word & low_mask, word & high_mask, high & low_mask, high & high_mask


_UNDO = (float(1 << 24), float(1 << 20))


def _make_scores_int4(shape: AttentionShape) -> Any:
    steps = shape.head_dim // 16

    @traced("f" * 16)
    def scores_int4(chunk: Any, scales: Any, query: Any, sums: Any, lane: Any) -> Any:
        """q.k of 64 stored positions; `sums` are the sums of q's columns 2t and 2t+1."""
        accs: list[Any] = [(0.0, 0.0, 0.0, 0.0)] * 4
        # step outside, tile inside: independent chains keep the matrix unit busy; more than two cost registers
        for some in ((0, 1), (2, 3)):
            for quad in range(steps // 4):
                at = [chunk + (t * (steps // 4) + quad) * 512 for t in some]
                words = [load_shared_128(address) for address in at]
                for i in range(4):
                    step = 4 * quad + i
                    for t, word in zip(some, words, strict=True):
                        numbers = _nibbles(word[i])
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


def _make_softmax(shape: AttentionShape, is_stored: bool, is_masked: bool) -> Any:
    columns = range(shape.num_columns)

    @traced("r" * 8 + "f" * 8)
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
        for (tile, high), row in shown.items():
            p = [int_to_f32(0), int_to_f32(0)]
            for c in columns:
                p[c] = exp2(row[c] - new_max[c])
                sums[c] = sums[c] + p[c]
            if is_stored:
                pair = load_shared_32(scales + (16 * tile + 8 * high + g) * 4)
                scale, offset = unpack_half2(pair)
                for c in columns:
                    offsets[c] = fma(p[c], offset, offsets[c])
                    p[c] = p[c] * scale
            regs.append(transpose_8x8(pack_half2(p[0], p[1])))
        return (*regs, *new_max, *sums, *offsets, *fix)

    return softmax


def _make_values(shape: AttentionShape, part: int) -> Any:
    tiles = shape.head_dim // 16
    count = 2 * tiles // shape.exact_parts

    @traced("f" * (4 * tiles))
    def values(out: Any, p: Any, chunk: Any) -> Any:
        """Add p.v for a chunk's dims (out was corrected before)."""
        new = [out[4 * tile : 4 * tile + 4] for tile in range(tiles)]
        for step in range(4):
            for tile in range(part * count, (part + 1) * count):
                a = load_shared_128(chunk + ((tile - part * count) * 4 + step) * 512)
                new[tile] = mma(*new[tile], *a, p[2 * step], p[2 * step + 1])
        return tuple(value for acc in new for value in acc)

    return values


def _make_values_int4(shape: AttentionShape) -> Any:
    tiles = shape.head_dim // 16

    @traced("f" * (4 * tiles))
    def values_int4(out: Any, p: Any, chunk: Any) -> Any:
        new = [out[4 * tile : 4 * tile + 4] for tile in range(tiles)]
        for first in range(0, tiles, 2):
            some = range(first, min(first + 2, tiles))
            words = {tile: load_shared_128(chunk + tile * 512) for tile in some}
            for step in range(4):
                for tile in some:
                    numbers = _nibbles(words[tile][step])
                    new[tile] = mma(*new[tile], *numbers, p[2 * step], p[2 * step + 1])
        return tuple(value for acc in new for value in acc)

    return values_int4


def _make_correct(shape: AttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 4))
    def correct(out: Any, first: Any, second: Any) -> Any:
        factors = (first, second)[: shape.num_columns]
        return tuple(v * factors[i % 2] if i % 2 < len(factors) else v for i, v in enumerate(out))

    return correct


def _make_undo(shape: AttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 4))
    def undo(out: Any) -> Any:
        """Take the powers of two of `_nibbles` out of the sums over stored values."""
        return tuple(value * _UNDO[i % 4 // 2] for i, value in enumerate(out))

    return undo


def _make_zeros(shape: AttentionShape) -> Any:
    @traced("f" * (shape.head_dim // 4))
    def zeros() -> Any:
        return tuple(int_to_f32(0) for _ in range(shape.head_dim // 4))

    return zeros


@traced("f" * 6)
def _start() -> Any:
    low, zero = int_to_f32(0) + _NEVER, int_to_f32(0)
    return low, low, zero, zero, zero, zero


@traced("ff")
def _query_sums(query: Any) -> Any:
    """The sums of q's columns 2t and 2t+1, by a product with ones."""
    acc: Any = (0.0, 0.0, 0.0, 0.0)
    one = 0x3C003C00
    for step in range(len(query) // 2):
        acc = mma(*acc, one, one, one, one, query[2 * step], query[2 * step + 1])
    return acc[0], acc[1]


# --- merging ---------------------------------------------------------------------------------------


def _make_send(launch: AttentionLaunch) -> Any:
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


def _make_merge(launch: AttentionLaunch) -> Any:
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


# --- the kernel ------------------------------------------------------------------------------------

_ARGS = "lllllllllll" + "rrrrr"


@traced("f" * 16)
def _no_scores() -> Any:
    return tuple(int_to_f32(0) for _ in range(16))


@traced("r" * 8)
def _no_weights() -> Any:
    return (0,) * 8


def _make_slopes(shape: AttentionShape) -> Any:
    @traced("ff")
    def load_slopes(slopes: Any, kv_head: Any, lane: Any) -> Any:
        if not shape.has_alibi:
            return int_to_f32(0), int_to_f32(0)
        column = (lane & 3) * 2
        address = slopes + (kv_head * shape.group + column) * 4
        first = load_f32_if(address, less(column, shape.group))
        return first, load_f32_if(address + 4, less(column + 1, shape.group))

    return load_slopes


def _make_kernel(launch: AttentionLaunch) -> Any:
    shape = launch.shape
    if shape.group > 8 or shape.head_dim % 32 or (shape.head_dim // launch.cluster) % 8:
        raise ValueError(f"{shape} does not fit clusters of {launch.cluster}")
    is_int4, no_window = shape.format == "int4", NO_WINDOW
    stages, num_warps, cluster = launch.stages, launch.num_warps, launch.cluster
    warp_streams, n_kv, group, dim = (
        launch.warp_streams,
        shape.n_kv_heads,
        shape.group,
        shape.head_dim,
    )
    stage_bytes, chunk_bytes = launch.stage_bytes, shape.chunk_bytes
    stored_bytes = shape.stored_bytes if is_int4 else chunk_bytes
    stored_parts = 2 if is_int4 else 4
    scales_at = 32 * dim
    parts = shape.exact_parts
    exact_head_bytes, stored_head_bytes = parts * chunk_bytes, shape.stored_head_bytes
    results_at = launch.ring_bytes
    bars_at = results_at + STREAMS * group * launch.result_floats * 4
    owned, num_threads = dim // cluster, 32 * num_warps
    results_bar_at = launch.shared_bytes - 8
    result_bytes = STREAMS * group * launch.result_floats * 4
    undo = _make_undo(shape)
    load_query, scores, correct = _make_load_query(shape), _make_scores(shape), _make_correct(shape)
    values = [_make_values(shape, part) for part in range(parts // 2)]
    values_0, values_1, values_2, values_3 = (values + values)[:4]
    softmax, softmax_masked = (_make_softmax(shape, False, masked) for masked in (False, True))
    softmax_stored, softmax_stored_masked = (
        _make_softmax(shape, True, masked) for masked in (False, True)
    )
    scores_int4, values_int4 = _make_scores_int4(shape), _make_values_int4(shape)
    zeros, send, merge = _make_zeros(shape), _make_send(launch), _make_merge(launch)
    load_slopes, place = _make_slopes(shape), _make_place(launch)

    shift = warp_streams.bit_length() - 1

    @device_function
    def fetch(
        stream: Any, ordinal: Any, part: Any, loads: Any, entries: Any, page: Any, used: Any, limit: Any,
        first_stream: Any, own: Any, table: Any, exact: Any, stored: Any, block_bytes: Any, ring: Any,
        bars: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """Fill the ring with chunks of blocks before `limit`; (stream, ordinal, part) is the next chunk.

        `entries` holds a page of the table over the lanes: 32 blocks of the warp's streams.
        """
        is_blocked = False
        while stream < warp_streams and loads < used + stages and not is_blocked:
            block = first_stream + stream + STREAMS * ordinal
            if block > own:
                stream += 1
                ordinal = 0
            elif block >= limit:
                is_blocked = True
            else:
                if ordinal >> (5 - shift) != page:
                    page = ordinal >> (5 - shift)
                    mine = (page << (5 - shift)) + (lane >> shift)
                    mine = first_stream + (lane & (warp_streams - 1)) + STREAMS * mine
                    if mine <= own:
                        entries = load_i32(table + mine * 4)
                in_page = ordinal & ((32 >> shift) - 1)
                entry = shuffle_from(entries, (in_page << shift) + stream)
                is_exact = is_int4 and block == own
                if lane == 0:
                    slot = remainder(loads, stages)
                    num_bytes = chunk_bytes if is_exact else stored_bytes
                    source = exact if is_exact else stored + wide(entry) * block_bytes
                    mbarrier_expect(bars + slot * 8, num_bytes)
                    bulk_copy(
                        ring + slot * stage_bytes,
                        source + part * num_bytes,
                        num_bytes,
                        bars + slot * 8,
                    )
                loads += 1
                part += 1
                if part == (parts if is_exact else stored_parts):
                    part = 0
                    ordinal += 1
        return stream, ordinal, part, loads, entries, page

    @device_function
    def arrived(used: Any, ring: Any, bars: Any) -> Any:
        slot = remainder(used, stages)
        mbarrier_wait(bars + slot * 8, quotient(used, stages) & 1)
        return ring + slot * stage_bytes

    def kernel(
        q: Any, exact_cache: Any, exact_blocks: Any, exact_block_bytes: Any, stored_cache: Any,
        stored_block_bytes: Any, tables: Any, positions: Any, row_info: Any, slopes: Any, out: Any,
        loop: Any, max_loops: Any, max_blocks: Any, window: Any, sinks: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        base, rank = shared_base(), cluster_rank()
        unit = quotient(block_x(), cluster)
        row, kv_head = quotient(unit, n_kv), remainder(unit, n_kv)
        bars = base + bars_at + warp * (8 * stages)
        ring = base + warp * (stages * stage_bytes)
        results = base + results_at
        if lane == 0:
            for i in range(stages):
                mbarrier_init(bars + 8 * i, 1)
            mbarrier_init_fence()
            if cluster > 1 and warp == 0:
                mbarrier_init(base + results_bar_at, 1)
                mbarrier_init_fence()
                mbarrier_expect(base + results_bar_at, result_bytes)
        sync_warp()
        grid_dependency_launch()
        if cluster > 1:
            cluster_arrive_relaxed()
        position = load_i32(positions + row * 4)
        num_stable = load_i32(row_info + row * 8)
        depth = load_i32(row_info + row * 8 + 4) + loop
        own = position >> 6
        table_row = row * max_loops + depth
        table = tables + wide(table_row * max_blocks) * 4
        exact = exact_cache + kv_head * exact_head_bytes
        if is_int4:
            exact += wide(load_i32(exact_blocks + table_row * 4)) * exact_block_bytes
        stored = stored_cache + kv_head * stored_head_bytes
        first_stream = (rank * num_warps + warp) * warp_streams
        per_stream = (own + STREAMS - first_stream) >> 4
        per_stream = per_stream if per_stream > 0 else 0
        stream, ordinal, part, loads, entries, page = fetch(
            0, 0, 0, 0, 0, -1, 0, num_stable, first_stream, own, table, exact, stored, stored_block_bytes,
            ring, bars, lane,
        )  # fmt: skip
        grid_dependency_wait()
        fence_async()
        used = 0
        everything = 1 << 30
        stream, ordinal, part, loads, entries, page = fetch(
            stream, ordinal, part, loads, entries, page, used, everything, first_stream, own, table, exact,
            stored, stored_block_bytes, ring, bars, lane,
        )  # fmt: skip
        query = load_query(q + (row * n_kv + kv_head) * (group * dim * 2), lane)
        sums = _query_sums(query)
        slope = load_slopes(slopes, kv_head, lane)
        if cluster > 1:
            cluster_wait()
        for s in range(warp_streams):
            state = _start()
            total = zeros()
            for turn in range(per_stream):
                block = first_stream + s + STREAMS * turn
                if block <= own:
                    if is_int4 and block < own:
                        chunk = arrived(used, ring, bars)
                        shown = scores_int4(chunk + lane * 16, chunk + scales_at, query, sums, lane)
                        sync_warp()
                        used += 1
                        stream, ordinal, part, loads, entries, page = fetch(
                            stream, ordinal, part, loads, entries, page, used, everything, first_stream,
                            own, table, exact, stored, stored_block_bytes, ring, bars, lane,
                        )  # fmt: skip
                        chunk = arrived(used, ring, bars)
                        if window < no_window:
                            step = softmax_stored_masked(
                                shown, state, chunk + scales_at, block * 64, position, window, sinks,
                                slope, lane,
                            )  # fmt: skip
                        else:
                            step = softmax_stored(
                                shown, state, chunk + scales_at, block * 64, position, window, sinks,
                                slope, lane,
                            )  # fmt: skip
                        state = step[8:14]
                        total = correct(total, step[14], step[15])
                        total = values_int4(total, step[0:8], chunk + lane * 16)
                        sync_warp()
                        used += 1
                        stream, ordinal, part, loads, entries, page = fetch(
                            stream, ordinal, part, loads, entries, page, used, everything, first_stream,
                            own, table, exact, stored, stored_block_bytes, ring, bars, lane,
                        )  # fmt: skip
                    else:
                        if is_int4:
                            total = undo(total)
                        shown, weights = _no_scores(), _no_weights()
                        for i in range(parts):
                            at = arrived(used, ring, bars) + lane * 16
                            if i < parts // 2:
                                shown = scores(shown, at, query, i)
                                if i == parts // 2 - 1:
                                    if block == own or window < no_window:
                                        step = softmax_masked(
                                            shown, state, 0, block * 64, position, window, sinks,
                                            slope, lane,
                                        )  # fmt: skip
                                    else:
                                        step = softmax(
                                            shown, state, 0, block * 64, position, window, sinks,
                                            slope, lane,
                                        )  # fmt: skip
                                    weights = step[0:8]
                                    state = step[8:14]
                                    total = correct(total, step[14], step[15])
                            elif i == parts // 2:
                                total = values_0(total, weights, at)
                            elif i == parts // 2 + 1:
                                total = values_1(total, weights, at)
                            elif i == parts // 2 + 2:
                                total = values_2(total, weights, at)
                            else:
                                total = values_3(total, weights, at)
                            sync_warp()
                            used += 1
                            stream, ordinal, part, loads, entries, page = fetch(
                                stream, ordinal, part, loads, entries, page, used, everything, first_stream,
                                own, table, exact, stored, stored_block_bytes, ring, bars, lane,
                            )  # fmt: skip
            if is_int4 and own & (STREAMS - 1) != first_stream + s:
                total = undo(total)
            send(total, state, first_stream + s, results, lane, base + results_bar_at)
        if cluster > 1:
            # every block of the cluster has told its streams' results to this one
            mbarrier_wait(base + results_bar_at, 0)
        else:
            sync_block()
        for i in range(thread_id(), group * owned, num_threads):
            column, d = quotient(i, owned), remainder(i, owned)
            value = merge(results, column, d)
            k = (kv_head * group + column) * dim + rank * owned + d
            store_16_if(out + place(row, k) * 2, pack_half2(value, value), 1)

    return kernel


def attention(name: str, launch: AttentionLaunch, blocks_per_sm: int = 1) -> Variant:
    """Decode attention over paged blocks.

    Kernel arguments: q fp16 (rows, heads, dim), already times log2(e)/sqrt(dim); the exact fp16 pool with its
    layer offset, exact_blocks int32 (rows, max_loops) (own blocks; int4 only), bytes of an exact block;
    the stored pool with its layer offset, bytes of a stored block; tables int32 (rows, max_loops, max_blocks);
    positions int32 (rows,), -1: no row (its output is 0); row_info int32 (rows, 2): how many leading blocks
    nothing in this step writes, and the row's loop before this step; slopes float32 (heads,) times log2(e);
    out fp16, as the launch says; loop, max_loops, max_blocks, window (1 << 30: none), sinks.
    """
    return Variant(
        name=f"{name}_{launch.shape.format}_c{launch.cluster}w{launch.num_warps}s{launch.stages}b{blocks_per_sm}",
        function=_make_kernel(launch),
        args=_ARGS,
        num_threads=32 * launch.num_warps,
        blocks_per_sm=blocks_per_sm,
        cluster=launch.cluster,
        shared_bytes=launch.shared_bytes,
        constants=(launch, blocks_per_sm),
    )
