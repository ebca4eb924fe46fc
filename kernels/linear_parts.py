"""The parts of a few-row product, each made for one launch shape: multiply, hand over, collect, stage x, finish.

Straight-line device code; `linear.py` puts it together and says what it is for.
"""

from __future__ import annotations

from typing import Any

from kernels.device_code import device_function, traced
from kernels.fragments import (
    PRESCALE,
    RANKS,
    ProductShape,
    key_place,
    pack_prescaled,
    packed_place,
    value_place,
)
from kernels.intrinsics import (
    block_y,
    bulk_copy,
    byte_permute,
    exp2,
    fence_async,
    fma,
    int_to_f32,
    less,
    load_f32_if,
    load_f32x2,
    load_f32x2_if,
    load_i32,
    load_shared_128,
    load_shared_f32,
    load_shared_f32x2,
    map_shared,
    mbarrier_expect,
    mma,
    pack_finite_half2,
    pack_half2,
    quotient,
    reciprocal,
    remainder,
    rsqrt,
    select,
    select_int,
    select_wide,
    shared_base,
    shuffle_xor,
    shuffle_xor_f32,
    store_16_if,
    store_32_if,
    store_async_f32x2,
    store_f32_if,
    store_f32x2_if,
    store_shared_f32_if,
    sum_of_warp,
    thread_id,
    wide,
)
from kernels.linear_shapes import BARS, GROUP, HeadShape, Launch

# --- pieces shared by all products -----------------------------------------------------------------


def add_chains(chains: Any) -> Any:
    """The sum of tuples of floats, one for each chain in the order of K: groups of GROUP in order, then the groups."""
    groups = [add_in_order(chains[i : i + GROUP]) for i in range(0, len(chains), GROUP)]
    return add_in_order(groups)


def add_in_order(parts: Any) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = tuple(a + b for a, b in zip(total, part, strict=True))
    return total


