"""Paged attention on the CPU over caches in a cut form (`CutCache`): fp16, int8 and int4, keys and values or the attention's inputs.

Writing rounds each position alone, so the stored form depends on nothing but its own vector. Reading brings one block at a time back
to fp32 and reduces it as `kernels.cpu_attention` does: in each row's own block the exact copies, elsewhere the stored form with
exact sinks. Called by `kernels.cpu` with plain arrays.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu_attention import TILE_ROWS, is_seen, reduce_block
from kernels.cpu_intrinsics import LANES, address, fma, from_half, to_half
from kernels.layout import BLOCK_SIZE, NUM_SINKS

FP16, INT8, INT4 = 0, 1, 2
_MASKED = np.float32(-1e30)
_F0 = np.float32(0.0)


@njit(nogil=True, cache=True)
def store(
    low, high, rows, first_key, first_value, heads, dim, kind, group, keys, values, scales, exact_keys, exact_values,
    exact_tables, sink_keys, sink_values, sink_of, layer, slots, tables, places, block_tables,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Writes rows' vectors, keys from column `first_key` on and values from `first_value`, to their places in every form."""
    has_keys, has_copies = keys.shape[0] > 0, exact_tables.shape[0] > 0
    codes = np.empty(dim, dtype=np.uint8)
    for r in range(low, high):
        number, offset = places[r] // BLOCK_SIZE, places[r] % BLOCK_SIZE
        block = block_tables[slots[r], tables[r], number]
        copy = exact_tables[slots[r], tables[r], number] if has_copies else -1
        sink = sink_of[block] if has_copies and places[r] < NUM_SINKS else -1
        for h in range(heads):
            v = rows[r, first_value + h * dim : first_value + (h + 1) * dim]
            _cut(v, kind, group, scales[block, layer, h, -1, :, offset], codes)
            _put(codes, v, kind, group, values[block, layer, h, offset, :])
            if copy >= 0:
                _halves(v, exact_values[copy, layer, h, offset, :])
            if sink >= 0:
                _halves(v, sink_values[sink, layer, h, offset, :])
            if has_keys:
                k = rows[r, first_key + h * dim : first_key + (h + 1) * dim]
                _cut(k, kind, group, scales[block, layer, h, 0, :, offset], codes)
                _put(codes, k, kind, group, keys[block, layer, h, :, offset])
                if copy >= 0:
                    _halves(k, exact_keys[copy, layer, h, :, offset])
                if sink >= 0:
                    _halves(k, sink_keys[sink, layer, h, offset, :])


