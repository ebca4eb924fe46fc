"""Gathers the blocks of keys and values that prompt tiles read, one layer's, in the order in which `warpgroup` multiplies by them.

The cache keeps the order of `mma.sync`; prompt attention reads each block many times, so that it is brought into the other order once,
in scratch memory, and 4-bit blocks back to fp16 with it. Numbers are moved or, from 4 bits, rounded once each: there is no order to keep.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    block_x,
    grid_dependency_launch,
    grid_dependency_wait,
    load_128,
    load_i32,
    quotient,
    remainder,
    store_128_if,
    sync_warp,
    thread_id,
    wide,
)
from kernels.layout import FragmentCache
from kernels.prompt_gather_stored import make_load_stored, make_put_sinks, make_restore
from kernels.prompt_shapes import GatherShape
from kernels.warpgroup import swizzled

ITEM_FIELDS = 4  # int32 of a gathered block: slot, table, block, which of the following
STORED, EXACT, WRITTEN = (
    0,
    1,
    2,
)  # brought from its stored form, from its exact copy, or written by `split_qkv` in this pass
_THREADS = 128


# Each of the 128 threads of a block has one 16-byte unit of the fragment order in each of two neighbouring steps. Of K these are
# 8 columns of two keys, of V 8 positions of two dims: the words change places in registers and leave as
# a row's unit of 16 bytes.


def make_load(shape: GatherShape, is_value: bool) -> Any:
    dim = shape.head_dim

    @traced("r" * (dim // 4))
    def load(source: Any, warp: Any, lane: Any) -> Any:
        """A thread's share of a block's K or V."""
        regs: list[Any] = []
        for i in range(dim // 32):
            pair = warp + 4 * i if is_value else warp * (dim // 32) + i
            for step in range(2):
                regs += load_128(source + pair * 1024 + (lane * 16 + step * 512))
        return tuple(regs)

    return load


def make_put(shape: GatherShape, is_value: bool) -> Any:
    dim = shape.head_dim

    @traced()
    def put(regs: Any, target: Any, warp: Any, lane: Any) -> None:
        """Write what `load` brought in the order of `warpgroup`: K by keys, V by dims."""
        g, t = lane >> 2, lane & 3
        for i in range(dim // 32):
            a, b = regs[8 * i : 8 * i + 4], regs[8 * i + 4 : 8 * i + 8]
            for high in range(2):
                if is_value:
                    pair = warp + 4 * i
                    at = value_unit((pair >> 1) * 16 + high * 8 + g, t, pair & 1, dim)
                else:
                    at = key_unit(warp * 16 + high * 8 + g, 4 * i + t)
                words = a[high], a[2 + high], b[high], b[2 + high]
                store_128_if(target + at, *words, 1)

    return put


def key_row(position: Any) -> Any:
    """The row of a block's key in shared memory: so that a lane's scores are those that the product with V wants from it."""
    return (position & 32) + ((position >> 1) & 3) * 8 + ((position >> 3) & 3) * 2 + (position & 1)


def key_unit(position: Any, octet: Any) -> Any:
    """Where 8 columns of a block's key lie, in bytes from the block's K."""
    row = key_row(position)
    return (octet >> 2) * 4096 + row * 64 + swizzled(octet & 3, row & 7) * 16


def value_unit(d: Any, unit: Any, high: Any, dim: int) -> Any:
    """Where dim d of 8 positions lies, in bytes from the block's V: of the 32 lower or higher ones 2 x unit + (0, 1, 8, 9, 16, 17, 24, 25)."""
    return high * (dim * 64) + d * 64 + swizzled(unit, d & 7) * 16


