"""honcho's command, for scripts/launch.py: goes on where nobody reads its output any more.

Once its output is a broken pipe (`up | head`, Ctrl-C on `up | tee log`) honcho by itself ends its loop at the next line
but not its processes, and no signal reaches them through it any more.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class Output(io.TextIOWrapper):
    """A standard stream that becomes /dev/null once its reader has gone."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            return self._let_go(len(text))

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._let_go()

    def _let_go(self, num_written: int = 0) -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        return num_written


def go_on_unread() -> None:
    """Lets this process's output go nowhere rather than end it when its reader leaves."""
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)


if __name__ == "__main__":
    go_on_unread()
    from honcho.command import main  # takes hold of sys.stdout when it is imported

    main()
