"""After attention over cached inputs: W_v by head, of averages that are joined from the chains' while they are staged."""

from __future__ import annotations

from typing import Any

from kernels.absorbed import attention
from kernels.absorbed_chains import join_factors, join_halves, twice
from kernels.absorbed_plan import plan
from kernels.absorbed_products import (
    VALUE_WARPS,
    ProductLaunch,
    make_collect,
    make_multiply,
    make_send,
    product_shape,
)
from kernels.absorbed_query import query
from kernels.absorbed_shape import AbsorbedLaunch, AbsorbedShape
from kernels.compiler import Variant
from kernels.device_code import traced
from kernels.fragments import RANKS, ProductShape, packed_place
from kernels.intrinsics import (
    block_x,
    block_y,
    bulk_copy,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    f32_of,
    grid_dependency_launch,
    grid_dependency_wait,
    less,
    load_128_if,
    load_f32x2_if,
    load_shared_32x2,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    pack_half2,
    quotient,
    remainder,
    shared_base,
    smaller,
    store_32_if,
    store_shared_128_if,
    store_shared_f32x2_if,
    sync_block,
    thread_id,
    wide,
)


def _make_shares(shape: AbsorbedShape, slots: int) -> Any:
    half, n_heads = slots // 2, shape.n_heads

    def join(told: list[Any], pairs: list[Any]) -> Any:
        """(maximum, sum) of all; each join's shares go to `pairs`."""
        top, total = told[0]
        for more in told[1:]:
            top, total, *both = join_factors(top, total, *more)
            pairs.append(both)
        return top, total

    @traced()
    def shares(meta: Any, table: Any, head: Any, first_row: Any, row: Any) -> None:
        """The shares of a row's averages in each join, in the order of the joins: to `table` (rows, slots - 1) pairs of halves twice."""
        places = [((first_row + row) * slots + slot) * n_heads + head for slot in range(slots)]
        told = [load_f32x2_if(meta + wide(place) * 8, 1) for place in places]
        pairs: list[Any] = []
        join([join(told[:half], pairs), join(told[half:], pairs)], pairs)
        for i, both in enumerate(pairs):
            first, second = (f32_of(twice(share)) for share in both)
            store_shared_f32x2_if(table + (row * (slots - 1) + i) * 8, first, second, 1)

    return shares


def _make_ask(launch: ProductLaunch, slots: int) -> Any:
    shape, k_slice = launch.shape, product_shape(launch.shape).k_slice
    d, n_heads, units = shape.d_model, shape.n_heads, k_slice // 8

    @traced("r" * (4 * slots * launch.staged_items))
    def ask(averages: Any, head: Any, thread: Any, first_row: Any, rank: Any, rows: Any) -> Any:
        """Eights of some rows' averages, of all slots."""
        words: list[Any] = []
        for i in range(launch.staged_items):
            item = thread + i * 32 * VALUE_WARPS
            row, column = quotient(item, units), rank * k_slice + remainder(item, units) * 8
            is_real = less(row, rows) & less(column, d)
            for slot in range(slots):
                place = ((first_row + row) * slots + slot) * n_heads + head
                words += load_128_if(averages + (wide(place) * d + column) * 2, is_real)
        return tuple(words)

    return ask


def _make_stage(launch: ProductLaunch, slots: int) -> Any:
    half, units, column_tiles = (
        slots // 2,
        product_shape(launch.shape).k_slice // 8,
        launch.column_tiles,
    )

    def join(parts: list[Any], pairs: list[Any]) -> Any:
        words = parts[0]
        for more, both in zip(parts[1:], pairs, strict=True):
            words = [join_halves(a, b, *both) for a, b in zip(words, more, strict=True)]
        return words

    @traced()
    def stage(words: Any, table: Any, x: Any, thread: Any, rows: Any) -> None:
        """Join what was asked for and put it into its place as B fragments."""
        for i in range(launch.staged_items):
            item = thread + i * 32 * VALUE_WARPS
            row, unit = quotient(item, units), remainder(item, units)
            mine = words[4 * slots * i : 4 * slots * (i + 1)]
            parts = [list(mine[j : j + 4]) for j in range(0, 4 * slots, 4)]
            at = table + smaller(row, rows - 1) * ((slots - 1) * 8)
            pairs = [load_shared_32x2(at + 8 * j) for j in range(slots - 1)]
            halves = [
                join(parts[:half], pairs[: half - 1]),
                join(parts[half:], pairs[half - 1 : -1]),
            ]
            place = ((unit >> 2) * column_tiles + (row >> 3)) * 512
            place = place + ((row & 7) * 4 + (unit & 3)) * 16
            store_shared_128_if(x + place, *join(halves, pairs[-1:]), less(row, rows))

    return stage


