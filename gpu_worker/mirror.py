"""An integer table that the host changes and the device reads: the host's array is the truth, `tensor` follows it.

On the CPU both are the same memory. On a GPU a changed table goes over in one copy, on the current stream, before the next pass.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Mirror:
    """A table of int32, filled with -1.

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
