"""One product of one layer in the persistent kernel; see `persistent.py`."""

from __future__ import annotations

from typing import Any

from kernels.device_code import device_function
from kernels.fragments import ProductShape
from kernels.intrinsics import (
    any_lane,
    quotient,
    remainder,
    sync_some,
    sync_warp,
    wide,
)
from kernels.linear_parts import scale_pair
from kernels.persistent_parts import (
    make_collect,
    make_factor,
    make_look_some_x,
    make_look_x,
    make_multiply,
    make_put,
    no_sum,
    num_chains,
    pitch_of,
)
from kernels.persistent_ring import make_ring
from kernels.persistent_shapes import (
    CoreLaunch,
)
from kernels.polling import (
    bulk_prefetch,
    narrow,
    thread_id_again,
)


def make_product(
    launch: CoreLaunch,
    product: ProductShape,
    is_normed: bool,
    ends: Any,
    later: ProductShape | None = None,
) -> Any:
    """What a producer warp and what the others do for one product of one layer.

    The weights of `later`'s tiles come into the L2 cache beside those of a warp's first tile.
    """
    prepare, finish = ends
    chains, parts, warps = num_chains(product), launch.parts(product), launch.warps
    if warps % chains or parts > 4 or launch.round_tiles(product) % (warps // chains):
        raise ValueError(f"{product} does not fit {launch}")
    split, steps = warps // chains, product.k_steps // launch.parts(product)
    chain_bytes, part_bytes, tile_bytes = product.k_steps * 512, steps * 512, product.tile_bytes
    group, sub_slices, threads = product.group, product.sub_slices, 32 * warps
    fetch, _, arrived, release = make_ring(launch)
    round_tiles, sums_at, sums_bytes = (
        launch.round_tiles(product),
        launch.sums_at,
        launch.sums_bytes,
    )
    buffer_bytes = launch.buffer_bytes
    pitch, factors_at = pitch_of(launch.rows), launch.buffer_bytes - 32
    unseen, look = make_look_x(product, is_normed)
    look_some, put = make_look_some_x(product), make_put(launch.rows)
    missing_at = len(look.device_traced.returns) - 1
    multiply_0, multiply_1, multiply_2, multiply_3 = (
        make_multiply(steps, min(i, parts - 1)) for i in range(4)
    )
    collect, factor = make_collect(chains, launch.sums_bytes), make_factor(product)

    has_later = later is not None
    after = later or product
    its_chains, its_slices, its_group = num_chains(after), after.sub_slices, after.group
    its_split, its_tile_bytes, its_bytes = (
        warps // its_chains,
        after.tile_bytes,
        after.k_steps * 512,
    )
    its_part = its_bytes // parts // 16 * 16
    its_rest = its_bytes - its_part * (parts - 1)

    @device_function
    def bring_closer(weights: Any, share: Any, warp: Any, lane: Any, part: Any) -> None:
        """Part `part` of the warp's chain in its first tile of the later product, into the L2 cache."""
        first, count, half = narrow(share >> 12), narrow((share >> 1) & 2047), narrow(share & 1)
        chain, i = (
            remainder(warp, its_chains),
            narrow((quotient(warp, its_chains) + half) & (its_split - 1)),
        )
        if lane < 4 and i < count:
            tile = first + i
            piece = (
                quotient(tile, its_group) * 8 + quotient(chain, its_slices)
            ) * its_group + remainder(tile, its_group)
            source = weights + wide(piece) * its_tile_bytes
            source += remainder(chain, its_slices) * its_bytes + part * its_part
            bulk_prefetch(source, its_rest if part == parts - 1 else its_part)
        sync_warp()

    @device_function
    def feed(
        base: Any,
        weights: Any,
        share: Any,
        slot: Any,
        turn: Any,
        later_weights: Any,
        later_share: Any,
    ) -> Any:
        """Fetch the pieces of this product for the group of this producer warp, in their order."""
        thread = thread_id_again()
        lane = thread & 31
        warp = ((thread >> 5) - warps) * 4 + (lane & 3)
        first, count, half = narrow(share >> 12), narrow((share >> 1) & 2047), narrow(share & 1)
        chain = remainder(warp, chains)
        rank, sub = quotient(chain, sub_slices), remainder(chain, sub_slices)
        start = narrow((quotient(warp, chains) + half) & (split - 1))
        for i in range(start, count, narrow(split)):
            tile = first + i
            piece = (quotient(tile, group) * 8 + rank) * group + remainder(tile, group)
            source = weights + wide(piece) * tile_bytes + sub * chain_bytes
            for part in range(parts):
                slot, turn = fetch(
                    base, warp, lane, source + part * part_bytes, part_bytes, slot, turn, 1
                )
                if has_later and i == start:
                    bring_closer(later_weights, later_share, warp, lane, part)
        return slot, turn

    @device_function
    def work(
        base: Any, x: Any, squares: Any, share: Any, slot: Any, turn: Any, odd: Any, rows: Any, eps: Any,
        e0: Any, e1: Any, e2: Any, e3: Any, e4: Any, e5: Any, e6: Any, e7: Any,
    ) -> Any:  # fmt: skip
        first, count, half = narrow(share >> 12), narrow((share >> 1) & 2047), narrow(share & 1)
        if count > 0:
            thread = thread_id_again()
            warp, lane, never = narrow(thread >> 5), narrow(thread & 31), narrow(rows >> 16)
            chain = remainder(warp, chains)
            unit = narrow(thread >> 3)
            mine = quotient(unit, rows)
            m = narrow(unit - mine * rows)
            is_real = mine < min(round_tiles, count)
            ready = prepare(m, first + mine, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7)
            # few words until one has come: to ask for all of them again and again keeps the L2 cache from its work
            while any_lane(look_some(x, chain, lane)) == 0:
                pass
            b = unseen(chain, warp, lane, rows)
            while any_lane(b[missing_at]) != 0:
                b = look(b, x, squares, chain, warp, lane)
            for start_tile in range(narrow(0), count, narrow(round_tiles)):
                num = narrow(min(round_tiles, count - start_tile))
                buffer = base + sums_at + odd * buffer_bytes
                odd = narrow(odd ^ 1)
                if is_normed and warp < rows:
                    factor(b, buffer + factors_at + warp * 4, eps, lane)
                for i in range(
                    narrow((quotient(warp, chains) + half) & (split - 1)), num, narrow(split)
                ):
                    acc = multiply_0(no_sum(), arrived(base, warp, slot, turn) + lane * 16, b)
                    slot, turn = release(base, warp, lane, slot, turn, acc[4] & never)
                    if parts > 1:
                        acc = multiply_1(acc, arrived(base, warp, slot, turn) + lane * 16, b)
                        slot, turn = release(base, warp, lane, slot, turn, acc[4] & never)
                    if parts > 2:
                        acc = multiply_2(acc, arrived(base, warp, slot, turn) + lane * 16, b)
                        slot, turn = release(base, warp, lane, slot, turn, acc[4] & never)
                    if parts > 3:
                        acc = multiply_3(acc, arrived(base, warp, slot, turn) + lane * 16, b)
                        slot, turn = release(base, warp, lane, slot, turn, acc[4] & never)
                    put(acc, buffer + (i * chains + chain) * sums_bytes, lane)
                sync_some(1, threads)
                tile = first + start_tile + mine
                is_real = mine < num
                if (unit & -4) < num * rows:
                    at = mine if is_real else 0
                    a, c = collect(buffer + at * (chains * sums_bytes) + m * pitch + (lane & 7) * 8)
                    if is_normed:
                        a, c = scale_pair(a, c, buffer + factors_at + m * 4)
                    finish(ready, a, c, m, tile, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7)
                if start_tile + round_tiles < count:
                    is_real = mine < min(round_tiles, count - start_tile - round_tiles)
                    ready = prepare(
                        m, tile + round_tiles, lane & 7, is_real, e0, e1, e2, e3, e4, e5, e6, e7
                    )
        elif is_normed:
            # a block's threads meet before each reads residuals that others of it wrote two products before
            sync_some(1, threads)
        return slot, turn, odd

    return feed, work
