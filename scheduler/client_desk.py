"""Answers every message of a client process. Called by the loop's drain; a `BadMessage` raised here has changed nothing."""

from __future__ import annotations

import logging

from scheduler.clients import Client
from scheduler.hub import Hub
from scheduler.messages import (
    VERSION,
    Accepted,
    BadMessage,
    Cancel,
    ClientBeat,
    Finish,
    Hello,
    PrefixCommand,
    Rejected,
    StatsQuery,
    StatsReply,
    Status,
    Submit,
    Unknown,
    Welcome,
)
from scheduler.validate import Refusal, check_peer_id, check_prefix_command

log = logging.getLogger(__name__)

BOOT_S = 2.0  # so long a submit is left unanswered, and thus repeated, while a new scheduler's workers come back

FromClient = Hello | Submit | ClientBeat | Cancel | Finish | StatsQuery | PrefixCommand


class ClientDesk:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def handle(self, message: FromClient, now: float) -> None:
        """Raises BadMessage if a value is out of range."""
        check_peer_id(message.client_id)
        client = self._hub.clients.hear(message.client_id, now)
        match message:
            case ClientBeat():
                self._beat(client, message, now)
            case Submit():
                self._submit(client, message, now)
            case Cancel():
                self._cancel(client, message, now)
            case Finish():
                self._finish(client, message, now)
            case Hello():
                self._hello(message, now)
            case StatsQuery():
                self._stats(message)
            case PrefixCommand():
                check_prefix_command(message)
                self._hub.prefixes.command(message, now)

    def _submit(self, client: Client, submit: Submit, now: float) -> None:
        """A known key is answered as before. What cannot be checked yet is left to be repeated."""
        hub = self._hub
        past = hub.clients.past((client.client_id, submit.request_id))
        if submit.request_id in client.requests:
            hub.to_client(client.client_id, Accepted(submit.request_id))
        elif past is not None and not (past.is_resumable and submit.resumed):
            hub.to_client(client.client_id, past.answer)
        elif hub.workers.limits is None and (submit.resumed or now - hub.started_at < BOOT_S):
            log.debug("submit %s: no worker has registered yet", submit.label)
        else:
            self._admit(client, submit, now)

    def _admit(self, client: Client, submit: Submit, now: float) -> None:
        hub = self._hub
        request = hub.new_request(submit, now)
        try:
            hub.admission.check_sense(submit)
            request.add_sequences(submit.sequences, hub.next_sequence_id)
            if not submit.resumed:
                if hub.is_draining:
                    raise Refusal("draining", "the engine is shutting down", 1.0)
                hub.admission.check_load(request, hub.metrics.queue_depth, now)
        except Refusal as ex:
            hub.lifecycle.reject(request, now)
            answer = Rejected(submit.request_id, ex.code, ex.message, ex.retry_after_s)
            hub.clients.remember(request.key, answer, now)
            hub.to_client(client.client_id, answer)
            log.info("request %s rejected: %s: %s", request.label, ex.code, ex.message)
            return
        client.requests[submit.request_id] = request
        hub.to_client(client.client_id, Accepted(submit.request_id))
        hub.accept(request, now)

    def _cancel(self, client: Client, cancel: Cancel, now: float) -> None:
        request = client.requests.get(cancel.request_id)
        if request is not None:
            self._hub.cancel_for(client, request, now, is_resumable=False)

    def _finish(self, client: Client, finish: Finish, now: float) -> None:
        request = client.requests.get(finish.request_id)
        if request is None:
            return  # late: the next beat settles it
        if not 0 <= finish.index < len(request.sequences):
            raise BadMessage(f"finish of sequence {finish.index} of {len(request.sequences)}")
        sequence = request.sequences[finish.index]
        if not 0 <= finish.num_tokens <= request.params.max_tokens:
            raise BadMessage(f"finish after {finish.num_tokens} tokens")
        if finish.num_tokens > len(sequence.tokens):
            return  # we began anew and are behind the client, which repeats it
        self._hub.lifecycle.stop(sequence, finish.num_tokens, now)

    def _beat(self, client: Client, beat: ClientBeat, now: float) -> None:
        hub = self._hub
        found = hub.clients.reconcile(client, beat, now)
        for request in found.unwanted:
            # Resumable: should this beat have been overtaken, the client will list the request again.
            hub.cancel_for(client, request, now, is_resumable=True)
        for answer in found.answers:
            hub.to_client(client.client_id, answer)
        if found.unknown:
            hub.to_client(client.client_id, Unknown(hub.epoch, tuple(found.unknown)))
        state, reason = hub.state(now)
        status = Status(hub.epoch, state, reason, hub.workers.digest, hub.metrics.queue_depth)
        hub.to_client(client.client_id, status)

    def _hello(self, hello: Hello, now: float) -> None:
        hub, workers = self._hub, self._hub.workers
        state, reason = hub.state(now)
        if hello.version != VERSION:
            state, reason = (
                "failed",
                f"client speaks version {hello.version}, the scheduler {VERSION}",
            )
        card = workers.card if hello.card_digest != workers.digest else b""
        welcome = Welcome(hub.epoch, state, reason, workers.digest, card)
        hub.to_client(hello.client_id, welcome)

    def _stats(self, query: StatsQuery) -> None:
        hub = self._hub
        hub.update_gauges()
        reply = StatsReply(query.query_id, hub.metrics.exposition())
        hub.to_client(query.client_id, reply)
