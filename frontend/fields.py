"""Reading a JSON body field by field: every wrong value is a 400 that names the field.

A field that is missing or null takes its default. Integers are JSON integers (no booleans, no 1.0), numbers are
finite, strings are well-formed Unicode. `Fields` remembers what was asked for, so that the rest can be refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from frontend.errors import ApiError, invalid, unsupported

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_DEPTH = 64


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        ApiError: 400; not UTF-8, not JSON (NaN and Infinity are not), not an object, nested too deeply, lone surrogates.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise invalid(None, "the body is nested too deeply", "invalid_json") from None
    except ValueError as ex:  # JSONDecodeError, UnicodeDecodeError, integers of absurd length
        raise invalid(None, f"the body is not JSON: {ex}", "invalid_json") from None
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object", "invalid_json")
    _check(body, "", 0, _SURROGATE_ESCAPE.search(raw) is not None)
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any, where: str, depth: int, has_surrogates: bool) -> None:
    """Bounds the depth and refuses lone surrogates anywhere, keys included."""
    if depth > MAX_DEPTH:
        raise invalid(where.split(".")[0].split("[")[0], "nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            if has_surrogates and _SURROGATE.search(key):
                raise invalid(where or None, "a name holds a lone surrogate: not Unicode text")
            _check(item, f"{where}.{key}" if where else key, depth + 1, has_surrogates)
    elif isinstance(value, list):
        if not has_surrogates and all(type(item) is int for item in value):
            return
        for i, item in enumerate(value):
            _check(item, f"{where}[{i}]", depth + 1, has_surrogates)
    elif has_surrogates and isinstance(value, str) and _SURROGATE.search(value):
        raise invalid(where, f"'{where}' holds a lone surrogate: not Unicode text")


class Fields:
    """Typed access to one JSON object. `prefix` is its own path, for the names in errors."""

    def __init__(self, body: dict[str, Any], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._asked: set[str] = set()

    def raw(self, name: str) -> Any:
        """The value as it came; None if it is missing."""
        self._asked.add(name)
        return self._body.get(name)

    def names(self) -> list[str]:
        """The names of all fields that came."""
        return list(self._body)

    def path(self, name: str) -> str:
        return self._prefix + name

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not int:
            raise self.wrong(name, f"must be an integer, not {_kind(value)}")
        if not low <= value <= high:
            allowed = f"from {low} to {high}" if low < high else str(low)
            raise self.wrong(name, f"must be {allowed}, not {_shown(value)}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return None if self.raw(name) is None else self.integer(name, 0, low, high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is int and abs(value) < 1 << 63:
            value = float(value)
        if type(value) is not float:
            raise self.wrong(name, f"must be a number, not {_kind(value)}")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.wrong(name, f"must be from {low:g} to {high:g}, not {_shown(value)}")
        return value

    def optional_number(self, name: str, low: float, high: float) -> float | None:
        return None if self.raw(name) is None else self.number(name, 0.0, low, high)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, f"must be true or false, not {_kind(value)}")
        return value

    def string(self, name: str, default: str = "", max_length: int | None = None) -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, f"must be a string, not {_kind(value)}")
        if max_length is not None and len(value) > max_length:
            raise self.wrong(name, f"must be at most {max_length} characters long")
        return value

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        value = self.string(name, default)
        if value not in choices:
            raise self.wrong(name, f"must be one of {', '.join(choices)}, not {_shown(value)}")
        return value

    def strings(self, name: str, max_items: int, max_length: int) -> tuple[str, ...]:
        """A string or an array of strings, none of them empty."""
        value = self.raw(name)
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise self.wrong(name, "must be a string or an array of strings")
        if len(listed) > max_items:
            raise self.wrong(name, f"must have at most {max_items} entries, not {len(listed)}")
        if not all(0 < len(item) <= max_length for item in listed):
            raise self.wrong(name, f"its strings must be 1 to {max_length} characters long")
        return tuple(listed)

    def token_ids(self, name: str, vocab: int, max_items: int | None = None) -> tuple[int, ...]:
        """An array of ids of the vocabulary; empty if the field is missing."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.wrong(name, f"must be an array of token ids, not {_kind(value)}")
        if max_items is not None and len(value) > max_items:
            raise self.wrong(name, f"must have at most {max_items} entries, not {len(value)}")
        return check_token_ids(value, vocab, self.path(name))

    def object(self, name: str) -> Fields | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, f"must be an object, not {_kind(value)}")
        return Fields(value, self.path(name) + ".")

    def array(self, name: str) -> list[Any]:
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(name, f"must be an array, not {_kind(value)}")
        return value

    def refuse(self, *names: str) -> None:
        """Fields that ask for what this server cannot do: anything but null, false, "" or an empty list is a 400."""
        for name in names:
            if self.raw(name) not in (None, False, "", [], {}):
                raise unsupported(self.path(name))

    def refuse_unknown(self) -> None:
        for name in self._body:
            if name not in self._asked:
                known = ", ".join(sorted(self._asked))
                raise self.wrong(name, f"is unknown here; known: {known}", "unknown_parameter")

    def wrong(self, name: str, what: str, code: str = "invalid_value") -> ApiError:
        path = self.path(name)
        return invalid(path[:200], f"'{path:.200}' {what}", code)


def check_token_ids(ids: list[Any], vocab: int, path: str) -> tuple[int, ...]:
    """`ids` if all are integers of 0..vocab-1.

    Raises:
        ApiError: 400 naming the first wrong entry.
    """
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab:
            what = f"must be a token id from 0 to {vocab - 1}, not {_shown(token)}"
            raise invalid(path, f"'{path}[{i}]' {what}", "invalid_token_id")
    return tuple(ids)


def _kind(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
    }
    return names.get(type(value), "an object" if isinstance(value, dict) else "null")


def _shown(value: Any) -> str:
    """At most 40 characters of a value; an integer beyond 64 bits is named only (its digits are costly)."""
    if type(value) is int and abs(value) >= 1 << 64:
        return "an integer of more than 64 bits"
    shown = repr(value) if not isinstance(value, (list, dict)) else _kind(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
