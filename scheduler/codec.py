"""How a frozen dataclass becomes a msgpack array and comes back checked.

The wire form is `[VERSION, tag, field, ...]`; nested dataclasses are plain arrays of their fields, and token lists are
packed little-endian uint32. Decoding checks the known fields against their annotations and ignores further ones, so fields may be
appended (with defaults). `messages.py` lists the types and their tags; this module knows none of them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20  # a hello's answer carries the model card with its tokenizer


class BadMessage(ValueError):
    """What a peer sent is not a message: wrong encoding, version, tag, length or field type."""


class Tokens(tuple[int, ...]):
    """Token ids; packed uint32 on the wire."""

    __slots__ = ()


_Packer = Callable[[Any], Any]

MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class _Codec:
    """How a type is written and read: all its fields at once, those that are written otherwise than they are, and how each comes back."""

    read: Callable[[Any], Sequence[Any]]
    changed: list[tuple[int, _Packer]]
    back: list[_Packer]  # they raise BadMessage
    num_required: int


_codecs: dict[type[Any], _Codec] = {}


def pack(tag: int, message: Any) -> bytes:
    """A message as one frame."""
    packed: bytes = msgpack.packb([VERSION, tag, *_to_wire(type(message), message)])
    return packed


def unpack(
    frame: bytes, types: dict[int, type[Any]], allowed: tuple[type[MessageT], ...]
) -> MessageT:
    """The message in a frame; `types` maps tags to types.

    Raises:
        BadMessage: it is not one, its version is another, or its type is not among `allowed`.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"{len(frame)} bytes, more than {MAX_MESSAGE_BYTES}")
    try:
        array_ = msgpack.unpackb(frame, use_list=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as ex:
        raise BadMessage(f"not msgpack: {ex}") from None
    if not isinstance(array_, tuple) or len(array_) < 2:
        raise BadMessage("not an array of version, tag and fields")
    version, tag = array_[0], array_[1]
    if version != VERSION:
        raise BadMessage(f"version {version!r:.40}, this side speaks {VERSION}")
    cls = types.get(tag) if isinstance(tag, int) else None
    if cls is None or cls not in allowed:
        raise BadMessage(f"tag {tag!r:.40} is not accepted here")
    message: MessageT = _from_wire(cls, array_[2:])
    return message


def _to_wire(cls: type[Any], message: Any) -> list[Any]:
    codec = _codec(cls)
    values = list(codec.read(message))
    for place, to in codec.changed:
        values[place] = to(values[place])
    return values


def _from_wire(cls: type[Any], values: Any) -> Any:
    codec = _codec(cls)
    if not isinstance(values, tuple) or len(values) < codec.num_required:
        raise BadMessage(f"{cls.__name__}: expected at least {codec.num_required} fields")
    try:
        return cls(*[back(value) for back, value in zip(codec.back, values, strict=False)])
    except BadMessage as ex:
        raise BadMessage(f"{cls.__name__}: {ex}") from None


def _codec(cls: type[Any]) -> _Codec:
    codec = _codecs.get(cls)
    if codec is None:
        hints, listed = get_type_hints(cls), fields(cls)
        coders = [_coder(hints[f.name]) for f in listed]
        names = [f.name for f in listed]
        codec = _codecs[cls] = _Codec(
            attrgetter(*names) if len(names) > 1 else lambda m: [getattr(m, n) for n in names],
            [(i, to) for i, (to, _) in enumerate(coders) if to is not _same],
            [back for _, back in coders],
            sum(f.default is f.default_factory for f in listed),  # both MISSING
        )
    return codec


def _coder(kind: Any) -> tuple[_Packer, _Packer]:
    """The pair (to wire, from wire) for one annotated type."""
    if kind is Tokens:
        return _pack_tokens, _unpack_tokens
    if kind in (int, str, bytes, bool):
        return _same, _checked(kind)
    if kind is float:
        return float, _float
    if is_dataclass(kind):
        cls: Any = kind
        return (lambda message: _to_wire(cls, message)), (lambda values: _from_wire(cls, values))
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType) and NoneType in args:
        to, back = _coder(next(a for a in args if a is not NoneType))
        may_pack = _same if to is _same else lambda v: None if v is None else to(v)
        return may_pack, lambda v: None if v is None else back(v)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        to, back = _coder(args[0])
        return (lambda vs: [to(v) for v in vs]), (lambda vs: tuple([back(v) for v in _tuple(vs)]))
    if origin is tuple:
        coders = [_coder(a) for a in args]
        return (
            lambda vs: [to(v) for (to, _), v in zip(coders, vs, strict=True)],
            lambda vs: tuple(
                [back(v) for (_, back), v in zip(coders, _tuple(vs, len(coders)), strict=True)]
            ),
        )
    if origin is dict:
        return _same, _series
    raise TypeError(f"no wire form for {kind}")


def _same(value: Any) -> Any:
    return value


def _checked(kind: type[Any]) -> _Packer:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise BadMessage(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return check


def _float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise BadMessage(f"expected a number, got {type(value).__name__}")
    return float(value)


def _tuple(value: Any, length: int | None = None) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or (length is not None and len(value) != length):
        raise BadMessage(f"expected an array, got {type(value).__name__}")
    return value


def _series(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise BadMessage(f"expected a map, got {type(value).__name__}")
    return {_checked(str)(k): _float(v) for k, v in value.items()}


def _pack_tokens(tokens: Tokens) -> bytes:
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _unpack_tokens(packed: Any) -> Tokens:
    if not isinstance(packed, bytes) or len(packed) % 4:
        raise BadMessage("expected packed token ids")
    words = array("I", packed)
    if sys.byteorder == "big":
        words.byteswap()
    return Tokens(words)
