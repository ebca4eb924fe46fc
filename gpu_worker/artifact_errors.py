"""The one error of everything that reads, writes or converts an artifact, and the table of its codes.

Each fault is one line: stable code, what is wrong, what to do about it. The worker passes that line on to the scheduler,
`/healthz` shows it, and command-line tools end with it. Codes are never given a second meaning.
"""

from __future__ import annotations

CODES = {
    "TL001": "cannot be read as a safetensors file",
    "TL002": "format not supported",
    "TL003": "configuration invalid",
    "TL004": "tensor missing",
    "TL005": "tensor unexpected",
    "TL006": "wrong shape",
    "TL007": "wrong dtype",
    "TL008": "value not finite",
    "TL009": "digest mismatch",
    "TL010": "truncated or damaged",
    "TL011": "tokenizer does not fit",
    "TL012": "loops out of order",
    "TL013": "KV mode not usable",
    "TL014": "not enough memory",
    "TL015": "self-check failed",
    "TL020": "source not readable",
    "TL021": "model type not supported",
    "TL022": "source option not supported",
    "TL023": "source tensors do not fit",
    "TL024": "target not writable",
}


class ArtifactError(Exception):
    """A fault of an artifact or of a checkpoint to convert; `str` is the one line for people.

    Attributes:
        code: a key of `CODES`.
        message: the cause, without line breaks.
        remedy: what to do, without line breaks.
    """

    def __init__(self, code: str, message: str, remedy: str) -> None:
        self.code = code
        self.message = " ".join(message.split())
        self.remedy = " ".join(remedy.split())
        super().__init__(f"{code} {CODES[code]}: {self.message} ({self.remedy})")
