"""Every inline PTX instruction of the kernels, each with the plain Python twin that the emulator runs.

Global addresses are 64-bit integers (`tensor.data_ptr()`), shared addresses are 32-bit and
start at `shared_base()`, so a kernel's arguments are scalars alone. Activations that the previous
kernel wrote are read with `.cg` loads (they bypass the L1 cache, which may hold lines from before
`grid_dependency_wait`); weights use the non-coherent path. Float arithmetic in traced code is emitted as
`.rn` instructions, which no later stage contracts: the same source gives the same bits in every variant.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from kernels import emulator
from kernels.device_code import op, traced

Four = tuple[Any, Any, Any, Any]


def _f32(x: float) -> float:
    return float(np.float32(x))


def _floats(data: bytes) -> tuple[Any, ...]:
    """float32 numbers whose sums and products are rounded as the device rounds them."""
    return tuple(np.frombuffer(data, np.float32))


def _half(bits: int) -> float:
    return float(np.uint16(bits & 0xFFFF).view(np.float16))


def _half_bits(x: float) -> int:
    with np.errstate(over="ignore"):
        return int(np.float16(np.float32(x)).view(np.uint16))


# --- who am I --------------------------------------------------------------------------------------


@op("r", "", "mov.u32 $0, %tid.x;")
def thread_id() -> int:
    return emulator.current().thread_id


@op("r", "", "mov.u32 $0, %ctaid.x;")
def block_x() -> int:
    return emulator.current().block.index[0]


@op("r", "", "mov.u32 $0, %ctaid.y;")
def block_y() -> int:
    return emulator.current().block.index[1]


@op("r", "", "mov.u32 $0, %nctaid.x;")
def grid_x() -> int:
    return emulator.current().block.grid[0]


@op("r", "", "mov.u32 $0, %nctaid.y;")
def grid_y() -> int:
    return emulator.current().block.grid[1]


@op("r", "", "mov.u32 $0, %cluster_ctarank;")
def cluster_rank() -> int:
    return emulator.current().block.rank


@op("r", "", "mov.u32 $0, dynamic_shared;")
def shared_base() -> int:
    """Where the block's dynamic shared memory starts (the system keeps what lies before)."""
    return emulator.SHARED_BASE


# --- global memory ---------------------------------------------------------------------------------


@op(
    "rrrr",
    "lr",
    "{.reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
    "@p ld.global.cg.v4.u32 {$0,$1,$2,$3}, [$4];}",
    volatile=True,
)
def load_128_if(address: int, condition: int) -> Four:
    """16 bytes, or zeros where `condition` is 0."""
    if not condition:
        return (0, 0, 0, 0)
    return struct.unpack("<4I", emulator.read_global(address, 16))


@op("ff", "l", "ld.global.cg.v2.f32 {$0,$1}, [$2];", volatile=True)
def load_f32x2(address: int) -> tuple[float, float]:
    return struct.unpack("<2f", emulator.read_global(address, 8))


@op(
    "ffff",
    "lr",
    "{.reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
    "@p ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];}",
    volatile=True,
)
def load_f32x4_if(address: int, condition: int) -> Four:
    if not condition:
        return (0.0, 0.0, 0.0, 0.0)
    return struct.unpack("<4f", emulator.read_global(address, 16))


@op(
    "ff",
    "lr",
    "{.reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
    "@p ld.global.cg.v2.f32 {$0,$1}, [$2];}",
    volatile=True,
)
def load_f32x2_if(address: int, condition: int) -> tuple[float, float]:
    if not condition:
        return (0.0, 0.0)
    return struct.unpack("<2f", emulator.read_global(address, 8))


@op(
    "f",
    "lr",
    "{.reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.cg.f32 $0, [$1];}",
    volatile=True,
)
def load_f32_if(address: int, condition: int) -> float:
    if not condition:
        return 0.0
    return float(struct.unpack("<f", emulator.read_global(address, 4))[0])


@op("f", "l", "ld.global.cg.f32 $0, [$1];", volatile=True)
def load_f32(address: int) -> float:
    return float(struct.unpack("<f", emulator.read_global(address, 4))[0])


@op(
    "r",
    "lr",
    "{.reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.cg.u32 $0, [$1];}",
    volatile=True,
)
def load_32_if(address: int, condition: int) -> int:
    if not condition:
        return 0
    return int(struct.unpack("<I", emulator.read_global(address, 4))[0])


@op("r", "l", "ld.global.cg.s32 $0, [$1];", volatile=True)
def load_i32(address: int) -> int:
    return int(struct.unpack("<i", emulator.read_global(address, 4))[0])


@op("l", "l", "ld.global.cg.s64 $0, [$1];", volatile=True)
def load_i64(address: int) -> int:
    return int(struct.unpack("<q", emulator.read_global(address, 8))[0])


