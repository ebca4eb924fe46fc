"""Products of few rows, y = x W^T, the same bits for a row however many rows share the call.

A cluster of 8 blocks owns a run of output rows; each block owns one eighth of K. A block starts all bulk copies
of its weights before it waits for the kernel in front of it (programmatic dependent launch), so the memory
stays busy across kernels. Then: stage its columns of x as fp16, `mma.sync` with W as the A operand, hand
partial sums to the block that owns the outputs, add the 8 x sub_slices partials in order, finish there (residual,
activation, rotary and cache write, or a plain store).

Every variant adds the same chains in the same order: neither the row count, nor the launch shape, nor the way the
partials travel changes a bit. `layouts.py` gives the order of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    block_x,
    block_y,
    bulk_copy,
    cluster_arrive,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    exp2,
    fence_async,
    fma,
    grid_dependency_launch,
    grid_dependency_wait,
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
    mbarrier_arrive_cluster,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
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
    sync_block,
    sync_warp,
    thread_id,
    wide,
)
from kernels.layouts import RANKS, ProductShape, key_place, packed_place, value_place

CLUSTERS = 15  # clusters of 8 blocks that an H200 runs at a time with one block a multiprocessor
_BARS = 40  # bytes of memory barriers: x has come, sums have come (2 buffers), buffers are free (2)
_PULL_ROW = 80  # bytes of 8 pairs, padded so that the stores meet no bank twice


@dataclass(frozen=True)
class Launch:
    """One launch shape of a product.

    `tiles` is what a cluster holds at a time, `rounds` how often (1: everything is in flight from the start; else
    a ring of `stages`), `num_warps` divides the work, `column_tiles` is the batch in eights. `is_push`: partials
    are written to the owner's own memory and announce themselves there; else they stay, over the spent weights,
    and the owner fetches them after a cluster barrier (slower, less memory). `max_rows` below a column tile saves room for them.
    """

    shape: ProductShape
    tiles: int
    num_warps: int
    column_tiles: int
    is_push: bool
    stages: int = 1
    max_rows: int = 0

    @property
    def clusters(self) -> int:
        return -(-self.shape.num_tiles // self.tiles) if self.stages == 1 else CLUSTERS

    @property
    def rounds(self) -> int:
        return -(-self.shape.num_tiles // (self.tiles * self.clusters))

    @property
    def warp_tiles(self) -> int:
        """Tiles of one warp (of one sub slice)."""
        return self.tiles * self.shape.sub_slices // self.num_warps

    @property
    def columns(self) -> int:
        return 8 * self.column_tiles

    @property
    def weight_bytes(self) -> int:
        return self.stages * self.tiles * self.shape.tile_bytes

    @property
    def x_bytes(self) -> int:
        return self.shape.k_slice * self.columns * 2

    @property
    def push_slots(self) -> int:
        """Pairs of 8 that one source sends to one owner."""
        return -(-self.tiles * (self.max_rows or self.columns) // RANKS)

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partials' own memory (none where they lie over the weights)."""
        if not self.is_push:
            return 0
        buffers = 2 if self.rounds > 1 else 1
        return buffers * RANKS * self.shape.sub_slices * self.push_slots * 64

    @property
    def shared_bytes(self) -> int:
        return (
            self.weight_bytes
            + self.x_bytes
            + self.partial_bytes
            + 8 * self.num_warps * self.stages
            + _BARS
        )


def _check(launch: Launch) -> None:
    shape = launch.shape
    spread = launch.tiles * shape.sub_slices
    if spread % launch.num_warps or (shape.sub_slices > 1 and launch.warp_tiles != 1):
        raise ValueError(f"{spread} chains do not divide over {launch.num_warps} warps")
    if shape.group % launch.warp_tiles or launch.tiles % launch.warp_tiles:
        raise ValueError(f"{launch.warp_tiles} tiles a warp do not fit groups of {shape.group}")
    if not launch.is_push:
        stored = launch.tiles * shape.sub_slices * launch.columns * _PULL_ROW
        if stored > launch.weight_bytes or launch.rounds > 1:
            raise ValueError("the partials do not fit over the weights")


