"""Runs a kernel's plain Python source on the CPU, one Python thread per device thread.

It owns the machine that the twins in `intrinsics.py` act on: threads, warps, blocks, clusters, shared memory,
memory barriers. numba's own simulator runs one block at a time and has no warp operations, so it cannot run
kernels whose clusters exchange data. Made for tiny shapes (a few hundred threads at most).

What it catches: reads and writes outside the arrays that the test registered, reads of shared memory that
nothing wrote (it starts as NaN), data read before its bulk copy was waited for (copies land only in the
wait), divergent barriers (a bounded wait fails), and deadlocks.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_WAIT_S = 30.0
_POLL_S = 0.001
SHARED_BASE = 1024
_RANK_SHIFT = 24
_local = threading.local()
_failed = threading.Event()


class Warp:
    """32 threads (or the 128 of a warpgroup) that exchange values."""

    def __init__(self, size: int = 32) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_WAIT_S)
        # Two sets: a thread may give to the next exchange while another still reads the last one.
        self._given: list[list[Any]] = [[None] * size, [None] * size]
        self._made: list[Any] = [None, None]
        self._turns = [0] * size

    def collective(self, value: Any, make: Callable[[list[Any]], Any]) -> Any:
        """Every thread gives a value; what one of them makes of all goes to all."""
        lane = current().thread_id % self.size
        turn = self._turns[lane] & 1
        self._turns[lane] += 1
        self._given[turn][lane] = value
        if self.barrier.wait() == 0:
            self._made[turn] = make(self._given[turn])
        self.barrier.wait()
        return self._made[turn]

    def exchange(self, value: Any) -> list[Any]:
        """Every lane gives a value and gets all 32."""
        lane = current().lane
        turn = self._turns[lane] & 1
        self._turns[lane] += 1
        self._given[turn][lane] = value
        self.barrier.wait()
        return self._given[turn]


class Block:
    """A block's shared memory, barrier and place in the grid."""

    def __init__(
        self,
        index: tuple[int, int],
        grid: tuple[int, int],
        rank: int,
        num_threads: int,
        shared: int,
    ) -> None:
        self.index = index
        self.grid = grid
        self.rank = rank
        self.shared = np.full(SHARED_BASE + shared, 0xFF, dtype=np.uint8)
        self.barrier = threading.Barrier(num_threads, timeout=_WAIT_S)
        self.warps = [Warp() for _ in range(num_threads // 32)]
        self.warpgroups = [Warp(128) for _ in range(num_threads // 128)]
        self.mbarriers: dict[int, MemoryBarrier] = {}
        self.lock = threading.Condition()
        self.named: dict[int, threading.Barrier] = {}

    def named_wait(self, name: int, num_threads: int) -> None:
        """Wait at one of the block's further barriers until so many threads have come."""
        with self.lock:
            if name not in self.named:
                self.named[name] = threading.Barrier(num_threads, timeout=_WAIT_S)
            barrier = self.named[name]
        assert barrier.parties == num_threads, f"barrier {name}: another number of threads"
        barrier.wait()

    def abort(self) -> None:
        """Let nobody wait any more: a thread has failed."""
        with self.lock:
            for barrier in (self.barrier, *self.named.values()):
                barrier.abort()
        for warp in (*self.warps, *self.warpgroups):
            warp.barrier.abort()


class Thread:
    """What `current()` gives to a twin."""

    def __init__(
        self, thread_id: int, block: Block, cluster: list[Block], arrived: threading.Barrier
    ) -> None:
        self.thread_id = thread_id
        self.lane = thread_id % 32
        self.block = block
        self.cluster = cluster
        self.warp = block.warps[thread_id // 32]
        self._arrived = arrived
        self._has_arrived = False
        # copies of the group that is still open, and of closed groups that have not landed
        self.open_copies: list[tuple[int, bytes]] = []
        self.copy_groups: list[list[tuple[int, bytes]]] = []

    def cluster_arrive(self) -> None:
        assert not self._has_arrived, "cluster barrier: arrived twice without a wait"
        self._has_arrived = True

    def cluster_wait(self) -> None:
        assert self._has_arrived, "cluster barrier: waited without arriving"
        self._has_arrived = False
        self._arrived.wait()


def current() -> Thread:
    """The device thread that runs on this Python thread."""
    thread: Thread = _local.thread
    return thread


class Memory:
    """The address ranges a kernel may touch."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, Any]] = []
        self.lock = threading.Lock()

    def check(self, address: int, num_bytes: int) -> None:
        if address % min(num_bytes, 16):
            raise ValueError(f"address {address:#x} is not aligned to {num_bytes} bytes")
        for start, end, _ in self.ranges:
            if start <= address and address + num_bytes <= end:
                return
        raise IndexError(f"{num_bytes} bytes at {address:#x} lie outside every registered array")


_memory = Memory()


def register(*arrays: Any) -> None:
    """Allow kernels to touch these arrays (NumPy arrays or CPU tensors), and keep them alive."""
    for array in arrays:
        if hasattr(array, "data_ptr"):
            start, size = array.data_ptr(), array.numel() * array.element_size()
        else:
            start, size = array.ctypes.data, array.nbytes
        _memory.ranges.append((start, start + size, array))


def forget() -> None:
    """Forget every registered array."""
    _memory.ranges.clear()


def read_global(address: int, num_bytes: int) -> bytes:
    _memory.check(address, num_bytes)
    return ctypes.string_at(address, num_bytes)


def poll_global(address: int, num_bytes: int) -> bytes:
    """What another block may be about to change; a thread that asks again and again lets others run."""
    if _failed.is_set():
        raise threading.BrokenBarrierError
    time.sleep(_POLL_S)
    return read_global(address, num_bytes)


def write_global(address: int, data: bytes) -> None:
    _memory.check(address, len(data))
    ctypes.memmove(address, data, len(data))


def atomic_add(address: int, value: int) -> int:
    with _memory.lock:
        old = int.from_bytes(read_global(address, 4), "little")
        write_global(address, ((old + value) & 0xFFFFFFFF).to_bytes(4, "little"))
        return old


def _shared(address: int, num_bytes: int) -> tuple[np.ndarray, int]:
    block, offset = _at(address)
    if offset % min(num_bytes, 16):
        raise ValueError(f"shared address {offset} is not aligned to {num_bytes} bytes")
    if offset < SHARED_BASE or offset + num_bytes > block.shared.size:
        raise IndexError(f"shared address {offset} + {num_bytes} > {block.shared.size}")
    return block.shared, offset


def read_shared(address: int, num_bytes: int) -> bytes:
    shared, offset = _shared(address, num_bytes)
    return shared[offset : offset + num_bytes].tobytes()


def write_shared(address: int, data: bytes) -> None:
    shared, offset = _shared(address, len(data))
    shared[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


def update_shared(address: int, num_bytes: int, update: Callable[[int], int]) -> int:
    """Atomically replace a number in shared memory; the old one."""
    with current().block.lock:
        old = int.from_bytes(read_shared(address, num_bytes), "little")
        write_shared(address, update(old).to_bytes(num_bytes, "little"))
        return old


def map_shared(address: int, rank: int) -> int:
    return (rank + 1) << _RANK_SHIFT | address


class MemoryBarrier:
    """Counts arrivals and bytes; copies that it announces land when somebody waits for them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.phase = 0
        # its own, so that a change wakes only those who wait here
        self.lock = threading.Condition()
        self._pending = count
        self._num_bytes = 0
        self._copies: list[tuple[int, bytes]] = []
        self.landing: list[tuple[int, bytes]] = []

    def arrive(self, num_bytes: int = 0) -> None:
        assert self._pending > 0, "memory barrier: more arrivals than it counts"
        self._pending -= 1
        self._num_bytes += num_bytes
        self._settle()

    def announce(self, shared: int, data: bytes) -> None:
        self._copies.append((shared, data))
        self._settle()

    def _settle(self) -> None:
        if self._pending == 0 and self._num_bytes == sum(len(data) for _, data in self._copies):
            self.landing += self._copies
            self._copies, self._num_bytes, self._pending = [], 0, self.count
            self.phase += 1


def _at(address: int) -> tuple[Block, int]:
    """The block and the offset of a shared address of the cluster."""
    thread, rank = current(), address >> _RANK_SHIFT
    return thread.cluster[rank - 1] if rank else thread.block, address & ((1 << _RANK_SHIFT) - 1)


def mbarrier_init(address: int, count: int) -> None:
    current().block.mbarriers[address] = MemoryBarrier(count)


def mbarrier_expect(address: int, num_bytes: int) -> None:
    barrier = current().block.mbarriers[address]
    with barrier.lock:
        barrier.arrive(num_bytes)
        barrier.lock.notify_all()


def mbarrier_arrive(address: int) -> None:
    block, offset = _at(address)
    barrier = block.mbarriers[offset]
    with barrier.lock:
        barrier.arrive()
        barrier.lock.notify_all()


def bulk_copy(shared: int, address: int, num_bytes: int, barrier: int) -> None:
    if num_bytes % 16 or address % 16 or shared % 16:
        raise ValueError(f"bulk copy of {num_bytes} bytes must be aligned to 16 bytes")
    store_async(shared, read_global(address, num_bytes), barrier)


def copy_async(shared: int, address: int, num_bytes: int) -> None:
    current().open_copies.append((shared, read_global(address, num_bytes)))


def copy_commit() -> None:
    thread = current()
    thread.copy_groups.append(thread.open_copies)
    thread.open_copies = []


def copy_wait(num_newest: int) -> None:
    """Land this thread's copies but for those of its newest groups."""
    groups = current().copy_groups
    while len(groups) > num_newest:
        for shared, data in groups.pop(0):
            write_shared(shared, data)


def store_async(address: int, data: bytes, barrier: int) -> None:
    (block, offset), (told, bar) = _at(address), _at(barrier)
    assert block is told, "data and barrier lie in different blocks"
    target = block.mbarriers[bar]
    with target.lock:
        target.announce(offset, data)
        target.lock.notify_all()


def mbarrier_wait(address: int, parity: int) -> None:
    barrier = current().block.mbarriers[address]
    with barrier.lock:
        if not barrier.lock.wait_for(lambda: barrier.phase % 2 != parity, timeout=_WAIT_S):
            raise TimeoutError(f"mbarrier {address}: parity {parity} never completed")
        for shared, data in barrier.landing:
            write_shared(shared, data)
        barrier.landing = []


def mbarrier_test(address: int, parity: int) -> int:
    """Whether the phase has ended; a thread that asks again and again lets others run."""
    if _failed.is_set():
        raise threading.BrokenBarrierError
    barrier = current().block.mbarriers[address]
    with barrier.lock:
        has_ended = barrier.phase % 2 != parity
    if not has_ended:
        time.sleep(_POLL_S)
    return int(has_ended)


def run(
    kernel: Callable[..., None],
    grid: tuple[int, int],
    num_threads: int,
    args: Sequence[Any],
    *,
    cluster: int = 1,
    shared_bytes: int = 0,
    is_together: bool = False,
) -> None:
    """Run `kernel` over `grid` blocks of `num_threads`, one cluster after the other.

    Args:
        is_together: all clusters of a row of the grid run at a time, as they must where blocks wait for others of the grid.

    Raises:
        The first exception that a device thread raised.
    """
    if grid[0] % cluster or num_threads % 32:
        raise ValueError(f"grid {grid} of {num_threads} threads cannot form clusters of {cluster}")
    for y in range(grid[1]):
        clusters = [
            [
                Block((first + rank, y), grid, rank, num_threads, shared_bytes)
                for rank in range(cluster)
            ]
            for first in range(0, grid[0], cluster)
        ]
        for some in [clusters] if is_together else [[one] for one in clusters]:
            _run_clusters(kernel, some, num_threads, args)


def _run_clusters(
    kernel: Callable[..., None],
    clusters: list[list[Block]],
    num_threads: int,
    args: Sequence[Any],
) -> None:
    arrived = [threading.Barrier(num_threads * len(blocks), timeout=_WAIT_S) for blocks in clusters]
    errors: list[BaseException] = []
    all_blocks = [block for blocks in clusters for block in blocks]

    def body(thread: Thread) -> None:
        _local.thread = thread
        try:
            kernel(*args)
        except threading.BrokenBarrierError as error:
            errors.append(error)
        except BaseException as error:
            errors.insert(0, error)
            _failed.set()
            for barrier in arrived:
                barrier.abort()
            for block in all_blocks:
                block.abort()

    _failed.clear()
    threads = [
        threading.Thread(target=body, args=(Thread(i, block, blocks, barrier),), daemon=True)
        for blocks, barrier in zip(clusters, arrived, strict=True)
        for block in blocks
        for i in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
