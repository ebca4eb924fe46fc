#!/usr/bin/env python3
"""Held-out perplexity and pointing-task accuracy of the demo artifact against the number of loops.

Reads the artifact and the corpus of demo_corpus.py; computes in parallel over positions with demo_model.py, which is
bound to the served arithmetic by `--check` (logits beside gpu_worker/naive.py). Three ways of reading:
plain; warm (each token starts from the state before it, as `warm_start` does); shared (blocks before a token's own are
read at their last loop, as TINYLOOP_KV_SHARE=last_loop does for generated tokens). Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_model import LoopedModel, shift_states
from demo_texts import CHAINS, MAX_STEPS, PointTask
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_worker import naive  # noqa: E402
from gpu_worker.artifact import Artifact, load  # noqa: E402

MODES = ("plain", "warm", "shared")


def model_of(artifact: Artifact) -> LoopedModel:
    model = LoopedModel(json.loads(artifact.config.to_json()))
    model.load(artifact.tensors(dequantise=True))  # type: ignore[arg-type]
    return model


@torch.no_grad()
def final_states(model: LoopedModel, tokens: Tensor, loops: int, mode: str) -> Tensor:
    """States (rows, length, d) after `loops` loops in one of MODES."""
    state, last = model.states(tokens, loops)
    if mode == "warm":
        for _ in range(2):  # a chain of carried-over states, followed to second order
            state, _ = model.states(tokens, loops, initial=shift_states(state))
    elif mode == "shared":
        state, _ = model.states(tokens, loops, earlier=last)
    return state


@torch.no_grad()
def token_losses(model: LoopedModel, rows: Tensor, loops: int, mode: str) -> Tensor:
    """Nats (rows, length - 1) of each next token of `rows`."""
    targets = rows[:, 1:].contiguous()
    losses, _ = model.loss(
        model.readout(final_states(model, rows[:, :-1].contiguous(), loops, mode)), targets
    )
    return losses.view_as(targets)


def held_out(path: Path, length: int, per_source: int) -> dict[str, Tensor]:
    """Rows (count, length + 1) of each source's held-out works, spread over them."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing: make it with scripts/demo_corpus.py")
    with np.load(path) as z:
        held, meta = z["held_out"].astype(np.int64), json.loads(bytes(z["meta"]))
    rows = {}
    for source in meta["sources"]:
        low, high = source["held"]
        count = (high - low - 1) // length
        if count > 0:
            picks = np.linspace(0, count - 1, min(count, per_source)).astype(int)
            parts = [held[low + i * length : low + (i + 1) * length + 1] for i in picks]
            rows[source["name"]] = torch.from_numpy(np.stack(parts))
    return rows


def perplexities(
    model: LoopedModel, rows: dict[str, Tensor], loops: int, mode: str
) -> dict[str, float]:
    """Perplexity of each source and of all rows together."""
    out, total, count = {}, 0.0, 0
    for name, part in rows.items():
        losses = torch.cat([token_losses(model, chunk, loops, mode) for chunk in part.split(4)])
        out[name] = math.exp(losses.mean().item())
        total, count = total + losses.sum().item(), count + losses.numel()
    return {"all": math.exp(total / count), **out}


@torch.no_grad()
def accuracy(model: LoopedModel, task: PointTask, loops: int, rows: int) -> list[float]:
    """Share of right answers for 1..MAX_STEPS steps; each row has one question, the same at all depths."""
    lines = task.batch(np.random.default_rng(20_000), rows, 128, most=1)
    at, hits = torch.from_numpy(lines.asked_at), []
    for tokens in torch.from_numpy(lines.tokens[:, : lines.used]).split(32):
        answers = tokens[:, at + 1]
        _, best = model.loss(
            model.readout(final_states(model, tokens, loops, "plain"), at=at), answers
        )
        hits.append(best == answers.flatten())
    steps, hit = lines.steps.ravel(), torch.cat(hits).numpy()
    asked = np.bincount(steps, minlength=MAX_STEPS + 1)[1:]
    return [
        float(a)
        for a in np.bincount(steps[hit], minlength=MAX_STEPS + 1)[1:] / np.maximum(asked, 1)
    ]


def check(artifact: Artifact, model: LoopedModel, tokens: list[int], loops: int) -> float:
    """Largest difference of logits from the oracle's, over the largest logit."""
    want = naive.forward(artifact.config, artifact.tensors(dequantise=True), tokens, loops)
    got = model.logits(torch.tensor([tokens]), loops)[0]
    return float((got - want).abs().max() / want.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, default=Path("gpu_worker/data/demo.tinyloop"))
    parser.add_argument("--corpus", type=Path, default=Path(".demo/corpus.npz"))
    parser.add_argument("--loops", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rows", type=int, default=12, help="held-out rows of each source")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--task-rows", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--check", action="store_true", help="only compare logits with gpu_worker/naive.py"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    artifact = load(args.artifact)
    model = model_of(artifact)
    text = artifact.blob("tokenizer.json")
    assert text is not None, "the demo artifact carries its tokenizer"
    tokenizer = Tokenizer.from_str(text.decode())
    if args.check:
        tokens = tokenizer.encode(
            "It is a truth universally acknowledged, that a small model in want of depth must loop."
        ).ids
        for loops in (1, 3, 8):
            print(
                f"{loops} loops: largest difference / largest logit {check(artifact, model, tokens, loops):.2e}"
            )
        return
    rows, task = held_out(args.corpus, args.length, args.rows), PointTask.from_tokenizer(tokenizer)
    print(f"{artifact.config.name} {artifact.digest[:12]}: {sum(r[:, 1:].numel() for r in rows.values()):,} held-out tokens "
          f"in rows of {args.length}; {args.task_rows} rows of chains {CHAINS}")  # fmt: skip
    names = ["all", *rows]
    print(
        f"{'loops':>5} {'mode':8}"
        + "".join(f"{name[:14]:>16}" for name in names)
        + "   pointing task (by steps)"
    )
    figures: dict[str, Any] = {}
    for mode in args.modes:
        for loops in args.loops:
            began = time.monotonic()
            row: dict[str, Any] = {"perplexity": perplexities(model, rows, loops, mode)}
            line = f"{loops:5} {mode:8}" + "".join(
                f"{row['perplexity'][name]:16.3f}" for name in names
            )
            if mode == "plain":
                row["task_by_steps"] = accuracy(model, task, loops, args.task_rows)
                row["task"] = sum(row["task_by_steps"]) / MAX_STEPS
                line += f"   {row['task']:6.1%}  " + " ".join(
                    f"{a:4.0%}" for a in row["task_by_steps"]
                )
            row["seconds"] = round(time.monotonic() - began, 1)
            figures[f"{mode}-{loops}"] = row
            print(line, flush=True)
    print(json.dumps({"artifact": artifact.digest[:12], "length": args.length, "figures": figures}))


if __name__ == "__main__":
    main()
