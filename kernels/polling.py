"""Words that blocks of one running kernel tell each other: whoever needs a word asks for it until it has come.

What has come is not asked for again (`poll_*_again`): polls keep the L2 cache from its work.
Such memory holds NOTHING before a step; every word is written once in a step, and no arithmetic gives NOTHING (as two halves
or as a float it is a NaN other than the one that instructions make). So a word is its own announcement: no fence, no counter.
Where memory is used again and again, a word comes with a tag in one 64-bit store.
"""

from __future__ import annotations

import struct
from typing import Any

from kernels import emulator
from kernels.device_code import op, traced
from kernels.intrinsics import Four, same

NOTHING = 0xFFFFFFFF


@op(
    "rrrr",
    "lr",
    "{.reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
    "@p ld.relaxed.gpu.global.v4.u32 {$0,$1,$2,$3}, [$4];}",
    memory=True,
)
def poll_128_if(address: int, condition: int) -> Four:
    """Four words as they are now, or zeros where `condition` is 0."""
    if not condition:
        return (0, 0, 0, 0)
    return struct.unpack("<4I", emulator.poll_global(address, 16))


@op(
    "rrrr",
    "rrrrlr",
    "{.reg .pred p; setp.ne.s32 p, $9, 0; @p ld.relaxed.gpu.global.v4.u32 {$0,$1,$2,$3}, [$8];}",
    memory=True,
    tied=4,
)
def poll_128_again(a: int, b: int, c: int, d: int, address: int, condition: int) -> Four:
    """Four words as they are now, or those given where `condition` is 0."""
    if not condition:
        return (a, b, c, d)
    return struct.unpack("<4I", emulator.poll_global(address, 16))


@op(
    "r",
    "lr",
    "{.reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.relaxed.gpu.global.u32 $0, [$1];}",
    memory=True,
)
def poll_32_if(address: int, condition: int) -> int:
    """A word as it is now, or 0 where `condition` is 0."""
    if not condition:
        return 0
    return int.from_bytes(emulator.poll_global(address, 4), "little")


@op(
    "rr",
    "rrlr",
    "{.reg .pred p; .reg .b64 w; setp.ne.s32 p, $5, 0; mov.b64 w, {$2,$3}; "
    "@p ld.relaxed.gpu.global.b64 w, [$4]; mov.b64 {$0,$1}, w;}",
    memory=True,
)
def poll_tagged_again(word: int, tag: int, address: int, condition: int) -> tuple[int, int]:
    """A word and its tag as they are now, or those given where `condition` is 0."""
    if not condition:
        return word, tag
    return struct.unpack("<2I", emulator.poll_global(address, 8))


@op(
    "",
    "lfrr",
    "{.reg .pred p; .reg .b64 w; setp.ne.s32 p, $3, 0; mov.b64 w, {$1,$2}; @p st.relaxed.gpu.global.b64 [$0], w;}",
    memory=True,
)
def store_tagged_if(address: int, value: float, tag: int, condition: int) -> None:
    """A float and its tag at once."""
    if condition:
        emulator.write_global(address, struct.pack("<fI", value, tag & 0xFFFFFFFF))


@op(
    "r",
    "rlr",
    "{.reg .pred p; setp.ne.s32 p, $3, 0; @p ld.relaxed.gpu.global.u32 $0, [$2];}",
    memory=True,
    tied=1,
)
def poll_32_again(a: int, address: int, condition: int) -> int:
    """A word as it is now, or the one given where `condition` is 0."""
    if not condition:
        return a
    return int.from_bytes(emulator.poll_global(address, 4), "little")


@op("r", "rr", "max.u16x2 $0, $1, $2;")
def max_halves(a: int, b: int) -> int:
    """The larger of the low and of the high 16 bits."""
    return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16 & 0xFFFF, b >> 16 & 0xFFFF) << 16


@traced("r")
def lacks_half(word: Any) -> Any:
    """Whether a half of the word has not come."""
    return same(word & 0xFFFF, 0xFFFF) | same((word >> 16) & 0xFFFF, 0xFFFF)


def lacks_any_half(words: Any) -> Any:
    """Whether a half of one of the words has not come."""
    most = words[0]
    for word in words[1:]:
        most = max_halves(most, word)
    return lacks_half(most)


def lacks_any_word(words: Any) -> Any:
    missing = same(words[0], NOTHING)
    for word in words[1:]:
        missing = missing | same(word, NOTHING)
    return missing


# --- other instructions of the kernels that poll ---------------------------------------------------


@op("r", "", "mov.u32 $0, %tid.x;", volatile=True)
def thread_id_again() -> int:
    """The thread's number, read anew: what is computed from it is not kept in registers from one loop turn to the next."""
    return emulator.current().thread_id


@op("r", "r", "mov.b32 $0, $1;")
def narrow(x: int) -> int:
    """An integer of 32 bits: numbers that mix with constants take 64, and twice the registers, without it."""
    return x


@op("l", "l", "ld.global.nc.s64 $0, [$1];", volatile=True)
def load_constant_i64(address: int) -> int:
    """A number that nothing writes while this kernel runs."""
    return int(struct.unpack("<q", emulator.read_global(address, 8))[0])


@op(
    "",
    "rrr",
    "{.reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; cvt.u16.u32 h, $1; @p st.shared.b16 [$0], h;}",
    memory=True,
)
def store_shared_16_if(address: int, value: int, condition: int) -> None:
    if condition:
        emulator.write_shared(address, struct.pack("<H", value & 0xFFFF))


@op("", "", "fence.proxy.async.shared::cta;", memory=True)
def fence_async_shared() -> None:
    """Order this thread's accesses to shared memory before later bulk copies into it."""


@op("", "lr", "cp.async.bulk.prefetch.L2.global [$0], $1;", memory=True)
def bulk_prefetch(address: int, num_bytes: int) -> None:
    """Bring what a bulk copy will read later into the L2 cache."""
    emulator.read_global(address, num_bytes)


@op(
    "",
    "rlrr",
    "{.reg .b64 policy; mov.b64 policy, 0x12F0000000000000; "
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], policy;}",
    memory=True,
)
def bulk_copy_once(shared: int, address: int, num_bytes: int, barrier: int) -> None:
    """A bulk copy of what is not needed again soon: it leaves the L2 cache before all else (`evict_first`)."""
    emulator.bulk_copy(shared, address, num_bytes, barrier)


@op(
    "r",
    "rr",
    "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [$1], $2; selp.u32 $0, 1, 0, p;}",
    memory=True,
)
def mbarrier_test(address: int, parity: int) -> int:
    """Whether the barrier's phase of this parity has ended."""
    return emulator.mbarrier_test(address, parity)
