"""The ends of a decode step: where rows write in each loop, and how they leave at their own depth."""

from __future__ import annotations

import torch

from kernels import step
from kernels.fragments import ProductShape, packed_size
from kernels.runtime import launch

D, ROWS, LOOPS, BLOCKS = 32, 8, 3, 2


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_row_has_places_up_to_its_depth() -> None:
    target = ProductShape(64, D, 2)
    x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(0))
    positions = ints(5, 64, 70, -1, -1, -1, -1, -1)
    depths = ints(1, 3, 2, 0, 0, 0, 0, 0)
    tables = torch.arange(ROWS * LOOPS * BLOCKS, dtype=torch.int32).view(ROWS, LOOPS, BLOCKS)
    slots = torch.full((LOOPS, ROWS), 7, dtype=torch.int32)
    packed = torch.zeros(packed_size(ROWS, target, 1), dtype=torch.half)
    begin = step.begin_step(step.StepShape(D, 0, target, 1, is_from_state=True))
    for given in (depths, None):
        launch(
            begin, (ROWS, 1), ints(*[0] * ROWS), None, None, x, torch.zeros(ROWS, D // 16), positions,
            torch.zeros(ROWS, 2, dtype=torch.int32), tables, slots, None, None, torch.ones(D), packed, given, None,
            None, None, 0, LOOPS, LOOPS, BLOCKS, 1.0,
        )  # fmt: skip
        for row, position in enumerate(positions.tolist()):
            last = LOOPS if given is None else int(given[row])
            for loop in range(LOOPS):
                is_written = position >= 0 and loop < last
                block = int(tables[row, loop, position // 64])
                expected = block * 64 + position % 64 if is_written else -1
                assert int(slots[loop, row]) == expected, (row, loop)


def test_what_the_step_before_has_told_is_forgotten() -> None:
    """All of the memory that is given, by blocks beyond the rows' own, and nothing behind it."""
    target = ProductShape(64, D, 2)
    begin = step.begin_step(step.StepShape(D, 0, target, 1, is_from_state=True))
    words = 4 * 40_000 + 12
    told = torch.arange(words, dtype=torch.int32)
    packed = torch.zeros(packed_size(1, target, 1), dtype=torch.half)
    launch(
        begin, step.begin_grid(1, has_told=True), ints(0), None, None, torch.ones(1, D), torch.zeros(1, D // 16), ints(3),
        torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, LOOPS, BLOCKS, dtype=torch.int32), torch.zeros(LOOPS, 1, dtype=torch.int32),
        None, None, torch.ones(D), packed, None, None, None, told, words // 4 - 3, LOOPS, LOOPS, BLOCKS, 1.0,
    )  # fmt: skip
    assert (told[:-12] == -1).all() and torch.equal(told[-12:], torch.arange(words - 12, words))


def test_rows_leave_with_their_states() -> None:
    x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(1))
    final, depths = torch.zeros(ROWS, D), ints(1, 2, 3, 2, 1, 0, 0, 0)
    positions = ints(*range(10, 10 + ROWS))
    states = []
    for done in (1, 2, 3):
        states.append(x * done)
        launch(step.leave(D), (ROWS, 1), states[-1], final, depths, positions, done)
        assert [p < 0 for p in positions.tolist()] == [0 < depth <= done for depth in depths.tolist()]  # fmt: skip
    for row, depth in enumerate(depths.tolist()):
        assert torch.equal(final[row], states[depth - 1][row] if depth else torch.zeros(D))
