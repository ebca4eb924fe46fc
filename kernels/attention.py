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

from kernels.attention_parts import (
    STREAMS,
    make_correct,
    make_load_query,
    make_merge,
    make_scores,
    make_scores_int4,
    make_send,
    make_sink_scores,
    make_sink_values,
    make_slopes,
    make_softmax,
    make_some_values,
    make_undo,
    make_values_int4,
    make_write,
    make_zeros,
    no_scores,
    no_weights,
    query_sums,
    start,
)
from kernels.compiler import Variant
from kernels.device_code import device_function
from kernels.fragment_commit import make_commit, make_sink_copy
from kernels.fragments import ProductShape
from kernels.intrinsics import (
    block_x,
    bulk_copy,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    fence_async,
    grid_dependency_launch,
    grid_dependency_wait,
    load_i32,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    quotient,
    remainder,
    shared_base,
    shuffle_from,
    sync_block,
    sync_warp,
    thread_id,
    wide,
)
from kernels.layout import NUM_SINKS

_NO_WINDOW = 1 << 30
_SM_BYTES = 228 * 1024  # of shared memory; the system keeps 1 KB of each block's


@dataclass(frozen=True)
class AttentionShape:
    """The model's side. A unit of work has `group` query heads (at most 8) of one kv head, which has `split` units.

    head_dim is a multiple of 32, at most 256.
    """

    n_kv_heads: int
    group: int
    head_dim: int
    format: str = "fp16"
    has_alibi: bool = False
    split: int = 1

    @staticmethod
    def of(
        n_heads: int, n_kv_heads: int, head_dim: int, kind: str = "fp16", has_alibi: bool = False
    ) -> AttentionShape:
        """That of a model: groups of more than 8 heads are cut into equal units."""
        group = n_heads // n_kv_heads
        split = next(s for s in range(1, group + 1) if group % s == 0 and group // s <= 8)
        return AttentionShape(n_kv_heads, group // split, head_dim, kind, has_alibi, split)

    @property
    def units(self) -> int:
        """Units of work of a row."""
        return self.n_kv_heads * self.split

    @property
    def num_columns(self) -> int:
        """Columns of a lane's pair that hold query heads."""
        return 1 if self.group == 1 else 2

    @property
    def exact_parts(self) -> int:
        """In how many chunks an fp16 block is fetched: half of them K's, the rest V's."""
        return 8 if self.format == "int4" and self.head_dim % 64 == 0 else 4

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

    @property
    def sink_bytes(self) -> int:
        """The exact sinks of one layer and kv head."""
        return 4 * NUM_SINKS * self.head_dim if self.format == "int4" else 0


@dataclass(frozen=True)
class AttentionLaunch:
    """`cluster` blocks of `num_warps` share the 16 streams; each warp has a ring of `stages` chunks.

    The output has the order in which the product `target` reads `column_tiles` x 8 rows, or (rows, heads x dim) without a
    target; it is fp16, or float32 with `is_float_out`.
    With `is_paged` the queries are float32 rows of [q; k; v] and the tables those of a `Paging`; see `attention`.
    """

    shape: AttentionShape
    cluster: int
    num_warps: int
    stages: int
    target: ProductShape | None = None
    column_tiles: int = 1
    is_float_out: bool = False
    is_paged: bool = False

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
        bars = 8 * self.num_warps * self.stages + 16
        return self.ring_bytes + results + self.shape.sink_bytes + bars


def choose_launch(
    shape: AttentionShape,
    rows: int,
    target: ProductShape | None = None,
    column_tiles: int = 1,
    *,
    is_float_out: bool = False,
    is_paged: bool = False,
) -> tuple[AttentionLaunch, int]:
    """How the streams of so many rows are spread, and the blocks for each multiprocessor. A row's bits are the same with all."""
    units = rows * shape.units
    if units <= 30:
        cluster = 8 if shape.head_dim % 64 == 0 else 4
        cluster, num_warps, stages, blocks = cluster, 16 // cluster, 4, 1
    elif units <= 132:
        cluster, num_warps, stages, blocks = 1, 8, 3, 1
    else:
        cluster, num_warps, stages, blocks = 1, 4, 3, 3 if shape.format == "int4" else 2
    while True:
        launch = AttentionLaunch(
            shape, cluster, num_warps, stages, target, column_tiles, is_float_out, is_paged
        )
        if launch.shared_bytes <= _SM_BYTES // blocks - 1024:
            return launch, blocks
        if blocks > 1:
            blocks -= 1
        elif stages > 2:
            stages -= 1
        else:
            num_warps //= 2


# --- the kernel ------------------------------------------------------------------------------------

_ARGS = "l" * 18 + "rrrrf"


def _make_kernel(launch: AttentionLaunch) -> Any:
    shape = launch.shape
    if shape.group > 8 or shape.head_dim % 32 or shape.head_dim % (8 * launch.cluster):
        raise ValueError(f"{shape} does not fit clusters of {launch.cluster}")
    is_int4, no_window, num_sinks = shape.format == "int4", _NO_WINDOW, NUM_SINKS
    is_paged = launch.is_paged
    # the row's own block is found by itself
    has_own = is_int4 or is_paged
    stages, num_warps, cluster = launch.stages, launch.num_warps, launch.cluster
    warp_streams, group, dim = launch.warp_streams, shape.group, shape.head_dim
    units, split, n_kv = shape.units, shape.split, shape.n_kv_heads
    stage_bytes, chunk_bytes = launch.stage_bytes, shape.chunk_bytes
    stored_bytes = shape.stored_bytes if is_int4 else chunk_bytes
    stored_parts = 2 if is_int4 else 4
    scales_at = 32 * dim
    parts = shape.exact_parts
    exact_head_bytes, stored_head_bytes = parts * chunk_bytes, shape.stored_head_bytes
    results_at = launch.ring_bytes
    result_bytes = STREAMS * group * launch.result_floats * 4
    sinks_at, sink_bytes = results_at + result_bytes, shape.sink_bytes
    bars_at = sinks_at + sink_bytes
    owned, num_threads = dim // cluster, 32 * num_warps
    sinks_bar_at, results_bar_at = launch.shared_bytes - 16, launch.shared_bytes - 8
    query_bytes = group * dim * (4 if is_paged else 2)
    undo, load_query = make_undo(shape), make_load_query(shape, is_paged)
    scores, correct = make_scores(shape), make_correct(shape)
    values = [make_some_values(shape, part) for part in range(parts // 2)]
    values_0, values_1, values_2, values_3 = (values + values)[:4]
    softmax, softmax_masked = (make_softmax(shape, False, masked) for masked in (False, True))
    softmax_stored, softmax_stored_masked = (
        make_softmax(shape, True, masked) for masked in (False, True)
    )
    softmax_sinks = make_softmax(shape, True, True, True)
    scores_int4, values_int4 = make_scores_int4(shape), make_values_int4(shape)
    sink_scores, sink_values = make_sink_scores(shape), make_sink_values(shape)
    commit, copy_sink = make_commit(dim), make_sink_copy(dim)
    is_committing = is_int4 and not is_paged
    zeros, send, merge = make_zeros(shape), make_send(launch), make_merge(launch)
    load_slopes, write = make_slopes(shape), make_write(launch)

    shift = warp_streams.bit_length() - 1
    half, chunk_tiles, value_tiles = parts // 2, 8 // parts, chunk_bytes // 2048
    tile_bytes = 32 * dim

    @device_function
    def fetch(
        stream: Any, ordinal: Any, part: Any, loads: Any, entries: Any, page: Any, used: Any, limit: Any,
        first_stream: Any, own: Any, own_tiles: Any, low: Any, table: Any, exact: Any, stored: Any, block_bytes: Any,
        ring: Any, bars: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """Fill the ring with chunks of blocks before `limit`; (stream, ordinal, part) is the next chunk.

        `entries` holds a page of the table over the lanes: 32 blocks of the warp's streams. Blocks between the first
        and block `low` are not seen. Of the own block only the tiles of 16 positions are fetched that hold a key.
        """
        is_blocked = False
        while stream < warp_streams and loads < used + stages and not is_blocked:
            block = first_stream + stream + STREAMS * ordinal
            if block > own:
                stream += 1
                ordinal = 0
            elif block >= limit:
                is_blocked = True
            elif block > 0 and block < low:
                ordinal += 1
            else:
                if ordinal >> (5 - shift) != page:
                    page = ordinal >> (5 - shift)
                    mine = (page << (5 - shift)) + (lane >> shift)
                    mine = first_stream + (lane & (warp_streams - 1)) + STREAMS * mine
                    if mine <= own:
                        entries = load_i32(table + mine * 4)
                in_page = ordinal & ((32 >> shift) - 1)
                entry = shuffle_from(entries, (in_page << shift) + stream)
                is_own = block == own
                slot = remainder(loads, stages)
                bar, target = bars + slot * 8, ring + slot * stage_bytes
                num_bytes = stored_bytes
                source = stored + wide(entry) * block_bytes
                if is_own:
                    num_bytes = chunk_bytes
                    if has_own:
                        source = exact
                source += part * num_bytes
                is_partial = is_own and own_tiles < 4
                if not is_partial:
                    if lane == 0:
                        mbarrier_expect(bar, num_bytes)
                        bulk_copy(target, source, num_bytes, bar)
                    loads += 1
                elif part < half:
                    here = own_tiles - part * chunk_tiles
                    if here > 0:
                        if lane == 0:
                            num_bytes = (here if here < chunk_tiles else chunk_tiles) * tile_bytes
                            mbarrier_expect(bar, num_bytes)
                            bulk_copy(target, source, num_bytes, bar)
                        loads += 1
                else:
                    num_bytes = own_tiles * 512
                    if lane == 0:
                        mbarrier_expect(bar, value_tiles * num_bytes)
                    if lane < value_tiles:
                        bulk_copy(target + lane * 2048, source + lane * 2048, num_bytes, bar)
                    loads += 1
                part += 1
                if part == (parts if is_own else stored_parts):
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
        stored_block_bytes: Any, tables: Any, positions: Any, row_info: Any, slopes: Any, windows: Any,
        loop_of: Any, row_map: Any, mapped: Any, out: Any, sinks: Any, sink_of: Any, sinks_bytes: Any,
        loop: Any, max_loops: Any, max_blocks: Any, q_stride: Any, scale: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        base, rank = shared_base(), cluster_rank()
        unit = quotient(block_x(), cluster)
        row, unit_head = quotient(unit, units), remainder(unit, units)
        kv_head = quotient(unit_head, split)
        bars = base + bars_at + warp * (8 * stages)
        ring = base + warp * (stages * stage_bytes)
        results = base + results_at
        if lane == 0:
            for i in range(stages):
                mbarrier_init(bars + 8 * i, 1)
            mbarrier_init_fence()
            if is_int4 and warp == 0:
                mbarrier_init(base + sinks_bar_at, 1)
                mbarrier_init_fence()
            if cluster > 1 and warp == 0:
                mbarrier_init(base + results_bar_at, 1)
                mbarrier_init_fence()
                mbarrier_expect(base + results_bar_at, result_bytes)
        sync_warp()
        grid_dependency_launch()
        if cluster > 1:
            cluster_arrive_relaxed()
        if is_paged:
            grid_dependency_wait()
        position = load_i32(positions + row * 4)
        own, own_tiles = position >> 6, ((position & 63) >> 4) + 1
        num_stable, table_row, this_map = 0, 0, -1
        if is_paged:
            table_row = load_i32(row_info + row * 4) * max_loops + load_i32(loop_of + row * 4)
            if row_map != 0:
                this_map = load_i32(row_map + row * 4)
        else:
            num_stable = load_i32(row_info + row * 8)
            table_row = row * max_loops + load_i32(row_info + row * 8 + 4) + loop
        table = tables + wide(table_row * max_blocks) * 4
        exact = exact_cache + kv_head * exact_head_bytes
        if this_map >= 0:
            exact = mapped + wide(this_map * n_kv + kv_head) * exact_head_bytes
        elif has_own and own >= 0:
            if not is_paged:
                exact += wide(load_i32(exact_blocks + table_row * 4)) * exact_block_bytes
            elif is_int4:
                at = wide(table_row * max_blocks + own) * 4
                exact += wide(load_i32(exact_blocks + at)) * exact_block_bytes
            else:
                exact += wide(load_i32(table + own * 4)) * exact_block_bytes
        stored = stored_cache + kv_head * stored_head_bytes
        window, low = no_window, 1
        if windows != 0:
            width = load_i32(windows + row * 4)
            if width > 0:
                window = width
                if position - width >= 127:
                    low = (position - width + 1) >> 6
        first_stream = (rank * num_warps + warp) * warp_streams
        sink = -1
        if is_int4 and own > 0 and first_stream == 0 and sink_of != 0:
            sink = load_i32(sink_of + wide(load_i32(table)) * 4)
            if sink >= 0 and lane == 0:
                mbarrier_expect(base + sinks_bar_at, sink_bytes)
                source = sinks + wide(sink) * sinks_bytes + kv_head * sink_bytes
                bulk_copy(base + sinks_at, source, sink_bytes, base + sinks_bar_at)
        per_stream = (own + STREAMS - first_stream) >> 4
        per_stream = per_stream if per_stream > 0 else 0
        stream, ordinal, part, loads, entries, page = fetch(
            0, 0, 0, 0, 0, -1, 0, num_stable, first_stream, own, own_tiles, low, table, exact, stored,
            stored_block_bytes, ring, bars, lane,
        )  # fmt: skip
        if not is_paged:
            grid_dependency_wait()
        fence_async()
        used = 0
        everything = 1 << 30
        stream, ordinal, part, loads, entries, page = fetch(
            stream, ordinal, part, loads, entries, page, used, everything, first_stream, own, own_tiles, low, table,
            exact, stored, stored_block_bytes, ring, bars, lane,
        )  # fmt: skip
        at = wide(unit_head) * query_bytes
        at += wide(row) * (q_stride * 4) if is_paged else wide(row) * (units * query_bytes)
        query = load_query(q + at, lane, scale)
        sums = query_sums(query)
        slope = load_slopes(slopes, unit_head, lane)
        if cluster > 1:
            cluster_wait()
        for s in range(warp_streams):
            state = start()
            total = zeros()
            for turn in range(per_stream):
                block = first_stream + s + STREAMS * turn
                if block <= own and (block == 0 or block >= low):
                    if is_int4 and block < own:
                        chunk = arrived(used, ring, bars)
                        shown = scores_int4(chunk + lane * 16, chunk + scales_at, query, sums, lane)
                        if block == 0 and sink >= 0:
                            mbarrier_wait(base + sinks_bar_at, 0)
                            shown = sink_scores(shown, base + sinks_at, query, lane)
                        sync_warp()
                        used += 1
                        stream, ordinal, part, loads, entries, page = fetch(
                            stream, ordinal, part, loads, entries, page, used, everything, first_stream,
                            own, own_tiles, low, table, exact, stored, stored_block_bytes, ring, bars, lane,
                        )  # fmt: skip
                        chunk = arrived(used, ring, bars)
                        if block == 0 and sink >= 0:
                            first_step = softmax_sinks(
                                shown, state, chunk + scales_at, 0, position, window, num_sinks,
                                slope, lane,
                            )  # fmt: skip
                            weights, state = first_step[0:8], first_step[8:14]
                            sink_v = base + sinks_at + sink_bytes // 2
                            total = sink_values(sink_v, first_step[16], lane)
                        else:
                            if window < no_window:
                                step = softmax_stored_masked(
                                    shown, state, chunk + scales_at, block * 64, position, window,
                                    num_sinks, slope, lane,
                                )  # fmt: skip
                            else:
                                step = softmax_stored(
                                    shown, state, chunk + scales_at, block * 64, position, window,
                                    num_sinks, slope, lane,
                                )  # fmt: skip
                            weights, state = step[0:8], step[8:14]
                            total = correct(total, step[14], step[15])
                        total = values_int4(total, weights, chunk + lane * 16)
                        sync_warp()
                        used += 1
                        stream, ordinal, part, loads, entries, page = fetch(
                            stream, ordinal, part, loads, entries, page, used, everything, first_stream,
                            own, own_tiles, low, table, exact, stored, stored_block_bytes, ring, bars, lane,
                        )  # fmt: skip
                    else:
                        if is_int4:
                            total = undo(total)
                        shown, weights = no_scores(), no_weights()
                        tiles = own_tiles if block == own else 4
                        for i in range(parts):
                            # a chunk of keys may have none
                            is_here = i >= half or i * chunk_tiles < tiles
                            at = base
                            if is_here:
                                at = arrived(used, ring, bars) + lane * 16
                            if i < half:
                                if is_here:
                                    shown = scores(shown, at, query, i)
                                if i == half - 1:
                                    if block == own or window < no_window:
                                        step = softmax_masked(
                                            shown, state, 0, block * 64, position, window, num_sinks,
                                            slope, lane,
                                        )  # fmt: skip
                                    else:
                                        step = softmax(
                                            shown, state, 0, block * 64, position, window, num_sinks,
                                            slope, lane,
                                        )  # fmt: skip
                                    weights = step[0:8]
                                    state = step[8:14]
                                    total = correct(total, step[14], step[15])
                            elif i == half:
                                total = values_0(total, weights, at, tiles)
                            elif i == half + 1:
                                total = values_1(total, weights, at, tiles)
                            elif i == half + 2:
                                total = values_2(total, weights, at, tiles)
                            else:
                                total = values_3(total, weights, at, tiles)
                            if is_here:
                                sync_warp()
                                used += 1
                                stream, ordinal, part, loads, entries, page = fetch(
                                    stream, ordinal, part, loads, entries, page, used, everything,
                                    first_stream, own, own_tiles, low, table, exact, stored,
                                    stored_block_bytes, ring, bars, lane,
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
            write(out, row, (unit_head * group + column) * dim + rank * owned + d, value)
        if is_committing and own >= 0 and remainder(unit_head, split) == 0:
            place, this_warp = position & 63, rank * num_warps + warp
            block = wide(load_i32(table + own * 4))
            if place == 63:
                commit(
                    exact, stored + block * stored_block_bytes, this_warp, cluster * num_warps, lane
                )
            elif position < num_sinks and this_warp == 0 and sink_of != 0:
                sink = load_i32(sink_of + block * 4)
                if sink >= 0:
                    copy_sink(
                        exact, sinks + wide(sink) * sinks_bytes + kv_head * sink_bytes, place, lane
                    )

    return kernel


def attention(name: str, launch: AttentionLaunch, blocks_per_sm: int = 1) -> Variant:
    """Decode attention over paged blocks.

    Kernel arguments: q fp16 (rows, heads, dim), already times log2(e)/sqrt(dim); the exact fp16 pool with its
    layer offset, exact_blocks int32 (rows, max_loops) (own blocks; int4 only), bytes of an exact block;
    the stored pool with its layer offset, bytes of a stored block; tables int32 (rows, max_loops, max_blocks);
    positions int32 (rows,), -1: no row (its output is 0); row_info int32 (rows, 2): how many leading blocks
    nothing in this step writes, and the row's loop before this step; slopes float32 (heads,); windows int32 (rows,), 0:
    all keys, else that many and the sinks (address 0: all rows see all keys); three addresses that are 0; out, as the
    launch says; exact sinks with their layer offset, sink_of int32 (num_blocks,) (address 0: there are none) and bytes of
    sinks (int4 only); loop, max_loops, max_blocks. With int4 a row that ends a block also makes its stored form, and one at the
    first positions its sinks: no row of the same launch reads them.

    A paged launch (see `Paging`) takes instead: q float32, the first of q_stride numbers of a row; exact_blocks int32
    (num_slots, max_loops, max_blocks) (int4 only; else the exact pool is the stored one); tables int32 of that shape;
    slots int32 (rows,) in the place of row_info; then, before out, the rows' tables, row_map (address 0: no row is mapped) and the
    exact own blocks of mapped rows, bytes (num_maps, kv heads, 256 * dim), all that in position order; loop is unused; after
    max_blocks q_stride and what q is multiplied by, times log2(e). Stored forms are made by `fragment_commit`, before.
    """
    source = "_paged" * launch.is_paged + "_f32" * launch.is_float_out
    how = f"c{launch.cluster}w{launch.num_warps}s{launch.stages}b{blocks_per_sm}"
    return Variant(
        name=f"{name}_{launch.shape.format}{source}_{how}",
        function=_make_kernel(launch),
        args=_ARGS,
        num_threads=32 * launch.num_warps,
        blocks_per_sm=blocks_per_sm,
        cluster=launch.cluster,
        shared_bytes=launch.shared_bytes,
        constants=(launch, blocks_per_sm),
    )
