"""The kernel that moves waves of guesses on: equal to its plain twin in every buffer, from any state, alone and beside others."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from gpu_worker.sampler import _mix
from kernels import cpu, cuda
from kernels.layout import NUM_RECORDS, RECORD_WORDS, WAVE_WORDS, WaveBuffers
from kernels.wave import (
    AHEAD,
    BASE,
    COLUMNS,
    COUNT,
    END,
    LOOPS,
    ROOT,
    SEED,
    SLOT,
    SPARE,
    TABLE,
    TURN,
    WINDOW,
    noise_key,
)

VOCAB = 3  # few tokens, so that guesses often hold


class State:
    """The buffers of some waves, with as many random nodes as there can be at that moment."""

    def __init__(self, rng: random.Random, shape: tuple[int, int]) -> None:
        num_waves, rows = shape
        total = num_waves * rows
        self.shape = shape
        self.buffers = WaveBuffers(
            torch.zeros(num_waves + 1, WAVE_WORDS, dtype=torch.int32),
            torch.zeros(total, dtype=torch.int32),
            torch.zeros(total, dtype=torch.bool),
            torch.full((NUM_RECORDS, num_waves + 1, RECORD_WORDS), -1, dtype=torch.int32),
        )
        self.columns = {name: torch.full((total,), 77, dtype=torch.int32) for name in COLUMNS}
        self.columns["tokens"] = torch.tensor([rng.randrange(VOCAB) for _ in range(total)]).int()
        self.chosen = torch.tensor([rng.randrange(VOCAB) for _ in range(total)]).int()
        settings = [torch.zeros(total), torch.zeros(total), torch.ones(total), torch.zeros(total)]
        keys = torch.zeros(total, 2, dtype=torch.int64)
        self.on_cpu = cpu.pack_choices(*settings, keys)
        self.on_gpu = cuda.pack_choices(*settings, keys)
        self.step = rng.choice([1, 2])
        self.row_info = (
            torch.full((total, 2), 77, dtype=torch.int32) if rng.random() < 0.5 else None
        )
        for wave in range(num_waves):
            self._fill(rng, wave, rows)

    def _fill(self, rng: random.Random, wave: int, rows: int) -> None:
        words = self.buffers.states[wave]
        root = rng.randrange(3, 200)
        segments = [*range(rows)]
        depths = sorted(rng.sample(segments, rng.randint(1, rows)), reverse=True)
        if rng.random() < 0.5:
            depths[0] = rows - 1  # the root reaches its full depth
        base = root - rng.randrange(rows)
        end = root + len(depths) + rng.choice([0, 1, 1, 2, 50])
        for name, value in (
            (ROOT, root), (COUNT, len(depths)), (BASE, base), (LOOPS, rows * self.step), (AHEAD, rng.choice([1, 2, rows, 63])),
            (END, end), (SLOT, 5 + wave), (SPARE, 99), (TABLE, 2), (WINDOW, rng.choice([0, 40])), (TURN, rng.randrange(40)),
        ):  # fmt: skip
            words[name] = value
        words[SEED], words[SEED + 1] = (
            rng.randrange(-(2**31), 2**31),
            rng.randrange(-(2**31), 2**31),
        )
        for i, depth in enumerate(depths):
            if root + i < end - 1:
                self.buffers.done[wave * rows + (root + i - base) % rows] = depth * self.step

    def advance(self, ops: Any, settings: Any) -> None:
        ops.advance_wave(
            self.buffers, self.columns, self.chosen, settings, self.shape, self.step, self.row_info, 10
        )  # fmt: skip

    def everything(self) -> list[torch.Tensor]:
        buffers = [getattr(self.buffers, f.name) for f in fields(WaveBuffers)]
        columns = [self.columns[name] for name in COLUMNS]
        return buffers + columns + [t for t in (self.row_info,) if t is not None]


@pytest.mark.parametrize("rows", [2, 4, 8, 32])
def test_the_kernel_moves_as_its_twin(rows: int) -> None:
    seen = set()
    for case in range(25 if rows < 32 else 8):
        shape = (1 + case % 2, rows)
        here, there = (State(random.Random(rows * 1000 + case), shape) for _ in range(2))
        for _ in range(2):
            here.advance(cpu, here.on_cpu)
            there.advance(cuda, there.on_gpu)
            for mine, its in zip(here.everything(), there.everything(), strict=True):
                assert torch.equal(mine, its)
            if here.row_info is None:
                keys = here.on_cpu[4].to(torch.int64) & 0xFFFFFFFF
                assert torch.equal(keys, there.on_gpu[2][:, 1:3].long() & 0xFFFFFFFF)
        seen |= {tuple(r[[0, 2, 3]].tolist()) for r in here.buffers.records.view(-1, RECORD_WORDS)}
    assert {(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0)} <= seen


def test_a_wave_has_the_same_result_beside_others() -> None:
    both = State(random.Random(3), (2, 8))
    alone = State(random.Random(3), (2, 8))
    alone.shape = (1, 8)
    both.advance(cpu, both.on_cpu)
    alone.advance(cpu, alone.on_cpu)
    for mine, its in zip(both.everything()[1:3], alone.everything()[1:3], strict=True):
        assert torch.equal(mine[:8], its[:8])
    assert torch.equal(both.buffers.states[0], alone.buffers.states[0])


def test_keys_are_those_of_the_sampler() -> None:
    rng = random.Random(1)
    for _ in range(50):
        seed, position = rng.getrandbits(64), rng.randrange(1 << 20)
        low, high = noise_key(seed - (seed >> 63 << 64), position)
        assert low | high << 32 == _mix(seed + position)
