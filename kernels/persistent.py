"""All loops and layers of a decode step of 1 to 8 rows, and its head, in one kernel; the bits are those of `linear.py` and
`attention.py`, whose finishing functions it shares.

One block on every multiprocessor. Four warps (a group) share a producer warp that walks the block's fixed list of weight
pieces and cache blocks, of all phases and layers, and keeps every warp's own ring of `slots` pieces filled by bulk copies; so the
memory goes on while the block waits for others. Only so much is in flight as keeps the memory busy (`in_flight` pieces a
warp): what is needed now would wait behind the rest.

Phases of a layer: qkv | attention | o | gate_up | down. Nothing waits for a whole phase: every number that crosses blocks is
polled by who needs it (`polling.py`), in memory of the layer call's own, which holds NOTHING before the step. Nothing that this
kernel writes is read by a bulk copy: keys and values of the step itself are put over the prefetched image of a cache block.

A block owns whole tiles of 16 outputs, with all of K: one warp a chain, added in order through shared
memory. Attention spreads the (stream, row, unit) items over all blocks; four warps share a block of the cache: 16
positions' scores each, then all 64 weights each, then a quarter of the dims. Idle groups merge the streams of a (row, unit).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.attention import AttentionShape
from kernels.attention_blocks import NO_WINDOW
from kernels.attention_parts import make_softmax, start
from kernels.attention_shapes import STREAMS
from kernels.compiler import Variant
from kernels.device_code import device_function
from kernels.fragments import ProductShape, packed_size
from kernels.intrinsics import (
    any_lane,
    bits_of,
    block_x,
    grid_dependency_wait,
    grid_x,
    load_constant_i32,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    quotient,
    remainder,
    shared_base,
    shuffle_from,
    store_64,
    sync_block,
    sync_some,
    sync_warp,
    thread_id,
    wide,
)
from kernels.linear import HeadShape
from kernels.linear_parts import make_gated, make_qkv, make_residual, make_store, scale_pair
from kernels.persistent_parts import (
    make_collect,
    make_factor,
    make_look_some_x,
    make_look_x,
    make_merge,
    make_multiply,
    make_patch,
    make_put,
    make_query,
    make_send,
    make_share_scores,
    make_tile_values,
    no_sum,
    num_chains,
    pitch_of,
    result_words,
)
from kernels.persistent_shares import share_tiles
from kernels.polling import (
    bulk_copy_once,
    clock,
    fence_async_shared,
    load_constant_i64,
    narrow,
    thread_id_again,
)
from kernels.warpgroup import make_registers

PRODUCTS = ("qkv", "o", "gate_up", "down", "head")
POINTERS = 6  # of a layer: qkv, o, gate_up, down, the gains before qkv and before gate_up
PIECE_BYTES = 2048  # of attention's copies: 16 positions x 64 dims of keys, or 16 dims of values
STAMPS = 18  # of a layer call, see `mark`
_PAIR_MASKS = (1, 2, 4)  # how the lanes that hold a tile's 8 pairs differ


@dataclass(frozen=True)
class CoreShape:
    """The model's side: its products as `graphs.product_shapes` cuts them; the cache is fp16."""

    d_model: int
    d_ff: int
    layers: int
    heads: HeadShape
    attention: AttentionShape
    qkv: ProductShape
    o: ProductShape
    gate_up: ProductShape
    down: ProductShape
    head: ProductShape

    @property
    def products(self) -> list[ProductShape]:
        return [getattr(self, name) for name in PRODUCTS]

    @property
    def told(self) -> dict[str, int]:
        """Bytes of 8 rows of what is told in a layer call, by name."""
        heads = self.heads
        return {
            "normed": 2 * packed_size(8, self.qkv, 1),
            "squares": 4 * 8 * (self.d_model // 16),
            "q": 2 * 8 * heads.n_heads * heads.head_dim,
            "k": 2 * 8 * heads.n_kv_heads * heads.head_dim,
            "v": 2 * 8 * heads.n_kv_heads * heads.head_dim,
            "mixed": 2 * packed_size(8, self.o, 1),
            "normed_2": 2 * packed_size(8, self.gate_up, 1),
            "squares_2": 4 * 8 * (self.d_model // 16),
            "hidden": 2 * packed_size(8, self.down, 1),
        }

    @property
    def told_at(self) -> dict[str, int]:
        """Where these lie within a layer call's memory; `end`: its bytes."""
        at, places = 0, {}
        for name, size in self.told.items():
            places[name] = at
            at += -(-size // 256) * 256
        return {**places, "end": at}


@dataclass(frozen=True)
class CoreLaunch:
    """`rows` (1, or 8 for up to 8) are computed; `groups` of four warps; each warp has `slots` of `slot_bytes`.

    A block finishes up to `most_tiles` tiles of 8 chains at a time.
    """

    shape: CoreShape
    rows: int
    groups: int = 4
    slots: int = 6
    slot_bytes: int = PIECE_BYTES
    in_flight: int = 1
    most_tiles: int = 4
    is_timed: bool = False

    @property
    def warps(self) -> int:
        return 4 * self.groups

    def round_tiles(self, product: ProductShape) -> int:
        """Tiles that a block finishes at a time: their sums find room, and threads."""
        fitting = min(self.most_tiles * 8 // num_chains(product), 4 * self.warps // self.rows)
        return max(1, fitting - fitting % 2)

    def parts(self, product: ProductShape) -> int:
        """Pieces of a chain, each of an equal number of steps and no larger than a slot."""
        steps = product.k_steps
        return next(
            n for n in range(1, steps + 1) if steps % n == 0 and steps // n * 512 <= self.slot_bytes
        )

    @property
    def sums_bytes(self) -> int:
        """Of a chain's sums of one tile."""
        return self.rows * pitch_of(self.rows)

    @property
    def sums_at(self) -> int:
        return self.warps * self.slots * self.slot_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of one of two buffers for the sums of the tiles that are finished at a time, and the rows' factors."""
        most = max(self.round_tiles(p) * num_chains(p) for p in self.shape.products)
        return most * self.sums_bytes + 32

    @property
    def scores_bytes(self) -> int:
        """Of the scores of a block of the cache that a group works on."""
        return 256 * self.shape.attention.group

    @property
    def area_bytes(self) -> int:
        """Of a group: two blocks' scores and two queries."""
        attention = self.shape.attention
        return 2 * self.scores_bytes + 4 * attention.group * attention.head_dim

    @property
    def areas_at(self) -> int:
        return self.sums_at + 2 * self.buffer_bytes

    @property
    def bars_at(self) -> int:
        return self.areas_at + self.groups * self.area_bytes

    @property
    def shared_bytes(self) -> int:
        return self.bars_at + self.warps * self.slots * 16


def results_size(shape: AttentionShape, rows: int) -> int:
    """Words (each with its tag) of the buffer of stream results."""
    return rows * shape.units * STREAMS * shape.group * result_words(shape)


def share_words(shape: CoreShape, num_blocks: int) -> list[int]:
    """`share_tiles` as the kernel reads it: 8 int32 a block, first << 12 | count << 1 | half."""
    words: list[int] = []
    for share in share_tiles(shape.products, num_blocks):
        words += [first << 12 | count << 1 | half for first, count, half in share] + [0] * 3
    return words


# --- rings -----------------------------------------------------------------------------------------


def _make_ring(launch: CoreLaunch) -> Any:
    """Filling a slot of each of a group's warps; waiting for a slot; giving it back."""
    slots, slot_bytes, warps, ahead = (
        launch.slots,
        launch.slot_bytes,
        launch.warps,
        launch.in_flight,
    )
    full_at, free_at = launch.bars_at, launch.bars_at + 8 * slots * warps

    @device_function
    def fetch(
        base: Any, warp: Any, lane: Any, source: Any, num_bytes: Any, slot: Any, turn: Any
    ) -> Any:
        """By the first four lanes of a producer warp, each for one warp."""
        if lane < 4:
            at = base + (warp * slots + slot) * 8
            mbarrier_wait(at + free_at, turn ^ 1)
            # the piece before those that may be in flight has come
            before, its_turn = slot - ahead, turn
            if before < 0:
                before += slots
                its_turn ^= 1
            mbarrier_wait(base + (warp * slots + before) * 8 + full_at, its_turn)
            mbarrier_expect(at + full_at, num_bytes)
            target = base + (warp * slots + slot) * slot_bytes
            bulk_copy_once(target, source, num_bytes, at + full_at)
        sync_warp()
        slot += 1
        if slot == slots:
            slot = 0
            turn ^= 1
        return narrow(slot), narrow(turn)

    @device_function
    def arrived(base: Any, warp: Any, slot: Any, turn: Any) -> Any:
        at = warp * slots + slot
        mbarrier_wait(base + full_at + at * 8, turn)
        return base + at * slot_bytes

    @device_function
    def release(base: Any, warp: Any, lane: Any, slot: Any, turn: Any, nothing: Any) -> Any:
        """`nothing`: 0, made of what was read last. Else the slot may be given back, and filled, before the reads that
        wait behind other loads have been done: the device does not order them."""
        sync_warp()
        if lane == 0:
            mbarrier_arrive(base + free_at + (warp * slots + slot) * 8 + nothing)
        slot += 1
        if slot == slots:
            slot = 0
            turn ^= 1
        return narrow(slot), narrow(turn)

    return fetch, arrived, release


def _make_mark(is_timed: bool) -> Any:
    @device_function
    def mark(stamps: Any, number: Any, k: Any, who: Any) -> None:
        """Note the clock as number `k` of layer call `number`, by thread `who`."""
        if is_timed and thread_id_again() == who:
            store_64(stamps + ((number * STAMPS + k) * grid_x() + block_x()) * 8, clock())

    return mark


# --- products --------------------------------------------------------------------------------------


def _make_product(
    launch: CoreLaunch, product: ProductShape, is_normed: bool, ends: Any, number: int
) -> Any:
    """What a producer warp and what the others do for one product of one layer."""
    prepare, finish = ends
    chains, parts, warps = num_chains(product), launch.parts(product), launch.warps
    if warps % chains or parts > 4:
        raise ValueError(f"{product} does not fit {launch}")
    split, steps = warps // chains, product.k_steps // launch.parts(product)
    chain_bytes, part_bytes, tile_bytes = product.k_steps * 512, steps * 512, product.tile_bytes
    group, sub_slices, threads = product.group, product.sub_slices, 32 * warps
    fetch, arrived, release = _make_ring(launch)
    round_tiles, sums_at, sums_bytes = (
        launch.round_tiles(product),
        launch.sums_at,
        launch.sums_bytes,
    )
    buffer_bytes = launch.buffer_bytes
    pitch, factors_at = pitch_of(launch.rows), launch.buffer_bytes - 32
    look, look_some, put = (
        make_look_x(product, is_normed),
        make_look_some_x(product),
        make_put(launch.rows),
    )
    missing_at = len(look.device_traced.returns) - 1
    multiply_0, multiply_1, multiply_2, multiply_3 = (
        make_multiply(steps, min(i, parts - 1)) for i in range(4)
    )
    collect, factor = make_collect(chains, launch.sums_bytes), make_factor(product)
    mark = _make_mark(launch.is_timed)

    @device_function
    def feed(base: Any, weights: Any, share: Any, slot: Any, turn: Any) -> Any:
        """Fetch the pieces of this product for the group of this producer warp, in their order."""
        thread = thread_id_again()
        lane = thread & 31
        warp = ((thread >> 5) - warps) * 4 + (lane & 3)
        first, count, half = narrow(share >> 12), narrow((share >> 1) & 2047), narrow(share & 1)
        chain = remainder(warp, chains)
        rank, sub = quotient(chain, sub_slices), remainder(chain, sub_slices)
        for i in range(narrow((quotient(warp, chains) + half) & (split - 1)), count, narrow(split)):
            tile = first + i
            piece = (quotient(tile, group) * 8 + rank) * group + remainder(tile, group)
            source = weights + wide(piece) * tile_bytes + sub * chain_bytes
            for part in range(parts):
                slot, turn = fetch(
                    base, warp, lane, source + part * part_bytes, part_bytes, slot, turn
                )
        return slot, turn

    @device_function
    def work(
        base: Any, x: Any, squares: Any, share: Any, slot: Any, turn: Any, odd: Any, rows: Any, eps: Any,
        stamps: Any, call: Any,
        e0: Any, e1: Any, e2: Any, e3: Any, e4: Any, e5: Any, e6: Any, e7: Any,
    ) -> Any:  # fmt: skip
        first, count, half = narrow(share >> 12), narrow((share >> 1) & 2047), narrow(share & 1)
        if count > 0:
            thread = thread_id_again()
            warp, lane, never = narrow(thread >> 5), narrow(thread & 31), narrow(rows >> 16)
            chain = remainder(warp, chains)
            unit = narrow(thread >> 3)
            mine = quotient(unit, rows)
            m = narrow(unit - mine * rows)
            is_real = mine < min(round_tiles, count)
            ready = prepare(m, first + mine, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7)
            # few words first: to ask for all of them again and again keeps the L2 cache from its work
            while any_lane(look_some(x, chain, lane)) != 0:
                pass
            b = look(x, squares, chain, warp, lane, rows)
            while any_lane(b[missing_at]) != 0:
                b = look(x, squares, chain, warp, lane, rows)
            mark(stamps, call, 2 * number, 0)
            for start_tile in range(narrow(0), count, narrow(round_tiles)):
                num = narrow(min(round_tiles, count - start_tile))
                buffer = base + sums_at + odd * buffer_bytes
                odd = narrow(odd ^ 1)
                if is_normed and warp < rows:
                    factor(b, buffer + factors_at + warp * 4, eps, lane)
                for i in range(
                    narrow((quotient(warp, chains) + half) & (split - 1)), num, narrow(split)
                ):
                    acc = multiply_0(no_sum(), arrived(base, warp, slot, turn) + lane * 16, b)
                    slot, turn = release(base, warp, lane, slot, turn, acc[4] & never)
                    if parts > 1:
                        acc = multiply_1(acc, arrived(base, warp, slot, turn) + lane * 16, b)
                        slot, turn = release(base, warp, lane, slot, turn, acc[4] & never)
                    if parts > 2:
                        acc = multiply_2(acc, arrived(base, warp, slot, turn) + lane * 16, b)
                        slot, turn = release(base, warp, lane, slot, turn, acc[4] & never)
                    if parts > 3:
                        acc = multiply_3(acc, arrived(base, warp, slot, turn) + lane * 16, b)
                        slot, turn = release(base, warp, lane, slot, turn, acc[4] & never)
                    put(acc, buffer + (i * chains + chain) * sums_bytes, lane)
                sync_some(1, threads)
                tile = first + start_tile + mine
                is_real = mine < num
                if (unit & -4) < num * rows:
                    at = mine if is_real else 0
                    a, c = collect(buffer + at * (chains * sums_bytes) + m * pitch + (lane & 7) * 8)
                    if is_normed:
                        a, c = scale_pair(a, c, buffer + factors_at + m * 4)
                    finish(ready, a, c, m, tile, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7)
                if start_tile + round_tiles < count:
                    is_real = mine < min(round_tiles, count - start_tile - round_tiles)
                    ready = prepare(
                        m, tile + round_tiles, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7
                    )
            mark(stamps, call, 2 * number + 1, 0)
        return slot, turn, odd

    return feed, work


# --- attention -------------------------------------------------------------------------------------


def _make_attention(launch: CoreLaunch) -> Any:
    """What a producer warp and what its group do for one layer's attention."""
    shape, slot_bytes = launch.shape.attention, launch.slot_bytes
    if shape.format != "fp16" or shape.has_alibi or shape.head_dim not in (64, 128, 256):
        raise ValueError(f"{shape} is not built")
    if slot_bytes < PIECE_BYTES:
        raise ValueError(f"attention's pieces do not fit {slot_bytes} bytes")
    units, split, group, dim = shape.units, shape.split, shape.group, shape.head_dim
    pieces, quarter_bytes, head_bytes, values_at = dim // 64, 32 * dim, 256 * dim, 128 * dim
    groups, warps = launch.groups, launch.warps
    fetch, arrived, release = _make_ring(launch)
    areas_at, scores_bytes = launch.areas_at, launch.scores_bytes
    area_bytes, width, no_window = launch.area_bytes, result_words(shape), NO_WINDOW
    query_bytes, key_bytes, kv_heads = 2 * group * dim, 2 * dim, shape.n_kv_heads
    look_query, lacks_any, keep_query, some_scores = make_query(shape)
    give, take = make_share_scores(shape)
    softmax, softmax_masked = (make_softmax(shape, masked) for masked in (False, True))
    (values_0, values_1, values_2, values_3), correct, zeros = make_tile_values(shape)
    at_1, at_2, at_3 = (4 * min(i, pieces - 1) for i in (1, 2, 3))
    look_new, patch_keys, patch_values = make_patch(shape)
    send = make_send(shape)
    look, merge = make_merge(shape, launch.shape.o)
    missing_at = STREAMS + 2
    mark = _make_mark(launch.is_timed)

    @device_function
    def unit_of(item: Any, per_stream: Any) -> Any:
        return narrow(remainder(item, per_stream) if item >= 0 else 0)

    @device_function
    def item_of(turn: Any, items: Any) -> Any:
        """The block's item in this turn (back and forth over the grid), -1: none."""
        at = block_x() if turn & 1 == 0 else grid_x() - 1 - block_x()
        item = turn * grid_x() + at
        return narrow(item if item < items else -1)

    @device_function
    def entry_of(
        tables: Any, row_info: Any, loop: Any, max_loops: Any, max_blocks: Any, row: Any, block: Any
    ) -> Any:
        """The table's entry for a block of a row."""
        depth = load_constant_i32(row_info + row * 8 + 4) + loop
        return load_constant_i32(tables + wide((row * max_loops + depth) * max_blocks + block) * 4)

    @device_function
    def shown_of(positions: Any, windows: Any, row: Any) -> Any:
        """(position, window, first block after block 0 that it shows)."""
        position = load_constant_i32(positions + row * 4)
        window, low = narrow(no_window), narrow(1)
        if windows != 0:
            width = load_constant_i32(windows + row * 4)
            if width > 0:
                window = width
                if position - width >= 127:
                    low = narrow((position - width + 1) >> 6)
        return position, window, low

    @device_function
    def feed(
        base: Any, cache: Any, block_bytes: Any, tables: Any, positions: Any, row_info: Any, windows: Any, loop: Any,
        rows: Any, max_loops: Any, max_blocks: Any, slot: Any, turn: Any,
    ) -> Any:  # fmt: skip
        thread = thread_id_again()
        lane = thread & 31
        warp = ((thread >> 5) - warps) * 4 + (lane & 3)
        per_stream = narrow(rows * units)
        items = narrow(per_stream * STREAMS)
        for again in range(
            narrow(warp >> 2), quotient(items + grid_x() - 1, grid_x()), narrow(groups)
        ):
            item = item_of(again, items)
            if item >= 0:
                stream = quotient(item, per_stream)
                unit = item - stream * per_stream
                row = quotient(unit, units)
                head = quotient(unit - row * units, split)
                position, _, low = shown_of(positions, windows, row)
                for block in range(stream, narrow((position >> 6) + 1), narrow(STREAMS)):
                    if block == 0 or block >= low:
                        entry = entry_of(tables, row_info, loop, max_loops, max_blocks, row, block)
                        source = cache + wide(entry) * block_bytes + head * head_bytes
                        source += (warp & 3) * quarter_bytes
                        for part in range(2 * pieces):
                            at = part * PIECE_BYTES
                            if part >= pieces:
                                at += values_at - quarter_bytes
                            slot, turn = fetch(
                                base, warp, lane, source + at, PIECE_BYTES, slot, turn
                            )
        return slot, turn

    @device_function
    def work(
        base: Any, q: Any, k: Any, v: Any, loop_slots: Any, tables: Any, positions: Any,
        row_info: Any, windows: Any, results: Any, out: Any, loop: Any, rows: Any, max_loops: Any,
        max_blocks: Any, slot: Any, turn: Any, stamps: Any, call: Any,
    ) -> Any:  # fmt: skip
        thread = thread_id_again()
        warp, lane, never = narrow(thread >> 5), narrow(thread & 31), narrow(rows >> 16)
        quarter, name = narrow(warp & 3), narrow(2 + (warp >> 2))
        area = base + areas_at + (warp >> 2) * area_bytes
        per_stream = narrow(rows * units)
        items = narrow(per_stream * STREAMS)
        written = narrow(-1)
        if lane < rows:
            written = load_constant_i32(loop_slots + lane * 4)
        item = item_of(warp >> 2, items)
        query = look_query(q + wide(unit_of(item, per_stream)) * query_bytes, lane, item >= 0)
        is_odd, is_other = narrow(0), narrow(0)
        for again in range(
            narrow(warp >> 2), quotient(items + grid_x() - 1, grid_x()), narrow(groups)
        ):
            unit = unit_of(item, per_stream)
            stream = quotient(item, per_stream)
            row = quotient(unit, units)
            head = quotient(unit - row * units, split)
            position, window, low = shown_of(positions, windows, row)
            own = narrow(position >> 6)
            is_live = item >= 0 and stream <= own
            has_own = (own - stream) & (STREAMS - 1) == 0
            here = shuffle_from(written, row)
            query_at = area + 2 * scores_bytes + is_other * query_bytes
            at = wide(row * kv_heads + head) * key_bytes
            new = look_new(k + at, v + at, quarter, lane, is_live and has_own)
            if is_live:
                while any_lane(lacks_any(query, new)) != 0:
                    query = look_query(q + wide(unit) * query_bytes, lane, 1)
                    new = look_new(k + at, v + at, quarter, lane, has_own)
                mark(stamps, call, 10, 0)
                keep_query(query, query_at, lane)
                sync_warp()
                is_other = narrow(is_other ^ 1)
            item = item_of(again + groups, items)
            query = look_query(q + wide(unit_of(item, per_stream)) * query_bytes, lane, item >= 0)
            if is_live:
                num_stable = load_constant_i32(row_info + row * 8)
                state = start()
                total = zeros()
                for block in range(stream, narrow(own + 1), narrow(STREAMS)):
                    if block == 0 or block >= low:
                        lane = narrow(thread_id_again() & 31)
                        shown = no_sum()
                        entry = narrow(-1)
                        if block >= num_stable and rows > 1:
                            entry = entry_of(
                                tables, row_info, loop, max_loops, max_blocks, row, block
                            )
                        for piece in range(pieces):
                            keys = arrived(base, warp, slot, turn)
                            if block == own and (here & 63) >> 4 == quarter:
                                patch_keys(new, piece, keys, here & 63, lane)
                            if block >= num_stable:
                                for r in range(rows):
                                    place = shuffle_from(written, r)
                                    if (
                                        r != row
                                        and place >> 6 == entry
                                        and (place & 63) >> 4 == quarter
                                    ):
                                        at = wide(r * kv_heads + head) * key_bytes
                                        more = look_new(k + at, v + at, quarter, lane, 1)
                                        while any_lane(lacks_any(more, more)) != 0:
                                            more = look_new(k + at, v + at, quarter, lane, 1)
                                        patch_keys(more, piece, keys, place & 63, lane)
                                sync_warp()
                            shown = some_scores(
                                shown, keys + lane * 16, query_at + piece * (group * 128), lane
                            )
                            if block >= num_stable:
                                fence_async_shared()
                            slot, turn = release(base, warp, lane, slot, turn, shown[4] & never)
                        mark(stamps, call, 11, 0)
                        scores = area + is_odd * scores_bytes
                        is_odd = narrow(is_odd ^ 1)
                        give(shown, scores, quarter, lane)
                        sync_some(name, 128)
                        if block == own or window < no_window:
                            step = softmax_masked(
                                take(scores, lane),
                                state,
                                block * 64,
                                position,
                                window,
                                (0, 0),
                                lane,
                            )
                        else:
                            step = softmax(
                                take(scores, lane),
                                state,
                                block * 64,
                                position,
                                window,
                                (0, 0),
                                lane,
                            )
                        state = step[8:12]
                        total = correct(total, step[12], step[13])
                        mark(stamps, call, 12, 0)
                        for piece in range(pieces):
                            values = arrived(base, warp, slot, turn)
                            if block == own:
                                patch_values(new, piece, values, here & 63, quarter, lane)
                            if block >= num_stable:
                                for r in range(rows):
                                    place = shuffle_from(written, r)
                                    if r != row and place >> 6 == entry:
                                        at = wide(r * kv_heads + head) * key_bytes
                                        more = look_new(k + at, v + at, quarter, lane, 1)
                                        while any_lane(lacks_any(more, more)) != 0:
                                            more = look_new(k + at, v + at, quarter, lane, 1)
                                        patch_values(more, piece, values, place & 63, quarter, lane)
                                sync_warp()
                            last = total[0]
                            if piece == 0:
                                total = values_0(total, step[0:8], values + lane * 16)
                                last = total[0]
                            elif piece == 1:
                                total = values_1(total, step[0:8], values + lane * 16)
                                last = total[at_1]
                            elif piece == 2:
                                total = values_2(total, step[0:8], values + lane * 16)
                                last = total[at_2]
                            else:
                                total = values_3(total, step[0:8], values + lane * 16)
                                last = total[at_3]
                            if block >= num_stable:
                                fence_async_shared()
                            slot, turn = release(
                                base, warp, lane, slot, turn, bits_of(last) & never
                            )
                # what follows is no part of the loops above: let it keep no registers there
                lane = narrow(thread_id_again() & 31)
                of_unit = results + wide(unit * STREAMS) * (group * width * 8)
                send(total, state, of_unit + stream * (group * width * 8), quarter, call + 1, lane)
                mark(stamps, call, 13, 0)
        # The last groups, which have fewer items, put the streams of each (row, unit) together.
        first = grid_x() - 1 - block_x() + (groups - 1 - (warp >> 2)) * grid_x()
        for unit in range(first, per_stream, groups * grid_x()):
            row = quotient(unit, units)
            own = load_constant_i32(positions + row * 4) >> 6
            of_unit = results + wide(unit * STREAMS) * (group * width * 8)
            for some in range(0, group * dim, 128):
                thread = thread_id_again()
                i, lane = some + (thread & 127), thread & 31
                if i < group * dim:
                    words = look(of_unit, i, own, call + 1, lane)
                    while any_lane(words[missing_at]) != 0:
                        words = look(of_unit, i, own, call + 1, lane)
                    mark(stamps, call, 14, 384)
                    merge(words, out, row, unit - row * units, i, own, lane)
                    mark(stamps, call, 15, 384)
        return slot, turn

    return feed, work


# --- the kernel ------------------------------------------------------------------------------------

_ARGS = "l" * 15 + "rrrrf"


def _make_kernel(launch: CoreLaunch) -> Any:
    shape = launch.shape
    layers, warps, slots = shape.layers, launch.warps, launch.slots
    threads, bars_at = 32 * warps, launch.bars_at
    layer_bytes = shape.attention.n_kv_heads * shape.attention.stored_head_bytes
    pointer_bytes = POINTERS * 8
    d_model = shape.d_model
    feed_qkv, work_qkv = _make_product(
        launch, shape.qkv, True, make_qkv(shape.heads, 1, is_told=True), 0
    )
    feed_o, work_o = _make_product(
        launch, shape.o, False, make_residual(d_model, shape.gate_up, 1, _PAIR_MASKS), 1
    )
    feed_gate_up, work_gate_up = _make_product(
        launch, shape.gate_up, True, make_gated(shape.d_ff, shape.down, 1), 2
    )
    feed_down, work_down = _make_product(
        launch, shape.down, False, make_residual(d_model, shape.qkv, 1, _PAIR_MASKS), 3
    )
    feed_head, work_head = _make_product(
        launch, shape.head, True, make_store(shape.head.n, False), 4
    )
    feed_attention, work_attention = _make_attention(launch)
    at = shape.told_at
    normed_at, squares_at, mixed_at, hidden_at = (
        at[n] for n in ("normed", "squares", "mixed", "hidden")
    )
    normed_2_at, squares_2_at, call_bytes = at["normed_2"], at["squares_2"], at["end"]
    q_at, k_at, v_at = at["q"], at["k"], at["v"]
    # Producers need few registers, what they leave goes to the others; whole warpgroups alone can give.
    has_quota = launch.groups == 4
    give_registers = make_registers(64, is_more=False)
    take_registers = make_registers(104, is_more=True)

    def kernel(
        shares: Any, pointers: Any, told: Any, x: Any, cache: Any, block_bytes: Any, slots_of_loops: Any,
        rope: Any, tables: Any, positions: Any, row_info: Any, windows: Any, results: Any, logits: Any, stamps: Any,
        rows: Any, calls: Any, max_loops: Any, max_blocks: Any, eps: Any,
    ) -> None:  # fmt: skip
        base = shared_base()
        if thread_id() == 0:
            for i in range(2 * slots * warps):
                mbarrier_init(base + bars_at + i * 8, 1)
            mbarrier_init_fence()
        sync_block()
        share = shares + block_x() * 32
        my_qkv, my_o = load_constant_i32(share), load_constant_i32(share + 4)
        my_gate_up, my_down = load_constant_i32(share + 8), load_constant_i32(share + 12)
        last = pointers + layers * pointer_bytes
        slot, turn = narrow(0), narrow(0)
        if thread_id() >= threads:
            if has_quota:
                give_registers()
            for call in range(calls):
                loop, layer = quotient(call, layers), remainder(call, layers)
                of_layer = pointers + layer * pointer_bytes
                slot, turn = feed_qkv(base, load_constant_i64(of_layer), my_qkv, slot, turn)
                # the cache and the tables may be written before this kernel
                grid_dependency_wait()
                slot, turn = feed_attention(
                    base, cache + layer * layer_bytes, block_bytes, tables, positions, row_info, windows, loop,
                    rows, max_loops, max_blocks, slot, turn,
                )  # fmt: skip
                slot, turn = feed_o(base, load_constant_i64(of_layer + 8), my_o, slot, turn)
                slot, turn = feed_gate_up(
                    base, load_constant_i64(of_layer + 16), my_gate_up, slot, turn
                )  # fmt: skip
                slot, turn = feed_down(
                    base, load_constant_i64(of_layer + 24), my_down, slot, turn
                )  # fmt: skip
            if logits != 0:
                slot, turn = feed_head(
                    base, load_constant_i64(last), load_constant_i32(share + 16), slot, turn
                )  # fmt: skip
        else:
            if has_quota:
                take_registers()
            grid_dependency_wait()
            odd = narrow(0)
            for call in range(calls):
                loop, layer = quotient(call, layers), remainder(call, layers)
                loop_slots = slots_of_loops + loop * rows * 4
                of_layer = pointers + layer * pointer_bytes
                here = told + wide(call) * call_bytes
                slot, turn, odd = work_qkv(
                    base, here + normed_at, here + squares_at, my_qkv, slot, turn, odd, rows, eps, stamps, call,
                    here + q_at, cache + layer * layer_bytes, loop_slots, rope, block_bytes, here + k_at, here + v_at, 0,
                )  # fmt: skip
                slot, turn = work_attention(
                    base, here + q_at, here + k_at, here + v_at, loop_slots, tables, positions, row_info, windows,
                    results, here + mixed_at, loop, rows, max_loops, max_blocks, slot, turn, stamps, call,
                )  # fmt: skip
                slot, turn, odd = work_o(
                    base, here + mixed_at, 0, my_o, slot, turn, odd, rows, eps, stamps, call,
                    x, here + squares_2_at, load_constant_i64(of_layer + 40), here + normed_2_at, 0, 0, 0, 0,
                )  # fmt: skip
                slot, turn, odd = work_gate_up(
                    base, here + normed_2_at, here + squares_2_at, my_gate_up, slot, turn, odd, rows, eps, stamps, call,
                    here + hidden_at, 0, 0, 0, 0, 0, 0, 0,
                )  # fmt: skip
                following = last + 8
                if layer + 1 < layers:
                    following = of_layer + pointer_bytes + 32
                elif call + 1 < calls:
                    following = pointers + 32
                after = here + call_bytes
                slot, turn, odd = work_down(
                    base, here + hidden_at, 0, my_down, slot, turn, odd, rows, eps, stamps, call,
                    x, after + squares_at, load_constant_i64(following), after + normed_at, 0, 0, 0, 0,
                )  # fmt: skip
            if logits != 0:
                here = told + wide(calls) * call_bytes
                slot, turn, odd = work_head(
                    base, here + normed_at, here + squares_at, load_constant_i32(share + 16), slot, turn, odd, rows, eps,
                    stamps, calls, logits, 0, 0, 0, 0, 0, 0, 0,
                )  # fmt: skip

    return kernel


def core_step(launch: CoreLaunch) -> Variant:
    """The core and the head of a decode step, launched after `step.begin_step` with one block a multiprocessor.

    Kernel arguments: shares int32 (blocks, 8) of `share_words`; pointers int64 (layers * POINTERS + 2): each layer's
    weights and gains (see POINTERS), then the head's weights and the last gain; told: memory of `CoreShape.told_at` for
    every layer call and one more, NOTHING all over but for the normed x and the squares of the first call;
    x float32 (rows, d), updated; the fp16 pool, bytes of a block over all layers; slots int32 (loops, rows); rope
    float32 (rows, dim/2, 2); tables int32 (rows, max_loops, max_blocks); positions int32 (rows,), -1: no row (nothing is
    written for it that is of use); row_info int32 (rows, 2): how many leading blocks nothing in this step
    writes, and the row's loop before this step; windows int32 (rows,), 0: all keys, else that many and the sinks (address 0:
    all rows see all keys); results (`results_size` pairs of words, NOTHING before the step); logits float32 (rows, n),
    written (address 0: there is no head); stamps int64 ((calls + 1) * STAMPS, blocks), written by timed variants; rows, loops, max_loops, max_blocks, eps.
    """
    return Variant(
        name=f"core_step_m{launch.rows}_g{launch.groups}s{launch.slots}x{launch.slot_bytes}{launch.is_timed * '_timed'}",
        function=_make_kernel(launch),
        args=_ARGS,
        num_threads=32 * (launch.warps + launch.groups),
        shared_bytes=launch.shared_bytes,
        is_together=True,
        constants=(launch,),
    )


# --- what is checked without a GPU -----------------------------------------------------------------


def variants() -> dict[str, Variant]:
    """The kernels of the reference model."""
    shape = CoreShape(
        1536, 4096, 4, HeadShape(12, 12, 128, True, True), AttentionShape(12, 1, 128),
        ProductShape(4608, 1536, 12), ProductShape(1536, 1536, 4), ProductShape(8192, 1536, 18),
        ProductShape(1536, 4096, 4, 2), ProductShape(50257, 1536, 8),
    )  # fmt: skip
    return {f"core_step_{rows}": core_step(CoreLaunch(shape, rows)) for rows in (1, 8)}
