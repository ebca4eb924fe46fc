"""Device code of the general product for many rows: a block's warps share tiles of W and x in shared memory.

Each warp goes through all of K and closes a chain at each slice's end, with the slices and the order of `kernels.cuda_linear_parts`: the same
bits as the products whose warps own one slice each. The first warp also fetches, a ring of groups ahead.
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
    run_place,
    store_result,
    unpack_weights,
)
from kernels.device_code import traced
from kernels.intrinsics import (
    block_x,
    block_y,
    bulk_copy,
    fence_async,
    grid_dependency_launch,
    grid_dependency_wait,
    less,
    load_f32_if,
    load_shared_128,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    shared_base,
    sync_block,
    sync_warp,
    thread_id,
    wide,
)
from kernels.reads import ends_of_sums, make_zero_once, never_of


@dataclass(frozen=True)
class Tiled:
    """warps_m x warps_n warps, each with `tiles` x 16 weight rows and `columns` x 8 rows of x; `stages` groups in the ring."""

    kind: str
    tiles: int
    columns: int
    warps_m: int
    warps_n: int
    stages: int
    blocks_per_sm: int = 1

    @property
    def block_tiles(self) -> int:
        return self.tiles * self.warps_m

    @property
    def block_columns(self) -> int:
        return self.columns * self.warps_n

    @property
    def stage_bytes(self) -> int:
        return self.block_tiles * GROUP_BYTES[self.kind] + self.block_columns * X_GROUP_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16)

    @property
    def num_threads(self) -> int:
        return 32 * self.warps_m * self.warps_n


def make_tiled(shape: Tiled) -> Any:
    """y float32 (n, num_out) = or += x W^T s [+ bias]; grid (runs of rows of x, runs of weight rows).

    Kernel arguments: packed W, s float32, bias (0: none), planes of x, 1 / s of x, y; n, num_out, num_in, groups, num_tiles,
    is_add, has_bias.
    """
    kind, tiles, columns = shape.kind, shape.tiles, shape.columns
    block_tiles, block_columns = shape.block_tiles, shape.block_columns
    words, group_bytes = load_words(kind), GROUP_BYTES[kind]
    stages, stage_bytes = shape.stages, shape.stage_bytes
    w_stride, x_stride = RUN * group_bytes, RUN * X_GROUP_BYTES
    x_at, bars_at = block_tiles * group_bytes, stages * stage_bytes
    num_warps, warps_n = shape.warps_m * shape.warps_n, shape.warps_n
    num_acc = 4 * tiles * columns
    zero_once = make_zero_once(ends_of_sums(tiles, columns))
    assert RUN % block_tiles == 0 and RUN % block_columns == 0, "a block's tiles lie in one run"

    @traced("f" * num_acc)
    def no_sums() -> Any:
        return (0.0,) * num_acc

    def parts_of(values: Any) -> list[list[Any]]:
        return [[values[4 * (t * columns + c) :][:4] for c in range(columns)] for t in range(tiles)]

    @traced("f" * num_acc)
    def multiply(acc: Any, at_w: Any, at_x: Any) -> Any:
        sums = parts_of(acc)
        x = [
            [load_shared_128(at_x + c * X_GROUP_BYTES + plane * 512) for plane in range(2)]
            for c in range(columns)
        ]
        whole = None
        if kind == "int8":
            whole = [load_shared_128(at_w + t * group_bytes) for t in range(tiles)]
        for step in range(2):
            own = []
            for t in range(tiles):
                if whole is not None:
                    own.append(unpack_weights(kind, whole[t], step))
                else:
                    at = at_w + t * group_bytes + step * 512
                    own.append([load_shared_128(at + 128 * i) for i in range(0, words, 8)])
            accumulate(sums, own, x, step)
        return tuple(value for row in sums for part in row for value in part)

    @traced("f" * (2 * columns))
    def load_inverses(inverse: Any, row: Any, n: Any, number: Any) -> Any:
        return tuple(
            load_f32_if(
                inverse + ((row + 8 * c + odd) * SLICES + number) * 4, less(row + 8 * c + odd, n)
            )
            for c in range(columns)
            for odd in range(2)
        )

    @traced("f" * num_acc)
    def close(sums: Any, acc: Any, inverses: Any) -> Any:
        """sums + acc, each column of x scaled back."""
        return tuple(
            sums[i] + acc[i] * inverses[2 * ((i >> 2) % columns) + (i & 1)] for i in range(num_acc)
        )

    @traced()
    def finish(
        sums: Any, scale: Any, bias: Any, y: Any, row: Any, out: Any, n: Any, num_out: Any, is_add: Any,
        has_bias: Any,
    ) -> None:  # fmt: skip
        for t, in_tile in enumerate(parts_of(sums)):
            for high in range(2):
                place = out + 16 * t + 8 * high
                is_out = less(place, num_out)
                ready = (
                    load_f32_if(scale + place * 4, is_out),
                    load_f32_if(bias + place * 4, is_out & has_bias),
                )
                for c, part in enumerate(in_tile):
                    for odd in range(2):
                        is_there = is_out & less(row + 8 * c + odd, n)
                        at = y + (wide(row + 8 * c + odd) * num_out + place) * 4
                        old = load_f32_if(at, is_there & is_add)
                        store_result(at, part[2 * high + odd], (*ready, old), is_there, is_add)

    @traced()
    def fetch_weights(shared: Any, weights: Any, group: Any, slot: Any) -> None:
        bar = shared + bars_at + slot * 16
        mbarrier_expect(bar, stage_bytes)
        place = shared + slot * stage_bytes
        bulk_copy(place, weights + wide(group) * w_stride, block_tiles * group_bytes, bar)

    @traced()
    def fetch_x(shared: Any, x: Any, group: Any, slot: Any) -> None:
        place, bar = shared + slot * stage_bytes + x_at, shared + bars_at + slot * 16
        bulk_copy(place, x + wide(group) * x_stride, block_columns * X_GROUP_BYTES, bar)

    def kernel(
        weights: Any, scale: Any, bias: Any, x: Any, inverse: Any, y: Any, n: Any, num_out: Any,
        num_in: Any, groups: Any, num_tiles: Any, is_add: Any, has_bias: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        shared = shared_base()
        if thread_id() < stages:
            mbarrier_init(shared + bars_at + thread_id() * 16, 1)
            mbarrier_init(shared + bars_at + thread_id() * 16 + 8, num_warps)
            mbarrier_init_fence()
        sync_block()
        grid_dependency_launch()
        first_tile, first_column = block_y() * block_tiles, block_x() * block_columns
        # a run is whole in memory: what comes of tiles beyond the end is not stored
        weights += run_place(first_tile, groups, group_bytes)
        x += run_place(first_column, groups, X_GROUP_BYTES)
        if thread_id() == 0:
            for group in range(min(stages, groups)):
                fetch_weights(shared, weights, group, group)
        grid_dependency_wait()
        if thread_id() == 0:
            fence_async()
            for group in range(min(stages, groups)):
                fetch_x(shared, x, group, group)
        warp_m, warp_n = warp // warps_n, warp % warps_n
        row = first_column * 8 + warp_n * (8 * columns) + 2 * (lane & 3)
        at_w = shared + warp_m * (tiles * group_bytes) + lane * 16
        at_x = shared + x_at + warp_n * (columns * X_GROUP_BYTES) + lane * 16
        per = (groups + SLICES - 1) >> 3
        sums, never = no_sums(), never_of(n)
        slot, parity, before, parity_before = 0, 0, 0, 0
        for low in range(0, groups, per):
            acc = no_sums()
            inverses = load_inverses(inverse, row, n, low // per)
            for group in range(low, min(groups, low + per)):
                mbarrier_wait(shared + bars_at + slot * 16, parity)
                acc = multiply(acc, at_w + slot * stage_bytes, at_x + slot * stage_bytes)
                sync_warp()
                # PERF: of the block alone; a release to the cluster would order all memory, every group
                if lane == 0:
                    mbarrier_arrive(shared + bars_at + slot * 16 + 8 + zero_once(acc, never))
                # the group before is most likely done with by all warps: its place in the ring is filled
                later = group + (stages - 1)
                if thread_id() == 0 and group > 0 and later < groups:
                    mbarrier_wait(shared + bars_at + before * 16 + 8, parity_before)
                    fetch_weights(shared, weights, later, before)
                    fetch_x(shared, x, later, before)
                before, parity_before = slot, parity
                slot += 1
                if slot == stages:
                    slot, parity = 0, 1 - parity
            sums = close(sums, acc, inverses)
        out = (first_tile + warp_m * tiles) * 16 + (lane >> 2)
        finish(sums, scale, bias, y, row, out, n, num_out, is_add, has_bias)

    return kernel
