from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from gpu_worker import artifact as artifacts
from gpu_worker import worker as worker_module
from gpu_worker.__main__ import load, pick_gpu, warm_up
from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.instant_engine import InstantEngine, instant_tokens
from gpu_worker.worker import Loaded, Worker
from scheduler import transport
from scheduler.config import BadSetting, Settings
from scheduler.messages import (
    FROM_WORKER,
    Abort,
    DropPrefixes,
    Params,
    Register,
    Registered,
    Run,
    SchedulerBeat,
    SequenceOutput,
    StepDone,
    Submit,
    Tokens,
    WorkerBeat,
    decode,
    encode,
)
from scripts.make_toy_artifact import make
from tests.wire import bounded_context, stack_directory


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("toy") / "toy.tinyloop")


@pytest.fixture
def settings() -> Iterator[Settings]:
    with stack_directory() as settings:
        yield settings


class ScriptedScheduler:
    """The scheduler's end of the worker wire, driven by the test."""

    def __init__(self, context: zmq.Context, settings: Settings, epoch: int = 1) -> None:
        wire = transport.Wire.from_settings(settings, "scheduler")
        self.epoch = epoch
        self.router = transport.bind_workers(context, wire)
        self.beats = transport.bind_beats(context, wire)
        self.worker_id = b""
        self.last_beat_at = 0.0

    def close(self) -> None:
        self.router.close(0)
        self.beats.close(0)

    def send(self, message: Any) -> None:
        self.router.send_multipart([self.worker_id, encode(message)])

    def receive(self, kind: type[Any], limit_s: float = 10.0) -> Any:
        """The next message of a kind; those of other kinds are passed over. Meanwhile the scheduler beats."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            now = time.monotonic()
            if self.worker_id and now - self.last_beat_at > 0.3:
                self.last_beat_at = now
                self.send(SchedulerBeat(self.epoch))
            if self.router.poll(50):
                self.worker_id, frame = self.router.recv_multipart()
                message = decode(frame, FROM_WORKER)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} came")

    def receive_beat(
        self, is_it: Callable[[WorkerBeat], bool], limit_s: float = 10.0
    ) -> WorkerBeat:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.beats.poll(50):
                beat = decode(self.beats.recv(), FROM_WORKER)
                assert isinstance(beat, WorkerBeat)
                if is_it(beat):
                    return beat
        raise AssertionError("no such beat came")

    def take_in(self) -> Register:
        register: Register = self.receive(Register)
        self.send(Registered(self.epoch))
        return register

    def run(self, sequence_id: int, attempt: int = 1, **kwargs: Any) -> Run:
        values: dict[str, Any] = {"seed": 7, "max_tokens": 4, "emitted": ()} | kwargs
        run = Run(
            self.epoch,
            sequence_id,
            attempt,
            Tokens((1, 2, 3)),
            Tokens(values["emitted"]),
            values["seed"],
            Params(loops=2, max_tokens=values["max_tokens"]),
        )
        self.send(run)
        return run

    def outputs_until_end(self, sequence_id: int) -> list[SequenceOutput]:
        outputs: list[SequenceOutput] = []
        while not outputs or not outputs[-1].finish_reason:
            step = self.receive(StepDone)
            outputs += [o for o in step.outputs if o.sequence_id == sequence_id]
        return outputs


class Running:
    """A worker in a thread, and its engine once loaded."""

    def __init__(self, settings: Settings, toy: Path, **engine: Any) -> None:
        self.engine: Any = None
        self.load: Callable[[], Loaded] = lambda: self.loaded(toy, **engine)
        wire = transport.Wire.from_settings(settings, "worker")
        self.worker = Worker(wire, "toy-0", lambda: self.load())
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def loaded(self, toy: Path, **engine: Any) -> Loaded:
        self.engine = InstantEngine(artifacts.load(toy), 256, 8, **engine)
        return Loaded(self.engine, "none")

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as ex:
            self.failure = ex

    def __enter__(self) -> Running:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()
        self.thread.join(8)
        assert not self.thread.is_alive()


@pytest.fixture
def scheduler(settings: Settings) -> Iterator[ScriptedScheduler]:
    with bounded_context() as context:
        yield ScriptedScheduler(context, settings)


# ---------------------------------------------------------------------------------------------------------- registration


def test_registers_with_card_and_limits_until_answered(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy) as running:
        first, second = scheduler.receive(Register), scheduler.receive(Register)
        assert first == second
        assert first.worker_id == running.worker.worker_id == scheduler.worker_id
        card = msgpack.unpackb(first.card)
        assert card["digest"] == first.digest and first.numerics_id == "instant"
        assert (first.limits.max_rows, first.limits.max_seq_len) == (8, 256)
        scheduler.send(Registered(scheduler.epoch))
        beat = scheduler.receive_beat(lambda b: b.state == "ready")
        assert (beat.name, beat.epoch, beat.step_age_s) == ("toy-0", 1, 0.0)
        with pytest.raises(AssertionError):
            scheduler.receive(Register, limit_s=1.5)


def test_refused_worker_beats_the_reason_and_asks_again(
    scheduler: ScriptedScheduler,
    settings: Settings,
    toy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "REFUSED_S", 1.0)
    with Running(settings, toy) as running:
        scheduler.receive(Register)
        scheduler.send(Registered(scheduler.epoch, "its artifact is another"))
        scheduler.receive_beat(
            lambda b: (b.state, b.reason) == ("failed", "its artifact is another")
        )
        scheduler.run(1)
        scheduler.receive(Register, limit_s=8)
        assert running.worker.num_stale >= 1 and not running.engine.has_work()
        scheduler.send(Registered(scheduler.epoch))
        scheduler.receive_beat(lambda b: b.state == "ready" and not b.reason)


def test_beats_loading_while_the_engine_loads(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    may_load = threading.Event()
    running = Running(settings, toy)
    running.load = lambda: (may_load.wait(10), running.loaded(toy))[1]
    with running:
        for _ in range(3):
            scheduler.receive_beat(lambda b: b.state == "loading")
        may_load.set()
        scheduler.take_in()
        scheduler.receive_beat(lambda b: b.state == "ready")


def test_faulty_artifact_is_reported_steadily_and_tried_again(
    scheduler: ScriptedScheduler,
    settings: Settings,
    toy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "RETRY_FIRST_S", 0.6)
    attempts: list[float] = []
    running = Running(settings, toy)

    def load() -> Loaded:
        attempts.append(time.monotonic())
        if len(attempts) < 3:
            raise ArtifactError("TL010", "ends at byte 7", "copy it again")
        return running.loaded(toy)

    running.load = load
    with running:
        line = "TL010 truncated or damaged: ends at byte 7 (copy it again)"
        scheduler.receive_beat(lambda b: b.state == "failed")
        states = []
        while len(attempts) < 3:
            beat = scheduler.receive_beat(lambda b: True)
            states.append((beat.state, beat.reason))
        assert set(states[:-1]) == {("failed", line)} and len(states) >= 3
        assert attempts[1] - attempts[0] > 0.5 and attempts[2] - attempts[1] > 1.1
        scheduler.take_in()
        scheduler.receive_beat(lambda b: b.state == "ready")


# ---------------------------------------------------------------------------------------------------------- runs, aborts


def test_runs_are_stepped_and_reported_with_credits(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy) as running:
        limits = scheduler.take_in().limits
        run = scheduler.run(1)
        step = scheduler.receive(StepDone)
        (output,) = step.outputs
        assert output.tokens == instant_tokens(run, 0, 4, limits.vocab)
        assert (output.sequence_id, output.attempt, output.first_index) == (1, 1, 0)
        assert output.finish_reason == "length"
        assert (step.runs_seen, step.free_rows, step.epoch) == (1, limits.max_rows, 1)
        assert step.free_blocks == limits.num_blocks
        emitted = tuple(output.tokens[:3])
        again = scheduler.run(1, attempt=2, emitted=emitted)
        (output,) = scheduler.receive(StepDone).outputs
        assert (output.attempt, output.first_index) == (2, 3)
        assert output.tokens == instant_tokens(again, 3, 4, limits.vocab)
        assert running.worker.num_stale == 0


def test_abort_takes_effect_before_the_next_step_and_frees_credits(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy, tokens_per_step=1, pace_s=0.05):
        limits = scheduler.take_in().limits
        scheduler.run(1, max_tokens=200)
        step = scheduler.receive(StepDone)
        assert step.free_rows == limits.max_rows - 1 and step.free_blocks < limits.num_blocks
        scheduler.send(Abort(1, 1, attempt=9))  # another attempt's: nothing
        scheduler.run(2, max_tokens=3)
        assert len(scheduler.outputs_until_end(2)) == 3
        scheduler.send(Abort(1, 1, attempt=1))
        while step.free_rows < limits.max_rows:
            step = scheduler.receive(StepDone)
        assert step.outputs == () and step.free_blocks == limits.num_blocks
        assert step.runs_seen == 2
        scheduler.send(DropPrefixes(1, (b"p" * 16,)))  # news without work is reported too
        assert scheduler.receive(StepDone).dropped == (b"p" * 16,)


def test_long_step_shows_its_age_in_the_beats(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy, pace_s=2.0):
        scheduler.take_in()
        scheduler.receive_beat(lambda b: b.state == "ready")
        scheduler.run(1)
        beat = scheduler.receive_beat(lambda b: b.step_age_s > 0.4)
        assert beat.step_age_s < 2.5
        scheduler.receive(StepDone)
        beat = scheduler.receive_beat(lambda b: b.step_age_s == 0)
        assert beat.series is not None and beat.series["steps"] == 1.0


# --------------------------------------------------------------------------------------------------------------- fencing


def test_other_epochs_are_dropped_and_counted(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy) as running:
        scheduler.take_in()
        scheduler.epoch = 0
        scheduler.run(1)
        scheduler.send(Abort(0, 1, 1))
        scheduler.epoch = 1
        scheduler.run(2)
        step = scheduler.receive(StepDone)
        assert [o.sequence_id for o in step.outputs] == [2] and step.runs_seen == 1
        assert running.worker.num_stale == 2


def test_new_epoch_empties_the_engine_and_registers_again(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy, tokens_per_step=1, pace_s=0.01) as running:
        scheduler.take_in()
        scheduler.run(1, max_tokens=200)
        scheduler.receive(StepDone)
        scheduler.epoch = 2
        scheduler.send(SchedulerBeat(2))
        scheduler.take_in()
        run = scheduler.run(5, max_tokens=2)
        step = scheduler.receive(StepDone)
        assert (step.epoch, step.runs_seen) == (2, 1)
        assert [o.sequence_id for o in step.outputs] == [run.sequence_id]
        scheduler.receive_beat(lambda b: b.epoch == 2)
        assert running.failure is None


def test_restarted_scheduler_gets_the_registration_at_once(settings: Settings, toy: Path) -> None:
    with bounded_context() as context, Running(settings, toy, tokens_per_step=1, pace_s=0.01):
        first = ScriptedScheduler(context, settings)
        first.take_in()
        first.run(1, max_tokens=200)
        first.receive(StepDone)
        first.close()
        second = ScriptedScheduler(context, settings, epoch=2)
        began = time.monotonic()
        second.take_in()
        assert time.monotonic() - began < 2.5  # and not only after the 3 s of silence
        second.run(9, max_tokens=1)
        assert second.outputs_until_end(9)[0].first_index == 0


def test_silence_empties_the_engine_and_registers_again(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy, tokens_per_step=1, pace_s=0.01) as running:
        scheduler.take_in()
        scheduler.run(1, max_tokens=250)
        scheduler.receive(StepDone)
        scheduler.last_beat_at = float("inf")
        began = time.monotonic()
        scheduler.receive(Register)
        assert 2.0 < time.monotonic() - began < 4.5
        assert not running.engine.has_work()


def test_second_registered_means_empty_again(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy, tokens_per_step=1, pace_s=0.01):
        scheduler.take_in()
        scheduler.run(1, max_tokens=200)
        scheduler.receive(StepDone)
        scheduler.send(Registered(1))  # answers a repeated Register
        scheduler.run(2, max_tokens=2)
        outputs = scheduler.outputs_until_end(2)
        assert [o.first_index for o in outputs] == [0, 1]
        scheduler.run(3, max_tokens=1)
        step = scheduler.receive(StepDone)
        assert [o.sequence_id for o in step.outputs] == [3] and step.runs_seen == 2


# ------------------------------------------------------------------------------------------------------- garbage, endings


def test_garbage_is_counted_and_ends_nothing(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy) as running:
        scheduler.take_in()
        not_for_workers = encode(Submit(b"x" * 16, 1, "", Params(1, 1), ()))
        garbage = [b"", b"\xc1", os.urandom(99), not_for_workers]
        for frame in garbage:
            scheduler.router.send_multipart([scheduler.worker_id, frame])
        scheduler.router.send_multipart([scheduler.worker_id, encode(SchedulerBeat(1)), b"more"])
        scheduler.run(1)
        assert scheduler.receive(StepDone).outputs
        assert running.worker.num_bad_frames == len(garbage) + 1


def test_failing_step_ends_the_worker_with_its_reason(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy) as running:
        scheduler.take_in()

        def fail() -> None:
            raise RuntimeError("device lost")

        running.engine.step = fail
        scheduler.run(1)
        running.thread.join(5)
        assert isinstance(running.failure, RuntimeError)
        scheduler.receive_beat(
            lambda b: (b.state, b.reason) == ("failed", "RuntimeError: device lost")
        )


def test_stop_finishes_the_step_in_progress(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    with Running(settings, toy, pace_s=0.5) as running:
        scheduler.take_in()
        scheduler.run(1)
        scheduler.receive_beat(lambda b: b.state == "ready")
        time.sleep(0.2)
        running.worker.stop()
        assert scheduler.receive(StepDone).outputs[0].finish_reason == "length"
        running.thread.join(3)
        assert not running.thread.is_alive() and running.failure is None


# ----------------------------------------------------------------------------------------------------------- real engine


def test_real_engine_goes_on_where_another_attempt_stopped(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    from gpu_worker.engine import Engine, EngineOptions

    running = Running(settings, toy)

    def load() -> Loaded:
        running.engine = Engine(artifacts.load(toy), EngineOptions(max_seq_len=256, max_rows=8))
        warm_up(running.engine)
        return Loaded(running.engine, "cpu")

    running.load = load
    with running:
        limits = scheduler.receive(Register, limit_s=90).limits  # compiles, if nobody has before
        scheduler.send(Registered(1))
        for sequence_id in range(4):
            scheduler.run(sequence_id, seed=sequence_id, max_tokens=20)
        whole: dict[int, list[int]] = {i: [] for i in range(4)}
        while any(len(tokens) < 20 for tokens in whole.values()):
            for output in scheduler.receive(StepDone).outputs:
                assert output.first_index == len(whole[output.sequence_id])
                whole[output.sequence_id] += output.tokens
        scheduler.epoch = 2
        scheduler.send(SchedulerBeat(2))
        scheduler.take_in()
        scheduler.run(9, seed=3, max_tokens=20, emitted=whole[3][:7])
        outputs = scheduler.outputs_until_end(9)
        assert outputs[0].first_index == 7
        assert [t for o in outputs for t in o.tokens] == whole[3][7:]
        assert running.engine.free_rows == limits.max_rows
        scheduler.receive_beat(lambda b: b.epoch == 2 and (b.series or {}).get("rows") == 0)


# --------------------------------------------------------------------------------------------------------------- process


@pytest.mark.parametrize(
    ("listed", "picked"), [("0", "0"), ("4,5,6", "4"), ("GPU-a,GPU-b", "GPU-b"), ("", "")]
)
def test_workers_of_a_host_share_out_the_listed_gpus(listed: str, picked: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": listed}
    pick_gpu(3, environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == picked


def start_process(settings: Settings, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_worker", "--index", "3"],
        env={**os.environ, "TINYLOOP_RUN_DIR": settings.run_dir, "OMP_NUM_THREADS": "1", **environ},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_process_serves_and_leaves_on_term(
    scheduler: ScriptedScheduler, settings: Settings, toy: Path
) -> None:
    process = start_process(settings, TINYLOOP_MODEL_PATH=str(toy), TINYLOOP_FAULT="instant_worker")
    try:
        assert scheduler.receive(Register, limit_s=30).name.endswith("-3")
        scheduler.send(Registered(1))
        scheduler.run(1)
        assert scheduler.receive(StepDone).outputs
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=5)
        assert process.returncode == 0
        assert "NO MODEL RUNS HERE" in errors and "leaves" in errors
    finally:
        process.kill()
        process.communicate()


def test_process_with_a_faulty_artifact_beats_the_line(
    scheduler: ScriptedScheduler, settings: Settings, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.tinyloop"
    bad.write_bytes(b"hello")
    process = start_process(settings, TINYLOOP_MODEL_PATH=str(bad))
    try:
        scheduler.receive_beat(lambda b: b.state == "loading", limit_s=30)
        beat = scheduler.receive_beat(lambda b: b.state == "failed", limit_s=30)
        assert beat.reason.startswith("TL001 cannot be read as a safetensors file")
        process.terminate()
        process.communicate(timeout=5)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("named", "line"),
    [
        (
            {"max_seq_len": 1_000_000},
            "TINYLOOP_MAX_SEQ_LEN=1000000: expected at most the artifact's",
        ),
        ({"fault": "nonsense"}, "TINYLOOP_FAULT=nonsense: expected one of instant_worker"),
    ],
)
def test_setting_that_the_artifact_refuses_is_named(
    toy: Path, named: dict[str, Any], line: str
) -> None:
    settings = Settings(model_path=str(toy), device="cpu", **named)
    with pytest.raises(BadSetting) as ex:
        load(settings)
    assert line in str(ex.value)


def test_kv_mode_that_the_artifact_cannot_use_is_one_line(tmp_path: Path) -> None:
    narrow = make(tmp_path / "gqa.tinyloop", variant="gqa", n_kv_heads=1)
    with pytest.raises(ArtifactError, match="TL013") as ex:
        load(Settings(model_path=str(narrow), device="cpu", kv_h_mode=True, kv_format="fp16"))
    assert "\n" not in str(ex.value)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("TINYLOOP_DEVICE", "cuda", "finds no GPU"),
        ("TINYLOOP_BEATS_ADDR", "tcp://0.0.0.0:7777", "TINYLOOP_CURVE_DIR"),
    ],
)
def test_bad_setting_ends_with_78_and_one_line(
    settings: Settings, toy: Path, name: str, value: str, line: str
) -> None:
    environ = {"TINYLOOP_MODEL_PATH": str(toy), "CUDA_VISIBLE_DEVICES": "", name: value}
    process = start_process(settings, **environ)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 78
    assert line in errors and name in errors and "Traceback" not in errors
