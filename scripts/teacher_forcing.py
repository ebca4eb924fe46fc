"""Known text through the engine's own batches and cache, token by token as if each had been generated: what the evaluations share.

Owns no arithmetic: rows, exits, cache forms and sharing are those that serve requests.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_worker import sampler  # noqa: E402
from gpu_worker.artifact import Artifact  # noqa: E402
from gpu_worker.batch import Batch, Work  # noqa: E402
from gpu_worker.engine import Engine, EngineOptions  # noqa: E402
from gpu_worker.exits import is_sequential  # noqa: E402
from gpu_worker.sequence import Sequence as Running  # noqa: E402
from scheduler.messages import Params, Run, Tokens  # noqa: E402

NUM_PROMPT = 64  # the rest of a row counts as generated


@dataclass
class Read:
    """One row of text. `losses` are nats of tokens NUM_PROMPT, NUM_PROMPT + 1, ... given all before."""

    losses: list[float] = field(default_factory=list)
    computed_loops: int = 0
    head_reads: int = 0  # to decide on exits, beyond one for each token
    bytes_at: dict[int, int] = field(default_factory=dict)
    step_ms_at: dict[int, float] = field(default_factory=dict)


def make_engine(artifact: Artifact, length: int, kv_format: str, kv_share: str) -> Engine:
    """An engine with room for one row."""
    return Engine(
        artifact,
        EngineOptions(kv_format=kv_format, kv_share=kv_share, max_rows=1, max_seq_len=length),
    )


@torch.inference_mode()
def read(engine: Engine, tokens: Sequence[int], params: Params, marks: Sequence[int] = ()) -> Read:
    """Runs one row and scores it.

    At each of `marks`, numbers of tokens, the sequence's bytes are taken while its last block is open, and the 4 tokens before run one
    at a time, under the clock of this process.
    """
    run = Run(1, 1, 1, Tokens(tokens[:NUM_PROMPT]), Tokens(tokens[NUM_PROMPT:]), 1, params)
    slot = engine.cache.open(params.loops)
    running = Running(run, slot, is_sequential(params, engine.model.has_coda))
    result = Read()
    while running.num_computed < len(tokens):
        start, end = running.num_computed, running.next_end(256)
        for mark in marks:
            if start < mark - 4 < end:
                end = mark - 4
            elif mark - 4 <= start < mark:
                end = start + 1
        engine.cache.extend(slot, end)
        if end in marks:
            result.bytes_at[end] = engine.cache.slot_bytes(slot)
        batch = Batch([Work(running, start, end)])
        began = time.process_time()
        batch.run(engine.model, engine.cache)
        for mark in marks:
            if mark - 4 <= start < mark:
                spent = 1000 * (time.process_time() - began)
                result.step_ms_at[mark] = min(spent, result.step_ms_at.get(mark, spent))
        running.num_computed = end
        engine.cache.settle(slot, end)
        if not running.is_prefilling:
            engine.cache.fold(slot, end)
        if start >= NUM_PROMPT:
            result.computed_loops += int(batch.computed_loops.sum())
            result.head_reads += batch.num_head_reads
        rows = range(max(start, NUM_PROMPT - 1), min(end, len(tokens) - 1))
        if len(rows):
            logits = engine.model.logits(batch.y[rows.start - start : rows.stop - start])
            targets = [tokens[p + 1] for p in rows]
            scored = sampler.log_probabilities(engine.model.ops, logits, targets, [0] * len(rows))
            result.losses += [-s.logprob for s in scored]
    engine.cache.close(slot)
    return result


def held_out(path: Path, length: int, count: int) -> list[list[int]]:
    """`count` rows of held-out tokens, one from each of the sources with the most of them (then a second from each)."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing: make it with scripts/demo_corpus.py")
    with np.load(path) as z:
        held, meta = z["held_out"].astype(int), json.loads(bytes(z["meta"]))
    spans = sorted((s["held"] for s in meta["sources"]), key=lambda span: span[0] - span[1])
    spans = [s for s in spans if s[1] - s[0] >= length]
    rows = []
    for i in range(count):
        low, high = spans[i % len(spans)]
        at = low + (i // len(spans)) * length
        if at + length > high:
            raise SystemExit(f"{path} has no {count} held-out rows of {length} tokens")
        rows.append(held[at : at + length].tolist())
    return rows
