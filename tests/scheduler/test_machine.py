"""Any sequence of events: the books balance, every request ends exactly once, and what is delivered is what was generated.

Hypothesis moves clients, workers, time and a wire that loses, doubles and delays; the bench does nothing by itself. At the end of
each run the wire is made good, and everything that was not cancelled must end, with all its tokens.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler.messages import Cancel, Finish, Rejected, SequenceSpec, Unknown
from scheduler.request import Request, RequestState
from tests.scheduler.rig import BenchClient, BenchWorker, Delivered, Rig, prompt, tokens

END_ROUNDS = 400


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.sampled_from([0, 2, 16]),
        depth=st.sampled_from([2, 128]),
        seed=st.integers(0, 2**32),
    )
    def start(self, capacity: int, depth: int, seed: int) -> None:
        self.rig = Rig(prefix_pool_capacity=capacity, max_queue_depth=depth)
        self.random = random.Random(seed)
        self.ends: Counter[int] = Counter()
        self.num_workers = 0
        self.num_seeds = 0
        self.finished: dict[tuple[bytes, int], tuple[int, int]] = {}  # key -> (index, at)
        self.watch()
        self.rig.client(0)
        self.rig.client(1)
        self.all: list[tuple[BenchClient, int, Delivered]] = []
        self.add_worker("n0", 4, 16)
        for size in (5, 70, 130):
            self.submit_and_start(size, 40)

    def watch(self) -> None:
        """Count the ends that the books are told of, by request."""
        metrics, ends = self.rig.scheduler.hub.metrics, self.ends
        inner = metrics.moved

        def moved(request: Request, old: RequestState) -> None:
            ends[id(request)] += request.state.is_ended
            self.keep = [*getattr(self, "keep", []), request]  # so that no id is used twice
            inner(request, old)

        metrics.moved = moved  # type: ignore[method-assign]

    # ------------------------------------------------------------------------------------------------ moves

    @rule(
        at=st.integers(0, 1), count=st.integers(1, 3), size=st.sampled_from([5, 64, 130, 200]), start=st.integers(0, 2),
        max_tokens=st.integers(0, 40), loops=st.integers(1, 4), priority=st.sampled_from([-3, 0, 7]),
    )  # fmt: skip
    def submit(
        self, at: int, count: int, size: int, start: int, max_tokens: int, loops: int, priority: int
    ) -> None:
        client = self.client(at)
        self.num_seeds += count
        specs = tuple(SequenceSpec(prompt(size, start), self.num_seeds - i) for i in range(count))
        got = client.submit(sequences=specs, max_tokens=max_tokens, loops=loops, priority=priority)
        self.all.append((client, client.num_ids, got))

    @rule(at=st.integers(0, 1), times=st.integers(1, 2))
    def submit_again(self, at: int, times: int) -> None:
        client = self.client(at)
        if client.num_ids:
            request_id = self.random.randint(1, client.num_ids)
            submit = next(d.submit for c, i, d in self.all if c is client and i == request_id)
            for _ in range(times):
                client.send(submit)

    @rule(at=st.integers(0, 1))
    def cancel(self, at: int) -> None:
        client = self.client(at)
        if client.requests:
            request_id = self.random.choice(list(client.requests))
            del client.requests[request_id]
            client.send(Cancel(client.client_id, request_id))

    @rule(at=st.integers(0, 1))
    def finish(self, at: int) -> None:
        client = self.client(at)
        open_ = [(i, d) for i, d in client.requests.items() if not d.is_over and d.tokens[0]]
        if open_ and 0 not in open_[0][1].ends:
            request_id, got = open_[0]
            key = client.client_id, request_id
            at_token = self.finished.setdefault(key, (0, len(got.tokens[0])))[1]
            client.send(Finish(client.client_id, request_id, 0, at_token))

    @rule(
        at=st.integers(0, 1),
        count=st.integers(1, 5),
        fate=st.sampled_from(["read", "lose", "double", "swap"]),
    )
    def client_wire(self, at: int, count: int, fate: str) -> None:
        client = self.client(at)
        if fate == "lose":
            del client.inbox[:count]
        elif fate == "double":
            client.inbox = [m for m in client.inbox for _ in (0, 1)]
        elif fate == "swap":
            self.random.shuffle(client.inbox)
        else:
            self.read(client, count)

    @rule(at=st.integers(0, 1))
    def beat(self, at: int) -> None:
        self.send_beat(self.client(at))

    @rule(count=st.integers(1, 4))
    def worker_reads(self, count: int) -> None:
        for worker in self.living():
            worker.read(count)

    @rule(deliver=st.sampled_from([True, True, True, False]), is_doubled=st.booleans())
    def worker_steps(self, deliver: bool, is_doubled: bool) -> None:
        for worker in self.living():
            if worker.epoch == self.rig.scheduler.hub.epoch:
                done = worker.step(deliver=deliver)
                if is_doubled and deliver:
                    worker.send(done)

    @rule()
    def sequence_fails_at_worker(self) -> None:
        for worker in self.living():
            if worker.running and worker.epoch == self.rig.scheduler.hub.epoch:
                victim = self.random.choice(list(worker.running))
                worker.step({victim: "error"})

    @rule(
        rows=st.integers(1, 4),
        blocks=st.sampled_from([12, 16, 40]),
        numerics=st.sampled_from(["n0", "n0", "n1"]),
    )
    def worker_joins(self, rows: int, blocks: int, numerics: str) -> None:
        if len(self.living()) < 3:
            self.add_worker(numerics, rows, blocks)

    @rule()
    def worker_dies(self) -> None:
        if self.living():
            self.rig.kill(self.random.choice(self.living()))

    @rule()
    def worker_registers_again(self) -> None:
        if self.living():
            self.random.choice(self.living()).register()

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.5]), with_beats=st.booleans())
    def time_passes(self, seconds: float, with_beats: bool) -> None:
        self.rig.clock.advance(seconds)
        if with_beats:
            for worker in self.living():
                worker.beat()

    @rule()
    def scheduler_restarts(self) -> None:
        self.rig.start(self.rig.scheduler.hub.epoch + 1)
        self.watch()
        for worker in self.living():
            worker.inbox.clear()
            worker.running.clear()
            worker.register()

    @rule()
    def tick(self) -> None:
        self.rig.tick()

    @rule(rounds=st.integers(1, 4))
    def all_goes_well(self, rounds: int) -> None:
        """Rounds without faults, so that there is something to lose."""
        for _ in range(rounds):
            self.rig.tick()
            for worker in self.living():
                worker.read()
                if worker.epoch == self.rig.scheduler.hub.epoch:
                    worker.step()
            self.rig.clock.advance(0.02)
            self.rig.tick()
            for client in list(self.rig.clients.values()):
                self.read(client, None)

    @rule(rounds=st.integers(1, 6), seed=st.integers(0, 2**32))
    def all_goes_roughly(self, rounds: int, seed: int) -> None:
        """Rounds in which any message may be lost, doubled or late."""
        dice = random.Random(seed)
        for _ in range(rounds):
            self.rig.tick()
            for worker in self.living():
                worker.read(dice.choice([None, None, 0, 1]))
                if worker.epoch == self.rig.scheduler.hub.epoch and dice.random() < 0.9:
                    ends = ["error"] + 4 * ["preempted"] + 95 * [""]
                    ending = {s: dice.choice(ends) for s in worker.running}
                    is_lost = dice.random() < 0.1
                    done = worker.step(ending, deliver=not is_lost)
                    if not is_lost and dice.random() < 0.2:
                        worker.send(done)
            self.rig.clock.advance(0.02)
            self.rig.tick()
            for client in list(self.rig.clients.values()):
                client.inbox = [
                    m for m in client.inbox for _ in range(dice.choice([0, 1, 1, 1, 1, 2]))
                ]
                if dice.random() < 0.2:
                    dice.shuffle(client.inbox)
                self.read(client, dice.choice([None, None, 1]))
                if dice.random() < 0.3:
                    self.send_beat(client)

    @rule(rounds=st.integers(3, 9), seed=st.integers(0, 2**32))
    def all_goes_roughly_for_long(self, rounds: int, seed: int) -> None:
        self.all_goes_roughly(rounds, seed)

    @rule(size=st.sampled_from([5, 130]), max_tokens=st.integers(4, 40))
    def submit_and_start(self, size: int, max_tokens: int) -> None:
        self.submit(0, 2, size, 0, max_tokens, 2, 0)
        self.all_goes_well(2)

    # ------------------------------------------------------------------------------------------------ what holds

    @invariant()
    def books_balance(self) -> None:
        self.rig.check_books()
        assert all(count <= 1 for count in self.ends.values()), "a request ended twice"

    @invariant()
    def no_worker_has_more_than_its_rows(self) -> None:
        for worker in self.rig.scheduler.hub.workers.ready.values():
            assert len(worker.in_flight) <= worker.limits.max_rows

    @invariant()
    def what_was_delivered_was_generated(self) -> None:
        for _, _, got in self.all:
            for spec, delivered in zip(got.submit.sequences, got.tokens, strict=True):
                assert delivered == tokens(spec.seed, len(delivered))

    @invariant()
    def no_bench_message_was_refused(self) -> None:
        assert self.rig.num_bad == 0

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        self.add_worker("n0", 4, 400)
        self.add_worker("n1", 4, 400)
        num_quiet = 0
        for _ in range(END_ROUNDS):
            rig.tick()
            for worker in self.living():
                worker.read()
                if worker.epoch == rig.scheduler.hub.epoch:
                    worker.step()
                worker.beat()
            for client in list(rig.clients.values()):
                self.read(client, None)
                self.send_beat(client)
                for got in client.requests.values():
                    if got.answer is None:
                        client.send(got.submit)
            rig.clock.advance(0.3)
            num_quiet = 0 if any(c.requests for c in rig.clients.values()) else num_quiet + 1
            if num_quiet == 3:  # what nobody lists has been cancelled by then
                break
        rig.check_books()
        hub = rig.scheduler.hub
        assert not any(c.requests for c in rig.clients.values()), "a request never ended"
        assert hub.metrics.in_flight == hub.metrics.queue_depth == 0
        assert len(hub.queue) == 0 and not [r for r in hub.live.values() if not r.is_internal]
        for client, request_id, got in self.all:
            self.check_ends(client, request_id, got)

    def check_ends(self, client: BenchClient, request_id: int, got: Delivered) -> None:
        """A completed sequence has all its tokens, or as many as its client asked to stop at."""
        for index, end in got.ends.items():
            asked = got.submit.params.max_tokens
            if end.finish_reason == "length":
                assert len(got.tokens[index]) == asked
            elif end.finish_reason == "stop":
                last = end.first_index + len(end.tokens)
                assert (index, last) == self.finished[client.client_id, request_id]
            else:
                assert end.finish_reason in ("error", "cancelled")

    # ------------------------------------------------------------------------------------------------ helpers

    def client(self, at: int) -> BenchClient:
        return list(self.rig.clients.values())[at]

    def living(self) -> list[BenchWorker]:
        return [w for w in self.rig.workers.values() if w.is_alive]

    def add_worker(self, numerics: str, rows: int, blocks: int) -> None:
        self.num_workers += 1
        worker = self.rig.worker(
            f"w{self.num_workers}", numerics_id=numerics, max_rows=rows, num_blocks=blocks
        )
        assert worker.epoch

    def read(self, client: BenchClient, count: int | None) -> None:
        for message in client.read(count):
            if isinstance(message, Unknown) and message.epoch == self.rig.scheduler.hub.epoch:
                client.resubmit(message)
                self.repeat_finishes(client)
            elif isinstance(message, Rejected):
                client.requests.pop(message.request_id, None)

    def send_beat(self, client: BenchClient) -> None:
        """A client's heartbeat: what is finished is said again, and what has ended is forgotten once it was listed."""
        client.beat()
        self.repeat_finishes(client)
        for request_id, got in list(client.requests.items()):
            if got.is_over:
                del client.requests[request_id]

    def repeat_finishes(self, client: BenchClient) -> None:
        for (client_id, request_id), (index, at) in self.finished.items():
            if client_id == client.client_id and request_id in client.requests:
                client.send(Finish(client_id, request_id, index, at))


SchedulerMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    phases=[
        Phase.reuse,
        Phase.generate,
    ],  # add Phase.shrink to look into a failure: it takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestScheduler = SchedulerMachine.TestCase
