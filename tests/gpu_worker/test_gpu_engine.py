"""The engine on a GPU against the engine on the CPU: every architecture in every KV mode that it can use.

Teacher-forced logits lie within the mode's tolerance, and the best token is the same wherever the CPU's margin is larger than that.
A mode that cuts numbers moves logits by itself, and a number that lies between two codes may be cut the other way: such modes may
differ by half of what they themselves change on the CPU.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.fused_model import AbsorbedModel, ClassedModel, FusedModel
from gpu_worker.kv_sizes import FORMATS, SHARES, unusable_reason
from gpu_worker.load_check import logits
from scheduler.messages import Tokens
from scripts.make_toy_artifact import VARIANTS, toy_config
from tests.gpu_worker.engine_helpers import collect, make_engine, make_run, random_prompt

pytestmark = pytest.mark.gpu

# Of the logits' spread. Rounding every operand of the CPU's products to halves, as fused kernels do, moves logits by up to 1.4e-2.
TOLERANCE = {"fp32": 2e-3}
OF_HALVES = 3e-2
LENGTH, NUM_TOKENS, LOOPS = 150, 24, 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


# Models that have fused kernels (few rows: one kernel for all, but not with such narrow heads) beside those that have not, with every
# kind of position.
MODELS: list[tuple[str, dict[str, Any]]] = [
    *((variant, {}) for variant in VARIANTS),
    ("pure", {"head_dim": 32}),
    ("pure", {"pos": "learned"}),
    ("pure", {"pos": "alibi"}),
]


@pytest.mark.parametrize(("variant", "overrides"), MODELS)
def test_logits_are_the_cpus_in_every_mode(
    shared: Path, variant: str, overrides: dict[str, Any]
) -> None:
    for kv_format, kv_share in itertools.product(FORMATS, SHARES):
        if not unusable_reason(toy_config(variant, **overrides), kv_format, kv_share):
            compare(shared, variant, overrides, kv_format, kv_share)


@pytest.mark.parametrize(
    ("overrides", "kv_format", "kind"),
    [
        ({}, "fp16", FusedModel),
        ({}, "int4", FusedModel),
        ({"head_dim": 32}, "fp16", FusedModel),
        ({"head_dim": 32}, "int4", FusedModel),
        ({"pos": "alibi"}, "fp16", FusedModel),
        ({"pos": "learned"}, "h", AbsorbedModel),
        ({"pos": "learned"}, "h_int4", AbsorbedModel),
    ],
)
def test_fused_rows_have_the_same_tokens_whatever_runs_beside_them(
    shared: Path, overrides: dict[str, Any], kv_format: str, kind: type[ClassedModel]
) -> None:
    """Of all depths at once, in two batches of unequal size and alone, in chunks, by guesses, and gone on with after a stop."""
    rng = random.Random(7)
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"speculation": "pipelined", "draft_loops": 1},
        {"speculation": "chain", "draft_loops": 1, "draft_ahead": 3},
    ]
    runs = [
        make_run(i, random_prompt(rng, 512, 20 + 11 * i), seed=i, loops=1 + i % 4, max_tokens=70, **ways[i % 2])
        for i in range(12)
    ]  # fmt: skip
    how: dict[str, Any] = {
        "device": "cuda",
        "is_graphed": True,
        "kv_format": kv_format,
        "num_blocks": 900,
    }
    roomy = make_engine(shared, "pure", overrides, max_rows=16, **how)
    assert type(roomy.model) is kind
    together = {i: got.tokens for i, got in collect(roomy, runs).items()}
    narrow = make_engine(shared, "pure", overrides, max_rows=2, prefill_chunk=64, **how)
    assert {i: got.tokens for i, got in collect(narrow, runs).items()} == together
    for run in runs[:4]:
        alone = collect(narrow, [replace(run, emitted=Tokens(together[run.sequence_id][:33]))])
        assert alone[run.sequence_id].tokens == together[run.sequence_id][33:]
        for way in ways[2:]:
            guessing = replace(run, params=replace(run.params, loops=4, **way))
            plain = replace(run, params=replace(run.params, loops=4))
            got, want = (collect(narrow, [one])[run.sequence_id].tokens for one in (guessing, plain))  # fmt: skip
            assert got == want, way


def compare(
    shared: Path, variant: str, overrides: dict[str, Any], kv_format: str, kv_share: str
) -> None:
    how = {"kv_format": kv_format, "kv_share": kv_share}
    on_cpu = {"device": "cpu", "is_graphed": False}
    gpu = make_engine(shared, variant, overrides, device="cuda", is_graphed=True, **how)
    cpu = make_engine(shared, variant, overrides, **on_cpu, **how)
    config = cpu.model.config
    prompt = random_prompt(random.Random(3), config.arch.vocab, LENGTH)
    loops = min(LOOPS, config.loop.hard_max)
    ours, theirs = (logits(engine, prompt, loops).cpu() for engine in (gpu, cpu))
    allowed = TOLERANCE.get(kv_format, OF_HALVES) * float(theirs.std())
    if "int" in kv_format:
        exact = logits(
            make_engine(shared, variant, overrides, **on_cpu, kv_format="fp32"), prompt, loops
        )
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
        f"{variant} {overrides} {kv_format} {kv_share}: logits within {error / float(theirs.std()):.1e}, {same} tokens free-running"
    )
