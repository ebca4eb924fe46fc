"""The core and the head of decode steps of 1 to 8 rows as one kernel (`kernels/persistent.py`), with what it needs on the device.

Gives the bits of the kernels one by one. For whom it is built: `is_built`; `PROVEN_ROWS` says up to how many rows engines use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from kernels.compiler import Variant
from kernels.fragment_commit import commit_passes
from kernels.launch import Library
from kernels.persistent_shapes import CoreLaunch, CoreShape, results_size, share_words
from kernels.step import begin_grid

MAX_ROWS = 8
PROVEN_ROWS = 8  # up to so many it had the right bits in hundreds of replays on an H200 (`scripts/gpu_check.py --only core`)
_SM_BYTES = 227 * 1024  # of shared memory that a block can have


def core_launch(spec: DecodeSpec, rows: int, **options: Any) -> CoreLaunch:
    """The launch for up to `rows` rows."""
    shapes = product_shapes(spec)
    shape = CoreShape(
        spec.d_model, spec.d_ff, spec.layers, spec.heads, spec.attention, shapes["qkv"], shapes["o"],
        shapes["gate_up"], shapes["down"], shapes["head"],
    )  # fmt: skip
    # measured: what makes one row faster makes eight slower, and the other way round
    if rows == 1:
        team = 1 if spec.head_dim % 128 or spec.kv_format == "int4" else 2
        options = {"most_tiles": 4, "team": team, "has_prefetch": True} | options
    else:
        # one stream a warp: more work until the first is done, less in all
        at_once = 4 if spec.kv_format == "int4" else 1
        options = {"most_tiles": 2, "urgent": 2 if at_once > 1 else 3, "at_once": at_once} | options
    return CoreLaunch(shape, 1 if rows == 1 else MAX_ROWS, **options)


def core_variant(spec: DecodeSpec, rows: int) -> Variant:
    return persistent.core_step(core_launch(spec, rows))


def commit_variant(spec: DecodeSpec) -> Variant:
    """What makes the stored form of the blocks that a launch of the core completes; int4 alone."""
    return commit_passes(spec.head_dim, spec.n_kv_heads)


def num_blocks(device: torch.device) -> int:
    """Blocks that run at a time on the device, one a multiprocessor; 0: it has no such kernels."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def is_built(spec: DecodeSpec, rows: int, num_blocks: int) -> bool:
    """Whether there is such a kernel for the model, the cache and the number of rows."""
    if num_blocks == 0 or rows > PROVEN_ROWS:
        return False
    try:
        return core_variant(spec, rows).shared_bytes <= _SM_BYTES
    except ValueError:
        return False


class PersistentCore:
    """One row bucket's kernel and memory.

    Args:
        addresses: where the packed weights lie, by `DecodeWeights`' names.
        num_blocks: the device's multiprocessors: so many blocks must run at a time.
        max_loops: passes of a launch, at most.
        options: of `CoreLaunch`.

    Attributes:
        normed, squares: what the kernel in front writes for the first layer.
        commit: the kernel to launch behind it, None with an fp16 cache.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        rows: int,
        addresses: Callable[[str], int],
        num_blocks: int,
        max_loops: int,
        device: torch.device | str,
        **options: Any,
    ) -> None:
        launch = core_launch(spec, rows, **options)
        self.spec, self.rows, self.max_loops = spec, rows, max_loops
        self.variant: Variant = persistent.core_step(launch)
        self.commit = commit_variant(spec) if spec.kv_format == "int4" else None
        self.grid = (num_blocks, 1)
        shape = launch.shape

        def table(words: list[int], kind: torch.dtype) -> Tensor:
            return torch.tensor(words, dtype=kind, device=device)

        self.shares = table(share_words(shape, num_blocks), torch.int32)
        names = [
            f"{layer}.{name}"
            for layer in range(spec.layers)
            for name in ("qkv", "o", "gate_up", "down", "norm1", "norm3")
        ]
        # by the gain that what follows the last pass reads x with
        self.pointers = {
            last: table([addresses(n) for n in (*names, "head", last)], torch.int64)
            for last in ("norm", "0.norm1")
        }
        calls, at = max_loops * spec.layers, shape.told_at
        told_words = (calls + 1) * at["end"] // 4
        results = 2 * results_size(shape.attention, rows)
        self._memory = torch.zeros(told_words + results, dtype=torch.int32, device=device)
        self.told, self.results = self._memory[:told_words], self._memory[told_words:]
        self.normed = self.told[at["normed"] // 4 :][: at["squares"] // 4].view(torch.half)
        squares = self.told[at["squares"] // 4 :][: rows * spec.d_model // 16]
        # All but what the kernel in front writes: where, and how often 16 bytes.
        self.forgotten = self._memory[at["q"] // 4 :]
        self.squares = squares.view(torch.float32).view(rows, -1)


class PersistentRunner(DecodeRunner):
    """A `DecodeRunner` whose steps are two kernels, three with int4."""

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
        super().__init__(weights, cache, rows, max_blocks, library)
        spec, device = self.spec, cache.stored.device
        self.core = PersistentCore(
            spec, rows, weights.address, num_blocks, spec.loops, device, **options
        )
        self.variants["core"], self.grids["core"] = self.core.variant, self.core.grid
        self.normed, self.squares = self.core.normed, self.core.squares
        self.told = self.core.forgotten.data_ptr(), self.core.forgotten.numel() // 4
        self.grids["begin"] = begin_grid(rows, has_told=True)
        if self.core.commit is not None:
            self.variants["commit"] = self.core.commit
            self.grids["commit"] = (rows, spec.loops * spec.layers)

    def launch_step(self, stream: int, skip: Collection[str] = ()) -> None:
        """Put one whole step on a raw stream; `core` and what follows, or `commit`, can be skipped."""
        spec, core = self.spec, self.core
        self.launch_begin(stream)
        if "core" in skip:
            return
        cache = self.cache
        exact = cache.exact.data_ptr(), spec.exact_block_bytes
        stored = cache.stored.data_ptr(), spec.stored_block_bytes
        sinks = cache.sinks.data_ptr(), cache.sinks.stride(0), cache.sink_of.data_ptr()
        tables, positions = self.tables.data_ptr(), self.positions.data_ptr()
        own_tables = tables if core.commit is None else self.exact_blocks.data_ptr()
        self._launch(
            "core", stream, core.shares.data_ptr(), core.pointers["norm"].data_ptr(), core.told.data_ptr(),
            self.x.data_ptr(), *exact, own_tables, *stored, tables, *sinks, self.slots.data_ptr(),
            self.rope.data_ptr(), positions, self.row_info.data_ptr(), 0,
            core.results.data_ptr(), self.logits.data_ptr(), self.rows,
            spec.loops * spec.layers, spec.loops, self._max_blocks, spec.norm_eps,
        )  # fmt: skip
        if core.commit is not None and "commit" not in skip:
            self._launch(
                "commit", stream, *exact, *stored, *sinks, tables, own_tables, positions,
                self.row_info.data_ptr(), spec.layers, spec.loops, self._max_blocks,
            )  # fmt: skip
