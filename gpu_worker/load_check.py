"""Runs the artifact's stored self-check through an engine: its own weights, kernels and paged cache, before it serves anyone."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import torch

from gpu_worker import selfcheck
from gpu_worker.batch import Batch, Work
from gpu_worker.engine import Engine
from gpu_worker.sequence import Sequence
from scheduler.messages import Params, Run, Tokens


def check(engine: Engine) -> float | None:
    """Compares the engine's logits with the stored ones.

    Returns:
        The largest deviation, None if the artifact has no self-check.

    Raises:
        ArtifactError: TL015: this engine computes another model than was converted.
    """
    return selfcheck.verify(
        engine.artifact,
        lambda tokens, loops: logits(engine, tokens, loops),
        engine.options.kv_format,
    )


@torch.inference_mode()
def logits(engine: Engine, tokens: Ordered[int], loops: int) -> torch.Tensor:
    """The engine's logits (len(tokens), vocab) at every position of one prompt; no sequence may be running."""
    slot = engine.cache.open(loops)
    try:
        engine.cache.extend(slot, len(tokens))
        run = Run(0, 0, 0, Tokens(tokens), Tokens(), 0, Params(loops=loops, max_tokens=1))
        batch = Batch([Work(Sequence(run, slot, False), 0, len(tokens))])
        batch.run(engine.model, engine.cache)
        return engine.model.logits(batch.y)
    finally:
        engine.cache.close(slot)
