#!/bin/sh
# Print the absolute path of a Python that can hold this project, or say on stderr what was looked for and where.
#
#   sh scripts/find_python.sh                    search PATH, then version managers' and system folders
#   PYTHON=python3.13 sh scripts/find_python.sh  check that one (a name or a path) and no other
#
# A candidate counts only when it runs: a version manager's shim on PATH may exist and still fail. It must be a
# 64-bit CPython of SUPPORTED, with the global lock, and with venv, ensurepip, ssl, zlib and ctypes.
# FIND_PYTHON_ROOT is put before the absolute folders below; the tests use it to search a made-up machine.
set -u

# Every minor version that jaxlib 0.11.2 and 0.12 have wheels for, in order of preference (the ones CI knows first).
SUPPORTED="3.13 3.12 3.14 3.15"
PROBE='
import sys
found = sys.version_info[:2]
fault = ""
if found < (3, 12):
    fault = "older than 3.12"
elif found > (3, 15):
    fault = "newer than 3.15, and jaxlib has no wheel for it"
elif sys.implementation.name != "cpython":
    fault = "%s, not CPython" % sys.implementation.name
elif sys.maxsize < 2**32:
    fault = "a 32-bit build"
else:
    import sysconfig
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        fault = "a free-threaded build"
    try:
        import ctypes, ssl, zlib
    except ImportError as error:
        fault = "built without a module that pip or jax needs (%s)" % error
    try:
        import ensurepip, venv
        ensurepip.version()
    except Exception as error:
        fault = "without venv or ensurepip (%s); Debian: apt-get install python%d.%d-venv" % ((error,) + found)
if fault:
    print("Python %d.%d, %s" % (found + (fault,)))
else:
    # In a virtual environment (maybe the very one that is about to be rebuilt), name the Python behind it.
    inside = sys.prefix != sys.base_prefix
    print("ok " + (inside and getattr(sys, "_base_executable", "") or sys.executable))
'

newline='
'
tried=$newline
unsuitable=

reject() { # reject PATH REASON
    unsuitable="$unsuitable  $1: $2$newline"
    return 1
}

# Prints nothing itself: sets $answer to the interpreter's path and succeeds, or notes the reason and fails.
check() { # check PATH
    case $tried in *"$newline$1$newline"*) return 1 ;; esac
    tried="$tried$1$newline"
    # A shim can wait for ever (for a network, for an answer): 20 s is far above any interpreter's start.
    if command -v timeout >/dev/null 2>&1; then
        answer=$(timeout 20 "$1" -I -c "$PROBE" 2>/dev/null </dev/null)
    else
        answer=$("$1" -I -c "$PROBE" 2>/dev/null </dev/null)
    fi
    code=$?
    case $answer in
        "ok /"*) [ "$code" -eq 0 ] && answer=${answer#ok } && return 0 ;;
        "Python "*) reject "$1" "$answer"; return 1 ;;
    esac
    # Python 2 stops at -I, so ask it in a way that every Python understands before calling it broken.
    version=$("$1" -c 'import sys; sys.stdout.write("%d.%d" % tuple(sys.version_info[:2]))' 2>/dev/null </dev/null)
    case $version in
        2.*) reject "$1" "Python $version, older than 3.12" ;;
        *) reject "$1" "does not run as a Python (exit status $code)" ;;
    esac
}

accept_if_good() { # accept_if_good PATH: ends the script on success
    if [ -f "$1" ] && [ -x "$1" ] && check "$1"; then
        printf '%s\n' "$answer"
        exit 0
    fi
}

root=${FIND_PYTHON_ROOT:-/}
home=${HOME:-/nonexistent}
data=${XDG_DATA_HOME:-$home/.local/share}

