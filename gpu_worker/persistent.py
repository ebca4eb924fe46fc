"""Decode steps of 1 to 8 rows as two kernels: the embedding, then everything else in one (`kernels/persistent.py`).

A `PersistentRunner` has the buffers and the interface of a `DecodeRunner` and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from gpu_worker.graphs import (
    DecodeCache,
    DecodeRunner,
    DecodeSpec,
    DecodeWeights,
    product_shapes,
)
from kernels import persistent
from kernels.launch import Library
from kernels.persistent import CoreLaunch, CoreShape

MAX_ROWS = 8


def core_launch(spec: DecodeSpec, rows: int, **options: Any) -> CoreLaunch:
    """The launch for up to `rows` rows."""
    shapes = product_shapes(spec)
    shape = CoreShape(
        spec.d_model, spec.d_ff, spec.layers, spec.heads, spec.attention, shapes["qkv"], shapes["o"],
        shapes["gate_up"], shapes["down"], shapes["head"],
    )  # fmt: skip
    return CoreLaunch(shape, 1 if rows == 1 else MAX_ROWS, **options)


class PersistentRunner(DecodeRunner):
    """See the module.

    Args:
        num_blocks: the device's multiprocessors: so many blocks must run at a time.
        options: of `CoreLaunch`.
    """

    def __init__(
        self,
        weights: DecodeWeights,
        cache: DecodeCache,
        rows: int,
        max_blocks: int,
        library: Library,
        num_blocks: int,
        **options: Any,
    ) -> None:
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows, at most {MAX_ROWS}")
        super().__init__(weights, cache, rows, max_blocks, library)
        spec, device = self.spec, cache.stored.device
        launch = core_launch(spec, rows, **options)
        self.variants["core"] = persistent.core_step(launch)
        self.grids["core"] = (num_blocks, 1)
        shape = launch.shape

        def table(words: list[int], kind: torch.dtype) -> Tensor:
            return torch.tensor(words, dtype=kind, device=device)

        self._shares = table(persistent.share_words(shape, num_blocks), torch.int32)
        names = [
            f"{layer}.{name}"
            for layer in range(spec.layers)
            for name in ("qkv", "o", "gate_up", "down", "norm1", "norm3")
        ]
        self._pointers = table([weights.address(n) for n in (*names, "head", "norm")], torch.int64)
        self._barrier = torch.zeros(1, dtype=torch.int32, device=device)
        self._counters = torch.zeros(rows * shape.attention.units, dtype=torch.int32, device=device)
        self.stamps = torch.zeros(
            2 + 10 * spec.loops * spec.layers, num_blocks, dtype=torch.int64, device=device
        )
        self._results = torch.zeros(persistent.results_size(shape.attention, rows), device=device)

    def launch_step(self, stream: int, skip: Collection[str] = ()) -> None:
        """Put one whole step on a raw stream; nothing but `core` can be skipped."""
        spec = self.spec
        self.launch_begin(stream)
        if "core" in skip:
            return
        self._launch(
            "core", stream, self._shares.data_ptr(), self._pointers.data_ptr(), self._barrier.data_ptr(),
            self._counters.data_ptr(), self.x.data_ptr(), self.squares.data_ptr(), self.normed.data_ptr(),
            self.q.data_ptr(), self.cache.exact.data_ptr(), spec.exact_block_bytes, self.slots.data_ptr(),
            self.rope.data_ptr(), self.tables.data_ptr(), self.positions.data_ptr(),
            self.row_info.data_ptr(), self._results.data_ptr(), self.mixed.data_ptr(),
            self.hidden.data_ptr(), self.logits.data_ptr(), self.stamps.data_ptr(), self.rows, spec.loops, spec.loops,
            self._max_blocks, spec.norm_eps,
        )  # fmt: skip
