"""KV formats and sharing: what each query reads is what the definition says, the tokens never depend on circumstances, sizes are real."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.kv_cache import KVCache
from gpu_worker.kv_sizes import FORMATS, SHARES
from kernels.layout import CutCache
from scheduler.messages import Tokens
from scripts.make_toy_artifact import toy_config
from tests.gpu_worker.engine_helpers import collect, make_engine, make_run, random_prompt
from tests.gpu_worker.slow_decoder import retell
from tests.gpu_worker.test_engine_pressure import prefix_of


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


CASES = [
    ("pre", "fp16", "per_loop"),
    ("gqa", "int8", "per_loop"),
    ("huginn", "int4", "per_loop"),
    ("alibi", "h", "per_loop"),
    ("learned", "h_int4", "per_loop"),
    ("biases", "h_int4", "per_loop"),  # rotary: rebuilt
    ("interleaved", "h", "last_loop"),
    ("ouro", "fp32", "last_loop"),
    ("learned", "int8", "last_loop"),
    ("branch_post_alibi", "h_int4", "last_loop"),
]


@pytest.mark.parametrize(("variant", "kv_format", "kv_share"), CASES)
def test_each_query_reads_what_the_definition_says(
    shared: Path, variant: str, kv_format: str, kv_share: str
) -> None:
    engine = make_engine(shared, variant, kv_format=kv_format, kv_share=kv_share)
    for length, window in ((80, 0), (30, 40)):
        prompt = random_prompt(random.Random(variant), 512, length)
        run = make_run(1, prompt, loops=2, max_tokens=50, cache_window=window)
        got = collect(engine, [run])[1]
        told = retell(engine, run, got.tokens, kv_format, kv_share)
        assert max(told.margins) < 0.02, told.margins
    assert engine.cache.pool.num_used == engine.cache.copies.num_used == 0
    assert engine.cache.sinks.num_used == 0


# the whole matrix takes minutes on a busy machine; these reach every line
QUICK = [
    case if i in (1, 5, 9) else pytest.param(*case, marks=pytest.mark.slow)
    for i, case in enumerate(CASES)
]


@pytest.mark.parametrize(("variant", "kv_format", "kv_share"), QUICK)
def test_tokens_do_not_depend_on_batch_chunk_prefix_or_preemption(
    shared: Path, variant: str, kv_format: str, kv_share: str
) -> None:
    rng = random.Random(variant)
    mode = {"kv_format": kv_format, "kv_share": kv_share}
    engine = make_engine(shared, variant, **mode)
    runs = []
    for i, length in enumerate((150, 64, 127, 190)):
        how = (
            {"temperature": 0.8, "presence_penalty": 0.4}
            if i % 2
            else {"cache_window": 70 * (i > 0)}
        )
        prompt = random_prompt(rng, 512, length)
        runs.append(make_run(i, prompt, seed=i, loops=3, max_tokens=50 + 5 * i, logprobs=2, **how))
    together = collect(engine, runs)
    chunked = collect(make_engine(shared, variant, prefill_chunk=64, **mode), runs)
    one = 4 * (engine.limits.extra_tables + engine.limits.loops_default)  # a longest sequence's
    few = one if kv_share == "last_loop" else 26
    tight_engine = make_engine(shared, variant, num_blocks=few, prefill_chunk=192, **mode)
    tight = collect(tight_engine, runs)
    assert tight_engine.series()["preemptions_total"] > 0
    for i, run in enumerate(runs):
        for other in (chunked, tight, collect(engine, [run])):
            assert other[i].tokens == together[i].tokens
            assert other[i].logprobs == together[i].logprobs
        rest = collect(engine, [replace(run, emitted=Tokens(together[i].tokens[:20]))])[i]
        assert rest.tokens == together[i].tokens[20:]
    keeper = make_run(
        7, runs[0].prompt, loops=3, max_tokens=30, store=prefix_of(list(runs[0].prompt), 128)
    )
    collect(engine, [keeper])
    hit = collect(engine, [replace(runs[0], prefix_id=bytes(16), prefix_len=128)])[0]
    assert hit.cached_tokens == 128
    assert (hit.tokens, hit.logprobs) == (together[0].tokens, together[0].logprobs)
    engine.drop_prefixes([bytes(16)])
    for pool in (engine.cache.pool, engine.cache.copies, engine.cache.sinks):
        assert pool.num_used == 0


@pytest.mark.parametrize(
    ("kv_format", "kv_share", "how"),
    [
        ("int4", "last_loop", {"exit_kind": "latent", "exit_threshold": 0.95, "exit_kv": "copy"}),
        ("h_int4", "per_loop", {"exit_kind": "latent", "exit_threshold": 0.95, "exit_kv": "copy"}),
        ("fp32", "last_loop", {"warm_start": True}),
    ],
)
def test_modes_with_exits_and_warm_starts(
    shared: Path, kv_format: str, kv_share: str, how: dict
) -> None:
    engine = make_engine(shared, "learned", kv_format=kv_format, kv_share=kv_share)
    run = make_run(1, random_prompt(random.Random(1), 512, 2), loops=4, max_tokens=90, **how)
    other = make_run(2, random_prompt(random.Random(2), 512, 80), loops=4, max_tokens=40, **how)
    got = collect(engine, [run, other])
    told = retell(engine, run, got[1].tokens, kv_format, kv_share)
    assert max(told.margins) < 0.02
    assert got[1].core_loops == told.loops
    assert collect(engine, [other])[2].tokens == got[2].tokens


@pytest.mark.parametrize("kv_format", FORMATS)
def test_sizes_are_those_of_the_arrays(kv_format: str) -> None:
    cache = KVCache(toy_config("alibi"), 20, 2, 256, kv_format)
    arrays = (
        (cache.paged.keys, cache.paged.values)
        if not isinstance(cache.paged, CutCache)
        else (cache.paged.keys, cache.paged.values, cache.paged.scales)
    )
    assert sum(a.nbytes for a in arrays) == 20 * cache.block_bytes
    if isinstance(cache.paged, CutCache):
        copies = cache.paged.exact_keys.nbytes + cache.paged.exact_values.nbytes
        sinks = cache.paged.sink_keys.nbytes + cache.paged.sink_values.nbytes
        assert (copies, sinks) == (20 * cache.form.copy_bytes, 20 * cache.form.sink_bytes)


@pytest.mark.parametrize("kv_share", SHARES)
def test_a_sequences_bytes_add_up(kv_share: str) -> None:
    cache = KVCache(toy_config("alibi"), 60, 2, 256, "int8", kv_share)
    slot = cache.open(4)
    cache.extend(slot, 200)
    cache.settle(slot, 130)
    cache.fold(slot, 130)
    tables = 4 * 5 * 4 * 2  # (prelude and coda, four loops) x four blocks, in both tables
    height, folded = 5, 2 if kv_share == "last_loop" else 5
    expected = (2 * folded + 2 * height) * cache.block_bytes + 2 * height * cache.form.copy_bytes
    assert cache.slot_bytes(slot) == expected + folded * cache.form.sink_bytes + tables
    whole = cache.used_bytes
    assert whole - cache.slot_bytes(slot) == (
        cache.block_tables.nbytes + cache.paged.exact_tables.nbytes + cache.paged.sink_of.nbytes - tables
    )  # fmt: skip
    cache.close(slot)
    assert cache.pool.num_used == cache.copies.num_used == cache.sinks.num_used == 0


def test_the_card_says_what_the_allocator_says(shared: Path) -> None:
    """At full context, with no more exact copies at hand than a worker of one row has."""
    engine = make_engine(shared, "alibi", kv_format="int8", max_rows=1, prefill_chunk=64)
    cache, card = engine.cache, msgpack.unpackb(engine.card)
    assert cache.copies.num_blocks < cache.pool.num_blocks and cache.pool.num_used == 0
    height = cache.num_extra_tables + engine.limits.loops_default
    total = height * (4 * cache.block_bytes + cache.form.copy_bytes + cache.form.sink_bytes + 4 * 8)
    assert card["kv_bytes_per_token"]["int8"] == round(total / 256)
    assert engine.series()["kv_bytes_per_token"] == total / 256


def test_a_mode_that_an_artifact_cannot_use_is_an_error_at_start(shared: Path) -> None:
    for variant, kv_format, word in (("gqa", "h_int4", "not smaller"), ("gqa", "h", "not smaller")):
        with pytest.raises(ArtifactError, match=word):
            make_engine(shared, variant, kv_format=kv_format)
    with pytest.raises(ArtifactError, match="nothing to share"):
        make_engine(shared, "plain", kv_share="last_loop")


def test_a_worker_serves_its_one_mode(shared: Path) -> None:
    engine = make_engine(
        shared, "pre", kv_format="h", kv_share="last_loop", h_mode_fp16_attn_qkv=True
    )
    assert engine.limits.kv_modes == ("h+last_loop+fp16_qkv",)
    good = make_run(1, [5, 6, 7], kv_cache_mode="h+last_loop+fp16_qkv")
    got = collect(engine, [good, make_run(2, [5, 6, 7], kv_cache_mode="fp32")])
    assert got[1].finish_reason == "length" and got[2].error_code == "invalid_request"
    absorbed = make_engine(shared, "alibi", kv_format="h_int4", h_mode_fp16_attn_qkv=True)
    assert absorbed.limits.kv_modes == ("h_int4",)
