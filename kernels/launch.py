"""Loads compiled kernels into the current CUDA context and launches them: cluster shape, shared memory over 48 KB,
and the permission to start while the kernel in front still runs (programmatic dependent launch).

A launch takes scalars alone and costs no look-up by type: a few microseconds, and nothing at the replay of a captured graph.
PyTorch owns the context, the memory and the streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.compiler import Variant, ptx_of

_CTYPES: dict[str, Any] = {"l": ctypes.c_int64, "r": ctypes.c_int32, "f": ctypes.c_float}
# Of CUlaunchAttributeID.
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 2, 4, 6


class CudaError(RuntimeError):
    """A driver call failed; the process must not go on computing."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the driver's interface."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver's interface."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def launch_config(variant: Variant, grid: tuple[int, int], *, is_overlapped: bool) -> LaunchConfig:
    """How `variant` is launched over `grid` blocks (in x a multiple of the cluster), on no stream yet."""
    values: list[tuple[int, tuple[int, ...]]] = []
    if variant.cluster > 1:
        values.append((_CLUSTER_DIMENSION, (variant.cluster, 1, 1)))
    if variant.is_together:
        values.append(
            (_COOPERATIVE, (1,))
        )  # all blocks at a time or none, whoever else uses the device
    if is_overlapped:
        values.append((_PROGRAMMATIC_SERIALIZATION, (1,)))
    attributes = (LaunchAttribute * max(1, len(values)))()
    for attribute, (kind, numbers) in zip(attributes, values, strict=False):
        attribute.id = kind
        for i, number in enumerate(numbers):
            attribute.value[i] = number
    return LaunchConfig(
        (grid[0], grid[1], 1), (variant.num_threads, 1, 1), variant.shared_bytes, None, attributes, len(values)
    )  # fmt: skip


def _checked(result: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorString(status)
        raise CudaError(f"{status.name}: {name.decode() if name else ''}")
    return values[0] if len(values) == 1 else values


class Kernel:
    """A kernel on the device."""

    def __init__(self, variant: Variant, ptx: str) -> None:
        from cuda.bindings import driver

        self.variant = variant
        self._module = _checked(driver.cuModuleLoadData(ptx.encode() + b"\0"))
        self._function = _checked(driver.cuModuleGetFunction(self._module, variant.name.encode()))
        if variant.shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self._function, attribute, variant.shared_bytes))
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._handle = ctypes.c_void_p(int(self._function))
        self._values = [_CTYPES[kind]() for kind in variant.args]
        addresses = [ctypes.addressof(value) for value in self._values]
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self._configs: dict[tuple[tuple[int, int], bool], LaunchConfig] = {}

    def launch(
        self,
        grid: tuple[int, int],
        args: Sequence[float],
        stream: int,
        *,
        is_overlapped: bool = True,
    ) -> None:
        """Put one launch on `stream` (a raw handle). For one thread at a time.

        Args:
            grid: blocks in x (a multiple of the cluster) and y.
            args: scalars, as `variant.args` says; missing ones at the end are 0.
            is_overlapped: whether it may start before the kernel in front has ended. The kernel itself waits
                before it touches anything that the step writes.
        """
        config = self._config(grid, is_overlapped)
        config.stream = stream
        for value, arg in zip(self._values, args, strict=False):
            value.value = arg
        for value in self._values[len(args) :]:
            value.value = 0
        status = self._launch(ctypes.byref(config), self._handle, self._addresses, None)
        if status:
            self._fail(status)

    def max_active_clusters(self) -> int:
        """How many of its clusters the device runs at a time."""
        from cuda.bindings import driver

        count = ctypes.c_int()
        config = self._config((self.variant.cluster, 1), False)
        status = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters(
            ctypes.byref(count), self._handle, ctypes.byref(config)
        )
        _checked((driver.CUresult(status),))
        return count.value

    def _config(self, grid: tuple[int, int], is_overlapped: bool) -> LaunchConfig:
        key = grid, is_overlapped
        if key not in self._configs:
            self._configs[key] = launch_config(self.variant, grid, is_overlapped=is_overlapped)
        return self._configs[key]

    def _fail(self, status: int) -> None:
        from cuda.bindings import driver

        _checked((driver.CUresult(status),))


class Library:
    """The kernels of one process, compiled or read from `build_dir` on first use."""

    def __init__(self, build_dir: Path | None = None) -> None:
        self.build_dir = build_dir
        self._kernels: dict[tuple[str, tuple[Any, ...]], Kernel] = {}

    def get(self, variant: Variant) -> Kernel:
        """The loaded kernel for `variant`."""
        key = (variant.name, variant.constants)
        if key not in self._kernels:
            self._kernels[key] = Kernel(variant, ptx_of(variant, self.build_dir))
        return self._kernels[key]