# --- pieces shared by all products -----------------------------------------------------------------


@traced("ff")
def _add_pairs(pairs: Any) -> Any:
    first, second = pairs[0]
    for more_first, more_second in pairs[1:]:
        first = first + more_first
        second = second + more_second
    return first, second


def _make_multiply(launch: Launch) -> Any:
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


def _make_send(launch: Launch) -> Any:
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
                    local = base + ((source + tile) * width + m) * _PULL_ROW + g * 8
                    store_shared_f32x2(local, part[odd], part[odd + 2])

    return keep


def _make_collect(launch: Launch) -> Any:
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
        local = base + (tile * width + m) * _PULL_ROW + g * 8
        pairs = []
        for rank in range(RANKS):
            remote = map_shared(local, rank)
            for chain in range(chains):
                pairs.append(load_cluster_f32x2(remote + chain * count * width * _PULL_ROW))
        return _add_pairs(pairs)

    return fetch


# --- staging x -------------------------------------------------------------------------------------


def _make_stage_half(launch: Launch) -> Any:
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


def _make_stage_packed(launch: Launch) -> Any:
    """x is fp16 in the order of `layouts.packed_place`: one bulk copy brings this block's piece."""
    x_bytes = launch.x_bytes
    bar_at = launch.shared_bytes - _BARS

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


def _make_stage_norm(launch: Launch) -> Any:
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


def _make_store(n: int, has_bias: bool) -> Any:
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


def _make_residual(n: int) -> Any:
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


def _make_gated(d_ff: int, target: ProductShape, column_tiles: int) -> Any:
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