@njit(nogil=True, cache=True)
def _halves(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        out[i] = to_half(x[i])


@njit(nogil=True, cache=True)
def _cut(x, kind, group, scales, codes):  # type: ignore[no-untyped-def]
    """Scales (and zero points) of a vector and its integer codes; int8 codes are offset by 128."""
    if kind == FP16:
        return
    for g in range(x.shape[0] // group):
        part = x[g * group : (g + 1) * group]
        least, most = part[0], part[0]
        for i in range(group):
            least, most = min(least, part[i]), max(most, part[i])
        if kind == INT8:
            scales[g] = to_half(max(-least, most) / np.float32(127.0))
            zero, bottom, top, shift = _F0, np.float32(-127.0), np.float32(127.0), 128
            scale = from_half(scales[g])
        else:
            scales[2 * g] = to_half((most - least) / np.float32(15.0))
            scales[2 * g + 1] = to_half(least)
            zero, bottom, top, shift = from_half(scales[2 * g + 1]), _F0, np.float32(15.0), 0
            scale = from_half(scales[2 * g])
        for i in range(group):
            code = np.rint((part[i] - zero) / scale) if scale > _F0 else _F0
            codes[g * group + i] = np.uint8(np.int32(min(max(code, bottom), top)) + shift)


@njit(nogil=True, cache=True)
def _put(codes, x, kind, group, out):  # type: ignore[no-untyped-def]
    """Writes a vector's codes in their stored form."""
    if kind == FP16:
        for i in range(x.shape[0]):
            out[i] = to_half(x[i])
    elif kind == INT8:
        for i in range(x.shape[0]):
            out[i] = np.int32(codes[i]) - 128
    else:
        half = group // 2
        for g in range(x.shape[0] // group):
            for i in range(half):
                at = g * group + i
                out[g * half + i] = codes[at] | (codes[at + half] << 4)


@njit(nogil=True, cache=True)
def _read_values(kind, group, values, scales, out):  # type: ignore[no-untyped-def]
    """A block's values (BLOCK_SIZE, stored_dim) and scales (S, BLOCK_SIZE) as fp32 (BLOCK_SIZE, dim)."""
    if kind == FP16:
        for k in range(BLOCK_SIZE):
            for i in range(values.shape[1]):
                out[k, i] = from_half(np.int16(values[k, i]))
    elif kind == INT8:
        for k in range(BLOCK_SIZE):
            scale = from_half(scales[0, k])
            for i in range(values.shape[1]):
                out[k, i] = np.float32(values[k, i]) * scale
    else:
        half = group // 2
        for k in range(BLOCK_SIZE):
            for g in range(values.shape[1] // half):
                scale, zero = from_half(scales[2 * g, k]), from_half(scales[2 * g + 1, k])
                packed = values[k, g * half : (g + 1) * half]
                lower, upper = out[k, g * group :], out[k, g * group + half :]
                for i in range(half):
                    code = np.uint8(packed[i])
                    lower[i] = fma(np.float32(code & 15), scale, zero)
                    upper[i] = fma(np.float32(code >> 4), scale, zero)


@njit(nogil=True, cache=True)
def _read_keys(kind, group, keys, scales, out):  # type: ignore[no-untyped-def]
    """A block's keys (stored_dim, BLOCK_SIZE) and scales (S, BLOCK_SIZE) as fp32 (dim, BLOCK_SIZE)."""
    if kind == FP16:
        for i in range(keys.shape[0]):
            for k in range(BLOCK_SIZE):
                out[i, k] = from_half(np.int16(keys[i, k]))
        return
    scale = np.empty(BLOCK_SIZE, dtype=np.float32)
    zero = np.empty(BLOCK_SIZE, dtype=np.float32)
    if kind == INT8:
        for k in range(BLOCK_SIZE):
            scale[k] = from_half(scales[0, k])
        for i in range(keys.shape[0]):
            for k in range(BLOCK_SIZE):
                out[i, k] = np.float32(keys[i, k]) * scale[k]
        return
    half = group // 2
    for g in range(keys.shape[0] // half):
        for k in range(BLOCK_SIZE):
            scale[k], zero[k] = from_half(scales[2 * g, k]), from_half(scales[2 * g + 1, k])
        for i in range(half):
            lower, upper = out[g * group + i], out[g * group + half + i]
            packed = keys[g * half + i]
            for k in range(BLOCK_SIZE):
                code = np.uint8(packed[k])
                lower[k] = fma(np.float32(code & 15), scale[k], zero[k])
                upper[k] = fma(np.float32(code >> 4), scale[k], zero[k])


@njit(nogil=True, cache=True)
def _turn(values, dim, out):  # type: ignore[no-untyped-def]
    """The values (BLOCK_SIZE, dim) as keys (dim, BLOCK_SIZE)."""
    for first in range(0, dim, LANES):
        for k in range(BLOCK_SIZE):
            for i in range(first, min(first + LANES, dim)):
                out[i, k] = values[k, i]


@njit(nogil=True, cache=True)
def _load(
    block, copy, is_first, head, dim, kind, group, keys, values, scales, exact_keys, exact_values, sink_keys, sink_values,
    sink_of, layer, key_block, value_block,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One block in fp32: from its exact copy if `copy` >= 0, else from its stored form, the sinks of a first block exact."""
    has_keys = keys.shape[0] > 0
    if copy >= 0:
        _read_values(FP16, group, exact_values[copy, layer, head], scales[0, 0, 0, 0], value_block)
        if has_keys:
            _read_keys(FP16, group, exact_keys[copy, layer, head], scales[0, 0, 0, 0], key_block)
    else:
        part = scales[block, layer, head]
        _read_values(kind, group, values[block, layer, head], part[-1], value_block)
        if has_keys:
            _read_keys(kind, group, keys[block, layer, head], part[0], key_block)
        if is_first and sink_of.shape[0] > 0 and sink_of[block] >= 0:
            sink = sink_of[block]
            for k in range(NUM_SINKS):
                for i in range(dim):
                    value_block[k, i] = from_half(sink_values[sink, layer, head, k, i])
                    if has_keys:
                        key_block[i, k] = from_half(sink_keys[sink, layer, head, k, i])
    if not has_keys:
        _turn(value_block, dim, key_block)


@njit(nogil=True, cache=True)
def read_inputs(
    blocks, copies, dim, kind, group, keys, values, scales, exact_keys, exact_values, sink_keys, sink_values, sink_of, layer, out
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The inputs of blocks 0, 1, ... of a sequence, (num_blocks, BLOCK_SIZE, dim): exact where `copies` >= 0, else as stored."""
    key_block = np.empty((dim, BLOCK_SIZE), dtype=np.float32)
    for b in range(blocks.shape[0]):
        _load(
            blocks[b], copies[b], b == 0, 0, dim, kind, group, keys, values, scales, exact_keys, exact_values, sink_keys,
            sink_values, sink_of, layer, key_block, out[b],
        )  # fmt: skip


@njit(nogil=True, cache=True)
def attend(
    low, high, q_rows, num_heads, num_kv, dim, scale, kind, group_size, keys, values, scales, exact_keys, exact_values,
    exact_tables, sink_keys, sink_values, sink_of, layer, slopes, tiles, slots, tables, positions, windows, row_map, map_base,
    maps, block_tables, out,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """See `kernels.cpu.attention`. Work items are (head of the cache, tile) pairs, head by head."""
    group = num_heads // num_kv
    padded = -(-dim // LANES) * LANES
    num_queries = group * TILE_ROWS
    q = np.empty((num_queries, dim), dtype=np.float32)
    s = np.empty((num_queries, BLOCK_SIZE), dtype=np.float32)
    o = np.empty((num_queries, padded), dtype=np.float32)
    top = np.empty(num_queries, dtype=np.float32)
    total = np.empty(num_queries, dtype=np.float32)
    lanes = np.empty(LANES, dtype=np.float32)
    # a block as stored, its exact copy, the mapped keys of one row, and a block that these are taken from
    key_blocks = np.zeros((4, dim, BLOCK_SIZE), dtype=np.float32)
    value_blocks = np.zeros((4, BLOCK_SIZE, padded), dtype=np.float32)
    has_copies = exact_tables.shape[0] > 0
    num_tiles = tiles.shape[0] - 1
    for item in range(low, high):
        head, tile = item // num_tiles, item % num_tiles
        start, end = tiles[tile], tiles[tile + 1]
        slot, table = slots[start], tables[start]
        blocks = block_tables[slot, table]
        count = (end - start) * group
        last = 0
        for m in range(count):
            row, h = start + m // group, head * group + m % group
            for i in range(dim):
                q[m, i] = q_rows[row, h * dim + i] * scale
            top[m], total[m] = _MASKED, _F0
            last = max(last, positions[row])
        o[:count] = _F0
        for b in range(last // BLOCK_SIZE + 1):
            base = b * BLOCK_SIZE
            is_loaded, is_copied = False, False
            m = 0
            while m < count:
                row = start + m // group
                is_own = has_copies and positions[row] // BLOCK_SIZE == b
                is_mapped = row_map[row] >= 0 and base >= map_base[row]
                many = group
                while not is_mapped and m + many < count:  # a run of rows that read the same form
                    other = start + (m + many) // group
                    if (has_copies and positions[other] // BLOCK_SIZE == b) != is_own or (
                        row_map[other] >= 0 and base >= map_base[other]
                    ):
                        break
                    many += group
                if is_seen(start, m, many, group, positions, windows, base):
                    form = 0
                    if is_mapped:
                        form = 2
                        here = min(BLOCK_SIZE, positions[row] - base + 1)
                        at = -1
                        for k in range(here):
                            place = maps[row_map[row], base - map_base[row] + k]
                            number, offset = place // BLOCK_SIZE, place % BLOCK_SIZE
                            if number != at:
                                at = number
                                _load(
                                    blocks[at], exact_tables[slot, table, at] if is_own else -1, False, head, dim, kind,
                                    group_size, keys, values, scales, exact_keys, exact_values, sink_keys, sink_values,
                                    sink_of, layer, key_blocks[3], value_blocks[3],
                                )  # fmt: skip
                            for i in range(dim):
                                key_blocks[2, i, k] = key_blocks[3, i, offset]
                                value_blocks[2, k, i] = value_blocks[3, offset, i]
                    elif is_own:
                        form = 1
                        if not is_copied:
                            _load(
                                blocks[b], exact_tables[slot, table, b], b == 0, head, dim, kind, group_size, keys, values,
                                scales, exact_keys, exact_values, sink_keys, sink_values, sink_of, layer, key_blocks[1],
                                value_blocks[1],
                            )  # fmt: skip
                            is_copied = True
                    elif not is_loaded:
                        _load(
                            blocks[b], -1, b == 0, head, dim, kind, group_size, keys, values, scales, exact_keys,
                            exact_values, sink_keys, sink_values, sink_of, layer, key_blocks[0], value_blocks[0],
                        )  # fmt: skip
                        is_loaded = True
                    reduce_block(
                        start, m, many, head, group, dim, q, s, o, top, total, lanes, address(key_blocks[form]),
                        address(value_blocks[form]), base, slopes, positions, windows,
                    )  # fmt: skip
                m += many
        for m in range(count):
            row, h = start + m // group, head * group + m % group
            for i in range(dim):
                out[row, h * dim + i] = o[m, i] / total[m]
