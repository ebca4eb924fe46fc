"""How long a request will take: fits of what the workers report, and the arithmetic on top of them.

The unit of work is a *row pass*: one token through one loop. A pass over `rows` rows takes base + per_row * rows + per_cached *
(cached positions read) ms; the three numbers are fitted per worker with old steps fading. Knows no requests, no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FADE = 0.98  # weight of the past at each step
_RIDGE = 1e-3
_WARM_UP_STEPS = 3  # not fitted: a worker's first steps compile and touch memory
_OUTLIER = 8.0  # a pass that takes so many times what was expected counts as that much
_TERMS = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))
_CACHED_UNIT = 1024.0  # positions, so that the three regressors are of like size


@dataclass(slots=True)
class PassFit:
    """Least squares over fading steps of one worker: pass_ms = base + per_row * rows + per_cached * cached."""

    num_steps: int = 0
    _xx: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    _xy: list[float] = field(default_factory=lambda: [0.0] * 3)
    _weights: tuple[float, float, float] | None = None

    def observe(self, rows: int, cached: int, pass_ms: float) -> None:
        self.num_steps += 1
        if self.num_steps <= _WARM_UP_STEPS:
            return
        expected = self.pass_ms(rows, cached)
        if expected is not None and self.num_steps > 3 * _WARM_UP_STEPS:
            pass_ms = min(pass_ms, _OUTLIER * expected + 1.0)
        x = (1.0, float(rows), cached / _CACHED_UNIT)
        for i in range(3):
            self._xy[i] = _FADE * self._xy[i] + x[i] * pass_ms
            for j in range(3):
                self._xx[i][j] = _FADE * self._xx[i][j] + x[i] * x[j]
        self._weights = None

    def pass_ms(self, rows: float, cached: float) -> float | None:
        """Time of one pass; None without data."""
        if self.num_steps <= _WARM_UP_STEPS:
            return None
        if self._weights is None:
            self._weights = self._solve()
        base, per_row, per_cached = self._weights
        return base + per_row * rows + per_cached * cached / _CACHED_UNIT

    def _solve(self) -> tuple[float, float, float]:
        """The best fit without a negative term: a row can't make a pass shorter, but noise can say so."""
        best, best_gain = (0.0, 0.0, 0.0), 0.0
        for terms in _TERMS:
            xy = [self._xy[i] for i in terms]
            found = _solve_normal([[self._xx[i][j] for j in terms] for i in terms], list(xy))
            gain = sum(x * y for x, y in zip(found, xy, strict=True))  # of the squared error
            if min(found) >= 0 and gain > best_gain:
                weights = dict(zip(terms, found, strict=True))
                best = weights.get(0, 0.0), weights.get(1, 0.0), weights.get(2, 0.0)
                best_gain = gain
        return best


def _solve_normal(a: list[list[float]], b: list[float]) -> list[float]:
    """Solve (a + a little ridge) x = b by elimination; `a` is symmetric and not negative. Mutates both."""
    size = len(b)
    for i in range(size):
        a[i][i] += _RIDGE * (a[i][i] or 1.0) * 1e-3 + 1e-9
    for i in range(size):
        for j in range(i + 1, size):
            factor = a[j][i] / a[i][i]
            b[j] -= factor * b[i]
            for k in range(i, size):
                a[j][k] -= factor * a[i][k]
    x = [0.0] * size
    for i in range(size - 1, -1, -1):
        x[i] = (b[i] - sum(a[i][k] * x[k] for k in range(i + 1, size))) / a[i][i]
    return x


@dataclass(slots=True)
class Ema:
    """An exponential moving average; None before the first value."""

    weight: float
    value: float | None = None

    def add(self, x: float) -> None:
        self.value = x if self.value is None else self.value + self.weight * (x - self.value)


@dataclass(slots=True)
class Work:
    """Row passes still to be done, over some sequences."""

    num_sequences: int = 0
    prefill_rows: float = 0.0
    decode_rows: float = 0.0

    def add(self, loops: int, prompt_tokens: int, output_tokens: float) -> None:
        self.num_sequences += 1
        self.prefill_rows += loops * prompt_tokens
        self.decode_rows += loops * output_tokens


@dataclass(frozen=True, slots=True)
class Capacity:
    """One worker as the prediction sees it. `slots`: sequences of the asked size that it holds at a time."""

    fit: PassFit
    slots: int
    cached_per_row: float


def drain_ms(work: Work, workers: list[Capacity], chunk: int) -> float | None:
    """Time until all of `work` is done by all workers together; None if any of them has no data yet."""
    if work.num_sequences == 0:
        return 0.0
    rows = max(1.0, work.num_sequences / max(1, len(workers)))
    decode_rate = prefill_rate = 0.0  # row passes per ms
    for worker in workers:
        held = min(rows, worker.slots)
        decode_ms = worker.fit.pass_ms(held, held * worker.cached_per_row)
        prefill_ms = worker.fit.pass_ms(chunk, 0)
        if decode_ms is None or prefill_ms is None:
            return None
        decode_rate += held / max(decode_ms, 1e-9)
        prefill_rate += chunk / max(prefill_ms, 1e-9)
    if not workers:
        return None
    return work.decode_rows / decode_rate + work.prefill_rows / prefill_rate


def completion_ms(
    own: Work, loops: int, longest_output: float, ahead: Work, workers: list[Capacity], chunk: int
) -> float | None:
    """Submit to end of a request (`own`, all its sequences) behind `ahead`; None without data.

    Waiting: with S slots and A sequences ahead, A + own - S of those ahead must end first; on average they take that share of the
    time that all of them take. Then its prefill, then as many passes as its longest output has, at the occupancy that it meets.
    """
    backlog = drain_ms(ahead, workers, chunk)
    prefill = drain_ms(Work(own.num_sequences, own.prefill_rows, 0.0), workers, chunk)
    if backlog is None or prefill is None or not workers:
        return None
    slots = sum(w.slots for w in workers)
    missing = min(ahead.num_sequences + own.num_sequences - slots, ahead.num_sequences)
    wait = backlog * missing / ahead.num_sequences if missing > 0 else 0.0
    occupancy = (ahead.num_sequences + own.num_sequences) / len(workers)
    passes = []
    for worker in workers:
        rows = max(1.0, min(occupancy, worker.slots))
        passes.append(worker.fit.pass_ms(rows, rows * worker.cached_per_row) or 0.0)
    return wait + prefill + loops * longest_output * sum(passes) / len(passes)
