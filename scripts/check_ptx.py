"""Compiles every kernel for sm_90 and assembles it; needs no GPU and no driver.

    python scripts/check_ptx.py [--build-dir build/ptx] [--only NAME] [--once]

Prints registers, shared memory and spills of each kernel; a spill, a call left in the PTX, double-precision
arithmetic, static shared memory or a place in shared memory that is given back before what was read of it has come
(`open_loads.py`) fails. With --build-dir the PTX stays there for the worker to load. Needs
`requirements-cuda.txt`; without it, it says what is missing and leaves with 0.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.compiler import Variant

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from open_loads import open_loads  # noqa: E402

SHARED_LIMIT = 227 * 1024


Job = tuple[str, int, str, str]


# Modules of kernels that need no model to be compiled for: each has a `variants()` by name.
MODULES = (
    "sampling", "cuda_dense", "cuda_attention", "prompt", "prompt_attention", "absorbed_values", "cuda_fragments", "wave", "step",
)  # fmt: skip


def variants_of(module: str) -> dict[str, Variant]:
    if util.find_spec(f"kernels.{module}") is None:
        return {}
    found: dict[str, Variant] = import_module(f"kernels.{module}").variants()
    return found


def variant_of(job: Job) -> Variant:
    from gpu_worker import graphs, persistent

    if job[0] in MODULES:
        return variants_of(job[0])[job[2]]
    spec_name, rows, kernel, instead = job
    spec = graphs.CHECKED_SPECS[spec_name]
    if kernel == "core":
        return persistent.core_variant(spec, rows)
    others = graphs.launches_to_try(spec, rows)[instead] if instead else None
    return graphs.step_kernels(spec, rows, others)[0][kernel]


def jobs_of(*, with_others: bool, row_counts: Sequence[int] = (1, 8, 16, 32, 64)) -> Iterator[Job]:
    """(module or spec name, rows, kernel, launches instead) of every kernel that a worker may load, each once."""
    from gpu_worker import graphs

    for module in MODULES:
        yield from ((module, 0, name, "") for name in variants_of(module))
    cores = [(name, rows) for name in graphs.CHECKED_SPECS for rows in (1, 8) if rows in row_counts]
    yield from ((name, rows, "core", "") for name, rows in cores)
    seen = set()
    for name, spec in graphs.CHECKED_SPECS.items():
        for rows in row_counts:
            for instead in ("", *(graphs.launches_to_try(spec, rows) if with_others else ())):
                for kernel in graphs.step_kernels(spec, rows)[0]:
                    job = (name, rows, kernel, instead)
                    variant = variant_of(job)
                    key = (variant.name, variant.constants)
                    if key not in seen:
                        seen.add(key)
                        yield job


def once_each(jobs: Sequence[Job]) -> list[Job]:
    """The first job of each kernel: of the same source in the same role."""
    first: dict[tuple[str, str, str], Job] = {}
    for job in jobs:
        function = variant_of(job).function
        role = job[0] if job[0] in MODULES else job[2]
        if role == "core":  # attention is another for each format
            role = f"{job[0]} core"
        first.setdefault((role, function.__module__, function.__qualname__), job)
    return list(first.values())


def missing() -> str | None:
    """What the compiler lacks, if anything."""
    if util.find_spec("numba_cuda") is None:
        return "numba-cuda"
    try:
        from cuda.bindings import nvrtc, nvvm

        nvrtc.nvrtcVersion()
        nvvm.version()
    except Exception as error:  # each library has an error of its own for a file that is not there
        return f"a library of CUDA 13.0 ({type(error).__name__})"
    return None


def find_tool(name: str) -> str | None:
    """A tool of the CUDA packages, else of the system."""
    spec = util.find_spec("nvidia")
    for folder in (
        spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    ):
        for path in Path(folder).glob(f"**/bin/{name}"):
            return str(path)
    return shutil.which(name)


def disassembled(cubin: Path, nvdisasm: str) -> str:
    """The machine code of an assembled kernel as text."""
    run = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True)
    return run.stdout


def check(job: Job, ptxas: str, nvdisasm: str, build_dir: Path | None) -> tuple[str, list[str]]:
    """One line of the table, and what is wrong."""
    from kernels.compiler import ptx_of

    spec_name, variant = job[0], variant_of(job)
    ptx = ptx_of(variant, build_dir)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        run = subprocess.run(
            [ptxas, "-arch=sm_90a", "-v", str(source), "-o", str(Path(folder, "kernel.cubin"))],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            return f"{spec_name:<10} {variant.name}", [
                f"{variant.name}: ptxas: {run.stderr.strip()[:500]}"
            ]
        faults = open_loads(disassembled(Path(folder, "kernel.cubin"), nvdisasm))

    def number(pattern: str) -> int:
        match = re.search(pattern, run.stderr)
        return int(match.group(1)) if match else 0

    registers = number(r"Used (\d+) registers")
    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    stack, static = number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem")
    if spills or stack:
        faults.append(f"{spills} bytes of spills, {stack} bytes of stack")
    if static:
        faults.append(f"{static} bytes of static shared memory")
    if variant.shared_bytes > SHARED_LIMIT:
        faults.append(f"{variant.shared_bytes} bytes of shared memory")
    if re.search(r"\bcall(\.uni)?\b", ptx):
        faults.append("a call in the PTX")
    if re.search(r"\.f64\b", ptx):
        faults.append("double precision")
    line = (
        f"{spec_name:<10} {variant.name:<28} {variant.num_threads:>4} {variant.cluster:>2} {registers:>4} "
        f"{variant.shared_bytes:>7} {spills:>4}"
    )
    return line, [f"{variant.name}: {fault}" for fault in faults]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build-dir", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", default="1,8,16,32,64", help="row buckets")
    parser.add_argument(
        "--others", action="store_true", help="also launch shapes that are only tried"
    )
    parser.add_argument(
        "--once", action="store_true", help="each kernel once, not for all models and row buckets"
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    ptxas, nvdisasm, lacking = find_tool("ptxas"), find_tool("nvdisasm"), missing()
    if lacking or ptxas is None or nvdisasm is None:
        print(
            f"check_ptx: {lacking or 'ptxas or nvdisasm'} is missing (pip install -r requirements-cuda.txt): skipped"
        )
        return 0
    row_counts = [int(r) for r in options.rows.split(",")]
    jobs = [
        job
        for job in jobs_of(with_others=options.others, row_counts=row_counts)
        if options.only in ("", job[0], job[2])
    ]
    if options.once:
        jobs = once_each(jobs)
    print(
        f"{'model':<10} {'kernel':<28} {'thr':>4} {'cl':>2} {'regs':>4} {'shared':>7} {'spill':>4}"
    )
    faults: list[str] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        over = map if options.jobs == 1 else pool.map
        for line, wrong in over(
            check,
            jobs,
            [ptxas] * len(jobs),
            [nvdisasm] * len(jobs),
            [options.build_dir] * len(jobs),
        ):
            print(line, flush=True)
            faults += wrong
    for fault in faults:
        print(f"FAIL {fault}")
    print(f"{len(jobs)} kernels, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
