"""A model whose decode rows run in CUDA graphs: the same functions and the same bits, without a launch per operation from Python.

Passes of few rows go through `DecodeGraphs`; larger ones (chunks of prompts) and the odd ends call the model's functions one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.decode_graphs import DecodeGraphs
from gpu_worker.kv_cache import KVCache
from gpu_worker.model import AfterPass, Model
from gpu_worker.rows import Rows
from kernels.layout import BLOCK_SIZE


class GraphedModel(Model):
    """See the module; made like a `Model`, then bound to the one cache that it runs over."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.graphs: DecodeGraphs | None = None

    def bind(self, cache: KVCache, max_rows: int) -> None:
        """Makes the buffers for up to `max_rows` rows over `cache`, which has a spare slot."""
        self.graphs = DecodeGraphs(self, cache, max_rows)

    def warm_up(self, loops: int) -> None:
        """Captures what steps at that depth use, waves of one sequence included; the rest is captured at its first use."""
        graphs = self.graphs
        if graphs is None or self.device.type != "cuda":
            return
        for bucket in graphs.buckets:
            for kind, count in (("step", loops), ("enter", 0), ("passes", 1), ("descend", loops), ("finish", 0)):  # fmt: skip
                graphs.captured(kind, bucket, count)
        for draft_loops in (1, 2):
            num_rows = 1 << (loops // draft_loops - 1).bit_length()
            if graphs.has_segments and loops % draft_loops == 0 and num_rows <= graphs.max_rows:
                graphs.captured("segment", graphs.bucket(num_rows), draft_loops, num_rows)

    def trunk(
        self, rows: Rows, cache: KVCache, after_pass: AfterPass | None = None
    ) -> tuple[Tensor, Tensor]:
        graphs = self.graphs
        if graphs is None or not self._fits(rows, graphs):
            return super().trunk(rows, cache, after_pass)
        num_passes = rows.last_loop - rows.first_loop + 1
        order = np.argsort(-num_passes, kind="stable")  # who leaves first stands last
        part = rows.select(order)
        graphs.load(part)
        graphs.enter(len(part))
        self._put_brought(part, graphs)
        states = self._run_loops(part, order, num_passes[order], graphs, after_pass)
        back = self.on_device(np.argsort(order))
        return states[back], graphs.embedded[: len(part)][back]

    def _fits(self, rows: Rows, graphs: DecodeGraphs) -> bool:
        is_rebuilt = self._over_inputs is not None and not self._over_inputs.is_absorbed
        has_odd_maps = rows.maps.size > 0 and rows.maps.shape[1] != BLOCK_SIZE
        return len(rows) <= graphs.max_rows and not is_rebuilt and not has_odd_maps

    def _put_brought(self, part: Rows, graphs: DecodeGraphs) -> None:
        self.put_brought_states(graphs.states[: len(part)], part)
        if part.embedded is not None:
            later = self.on_device(np.flatnonzero(part.first_loop > 1))
            graphs.embedded[later] = part.embedded[later]

    def _run_loops(
        self,
        part: Rows,
        order: NDArray[np.intp],
        num_passes: NDArray[np.int32],
        graphs: DecodeGraphs,
        after_pass: AfterPass | None,
    ) -> Tensor:
        """The states (n, d) after each row's last pass."""
        live, done = len(part), 0
        if after_pass is None:
            graphs.descend(live, int(num_passes[0]))
            return graphs.final[:live].clone()
        is_alive = np.ones(live, dtype=np.bool_)
        while live:
            before = graphs.states[:live].clone()
            graphs.passes(live, 1)
            done += 1
            at = np.flatnonzero(is_alive[:live])
            states = graphs.states[:live][self.on_device(at)]
            loops = part.first_loop[at] + done - 1
            leaves = after_pass(order[at], loops, before[self.on_device(at)], states)
            stays = is_alive & (num_passes > done)
            if leaves is not None:
                stays[at[leaves]] = False
            left = np.flatnonzero(is_alive & ~stays)
            if len(left):
                graphs.keep(self.on_device(left))
            is_alive = stays
            live = int(np.flatnonzero(stays).max(initial=-1)) + 1
        return graphs.final[: len(part)].clone()
