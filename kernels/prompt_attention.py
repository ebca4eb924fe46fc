"""Attention of prompt rows over gathered blocks, by warpgroup products.

A tile is up to 64 rows of one sequence whose positions lie in one aligned block of 64; a unit is two that follow each other. A block of
threads has a query head of one unit after the other, a warpgroup each of its tiles; one more thread brings K and V of one block of keys after
the other to shared memory, for both. Key blocks are read in ascending order up to the tile's own, with a running softmax (float32 sums,
fp16 weights): what a row adds, and in which order, depends on its position, its window and the keys alone, never on the chunk, the other rows
or the other sequences of the pass. Blocks that a window hides from both tiles are skipped; reading them would add zeros. K and V of the rows
must be among the gathered, and whatever a block holds after them must be finite. Of an int4 cache a tile reads its own block
exactly, all others as they are stored.

While a warpgroup turns scores into weights, the matrix unit adds its weighted values of the block before, or works for the other one.
"""

from __future__ import annotations

from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    any_lane,
    bits_of,
    block_x,
    bulk_copy,
    fence_async,
    grid_dependency_launch,
    grid_dependency_wait,
    grid_x,
    int_to_f32,
    load_i32,
    mbarrier_arrive,
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
from kernels.prompt_attention_parts import (
    make_correct,
    make_finish,
    make_load_query,
    make_slope,
    make_softmax,
    make_zeros,
    pack_weights,
    start,
)
from kernels.prompt_shapes import PromptAttentionShape
from kernels.warpgroup import (
    descriptor,
    make_added_product,
    make_product,
    make_registers,
    make_two_products,
    make_wait,
)

TILE_ROWS = 64
UNIT_TILES = 2  # tiles of a unit: they share slot, table and window, and the second has the next block of positions
# int32 of a tile: slot, table, first position, first row, number of rows, window; which gathered block is block 0, which is block b > 0
# less b, and which is the tile's own; the rest unused
TILE_FIELDS = 12
_TILE_BYTES = 4 * TILE_FIELDS
_STAGE_BARS = 32  # bytes of a stage's barriers: K is there, V is there, K is used, V is used
_USER_REGISTERS, _BRINGER_REGISTERS = 240, 24  # of a thread, together as many as 3 x 128 x 168 hold


