#!/usr/bin/env bash
# Makes .venv in the checkout and installs the project into it, once. The other scripts source this file and do the same.
# PYTHON sets the interpreter. TORCH sets another torch requirement, such as TORCH='torch==2.9.1'.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

setup() {
    local extras=$1 python=${PYTHON:-python3} constraints=.venv/constraints.txt stamp want
    if [ ! -x .venv/bin/python ]; then
        say "making the virtual environment .venv with $($python --version)"
        "$python" -m venv .venv
    fi
    want=$(cat pyproject.toml launch/constraints.txt; echo "$extras ${TORCH:-}")
    stamp=.venv/installed-${extras//,/-}
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
        say "the environment is up to date"
        return
    fi
    grep -v '^#' launch/constraints.txt >"$constraints"
    [ -z "${TORCH:-}" ] || { grep -v '^torch' launch/constraints.txt | grep -v '^#' || true; echo "$TORCH"; } >"$constraints"
    say "installing the project and its dependencies (a few minutes the first time)"
    # torch is installed first and alone, because its exact version decides which build pip takes.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch' "$constraints")" 2> >(quiet >&2)
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" -e ".[$extras]" 2> >(quiet >&2)
    printf '%s' "$want" >"$stamp"
}

# Sets RINGMASTER_PYTHON to an interpreter that has the package. If it is not set, makes .venv and uses its interpreter.
python_with_package() {
    if [ -z "${RINGMASTER_PYTHON:-}" ]; then
        setup test,fast >&2
        RINGMASTER_PYTHON=$PWD/.venv/bin/python
    fi
}

# Removes pip's warnings about search paths that do not exist.
quiet() { grep -v 'is ignored: it is neither a file nor a directory' || true; }

[ "${BASH_SOURCE[0]}" != "$0" ] || setup test,fast   # when it is called, and not sourced
