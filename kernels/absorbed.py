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

What should bound it (`docs/kernels.md` says what was measured), 64 rows of 1024 positions, 2 blocks a row, each 8 stored blocks
(12 heads on 16 columns, d 1536):
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
    copy_exact,
    copy_stored,
    make_add_scores,
    make_close,
    make_correct,
    make_gather,
    make_integer_query,
    make_is_corrected,
    make_join,
    make_load_query,
    make_no_scores,
    make_put,
    make_put_scores,
    make_read_query,
    make_results,
    make_scores_exact,
    make_slopes,
    make_softmax,
    make_start,
    make_tell_tops,
    make_undo,
    make_values_exact,
    make_values_stored,
    make_zeros,
    narrow,
)
from kernels.compiler import Variant
from kernels.device_code import device_function
from kernels.fragments import ProductShape
from kernels.intrinsics import (
    anew,
    block_x,
    copy_commit,
    fence_async_shared,
    grid_dependency_launch,
    grid_dependency_wait,
    load_constant_i32,
    load_i32,
    make_copy_wait,
    quotient,
    remainder,
    shared_base,
    shuffle_from,
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
SHARED_LIMIT = 227 * 1024


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
        """Groups of values; each has a warp that copies it and adds its values."""
        return self.d_model // GROUP

    @property
    def warpgroups(self) -> int:
        return -(-self.groups // 4)

    @property
    def num_warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def shared_groups(self) -> int:
        """Groups whose scores of stored positions one warpgroup makes."""
        return -(-self.groups // self.warpgroups)

    @property
    def matrix_bytes(self) -> int:
        """Of 64 bytes of queries, in integers of two bytes."""
        return 2 * self.columns * 64

    @property
    def exact_row(self) -> int:
        """Floats from head to head of a group's scores of 16 exact positions."""
        return PIECE if self.is_cut else PIECE + 4

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
        """Floats of a lane's sums: 8 tiles of 16 values x column tiles x 4, and of the zeros x column tiles x 2."""
        return self.tiles * (32 + 2 * self.is_cut)

    @property
    def num_words(self) -> int:
        """Words of a lane's averages."""
        return 2 * self.columns

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
    def matrices_bytes(self) -> int:
        """The queries as integers."""
        return self.shape.groups * 2 * self.shape.matrix_bytes * self.shape.is_cut

    @property
    def partials_bytes(self) -> int:
        """Shares of a step's scores: of warpgroups or (of exact positions) of groups."""
        shape = self.shape
        stored = shape.warpgroups * SCORE_ROW * shape.is_cut
        return max(stored, shape.groups * shape.exact_row) * shape.columns * 4

    @property
    def rest_bytes(self) -> int:
        """A group's part of the queries, as halves, that registers do not hold."""
        return GROUP * 2 * max(0, self.shape.columns - 8)

    @property
    def head_bytes(self) -> int:
        """Of two steps each: shares of scores, p, corrections, what ends a chain; of queries: what is not in registers, their sums, units, tops."""
        shape = self.shape
        steps = 2 * (self.partials_bytes + shape.columns * (128 + 4 + 16))
        tables = (shape.groups + 1) * 8 * shape.tiles * 4 + shape.groups * shape.columns * 4
        return steps + shape.groups * self.rest_bytes + tables

    @property
    def stages(self) -> int:
        """Stages of a warp: two are in use at a time, the third is being filled where it has room."""
        stage = self.shape.groups * STAGE_BYTES
        other = self.matrices_bytes + self.head_bytes
        return 3 if 3 * stage + other <= SHARED_LIMIT else 2

    @property
    def ring_bytes(self) -> int:
        return self.shape.groups * self.stages * STAGE_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.matrices_bytes + self.ring_bytes + self.head_bytes


_ARGS = "l" * 18 + "rrr"
# What fills a stage, packed into a word: its kind, whether it is its chain's first or last, its stage, the piece of 16 positions (of
# exact blocks), the chain (from the block's first), the block's number.
_STORED, _SINKS, _EXACT, _EMPTY, _KIND = 0, 1, 2, 3, 3
_FIRST, _LAST, _STAGE, _PIECE, _CHAIN, _NUMBER = 4, 8, 4, 6, 8, 11


def _make_kernel(launch: AbsorbedLaunch) -> Any:
    shape = launch.shape
    is_cut, is_joined, chains, split, stages = (
        shape.is_cut, launch.is_joined, launch.block_chains, launch.split, launch.stages,
    )  # fmt: skip
    d, n_heads, slots, row_bytes = shape.d_model, shape.n_heads, launch.slots, shape.row_bytes
    exact_row_bytes, group_bytes, query_bytes = 2 * d, shape.group_bytes, shape.query_bytes
    code_bytes, half_bytes, scale_bytes = GROUP // 2, GROUP * 2, 256
    num_groups, shared_groups, tiles = shape.groups, shape.shared_groups, shape.tiles
    is_even = shape.groups == shape.num_warps
    ring_at = launch.matrices_bytes
    partials_at, partials_bytes = ring_at + launch.ring_bytes, launch.partials_bytes
    weights_at, weights_bytes = partials_at + 2 * partials_bytes, shape.columns * 128
    factors_at, factors_bytes = weights_at + 2 * weights_bytes, shape.columns * 4
    shares_at, shares_bytes = factors_at + 2 * factors_bytes, shape.columns * 16
    rest_at, rest_bytes = shares_at + 2 * shares_bytes, launch.rest_bytes
    units_at, table_bytes = rest_at + shape.groups * rest_bytes, 32 * tiles
    query_sums_at = units_at + table_bytes
    tops_at, tops_bytes = query_sums_at + shape.groups * table_bytes, shape.columns * 4
    stage_bytes, piece, num_sinks, matrices_bytes = (
        STAGE_BYTES, PIECE, NUM_SINKS, 2 * shape.matrix_bytes,
    )  # fmt: skip
    stored_partials, exact_partials = (
        shape.columns * SCORE_ROW * 4, shape.columns * shape.exact_row * 4,
    )  # fmt: skip
    stride, sink_chain, everything = CHAINS, _SINK_CHAIN, _EVERYTHING
    stored, sinks_only, exact_piece, empty, kind_mask = _STORED, _SINKS, _EXACT, _EMPTY, _KIND
    first_bit, last_bit = _FIRST, _LAST
    stage_shift, piece_shift, chain_shift, number_shift = _STAGE, _PIECE, _CHAIN, _NUMBER
    load_query, read_query, tell_tops, integer_query = (
        make_load_query(shape), make_read_query(shape), make_tell_tops(shape), make_integer_query(shape),
    )  # fmt: skip
    no_scores, put_scores, scores_exact = (
        make_no_scores(shape), make_put_scores(shape), make_scores_exact(shape),
    )  # fmt: skip
    add_scores = make_add_scores(shape) if is_cut else None
    gather_stored, gather_exact = make_gather(shape, True), make_gather(shape, False)
    values_exact, undo, correct, is_corrected = (
        make_values_exact(shape), make_undo(shape), make_correct(shape), make_is_corrected(shape),
    )  # fmt: skip
    values_stored = make_values_stored(shape) if is_cut else None
    start, softmax, zeros = make_start(shape), make_softmax(shape), make_zeros(shape)
    load_slopes, close = make_slopes(shape), make_close(shape, is_joined)
    results, join, put = make_results(shape), make_join(shape), make_put(shape)
    wait_first, wait_next = make_copy_wait(stages - 1), make_copy_wait(stages - 2)

    @device_function
    def parts_of(chain: Any, lead: Any, first: Any, position: Any) -> Any:
        """What a chain reads: (block 0 before all others, its blocks that the window leaves, their first, the sinks, pieces of the own block)."""
        own = position >> 6
        last = own if is_cut else own + 1
        leads = lead if chain == 0 else 0
        block = first + ((chain - first) & (stride - 1))
        blocks = (last - block + stride - 1) >> 3 if last > block else 0
        sinks_here = 1 if is_cut and chain == sink_chain and own > 0 else 0
        pieces = ((position >> 4) & 3) + 1 if position >= 0 and own & (stride - 1) == chain else 0
        return leads, blocks, block, sinks_here, pieces

    @device_function
    def units_of(chain: Any, lead: Any, first: Any, position: Any) -> Any:
        """How many stages a chain fills; one that reads nothing has an empty one."""
        leads, blocks, _, sinks_here, pieces = parts_of(chain, lead, first, position)
        if is_cut:
            units = leads + blocks + sinks_here + pieces
        else:
            units = leads + 4 * blocks
            if pieces > 0:
                units += pieces - 4
        return narrow(units if units > 0 else 1)

    @device_function
    def unit_at(
        chain: Any, unit: Any, units: Any, lead: Any, first: Any, position: Any, sink: Any
    ) -> Any:
        """A chain's unit as a packed word, without its stage."""
        leads, blocks, block, sinks_here, pieces = parts_of(chain, lead, first, position)
        number, part, kind = position >> 6, 0, exact_piece
        if leads + blocks + sinks_here + pieces == 0:
            number, kind = 0, empty
        elif is_cut:
            full = leads + blocks
            if unit < full:
                number = 0 if unit < leads else block + stride * (unit - leads)
                kind = stored
            elif unit < full + sinks_here:
                number = 0
                kind = sinks_only if sink >= 0 else empty
            else:
                part = unit - full - sinks_here
        else:
            after = unit - leads
            number = 0 if after < 0 else block + stride * (after >> 2)
            part = 0 if after < 0 else after & 3
        word = (number << number_shift) | (part << piece_shift) | kind
        word |= (chain & (chains - 1)) << chain_shift
        if unit == 0:
            word |= first_bit
        if unit + 1 == units:
            word |= last_bit
        return narrow(word)

    @device_function
    def list_units(
        number: Any, first_chain: Any, position: Any, window: Any, sink: Any, table: Any
    ) -> Any:
        """The word and the cache block of the thread block's unit `number`, a lane its own; -1 after the last."""
        first = position - window + 1
        first = narrow(first >> 6 if first > 0 else 0)
        # the window has left sinks behind that are in block 0 alone
        lead = narrow(1 if first > 0 and sink < 0 else 0)
        chain, left, units = narrow(0), narrow(number), narrow(0)
        is_found = False
        for i in range(narrow(chains)):
            if not is_found:
                chain = narrow(i)
                units = units_of(first_chain + i, lead, first, position)
                if left < units:
                    is_found = True
                else:
                    left = narrow(left - units)
        word, entry = narrow(-1), narrow(0)
        if is_found:
            word = unit_at(first_chain + chain, left, units, lead, first, position, sink)
            if word & kind_mask == stored or (not is_cut and word & kind_mask == exact_piece):
                entry = load_constant_i32(table + wide(word >> number_shift) * 4)
        return word, entry

    @device_function
    def fetch(
        stage: Any, word: Any, entry: Any, codes: Any, code_block_bytes: Any, scales: Any,
        scale_block_bytes: Any, exact: Any, exact_bytes: Any, copy_at: Any, sinks: Any, sink_bytes: Any,
        sink: Any, position: Any, warp: Any, lane: Any,
    ) -> None:  # fmt: skip
        """Start the copies of this warp's group of a unit."""
        kind = word & kind_mask
        if is_cut and kind == stored:
            copy_stored(
                stage, codes + wide(entry) * code_block_bytes + warp * code_bytes,
                scales + wide(entry) * scale_block_bytes + warp * scale_bytes, row_bytes, lane,
            )  # fmt: skip
        elif is_cut and kind == sinks_only:
            source = sinks + wide(sink) * sink_bytes + warp * half_bytes
            copy_exact(stage, source, num_sinks - 1, num_sinks - 1, exact_row_bytes, lane)
        elif kind == exact_piece:
            number, part = word >> number_shift, (word >> piece_shift) & 3
            if is_cut:
                source = exact + wide(load_i32(copy_at)) * exact_bytes
            else:
                source = codes + wide(entry) * code_block_bytes
            last = position - number * 64 - part * piece
            last = narrow(last if last < piece - 1 else piece - 1)
            source += part * (piece * exact_row_bytes) + warp * half_bytes
            copy_exact(stage, source, last, piece - 1, exact_row_bytes, lane)

    def kernel(
        queries: Any, values: Any, value_bytes: Any, scales: Any, scale_block_bytes: Any, exact: Any,
        exact_bytes: Any, sinks: Any, sink_bytes: Any, sink_of: Any, tables: Any, exact_blocks: Any,
        positions: Any, row_info: Any, windows: Any, slopes: Any, out: Any, meta: Any,
        loop: Any, max_loops: Any, max_blocks: Any,
    ) -> None:  # fmt: skip
        thread = thread_id()
        lane, warp = narrow(thread & 31), narrow(thread >> 5)
        base = shared_base()
        row, part_of_row = quotient(block_x(), split), remainder(block_x(), split)
        ring = narrow(base + ring_at + warp * (stages * stage_bytes))
        is_owner = is_even or warp < num_groups
        grid_dependency_launch()
        position = load_i32(positions + row * 4)
        num_stable = load_i32(row_info + row * 8)
        depth = load_i32(row_info + row * 8 + 4) + loop
        window = load_i32(windows + row * 4)
        if window == 0:
            window = narrow(everything)
        place = narrow(row * max_loops + depth)
        table = tables + wide(place * max_blocks) * 4
        first_chain = narrow(part_of_row * chains)
        sink = narrow(-1)
        if is_cut and position >= 64 and (part_of_row == 0 or part_of_row == split - 1):
            sink = load_constant_i32(sink_of + wide(load_constant_i32(table)) * 4)
        # 32 units, a lane one; the next to be fetched
        listed, entries = list_units(lane, first_chain, position, window, sink, table)
        fetched = narrow(stages)
        # two units that wait for their steps, after the one whose steps are next
        scored, ahead, ahead_2 = narrow(-1), narrow(-1), narrow(-1)
        is_waiting = True
        for i in range(narrow(stages)):
            word, entry = shuffle_from(listed, i), shuffle_from(entries, i)
            if is_waiting and (word < 0 or word >> number_shift >= num_stable):
                grid_dependency_wait()
                is_waiting = False
            if word >= 0:
                if is_owner:
                    fetch(
                        narrow(ring + i * stage_bytes), word, entry, values, value_bytes, scales, scale_block_bytes,
                        exact, exact_bytes, exact_blocks + place * 4, sinks, sink_bytes, sink, position, warp, lane,
                    )  # fmt: skip
                word = narrow(word | (i << stage_shift))
            if i == 0:
                scored = word
            elif i == 1:
                ahead = word
            else:
                ahead_2 = word
            copy_commit()
        if is_waiting:
            grid_dependency_wait()
        group = narrow(warp if warp < num_groups else num_groups - 1)
        rest = narrow(base + rest_at + group * rest_bytes)
        own_query = queries + wide(row) * query_bytes + group * group_bytes
        units = narrow(base + units_at)
        if is_cut:
            words = read_query(own_query, lane)
            tell_tops(words, base + tops_at + group * tops_bytes, lane)
            sync_block()
            integer_query(
                words, base + tops_at, base + group * matrices_bytes,
                base + query_sums_at + group * table_bytes, units, lane,
            )  # fmt: skip
            fence_async_shared()
            sync_block()
        else:
            query = load_query(own_query, rest, lane)
            sync_warp()
        slope = load_slopes(slopes, warp)
        state, joined, total = start(), start(), zeros()
        is_undone = not is_cut
        # three steps at a time are under way: of one the values are added, of the next the softmax is done, of the third the scores are made
        added, weighed = narrow(-1), narrow(-1)
        odd = narrow(0)
        while scored >= 0 or weighed >= 0 or added >= 0:
            lane = anew(lane)
            partials = narrow(base + partials_at + odd * partials_bytes)
            weights = narrow(base + weights_at + odd * weights_bytes)
            factors = narrow(base + factors_at + odd * factors_bytes)
            if added >= 0 and is_owner:
                kind = added & kind_mask
                filled = narrow(ring + ((added >> stage_shift) & 3) * stage_bytes)
                if kind != empty:
                    if added & first_bit == 0 and is_corrected(factors, lane) != 0:
                        total = correct(total, factors, lane)
                    if is_cut and kind == stored:
                        total = values_stored(total, filled, weights, lane)
                    else:
                        if not is_undone:
                            total = undo(total)
                            is_undone = True
                        total = values_exact(total, filled, weights, lane)
                sync_warp()
            if added >= 0:
                word, entry = shuffle_from(listed, fetched), shuffle_from(entries, fetched)
                if word >= 0:
                    if is_owner:
                        fetch(
                            narrow(ring + ((added >> stage_shift) & 3) * stage_bytes), word, entry, values,
                            value_bytes, scales, scale_block_bytes, exact, exact_bytes, exact_blocks + place * 4,
                            sinks, sink_bytes, sink, position, warp, lane,
                        )  # fmt: skip
                    word = narrow(word | (added & (3 << stage_shift)))
                    if ahead < 0:
                        ahead = word
                    else:
                        ahead_2 = word
                    fetched = narrow(fetched + 1)
                    if fetched & 31 == 0:
                        listed, entries = list_units(
                            narrow(fetched + lane), first_chain, position, window, sink,
                            tables + wide(place * max_blocks) * 4,
                        )  # fmt: skip
                copy_commit()
                if added & last_bit > 0:
                    if is_owner:
                        s = (added >> chain_shift) & (stride - 1)
                        shares = narrow(base + shares_at + odd * shares_bytes)
                        if not is_undone:
                            total = undo(total)
                        words = results(total, shares, lane)
                        slot = row * slots + (part_of_row if is_joined else first_chain + s)
                        target = out + wide(slot) * (n_heads * d * 2)
                        if is_joined and s > 0:
                            words = join(words, target, shares, warp, lane)
                        put(words, target, warp, lane)
                    total = zeros()
                    is_undone = not is_cut
            if scored >= 0:
                if added < 0 and weighed < 0:
                    wait_first()
                else:
                    wait_next()
                filled = narrow(((scored >> stage_shift) & 3) * stage_bytes)
                if is_cut and scored & kind_mask == stored:
                    warpgroup = warp >> 2
                    sync_some(1 + warpgroup, 128)
                    rows_from = narrow((warp & 3) * 16)
                    found = no_scores()
                    for i in range(narrow(shared_groups)):
                        at = narrow(warpgroup * shared_groups + i)
                        if is_even or at < num_groups:
                            found = add_scores(
                                found, base + ring_at + at * (stages * stage_bytes) + filled,
                                base + at * matrices_bytes, base + query_sums_at + at * table_bytes,
                                rows_from, lane,
                            )  # fmt: skip
                    put_scores(
                        found, units, partials + warpgroup * stored_partials, rows_from, lane
                    )
                elif scored & kind_mask != empty:
                    sync_warp()
                    if is_owner:
                        if is_cut:
                            query = load_query(own_query, rest, lane)
                            sync_warp()
                        scores_exact(
                            narrow(ring + filled),
                            query,
                            rest,
                            partials + warp * exact_partials,
                            lane,
                        )
            if weighed >= 0:
                odd_2 = odd ^ 1
                number, kind = narrow(weighed >> number_shift), weighed & kind_mask
                key = narrow(number * 64)
                low, high = narrow(0), narrow(position + 1)
                if kind == stored:
                    if number == 0 and sink >= 0:
                        low = narrow(num_sinks)
                elif kind == exact_piece:
                    key = narrow(key + ((weighed >> piece_shift) & 3) * piece)
                    if key + piece < high:
                        high = narrow(key + piece)
                else:
                    high = narrow(num_sinks if kind == sinks_only else 0)
                if is_cut and kind == stored:
                    shown = gather_stored(base + partials_at + odd_2 * partials_bytes, warp, lane)
                else:
                    shown = gather_exact(base + partials_at + odd_2 * partials_bytes, warp, lane)
                state = softmax(
                    state, weighed & first_bit, shown, base + weights_at + odd_2 * weights_bytes,
                    base + factors_at + odd_2 * factors_bytes, slope, key, low, high, position, window, warp, lane,
                )  # fmt: skip
                if weighed & last_bit > 0:
                    s = narrow((weighed >> chain_shift) & (stride - 1))
                    slot = row * slots + (part_of_row if is_joined else first_chain + s)
                    joined = close(
                        state, joined, s == 0, base + shares_at + odd_2 * shares_bytes,
                        meta + wide(slot) * (n_heads * 8), s == chains - 1 or not is_joined, warp, lane,
                    )  # fmt: skip
            sync_block()
            added = weighed
            weighed = scored
            scored = ahead
            ahead = ahead_2
            ahead_2 = narrow(-1)
            odd = narrow(odd ^ 1)

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
