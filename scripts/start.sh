#!/usr/bin/env bash
# Starts TinyLoop detached: it outlives this shell, logs to LOG, and stops (draining) on `kill -TERM` of the printed pid.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# shellcheck disable=SC2046
ensure_venv $(gpu_extra)
LOG="${LOG:-/tmp/tinyloop_server.log}"
nohup setsid "$VENV_PYTHON" "$ROOT/scripts/launch.py" >"$LOG" 2>&1 </dev/null &
PID=$!
# A bad setting ends it at once: say so here rather than in the log alone.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    sleep 0.1
    if ! kill -0 "$PID" 2>/dev/null; then
        STATUS=0
        wait "$PID" || STATUS=$?
        tail -n 5 "$LOG" >&2
        exit "$STATUS"
    fi
done
echo "TinyLoop server pid=$PID on ${HOST:-0.0.0.0}:${PORT:-8000} — log $LOG"
