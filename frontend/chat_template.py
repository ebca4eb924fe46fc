"""Chat templates: Jinja from the artifact, run in a sandbox on the client's messages."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(Exception):
    """The template cannot be compiled, or does not take these messages."""


class ChatTemplate:
    """One compiled template. `special` holds the strings of special tokens by the names that templates use."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._special = {"bos_token": "", "eos_token": "", **special}
        self._failure = ""
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as ex:
            self._failure = f"the artifact's template does not compile: {ex}"

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
        options: dict[str, Any],
    ) -> str:
        """The conversation as one text, with the assistant's turn opened unless `options` say otherwise.

        Raises:
            TemplateError: see the class.
        """
        if self._failure:
            raise TemplateError(self._failure)
        names = {**self._special, "add_generation_prompt": True, **options}
        try:
            text = self._template.render(**names, messages=list(messages), tools=tools)
            text.encode()  # a call's arguments are JSON in JSON: they may hold lone surrogates
            return text
        except RecursionError:
            raise TemplateError("it nests too deeply") from None
        except (
            Exception
        ) as ex:  # a template may raise anything: TypeError, KeyError, its own errors
            raise TemplateError(str(ex) or type(ex).__name__) from None


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
