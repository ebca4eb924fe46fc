"""Rows: the tokens of one step, each with its own sequence, position, place in the cache and loops to run.

A plain container that the engine fills and the model runs. Rows of one sequence follow each other in ascending position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu_attention import TILE_ROWS, make_tiles
from kernels.layout import HostPaging, Paging

if TYPE_CHECKING:
    from gpu_worker.kv_cache import KVCache

Ints = NDArray[np.int32]
NO_MAPS: Ints = np.zeros((0, 0), dtype=np.int32)


@dataclass(slots=True)
class Rows:
    """One entry per row, int32 unless said.

    Attributes:
        tokens: ids, int64.
        slots: the cache slot of the row's sequence.
        positions: absolute position.
        places: where its K and V go; the position itself but for tree rows.
        first_loop: the loop it starts at, 1 for a new token; later ones come with `states` and `embedded`.
        last_loop: the loop after which it leaves at the latest.
        windows: recent keys that it sees besides the sinks, 0 for all.
        row_map, map_base: see `Paging`; -1 for rows that read the plain table.
        init_seeds: uint64 seeds of the initial state, for models that have one.
        has_init_seed: bool.
        is_prompt: bool, rows of prompt tokens; the others' were generated, or guessed.
        is_warm: bool, rows at loop 1 that start from the state that they bring.
        maps: (num_maps, width) places by position, for rows with a `row_map`.
        states, embedded: (n, d) fp32 where any `first_loop` > 1 or `is_warm`: the state before that loop and the prelude's output.
    """

    tokens: NDArray[np.int64]
    slots: Ints
    positions: Ints
    places: Ints
    first_loop: Ints
    last_loop: Ints
    windows: Ints
    row_map: Ints
    map_base: Ints
    init_seeds: NDArray[np.uint64]
    has_init_seed: NDArray[np.bool_]
    is_prompt: NDArray[np.bool_]
    is_warm: NDArray[np.bool_]
    maps: Ints
    states: Tensor | None = None
    embedded: Tensor | None = None

    @staticmethod
    def empty(n: int) -> Rows:
        """`n` rows of token 0 at place 0, to be filled in: all loops from 1 to 1, no windows, no maps."""

        def zeros() -> Ints:
            return np.zeros(n, dtype=np.int32)

        return Rows(
            np.zeros(n, dtype=np.int64), zeros(), zeros(), zeros(), np.ones(n, dtype=np.int32), np.ones(n, dtype=np.int32),
            zeros(), np.full(n, -1, dtype=np.int32), zeros(), np.zeros(n, dtype=np.uint64), np.zeros(n, dtype=np.bool_),
            np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_), NO_MAPS,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def join(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, in that order. Parts with maps keep them, renumbered; so do parts with states."""
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {}
        for f in fields(Rows):
            if f.name not in ("maps", "states", "embedded"):
                joined[f.name] = np.concatenate([getattr(part, f.name) for part in parts])
        rows = Rows(**joined, maps=NO_MAPS)
        width = max(part.maps.shape[1] for part in parts)
        first, num_maps = 0, 0
        maps = []
        for part in parts:
            if len(part.maps):
                here = slice(first, first + len(part))
                rows.row_map[here] = np.where(part.row_map >= 0, part.row_map + num_maps, -1)
                maps.append(np.pad(part.maps, ((0, 0), (0, width - part.maps.shape[1]))))
                num_maps += len(part.maps)
            first += len(part)
        if maps:
            rows.maps = np.concatenate(maps)
        if any(part.states is not None for part in parts):
            rows.states = _join_brought([(len(p), p.states) for p in parts])
        if any(part.embedded is not None for part in parts):
            rows.embedded = _join_brought([(len(p), p.embedded) for p in parts])
        return rows

    def select(self, indices: NDArray[np.intp]) -> Rows:
        """The rows at `indices`, in that order."""
        parts = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "maps" or value is None:
                parts[f.name] = value
            else:
                at = on_device(indices, value.device) if isinstance(value, Tensor) else indices
                parts[f.name] = value[at]
        return Rows(**parts)

    def paging_at(self, cache: KVCache) -> Callable[[int], Paging]:
        """`paging` with all rows in one table, made when it is asked for."""
        return lambda table: self.paging(np.full(len(self), table, dtype=np.int32), cache)

    def paging(self, tables: Ints, cache: KVCache) -> Paging:
        """How the kernels find these rows' keys when row r is in table `tables[r]` of its sequence."""
        block_tables = cache.block_tables
        by_row = (
            self.slots, tables, self.positions, self.places, self.windows, self.row_map, self.map_base,
        )  # fmt: skip
        maps, tiles = self.maps, make_tiles(self.slots, tables, TILE_ROWS)
        joined = [*by_row, maps.ravel(), tiles]
        bounds = np.cumsum([len(part) for part in joined[:-1]])
        packed = on_device(np.concatenate(joined), block_tables.device)
        slots, of_tables, positions, places, windows, row_map, map_base, map_places, bounds_of_tiles = (
            torch.tensor_split(packed, bounds.tolist())
        )  # fmt: skip
        on_host = HostPaging(*by_row, maps, cache.host_tables, tiles)
        return Paging(
            slots, of_tables, positions, places, windows, row_map, map_base, map_places.view(maps.shape),
            block_tables, bounds_of_tiles, on_host,
        )  # fmt: skip


def _join_brought(parts: Sequence[tuple[int, Tensor | None]]) -> Tensor:
    """(n, d) of what the parts bring, zeros for those that bring nothing."""
    some = next(tensor for _, tensor in parts if tensor is not None)
    return torch.cat(
        [some.new_zeros(n, some.shape[1]) if tensor is None else tensor for n, tensor in parts]
    )


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A host array as a tensor of the device: the same memory on the CPU, a copy in stream order elsewhere."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
