"""Nothing that a peer sends gets past the checks, harms others, or ends the scheduler."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import messages
from scheduler.messages import (
    FROM_CLIENT,
    FROM_WORKER,
    MAX_SEQUENCES,
    Accepted,
    HeldPrefix,
    Hello,
    PrefixKey,
    Register,
    Rejected,
    SequenceOutput,
    SequenceSpec,
    StepDone,
    TokenLogprob,
    Tokens,
    WorkerBeat,
)
from tests.scheduler.rig import DIGEST, LIMITS, Rig, client_id, prompt, tokens

INF, NAN = math.inf, math.nan
HUGE = 1 << 63

BAD_PARAMS: list[dict[str, Any]] = [
    {"loops": 0}, {"loops": -1}, {"loops": 9}, {"loops": HUGE}, {"max_tokens": -1}, {"max_tokens": HUGE},
    {"min_tokens": -1}, {"min_tokens": 6}, {"temperature": -0.1}, {"temperature": NAN}, {"temperature": INF},
    {"top_k": -1}, {"top_k": HUGE}, {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": NAN}, {"min_p": -0.1}, {"min_p": 1.1},
    {"repetition_penalty": 0.0}, {"repetition_penalty": -1.0}, {"repetition_penalty": INF},
    {"presence_penalty": NAN}, {"frequency_penalty": -INF},
    {"logit_bias": ((1000, 1.0),)}, {"logit_bias": ((-1, 1.0),)}, {"logit_bias": ((1, NAN),)},
    {"stop_token_ids": (1000,)}, {"stop_token_ids": (-1,)}, {"logprobs": -2}, {"logprobs": 1001},
    {"prompt_logprobs": -2}, {"cache_window": -1}, {"exit_kind": "never"}, {"exit_kind": "kl"},
    {"exit_threshold": NAN}, {"min_loops": 0}, {"min_loops": 3}, {"exit_kv": "drop"}, {"init_seed": -1},
    {"kv_cache_mode": "fp64"}, {"speculation": "magic"}, {"draft_loops": 3}, {"draft_loops": -1},
    {"draft_ahead": -1}, {"draft_ahead": 65}, {"branches": -1}, {"branches": HUGE},
    {"speculation": "chain"}, {"speculation": "pipelined", "draft_loops": 2}, {"speculation": "tree", "draft_loops": 1},
    {"speculation": "chain", "draft_loops": 1, "loops": 1},
]  # fmt: skip

BAD_SUBMITS: list[dict[str, Any]] = [
    {"sequences": ()}, {"sequences": (SequenceSpec(Tokens(), 1),)}, {"sequences": (SequenceSpec(Tokens([1000]), 1),)},
    {"sequences": (SequenceSpec(Tokens([1]), -1),)}, {"sequences": (SequenceSpec(Tokens([1]), 1, Tokens([2])),)},
    {"sequences": (SequenceSpec(Tokens([1]), 1, Tokens([1] * 6)),), "resumed": True},
    {"sequences": (SequenceSpec(Tokens([1]), 1, Tokens([1000])),), "resumed": True},
    {"priority": 101}, {"priority": -101}, {"slo_ms": 0.0}, {"slo_ms": NAN}, {"slo_ms": -INF}, {"timeout_s": -1.0},
    {"timeout_s": INF}, {"salt": "s" * 2000},
]  # fmt: skip


def test_a_request_of_too_many_sequences_is_refused() -> None:
    rig = Rig()
    rig.worker()
    sequence = SequenceSpec(Tokens([1]), 1)
    wrong = rig.client().submit(sequences=(sequence,) * (MAX_SEQUENCES + 1))
    rig.run(1)
    assert isinstance(wrong.answer, Rejected) and str(MAX_SEQUENCES) in wrong.answer.message


@pytest.mark.parametrize("bad", BAD_PARAMS + BAD_SUBMITS, ids=str)
def test_a_wrong_submit_is_answered_and_harms_no_other(bad: dict[str, Any]) -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    good = client.submit(seed=1, max_tokens=3)
    wrong = client.submit(**({"max_tokens": 5} | bad))
    rig.run(3)
    assert isinstance(wrong.answer, Rejected), bad
    assert wrong.answer.code in ("invalid_request", "context_length_exceeded")
    assert wrong.answer.message.isprintable() and wrong.answer.message
    assert good.tokens == [tokens(1, 3)]
    assert rig.count("tinyloop_requests_rejected_total") == 1
    rig.check_books()


def test_what_a_model_lacks_is_refused_by_name() -> None:
    rig = Rig()
    rig.worker(has_injection=False)
    client = rig.client()
    wrong = client.submit(warm_start=True)
    client.read()
    assert isinstance(wrong.answer, Rejected) and "injection" in wrong.answer.message


def test_limits_themselves_are_allowed() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    got = client.submit(
        loops=8, max_tokens=5, min_tokens=5, top_p=1.0, min_p=1.0, logit_bias=((999, -100.0),), stop_token_ids=(999,),
        logprobs=20, min_loops=8, exit_kind="gate", draft_loops=8, priority=-100, size=60,
    )  # fmt: skip
    client.read()
    assert isinstance(got.answer, Accepted)


def held(**changes: Any) -> HeldPrefix:
    return replace(HeldPrefix(b"i" * 16, PrefixKey(loops=2), prompt(64), 1, 1), **changes)


BAD_REGISTERS: list[dict[str, Any]] = [
    {"worker_id": b"short"}, {"digest": ""}, {"name": "n" * 2000},
    *({"limits": replace(LIMITS, **{name: value})} for name, value in (
        ("max_rows", 0), ("max_rows", HUGE), ("num_blocks", 0), ("num_blocks", HUGE), ("extra_tables", -1),
        ("max_seq_len", 0), ("vocab", 0), ("vocab", HUGE), ("loops_default", 0), ("loops_max", 1),
    )),
    *({"prefixes": (bad,)} for bad in (
        held(prefix_id=b"short"), held(tokens=prompt(63)), held(tokens=Tokens()), held(tokens=Tokens([5000] * 64)),
        held(num_blocks=-1), held(num_bytes=-1), held(key=PrefixKey(loops=0)), held(key=PrefixKey(loops=1, cache_window=-1)),
        held(key=PrefixKey(loops=1, salt="s" * 2000)),
    )),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_REGISTERS, ids=str)
def test_a_wrong_register_is_dropped(bad: dict[str, Any]) -> None:
    rig = Rig()
    worker = rig.worker(is_ready=False)
    worker.register(**bad)
    assert rig.num_bad == 1
    assert not rig.scheduler.hub.workers.ready
    assert rig.scheduler.hub.workers.digest == ""


BAD_STEPS: list[dict[str, Any]] = [
    {"runs_seen": -1}, {"free_rows": -1}, {"free_blocks": -1}, {"free_blocks": HUGE}, {"num_rows": -1},
    {"cached_positions": -1}, {"core_passes": -1}, {"step_ms": NAN}, {"step_ms": -1.0}, {"step_ms": INF},
    {"held": (held(prefix_id=b"x"),)},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_STEPS, ids=str)
def test_a_wrong_step_is_dropped_and_what_it_said_is_asked_for_again(bad: dict[str, Any]) -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    got = client.submit(seed=1, max_tokens=4)
    rig.run(1)
    worker.send(replace(worker.step(deliver=False), **bad))
    assert rig.num_bad == 1
    rig.run(6)
    assert got.tokens == [tokens(1, 4)]


BAD_OUTPUTS: list[dict[str, Any]] = [
    {"finish_reason": "bored"}, {"first_index": -1}, {"tokens": Tokens([1000])}, {"tokens": Tokens([1] * 9)},
    {"logprobs": ()}, {"logprobs": (TokenLogprob(NAN),)}, {"logprobs": (TokenLogprob(-1.0, Tokens([1])),)},
    {"logprobs": (TokenLogprob(-1.0, Tokens([1]), (NAN,)),)}, {"prompt_logprobs": (TokenLogprob(NAN),)},
    {"core_loops": -1}, {"cached_tokens": HUGE},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_OUTPUTS, ids=str)
def test_a_wrong_output_ends_its_own_request_alone(bad: dict[str, Any]) -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    victim = client.submit(seed=1, max_tokens=4, logprobs=0)
    other = client.submit(seed=2, max_tokens=4, logprobs=0)
    rig.run(1)
    done = worker.step(deliver=False)
    worker.send(replace(done, outputs=(replace(done.outputs[0], **bad), *done.outputs[1:])))
    rig.run(4)
    assert victim.ends[0].error_code == "internal_error"
    assert other.tokens == [tokens(2, 4)]
    assert rig.count("tinyloop_requests_errored_total") == 1
    rig.check_books()


@pytest.mark.parametrize(
    "bad", [{"state": "sleepy"}, {"step_age_s": NAN}, {"step_age_s": -1.0}, {"worker_id": b""}]
)
def test_a_wrong_beat_is_dropped(bad: dict[str, Any]) -> None:
    rig = Rig()
    worker = rig.worker()
    worker.send(replace(WorkerBeat(worker.worker_id, "w0", 1, "ready"), **bad))
    assert rig.num_bad == 1


def test_a_worker_that_names_another_is_not_believed() -> None:
    rig = Rig()
    one, two = rig.worker("a"), rig.worker("b")
    rig.from_worker(one.worker_id, WorkerBeat(two.worker_id, "b", 1, "ready", step_age_s=99.0))
    assert rig.num_bad == 1
    rig.elapse(0.2, beats=False)
    assert len(rig.scheduler.hub.workers.ready) == 2


def test_an_id_of_another_length_is_dropped() -> None:
    rig = Rig()
    rig.from_client(Hello(b"short"))
    assert rig.num_bad == 1 and len(rig.scheduler.hub.clients) == 0


def test_a_hello_of_another_version_is_told() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    client.send(Hello(client.client_id, version=3))
    (welcome,) = client.read()
    assert welcome.state == "failed" and "version 3" in welcome.reason


# ----------------------------------------------------------------------------------------------- anything well-formed

_INTS = st.one_of(st.integers(-3, 70), st.integers(-HUGE, HUGE - 1))
_FLOATS = st.floats() | st.integers(-3, 3).map(float)
_TEXT = st.sampled_from(
    ["", "a", "stop", "length", "error", "ready", "failed", "register", "list", "delete", "none"]
) | st.text(max_size=5)
_BYTES = st.sampled_from(
    [client_id(0), client_id(1), bytes([200]) + b"w0".ljust(15, b"."), b"", b"x" * 16]
)
_TOKENS = st.lists(st.integers(0, 1100), max_size=5).map(Tokens) | st.sampled_from(
    [prompt(64), prompt(130)]
)


def _strategy(kind: Any) -> st.SearchStrategy[Any]:
    from types import UnionType
    from typing import Union, get_args, get_origin

    simple = {
        int: _INTS,
        float: _FLOATS,
        str: _TEXT,
        bytes: _BYTES,
        bool: st.booleans(),
        Tokens: _TOKENS,
    }
    if kind in simple:
        return simple[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.none() | _strategy(next(a for a in args if a is not type(None)))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(_strategy(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*[_strategy(a) for a in args])
    if origin is dict:
        return st.dictionaries(_TEXT, _FLOATS, max_size=3)
    hints = get_type_hints(kind, vars(messages))
    return st.builds(kind, **{f.name: _strategy(hints[f.name]) for f in fields(kind)})


_FROM_CLIENT = st.one_of(*[_strategy(kind) for kind in FROM_CLIENT])
_FROM_WORKER = st.one_of(*[_strategy(kind) for kind in FROM_WORKER])


@settings(max_examples=60, deadline=None)
@given(st.lists(_FROM_CLIENT | _FROM_WORKER, max_size=12))
def test_no_well_formed_message_breaks_the_scheduler_or_another_request(sent: list[Any]) -> None:
    rig = Rig(epoch=1)
    worker, client = rig.worker(), rig.client(7)
    got = client.submit(seed=1, max_tokens=5)
    rig.run(1)
    for message in sent:  # `from_client` and `from_worker` let nothing through but BadMessage
        if isinstance(message, FROM_CLIENT):
            rig.from_client(message)
        else:
            sender = getattr(message, "worker_id", b"x" * 16)
            if sender != worker.worker_id:
                rig.from_worker(sender, message)
        rig.tick()
        rig.check_books()
    for _ in range(30):
        rig.run(1)
        client.beat()
    assert got.tokens == [tokens(1, 5)]
    rig.scheduler.hub.update_gauges()
    assert rig.scheduler.hub.metrics.exposition()


def test_outputs_and_registers_of_the_bench_are_valid() -> None:
    """The ground under the tests above: without a change, the same messages are taken."""
    rig = Rig()
    worker = rig.worker()
    worker.send(Register(worker.worker_id, "w0", "bench", DIGEST, "n0", LIMITS, b"card"))
    worker.send(StepDone(1, (SequenceOutput(1, 1, 0, Tokens([1])),), 0, 4, 100))
    assert rig.num_bad == 0