@op("", "lff", "st.global.v2.f32 [$0], {$1,$2};", memory=True)
def store_f32x2(address: int, a: float, b: float) -> None:
    emulator.write_global(address, struct.pack("<2f", a, b))


@op(
    "",
    "lffr",
    "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.v2.f32 [$0], {$1,$2};}",
    memory=True,
)
def store_f32x2_if(address: int, a: float, b: float, condition: int) -> None:
    if condition:
        emulator.write_global(address, struct.pack("<2f", a, b))


@op("", "lfr", "{.reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.f32 [$0], $1;}", memory=True)
def store_f32_if(address: int, value: float, condition: int) -> None:
    if condition:
        emulator.write_global(address, struct.pack("<f", value))


@op(
    "",
    "lrr",
    "{.reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; cvt.u16.u32 h, $1; @p st.global.u16 [$0], h;}",
    memory=True,
)
def store_16_if(address: int, value: int, condition: int) -> None:
    if condition:
        emulator.write_global(address, struct.pack("<H", value & 0xFFFF))


@op("", "lf", "st.global.f32 [$0], $1;", memory=True)
def store_f32(address: int, value: float) -> None:
    emulator.write_global(address, struct.pack("<f", value))


@op("", "lr", "st.global.u32 [$0], $1;", memory=True)
def store_32(address: int, value: int) -> None:
    emulator.write_global(address, struct.pack("<I", value & 0xFFFFFFFF))


@op("", "lrr", "{.reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.u32 [$0], $1;}", memory=True)
def store_32_if(address: int, value: int, condition: int) -> None:
    if condition:
        emulator.write_global(address, struct.pack("<I", value & 0xFFFFFFFF))


@op(
    "",
    "lrrr",
    "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.v2.u32 [$0], {$1,$2};}",
    memory=True,
)
def store_64_if(address: int, a: int, b: int, condition: int) -> None:
    """Two words."""
    if condition:
        emulator.write_global(address, struct.pack("<2I", a & 0xFFFFFFFF, b & 0xFFFFFFFF))


@op(
    "",
    "lrrrrr",
    "{.reg .pred p; setp.ne.s32 p, $5, 0; @p st.global.v4.u32 [$0], {$1,$2,$3,$4};}",
    memory=True,
)
def store_128_if(address: int, a: int, b: int, c: int, d: int, condition: int) -> None:
    if condition:
        emulator.write_global(address, struct.pack("<4I", *(x & 0xFFFFFFFF for x in (a, b, c, d))))


@op(
    "",
    "lffffr",
    "{.reg .pred p; setp.ne.s32 p, $5, 0; @p st.global.v4.f32 [$0], {$1,$2,$3,$4};}",
    memory=True,
)
def store_f32x4_if(address: int, a: float, b: float, c: float, d: float, condition: int) -> None:
    if condition:
        emulator.write_global(address, struct.pack("<4f", a, b, c, d))


@op("", "lr", "red.release.gpu.global.add.u32 [$0], $1;", memory=True)
def add_release(address: int, value: int) -> None:
    emulator.atomic_add(address, value)


@op("r", "l", "ld.acquire.gpu.global.u32 $0, [$1];", memory=True)
def load_acquire(address: int) -> int:
    return int(struct.unpack("<I", emulator.read_global(address, 4))[0])


@op("r", "l", "ld.global.nc.s32 $0, [$1];", volatile=True)
def load_constant_i32(address: int) -> int:
    """A number that nothing writes while this kernel runs (it may stay in the L1 cache)."""
    return int(struct.unpack("<i", emulator.read_global(address, 4))[0])


@op(
    "rrrr",
    "lr",
    "{.reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
    "@p ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];}",
    volatile=True,
)
def load_weight_128_if(address: int, condition: int) -> Four:
    """16 bytes of what no kernel of the step writes, or zeros where `condition` is 0."""
    if not condition:
        return (0, 0, 0, 0)
    return struct.unpack("<4I", emulator.read_global(address, 16))


@op("r", "l", "{.reg .u16 h; ld.global.nc.u16 h, [$1]; cvt.u32.u16 $0, h;}", volatile=True)
def load_u16(address: int) -> int:
    return int(struct.unpack("<H", emulator.read_global(address, 2))[0])


@op("r", "l", "ld.global.nc.s8 $0, [$1];", volatile=True)
def load_s8(address: int) -> int:
    return int(struct.unpack("<b", emulator.read_global(address, 1))[0])


@op("", "ll", "st.global.u64 [$0], $1;", memory=True)
def store_64(address: int, value: int) -> None:
    emulator.write_global(address, (value & (2**64 - 1)).to_bytes(8, "little"))


