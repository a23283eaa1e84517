#!/bin/sh
# Make or bring up to date a virtual environment from a lock:  envs/make_venv.sh FOLDER cpu|gpu
set -eu
venv=$1
kind=$2
here=$(dirname "$0")

# A command of that name may exist and yet not run (pyenv's shims), or lack ensurepip (Debian without python3-venv).
usable='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= '
case $kind in
    gpu) usable="$usable (3, 12))" newest=3.12 ;;
    cpu) usable="$usable (3, 13))" newest=3.13 ;;
    *) echo "make_venv.sh: the kind is cpu or gpu, not '$kind'" >&2; exit 2 ;;
esac

if [ ! -x "$venv/bin/pip" ]; then
    for python in python3.11 python3.12 python3.13 python3; do
        if "$python" -c "$usable" 2>/dev/null; then break; fi
        python=
    done
    if [ -z "$python" ]; then
        echo "No usable Python found: this needs Python 3.11 to $newest with its venv module, as python3.11, python3.12," >&2
        echo "python3.13 or python3 on PATH; seen: $(python3 --version 2>&1 || true)." >&2
        echo "On Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    fi
    echo "Making $venv for $kind with $("$python" --version); a few minutes, 3 GB or more ..."
    "$python" -m venv "$venv"
fi

pip="$venv/bin/python -m pip install -qq --disable-pip-version-check"
$pip pip==26.3
$pip -r "$here/$kind/requirements.txt"
$pip --no-deps -r "$here/$kind/requirements-no-deps.txt"
