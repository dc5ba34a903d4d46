#!/usr/bin/env bash
# Sets up .venv and runs lint, spelling, types and all tests but those that need Docker. Arguments go to pytest: ./launch/test.sh tests/unit -k core
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup test
say "lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/codespell
if [ $# -gt 0 ]; then
    .venv/bin/mypy
    exec .venv/bin/python -m pytest "$@"
fi
say "types, and tests on all cores"
.venv/bin/mypy &
types=$!
.venv/bin/python -m pytest -n "$(nproc)" --dist worksteal -m "not alone and not docker"
wait "$types"
say "tests that measure, one by one"
.venv/bin/python -m pytest -m "alone and not docker"
