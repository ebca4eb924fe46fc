"""API keys: read from a file, looked up by digest, each with a prefix-pool salt of its own. Stdlib and settings only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from scheduler.config import BadSetting


def read_keys(path: str | None) -> Mapping[str, str]:
    """Digest of each API key -> its salt, from a file with one key a line ('#' begins a comment line); {} without a file.

    Raises:
        BadSetting: the file cannot be read or holds no key.
    """
    if path is None:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise BadSetting("TINYLOOP_API_KEYS_FILE", path, "a readable UTF-8 file") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise BadSetting("TINYLOOP_API_KEYS_FILE", path, "a file with at least one key")
    return {digest(key): digest("salt/" + key)[:16] for key in keys}


def digest(text: str) -> str:
    """Keys are compared by digest, which leaks nothing of a key by its timing."""
    return hashlib.sha256(text.encode()).hexdigest()
