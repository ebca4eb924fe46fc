"""Choosing tokens on the device, one block a row: penalties, bias, temperature, top-k, top-p, min-p, keyed noise.

The order is the design's; ties go to the lowest id; sums that decide what is kept are integers, so their order does
not matter. A row's token depends on its own logits and settings alone. Nothing is sorted: a radix search over
the ordered bits of the logits finds the last value that is kept, and a second one its last id.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.compiler import Variant
from kernels.device_code import device_function, traced
from kernels.intrinsics import (
    add_shared_64,
    below,
    bits_of,
    block_x,
    exp2,
    f32_of,
    f32_to_mass,
    fma,
    grid_dependency_launch,
    grid_dependency_wait,
    int_to_f32,
    less_f32,
    load_f32,
    load_i32,
    load_i64,
    load_shared_32,
    load_shared_64,
    log2,
    max_shared,
    min_shared,
    mul_high_64,
    mul_low,
    reciprocal,
    same,
    select,
    select_int,
    shared_base,
    store_32,
    store_f32,
    store_shared_32,
    store_shared_64,
    sync_block,
    sync_warp,
    thread_id,
    warp_max,
    warp_min,
)

THREADS = 512
_BITS = 11
_BINS_AT = 64  # the bins' place in shared memory, after a few numbers that all threads share
_SUMS_AT = _BINS_AT + (8 << _BITS)
_SHARED = _SUMS_AT + 8 * 32
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


def _make_choose(is_shaped: bool) -> Any:
    value = _make_value(is_shaped)
    threads, bins_at, bits, sums_at = THREADS, _BINS_AT, _BITS, _SUMS_AT

    @device_function
    def best(order: Any, token: Any, base: Any) -> Any:
        """(largest order, its lowest token) over the block."""
        if thread_id() == 0:
            store_shared_32(base, 0)
            store_shared_32(base + 4, _NO_ID)
        sync_block()
        most = warp_max(order)
        if thread_id() & 31 == 0:
            max_shared(base, most)
        sync_block()
        most = load_shared_32(base)
        mine = warp_min(token if same(order, most) else _NO_ID)
        if thread_id() & 31 == 0:
            min_shared(base + 4, mine)
        sync_block()
        found = load_shared_32(base + 4)
        sync_block()
        return most, found

    @device_function
    def is_kept(order: Any, token: Any, floor: Any, last: Any) -> Any:
        return below(floor, order) or (same(order, floor) and token <= last)

    @device_function
    def narrow(
        logits: Any, counts: Any, bias: Any, settings: Any, vocab: Any, floor: Any, last: Any, target: Any,
        is_mass: Any, top: Any, base: Any,
    ) -> Any:  # fmt: skip
        """The new (floor, last): keep those of the kept that have less than `target` ahead of them."""
        prefix, known = 0, 0
        ahead = 0
        for step in range(3):
            shift = 21 if step == 0 else 10 if step == 1 else 0
            width = 10 if step == 2 else bits
            for b in range(thread_id(), 1 << bits, threads):
                store_shared_64(base + bins_at + b * 8, 0)
            sync_block()
            for i in range(thread_id(), vocab, threads):
                z = value(logits, counts, bias, settings, i)
                order = _ordered(z)
                if same(order & known, prefix) and is_kept(order, i, floor, last):
                    weight = _mass(z, top) if is_mass else 1
                    if weight > 0:
                        b = (order >> shift) & ((1 << width) - 1)
                        add_shared_64(base + bins_at + b * 8, weight)
            sync_block()
            # The first warp finds the bin in which the target is reached: 64 bins a lane, the highest first.
            lane = thread_id()
            if lane < 32:
                first = (1 << bits) - 64 * (lane + 1)
                mine = 0
                for b in range(64):
                    mine += load_shared_64(base + bins_at + (first + b) * 8)
                store_shared_64(base + sums_at + lane * 8, mine)
                sync_warp()
                before = ahead
                for other in range(lane):
                    before += load_shared_64(base + sums_at + other * 8)
                # The target lies in one lane's bins: the last ones with any mass, if it is never reached.
                is_last = True
                for other in range(lane + 1, 32):
                    if load_shared_64(base + sums_at + other * 8) > 0:
                        is_last = False
                if mine > 0 and before < target and (before + mine >= target or is_last):
                    b = 63
                    chosen = 0
                    is_found = False
                    while b >= 0 and not is_found:
                        weight = load_shared_64(base + bins_at + (first + b) * 8)
                        if weight > 0:
                            chosen = first + b
                            if before + weight >= target:
                                is_found = True
                            else:
                                before += weight
                        b -= 1
                    store_shared_32(base + 8, chosen)
                    store_shared_64(base + 16, before)
            sync_block()
            prefix = prefix | (load_shared_32(base + 8) << shift)
            ahead = load_shared_64(base + 16)
            known = known | (((1 << width) - 1) << shift)
            sync_block()
        # Equal values: the lowest ids while less than the target is ahead; a binary search for the last one, unless
        # all of them are kept.
        each = _mass(_unordered(prefix), top) if is_mass else 1
        if thread_id() == 0:
            store_shared_64(base + 16, 0)
        sync_block()
        count = 0
        for i in range(thread_id(), vocab, threads):
            order = _ordered(value(logits, counts, bias, settings, i))
            if same(order, prefix) and is_kept(order, i, floor, last):
                count += 1
        if count > 0:
            add_shared_64(base + 16, count)
        sync_block()
        low, high = 0, vocab - 1
        if ahead + (load_shared_64(base + 16) - 1) * each < target:
            low = high
        sync_block()
        while low < high:
            middle = (low + high) >> 1
            if thread_id() == 0:
                store_shared_64(base + 16, 0)
            sync_block()
            count = 0
            for i in range(thread_id(), middle + 1, threads):
                order = _ordered(value(logits, counts, bias, settings, i))
                if same(order, prefix) and is_kept(order, i, floor, last):
                    count += 1
            if count > 0:
                add_shared_64(base + 16, count)
            sync_block()
            # all equal entries up to `middle` are kept, and there is room for one more
            if ahead + load_shared_64(base + 16) * each < target:
                low = middle + 1
            else:
                high = middle
            sync_block()
        return prefix, low

    def kernel(
        all_logits: Any, all_counts: Any, all_bias: Any, all_settings: Any, all_top_p: Any, all_numbers: Any,
        tokens: Any, vocab: Any,
    ) -> None:  # fmt: skip
        row, base = block_x(), shared_base()
        grid_dependency_launch()
        grid_dependency_wait()
        logits = all_logits + row * vocab * 4
        counts, bias = all_counts + row * vocab * 4, all_bias + row * vocab * 4
        settings, numbers = all_settings + row * 32, all_numbers + row * 16
        top_k, key_low, key_high = load_i32(numbers), load_i32(numbers + 4), load_i32(numbers + 8)
        is_greedy = load_i32(numbers + 12)
        top_p = load_i64(all_top_p + row * 8)
        best_order, best_token = 0, _NO_ID
        for i in range(thread_id(), vocab, threads):
            order = _ordered(value(logits, counts, bias, settings, i))
            if below(best_order, order):
                best_order, best_token = order, i
        top_order, token = best(best_order, best_token, base)
        if is_greedy == 0:
            top = _unordered(top_order)
            floor, last = 0, vocab - 1
            if top_k > 0 and top_k < vocab:
                floor, last = narrow(
                    logits, counts, bias, settings, vocab, floor, last, top_k, False, top, base
                )
            if top_p != 0:
                if thread_id() == 0:
                    store_shared_64(base + 24, 0)
                sync_block()
                total = 0
                for i in range(thread_id(), vocab, threads):
                    z = value(logits, counts, bias, settings, i)
                    if is_kept(_ordered(z), i, floor, last):
                        total += _mass(z, top)
                add_shared_64(base + 24, total)
                sync_block()
                target = mul_high_64(load_shared_64(base + 24), top_p)
                target = target if target > 1 else 1
                floor, last = narrow(
                    logits, counts, bias, settings, vocab, floor, last, target, True, top, base
                )
            min_p = load_f32(settings + 4)
            best_order, best_token = 0, _NO_ID
            for i in range(thread_id(), vocab, threads):
                z = value(logits, counts, bias, settings, i)
                if is_kept(_ordered(z), i, floor, last) and _passes(z, top, min_p):
                    order = _ordered(_noisy(z, key_low, key_high, i))
                    if below(best_order, order):
                        best_order, best_token = order, i
            _, token = best(best_order, best_token, base)
        if thread_id() == 0:
            store_32(tokens + row * 4, token)

    return kernel


def choose(name: str, *, is_shaped: bool) -> Variant:
    """One token a row.

    Kernel arguments: logits float32 (rows, vocab); counts int32 (rows, vocab) and bias float32 (rows, vocab)
    (`is_shaped` only); settings float32 (rows, 8): 1/temperature (1 if greedy), min_p, repetition, presence and
    frequency penalties; top_p int64 (rows,): top_p times 2^64 as bits, 0: all; numbers int32 (rows, 4): top_k
    (0: all), the noise key's low and high word, 1 for greedy; tokens int32 (rows,), written; vocab.
    """
    return Variant(name, _make_choose(is_shaped), "lllllllr", THREADS, 1, _SHARED, 1, (is_shaped,))


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
    return Variant(name, _make_log_probabilities(), "lllllrr", THREADS, 1, _SHARED, 1, ())


def variants() -> dict[str, Variant]:
    """Every kernel of this module by name."""
    return {
        "choose": choose("choose", is_shaped=False),
        "choose_shaped": choose("choose_shaped", is_shaped=True),
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