def _make_products(shape: PromptAttentionShape) -> tuple[Any, Any, Any]:
    dim = shape.head_dim
    # matrices of 32 columns: K has 64 rows (keys), V has dim rows
    of_keys, of_values = (64, dim // 16, 4096), (dim, 4, 64 * dim)
    first_scores, last_values = make_product(*of_keys), make_added_product(*of_values)
    scores_and_values = make_two_products(*of_keys, *of_values)

    @traced("f" * 32)
    def scores(query: Any, keys: Any) -> Any:
        return first_scores(*query, descriptor(keys))

    @traced("f" * (32 + dim // 2))
    def both(out: Any, query: Any, weights: Any, keys: Any, values: Any) -> Any:
        return scores_and_values(*out, *query, *weights, descriptor(keys), descriptor(values))

    @traced("f" * (dim // 2))
    def weighted(out: Any, weights: Any, values: Any) -> Any:
        return last_values(*out, *weights, descriptor(values))

    return scores, both, weighted


def _make_kernel(shape: PromptAttentionShape, stages: int) -> Any:
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    group = heads // kv_heads
    half_bytes, row_bytes, is_windowed = shape.half_bytes, 2 * dim, shape.has_windows
    bars_at, is_int4 = 2 * stages * half_bytes, shape.kind == "int4"
    scores, both, weighted = _make_products(shape)
    wait_out, half_dim = make_wait(dim // 2 + 32), dim // 2
    load_query, correct = make_load_query(shape), make_correct(shape)
    softmax, softmax_own = make_softmax(shape, is_windowed), make_softmax(shape, True)
    zeros, finish, load_slope = make_zeros(shape), make_finish(shape), make_slope(shape)
    more_registers = make_registers(_USER_REGISTERS, is_more=True)
    fewer_registers = make_registers(_BRINGER_REGISTERS, is_more=False)

    @traced("f" * (dim // 2) + "f" * 32)
    def finished(out: Any, weights: Any) -> Any:
        """out after the product that was started, and the weights, which may not become the next factors before."""
        return wait_out(*out, *weights)

    @traced("r")
    def is_corrected(fix0: Any, fix1: Any) -> Any:
        """Whether a row of the warp has a new maximum: else the factors are all 1."""
        one = bits_of(int_to_f32(1))
        return any_lane((bits_of(fix0) ^ one) | (bits_of(fix1) ^ one))

    @device_function
    def work(turn: Any) -> Any:
        """The (unit, head) of this block's turn: there and back over the blocks, so that all get about as many keys."""
        at = grid_x() - 1 - block_x() if turn & 1 else block_x()
        return turn * grid_x() + at

    @device_function
    def extent(unit: Any) -> Any:
        """(key blocks before the last tile's own, blocks that are read in all, blocks left out after the first, whether two tiles)."""
        first, window = load_i32(unit + 8), load_i32(unit + 20)
        is_pair = 1 if load_i32(unit + _TILE_BYTES + 16) > 0 else 0
        # Without the blocks between the first, which has the sinks, and the first that a row's window reaches.
        skipped = 0
        if is_windowed and window > 0 and first - window >= 127:
            skipped = ((first - window + 1) >> 6) - 1
        # Of an int4 cache a tile's own block is another one than that which the next tile reads.
        before = (first >> 6) - skipped + is_pair
        count = before + 1 + (is_pair if is_int4 else 0)
        return before, count, skipped, is_pair

    @device_function
    def bring(source: Any, base: Any, index: Any, part: Any) -> None:
        """Start the copy of K (part 0) or V (1), the index-th of this block of threads, when its place is free."""
        slot, turn = remainder(index, stages), quotient(index, stages)
        bars = base + bars_at + slot * _STAGE_BARS + part * 8
        if turn > 0:
            mbarrier_wait(bars + 16, (turn - 1) & 1)
        mbarrier_expect(bars, half_bytes)
        bulk_copy(
            base + (slot * 2 + part) * half_bytes, source + part * half_bytes, half_bytes, bars
        )

    @device_function
    def arrived(base: Any, index: Any, part: Any) -> Any:
        slot = remainder(index, stages)
        mbarrier_wait(base + bars_at + slot * _STAGE_BARS + part * 8, quotient(index, stages) & 1)
        return base + (slot * 2 + part) * half_bytes

    @device_function
    def used(base: Any, index: Any, part: Any, lane: Any) -> None:
        """For this warp: K or V of the index-th block is read."""
        sync_warp()
        if lane == 0:
            bars = base + bars_at + remainder(index, stages) * _STAGE_BARS + 16
            mbarrier_arrive(bars + part * 8)

    @device_function
    def pass_by(base: Any, first: Any, end: Any, lane: Any) -> None:
        """Blocks that only the other tile reads."""
        for index in range(first, end):
            arrived(base, index, 0)
            used(base, index, 0, lane)
            arrived(base, index, 1)
            used(base, index, 1, lane)

    def kernel(q: Any, scratch: Any, counts: Any, tiles: Any, slopes: Any, out: Any) -> None:
        lane, warp, base = thread_id() & 31, thread_id() >> 5, shared_base()
        if thread_id() == 0:
            for i in range(stages):
                bars = base + bars_at + i * _STAGE_BARS
                mbarrier_init(bars, 1)
                mbarrier_init(bars + 8, 1)
                mbarrier_init(bars + 16, 8)
                mbarrier_init(bars + 24, 8)
            mbarrier_init_fence()
        sync_block()
        grid_dependency_launch()
        grid_dependency_wait()
        num_work = load_i32(counts + 4) * heads
        warpgroup = warp >> 2
        turn, at, done = 0, work(0), 0
        if warpgroup == 2:
            fewer_registers()
            if thread_id() == 256:
                fence_async()
                while at < num_work:
                    unit = tiles + quotient(at, heads) * (UNIT_TILES * _TILE_BYTES)
                    kv_head = quotient(remainder(at, heads), group)
                    before, count, skipped, is_pair = extent(unit)
                    item, shift = load_i32(unit + 24), load_i32(unit + 28)
                    own, next_own = load_i32(unit + 32), load_i32(unit + _TILE_BYTES + 32)
                    for index in range(count):
                        if index >= before and is_int4:
                            item = own if index == before else next_own
                        elif index > 0:
                            item = shift + index + skipped
                        source = scratch + wide(item * kv_heads + kv_head) * (2 * half_bytes)
                        bring(source, base, done + index, 0)
                        bring(source, base, done + index, 1)
                    done += count
                    turn += 1
                    at = work(turn)
        else:
            more_registers()
            while at < num_work:
                unit, head = quotient(at, heads), remainder(at, heads)
                tile = tiles + unit * (UNIT_TILES * _TILE_BYTES)
                before, count, skipped, is_pair = extent(tile)
                end = done + count
                if warpgroup == 1 and is_pair == 0:
                    pass_by(base, done, end, lane)
                else:
                    # Of what is there a tile reads the blocks before its own and its own.
                    own = done + before
                    before += warpgroup - is_pair
                    if is_int4:
                        own += warpgroup
                    else:
                        own = done + before
                    tile += warpgroup * _TILE_BYTES
                    first, window = load_i32(tile + 8), load_i32(tile + 20)
                    first_row, rows = load_i32(tile + 12), load_i32(tile + 16)
                    row = (warp & 3) * 16
                    head_at = wide(first_row * heads + head) * row_bytes
                    query = load_query(q + head_at, row, rows, lane)
                    slope = load_slope(slopes, head)
                    position = first + row + (lane >> 2)
                    top0, top1, sum0, sum1 = start()
                    total = zeros()
                    if before == 0:
                        pass_by(base, done, own, lane)
                    at = done if before > 0 else own
                    shown = scores(query, arrived(base, at, 0))
                    used(base, at, 0, lane)
                    step = softmax_own(
                        shown, top0, top1, sum0, sum1, 0, position, window, slope, lane
                    )
                    weights = pack_weights(step[0:32])
                    for index in range(1, before):
                        at = done + index
                        result = both(
                            total, query, weights, arrived(base, at, 0), arrived(base, at - 1, 1)
                        )
                        used(base, at, 0, lane)
                        step = softmax(
                            result[0:32], step[32], step[33], step[34], step[35], (index + skipped) * 64,
                            position, window, slope, lane,
                        )  # fmt: skip
                        ended = finished(result[32:], step[0:32])
                        used(base, at - 1, 1, lane)
                        total = ended[0:half_dim]
                        weights = pack_weights(ended[half_dim:])
                        if is_corrected(step[36], step[37]):
                            total = correct(total, step[36], step[37])
                    if before > 0:
                        at = done + before - 1
                        pass_by(base, at + 1, own, lane)
                        result = both(
                            total, query, weights, arrived(base, own, 0), arrived(base, at, 1)
                        )
                        used(base, own, 0, lane)
                        step = softmax_own(
                            result[0:32], step[32], step[33], step[34], step[35], (first >> 6) * 64,
                            position, window, slope, lane,
                        )  # fmt: skip
                        ended = finished(result[32:], step[0:32])
                        used(base, at, 1, lane)
                        weights = pack_weights(ended[half_dim:])
                        total = correct(ended[0:half_dim], step[36], step[37])
                    total = weighted(total, weights, arrived(base, own, 1))
                    used(base, own, 1, lane)
                    pass_by(base, own + 1, end, lane)
                    finish(total, step[34], step[35], out + head_at, row, rows, lane)
                done = end
                turn += 1
                at = work(turn)

    return kernel


def prompt_attention(shape: PromptAttentionShape, stages: int = 4) -> Variant:
    """Attention of prompt tiles; grid (at most the multiprocessors, 1), units with most keys first.

    Kernel arguments: q fp16 (rows, num_heads, head_dim), already times log2(e) / sqrt(head_dim); scratch as `prompt_gather` wrote it;
    counts and tiles of `PromptTiles`; slopes float32 (num_heads,) or absent; out fp16 (rows, num_heads, head_dim).
    """
    if shape.head_dim % 32 or shape.head_dim > 128 or shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"{shape}: head_dim must be 32, 64, 96 or 128, the heads a multiple of the kv heads"
        )
    kind = ("_alibi" if shape.has_alibi else "") + ("_window" if shape.has_windows else "")
    kind += "_int4" if shape.kind == "int4" else ""
    return Variant(
        name=f"prompt_attention_h{shape.num_heads}k{shape.num_kv_heads}d{shape.head_dim}{kind}_s{stages}",
        function=_make_kernel(shape, stages),
        args="llllll",
        num_threads=384,
        shared_bytes=stages * (2 * shape.half_bytes + _STAGE_BARS),
        constants=(shape, stages),
    )


def variants() -> dict[str, Variant]:
    """What `scripts/check_ptx.py` compiles."""
    shapes = {
        "d128": PromptAttentionShape(12, 12, 128),
        "d128_window": PromptAttentionShape(12, 12, 128, False, True),
        "gqa": PromptAttentionShape(16, 2, 64),
        "alibi": PromptAttentionShape(8, 8, 96, True),
        "int4": PromptAttentionShape(12, 12, 128, kind="int4"),
    }
    return {f"prompt_attention_{name}": prompt_attention(shape) for name, shape in shapes.items()}
