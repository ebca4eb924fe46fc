"""One request as its client sees it: what has been delivered of each sequence, and the stream that hands it out.

`Delivery` puts events in order, drops repeats and knows what is still missing; it touches no socket and no clock.
`TokenStream` is the handle the caller iterates; when the caller lets go of it, the request is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from scheduler.messages import Finish, LiveRequest, Params, SequenceSpec, Submit, TokenEvent, Tokens


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request to submit. `label` is for people and logs; `timeout_s` counts from submit, 0 is none."""

    label: str
    params: Params
    sequences: tuple[SequenceSpec, ...]
    priority: int = 0
    slo_ms: float | None = None
    timeout_s: float = 0.0
    salt: str = ""


class Rejection(Exception):
    """The request was not admitted. `code` is one of `messages.Rejected`'s; `retry_after_s` 0 means no advice."""

    def __init__(self, code: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    has_prompt_logprobs: bool = False
    is_ended: bool = False
    finish_at: int | None = None  # the caller found a stop string after so many tokens
    finish_deadline: float = 0.0


class Delivery:
    """The state of one submitted request at its client. Belongs to the client's loop."""

    def __init__(self, request_id: int, spec: RequestSpec, now: float) -> None:
        self.request_id = request_id
        self.spec = spec
        self.submitted_at = now
        self.card_digest = ""  # of the model that admitted it; set with `Accepted`
        self.unknown_since: float | None = None
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False
        self.events: deque[TokenEvent] = deque()
        self.wake = asyncio.Event()
        self._sequences = [_Sequence(tokens=list(s.emitted)) for s in spec.sequences]

    def accept(self, card_digest: str) -> None:
        """The scheduler has it (an event says so as well as `Accepted`)."""
        self.unknown_since = None
        if not self.answer.done():
            self.card_digest = card_digest
            self.answer.set_result(None)

    def take(self, event: TokenEvent) -> bool:
        """Queue what is new in an event. False: tokens before it are missing; the event is dropped and must be sent again."""
        if self.is_over or not 0 <= event.index < len(self._sequences):
            return True
        sequence = self._sequences[event.index]
        if sequence.is_ended:
            return True
        num_held = len(sequence.tokens)
        if event.first_index > num_held and sequence.finish_at is None:
            return False
        num_repeated = min(num_held - event.first_index, len(event.tokens))
        if sequence.finish_at is not None:
            self._take_finishing(sequence, event, num_repeated)
            return True
        if num_repeated:
            event = replace(
                event,
                first_index=num_held,
                tokens=Tokens(event.tokens[num_repeated:]),
                logprobs=event.logprobs[num_repeated:],
            )
        if event.prompt_logprobs and sequence.has_prompt_logprobs:
            event = replace(event, prompt_logprobs=())
        if event.tokens or event.prompt_logprobs or event.finish_reason:
            sequence.tokens += event.tokens
            sequence.has_prompt_logprobs |= bool(event.prompt_logprobs)
            self._put(event)
        return True

    def _take_finishing(self, sequence: _Sequence, event: TokenEvent, num_repeated: int) -> None:
        """After `finish` only the end is of interest; tokens beyond it are counted (so that none is sent again) and dropped."""
        assert sequence.finish_at is not None
        if event.finish_reason:
            self._put(_stopped(event, sequence.finish_at))
        elif event.first_index <= len(sequence.tokens):
            sequence.tokens += event.tokens[num_repeated:]

    def _put(self, event: TokenEvent) -> None:
        self.events.append(event)
        if event.finish_reason:
            self._end(event.index)
        self.wake.set()

    def _end(self, index: int) -> None:
        self._sequences[index].is_ended = True
        if all(s.is_ended for s in self._sequences):
            self.close()

    def finish(self, index: int, num_tokens: int, deadline: float) -> None:
        """The caller found a stop string in sequence `index`. Repeats have no effect."""
        sequence = self._sequences[index]
        if sequence.finish_at is not None:
            return
        sequence.finish_at = num_tokens
        sequence.finish_deadline = deadline
        # tokens queued beyond the stop string must not reach the caller; an end that is queued becomes this one
        queued, self.events = self.events, deque()
        for event in queued:
            if event.index != index:
                self.events.append(event)
            elif event.finish_reason:
                self.events.append(_stopped(event, num_tokens))

    def expire_finishes(self, now: float) -> None:
        """End the finishing sequences whose last event did not come in time."""
        for index, sequence in enumerate(self._sequences):
            if (
                not sequence.is_ended
                and sequence.finish_at is not None
                and now >= sequence.finish_deadline
            ):
                self._end(index)
                self.wake.set()

    def fail(self, code: str, message: str) -> None:
        """End every open sequence with an error event, the finishing ones as stopped."""
        for index, sequence in enumerate(self._sequences):
            if not sequence.is_ended:
                self.take(
                    TokenEvent(
                        self.request_id,
                        index,
                        len(sequence.tokens),
                        Tokens(),
                        finish_reason="error",
                        error_code=code,
                        error_message=message,
                    )
                )

    def close(self) -> None:
        """Nothing more will come; what is queued can still be read."""
        self.is_over = True
        self.wake.set()

    def listing(self) -> LiveRequest:
        """Its line in the client's heartbeat."""
        return LiveRequest(
            self.request_id,
            tuple(len(s.tokens) for s in self._sequences),
            tuple(i for i, s in enumerate(self._sequences) if s.is_ended),
        )

    def submit_message(self, client_id: bytes, now: float, *, is_resumed: bool) -> Submit:
        """The submit; a resumed one carries the tokens held and the time left."""
        spec = self.spec
        sequences, timeout_s = spec.sequences, spec.timeout_s
        if is_resumed:
            sequences = tuple(
                replace(s, emitted=Tokens(held.tokens))
                for s, held in zip(spec.sequences, self._sequences, strict=True)
            )
            timeout_s = timeout_s and max(0.001, timeout_s - (now - self.submitted_at))
        return Submit(
            client_id,
            self.request_id,
            spec.label,
            spec.params,
            sequences,
            spec.priority,
            spec.slo_ms,
            timeout_s,
            spec.salt,
            is_resumed,
        )

    def finish_messages(self, client_id: bytes, *, with_ended: bool) -> list[Finish]:
        """`Finish` for what is finishing; `with_ended` for what has ended too, which a new scheduler cannot know."""
        messages = []
        for index, sequence in enumerate(self._sequences):
            finish_at = sequence.finish_at
            if finish_at is None and sequence.is_ended:
                finish_at = len(sequence.tokens)
            if finish_at is not None and (with_ended or not sequence.is_ended):
                messages.append(Finish(client_id, self.request_id, index, finish_at))
        return messages


def _stopped(event: TokenEvent, num_tokens: int) -> TokenEvent:
    """The last event of a sequence that its reader ended after `num_tokens` tokens."""
    return replace(
        event,
        first_index=num_tokens,
        tokens=Tokens(),
        logprobs=(),
        prompt_logprobs=(),
        finish_reason="stop",
        error_code="",
        error_message="",
    )


class Owner(Protocol):
    """What a stream asks of its client."""

    def finish_sequence(self, delivery: Delivery, index: int, num_tokens: int) -> None: ...
    def cancel_request(self, delivery: Delivery) -> None: ...


class TokenStream:
    """The events of one request, in order per sequence and each token once. For one reader."""

    def __init__(self, owner: Owner, delivery: Delivery) -> None:
        self._owner = owner
        self._delivery = delivery

    @property
    def request_id(self) -> int:
        return self._delivery.request_id

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next event; ends once every sequence has ended or the request was cancelled here."""
        delivery = self._delivery
        while not delivery.events:
            if delivery.is_over:
                raise StopAsyncIteration
            delivery.wake.clear()
            await delivery.wake.wait()
        return delivery.events.popleft()

    async def finish(self, index: int, num_tokens: int) -> None:
        """A stop string was found: sequence `index` is complete after `num_tokens` tokens.

        It yields one last event (`finish_reason` stop, with stats), or ends without one after 2 s.
        """
        self._owner.finish_sequence(self._delivery, index, num_tokens)

    async def cancel(self) -> None:
        """The caller wants no more; the stream ends at once. Idempotent."""
        self._owner.cancel_request(self._delivery)
