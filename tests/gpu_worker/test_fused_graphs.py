"""The buffers and launches of models with fused kernels, on a machine without a GPU: what a step uploads, and whom it calls with how many arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker import absorbed_decode, fused_graphs, persistent
from gpu_worker.fused_model import AbsorbedModel, ClassedModel, FusedModel
from gpu_worker.plain_decode import choices_of
from gpu_worker.rows import Rows
from gpu_worker.sequence import Sequence
from kernels import cuda
from kernels.compiler import Variant
from tests.gpu_worker.engine_helpers import make_engine, make_run

LOOPS = 2


@pytest.mark.parametrize(
    ("pos", "kv_format", "kind", "one_kernel"),
    [
        ("rope", "fp16", FusedModel, []),
        ("rope", "fp16", FusedModel, ["core_step"]),
        ("rope", "int4", FusedModel, []),
        ("rope", "int4", FusedModel, ["core_step", "commit_passes_d64"]),
        ("alibi", "fp16", FusedModel, []),
        ("learned", "h", AbsorbedModel, []),
        ("learned", "h_int4", AbsorbedModel, []),
    ],
)
def test_a_step_uploads_its_rows_and_calls_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pos: str, kv_format: str, kind: type[ClassedModel],
    one_kernel: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(persistent, "num_blocks", lambda device: 132 * bool(one_kernel))
    engine = make_engine(
        tmp_path, "pure", {"pos": pos}, device="cuda", is_graphed=True, kv_format=kv_format, num_blocks=100
    )  # fmt: skip
    assert type(engine.model) is kind
    graphs = engine.model.graphs
    assert graphs is not None
    names: list[str] = []

    def launch(variant: Variant, grid: tuple[int, int], *args: Any, is_overlapped: bool = True) -> None:  # fmt: skip
        assert len(args) <= len(variant.args) and 0 not in grid, variant.name
        for given, letter in zip(args, variant.args, strict=False):
            is_address = given is None or isinstance(given, torch.Tensor)
            assert letter == "l" or not is_address, (variant.name, letter)
        names.append(variant.name.split("_m8")[0])

    for module in (fused_graphs, absorbed_decode, cuda):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(graphs, "_is_captured", False)
    slots = [engine.cache.open(LOOPS) for _ in range(2)]
    for slot in slots:
        engine.cache.extend(slot, 70)
    rows = Rows.empty(2)
    rows.slots[:], rows.tokens[:], rows.last_loop[:] = slots, (7, 9), (1, LOOPS)
    rows.positions[:] = rows.places[:] = (63, 69)
    sequences = [Sequence(make_run(i, [1, 2]), slot, False) for i, slot in enumerate(slots)]
    graphs.load(rows)
    graphs.set_choices(choices_of(engine.model.ops, sequences))
    graphs.step(2, LOOPS)
    on_device = graphs._inputs.on_device
    spare = graphs.max_rows - 2
    assert on_device["tokens"].tolist() == [7, 9] + [0] * spare
    assert on_device["positions"].tolist() == [63, 69] + [-1] * spare
    assert on_device["depths"].tolist() == [1, LOOPS] + [0] * spare
    assert on_device["slots"].tolist() == slots + [engine.cache.spare_slot] * spare
    layers = engine.model.config.stages.core
    plans = [name for name in names if "plan" in name]
    assert plans == names[: int(kind is AbsorbedModel)]
    if one_kernel:
        assert names == ["begin_step", *one_kernel, "choose"]
    else:
        assert names[len(plans)] == "begin_step" and names[-2:] == ["head", "choose"]
        num_attending = sum("attention" in name for name in names)
        assert num_attending == names.count("o") == LOOPS * layers

    names.clear()
    graphs.load(rows.select([1]))
    graphs.enter(1)
    graphs.descend(1, LOOPS)
    graphs.finish(1)
    assert on_device["positions"].tolist() == [69] + [-1] * (spare + 1)
    assert names.count("leave") == LOOPS and names.count("choose") == 1
    assert all(tensor is not None for tensor in graphs._changed())
