"""General paged attention on the GPU, for every form of the cache and every mask, in fp32 without the matrix unit.

The work of one (row, cache head) is always the same 16 streams: stream s reduces blocks s, s + 16, ... with a running softmax; four
streams in a row are added in order, then the four sums. Within a block of keys sums have one order per form. How many blocks of threads
share the streams of a row (1, 4 or 16) and how many query heads one of them takes changes no order: a row's result has the same bits
alone, among others, at any place and in any chunk.

Blocks that no key of the window lies in are skipped. Blocks that a row reads through a map come from where `cuda_read.gather` put them,
in the layout of the cache itself, so that they are reduced like all others.
"""

from __future__ import annotations

from typing import Any

from kernels import cuda_attend_pairs, cuda_attend_rows
from kernels.compiler import Variant
from kernels.cuda_attend_parts import (
    STREAMS,
    WEIGHTS_BYTES,
    Shape,
    greatest,
    least,
    load_copies,
    load_entries,
    make_correct,
    make_hidden,
    make_load_fields,
    make_positions,
    make_softmax,
    make_start,
    make_state_of,
    make_tables,
    make_together,
    make_zeros,
)
from kernels.cuda_attend_sums import (
    average,
    make_dim,
    make_finish,
    make_fold,
    make_merge,
    make_put,
    make_read,
    make_reset,
    make_write,
)
from kernels.device_code import traced
from kernels.intrinsics import (
    block_x,
    block_y,
    grid_dependency_launch,
    grid_dependency_wait,
    less,
    load_f32_if,
    load_i32,
    quotient,
    remainder,
    shared_base,
    shuffle_from,
    smaller,
    store_f32,
    sync_block,
    sync_warp,
    thread_id,
    wide,
)

_LOG2E = 1.4426950408889634
_FAR = 1 << 30
MERGE_THREADS = 128


def _make_slopes(shape: Shape) -> Any:
    @traced("f" * shape.heads, is_tuple=True)
    def load_slopes(at: Any, count: Any) -> Any:
        return tuple(load_f32_if(at + h * 4, less(h, count)) * _LOG2E for h in range(shape.heads))

    return load_slopes


def _make_nothing(count: int) -> Any:
    @traced("f" * count, is_tuple=True)
    def nothing() -> Any:
        return (0.0,) * count

    return nothing


