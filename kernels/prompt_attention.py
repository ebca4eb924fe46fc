"""Attention of prompt rows over the paged cache, by warpgroup products.

A tile is up to 64 rows of one sequence whose positions lie in one aligned block of 64. A block of threads has a query head and up
to two tiles of a sequence, one each for two warpgroups; a third brings K and V of one block of keys after the other from the cache
to shared memory, on the way from the cache's order into that of `warpgroup`. Key blocks are read in ascending order up to the
tile's own, with a running softmax (float32 sums, fp16 weights): what a row adds, and in which order, depends on its position,
its window and the keys alone, never on the chunk, the other rows or the other sequences of the pass. Blocks that a
window hides from both tiles are skipped; reading them would add zeros. K and V of the rows must be in the cache before, and whatever a block
holds after them must be finite.

While a warpgroup turns scores into weights, the matrix unit adds its weighted values of the block before, or works for the other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    block_x,
    fence_async,
    grid_dependency_launch,
    grid_dependency_wait,
    load_i32,
    mbarrier_arrive_cluster,
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
    make_load,
    make_load_query,
    make_put,
    make_slope,
    make_softmax,
    make_zeros,
    start,
)
from kernels.warpgroup import (
    descriptor,
    make_added_product,
    make_product,
    make_registers,
    make_two_products,
    make_wait,
)

TILE_ROWS = 64
TILE_FIELDS = (
    8  # int32 of a tile: slot, table, first position, first row, number of rows, window, two unused
)
UNIT_TILES = 2  # tiles of one block of threads; they share slot, table and window, and the second has the next block of positions
# Of a thread of the warpgroups with tiles, and of the one that brings keys: as many as 3 x 128 x 168 hold.
_USER_REGISTERS, _BRINGER_REGISTERS = 200, 104
_TILE_BYTES = 4 * TILE_FIELDS
_STAGE_BARS = 32  # bytes of a stage's barriers: K is there, V is there, K is used, V is used


@dataclass(frozen=True)
class PromptAttentionShape:
    """The model's side; head_dim is a multiple of 32. Without `has_windows` the tiles' windows must be 0."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_alibi: bool = False
    has_windows: bool = False

    @property
    def half_bytes(self) -> int:
        """K or V of one block of one layer and kv head."""
        return 128 * self.head_dim


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
    heads, group, dim = shape.num_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim
    half_bytes, row_bytes, is_windowed = shape.half_bytes, 2 * dim, shape.has_windows
    bars_at = 2 * stages * half_bytes
    scores, both, weighted = _make_products(shape)
    wait_out = make_wait(dim // 2)
    load_keys, load_values = make_load(shape, False), make_load(shape, True)
    put_keys, put_values = make_put(shape, False), make_put(shape, True)
    load_query, correct = make_load_query(shape), make_correct(shape)
    softmax, softmax_own = make_softmax(shape, is_windowed), make_softmax(shape, True)
    zeros, finish, load_slope = make_zeros(shape), make_finish(shape), make_slope(shape)

    more_registers = make_registers(_USER_REGISTERS, is_more=True)
    fewer_registers = make_registers(_BRINGER_REGISTERS, is_more=False)

    @traced("f" * (dim // 2))
    def finished(out: Any) -> Any:
        return wait_out(*out)

    @device_function
    def place(base: Any, index: Any, part: Any) -> Any:
        """Where K (part 0) or V (1) of the index-th block lies."""
        return base + (remainder(index, stages) * 2 + part) * half_bytes

    @device_function
    def arrived(base: Any, index: Any, part: Any) -> Any:
        bar = base + bars_at + remainder(index, stages) * _STAGE_BARS + part * 8
        mbarrier_wait(bar, quotient(index, stages) & 1)
        return place(base, index, part)

    @device_function
    def tell(base: Any, index: Any, event: Any, lane: Any) -> None:
        """For this warp: something of the index-th block is there (0, 1) or used (2, 3)."""
        sync_warp()
        if lane == 0:
            mbarrier_arrive_cluster(
                base + bars_at + remainder(index, stages) * _STAGE_BARS + event * 8
            )

    @device_function
    def await_free(base: Any, index: Any, part: Any) -> Any:
        """Where K or V of the index-th block may be written, as soon as its place is free."""
        turn = quotient(index, stages)
        if turn > 0:
            bar = base + bars_at + remainder(index, stages) * _STAGE_BARS + 16 + part * 8
            mbarrier_wait(bar, (turn - 1) & 1)
        return place(base, index, part)

    @device_function
    def tell_there(base: Any, index: Any, part: Any, lane: Any) -> None:
        fence_async()
        tell(base, index, part, lane)

    @device_function
    def source_of(
        cache: Any, block_bytes: Any, table: Any, index: Any, skipped: Any, count: Any
    ) -> Any:
        """The address of the index-th block that the tiles read (of the first, past the end)."""
        block = index + skipped if 0 < index < count else 0
        return cache + wide(load_i32(table + block * 4)) * block_bytes

    def kernel(
        q: Any, cache: Any, layer_bytes: Any, block_bytes: Any, tables: Any, tiles: Any, slopes: Any, out: Any,
        num_tables: Any, max_blocks: Any,
    ) -> None:  # fmt: skip
        lane, warp, base = thread_id() & 31, thread_id() >> 5, shared_base()
        tile = tiles + quotient(block_x(), heads) * (UNIT_TILES * _TILE_BYTES)
        head = remainder(block_x(), heads)
        grid_dependency_launch()
        grid_dependency_wait()
        slot, which, first, window = (
            load_i32(tile),
            load_i32(tile + 4),
            load_i32(tile + 8),
            load_i32(tile + 20),
        )
        is_pair = load_i32(tile + _TILE_BYTES + 16) > 0
        if thread_id() == 0:
            users = 8 if is_pair else 4
            for i in range(stages):
                for event in range(4):
                    mbarrier_init(
                        base + bars_at + i * _STAGE_BARS + event * 8, 4 if event < 2 else users
                    )
            mbarrier_init_fence()
        sync_block()
        own = first >> 6
        # Without the blocks between the first, which has the sinks, and the first that a row's window reaches.
        skipped = 0
        if is_windowed and window > 0 and first - window >= 127:
            skipped = ((first - window + 1) >> 6) - 1
        count = own + 1 - skipped
        if is_pair:
            count += 1
        warpgroup = warp >> 2
        if warpgroup == 2:
            fewer_registers()
            warp &= 3
            table = tables + wide((slot * num_tables + which) * max_blocks) * 4
            source = cache + layer_bytes + quotient(head, group) * (2 * half_bytes)
            # Two halves of blocks are on their way from memory.
            at = source_of(source, block_bytes, table, 0, skipped, count)
            keys = load_keys(at, warp, lane, 1)
            for index in range(count):
                values = load_values(at + half_bytes, warp, lane, 1)
                at = source_of(source, block_bytes, table, index + 1, skipped, count)
                put_keys(keys, await_free(base, index, 0), warp, lane)
                tell_there(base, index, 0, lane)
                keys = load_keys(at, warp, lane, 1 if index + 1 < count else 0)
                put_values(values, await_free(base, index, 1), warp, lane)
                tell_there(base, index, 1, lane)
        elif warpgroup == 0 or is_pair:
            more_registers()
            mine = count - 1 if is_pair and warpgroup == 0 else count
            tile += warpgroup * _TILE_BYTES
            first, first_row, rows = load_i32(tile + 8), load_i32(tile + 12), load_i32(tile + 16)
            row = (warp & 3) * 16
            head_at = wide(first_row * heads + head) * row_bytes
            query = load_query(q + head_at, row, rows, lane)
            slope = load_slope(slopes, head)
            position = first + row + (lane >> 2)
            top0, top1, sum0, sum1 = start()
            total = zeros()
            shown = scores(query, arrived(base, 0, 0))
            tell(base, 0, 2, lane)
            for index in range(mine - 1):
                block = index + skipped if index > 0 else 0
                step = softmax(
                    shown, top0, top1, sum0, sum1, block * 64, position, window, slope, lane
                )
                top0, top1, sum0, sum1 = step[16], step[17], step[18], step[19]
                total = finished(total)
                if index > 0:
                    tell(base, index - 1, 3, lane)
                total = correct(total, step[20], step[21])
                result = both(
                    total, query, step[0:16], arrived(base, index + 1, 0), arrived(base, index, 1)
                )
                shown, total = result[0:32], result[32:]
                tell(base, index + 1, 2, lane)
            step = softmax_own(
                shown, top0, top1, sum0, sum1, (first >> 6) * 64, position, window, slope, lane
            )
            total = finished(total)
            if mine > 1:
                tell(base, mine - 2, 3, lane)
            total = correct(total, step[20], step[21])
            total = weighted(total, step[0:16], arrived(base, mine - 1, 1))
            tell(base, mine - 1, 3, lane)
            for index in range(mine, count):
                arrived(base, index, 0)
                tell(base, index, 2, lane)
                arrived(base, index, 1)
                tell(base, index, 3, lane)
            finish(total, step[18], step[19], out + head_at, row, rows, lane)

    return kernel


def prompt_attention(shape: PromptAttentionShape, stages: int = 4) -> Variant:
    """Attention of prompt tiles; grid (number of units x query heads, 1), units with most keys first.

    Kernel arguments: q fp16 (rows, num_heads, head_dim), already times log2(e) / sqrt(head_dim); the cache, bytes of the layer's
    offset and of a block over all layers; block_tables int32 (slots, tables, max_blocks); tiles int32 (num_units, UNIT_TILES,
    TILE_FIELDS), a missing second one of no rows; slopes float32 (num_heads,) or absent; out fp16 (rows, num_heads, head_dim);
    num_tables, max_blocks.
    """
    if shape.head_dim % 32 or shape.head_dim > 128 or shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"{shape}: head_dim must be 32, 64, 96 or 128, the heads a multiple of the kv heads"
        )
    kind = ("_alibi" if shape.has_alibi else "") + ("_window" if shape.has_windows else "")
    return Variant(
        name=f"prompt_attention_h{shape.num_heads}k{shape.num_kv_heads}d{shape.head_dim}{kind}_s{stages}",
        function=_make_kernel(shape, stages),
        args="llllllll" + "rr",
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
    }
    return {f"prompt_attention_{name}": prompt_attention(shape) for name, shape in shapes.items()}
