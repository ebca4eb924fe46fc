"""Reading what came over HTTP: a bounded JSON body, and the facts of a request that validation needs."""

from __future__ import annotations

import asyncio
from typing import Any

from falcon.asgi import Request

from frontend.errors import ApiError
from frontend.fields import parse_object
from frontend.schemas import Context
from frontend.service import Service

_CHUNK = 64 << 10
_PATIENCE = 8  # times the limit: so much is read and dropped, as most clients write all before they read the answer


async def json_body(req: Request, service: Service) -> dict[str, Any]:
    """The body as a JSON object. A missing Content-Type counts as JSON.

    Raises:
        ApiError: 400 not a JSON object, 413 above the limit, 415 another media type.
    """
    media_type = (req.content_type or "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        message = f"send Content-Type: application/json, not {media_type:.80}"
        raise ApiError(415, message, code="unsupported_media_type")
    limit = service.settings.body_limit_bytes
    if (req.content_length or 0) > limit * _PATIENCE:
        raise _too_large(limit)
    parts, size = [], 0
    while part := await req.stream.read(_CHUNK):
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > limit * _PATIENCE:
            break
    if size > limit:
        raise _too_large(limit)
    raw = b"".join(parts)
    return await asyncio.to_thread(parse_object, raw) if size > _CHUNK else parse_object(raw)


def context(req: Request, service: Service) -> Context:
    """What validation needs of a request and of the process.

    Raises:
        ApiError: 503, no model is known yet.
    """
    return Context(
        model=service.served_model(),
        max_n=service.settings.max_n,
        request_id=req.context.request_id,
        salt=req.context.salt,
    )


def _too_large(limit: int) -> ApiError:
    # the rest of the body is not read, so the connection cannot be used again
    headers = {"Connection": "close"}
    return ApiError(
        413, f"the body is larger than {limit} bytes", code="body_too_large", headers=headers
    )
