"""Whether a submit is taken: the engine's state, the request's own sense, the queue cap and the SLO, in that order.

Owns the predictor's memory across requests (actual/asked output length, its own error). Reads workers and queue, changes nothing;
a refusal carries the advice when to come back, from the same prediction.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.config import Settings
from scheduler.messages import Submit
from scheduler.predictor import Capacity, Ema, Work, completion_ms, drain_ms
from scheduler.priority_queue import PriorityQueue
from scheduler.request import Request, RequestState, Sequence, num_blocks
from scheduler.validate import Refusal, check_submit
from scheduler.workers import Workers

SAMPLED = (
    16  # without an SLO one request in so many is predicted, so that the predictor's error is known
)
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Admission:
    def __init__(self, settings: Settings, workers: Workers, queue: PriorityQueue) -> None:
        self._max_depth = settings.max_queue_depth
        self._default_slo_ms = settings.default_slo_ms
        self._chunk = settings.prefill_chunk_on("cpu")
        self._workers = workers
        self._queue = queue
        self._output_ratio = Ema(0.05)  # actual / asked tokens
        self.error = Ema(0.05)  # |predicted - actual| / actual

    def check_sense(self, submit: Submit) -> None:
        """What makes a request wrong whatever the load.

        Raises:
            Refusal: invalid_request or context_length_exceeded.
        """
        check_submit(submit, self._workers.limits)
        mode, modes = submit.params.kv_cache_mode, self._workers.kv_modes
        if mode and mode not in modes:
            served = ", ".join(sorted(modes))
            raise Refusal(
                "invalid_request", f"kv_cache_mode: {mode!r:.80} is not served; served: {served}"
            )

    def check_load(self, request: Request, depth: int, now: float) -> None:
        """Queue cap and SLO. `depth` counts the queued requests, without this one.

        Raises:
            Refusal: engine_down, queue_full or slo_unattainable.
        """
        if not self._workers.ready and not self._workers.may_return(now):
            state, reason = self._workers.state(now)
            raise Refusal("engine_down", f"no engine is ready: {reason or state}", MIN_RETRY_S)
        if depth >= self._max_depth:
            raise Refusal(
                "queue_full",
                f"{depth} requests are waiting, the limit is {self._max_depth}",
                self._slot_s(),
            )
        slo_ms = request.slo_ms if request.slo_ms is not None else self._default_slo_ms
        if slo_ms is not None or request.order % SAMPLED == 0:
            request.predicted_ms = self._predict_ms(request)
        if (
            slo_ms is not None
            and request.predicted_ms is not None
            and request.predicted_ms > slo_ms
        ):
            raise Refusal(
                "slo_unattainable",
                f"expected to take {request.predicted_ms:.0f} ms, the limit is {slo_ms:g} ms",
                _retry_s(request.predicted_ms - slo_ms),
            )

    def learn(self, request: Request, now: float) -> None:
        """Take over what a completed request teaches."""
        if request.is_internal or request.state is not RequestState.COMPLETED:
            return
        asked = request.params.max_tokens
        for sequence in request.sequences:
            if asked > 0:
                self._output_ratio.add(len(sequence.tokens) / asked)
        actual_ms = (now - request.stamps[RequestState.QUEUED]) * 1e3
        if request.predicted_ms is not None and actual_ms > 0:
            self.error.add(abs(request.predicted_ms - actual_ms) / actual_ms)

    def _expected(self, sequence: Sequence) -> float:
        """Tokens that it will still generate."""
        asked, done = sequence.request.params.max_tokens, len(sequence.tokens)
        ratio = 1.0 if self._output_ratio.value is None else self._output_ratio.value
        return max(min(1.0, asked - done), ratio * asked - done)

    def _add(self, work: Work, sequences: Iterable[Sequence]) -> Work:
        for sequence in sequences:
            if sequence.finish_reason:
                continue
            is_prefilled = sequence.worker_id is not None and sequence.first_token_at is not None
            prompt = 0 if is_prefilled else len(sequence.prompt) + len(sequence.tokens)
            work.add(sequence.request.params.loops, prompt, self._expected(sequence))
        return work

    def _capacities(self, request: Request) -> list[Capacity]:
        longest = max(len(s.prompt) for s in request.sequences) + request.params.max_tokens
        capacities = []
        for worker in self._workers.ready.values():
            limits = worker.limits
            blocks = num_blocks(longest, request.params.loops, limits.extra_tables)
            slots = max(1, min(limits.max_rows, limits.num_blocks // blocks))
            running = list(worker.in_flight.values())
            cached = sum(len(s.prompt) + len(s.tokens) for s in running) / max(1, len(running))
            capacities.append(Capacity(worker.passes, slots, cached or longest))
        return capacities

    def _predict_ms(self, request: Request) -> float | None:
        ahead = self._add(Work(), self._workers.in_flight())
        for queued in self._queue:
            if (queued.rank, queued.order) > (request.rank, request.order):
                break
            self._add(ahead, (s for s in queued.sequences if s.is_waiting))
        own = self._add(Work(), request.sequences)
        longest_output = max(self._expected(s) for s in request.sequences)
        loops = request.params.loops
        return completion_ms(
            own, loops, longest_output, ahead, self._capacities(request), self._chunk
        )

    def _slot_s(self) -> float:
        """When one place in the queue will be free: the time of everything there is, shared by the requests waiting."""
        work = self._add(Work(), self._workers.in_flight())
        requests = list(self._queue)
        for queued in requests:
            self._add(work, (s for s in queued.sequences if s.is_waiting))
        total = drain_ms(work, self._capacities(requests[0]), self._chunk) if requests else None
        return MIN_RETRY_S if total is None else _retry_s(total / len(requests))


def _retry_s(wait_ms: float) -> float:
    return min(max(wait_ms / 1e3, MIN_RETRY_S), MAX_RETRY_S)
