"""The decode rows of a model without rotary positions over cached inputs (KV formats h and h_int4), through the fused kernels.

As `FusedGraphs`, with three kernels where that has two: queries in terms of the input, which also goes to the cache, attention over inputs,
and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.absorbed_graphs import AbsorbedWeights, step_kernels
from gpu_worker.fused_graphs import Bucket, FusedGraphs, layer_of
from gpu_worker.graphs import DecodeSpec
from gpu_worker.rows import Rows
from kernels import absorbed_plan
from kernels.compiler import Variant
from kernels.layout import BLOCK_SIZE, CutCache
from kernels.runtime import launch


class AbsorbedBucket(Bucket):
    """With queries over inputs, what attention reads, and its averages of inputs with their maxima and sums."""

    queries: Tensor
    averages: Tensor
    meta: Tensor
    lists: Tensor


class AbsorbedDecode(FusedGraphs):
    """See the module."""

    def _pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(self._cache.paged, CutCache)
        self._cut = self._cache.paged
        size = max(self._cache.spare_slot + 1, self.max_rows), self._cache.num_tables
        self._own = torch.zeros(size, dtype=torch.int32, device=self._model.device)
        weights = AbsorbedWeights(self._spec, self._cut.kind, tensors)
        self._shape = weights.shape
        return weights.others.packed | weights.packed

    def load(self, rows: Rows, sources: NDArray[np.int32] | None = None) -> None:
        super().load(rows, sources)
        if self._cut.kind == "int4":  # the rows of a sequence are all in one block
            own = np.full(self._own.shape, -1, dtype=np.int32)
            own[rows.slots] = self._cache.host_copy_tables[rows.slots, :, rows.places // BLOCK_SIZE]
            self._put(torch.from_numpy(own), self._own)

    def _kernels(self) -> tuple[Callable[..., dict[str, Variant]], list[tuple[Any, ...]]]:
        return kernels_of, [(self._spec, self._cut.kind, rows) for rows in self.buckets]

    def _make_bucket(self, rows: int) -> Bucket:
        spec, device = self._spec, self._model.device
        variants, grids, attend = step_kernels(spec, self._cut.kind, rows)
        bucket = AbsorbedBucket(spec, rows, variants, grids, "pos" in self._packed, device)
        bucket.queries = torch.zeros(
            rows, self._shape.query_bytes // 2, dtype=torch.half, device=device
        )
        bucket.averages = torch.zeros(
            rows, attend.slots, spec.n_heads, spec.d_model, dtype=torch.half, device=device
        )
        bucket.meta = torch.zeros(rows, attend.slots, spec.n_heads, 2, device=device)
        room = absorbed_plan.list_units(attend, self._cache.max_blocks)
        bucket.lists = torch.zeros(
            spec.loops, rows, attend.split, room, 4, dtype=torch.int32, device=device
        )
        return bucket

    def _begin(
        self, part: Bucket, x: Tensor, num_passes: int, gain: str, *, is_from_state: bool = True, depths: Tensor | None = None
    ) -> None:  # fmt: skip
        if num_passes > 0:
            assert isinstance(part, AbsorbedBucket)
            launch(
                part.variants["plan"], (part.rows, num_passes), self._block_tables, self._cut.sink_of, self._own,
                self._by_name["positions"], self._row_info, self._by_name["windows"], part.lists,
                self._cache.num_tables, self._cache.max_blocks, part.lists.shape[3], is_overlapped=False,
            )  # fmt: skip
        super()._begin(part, x, num_passes, gain, is_from_state=is_from_state, depths=depths)

    def _attend(self, part: Bucket, loop: int, layer: int) -> None:
        assert isinstance(part, AbsorbedBucket)
        packed, variants, grids, inputs = self._packed, part.variants, part.grids, self._cut
        cache: list[Tensor | int] = []
        for pool in (inputs.values, inputs.scales, inputs.exact_values, inputs.sink_values):
            cache += [layer_of(pool, layer), pool.stride(0) * pool.element_size()]
        places = [
            inputs.sink_of, self._block_tables, self._own, self._by_name["positions"], self._row_info,
        ]  # fmt: skip
        sizes = loop, self._cache.num_tables, self._cache.max_blocks
        launch(
            variants["query"], grids["query"], packed[f"{layer}.q"], packed[f"{layer}.k"], part.normed, part.squares,
            part.queries, self.states, packed[f"{layer}.norm1"], *cache, *places, part.rows, *sizes, self._spec.norm_eps,
        )  # fmt: skip
        launch(
            variants["attention"], grids["attention"], part.queries, *cache, part.lists[loop],
            self._by_name["positions"], self._by_name["windows"], self._slopes, part.averages, part.meta,
            part.lists.shape[3],
        )  # fmt: skip
        launch(
            variants["values"], grids["values"], packed[f"{layer}.v"], part.averages, part.meta, part.mixed, part.rows,
        )  # fmt: skip


def kernels_of(spec: DecodeSpec, kind: str, rows: int) -> dict[str, Variant]:
    """The kernels of a step of that many rows over inputs of that kind."""
    return step_kernels(spec, kind, rows)[0]
