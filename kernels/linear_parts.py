"""The parts of a few-row product, each made for one launch shape: multiply, hand over, collect, stage x, finish.

Straight-line device code; `linear.py` puts it together and says what it is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.device_code import device_function, traced
from kernels.fragments import RANKS, ProductShape, key_place, packed_place, value_place
from kernels.intrinsics import (
    block_y,
    bulk_copy,
    exp2,
    fence_async,
    fma,
    int_to_f32,
    less,
    load_128_if,
    load_cluster_f32x2,
    load_f32_if,
    load_f32x2,
    load_f32x2_if,
    load_f32x4_if,
    load_i32,
    load_shared_128,
    load_shared_f32x2,
    map_shared,
    mbarrier_expect,
    mbarrier_wait,
    mma,
    pack_half2,
    quotient,
    reciprocal,
    remainder,
    rsqrt,
    select,
    select_int,
    select_wide,
    shared_base,
    store_16_if,
    store_async_f32x2,
    store_f32_if,
    store_f32x2_if,
    store_shared_128_if,
    store_shared_f32x2,
    sum_of_8_lanes,
    sum_of_warp,
    thread_id,
    wide,
)

if TYPE_CHECKING:
    from kernels.linear import HeadShape, Launch

PULL_ROW = 80  # bytes of 8 pairs, padded so that the stores meet no bank twice
BARS = 40  # bytes of memory barriers: x has come, sums have come (2 buffers), buffers are free (2)


# --- pieces shared by all products -----------------------------------------------------------------


@traced("ff")
def _add_pairs(pairs: Any) -> Any:
    first, second = pairs[0]
    for more_first, more_second in pairs[1:]:
        first = first + more_first
        second = second + more_second
    return first, second


def make_multiply(launch: Launch) -> Any:
    """acc[tile][column tile][4] of a warp, over one chain."""
    steps, tiles, columns = launch.shape.k_steps, launch.warp_tiles, launch.column_tiles
    tile_bytes = launch.shape.tile_bytes

    @traced("f" * (4 * tiles * columns))
    def multiply(weights: Any, x: Any) -> Any:
        acc = [[(0.0, 0.0, 0.0, 0.0)] * columns for _ in range(tiles)]
        for pair in range(steps // 2):
            a = [
                [load_shared_128(weights + t * tile_bytes + (2 * pair + s) * 512) for s in range(2)]
                for t in range(tiles)
            ]
            for c in range(columns):
                b = load_shared_128(x + (pair * columns + c) * 512)
                for step in range(2):
                    for tile in range(tiles):
                        acc[tile][c] = mma(
                            *acc[tile][c], *a[tile][step], *b[2 * step : 2 * step + 2]
                        )
        return tuple(value for row in acc for part in row for value in part)

    return multiply


def make_send(launch: Launch) -> Any:
    """Hand a warp's accumulators over: pairs (row g, row g+8) of each column."""
    tiles, columns, count = launch.warp_tiles, launch.column_tiles, launch.tiles
    width = launch.columns

    if launch.is_push:
        slots = launch.push_slots

        @traced()
        def send(
            acc: Any, base: Any, tile0: Any, source: Any, lane: Any, num_rows: Any, bar: Any
        ) -> None:
            # `source` = rank * sub_slices + sub slice; the owner of (m, tile) is (m * count + tile) % 8.
            g, t = lane >> 2, lane & 3
            for tile in range(tiles):
                for c in range(columns):
                    part = acc[4 * (tile * columns + c) : 4 * (tile * columns + c) + 4]
                    for odd in range(2):
                        m = 8 * c + 2 * t + odd
                        unit = m * count + tile0 + tile
                        local = base + (source * slots + (unit >> 3)) * 64 + g * 8
                        remote, pair = map_shared(local, unit & 7), (part[odd], part[odd + 2])
                        there = map_shared(bar, unit & 7)
                        store_async_f32x2(remote, *pair, there, num_rows - m)

        return send

    @traced()
    def keep(
        acc: Any, base: Any, tile0: Any, source: Any, lane: Any, num_rows: Any, bar: Any
    ) -> None:
        g, t = lane >> 2, lane & 3
        for tile in range(tiles):
            for c in range(columns):
                part = acc[4 * (tile * columns + c) : 4 * (tile * columns + c) + 4]
                for odd in range(2):
                    m = 8 * c + 2 * t + odd
                    local = base + ((source + tile) * width + m) * PULL_ROW + g * 8
                    store_shared_f32x2(local, part[odd], part[odd + 2])

    return keep


