"""Attention of one layer in the persistent kernel (`persistent.py`).

An item is one stream of one (row, unit), the work of a team of groups. A team takes as many blocks of the stream at a time as it has
groups: each group scores one of them, then every warp goes through them in order, with all weights and its own share of the dims; so
the running softmax is that of `attention.py`. With int4, stream 0 has the exact keys (sinks and own block), stream s the stored blocks s - 1,
s + 15, ... (`persistent_stored.py`).
"""

from __future__ import annotations

from typing import Any

from kernels.attention_blocks import NO_WINDOW
from kernels.attention_parts import make_softmax, start
from kernels.attention_shapes import STREAMS
from kernels.device_code import device_function
from kernels.intrinsics import (
    any_lane,
    bits_of,
    grid_x,
    load_constant_i32,
    quotient,
    remainder,
    shuffle_from,
    sync_some,
    sync_warp,
    wide,
)
from kernels.persistent_parts import (
    make_merge,
    make_patch,
    make_query,
    make_send,
    make_share_scores,
    make_tile_values,
    no_sum,
    num_streams,
    result_words,
)
from kernels.persistent_ring import make_ring
from kernels.persistent_rows import entry_of, shown_of
from kernels.persistent_shapes import (
    PIECE_BYTES,
    CoreLaunch,
)
from kernels.persistent_stored import make_stored
from kernels.polling import (
    fence_async_shared,
    narrow,
    thread_id_again,
)


