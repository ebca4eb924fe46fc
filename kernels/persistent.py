"""All loops and layers of a decode step of 1 to 8 rows, and its head, in one kernel; the bits are those of `linear.py` and
`attention.py`, whose finishing functions it shares.

One block on every multiprocessor. Four warps (a group) share a producer warp that walks the block's fixed list of weight
pieces and cache blocks, of all phases and layers, and keeps every warp's own ring of `slots` pieces filled by bulk copies; so the
memory goes on while the block waits for others. Only so much is in flight as keeps the memory busy (`in_flight` pieces a
warp): what is needed now would wait behind the rest.

Phases of a layer: qkv | attention | o | gate_up | down. Nothing waits for a whole phase: every number that crosses blocks is
polled by who needs it (`polling.py`), in memory of the layer call's own, which holds NOTHING before the step. Nothing that this
kernel writes is read by a bulk copy: keys and values of the step itself are put over the prefetched image of a cache block.

A block owns whole tiles of 16 outputs, with all of K: one warp a chain, added in order through shared
memory (`persistent_products.py`). Attention (`persistent_attention.py`) spreads the (stream, row, unit) items over all blocks: a group
scores a block of the cache, 16 positions a warp; then every warp of the team makes all weights and adds its share of the dims. Idle
groups merge the streams of a (row, unit).
"""

from __future__ import annotations

from typing import Any

from kernels.compiler import Variant
from kernels.intrinsics import (
    block_x,
    grid_dependency_wait,
    load_constant_i32,
    mbarrier_init,
    mbarrier_init_fence,
    quotient,
    remainder,
    shared_base,
    sync_block,
    thread_id,
    wide,
)
from kernels.linear_parts import make_gated, make_qkv, make_residual, make_store
from kernels.persistent_attention import make_attention
from kernels.persistent_products import make_product
from kernels.persistent_shapes import (
    POINTERS,
    CoreLaunch,
)
from kernels.polling import (
    load_constant_i64,
    narrow,
)
from kernels.warpgroup import make_registers

_PAIR_MASKS = (1, 2, 4)  # how the lanes that hold a tile's 8 pairs differ
_ARGS = "l" * 20 + "rrrrf"


