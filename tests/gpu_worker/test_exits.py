"""Adaptive exits and warm start against a slow restatement: one token at a time, every earlier K and V recomputed from its rule."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gpu_worker import naive
from gpu_worker.engine import Engine
from gpu_worker.model_config import ModelConfig
from scheduler.messages import Run, Tokens
from tests.gpu_worker.engine_helpers import (
    collect,
    engine_weights,
    make_engine,
    make_run,
    random_prompt,
)
from tests.gpu_worker.test_goldens_engine import GOLDENS, run_prompts
from tests.gpu_worker.test_goldens_engine import make_engine as make_golden_engine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


class Slow:
    """One sequence decoded from its definition: lists of K and V per (stage, layer, loop), one position at a time, in fp64."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], how: Any) -> None:
        self.model = naive._Model(config, weights, torch.ones(1, 1, dtype=torch.bool))
        self.config, self.how = config, how
        self.kv: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        self.position = 0
        self.carried: Tensor | None = None

    def stage(self, stage: str, loop: int, x: Tensor) -> Tensor:
        """One token (1, d) through the layers of a stage; appends or replaces its K and V at this loop."""
        m, arch = self.model, self.config.arch
        for i in range(getattr(self.config.stages, stage)):
            at = f"{stage}.{i}"

            def attend(at: str, x: Tensor) -> Tensor:
                q, k, v = (
                    m.linear(f"{at}.attn.{n}", x, getattr(arch, f"{n}_bias")).view(
                        1, -1, arch.head_dim
                    )
                    for n in "qkv"
                )
                if arch.qk_norm:
                    q = naive._rms(q, arch.norm_eps) * m.w[f"{at}.attn.q_norm.weight"]
                    k = naive._rms(k, arch.norm_eps) * m.w[f"{at}.attn.k_norm.weight"]
                if arch.qk_bias:
                    q, k = q + m.w[f"{at}.attn.qk_bias"][0], k + m.w[f"{at}.attn.qk_bias"][1]
                if arch.pos.kind == "rope":
                    angles = naive.rotary_angles(arch, self.position + 1)[-1:]
                    q, k = (naive.rotate(t, angles, arch.pos.pairing) for t in (q, k))
                rows = self.kv.setdefault((at, loop), [])
                del rows[self.position :]
                rows.append((k[0], v[0]))
                keys, values = (torch.stack(t) for t in zip(*rows, strict=True))
                heads = []
                for h in range(arch.n_heads):
                    g = h * arch.n_kv_heads // arch.n_heads
                    scores = keys[:, g] @ q[0, h] / math.sqrt(arch.head_dim)
                    if arch.pos.kind == "alibi":
                        distance = self.position - torch.arange(self.position + 1)
                        scores = scores - naive.alibi_slopes(arch.n_heads)[h] * distance
                    heads.append(scores.softmax(0) @ values[:, g])
                return m.linear(f"{at}.attn.o", torch.cat(heads)[None], arch.o_bias)

            m.attention = attend  # type: ignore[method-assign]
            x = m.block(at, x)
        return x

    def token(self, token: int, loops: int, is_read: bool, is_prompt: bool) -> tuple[Tensor, int]:
        """Runs the next token; returns (logits it is read with, loops computed)."""
        m, loop_config, how = self.model, self.config.loop, self.how
        embedded = m.w["embed.weight"][token][None]
        if self.config.arch.embed_rank:
            embedded = embedded @ m.w["embed.proj.weight"].T
        embedded = embedded * self.config.arch.embed_scale
        if self.config.arch.pos.kind == "learned":
            embedded = embedded + m.w["pos.weight"][self.position]
        embedded = self.stage("prelude", 0, embedded)
        state = embedded if loop_config.state_init.kind == "embed" else torch.zeros_like(embedded)
        if how.warm_start and not is_prompt:
            assert self.carried is not None
            state = self.carried
        read, read_state, computed, before, staying = None, state, loops, None, 1.0
        for t in range(1, loops + 1):
            previous = state
            x = state
            if loop_config.inject == "add":
                x = state + embedded
            elif loop_config.inject == "concat":
                x = torch.cat([state, embedded], dim=1) @ m.w["inject.weight"].T
            state = self.stage("core", t, x)
            if loop_config.norm_each:
                state = m.norm("norm", state)
            if read is None:
                leaves = False
                if how.exit_kind == "gate":
                    staying *= 1 - float(m.gate(state))
                    leaves = 1 - staying >= how.exit_threshold and how.exit_threshold < 1
                elif how.exit_kind == "latent":
                    leaves = float((state - previous).norm() / state.norm()) < how.exit_threshold
                elif how.exit_kind == "kl":
                    p = self.logits(state).log_softmax(-1)
                    if before is not None:
                        leaves = float((before.exp() * (before - p)).sum()) < how.exit_threshold
                    before = p
                if is_read and leaves and how.min_loops <= t < loops:
                    read, read_state = self.logits(state), state
                    if how.exit_kv == "copy" and not is_prompt:
                        computed = t
                        for i in range(self.config.stages.core):
                            for later in range(t + 1, loops + 1):
                                rows = self.kv.setdefault((f"core.{i}", later), [])
                                del rows[self.position :]
                                rows.append(self.kv[f"core.{i}", t][self.position])
                        break
        if read is None or is_prompt:
            final = self.logits(state)
            read_state = state if read is None else read_state
            read = final if read is None else read
        if how.exit_kind != "none" and not is_prompt:
            self.logits(read_state)  # the coda keeps what was read
        is_raw = loop_config.warm_start == "raw" or loop_config.norm_each
        self.carried = read_state if is_raw else m.norm_core(read_state)
        self.position += 1
        return read, computed

    def logits(self, state: Tensor) -> Tensor:
        m = self.model
        y = self.stage("coda", 0, m.norm_core(state) if self.config.loop.norm_after_core else state)
        if not (self.config.loop.norm_each and self.config.stages.coda == 0):
            y = m.norm("norm", y)
        if not self.config.arch.tied_head:
            return (y @ m.w["head.weight"].T)[0]
        if self.config.arch.embed_rank:
            y = y @ m.w["embed.proj.weight"]
        return (y @ m.w["embed.weight"].T)[0]


