"""The decode rows of a pre-norm, RMS, SwiGLU model through its fused kernels: five a layer, each started while the one before still runs.

Same buffers, stretches and meaning as `DecodeGraphs`; only what a stretch launches is different. Every stretch begins with a kernel
that takes the states as they are, so that rows may enter, leave and be changed between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker import persistent
from gpu_worker.decode_graphs import DecodeGraphs
from gpu_worker.graphs import (
    DecodeSpec,
    DecodeWeights,
    column_tiles_for,
    product_shapes,
    step_kernels,
)
from gpu_worker.rows import Rows
from kernels import fragments, runtime, step
from kernels.compile_ahead import compile_ahead
from kernels.compiler import Variant
from kernels.layout import BLOCK_SIZE, FragmentCache
from kernels.runtime import launch

if TYPE_CHECKING:
    from gpu_worker.kv_cache import KVCache
    from gpu_worker.model import Model
    from gpu_worker.persistent import PersistentCore


class FusedGraphs(DecodeGraphs):
    """See the module.

    Args:
        spec: the model's shapes; `loops` plays no part.
        tensors: `DecodeWeights`' names, and `pos` fp16 (max_pos, d) with learned positions.
        angles: float32 (max_pos, head_dim / 2, 2) of cos and sin; None without rotary positions.
        slopes: float32 (heads,), ALiBi alone.
        embed_scale: embeddings are times this.
    """

    sizes = (1, 8, 16, 32, 64)  # the kernels take as long for 2 rows as for 8

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        max_rows: int,
        spec: DecodeSpec,
        tensors: Mapping[str, Tensor],
        angles: Tensor | None,
        slopes: Tensor | None,
        embed_scale: float,
    ) -> None:
        super().__init__(model, cache, max_rows)
        self._spec = spec
        self._angles, self._slopes, self._embed_scale = angles, slopes, embed_scale
        device = model.device
        self._row_info = self._inputs.on_device["row_info"]
        self._rope = torch.zeros(self.max_rows, max(1, spec.head_dim // 2), 2, device=device)
        self._leave = step.leave(spec.d_model)
        self._written = self._block_tables  # where the rows' own K and V go
        self._packed = self._pack(tensors)
        compile_ahead(*self._kernels(), runtime.library().build_dir)
        self._by_bucket = {bucket: self._make_bucket(bucket) for bucket in self.buckets}

    def _pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights in the kernels' order, by `DecodeWeights`' names."""
        spec = self._spec
        assert isinstance(self._cache.paged, FragmentCache)
        self._paged = self._cache.paged
        if self._cache.form.has_copies:
            self._written = self._paged.exact_tables
        self._q = self.states.new_zeros(
            self.max_rows, spec.n_heads * spec.head_dim, dtype=torch.half
        )
        return DecodeWeights(spec, tensors).packed

    def _kernels(self) -> tuple[Callable[..., dict[str, Variant]], list[tuple[Any, ...]]]:
        """What `compile_ahead` takes: the kernels of all buckets."""
        num_blocks = persistent.num_blocks(self._model.device)
        return kernels_of, [(self._spec, rows, num_blocks) for rows in self.buckets]

    def _make_bucket(self, rows: int) -> Bucket:
        spec, device = self._spec, self._model.device
        bucket = Bucket(spec, rows, *step_kernels(spec, rows), "pos" in self._packed, device)
        num_blocks = persistent.num_blocks(device)
        if persistent.is_built(spec, rows, num_blocks):
            bucket.take_core(
                persistent.PersistentCore(
                    spec,
                    rows,
                    lambda name: self._packed[name].data_ptr(),
                    num_blocks,
                    spec.loops,
                    device,
                )
            )
        return bucket

    def load(self, rows: Rows, sources: NDArray[np.int32] | None = None) -> None:
        super().load(rows, sources)
        count = len(rows)
        info = self._inputs.host["row_info"].numpy()
        info[:] = 0
        first_table = self._cache.num_extra_tables + rows.first_loop - 1
        in_tables = (rows.slots - np.arange(count)) * self._cache.num_tables + first_table
        info[:count, 0] = _num_stable(rows)
        info[:count, 1] = in_tables
        self._inputs.host["positions"][count:] = -1  # rows that there are not

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self._by_name["positions"][rows] = -1

    def _spare_all(self) -> None:
        super()._spare_all()
        self._by_name["positions"].fill_(-1)

    # ------------------------------------------------------------------------------------------------------- the stretches

    def _stretch(self, kind: str, bucket: int, num_passes: int) -> Callable[[], None]:
        part = self._by_bucket[bucket]

        def enter() -> None:
            self._begin(part, self.states, 0, "0.norm1", is_from_state=False)

        def passes() -> None:
            self._begin(part, self.states, num_passes, "0.norm1")
            self._passes(part, num_passes, "0.norm1")
            self._row_info[:bucket, 1] += num_passes

        def descend() -> None:
            depths, positions = self._by_name["depths"], self._by_name["positions"]
            self._begin(part, self.states, num_passes, "0.norm1", depths=depths)
            for loop in range(num_passes):
                self._pass(part, loop, "0.norm1")
                launch(
                    self._leave, (bucket, 1), self.states, self.final, depths, positions, loop + 1
                )

        def finish() -> None:
            read()
            self._choose(bucket)

        def whole() -> None:
            self._begin(part, self.states, num_passes, "0.norm1", is_from_state=False)
            self._passes(part, num_passes, "norm", has_head=True)
            self._choose(bucket)

        def read() -> None:
            self._begin(part, self.final, 0, "norm")
            self._head(part)

        return {
            "enter": enter, "passes": passes, "descend": descend, "finish": finish, "step": whole, "read": read,
        }[kind]  # fmt: skip

    def _segment(self, bucket: int, num_rows: int, num_passes: int) -> Callable[[], None]:
        part = self._by_bucket[bucket]

        def segment() -> None:
            self._begin(part, self.embedded, 0, "0.norm1", is_from_state=False)
            is_new, states = self.waves.is_new[:bucket].view(-1, 1), self.states[:bucket]
            states.copy_(torch.where(is_new, self.embedded[:bucket], states))
            self._begin(part, self.states, num_passes, "0.norm1")
            self._passes(part, num_passes, "norm", has_head=True)
            self._choose(bucket)
            self._model.ops.advance_wave(
                self.waves, self._by_name, self.chosen, self._settings, (bucket // num_rows, num_rows), num_passes,
                self._row_info, self._cache.num_tables,
            )  # fmt: skip

        return segment

    def read(self, states: Tensor) -> Tensor:
        """Logits (n, vocab) of states (n, d), at most `max_rows`; valid until the next call."""
        self.final[: len(states)].copy_(states)
        self._run("read", self.bucket(len(states)), 0)
        return self.logits[: len(states)]

    def _begin(
        self, part: Bucket, x: Tensor, num_passes: int, gain: str, *, is_from_state: bool = True, depths: Tensor | None = None
    ) -> None:  # fmt: skip
        packed, told = self._packed, part.core.forgotten if part.core is not None else None
        launch(
            part.begin_passes if is_from_state else part.begin_step,
            step.begin_grid(part.rows, has_told=told is not None), self._by_name["tokens"],
            packed["embed"], packed.get("pos"), x, part.squares, self._by_name["positions"], self._row_info, self._written,
            part.slots, self._angles, self._rope, packed[gain], part.normed, depths, self._by_name["sources"], self.chosen,
            told, told.numel() // 4 if told is not None else 0, num_passes, self._cache.num_tables, self._cache.max_blocks, self._embed_scale, is_overlapped=False,
        )  # fmt: skip

    def _head(self, part: Bucket) -> None:
        launch(
            part.variants["head"], part.grids["head"], self._packed["head"], part.normed, part.squares,
            part.rows, self._spec.norm_eps, self.logits,
        )  # fmt: skip

    def _passes(
        self, part: Bucket, num_passes: int, last_gain: str, *, has_head: bool = False
    ) -> None:
        if part.core is not None:
            self._core_passes(part.core, part, num_passes, last_gain, has_head=has_head)
            return
        for loop in range(num_passes):
            self._pass(part, loop, last_gain if loop == num_passes - 1 else "0.norm1")
        if has_head:
            self._head(part)

    def _core_passes(
        self, core: PersistentCore, part: Bucket, num_passes: int, last_gain: str, *, has_head: bool
    ) -> None:
        """`_passes` in one kernel, and a second for what they complete in the cache."""
        paged, spec, positions = self._paged, self._spec, self._by_name["positions"]
        exact, stored = ((pool, pool.stride(0)) for pool in (paged.exact, paged.stored))
        first_keys: tuple[Tensor | None, int, Tensor | None] = None, 0, None
        if paged.sinks is not None:
            first_keys = paged.sinks, paged.sinks.stride(0), paged.sink_of
        sizes = self._cache.num_tables, self._cache.max_blocks
        launch(
            core.variant, core.grid, core.shares, core.pointers[last_gain], core.told, self.states, *exact, self._written,
            *stored, self._block_tables, *first_keys, part.slots, self._rope, positions, self._row_info,
            self._by_name["windows"], core.results, self.logits if has_head else None, part.rows,
            num_passes * spec.layers, *sizes, spec.norm_eps,
        )  # fmt: skip
        if core.commit is not None:
            launch(
                core.commit, (part.rows, num_passes * spec.layers), *exact, *stored, *first_keys, self._block_tables,
                self._written, positions, self._row_info, spec.layers, *sizes,
            )  # fmt: skip

    def _pass(self, part: Bucket, loop: int, last_gain: str) -> None:
        """One pass; what it leaves is for the reader with the gain `last_gain`."""
        for layer in range(self._spec.layers):
            is_last = layer == self._spec.layers - 1
            self._layer(part, loop, layer, last_gain if is_last else f"{layer + 1}.norm1")

    def _layer(self, part: Bucket, loop: int, layer: int, following: str) -> None:
        """One layer's kernels; the last writes what the reader with the gain `following` wants."""
        self._attend(part, loop, layer)
        packed, rows, eps = self._packed, part.rows, self._spec.norm_eps
        variants, grids = part.variants, part.grids
        launch(
            variants["o"], grids["o"], packed[f"{layer}.o"], part.mixed, None, rows, eps, self.states, part.squares,
            packed[f"{layer}.norm3"], part.normed,
        )  # fmt: skip
        launch(
            variants["gate_up"], grids["gate_up"], packed[f"{layer}.gate_up"], part.normed, part.squares, rows, eps,
            part.hidden,
        )  # fmt: skip
        launch(
            variants["down"], grids["down"], packed[f"{layer}.down"], part.hidden, None, rows, eps, self.states,
            part.squares, packed[following], part.normed,
        )  # fmt: skip

    def _attend(self, part: Bucket, loop: int, layer: int) -> None:
        """From the normed rows to the heads' outputs, by way of the cache."""
        paged, rows, eps = self._paged, part.rows, self._spec.norm_eps
        packed, variants, grids = self._packed, part.variants, part.grids
        exact, stored = layer_of(paged.exact, layer), layer_of(paged.stored, layer)
        exact_bytes, stored_bytes = paged.exact.stride(0), paged.stored.stride(0)
        sinks = paged.sinks
        launch(
            variants["qkv"], grids["qkv"], packed[f"{layer}.qkv"], part.normed, part.squares, rows, eps, self._q,
            exact, part.slots[loop], self._rope, exact_bytes,
        )  # fmt: skip
        launch(
            variants["attention"], grids["attention"], self._q, exact, paged.exact_tables, exact_bytes, stored,
            stored_bytes, self._block_tables, self._by_name["positions"], self._row_info, self._slopes,
            self._by_name["windows"], None, None, None, part.mixed, layer_of(sinks, layer) if sinks is not None else None,
            None if sinks is None else paged.sink_of, 0 if sinks is None else sinks.stride(0), loop,
            self._cache.num_tables, self._cache.max_blocks,
        )  # fmt: skip


class Bucket:
    """The kernels of one number of rows, and what lies between them.

    Args:
        variants, grids: of `qkv` or what stands for it, `attention`, `o`, `gate_up`, `down` and `head`.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        rows: int,
        variants: dict[str, Variant],
        grids: dict[str, tuple[int, int]],
        has_learned: bool,
        device: torch.device,
    ) -> None:
        self.rows, self.variants, self.grids = rows, variants, grids
        shapes, tiles = product_shapes(spec), column_tiles_for(rows)
        angles = spec.head_dim // 2 if spec.is_rotary else 0
        self.begin_step, self.begin_passes = (
            step.begin_step(
                step.StepShape(spec.d_model, angles, shapes["qkv"], tiles, has_learned, is_state)
            )
            for is_state in (False, True)
        )
        self.slots = torch.zeros(spec.loops, rows, dtype=torch.int32, device=device)
        self.squares = torch.zeros(rows, spec.d_model // 16, device=device)
        self.core: PersistentCore | None = None
        self.normed, self.mixed, self.hidden = (
            torch.zeros(
                fragments.packed_size(rows, shapes[name], tiles), dtype=torch.half, device=device
            )
            for name in ("qkv", "o", "down")
        )

    def take_core(self, core: PersistentCore) -> None:
        """Let one kernel stand for those of all layers; what the first of them reads lies in its memory."""
        self.core, self.normed, self.squares = core, core.normed, core.squares


def kernels_of(spec: DecodeSpec, rows: int, num_blocks: int) -> dict[str, Variant]:
    """The kernels of a step of that many rows on a device of so many multiprocessors."""
    variants = step_kernels(spec, rows)[0]
    if persistent.is_built(spec, rows, num_blocks):
        variants["core"] = persistent.core_variant(spec, rows)
        if spec.kv_format == "int4":
            variants["commit"] = persistent.commit_variant(spec)
    return variants


def _num_stable(rows: Rows) -> NDArray[np.int32]:
    """How many leading blocks of each row's sequence no row of these writes."""
    stable: NDArray[np.int32] = rows.places // BLOCK_SIZE
    if len(np.unique(rows.slots)) < len(rows):
        least: dict[int, int] = {}
        for slot, block in zip(rows.slots.tolist(), stable.tolist(), strict=True):
            least[slot] = min(block, least.get(slot, block))
        stable = np.array([least[slot] for slot in rows.slots.tolist()], dtype=np.int32)
    return stable


def layer_of(pool: Tensor, layer: int) -> Tensor:
    """The pool from `layer` of its first block on."""
    return pool.view(-1)[layer * pool.stride(1) :]