def make_attention(launch: CoreLaunch) -> Any:
    """What a producer warp and what its team do for one layer's attention."""
    shape, slot_bytes = launch.shape.attention, launch.slot_bytes
    is_known = shape.format in ("fp16", "int4") and shape.head_dim in (64, 128, 256)
    if not is_known or shape.has_alibi:
        raise ValueError(f"{shape} is not built")
    if slot_bytes < PIECE_BYTES:
        raise ValueError(f"attention's pieces do not fit {slot_bytes} bytes")
    if launch.at_once not in ((1, 4) if shape.format == "int4" else (1,)):
        raise ValueError(f"{launch.at_once} streams at once are not built for {shape.format}")
    if max(launch.urgent, launch.in_flight) >= launch.slots:
        raise ValueError(f"{launch} asks for more pieces than there are slots")
    units, split, group, dim = shape.units, shape.split, shape.group, shape.head_dim
    team, warps = launch.team, launch.warps
    if launch.groups % team or dim % (64 * team):
        raise ValueError(f"{shape} is not built for teams of {team} groups")
    groups, teams = launch.groups, launch.groups // team
    members, name_threads = 4 * team, 128 * team
    pieces, quarter_bytes, head_bytes, values_at = dim // 64, 32 * dim, 256 * dim, 128 * dim
    value_pieces = pieces // team
    value_bytes = value_pieces * PIECE_BYTES
    fetch, _, arrived, release = make_ring(launch)
    has_stored, at_once = shape.format == "int4", launch.at_once
    num_items, num_results = launch.num_items, num_streams(shape)
    sink_for, feed_stored, work_stored, *of_sinks = make_stored(launch)
    feed_sinks, work_sinks, no_sinks, sink_step = of_sinks
    stored_head_bytes, sink_bytes = shape.stored_head_bytes, shape.sink_bytes
    query_stride = launch.query_stride
    areas_at, scores_bytes = launch.areas_at, launch.scores_bytes
    area_bytes, width, no_window = launch.area_bytes * team, result_words(shape), NO_WINDOW
    query_bytes, key_bytes, kv_heads = 2 * group * dim, 2 * dim, shape.n_kv_heads
    look_query, look_again, lacks_any, keep_query, some_scores = make_query(shape)
    give, take = make_share_scores(shape)
    softmax, softmax_masked = (make_softmax(shape, masked) for masked in (False, True))
    (values_0, values_1, values_2, values_3), correct, zeros = make_tile_values(shape, team)
    at_1, at_2, at_3 = (4 * min(i, value_pieces - 1) for i in (1, 2, 3))
    look_new, patch_keys, patch_values = make_patch(shape, team)
    send = make_send(shape, team)
    look_some, unseen, look, merge = make_merge(shape, launch.shape.o)
    is_spread = team > 1 or has_stored
    missing_at = num_results + 2

    @device_function
    def unit_of(item: Any, per_stream: Any) -> Any:
        return narrow(remainder(item, per_stream) if item >= 0 else 0)

    @device_function
    def item_of(seat: Any, turn: Any, items: Any) -> Any:
        """A team's item in this turn of its block, -1: none.

        A group alone: neighbouring items are those of a block; teams, which have one or two, and int4 go over all blocks first.
        """
        time = quotient(turn, teams)
        item = (time * grid_x() + seat) * teams + (turn - time * teams)
        if is_spread:
            item = turn * grid_x() + seat
        return narrow(item if item < items else -1)

    @device_function
    def turns_of(items: Any) -> Any:
        return narrow(quotient(items + teams * grid_x() - 1, teams * grid_x()) * teams)

    @device_function
    def feed(
        base: Any, seat: Any, cache: Any, block_bytes: Any, own_tables: Any, stored: Any, stored_bytes: Any, tables: Any,
        sinks: Any, sinks_bytes: Any, sink_of: Any, positions: Any, row_info: Any, windows: Any, loop: Any, rows: Any,
        max_loops: Any, max_blocks: Any, slot: Any, turn: Any,
    ) -> Any:  # fmt: skip
        thread = thread_id_again()
        lane = thread & 31
        warp = ((thread >> 5) - warps) * 4 + (lane & 3)
        per_stream = narrow(rows * units)
        items = narrow(per_stream * num_items)
        member = narrow(remainder(warp, members))
        for again in range(quotient(warp, members), turns_of(items), narrow(teams)):
            item = item_of(seat, again, items)
            if item >= 0:
                stream = quotient(item, per_stream)
                unit = item - stream * per_stream
                row = quotient(unit, units)
                head = quotient(unit - row * units, split)
                position, _, low = shown_of(positions, windows, row)
                own = narrow(position >> 6)
                half = narrow(((member >> 2) + quotient(again, teams)) & (team - 1))
                first = narrow(stream)
                if has_stored:
                    first = own
                    if stream > 0:
                        first = narrow(own + 1)
                        slot, turn = feed_stored(
                            base, warp, lane, stored + head * stored_head_bytes, stored_bytes, tables, row_info, loop,
                            max_loops, max_blocks, row, narrow((stream - 1) * at_once), own, low, slot, turn,
                        )  # fmt: skip
                    else:
                        sink = sink_for(
                            sink_of, tables, row_info, loop, max_loops, max_blocks, row, own
                        )
                        if sink >= 0:
                            source = sinks + wide(sink) * sinks_bytes + head * sink_bytes
                            slot, turn = feed_sinks(base, warp, lane, source, slot, turn)
                for start_block in range(first, narrow(own + 1), narrow(STREAMS * team)):
                    block = start_block + half * STREAMS
                    if block <= own and (block == 0 or block >= low):
                        entry = entry_of(
                            own_tables, row_info, loop, max_loops, max_blocks, row, block
                        )
                        source = cache + wide(entry) * block_bytes + head * head_bytes
                        source += (member & 3) * quarter_bytes
                        for part in range(pieces):
                            at = part * PIECE_BYTES
                            slot, turn = fetch(
                                base, warp, lane, source + at, PIECE_BYTES, slot, turn, 1
                            )
                    for i in range(team):
                        block = start_block + i * STREAMS
                        if block <= own and (block == 0 or block >= low):
                            entry = entry_of(
                                own_tables, row_info, loop, max_loops, max_blocks, row, block
                            )
                            source = cache + wide(entry) * block_bytes + head * head_bytes
                            source += values_at + member * value_bytes
                            for part in range(value_pieces):
                                at = part * PIECE_BYTES
                                slot, turn = fetch(
                                    base, warp, lane, source + at, PIECE_BYTES, slot, turn, 1
                                )
        return slot, turn

    @device_function
    def work(
        base: Any, seat: Any, q: Any, k: Any, v: Any, loop_slots: Any, own_tables: Any, tables: Any, sink_of: Any,
        positions: Any, row_info: Any, windows: Any, results: Any, out: Any, loop: Any, rows: Any, max_loops: Any,
        max_blocks: Any, slot: Any, turn: Any, call: Any,
    ) -> Any:  # fmt: skip
        thread = thread_id_again()
        warp, lane, never = narrow(thread >> 5), narrow(thread & 31), narrow(rows >> 16)
        quarter, member, mine = (
            narrow(warp & 3),
            narrow(remainder(warp, members)),
            quotient(warp, members),
        )
        name = narrow(2 + mine)
        area = base + areas_at + mine * area_bytes
        per_stream = narrow(rows * units)
        items = narrow(per_stream * num_items)
        written = narrow(-1)
        if lane < rows:
            written = load_constant_i32(loop_slots + lane * 4)
        item = item_of(seat, mine, items)
        query = look_query(q + wide(unit_of(item, per_stream)) * query_bytes, lane, item >= 0)
        is_odd, is_other = narrow(0), narrow(0)
        for again in range(mine, turns_of(items), narrow(teams)):
            unit = unit_of(item, per_stream)
            stream = quotient(item, per_stream)
            row = quotient(unit, units)
            head = quotient(unit - row * units, split)
            position, window, low = shown_of(positions, windows, row)
            num_stable = load_constant_i32(row_info + row * 8)
            own = narrow(position >> 6)
            is_live = item >= 0 and own >= 0
            if not has_stored:
                is_live = item >= 0 and stream <= own
            has_own = (own - stream) & (STREAMS - 1) == 0
            sink = narrow(-1)
            if has_stored:
                has_own = stream == 0
                is_live = is_live and (stream == 0 or (stream - 1) * at_once < own)
                if stream <= 1:
                    sink = sink_for(
                        sink_of, tables, row_info, loop, max_loops, max_blocks, row, own
                    )
            here = shuffle_from(written, row)
            query_at = area + 2 * team * scores_bytes + is_other * query_stride
            at = wide(row * kv_heads + head) * key_bytes
            new = look_new(k + at, v + at, member, lane, is_live and has_own)
            following = item_of(seat, again + teams, items)
            next_unit = unit_of(following, per_stream)
            half = narrow(((member >> 2) + quotient(again, teams)) & (team - 1))
            if is_live:
                while any_lane(lacks_any(query, new)) != 0:
                    query = look_again(query, q + wide(unit) * query_bytes, lane)
                    new = look_new(k + at, v + at, member, lane, has_own)
                keep_query(query, query_at, lane)
                sync_warp()
                is_other = narrow(is_other ^ 1)
            item = following
            query = look_query(q + wide(next_unit) * query_bytes, lane, item >= 0)
            if has_stored and is_live and stream > 0:
                slot, turn, is_odd = work_stored(
                    base, area, query_at, query_at + query_bytes, is_odd, name, sink, narrow((stream - 1) * at_once),
                    position, low, window, results, narrow(unit * num_results + 1 + (stream - 1) * at_once), call + 1,
                    slot, turn, never,
                )  # fmt: skip
            elif is_live:
                state = start()
                total = zeros()
                first = narrow(stream)
                if has_stored:
                    first, seen = own, no_sinks()
                    if sink >= 0:
                        slot, turn, seen = work_sinks(base, query_at, slot, turn, never)
                for start_block in range(first, narrow(own + 1), narrow(STREAMS * team)):
                    lane = narrow(thread_id_again() & 31)
                    scores = area + is_odd * (team * scores_bytes)
                    is_odd = narrow(is_odd ^ 1)
                    block = narrow(start_block + half * STREAMS)
                    if block <= own and (block == 0 or block >= low):
                        shown = no_sum()
                        entry = narrow(-1)
                        if block >= num_stable and rows > 1:
                            entry = entry_of(
                                own_tables, row_info, loop, max_loops, max_blocks, row, block
                            )
                        for piece in range(pieces):
                            keys = arrived(base, warp, slot, turn)
                            if block == own and (here & 63) >> 4 == quarter:
                                patch_keys(new, piece, keys, here & 63, lane)
                            if block >= num_stable:
                                for r in range(rows):
                                    place = shuffle_from(written, r)
                                    if (
                                        r != row
                                        and place >> 6 == entry
                                        and (place & 63) >> 4 == quarter
                                    ):
                                        at = wide(r * kv_heads + head) * key_bytes
                                        more = look_new(k + at, v + at, member, lane, 1)
                                        while any_lane(lacks_any(more, more)) != 0:
                                            more = look_new(k + at, v + at, member, lane, 1)
                                        patch_keys(more, piece, keys, place & 63, lane)
                                sync_warp()
                            shown = some_scores(
                                shown, keys + lane * 16, query_at + piece * (group * 128), lane
                            )
                            if block >= num_stable:
                                fence_async_shared()
                            slot, turn = release(base, warp, lane, slot, turn, shown[4] & never)
                        give(shown, scores + half * scores_bytes, quarter, lane)
                    if has_stored:
                        if sink >= 0:
                            sunk = sink_step(seen, position, (0, 0), lane)
                            state, total = sunk[0:4], sunk[4:]
                    sync_some(name, name_threads)
                    for i in range(team):
                        block = narrow(start_block + i * STREAMS)
                        if block <= own and (block == 0 or block >= low):
                            lane = narrow(thread_id_again() & 31)
                            entry = narrow(-1)
                            if block >= num_stable and rows > 1:
                                entry = entry_of(
                                    own_tables, row_info, loop, max_loops, max_blocks, row, block
                                )
                            shares = take(scores + i * scores_bytes, lane)
                            if block == own or window < no_window:
                                step = softmax_masked(
                                    shares, state, block * 64, position, window, (0, 0), lane
                                )
                            else:
                                step = softmax(
                                    shares, state, block * 64, position, window, (0, 0), lane
                                )
                            state = step[8:12]
                            total = correct(total, step[12], step[13])
                            for piece in range(value_pieces):
                                values = arrived(base, warp, slot, turn)
                                if block == own:
                                    patch_values(new, piece, values, here & 63, member, lane)
                                if block >= num_stable:
                                    for r in range(rows):
                                        place = shuffle_from(written, r)
                                        if r != row and place >> 6 == entry:
                                            at = wide(r * kv_heads + head) * key_bytes
                                            more = look_new(k + at, v + at, member, lane, 1)
                                            while any_lane(lacks_any(more, more)) != 0:
                                                more = look_new(k + at, v + at, member, lane, 1)
                                            patch_values(
                                                more, piece, values, place & 63, member, lane
                                            )
                                    sync_warp()
                                last = total[0]
                                if piece == 0:
                                    total = values_0(total, step[0:8], values + lane * 16)
                                    last = total[0]
                                elif piece == 1:
                                    total = values_1(total, step[0:8], values + lane * 16)
                                    last = total[at_1]
                                elif piece == 2:
                                    total = values_2(total, step[0:8], values + lane * 16)
                                    last = total[at_2]
                                else:
                                    total = values_3(total, step[0:8], values + lane * 16)
                                    last = total[at_3]
                                if block >= num_stable:
                                    fence_async_shared()
                                slot, turn = release(
                                    base, warp, lane, slot, turn, bits_of(last) & never
                                )
                # what follows is no part of the loops above: let it keep no registers there
                lane = narrow(thread_id_again() & 31)
                of_unit = results + wide(unit * num_results) * (group * width * 8)
                send(total, state, of_unit + stream * (group * width * 8), member, call + 1, lane)
        # The groups that have fewer items put the streams of each (row, unit) together.
        first = narrow(grid_x() - 1 - seat + (groups - 1 - (warp >> 2)) * grid_x())
        for unit in range(first, per_stream, narrow(groups * grid_x())):
            row = quotient(unit, units)
            own = load_constant_i32(positions + row * 4) >> 6
            of_unit = results + wide(unit * num_results) * (group * width * 8)
            for some in range(0, group * dim, 128):
                thread = thread_id_again()
                i, lane = some + (thread & 127), thread & 31
                if i < group * dim:
                    if at_once > 1:
                        # many wait: one word a stream until all have come, as the memory has other work
                        while any_lane(look_some(of_unit, i, own, call + 1, lane)) != 0:
                            pass
                    words = unseen(own)
                    while any_lane(words[missing_at]) != 0:
                        words = look(words, of_unit, i, call + 1, lane)
                    merge(words, out, row, unit - row * units, i, own, lane)
        return slot, turn

    return feed, work
