#!/usr/bin/env python3
"""Trains the embedded demo model on the text of demo_corpus.py and the pointing task of demo_texts.py.

  python scripts/demo_corpus.py                                  # text -> .demo/corpus.npz
  python scripts/train_demo.py --minutes 8 --out .demo/run       # on one GPU; resumes from .demo/run/checkpoint.pt
  python scripts/train_demo.py --export .demo/run --artifact gpu_worker/data/demo.tinyloop

Each step's text takes its own number of loops (1..8, often 8), some steps start tokens from carried-over states (warm
start), some read the last loop's K/V of earlier 64-blocks (last-loop sharing), and the last part trains on int8-rounded
weights. The pointing task is asked after every loop: loop t must hold the name t steps on, or the end once reached.
The schedule follows the clock: the run ends, evaluates and saves itself when its minutes are over.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_model import CONFIG, LoopedModel, fake_quantise, quantise, shift_states
from demo_texts import CHAINS, MAX_STEPS, PointTask
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

LOOPS = [1, 2, 3, 4, 5, 6, 7, 8]
LOOP_ODDS = [
    0.07,
    0.08,
    0.06,
    0.09,
    0.06,
    0.10,
    0.06,
    0.48,
]  # of the text; the pointing task takes all eight
EVAL_LOOPS = [1, 2, 4, 6, 8]
TASK_CHAINS = [
    CHAINS,
    (8, 6, 2),
    (7, 6, 3),
    (6, 6, 4),
    (8, 4, 4),
    (5, 5, 6),
    (8, 7, 1),
]  # as many names in each


@dataclass(frozen=True)
class Recipe:
    """What a run is made of; `minutes` of wall clock from start to the last save."""

    minutes: float = 8.0
    text_rows: int = 48
    text_length: int = 512
    task_rows: int = 40
    task_length: int = 256
    matrix_lr: float = 2.0e-3
    other_lr: float = 1.5e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    warmup_steps: int = 60
    decay_from: float = 0.25
    special_from: float = 0.3
    quantised_from: float = 0.9
    save_every_s: float = 240.0
    eval_every_s: float = 90.0
    reserve_s: float = 25.0
    seed: int = 1
    flex: bool = True


class Text:
    """Random rows of the training text, drawn per source by its weight; held-out rows in order."""

    def __init__(self, path: Path, device: torch.device, seed: int) -> None:
        with np.load(path) as z:
            self.tokens = torch.from_numpy(z["tokens"].astype(np.int32)).to(device)
            self.held = torch.from_numpy(z["held_out"].astype(np.int32)).to(device)
            self.meta = json.loads(bytes(z["meta"]))
        spans = np.array([source["train"] for source in self.meta["sources"]])
        mass = (spans[:, 1] - spans[:, 0]) * np.array(
            [source["weight"] for source in self.meta["sources"]]
        )
        self.spans, self.odds = spans, mass / mass.sum()
        self.rng = np.random.default_rng(seed)

    def batch(self, rows: int, length: int) -> Tensor:
        """(rows, length + 1) token ids."""
        source = self.rng.choice(len(self.odds), size=rows, p=self.odds)
        low, high = (
            self.spans[source, 0],
            np.maximum(self.spans[source, 1] - length - 1, self.spans[source, 0] + 1),
        )
        start = torch.from_numpy(self.rng.integers(low, high)).to(
            self.tokens.device, non_blocking=True
        )
        at = (start[:, None] + torch.arange(length + 1, device=start.device)).clamp_max(
            len(self.tokens) - 1
        )
        return self.tokens[at].long()

    def held_rows(self, source: dict[str, Any], length: int, at_most: int) -> Tensor:
        low, high = source["held"]
        count = min((high - low - 1) // length, at_most)
        return torch.stack(
            [self.held[low + i * length : low + (i + 1) * length + 1] for i in range(count)]
        ).long()


class Trainer:
    """Owns model, optimisers and the clock of one run."""

    def __init__(
        self, recipe: Recipe, folder: Path, corpus: Path, device: torch.device, started: float
    ) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        cuda = device.type == "cuda"
        dtype = torch.bfloat16 if cuda else torch.float32
        self.model = LoopedModel(
            CONFIG, compile_parts=cuda, flex=cuda and recipe.flex, dtype=dtype
        ).to(device)
        self.text = Text(corpus, device, recipe.seed)
        self.task = PointTask.from_tokenizer(
            Tokenizer.from_file(str(corpus.parent / "tokenizer.json"))
        )
        self.rng = np.random.default_rng(recipe.seed + 1)
        named = self.model.tensors()
        matrices = [p for n, p in named.items() if p.ndim == 2 and not n.startswith("embed")]
        others = [p for n, p in named.items() if p.ndim == 1 or n.startswith("embed")]
        muon = torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay, momentum=0.95,
                                nesterov=True, adjust_lr_fn="match_rms_adamw")  # fmt: skip
        adam = torch.optim.AdamW(
            others, lr=recipe.other_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=cuda
        )
        self.optimisers = [(muon, recipe.matrix_lr), (adam, recipe.other_lr)]
        self.matrices = [p for p in named.values() if p.ndim == 2]
        self.started, self.step, self.tokens_seen, self.before_s = started, 0, 0, 0.0
        self.good: dict[str, Tensor] = {}
        self.log_file = (folder / "log.jsonl").open("a")

    # -- the clock

    @property
    def elapsed_s(self) -> float:
        return self.before_s + time.monotonic() - self.started

    @property
    def progress(self) -> float:
        return min(1.0, self.elapsed_s / (self.recipe.minutes * 60.0 - self.recipe.reserve_s))

    def rate(self) -> float:
        """Learning-rate factor: a short warm-up, flat, then linear to zero by the clock."""
        warm = min(1.0, (self.step + 1) / self.recipe.warmup_steps)
        left = (1.0 - self.progress) / (1.0 - self.recipe.decay_from)
        return warm * min(1.0, max(left, 0.01))

    # -- one step

    def train_step(self) -> dict[str, float]:
        recipe = self.recipe
        for optimiser, lr in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr * self.rate()
        quantised = self.progress >= recipe.quantised_from
        masters = [p.data.clone() for p in self.matrices] if quantised else []
        if quantised:
            for p in self.matrices:
                p.data.copy_(fake_quantise(p.data))
        text_loops = int(self.rng.choice(LOOPS, p=LOOP_ODDS))
        kind = "plain"
        if self.progress >= recipe.special_from:
            kind = str(self.rng.choice(["plain", "warm", "shared"], p=[0.7, 0.14, 0.16]))
        text_loss = self.text_loss(text_loops, kind)
        text_loss.backward()
        task_loss = self.task_loss()
        task_loss.backward()
        if quantised:
            for p, master in zip(self.matrices, masters, strict=True):
                p.data.copy_(master)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser, _ in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens_seen += recipe.text_rows * recipe.text_length
        report = self.step % 20 == 0 or self.step <= 3
        if self.step % 100 == 0:
            self.keep_or_go_back(math.isfinite(norm.item()))
        values = (
            {"text": text_loss.item(), "task": task_loss.item(), "norm": norm.item()}
            if report
            else {}
        )
        return {"step": self.step, "loops": text_loops, "kind": kind, **values}  # type: ignore[dict-item]

    def keep_or_go_back(self, finite: bool) -> None:
        """After a number that is not finite: the last good weights, fresh moments and half the rate."""
        if finite:
            self.good = {name: p.data.clone() for name, p in self.model.tensors().items()}
            return
        print(f"step {self.step}: gradient not finite, going back")
        self.model.load(self.good)
        for optimiser, _ in self.optimisers:
            optimiser.state.clear()
        self.optimisers = [(optimiser, lr / 2) for optimiser, lr in self.optimisers]

    def text_loss(self, loops: int, kind: str) -> Tensor:
        recipe, model = self.recipe, self.model
        rows = self.text.batch(recipe.text_rows, recipe.text_length)
        tokens, targets = rows[:, :-1], rows[:, 1:]
        initial, earlier = None, None
        if kind != "plain":
            with torch.no_grad():
                final, last = model.states(tokens, loops)
            if kind == "warm":  # the prompt part of each row stays cold
                start = torch.randint(
                    0, recipe.text_length // 2, (len(tokens), 1), device=tokens.device
                )
                initial = shift_states(final, start)
            else:
                earlier = last
        state, _ = model.states(
            tokens, loops, initial=initial, earlier=earlier, dropout=recipe.dropout
        )
        losses, _ = model.loss(model.readout(state, recipe.dropout), targets.contiguous())
        return losses.mean()

    def task_loss(self) -> Tensor:
        """The pointing task, asked after every loop; a few rows also learn the wording of the questions."""
        recipe, model = self.recipe, self.model
        chains = TASK_CHAINS[int(self.rng.integers(len(TASK_CHAINS)))]
        lines = self.task.batch(self.rng, recipe.task_rows, recipe.task_length, chains)
        tokens, steps, path, at = (
            torch.from_numpy(a).to(self.device)
            for a in (lines.tokens, lines.steps, lines.path, lines.asked_at)
        )
        total = torch.zeros((), device=self.device)
        for loop, (state, _) in enumerate(model.unroll(tokens, max(LOOPS)), start=1):
            answers = path.gather(2, steps.clamp(max=loop)[:, :, None] - 1)
            losses, _ = model.loss(model.readout(state, at=at), answers)
            total = total + losses.mean() / max(LOOPS)
        few, asked = recipe.task_rows // 8, int(lines.asked_at[0]) + 1
        y = model.readout(state).view(*tokens.shape, -1)[:few, asked : lines.used - 1].flatten(0, 1)
        wording, _ = model.loss(y, tokens[:few, asked + 1 : lines.used])
        return total + 0.02 * wording.mean()

    # -- held-out figures

    @torch.no_grad()
    def evaluate(
        self, loops_list: list[int], rows_per_source: int, task_batches: int
    ) -> dict[str, Any]:
        """Held-out nats per token (by source and over all) and task accuracy (by hops and over all) for each depth."""
        out: dict[str, Any] = {}
        recipe = self.recipe
        for loops in loops_list:
            total, count, by_source = 0.0, 0, {}
            for source in self.text.meta["sources"]:
                if source["held"][1] - source["held"][0] <= recipe.text_length:
                    continue
                rows = self.text.held_rows(source, recipe.text_length, rows_per_source)
                padded = rows[torch.arange(recipe.text_rows, device=rows.device) % len(rows)]
                state, _ = self.model.states(padded[:, :-1].contiguous(), loops)
                losses, _ = self.model.loss(self.model.readout(state), padded[:, 1:].contiguous())
                losses = losses.view(recipe.text_rows, -1)[: min(len(rows), recipe.text_rows)]
                by_source[source["name"]] = round(float(losses.mean()), 4)
                total, count = total + float(losses.sum()), count + losses.numel()
            right, asked = np.zeros(MAX_STEPS + 1), np.zeros(MAX_STEPS + 1)
            rng = np.random.default_rng(10_000)
            for _ in range(task_batches):
                lines = self.task.batch(rng, recipe.task_rows, recipe.task_length)
                at, tokens = (
                    torch.from_numpy(a).to(self.device) for a in (lines.asked_at, lines.tokens)
                )
                state, _ = self.model.states(tokens, loops)
                answers = tokens[:, at + 1]
                _, best = self.model.loss(self.model.readout(state, at=at), answers)
                hit = (best == answers.flatten()).cpu().numpy()
                right += np.bincount(lines.steps.ravel()[hit], minlength=MAX_STEPS + 1)
                asked += np.bincount(lines.steps.ravel(), minlength=MAX_STEPS + 1)
            accuracy = right[1:] / np.maximum(asked[1:], 1)
            out[str(loops)] = {"loss": round(total / count, 4), "perplexity": round(math.exp(total / count), 3), **by_source,
                               "task": round(float(right[1:].sum() / asked[1:].sum()), 4),
                               "task_by_steps": [round(float(a), 3) for a in accuracy]}  # fmt: skip
        return out

    # -- saving

    def log(self, record: dict[str, Any]) -> None:
        self.log_file.write(json.dumps(record) + "\n")
        self.log_file.flush()

    def save(self) -> None:
        state = {"weights": self.model.tensors(), "optimisers": [o.state_dict() for o, _ in self.optimisers],
                 "step": self.step, "tokens_seen": self.tokens_seen, "elapsed_s": self.elapsed_s,
                 "rng": [self.rng.bit_generator.state, self.text.rng.bit_generator.state]}  # fmt: skip
        partial = self.folder / "checkpoint.partial"
        torch.save(state, partial)
        partial.replace(self.folder / "checkpoint.pt")

    def resume(self) -> bool:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location=self.device, weights_only=False)
        self.model.load(state["weights"])
        for (optimiser, _), saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.tokens_seen, self.before_s = (
            state["step"],
            state["tokens_seen"],
            state["elapsed_s"],
        )
        self.rng.bit_generator.state, self.text.rng.bit_generator.state = state["rng"]
        return True

    def start_from(self, artifact: Path) -> None:
        """Takes the weights of an earlier artifact; moments and clock begin anew."""
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from gpu_worker.artifact import load

        self.model.load(load(artifact).tensors(dequantise=True))

    def write_quantised(self, tensors: dict[str, Tensor]) -> None:
        """int8 weights and scales as two safetensors files, each under 16 MiB."""
        parts: list[dict[str, Tensor]] = [{}, {}]
        for name, weight in tensors.items():
            part = parts[0 if name.startswith(("embed", "prelude")) else 1]
            if weight.ndim == 2:
                q, scale = quantise(weight.detach())
                part[name], part[f"{name}.scale"] = q.cpu(), scale.cpu()
            else:
                part[name] = weight.detach().float().cpu()
        for i, part in enumerate(parts):
            save_file(part, self.folder / f"weights-{i}.safetensors")


def show_bar(trainer: Trainer, losses: dict[str, float], speed: float) -> None:
    filled = int(30 * trainer.progress)
    print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {trainer.elapsed_s:4.0f} s step {trainer.step:5} "
          f"text {losses['text']:.3f} task {losses['task']:.3f} {speed / 1e3:6.0f} k tok/s",
          end="\n" if not sys.stdout.isatty() else "", flush=True)  # fmt: skip


def train(
    recipe: Recipe, folder: Path, corpus: Path, device: torch.device, start_from: Path | None
) -> None:
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe, folder, corpus, device, started)
    if trainer.resume():
        print(f"resumed at step {trainer.step}, {trainer.elapsed_s:.0f} s")
    elif start_from is not None:
        trainer.start_from(start_from)
    saved = evaluated = shown = time.monotonic()
    seen, losses = trainer.tokens_seen, {"text": math.nan, "task": math.nan}
    while trainer.progress < 1.0:
        record = trainer.train_step()
        now = time.monotonic()
        if "text" in record:
            losses = record
            trainer.log({**record, "elapsed_s": round(trainer.elapsed_s, 1)})
            if now - shown > 10 or trainer.step <= 3:
                show_bar(trainer, losses, (trainer.tokens_seen - seen) / (now - shown))
                shown, seen = now, trainer.tokens_seen
        if now - evaluated > recipe.eval_every_s:
            figures = trainer.evaluate([1, 8], 16, 1)
            print("\nheld out", json.dumps(figures))
            trainer.log({"step": trainer.step, "held_out": figures})
            evaluated = time.monotonic()
        if now - saved > recipe.save_every_s:
            trainer.save()
            trainer.write_quantised(trainer.model.tensors())
            saved = time.monotonic()
    for p in trainer.matrices:
        p.data.copy_(fake_quantise(p.data))
    trainer.write_quantised(trainer.model.tensors())
    figures = trainer.evaluate(EVAL_LOOPS, 64, 4)
    summary = {"steps": trainer.step, "text_tokens": trainer.tokens_seen, "elapsed_s": round(trainer.elapsed_s, 1),
               "held_out": figures}  # fmt: skip
    trainer.log(summary)
    for loops, row in figures.items():
        print(loops, json.dumps(row))
    if device.type == "cuda":
        summary["gpu"] = torch.cuda.get_device_name()
        summary["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps({k: v for k, v in summary.items() if k != "held_out"}))
    trainer.save()


def export(folder: Path, corpus: Path, artifact: Path) -> None:
    """Packs a finished run as one .tinyloop file with tokenizer, chat template and generation defaults."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from demo_corpus import CHAT_TEMPLATE

    from gpu_worker import selfcheck
    from gpu_worker.artifact import ModelConfig, write

    tensors = load_file(folder / "weights-0.safetensors") | load_file(
        folder / "weights-1.safetensors"
    )
    with np.load(corpus) as z:
        meta = json.loads(bytes(z["meta"]))
    blobs = {
        "tokenizer.json": (corpus.parent / "tokenizer.json").read_bytes(),
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
        "generation.json": json.dumps({"temperature": 0.8, "top_p": 0.95}).encode(),
    }
    source = {
        "trained_by": "scripts/train_demo.py",
        "text": [{k: s[k] for k in ("name", "package", "licence")} for s in meta["sources"]],
    }
    artifact.parent.mkdir(parents=True, exist_ok=True)
    write(artifact, ModelConfig.from_json(json.dumps(CONFIG)), tensors, blobs, source)
    selfcheck.add(artifact)
    print(f"{artifact}: {artifact.stat().st_size / 2**20:.2f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=Recipe.minutes, help="wall clock of the whole run"
    )
    parser.add_argument("--corpus", type=Path, default=Path(".demo/corpus.npz"))
    parser.add_argument(
        "--out", type=Path, default=Path(".demo/run"), help="checkpoint, log, weights"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text-rows", type=int, default=Recipe.text_rows)
    parser.add_argument("--task-rows", type=int, default=Recipe.task_rows)
    parser.add_argument(
        "--reserve",
        type=float,
        default=Recipe.reserve_s,
        help="seconds kept for the last evaluation",
    )
    parser.add_argument("--rate", type=float, default=1.0, help="factor of both learning rates")
    parser.add_argument(
        "--start-from", type=Path, help="an earlier artifact whose weights to go on from"
    )
    parser.add_argument(
        "--plain-attention",
        action="store_true",
        help="no flex attention: slower, compiles anywhere",
    )
    parser.add_argument(
        "--export", type=Path, help="folder of a finished run: write --artifact and stop"
    )
    parser.add_argument("--artifact", type=Path, default=Path("gpu_worker/data/demo.tinyloop"))
    args = parser.parse_args()
    if args.export:
        export(args.export, args.corpus, args.artifact)
        return
    recipe = Recipe(minutes=args.minutes, text_rows=args.text_rows, task_rows=args.task_rows, reserve_s=args.reserve,
                    matrix_lr=Recipe.matrix_lr * args.rate, other_lr=Recipe.other_lr * args.rate,
                    flex=not args.plain_attention)  # fmt: skip
    train(recipe, args.out, args.corpus, torch.device(args.device), args.start_from)


if __name__ == "__main__":
    main()
