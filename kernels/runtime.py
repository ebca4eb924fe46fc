"""Launches kernels on whatever device their tensors are on: the GPU that PyTorch uses, or, for tensors in host memory, the emulator.

Owns the process's loaded kernels and the current stream. The GPU backend (`kernels.cuda` and its parts) launches through
`launch` alone, so that its code runs as it is, with tiny shapes, where there is no GPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kernels import emulator
from kernels.compiler import Variant
from kernels.launch import Library

_library = Library()


def set_build_dir(build_dir: Path | None) -> None:
    """Keep compiled kernels there; without one every start compiles anew. Before the first launch."""
    global _library
    _library = Library(build_dir)


def library() -> Library:
    """The kernels that this process has loaded."""
    return _library


def launch(
    variant: Variant,
    grid: tuple[int, int],
    *args: Tensor | float | None,
    is_overlapped: bool = True,
) -> None:
    """Puts one launch on PyTorch's current stream.

    Args:
        variant: the kernel. It must call `grid_dependency_wait` before it touches what earlier kernels wrote.
        grid: blocks in x (a multiple of the cluster) and y; nothing happens if either is 0.
        args: one for each of the kernel's: tensors (contiguous as far as the kernel needs; their addresses go over),
            numbers, and None for an absent tensor (address 0). Missing ones at the end are 0.
        is_overlapped: whether it may start while the kernel in front still runs.
    """
    if 0 in grid:
        return
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    values = [
        arg.data_ptr() if isinstance(arg, Tensor) else 0 if arg is None else arg for arg in args
    ]
    if any(tensor.is_cuda for tensor in tensors):
        stream = torch.cuda.current_stream().cuda_stream
        _library.get(variant).launch(grid, values, stream, is_overlapped=is_overlapped)
        return
    for tensor in tensors:
        emulator.register(tensor)
    try:
        emulator.run(
            variant.function,
            grid,
            variant.num_threads,
            values + [0] * (len(variant.args) - len(values)),
            cluster=variant.cluster,
            shared_bytes=variant.shared_bytes,
            is_together=variant.is_together,
        )
    finally:
        emulator.forget()