@dataclass(frozen=True)
class HeadShape:
    """What the fused QKV product needs to know of the model and the cache."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    is_rotary: bool
    is_half_pairing: bool

    @property
    def head_bytes(self) -> int:
        """Bytes of one block of one layer and kv head: K, then V."""
        return 64 * self.head_dim * 4


def _make_qkv(heads: HeadShape) -> Any:
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


# --- the kernel ------------------------------------------------------------------------------------

_ARGS = "llll" + "rf" + "l" * 8


def _make_kernel(launch: Launch, source: str, prepare: Any, finish: Any) -> Any:
    shape = launch.shape
    _check(launch)
    num_warps, tiles, rounds, stages = launch.num_warps, launch.tiles, launch.rounds, launch.stages
    clusters, chains, columns = launch.clusters, shape.sub_slices, launch.columns
    group, tile_bytes, num_tiles = shape.group, shape.tile_bytes, shape.num_tiles
    warp_tiles = launch.warp_tiles
    warp_bytes = tiles * tile_bytes // num_warps
    stage_bytes = tiles * tile_bytes
    x_at = launch.weight_bytes
    partials_at = x_at + launch.x_bytes if launch.is_push else 0
    buffer_bytes = RANKS * chains * launch.push_slots * 64
    bars_at = x_at + launch.x_bytes + launch.partial_bytes
    x_bar_at = launch.shared_bytes - _BARS
    sums_bar_at, free_bar_at = x_bar_at + 8, x_bar_at + 24
    is_push = launch.is_push
    makers = {"norm": _make_stage_norm, "half": _make_stage_half, "packed": _make_stage_packed}
    stage = makers[source](launch)
    x_row_bytes = {"norm": 4 * shape.k, "half": 2 * shape.k, "packed": 0}[source]
    is_packed = source == "packed"
    partial_row_bytes = shape.k // 16 * 4
    chain_x_bytes = shape.k_steps // 2 * launch.column_tiles * 512
    multiply, send, collect = _make_multiply(launch), _make_send(launch), _make_collect(launch)

    @device_function
    def fetch(base: Any, weights: Any, cluster: Any, turn: Any, warp: Any, rank: Any) -> None:
        tile = (cluster + turn * clusters) * tiles + quotient(warp, chains) * warp_tiles
        if tile < num_tiles:
            piece = (quotient(tile, group) * RANKS + rank) * group + remainder(tile, group)
            place = wide(piece) * tile_bytes + remainder(warp, chains) * warp_bytes
            slot = remainder(turn, stages)
            bar = base + bars_at + warp * (8 * stages) + slot * 8
            mbarrier_expect(bar, warp_bytes)
            bulk_copy(
                base + slot * stage_bytes + warp * warp_bytes, weights + place, warp_bytes, bar
            )

    @device_function
    def owned(i: Any, rank: Any, rows: Any) -> Any:
        # The i-th (row, tile) of this rank; past the end a repeated one that is not stored.
        unit = rank + RANKS * i
        return unit if unit < rows * tiles else 0

    @device_function
    def reduce(
        base: Any, turn: Any, cluster: Any, rank: Any, rows: Any, first_row: Any,
        e0: Any, e1: Any, e2: Any, e3: Any, e4: Any, e5: Any, e6: Any, e7: Any,
    ) -> None:  # fmt: skip
        lane = thread_id() & 31
        first = (thread_id() >> 5) * 4 + (lane >> 3)
        tile0 = (cluster + turn * clusters) * tiles
        unit = owned(first, rank, rows)
        m, tile = quotient(unit, tiles), remainder(unit, tiles)
        is_real = less(rank + RANKS * first, rows * tiles) & less(tile0 + tile, num_tiles)
        ready = prepare(
            first_row + m, tile0 + tile, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7
        )
        if is_push:
            mbarrier_wait(shared_base() + sums_bar_at + (turn & 1) * 8, (turn >> 1) & 1)
        else:
            cluster_wait()
        # The loop's count is the same for the whole warp: lanes shuffle in `finish`.
        for i in range((thread_id() >> 5) * 4, (rows * tiles + RANKS - 1) >> 3, num_warps * 4):
            a, b = collect(base, unit, m, tile, lane & 7)
            finish(
                ready,
                a,
                b,
                first_row + m,
                tile0 + tile,
                lane & 7,
                is_real,
                e0,
                e1,
                e2,
                e3,
                e4,
                e5,
                e6,
                e7,
            )
            following = i + (lane >> 3) + num_warps * 4
            unit = owned(following, rank, rows)
            m, tile = quotient(unit, tiles), remainder(unit, tiles)
            is_real = less(rank + RANKS * following, rows * tiles) & less(tile0 + tile, num_tiles)
            ready = prepare(
                first_row + m, tile0 + tile, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7
            )

    def kernel(
        weights: Any, x: Any, partials: Any, gain: Any, num_rows: Any, eps: Any,
        e0: Any, e1: Any, e2: Any, e3: Any, e4: Any, e5: Any, e6: Any, e7: Any,
    ) -> None:  # fmt: skip
        lane, warp = thread_id() & 31, thread_id() >> 5
        rank, cluster = cluster_rank(), block_x() >> 3
        base = shared_base()
        bars = base + bars_at + warp * (8 * stages)
        if lane == 0:
            for i in range(stages):
                mbarrier_init(bars + 8 * i, 1)
            if is_packed and warp == 0:
                mbarrier_init(base + x_bar_at, 1)
            if is_push and warp == 0:
                for i in range(2):
                    mbarrier_init(base + sums_bar_at + 8 * i, 1)
                    mbarrier_init(base + free_bar_at + 8 * i, RANKS)
            mbarrier_init_fence()
            for turn in range(min(stages, rounds)):
                fetch(base, weights, cluster, turn, warp, rank)
        if is_packed:
            sync_block()
        else:
            sync_warp()
        grid_dependency_launch()
        cluster_arrive_relaxed()
        first_row = block_y() * columns
        rows = min(num_rows - first_row, columns)
        sum_bytes = ((rows * tiles - rank + RANKS - 1) >> 3) * (RANKS * chains * 64)
        if is_push and thread_id() == 0:
            mbarrier_expect(base + sums_bar_at, sum_bytes)
            if rounds > 1:
                mbarrier_expect(base + sums_bar_at + 8, sum_bytes)
        grid_dependency_wait()
        stage(
            x + first_row * x_row_bytes,
            partials + first_row * partial_row_bytes,
            gain,
            base + x_at,
            rank,
            rows,
            eps,
        )
        if not is_packed:
            sync_block()
        cluster_wait()
        chain = remainder(warp, chains)
        tile_in_cluster = quotient(warp, chains) * warp_tiles
        sender = rank * chains + chain if is_push else chain * tiles + tile_in_cluster
        for turn in range(rounds):
            slot = remainder(turn, stages)
            place = base + slot * stage_bytes + warp * warp_bytes
            if (cluster + turn * clusters) * tiles + tile_in_cluster < num_tiles:
                mbarrier_wait(bars + slot * 8, quotient(turn, stages) & 1)
            acc = multiply(place + lane * 16, base + x_at + chain * chain_x_bytes + lane * 16)
            if turn + stages < rounds:
                sync_warp()
                if lane == 0:
                    fetch(base, weights, cluster, turn + stages, warp, rank)
            if turn > 0:
                before = (turn - 1) & 1
                reduce(
                    base + partials_at + before * buffer_bytes, turn - 1, cluster, rank, rows, first_row,
                    e0, e1, e2, e3, e4, e5, e6, e7,
                )  # fmt: skip
                if turn + 1 < rounds:
                    # This block's buffer is read: arm it for the round after next and tell all who write it.
                    sync_block()
                    if thread_id() == 0:
                        mbarrier_expect(base + sums_bar_at + before * 8, sum_bytes)
                    if thread_id() < RANKS:
                        mbarrier_arrive_cluster(
                            map_shared(base + free_bar_at + before * 8, thread_id())
                        )
            if not is_push:
                sync_block()
            elif turn > 1:
                mbarrier_wait(base + free_bar_at + (turn & 1) * 8, ((turn >> 1) - 1) & 1)
            send(
                acc, base + partials_at + (turn & 1) * buffer_bytes, tile_in_cluster, sender, lane, rows,
                base + sums_bar_at + (turn & 1) * 8,
            )  # fmt: skip
            if not is_push:
                cluster_arrive()
        reduce(
            base + partials_at + ((rounds - 1) & 1) * buffer_bytes, rounds - 1, cluster, rank, rows, first_row,
            e0, e1, e2, e3, e4, e5, e6, e7,
        )  # fmt: skip
        if not is_push:
            # A block may not end while another reads its partials.
            cluster_arrive_relaxed()
            cluster_wait()
        elif rounds > 1:
            # Nor while another may still tell it that a buffer is free.
            cluster_arrive_relaxed()
            cluster_wait()

    return kernel


def _variant(name: str, launch: Launch, source: str, ends: Any, *constants: Any) -> Variant:
    how = "_ring" if launch.rounds > 1 else "_push" if launch.is_push else "_pull"
    return Variant(
        name=f"{name}_m{launch.max_rows or launch.columns}_t{launch.tiles}{how}",
        function=_make_kernel(launch, source, *ends),
        args=_ARGS,
        num_threads=32 * launch.num_warps,
        cluster=RANKS,
        shared_bytes=launch.shared_bytes,
        constants=(launch, source, *constants),
    )


def store_product(name: str, launch: Launch, source: str, *, has_bias: bool = False) -> Variant:
    """float32 out = x W^T [+ bias]; `source`: `norm` (float32 x, normed here), `half` or `packed` (fp16 x)."""
    return _variant(name, launch, source, _make_store(launch.shape.n, has_bias), has_bias)


def residual_product(name: str, launch: Launch, source: str = "packed") -> Variant:
    """x += h W^T in place, with the sums of squares that the next norm needs."""
    return _variant(name, launch, source, _make_residual(launch.shape.n))


def gated_product(name: str, launch: Launch, target: ProductShape) -> Variant:
    """fp16 silu(g) * u with [g; u] = norm(x) W^T, in the order of `target`; the shape's n is 2 d_ff."""
    ends = _make_gated(launch.shape.n // 2, target, launch.column_tiles)
    return _variant(name, launch, "norm", ends, target)


def qkv_product(name: str, launch: Launch, heads: HeadShape) -> Variant:
    """q, k, v = norm(x) W^T, turned; k and v go into the cache."""
    return _variant(name, launch, "norm", _make_qkv(heads), heads)
