"""The client processes: what each waits for, what it holds of it, and what must be sent again.

One rule makes delivery exact: every beat lists all that a client waits for with the tokens it holds. What was published one beat
ago and is not held was lost and goes out again; what is not known is `Unknown`; what is not listed is not wanted, or its end
has been seen. Keys of the past stay for a minute, so that a late repeat of a submit does not run again. Sends nothing itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from scheduler.messages import Accepted, BadMessage, ClientBeat, LiveRequest, Rejected, TokenEvent
from scheduler.request import Request, RequestKey

SILENT_AFTER_S = 5.0  # then a client's requests are cancelled
KEY_KEPT_S = 60.0
MAX_CLIENTS = 4096
MAX_KEYS = 200_000

Answer = Accepted | Rejected


@dataclass(slots=True)
class Client:
    """`requests` are those not acknowledged, ended ones too. `again` are events to be sent once more."""

    client_id: bytes
    heard_at: float
    requests: dict[int, Request] = field(default_factory=dict)
    again: list[TokenEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PastKey:
    """A request that is over for us. `is_resumable`: we let go of it by ourselves, so the client may want it back."""

    answer: Answer
    is_resumable: bool
    expires_at: float


@dataclass(slots=True)
class Reconciled:
    """What a beat leads to."""

    unknown: list[int] = field(default_factory=list)
    unwanted: list[Request] = field(default_factory=list)  # running, and no longer listed
    answers: list[Answer] = field(default_factory=list)  # to be given once more


class Clients:
    def __init__(self) -> None:
        self._clients: dict[bytes, Client] = {}
        self._past: OrderedDict[RequestKey, PastKey] = OrderedDict()  # by expiry

    def __len__(self) -> int:
        return len(self._clients)

    def hear(self, client_id: bytes, now: float) -> Client:
        """The client of a message just received; a new one is taken in.

        Raises:
            BadMessage: there are too many.
        """
        client = self._clients.get(client_id)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                raise BadMessage(f"more than {MAX_CLIENTS} clients")
            client = self._clients[client_id] = Client(client_id, now)
        client.heard_at = now
        return client

    def get(self, client_id: bytes) -> Client | None:
        return self._clients.get(client_id)

    def past(self, key: RequestKey) -> PastKey | None:
        return self._past.get(key)

    def forget(self, request: Request, now: float, *, is_resumable: bool) -> None:
        """An ended request is acknowledged or given up; its key stays for a minute."""
        client = self._clients.get(request.client_id)
        if client is not None:
            client.requests.pop(request.request_id, None)
        self.remember(request.key, Accepted(request.request_id), now, is_resumable=is_resumable)

    def remember(
        self, key: RequestKey, answer: Answer, now: float, *, is_resumable: bool = False
    ) -> None:
        self._past.pop(key, None)
        self._past[key] = PastKey(answer, is_resumable, now + KEY_KEPT_S)
        if len(self._past) > MAX_KEYS:
            self._past.popitem(last=False)

    def reconcile(self, client: Client, beat: ClientBeat, now: float) -> Reconciled:
        """Compare a client's list with ours, queue what it lacks, let go of what it has.

        Raises:
            BadMessage: a list that does not fit a request. Nothing has been changed then.
        """
        listed = {live.request_id: live for live in beat.live}
        for request_id, live in listed.items():
            request = client.requests.get(request_id)
            if request is not None:
                _check(live, len(request.sequences))
        result = Reconciled()
        for request in list(client.requests.values()):
            if request.request_id not in listed:
                if not request.state.is_ended:
                    result.unwanted.append(request)
                else:
                    self.forget(request, now, is_resumable=True)
        for request_id, live in listed.items():
            request = client.requests.get(request_id)
            if request is None:
                self._answer_for_past((beat.client_id, request_id), result)
            elif request.state.is_ended and len(set(live.ended)) == len(request.sequences):
                self.forget(request, now, is_resumable=False)
            else:
                _resend(client, request, live)
        return result

    def _answer_for_past(self, key: RequestKey, result: Reconciled) -> None:
        past = self._past.get(key)
        if past is None or past.is_resumable:
            result.unknown.append(key[1])
        elif isinstance(past.answer, Rejected):
            result.answers.append(past.answer)

    def take_resends(self) -> list[tuple[bytes, list[TokenEvent]]]:
        """What is to go out once more, by client; it is no longer queued then."""
        taken = []
        for client in self._clients.values():
            if client.again:
                taken.append((client.client_id, client.again))
                client.again = []
        return taken

    def expire(self, now: float) -> list[Client]:
        """Drop the keys past their time; returns, and forgets, the clients that fell silent."""
        while self._past and next(iter(self._past.values())).expires_at <= now:
            self._past.popitem(last=False)
        silent = [c for c in self._clients.values() if now - c.heard_at > SILENT_AFTER_S]
        for client in silent:
            del self._clients[client.client_id]
        return silent


def _check(live: LiveRequest, num_sequences: int) -> None:
    if len(live.num_tokens) != num_sequences or min(live.num_tokens) < 0:
        raise BadMessage("a beat that lists other sequences than were submitted")
    if any(not 0 <= index < num_sequences for index in live.ended):
        raise BadMessage("a beat that lists the end of a sequence that does not exist")


def _resend(client: Client, request: Request, live: LiveRequest) -> None:
    """Queue what was due and is not held; what went out since the last beat may still be on its way."""
    ended = set(live.ended)
    for sequence, num_held in zip(request.sequences, live.num_tokens, strict=True):
        is_lacking = num_held < sequence.num_due or sequence.is_end_due
        if is_lacking and sequence.index not in ended:
            # A client that is finishing a sequence counts tokens which we have cut off.
            client.again.append(sequence.event(min(num_held, len(sequence.tokens))))
        sequence.acknowledge(num_held)
        sequence.num_due = sequence.num_published
        sequence.is_end_due = sequence.is_end_published
