"""How device code is written once and used twice.

`op` marks a plain Python function as one PTX instruction: the function body is the twin that the emulator
runs, the text is what the compiler emits. `traced` marks straight-line code over such operations: the emulator
runs it as it stands; the compiler runs it once over symbols, so that every loop in it is unrolled and every
list of accumulators stays in registers. `device_function` marks a helper with run-time control flow.
Nothing here imports numba; `compiler.py` does the translation.

Kinds of values: `r` 32-bit integer or packed halves, `l` 64-bit integer or address, `f` float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Kind = str


@dataclass(frozen=True)
class Op:
    """One PTX instruction (or a short fixed sequence): `$0..` are results, then arguments.

    The first `tied` arguments come in the registers of the last `tied` results.
    """

    returns: str
    args: str
    text: str
    is_volatile: bool
    touches_memory: bool
    tied: int = 0


@dataclass(frozen=True)
class TracedSpec:
    """The kinds that a traced function returns: one letter, several (a tuple), or none."""

    returns: str
    is_tuple: bool
    num_args: int


class Symbol:
    """A value of the program being emitted; arithmetic on it emits instructions."""

    __slots__ = ("emitter", "kind", "value")

    def __init__(self, emitter: Emitter, kind: Kind, value: Any) -> None:
        self.emitter = emitter
        self.kind = kind
        self.value = value

    def __add__(self, other: Any) -> Symbol:
        return self.emitter.binary("add", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return self.emitter.binary("add", other, self)

    def __sub__(self, other: Any) -> Symbol:
        return self.emitter.binary("sub", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return self.emitter.binary("sub", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return self.emitter.binary("mul", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return self.emitter.binary("mul", other, self)

    def __lshift__(self, other: int) -> Symbol:
        return self.emitter.binary("shl", self, other)

    def __rshift__(self, other: int) -> Symbol:
        return self.emitter.binary("lshr", self, other)

    def __and__(self, other: Any) -> Symbol:
        return self.emitter.binary("and_", self, other)

    def __or__(self, other: Any) -> Symbol:
        return self.emitter.binary("or_", self, other)

    def __xor__(self, other: Any) -> Symbol:
        return self.emitter.binary("xor", self, other)

    def __bool__(self) -> bool:
        raise TypeError("traced code cannot branch on a run-time value; use select()")


class Emitter:
    """What turns operations into instructions (implemented in compiler.py)."""

    def binary(self, name: str, a: Any, b: Any) -> Symbol:
        raise TypeError(f"{type(self).__name__} cannot emit {name}")

    def call(self, op: Op, args: Sequence[Any]) -> Any:
        raise TypeError(f"{type(self).__name__} cannot call")


def _emitter_of(args: Sequence[Any]) -> Emitter | None:
    for arg in args:
        if isinstance(arg, Symbol):
            return arg.emitter
    return _ambient[-1] if _ambient else None


# The emitter of the traced function being compiled: operations without symbol arguments need it.
_ambient: list[Emitter] = []


def tracing(emitter: Emitter, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run `function` over symbols, with `emitter` receiving its instructions."""
    _ambient.append(emitter)
    try:
        return function(*args)
    finally:
        _ambient.pop()


def op(
    returns: str,
    args: str,
    text: str,
    *,
    volatile: bool = False,
    memory: bool = False,
    tied: int = 0,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a twin as the PTX instruction `text`."""
    spec = Op(returns, args, text, volatile or memory, memory, tied)

    def mark(twin: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            emitter = _emitter_of(values)
            if emitter is not None:
                return emitter.call(spec, values)
            return twin(*values)

        call.__name__ = twin.__name__
        call.__doc__ = twin.__doc__
        call.device_op = spec  # type: ignore[attr-defined]
        return call

    return mark


def traced(
    returns: str = "", *, is_tuple: bool | None = None, num_star: int = 0
) -> Callable[..., Any]:
    """Mark straight-line device code.

    Args:
        returns: the kinds of its results.
        is_tuple: whether they come as a tuple (default: if there are several).
        num_star: how many arguments its `*args` stands for.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        spec = TracedSpec(
            returns,
            len(returns) > 1 if is_tuple is None else is_tuple,
            function.__code__.co_argcount + num_star,
        )
        function.device_traced = spec  # type: ignore[attr-defined]
        return function

    return mark


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a helper with loops or branches at run time; it is inlined where it is called."""
    function.device_inline = True  # type: ignore[attr-defined]
    return function
