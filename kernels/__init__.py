"""The kernels of one device, under the same names on every device: `backend(device)` is all that the engine uses.

`kernels.reference` has the plain PyTorch twin of each function; tests hold every backend to it.
"""

from __future__ import annotations

import importlib
from typing import Any

_BACKENDS = {"cpu": "kernels.cpu", "cuda": "kernels.cuda"}


def backend(device: str) -> Any:
    """The module with the kernels for `device`: `cpu` or `cuda`."""
    return importlib.import_module(_BACKENDS[device])
