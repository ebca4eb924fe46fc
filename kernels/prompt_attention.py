"""Attention of prompt rows over the paged cache on the matrix unit.

A tile is up to 64 rows of one sequence whose positions lie in one aligned block of 64. One block of threads has a tile and a query
head; each of its 4 warps 16 rows. Key blocks are read in ascending order up to the tile's own, with a running softmax (float32
sums, fp16 weights): what a row adds, and in which order, depends on its position, its window and the keys alone, never
on the chunk, the other rows of the tile or the other sequences of the pass. Blocks that a window hides from a whole tile are skipped; reading
them would add zeros. K and V of the rows must be in the cache before, and whatever a block holds after them must be finite.

The fragment order of the cache is also that of a B operand: of a lane's four words of 16 keys, words 0 and 2 belong to the first 8 keys,
1 and 3 to the others. K and V come by bulk copies through a ring; scores turn into the A operand of the second product in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function
from kernels.intrinsics import (
    block_x,
    bulk_copy,
    fence_async,
    grid_dependency_launch,
    grid_dependency_wait,
    load_i32,
    mbarrier_arrive_cluster,
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
    make_finish,
    make_load_query,
    make_scores,
    make_slope,
    make_softmax,
    make_values,
    make_zeros,
    start,
)

TILE_ROWS = 64
TILE_FIELDS = (
    8  # int32 of a tile: slot, table, first position, first row, number of rows, window, two unused
)
_WARPS = 4


@dataclass(frozen=True)
class PromptAttentionShape:
    """The model's side; head_dim is a multiple of 32."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_alibi: bool = False

    @property
    def half_bytes(self) -> int:
        """K or V of one block of one layer and kv head."""
        return 128 * self.head_dim


def _make_kernel(shape: PromptAttentionShape, stages: int) -> Any:
    heads, group = shape.num_heads, shape.num_heads // shape.num_kv_heads
    half_bytes, row_bytes = shape.half_bytes, 2 * shape.head_dim
    bars_at, free_at = stages * half_bytes, stages * half_bytes + 8 * stages
    load_query, scores, values = make_load_query(shape), make_scores(shape), make_values(shape)
    softmax, softmax_masked = make_softmax(shape, False), make_softmax(shape, True)
    zeros, finish, load_slope = make_zeros(shape), make_finish(shape), make_slope(shape)

    @device_function
    def fetch(load: Any, skipped: Any, table: Any, cache: Any, block_bytes: Any, base: Any) -> None:
        """Start the copy of half `load & 1` of the (load / 2)-th block that the tile reads."""
        block = load >> 1
        if block > 0:
            block += skipped
        slot, turn = remainder(load, stages), quotient(load, stages)
        if turn > 0:
            mbarrier_wait(base + free_at + slot * 8, (turn - 1) & 1)
        source = cache + wide(load_i32(table + block * 4)) * block_bytes + (load & 1) * half_bytes
        bar = base + bars_at + slot * 8
        mbarrier_expect(bar, half_bytes)
        bulk_copy(base + slot * half_bytes, source, half_bytes, bar)

    @device_function
    def arrived(load: Any, base: Any) -> Any:
        slot = remainder(load, stages)
        mbarrier_wait(base + bars_at + slot * 8, quotient(load, stages) & 1)
        return base + slot * half_bytes

    def kernel(
        q: Any, cache: Any, layer_bytes: Any, block_bytes: Any, tables: Any, tiles: Any, slopes: Any, out: Any,
        num_tables: Any, max_blocks: Any,
    ) -> None:  # fmt: skip
        thread, lane, warp = thread_id(), thread_id() & 31, thread_id() >> 5
        base = shared_base()
        tile = tiles + quotient(block_x(), heads) * (4 * TILE_FIELDS)
        head = remainder(block_x(), heads)
        if thread == 0:
            for i in range(stages):
                mbarrier_init(base + bars_at + 8 * i, 1)
                mbarrier_init(base + free_at + 8 * i, _WARPS)
            mbarrier_init_fence()
        sync_block()
        grid_dependency_launch()
        grid_dependency_wait()
        fence_async()
        slot, which, first = load_i32(tile), load_i32(tile + 4), load_i32(tile + 8)
        first_row, rows, window = load_i32(tile + 12), load_i32(tile + 16), load_i32(tile + 20)
        own = first >> 6
        # Without the blocks between the first, which has the sinks, and the first that a row's window reaches.
        skipped = 0
        if window > 0 and first - window >= 127:
            skipped = ((first - window + 1) >> 6) - 1
        num_loads = 2 * (own + 1 - skipped)
        table = tables + wide((slot * num_tables + which) * max_blocks) * 4
        source = cache + layer_bytes + quotient(head, group) * (2 * half_bytes)
        if thread == 0:
            for load in range(min(stages - 1, num_loads)):
                fetch(load, skipped, table, source, block_bytes, base)
        row = warp * 16
        head_at = wide(first_row * heads + head) * row_bytes
        query = load_query(q + head_at, row, rows, lane)
        slope = load_slope(slopes, head)
        position = first + row + (lane >> 2)
        top0, top1, sum0, sum1 = start()
        total = zeros()
        for load in range(0, num_loads, 2):
            block = load >> 1
            if block > 0:
                block += skipped
            if thread == 0 and load + stages - 1 < num_loads:
                fetch(load + stages - 1, skipped, table, source, block_bytes, base)
            keys = arrived(load, base)
            shown = scores(query, keys + lane * 16)
            sync_warp()
            if lane == 0:
                mbarrier_arrive_cluster(base + free_at + remainder(load, stages) * 8)
            if block == own or window > 0:
                step = softmax_masked(
                    shown, top0, top1, sum0, sum1, block * 64, position, window, slope, lane
                )
            else:
                step = softmax(
                    shown, top0, top1, sum0, sum1, block * 64, position, window, slope, lane
                )
            top0, top1, sum0, sum1 = step[16], step[17], step[18], step[19]
            if thread == 0 and load + stages < num_loads:
                fetch(load + stages, skipped, table, source, block_bytes, base)
            total = values(
                total, step[0:16], step[20], step[21], arrived(load + 1, base) + lane * 16
            )
            sync_warp()
            if lane == 0:
                mbarrier_arrive_cluster(base + free_at + remainder(load + 1, stages) * 8)
        finish(total, sum0, sum1, out + head_at, row, rows, lane)

    return kernel


