"""The stored self-check passes for the right arithmetic and catches the mistakes that ports of these models make."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gpu_worker import artifact, naive, selfcheck
from gpu_worker.artifact import Artifact
from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.convert import Options, convert
from gpu_worker.model_config import ModelConfig, Pos
from scripts.make_toy_artifact import make

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
Weights = dict[str, torch.Tensor]


def run(
    loaded: Artifact, config: ModelConfig | None = None, weights: Weights | None = None
) -> float:
    def logits(tokens: Sequence[int], loops: int) -> torch.Tensor:
        return naive.forward(
            config or loaded.config, weights or loaded.tensors(dequantise=True), tokens, loops
        )

    deviation = selfcheck.verify(loaded, logits)
    assert deviation is not None
    return deviation


@pytest.fixture(params=["ouro-tiny", "huginn-tiny", "qwen3-tiny", "llama3-scaling-tiny"])
def converted(request: pytest.FixtureRequest, tmp_path: Path) -> Artifact:
    convert(GOLDENS / request.param, tmp_path / "a.tinyloop")
    return artifact.load(tmp_path / "a.tinyloop")


def swapped(weights: Weights, first: str, second: str) -> Weights:
    names = {
        n: n.replace(first, second) if first in n else n.replace(second, first) for n in weights
    }
    return {names[n]: w for n, w in weights.items()}


def test_the_right_arithmetic_passes(converted: Artifact) -> None:
    assert run(converted) < 1e-5


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
def test_it_is_computed_from_the_weights_as_stored(tmp_path: Path, dtype: str) -> None:
    convert(GOLDENS / "ouro-tiny", tmp_path / "a.tinyloop", Options(dtype=dtype))
    assert run(artifact.load(tmp_path / "a.tinyloop")) < 1e-5
    assert run(artifact.load(make(tmp_path / "b.tinyloop", variant="huginn", dtype=dtype))) < 1e-5


def test_swapped_gate_and_up_are_caught(converted: Artifact) -> None:
    weights = converted.tensors(dequantise=True)
    with pytest.raises(ArtifactError, match="TL015"):
        run(converted, weights=swapped(weights, ".mlp.gate.", ".mlp.up."))


def test_wrong_rotary_pairing_is_caught(converted: Artifact) -> None:
    pos = converted.config.arch.pos
    other: Pos = dataclasses.replace(
        pos, pairing="half" if pos.pairing == "interleaved" else "interleaved"
    )
    arch = dataclasses.replace(converted.config.arch, pos=other)
    with pytest.raises(ArtifactError, match="TL015"):
        run(converted, dataclasses.replace(converted.config, arch=arch))


def test_missing_rotary_scaling_is_caught(tmp_path: Path) -> None:
    convert(GOLDENS / "llama3-scaling-tiny", tmp_path / "a.tinyloop")
    loaded = artifact.load(tmp_path / "a.tinyloop")
    arch = dataclasses.replace(
        loaded.config.arch, pos=dataclasses.replace(loaded.config.arch.pos, scaling=None)
    )
    with pytest.raises(ArtifactError, match="TL015"):
        run(loaded, dataclasses.replace(loaded.config, arch=arch))


@pytest.mark.parametrize(
    "pair", [(".norm1.", ".norm3."), (".norm2.", ".norm4."), (".norm1.", ".norm2.")]
)
@pytest.mark.parametrize("name", ["ouro-tiny", "huginn-tiny"])
def test_norms_in_another_order_are_caught(
    tmp_path: Path, name: str, pair: tuple[str, str]
) -> None:
    convert(GOLDENS / name, tmp_path / "a.tinyloop")
    loaded = artifact.load(tmp_path / "a.tinyloop")
    with pytest.raises(ArtifactError, match="TL015"):
        run(loaded, weights=swapped(loaded.tensors(dequantise=True), *pair))


def test_the_other_kind_of_block_is_caught(tmp_path: Path) -> None:
    """The second norm before the addition (Ouro) and after it (Huginn) have the same tensors."""
    for name, other in (("ouro-tiny", "sum_post"), ("huginn-tiny", "branch_post")):
        convert(GOLDENS / name, tmp_path / "a.tinyloop")
        loaded = artifact.load(tmp_path / "a.tinyloop")
        arch = dataclasses.replace(loaded.config.arch, block=other)
        with pytest.raises(ArtifactError, match="TL015"):
            run(loaded, dataclasses.replace(loaded.config, arch=arch))


def test_swapped_state_and_embedding_are_caught(tmp_path: Path) -> None:
    convert(GOLDENS / "huginn-tiny", tmp_path / "a.tinyloop")
    loaded = artifact.load(tmp_path / "a.tinyloop")
    weights = loaded.tensors(dequantise=True)
    state, embedding = weights["inject.weight"].chunk(2, dim=1)
    with pytest.raises(ArtifactError, match="TL015"):
        run(loaded, weights=weights | {"inject.weight": torch.cat([embedding, state], dim=1)})


def test_not_a_number_is_caught_and_no_probe_is_no_fault(tmp_path: Path) -> None:
    loaded = artifact.load(make(tmp_path / "a.tinyloop"))
    with pytest.raises(ArtifactError, match="TL015"):
        selfcheck.verify(loaded, lambda tokens, loops: torch.full((len(tokens), 512), float("nan")))
    artifact.write(tmp_path / "b.tinyloop", loaded.config, loaded.tensors())
    bare = artifact.load(tmp_path / "b.tinyloop")
    assert selfcheck.verify(bare, lambda tokens, loops: pytest.fail("nothing to run")) is None


def test_it_is_small_and_uses_every_weight(tmp_path: Path) -> None:
    loaded = artifact.load(make(tmp_path / "a.tinyloop", variant="huginn"))
    blob = loaded.blob("probe.json")
    assert blob is not None and len(blob) < 4096
    assert (
        json.loads(blob)["loops"] == 2
    )  # loop 1 starts from zeros, which hides half of the injection
    base = loaded.tensors(dequantise=True)
    for name, weight in base.items():
        noisy = weight + weight.std().clamp(min=0.1) * torch.randn(
            weight.shape, generator=torch.Generator().manual_seed(1)
        )
        with pytest.raises(ArtifactError, match="TL015"):
            run(loaded, weights=base | {name: noisy})


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_one_can_be_added_to_an_artifact_without(tmp_path: Path, dtype: str) -> None:
    path = make(tmp_path / "a.tinyloop", variant="huginn", dtype=dtype)
    with_check = artifact.load(path)
    blobs = with_check.blobs()
    del blobs["blob.probe.json"]
    bare = artifact.write(tmp_path / "b.tinyloop", with_check.config, with_check.tensors(), blobs)
    assert selfcheck.add(tmp_path / "b.tinyloop") == with_check.digest != bare
    assert run(artifact.load(tmp_path / "b.tinyloop", verify=True)) < 1e-5
