"""Compiles many kernels at once, in processes of their own, into a build directory that later starts read.

    python -m kernels.compile_ahead < JOBS       a pickled list of (module, function, arguments, kernel name, build directory)

The processes know nothing of the program that starts them: kernels are made anew there by calling a function of a module.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kernels.compiler import Variant, ptx_of, ptx_path

ROOT = Path(__file__).resolve().parents[1]

Finder = Callable[..., dict[str, Variant]]


def compile_ahead(find: Finder, calls: Sequence[tuple[Any, ...]], build_dir: Path | None) -> None:
    """Compiles the kernels of find(*call) for all calls that the build directory lacks, on all cores; nothing without one.

    Args:
        find: a function of a module, so that other processes can call it too.
        calls: its arguments, which can be pickled.

    Raises:
        RuntimeError: a kernel did not compile.
    """
    if build_dir is None:
        return
    jobs = [
        (find.__module__, find.__name__, call, name, str(build_dir))
        for call in calls
        for name, variant in find(*call).items()
        if not ptx_path(variant, build_dir).exists()
    ]
    count = min(len(jobs), os.cpu_count() or 1)
    if count < 2:
        return  # what is missing is compiled when it is first used
    command = [sys.executable, "-m", "kernels.compile_ahead"]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(count)
    ]
    for i, process in enumerate(processes):
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(jobs[i::count]))
        process.stdin.close()
        process.stdin = None
    failed = [
        error for process in processes if (error := process.communicate()[1]) and process.returncode
    ]
    if failed:
        raise RuntimeError(f"kernels did not compile: {failed[0].decode(errors='replace')[-2000:]}")


def main() -> None:
    for module, function, call, name, build_dir in pickle.load(sys.stdin.buffer):
        ptx_of(getattr(import_module(module), function)(*call)[name], Path(build_dir))


if __name__ == "__main__":
    main()