@dataclass
class Told:
    margins: list[float]  # how far each token's logit lies below the largest
    loops: int  # computed for the tokens' rows


def retell(engine: Engine, run: Run, tokens: Sequence[int]) -> Told:
    """What the definition says of a greedy token list."""
    weights = dict(engine_weights(engine))
    slow = Slow(engine.artifact.config, weights, run.params)
    told = Told([], 0)
    everything = [*run.prompt, *tokens]
    with torch.no_grad():
        for p, token in enumerate(everything[:-1]):
            is_prompt, is_read = p < len(run.prompt), p >= len(run.prompt) - 1
            logits, computed = slow.token(token, run.params.loops, is_read, is_prompt)
            if is_read:
                told.margins.append(float(logits.max() - logits[everything[p + 1]]))
                told.loops += computed
    return told


CASES = [
    ("ouro", {"exit_kind": "gate", "exit_threshold": 0.6}),
    ("gate_coda", {"exit_kind": "gate", "exit_threshold": 0.7, "min_loops": 2}),
    ("pre", {"exit_kind": "latent", "exit_threshold": 0.36}),
    ("learned", {"exit_kind": "latent", "exit_threshold": 0.9, "min_loops": 3}),
    ("relu2", {"exit_kind": "kl", "exit_threshold": 0.7}),
    ("gelu_tanh", {"exit_kind": "kl", "exit_threshold": 0.08, "min_loops": 2}),
    ("learned", {"warm_start": True}),
    ("huginn", {"warm_start": True}),
    ("huginn", {"warm_start": True, "exit_kind": "latent", "exit_threshold": 0.95}),
]


