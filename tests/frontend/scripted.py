"""An engine whose tokens a test writes down: the client's real streams, fed without wire, scheduler or worker."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpu_worker import gpt2_tokenizer
from scheduler.config import Settings
from scheduler.messages import (
    FinishStats,
    PrefixInfo,
    PrefixReply,
    TokenEvent,
    TokenLogprob,
    Tokens,
)
from scheduler.stream import Delivery, Rejection, RequestSpec, TokenStream

Script = Callable[[RequestSpec], Sequence[TokenEvent | float | asyncio.Event]]

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


load_gpt2 = functools.cache(gpt2_tokenizer.load)


def card(**changes: Any) -> dict[str, Any]:
    """GPT-2's tokenizer on a small looped model."""
    values = {
        "name": "demo", "digest": "ab" * 32, "arch_name": "tinyloop", "quant": "int8", "format": 1, "vocab": 50257,
        "max_seq_len": 256, "max_pos": 2048, "loops_default": 4, "loops_trained": 8, "loops_max": 16, "loops_min": 1,
        "has_injection": True, "has_coda": True, "exit_kind": "none", "exit_threshold": None, "warm_start": "raw",
        "has_init_seed": False, "kv_modes": ["fp32", "int8"], "kv_mode_default": "fp32", "kv_bytes_per_token": {"fp32": 64},
        "num_parameters": 1000, "speculation": True, "tokens": {"bos": None, "eos": [50256], "pad": None},
        "tokenizer": load_gpt2(), "chat_template": TEMPLATE, "generation": None, "numerics_id": "cpu",
        "block_size": 64, "max_rows": 8, "num_blocks": 100, "commit": None,
    }  # fmt: skip
    return values | changes


def says(
    tokens: Sequence[int], finish_reason: str = "length", *, per_event: int = 1, index: int = 0
) -> list[TokenEvent]:
    """The events of one sequence that emits `tokens`; log-probability of token i is -i - 1."""
    events = []
    for first in range(0, len(tokens), per_event):
        part = Tokens(tokens[first : first + per_event])
        logprobs = tuple(
            TokenLogprob(-float(first + i) - 1, Tokens((t, 0)), (-float(first + i) - 1, -20.0))
            for i, t in enumerate(part)
        )
        events.append(TokenEvent(0, index, first, part, logprobs))
    return end(events, finish_reason, index)


def end(events: list[TokenEvent], finish_reason: str, index: int = 0) -> list[TokenEvent]:
    """`events` with the end on the last of them (on one of its own if there is none)."""
    num_tokens = sum(len(e.tokens) for e in events)
    stats = FinishStats(5, num_tokens, 0, 1.0, 100.0, 600.0, 4 * num_tokens, "fp32")
    last = events[-1] if events else TokenEvent(0, index, 0, Tokens())
    return [*events[:-1], replace(last, finish_reason=finish_reason, stats=stats)]


class ScriptedEngine:
    """Implements `frontend.service.Engine`. Numbers in a script are pauses in seconds; an event of asyncio is waited for."""

    def __init__(self, settings: Settings) -> None:
        self.card: dict[str, Any] | None = None
        self.on_card: Callable[[dict[str, Any]], None] | None = None
        self.queue_depth = 0
        self.state, self.reason = "loading", "no worker yet"
        self.script: Script = lambda spec: says([15496])
        self.rejection: Rejection | None = None
        self.specs: list[RequestSpec] = []
        self.cancelled: list[int] = []
        self.finished: list[tuple[int, int]] = []
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.exposition: str | None = None
        self.prefix_code = ""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and self.card is not None

    def load(self, values: dict[str, Any]) -> None:
        self.card, self.state, self.reason = values, "ready", ""
        assert self.on_card is not None
        self.on_card(values)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def submit(self, spec: RequestSpec) -> TokenStream:
        if self.rejection is not None:
            raise self.rejection
        self.specs.append(spec)
        delivery = Delivery(len(self.specs), spec, 0.0)
        task = asyncio.create_task(self._play(delivery, self.script(spec)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return TokenStream(self, delivery)

    async def _play(self, delivery: Delivery, script: Sequence[Any]) -> None:
        for item in script:
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif isinstance(item, float):
                await asyncio.sleep(item)
            elif not delivery.is_over:
                delivery.take(replace(item, request_id=delivery.request_id))
            await asyncio.sleep(0)

    def finish_sequence(self, delivery: Delivery, index: int, num_tokens: int) -> None:
        self.finished.append((index, num_tokens))
        delivery.finish(index, num_tokens, 1e9)

    def cancel_request(self, delivery: Delivery) -> None:
        if not delivery.is_over:
            self.cancelled.append(delivery.request_id)
        delivery.events.clear()
        delivery.close()

    async def stats(self, timeout_s: float = 1.0) -> str | None:
        return self.exposition

    async def prefix(self, op: str, **named: Any) -> PrefixReply:
        self.commands.append((op, named))
        entry = PrefixInfo("sys", 64, 4, 3, ("w0",), 4096, 1.5, True)
        return PrefixReply(1, self.prefix_code, "not today" if self.prefix_code else "", (entry,))
