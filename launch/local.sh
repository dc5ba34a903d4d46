#!/usr/bin/env bash
# Sets up .venv and runs the main job: the quadratic on 64 workers of unequal speed, in virtual time.
# Arguments are overrides: ./launch/local.sh method=rennala cluster.workers=200
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup test,fast
say "ringmaster simulate $*"
exec .venv/bin/ringmaster simulate "$@"