@op("rrrr", "l", "ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4];", volatile=True)
def load_constant_128(address: int) -> Four:
    """Numbers that nothing writes while this kernel runs (they may stay in the L1 cache)."""
    return struct.unpack("<4I", emulator.read_global(address, 16))


@op("rrrr", "l", "ld.global.cg.v4.u32 {$0,$1,$2,$3}, [$4];", volatile=True)
def load_128(address: int) -> Four:
    return struct.unpack("<4I", emulator.read_global(address, 16))


@op("rr", "l", "ld.global.cg.v2.u32 {$0,$1}, [$2];", volatile=True)
def load_64(address: int) -> tuple[int, int]:
    return struct.unpack("<2I", emulator.read_global(address, 8))


@op("r", "l", "ld.global.cg.u32 $0, [$1];", volatile=True)
def load_32(address: int) -> int:
    return int(struct.unpack("<I", emulator.read_global(address, 4))[0])


@op("r", "l", "{.reg .b16 h; ld.global.cg.u16 h, [$1]; cvt.u32.u16 $0, h;}", volatile=True)
def load_16(address: int) -> int:
    return int(struct.unpack("<H", emulator.read_global(address, 2))[0])


@op("r", "l", "ld.global.cg.u8 $0, [$1];", volatile=True)
def load_8(address: int) -> int:
    return emulator.read_global(address, 1)[0]


@op("", "lr", "{.reg .b16 h; cvt.u16.u32 h, $1; st.global.u16 [$0], h;}", memory=True)
def store_16(address: int, value: int) -> None:
    emulator.write_global(address, struct.pack("<H", value & 0xFFFF))


@op("", "lr", "st.global.u8 [$0], $1;", memory=True)
def store_8(address: int, value: int) -> None:
    emulator.write_global(address, bytes([value & 0xFF]))


# --- shared memory ---------------------------------------------------------------------------------


@op("rrrr", "r", "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", volatile=True)
def load_shared_128(address: int) -> Four:
    return struct.unpack("<4I", emulator.read_shared(address, 16))


@op("ff", "r", "ld.shared.v2.f32 {$0,$1}, [$2];", volatile=True)
def load_shared_f32x2(address: int) -> tuple[float, float]:
    return _floats(emulator.read_shared(address, 8))


@op("f", "r", "ld.shared.f32 $0, [$1];", volatile=True)
def load_shared_f32(address: int) -> float:
    return _floats(emulator.read_shared(address, 4))[0]  # type: ignore[no-any-return]


@op("r", "r", "ld.shared.u32 $0, [$1];", volatile=True)
def load_shared_32(address: int) -> int:
    return int(struct.unpack("<I", emulator.read_shared(address, 4))[0])


@op("", "rff", "st.shared.v2.f32 [$0], {$1,$2};", memory=True)
def store_shared_f32x2(address: int, a: float, b: float) -> None:
    emulator.write_shared(address, struct.pack("<2f", a, b))


@op("", "rfr", "{.reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.f32 [$0], $1;}", memory=True)
def store_shared_f32_if(address: int, value: float, condition: int) -> None:
    if condition:
        emulator.write_shared(address, struct.pack("<f", value))


@op(
    "",
    "rffr",
    "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.v2.f32 [$0], {$1,$2};}",
    memory=True,
)
def store_shared_f32x2_if(address: int, a: float, b: float, condition: int) -> None:
    if condition:
        emulator.write_shared(address, struct.pack("<2f", a, b))


@op("", "rr", "st.shared.u32 [$0], $1;", memory=True)
def store_shared_32(address: int, value: int) -> None:
    emulator.write_shared(address, struct.pack("<I", value & 0xFFFFFFFF))


@op(
    "",
    "rrrrrr",
    "{.reg .pred p; setp.ne.s32 p, $5, 0; @p st.shared.v4.u32 [$0], {$1,$2,$3,$4};}",
    memory=True,
)
def store_shared_128_if(address: int, a: int, b: int, c: int, d: int, condition: int) -> None:
    if condition:
        emulator.write_shared(address, struct.pack("<4I", *(x & 0xFFFFFFFF for x in (a, b, c, d))))


@op("", "rr", "red.shared.max.u32 [$0], $1;", memory=True)
def max_shared(address: int, value: int) -> None:
    emulator.update_shared(address, 4, lambda old: max(old, value & 0xFFFFFFFF))


@op("", "rr", "red.shared.min.u32 [$0], $1;", memory=True)
def min_shared(address: int, value: int) -> None:
    emulator.update_shared(address, 4, lambda old: min(old, value & 0xFFFFFFFF))


@op("", "rl", "red.shared.add.u64 [$0], $1;", memory=True)
def add_shared_64(address: int, value: int) -> None:
    emulator.update_shared(address, 8, lambda old: (old + value) & (2**64 - 1))


