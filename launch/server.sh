#!/usr/bin/env bash
usage() {
    cat <<'TEXT'
launch/server.sh [key=value ...]

Serves a run whose workers come from other machines. A server that crashes is started again and resumes from its newest
checkpoint; so does this script when it is called again. Arguments are overrides, such as method=rennala
budget.updates=10000. A mistake in them ends it with code 2.

  SERVER_HOST     the address of this machine that workers can reach   (the first of hostname -I)
  SERVER_PORT     the one port they need                               (29400)
  RUN_DIR         the run directory                                    (runs/cluster)
  WORKERS         the start waits for this many workers, for a while   (4)
  RINGMASTER_TOKEN or RINGMASTER_TOKEN_FILE   the secret workers must know (a new one is made: RUN_DIR/token)
  RINGMASTER_PYTHON   an interpreter that has the package              (.venv's, made if need be)
  LAUNCHER        torchrun: under torchrun instead, which opens ports of its own; see docs/cluster.md   (ringmaster)
  MAX_RESTARTS    with LAUNCHER=torchrun: how often it starts a crashed server again                    (100)

Then, on any machine that can reach it:  RINGMASTER_TOKEN_FILE=... launch/worker.sh HOST:PORT
TEXT
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python_with_package
host=${SERVER_HOST:-$(hostname -I | cut -d' ' -f1)}
[ -n "$host" ] || { echo "launch/server.sh: this machine has no address; set SERVER_HOST" >&2; exit 2; }
case "${LAUNCHER:-ringmaster}" in
    ringmaster) command=(ringmaster_dist train) ;;
    torchrun) command=(torch.distributed.run --standalone --nproc-per-node=1
        --max-restarts="${MAX_RESTARTS:-100}" -m ringmaster_dist.train) ;;
    *) echo "launch/server.sh: LAUNCHER=$LAUNCHER: must be ringmaster or torchrun" >&2; exit 2 ;;
esac
say "serving at $host:${SERVER_PORT:-29400}, run directory ${RUN_DIR:-runs/cluster}"
exec "$RINGMASTER_PYTHON" -m "${command[@]}" cluster.local_workers=0 cluster.workers="${WORKERS:-4}" cluster.profile=none \
    server.host="$host" server.port="${SERVER_PORT:-29400}" run.dir="${RUN_DIR:-runs/cluster}" resume=auto "$@"
