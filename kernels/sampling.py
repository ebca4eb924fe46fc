"""Choosing tokens on the device: penalties, bias, temperature, top-k, top-p, min-p, keyed noise.

The order is the design's; ties go to the lowest id; sums that decide what is kept are integers, so their order does
not matter. A row's token depends on its own logits and settings alone. A cluster of blocks keeps a row's values in its shared memory.
Nothing is sorted: a search over the ordered bits of the values finds the last value that is kept, and a second one its last id. Each turn
of a search counts what lies above seven thresholds; every block tells all others its counts, and all draw the same conclusion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    below,
    bits_of,
    block_x,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    exp2,
    f32_of,
    f32_to_mass,
    fma,
    grid_dependency_launch,
    grid_dependency_wait,
    int_to_f32,
    less,
    less_f32,
    load_f32,
    load_i32,
    load_i64,
    load_shared_32,
    load_shared_64,
    log2,
    map_shared,
    max_shared,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    min_shared,
    mul_high_64,
    mul_low,
    quotient,
    reciprocal,
    remainder,
    same,
    select,
    select_int,
    shared_base,
    shuffle_from,
    store_32,
    store_async_64,
    store_f32,
    store_shared_32,
    store_shared_64,
    sync_block,
    thread_id,
    warp_max,
    warp_min,
    warp_sum,
    wide,
)

THREADS = 512
_BATCH = 4  # loads that a thread has under way
_SLOTS = 7  # numbers that blocks tell each other in a turn
# Shared memory of `choose`: two barriers, the warps' own numbers, what has come from all blocks in this turn and the next, the values.
_OWN_AT = 16
_FROM_AT = _OWN_AT + 16 * _SLOTS * 8
_VALUES_AT = _FROM_AT + 2 * 8 * _SLOTS * 8
_MAX_SHARED = 227 * 1024
_BINS_AT = 64  # of `log_probabilities`: the threads' sums, after two numbers that all share
_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_NO_ID = 0x7FFFFFFF


@traced("r")
def _ordered(z: Any) -> Any:
    """Bits that order as unsigned numbers like the floats."""
    bits = bits_of(z)
    return bits ^ select_int(0xFFFFFFFF, 0x80000000, bits >> 31)


@traced("f")
def _unordered(order: Any) -> Any:
    return f32_of(order ^ select_int(0x80000000, 0xFFFFFFFF, order >> 31))


@traced("r")
def _mix(h: Any) -> Any:
    h = mul_low(h ^ (h >> 16), 0x7FEB352D)
    h = mul_low(h ^ (h >> 15), 0x846CA68B)
    return h ^ (h >> 16)


@traced("f")
def _minus_log(u: Any, rest: Any) -> Any:
    """-ln(u), where rest = 1 - u: a series near 1, where the fast logarithm loses its digits."""
    series = fma(fma(fma(fma(rest, 0.2, 0.25), rest, 1 / 3), rest, 0.5), rest, 1.0) * rest
    return select(series, log2(u) * -_LN2, less_f32(rest * rest, 0.001))


@traced("f")
def _noise(low: Any, high: Any, token: Any) -> Any:
    """-ln(-ln(u)), u = (23 hashed bits + 1/2) / 2^23, keyed by (low, high, token)."""
    h = _mix(_mix((mul_low(token, 0x9E3779B9) + low) & 0xFFFFFFFF) ^ (high & 0xFFFFFFFF))
    step = 2.0**-23
    u = (int_to_f32(h >> 9) + 0.5) * step
    rest = (int_to_f32(0x7FFFFF - (h >> 9)) + 0.5) * step
    inner = _minus_log(u, rest)
    return _minus_log(inner, int_to_f32(1) - inner)


def _make_value(is_shaped: bool) -> Any:
    @traced("f")
    def value(logits: Any, counts: Any, bias: Any, settings: Any, i: Any) -> Any:
        """Logit i after penalties, bias and temperature.

        counts: how often the token was generated; bit 31: it is in the prompt.
        """
        z = load_f32(logits + i * 4)
        if is_shaped:
            count = load_i32(counts + i * 4)
            generated = count & 0x7FFFFFFF
            repetition, presence, frequency = (load_f32(settings + 4 * j) for j in (2, 3, 4))
            divided = z * reciprocal(repetition)
            punished = select(divided, z * repetition, less_f32(0.0, z))
            z = select(z, punished, same(count, 0))
            z = z - select(0.0, presence, same(generated, 0))
            z = fma(int_to_f32(generated) * -1.0, frequency, z) + load_f32(bias + i * 4)
        return z * load_f32(settings)

    return value


@traced("f")
def _likelihood(z: Any, top: Any) -> Any:
    """exp(z - top)."""
    return exp2((z - top) * _LOG2E)


@traced("l")
def _mass(z: Any, top: Any) -> Any:
    return f32_to_mass(_likelihood(z, top) * float(1 << 30))


@traced("f")
def _noisy(z: Any, low: Any, high: Any, token: Any) -> Any:
    return z + _noise(low, high, token)


@traced("r")
def _passes(z: Any, top: Any, min_p: Any) -> Any:
    return 1 - less_f32(_likelihood(z, top), min_p)


def _make_choose(is_shaped: bool, vocab: int, cluster: int) -> Any:
    value = _make_value(is_shaped)
    threads, num_warps, size = THREADS, THREADS // 32, -(-vocab // cluster)
    values_at = _VALUES_AT
    sent = cluster * _SLOTS
    bytes_a_turn = sent * 8

    @traced()
    def take(logits: Any, counts: Any, bias: Any, settings: Any, first: Any, i: Any, num: Any, base: Any) -> None:  # fmt: skip
        """Puts values i, i + threads, ... into shared memory; asked for together, so that they come together."""
        at = [select_int(i + n * threads, 0, less(i + n * threads, num)) for n in range(_BATCH)]
        found = [value(logits, counts, bias, settings, first + j) for j in at]
        for n, z in enumerate(found):
            # What lies beyond the end is written to a place that nobody reads.
            is_there = less(i + n * threads, num)
            store_shared_32(base + values_at + select_int(at[n], size, is_there) * 4, _ordered(z))

    @device_function
    def send(turn: Any, base: Any, mine: Any) -> None:
        """Tells every block of the cluster one number of this one's."""
        slot, half = remainder(thread_id(), _SLOTS), turn & 1
        place = base + _FROM_AT + (half * sent + cluster_rank() * _SLOTS + slot) * 8
        there = quotient(thread_id(), _SLOTS)
        store_async_64(map_shared(place, there), mine, map_shared(base + half * 8, there))

    @device_function
    def receive(turn: Any, base: Any) -> Any:
        """Where the numbers of all blocks have come: rank by rank, `_SLOTS` each."""
        half = turn & 1
        mbarrier_wait(base + half * 8, (turn >> 1) & 1)
        return base + _FROM_AT + half * (sent * 8)

    @device_function
    def rearm(turn: Any, base: Any) -> None:
        """For the turn after next. Others send for it once this block has sent for the next."""
        if thread_id() == 0:
            mbarrier_expect(base + (turn & 1) * 8, bytes_a_turn)

    @device_function
    def all_sum(turn: Any, base: Any, slot: Any) -> Any:
        """Number `slot` of the blocks' sums, of what the warps have put into their places."""
        sync_block()
        if thread_id() < sent:
            total = 0
            for warp in range(num_warps):
                total += load_shared_64(
                    base + _OWN_AT + (warp * _SLOTS + remainder(thread_id(), _SLOTS)) * 8
                )
            send(turn, base, total)
        came = receive(turn, base)
        total = 0
        for rank in range(cluster):
            total += load_shared_64(came + (rank * _SLOTS + slot) * 8)
        rearm(turn, base)
        return total

    @device_function
    def put(base: Any, slot: Any, mine: Any) -> None:
        """This warp's sum of the lanes' numbers (below 2^46 in all), for `all_sum`."""
        low, high = warp_sum(mine & 0xFFFFFF), warp_sum(mine >> 24)
        if thread_id() & 31 == 0:
            at = (thread_id() >> 5) * _SLOTS + slot
            store_shared_64(base + _OWN_AT + at * 8, wide(low) + (wide(high) << 24))

    @device_function
    def best(turn: Any, base: Any, order: Any, token: Any) -> Any:
        """(largest order, its lowest token) over the cluster."""
        most = warp_max(order)
        lowest = warp_min(token if same(order, most) else _NO_ID)
        if thread_id() & 31 == 0:
            key = ((wide(most) & 0xFFFFFFFF) << 31) | (_NO_ID - lowest)
            store_shared_64(base + _OWN_AT + (thread_id() >> 5) * _SLOTS * 8, key)
        sync_block()
        if thread_id() < sent:
            key = wide(0)
            for warp in range(num_warps):
                key = max(key, load_shared_64(base + _OWN_AT + warp * _SLOTS * 8))
            send(turn, base, key)
        came = receive(turn, base)
        key = wide(0)
        for rank in range(cluster):
            key = max(key, load_shared_64(came + rank * _SLOTS * 8))
        rearm(turn, base)
        return key >> 31, _NO_ID - (key & _NO_ID)

    @device_function
    def is_kept(order: Any, token: Any, floor: Any, last: Any) -> Any:
        return below(floor, order) or (same(order, floor) and token <= last)

    @device_function
    def weight_of(order: Any, is_mass: Any, top: Any) -> Any:
        return _mass(_unordered(order), top) if is_mass else wide(1)

    @device_function
    def narrow(
        first: Any, num: Any, floor: Any, last: Any, target: Any, is_mass: Any, top: Any, turn: Any, base: Any
    ) -> Any:  # fmt: skip
        """The new (floor, last): keep those of the kept that have less than `target` ahead of them.

        The floor is the largest value at which the weight of all from it on reaches the target, found three bits a turn.
        """
        lane, prefix = thread_id() & 31, 0
        for step in range(11):
            shift = 30 - 3 * step
            a, b, c, d, e, f, g = wide(0), wide(0), wide(0), wide(0), wide(0), wide(0), wide(0)
            for i in range(thread_id(), num, threads):
                order = load_shared_32(base + values_at + i * 4)
                if not below(order, prefix) and is_kept(order, first + i, floor, last):
                    weight = weight_of(order, is_mass, top)
                    digit = (order >> 30) & 3
                    if step > 0:
                        digit = ((order - prefix) >> shift) & 7
                        if below(prefix + (8 << shift) - 1, order):
                            digit = 7
                    a += weight if digit >= 1 else 0
                    b += weight if digit >= 2 else 0
                    c += weight if digit >= 3 else 0
                    d += weight if digit >= 4 else 0
                    e += weight if digit >= 5 else 0
                    f += weight if digit >= 6 else 0
                    g += weight if digit >= 7 else 0
            put(base, 0, a)
            put(base, 1, b)
            put(base, 2, c)
            put(base, 3, d)
            put(base, 4, e)
            put(base, 5, f)
            put(base, 6, g)
            total = all_sum(turn, base, lane if lane < _SLOTS else 0)
            turn += 1
            prefix += warp_sum(1 if lane < _SLOTS and total >= target else 0) << shift
        # Equal values: the lowest ids while less than the target is ahead; a binary search for the last one, unless
        # all of them are kept.
        ahead, equal = wide(0), wide(0)
        for i in range(thread_id(), num, threads):
            order = load_shared_32(base + values_at + i * 4)
            if is_kept(order, first + i, floor, last):
                if below(prefix, order):
                    ahead += weight_of(order, is_mass, top)
                elif same(order, prefix):
                    equal += 1
        put(base, 0, ahead)
        put(base, 1, equal)
        total = all_sum(turn, base, thread_id() & 1)
        turn += 1
        # The lanes have the two sums in turn.
        other = wide(shuffle_from(total & 0xFFFFFF, lane ^ 1)) + (
            wide(shuffle_from(total >> 24, lane ^ 1)) << 24
        )
        ahead, equal = (total, other) if lane & 1 == 0 else (other, total)
        each = weight_of(prefix, is_mass, top)
        low, high = 0, last if same(prefix, floor) else vocab - 1
        if ahead + (equal - 1) * each < target:
            low = high
        while low < high:
            middle = (low + high) >> 1
            equal = wide(0)
            for i in range(thread_id(), num, threads):
                order = load_shared_32(base + values_at + i * 4)
                if (
                    same(order, prefix)
                    and first + i <= middle
                    and is_kept(order, first + i, floor, last)
                ):
                    equal += 1
            put(base, 0, equal)
            equal = all_sum(turn, base, 0)
            turn += 1
            # all equal entries up to `middle` are kept, and there is room for one more
            if ahead + equal * each < target:
                low = middle + 1
            else:
                high = middle
        return prefix, low, turn

    def kernel(
        all_logits: Any, all_counts: Any, all_bias: Any, all_settings: Any, all_top_p: Any, all_numbers: Any, tokens: Any,
    ) -> None:  # fmt: skip
        row, base = quotient(block_x(), cluster), shared_base()
        first = cluster_rank() * size
        num = min(size, vocab - first)
        if thread_id() == 0:
            for half in range(2):
                mbarrier_init(base + half * 8, 1)
            mbarrier_init_fence()
            for half in range(2):
                mbarrier_expect(base + half * 8, bytes_a_turn)
        grid_dependency_launch()
        sync_block()
        cluster_arrive_relaxed()
        grid_dependency_wait()
        logits = all_logits + wide(row) * (vocab * 4)
        counts, bias = all_counts + wide(row) * (vocab * 4), all_bias + wide(row) * (vocab * 4)
        settings, numbers = all_settings + row * 32, all_numbers + row * 16
        top_k, key_low, key_high = load_i32(numbers), load_i32(numbers + 4), load_i32(numbers + 8)
        is_greedy = load_i32(numbers + 12)
        top_p = load_i64(all_top_p + row * 8)
        for start in range(0, num, _BATCH * threads):
            take(logits, counts, bias, settings, first, start + thread_id(), num, base)
        # Each thread goes on with the values that it has put there itself.
        best_order, best_token = 0, _NO_ID
        for i in range(thread_id(), num, threads):
            order = load_shared_32(base + values_at + i * 4)
            if below(best_order, order):
                best_order, best_token = order, first + i
        cluster_wait()
        top_order, token = best(0, base, best_order, best_token)
        turn = 1
        if is_greedy == 0:
            top = _unordered(top_order)
            floor, last = 0, vocab - 1
            if top_k > 0 and top_k < vocab:
                floor, last, turn = narrow(
                    first, num, floor, last, wide(top_k), False, top, turn, base
                )
            if top_p != 0:
                total = wide(0)
                for i in range(thread_id(), num, threads):
                    order = load_shared_32(base + values_at + i * 4)
                    if is_kept(order, first + i, floor, last):
                        total += _mass(_unordered(order), top)
                put(base, 0, total)
                target = mul_high_64(all_sum(turn, base, 0), top_p)
                turn += 1
                target = target if target > 1 else 1
                floor, last, turn = narrow(first, num, floor, last, target, True, top, turn, base)
            min_p = load_f32(settings + 4)
            best_order, best_token = 0, _NO_ID
            for i in range(thread_id(), num, threads):
                order = load_shared_32(base + values_at + i * 4)
                z = _unordered(order)
                if is_kept(order, first + i, floor, last) and _passes(z, top, min_p):
                    noisy = _ordered(_noisy(z, key_low, key_high, first + i))
                    if below(best_order, noisy):
                        best_order, best_token = noisy, first + i
            _, token = best(turn, base, best_order, best_token)
        if cluster_rank() == 0 and thread_id() == 0:
            store_32(tokens + row * 4, token)

    return kernel


