"""The ends of a decode step: look up embeddings and places at its start, and let rows leave at their own depth.

One block a row, and more that make memory forget what the step before has told. What later kernels read about a row (its slot in each loop, its rotary angles) is gathered here
once, so that they find it by one load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.fragments import ProductShape, pack_prescaled, packed_place
from kernels.intrinsics import (
    block_x,
    block_y,
    fence_device,
    fma,
    grid_dependency_launch,
    grid_dependency_wait,
    grid_x,
    grid_y,
    less,
    load_32_if,
    load_f32x2,
    load_f32x2_if,
    load_i32,
    store_32,
    store_32_if,
    store_128_if,
    store_f32_if,
    store_f32x2,
    store_f32x2_if,
    sum_of_8_lanes,
    thread_id,
    unpack_half2,
    wide,
)

_THREADS = 256
_FORGETTING = 128  # blocks, about


@dataclass(frozen=True)
class StepShape:
    """d is a multiple of 16; `angles` is half the rotary width, 0 without rotary positions.

    `target` is the product that reads x, `column_tiles` x 8 rows at a time. `is_from_state`: rows start from the x that is there, not from
    embeddings.
    """

    d_model: int
    angles: int
    target: ProductShape
    column_tiles: int
    has_learned_positions: bool = False
    is_from_state: bool = False

    @property
    def threads(self) -> int:
        """One for each two numbers of a row, at most 1,024."""
        return min(1024, -(-self.d_model // 64) * 32)


def _make_begin(shape: StepShape) -> Any:
    d, angles, threads = shape.d_model, shape.angles, shape.threads
    pairs = d // 2

    @traced()
    def embed(
        embeddings: Any, learned: Any, x: Any, squares: Any, gain: Any, packed: Any, token: Any,
        position: Any, row: Any, pair: Any, is_real: Any, scale: Any,
    ) -> None:  # fmt: skip
        address = x + (wide(row) * d + pair * 2) * 4
        if shape.is_from_state:
            first, second = load_f32x2_if(address, is_real)
        else:
            first, second = unpack_half2(
                load_32_if(embeddings + (wide(token) * d + pair * 2) * 2, is_real)
            )
            first, second = first * scale, second * scale
            if shape.has_learned_positions:
                at = learned + (wide(position) * d + pair * 2) * 2
                more = unpack_half2(load_32_if(at, is_real))
                first, second = first + more[0], second + more[1]
            store_f32x2_if(address, first, second, is_real)
        total = sum_of_8_lanes(fma(first, first, second * second))
        gains = load_f32x2_if(gain + pair * 8, is_real)
        place = packed_place(row, pair * 2, shape.target, shape.column_tiles)
        halves = pack_prescaled(first * gains[0], second * gains[1])
        store_32_if(packed + wide(place) * 2, halves, is_real)
        store_f32_if(
            squares + (row * (d // 16) + (pair >> 3)) * 4, total, is_real & less(pair & 7, 1)
        )

    @device_function
    def begin(
        tokens: Any, embeddings: Any, learned: Any, x: Any, squares: Any, positions: Any, row_info: Any,
        blocks: Any, slots: Any, rope_table: Any, rope: Any, gain: Any, packed: Any, depths: Any, sources: Any, chosen: Any,
        num_loops: Any, max_loops: Any, blocks_a_loop: Any, scale: Any, row: Any, thread: Any,
    ) -> None:  # fmt: skip
        position = load_i32(positions + row * 4)
        before = load_i32(row_info + row * 8 + 4)
        is_row = position >= 0
        last = num_loops
        if depths != 0:
            last = load_i32(depths + row * 4)
        token = load_i32(tokens + row * 4)
        if sources != 0:
            source = load_i32(sources + row * 4)
            if source >= 0:
                token = load_i32(chosen + source * 4)
        safe = position if is_row else 0
        # The whole warp goes round together: `embed` adds over lanes.
        for first in range(0, pairs, threads):
            pair = first + thread
            embed(
                embeddings, learned, x, squares, gain, packed, token, safe, row,
                pair if pair < pairs else 0, less(pair, pairs), scale,
            )  # fmt: skip
        for loop in range(thread, num_loops, threads):
            slot = -1
            if is_row and loop < last:
                table = (row * max_loops + before + loop) * blocks_a_loop
                if blocks_a_loop > 1:
                    table += position >> 6
                slot = load_i32(blocks + table * 4) * 64 + (position & 63)
            store_32(slots + (loop * grid_x() + row) * 4, slot)
        for angle in range(thread, angles, threads):
            cos, sin = load_f32x2(rope_table + (wide(safe) * angles + angle) * 8)
            store_f32x2(rope + (row * angles + angle) * 8, cos, sin)

    def kernel(
        tokens: Any, embeddings: Any, learned: Any, x: Any, squares: Any, positions: Any, row_info: Any,
        blocks: Any, slots: Any, rope_table: Any, rope: Any, gain: Any, packed: Any, depths: Any, sources: Any, chosen: Any,
        told: Any, num_told: Any, num_loops: Any, max_loops: Any, blocks_a_loop: Any, scale: Any,
    ) -> None:  # fmt: skip
        row, thread = block_x(), thread_id()
        grid_dependency_launch()
        grid_dependency_wait()
        if block_y() == 0:
            begin(
                tokens, embeddings, learned, x, squares, positions, row_info, blocks, slots, rope_table, rope, gain, packed,
                depths, sources, chosen, num_loops, max_loops, blocks_a_loop, scale, row, thread,
            )  # fmt: skip
        else:
            first = ((block_y() - 1) * grid_x() + row) * threads + thread
            for at in range(first, num_told, (grid_y() - 1) * grid_x() * threads):
                store_128_if(told + at * 16, -1, -1, -1, -1, 1)

    return kernel


def begin_grid(rows: int, *, has_told: bool) -> tuple[int, int]:
    """The grid of `begin_step`."""
    return rows, 1 + has_told * -(-_FORGETTING // rows)


def begin_step(shape: StepShape) -> Variant:
    """Embed the rows' tokens (or take their states) and gather what the step needs.

    Kernel arguments: tokens int32 (rows,); embeddings fp16 (vocab, d); learned positions fp16 (max_pos, d);
    x float32 (rows, d) and its sums of squares (rows, d/16), both written; positions int32 (rows,), -1: no row;
    row_info int32 (rows, 2), [1] = the row's loop before this step; blocks int32 (rows, max_loops, blocks_a_loop)
    (with 1: the own block; else the table); slots int32 (num_loops, rows), written; rope_table float32
    (max_pos, angles, 2); rope float32 (rows, angles, 2), written; gain float32 (d,) of the norm that x meets first;
    packed fp16 x times gain in the order of `target`, written; depths int32 (rows,), after how many loops each row leaves, or
    absent: none does; sources int32 (rows,), absent or for rows with a source >= 0 where in `chosen` (int32) their token stands;
    told, memory in which blocks of one running kernel will tell each other numbers, and how often 16 bytes of it are set to NOTHING;
    num_loops, max_loops, blocks_a_loop, scale. Grid: `begin_grid`.
    """
    return Variant(
        name="begin_passes" if shape.is_from_state else "begin_step",
        function=_make_begin(shape),
        args="l" * 17 + "rrrrf",
        num_threads=shape.threads,
        constants=(shape,),
    )


def _make_leave(d_model: int) -> Any:
    pairs = d_model // 2

    @traced()
    def move(source: Any, target: Any, at: Any) -> None:
        store_f32x2(target + wide(at) * 8, *load_f32x2(source + wide(at) * 8))

    def kernel(x: Any, final: Any, depths: Any, positions: Any, num_done: Any) -> None:
        row, thread = block_x(), thread_id()
        # Nothing that follows may start before this has ended: attention reads positions without waiting.
        grid_dependency_wait()
        if load_i32(depths + row * 4) == num_done:
            for pair in range(thread, pairs, _THREADS):
                move(x, final, row * pairs + pair)
            if thread == 0:
                store_32(positions + row * 4, -1)
                fence_device()

    return kernel


def leave(d_model: int) -> Variant:
    """Rows whose depth is reached put their states aside and are no rows of the passes that follow.

    Kernel arguments: x float32 (rows, d); final float32 (rows, d), written; depths int32 (rows,); positions int32 (rows,), written;
    num_done, the loops that are done.
    """
    return Variant(
        "leave", _make_leave(d_model), "llllr", num_threads=_THREADS, constants=(d_model,)
    )


def variants() -> dict[str, Variant]:
    """What needs no model's products to be made for."""
    return {"leave": leave(1536)}