# One line a place: a folder, or a pattern of folders, that may hold python3.X.
places() {
    printf '%s\n' \
        ${PYENV_ROOT:+"$PYENV_ROOT/versions/*/bin"} "$home/.pyenv/versions/*/bin" \
        "${ASDF_DATA_DIR:-$home/.asdf}/installs/python/*/bin" \
        "${MISE_DATA_DIR:-$data/mise}/installs/python/*/bin" \
        "${UV_PYTHON_INSTALL_DIR:-$data/uv/python}/*/bin" \
        "$home/.rye/py/*/bin" "$data/hatch/pythons/*/python/bin" \
        ${CONDA_PREFIX:+"$CONDA_PREFIX/bin"} \
        "$home/miniconda3/bin" "$home/miniconda3/envs/*/bin" "$home/miniforge3/bin" "$home/miniforge3/envs/*/bin" \
        "$home/mambaforge/bin" "$home/anaconda3/bin" "$home/micromamba/envs/*/bin" \
        "$home/.local/bin" "$home/.nix-profile/bin" \
        "${root}usr/local/bin" "${root}usr/bin" "${root}usr/local/python*/bin" "${root}opt/python/bin" \
        "${root}opt/python/*/bin" "${root}opt/python*/bin" "${root}opt/conda/bin" "${root}opt/miniconda3/bin" \
        "${root}opt/miniforge3/bin" "${root}opt/pyenv/versions/*/bin" "${root}opt/hostedtoolcache/Python/*/*/bin" \
        "${root}home/linuxbrew/.linuxbrew/bin" "${root}opt/homebrew/bin"
}

if [ -n "${PYTHON:-}" ]; then
    chosen=$(command -v -- "$PYTHON" 2>/dev/null) || chosen=
    case $chosen in
        "") reject "$PYTHON" "not found, neither as a path nor on PATH" ;;
        /*) accept_if_good "$chosen" ;;
        *) accept_if_good "$PWD/$chosen" ;;
    esac
    {
        echo "jaxmoe: PYTHON=$PYTHON cannot hold this project."
        echo "Wanted: a 64-bit CPython 3.12, 3.13, 3.14 or 3.15 with venv and ensurepip. Got:"
        printf '%s' "$unsuitable"
        echo "Remedy: name another one (PYTHON=/path/to/python3.13), or leave PYTHON unset to have one looked for."
    } >&2
    exit 1
fi

names="python3 python"
for version in $SUPPORTED; do names="$names python$version"; done

# PATH first: what its owner calls python3 is the least surprising choice.
for name in $names; do
    set -f
    IFS=:
    # shellcheck disable=SC2086  # PATH is split at its colons on purpose
    set -- ${PATH:-}
    unset IFS
    set +f
    for folder in "$@"; do
        case $folder in /*) accept_if_good "$folder/$name" ;; esac
    done
done

patterns=$(places)
for version in $SUPPORTED; do
    IFS=$newline
    # Split at newlines alone, so that a blank in a folder's name survives; the patterns expand here.
    # shellcheck disable=SC2086
    set -- $patterns
    unset IFS
    for folder in "$@"; do
        accept_if_good "$folder/python$version"
    done
done

{
    echo "jaxmoe: no suitable Python found."
    echo "Looked for: a 64-bit CPython 3.12, 3.13, 3.14 or 3.15 (what jaxlib has wheels for) with venv and ensurepip,"
    echo "  called $names."
    echo "Looked in:"
    echo "  PATH: ${PATH:-}"
    set -f
    IFS=$newline
    # shellcheck disable=SC2086
    printf '  %s\n' $patterns
    unset IFS
    if [ -n "$unsuitable" ]; then
        echo "Found, but unsuitable:"
        printf '%s' "$unsuitable"
    fi
    echo "Remedy: install one and run the same command again, for example with"
    echo "  apt-get install python3 python3-venv    (Debian 13 and later)"
    echo "  pyenv install 3.13                      (or: uv python install 3.13, mise install python@3.13)"
    echo "or name one that lies elsewhere: make demo PYTHON=/path/to/python3.13"
} >&2
exit 1
