"""Loads from shared memory that a kernel's machine code does not wait for before their place is given back.

`kernels/reads.py` says why that is a fault: a bulk copy may fill the place before the load has been done. Takes the text that
nvdisasm writes of a kernel; called by `check_ptx.py`.
"""

from __future__ import annotations

import re

_LINE = re.compile(
    r"\s+/\*(?P<at>[0-9a-f]+)\*/\s+(?P<when>@!?\w+\s+)?(?P<name>[A-Z][\w.]*)\s*(?P<rest>.*?);"
)
_REGISTER = re.compile(r"\bR(\d+)")
# Registers of the operands of matrix products: D, A, B, C.
_MATRIX_WIDTHS = {"HMMA": (4, 4, 2, 4), "IMMA": (4, 4, 2, 4), "HGMMA": (4, 4, 4, 4)}


def open_loads(disassembly: str) -> list[str]:
    """Arrivals at memory barriers, and bulk copies, in front of which a load's registers are still open.

    Reads the code from top to bottom: a load counts as waited for once an instruction reads or writes one of its registers.
    """
    found: list[str] = []
    still_open: dict[int, tuple[int, str]] = {}  # first register: (how many, where)
    for line in disassembly.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, rest = match["name"], match["rest"]
        gives_back = name.startswith("UBLKCP") or (
            name.startswith("SYNCS.ARRIVE") and "A1T0" in name
        )
        if gives_back and still_open:
            loads = ", ".join(f"{where} of R{first}" for first, (_, where) in still_open.items())
            found.append(f"{name} at {match['at']} does not wait for the loads at {loads}")
        touched = [(int(register), width) for register, width in _operands(name, rest)]
        for first, (count, _) in list(still_open.items()):
            if any(first < start + width and start < first + count for start, width in touched):
                del still_open[first]
        if name.startswith("LDS") and rest.startswith("R") and rest[1].isdigit():
            first = int(_REGISTER.match(rest).group(1))  # type: ignore[union-attr]
            still_open[first] = (_width(name), match["at"])
        if name == "EXIT" or (name == "BRA" and not match["when"]):
            still_open.clear()  # what follows is reached from elsewhere
    return found


def _operands(name: str, rest: str) -> list[tuple[str, int]]:
    """(register, registers from it on) of each operand; a load's are its result and its addresses."""
    registers = _REGISTER.findall(rest)
    widths = _MATRIX_WIDTHS.get(name.split(".")[0])
    if widths is not None:
        return list(zip(registers, widths, strict=False))
    return [(register, _width(name)) for register in registers]


def _width(name: str) -> int:
    if name.startswith("LDSM"):
        return int(name[-1]) if name[-1].isdigit() else 1
    return 4 if ".128" in name else 2 if ".64" in name else 1
