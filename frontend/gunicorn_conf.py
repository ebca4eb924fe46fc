"""Gunicorn's configuration for the web processes; read once by the master, and again on SIGHUP.

Owns the directory in which prometheus-client's processes share their series: private, fresh for each master, and named
in the environment before anything imports prometheus_client. Everything else comes from `Settings`.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

from frontend.api_keys import read_keys
from scheduler.config import BadSetting, Settings, exit_bad_setting
from scheduler.transport import TransportError, Wire

_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def _prepare_metrics_dir(run_dir: Path) -> None:
    """Makes this master's directory of series and removes those of masters before it.

    On a reload it is there already and stays: the web processes that are alive write to it.
    """
    own = run_dir / f"web-metrics-{os.getpid()}"
    if os.environ.get(_METRICS_VARIABLE) == str(own) and own.is_dir():
        return
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for stale in run_dir.glob("web-metrics-*"):
        shutil.rmtree(stale, ignore_errors=True)
    own.mkdir(mode=0o700)
    os.environ[_METRICS_VARIABLE] = str(own)


_settings = Settings.from_env_or_exit(os.environ)
try:  # what every web process would fail at, one after the other
    Wire.from_settings(_settings, "client")
    read_keys(_settings.api_keys_file)
except (BadSetting, TransportError) as ex:
    exit_bad_setting(ex)
_prepare_metrics_dir(Path(_settings.run_dir))

bind = (
    f"[{_settings.host}]:{_settings.port}"
    if ":" in _settings.host
    else f"{_settings.host}:{_settings.port}"
)
workers = _settings.web_processes
worker_class = "asgi"
asgi_loop = "uvloop"
asgi_lifespan = "on"
asgi_disconnect_grace_period = 0  # a handler learns at once that its client has left
graceful_timeout = max(1, math.ceil(_settings.grace_s))
timeout = 60  # a process whose loop is blocked for this long is killed
keepalive = 5
control_socket_disable = True  # two servers of one user would share its path
loglevel = _settings.log_level
proc_name = "tinyloop-web"


def child_exit(server: Any, worker: Any) -> None:
    """A web process is gone: its live gauges go with it, its counters stay in the sums."""
    from prometheus_client import multiprocess

    multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]


def on_exit(server: Any) -> None:
    shutil.rmtree(os.environ[_METRICS_VARIABLE], ignore_errors=True)