def make_collect(launch: Launch) -> Any:
    """The sum of all chains for (m, tile, g): a pair of floats."""
    chains, slots = launch.shape.sub_slices, launch.push_slots
    count, width = launch.tiles, launch.columns

    if launch.is_push:

        @traced("ff")
        def collect(base: Any, unit: Any, m: Any, tile: Any, g: Any) -> Any:
            local = base + (unit >> 3) * 64 + g * 8
            return _add_pairs(
                [load_shared_f32x2(local + i * slots * 64) for i in range(RANKS * chains)]
            )

        return collect

    @traced("ff")
    def fetch(base: Any, unit: Any, m: Any, tile: Any, g: Any) -> Any:
        local = base + (tile * width + m) * PULL_ROW + g * 8
        pairs = []
        for rank in range(RANKS):
            remote = map_shared(local, rank)
            for chain in range(chains):
                pairs.append(load_cluster_f32x2(remote + chain * count * width * PULL_ROW))
        return _add_pairs(pairs)

    return fetch


# --- staging x -------------------------------------------------------------------------------------


def make_stage_half(launch: Launch) -> Any:
    """x is fp16 (rows, k): copy this rank's columns."""
    units, threads = launch.shape.k_slice // 8, 32 * launch.num_warps
    k, column_tiles = launch.shape.k, launch.column_tiles
    batch = max(1, min(4, -(-launch.columns * units // threads)))

    @traced()
    def copy(x: Any, shared: Any, item: Any, rank: Any, num_items: Any) -> None:
        loads = []
        for i in range(batch):
            at = item + i * threads
            row, unit = quotient(at, units), remainder(at, units)
            column = (rank * units + unit) * 8
            is_row = less(at, num_items)
            loads.append(
                (
                    load_128_if(x + (row * k + column) * 2, is_row & less(column, k)),
                    row,
                    unit,
                    is_row,
                )
            )
        for values, row, unit, is_row in loads:
            place = ((unit >> 2) * column_tiles + (row >> 3)) * 512
            place = place + ((row & 7) * 4 + (unit & 3)) * 16
            store_shared_128_if(shared + place, *values, is_row)

    @device_function
    def stage(
        x: Any, partials: Any, gain: Any, shared: Any, rank: Any, rows: Any, eps: Any
    ) -> None:
        for first in range(thread_id(), rows * units, threads * batch):
            copy(x, shared, first, rank, rows * units)

    return stage


def make_stage_packed(launch: Launch) -> Any:
    """x is fp16 in the order of `fragments.packed_place`: one bulk copy brings this block's piece."""
    x_bytes = launch.x_bytes
    bar_at = launch.shared_bytes - BARS

    @device_function
    def stage(
        x: Any, partials: Any, gain: Any, shared: Any, rank: Any, rows: Any, eps: Any
    ) -> None:
        bar = shared_base() + bar_at
        if thread_id() == 0:
            fence_async()
            mbarrier_expect(bar, x_bytes)
            bulk_copy(shared, x + (block_y() * RANKS + rank) * x_bytes, x_bytes, bar)
        mbarrier_wait(bar, 0)

    return stage


def make_stage_norm(launch: Launch) -> Any:
    """x is float32 (rows, k) with the sums of squares of its 16-column tiles: RMS norm and gain, then fp16."""
    units, warps = launch.shape.k_slice // 8, launch.num_warps
    k, column_tiles = launch.shape.k, launch.column_tiles
    num_partials = k // 16
    batch = max(1, min(4, -(-launch.columns // warps)))
    inverse_k = 1.0 / k

    @traced()
    def normalise(
        x: Any,
        partials: Any,
        gain: Any,
        shared: Any,
        first: Any,
        lane: Any,
        rank: Any,
        rows: Any,
        eps: Any,
    ) -> None:
        in_row = []
        for i in range(batch):
            row = first + i * warps
            in_row.append((row, less(row, rows)))
        squares = [
            [
                load_f32_if(
                    partials + (row * num_partials + lane + j) * 4,
                    is_row & less(lane + j, num_partials),
                )
                for j in range(0, num_partials, 32)
            ]
            for row, is_row in in_row
        ]
        for unit0 in range(0, units, 32):
            unit = lane + unit0
            column = (rank * units + unit) * 8
            is_unit = less(unit, units)
            is_real = is_unit & less(column, k)
            gains = [
                *load_f32x4_if(gain + column * 4, is_real),
                *load_f32x4_if(gain + column * 4 + 16, is_real),
            ]
            values = []
            for row, is_row in in_row:
                address = x + (row * k + column) * 4
                values.append(
                    [
                        *load_f32x4_if(address, is_real & is_row),
                        *load_f32x4_if(address + 16, is_real & is_row),
                    ]
                )
            for i, (row, is_row) in enumerate(in_row):
                total = squares[i][0]
                for value in squares[i][1:]:
                    total = total + value
                scale = rsqrt(fma(sum_of_warp(total), inverse_k, eps))
                scaled = [v * scale * g for v, g in zip(values[i], gains, strict=True)]
                halves = [pack_half2(scaled[j], scaled[j + 1]) for j in range(0, 8, 2)]
                place = ((unit >> 2) * column_tiles + (row >> 3)) * 512
                place = place + ((row & 7) * 4 + (unit & 3)) * 16
                store_shared_128_if(shared + place, *halves, is_unit & is_row)

    @device_function
    def stage(
        x: Any, partials: Any, gain: Any, shared: Any, rank: Any, rows: Any, eps: Any
    ) -> None:
        for first in range(thread_id() >> 5, rows, warps * batch):
            normalise(x, partials, gain, shared, first, thread_id() & 31, rank, rows, eps)

    return stage


# --- finishing -------------------------------------------------------------------------------------
# `prepare` loads what `finish` needs while the partials travel. Both get (m, tile, g, is_real, e0..e7): the row,
# the tile of 16 outputs, the pair within it, whether that exists, and the kernel's last eight arguments.


def make_store(n: int, has_bias: bool) -> Any:
    """float32 out (rows, n) [+ bias (n,) float32]: e0 = out, e1 = bias."""

    @traced("ff", num_star=8)
    def prepare(m: Any, tile: Any, g: Any, is_real: Any, *e: Any) -> Any:
        if not has_bias:
            return int_to_f32(0), int_to_f32(0)
        column = tile * 16 + g * 2
        first = load_f32_if(e[1] + column * 4, is_real & less(column, n))
        return first, load_f32_if(e[1] + column * 4 + 4, is_real & less(column + 1, n))

    @traced(num_star=8)
    def finish(
        ready: Any, a: Any, b: Any, m: Any, tile: Any, g: Any, is_real: Any, *e: Any
    ) -> None:
        column = tile * 16 + g * 2
        address = e[0] + (wide(m) * n + column) * 4
        is_first = is_real & less(column, n)
        store_f32_if(address, a + ready[0], is_first)
        store_f32_if(address + 4, b + ready[1], is_first & less(column + 1, n))

    return prepare, finish


def make_residual(n: int) -> Any:
    """x (rows, n) float32 += product: e0 = x, e1 = the new sums of squares (rows, n/16)."""

    @traced("ff", num_star=8)
    def prepare(m: Any, tile: Any, g: Any, is_real: Any, *e: Any) -> Any:
        column = tile * 16 + g * 2
        return load_f32x2_if(e[0] + (wide(m) * n + column) * 4, is_real & less(column, n))

    @traced(num_star=8)
    def finish(
        ready: Any, a: Any, b: Any, m: Any, tile: Any, g: Any, is_real: Any, *e: Any
    ) -> None:
        column = tile * 16 + g * 2
        is_real = is_real & less(column, n)
        first, second = ready[0] + a, ready[1] + b
        store_f32x2_if(e[0] + (wide(m) * n + column) * 4, first, second, is_real)
        squares = sum_of_8_lanes(fma(first, first, second * second))
        store_f32_if(e[1] + (m * (n // 16) + tile) * 4, squares, is_real & less(g, 1))

    return prepare, finish


def make_gated(d_ff: int, target: ProductShape, column_tiles: int) -> Any:
    """fp16 out = silu(gate) * up in the order in which `target` reads it: e0 = out."""

    @traced("f", is_tuple=True, num_star=8)
    def prepare(m: Any, tile: Any, g: Any, is_real: Any, *e: Any) -> Any:
        return (int_to_f32(g),)

    @traced(num_star=8)
    def finish(
        ready: Any, a: Any, b: Any, m: Any, tile: Any, g: Any, is_real: Any, *e: Any
    ) -> None:
        hidden = tile * 8 + g
        gate = a * reciprocal(exp2(a * -1.4426950408889634) + 1.0)
        out = pack_half2(gate * b, gate * b)
        store_16_if(
            e[0] + packed_place(m, hidden, target, column_tiles) * 2,
            out,
            is_real & less(hidden, d_ff),
        )

    return prepare, finish


def make_qkv(heads: HeadShape) -> Any:
    """Turn q and k, scale q, write q (rows, n_heads, head_dim) fp16 and k, v into the cache.

    e0 = q, e1 = cache + layer offset, e2 = slots (rows,) int32 (block * 64 + offset, -1: no row),
    e3 = (cos, sin) float32 (rows, head_dim/2, 2), e4 = bytes of a block over all layers.
    """
    dim, tiles = heads.head_dim, heads.head_dim // 16
    scale = 1.4426950408889634 / dim**0.5

    @traced("ffr", num_star=8)
    def prepare(m: Any, tile: Any, g: Any, is_real: Any, *e: Any) -> Any:
        slot = load_i32(e[2] + m * 4)
        if not heads.is_rotary:
            return int_to_f32(1), int_to_f32(0), slot
        pair = remainder(tile, tiles) * 8 + g
        cos, sin = load_f32x2(e[3] + (m * (dim // 2) + pair) * 8)
        return cos, sin, slot

    @traced(num_star=8)
    def finish(
        ready: Any, a: Any, b: Any, m: Any, tile: Any, g: Any, is_real: Any, *e: Any
    ) -> None:
        cos, sin, slot = ready
        head, part = quotient(tile, tiles), remainder(tile, tiles)
        pair = part * 8 + g
        is_q = less(head, heads.n_heads)
        is_v = less(heads.n_heads + heads.n_kv_heads - 1, head)
        turned_a = fma(a, cos, (b * sin) * -1.0)
        turned_b = fma(b, cos, a * sin)
        factor = select(int_to_f32(1) * scale, int_to_f32(1), is_q)
        out_a = select(a, turned_a * factor, is_v)
        out_b = select(b, turned_b * factor, is_v)
        if heads.is_half_pairing:
            dim_a, dim_b = (
                select_int(2 * pair, pair, is_v),
                select_int(2 * pair + 1, pair + dim // 2, is_v),
            )
        else:
            dim_a, dim_b = 2 * pair, 2 * pair + 1
        kv_head = head - select_int(heads.n_heads + heads.n_kv_heads, heads.n_heads, is_v)
        position = slot & 63
        block = e[1] + wide(slot >> 6) * e[4] + kv_head * heads.head_bytes
        packed = pack_half2(out_a, out_b)
        is_written = is_real & less(-1, slot)
        for value, d in ((packed, dim_a), (packed >> 16, dim_b)):
            q_address = e[0] + ((m * heads.n_heads + head) * dim + d) * 2
            k_place = key_place(position, d, dim)
            v_place = value_place(position, d) + 64 * dim
            cached = block + select_int(v_place, k_place, is_v) * 2
            store_16_if(select_wide(q_address, cached, is_q), value, is_written)

    return prepare, finish