@op("l", "r", "ld.shared.u64 $0, [$1];", volatile=True)
def load_shared_64(address: int) -> int:
    return int.from_bytes(emulator.read_shared(address, 8), "little")


@op("", "rl", "st.shared.u64 [$0], $1;", memory=True)
def store_shared_64(address: int, value: int) -> None:
    emulator.write_shared(address, (value & (2**64 - 1)).to_bytes(8, "little"))


@op("r", "rr", "mapa.shared::cluster.u32 $0, $1, $2;")
def map_shared(address: int, rank: int) -> int:
    """The cluster address of `address` in the block of rank `rank`."""
    return emulator.map_shared(address, rank)


@op(
    "",
    "rffrr",
    "{.reg .pred p; setp.gt.s32 p, $4, 0; @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    ".v2.f32 [$0], {$1,$2}, [$3];}",
    memory=True,
)
def store_async_f32x2(address: int, a: float, b: float, barrier: int, condition: int) -> None:
    """Where `condition` > 0: store into a block of the cluster and tell its memory barrier of 8 bytes."""
    if condition > 0:
        emulator.store_async(address, struct.pack("<2f", a, b), barrier)


@op(
    "",
    "rfrr",
    "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    ".f32 [$0], $1, [$2];}",
    memory=True,
)
def store_async_f32(address: int, value: float, barrier: int, condition: int) -> None:
    """Where `condition`: store into a block of the cluster and tell its memory barrier of 4 bytes."""
    if condition:
        emulator.store_async(address, struct.pack("<f", value), barrier)


@op(
    "",
    "rffffr",
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1,$2,$3,$4}, [$5];",
    memory=True,
)
def store_async_f32x4(address: int, a: float, b: float, c: float, d: float, barrier: int) -> None:
    """Store into a block of the cluster and tell its memory barrier of 16 bytes."""
    emulator.store_async(address, struct.pack("<4f", a, b, c, d), barrier)


@op(
    "",
    "rlr",
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [$0], $1, [$2];",
    memory=True,
)
def store_async_64(address: int, value: int, barrier: int) -> None:
    """Store into a block of the cluster and tell its memory barrier of 8 bytes."""
    emulator.store_async(address, (value & (2**64 - 1)).to_bytes(8, "little"), barrier)


@op("ffff", "r", "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", volatile=True)
def load_shared_f32x4(address: int) -> Four:
    return _floats(emulator.read_shared(address, 16))


@op("", "rf", "st.shared.f32 [$0], $1;", memory=True)
def store_shared_f32(address: int, value: float) -> None:
    emulator.write_shared(address, struct.pack("<f", value))


@op("f", "r", "{.reg .b16 h; ld.shared.b16 h, [$1]; cvt.f32.f16 $0, h;}", volatile=True)
def load_shared_half(address: int) -> float:
    return _half(int.from_bytes(emulator.read_shared(address, 2), "little"))


@op("rr", "r", "ld.shared.v2.u32 {$0,$1}, [$2];", volatile=True)
def load_shared_32x2(address: int) -> tuple[int, int]:
    return struct.unpack("<2I", emulator.read_shared(address, 8))


def _matrices(address: int) -> list[list[int]]:
    """Four 8x8 matrices of 16-bit values, each row of 16 bytes where one lane says: rows of 8 words of 16 bits."""
    rows = emulator.current().warp.exchange(emulator.read_shared(address, 16))
    return [list(struct.unpack("<8H", row)) for row in rows]


@op("rrrr", "r", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", volatile=True)
def load_matrices(address: int) -> Four:
    """Four 8x8 matrices: lane 8m+r gives where row r of matrix m lies; lane 4r+c gets its columns 2c and 2c+1."""
    rows = _matrices(address)
    row, pair = divmod(emulator.current().lane, 4)
    one, two, three, four = (
        rows[8 * m + row][2 * pair] | rows[8 * m + row][2 * pair + 1] << 16 for m in range(4)
    )
    return one, two, three, four


@op(
    "rrrr",
    "r",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];",
    volatile=True,
)
def load_matrices_transposed(address: int) -> Four:
    """As `load_matrices`, but lane 4c+r gets column c of rows 2r and 2r+1."""
    rows = _matrices(address)
    column, pair = divmod(emulator.current().lane, 4)
    one, two, three, four = (
        rows[8 * m + 2 * pair][column] | rows[8 * m + 2 * pair + 1][column] << 16 for m in range(4)
    )
    return one, two, three, four


# --- barriers, bulk copies, kernel order -----------------------------------------------------------


@op("", "", "bar.sync 0;", memory=True)
def sync_block() -> None:
    emulator.current().block.barrier.wait()


