"""The messages of a chat request, checked and brought into the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from frontend.errors import invalid, unsupported
from frontend.fields import Fields
from frontend.requests import Conversation

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_conversation(fields: Fields) -> Conversation:
    """`messages`, `tools` and what the template is told.

    Raises:
        ApiError: 400 naming the message and its field.
    """
    messages = fields.array("messages")
    if not messages:
        raise fields.wrong(
            "messages", "must have at least one message", "missing_required_parameter"
        )
    checked = tuple(_message(m, fields.path(f"messages[{i}]")) for i, m in enumerate(messages))
    fields.refuse("continue_final_message", "chat_template")
    options = fields.object("chat_template_kwargs")
    named = {} if options is None else {name: options.raw(name) for name in options.names()}
    named["add_generation_prompt"] = fields.boolean("add_generation_prompt", True)
    return Conversation(checked, _tools(fields), named)


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(path, f"'{path}' must be an object with role and content")
    fields = Fields(value, path + ".")
    role = fields.choice("role", "", ROLES)
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = fields.array("tool_calls")
    if calls:
        message["tool_calls"] = [
            _tool_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(calls)
        ]
    has_calls = bool(calls) or fields.object("function_call") is not None
    content = fields.raw("content")
    if content is None and (role != "assistant" or not has_calls):
        raise fields.wrong("content", "is required", "missing_required_parameter")
    message["content"] = _content(content, path + ".content")
    for name in ("name", "tool_call_id"):
        if text := fields.string(name):
            message[name] = text
    return message


def _content(content: Any, path: str) -> str:
    """A string as it is; the text parts of an array, one a line."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(path, f"'{path}' must be a string or an array of parts")
    texts = []
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        if not isinstance(part, dict):
            raise invalid(where, f"'{where}' must be an object with a type")
        fields = Fields(part, where + ".")
        kind = fields.string("type")
        if kind in ("image_url", "input_image", "input_audio", "audio", "file", "video_url"):
            raise unsupported(f"{where}.type", f"'{where}': this model takes text only, not {kind}")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise fields.wrong("type", "must be text")
        name = "refusal" if kind == "refusal" else "text"
        if fields.raw(name) is None:
            raise fields.wrong(name, "is required", "missing_required_parameter")
        texts.append(fields.string(name))
    return "\n".join(texts)


def _tool_call(value: Any, path: str) -> dict[str, Any]:
    """A call as templates expect it: its arguments as an object where they are one."""
    if not isinstance(value, dict):
        raise invalid(path, f"'{path}' must be an object")
    fields = Fields(value, path + ".")
    function = fields.object("function")
    if function is None:
        raise fields.wrong("function", "is required", "missing_required_parameter")
    arguments = function.raw("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # the template gets the text
    call = {"name": function.string("name"), "arguments": arguments}
    return {"id": fields.string("id"), "type": fields.string("type", "function"), "function": call}


def _tools(fields: Fields) -> tuple[Any, ...] | None:
    """The tools to show to the template. A call cannot be enforced here, so whoever requires one is refused."""
    tools, functions = fields.array("tools"), fields.array("functions")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            path = fields.path(f"tools[{i}]")
            raise invalid(path, f"'{path}' must be an object with a function")
    for name in ("tool_choice", "function_call"):
        choice = fields.raw(name)
        if isinstance(choice, dict) or choice == "required":
            raise unsupported(fields.path(name), f"'{name}': a tool call cannot be enforced here")
        if fields.choice(name, "auto", ("none", "auto")) == "none":
            return None
    return tuple(tools or functions) or None
