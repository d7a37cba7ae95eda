#!/bin/sh
# Makes the virtual environment, or adds to it: make-venv.sh PYTHON FOLDER WHAT, where WHAT is `.` or `.[dev]`. On Debian the venv module is
# a package of its own.
set -eu
python=$1
venv=$2
what=$3

if ! command -v "$python" >/dev/null 2>&1; then
    echo "make: $python is not there; install Python 3.11 or newer" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "make: $("$python" --version) is too old; Python 3.11 or newer is needed (make PYTHON=python3.12 ...)" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv >/dev/null
    else
        echo "make: $python has no venv module; install it: apt install python3-venv" >&2
        exit 1
    fi
fi
echo "make: installing $what into $venv, which takes up to a minute" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$what"; then
    echo "make: the Python packages could not be installed; is a package index reachable?" >&2
    exit 1
fi
