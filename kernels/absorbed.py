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
    make_close,
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
    make_start,
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
    block_x,
    copy_commit,
    copy_wait_but_one,
    grid_dependency_launch,
    grid_dependency_wait,
    load_constant_i32,
    load_i32,
    load_shared_128,
    quotient,
    remainder,
    shared_base,
    store_shared_128_if,
    sync_block,
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
        return -(-self.columns // self.groups)

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
    def ring_bytes(self) -> int:
        return self.shape.groups * 2 * STAGE_BYTES

    @property
    def partials_bytes(self) -> int:
        return self.shape.groups * self.shape.columns * SCORE_ROW * 4

    @property
    def kept_bytes(self) -> int:
        return self.shape.num_words * 128 * self.shape.groups if self.is_joined else 0

    @property
    def shared_bytes(self) -> int:
        # p, shares, what is joined, corrections; sums of queries; what the chains read
        small = CHAINS * 16 + self.shape.columns * (128 + 16 + 8 + 4 + 4 * self.shape.groups)
        return (
            self.ring_bytes + self.shape.query_bytes + self.partials_bytes + small + self.kept_bytes
        )


_ARGS = "l" * 18 + "rrr"
_STORED, _SINKS, _EXACT = 0, 1, 2  # kinds of what fills a stage


def _make_kernel(launch: AbsorbedLaunch) -> Any:
    shape = launch.shape
    is_cut, is_joined, chains, split = (
        shape.is_cut, launch.is_joined, launch.block_chains, launch.split,
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
    infos_at = joined_at + shape.columns * 8
    sums_at = infos_at + chains * 16
    kept_at = sums_at + shape.groups * shape.columns * 4
    sum_bytes, kept_bytes = shape.columns * 4, shape.num_words * 128
    stage_bytes, piece, num_sinks, everything = STAGE_BYTES, PIECE, NUM_SINKS, _EVERYTHING
    group_partials = shape.columns * SCORE_ROW * 4
    stride, sink_chain, stored, sinks_only, exact_piece = (
        CHAINS, _SINK_CHAIN, _STORED, _SINKS, _EXACT,
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
    def units_of(chain: Any, position: Any, first: Any, has_sinks: Any) -> Any:
        """What a chain reads: (whether block 0 comes before, its first block, how many blocks, stages to fill)."""
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
        return narrow(lead), narrow(block), narrow(blocks), narrow(units)

    @device_function
    def unit_at(chain: Any, unit: Any, infos: Any, own: Any, has_sinks: Any) -> Any:
        """(block number, piece of 16 positions, kind) of a chain's unit; `infos` has what `units_of` gave."""
        lead, block, blocks, _ = load_shared_128(infos + (chain & (chains - 1)) * 16)
        number, part, kind = own, 0, exact_piece
        if is_cut:
            full = lead + blocks
            sinks_here = has_sinks if chain == sink_chain else 0
            if unit < full:
                number = 0 if unit < lead else block + stride * (unit - lead)
                kind = stored
            elif unit < full + sinks_here:
                number = 0
                kind = sinks_only
            else:
                part = unit - full - sinks_here
        else:
            after = unit - lead
            number = 0 if after < 0 else block + stride * (after >> 2)
            part = 0 if after < 0 else after & 3
        return narrow(number), narrow(part), narrow(kind)

    @device_function
    def num_units(chain: Any, infos: Any) -> Any:
        return load_shared_128(infos + (chain & (chains - 1)) * 16)[3]

    @device_function
    def following(chain: Any, unit: Any, end: Any, infos: Any) -> Any:
        """The next (chain, unit) that there is, from this one on, up to chain `end`."""
        while chain < end and unit >= num_units(chain, infos):
            chain = narrow(chain + 1)
            unit = narrow(0)
        return chain, unit

    @device_function
    def fetch(
        stage: Any, number: Any, part: Any, kind: Any, codes: Any, code_block_bytes: Any, scales: Any,
        scale_block_bytes: Any, exact: Any, exact_bytes: Any, copy: Any, sinks: Any, sink_bytes: Any,
        sink: Any, table: Any, position: Any, warp: Any, lane: Any,
    ) -> None:  # fmt: skip
        """Start the copies of this warp's group of a unit."""
        if is_cut and kind == stored:
            entry = wide(load_constant_i32(table + number * 4))
            copy_stored(
                stage, codes + entry * code_block_bytes + warp * code_bytes,
                scales + entry * scale_block_bytes + warp * scale_bytes, row_bytes, lane,
            )  # fmt: skip
        elif is_cut and kind == sinks_only:
            source = sinks + wide(sink) * sink_bytes + warp * half_bytes
            copy_exact(stage, source, num_sinks - 1, num_sinks - 1, exact_row_bytes, lane)
        else:
            if is_cut:
                source = exact + wide(copy) * exact_bytes
            else:
                source = codes + wide(load_constant_i32(table + number * 4)) * code_block_bytes
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
        ring = narrow(base + warp * (2 * stage_bytes))
        query = narrow(base + query_at + warp * group_bytes)
        group_scores, weights = narrow(base + partials_at), narrow(base + weights_at)
        infos = narrow(base + infos_at)
        shares, factors = narrow(base + shares_at), narrow(base + factors_at)
        grid_dependency_launch()
        position = load_i32(positions + row * 4)
        num_stable = load_i32(row_info + row * 8)
        depth = load_i32(row_info + row * 8 + 4) + loop
        window = load_i32(windows + row * 4)
        if window == 0:
            window = narrow(everything)
        own = narrow(position >> 6)
        first = position - window + 1
        first = narrow(first >> 6 if first > 0 else 0)
        place = narrow(row * max_loops + depth)
        table = tables + wide(place * max_blocks) * 4
        has_sinks, sink, copy = narrow(0), narrow(0), narrow(0)
        if is_cut:
            copy = load_i32(exact_blocks + place * 4)
            if position >= 64:
                sink = load_constant_i32(sink_of + wide(load_constant_i32(table)) * 4)
                if sink >= 0:
                    has_sinks = narrow(1)
        chain = narrow(part_of_row * chains)
        end = narrow(chain + chains)
        unit = narrow(0)
        if thread < chains:
            info = units_of(chain + thread, position, first, has_sinks)
            store_shared_128_if(infos + thread * 16, info[0], info[1], info[2], info[3], 1)
        sync_block()
        num_fetched = 0
        is_stable = True
        for i in range(2):
            chain, unit = following(chain, unit, end, infos)
            number, part, kind = unit_at(chain, unit, infos, own, has_sinks)
            is_stable = is_stable and chain < end and number < num_stable
            if is_stable:
                fetch(
                    ring + i * stage_bytes, number, part, kind, values, value_bytes, scales,
                    scale_block_bytes, exact, exact_bytes, copy, sinks, sink_bytes, sink, table, position,
                    warp, lane,
                )  # fmt: skip
                copy_commit()
                unit = narrow(unit + 1)
                num_fetched += 1
        grid_dependency_wait()
        for i in range(num_fetched, 2):
            chain, unit = following(chain, unit, end, infos)
            if chain < end:
                number, part, kind = unit_at(chain, unit, infos, own, has_sinks)
                fetch(
                    ring + i * stage_bytes, number, part, kind, values, value_bytes, scales,
                    scale_block_bytes, exact, exact_bytes, copy, sinks, sink_bytes, sink, table, position,
                    warp, lane,
                )  # fmt: skip
            copy_commit()
            unit = narrow(unit + 1)
        load_query(queries + wide(row) * query_bytes + warp * group_bytes, query, lane)
        sync_warp()
        sums = narrow(base + sums_at + warp * sum_bytes)
        query_sums(query, sums, lane)
        sync_warp()
        slope = load_slopes(slopes, warp)
        used = narrow(0)
        for s in range(narrow(chains)):
            here = narrow(part_of_row * chains + s)
            state, total = start(), zeros()
            is_undone = not is_cut
            for u in range(num_units(here, infos)):
                number, part, kind = unit_at(here, u, infos, own, has_sinks)
                stage = ring + (used & 1) * stage_bytes
                copy_wait_but_one()
                sync_warp()
                if is_cut and kind == stored:
                    scores_stored(stage, query, sums, group_scores + warp * group_partials, lane)
                else:
                    scores_exact(stage, query, group_scores + warp * group_partials, lane)
                sync_block()
                key = narrow(number * 64 + part * piece)
                low, high = narrow(0), narrow(position + 1)
                if kind == stored:
                    if number == 0 and has_sinks > 0:
                        low = narrow(num_sinks)
                elif kind == sinks_only:
                    high = narrow(num_sinks)
                elif key + piece < high:
                    high = narrow(key + piece)
                state = softmax(
                    state, group_scores, weights, factors, slope, key, low, high, position, window,
                    warp, lane,
                )  # fmt: skip
                sync_block()
                if u > 0:
                    total = correct(total, factors, lane)
                if is_cut and kind == stored:
                    total = values_stored(total, stage, weights, lane)
                else:
                    if not is_undone:
                        total = undo(total)
                        is_undone = True
                    total = values_exact(total, stage, weights, lane)
                sync_warp()
                chain, unit = following(chain, unit, end, infos)
                if chain < end:
                    number, part, kind = unit_at(chain, unit, infos, own, has_sinks)
                    fetch(
                        stage, number, part, kind, values, value_bytes, scales, scale_block_bytes, exact,
                        exact_bytes, copy, sinks, sink_bytes, sink,
                        tables + wide((row * max_loops + depth) * max_blocks) * 4, position, warp, lane,
                    )  # fmt: skip
                copy_commit()
                unit = narrow(unit + 1)
                used = narrow(used + 1)
            is_last = s == chains - 1
            slot = row * slots + (part_of_row if is_joined else here)
            sync_block()
            close(
                state, base + joined_at, s == 0, shares, meta + wide(slot) * (n_heads * 8),
                is_last or not is_joined, warp, lane,
            )  # fmt: skip
            sync_block()
            words = results(total, shares, is_undone, lane)
            if is_joined and s > 0:
                words = join(words, base + kept_at + warp * kept_bytes, shares, lane)
            if is_joined and not is_last:
                keep(words, base + kept_at + warp * kept_bytes, lane)
            else:
                put(words, out + wide(slot) * (n_heads * d * 2), warp, lane)

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
        num_threads=32 * launch.shape.groups,
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
