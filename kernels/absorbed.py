"""Decode attention over cached inputs (the KV formats h and h_int4) of models without rotary positions.

The cache keeps x, the normed input of a layer, instead of K and V. A step's row brings its query in terms of x (W_K^T q,
`absorbed_products.query`), reads x for scores and for the weighted sum alike, and hands on averages of x, one per head, to
which `absorbed_products.values` applies W_V. All heads read the one x: with 12 heads of 128 and d 1536 half of the bytes of K and V.

The cache's layout is `layout.CutCache`'s (rows of positions), the same for every kernel that reads it.

A row's blocks are 8 chains: chain c reads blocks c, c + 8, ... in order, then the exact sinks (chain 7) or the row's own block
(exact, 16 positions at a time) with a running softmax. Chains are averages in fp16, joined in order in two halves, then the
halves; where a chain runs (8 blocks for few rows, 2 for many) changes no bit. Each warp owns one group of 128 values: its codes, its
scales, its part of the query, its sums. Scores are the groups' shares added in order through shared memory; then one
warp a head does the softmax. Codes go to `mma.sync` as subnormal halves by masks alone, x as the A operand in both products (the
second through a transposing matrix load); scales and zeros leave through the shares of scores and through p.

What bounds it, 64 rows of 1024 positions, 2 blocks a row, each 8 stored blocks (12 heads on 16 columns, d 1536):
* memory: 51 KB a block at 33.5 bytes/ns and multiprocessor: 1.5 us, so 12.2 us a call;
* matrix unit: 2 x 768 mma of 2048 products, 4 units, about 6.4 cycles each: 2,460 cycles or 1.3 us a block;
* issue: about 800 instructions of a warp, 3 warps a scheduler: 2,400 cycles; shared memory: about 1,800 cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.absorbed_parts import (
    GROUP,
    PIECE,
    SCORE_ROW,
    STAGE_BYTES,
    make_close,
    make_copy_exact,
    make_copy_stored,
    make_correct,
    make_join,
    make_keep,
    make_load_query,
    make_put,
    make_query_sums,
    make_results,
    make_scores_exact,
    make_scores_stored,
    make_slopes,
    make_softmax,
    make_undo,
    make_values_exact,
    make_values_stored,
    make_zero_sums,
    make_zeros,
    narrow,
)
from kernels.compiler import Variant
from kernels.device_code import device_function
from kernels.fragments import ProductShape
from kernels.intrinsics import (
    block_x,
    copy_commit,
    copy_wait_but_one,
    grid_dependency_launch,
    grid_dependency_wait,
    load_constant_i32,
    load_i32,
    load_shared_32,
    load_shared_64,
    load_shared_128,
    opaque,
    quotient,
    remainder,
    shared_base,
    store_shared_64,
    store_shared_128_if,
    sync_block,
    sync_some,
    sync_warp,
    thread_id,
    wide,
)
from kernels.layout import NUM_SINKS

CHAINS = 8
_JOINED = 2  # blocks a row with which each block joins its half of the chains
_SINK_CHAIN = 7
_EVERYTHING = 1 << 30


@dataclass(frozen=True)
class AbsorbedShape:
    """The model's side. `kind` is the cache's: fp16 (h) or int4 (h_int4, groups of 128 values).

    Raises:
        ValueError: d_model is no multiple of 128 up to 2048, or there are more than 16 heads.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    kind: str = "int4"
    has_alibi: bool = False

    def __post_init__(self) -> None:
        if self.d_model % GROUP or self.groups > 16 or self.n_heads > 16 or self.head_dim % 32:
            raise ValueError(f"no absorbed attention for {self}")

    @property
    def is_cut(self) -> bool:
        return self.kind == "int4"

    @property
    def groups(self) -> int:
        """Groups of values, and warps."""
        return self.d_model // GROUP

    @property
    def halves(self) -> int:
        """Warps of a group: each has half of its values in the weighted sums, half of the positions in scores."""
        return 2 if self.groups <= 12 else 1

    @property
    def num_warps(self) -> int:
        return self.groups * self.halves

    @property
    def half_tiles(self) -> int:
        """Tiles of 16 values of a warp."""
        return 8 // self.halves

    @property
    def columns(self) -> int:
        """Heads, rounded up to fours."""
        return -(-self.n_heads // 4) * 4

    @property
    def tiles(self) -> int:
        """Column tiles of 8."""
        return -(-self.columns // 8)

    @property
    def warp_heads(self) -> int:
        """Heads whose softmax one warp does."""
        return -(-self.columns // self.num_warps)

    @property
    def num_sums(self) -> int:
        """Floats of a lane's sums: tiles of 16 values x column tiles x 4."""
        return self.tiles * 4 * self.half_tiles

    @property
    def num_words(self) -> int:
        """Words of a lane's averages."""
        return 2 * self.columns // self.halves

    @property
    def group_bytes(self) -> int:
        """A group's part of a row's query."""
        return GROUP * self.columns * 2

    @property
    def query_bytes(self) -> int:
        """A row's query, in the order of `query_place`."""
        return self.groups * self.group_bytes

    @property
    def row_bytes(self) -> int:
        """A stored position's codes (or halves)."""
        return self.d_model // 2 if self.is_cut else self.d_model * 2

    @property
    def scale(self) -> float:
        """What queries are multiplied by: scores are exponents of 2."""
        return float(1.4426950408889634 / self.head_dim**0.5)


def query_place(shape: AbsorbedShape, head: int, value: int) -> tuple[int, bool]:
    """Where a query's value lies in its row (in halves), and whether it belongs to the high codes.

    [group][column tile][step][column][t][low pair, low pair + 1, high pair, high pair + 1]: fragments of 8 dims.
    """
    group, i = divmod(value, GROUP)
    is_high, i = i >= 64, i % 64
    step, t, odd, half = i >> 4, (i >> 2) & 3, i & 1, (i >> 1) & 1
    tile = head >> 3
    width = min(8, shape.columns - 8 * tile)
    word = ((step * width + (head & 7)) * 4 + t) * 4 + 2 * is_high + odd
    return group * shape.group_bytes // 2 + tile * 1024 + word * 2 + half, is_high


@dataclass(frozen=True)
class AbsorbedLaunch:
    """`split` blocks share a row's chains: 8, 4 or 1 write every chain's averages, 2 write those of their halves."""

    shape: AbsorbedShape
    split: int

    @property
    def is_joined(self) -> bool:
        return self.split == _JOINED

    @property
    def slots(self) -> int:
        """Averages of a row."""
        return _JOINED if self.is_joined else CHAINS

    @property
    def block_chains(self) -> int:
        return CHAINS // self.split

    @property
    def ring_bytes(self) -> int:
        return self.shape.groups * 2 * STAGE_BYTES

    @property
    def partials_bytes(self) -> int:
        return self.shape.groups * self.shape.columns * SCORE_ROW * 4

    @property
    def kept_bytes(self) -> int:
        return self.shape.num_words * 128 * self.shape.num_warps if self.is_joined else 0

    @property
    def shared_bytes(self) -> int:
        shape = self.shape
        # p, shares, what is joined, corrections, maxima and sums; sums of queries, sums of p z
        small = shape.columns * (128 + 16 + 8 + 4 + 256 + 4 * shape.groups * (1 + shape.halves))
        lists = 16 + 2 * _PAGE * _UNIT_BYTES
        return (
            self.ring_bytes
            + shape.query_bytes
            + self.partials_bytes
            + small
            + lists
            + self.kept_bytes
        )


_ARGS = "l" * 18 + "rrr"
_STORED, _SINKS, _EXACT, _NOTHING = 0, 1, 2, 3  # kinds of what fills a stage
# What the list of units says: two addresses, then flags, first key, and which keys count (from, to).
_PAGE, _UNIT_BYTES = 32, 32
# Flags: of its chain; nothing in this step writes it; the first exact one after stored ones.
_FIRST, _LAST, _STABLE, _UNDO = 4, 8, 16, 32
_ROWS_AT, _CHAIN_AT = 8, 12  # further bits: the last row of an exact piece, the chain


def _make_list(launch: AbsorbedLaunch) -> Any:
    """How one warp lists what a block reads, a page of 32 units at a time, each lane one."""
    shape, chains, split = launch.shape, launch.block_chains, launch.split
    is_cut, exact_row_bytes = shape.is_cut, 2 * shape.d_model
    stride, sink_chain, piece, num_sinks, page, unit_bytes, everything = (
        CHAINS, _SINK_CHAIN, PIECE, NUM_SINKS, _PAGE, _UNIT_BYTES, _EVERYTHING,
    )  # fmt: skip
    stored, sinks_only, exact_piece, nothing = _STORED, _SINKS, _EXACT, _NOTHING
    first_flag, last_flag, stable_flag, undo_flag, rows_at, chain_at = (
        _FIRST, _LAST, _STABLE, _UNDO, _ROWS_AT, _CHAIN_AT,
    )  # fmt: skip

    @device_function
    def units_of(chain: Any, position: Any, first: Any, has_sinks: Any) -> Any:
        """What a chain reads: (whether block 0 comes before, its first block, how many blocks, units: 1 for nothing)."""
        own = position >> 6
        last = own if is_cut else own + 1
        lead = 1 if chain == 0 and first > 0 and has_sinks == 0 else 0
        block = first + ((chain - first) & (stride - 1))
        blocks = (last - block + stride - 1) >> 3 if last > block else 0
        pieces = 0
        if position >= 0 and own & (stride - 1) == chain:
            pieces = ((position >> 4) & 3) + 1
        if is_cut:
            units = lead + blocks + pieces
            if chain == sink_chain:
                units += has_sinks
        else:
            units = lead + 4 * blocks
            if pieces > 0:
                units += pieces - 4
        return lead, block, blocks, units if units > 0 else 1

    @device_function
    def list_page(
        number: Any, units: Any, header: Any, codes: Any, code_block_bytes: Any, scales: Any,
        scale_block_bytes: Any, exact: Any, exact_bytes: Any, sinks: Any, sink_bytes: Any, sink_of: Any,
        tables: Any, exact_blocks: Any, positions: Any, row_info: Any, windows: Any, loop: Any, max_loops: Any,
        max_blocks: Any,
    ) -> None:  # fmt: skip
        """Write page `number` of the list; to `header` how many units there are, the row's position and its window."""
        lane = opaque(thread_id()) & 31
        row = quotient(opaque(block_x()), split)
        first_chain = remainder(opaque(block_x()), split) * chains
        position, num_stable = load_i32(positions + row * 4), load_i32(row_info + row * 8)
        window = load_i32(windows + row * 4)
        if window == 0:
            window = narrow(everything)
        place = row * max_loops + load_i32(row_info + row * 8 + 4) + loop
        table = tables + wide(place * max_blocks) * 4
        sink = narrow(-1)
        if is_cut and position >= 64:
            sink = load_constant_i32(sink_of + wide(load_constant_i32(table)) * 4)
        has_sinks = 1 if sink >= 0 else 0
        own = position >> 6
        first = position - window + 1
        first = first >> 6 if first > 0 else 0
        # which chain's the lane's unit is
        unit, total, chain, lead, block, blocks, count = number * page + lane, 0, 0, 0, 0, 0, 0
        for i in range(chains):
            info = units_of(first_chain + i, position, first, has_sinks)
            if number * page + lane >= total:
                unit = number * page + lane - total
                chain = i
                lead, block, blocks, count = info
            total += info[3]
        if number == 0 and lane == 0:
            store_shared_128_if(header, total, position, window, 0, 1)
        block_number, part, kind, flags = own, 0, exact_piece, 0
        if is_cut:
            full = lead + blocks
            sinks_here = has_sinks if first_chain + chain == sink_chain else 0
            if unit < full:
                block_number = 0 if unit < lead else block + stride * (unit - lead)
                kind = stored
            else:
                if unit == full and full > 0:
                    flags = undo_flag
                if unit < full + sinks_here:
                    block_number = 0
                    kind = sinks_only
                else:
                    part = unit - full - sinks_here
                    if position < 0 or own & (stride - 1) != first_chain + chain:
                        kind = nothing
        else:
            after = unit - lead
            block_number = 0 if after < 0 else block + stride * (after >> 2)
            part = 0 if after < 0 else after & 3
            if lead + blocks == 0:
                kind = nothing
        if unit < count:
            key = block_number * 64 + part * piece
            low, high, rows = 0, position + 1, piece - 1
            source, more = codes, scales
            if kind == sinks_only:
                source = sinks + wide(sink) * sink_bytes
                high = num_sinks
                rows = num_sinks - 1
            elif is_cut and kind == exact_piece:
                source = exact + wide(load_constant_i32(exact_blocks + place * 4)) * exact_bytes
            elif kind != nothing:
                entry = wide(load_constant_i32(table + wide(block_number) * 4))
                source = codes + entry * code_block_bytes
                more = scales + entry * scale_block_bytes
                if is_cut and block_number == 0 and has_sinks > 0:
                    low = num_sinks
            if kind == exact_piece:
                source += part * (piece * exact_row_bytes)
                rows = position - key if position - key < piece - 1 else piece - 1
                high = key + piece if key + piece < high else high
            flags += kind + (rows << rows_at) + (chain << chain_at)
            if unit == 0:
                flags += first_flag
            if unit == count - 1:
                flags += last_flag
            if block_number < num_stable or kind == nothing:
                flags += stable_flag
            place_of_unit = units + ((number & 1) * page + lane) * unit_bytes
            store_shared_64(place_of_unit, source)
            store_shared_64(place_of_unit + 8, more)
            store_shared_128_if(place_of_unit + 16, flags, key, low, high, 1)

    return list_page


def _make_kernel(launch: AbsorbedLaunch) -> Any:
    shape = launch.shape
    is_cut, is_joined, chains, split, halves, num_warps = (
        shape.is_cut, launch.is_joined, launch.block_chains, launch.split, shape.halves, shape.num_warps,
    )  # fmt: skip
    d, n_heads, columns = shape.d_model, shape.n_heads, shape.columns
    group_bytes, query_bytes = shape.group_bytes, shape.query_bytes
    code_bytes, half_bytes, scale_bytes = GROUP // 2, GROUP * 2, 256
    query_at = launch.ring_bytes
    partials_at = query_at + query_bytes
    weights_at = partials_at + launch.partials_bytes
    shares_at = weights_at + columns * 128
    factors_at = shares_at + columns * 16
    joined_at = factors_at + columns * 4
    header_at = joined_at + columns * 8
    units_at = header_at + 16
    sums_at = units_at + 2 * _PAGE * _UNIT_BYTES
    zeros_at = sums_at + shape.groups * columns * 4
    state_at = zeros_at + shape.groups * halves * columns * 4
    kept_at = state_at + columns * 256
    column_bytes, kept_bytes, ring_bytes = columns * 4, shape.num_words * 128, 2 * STAGE_BYTES
    stage_bytes, page, unit_bytes = STAGE_BYTES, _PAGE, _UNIT_BYTES
    group_partials, group_shift = columns * SCORE_ROW * 4, shape.halves - 1
    stored, sinks_only, nothing, num_sinks, piece = _STORED, _SINKS, _NOTHING, NUM_SINKS, PIECE
    first_flag, last_flag, stable_flag, undo_flag, rows_at, chain_at = (
        _FIRST, _LAST, _STABLE, _UNDO, _ROWS_AT, _CHAIN_AT,
    )  # fmt: skip
    list_page = _make_list(launch)
    copy_stored, copy_exact = make_copy_stored(shape), make_copy_exact(shape)
    load_query, query_sums = make_load_query(shape), make_query_sums(shape)
    scores_stored, scores_exact = make_scores_stored(shape), make_scores_exact(shape)
    values_exact, undo, correct = (
        make_values_exact(shape), make_undo(shape), make_correct(shape),
    )  # fmt: skip
    values_stored = make_values_stored(shape) if is_cut else values_exact
    softmax, zeros, load_slopes = make_softmax(shape), make_zeros(shape), make_slopes(shape)
    close, results = make_close(shape, is_joined), make_results(shape)
    fix_zeros, add_zeros = make_zero_sums(shape)
    keep, join, put = make_keep(shape), make_join(shape), make_put(shape)

    @device_function
    def sync_group(warp: Any) -> None:
        """Wait for the other warp of the group."""
        if halves == 2:
            sync_some(1 + (warp >> group_shift), 64)
        else:
            sync_warp()

    @device_function
    def fetch(stage: Any, unit: Any, warp: Any, lane: Any) -> None:
        """Start the copies of this warp's part of a unit (`unit`: its place in the list)."""
        flags = load_shared_32(unit + 16)
        kind, group, half = flags & 3, warp >> group_shift, warp & group_shift
        if is_cut and kind == stored:
            codes = load_shared_64(unit) + group * code_bytes
            copy_stored(stage, codes, load_shared_64(unit + 8) + group * scale_bytes, half, lane)
        elif kind != nothing:
            wrap = num_sinks - 1 if kind == sinks_only else piece - 1
            source = load_shared_64(unit) + group * half_bytes
            copy_exact(stage, source, (flags >> rows_at) & (piece - 1), wrap, half, lane)

    def kernel(
        queries: Any, values: Any, value_bytes: Any, scales: Any, scale_block_bytes: Any, exact: Any,
        exact_bytes: Any, sinks: Any, sink_bytes: Any, sink_of: Any, tables: Any, exact_blocks: Any,
        positions: Any, row_info: Any, windows: Any, slopes: Any, out: Any, meta: Any,
        loop: Any, max_loops: Any, max_blocks: Any,
    ) -> None:  # fmt: skip
        # What depends on the warp or the lane is computed where it is used (`opaque`): registers are for the sums.
        lane, warp, base = narrow(thread_id() & 31), narrow(thread_id() >> 5), shared_base()
        group_scores, weights = narrow(base + partials_at), narrow(base + weights_at)
        shares, factors = narrow(base + shares_at), narrow(base + factors_at)
        header, units = narrow(base + header_at), narrow(base + units_at)
        grid_dependency_launch()
        if warp == num_warps - 1:
            list_page(
                0, units, header, values, value_bytes, scales, scale_block_bytes, exact, exact_bytes, sinks,
                sink_bytes, sink_of, tables, exact_blocks, positions, row_info, windows, loop, max_loops,
                max_blocks,
            )  # fmt: skip
        sync_block()
        num_fetched = 0
        is_stable = True
        ring = narrow(base + (warp >> group_shift) * ring_bytes)
        for i in range(2):
            if i < load_shared_32(header):
                is_stable = (
                    is_stable and load_shared_32(units + i * unit_bytes + 16) & stable_flag != 0
                )
                if is_stable:
                    fetch(ring + i * stage_bytes, units + i * unit_bytes, warp, lane)
                    copy_commit()
                    num_fetched += 1
        grid_dependency_wait()
        for i in range(num_fetched, 2):
            if i < load_shared_32(header):
                fetch(ring + i * stage_bytes, units + i * unit_bytes, warp, lane)
            copy_commit()
        my_group = narrow(warp >> group_shift)
        query = narrow(base + query_at + my_group * group_bytes)
        row = quotient(block_x(), split)
        load_query(
            queries + wide(row) * query_bytes + my_group * group_bytes,
            query,
            warp & group_shift,
            lane,
        )
        sync_group(warp)
        if warp & group_shift == 0:
            query_sums(query, base + sums_at + my_group * column_bytes, lane)
        sync_group(warp)
        slope = load_slopes(slopes, warp)
        total = zeros()
        for u in range(load_shared_32(header)):
            unit = narrow(units + (u & (2 * page - 1)) * unit_bytes)
            if u & (page - 1) == 0 and u + page < load_shared_32(header) and warp == num_warps - 1:
                list_page(
                    (u >> 5) + 1, units, header, values, value_bytes, scales, scale_block_bytes, exact,
                    exact_bytes, sinks, sink_bytes, sink_of, tables, exact_blocks, positions, row_info, windows,
                    loop, max_loops, max_blocks,
                )  # fmt: skip
            flags = load_shared_32(unit + 16)
            if flags & first_flag != 0:
                total = zeros()
            here = opaque(warp)
            group, half = narrow(here >> group_shift), narrow(here & group_shift)
            stage = narrow(base + group * ring_bytes + (u & 1) * stage_bytes)
            if flags & 3 != nothing:
                copy_wait_but_one()
                sync_group(here)
                query = narrow(base + query_at + group * group_bytes)
                my_scores = narrow(group_scores + group * group_partials)
                if is_cut and flags & 3 == stored:
                    sums = narrow(base + sums_at + group * column_bytes)
                    scores_stored(stage, query, sums, my_scores, half, opaque(lane))
                elif half == 0:
                    scores_exact(stage, query, my_scores, opaque(lane))
                sync_block()
                if warp < columns:
                    _, key, low, high = load_shared_128(unit + 16)
                    _, position, window, _ = load_shared_128(header)
                    softmax(
                        base + state_at, flags & first_flag, group_scores, weights, factors, slope, key, low,
                        high, position, window, opaque(warp), opaque(lane),
                    )  # fmt: skip
                sync_block()
                if flags & first_flag == 0:
                    total = correct(total, factors, opaque(lane))
                here = opaque(warp)
                stage = narrow(base + (here >> group_shift) * ring_bytes + (u & 1) * stage_bytes)
                zero_sums = narrow(base + zeros_at + here * column_bytes)
                if is_cut and flags & 3 == stored:
                    add_zeros(
                        zero_sums, stage, weights, factors, flags & first_flag, here & group_shift,
                        opaque(lane),
                    )  # fmt: skip
                    total = values_stored(total, stage, weights, here & group_shift, opaque(lane))
                else:
                    if is_cut:
                        fix_zeros(zero_sums, factors, flags & first_flag, opaque(lane))
                    if flags & undo_flag != 0:
                        total = undo(total)
                    total = values_exact(total, stage, weights, here & group_shift, opaque(lane))
                sync_group(here)
            elif is_cut:
                zero_sums = narrow(base + zeros_at + here * column_bytes)
                fix_zeros(zero_sums, factors, 1, opaque(lane))
            if u + 2 < load_shared_32(header):
                fetch(
                    stage,
                    units + ((u + 2) & (2 * page - 1)) * unit_bytes,
                    opaque(warp),
                    opaque(lane),
                )
            copy_commit()
            if flags & last_flag != 0:
                here, at = opaque(warp), opaque(lane)
                group, half = narrow(here >> group_shift), narrow(here & group_shift)
                chain = narrow(flags >> chain_at)
                is_last = chain == chains - 1
                block = opaque(block_x())
                slot = block if is_joined else block * chains + chain
                sync_block()
                if warp < columns:
                    close(
                        base + state_at, flags & 3 == nothing, base + joined_at, chain == 0, shares,
                        meta + wide(slot) * (n_heads * 8), is_last or not is_joined, here, at,
                    )  # fmt: skip
                sync_block()
                zero_sums = base + zeros_at + group * (halves * column_bytes)
                is_undone = not is_cut or flags & 3 != stored
                words = results(total, shares, zero_sums, is_undone, at)
                kept = narrow(base + kept_at + here * kept_bytes)
                if is_joined and chain > 0:
                    words = join(words, kept, shares, at)
                if is_joined and not is_last:
                    keep(words, kept, at)
                else:
                    put(words, out + wide(slot) * (n_heads * d * 2), group, half, at)

    return kernel


def attention(name: str, launch: AbsorbedLaunch) -> Variant:
    """Attention of generated tokens over cached inputs: grid (rows * split, 1).

    Kernel arguments: queries fp16 (rows, query_bytes / 2) in the order of `query_place`, already scaled; the stored
    values (num_blocks, layers, 1, 64, stored_dim) with the layer's offset, bytes of a block; scales (num_blocks, layers, 1, 1,
    2 groups, 64) likewise, bytes of a block; exact copies (num_copies, layers, 1, 64, d) likewise, bytes of a copy; sinks (num_sinks,
    layers, 1, NUM_SINKS, d) likewise, bytes; sink_of int32 (num_blocks,); tables int32 (rows, max_loops, max_blocks); exact_blocks
    int32 (rows, max_loops): copies of the rows' own blocks; positions int32 (rows,), -1: no row (its averages are 0); row_info int32
    (rows, 2): how many leading blocks nothing in this step writes, and the row's loop before this step; windows int32 (rows,), 0: all;
    slopes float32 (heads,) times log2(e); out fp16 (rows, slots, heads, d) and meta float32 (rows, slots, heads, 2), written: averages
    with their (maximum, sum); loop, max_loops, max_blocks. With kind fp16 there are no scales, copies or sinks.
    """
    return Variant(
        name=f"{name}_{launch.shape.kind}_x{launch.split}",
        function=_make_kernel(launch),
        args=_ARGS,
        num_threads=32 * launch.shape.num_warps,
        shared_bytes=launch.shared_bytes,
        constants=(launch,),
    )


def variants() -> dict[str, Variant]:
    """The kernels of the 1B reference model with learned positions, for a check of the compiler's work."""
    # these need the shapes above
    from kernels.absorbed_products import ProductLaunch, query, values

    found: dict[str, Variant] = {}
    target = ProductShape(1536, 1536, 4)
    for kind in ("int4", "fp16"):
        shape = AbsorbedShape(1536, 12, 12, 128, kind)
        for split in (8, 2):
            attend = AbsorbedLaunch(shape, split)
            launch = ProductLaunch(shape, 8 if split == 2 else 1)
            for variant in (
                attention("absorbed", attend),
                query("absorbed_query", launch),
                values("absorbed_values", launch, attend, target),
            ):
                found[variant.name] = variant
    return found
