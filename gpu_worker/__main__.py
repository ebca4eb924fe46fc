"""`python -m gpu_worker --index N`: one worker process of this host.

Reads the environment, makes the function that loads the engine, and hands both to `Worker`. Heavy imports wait until the heart
beats, so that the scheduler sees a worker that is loading and not an absent one.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import MutableMapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.worker import Engine as EngineFace
from gpu_worker.worker import Loaded, Worker
from scheduler.config import EXIT_BAD_SETTING, BadSetting, Settings, exit_bad_setting
from scheduler.messages import Params, Run, Tokens
from scheduler.transport import TransportError, Wire

if TYPE_CHECKING:
    from gpu_worker.artifact import Artifact

log = logging.getLogger("gpu_worker")

DEMO = Path(__file__).parent / "data" / "demo.tinyloop"
DEFAULT_MAX_SEQ_LEN = 2048
COMPUTE_CAPABILITY = (9, 0)


def load(settings: Settings) -> Loaded:
    """The engine that the settings ask for.

    Raises:
        ArtifactError: the artifact cannot be used as asked.
        BadSetting: a setting contradicts the device or the artifact.
    """
    from gpu_worker import artifact as artifacts

    path = Path(settings.model_path) if settings.model_path else DEMO
    if not settings.model_path:
        log.warning("TINYLOOP_MODEL_PATH is not set: serving the embedded DEMO model %s", path)
    artifact = artifacts.load(path)
    max_seq_len = _max_seq_len(settings, artifact.config.arch.max_pos)
    if settings.fault:
        return _load_fault(settings, artifact, max_seq_len)

    from gpu_worker import load_check
    from gpu_worker.engine import Engine, EngineOptions

    device = _device(settings)
    options = EngineOptions(
        device=device,
        kv_format=settings.kv_format_on(device),
        kv_share=settings.kv_share,
        num_blocks=settings.kv_blocks,
        max_rows=settings.max_rows,
        prefill_chunk=settings.prefill_chunk_on(device),
        max_seq_len=max_seq_len,
        threads=settings.threads,
        build_dir=settings.build_dir,
        h_mode_fp16_attn_qkv=settings.h_mode_fp16_attn_qkv,
        commit=settings.commit,
        hf_home=settings.hf_home or "",
        is_graphed=device == "cuda",
    )
    log.info("loading %s; the first start also compiles the CPU kernels", artifact.config.name)
    engine = Engine(artifact, options)
    load_check.check(engine)
    engine.model.warm_up(engine.limits.loops_default)
    longest = min(engine.options.prefill_chunk, engine.options.max_seq_len - 1)
    lengths = [2**n for n in range(4, longest.bit_length())] if device == "cuda" else []
    warm_up(engine, lengths)
    return Loaded(engine, device)


def _device(settings: Settings) -> str:
    """cpu or cuda; `auto` takes a GPU that the kernels are made for, if what compiles them is installed."""
    lacking = "" if settings.device == "cpu" else _missing_for_cuda()
    if settings.device == "cuda" and lacking:
        raise BadSetting("TINYLOOP_DEVICE", "cuda", f"cpu or auto: {lacking}")
    if lacking:
        log.info("serving on the CPU: %s", lacking)
    return "cpu" if settings.device == "cpu" or lacking else "cuda"


def _missing_for_cuda() -> str:
    """Why this process cannot run on a GPU, "" if it can."""
    import torch

    if not torch.cuda.is_available():
        return "this PyTorch finds no GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != COMPUTE_CAPABILITY:
        return f"the kernels are for compute capability 9.0, this GPU has {major}.{minor}"
    if find_spec("numba_cuda") is None:
        return "numba-cuda is not installed (pip install -r requirements-cuda.txt)"
    return ""


def warm_up(engine: EngineFace, lengths: Sequence[int] = ()) -> None:
    """Run a greedy and a sampled sequence: what compiles or allocates at first use does so while the worker is loading.

    `lengths`: of further prompts, one after the other, where kernels differ by the length of a pass.
    """
    loops = engine.limits.loops_default
    for sequence_id, temperature in enumerate((0.0, 1.0)):
        params = Params(loops, 2, temperature=temperature, top_p=0.9, logprobs=1)
        engine.add(Run(0, sequence_id, 0, Tokens((0, 0, 0)), Tokens(), 0, params))
    for length in (0, *lengths):
        if length:
            engine.add(Run(0, length, 0, Tokens((0,) * length), Tokens(), 0, Params(loops, 1)))
        while engine.has_work():
            engine.step()
    engine.reset()


def _load_fault(settings: Settings, artifact: Artifact, max_seq_len: int) -> Loaded:
    from gpu_worker import instant_engine

    if settings.fault not in instant_engine.FAULTS:
        raise BadSetting(
            "TINYLOOP_FAULT", settings.fault, "one of " + ", ".join(instant_engine.FAULTS)
        )
    log.warning("TINYLOOP_FAULT=%s: NO MODEL RUNS HERE, the tokens are made up", settings.fault)
    is_paced = settings.fault == "paced_worker"
    engine = instant_engine.InstantEngine(
        artifact,
        max_seq_len,
        settings.max_rows,
        tokens_per_step=1 if is_paced else 0,
        pace_s=instant_engine.PACE_S if is_paced else 0.0,
        hf_home=settings.hf_home or "",
    )
    return Loaded(engine, "none")


def _max_seq_len(settings: Settings, max_pos: int) -> int:
    if settings.max_seq_len is not None and settings.max_seq_len > max_pos:
        raise BadSetting(
            "TINYLOOP_MAX_SEQ_LEN",
            settings.max_seq_len,
            f"at most the artifact's {max_pos} positions",
        )
    return settings.max_seq_len or min(DEFAULT_MAX_SEQ_LEN, max_pos)


def pick_gpu(index: int, environ: MutableMapping[str, str]) -> None:
    """Give each worker of a host a GPU of its own, in turn, by the variable that every CUDA library obeys.

    The choice is among those that the variable lists already, else among this machine's; without any nothing changes.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        gpus = [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    else:
        gpus = [gpu for gpu in listed.split(",") if gpu.strip()]
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_worker", description="One worker process.")
    parser.add_argument("--index", type=int, default=0, help="its number among this host's workers")
    args = parser.parse_args()
    settings = Settings.from_env_or_exit(os.environ)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # read when the maths libraries are first imported, which is later, in `load`
    pick_gpu(args.index, os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        wire = Wire.from_settings(settings, "worker")
    except TransportError as ex:
        print(f"bad setting: {ex}", file=sys.stderr, flush=True)
        return EXIT_BAD_SETTING
    name = f"{socket.gethostname()}-{args.index}"
    worker = Worker(wire, name, lambda: load(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    log.info("worker %s starts: %s", name, settings.summary())
    try:
        worker.run()
    except BadSetting as ex:
        exit_bad_setting(ex)
    except Exception:
        log.exception("worker %s ends", name)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
