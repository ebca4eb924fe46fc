"""The stored self-check: a tiny prompt and some of its logits, kept in the artifact and compared at every load.

The numbers come from the naive forward on the weights as they are stored (after rounding or quantising), so what they test is the
program that loads them: swapped gate and up, another rotary pairing or another order of norms are off by far more than rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_worker import artifact as artifacts
from gpu_worker import naive
from gpu_worker.artifact import Artifact
from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.model_config import ModelConfig
from gpu_worker.quantise import stored_values
from gpu_worker.tensor_table import check_finite, storage_dtype

NUM_TOKENS = 12
NUM_IDS = 48  # logits kept per position
# Largest deviation allowed, in standard deviations of the logits. Wide enough for kernels that multiply in the weights' own type.
TOLERANCE = {"fp32": 2e-3, "fp16": 2e-2, "bf16": 6e-2, "int8": 6e-2}

LogitsFn = Callable[[Sequence[int], int], torch.Tensor]  # (tokens, loops) -> (len(tokens), vocab)


class StoredForm(Mapping[str, torch.Tensor]):
    """Weights in fp32 as they will read after being stored in the configuration's dtype, made one at a time when looked up."""

    def __init__(
        self, config: ModelConfig, make: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]]
    ) -> None:
        self._config = config
        self._make = make

    def __getitem__(self, name: str) -> torch.Tensor:
        given = self._make[name]
        weight = given if isinstance(given, torch.Tensor) else given()
        dtype = storage_dtype(self._config, name)
        values = weight if weight.dtype == dtype == torch.float32 else stored_values(weight, dtype)
        check_finite(name, values, sample=False)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)

    def __contains__(self, name: object) -> bool:
        return name in self._make


def fewest_loops(config: ModelConfig) -> int:
    """The fewest loops that use every weight: 2 where the embeddings are injected, as loop 1 may start from zeros."""
    return 1 if config.loop.inject == "none" else min(2, config.loop.hard_max)


def make(config: ModelConfig, weights: naive.Weights) -> bytes:
    """The self-check (`probe.json`) of a model. `weights` are fp32, as stored (see `StoredForm`)."""
    count = min(NUM_TOKENS, config.arch.max_pos)
    tokens = [(7919 * i + 13) % config.arch.vocab for i in range(count)]
    loops = fewest_loops(config)
    logits = naive.forward(config, weights, tokens, loops)
    likely = logits[-1].topk(min(NUM_IDS // 3, config.arch.vocab)).indices.tolist()
    spread = torch.linspace(0, config.arch.vocab - 1, NUM_IDS - len(likely)).long().tolist()
    ids = sorted({*likely, *spread})
    positions = sorted({count // 4, count // 2, count - 1})
    probe = {
        "tokens": tokens,
        "loops": loops,
        "positions": positions,
        "ids": ids,
        "logits": [[round(v, 6) for v in logits[p, ids].tolist()] for p in positions],
        "tolerance": round(TOLERANCE[config.dtype] * max(float(logits.std()), 1e-3), 6),
    }
    return json.dumps(probe, separators=(",", ":"), sort_keys=True).encode()


def add(path: str | Path) -> str:
    """Gives an artifact a self-check, or a new one, from the weights that it holds; returns its new digest.

    Raises:
        ArtifactError: the artifact is faulty.
    """
    loaded = artifacts.load(path, verify=True)
    blobs = loaded.blobs() | {
        "blob.probe.json": make(loaded.config, loaded.tensors(dequantise=True))
    }
    return artifacts.write(path, loaded.config, loaded.tensors(), blobs, loaded.source)


def verify(artifact: Artifact, logits_fn: LogitsFn, kv_format: str = "fp32") -> float | None:
    """Runs the stored prompt through `logits_fn` and compares. What keeps K, V or inputs in halves is allowed what fp16 weights are.

    Returns:
        The largest deviation, or None if the artifact has no self-check.

    Raises:
        ArtifactError: TL015 if it exceeds the stored tolerance.
    """
    blob = artifact.blob("probe.json")
    if blob is None:
        return None
    probe: dict[str, Any] = json.loads(blob)
    found = logits_fn(probe["tokens"], probe["loops"]).detach().float().cpu()
    found = found[probe["positions"]][:, probe["ids"]]
    deviation = float((found - torch.tensor(probe["logits"])).abs().max())
    allowed = probe["tolerance"]
    if kv_format != "fp32":
        allowed *= max(1.0, TOLERANCE["fp16"] / TOLERANCE[artifact.config.dtype])
    if not deviation <= allowed:  # NaN fails too
        raise ArtifactError(
            "TL015",
            f"logits of the stored prompt are off by {deviation:.3g}, allowed are {allowed:.3g}",
            "this program computes the model differently than it was converted: convert again, or report it with the artifact's digest",
        )
    return deviation
