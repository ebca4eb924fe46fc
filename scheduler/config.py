"""Every setting of TinyLoop, defined once: name, unit, default, range and meaning.

Each process reads its environment once, at its entry point, into one frozen `Settings` and hands it (or plain numbers)
down; nothing else reads the environment. The README's table is made from the same definitions:
`python -m scheduler.config` prints it, `--check FILE` fails if the block in FILE is stale, `--write FILE` renews it.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

_log = logging.getLogger(__name__)

EXIT_BAD_SETTING = 78  # sysexits.h EX_CONFIG: a supervisor must not start the process again
MAX_IPC_PATH_BYTES = 107  # sun_path of a Unix socket, less the final NUL
KV_FORMATS = ("fp32", "fp16", "int8", "int4", "h", "h_int4")
SOCKETS = ("submit", "events", "workers", "beats")

_TABLE_START, _TABLE_END = "<!-- settings -->", "<!-- /settings -->"


class BadSetting(ValueError):
    """A setting that cannot be used. `str()` is one line: the variable, its value and what is accepted."""

    def __init__(self, env: str, value: object, accepts: str) -> None:
        shown = str(value) if str(value).isprintable() else repr(value)
        super().__init__(f"{env}={shown}: expected {accepts}")
        self.env = env


@dataclass(frozen=True, slots=True)
class Variable:
    """How one environment variable is read, and what is said of it. `parse` raises ValueError."""

    env: str
    unit: str
    default: str
    accepts: str
    about: str
    parse: Callable[[str], Any]


def _variable(
    env: str,
    default: Any,
    accepts: str,
    unit: str,
    about: str,
    parse: Callable[[str], Any],
    shown: str,
) -> Any:
    if not shown:
        is_unset = default in (None, "", ())
        shown = "unset" if is_unset else f"{default:g}" if type(default) is float else str(default)
    return field(
        default=default, metadata={"variable": Variable(env, unit, shown, accepts, about, parse)}
    )


def _integer(
    env: str,
    default: int | None,
    low: int,
    high: int,
    unit: str,
    about: str,
    multiple: int = 1,
    shown: str = "",
) -> Any:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise ValueError
        if not low <= int(text) <= high or int(text) % multiple:
            raise ValueError
        return int(text)

    accepts = f"an integer from {low} to {high}"
    accepts += f", a multiple of {multiple}" if multiple > 1 else ""
    return _variable(env, default, accepts, unit, about, parse, shown)


def _number(env: str, default: float | None, low: float, high: float, unit: str, about: str) -> Any:
    def parse(text: str) -> float:
        number = float(text)
        if not low <= number <= high:  # false for NaN too
            raise ValueError
        return number

    return _variable(env, default, f"a number from {low} to {high}", unit, about, parse, "")


def _flag(env: str, about: str) -> Any:
    def parse(text: str) -> bool:
        return bool(("0", "1").index(text))

    return _variable(env, False, "0 or 1", "flag", about, parse, "0")


def _choice(
    env: str, default: str | None, choices: Sequence[str], about: str, shown: str = ""
) -> Any:
    def parse(text: str) -> str:
        return choices[choices.index(text)]

    return _variable(env, default, "one of " + ", ".join(choices), "name", about, parse, shown)


def _text(
    env: str, default: str | None, unit: str, accepts: str, about: str, shown: str = ""
) -> Any:
    def parse(text: str) -> str:
        if len(text) > 4096 or not text.isprintable():
            raise ValueError
        return text

    return _variable(env, default, accepts, unit, about, parse, shown)


def _names(env: str, about: str) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        if not text.isprintable():
            raise ValueError
        return tuple(name.strip() for name in text.split(",") if name.strip())

    return _variable(env, (), "a comma-separated list, or *", "list", about, parse, "")


def _address(env: str, name: str, about: str) -> Any:
    def parse(text: str) -> str:
        found = re.fullmatch(r"ipc:///\S+|tcp://\S+:([0-9]{1,5})", text)
        if found is None or not 1 <= int(found[1] or 1) <= 65535:
            raise ValueError
        return text

    accepts, shown = "ipc:///PATH or tcp://HOST:PORT", f"ipc://RUN_DIR/{name}.ipc"
    return _variable(env, "", accepts, "address", about, parse, shown)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one process. `Settings()` is all defaults; `run_dir` and the addresses are filled in from `port`.

    Raises:
        BadSetting: by `from_env`, a value that cannot be read; by both, KV flags that contradict the KV format
            and socket paths that are too long.
    """

    # fmt: off
    model_path: str | None = _text("TINYLOOP_MODEL_PATH", None, "path", "a file",
        "The `.tinyloop` artifact to serve.", shown="the embedded demo")
    max_seq_len: int | None = _integer("TINYLOOP_MAX_SEQ_LEN", None, 1, 1 << 24, "tokens",
        "Longest prompt plus generated tokens; more than the artifact's positions is an error at start.",
        shown="min(2048, the artifact's positions)")
    max_queue_depth: int = _integer("TINYLOOP_MAX_QUEUE_DEPTH", 128, 1, 1_000_000, "requests",
        "Requests that may wait; beyond it a submit is answered 503.")
    default_slo_ms: float | None = _number("TINYLOOP_DEFAULT_SLO_MS", None, 1, 86_400_000, "ms",
        "Deadline that every request inherits; 503 at once when the predictor says it cannot be met.")
    prefix_pool_capacity: int = _integer("TINYLOOP_PREFIX_POOL_CAPACITY", 16, 0, 65_536, "entries",
        "Pinned entries of the shared prefix pool; 0 switches it off.")
    kv_h_mode: bool = _flag("TINYLOOP_KV_H_MODE", "Cache the attention input (H) in place of K and V.")
    kv_int4: bool = _flag("TINYLOOP_KV_INT4", "Store the KV cache in 4 bits; stacks with H mode.")
    h_mode_fp16_attn_qkv: bool = _flag("TINYLOOP_H_MODE_FP16_ATTN_QKV",
        "In H mode, compute rebuilt Q, K and V in fp16 (1) or in fp32 (0).")
    commit: str | None = _text("TINYLOOP_COMMIT", None, "text", "printable text",
        "Version string shown in `model_info.runtime.commit`.")
    build_dir: str = _text("TINYLOOP_BUILD_DIR", "./build", "path", "a directory",
        "Where the GPU's compiled kernels are kept (the CPU's lie beside their sources); made for its owner alone.")
    hf_home: str | None = _text("HF_HOME", None, "path", "a directory",
        "Tokenizer cache of the Hugging Face hub.", shown="Hugging Face's")
    host: str = _text("HOST", "0.0.0.0", "address", "an address of this machine",
        "Address the web server listens on.")
    port: int = _integer("PORT", 8000, 1, 65_535, "port", "Port the web server listens on.")
    log: str = _text("LOG", "/tmp/tinyloop_server.log", "path", "a file",
        "Log file of the detached launch, `scripts/start.sh`.")
    device: str = _choice("TINYLOOP_DEVICE", "auto", ("auto", "cuda", "cpu"),
        "Device of the workers; `auto` takes a GPU of compute capability 9.0 (H100, H200) if there is one.")
    kv_format: str | None = _choice("TINYLOOP_KV_FORMAT", None, KV_FORMATS,
        "How keys and values (or H) are stored.", shown="fp32 on cpu, fp16 on cuda")
    kv_share: str = _choice("TINYLOOP_KV_SHARE", "per_loop", ("per_loop", "last_loop"),
        "Keep K/V of every loop, or fold a generated token's to its last loop's.")
    kv_blocks: int = _integer("TINYLOOP_KV_BLOCKS", 0, 0, 1 << 30, "blocks",
        "Blocks of the KV pool (64 positions of one loop each).", shown="0: from free memory")
    prefill_chunk: int | None = _integer("TINYLOOP_PREFILL_CHUNK", None, 64, 65_536, "tokens",
        "Prompt tokens of one prefill step.", multiple=64, shown="256 on cpu, 2048 on cuda")
    max_rows: int = _integer("TINYLOOP_MAX_ROWS", 64, 1, 4096, "rows",
        "Sequences that a worker runs at a time.")
    threads: int = _integer("TINYLOOP_THREADS", 1, 1, 256, "threads",
        "CPU threads of a worker on the cpu device.")
    api_keys_file: str | None = _text("TINYLOOP_API_KEYS_FILE", None, "path", "a file",
        "API keys, one a line; unset: no key is asked for.")
    curve_dir: str | None = _text("TINYLOOP_CURVE_DIR", None, "path", "a directory",
        "CURVE keys; required for tcp:// beyond loopback.")
    run_dir: str = _text("TINYLOOP_RUN_DIR", "", "path", "a directory with a short path",
        "Sockets, lock and marks of one stack; made for its owner alone.", shown="/tmp/tinyloop-UID-PORT")
    submit_addr: str = _address("TINYLOOP_SUBMIT_ADDR", "submit", "Where clients push to the scheduler.")
    events_addr: str = _address("TINYLOOP_EVENTS_ADDR", "events", "Where the scheduler publishes to clients.")
    workers_addr: str = _address("TINYLOOP_WORKERS_ADDR", "workers", "Where workers and the scheduler meet.")
    beats_addr: str = _address("TINYLOOP_BEATS_ADDR", "beats", "Where workers send their heartbeats.")
    grace_s: float = _number("TINYLOOP_GRACE_S", 30.0, 0, 3600, "s",
        "Time that running requests have to finish after SIGTERM.")
    lame_duck_s: float = _number("TINYLOOP_LAME_DUCK_S", 0.0, 0, 600, "s",
        "Time after SIGTERM in which the stack still listens but answers 503, so that balancers notice.")
    ageing_s: float = _number("TINYLOOP_AGEING_S", 10.0, 0, 86_400, "s",
        "Waiting time that outweighs one step of priority; 0: priorities are off.")
    model_aliases: tuple[str, ...] = _names("TINYLOOP_MODEL_ALIASES",
        "Further model names to answer to; `*` answers to every name.")
    body_limit_bytes: int = _integer("TINYLOOP_BODY_LIMIT_BYTES", 4 << 20, 1024, 1 << 30, "bytes",
        "Largest HTTP request body; more is 413.")
    request_timeout_s: float = _number("TINYLOOP_REQUEST_TIMEOUT_S", 600.0, 0.1, 86_400, "s",
        "Longest life of a request; then it is cancelled.")
    cors_origins: tuple[str, ...] = _names("TINYLOOP_CORS_ORIGINS",
        "Origins whose browser pages may call the server.")
    max_streams: int = _integer("TINYLOOP_MAX_STREAMS", 512, 1, 65_536, "requests",
        "Requests in flight in one web process; more are 503.")
    max_n: int = _integer("TINYLOOP_MAX_N", 16, 1, 128, "choices",
        "Largest `n` (choices per prompt) of a request.")
    web_processes: int = _integer("TINYLOOP_WEB_PROCESSES", 2, 1, 256, "processes", "Web processes.")
    workers: int = _integer("TINYLOOP_WORKERS", 1, 0, 64, "processes",
        "Workers started here; 0: this host runs none.")
    fault: str = _text("TINYLOOP_FAULT", "", "name", "a name",
        "Fault switch for tests; never set it in service.")
    log_level: str = _choice("TINYLOOP_LOG_LEVEL", "info", ("debug", "info", "warning", "error"),
        "Least level logged.")
    # fmt: on

    def __post_init__(self) -> None:
        run_dir = os.path.abspath(self.run_dir or f"/tmp/tinyloop-{os.getuid()}-{self.port}")
        object.__setattr__(self, "run_dir", run_dir)
        for name in SOCKETS:
            if not getattr(self, f"{name}_addr"):
                object.__setattr__(self, f"{name}_addr", f"ipc://{run_dir}/{name}.ipc")
            self._check_ipc_path(name)
        self.kv_format_on("cpu")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """The settings in `environ`. An empty value counts as unset; unknown TINYLOOP_ names are warned of in one line.

        Raises:
            BadSetting: a value is not accepted.
        """
        values: dict[str, Any] = {}
        for name, variable in VARIABLES.items():
            text = environ.get(variable.env, "").strip()
            if not text:
                continue
            try:
                values[name] = variable.parse(text)
            except ValueError:
                raise BadSetting(variable.env, text, variable.accepts) from None
        warning = unknown_names(environ)
        if warning:
            _log.warning("%s", warning)
        return cls(**values)

    @classmethod
    def from_env_or_exit(cls, environ: Mapping[str, str]) -> Settings:
        """`from_env` for entry points: a bad setting is printed as one line and ends the process with status 78."""
        try:
            return cls.from_env(environ)
        except BadSetting as ex:
            exit_bad_setting(ex)

    def kv_format_on(self, device: str) -> str:
        """One of KV_FORMATS for `device` (cpu or cuda): the KV format with the contract's two flags stacked onto it.

        Raises:
            BadSetting: the flags contradict the format (H and 4 bits are cuts of fp16).
        """
        cuts = {
            (False, False): "fp16",
            (True, False): "h",
            (False, True): "int4",
            (True, True): "h_int4",
        }
        if not self.kv_h_mode and not self.kv_int4:
            return self.kv_format or ("fp16" if device == "cuda" else "fp32")
        base = self.kv_format or "fp16"
        if base in ("fp32", "int8"):
            flags = [("TINYLOOP_KV_H_MODE", self.kv_h_mode), ("TINYLOOP_KV_INT4", self.kv_int4)]
            flag = next(env for env, is_set in flags if is_set)
            raise BadSetting(
                flag,
                1,
                f"0 with TINYLOOP_KV_FORMAT={base}; it stacks onto fp16, int4, h and h_int4",
            )
        return cuts["h" in base.split("_") or self.kv_h_mode, "int4" in base or self.kv_int4]

    def prefill_chunk_on(self, device: str) -> int:
        """Prompt tokens of one prefill step on `device`."""
        return self.prefill_chunk or (2048 if device == "cuda" else 256)

    def summary(self) -> str:
        """One line for the log: every setting that differs from its default."""
        plain, same_place = Settings(), Settings(run_dir=self.run_dir)
        changed = [
            name
            for name in VARIABLES
            if getattr(self, name) != getattr(same_place if name.endswith("_addr") else plain, name)
        ]
        listed = [f"{VARIABLES[name].env}={getattr(self, name)}" for name in changed]
        return " ".join(listed) or "all settings at their defaults"

    def path_in_run_dir(self, name: str) -> Path:
        """The path of `name` in the run directory, for example `lame` or `scheduler.lock`."""
        return Path(self.run_dir, name)

    def _check_ipc_path(self, name: str) -> None:
        address = getattr(self, f"{name}_addr")
        path = address.removeprefix("ipc://")
        if path != address and len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
            is_derived = address == f"ipc://{self.run_dir}/{name}.ipc"
            env = "TINYLOOP_RUN_DIR" if is_derived else f"TINYLOOP_{name.upper()}_ADDR"
            value = self.run_dir if is_derived else address
            raise BadSetting(
                env,
                value,
                f"a path short enough for a socket, {MAX_IPC_PATH_BYTES} bytes with its name",
            )