def _make_kernel(launch: CoreLaunch) -> Any:
    shape = launch.shape
    layers, warps, slots = shape.layers, launch.warps, launch.slots
    threads, bars_at = 32 * warps, launch.bars_at
    heads = shape.attention.n_kv_heads
    own_layer, stored_layer, sinks_layer = (
        heads * size
        for size in (shape.heads.head_bytes, shape.attention.stored_head_bytes, shape.attention.sink_bytes)
    )  # fmt: skip
    pointer_bytes = POINTERS * 8
    d_model = shape.d_model
    feed_qkv, work_qkv = make_product(
        launch, shape.qkv, True, make_qkv(shape.heads, 1, is_told=True)
    )
    feed_o, work_o = make_product(
        launch, shape.o, False, make_residual(d_model, shape.gate_up, 1, _PAIR_MASKS)
    )
    feed_gate_up, work_gate_up = make_product(
        launch,
        shape.gate_up,
        True,
        make_gated(shape.d_ff, shape.down, 1),
        shape.down if launch.has_prefetch else None,
    )
    feed_down, work_down = make_product(
        launch, shape.down, False, make_residual(d_model, shape.qkv, 1, _PAIR_MASKS)
    )
    feed_head, work_head = make_product(launch, shape.head, True, make_store(shape.head.n, False))
    feed_attention, work_attention = make_attention(launch)
    at = shape.told_at
    normed_at, squares_at, mixed_at, hidden_at = (
        at[n] for n in ("normed", "squares", "mixed", "hidden")
    )
    normed_2_at, squares_2_at, call_bytes = at["normed_2"], at["squares_2"], at["end"]
    q_at, k_at, v_at = at["q"], at["k"], at["v"]
    # Producers need few registers, what they leave goes to the others; whole warpgroups alone can give.
    has_quota = launch.groups == 4
    give_registers = make_registers(64, is_more=False)
    take_registers = make_registers(104, is_more=True)

    def kernel(
        shares: Any, pointers: Any, told: Any, x: Any, cache: Any, block_bytes: Any, own_tables: Any, stored: Any,
        stored_bytes: Any, tables: Any, sinks: Any, sinks_bytes: Any, sink_of: Any, slots_of_loops: Any, rope: Any,
        positions: Any, row_info: Any, windows: Any, results: Any, logits: Any,
        rows: Any, calls: Any, max_loops: Any, max_blocks: Any, eps: Any,
    ) -> None:  # fmt: skip
        base = shared_base()
        if thread_id() == 0:
            for i in range(2 * slots * warps):
                mbarrier_init(base + bars_at + i * 8, 1)
            mbarrier_init_fence()
        sync_block()
        share = shares + block_x() * 32
        my_qkv, my_o = load_constant_i32(share), load_constant_i32(share + 4)
        my_gate_up, my_down = load_constant_i32(share + 8), load_constant_i32(share + 12)
        seat = load_constant_i32(share + 20)
        last = pointers + layers * pointer_bytes
        slot, turn = narrow(0), narrow(0)
        if thread_id() >= threads:
            if has_quota:
                give_registers()
            for call in range(calls):
                loop, layer = quotient(call, layers), remainder(call, layers)
                of_layer = pointers + layer * pointer_bytes
                slot, turn = feed_qkv(base, load_constant_i64(of_layer), my_qkv, slot, turn, 0, 0)
                # the cache and the tables may be written before this kernel
                grid_dependency_wait()
                slot, turn = feed_attention(
                    base, seat, cache + layer * own_layer, block_bytes, own_tables, stored + layer * stored_layer, stored_bytes,
                    tables, sinks + layer * sinks_layer, sinks_bytes, sink_of, positions, row_info, windows, loop, rows,
                    max_loops, max_blocks, slot, turn,
                )  # fmt: skip
                slot, turn = feed_o(base, load_constant_i64(of_layer + 8), my_o, slot, turn, 0, 0)
                slot, turn = feed_gate_up(
                    base, load_constant_i64(of_layer + 16), my_gate_up, slot, turn,
                    load_constant_i64(of_layer + 24), my_down,
                )  # fmt: skip
                slot, turn = feed_down(
                    base, load_constant_i64(of_layer + 24), my_down, slot, turn, 0, 0
                )  # fmt: skip
            if logits != 0:
                slot, turn = feed_head(
                    base, load_constant_i64(last), load_constant_i32(share + 16), slot, turn, 0, 0
                )  # fmt: skip
        else:
            if has_quota:
                take_registers()
            grid_dependency_wait()
            odd, call = narrow(0), narrow(0)
            while call < calls:  # `range` takes a register more
                loop, layer = quotient(call, layers), remainder(call, layers)
                loop_slots = slots_of_loops + loop * rows * 4
                of_layer = pointers + layer * pointer_bytes
                here = told + wide(call) * call_bytes
                slot, turn, odd = work_qkv(
                    base, here + normed_at, here + squares_at, my_qkv, slot, turn, odd, rows, eps,
                    here + q_at, cache + layer * own_layer, loop_slots, rope, block_bytes, here + k_at, here + v_at, 0,
                )  # fmt: skip
                slot, turn = work_attention(
                    base, seat, here + q_at, here + k_at, here + v_at, loop_slots, own_tables, tables, sink_of, positions,
                    row_info, windows, results, here + mixed_at, loop, rows, max_loops, max_blocks, slot, turn, call,
                )  # fmt: skip
                slot, turn, odd = work_o(
                    base, here + mixed_at, 0, my_o, slot, turn, odd, rows, eps,
                    x, here + squares_2_at, load_constant_i64(of_layer + 40), here + normed_2_at, 0, 0, 0, 0,
                )  # fmt: skip
                slot, turn, odd = work_gate_up(
                    base, here + normed_2_at, here + squares_2_at, my_gate_up, slot, turn, odd, rows, eps,
                    here + hidden_at, 0, 0, 0, 0, 0, 0, 0,
                )  # fmt: skip
                following = last + 8
                if layer + 1 < layers:
                    following = of_layer + pointer_bytes + 32
                elif call + 1 < calls:
                    following = pointers + 32
                after = here + call_bytes
                slot, turn, odd = work_down(
                    base, here + hidden_at, 0, my_down, slot, turn, odd, rows, eps,
                    x, after + squares_at, load_constant_i64(following), after + normed_at, 0, 0, 0, 0,
                )  # fmt: skip
                call = narrow(call + 1)
            if logits != 0:
                here = told + wide(calls) * call_bytes
                slot, turn, odd = work_head(
                    base, here + normed_at, here + squares_at, load_constant_i32(share + 16), slot, turn, odd, rows, eps,
                    logits, 0, 0, 0, 0, 0, 0, 0,
                )  # fmt: skip

    return kernel


def core_step(launch: CoreLaunch) -> Variant:
    """The core and the head of a decode step, launched after `step.begin_step` with one block a multiprocessor.

    Kernel arguments: shares int32 (blocks, 8) of `share_words`; pointers int64 (layers * POINTERS + 2): each layer's
    weights and gains (see POINTERS), then the head's weights and the last gain; told: memory of `CoreShape.told_at` for
    every layer call and one more, NOTHING all over but for the normed x and the squares of the first call;
    x float32 (rows, d), updated; the fp16 pool, bytes of a block over all layers, and its tables int32 (rows, max_loops,
    max_blocks); with int4 the same of the stored blocks (the fp16 pool then has the rows' own blocks), the sinks, bytes of all
    layers' sinks of one block, and int32 (stored blocks,) which of them belongs to a block, -1: none; slots int32 (loops,
    rows); rope float32 (rows, dim/2, 2); positions int32 (rows,), -1: no row (nothing is
    written for it that is of use); row_info int32 (rows, 2): how many leading blocks nothing in this step
    writes, and the row's loop before this step; windows int32 (rows,), 0: all keys, else that many and the sinks (address 0:
    all rows see all keys); results (`results_size` pairs of words, NOTHING before the step); logits float32 (rows, n),
    written (address 0: there is no head); rows, loops, max_loops, max_blocks, eps.
    """
    return Variant(
        name=f"core_step_m{launch.rows}_g{launch.groups}s{launch.slots}x{launch.slot_bytes}",
        function=_make_kernel(launch),
        args=_ARGS,
        num_threads=32 * (launch.warps + launch.groups),
        shared_bytes=launch.shared_bytes,
        is_together=True,
        constants=(launch,),
    )
