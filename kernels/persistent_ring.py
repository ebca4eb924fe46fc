"""The persistent kernel's rings of pieces: filled by producer warps, emptied by one warp each; see `persistent.py`."""

from __future__ import annotations

from typing import Any

from kernels.device_code import device_function
from kernels.intrinsics import (
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    sync_warp,
)
from kernels.persistent_shapes import (
    CoreLaunch,
)
from kernels.polling import (
    bulk_copy_once,
    mbarrier_test,
    narrow,
)


def make_ring(launch: CoreLaunch) -> Any:
    """Filling a slot of each of a group's warps; waiting for a slot; giving it back."""
    slots, slot_bytes, warps, ahead = (
        launch.slots,
        launch.slot_bytes,
        launch.warps,
        launch.in_flight,
    )
    urgent = launch.urgent
    full_at, free_at = launch.bars_at, launch.bars_at + 8 * slots * warps

    @device_function
    def wait_for_room(base: Any, warp: Any, slot: Any, turn: Any) -> Any:
        """Where the slot's barriers lie, once it is free and the piece before those that may be in flight has come."""
        at = base + (warp * slots + slot) * 8
        mbarrier_wait(at + free_at, turn ^ 1)
        before, its_turn = slot - ahead, turn
        if before < 0:
            before += slots
            its_turn ^= 1
        came = base + (warp * slots + before) * 8 + full_at
        if urgent:
            behind, old_turn = slot - urgent, turn
            if behind < 0:
                behind += slots
                old_turn ^= 1
            used = base + (warp * slots + behind) * 8 + free_at
            while (mbarrier_test(came, its_turn) | mbarrier_test(used, old_turn)) == 0:
                pass
        else:
            mbarrier_wait(came, its_turn)
        return at

    @device_function
    def following(slot: Any, turn: Any, is_used: Any) -> Any:
        if is_used:
            slot += 1
            if slot == slots:
                slot = 0
                turn ^= 1
        return narrow(slot), narrow(turn)

    @device_function
    def fetch(
        base: Any, warp: Any, lane: Any, source: Any, num_bytes: Any, slot: Any, turn: Any, is_wanted: Any
    ) -> Any:  # fmt: skip
        """By the first four lanes of a producer warp, each for one warp, where `is_wanted`."""
        if lane < 4 and is_wanted:
            at = wait_for_room(base, warp, slot, turn)
            mbarrier_expect(at + full_at, num_bytes)
            target = base + (warp * slots + slot) * slot_bytes
            bulk_copy_once(target, source, num_bytes, at + full_at)
        sync_warp()
        return following(slot, turn, is_wanted)

    @device_function
    def fetch_two(
        base: Any, warp: Any, lane: Any, source: Any, num_bytes: Any, other: Any, other_bytes: Any, slot: Any, turn: Any,
        is_wanted: Any,
    ) -> Any:  # fmt: skip
        """A piece that lies in two places."""
        if lane < 4 and is_wanted:
            at = wait_for_room(base, warp, slot, turn)
            mbarrier_expect(at + full_at, num_bytes + other_bytes)
            target = base + (warp * slots + slot) * slot_bytes
            bulk_copy_once(target, source, num_bytes, at + full_at)
            bulk_copy_once(target + num_bytes, other, other_bytes, at + full_at)
        sync_warp()
        return following(slot, turn, is_wanted)

    @device_function
    def arrived(base: Any, warp: Any, slot: Any, turn: Any) -> Any:
        at = warp * slots + slot
        mbarrier_wait(base + full_at + at * 8, turn)
        return base + at * slot_bytes

    @device_function
    def release(base: Any, warp: Any, lane: Any, slot: Any, turn: Any, nothing: Any) -> Any:
        """`nothing`: 0, made of all that was read (`reads.py` says why)."""
        sync_warp()
        if lane == 0:
            mbarrier_arrive(base + free_at + (warp * slots + slot) * 8 + nothing)
        return following(slot, turn, 1)

    return fetch, fetch_two, arrived, release