def make_multiply(launch: Launch) -> Any:
    """acc[tile][4] of a warp, over one chain."""
    tiles, tile_bytes = launch.warp_tiles, launch.shape.tile_bytes

    @traced("f" * (4 * tiles))
    def multiply(weights: Any, x: Any) -> Any:
        acc = [(0.0, 0.0, 0.0, 0.0)] * tiles
        for pair in range(launch.shape.k_steps // 2):
            b = load_shared_128(x + pair * 512)
            for step in range(2):
                for tile in range(tiles):
                    a = load_shared_128(weights + tile * tile_bytes + (2 * pair + step) * 512)
                    acc[tile] = mma(*acc[tile], *a, *b[2 * step : 2 * step + 2])
        return tuple(value for part in acc for value in part)

    return multiply


def make_send(launch: Launch) -> Any:
    """Hand a warp's accumulators over: pairs (row g, row g+8) of each column."""
    tiles, count, slots = launch.warp_tiles, launch.tiles, launch.push_slots

    @traced()
    def send(
        acc: Any, base: Any, tile0: Any, source: Any, lane: Any, num_rows: Any, bar: Any
    ) -> None:
        # `source` = rank * sub_slices + sub slice; the owner of (m, tile) is (m * count + tile) % 8.
        g, t = lane >> 2, lane & 3
        for tile in range(tiles):
            part = acc[4 * tile : 4 * tile + 4]
            for odd in range(2):
                m = 2 * t + odd
                unit = m * count + tile0 + tile
                local = base + (source * slots + (unit >> 3)) * 64 + g * 8
                remote, pair = map_shared(local, unit & 7), (part[odd], part[odd + 2])
                there = map_shared(bar, unit & 7)
                store_async_f32x2(remote, *pair, there, num_rows - m)

    return send


def make_collect(launch: Launch) -> Any:
    """The sum of all chains for an owned (m, tile), number `unit`, and g: a pair of floats."""
    chains, slots = launch.shape.sub_slices, launch.push_slots

    @traced("ff")
    def collect(base: Any, unit: Any, g: Any) -> Any:
        local = base + (unit >> 3) * 64 + g * 8
        return add_chains(
            [load_shared_f32x2(local + i * slots * 64) for i in range(RANKS * chains)]
        )

    return collect


# --- staging x -------------------------------------------------------------------------------------


def make_stage(launch: Launch) -> Any:
    """x is fp16 in the order of `fragments.packed_place`: one bulk copy brings this block's piece."""
    x_bytes = launch.x_bytes
    bar_at = launch.shared_bytes - BARS

    @device_function
    def stage(x: Any, shared: Any, rank: Any) -> None:
        bar = shared_base() + bar_at
        if thread_id() == 0:
            fence_async()
            mbarrier_expect(bar, x_bytes)
            bulk_copy(shared, x + (block_y() * RANKS + rank) * x_bytes, x_bytes, bar)

    return stage


def make_scales(k: int, batch: int, apart: int = 8) -> Any:
    """One warp: what the sums of `batch` rows (1, 2, 4, 8, 16 or 32) must be multiplied by: the RMS norm and PRESCALE.

    The rows are first, first + 1, ..., eight together and the next eight `apart` from them. `squares` are the sums of squares of a
    row's 16-column tiles (rows, k/16) float32; the factors go to `table` (shared memory, float32, by row). Rows past `rows` give nothing.
    Lane i adds squares i, i + 32, ... of a row; then lanes add what those that differ by 1, 2, 4, 8, 16 have.
    """
    num_squares, inverse_k = k // 16, 1.0 / k

    @traced()
    def scales(
        squares: Any, table: Any, first_row: Any, first: Any, rows: Any, eps: Any, lane: Any
    ) -> None:
        totals = []
        for i in range(batch):
            row = first + (i >> 3) * apart + (i & 7)
            parts = [
                load_f32_if(
                    squares + ((first_row + row) * num_squares + lane + j) * 4,
                    less(row, rows) & less(lane + j, num_squares),
                )
                for j in range(0, num_squares, 32)
            ]
            totals.append(parts)
        totals = [sum_of(parts) for parts in totals]
        # While a lane has several rows it keeps half of them and gives the other half away.
        mine: Any = 0
        for bit in range(5):
            half, is_second = len(totals) // 2, (lane >> bit) & 1
            if half:
                kept = [select(totals[half + i], totals[i], is_second) for i in range(half)]
                given = [select(totals[i], totals[half + i], is_second) for i in range(half)]
                mine = mine * 2 + is_second
            else:
                kept = given = totals
            totals = [a + shuffle_xor_f32(b, 1 << bit) for a, b in zip(kept, given, strict=True)]
        scale = rsqrt(fma(totals[0], inverse_k, eps)) * (1 / PRESCALE)
        row = first + (mine >> 3) * apart + (mine & 7)
        store_shared_f32_if(table + row * 4, scale, less(row, rows) & less(lane, batch))

    return scales


def sum_of(values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def row_factor(parts: list[Any], inverse_k: float, eps: Any) -> Any:
    """What a row's sums are multiplied by, from its sums of squares over the lanes of a warp."""
    return rsqrt(fma(sum_of_warp(sum_of(parts)), inverse_k, eps)) * (1 / PRESCALE)


@traced("ff")
def scale_pair(a: Any, b: Any, address: Any) -> Any:
    """A pair of sums times the factor in shared memory."""
    scale = load_shared_f32(address)
    return a * scale, b * scale


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


def make_residual(n: int, target: ProductShape, column_tiles: int, masks: Any) -> Any:
    """x (rows, n) float32 += product: e0 = x, e1 = the new sums of squares (rows, n/16).

    What the next norm's reader multiplies, fp16 x * gain * PRESCALE in the order of `target`, goes to e3; e2 = that
    gain (n,) float32. `masks`: how the lanes of a tile's 8 pairs differ.
    """

    @traced("ffff", num_star=8)
    def prepare(m: Any, tile: Any, g: Any, is_real: Any, *e: Any) -> Any:
        column = tile * 16 + g * 2
        is_real = is_real & less(column, n)
        x = load_f32x2_if(e[0] + (wide(m) * n + column) * 4, is_real)
        return *x, *load_f32x2_if(e[2] + column * 4, is_real)

    @traced(num_star=8)
    def finish(
        ready: Any, a: Any, b: Any, m: Any, tile: Any, g: Any, is_real: Any, *e: Any
    ) -> None:
        column = tile * 16 + g * 2
        is_real = is_real & less(column, n)
        first, second = ready[0] + a, ready[1] + b
        store_f32x2_if(e[0] + (wide(m) * n + column) * 4, first, second, is_real)
        place = packed_place(m, column, target, column_tiles)
        packed = pack_prescaled(first * ready[2], second * ready[3])
        store_32_if(e[3] + wide(place) * 2, packed, is_real)
        squares = fma(first, first, second * second)
        for mask in masks:
            squares = squares + shuffle_xor_f32(squares, mask)
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


def make_qkv(heads: HeadShape, neighbour: int, *, is_told: bool = False) -> Any:
    """Turn q and k, scale q, write q (rows, n_heads, head_dim) fp16 and k, v into the cache.

    `neighbour`: the lanes of pairs 2i and 2i + 1 differ by this bit; rotary halves change places, so that each stores two neighbours.
    e0 = q, e1 = cache + layer offset, e2 = slots (rows,) int32 (block * 64 + offset, -1: no row),
    e3 = (cos, sin) float32 (rows, head_dim/2, 2), e4 = bytes of a block over all layers; with `is_told` also into e5 and e6, k and v
    (rows, n_kv_heads, head_dim).
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
        position = slot & 63
        kv_head = head - select_int(heads.n_heads + heads.n_kv_heads, heads.n_heads, is_v)
        block = e[1] + wide(slot >> 6) * e[4] + kv_head * heads.head_bytes
        packed = pack_finite_half2(out_a, out_b)
        word, d = packed, 2 * pair
        if heads.is_half_pairing:
            odd = g & 1
            other = shuffle_xor(packed, neighbour)
            word = byte_permute(packed, other, select_int(0x3276, 0x5410, odd))
            d = pair - odd + odd * (dim // 2)
        is_written = is_real & less(-1, slot)
        q_address = e[0] + ((m * heads.n_heads + head) * dim + d) * 2
        cached = block + key_place(position, d, dim) * 2
        store_32_if(select_wide(q_address, cached, is_q), word, is_written & (is_v ^ 1))
        for odd in range(2):
            cached = block + (value_place(position, 2 * pair + odd) + 64 * dim) * 2
            store_16_if(cached, packed >> (16 * odd), is_written & is_v)
        if is_told:
            row = (m * heads.n_kv_heads + kv_head) * dim
            told = select_wide(e[6], e[5], is_v) + wide(row + select_int(2 * pair, d, is_v)) * 2
            store_32_if(told, select_int(packed, word, is_v), is_written & (1 - is_q))

    return prepare, finish