def _make_kernel(shape: Shape) -> Any:
    has_keys, has_copies, is_int4 = shape.has_keys, shape.has_scales, shape.is_int4
    n, dim, num_warps = shape.queries, shape.dim, shape.num_warps
    streams, far = STREAMS, _FAR
    key_bytes, value_bytes, scale_bytes = shape.key_bytes, shape.value_bytes, shape.scale_bytes
    exact_bytes, sink_bytes = 128 * dim, 8 * dim
    scores_at, turn_bytes, weights_at = shape.scores_at, shape.turn_bytes, shape.weights_at
    warp_scores, warp_weights = n * 256, n * WEIGHTS_BYTES
    lane_queries, warp_queries = shape.query_stride * 4, shape.query_stride * 16
    sums_at, level_bytes = shape.sums_at, shape.level_bytes
    start, zeros, softmax, correct = (
        make(shape) for make in (make_start, make_zeros, make_softmax, make_correct)
    )
    finish, fold, reset, read = (
        make(shape) for make in (make_finish, make_fold, make_reset, make_read)
    )
    state_of, first_dim, load_slopes = make_state_of(shape), make_dim(shape), _make_slopes(shape)
    no_sums, no_slopes = _make_nothing(shape.queries), _make_nothing(shape.heads)
    put, write = make_put(shape), make_write(shape)
    num_rows, row_heads = shape.rows, shape.heads
    together, load_fields = make_together(shape), make_load_fields(shape)
    positions_of, hidden_of, tables_of = (
        make(shape) for make in (make_positions, make_hidden, make_tables)
    )
    stage_queries, query_sums = (
        cuda_attend_pairs.make_stage_queries(shape),
        cuda_attend_pairs.make_query_sums(shape),
    )
    key_offset, exact_key_offset = (
        cuda_attend_pairs.make_key_offset(shape, x) for x in (False, True)
    )
    load_keys, load_exact_keys = (cuda_attend_pairs.make_load_keys(shape, x) for x in (False, True))
    load_values, no_values = (
        cuda_attend_pairs.make_load_values(shape),
        cuda_attend_pairs.make_no_values(shape),
    )
    scores, exact_scores = (cuda_attend_pairs.make_scores(shape, x) for x in (False, True))
    values, exact_values_of = (
        cuda_attend_pairs.make_values(shape),
        cuda_attend_pairs.make_exact_values(shape),
    )
    share, load_scales = (
        cuda_attend_pairs.make_share(shape),
        cuda_attend_pairs.make_load_scales(shape),
    )
    exact_scales = cuda_attend_pairs.exact_scales
    sink_scores, sink_values_of = (
        cuda_attend_pairs.make_sink_scores(shape),
        cuda_attend_pairs.make_sink_values(shape),
    )
    load_query, scale_offset = (
        cuda_attend_rows.make_load_query(shape),
        cuda_attend_rows.make_scale_offset(shape),
    )
    dots, exact_dots = (cuda_attend_rows.make_dots(shape, x) for x in (False, True))
    add_rows, add_exact_rows = (cuda_attend_rows.make_add_rows(shape, x) for x in (False, True))
    sink_dots, add_sinks = (
        cuda_attend_rows.make_sink_dots(shape),
        cuda_attend_rows.make_add_sinks(shape),
    )
    part_rows, batch, lanes = shape.part_rows, cuda_attend_rows.batch_of(shape), shape.lanes
    make_offset = (
        cuda_attend_pairs.make_value_offset if has_keys else cuda_attend_rows.make_row_offset
    )
    value_offset, exact_value_offset = (make_offset(shape, x) for x in (False, True))

    def kernel(
        q: Any, keys: Any, values_of: Any, scales_of: Any, exact_keys: Any, exact_values: Any, exact_tables: Any, sink_keys: Any,
        sink_values: Any, sink_of: Any, near_keys: Any, near_values: Any, near_scales: Any, near_exact_keys: Any,
        near_exact_values: Any, slots: Any, tables: Any, positions: Any, windows: Any, row_map: Any, map_base: Any, maps: Any,
        block_tables: Any, slopes: Any, out: Any, parts: Any, part_totals: Any, q_width: Any, layer: Any, layers: Any, heads: Any,
        group: Any, subs: Any, num_tables: Any, max_blocks: Any, exact_num_tables: Any, exact_max_blocks: Any, map_width: Any,
        near_blocks: Any, split_shift: Any, row_count: Any, scale: Any,
    ) -> None:  # fmt: skip
        lane, warp, base = thread_id() & 31, thread_id() >> 5, shared_base()
        row_group, split = block_x() >> split_shift, block_x() & ((1 << split_shift) - 1)
        head, first_query = quotient(block_y(), subs), remainder(block_y(), subs) * row_heads
        # heads from here on; those over row_heads are another block's
        num_here = group - first_query
        query_head, num_heads = head * group + first_query, heads * group
        grid_dependency_launch()
        grid_dependency_wait()
        per_split = streams >> split_shift
        first_stream = split * per_split
        first_row = row_group * num_rows
        count = smaller(num_rows, row_count - first_row)
        active = together(slots, tables, positions, row_map, first_row, count)
        turn = 0
        for row in range(first_row, first_row + count, active):
            # what does not depend on each other is asked for first
            fields = load_fields(
                slots, tables, row_map, map_base, positions, windows, row, active, lane
            )
            slope = no_slopes()
            if slopes != 0:
                slope = load_slopes(slopes + query_head * 4, num_here)
            row_q = q + wide(row * q_width + query_head * dim) * 4
            if has_keys:
                stage_queries(base, row_q, q_width, num_here, active, scale, thread_id())
            else:
                query = load_query(row_q, num_here, scale, warp, lane)
            row_positions = positions_of(fields)
            row_hidden = hidden_of(fields, row_positions)
            slot, which_table, which_map, first_mapped = tables_of(fields)
            position, hidden = greatest(row_positions), least(row_hidden)
            own = position >> 6
            mapped_from = first_mapped >> 6 if which_map >= 0 else far
            table = block_tables + wide((slot * num_tables + which_table) * max_blocks) * 4
            entries_ahead = load_entries(table, first_stream, own, lane)
            own_copy, sink = -1, -1
            if has_copies:
                copied = own
                if own >= mapped_from:
                    at = which_map * map_width + position - mapped_from * 64
                    copied = load_i32(maps + wide(at) * 4) >> 6
                at = (slot * exact_num_tables + which_table) * exact_max_blocks
                own_copy = shuffle_from(load_copies(exact_tables + wide(at) * 4, copied, lane), 0)
                if first_stream == 0 and mapped_from > 0 and (own > 0 or own_copy < 0) and own >= 0:
                    sink = load_i32(sink_of + wide(shuffle_from(entries_ahead, 0)) * 4)
            sink_at = wide((sink * layers + layer) * heads + head) * sink_bytes
            sums, sums_of_four = (
                base + sums_at + thread_id() * 4,
                base + sums_at + level_bytes + thread_id() * 4,
            )
            weights = base + weights_at + warp * warp_weights
            query_total = no_sums()
            if has_keys:
                sync_block()
                if is_int4:
                    query_total = query_sums(base, lane)
                my_queries = base + warp * warp_queries + (lane >> 3) * lane_queries
            reset(sums)
            for stream in range(first_stream, first_stream + per_split):
                if stream & 3 == 0:
                    reset(sums_of_four)
                if stream <= own:
                    state, total = start(), zeros()
                    block, ordinal, entries = stream, 0, entries_ahead
                    entries_ahead = load_entries(table, stream + 1, own, lane)
                    while block <= own:
                        if ordinal == 32:  # what the lanes hold is used up
                            ordinal, entries = 0, load_entries(table, block, own, lane)
                        entry = shuffle_from(entries, ordinal)
                        ordinal += 1
                        from_position = block * 64
                        if block == 0 or from_position + 63 > hidden:
                            is_exact = has_copies and block == own and own_copy >= 0
                            is_near = block >= mapped_from
                            has_sink = False
                            last = position - from_position
                            if has_copies and is_exact:
                                at = (own_copy * layers + layer) * heads + head
                                if is_near:
                                    at = row * heads + head
                            else:
                                at = (entry * layers + layer) * heads + head
                                if is_near:
                                    at = (row * near_blocks + block - mapped_from) * heads + head
                            mine = base + scores_at + turn * turn_bytes + warp * warp_scores
                            if has_keys:
                                if has_copies and is_exact:
                                    key_at = near_exact_keys if is_near else exact_keys
                                    value_at = near_exact_values if is_near else exact_values
                                    key_at += wide(at) * exact_bytes + exact_key_offset(warp, lane)
                                    value_at += wide(at) * exact_bytes + exact_value_offset(
                                        warp, lane
                                    )
                                    key_words = load_exact_keys(key_at)
                                    value_words = no_values()
                                    scaling = exact_scales()
                                    products = exact_scores(key_words, my_queries)
                                else:
                                    key_at = near_keys if is_near else keys
                                    value_at = near_values if is_near else values_of
                                    scale_at = near_scales if is_near else scales_of
                                    key_at += wide(at) * key_bytes + key_offset(warp, lane)
                                    value_at += wide(at) * value_bytes + value_offset(warp, lane)
                                    key_words = load_keys(key_at)
                                    value_words = load_values(value_at, last, lane)
                                    has_sink = block == 0 and sink >= 0
                                    scaling = load_scales(
                                        scale_at + wide(at) * scale_bytes + lane * 4,
                                        has_sink and lane < 2,
                                    )
                                    products = scores(key_words, my_queries)
                                share(products, mine, lane)
                                if has_copies and has_sink:
                                    sync_warp()
                                    sink_scores(sink_keys + sink_at, my_queries, mine, warp, lane)
                            else:
                                scaling = exact_scales()
                                value_at = near_values if is_near else values_of
                                scale_at = near_scales if is_near else scales_of
                                if has_copies and is_exact:
                                    value_at = near_exact_values if is_near else exact_values
                                    value_at += wide(at) * exact_bytes + exact_value_offset(
                                        warp, lane
                                    )
                                else:
                                    value_at += wide(at) * value_bytes + value_offset(warp, lane)
                                    scale_at += wide(at) * scale_bytes + scale_offset(warp, lane)
                                at_row = quotient(lane, lanes) * part_rows
                                for line in range(at_row, at_row + part_rows, batch):
                                    if has_copies and is_exact:
                                        exact_dots(
                                            value_at, scale_at, query, mine, line, last, lane
                                        )
                                    else:
                                        dots(value_at, scale_at, query, mine, line, last, lane)
                                has_sink = block == 0 and sink >= 0
                                if has_copies and has_sink:
                                    sync_warp()
                                    sink_dots(
                                        sink_values + sink_at + exact_value_offset(warp, lane),
                                        query,
                                        mine,
                                        lane,
                                    )
                            if num_warps > 1:
                                sync_block()
                            else:
                                sync_warp()
                            step = softmax(
                                state, scaling, slope, query_total, base + scores_at + turn * turn_bytes, weights,
                                from_position, row_positions, row_hidden, has_sink and lane < 2, lane,
                            )  # fmt: skip
                            sync_warp()
                            state, total = state_of(step), correct(total, step)
                            if has_keys:
                                if has_copies and is_exact:
                                    total = exact_values_of(total, value_at, last, weights, lane)
                                else:
                                    total = values(total, value_words, weights, lane)
                                if has_copies and has_sink:
                                    total = sink_values_of(
                                        total,
                                        sink_values + sink_at + exact_value_offset(warp, lane),
                                        weights,
                                        lane,
                                    )
                            else:
                                at_row = quotient(lane, lanes) * part_rows
                                for line in range(at_row, at_row + part_rows, batch):
                                    if has_copies and is_exact:
                                        total = add_exact_rows(
                                            total, value_at, scale_at, weights, line, last
                                        )
                                    else:
                                        total = add_rows(
                                            total, value_at, scale_at, weights, line, last
                                        )
                                if has_copies and has_sink:
                                    total = add_sinks(
                                        total,
                                        sink_values + sink_at + exact_value_offset(warp, lane),
                                        weights,
                                        lane,
                                    )
                            turn = 1 - turn
                        block += streams
                    results = finish(total, state, lane)
                    if per_split == 1:
                        at = (row * num_heads + query_head) * streams + stream
                        put(
                            results, parts, part_totals, at, streams, first_dim(warp, lane), num_heads, num_here, active
                        )  # fmt: skip
                    else:
                        fold(sums_of_four, results)
                if stream & 3 == 3:
                    if per_split == 4:
                        at = (row * num_heads + query_head) * 4 + split
                        put(
                            read(sums_of_four), parts, part_totals, at, 4, first_dim(warp, lane), num_heads, num_here, active
                        )  # fmt: skip
                    elif split_shift == 0:
                        fold(sums, read(sums_of_four))
            if split_shift == 0:
                at = (row * num_heads + query_head) * dim + first_dim(warp, lane)
                write(read(sums), out, at, num_heads, num_here, active)

    return kernel