VARIABLES: dict[str, Variable] = {f.name: f.metadata["variable"] for f in fields(Settings)}


def exit_bad_setting(ex: Exception) -> NoReturn:
    """Prints the one line of `ex` (a `BadSetting`, or of whoever tried to use one) and ends the process so that its supervisor does not start it again."""
    print(f"bad setting: {ex}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_BAD_SETTING)


def unknown_names(environ: Mapping[str, str]) -> str:
    """One line naming the TINYLOOP_ variables that are no settings, each with the nearest one that is; "" if none."""
    known = [variable.env for variable in VARIABLES.values()]
    unknown = sorted(name for name in environ if name.startswith("TINYLOOP_") and name not in known)
    nearest = [difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0] for name in unknown]
    listed = ", ".join(
        f"{name} (nearest: {near})" for name, near in zip(unknown, nearest, strict=True)
    )
    return f"unknown settings ignored: {listed}" if listed else ""


def table() -> str:
    """The settings as a Markdown table."""
    rows = [["variable", "unit", "default", "accepts", "meaning"], ["---"] * 5]
    for v in VARIABLES.values():
        rows.append([f"`{v.env}`", v.unit, v.default, v.accepts, v.about])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def with_table(text: str) -> str:
    """`text` with the block between the settings marks renewed.

    Raises:
        ValueError: the marks are not there.
    """
    before, start, rest = text.partition(_TABLE_START)
    _, end, after = rest.partition(_TABLE_END)
    if not start or not end:
        raise ValueError(f"no {_TABLE_START} ... {_TABLE_END} block")
    return f"{before}{start}\n{table()}\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler.config", description="The table of settings."
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", metavar="FILE", type=Path, help="fail if the table in FILE is stale"
    )
    mode.add_argument("--write", metavar="FILE", type=Path, help="renew the table in FILE")
    args = parser.parse_args(argv)
    path = args.check or args.write
    if path is None:
        print(table())
        return 0
    old = path.read_text(encoding="utf-8")
    try:
        new = with_table(old)
    except ValueError as ex:
        print(f"{path}: {ex}", file=sys.stderr)
        return 1
    if args.write:
        path.write_text(new, encoding="utf-8")
    elif new != old:
        print(
            f"{path}: the table of settings is stale; run python -m scheduler.config --write {path}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
