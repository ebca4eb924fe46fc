"""Decode attention over cached inputs (the KV formats h and h_int4) of models without rotary positions.

The cache keeps x, the normed input of a layer, instead of K and V. A step's row brings its query in terms of x (W_K^T q,
`absorbed_products.query`), reads x for scores and for the weighted sum alike, and hands on averages of x, one per head, to
which `absorbed_products.values` applies W_V. All heads read the one x: with 12 heads of 128 and d 1536 half of the bytes of K and V.

The cache's layout is `layout.CutCache`'s (rows of positions), the same for every kernel that reads it.

A row's blocks are 8 chains: chain c reads blocks c, c + 8, ... in order with a running softmax; two more read exactly, 16 positions at
a time, the row's own block (after chain 3) and the sinks (after chain 7). With kind fp16 the own block is one of its chain's. Chains
are averages in fp16, joined in order in two halves, then the halves, in halves' arithmetic; where a chain runs (a block each for few
rows, 2 blocks a row for many) changes no bit. `absorbed_plan` has listed what a block reads.

Each warp owns one group of 128 values: its codes, its scales, its part of the query, its sums. Scores are the groups' shares added in
order through shared memory; then one warp a head does the softmax. Codes go to `mma.sync` as subnormal halves by masks alone, x as the A
operand in both products (the second through a transposing matrix load); scales and zeros leave through the shares of scores and
through p. While a unit is scored, the copies of the next start between the products: on their own they took a seventh of the time.

What should bound it (`docs/kernels.md` says what was measured), 64 rows of 1024 positions, 2 blocks a row, each 8 stored blocks
(12 heads on 16 columns, d 1536):
* memory: 51 KB a block at 33.5 bytes/ns and multiprocessor: 1.5 us, so 12.2 us a call;
* matrix unit: 2 x 768 mma of 2048 products, 4 units, about 6.4 cycles each: 2,460 cycles or 1.3 us a block;
* issue: about 800 instructions of a warp, 3 warps a scheduler: 2,400 cycles; shared memory: about 1,800 cycles.
"""

from __future__ import annotations

from typing import Any

