#!/usr/bin/env bash
# Sets up .venv and runs the main job: a small NanoChat learns the Python standard library, with a server and four workers
# of unequal pace over RPC. Arguments are overrides: ./launch/local.sh method=rennala cluster.workers=6
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup test
say "ringmaster train experiment=nanochat_local $*"
exec .venv/bin/ringmaster train experiment=nanochat_local "$@"
