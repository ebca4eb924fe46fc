"""Paged attention on the CPU, compiled: writing K and V to blocks, and reading them for tiles of rows.

A tile is up to TILE_ROWS rows of one sequence and table, so that a block is fetched once for all of them; each row's arithmetic is
its own and the same in every tile. Called by `kernels.cpu` with plain arrays.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu_intrinsics import LANES, address, exp, fma, tile_1x1, tile_1x4, tile_2x4, tile_4x4
from kernels.layout import BLOCK_SIZE, NUM_SINKS

TILE_ROWS = 16  # query rows that share one reading of a block
_MASKED = np.float32(-1e30)
_F0 = np.float32(0.0)


@njit(nogil=True, cache=True)
def make_tiles(slots, tables, max_rows):  # type: ignore[no-untyped-def]
    """Row bounds (num_tiles + 1) of the runs of rows that share slot and table, cut at `max_rows`."""
    n = slots.shape[0]
    bounds = np.empty(n + 1, dtype=np.int32)
    bounds[0] = 0
    count = 0
    for r in range(1, n + 1):
        if (
            r == n
            or slots[r] != slots[r - 1]
            or tables[r] != tables[r - 1]
            or r - bounds[count] == max_rows
        ):
            count += 1
            bounds[count] = r
    return bounds[: count + 1]


@njit(nogil=True, cache=True)
def store(low, high, qkv, num_heads, dim, keys, values, layer, slots, tables, places, block_tables):  # type: ignore[no-untyped-def]
    num_kv = keys.shape[2]
    for h in range(
        num_kv
    ):  # outside: a head's 64 lines of keys stay in the processor's cache from row to row
        for r in range(low, high):
            block = block_tables[slots[r], tables[r], places[r] // BLOCK_SIZE]
            offset = places[r] % BLOCK_SIZE
            key_block, value = keys[block, layer, h], values[block, layer, h, offset]
            k = qkv[r, (num_heads + h) * dim :]
            v = qkv[r, (num_heads + num_kv + h) * dim :]
            for i in range(dim):
                value[i] = v[i]
            for i in range(dim):
                key_block[i, offset] = k[i]


@njit(nogil=True, cache=True)
def _product(rows, x, ldx, w, ldw, depth, out, ldo, num_vectors, like):  # type: ignore[no-untyped-def]
    """out (rows, num_vectors * LANES) += x (rows, depth) w (depth, num_vectors * LANES), over addresses and strides in floats.

    `like` is any fp32 array.
    """
    vector = 0
    while vector < num_vectors:
        at_w, at_out = w + vector * LANES * 4, out + vector * LANES * 4
        wide = num_vectors - vector >= 4
        r = 0
        while r < rows:
            at_x, to = x + r * ldx * 4, at_out + r * ldo * 4
            if wide and rows - r >= 4:
                tile_4x4(at_x, ldx, at_w, ldw, depth, to, ldo, 0, like)
                r += 4
            elif wide and rows - r >= 2:
                tile_2x4(at_x, ldx, at_w, ldw, depth, to, ldo, 0, like)
                r += 2
            elif wide:
                tile_1x4(at_x, ldx, at_w, ldw, depth, to, ldo, 0, like)
                r += 1
            else:
                tile_1x1(at_x, ldx, at_w, ldw, depth, to, ldo, 0, like)
                r += 1
        vector += 4 if wide else 1


@njit(nogil=True, cache=True)
def _gather(keys, values, layer, head, table, places, count, key_block, value_block):  # type: ignore[no-untyped-def]
    """Copies the keys at `count` places into one block's layout."""
    dim = key_block.shape[0]
    for k in range(count):
        block, offset = table[places[k] // BLOCK_SIZE], places[k] % BLOCK_SIZE
        for i in range(dim):
            key_block[i, k] = keys[block, layer, head, i, offset]
            value_block[k, i] = values[block, layer, head, offset, i]


@njit(nogil=True, cache=True)
def _soften(s, visible, first, sinks, top, lanes):  # type: ignore[no-untyped-def]
    """Turns a row's 64 scores of one block into exp(score - new maximum), 0 where masked.

    Keys [first, visible) and those below `sinks` are seen. Returns (new maximum, sum of the weights).
    """
    if visible < BLOCK_SIZE or first > 0:
        for k in range(BLOCK_SIZE):
            if k >= visible or (k < first and k >= sinks):
                s[k] = _MASKED
    for j in range(LANES):
        lanes[j] = max(s[j], s[LANES + j])
        lanes[j] = max(lanes[j], max(s[2 * LANES + j], s[3 * LANES + j]))
    for j in range(LANES):
        top = max(top, lanes[j])
    for k in range(BLOCK_SIZE):
        weight = exp(s[k] - top)
        s[k] = weight if s[k] > _MASKED else _F0
    for j in range(LANES):
        lanes[j] = (s[j] + s[LANES + j]) + (s[2 * LANES + j] + s[3 * LANES + j])
    total = _F0
    for j in range(LANES):
        total += lanes[j]
    return top, total


@njit(nogil=True, cache=True)
def attend(
    low, high, qkv, num_heads, num_kv, dim, keys, values, layer, slopes, tiles, slots, tables, positions, windows, row_map,
    map_base, maps, block_tables, out,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """See `kernels.cpu.attention`. Work items are (K/V head, tile) pairs, head by head: tiles of one sequence find blocks in cache."""
    group = num_heads // num_kv
    padded = values.shape[4]
    num_queries = group * TILE_ROWS
    q = np.empty((num_queries, dim), dtype=np.float32)
    s = np.empty((num_queries, BLOCK_SIZE), dtype=np.float32)
    o = np.empty((num_queries, padded), dtype=np.float32)
    top = np.empty(num_queries, dtype=np.float32)
    total = np.empty(num_queries, dtype=np.float32)
    lanes = np.empty(LANES, dtype=np.float32)
    key_block = np.zeros((dim, BLOCK_SIZE), dtype=np.float32)
    value_block = np.zeros((BLOCK_SIZE, padded), dtype=np.float32)
    num_tiles = tiles.shape[0] - 1
    scale = np.float32(1.0 / np.sqrt(dim))
    key_bytes, value_bytes = dim * BLOCK_SIZE * 4, BLOCK_SIZE * padded * 4
    for item in range(low, high):
        head, tile = item // num_tiles, item % num_tiles
        start, end = tiles[tile], tiles[tile + 1]
        slot, table = slots[start], tables[start]
        blocks = block_tables[slot, table]
        count = (end - start) * group
        last, least = 0, 1 << 30
        is_mapped = False
        for m in range(count):
            row, h = start + m // group, head * group + m % group
            for i in range(dim):
                q[m, i] = qkv[row, h * dim + i] * scale
            top[m], total[m] = _MASKED, _F0
            last, least = max(last, positions[row]), min(least, positions[row])
            is_mapped = is_mapped or row_map[row] >= 0
        o[:count] = _F0
        for b in range(last // BLOCK_SIZE + 1):
            base = b * BLOCK_SIZE
            # a run of rows that read the same block together; mapped rows read alone
            m = 0
            while m < count:
                row = start + m // group
                many = group if is_mapped else count - m
                at_keys = (
                    address(keys)
                    + ((blocks[b] * keys.shape[1] + layer) * num_kv + head) * key_bytes
                )
                at_values = (
                    address(values)
                    + ((blocks[b] * keys.shape[1] + layer) * num_kv + head) * value_bytes
                )
                if (
                    is_mapped
                    and positions[row] >= base
                    and row_map[row] >= 0
                    and base >= map_base[row]
                ):
                    here = min(BLOCK_SIZE, positions[row] - base + 1)
                    places = maps[row_map[row], base - map_base[row] :]
                    _gather(keys, values, layer, head, blocks, places, here, key_block, value_block)
                    at_keys, at_values = address(key_block), address(value_block)
                if is_seen(start, m, many, group, positions, windows, base):
                    reduce_block(
                        start, m, many, head, group, dim, q, s, o, top, total, lanes, at_keys, at_values, base, slopes, positions,
                        windows,
                    )  # fmt: skip
                m += many
        for m in range(count):
            row, h = start + m // group, head * group + m % group
            for i in range(dim):
                out[row, h * dim + i] = o[m, i] / total[m]


@njit(nogil=True, cache=True)
def is_seen(start, m, many, group, positions, windows, base):  # type: ignore[no-untyped-def]
    """Whether any of the queries sees a key of the block."""
    for i in range(m, m + many, group):
        row = start + i // group
        p, window = positions[row], windows[row]
        if p >= base and (base < NUM_SINKS or window == 0 or base + BLOCK_SIZE > p - window + 1):
            return True
    return False


@njit(nogil=True, cache=True)
def reduce_block(
    start,
    m0,
    many,
    head,
    group,
    dim,
    q,
    s,
    o,
    top,
    total,
    lanes,
    at_keys,
    at_values,
    base,
    slopes,
    positions,
    windows,
):  # type: ignore[no-untyped-def]
    """Adds one block to the running sums of queries m0 .. m0 + many."""
    padded = o.shape[1]
    s[m0 : m0 + many] = _F0
    _product(
        many,
        address(q) + m0 * dim * 4,
        dim,
        at_keys,
        BLOCK_SIZE,
        dim,
        address(s) + m0 * BLOCK_SIZE * 4,
        BLOCK_SIZE,
        4,
        s,
    )
    all_whole = True
    for m in range(m0, m0 + many):
        row = start + m // group
        p, window = positions[row], windows[row]
        visible = min(BLOCK_SIZE, p - base + 1)
        first = max(p - window + 1 - base, 0) if window > 0 else 0
        sinks = max(NUM_SINKS - base, 0)
        if visible <= 0 or (first >= visible and sinks == 0):
            s[m] = _F0
            all_whole = all_whole and visible >= BLOCK_SIZE
            continue
        if slopes.shape[0]:
            slope = slopes[head * group + m % group]
            for k in range(BLOCK_SIZE):
                s[m, k] = fma(slope, np.float32(base + k - p), s[m, k])
        new_top, weight = _soften(s[m], visible, first, sinks, top[m], lanes)
        correction = exp(top[m] - new_top)
        top[m] = new_top
        total[m] = fma(total[m], correction, weight)
        for i in range(padded):
            o[m, i] *= correction
        all_whole = all_whole and visible == BLOCK_SIZE
    if all_whole:
        at_s, at_o = address(s) + m0 * BLOCK_SIZE * 4, address(o) + m0 * padded * 4
        _product(
            many, at_s, BLOCK_SIZE, at_values, padded, BLOCK_SIZE, at_o, padded, padded // LANES, s
        )
        return
    for m in range(m0, m0 + many):
        visible = min(BLOCK_SIZE, positions[start + m // group] - base + 1)
        if visible > 0:
            at_s, at_o = address(s) + m * BLOCK_SIZE * 4, address(o) + m * padded * 4
            _product(
                1, at_s, BLOCK_SIZE, at_values, padded, visible, at_o, padded, padded // LANES, s
            )