from kernels.absorbed_chains import make_close, make_join, make_keep, make_put, make_results
from kernels.absorbed_parts import (
    copy_exact,
    copy_stored,
    make_correct,
    make_load_query,
    make_query_sums,
    make_scores_exact,
    make_scores_stored,
    make_slopes,
    make_softmax,
    make_start,
    make_undo,
    make_values_exact,
    make_values_stored,
    make_zeros,
    narrow,
)
from kernels.absorbed_shape import (
    CHAIN_SHIFT,
    COUNT_SHIFT,
    ENTRY_BYTES,
    EXACT,
    FIRST,
    GROUP,
    KIND,
    LAST,
    NOTHING,
    SCORE_ROW,
    SINKS_APART,
    STABLE,
    STAGE_BYTES,
    STORED,
    AbsorbedLaunch,
)
from kernels.compiler import Variant
from kernels.device_code import device_function
from kernels.intrinsics import (
    block_x,
    copy_commit,
    copy_wait_all,
    copy_wait_but_one,
    grid_dependency_launch,
    grid_dependency_wait,
    load_constant_128,
    load_i32,
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

_EVERYTHING = 1 << 30
_ARGS = "l" * 15 + "r"


def _make_kernel(launch: AbsorbedLaunch) -> Any:
    shape = launch.shape
    is_cut, is_joined, split, block_chains = (
        shape.is_cut, launch.is_joined, launch.split, launch.block_chains,
    )  # fmt: skip
    d, n_heads, slots, row_bytes = shape.d_model, shape.n_heads, launch.slots, shape.row_bytes
    exact_row_bytes, group_bytes, query_bytes = 2 * d, shape.group_bytes, shape.query_bytes
    code_bytes, half_bytes, scale_bytes = GROUP // 2, GROUP * 2, 256
    query_at = launch.ring_bytes
    partials_at = query_at + query_bytes
    weights_at = partials_at + launch.partials_bytes
    shares_at = weights_at + shape.columns * 128
    factors_at = shares_at + shape.columns * 16
    joined_at = factors_at + shape.columns * 4
    sums_at = joined_at + shape.columns * 8
    kept_at = sums_at + shape.groups * shape.columns * 4
    sum_bytes, kept_bytes = shape.columns * 4, shape.num_words * 128
    stage_bytes, num_sinks, everything = STAGE_BYTES, NUM_SINKS, _EVERYTHING
    group_partials = shape.columns * SCORE_ROW * 4
    stored, exact_piece, nothing = STORED, EXACT, NOTHING
    kind_mask, first_flag, last_flag, stable_flag, apart_flag = (
        KIND, FIRST, LAST, STABLE, SINKS_APART,
    )  # fmt: skip
    ahead, chain_shift, count_shift, entry_bytes = (
        launch.ahead, CHAIN_SHIFT, COUNT_SHIFT, ENTRY_BYTES,
    )  # fmt: skip
    load_query, query_sums = make_load_query(shape), make_query_sums(shape)
    scores_stored, scores_exact = make_scores_stored(shape), make_scores_exact(shape)
    values_exact, undo, correct = (
        make_values_exact(shape), make_undo(shape), make_correct(shape),
    )  # fmt: skip
    values_stored = make_values_stored(shape) if is_cut else values_exact
    start, softmax, zeros = make_start(shape), make_softmax(shape), make_zeros(shape)
    load_slopes, close = make_slopes(shape), make_close(shape, is_joined)
    results, keep, join, put = (
        make_results(shape), make_keep(shape), make_join(shape), make_put(shape),
    )  # fmt: skip

    @device_function
    def fetch(
        stage: Any, block: Any, key: Any, kind: Any, end: Any, values: Any, value_bytes: Any, scales: Any,
        scale_block_bytes: Any, exact: Any, exact_bytes: Any, sinks: Any, sink_bytes: Any, warp: Any, lane: Any,
    ) -> None:  # fmt: skip
        """Start the copies of this warp's group of a unit."""
        if is_cut and kind == stored:
            copy_stored(
                stage, values + wide(block) * value_bytes + warp * code_bytes,
                scales + wide(block) * scale_block_bytes + warp * scale_bytes, row_bytes, lane,
            )  # fmt: skip
        elif kind != nothing:
            if not is_cut:
                source = values + wide(block) * value_bytes
            elif kind == exact_piece:
                source = exact + wide(block) * exact_bytes
            else:
                source = sinks + wide(block) * sink_bytes
            source += (key & 63) * exact_row_bytes + warp * half_bytes
            copy_exact(stage, source, narrow(end - key - 1), exact_row_bytes, lane)

    def kernel(
        queries: Any, values: Any, value_bytes: Any, scales: Any, scale_block_bytes: Any, exact: Any,
        exact_bytes: Any, sinks: Any, sink_bytes: Any, lists: Any, positions: Any, windows: Any, slopes: Any,
        out: Any, meta: Any, room: Any,
    ) -> None:  # fmt: skip
        thread = thread_id()
        lane, warp = narrow(thread & 31), narrow(thread >> 5)
        base = shared_base()
        row, part_of_row = quotient(block_x(), split), remainder(block_x(), split)
        ring = narrow(base + warp * (2 * stage_bytes))
        query = narrow(base + query_at + warp * group_bytes)
        grid_dependency_launch()
        units = lists + wide(block_x()) * room * entry_bytes
        position = load_i32(positions + row * 4)
        window = load_i32(windows + row * 4)
        # each lane asks for a unit: the first ones' are near when they are asked for in turn
        flags = load_constant_128(units + min(lane, room - 1) * entry_bytes)[2]
        count = narrow(shuffle_from(flags, 0) >> count_shift)
        if window == 0:
            window = narrow(everything)
        num_fetched = narrow(0)
        for u in range(ahead):
            if position >= 0 and u < count and num_fetched == u:
                block, key, flags, end = load_constant_128(units + u * entry_bytes)
                if flags & stable_flag:
                    fetch(
                        ring + u * stage_bytes, block, key, flags & kind_mask, end, values, value_bytes, scales,
                        scale_block_bytes, exact, exact_bytes, sinks, sink_bytes, warp, lane,
                    )  # fmt: skip
                    num_fetched = narrow(u + 1)
            copy_commit()
        slope = load_slopes(slopes, warp)
        grid_dependency_wait()
        if position >= 0 and num_fetched == 0:
            block, key, flags, end = load_constant_128(units)
            fetch(
                ring, block, key, flags & kind_mask, end, values, value_bytes, scales, scale_block_bytes, exact,
                exact_bytes, sinks, sink_bytes, warp, lane,
            )  # fmt: skip
            copy_commit()
        load_query(queries + wide(row) * query_bytes + warp * group_bytes, query, lane)
        sync_warp()
        query_sums(query, base + sums_at + warp * sum_bytes, lane)
        sync_warp()
        state, total = start(), zeros()
        is_undone = not is_cut
        for u in range(count):
            _, key, flags, end = load_constant_128(units + u * entry_bytes)
            kind = narrow(flags & kind_mask)
            if position < 0:
                kind = narrow(nothing)
            is_first, is_last = flags & first_flag, flags & last_flag
            # as if they changed from unit to unit: what is made of them would else be kept in registers all the time
            lane_here, warp_here = narrow(lane + (flags >> 31)), narrow(warp + (flags >> 31))
            at = narrow(base + (flags >> 31))
            weights, factors, shares = at + weights_at, at + factors_at, at + shares_at
            stage = narrow(at + warp_here * (2 * stage_bytes) + (u & 1) * stage_bytes)
            chain = (flags >> chain_shift) & 255
            slot = row * slots + (part_of_row if is_joined else chain)
            next_stage = narrow(at + warp_here * (2 * stage_bytes) + ((u + 1) & 1) * stage_bytes)
            if ahead > 1 and u == 0 and num_fetched > 1:
                copy_wait_but_one()
            else:
                copy_wait_all()
            sync_warp()
            block, next_key, next_kind, next_end = 0, 0, nothing, 0
            if position >= 0 and u + 1 < count and (ahead == 1 or u + 1 >= num_fetched):
                block, next_key, next_kind, next_end = load_constant_128(
                    units + (u + 1) * entry_bytes
                )
                next_kind = next_kind & kind_mask
            has_next = is_cut and kind == stored and next_kind == stored
            if not has_next:
                fetch(
                    next_stage, block, next_key, next_kind, next_end, values, value_bytes, scales,
                    scale_block_bytes, exact, exact_bytes, sinks, sink_bytes, warp_here, lane_here,
                )  # fmt: skip
            if is_cut and kind == stored:
                scores_stored(
                    stage, at + query_at + warp_here * group_bytes, at + sums_at + warp_here * sum_bytes,
                    at + partials_at + warp_here * group_partials, next_stage,
                    values + wide(block) * value_bytes + warp_here * code_bytes,
                    scales + wide(block) * scale_block_bytes + warp_here * scale_bytes, 1 if has_next else 0, lane_here,
                )  # fmt: skip
            elif kind != nothing:
                scores_exact(
                    stage, at + query_at + warp_here * group_bytes, at + partials_at + warp_here * group_partials,
                    lane_here,
                )  # fmt: skip
            copy_commit()
            sync_block()
            if kind != nothing:
                state = softmax(
                    state, at + partials_at, weights, factors, slope, key,
                    num_sinks if flags & apart_flag else 0, end, position, window, warp_here, lane_here,
                )  # fmt: skip
            if is_last:
                close(
                    state, at + joined_at, chain == part_of_row * block_chains, shares,
                    meta + wide(slot) * (n_heads * 8), not is_joined or u == count - 1, warp_here, lane_here,
                )  # fmt: skip
            sync_block()
            if not is_first:
                total = correct(total, factors, lane_here)
            if is_cut and kind == stored:
                total = values_stored(total, stage, weights, lane_here)
            elif kind != nothing:
                if not is_undone:
                    total = undo(total)
                    is_undone = True
                total = values_exact(total, stage, weights, lane_here)
            sync_warp()
            if is_last:
                words = results(total, shares, is_undone, lane_here)
                state, total = start(), zeros()
                is_undone = not is_cut
                if is_joined and chain > part_of_row * block_chains:
                    words = join(words, at + kept_at + warp_here * kept_bytes, shares, lane_here)
                if is_joined and u < count - 1:
                    keep(words, at + kept_at + warp_here * kept_bytes, lane_here)
                else:
                    put(words, out + wide(slot) * (n_heads * d * 2), warp_here, lane_here)

    return kernel


def attention(name: str, launch: AbsorbedLaunch) -> Variant:
    """Attention of generated tokens over cached inputs: grid (rows * split, 1).

    Kernel arguments: queries fp16 (rows, query_bytes / 2) in the order of `query_place`, already scaled; the stored
    values (num_blocks, layers, 1, 64, stored_dim) with the layer's offset, bytes of a block; scales (num_blocks, layers, 1, 1,
    2 groups, 64) likewise, bytes of a block; exact copies (num_copies, layers, 1, 64, d) likewise, bytes of a copy; sinks (num_sinks,
    layers, 1, NUM_SINKS, d) likewise, bytes; lists of this loop, as `absorbed_plan.plan` writes them; positions int32 (rows,), -1: no row
    (its averages are 0); windows int32 (rows,), 0: all; slopes float32 (heads,) times log2(e); out fp16 (rows, slots, heads, d) and meta
    float32 (rows, slots, heads, 2), written: averages with their (maximum, sum); the room of a list. With kind fp16 there are no scales,
    copies or sinks.
    """
    return Variant(
        name=f"{name}_{launch.shape.kind}_x{launch.split}",
        function=_make_kernel(launch),
        args=_ARGS,
        num_threads=32 * launch.shape.groups,
        shared_bytes=launch.shared_bytes,
        constants=(launch,),
    )
