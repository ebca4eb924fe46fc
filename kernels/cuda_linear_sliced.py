"""Device code of the general product for few rows: a block's 8 warps each own one slice of K.

Slices, chains and their order are those of `kernels.cuda_linear_parts`. Weights come straight from global memory, a chunk of groups
ahead; up to 8 rows of x are split by the block itself, more by a kernel before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.cuda_linear_parts import (
    GROUP_BYTES,
    RUN,
    SLICES,
    X_GROUP_BYTES,
    accumulate,
    load_words,
    make_stage_slice,
    run_place,
    store_result,
    unpack_weights,
)
from kernels.device_code import traced
from kernels.intrinsics import (
    bits_of,
    block_x,
    block_y,
    f32_of,
    grid_dependency_launch,
    grid_dependency_wait,
    grid_x,
    int_to_f32,
    less,
    load_128_if,
    load_f32_if,
    load_shared_128,
    load_shared_f32,
    load_weight_128_if,
    select_int,
    shared_base,
    shuffle_from,
    store_shared_128_if,
    store_shared_f32_if,
    sync_block,
    sync_warp,
    thread_id,
    wide,
)


@dataclass(frozen=True)
class Sliced:
    """A product whose block has 8 warps, one a slice, for `tiles` x 16 weight rows and `columns` x 8 rows of x.

    `max_groups`: with x staged by the block itself, in shared memory, for up to that many groups; 0: x was staged by a kernel before.
    """

    kind: str
    tiles: int
    columns: int
    chunk: int
    max_groups: int = 0
    blocks_per_sm: int = 1
    held: int = 4  # groups of x in registers while the block stages it

    @property
    def row_floats(self) -> int:
        """Floats from one row's partial sums to the next; no two lanes of a store meet in a bank."""
        return 16 * self.tiles + 4

    @property
    def partial_bytes(self) -> int:
        """Bytes of one slice's sums."""
        return 8 * self.columns * self.row_floats * 4

    @property
    def shared_bytes(self) -> int:
        zeros = 512 if self.max_groups else 0
        return SLICES * self.partial_bytes + zeros + self.max_groups * X_GROUP_BYTES


