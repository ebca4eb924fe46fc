"""The engine on a GPU against the engine on the CPU: every architecture in every KV mode that it can use.

Teacher-forced logits lie within the mode's tolerance, and the best token is the same wherever the CPU's margin is larger than that.
A mode that cuts numbers moves logits by itself, and a number that lies between two codes may be cut the other way: such modes may
differ by half of what they themselves change on the CPU.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from gpu_worker.kv_sizes import FORMATS, SHARES, unusable_reason
from gpu_worker.load_check import logits
from scripts.make_toy_artifact import VARIANTS, toy_config
from tests.gpu_worker.engine_helpers import collect, make_engine, make_run, random_prompt

pytestmark = pytest.mark.gpu

# Of the logits' spread. fp16 products of the fused kernels and fp16 weights of attention move logits by 1e-3.
TOLERANCE = {"fp32": 2e-3}
OF_HALVES = 2e-2
LENGTH, NUM_TOKENS, LOOPS = 150, 24, 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_cpus_in_every_mode(shared: Path, variant: str) -> None:
    for kv_format, kv_share in itertools.product(FORMATS, SHARES):
        if not unusable_reason(toy_config(variant), kv_format, kv_share):
            compare(shared, variant, kv_format, kv_share)


def compare(shared: Path, variant: str, kv_format: str, kv_share: str) -> None:
    how = {"kv_format": kv_format, "kv_share": kv_share}
    on_cpu = {"device": "cpu", "is_graphed": False}
    gpu = make_engine(shared, variant, device="cuda", is_graphed=True, **how)
    cpu = make_engine(shared, variant, **on_cpu, **how)
    config = cpu.model.config
    prompt = random_prompt(random.Random(3), config.arch.vocab, LENGTH)
    loops = min(LOOPS, config.loop.hard_max)
    ours, theirs = (logits(engine, prompt, loops).cpu() for engine in (gpu, cpu))
    allowed = TOLERANCE.get(kv_format, OF_HALVES) * float(theirs.std())
    if "int" in kv_format:
        exact = logits(make_engine(shared, variant, **on_cpu, kv_format="fp32"), prompt, loops)
        allowed = max(allowed, float((theirs - exact).abs().max()) / 2)
    error = float((ours - theirs).abs().max())
    assert error <= allowed, (kv_format, kv_share, error, allowed)
    best = theirs.topk(2).values
    is_sure = best[:, 0] - best[:, 1] > 2 * allowed
    assert torch.equal(ours.argmax(-1)[is_sure], theirs.argmax(-1)[is_sure]), (kv_format, kv_share)

    run = make_run(1, prompt, loops=loops, max_tokens=NUM_TOKENS)
    freely = [collect(engine, [run])[1].tokens for engine in (gpu, cpu)]
    same = next((i for i, (a, b) in enumerate(zip(*freely, strict=False)) if a != b), NUM_TOKENS)
    print(
        f"{variant} {kv_format} {kv_share}: logits within {error / float(theirs.std()):.1e}, {same} tokens free-running"
    )
