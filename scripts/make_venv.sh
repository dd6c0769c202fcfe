#!/bin/sh
# Make VENV hold this project (editable) with EXTRAS; do nothing when it already does.
#
#   sh scripts/make_venv.sh VENV EXTRAS [PIN...]     e.g. .venv-min viz,test jax==0.11.2
#
# Done means: the stamp of EXTRAS carries this folder, the sum of pyproject.toml, the pins and the interpreter's own
# version text, and the interpreter still runs. `.installing` lies in VENV while it changes: an interrupted install
# leaves it behind, and the next run starts from nothing. PYTHON, if set, picks the interpreter (find_python.sh).
set -eu

venv=$1
extras=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd -P)
cd "$here"
unset PYTHONHOME PYTHONPATH

# Two makes in two terminals must not build the same folder at once.
if command -v flock >/dev/null 2>&1; then
    exec 9>"$venv.lock"
    flock 9
fi

# What the stamp must say; empty when the interpreter in there does not run.
state() {
    text=$("$venv/bin/python" -I -c 'import sys; print(" ".join(sys.version.split()))' 2>/dev/null) || return 0
    printf '%s\n' "folder $here" "project $(cksum <pyproject.toml)" "pins $*" "python $text"
}

why=
if [ -n "${PYTHON:-}" ]; then
    base=$(sh scripts/find_python.sh)
    [ "$(cat "$venv/.base-python" 2>/dev/null)" = "$base" ] || why="PYTHON asks for $base"
fi
stamp=$venv/.stamp-$(printf '%s' "$extras" | tr ',' '-')
want=$(state "$@")
if [ -e "$venv/.installing" ]; then
    why="its last install did not finish"
elif [ -z "$want" ]; then
    why="its Python does not run"
elif [ ! -e "$venv/.base-python" ]; then
    why="it was made by something else"
elif [ "$(sed -n 1p "$venv/.folder" 2>/dev/null)" != "$here" ]; then
    why="it was made in another folder"
fi

if [ -z "$why" ] && [ -x "$venv/bin/jaxmoe" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
    exit 0
fi

if [ -n "$why" ]; then
    base=$(sh scripts/find_python.sh)
    if [ -e "$venv" ] || [ -L "$venv" ]; then
        # Never delete a folder that is not plainly a virtual environment: VENV is the caller's word.
        if [ ! -L "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/.installing" ] &&
            [ -n "$(ls -A "$venv")" ]; then
            echo "jaxmoe: $venv exists and is no virtual environment. Move it away, or choose another: VENV=..." >&2
            exit 1
        fi
        echo "jaxmoe: making $venv anew: $why"
        rm -rf "$venv"
    fi
    mkdir -p "$venv"
    : >"$venv/.installing"
    echo "jaxmoe: making $venv with $base"
    "$base" -I -m venv "$venv"
    printf '%s\n' "$base" >"$venv/.base-python"
    printf '%s\n' "$here" >"$venv/.folder"
fi

: >"$venv/.installing"
rm -f "$stamp"
pins=$*
echo "jaxmoe: installing .[$extras]${pins:+ with $pins} into $venv (the first time takes a few minutes)"
quiet=-qq # errors alone: a machine whose pip names local folders would print a warning a package
[ ! -t 1 ] || quiet=--progress-bar=on
PIP_USER=0 "$venv/bin/python" -m pip install $quiet --no-input --disable-pip-version-check \
    --editable ".[$extras]" "$@"
state "$@" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm "$venv/.installing"