def _make_values(launch: ProductLaunch, slots: int, target: ProductShape) -> Any:
    shape, product = launch.shape, product_shape(launch.shape)
    tiles, columns, column_tiles = launch.tiles, launch.columns, launch.column_tiles
    tile_bytes, ranks, num_warps = product.tile_bytes, RANKS, VALUE_WARPS
    x_at, sums_at = launch.weight_bytes, launch.weight_bytes + launch.x_bytes
    bars_at, head_dim = sums_at + RANKS * launch.sum_slots * 64, shape.head_dim
    warp_bars_at = bars_at + 8
    shares_at = warp_bars_at + 8 * VALUE_WARPS
    multiply = make_multiply(product.k_steps // 2, launch.column_tiles)
    send, collect, shares = make_send(launch), make_collect(launch), _make_shares(shape, slots)
    ask, stage = _make_ask(launch, slots), _make_stage(launch, slots)

    @traced()
    def finish(a: Any, b: Any, out: Any, row: Any, column: Any, is_real: Any) -> None:
        place = packed_place(row, column, target, column_tiles)
        store_32_if(out + wide(place) * 2, pack_half2(a, b), is_real)

    def kernel(weights: Any, averages: Any, meta: Any, out: Any, num_rows: Any) -> None:
        lane, warp = thread_id() & 31, thread_id() >> 5
        rank, head, base = cluster_rank(), block_x() >> 3, shared_base()
        first_row = block_y() * columns
        rows = min(num_rows - first_row, columns)
        sums_bar, weight_bar = base + bars_at, base + warp_bars_at + warp * 8
        if lane == 0:
            mbarrier_init(weight_bar, 1)
            if warp == 0:
                mbarrier_init(sums_bar, 1)
            mbarrier_init_fence()
            if warp < tiles:
                piece = (head * ranks + rank) * tiles + warp
                mbarrier_expect(weight_bar, tile_bytes)
                bulk_copy(
                    base + warp * tile_bytes,
                    weights + wide(piece) * tile_bytes,
                    tile_bytes,
                    weight_bar,
                )
        sync_block()
        grid_dependency_launch()
        cluster_arrive_relaxed()
        if thread_id() == 0:
            mbarrier_expect(sums_bar, ((rows * tiles - rank + ranks - 1) >> 3) * (ranks * 64))
        grid_dependency_wait()
        words = ask(averages, head, thread_id(), first_row, rank, rows)
        if thread_id() < rows:
            shares(meta, base + shares_at, head, first_row, thread_id())
        sync_block()
        stage(words, base + shares_at, base + x_at, thread_id(), rows)
        sync_block()
        cluster_wait()
        if warp < tiles:
            mbarrier_wait(weight_bar, 0)
            acc = multiply(base + warp * tile_bytes + lane * 16, base + x_at, lane)
            send(acc, base + sums_at, warp, rank, lane, rows, sums_bar)
        mbarrier_wait(sums_bar, 0)
        for i in range(warp * 4, (rows * tiles + ranks - 1) >> 3, num_warps * 4):
            unit = rank + ranks * (i + (lane >> 3))
            is_real = less(unit, rows * tiles)
            unit = unit if unit < rows * tiles else 0
            a, b = collect(base + sums_at, unit, lane & 7)
            column = head * head_dim + remainder(unit, tiles) * 16 + (lane & 7) * 2
            finish(a, b, out, first_row + quotient(unit, tiles), column, is_real)

    return kernel


def values(
    name: str, launch: ProductLaunch, attend: AbsorbedLaunch, target: ProductShape
) -> Variant:
    """W_v of the joined averages, fp16 in the order in which `target` reads it: grid (8 * heads, chunks of columns).

    Kernel arguments: W_v (`pack_values`), averages and meta of `absorbed.attention`, out, num_rows.
    """
    shared = (
        launch.weight_bytes + launch.x_bytes + RANKS * launch.sum_slots * 64 + 8 + 8 * VALUE_WARPS
        + launch.columns * (attend.slots - 1) * 8
    )  # fmt: skip
    return Variant(
        name=f"{name}_m{launch.columns}_x{attend.split}",
        function=_make_values(launch, attend.slots, target),
        args="llllr",
        num_threads=32 * VALUE_WARPS,
        cluster=RANKS,
        shared_bytes=shared,
        constants=(launch, attend, target),
    )


def variants() -> dict[str, Variant]:
    """The kernels of the 1B reference model with learned positions, for a check of the compiler's work."""
    found: dict[str, Variant] = {}
    target = ProductShape(1536, 1536, 4)
    for kind in ("int4", "fp16"):
        shape = AbsorbedShape(1536, 12, 12, 128, kind)
        for split in (shape.chains, 2):
            attend = AbsorbedLaunch(shape, split)
            launch = ProductLaunch(shape, 8, 3) if split == 2 else ProductLaunch(shape, 1)
            for variant in (
                plan("absorbed_plan", attend),
                attention("absorbed", attend),
                query("absorbed_query", launch),
                values("absorbed_values", launch, attend, target),
            ):
                found[variant.name] = variant
    return found