@pytest.mark.parametrize("exit_kv", ["complete", "copy"])
@pytest.mark.parametrize(("variant", "how"), CASES)
def test_tokens_and_loops_are_those_of_the_definition(
    shared: Path, variant: str, how: dict[str, Any], exit_kv: str
) -> None:
    engine = make_engine(shared, variant)
    prompt = random_prompt(random.Random(variant), 512, 70)
    run = make_run(1, prompt, loops=5, max_tokens=14, exit_kv=exit_kv, **how)
    got = collect(engine, [run])[1]
    told = retell(engine, run, got.tokens)
    assert max(told.margins) < 2e-3
    assert got.core_loops == told.loops
    if "exit_kind" in how:
        full = len(got.tokens) * 5
        assert got.core_loops < full if exit_kv == "copy" else got.core_loops == full


@pytest.mark.parametrize(("variant", "how"), CASES)
def test_exits_and_warm_starts_are_the_same_alone_in_batches_and_after_preemption(
    shared: Path, variant: str, how: dict[str, Any]
) -> None:
    rng = random.Random(variant)
    runs = []
    for i, length in enumerate((64, 30, 127, 128)):
        settings = {
            "loops": 4,
            "max_tokens": rng.randrange(20, 50),
            **how,
            "exit_kv": ("copy", "complete")[i // 2],
        }
        settings |= {"temperature": 0.8, "frequency_penalty": 0.3} if i % 2 else {}
        runs.append(make_run(i, random_prompt(rng, 512, length), seed=i, **settings))
    plain = make_run(9, random_prompt(rng, 512, 40), loops=3, max_tokens=30)
    engine = make_engine(shared, variant)
    together = collect(engine, [*runs, plain])
    assert together[9].tokens == collect(engine, [plain])[9].tokens
    tight = collect(make_engine(shared, variant, num_blocks=26, prefill_chunk=64), runs)
    for run in runs:
        tokens = together[run.sequence_id].tokens
        assert collect(engine, [run])[run.sequence_id].tokens == tokens
        assert tight[run.sequence_id].tokens == tokens
        for done in (1, len(tokens) // 2):
            rest = collect(engine, [replace(run, emitted=Tokens(tokens[:done]))])[run.sequence_id]
            assert rest.tokens == tokens[done:]


def test_upstreams_tokens_with_exits(shared: Path) -> None:
    """Ouro's own early exit at 0.5: every K and V at full depth, each token read at its exit loop."""
    expected = load_file(GOLDENS / "ouro-tiny" / "expected.safetensors")
    engine = make_golden_engine(shared, "ouro-tiny")
    how = {"loops": 4, "exit_kind": "gate", "exit_threshold": 0.5}
    for row, got in enumerate(run_prompts(engine, expected["input_ids"].tolist(), **how)):
        assert got.tokens == expected["greedy_ids.q0.5"][row].tolist()
    off = run_prompts(engine, expected["input_ids"].tolist(), **how | {"exit_threshold": 1.0})
    for row, got in enumerate(off):
        assert got.tokens == expected["greedy_ids.loops4"][row].tolist()


@pytest.mark.parametrize(
    ("variant", "how", "word"),
    [
        ("pre", {"exit_kind": "gate", "exit_threshold": 0.5}, "exit gate"),
        ("pre", {"warm_start": True}, "warm start"),
        ("ouro", {"warm_start": True}, "warm start"),
        ("learned", {"warm_start": True, "speculation": "chain"}, "side by side"),
        ("pre", {"exit_kind": "kl", "exit_threshold": 0.1, "speculation": "tree"}, "side by side"),
        ("pre", {"min_loops": 5}, "min_loops"),
        ("pre", {"exit_kv": "keep"}, "exit_kv"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(
    shared: Path, variant: str, how: dict[str, Any], word: str
) -> None:
    engine = make_engine(shared, variant)
    engine.add(make_run(1, [1, 2, 3], loops=4, **how))
    (output,) = engine.step().outputs
    assert output.error_code == "invalid_request" and word in output.error_message
