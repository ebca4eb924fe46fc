"""Choosing tokens from logits on the CPU, compiled: top-k, top-p, min-p, Gumbel noise, and log-probabilities.

One row at a time and in one order, ties always to the lowest id, so that a row's token depends on its own logits and settings
alone. Called by `kernels.cpu` with plain arrays.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from kernels.cpu_intrinsics import LANES, exp, hash_uniform, log

_F0 = np.float32(0.0)
_MAX_NOISE = np.float32(16.64)  # of -log(-log(u)) for the largest u, 1 - 2**-24
_MASS = np.float32(2.0**30)  # a top-p weight is this times exp(z - max), cut to an integer
_RADIX_BITS = 11


@njit(nogil=True, cache=True)
def choose(low, high, logits, temperature, top_k, top_p, min_p, keys, tokens):  # type: ignore[no-untyped-def]
    """tokens[r] for rows [low, high). See `kernels.cpu.choose`."""
    vocab = logits.shape[1]
    z = np.empty(vocab, dtype=np.float32)
    ids = np.empty(vocab, dtype=np.int32)
    order = np.empty(vocab, dtype=np.uint32)
    mass = np.empty(vocab, dtype=np.int64)
    lanes = np.empty(LANES, dtype=np.float32)
    bins = np.empty(1 << _RADIX_BITS, dtype=np.int64)
    for r in range(low, high):
        row = logits[r]
        top = row_max(row, lanes)
        if temperature[r] <= _F0:
            tokens[r] = first_equal(row, top)
            continue
        inverse = np.float32(1.0) / temperature[r]
        top *= inverse
        if top_k[r] <= 0 and top_p[r] >= 1.0 and min_p[r] <= _F0:
            tokens[r] = _noisy_best_of_all(row, inverse, top, keys[r, 0], keys[r, 1])
            continue
        count = vocab
        for i in range(vocab):
            z[i] = row[i] * inverse
            ids[i] = i
        if 0 < top_k[r] < count:
            mass[:count] = 1
            count = _keep_best(z, ids, order, mass, count, top_k[r], bins)
        if top_p[r] < 1.0:
            total = 0
            kept = 0
            for i in range(count):
                weight = np.int64(exp(z[i] - top) * _MASS)
                if weight > 0:  # what weighs nothing is never within top-p
                    z[kept], ids[kept], mass[kept] = z[i], ids[i], weight
                    kept += 1
                    total += weight
            count = _keep_best(
                z, ids, order, mass, kept, max(np.int64(math.floor(top_p[r] * total)), 1), bins
            )
        if min_p[r] > _F0:
            kept = 0
            for i in range(count):
                if exp(z[i] - top) >= min_p[r]:
                    z[kept], ids[kept] = z[i], ids[i]
                    kept += 1
            count = kept
        tokens[r] = _noisy_best(z, ids, count, keys[r, 0], keys[r, 1])


@njit(nogil=True, cache=True)
def row_max(row, lanes):  # type: ignore[no-untyped-def]
    """The largest value of a row."""
    lanes[:] = row[0]
    whole = row.shape[0] // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] = max(lanes[j], row[i + j])
    for i in range(whole, row.shape[0]):
        lanes[0] = max(lanes[0], row[i])
    top = lanes[0]
    for j in range(1, LANES):
        top = max(top, lanes[j])
    return top


@njit(nogil=True, cache=True)
def first_equal(row, value):  # type: ignore[no-untyped-def]
    """The lowest index that holds `value`, 0 if none does."""
    for i in range(row.shape[0]):
        if row[i] == value:
            return i
    return 0


@njit(nogil=True, cache=True)
def _noise(low, high, token):  # type: ignore[no-untyped-def]
    return -log(-log(hash_uniform(low, high, np.uint32(token))))


@njit(nogil=True, cache=True)
def _noisy_best(z, ids, count, low, high):  # type: ignore[no-untyped-def]
    best, best_id = np.float32(-np.inf), np.int64(ids[0])
    for i in range(count):
        if z[i] + _MAX_NOISE > best:
            value = z[i] + _noise(low, high, ids[i])
            if value > best:
                best, best_id = value, np.int64(ids[i])
    return best_id


@njit(nogil=True, cache=True)
def _noisy_best_of_all(row, inverse, top, low, high):  # type: ignore[no-untyped-def]
    """Over the whole vocabulary; what cannot win even with the largest noise is not given any.

    The most likely token's own noisy value is a lower bound of the winner's that most of the others fail at once.
    """
    bound = np.float32(-np.inf)
    for i in range(row.shape[0]):
        if row[i] * inverse == top:
            bound = top + _noise(low, high, i)
            break
    best, best_id = np.float32(-np.inf), np.int64(0)
    for i in range(row.shape[0]):
        z = row[i] * inverse
        if z + _MAX_NOISE >= bound:
            value = z + _noise(low, high, i)
            if value > best:
                best, best_id = value, np.int64(i)
                bound = max(bound, best)
    return best_id


@njit(nogil=True, cache=True)
def _keep_best(z, ids, order, mass, count, target, bins):  # type: ignore[no-untyped-def]
    """Keeps, in place and in id order, those of the first `count` entries that have less than `target` mass ahead of them.

    Ahead are larger z, and lower ids among equals. A radix selection: three passes over ever fewer bits find the last kept value.
    Returns how many are left.
    """
    for i in range(count):
        bits = z[i : i + 1].view(np.uint32)[0]
        order[i] = bits ^ (np.uint32(0xFFFFFFFF) if bits >> 31 else np.uint32(0x80000000))
    prefix, known = np.uint32(0), np.uint32(0)  # the value's leading bits, and which bits those are
    ahead = np.int64(0)
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        bins[:] = 0
        for i in range(count):
            if (order[i] & known) == prefix:
                bins[(order[i] >> np.uint32(shift)) & np.uint32((1 << width) - 1)] += mass[i]
        chosen = 0
        for b in range((1 << width) - 1, -1, -1):
            if bins[b] > 0:
                chosen = b
                if ahead + bins[b] >= target:
                    break
                ahead += bins[b]
        prefix |= np.uint32(chosen << shift)
        known |= np.uint32(((1 << width) - 1) << shift)
    kept = 0
    for i in range(count):
        keep = order[i] > prefix
        if order[i] == prefix:
            keep = ahead < target
            ahead += mass[i]
        if keep:
            z[kept], ids[kept], mass[kept] = z[i], ids[i], mass[i]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def log_probabilities(low, high, logits, chosen, logprobs, top_ids, top_logprobs):  # type: ignore[no-untyped-def]
    """See `kernels.cpu.log_probabilities`."""
    lanes = np.empty(LANES, dtype=np.float32)
    num_top = top_ids.shape[1]
    for r in range(low, high):
        row = logits[r]
        top = row_max(row, lanes)
        normaliser = top + np.float32(math.log(_sum_exp(row, top)))
        logprobs[r] = row[chosen[r]] - normaliser
        count = 0
        for i in range(row.shape[0] if num_top else 0):
            if count == num_top and row[i] <= row[top_ids[r, count - 1]]:
                continue
            at = min(count, num_top - 1)
            while at > 0 and row[i] > row[top_ids[r, at - 1]]:
                top_ids[r, at] = top_ids[r, at - 1]
                at -= 1
            top_ids[r, at] = i
            count = min(count + 1, num_top)
        for j in range(num_top):
            top_logprobs[r, j] = row[top_ids[r, j]] - normaliser


@njit(nogil=True, cache=True)
def _sum_exp(row, top):  # type: ignore[no-untyped-def]
    lanes = np.zeros(LANES, dtype=np.float64)
    whole = row.shape[0] // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] += np.float64(exp(row[i + j] - top))
    for i in range(whole, row.shape[0]):
        lanes[0] += np.float64(exp(row[i] - top))
    return lanes.sum()
