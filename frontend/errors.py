"""What a client is told when a request cannot be served: one exception, one body shape for all families.

`ApiError` is raised where the fault is known and becomes HTTP in one place (`app.py`), or an error frame once a
stream has begun (`streaming.py`). No Falcon in here: the batch script raises and shows the same errors.
"""

from __future__ import annotations

import math
import re
from typing import Any

from scheduler.client import Rejection

_FIELD = re.compile(r"(\w+): ")  # the scheduler's messages name the field first
_INVALID_REJECTIONS = ("invalid_request", "context_length_exceeded")


class ApiError(Exception):
    """A request that is refused or has failed. `param` names the field at fault; `retry_after_s` 0 sends no header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = "",
        retry_after_s: float = 0.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})
        if retry_after_s:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        if status >= 500 and status != 503:
            self.headers["X-Should-Retry"] = "false"  # SDKs repeat every 5xx otherwise

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """400: the field `param` is wrong."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, message: str = "") -> ApiError:
    """400: the field is known but this server cannot honour it; it is never ignored."""
    return ApiError(
        400,
        message or f"'{param}' is not supported by this server",
        code="unsupported_parameter",
        param=param,
    )


def unavailable(code: str, message: str, retry_after_s: float = 1.0) -> ApiError:
    """503: not now; the same request may work later."""
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def from_rejection(rejection: Rejection) -> ApiError:
    """The scheduler's refusal as HTTP: a fault of the request is 400, anything else 503 with Retry-After."""
    if rejection.code in _INVALID_REJECTIONS:
        field = _FIELD.match(rejection.message)
        param = field[1] if field else None
        return ApiError(400, rejection.message, code=rejection.code, param=param)
    return unavailable(rejection.code, rejection.message, max(1.0, rejection.retry_after_s))
