#!/usr/bin/env bash
# Sets up .venv and runs lint, spelling, type checks and all tests except those that need Docker.
# Arguments go to pytest, as in ./launch/test.sh tests/unit -k core
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup test,fast
unset PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes, which would all compile the package
say "lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/codespell
say "type checks"
.venv/bin/mypy
[ $# -eq 0 ] || exec .venv/bin/python -m pytest "$@"
say "tests on all cores"
# Many tests wait for processes most of their time, so twice as many run as there are cores.
usual="not alone and not docker"
if ! .venv/bin/python -m pytest -n "$((2 * $(nproc)))" --dist worksteal --durations 15 -m "$usual"; then
    say "some tests failed while others ran at the same time: they get a second chance, one by one"
    .venv/bin/python -m pytest --last-failed --last-failed-no-failures none -m "$usual"
fi
say "tests that measure time, one by one"
.venv/bin/python -m pytest -m "alone and not docker"
