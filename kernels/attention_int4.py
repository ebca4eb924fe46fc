"""Decode attention over blocks stored in 4 bits, with exact keys where a row must read them exactly.

The 16 streams of `attention` have complete blocks alone, which the matrix unit multiplies as integers. A 17th stream, merged last,
has what is read in fp16: the first NUM_SINKS keys, which the first block then leaves out, and the row's own block. It is the work of
the last warp. All sums have the same order in every launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.attention_blocks import NO_WINDOW, make_fetch_own, make_find
from kernels.attention_int4_parts import (
    heads_of,
    kept_tiles,
    make_head_slope,
    make_integer_query,
    make_load_pairs,
    make_send_stored,
    make_stored_scores,
    make_stored_softmax,
    make_stored_values,
    make_stored_zeros,
    start_stored,
)
from kernels.attention_parts import (
    make_correct,
    make_load_query,
    make_merge,
    make_scores,
    make_send,
    make_sinks,
    make_slopes,
    make_softmax,
    make_some_values,
    make_write,
    make_zeros,
    no_scores,
    start,
)
from kernels.attention_shapes import STREAMS
from kernels.device_code import device_function
from kernels.fragment_commit import make_commit, make_sink_copy
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
    sync_block,
    sync_warp,
    thread_id,
    wide,
)
from kernels.layout import NUM_SINKS
from kernels.polling import bulk_copy_once
from kernels.reads import make_zero_once, never_of

if TYPE_CHECKING:
    from kernels.attention_shapes import AttentionLaunch


def make_kernel(launch: AttentionLaunch) -> Any:
    """The kernel of `attention.attention` with int4."""
    shape, is_paged = launch.shape, launch.is_paged
    stages, num_warps, cluster = launch.stages, launch.num_warps, launch.cluster
    warp_streams, group, dim = launch.warp_streams, shape.group, shape.head_dim
    units, split, parts = shape.units, shape.split, shape.exact_parts
    half, chunk_tiles = parts // 2, 8 // parts
    stage_bytes, stored_bytes = launch.stage_bytes, shape.stored_bytes
    head_bytes, scales_at = shape.stored_head_bytes, 32 * dim
    result_bytes, sink_bytes, num_sinks = launch.result_bytes, shape.sink_bytes, NUM_SINKS
    results_at, sinks_at, bars_at = launch.ring_bytes, launch.sinks_at, launch.bars_at
    sinks_bar_at, results_bar_at = launch.shared_bytes - 16, launch.shared_bytes - 8
    owned, num_threads, all_warps = dim // cluster, 32 * num_warps, cluster * num_warps
    query_bytes, no_window = group * dim * (4 if is_paged else 2), NO_WINDOW
    find, fetch_own = make_find(launch), make_fetch_own(launch)
    integer_query = make_integer_query(shape, is_paged)
    stored_scores, stored_values = make_stored_scores(shape), make_stored_values(shape)
    stored_zeros, head_slope = make_stored_zeros(shape), make_head_slope(shape)
    stored_softmax, stored_softmax_masked = (
        make_stored_softmax(shape, masked) for masked in (False, True)
    )
    send_stored, load_pairs = make_send_stored(launch), make_load_pairs(shape)
    load_query, load_slopes = make_load_query(shape, is_paged), make_slopes(shape)
    scores, softmax_masked = make_scores(shape), make_softmax(shape, True)
    values = [make_some_values(shape, part) for part in range(half)]
    values_0, values_1, values_2, values_3 = (values + values)[:4]
    read_sinks, sink_step = make_sinks(shape, dim // 16)
    correct, zeros = make_correct(shape), make_zeros(shape)
    send, merge, write = make_send(launch), make_merge(launch), make_write(launch)
    commit, copy_sink = make_commit(dim), make_sink_copy(dim)

    read_scores = make_zero_once(range(2 * heads_of(shape)))
    read_values = make_zero_once(range(2 * kept_tiles(shape)))
    read_own_scores, read_own_values = (
        make_zero_once(range(0, count, 4)) for count in (16, dim // 4)
    )

    @device_function
    def seen_from(block: Any, low: Any) -> Any:
        """The first block of a stream from `block` on that is not between the first and block `low`."""
        if block > 0 and block < low:
            block += (low - block + STREAMS - 1) & -STREAMS
        return block

    @device_function
    def fetch_stored(
        stream: Any, block: Any, part: Any, entry: Any, loads: Any, first_stream: Any, own: Any, low: Any,
        table: Any, stored: Any, block_bytes: Any, ring: Any, bars: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """Start the copy of the next part, keys or values; `entry` is the table's of `block`, asked for in time."""
        if lane == 0:
            slot = remainder(loads, stages)
            source = stored + wide(entry) * block_bytes + part * stored_bytes
            mbarrier_expect(bars + slot * 8, stored_bytes)
            bulk_copy_once(ring + slot * stage_bytes, source, stored_bytes, bars + slot * 8)
        loads += 1
        part ^= 1
        if part == 0:
            block = seen_from(block + STREAMS, low)
            while block >= own and stream < warp_streams:
                stream += 1
                block = seen_from(first_stream + stream, low)
            if stream < warp_streams:
                entry = load_i32(table + block * 4)
        return stream, block, part, entry, loads

    @device_function
    def fetch(
        stream: Any, block: Any, part: Any, entry: Any, loads: Any, used: Any, last_part: Any,
        first_stream: Any, position: Any, low: Any, table: Any, exact: Any, stored: Any, block_bytes: Any,
        ring: Any, bars: Any, lane: Any,
    ) -> Any:  # fmt: skip
        """Fill the ring: with stored parts, then with the own block's up to `last_part` (0: this warp has none of them)."""
        own, own_tiles = position >> 6, ((position & 63) >> 4) + 1
        while loads < used + stages and (stream < warp_streams or part < last_part):
            if stream < warp_streams:
                stream, block, part, entry, loads = fetch_stored(
                    stream, block, part, entry, loads, first_stream, own, low, table, stored, block_bytes,
                    ring, bars, lane,
                )  # fmt: skip
            else:
                slot = remainder(loads, stages)
                loads += fetch_own(
                    part, own_tiles, exact, ring + slot * stage_bytes, bars + slot * 8, lane
                )
                part += 1
        return stream, block, part, entry, loads

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
        this_warp = rank * num_warps + warp
        is_last_warp = this_warp == all_warps - 1
        if lane == 0:
            for i in range(stages):
                mbarrier_init(bars + 8 * i, 1)
            if is_last_warp:
                mbarrier_init(base + sinks_bar_at, 1)
            if cluster > 1 and warp == 0:
                mbarrier_init(base + results_bar_at, 1)
            mbarrier_init_fence()
            if cluster > 1 and warp == 0:
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
        own = position >> 6
        stored = stored_cache + kv_head * head_bytes
        first_stream = this_warp * warp_streams
        stream, part, entry, loads, used = 0, 0, 0, 0, 0
        never = never_of(max_blocks)
        block = seen_from(first_stream, low)
        while block >= own and stream < warp_streams:
            stream += 1
            block = seen_from(first_stream + stream, low)
        if stream < warp_streams:
            entry = load_i32(table + block * 4)
        sink = -1
        if sink_of != 0 and own > 0 and (is_last_warp or first_stream == 0):
            sink = load_i32(sink_of + wide(load_i32(table)) * 4)
        while loads < stages and stream < warp_streams and block < num_stable:
            stream, block, part, entry, loads = fetch_stored(
                stream, block, part, entry, loads, first_stream, own, low, table, stored, stored_block_bytes,
                ring, bars, lane,
            )  # fmt: skip
        if not is_paged:
            grid_dependency_wait()
        fence_async()
        last_part = parts if is_last_warp and own >= 0 else 0
        stream, block, part, entry, loads = fetch(
            stream, block, part, entry, loads, used, last_part, first_stream, position, low, table, exact,
            stored, stored_block_bytes, ring, bars, lane,
        )  # fmt: skip
        if sink >= 0 and is_last_warp and lane == 0:
            mbarrier_expect(base + sinks_bar_at, sink_bytes)
            source = sinks + wide(sink) * sinks_bytes + kv_head * sink_bytes
            bulk_copy(base + sinks_at, source, sink_bytes, base + sinks_bar_at)
        queries = q + wide(unit_head) * query_bytes
        queries += wide(row) * (q_stride * 4) if is_paged else wide(row) * (units * query_bytes)
        integers = integer_query(queries, lane, scale)
        query_unit, query_sum, query = integers[0], integers[1], integers[2:]
        slope = head_slope(slopes, unit_head, lane)
        if cluster > 1:
            cluster_wait()
        for s in range(warp_streams):
            state = start_stored()
            total = stored_zeros()
            here = seen_from(first_stream + s, low)
            while here < own:
                chunk = arrived(used, ring, bars)
                pairs = load_pairs(chunk + scales_at, lane)
                shown = stored_scores(chunk + lane * 16, pairs, query, query_unit, query_sum, lane)
                free = ring + read_scores(shown, never)
                sync_warp()
                used += 1
                stream, block, part, entry, loads = fetch(
                    stream, block, part, entry, loads, used, last_part, first_stream, position, low, table,
                    exact, stored, stored_block_bytes, free, bars, lane,
                )  # fmt: skip
                chunk = arrived(used, ring, bars)
                pairs = load_pairs(chunk + scales_at, lane)
                hidden = num_sinks if here == 0 and sink >= 0 else 0
                if hidden > 0 or window < no_window:
                    step = stored_softmax_masked(
                        shown,
                        state,
                        pairs,
                        here * 64,
                        position,
                        window,
                        hidden,
                        slope,
                        lane,
                    )
                else:
                    step = stored_softmax(
                        shown,
                        state,
                        pairs,
                        here * 64,
                        position,
                        window,
                        hidden,
                        slope,
                        lane,
                    )
                state = step[0:3]
                total = stored_values(total, step[5:], chunk + lane * 16, step[3], step[4], lane)
                free = ring + read_values(total, never)
                sync_warp()
                used += 1
                stream, block, part, entry, loads = fetch(
                    stream, block, part, entry, loads, used, last_part, first_stream, position, low, table,
                    exact, stored, stored_block_bytes, free, bars, lane,
                )  # fmt: skip
                here = seen_from(here + STREAMS, low)
            send_stored(total, state, first_stream + s, results, lane, base + results_bar_at)
        if is_last_warp:
            fragments = load_query(queries, lane, scale)
            own_slopes = load_slopes(slopes, unit_head, lane)
            exact_state = start()
            exact_total = zeros()
            if sink >= 0:
                mbarrier_wait(base + sinks_bar_at, 0)
                values_at = base + sinks_at + 2 * num_sinks * dim
                read = read_sinks(base + sinks_at, values_at, fragments, lane)
                seen = sink_step(read, position, own_slopes, lane)
                exact_state, exact_total = seen[0:4], seen[4:]
            if own >= 0:
                tiles = ((position & 63) >> 4) + 1
                own_shown = no_scores()
                for i in range(half):
                    if i * chunk_tiles < tiles:
                        own_shown = scores(
                            own_shown, arrived(used, ring, bars) + lane * 16, fragments, i
                        )
                        free = ring + read_own_scores(own_shown, never)
                        sync_warp()
                        used += 1
                        stream, block, part, entry, loads = fetch(
                            stream, block, part, entry, loads, used, last_part, first_stream, position, low,
                            table, exact, stored, stored_block_bytes, free, bars, lane,
                        )  # fmt: skip
                own_step = softmax_masked(
                    own_shown, exact_state, own * 64, position, window, own_slopes, lane
                )
                exact_state = own_step[8:12]
                exact_total = correct(exact_total, own_step[12], own_step[13])
                for i in range(half):
                    chunk = arrived(used, ring, bars) + lane * 16
                    if i == 0:
                        exact_total = values_0(exact_total, own_step[0:8], chunk, tiles)
                    elif i == 1:
                        exact_total = values_1(exact_total, own_step[0:8], chunk, tiles)
                    elif i == 2:
                        exact_total = values_2(exact_total, own_step[0:8], chunk, tiles)
                    else:
                        exact_total = values_3(exact_total, own_step[0:8], chunk, tiles)
                    free = ring + read_own_values(exact_total, never)
                    sync_warp()
                    used += 1
                    stream, block, part, entry, loads = fetch(
                        stream, block, part, entry, loads, used, last_part, first_stream, position, low,
                        table, exact, stored, stored_block_bytes, free, bars, lane,
                    )  # fmt: skip
            send(exact_total, exact_state, STREAMS, results, lane, base + results_bar_at)
        if cluster > 1:
            # every block of the cluster has told its streams' results to this one
            mbarrier_wait(base + results_bar_at, 0)
        else:
            sync_block()
        for i in range(thread_id(), group * owned, num_threads):
            column, d = quotient(i, owned), remainder(i, owned)
            value = merge(results, column, d)
            write(out, row, (unit_head * group + column) * dim + rank * owned + d, value)
        if not is_paged and own >= 0 and remainder(unit_head, split) == 0:
            place, this_block = position & 63, wide(load_i32(table + own * 4))
            if place == 63:
                commit(exact, stored + this_block * stored_block_bytes, this_warp, all_warps, lane)
            elif position < num_sinks and this_warp == 0 and sink_of != 0:
                sink = load_i32(sink_of + this_block * 4)
                if sink >= 0:
                    at = sinks + wide(sink) * sinks_bytes + kv_head * sink_bytes
                    copy_sink(exact, at, place, lane)

    return kernel
