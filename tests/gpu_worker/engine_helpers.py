"""Builders for the engine's tests: runs, engines on toy artifacts, and what comes out of them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gpu_worker import artifact, naive
from gpu_worker.engine import Engine, EngineOptions
from scheduler.messages import Params, Run, TokenLogprob, Tokens
from scripts.make_toy_artifact import make

# The engine's tests say the same of every device: on a machine with a GPU they run there too with TINYLOOP_TEST_DEVICE=cuda.
DEVICE = os.environ.get("TINYLOOP_TEST_DEVICE", "cpu")
IS_GRAPHED = DEVICE == "cuda" or os.environ.get("TINYLOOP_TEST_GRAPHED") == "1"


def make_engine(
    tmp_path: Path, variant: str = "pre", overrides: dict[str, Any] | None = None, **options: Any
) -> Engine:
    """An engine on a toy artifact, made once per directory and variant."""
    path = tmp_path / f"{variant}-{abs(hash(str(overrides)))}.tinyloop"
    if not path.exists():
        make(path, variant=variant, **(overrides or {}))
    options = {
        "max_rows": 8, "num_blocks": 400, "max_seq_len": 256, "prefill_chunk": 128, "device": DEVICE, "is_graphed": IS_GRAPHED,
        "kv_format": os.environ.get("TINYLOOP_TEST_KV_FORMAT", "fp32"),
        "build_dir": os.environ.get("TINYLOOP_TEST_BUILD_DIR", ""),
        "max_speculating": 2, "max_waves": 2,
    } | options  # fmt: skip
    return Engine(artifact.load(path), EngineOptions(**options))


def make_run(
    sequence_id: int,
    prompt: Sequence[int],
    *,
    seed: int = 1,
    emitted: Sequence[int] = (),
    attempt: int = 1,
    **params: Any,
) -> Run:
    settings = {"loops": 2, "max_tokens": 8} | {
        k: v for k, v in params.items() if k not in ("prefix_id", "prefix_len", "store")
    }
    rest = {k: v for k, v in params.items() if k in ("prefix_id", "prefix_len", "store")}
    return Run(
        1, sequence_id, attempt, Tokens(prompt), Tokens(emitted), seed, Params(**settings), **rest
    )


def random_prompt(rng: random.Random, vocab: int, length: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


@dataclass
class Got:
    """All that an engine said about one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str = ""
    error_code: str = ""
    cached_tokens: int = 0
    core_loops: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    num_outputs: int = 0


def collect(
    engine: Engine,
    runs: Iterable[Run] = (),
    *,
    arrivals: Sequence[tuple[int, Run]] = (),
    max_steps: int = 5000,
) -> dict[int, Got]:
    """Steps the engine until it has no work; `arrivals` are (step, run) pairs. Requeues what it preempts, as a scheduler would."""
    got: dict[int, Got] = {}
    by_id = {run.sequence_id: run for run in [*runs, *(r for _, r in arrivals)]}
    for run in runs:
        engine.add(run)
    waiting: list[Run] = []
    for step in range(max_steps):
        for at, run in arrivals:
            if at == step:
                engine.add(run)
        if not engine.has_work() and not waiting and all(at <= step for at, _ in arrivals):
            return got
        if waiting and not engine.has_work():
            engine.add(waiting.pop(0))
        for output in engine.step().outputs:
            one = got.setdefault(output.sequence_id, Got())
            run = by_id[output.sequence_id]
            assert output.first_index == len(one.tokens) + len(run.emitted), (
                "a token was lost or doubled"
            )
            one.tokens += output.tokens
            one.logprobs += output.logprobs
            one.prompt_logprobs += output.prompt_logprobs
            one.cached_tokens += output.cached_tokens
            one.core_loops += output.core_loops
            one.drafted_tokens += output.drafted_tokens
            one.accepted_tokens += output.accepted_tokens
            one.rounds += output.rounds
            one.error_code = output.error_code
            one.num_outputs += 1
            if output.finish_reason == "preempted":
                emitted = Tokens([*run.emitted, *one.tokens])
                waiting.append(
                    Run(
                        1,
                        run.sequence_id,
                        run.attempt + 1,
                        run.prompt,
                        emitted,
                        run.seed,
                        run.params,
                    )
                )
            else:
                one.finish_reason = output.finish_reason
    raise AssertionError(f"still at work after {max_steps} steps")


def assert_greedy(engine: Engine, run: Run, tokens: Sequence[int], tolerance: float = 2e-3) -> None:
    """The oracle's word on a greedy token list, in one cache-free pass: each token is the largest of its logits (near ties pass)."""
    weights = engine_weights(engine)
    everything = [*run.prompt, *run.emitted, *tokens]
    logits = naive.forward(
        engine.model.config, weights, everything, run.params.loops, init_seed=run.params.init_seed
    )
    first = len(run.prompt) + len(run.emitted)
    for i, token in enumerate(tokens):
        row = logits[first + i - 1]
        assert row[token] >= row.max() - tolerance, (
            f"token {i} is {token}, the oracle says {int(row.argmax())}"
        )


def engine_weights(engine: Engine) -> Mapping[str, Tensor]:
    return engine.artifact.tensors(dequantise=True)
