#!/usr/bin/env bash
# Sets up .venv and trains a small NanoChat on the Python standard library, with a server and four workers of unequal pace
# over RPC. Arguments are overrides, as in ./launch/local.sh method=rennala cluster.workers=6
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup test,fast
say "ringmaster train experiment=nanochat_local $*"
exec .venv/bin/ringmaster train experiment=nanochat_local "$@"
