"""Serves the stack in the foreground: starts the Procfile through honcho, says when it is ready, ends with status 0.

Called by scripts/up once the virtual environment is there. Knows nothing of how the processes work; it looks at
/healthz from outside and passes SIGTERM and SIGINT on, whereupon scripts/keep drains the stack.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scheduler.config import BadSetting, Settings, exit_bad_setting  # noqa: E402
from scripts.foreman import go_on_unread  # noqa: E402

FOREMAN = str(ROOT / "scripts" / "foreman.py")
STOPPED_BY_SIGNAL = (130, 143)  # honcho's statuses for SIGINT and SIGTERM
PR_SET_PDEATHSIG = 1
POLL_S = 0.1
STEADY_S = 1.0  # each web process becomes ready for itself, and any of them may answer
PATHS = (
    "TINYLOOP_MODEL_PATH",
    "TINYLOOP_API_KEYS_FILE",
    "TINYLOOP_CURVE_DIR",
    "TINYLOOP_RUN_DIR",
    "TINYLOOP_BUILD_DIR",
)


def main() -> int:
    go_on_unread()
    logging.getLogger("scheduler.config").setLevel(logging.ERROR)  # the processes warn
    environ = dict(os.environ)
    for name in PATHS:  # relative to where the caller is, not to where the stack runs
        if environ.get(name):
            environ[name] = os.path.abspath(environ[name])
    os.chdir(ROOT)
    environ.setdefault("PORT", "8000")  # else honcho would choose 5000
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", "")])
    settings = Settings.from_env_or_exit(environ)
    check_port_is_free(settings)
    honcho = subprocess.Popen(
        # no .env file: it would override the caller's PORT
        [sys.executable, FOREMAN, "-e", os.devnull, "-f", str(ROOT / "Procfile"), "start"],
        env=environ,
        start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on once
        preexec_fn=stop_with_parent,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: stop(honcho))
    announce_when_ready(settings, honcho)
    status = honcho.wait()
    return 0 if status in STOPPED_BY_SIGNAL else status


def check_port_is_free(settings: Settings) -> None:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as ex:
            reason = ex.strerror or ex
            if isinstance(ex, socket.gaierror) or ex.errno == errno.EADDRNOTAVAIL:
                here = f"an address of this machine ({reason})"
                exit_bad_setting(BadSetting("HOST", settings.host, here))
            where = f"a free port of {settings.host} ({reason})"
            exit_bad_setting(BadSetting("PORT", settings.port, where))


def stop(honcho: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        honcho.send_signal(signal.SIGTERM)


def stop_with_parent() -> None:
    """In the child: a SIGTERM when this process is killed, so that the stack drains then too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def announce_when_ready(settings: Settings, honcho: subprocess.Popen[bytes]) -> None:
    """Follows /healthz until it says ok (or honcho has ended), showing each new reason why it does not yet."""
    shown, ok_since = {""}, 0.0
    while honcho.poll() is None:
        status, text = health(settings)
        ok_since = (ok_since or time.monotonic()) if status == 200 else 0.0
        if ok_since and time.monotonic() - ok_since >= STEADY_S:
            url = base_url(settings)
            body = '{"prompt": "Once upon a time", "max_tokens": 40, "stream": true}'
            print(
                f"TinyLoop is ready on {url} (listening on {settings.host}:{settings.port})\n"
                f"  curl -N {url}/generate -H 'Content-Type: application/json' -d '{body}'",
                flush=True,
            )
            return
        if status != 200 and text not in shown:
            print(f"TinyLoop is not ready yet: {text}", flush=True)
            shown.add(text)
        time.sleep(POLL_S)


def base_url(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def health(settings: Settings) -> tuple[int, str]:
    """Status and text of /healthz; (0, "") while nothing answers."""
    host = base_url(settings).removeprefix("http://").rpartition(":")[0].strip("[]")
    connection = http.client.HTTPConnection(host, settings.port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status, answer.read(500).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