@op("", "rr", "bar.sync $0, $1;", memory=True)
def sync_some(name: int, num_threads: int) -> None:
    """Wait at barrier `name` (1 to 15) until so many threads of the block have come to it."""
    emulator.current().block.named_wait(name, num_threads)


@op("", "", "bar.warp.sync 0xffffffff;", memory=True)
def sync_warp() -> None:
    emulator.current().warp.barrier.wait()


@op("", "", "barrier.cluster.arrive.release.aligned;", memory=True)
def cluster_arrive() -> None:
    emulator.current().cluster_arrive()


@op("", "", "barrier.cluster.arrive.relaxed.aligned;", memory=True)
def cluster_arrive_relaxed() -> None:
    """Arrive without ordering memory: for `all have started` and `all have read`. A release costs about 1 us."""
    emulator.current().cluster_arrive()


@op("", "", "barrier.cluster.wait.acquire.aligned;", memory=True)
def cluster_wait() -> None:
    emulator.current().cluster_wait()


@op("r", "r", "mov.u32 $0, $1;", volatile=True)
def at_run_time(value: int) -> int:
    """The same number, of which the compiler knows nothing: a loop of so many turns stays a loop."""
    return value


@op("", "", r".pragma \22nounroll\22;", volatile=True)
def keep_loop() -> None:
    """At the start of a loop's body: the assembler does not repeat it, so that its code stays small."""


@op("", "", "griddepcontrol.launch_dependents;", memory=True)
def grid_dependency_launch() -> None:
    """Let the next kernel of the stream start as soon as there is room beside this one."""


@op("", "", "griddepcontrol.wait;", memory=True)
def grid_dependency_wait() -> None:
    """Wait until all earlier kernels have ended and their writes can be read."""


@op("", "", "fence.proxy.async.global;", memory=True)
def fence_async() -> None:
    """Order what this thread may see of global memory before its later bulk copies from there.

    Without `.global` it waits until all of the block's memory accesses have been seen by the whole device.
    """


@op("", "", "fence.acq_rel.gpu;", memory=True)
def fence_device() -> None:
    """Order this thread's accesses before its later ones for every thread of the device."""


@op("", "rr", "mbarrier.init.shared.b64 [$0], $1;", memory=True)
def mbarrier_init(address: int, count: int) -> None:
    emulator.mbarrier_init(address, count)


@op("", "", "fence.mbarrier_init.release.cluster;", memory=True)
def mbarrier_init_fence() -> None:
    """Make initialised barriers visible to the copy engine."""


@op("", "rr", "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", memory=True)
def mbarrier_expect(address: int, num_bytes: int) -> None:
    emulator.mbarrier_expect(address, num_bytes)


@op(
    "",
    "rr",
    "{.reg .pred p; W${:uid}: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; "
    "@p bra D${:uid}; bra W${:uid}; D${:uid}:}",
    memory=True,
)
def mbarrier_wait(address: int, parity: int) -> None:
    emulator.mbarrier_wait(address, parity)


@op("", "r", "mbarrier.arrive.shared.b64 _, [$0];", memory=True)
def mbarrier_arrive(address: int) -> None:
    """Arrive at a memory barrier of this block."""
    emulator.mbarrier_arrive(address)


@op("", "r", "mbarrier.arrive.shared::cluster.b64 _, [$0];", memory=True)
def mbarrier_arrive_cluster(address: int) -> None:
    """Arrive at a memory barrier of a block of the cluster, to tell that this block has read something.

    Orders nothing beyond this block: a release to the cluster waits for all of its memory accesses.
    """
    emulator.mbarrier_arrive(address)


@op(
    "",
    "rlrr",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    memory=True,
)
def bulk_copy(shared: int, address: int, num_bytes: int, barrier: int) -> None:
    emulator.bulk_copy(shared, address, num_bytes, barrier)


@op("", "rl", "cp.async.cg.shared.global [$0], [$1], 16;", memory=True)
def copy_async_16(shared: int, address: int) -> None:
    """Start copying 16 bytes; this thread may read them after `copy_commit` and `copy_wait_*`, others of the warp after a barrier more."""
    emulator.copy_async(shared, address, 16)


@op(
    "",
    "rlr",
    "{.reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.cg.shared.global [$0], [$1], 16;}",
    memory=True,
)
def copy_async_16_if(shared: int, address: int, condition: int) -> None:
    if condition:
        emulator.copy_async(shared, address, 16)


@op("", "", "cp.async.commit_group;", memory=True)
def copy_commit() -> None:
    """Close the group of this thread's copies since the last one."""
    emulator.copy_commit()


@op("", "", "cp.async.wait_group 1;", memory=True)
def copy_wait_but_one() -> None:
    """Wait for all groups of this thread's copies but the newest."""
    emulator.copy_wait(1)


