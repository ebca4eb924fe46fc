"""Loads compiled kernels into the current CUDA context and launches them: cluster shape, shared memory over 48 KB,
and the permission to start while the kernel in front still runs (programmatic dependent launch).

A launch takes scalars alone and costs no look-up by type; inside a captured graph it costs nothing at replay.
PyTorch owns the context, the memory and the streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.compiler import Variant, ptx_of

_CTYPES = {"l": ctypes.c_int64, "r": ctypes.c_int32, "f": ctypes.c_float}


class CudaError(RuntimeError):
    """A driver call failed; the process must not go on computing."""


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
        self._types = tuple(_CTYPES[kind] for kind in variant.args)
        self._driver = driver

    def launch(
        self,
        grid: tuple[int, int],
        args: Sequence[float],
        stream: int,
        *,
        is_overlapped: bool = True,
    ) -> None:
        """Put one launch on `stream` (a raw handle).

        Args:
            grid: blocks in x (a multiple of the cluster) and y.
            args: scalars, as `variant.args` says; missing ones at the end are 0.
            is_overlapped: whether it may start before the kernel in front has ended. The kernel itself waits
                before it touches anything that the step writes.
        """
        config = self._config(grid, stream, is_overlapped)
        values = tuple(args) + (0,) * (len(self._types) - len(args))
        _checked(self._driver.cuLaunchKernelEx(config, self._function, (values, self._types), 0))

    def max_active_clusters(self) -> int:
        """How many of its clusters the device runs at a time."""
        config = self._config((self.variant.cluster, 1), 0, False)
        return int(_checked(self._driver.cuOccupancyMaxActiveClusters(self._function, config)))

    def _config(self, grid: tuple[int, int], stream: int, is_overlapped: bool) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.variant.num_threads, 1, 1
        config.sharedMemBytes = self.variant.shared_bytes
        config.hStream = stream
        attributes = []
        if self.variant.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x = self.variant.cluster
            cluster.value.clusterDim.y = 1
            cluster.value.clusterDim.z = 1
            attributes.append(cluster)
        if is_overlapped:
            overlap = driver.CUlaunchAttribute()
            overlap.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


class Library:
    """The kernels of one process, compiled or read from `build_dir` on first use."""

    def __init__(self, build_dir: Path | None = None) -> None:
        self._build_dir = build_dir
        self._kernels: dict[tuple[str, tuple[Any, ...]], Kernel] = {}

    def get(self, variant: Variant) -> Kernel:
        """The loaded kernel for `variant`."""
        key = (variant.name, variant.constants)
        if key not in self._kernels:
            self._kernels[key] = Kernel(variant, ptx_of(variant, self._build_dir))
        return self._kernels[key]