def _make_kernel(shape: GatherShape) -> Any:
    heads, dim, is_int4 = shape.num_kv_heads, shape.head_dim, shape.kind == "int4"
    half_bytes, stored_bytes = shape.half_bytes, shape.stored_bytes
    load_keys, load_values = make_load(shape, False), make_load(shape, True)
    put_keys, put_values = make_put(shape, False), make_put(shape, True)
    load_stored_keys, load_stored_values = (make_load_stored(shape, v) for v in (False, True))
    restore_keys, restore_values = (make_restore(shape, v) for v in (False, True))
    put_sink_keys, put_sink_values = (make_put_sinks(shape, v) for v in (False, True))

    @device_function
    def move(source: Any, target: Any, warp: Any, lane: Any) -> None:
        keys, values = load_keys(source, warp, lane), load_values(source + half_bytes, warp, lane)
        put_keys(keys, target, warp, lane)
        put_values(values, target + half_bytes, warp, lane)

    @device_function
    def move_stored(source: Any, target: Any, warp: Any, lane: Any) -> None:
        keys = load_stored_keys(source, warp, lane)
        values = load_stored_values(source + stored_bytes, warp, lane)
        put_keys(restore_keys(keys), target, warp, lane)
        put_values(restore_values(values), target + half_bytes, warp, lane)

    def kernel(
        stored: Any, stored_layer: Any, stored_block: Any, exact: Any, exact_layer: Any, exact_block: Any,
        sinks: Any, sink_layer: Any, sink_bytes: Any, sink_of: Any, block_tables: Any, exact_tables: Any,
        counts: Any, items: Any, scratch: Any, num_tables: Any, max_blocks: Any,
    ) -> None:  # fmt: skip
        head, lane, warp = remainder(block_x(), heads), thread_id() & 31, thread_id() >> 5
        item = items + quotient(block_x(), heads) * (4 * ITEM_FIELDS)
        target = scratch + wide(block_x()) * (2 * half_bytes)
        grid_dependency_launch()
        grid_dependency_wait()
        if quotient(block_x(), heads) >= load_i32(counts + 8):
            return
        index, source_kind = load_i32(item + 8), load_i32(item + 12)
        if source_kind == WRITTEN:
            return
        at = wide((load_i32(item) * num_tables + load_i32(item + 4)) * max_blocks + index) * 4
        block = load_i32(block_tables + at)
        if not is_int4:
            source = stored + stored_layer + wide(block) * stored_block + head * (2 * half_bytes)
            move(source, target, warp, lane)
        elif source_kind == EXACT:
            copy = load_i32(exact_tables + at)
            source = exact + exact_layer + wide(copy) * exact_block + head * (2 * half_bytes)
            move(source, target, warp, lane)
        else:
            source = stored + stored_layer + wide(block) * stored_block + head * (2 * stored_bytes)
            move_stored(source, target, warp, lane)
            sink = -1
            if index == 0:
                sink = load_i32(sink_of + block * 4)
            if sink >= 0:
                source = sinks + sink_layer + wide(sink) * sink_bytes + head * (16 * dim)
                sync_warp()
                put_sink_keys(source, target, warp, lane)
                put_sink_values(source, target + half_bytes, warp, lane)

    return kernel


def gather(shape: GatherShape) -> Variant:
    """Gather blocks; grid (items x kv heads, 1).

    Kernel arguments: what `cache_arguments` gives; block_tables and exact_tables (int4) int32 (slots, tables, max_blocks); counts and items of
    `PromptTiles` (blocks of threads past them leave at once); scratch uint8 (num_items, num_kv_heads, 256 * head_dim), written; num_tables, max_blocks.
    """
    return Variant(
        name=f"prompt_gather_k{shape.num_kv_heads}d{shape.head_dim}_{shape.kind}",
        function=_make_kernel(shape),
        args="l" * 15 + "rr",
        num_threads=_THREADS,
        blocks_per_sm=4,
        constants=(shape,),
    )


def cache_arguments(cache: FragmentCache, layer: int) -> tuple[Tensor | int | None, ...]:
    """Where a kernel finds a layer: the stored pool, bytes of its layer's offset and of a block; the same of the exact copies and of the
    sinks; which sinks a block has."""
    found: list[Tensor | int | None] = []
    for pool in (cache.stored, cache.exact, cache.sinks):
        found += [None, 0, 0] if pool is None else [pool, layer * pool.stride(1), pool.stride(0)]
    return (*found, cache.sink_of)
