"""One request while it runs: token events in, text out, for streamed and whole answers alike.

`Generation` submits, iterates, applies stop strings and keeps the books of every choice; a whole answer is what the
deltas of the stream add up to. It cancels what it leaves behind. It knows neither JSON nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace

from frontend.errors import ApiError, from_rejection
from frontend.requests import GenerationRequest
from frontend.text import StopMatcher, StreamingDetokenizer, TextModel
from scheduler.client import Rejection, RequestSpec, TokenStream
from scheduler.messages import FinishStats, SequenceSpec, TokenEvent, TokenLogprob, Tokens
from scheduler.seeds import sequence_seed

KEEP_ALIVE_S = 1.5  # a stream that waits longer says so, and notices that its reader has left

_ERROR_STATUS = {"invalid_request": 400, "context_length_exceeded": 400, "engine_down": 503}


@dataclass(frozen=True, slots=True)
class Delta:
    """What came for one choice: text that is complete now, and tokens `first`..`end` of its list.

    `is_first` marks a choice's first delta (with `echo` its text begins with the prompt); `finish_reason` is "" until
    the last one.
    """

    choice: Choice
    text: str
    first: int
    end: int
    is_first: bool
    finish_reason: str


class Choice:
    """One sequence of a request. `offsets` are the places of its tokens in `text`, in characters.

    With `echo` the text, the offsets and (where asked for) the log-probabilities begin with the prompt's.
    `stop_reason` is the stop string or stop token id that ended it, None for an end token of the model.
    """

    def __init__(
        self, request: GenerationRequest, text: TextModel, prompt_index: int, number: int
    ) -> None:
        asked = request.asked
        self.prompt: Tokens = request.prompts[prompt_index]
        self.prompt_index = prompt_index
        self.index = prompt_index * asked.num_sequences + number
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.offsets: list[int] = []
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.prompt_offsets: list[int] = []
        self.finish_reason = ""
        self.stop_reason: str | int | None = None
        self.stats: FinishStats | None = None
        self._request = request
        self._eos = text.eos
        self._detokenizer = StreamingDetokenizer(
            text, asked.skip_special_tokens, is_start=asked.echo
        )
        self._matcher = StopMatcher(asked.stops, asked.include_stop)
        self._num_chars = 0
        self._is_started = False
        self._is_ended = False
        self._echoed = ""
        if asked.echo:
            self._echoed = "".join([self._place(t, self.prompt_offsets) for t in self.prompt])

    @property
    def is_stopped(self) -> bool:
        """A stop string was found; further tokens are not this choice's."""
        return self._matcher.found is not None

    def take(self, event: TokenEvent) -> Delta:
        """Adds an event.

        Raises:
            ApiError: the event says that the sequence has failed, or was ended by the time limit.
        """
        self.prompt_logprobs += event.prompt_logprobs
        first, was_stopped = len(self.tokens), self.is_stopped
        pieces = []
        limit = self._request.max_tokens
        for i, token in enumerate(event.tokens):
            if self.is_stopped or len(self.tokens) >= limit:
                break
            self.tokens.append(token)
            self.logprobs += event.logprobs[i : i + 1]
            can_stop = len(self.tokens) >= self._request.params.min_tokens
            pieces.append(self._matcher.push(self._place(token, self.offsets), can_stop))
        if event.finish_reason and not was_stopped:
            pieces.append(self._end(event))
        if event.finish_reason:
            self.stats, self._is_ended = event.stats, True
        return self._delta("".join(pieces), first, event.finish_reason and self.finish_reason)

    def close(self) -> Delta | None:
        """The last delta of a choice whose last event never came; None if it has ended properly.

        Raises:
            ApiError: the stream broke off before any end was known.
        """
        if self._is_ended:
            return None
        if not self.is_stopped:
            raise ApiError(500, "the engine ended the stream too early", code="engine_error")
        self.finish_reason = "stop"
        return self._delta("", len(self.tokens), "stop")

    def _check_prompt_logprobs(self) -> None:
        """They come before the first token, all of them: silently missing ones would be scored as chance."""
        if self._request.params.prompt_logprobs >= 0 and len(self.prompt_logprobs) != len(
            self.prompt
        ):
            counts = f"{len(self.prompt_logprobs)} of {len(self.prompt)}"
            raise ApiError(
                500, f"prompt log-probabilities came for {counts} tokens", code="engine_error"
            )

    def _place(self, token: int, offsets: list[int]) -> str:
        offsets.append(self._num_chars)
        is_stop = offsets is self.offsets and token in self._request.params.stop_token_ids
        piece = (
            ""
            if is_stop and not self._request.asked.include_stop
            else self._detokenizer.push(token)
        )
        self._num_chars += len(piece)
        return piece

    def _end(self, event: TokenEvent) -> str:
        """Notes why the sequence ended; returns the text that was held back until now."""
        if event.finish_reason in ("error", "cancelled"):
            raise _failure(event, self._request.timeout_s)
        if self.is_stopped:  # the very token that ends it completed a stop string
            self._note_stop()
            return ""
        tail = self._matcher.push(self._detokenizer.flush())
        self.finish_reason = event.finish_reason
        if event.finish_reason == "stop" and self.tokens and self.tokens[-1] not in self._eos:
            token = self.tokens[-1]
            self.stop_reason = self._request.asked.stop_tokens.get(token, token)
        return tail + self._matcher.flush()

    def _note_stop(self) -> None:
        self.finish_reason, self.stop_reason = "stop", self._matcher.found

    def _delta(self, piece: str, first: int, finish_reason: str) -> Delta:
        if self.is_stopped and not self.finish_reason:
            self._note_stop()
        is_first = not self._is_started and bool(self.tokens or finish_reason)
        if is_first:
            self._is_started = True
            self._check_prompt_logprobs()
            piece = self._echoed + piece
        self.text += piece
        return Delta(self, piece, first, len(self.tokens), is_first, finish_reason)