@op("", "", "cp.async.wait_group 0;", memory=True)
def copy_wait_all() -> None:
    """Wait for all groups of this thread's copies."""
    emulator.copy_wait(0)


# --- arithmetic ------------------------------------------------------------------------------------


@op("f", "fff", "fma.rn.f32 $0, $1, $2, $3;")
def fma(a: float, b: float, c: float) -> float:
    return _f32(float(a) * float(b) + float(c))


@op("f", "ff", "max.f32 $0, $1, $2;")
def fmax(a: float, b: float) -> float:
    return max(a, b)


@op("f", "f", "ex2.approx.ftz.f32 $0, $1;")
def exp2(x: float) -> float:
    return 0.0 if x == -math.inf else _f32(2.0**x)


@op("f", "f", "lg2.approx.ftz.f32 $0, $1;")
def log2(x: float) -> float:
    return _f32(math.log2(x))


@op("f", "f", "rsqrt.approx.ftz.f32 $0, $1;")
def rsqrt(x: float) -> float:
    return _f32(1.0 / math.sqrt(x))


@op("f", "f", "rcp.approx.ftz.f32 $0, $1;")
def reciprocal(x: float) -> float:
    return _f32(1.0 / x) if x else math.inf


@op("f", "r", "cvt.rn.f32.s32 $0, $1;")
def int_to_f32(x: int) -> float:
    return _f32(x)


@op("l", "f", "cvt.rzi.s64.f32 $0, $1;")
def f32_to_mass(x: float) -> int:
    """The integer part."""
    return int(x)


@op("r", "f", "mov.b32 $0, $1;")
def bits_of(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


@op("f", "r", "mov.b32 $0, $1;")
def f32_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


@op("r", "ff", "cvt.rn.f16x2.f32 $0, $2, $1;")
def pack_half2(low: float, high: float) -> int:
    return _half_bits(low) | _half_bits(high) << 16


@op("r", "ff", "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;")
def pack_finite_half2(low: float, high: float) -> int:
    """Halves; what fp16 cannot hold becomes the largest number that it can."""
    return (
        _half_bits(max(min(low, 65504.0), -65504.0))
        | _half_bits(max(min(high, 65504.0), -65504.0)) << 16
    )


@op("ff", "r", "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}")
def unpack_half2(bits: int) -> tuple[float, float]:
    return _half(bits), _half(bits >> 16)


@op("f", "ffr", "{.reg .pred p; setp.ne.s32 p, $3, 0; selp.f32 $0, $1, $2, p;}")
def select(a: float, b: float, condition: int) -> float:
    """`a` where `condition` is not zero, else `b`."""
    return a if condition else b


@op("r", "rrr", "{.reg .pred p; setp.ne.s32 p, $3, 0; selp.b32 $0, $1, $2, p;}")
def select_int(a: int, b: int, condition: int) -> int:
    return a if condition else b


@op("l", "llr", "{.reg .pred p; setp.ne.s32 p, $3, 0; selp.b64 $0, $1, $2, p;}")
def select_wide(a: int, b: int, condition: int) -> int:
    return a if condition else b


@op("l", "r", "cvt.s64.s32 $0, $1;")
def wide(x: int) -> int:
    return x


@op("r", "rr", "{.reg .pred p; setp.lt.s32 p, $1, $2; selp.u32 $0, 1, 0, p;}")
def less(a: int, b: int) -> int:
    return int(a < b)


@op("r", "ff", "{.reg .pred p; setp.lt.f32 p, $1, $2; selp.u32 $0, 1, 0, p;}")
def less_f32(a: float, b: float) -> int:
    return int(a < b)


@op("r", "rr", "div.u32 $0, $1, $2;")
def quotient(a: int, b: int) -> int:
    return a // b


@op("r", "rr", "rem.u32 $0, $1, $2;")
def remainder(a: int, b: int) -> int:
    return a % b


@op("r", "rr", "mul.lo.u32 $0, $1, $2;")
def mul_low(a: int, b: int) -> int:
    return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF) & 0xFFFFFFFF


@op("l", "ll", "mul.hi.u64 $0, $1, $2;")
def mul_high_64(a: int, b: int) -> int:
    return (a & (2**64 - 1)) * (b & (2**64 - 1)) >> 64


@op("r", "rr", "{.reg .pred p; setp.lt.u32 p, $1, $2; selp.u32 $0, 1, 0, p;}")
def below(a: int, b: int) -> int:
    """Whether a < b as unsigned numbers."""
    return int((a & 0xFFFFFFFF) < (b & 0xFFFFFFFF))


