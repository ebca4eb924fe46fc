# Sourced by scripts/up and scripts/test: finds Python, makes .venv and installs the pinned packages, but only when
# they have changed since the last time (a stamp in .venv says what is installed). Defines ensure_venv and VENV_PYTHON.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"

fail() {
    echo "$1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python3.14; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "TinyLoop needs Python 3.11 or newer with its venv module (on Debian: apt-get install python3 python3-venv)."
}

# install_pinned STAMP SIZE FILE...: pip installs FILEs unless STAMP says that these very files are in already.
install_pinned() {
    local stamp="$VENV/.installed-$1" size="$2" wanted
    shift 2
    wanted="$(cat "$@" | cksum)"
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
    echo "Installing pinned packages into .venv: $size to download where they are not cached yet." >&2
    local file
    for file in "$@"; do
        local options=()
        case "$file" in *-nodeps.txt) options=(--no-deps) ;; esac
        "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check ${options[@]+"${options[@]}"} -r "$file" >&2 ||
            fail "Could not install $(basename "$file"); the lines above say why."
    done
    echo "$wanted" >"$stamp"
}

# gpu_extra: `cuda` where there is an NVIDIA GPU, else nothing.
gpu_extra() {
    [ "${TINYLOOP_DEVICE:-auto}" != cpu ] && compgen -G "/dev/nvidia[0-9]*" >/dev/null && echo cuda
    return 0
}

# ensure_venv [dev] [cuda]: the virtual environment with what a server needs, with `dev` also what the tests need, and with
# `cuda` what the GPU kernels need.
ensure_venv() {
    if command -v flock >/dev/null; then # two scripts at the same time: the second waits
        exec 9<"$ROOT"
        flock 9
    fi
    if ! "$VENV_PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        local base
        base="$(find_python)" || exit 1
        "$base" -m venv --clear "$VENV" || fail "$base -m venv failed; on Debian: apt-get install python3-venv"
    fi
    install_pinned server "about 320 MB with a CPU build of torch (about 3 GB if pip's index has only the CUDA build)" \
        "$ROOT/requirements.txt" "$ROOT/requirements-nodeps.txt"
    local extra
    for extra in "$@"; do
        case "$extra" in
        dev) install_pinned dev "about 35 MB for the tests" "$ROOT/requirements-dev.txt" ;;
        cuda) install_pinned cuda "about 250 MB for the GPU kernels" "$ROOT/requirements-cuda.txt" ;;
        esac
    done
    if command -v flock >/dev/null; then
        exec 9<&-
    fi
}