def make_sliced(shape: Sliced) -> Any:
    """y float32 (n, num_out) = or += x W^T s [+ bias]; grid (any number of blocks, runs of rows).

    Kernel arguments: packed W, s float32, bias (0: none), x (float32, or planes), 1 / s of x, y; n, num_out, num_in, groups,
    num_tiles, is_add.
    """
    kind, tiles, columns, chunk = shape.kind, shape.tiles, shape.columns, shape.chunk
    words, group_bytes = load_words(kind), GROUP_BYTES[kind]
    w_stride, x_stride = RUN * group_bytes, RUN * X_GROUP_BYTES
    row_floats, partial_bytes = shape.row_floats, shape.partial_bytes
    assert RUN % tiles == 0 and RUN % columns == 0, "a block's tiles lie in one run"
    is_direct = shape.max_groups > 0
    width_shift = (16 * tiles).bit_length() - 1
    zeros_at, x_at = SLICES * partial_bytes, SLICES * partial_bytes + 512
    num_acc = 4 * tiles * columns
    stage = make_stage_slice(is_shared=True, held=shape.held)

    @traced("r" * (chunk * tiles * words))
    def load_weights(at: Any, group: Any, end: Any, num_tiles: Any) -> Any:
        found = []
        for i in range(chunk):
            for tile in range(tiles):
                is_there = less(group + i, end) & less(tile, num_tiles)
                place = at + (i * RUN + tile) * group_bytes
                for q in range(words // 4):
                    found += load_weight_128_if(place + q * 512, is_there)
        return tuple(found)

    @traced("r" * 2)
    def no_x() -> Any:
        return 0, 0

    @traced("r" * (chunk * columns * 8))
    def load_x(at: Any, group: Any, end: Any, num_columns: Any) -> Any:
        found = []
        for i in range(chunk):
            for column in range(columns):
                is_there = less(group + i, end) & less(column, num_columns)
                place = at + (i * RUN + column) * X_GROUP_BYTES
                for plane in range(2):
                    found += load_128_if(place + plane * 512, is_there)
        return tuple(found)

    @traced("f" * num_acc)
    def no_sums() -> Any:
        return (0.0,) * num_acc

    @traced("f" * num_acc)
    def multiply(acc: Any, weights: Any, x: Any, shared: Any, group: Any, end: Any) -> Any:
        sums = [
            [acc[4 * (t * columns + c) : 4 * (t * columns + c) + 4] for c in range(columns)]
            for t in range(tiles)
        ]
        for i in range(chunk):
            if is_direct:
                # beyond the end the weights are any numbers, x is zeros
                is_there = less(group + i, end)
                places = [shared + x_at + (group + i) * X_GROUP_BYTES + p * 512 for p in range(2)]
                parts = [
                    [
                        load_shared_128(select_int(place, shared + zeros_at, is_there))
                        for place in places
                    ]
                ]
            else:
                parts = [
                    [x[8 * (i * columns + c) + 4 * plane :][:4] for plane in range(2)]
                    for c in range(columns)
                ]
            own = [
                weights[(i * tiles + t) * words : (i * tiles + t + 1) * words] for t in range(tiles)
            ]
            for step in range(2):
                accumulate(sums, [unpack_weights(kind, w, step) for w in own], parts, step)
        return tuple(value for row in sums for part in row for value in part)

    @traced("f" * (2 * columns))
    def load_inverses(inverse: Any, row: Any, n: Any, warp: Any) -> Any:
        """1 / s of this slice of the rows that a lane's sums belong to."""
        return tuple(
            load_f32_if(
                inverse + ((row + 8 * c + odd) * SLICES + warp) * 4, less(row + 8 * c + odd, n)
            )
            for c in range(columns)
            for odd in range(2)
        )

    @traced("ff")
    def share_inverses(own: Any, lane: Any) -> Any:
        bits, t = bits_of(own), lane & 3
        return tuple(f32_of(shuffle_from(bits, 8 * t + 4 * odd)) for odd in range(2))

    @traced()
    def keep(acc: Any, inverses: Any, place: Any, lane: Any) -> None:
        g, t = lane >> 2, lane & 3
        for tile in range(tiles):
            for c in range(columns):
                part = acc[4 * (tile * columns + c) :][:4]
                for odd in range(2):
                    at = place + ((8 * c + 2 * t + odd) * row_floats + 16 * tile + g) * 4
                    factor = inverses[2 * c + odd]
                    store_shared_f32_if(at, part[odd] * factor, 1)
                    store_shared_f32_if(at + 32, part[odd + 2] * factor, 1)

    @traced("fff")
    def prepare(
        scale: Any, bias: Any, y: Any, row: Any, out: Any, num_out: Any, is_there: Any, is_add: Any,
        has_bias: Any,
    ) -> Any:  # fmt: skip
        is_there = is_there & less(out, num_out)
        return (
            load_f32_if(scale + out * 4, is_there),
            load_f32_if(bias + out * 4, is_there & has_bias),
            load_f32_if(y + (wide(row) * num_out + out) * 4, is_there & is_add),
        )

    @traced()
    def finish(
        ready: Any, shared: Any, in_tile: Any, y: Any, row: Any, out: Any, num_out: Any, is_add: Any
    ) -> None:
        at = shared + ((in_tile >> width_shift) * row_floats + (in_tile & (16 * tiles - 1))) * 4
        total = int_to_f32(0)
        for i in range(SLICES):
            total = total + load_shared_f32(at + i * partial_bytes)
        store_result(y + (wide(row) * num_out + out) * 4, total, ready, less(out, num_out), is_add)

    def kernel(
        weights: Any, scale: Any, bias: Any, x: Any, inverse: Any, y: Any, n: Any, num_out: Any,
        num_in: Any, groups: Any, num_tiles: Any, is_add: Any, has_bias: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        shared = shared_base()
        per = (groups + SLICES - 1) >> 3
        low = warp * per
        end = min(groups, low + per)
        weights += low * w_stride + lane * 16
        own = load_weights(
            weights + run_place(block_x() * tiles, groups, group_bytes), low, end,
            num_tiles - block_x() * tiles,
        )  # fmt: skip
        grid_dependency_launch()
        grid_dependency_wait()
        first_row = block_y() * (8 * columns)
        num_columns = (n - first_row + 7) >> 3
        if is_direct:
            at_x = shared + lane * 16
            store_shared_128_if(at_x + zeros_at, 0, 0, 0, 0, 1)
            mine = stage(x, first_row, n, num_in, low, end, lane, at_x + x_at)
            sync_warp()
            inverses = share_inverses(mine, lane)
            parts = no_x()
        else:
            at_x = shared
            x += run_place(block_y() * columns, groups, X_GROUP_BYTES) + lane * 16
            parts = load_x(x + low * x_stride, low, end, num_columns)
            inverses = load_inverses(inverse, first_row + 2 * (lane & 3), n, warp)
        num_sums = min(n - first_row, 8 * columns) * (16 * tiles)
        for tile in range(block_x() * tiles, num_tiles, grid_x() * tiles):
            acc = no_sums()
            for group in range(low, end, chunk):
                following, next_tile = group + chunk, tile
                if following >= end:
                    following, next_tile = low, tile + grid_x() * tiles
                later = load_weights(
                    weights + run_place(next_tile, groups, group_bytes) + (following - low) * w_stride,
                    following, end, num_tiles - next_tile,
                )  # fmt: skip
                if is_direct:
                    acc = multiply(acc, own, parts, at_x, group, end)
                else:
                    later_x = load_x(x + following * x_stride, following, end, num_columns)
                    acc = multiply(acc, own, parts, at_x, group, end)
                    parts = later_x
                own = later
            in_tile = thread_id()
            row = first_row + (in_tile >> width_shift)
            out = tile * 16 + (in_tile & (16 * tiles - 1))
            ready = prepare(
                scale, bias, y, row, out, num_out, less(in_tile, num_sums), is_add, has_bias
            )
            keep(acc, inverses, shared + warp * partial_bytes, lane)
            sync_block()
            for i in range(thread_id(), num_sums, 32 * SLICES):
                finish(ready, shared, i, y, row, out, num_out, is_add)
                row = first_row + ((i + 32 * SLICES) >> width_shift)
                ready = prepare(
                    scale, bias, y, row, out, num_out, less(i + 32 * SLICES, num_sums), is_add, has_bias
                )  # fmt: skip
            sync_block()

    return kernel