@op("r", "rr", "{.reg .pred p; setp.eq.u32 p, $1, $2; selp.u32 $0, 1, 0, p;}")
def same(a: int, b: int) -> int:
    return int((a & 0xFFFFFFFF) == (b & 0xFFFFFFFF))


@op("f", "f", "sqrt.rn.f32 $0, $1;")
def sqrt(x: float) -> float:
    return _f32(math.sqrt(x)) if x >= 0 else math.nan


@op("f", "ff", "div.rn.f32 $0, $1, $2;")
def divide(a: float, b: float) -> float:
    """a / b, correctly rounded."""
    with np.errstate(all="ignore"):
        return float(np.float32(a) / np.float32(b))


@op("r", "rrr", "prmt.b32 $0, $1, $2, $3;")
def byte_permute(a: int, b: int, selector: int) -> int:
    """Four bytes out of those of a (0-3) and b (4-7), one selector nibble each, lowest first."""
    source = struct.pack("<2I", a & 0xFFFFFFFF, b & 0xFFFFFFFF)
    return sum(source[selector >> 4 * i & 7] << 8 * i for i in range(4))


@op("r", "rr", "sub.rn.f16x2 $0, $1, $2;")
def sub_half2(a: int, b: int) -> int:
    halves = [_half_bits(_half(a >> s) - _half(b >> s)) for s in (0, 16)]
    return halves[0] | halves[1] << 16


@op("f", "ff", "min.f32 $0, $1, $2;")
def fmin(a: float, b: float) -> float:
    return min(a, b)


@op("r", "f", "cvt.rni.s32.f32 $0, $1;")
def nearest_int(x: float) -> int:
    """The nearest integer, ties to even; `x` must fit 32 bits."""
    return int(np.rint(x))


@op("r", "rr", "min.s32 $0, $1, $2;")
def smaller(a: int, b: int) -> int:
    return min(a, b)


@op("r", "rrr", "fma.rn.f16x2 $0, $1, $2, $3;")
def fma_half2(a: int, b: int, c: int) -> int:
    """a b + c of two halves, each rounded once."""
    sums = [_half(a >> s) * _half(b >> s) + _half(c >> s) for s in (0, 16)]
    with np.errstate(over="ignore"):
        bits = [int(np.float16(x).view(np.uint16)) for x in sums]
    return bits[0] | bits[1] << 16


@op("r", "rr", "mul.rn.f16x2 $0, $1, $2;")
def mul_half2(a: int, b: int) -> int:
    low, high = (_half_bits(_half(a >> s) * _half(b >> s)) for s in (0, 16))
    return low | high << 16


# --- across the warp -------------------------------------------------------------------------------


@op("f", "fr", "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", volatile=True)
def shuffle_xor_f32(value: float, mask: int) -> float:
    warp = emulator.current().warp
    return float(warp.exchange(value)[emulator.current().lane ^ mask])


@op("r", "rr", "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", volatile=True)
def shuffle_xor(value: int, mask: int) -> int:
    return int(emulator.current().warp.exchange(value)[emulator.current().lane ^ mask])


@op("r", "rr", "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", volatile=True)
def shuffle_from(value: int, lane: int) -> int:
    return int(emulator.current().warp.exchange(value)[lane & 31])


@op(
    "r",
    "r",
    "{.reg .pred p, q; setp.ne.s32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; selp.u32 $0, 1, 0, q;}",
    volatile=True,
)
def any_lane(value: int) -> int:
    """Whether it is not zero in any lane of the warp."""
    return int(any(emulator.current().warp.exchange(value)))


def _words(value: int) -> list[int]:
    """What the lanes of the warp bring, as unsigned words."""
    return [int(x) & 0xFFFFFFFF for x in emulator.current().warp.exchange(value)]


@op("r", "r", "redux.sync.max.u32 $0, $1, 0xffffffff;", volatile=True)
def warp_max(value: int) -> int:
    return max(_words(value))


@op("r", "r", "redux.sync.min.u32 $0, $1, 0xffffffff;", volatile=True)
def warp_min(value: int) -> int:
    return min(_words(value))


@op("r", "r", "redux.sync.add.u32 $0, $1, 0xffffffff;", volatile=True)
def warp_sum(value: int) -> int:
    return sum(_words(value)) & 0xFFFFFFFF