class Generation:
    """All sequences of one HTTP request. Use: `await start()`, then iterate `deltas()` to its end or `aclose()` it."""

    def __init__(self, request: GenerationRequest, text: TextModel) -> None:
        self.request = request
        self.text = text
        numbers = range(request.asked.num_sequences)
        self.choices = [
            Choice(request, text, j, k) for j in range(len(request.prompts)) for k in numbers
        ]
        self._stream: TokenStream | None = None
        self._pending: dict[int, Delta] = {}

    async def start(self, submit: Callable[[RequestSpec], Awaitable[TokenStream]]) -> None:
        """Submits, and waits until it is admitted.

        Raises:
            ApiError: 400 or 503, the scheduler's refusal.
        """
        asked = self.request.asked
        sequences = tuple(
            SequenceSpec(
                c.prompt, sequence_seed(asked.seed, c.prompt_index, c.index % asked.num_sequences)
            )
            for c in self.choices
        )
        spec = RequestSpec(
            label=asked.label,
            params=self.request.params,
            sequences=sequences,
            priority=asked.priority,
            slo_ms=asked.slo_ms,
            timeout_s=self.request.timeout_s,
            salt=asked.salt,
        )
        try:
            self._stream = await submit(spec)
        except Rejection as rejection:
            raise from_rejection(rejection) from None

    async def deltas(self) -> AsyncGenerator[Delta | None, None]:
        """What comes, in order per choice; None when nothing has come for KEEP_ALIVE_S. Leaving it cancels the request.

        Raises:
            ApiError: the request has failed.
        """
        assert self._stream is not None, "start() comes first"
        stream = self._stream
        try:
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        event = await anext(stream)
                except TimeoutError:
                    yield None
                    continue
                except StopAsyncIteration:
                    break
                choice = self.choices[event.index]
                was_stopped = choice.is_stopped
                delta = self._merge(choice.take(event))
                if choice.is_stopped and not was_stopped and not event.finish_reason:
                    await stream.finish(event.index, len(choice.tokens))
                if delta is not None:
                    yield delta
            for choice in self.choices:
                last = choice.close()
                if last is not None and (delta := self._merge(last)) is not None:
                    yield delta
        finally:
            await stream.cancel()

    def _merge(self, delta: Delta) -> Delta | None:
        """Holds deltas of running choices back until `stream_interval` tokens have come; the first goes at once."""
        index = delta.choice.index
        if held := self._pending.pop(index, None):
            text = held.text + delta.text
            is_first = held.is_first or delta.is_first
            delta = replace(delta, text=text, first=held.first, is_first=is_first)
        if delta.finish_reason or (delta.is_first and delta.end > 0):
            return delta
        if delta.end - delta.first < self.request.asked.stream_interval:
            self._pending[index] = delta
            return None
        return delta

    # ---------------------------------------------------------------------------------------------- the books

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.request.prompts)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix pool; of a prompt with several choices, its least lucky one."""
        cached: dict[int, int] = {}
        for choice in self.choices:
            number = choice.stats.cached_tokens if choice.stats else 0
            cached[choice.prompt_index] = min(number, cached.get(choice.prompt_index, number))
        return sum(cached.values())

    def best(self) -> list[Choice]:
        """The choices to answer with: of every prompt the `n` of highest mean log-probability, in that order."""
        asked = self.request.asked
        if asked.n == asked.num_sequences:
            return self.choices
        result: list[Choice] = []
        for j in range(len(self.request.prompts)):
            ranked = sorted(
                (c for c in self.choices if c.prompt_index == j), key=_mean_logprob, reverse=True
            )
            result += ranked[: asked.n]
        return result


def _mean_logprob(choice: Choice) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))


def _failure(event: TokenEvent, timeout_s: float) -> ApiError:
    if event.finish_reason == "cancelled":
        return ApiError(504, f"not finished within {timeout_s:g} s: cancelled", code="timeout")
    code = event.error_code or "engine_error"
    message = event.error_message or "the engine could not finish this request"
    return ApiError(_ERROR_STATUS.get(code, 500), message, code=code)