def attend(shape: Shape) -> Variant:
    """Attention of rows.

    Kernel arguments, addresses of int32 tensors where no other type is said: q float32 (rows, q_width), the queries first in a row; the fields
    of a `CutCache` (for keys and values in float32 of a `PagedCache`); the same of the blocks that rows read through maps, as
    `cuda_read.gather` lays them out; the fields of a `Paging`; slopes float32 (query heads) or 0; out float32 (rows, query heads, dim);
    parts float32 (rows, query heads, splits, dim) and part_totals float32 (rows, query heads, splits, 2), written instead of `out`
    if that is not 1. Then counts: floats of a row of q; the layer; layers and heads of the cache; query heads per cache head, and how many
    blocks of threads share them; tables per slot and blocks per table, the same of exact_tables; places per map; mapped
    blocks per row; the logarithm of the number of blocks of threads that share the 16 streams (0, 2 or 4); rows. Last the scale of the scores.

    Its grid is (rows / rows of the shape, rounded up, * splits, heads * subs).
    """
    name = f"attend_{'' if shape.has_keys else 'h_'}{shape.kind}_{shape.dim}_{shape.rows}x{shape.heads}"
    args = "l" * 27 + "r" * 14 + "f"
    num_threads = 32 * shape.num_warps
    return Variant(
        name, _make_kernel(shape), args, num_threads,
        shared_bytes=shape.shared_bytes, blocks_per_sm=blocks_per_sm(shape), constants=(shape, num_threads),
    )  # fmt: skip


