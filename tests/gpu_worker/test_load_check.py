"""The self-check through the real engine: right for every kind of model, and it catches weights that are not where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker import artifact, load_check, naive
from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.convert import convert
from gpu_worker.engine import Engine, EngineOptions
from gpu_worker.kv_sizes import FORMATS, unusable_reason
from scripts.make_toy_artifact import VARIANTS, make
from tests.gpu_worker.engine_helpers import collect, make_run

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"


def engine_on(path: Path, kv_format: str = "fp32") -> Engine:
    options = EngineOptions(max_rows=4, num_blocks=200, max_seq_len=128, kv_format=kv_format)
    return Engine(artifact.load(path), options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_model_passes(tmp_path: Path, variant: str) -> None:
    engine = engine_on(make(tmp_path / "a.tinyloop", variant=variant))
    deviation = load_check.check(engine)
    assert deviation is not None and deviation < 1e-3
    assert engine.cache.pool.num_used == 0
    tokens = [5, 9, 200, 41, 3]
    want = naive.forward(
        engine.artifact.config, engine.artifact.tensors(dequantise=True), tokens, 1
    )
    torch.testing.assert_close(load_check.logits(engine, tokens, 1), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_model_passes_in_every_kv_format(tmp_path: Path, variant: str) -> None:
    path = make(tmp_path / "a.tinyloop", variant=variant)
    config = artifact.load(path).config
    for kv_format in FORMATS:
        if not unusable_reason(config, kv_format, "per_loop"):
            assert load_check.check(engine_on(path, kv_format)) is not None, kv_format


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_loaded_model_does_not_care_what_becomes_of_its_file(
    tmp_path: Path, variant: str, dtype: str
) -> None:
    path = make(tmp_path / "a.tinyloop", variant=variant, dtype=dtype)
    engine = engine_on(path)
    tokens = [5, 9, 200, 41, 3]
    before = load_check.logits(engine, tokens, 1)
    with path.open("r+b") as file:  # in place, as `cp` does: a memory map of it would change
        file.write(bytes(path.stat().st_size))
    assert torch.equal(load_check.logits(engine, tokens, 1), before)


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("ouro-tiny", (".mlp.gate.", ".mlp.up.")),
        ("ouro-tiny", (".norm2.", ".norm4.")),
        ("huginn-tiny", (".norm1.", ".norm2.")),
        ("llama-tiny", (".norm1.", ".norm3.")),
    ],
)
def test_swapped_weights_are_caught_at_load(
    tmp_path: Path, name: str, pair: tuple[str, str]
) -> None:
    convert(GOLDENS / name, tmp_path / "a.tinyloop")
    good = artifact.load(tmp_path / "a.tinyloop")
    first, second = pair
    swapped = {
        n.replace(first, second) if first in n else n.replace(second, first): w
        for n, w in good.tensors().items()
    }
    artifact.write(
        tmp_path / "b.tinyloop",
        good.config,
        swapped,
        {"probe.json": good.blob("probe.json") or b""},
    )
    for kv_format in ("fp32", "fp16"):
        with pytest.raises(ArtifactError, match="TL015"):
            load_check.check(engine_on(tmp_path / "b.tinyloop", kv_format))


def test_the_engine_serves_as_before_after_it(tmp_path: Path) -> None:
    path = make(tmp_path / "a.tinyloop", variant="huginn")
    checked, plain = engine_on(path), engine_on(path)
    load_check.check(checked)
    run = make_run(1, [7, 8, 9], loops=3, max_tokens=12)
    assert collect(checked, [run])[1].tokens == collect(plain, [run])[1].tokens
