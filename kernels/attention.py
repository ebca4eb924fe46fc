"""Paged attention of generated tokens: one query a row, keys and values in blocks of 64 positions.

The work of one (row, kv head) is always the same 16 streams: stream s reads blocks s, s+16, ... in order and
keeps a running softmax; the streams are merged in order. A stream is one warp's work. A few rows spread the
streams over a cluster of 8 blocks, many rows keep them in one block: the same bits either way.

Keys are the A operand of `mma.sync` and the query heads of a group its columns; the weights p, transposed in
registers, are the B operand for the transposed values. Each warp feeds itself by bulk copies through a ring.
Blocks that were complete before the step are fetched before the kernel in front has ended. They leave the L2 cache before all else,
which keeps part of the weights there from one loop to the next.

Formats: `fp16`; `int4` (`attention_int4`) stores complete blocks as 4-bit numbers with a scale and an offset per position, k or v
and kv head, and reads the row's own block and the first NUM_SINKS keys exactly.
"""

from __future__ import annotations

from typing import Any

from kernels import attention_int4
from kernels.attention_blocks import ARGS, NO_WINDOW, make_fetch_own, make_find
from kernels.attention_parts import (
    make_correct,
    make_load_query,
    make_merge,
    make_scores,
    make_send,
    make_slopes,
    make_softmax,
    make_some_values,
    make_write,
    make_zeros,
    no_scores,
    no_weights,
    start,
)
from kernels.attention_shapes import STREAMS, AttentionLaunch, AttentionShape, choose_launch
from kernels.compiler import Variant
from kernels.device_code import device_function
from kernels.intrinsics import (
    block_x,
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
from kernels.polling import bulk_copy_once
from kernels.reads import make_zero_once, never_of

__all__ = ["AttentionLaunch", "AttentionShape", "attention", "choose_launch"]


def _make_kernel(launch: AttentionLaunch) -> Any:
    shape, is_paged = launch.shape, launch.is_paged
    stages, num_warps, cluster = launch.stages, launch.num_warps, launch.cluster
    warp_streams, group, dim = launch.warp_streams, shape.group, shape.head_dim
    units, split, parts, chunk_bytes = (
        shape.units,
        shape.split,
        shape.exact_parts,
        shape.chunk_bytes,
    )
    head_bytes, result_bytes = parts * chunk_bytes, launch.result_bytes
    half, chunk_tiles = parts // 2, 8 // parts
    results_at, bars_at = launch.ring_bytes, launch.bars_at
    results_bar_at = launch.shared_bytes - 8
    owned, num_threads = dim // cluster, 32 * num_warps
    query_bytes, no_window = group * dim * (4 if is_paged else 2), NO_WINDOW
    find, fetch_own = make_find(launch), make_fetch_own(launch)
    load_query, load_slopes = make_load_query(shape, is_paged), make_slopes(shape)
    scores, correct, zeros = make_scores(shape), make_correct(shape), make_zeros(shape)
    values_0, values_1 = (make_some_values(shape, part) for part in range(2))
    softmax, softmax_masked = (make_softmax(shape, masked) for masked in (False, True))
    send, merge, write = make_send(launch), make_merge(launch), make_write(launch)

    read_scores, read_values = (
        make_zero_once(range(0, 16, 4)),
        make_zero_once(range(0, dim // 4, 4)),
    )
    shift = warp_streams.bit_length() - 1

    @device_function
    def fetch(
        stream: Any, ordinal: Any, part: Any, loads: Any, entries: Any, page: Any, used: Any, limit: Any,
        first_stream: Any, position: Any, low: Any, table: Any, exact: Any, stored: Any, block_bytes: Any,
        ring: Any, bars: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """Fill the ring with chunks of blocks before `limit`; (stream, ordinal, part) is the next chunk.

        `entries` holds a page of the table over the lanes: 32 blocks of the warp's streams. Blocks between the first
        and block `low` are not seen.
        """
        own, is_blocked = position >> 6, False
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
                slot = remainder(loads, stages)
                bar, target = bars + slot * 8, ring + slot * chunk_bytes
                if block == own:
                    tiles = ((position & 63) >> 4) + 1
                    loads += fetch_own(part, tiles, exact, target, bar, lane)
                else:
                    if lane == 0:
                        source = stored + wide(entry) * block_bytes + part * chunk_bytes
                        mbarrier_expect(bar, chunk_bytes)
                        bulk_copy_once(target, source, chunk_bytes, bar)
                    loads += 1
                part += 1
                if part == parts:
                    part = 0
                    ordinal += 1
        return stream, ordinal, part, loads, entries, page

    @device_function
    def arrived(used: Any, ring: Any, bars: Any) -> Any:
        slot = remainder(used, stages)
        mbarrier_wait(bars + slot * 8, quotient(used, stages) & 1)
        return ring + slot * chunk_bytes

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
        ring = base + warp * (stages * chunk_bytes)
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
        if is_paged:
            grid_dependency_wait()
        position, num_stable, table, exact, window, low = find(
            row, kv_head, exact_cache, exact_blocks, exact_block_bytes, tables, positions, row_info, windows,
            loop_of, row_map, mapped, loop, max_loops, max_blocks,
        )  # fmt: skip
        own, own_tiles = position >> 6, ((position & 63) >> 4) + 1
        stored = stored_cache + kv_head * head_bytes
        first_stream = (rank * num_warps + warp) * warp_streams
        per_stream = (own + STREAMS - first_stream) >> 4
        per_stream = per_stream if per_stream > 0 else 0
        stream, ordinal, part, loads, entries, page = fetch(
            0, 0, 0, 0, 0, -1, 0, num_stable, first_stream, position, low, table, exact, stored,
            stored_block_bytes, ring, bars, lane,
        )  # fmt: skip
        if not is_paged:
            grid_dependency_wait()
        fence_async()
        used, never = 0, never_of(max_blocks)
        everything = 1 << 30
        stream, ordinal, part, loads, entries, page = fetch(
            stream, ordinal, part, loads, entries, page, used, everything, first_stream, position, low, table,
            exact, stored, stored_block_bytes, ring, bars, lane,
        )  # fmt: skip
        at = wide(unit_head) * query_bytes
        at += wide(row) * (q_stride * 4) if is_paged else wide(row) * (units * query_bytes)
        query = load_query(q + at, lane, scale)
        slope = load_slopes(slopes, unit_head, lane)
        if cluster > 1:
            cluster_wait()
        for s in range(warp_streams):
            state = start()
            total = zeros()
            for turn in range(per_stream):
                block = first_stream + s + STREAMS * turn
                if block <= own and (block == 0 or block >= low):
                    tiles = own_tiles if block == own else 4
                    shown, weights = no_scores(), no_weights()
                    for i in range(parts):
                        # a chunk of keys may have none
                        is_here = i >= half or i * chunk_tiles < tiles
                        chunk = base
                        if is_here:
                            chunk = arrived(used, ring, bars) + lane * 16
                        if i < half:
                            if is_here:
                                shown = scores(shown, chunk, query, i)
                            if i == half - 1:
                                if block == own or window < no_window:
                                    step = softmax_masked(
                                        shown, state, block * 64, position, window, slope, lane
                                    )
                                else:
                                    step = softmax(
                                        shown, state, block * 64, position, window, slope, lane
                                    )
                                weights, state = step[0:8], step[8:12]
                                total = correct(total, step[12], step[13])
                        elif i == half:
                            total = values_0(total, weights, chunk, tiles)
                        else:
                            total = values_1(total, weights, chunk, tiles)
                        if is_here:
                            free = (
                                read_scores(shown, never) if i < half else read_values(total, never)
                            )
                            sync_warp()
                            used += 1
                            stream, ordinal, part, loads, entries, page = fetch(
                                stream, ordinal, part, loads, entries, page, used, everything,
                                first_stream, position, low, table, exact, stored, stored_block_bytes,
                                ring + free, bars, lane,
                            )  # fmt: skip
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

    return kernel


def attention(name: str, launch: AttentionLaunch, blocks_per_sm: int = 1) -> Variant:
    """Decode attention over paged blocks.

    Kernel arguments: q fp16 (rows, heads, dim), already times log2(e)/sqrt(dim); the exact fp16 pool with its
    layer offset (with fp16 the stored one), exact_blocks int32 (rows, max_loops, max_blocks) (int4 only), bytes of an exact block;
    the stored pool with its layer offset, bytes of a stored block; tables int32 (rows, max_loops, max_blocks);
    positions int32 (rows,), -1: no row (its output is 0); row_info int32 (rows, 2): how many leading blocks
    nothing in this step writes, and the row's loop before this step; slopes float32 (heads,); windows int32 (rows,), 0:
    all keys, else that many and the sinks (address 0: all rows see all keys); three addresses that are 0; out, as the
    launch says; exact sinks with their layer offset, sink_of int32 (num_blocks,) (address 0: there are none) and bytes of
    sinks (int4 only); loop, max_loops, max_blocks. With int4 a row that ends a block also makes its stored form, and one at the
    first positions its sinks: no row of the same launch reads them.

    A paged launch (see `Paging`) takes instead: q float32, the first of q_stride numbers of a row; exact_blocks int32
    (num_slots, max_loops, max_blocks) (int4 only); tables int32 of that shape;
    slots int32 (rows,) in the place of row_info; then, before out, the rows' tables, row_map (address 0: no row is mapped) and the
    exact own blocks of mapped rows, bytes (num_maps, kv heads, 256 * dim), all that in position order; loop is unused; after
    max_blocks q_stride and what q is multiplied by, times log2(e). Stored forms are made by `fragment_commit`, before.
    """
    launch.check()
    make = attention_int4.make_kernel if launch.shape.format == "int4" else _make_kernel
    source = "_paged" * launch.is_paged + "_f32" * launch.is_float_out
    how = f"c{launch.cluster}w{launch.num_warps}s{launch.stages}b{blocks_per_sm}"
    return Variant(
        name=f"{name}_{launch.shape.format}{source}_{how}",
        function=make(launch),
        args=ARGS,
        num_threads=32 * launch.num_warps,
        blocks_per_sm=blocks_per_sm,
        cluster=launch.cluster,
        shared_bytes=launch.shared_bytes,
        constants=(launch, blocks_per_sm),
    )