def blocks_per_sm(shape: Shape) -> int:
    """Blocks of threads that the registers of a multiprocessor should hold: as many as go without spills."""
    registers = 80 + 16 * (shape.queries - 1)
    if shape.has_scales and shape.has_keys:
        registers = 128 if shape.queries > 1 else 96 if shape.is_int4 else 80
    elif shape.has_scales:
        registers += 40
    return max(1, 65536 // (32 * shape.num_warps * registers))


def _make_merge_kernel(num_parts: int) -> Any:
    add, threads, shift = make_merge(num_parts), MERGE_THREADS, 0 if num_parts == STREAMS else 2

    def kernel(
        parts: Any, part_totals: Any, positions: Any, out: Any, num_heads: Any, dim: Any
    ) -> None:
        grid_dependency_launch()
        grid_dependency_wait()
        i = block_x() * threads + thread_id()
        own = load_i32(positions + block_y() * 4) >> 6
        if i < num_heads * dim:
            d, row_head = remainder(i, dim), block_y() * num_heads + quotient(i, dim)
            first = wide(row_head) * num_parts
            value, total = add(
                parts + (first * dim + d) * 4, dim * 4, part_totals + first * 8, (own >> shift) + 1
            )
            store_f32(out + (wide(row_head) * dim + d) * 4, average(value, total))

    return kernel


def merge(num_parts: int) -> Variant:
    """Adds up what `attend` left in parts.

    Kernel arguments: parts, part_totals, positions and out as there; query heads; dim. Its grid is (query heads * dim / 128 rounded up, rows).
    """
    return Variant(
        f"attend_merge_{num_parts}", _make_merge_kernel(num_parts), "llllrr", MERGE_THREADS, constants=(num_parts,)
    )  # fmt: skip