def choose(name: str, vocab: int, *, is_shaped: bool, cluster: int = 0) -> Variant:
    """One token a row, by a cluster of blocks that share its `vocab` values (`cluster` 0: as many blocks as suit their number).

    A cluster has two blocks at least: a launch without one may not send to blocks of a cluster.

    Kernel arguments: logits float32 (rows, vocab); counts int32 (rows, vocab) and bias float32 (rows, vocab)
    (`is_shaped` only); settings float32 (rows, 8): 1/temperature (1 if greedy), min_p, repetition, presence and
    frequency penalties; top_p int64 (rows,): top_p times 2^64 as bits, 0: all; numbers int32 (rows, 4): top_k
    (0: all), the noise key's low and high word, 1 for greedy; tokens int32 (rows,), written.

    Raises:
        ValueError: more values than the shared memory of a cluster holds.
    """
    blocks = cluster or (8 if vocab > 4096 else 2)
    shared = _VALUES_AT + 4 * (-(-vocab // blocks) + 1)
    if shared > _MAX_SHARED:
        raise ValueError(f"{vocab} logits a row are more than {blocks} blocks hold")
    return Variant(
        name, _make_choose(is_shaped, vocab, blocks), "lllllll", THREADS,
        cluster=blocks, shared_bytes=shared, blocks_per_sm=2, constants=(is_shaped, vocab, blocks),
    )  # fmt: skip


@traced("f")
def _log_sum(top: Any, total: Any) -> Any:
    return fma(log2(total), _LN2, top)


@traced("f")
def _add_likelihood(total: Any, z: Any, top: Any) -> Any:
    return total + _likelihood(z, top)


@traced("f")
def _minus(a: Any, b: Any) -> Any:
    return a - b


@traced("f")
def _zero() -> Any:
    return int_to_f32(0)


@traced("f")
def _plus(a: Any, b: Any) -> Any:
    return a + b


def _make_log_probabilities() -> Any:
    threads, bins_at = THREADS, _BINS_AT

    def kernel(
        all_logits: Any,
        chosen: Any,
        logprobs: Any,
        top_ids: Any,
        top_logprobs: Any,
        vocab: Any,
        num_top: Any,
    ) -> None:
        row, base = block_x(), shared_base()
        grid_dependency_launch()
        grid_dependency_wait()
        logits = all_logits + row * vocab * 4
        # The n-th best is the best of what comes after the one before; round 0 finds the maximum for the sum.
        previous, previous_id = 0, 0
        normaliser = _zero()
        for turn in range(num_top + 1):
            order, token = 0, _NO_ID
            for i in range(thread_id(), vocab, threads):
                mine = _ordered(load_f32(logits + i * 4))
                is_after = below(mine, previous) or (same(mine, previous) and i > previous_id)
                if (turn <= 1 or is_after) and below(order, mine):
                    order, token = mine, i
            if thread_id() == 0:
                store_shared_32(base, 0)
                store_shared_32(base + 4, _NO_ID)
            sync_block()
            most = warp_max(order)
            if thread_id() & 31 == 0:
                max_shared(base, most)
            sync_block()
            previous = load_shared_32(base)
            first = warp_min(token if same(order, previous) else _NO_ID)
            if thread_id() & 31 == 0:
                min_shared(base + 4, first)
            sync_block()
            previous_id = load_shared_32(base + 4)
            sync_block()
            if turn == 0:
                top = _unordered(previous)
                total = _zero()
                for i in range(thread_id(), vocab, threads):
                    total = _add_likelihood(total, load_f32(logits + i * 4), top)
                store_shared_32(base + bins_at + thread_id() * 4, bits_of(total))
                sync_block()
                total = _zero()
                for i in range(threads):
                    total = _plus(total, f32_of(load_shared_32(base + bins_at + i * 4)))
                normaliser = _log_sum(top, total)
                if thread_id() == 0:
                    mine = load_i32(chosen + row * 4)
                    store_f32(logprobs + row * 4, _minus(load_f32(logits + mine * 4), normaliser))
            elif thread_id() == 0:
                at = row * num_top + turn - 1
                store_32(top_ids + at * 4, previous_id)
                store_f32(top_logprobs + at * 4, _minus(_unordered(previous), normaliser))

    return kernel


def log_probabilities(name: str) -> Variant:
    """Log-probabilities of the raw logits.

    Kernel arguments: logits float32 (rows, vocab); chosen int32 (rows,); logprobs float32 (rows,), written;
    top_ids int32 and top_logprobs float32 (rows, num_top), written, ties to the lowest id; vocab; num_top.
    """
    return Variant(
        name, _make_log_probabilities(), "lllllrr", THREADS, shared_bytes=_BINS_AT + 4 * THREADS
    )


def variants() -> dict[str, Variant]:
    """Every kernel of this module by name."""
    return {
        "choose": choose("choose", 50257, is_shaped=False),
        "choose_shaped": choose("choose_shaped", 50257, is_shaped=True),
        "log_probabilities": log_probabilities("log_probabilities"),
    }


def pack_settings(
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    *,
    penalties: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(settings, top_p, numbers) as the kernel reads them, on the CPU.

    Args:
        top_p: float64 (rows,); 1 or more keeps all.
        keys: (rows, 2), the low and the high word.
        penalties: float32 (rows, 3): repetition, presence, frequency.
    """
    rows = len(temperature)
    is_greedy = temperature <= 0
    settings = torch.zeros(rows, 8)
    settings[:, 0] = torch.where(is_greedy, 1.0, 1 / temperature)
    settings[:, 1], settings[:, 2] = min_p, 1.0
    if penalties is not None:
        settings[:, 2:5] = penalties
    shares = [0 if p >= 1 else max(1, int(p * 2**64)) for p in top_p.tolist()]
    share = torch.tensor([s - (s >> 63 << 64) for s in shares], dtype=torch.int64)
    words = torch.stack([top_k.long(), *keys.long().unbind(1), is_greedy.long()], 1)
    numbers = (((words + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).int()
    return settings, share, numbers.contiguous()
