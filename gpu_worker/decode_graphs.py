"""Device buffers for the rows of a step and the CUDA graphs that run them: one graph per row bucket and stretch of the model.

    enter     tokens -> the prelude's output and the states before the first loop
    passes    so many core passes, each row one loop further each time
    descend   as many core passes as the deepest row has; each row leaves at its own depth
    finish    norm, coda, head and the choice of tokens, from the states that rows left with
    step      all of this for rows of one depth
    segment   waves of guesses: some core passes, a word for every row, and what follows from the words (`kernels.wave`)

A bucket has a fixed number of rows; those beyond the real ones belong to the cache's spare slot, as do rows that have left the loops. The
graphs run the model's own functions on these buffers, so they give the bits of the same functions called one by one. Nothing here waits
for the device. On a device without graphs the functions are called directly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.mirror import Inputs, Upload
from gpu_worker.rows import Rows
from kernels.layout import (
    BLOCK_SIZE,
    NUM_RECORDS,
    RECORD_WORDS,
    WAVE_WORDS,
    Paging,
    WaveBuffers,
)

if TYPE_CHECKING:
    from gpu_worker.kv_cache import KVCache
    from gpu_worker.model import Model

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_CHOICES = (torch.float32, torch.int64, torch.float64, torch.float32)  # see `kernels.cpu.choose`
_COLUMNS = (
    "tokens", "sources", "home", "slots", "tables", "positions", "places", "windows", "row_map", "map_base", "depths",
)  # fmt: skip


class DecodeGraphs:
    """See the module.

    Args:
        model: whose functions run.
        cache: that the rows read and write; it has a spare slot.
        max_rows: at most, one of BUCKETS.

    Attributes:
        states, embedded: (max_rows, d) fp32, what `enter` made and `passes` go on from.
        final: (max_rows, d) the states that rows left the loops with.
        chosen: int32 (max_rows,) the tokens of the last `finish`; `sources` point into it.
        logits: (max_rows, vocab) of the last `finish`.
        waves: what `segment` knows of the waves.
        has_segments: whether there is that stretch.
    """

    has_segments = True
    sizes: tuple[int, ...] = BUCKETS

    def __init__(self, model: Model, cache: KVCache, max_rows: int) -> None:
        self._model, self._cache = model, cache
        self.buckets = [size for size in self.sizes if size <= max_rows]
        self.max_rows = self.buckets[-1]
        device, d = model.device, model.arch.d_model
        self._is_captured = device.type == "cuda"

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        n = self.max_rows
        settings = model.ops.pack_choices(
            *(torch.zeros(n, dtype=kind) for kind in _CHOICES), torch.zeros(n, 2)
        )
        columns = dict.fromkeys(_COLUMNS, (torch.int32, (n,)))
        choices = {str(i): (part.dtype, tuple(part.shape)) for i, part in enumerate(settings)}
        self._inputs = Inputs([columns | {"row_info": (torch.int32, (n, 2))}, choices], device)
        self._by_name = {name: self._inputs.on_device[name] for name in _COLUMNS}
        self._settings = [self._inputs.on_device[name] for name in choices]
        self._maps = ints(n, BLOCK_SIZE)
        self._stage_tables = ints(cache.num_tables, n) + torch.arange(
            cache.num_tables, dtype=torch.int32, device=device
        ).view(-1, 1)
        self._tiles = torch.arange(n + 1, dtype=torch.int32, device=device)
        self.states = torch.zeros(n, d, device=device)
        self.embedded = torch.zeros(n, d, device=device)
        self.final = torch.zeros(n, d, device=device)
        self.logits = torch.zeros(n, model.arch.vocab, device=device)
        self.chosen = ints(n)
        self._block_tables = cache.block_tables
        self.waves = WaveBuffers(
            ints(n, WAVE_WORDS), ints(n), torch.ones(n, dtype=torch.bool, device=device),
            torch.zeros(NUM_RECORDS, n, RECORD_WORDS, dtype=torch.int32, pin_memory=self._is_captured),
        )  # fmt: skip
        self._graphs: dict[tuple[str, int, int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._uploads: dict[torch.dtype, list[Upload]] = {}

    # --------------------------------------------------------------------------------------------------------- the rows

    def bucket(self, count: int) -> int:
        """The smallest bucket for that many rows."""
        return next(size for size in self.buckets if size >= count)

    def load(self, rows: Rows, sources: NDArray[np.int32] | None = None) -> None:
        """Puts rows into the buffers, in their order; the rest of the buffers becomes spare rows.

        Args:
            sources: for rows whose token was chosen on the device by the last `finish`, its row there; -1 for the others.
        """
        count = len(rows)
        by_name = {name: self._inputs.host[name].numpy() for name in _COLUMNS}
        for column in by_name.values():
            column[:] = 0
        by_name["sources"][:] = by_name["row_map"][:] = -1
        by_name["slots"][:] = by_name["home"][:] = self._cache.spare_slot
        for name in ("tokens", "slots", "positions", "places", "windows", "row_map", "map_base"):
            by_name[name][:count] = getattr(rows, name)
        by_name["home"][:count] = rows.slots
        by_name["tables"][:count] = self._cache.num_extra_tables + rows.first_loop - 1
        by_name["depths"][:count] = rows.last_loop - rows.first_loop + 1
        if sources is not None:
            by_name["sources"][:count] = sources
        self._inputs.touch(0)
        if len(rows.maps):
            self._put(torch.from_numpy(rows.maps), self._maps[: len(rows.maps)])
        self._cache.block_tables  # noqa: B018 (brings the device's tables up to date)

    def keep(self, rows: Tensor) -> None:
        """These rows leave the loops with their present states: whatever runs on in their place writes to the spare slot."""
        self.final[rows] = self.states[rows]
        self._by_name["slots"][rows] = self._cache.spare_slot
        self._by_name["tables"][rows] = (
            0  # passes go on counting it up, and it must name one that there is
        )

    def _put(self, source: Tensor, target: Tensor) -> None:
        if not self._is_captured:
            target.copy_(source)
            return
        uploads = self._uploads.setdefault(source.dtype, [Upload() for _ in range(8)])
        uploads.append(uploads.pop(0))
        uploads[-1].copy(source, target)

    # ------------------------------------------------------------------------------------------------------- the stretches

    def enter(self, count: int) -> None:
        """Embeddings and prelude of the first `count` rows; their states start cold."""
        self._run("enter", self.bucket(count), 0)

    def passes(self, count: int, num_passes: int) -> None:
        """That many core passes of the first `count` rows."""
        self._run("passes", self.bucket(count), num_passes)

    def set_choices(self, settings: Sequence[Tensor]) -> None:
        """How the tokens of the first rows are chosen, as the kernels' `pack_choices` returns it."""
        for i, source in enumerate(settings):
            self._inputs.host[str(i)][: len(source)] = source
        self._inputs.touch(1)

    def descend(self, count: int, num_passes: int) -> None:
        """Core passes of the first `count` rows until each has run its own number of them, `num_passes` at most."""
        self._run("descend", self.bucket(count), num_passes)

    def finish(self, count: int) -> None:
        """Coda and head of the first `count` rows, and a token for each."""
        self._run("finish", self.bucket(count), 0)

    def step(self, count: int, num_passes: int) -> None:
        """`enter`, `passes` and `finish` as one, for rows of one depth."""
        self._run("step", self.bucket(count), num_passes)

    def start_waves(self, states: Tensor) -> None:
        """Puts waves (w, WAVE_WORDS) into the buffers; the row of each root has been loaded, the other rows are spare ones."""
        self._put(states, self.waves.states[: len(states)])
        self.waves.done.zero_()
        self.waves.is_new.fill_(True)

    def segment(self, num_waves: int, num_rows: int, num_passes: int) -> None:
        """That many core passes of waves of `num_rows` rows each, then a word for every row and what follows from the words."""
        bucket = self.bucket(num_waves * num_rows)
        self._run("segment", bucket, num_passes, num_rows)

    def _run(self, kind: str, bucket: int, num_passes: int, num_rows: int = 0) -> None:
        """Runs a stretch, as a graph where there are graphs."""
        self._inputs.upload()
        if self._is_captured:
            self.captured(kind, bucket, num_passes, num_rows).replay()
        else:
            self._make(kind, bucket, num_passes, num_rows)()

    def captured(
        self, kind: str, bucket: int, num_passes: int, num_rows: int = 0
    ) -> torch.cuda.CUDAGraph:
        """The graph of a stretch, captured if that has not been done; `num_rows` of each wave, for segments."""
        how = kind, bucket, num_passes, num_rows
        if how not in self._graphs:
            self._graphs[how] = self._capture(self._make(*how))
        return self._graphs[how]

    def _make(self, kind: str, bucket: int, num_passes: int, num_rows: int) -> Callable[[], None]:
        if kind == "segment":
            return self._segment(bucket, num_rows, num_passes)
        return self._stretch(kind, bucket, num_passes)

    def _capture(self, stretch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures a stretch, after a run on spare rows that loads its kernels; the buffers are left as they were."""
        changed = self._changed()
        before = [tensor.clone() for tensor in changed]
        self._spare_all()
        stretch()
        for tensor, kept in zip(changed, before, strict=True):
            tensor.copy_(kept)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # an older graph that is collected while this one is captured would spoil it
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                stretch()
        finally:
            gc.enable()
        self._pool = graph.pool()
        return graph

    def _changed(self) -> list[Tensor]:
        """The buffers that stretches write and later ones read."""
        waves = self.waves
        return [
            *self._inputs.on_device.values(), self.states, self.embedded, self.final, self.chosen, waves.states, waves.done,
            waves.is_new,
        ]  # fmt: skip

    def _spare_all(self) -> None:
        for name in ("slots", "home"):
            self._by_name[name].fill_(self._cache.spare_slot)

    def _stretch(self, kind: str, bucket: int, num_passes: int) -> Callable[[], None]:
        def enter() -> None:
            tokens = self._take_tokens(bucket)
            positions = self._by_name["positions"][:bucket]
            embedded = self._model.enter(tokens, positions, self._paging_at(bucket), self._cache)
            self.embedded[:bucket].copy_(embedded)
            self.states[:bucket].copy_(self._model.cold_states(embedded))

        def passes() -> None:
            states, embedded = self.states[:bucket], self.embedded[:bucket]
            paging = self._paging(bucket, self._by_name["slots"], self._by_name["tables"])
            for _ in range(num_passes):
                states = self._model.core_pass(states, embedded, paging, self._cache)
                self._by_name["tables"][:bucket] += 1
            self.states[:bucket].copy_(states)

        def descend() -> None:
            one_pass = self._stretch("passes", bucket, 1)
            depths, slots, tables = (self._by_name[name][:bucket] for name in ("depths", "slots", "tables"))  # fmt: skip
            for num_done in range(1, num_passes + 1):
                one_pass()
                is_last = depths == num_done
                states, final = self.states[:bucket], self.final[:bucket]
                final.copy_(torch.where(is_last.view(-1, 1), states, final))
                slots.masked_fill_(is_last, self._cache.spare_slot)
                tables.masked_fill_(
                    is_last, 0
                )  # counted on by what follows, and it must name one that there is

        def finish() -> None:
            y = self._model.leave(self.final[:bucket], self._paging_at(bucket), self._cache)
            self.logits[:bucket].copy_(self._model.logits(y))
            self._choose(bucket)

        def step() -> None:
            enter()
            passes()
            self.final[:bucket].copy_(self.states[:bucket])
            finish()

        return {
            "enter": enter, "passes": passes, "descend": descend, "finish": finish, "step": step,
        }[kind]  # fmt: skip

    def _segment(self, bucket: int, num_rows: int, num_passes: int) -> Callable[[], None]:
        passes = self._stretch("passes", bucket, num_passes)
        finish = self._stretch("finish", bucket, 0)

        def segment() -> None:
            self._enter_new(bucket)
            passes()
            self.final[:bucket].copy_(self.states[:bucket])
            finish()
            self._model.ops.advance_wave(
                self.waves, self._by_name, self.chosen, self._settings, (bucket // num_rows, num_rows), num_passes
            )  # fmt: skip

        return segment

    def _enter_new(self, bucket: int) -> None:
        """The prelude of all rows, the same again where it has run before; new ones start cold."""
        by_name, states = self._by_name, self.states[:bucket]
        embedded = self._model.enter(
            by_name["tokens"][:bucket], by_name["positions"][:bucket], self._paging_at(bucket), self._cache
        )  # fmt: skip
        self.embedded[:bucket].copy_(embedded)
        is_new = self.waves.is_new[:bucket].view(-1, 1)
        states.copy_(torch.where(is_new, self._model.cold_states(embedded), states))

    def _take_tokens(self, bucket: int) -> Tensor:
        """The rows' tokens, those filled in that the last `finish` chose."""
        sources, tokens = self._by_name["sources"][:bucket], self._by_name["tokens"][:bucket]
        return torch.where(sources >= 0, self.chosen[sources], tokens)

    def _choose(self, bucket: int) -> None:
        settings = [setting[:bucket] for setting in self._settings]
        self._model.ops.choose_packed(self.logits[:bucket], settings, self.chosen[:bucket])

    def _paging_at(self, bucket: int) -> Callable[[int], Paging]:
        return lambda table: self._paging(bucket, self._by_name["home"], self._stage_tables[table])

    def _paging(self, bucket: int, slots: Tensor, tables: Tensor) -> Paging:
        by_name = {name: column[:bucket] for name, column in self._by_name.items()}
        return Paging(
            slots[:bucket], tables[:bucket], by_name["positions"], by_name["places"], by_name["windows"],
            by_name["row_map"], by_name["map_base"], self._maps, self._block_tables, self._tiles[: bucket + 1],
        )  # fmt: skip
