"""Everything that happens to a request between acceptance and end: sent to a worker, its tokens taken, sent back, ended.

The only caller of `transition()`. Each event of a sequence is one method here; `_settle` then moves the request to where its
sequences are. `dirty` collects what clients must hear of; publishing is the loop's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from scheduler.admission import Admission
from scheduler.messages import Abort, BadMessage, Run, SequenceOutput, Tokens
from scheduler.metrics import Metrics
from scheduler.prefix_pool import Match, PrefixPool
from scheduler.priority_queue import PriorityQueue
from scheduler.request import Request, RequestState, Sequence, SequenceId, transition
from scheduler.validate import MAX_TEXT, check_output
from scheduler.workers import Worker, Workers

log = logging.getLogger(__name__)

_S = RequestState


class Lifecycle:
    """Moves requests; the parts that it moves them between are handed in.

    Args:
        send: gives a message to a worker; False if it cannot be reached.
        ended: told of every request that ended.
    """

    def __init__(
        self,
        epoch: int,
        metrics: Metrics,
        queue: PriorityQueue,
        workers: Workers,
        pool: PrefixPool,
        admission: Admission,
        send: Callable[[bytes, object], bool],
        ended: Callable[[Request], None],
    ) -> None:
        self._epoch = epoch
        self._metrics = metrics
        self._queue = queue
        self._workers = workers
        self._pool = pool
        self._admission = admission
        self._send = send
        self._ended = ended
        self.dirty: dict[int, Sequence] = {}  # by sequence id: has tokens or an end to publish

    def accept(self, request: Request, now: float) -> None:
        """QUEUED, in line. A resumed sequence that holds its last token already ends at once."""
        transition(request, _S.QUEUED, now, self._metrics)
        self._queue.push(request)
        params = request.params
        for sequence in request.sequences:
            if sequence.tokens and sequence.tokens[-1] in params.stop_token_ids:
                self.end(sequence, "stop", now)
            elif sequence.tokens and sequence.num_remaining == 0:
                self.end(sequence, "length", now)

    def reject(self, request: Request, now: float) -> None:
        transition(request, _S.REJECTED, now, self._metrics)

    def run(self, sequence: Sequence, worker: Worker, match: Match | None, now: float) -> bool:
        """Send a waiting sequence to a worker. False if the worker could not be reached; then it still waits."""
        request, pool = sequence.request, self._pool
        sequence.attempt += 1
        message = Run(
            self._epoch,
            sequence.sequence_id,
            sequence.attempt,
            sequence.prompt,
            Tokens(sequence.tokens),
            sequence.seed,
            request.params,
            prefix_id=match.entry.prefix_id if match else b"",
            prefix_len=match.length if match else 0,
            store=pool.plan_store(
                sequence.prompt, request.params, request.salt, worker.worker_id, match
            ),
        )
        if not self._send(worker.worker_id, message):
            return False
        worker.sent(sequence)
        sequence.worker_id = worker.worker_id
        sequence.heard_at = now
        sequence.prefix_id = message.prefix_id
        sequence.kv_cache_mode = request.params.kv_cache_mode or pool.default_mode
        if match is not None:
            pool.use(match, now)
        log.info("request %s[%d] to worker %s, attempt %d, %d of %d prompt tokens held", request.label, sequence.index,
                 worker.name, sequence.attempt, message.prefix_len, len(sequence.prompt))  # fmt: skip
        if not request.has_waiting:
            self._queue.remove(request)
        if request.state is _S.QUEUED:
            transition(request, _S.DISPATCHED, now, self._metrics)
        return True

    def take(self, worker: Worker, output: SequenceOutput, now: float) -> None:
        """What one step did for one sequence. What is stale or repeated falls away, a gap sends it off anew, nonsense ends it."""
        sequence = worker.in_flight.get(SequenceId(output.sequence_id))
        if sequence is None or sequence.attempt != output.attempt:
            self._metrics.stale.inc()
            return
        sequence.heard_at = now
        params = sequence.request.params
        room = params.max_tokens - output.first_index
        try:
            check_output(output, worker.limits, params.logprobs >= 0, room)
        except BadMessage as ex:
            self._metrics.bad_messages.labels("workers").inc()
            log.error("request %s: worker %s sent %s", sequence.request.label, worker.name, ex)
            self.end(sequence, "error", now, "internal_error", "the engine sent an invalid output")
            return
        num_known = len(sequence.tokens) - output.first_index
        if num_known < 0:
            log.error("request %s: worker %s left tokens out", sequence.request.label, worker.name)
            self.lose_sequences([sequence], worker, now)
            return
        self._count(sequence, output)
        self._take_tokens(sequence, worker, output, num_known, now)
        if output.finish_reason == "preempted":
            sequence.preemptions += 1
            self._metrics.preemptions.inc()
            self._requeue(sequence, worker, now)
        elif output.finish_reason:
            del worker.in_flight[sequence.sequence_id]  # there it has ended already
            code, message = output.error_code[:MAX_TEXT], output.error_message[:MAX_TEXT]
            self.end(sequence, output.finish_reason, now, code, message)

    def _count(self, sequence: Sequence, output: SequenceOutput) -> None:
        if output.cached_tokens > 0:
            self._metrics.prefix_hits.inc()
            self._pool.hit(sequence.prefix_id)
        if sequence.attempt == 1:
            sequence.cached_tokens += output.cached_tokens
        sequence.core_loops += output.core_loops
        sequence.drafted_tokens += output.drafted_tokens
        sequence.accepted_tokens += output.accepted_tokens
        sequence.rounds += output.rounds

    def _take_tokens(
        self, sequence: Sequence, worker: Worker, output: SequenceOutput, num_known: int, now: float
    ) -> None:
        request = sequence.request
        if not sequence.tokens:
            sequence.prompt_logprobs += output.prompt_logprobs
        tokens = output.tokens[num_known:]
        if not tokens:
            return
        sequence.tokens += tokens
        sequence.logprobs += output.logprobs[num_known:]
        sequence.numerics_id = worker.numerics_id
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        self.dirty[sequence.sequence_id] = sequence
        self._metrics.tokens.inc(len(tokens))
        if request.state is _S.DISPATCHED:
            transition(request, _S.RUNNING, now, self._metrics)

    def end(
        self, sequence: Sequence, reason: str, now: float, code: str = "", message: str = ""
    ) -> None:
        """End one sequence, wherever it is. One that ends in error takes the rest of its request with it. Repeats do nothing."""
        if sequence.finish_reason:
            return
        request = sequence.request
        for each in request.sequences if reason == "error" else [sequence]:
            if not each.finish_reason:
                self._abort(each)
                each.finish_reason, each.error_code, each.error_message = reason, code, message
                each.ended_at = now
                self.dirty[each.sequence_id] = each
        self._settle(request, now)

    def stop(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """The client found a stop string after `num_tokens` tokens."""
        if not sequence.finish_reason:
            sequence.truncate(num_tokens)
            self.end(sequence, "stop", now)

    def end_all(
        self, request: Request, reason: str, now: float, code: str = "", message: str = ""
    ) -> None:
        """End what is left of a request: cancelled, or in error."""
        for sequence in request.sequences:
            self.end(sequence, reason, now, code, message)

    def lose_worker(self, worker: Worker, reason: str, now: float, *, is_loss: bool = True) -> None:
        """A worker is gone: its sequences go back to their old places in the queue. `is_loss` False: it dropped them, but
        nothing died, so none of them is to blame."""
        log.warning(
            "worker %s is lost: %s; %d sequences were with it",
            worker.name,
            reason,
            len(worker.in_flight),
        )
        self._workers.remove(worker, now)
        self._pool.worker_lost(worker.worker_id)
        self._metrics.workers.remove(worker.name)
        self._metrics.worker_losses.inc(is_loss)
        self._lose(list(worker.in_flight.values()), worker, now, is_loss=is_loss)

    def lose_sequences(self, sequences: list[Sequence], worker: Worker, now: float) -> None:
        """A worker lives, but what it said of these was lost: they are sent off anew."""
        aborts = [Abort(self._epoch, s.sequence_id, s.attempt) for s in sequences]
        self._lose(sequences, worker, now)
        for abort in aborts:
            self._send(worker.worker_id, abort)

    def _lose(
        self, sequences: list[Sequence], worker: Worker, now: float, *, is_loss: bool = True
    ) -> None:
        requests = {s.request.order: s.request for s in sequences}
        company = {s.request.order for s in worker.in_flight.values()}
        doomed = [r for r in requests.values() if is_loss and r.is_suspect and company == {r.order}]
        for request in requests.values():
            request.losses += is_loss
        for sequence in sequences:
            sequence.restarts += 1
            self._metrics.requeues.inc()
            self._requeue(sequence, worker, now)
        for request in doomed:
            message = "the engine was lost each time it ran this request"
            self.end_all(request, "error", now, "worker_lost", message)

    def _requeue(self, sequence: Sequence, worker: Worker, now: float) -> None:
        """Back to the queue, priority and arrival unchanged; what it has emitted will be replayed."""
        worker.in_flight.pop(sequence.sequence_id, None)
        sequence.worker_id = None
        if not sequence.tokens:
            sequence.prompt_logprobs = ()
        self._queue.push(sequence.request)
        self._settle(sequence.request, now)

    def _abort(self, sequence: Sequence) -> None:
        """Take it from its worker, if it is with one; the blocks are free before the worker's next step."""
        worker = self._workers.ready.get(sequence.worker_id or b"")
        sequence.worker_id = None
        if worker is not None and worker.in_flight.pop(sequence.sequence_id, None) is not None:
            self._send(worker.worker_id, Abort(self._epoch, sequence.sequence_id, sequence.attempt))

    def _settle(self, request: Request, now: float) -> None:
        """Move the request to where its sequences are."""
        if request.state.is_ended:
            return
        if all(s.finish_reason for s in request.sequences):
            self._queue.remove(request)
            transition(request, request.end_state(), now, self._metrics)
            log.info("request %s %s", request.label, request.state.name.lower())
            self._admission.learn(request, now)
            self._ended(request)
        elif not request.has_waiting:
            self._queue.remove(request)
        elif not request.is_in_flight and request.state is not _S.QUEUED:
            transition(request, _S.QUEUED, now, self._metrics)
