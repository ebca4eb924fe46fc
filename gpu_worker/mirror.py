"""What the host changes and the device reads: tables, and the inputs of a step. The host's memory is the truth, the device's follows it.

On a GPU what has changed goes over in one copy, on the current stream, before the next pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Mirror:
    """A table of int32, filled with -1; on the CPU `host` and `tensor` are the same memory.

    Args:
        shape: of the table.
        device: that of the kernels that read it.

    Attributes:
        host: the table; whoever writes to it calls `touch`.
        tensor: the same on the device, as of the last `upload`.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.host: NDArray[np.int32] = np.full(shape, -1, dtype=np.int32)
        self._source = torch.from_numpy(self.host)
        self._is_shared = device.type == "cpu"
        self.tensor = self._source if self._is_shared else self._source.to(device)
        self._is_stale = False
        self._uploads: list[Upload] = [] if self._is_shared else [Upload(), Upload()]

    def touch(self) -> None:
        """The host's array has changed."""
        self._is_stale = True

    def upload(self) -> None:
        """Brings `tensor` up to date for whatever is put on the stream next."""
        if self._is_stale and not self._is_shared:
            self._uploads.reverse()
            self._uploads[0].copy(self._source, self.tensor)
        self._is_stale = False


class Upload:
    """A piece of pinned memory for copies to the device that the host need not wait for."""

    def __init__(self) -> None:
        self._staging: Tensor | None = None
        self._copied = torch.cuda.Event()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies host memory to the device in stream order; `source` may change as soon as this returns."""
        if self._staging is None or self._staging.numel() < source.numel():
            self._staging = torch.empty(source.numel(), dtype=source.dtype, pin_memory=True)
        else:
            self._copied.synchronize()  # the piece may still be on its way from the last time
        staged = self._staging[: source.numel()].view(source.shape)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        self._copied.record()


class Inputs:
    """Small tensors that the host fills in before a step, one behind the other in memory, so that one copy takes them all over.

    Args:
        groups: fields by name (dtype, shape) in groups; a copy takes the groups that have changed, and what lies between them.
        device: that of the kernels that read them.

    Attributes:
        host: the fields as the host fills them in; whoever does so calls `touch`.
        on_device: the same as the kernels see them, who may change them until the next `upload` of their group.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, tuple[torch.dtype, tuple[int, ...]]]],
        device: torch.device,
    ) -> None:
        places, ends, size = {}, [0], 0
        for group in groups:
            for name, (dtype, shape) in group.items():
                places[name] = size, dtype, shape
                size += -(-math.prod(shape) * dtype.itemsize // 16) * 16
            ends.append(size)
        self._ends = ends
        self._source = torch.zeros(size, dtype=torch.uint8)
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host: dict[str, Tensor] = {}
        self.on_device: dict[str, Tensor] = {}
        for name, (at, dtype, shape) in places.items():
            for fields, memory in ((self.host, self._source), (self.on_device, self._target)):
                part = memory[at : at + math.prod(shape) * dtype.itemsize]
                fields[name] = part.view(dtype).view(shape)
        self._changed: set[int] = set()
        self._uploads = [Upload() for _ in range(8)] if device.type == "cuda" else []

    def touch(self, group: int) -> None:
        """The host has filled in fields of that group."""
        self._changed.add(group)

    def upload(self) -> None:
        """Brings what has changed to the device, for whatever is put on the stream next."""
        if not self._changed:
            return
        part = slice(self._ends[min(self._changed)], self._ends[max(self._changed) + 1])
        self._changed.clear()
        source, target = self._source[part], self._target[part]
        if self._uploads:
            self._uploads.append(self._uploads.pop(0))
            self._uploads[-1].copy(source, target)
        else:
            target.copy_(source)
