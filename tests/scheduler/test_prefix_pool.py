"""The prefix pool: what matches, what is stored, pinned, evicted, rebuilt; first alone, then through the scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.messages import (
    DropPrefixes,
    HeldPrefix,
    Params,
    PrefixCommand,
    PrefixKey,
    PrefixReply,
    SequenceSpec,
    Tokens,
)
from scheduler.prefix_pool import UNPINNED_PER_PINNED, PrefixPool, prefix_id
from tests.scheduler.rig import BenchClient, BenchWorker, Rig, prompt, tokens

W = b"w" * 16
V = b"v" * 16


def make_pool(capacity: int = 4, *, has_coda: bool = False) -> PrefixPool:
    pool = PrefixPool(capacity)
    pool.default_mode, pool.has_coda = "fp32", has_coda
    return pool


def params(loops: int = 2, **fields: object) -> Params:
    return Params(loops=loops, max_tokens=5, **fields)  # type: ignore[arg-type]


def held(num_tokens: int, start: int = 0, **key: object) -> HeldPrefix:
    made = PrefixKey(**{"kv_cache_mode": "fp32", "loops": 2} | key)  # type: ignore[arg-type]
    return HeldPrefix(
        prefix_id(made, prompt(num_tokens, start)), made, prompt(num_tokens, start), 2, 100
    )


def length(pool: PrefixPool, text: Tokens, p: Params, salt: str = "", worker: bytes = W) -> int:
    match = pool.matches(text, p, salt).get(worker)
    return match.length if match else 0


def test_the_longest_match_at_multiples_of_a_block() -> None:
    pool = make_pool()
    pool.held(W, held(64), 0.0)
    pool.held(W, held(192), 0.0)
    assert length(pool, prompt(300), params()) == 192
    assert length(pool, prompt(191), params()) == 128  # the part in common with the longer entry
    assert length(pool, prompt(130), params()) == 128
    assert length(pool, prompt(100), params()) == 64
    assert length(pool, prompt(63), params()) == 0
    assert length(pool, prompt(300, start=1), params()) == 0


def test_at_least_one_token_is_always_run() -> None:
    pool = make_pool()
    pool.held(W, held(128), 0.0)
    assert length(pool, prompt(128), params()) == 64
    assert length(pool, prompt(129), params()) == 128
    assert length(pool, prompt(64), params()) == 0


@pytest.mark.parametrize(
    ("has_coda", "own", "asked", "hit"),
    [
        (False, 4, 4, True),
        (False, 4, 2, True),
        (False, 4, 5, False),
        (True, 4, 4, True),
        (True, 4, 2, False),
    ],
)
def test_which_loops_an_entry_serves(has_coda: bool, own: int, asked: int, hit: bool) -> None:
    pool = make_pool(has_coda=has_coda)
    pool.held(W, held(64, loops=own), 0.0)
    assert length(pool, prompt(100), params(asked)) == (64 if hit else 0)


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        (0, 0, 256), (0, 300, 256), (0, 256, 256), (0, 100, 64), (100, 100, 256), (100, 0, 64),
        (100, 130, 64), (0, 64, 64), (0, 63, 0), (100, 99, 64),
    ],
)  # fmt: skip
def test_a_window_counts_where_the_prefix_is_longer(own: int, asked: int, expected: int) -> None:
    pool = make_pool()
    pool.held(W, held(256, cache_window=own), 0.0)
    assert length(pool, prompt(400), params(cache_window=asked)) == expected


def test_salts_modes_and_initial_states_isolate() -> None:
    pool = make_pool()
    pool.held(W, held(64, salt="a"), 0.0)
    assert length(pool, prompt(100), params(), "a") == 64
    assert length(pool, prompt(100), params(), "b") == 0
    assert length(pool, prompt(100), params(), "") == 0
    assert (
        length(pool, prompt(100), params(kv_cache_mode="fp32"), "a") == 64
    )  # the default, by name
    assert length(pool, prompt(100), params(kv_cache_mode="fp16"), "a") == 0
    assert length(pool, prompt(100), params(init_seed=0), "a") == 0
    assert pool.plan_store(prompt(100), params(), "b", W, None) is not None


def test_prompt_log_probabilities_need_every_token_run() -> None:
    pool = make_pool()
    pool.held(W, held(64), 0.0)
    assert length(pool, prompt(100), params(prompt_logprobs=0)) == 0


def test_each_worker_has_its_own() -> None:
    pool = make_pool()
    pool.held(W, held(64), 0.0)
    pool.held(V, held(128), 0.0)
    assert length(pool, prompt(200), params(), worker=W) == 64
    assert length(pool, prompt(200), params(), worker=V) == 128
    pool.worker_lost(V)
    assert length(pool, prompt(200), params(), worker=V) == 0
    assert len(list(pool.entries())) == 1


def test_a_prompt_is_stored_whole_and_once() -> None:
    pool = make_pool()
    store = pool.plan_store(prompt(200), params(), "s", W, None)
    assert store is not None
    assert (len(store.tokens), store.key.salt, store.key.loops, store.key.kv_cache_mode) == (
        192,
        "s",
        2,
        "fp32",
    )
    pool.held(W, store, 0.0)
    match = pool.matches(prompt(200), params(), "s")[W]
    assert pool.plan_store(prompt(200), params(), "s", W, match) is None
    assert pool.plan_store(prompt(200), params(), "s", V, None) == store
    assert pool.plan_store(prompt(63), params(), "s", W, None) is None


def test_the_second_sight_pins() -> None:
    pool = make_pool()
    pool.held(W, held(128), 0.0)
    (entry,) = pool.entries()
    assert not entry.is_pinned
    pool.use(pool.matches(prompt(128), params(), "")[W], 1.0)  # the very same prompt
    assert entry.is_pinned


def test_the_part_that_prompts_share_gets_an_entry_of_its_own_and_a_pin() -> None:
    pool = make_pool()
    pool.held(W, held(256), 0.0)
    other = Tokens([*prompt(128), *prompt(100, 500)])
    match = pool.matches(other, params(), "")[W]
    assert (match.length, match.is_whole) == (128, False)
    store = pool.plan_store(other, params(), "", W, match)
    assert store is not None and store.tokens == prompt(128)
    pool.use(match, 1.0)
    pool.held(W, store, 1.0)
    pinned = {len(e.tokens): e.is_pinned for e in pool.entries()}
    assert pinned == {256: False, 128: True}
    third = Tokens([*prompt(128), *prompt(100, 700)])
    match = pool.matches(third, params(), "")[W]
    assert (match.length, match.is_whole) == (128, True)
    store = pool.plan_store(third, params(), "", W, match)
    assert store is not None and len(store.tokens) == 192


def test_pins_beyond_capacity_let_go_of_the_least_used() -> None:
    pool = make_pool(capacity=2)
    for at in range(3):
        pool.held(W, held(64, at), float(at))
    for at in (0, 1, 0, 2):
        pool.use(pool.matches(prompt(100, at), params(), "")[W], 10.0 + at)
    assert [e.is_pinned for e in sorted(pool.entries(), key=lambda e: e.tokens[0])] == [
        True,
        False,
        True,
    ]
    assert pool.evicted == []


def test_unpinned_entries_are_bounded_and_their_holders_told() -> None:
    pool = make_pool(capacity=1)
    for at in range(UNPINNED_PER_PINNED + 2):
        pool.held(W, held(64, at), float(at))
    assert pool.evicted == [(W, held(64, 0).prefix_id), (W, held(64, 1).prefix_id)]
    assert length(pool, prompt(100, 0), params()) == 0


def test_a_capacity_of_zero_switches_it_off() -> None:
    pool = make_pool(capacity=0)
    assert pool.plan_store(prompt(200), params(), "", W, None) is None
    pool.held(W, held(64), 0.0)
    assert pool.evicted == [(W, held(64).prefix_id)]
    assert length(pool, prompt(200), params()) == 0


def test_an_entry_that_is_not_what_its_id_says_is_dropped() -> None:
    pool = make_pool()
    wrong = replace(held(64), tokens=prompt(64, 1))
    pool.held(W, wrong, 0.0)
    assert pool.evicted == [(W, wrong.prefix_id)]
    assert list(pool.entries()) == []


def test_names() -> None:
    pool = make_pool(capacity=2)
    code, entry = pool.register("s", "a", prompt(64), 2, 0.0)
    assert code == "" and entry is not None
    assert pool.register("s", "a", prompt(64), 2, 0.0) == ("", entry)
    assert pool.register("s", "a", prompt(128), 2, 0.0) == ("exists", None)
    assert pool.register("s", "a", prompt(64), 3, 0.0) == ("exists", None)
    assert pool.register("t", "a", prompt(64), 2, 0.0)[0] == ""
    assert pool.register("s", "b", prompt(64), 2, 0.0) == ("pool_full", None)
    assert length(pool, prompt(100), params(), "s") == 0  # nobody holds it yet
    store = pool.plan_store(prompt(100), params(), "s", W, None)
    assert store is not None and store.key.name == "a"
    pool.held(W, store, 1.0)
    assert length(pool, prompt(100), params(), "s") == 64
    assert pool.delete("s", "a") and not pool.delete("s", "a")
    assert pool.evicted == [(W, store.prefix_id)]
    pool.evicted.clear()
    pool.held(V, store, 2.0)  # a worker that was away
    assert pool.evicted == [(V, store.prefix_id)]
    pool.evicted.clear()
    assert pool.register("s", "a", prompt(64), 2, 0.0)[0] == ""
    pool.held(V, store, 3.0)
    assert pool.evicted == []


def test_a_registered_entry_outlives_its_holders() -> None:
    pool = make_pool()
    _, entry = pool.register("", "a", prompt(64), 2, 0.0)
    assert entry is not None
    pool.held(W, entry.as_store(), 0.0)
    assert pool.homeless() == []
    pool.dropped(W, [entry.prefix_id])
    assert pool.homeless() == [entry]


_acts = st.lists(
    st.tuples(
        st.sampled_from(["held", "dropped", "lost", "use", "register", "delete"]),
        st.integers(0, 3), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3),
    ),
    max_size=60,
)  # fmt: skip


@given(_acts, st.booleans())
def test_it_agrees_with_a_search_through_all_entries(
    acts: list[tuple[str, int, int, int, int]], has_coda: bool
) -> None:
    pool = make_pool(capacity=2, has_coda=has_coda)
    texts = [
        prompt(256, 0),
        Tokens([*prompt(64), *prompt(192, 300)]),
        Tokens([*prompt(128), *prompt(128, 400)]),
    ]
    for act, who, blocks, text, loops in acts:
        worker = bytes([who + 1]) * 16
        key = PrefixKey(kv_cache_mode="fp32", loops=loops)
        part = Tokens(texts[text][: blocks * 64])
        if act == "held":
            pool.held(worker, HeldPrefix(prefix_id(key, part), key, part, 1, 1), 0.0)
        elif act == "dropped":
            pool.dropped(worker, [prefix_id(key, part)])
        elif act == "lost":
            pool.worker_lost(worker)
        elif act == "register":
            _, entry = pool.register("", f"n{who}", part, loops, 0.0)
            if entry is not None and blocks > 1:
                pool.held(worker, entry.as_store(), 0.0)
        elif act == "delete":
            pool.delete("", f"n{who}")
        found = pool.matches(texts[text], params(loops), "")
        if act == "use":
            for match in found.values():
                pool.use(match, 0.0)
        asked = Tokens([*texts[text], 1])
        expected: dict[bytes, int] = {}
        for entry in pool.entries():
            fits = entry.key.loops == loops if has_coda else entry.key.loops >= loops
            common = next(
                (i for i, (a, b) in enumerate(zip(entry.tokens, asked, strict=False)) if a != b),
                len(entry.tokens),
            )
            for holder in entry.holders if fits else ():
                expected[holder] = max(expected.get(holder, 0), common // 64 * 64)
        found = pool.matches(asked, params(loops), "")
        assert {w: m.length for w, m in found.items()} == {w: n for w, n in expected.items() if n}
        assert sum(e.is_pinned for e in pool.entries()) <= max(2, len(pool._named))
        assert all(e.holders or e.key.name for e in pool.entries())
    for name in range(4):
        pool.delete("", f"n{name}")
    for who in range(4):
        pool.worker_lost(bytes([who + 1]) * 16)
    assert pool._roots == {} and list(pool.entries()) == []  # no twig is left


# ---------------------------------------------------------------------------------------------- through the scheduler


def run_one(rig: Rig, client: BenchClient, text: Tokens, **fields: object) -> None:
    spec = SequenceSpec(text, client.num_ids)
    got = client.submit(sequences=(spec,), max_tokens=2, **fields)  # type: ignore[arg-type]
    rig.run(3)
    assert got.tokens == [tokens(spec.seed, 2)]


def test_the_second_of_two_prompts_begins_from_the_first() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    run_one(rig, client, prompt(200))
    run_one(rig, client, Tokens([*prompt(192), 5, 6]))
    assert [(r.prefix_len, bool(r.store)) for r in worker.runs] == [(0, True), (192, False)]
    assert worker.runs[1].prefix_id == worker.runs[0].store.prefix_id  # type: ignore[union-attr]
    assert rig.count("tinyloop_prefix_pool_hits_total") == 1
    run_one(rig, client, prompt(200), salt="other")
    assert worker.runs[2].prefix_len == 0
    assert rig.count("tinyloop_prefix_pool_hits_total") == 1


def test_the_answer_says_how_much_was_cached() -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    client.submit(seed=1, size=100)
    rig.run(6)
    got = client.submit(seed=1, size=100)
    rig.run(6)
    assert got.stats.cached_tokens == 64


def test_routing_prefers_the_holder_unless_it_is_much_busier() -> None:
    rig = Rig()
    holder, client = rig.worker("a", max_rows=8), rig.client()
    run_one(rig, client, prompt(100))
    other = rig.worker("b", max_rows=8)
    for seed in range(8):
        client.submit(seed=seed, size=100, max_tokens=50)
    rig.run(1)
    # Up to a quarter of its rows more than the other are worth it.
    assert len(holder.running) == 5 and len(other.running) == 3


def test_a_registered_prefix_is_built_listed_used_and_deleted() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    client.send(PrefixCommand(client.client_id, 1, "register", "s", "sys", prompt(150), 3))
    assert client.read() == []
    rig.elapse(0.1)
    rig.run(1)
    rig.elapse(0.1)
    client.read()
    (reply,) = [m for m in client.seen if isinstance(m, PrefixReply)]
    assert (reply.query_id, reply.code) == (1, "")
    (info,) = reply.entries
    assert (info.name, info.num_tokens, info.loops, info.workers, info.is_pinned) == (
        "sys",
        128,
        3,
        ("w0",),
        True,
    )
    assert info.num_bytes > 0
    assert rig.count("tinyloop_requests_submitted_total") == 0  # not a client's request
    run_one(rig, client, prompt(150), salt="s", loops=2)
    assert worker.runs[-1].prefix_len == 128
    client.send(PrefixCommand(client.client_id, 2, "list", "s"))
    client.send(PrefixCommand(client.client_id, 3, "list", "other"))
    client.send(PrefixCommand(client.client_id, 4, "delete", "other", "sys"))
    client.send(PrefixCommand(client.client_id, 5, "delete", "s", "sys"))
    replies = {m.query_id: m for m in client.read()}
    assert [e.hits for e in replies[2].entries if e.name == "sys"] == [1]
    assert replies[3].entries == () and replies[4].code == "not_found" and replies[5].code == ""
    rig.tick()
    drops = [m for m in worker.inbox if isinstance(m, DropPrefixes)]
    assert [len(d.prefix_ids) for d in drops] == [1]
    rig.check_books()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"tokens": prompt(63)}, "invalid_request"), ({"tokens": prompt(64), "loops": 9}, "invalid_request"),
        ({"tokens": prompt(64), "loops": -1}, "invalid_request"), ({"tokens": Tokens([5000] * 64)}, "invalid_request"),
        ({"tokens": prompt(64), "name": ""}, "invalid_request"), ({"tokens": prompt(2000)}, "invalid_request"),
    ],
)  # fmt: skip
def test_a_register_that_makes_no_sense_is_answered(fields: dict[str, object], code: str) -> None:
    rig = Rig()
    rig.worker()
    client = rig.client()
    client.send(replace(PrefixCommand(client.client_id, 1, "register", "", "a"), **fields))  # type: ignore[arg-type]
    assert [m.code for m in client.read()] == [code]


def test_a_register_without_an_engine() -> None:
    rig = Rig()
    client = rig.client()
    client.send(PrefixCommand(client.client_id, 1, "register", "", "a", prompt(64)))
    assert [m.code for m in client.read()] == ["engine_down"]


def build(rig: Rig, client: BenchClient) -> None:
    client.send(PrefixCommand(client.client_id, 1, "register", "", "sys", prompt(128), 2))
    rig.elapse(0.1)
    rig.run(1)
    rig.elapse(0.1)


def test_a_registered_prefix_is_rebuilt_after_its_worker_is_lost() -> None:
    rig = Rig()
    first, client = rig.worker("a"), rig.client()
    build(rig, client)
    rig.kill(first)
    rig.elapse(1.0)
    second = rig.worker("b")
    rig.elapse(6.0)
    rig.run(1)
    rig.elapse(0.1)
    assert [p.key.name for p in second.prefixes.values()] == ["sys"]
    run_one(rig, client, prompt(150))
    assert second.runs[-1].prefix_len == 128


def test_another_worker_stores_a_registered_prefix_as_it_passes_by() -> None:
    rig = Rig()
    rig.worker("a", max_rows=1)
    client = rig.client()
    build(rig, client)
    second = rig.worker("b", max_rows=4)
    for seed in range(3):
        client.submit(seed=seed, size=150, max_tokens=4)
    rig.run(1)
    assert [p.key.name for p in second.prefixes.values()] == ["sys"]


def test_a_new_scheduler_learns_from_its_workers_what_they_hold() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    build(rig, client)
    run_one(rig, client, prompt(200, 300))
    rig.start(epoch=2)
    worker.register()
    worker.read()
    client.send(PrefixCommand(client.client_id, 9, "list"))
    entries = next(m for m in client.read() if isinstance(m, PrefixReply)).entries
    assert {(e.name, e.num_tokens, e.is_pinned) for e in entries} == {
        ("sys", 128, True),
        ("", 192, False),
    }
    run_one(rig, client, prompt(200, 300))
    assert worker.runs[-1].prefix_len == 192


def test_of_two_registered_prefixes_that_share_their_beginning_both_are_built() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    for name, size in (("short", 64), ("long", 192)):
        client.send(PrefixCommand(client.client_id, size, "register", "", name, prompt(size), 2))
    rig.elapse(0.1)
    rig.run(1)
    rig.elapse(0.1)
    client.read()
    assert {m.query_id: m.code for m in client.seen if isinstance(m, PrefixReply)} == {
        64: "",
        192: "",
    }
    assert {p.key.name: len(p.tokens) for p in worker.prefixes.values()} == {
        "short": 64,
        "long": 192,
    }


def test_a_build_that_cannot_be_kept_is_told() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    client.send(PrefixCommand(client.client_id, 1, "register", "", "sys", prompt(128), 2))
    rig.elapse(0.1)
    worker.read()
    done = worker.step(deliver=False)
    worker.send(replace(done, held=()))  # no room
    rig.elapse(0.2)
    (reply,) = [m for m in client.seen if isinstance(m, PrefixReply)]
    assert reply.code == "pool_full"


def test_a_worker_that_drops_an_entry_is_not_sent_to_it() -> None:
    rig = Rig()
    worker, client = rig.worker(), rig.client()
    run_one(rig, client, prompt(100))
    drop_all(worker)
    rig.run(1)
    run_one(rig, client, prompt(100))
    assert worker.runs[-1].prefix_len == 0


def drop_all(worker: BenchWorker) -> None:
    worker.dropped += list(worker.prefixes)
    worker.prefixes.clear()