def prompt_attention(
    shape: PromptAttentionShape, stages: int = 4, blocks_per_sm: int = 2
) -> Variant:
    """Attention of prompt tiles; grid (number of tiles x query heads, 1), tiles with most keys first.

    Kernel arguments: q fp16 (rows, num_heads, head_dim), already times log2(e) / sqrt(head_dim); the cache, bytes of the layer's
    offset and of a block over all layers; block_tables int32 (slots, tables, max_blocks); tiles int32 (num_tiles, TILE_FIELDS); slopes
    float32 (num_heads,) or absent; out fp16 (rows, num_heads, head_dim); num_tables, max_blocks.
    """
    if shape.head_dim % 32 or shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{shape}: head_dim must be a multiple of 32, the heads of the kv heads")
    alibi = "_alibi" if shape.has_alibi else ""
    return Variant(
        name=f"prompt_attention_h{shape.num_heads}k{shape.num_kv_heads}d{shape.head_dim}{alibi}_s{stages}b{blocks_per_sm}",
        function=_make_kernel(shape, stages),
        args="llllllll" + "rr",
        num_threads=32 * _WARPS,
        shared_bytes=stages * (shape.half_bytes + 16),
        blocks_per_sm=blocks_per_sm,
        constants=(shape, stages, blocks_per_sm),
    )


def variants() -> dict[str, Variant]:
    """What `scripts/check_ptx.py` compiles."""
    shapes = {
        "d128": (PromptAttentionShape(12, 12, 128), 4, 2),
        "d128s4b3": (PromptAttentionShape(12, 12, 128), 4, 3),
        "gqa": (PromptAttentionShape(16, 2, 64), 4, 3),
        "alibi": (PromptAttentionShape(8, 8, 96, True), 4, 2),
    }
    return {f"prompt_attention_{name}": prompt_attention(*args) for name, args in shapes.items()}
