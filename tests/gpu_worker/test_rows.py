"""Rows of one core step: depths mixed, entered late and left early, joined and selected, with the bits of plain rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker import artifact
from gpu_worker.kv_cache import KVCache
from gpu_worker.model import Model
from gpu_worker.rows import Rows
from scripts.make_toy_artifact import make

TOKENS = np.random.default_rng(3).integers(0, 512, 140)


@pytest.fixture(scope="module", params=["pre", "huginn", "learned"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    loaded = artifact.load(
        make(tmp_path_factory.mktemp("toy") / "toy.tinyloop", variant=request.param)
    )
    return Model(loaded.config, loaded.tensors())


def rows_of(slot: int, start: int, end: int, first_loop: int, last_loop: int) -> Rows:
    rows = Rows.empty(end - start)
    rows.tokens[:] = TOKENS[start:end]
    rows.slots[:] = slot
    rows.positions[:] = rows.places[:] = np.arange(start, end)
    rows.first_loop[:], rows.last_loop[:] = first_loop, last_loop
    return rows


class Run:
    """A cache with one slot per sequence, all of the same tokens."""

    def __init__(self, model: Model, num_slots: int = 3, loops: int = 4) -> None:
        self.model = model
        self.cache = KVCache(model.config, 60, num_slots, 256)
        self.slots = [self.cache.open(loops) for _ in range(num_slots)]
        for slot in self.slots:
            self.cache.extend(slot, 200)

    @torch.inference_mode()
    def trunk(self, *parts: Rows, after_pass=None) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        return self.model.trunk(Rows.join(parts), self.cache, after_pass)

    @torch.inference_mode()
    def logits(self, states: Tensor, rows: Rows) -> Tensor:
        return self.model.logits(self.model.read_out(states, rows, self.cache))


def test_rows_of_different_depths_share_passes(model: Model) -> None:
    run = Run(model)
    a, b, c = run.slots
    parts = [rows_of(a, 0, 70, 1, 4), rows_of(b, 0, 5, 1, 1), rows_of(c, 0, 66, 1, 3)]
    together, _ = run.trunk(*parts)
    for part, first, loops in ((parts[0], 0, 4), (parts[1], 70, 1), (parts[2], 75, 3)):
        alone, _ = Run(model, 3, loops).trunk(part)
        assert torch.equal(together[first : first + len(part)], alone)


def test_a_state_may_be_taken_up_again_at_any_loop(model: Model) -> None:
    """Draft and verification: loops 1..k of some rows first, the others later, beside rows of other sequences."""
    plain = Run(model)
    expected_rows = rows_of(plain.slots[0], 0, 140, 1, 4)
    states, _ = plain.trunk(expected_rows)
    expected = plain.logits(states, expected_rows)
    for k in (1, 2, 3):
        run = Run(model)
        slot, other, _ = run.slots
        run.trunk(rows_of(slot, 0, 130, 1, 4))
        drafted, embedded = [], []
        for p in range(130, 140):
            state, e = run.trunk(rows_of(slot, p, p + 1, 1, k))
            drafted.append(state)
            embedded.append(e)
        late = rows_of(slot, 130, 140, k + 1, 4)
        late.states, late.embedded = torch.cat(drafted), torch.cat(embedded)
        states, _ = run.trunk(rows_of(other, 0, 33, 1, 2), late)
        coda = rows_of(slot, 0, 130, 1, 4)
        whole, _ = run.trunk(coda)  # the coda's K and V of what came before
        run.logits(whole, coda)
        assert torch.equal(run.logits(states[33:], late), expected[130:])


def test_rows_leave_when_they_are_told_to(model: Model) -> None:
    run = Run(model)
    rows = rows_of(run.slots[0], 0, 40, 1, 4)
    seen: list[list[int]] = []

    def leave(active, loops, *states):  # type: ignore[no-untyped-def]
        seen.append(active.tolist())
        assert (loops == len(seen)).all() and states[0].shape[0] == len(active)
        return (active % 4) < len(seen)  # row r leaves after loop r % 4 + 1

    states, _ = run.trunk(rows, after_pass=leave)
    assert [len(active) for active in seen] == [40, 30, 20, 10]
    first, _ = Run(model).trunk(rows_of(run.slots[0], 0, 1, 1, 1))
    assert torch.equal(states[0], first[0])


def test_joined_rows_keep_their_maps_and_states() -> None:
    a, b, c = Rows.empty(2), Rows.empty(3), Rows.empty(1)
    a.row_map[:], a.maps = [1, -1], np.array([[1, 2], [3, 4]], dtype=np.int32)
    c.row_map[:], c.maps = 0, np.array([[5, 6, 7]], dtype=np.int32)
    b.states, b.embedded = torch.ones(3, 4), torch.full((3, 4), 2.0)
    joined = Rows.join([a, b, c])
    assert joined.row_map.tolist() == [1, -1, -1, -1, -1, 2]
    assert joined.maps.tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 7]]
    assert joined.states is not None and joined.embedded is not None
    assert joined.states[:, 0].tolist() == [0, 0, 1, 1, 1, 0]
    part = joined.select(np.array([5, 2]))
    assert part.row_map.tolist() == [2, -1] and part.embedded is not None
    assert part.embedded[:, 0].tolist() == [0, 2] and part.maps is joined.maps