@op("r", "r", "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", volatile=True)
def transpose_8x8(pair: int) -> int:
    """Transpose an 8x8 matrix of 16-bit values: lane 4r+c holds row r, columns 2c and 2c+1."""
    rows = emulator.current().warp.exchange(pair)
    row, column = divmod(emulator.current().lane, 4)

    def at(r: int, c: int) -> int:
        return int(rows[4 * r + c // 2] >> 16 * (c % 2) & 0xFFFF)

    return at(2 * column, row) | at(2 * column + 1, row) << 16


@op(
    "ffff",
    "ffffrrrrrr",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$8,$9,$10,$11}, "
    "{$12,$13}, {$4,$5,$6,$7};",
)
def mma(
    c0: float, c1: float, c2: float, c3: float,
    a0: int, a1: int, a2: int, a3: int, b0: int, b1: int,
) -> Four:  # fmt: skip
    """c + A B for a 16x16 tile A (row major) and a 16x8 tile B, both fp16, spread over the warp."""
    thread = emulator.current()
    product = thread.warp.collective((a0, a1, a2, a3, b0, b1), _tile_product)
    row, column = divmod(thread.lane, 4)
    column *= 2
    there = product[row : row + 9 : 8, column : column + 2].reshape(4)
    with np.errstate(invalid="ignore"):
        return tuple((there + np.array([c0, c1, c2, c3], np.float64)).astype(np.float32))


def _tile_product(fragments: list[Any]) -> Any:
    """A B in float64 from the registers of all 32 lanes."""
    bits = np.array(fragments, dtype=np.int64).astype(np.uint32).view(np.float16)
    # (lane g, lane t, register, half): a's registers are (low, high rows) of the low, then the high columns
    parts = bits.reshape(8, 4, 6, 2).astype(np.float64)
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    for register in range(4):
        rows, columns = 8 * (register & 1), 8 * (register >> 1)
        a[rows : rows + 8, columns : columns + 8] = parts[:, :, register].reshape(8, 8)
    for register in range(2):
        b[8 * register : 8 * register + 8] = parts[:, :, 4 + register].reshape(8, 8).T
    # columns of B that hold no row may be NaN; they must not reach others
    with np.errstate(invalid="ignore"):
        return a @ b


@op(
    "rrrr",
    "rrrrrrrrrr",
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0,$1,$2,$3}, {$8,$9,$10,$11}, "
    "{$12,$13}, {$4,$5,$6,$7};",
)
def mma_u8s8(
    c0: int, c1: int, c2: int, c3: int,
    a0: int, a1: int, a2: int, a3: int, b0: int, b1: int,
) -> Four:  # fmt: skip
    """c + A B for a 16x32 tile A of unsigned bytes (row major) and a 32x8 tile B of signed ones, over the warp."""
    return _add_bytes((c0, c1, c2, c3), (a0, a1, a2, a3, b0, b1), _signed_bytes_product)


@op(
    "rrrr",
    "rrrrrrrrrr",
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {$0,$1,$2,$3}, {$8,$9,$10,$11}, "
    "{$12,$13}, {$4,$5,$6,$7};",
)
def mma_u8u8(
    c0: int, c1: int, c2: int, c3: int,
    a0: int, a1: int, a2: int, a3: int, b0: int, b1: int,
) -> Four:  # fmt: skip
    """`mma_u8s8` with unsigned bytes in B."""
    return _add_bytes((c0, c1, c2, c3), (a0, a1, a2, a3, b0, b1), _bytes_product)


def _add_bytes(c: Four, registers: tuple[int, ...], product_of: Any) -> Four:
    thread = emulator.current()
    product = thread.warp.collective(registers, product_of)
    row, column = divmod(thread.lane, 4)
    there = product[row : row + 9 : 8, 2 * column : 2 * column + 2].reshape(4)
    return tuple(int(x) for x in there + np.array(c, np.int64))  # type: ignore[return-value]


def _bytes_product(fragments: list[Any], sign: Any = np.uint8) -> Any:
    """A B from the registers of all 32 lanes, as integers."""
    data = np.array(fragments, dtype=np.int64).astype(np.uint32).view(np.uint8)
    # (lane g, lane t, register, byte): a's registers are (low, high rows) of the low, then the high columns
    parts = data.reshape(8, 4, 6, 4)
    a, b = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    for register in range(4):
        rows, columns = 8 * (register & 1), 16 * (register >> 1)
        a[rows : rows + 8, columns : columns + 16] = parts[:, :, register].reshape(8, 16)
    for register in range(2):
        b[16 * register : 16 * register + 16] = (
            parts[:, :, 4 + register].view(sign).reshape(8, 16).T
        )
    return a @ b


def _signed_bytes_product(fragments: list[Any]) -> Any:
    return _bytes_product(fragments, np.int8)


@traced("f")
def sum_of_8_lanes(value: float) -> float:
    """The sum over each aligned group of 8 lanes, the same bits in all of them."""
    for mask in (1, 2, 4):
        value = value + shuffle_xor_f32(value, mask)
    return value


@traced("f")
def sum_of_warp(value: float) -> float:
    """The sum over the warp, the same bits in every lane."""
    for mask in (1, 2, 4, 8, 16):
        value = value + shuffle_xor_f32(value, mask)
    return value
