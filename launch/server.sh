#!/usr/bin/env bash
usage() {
    cat <<'TEXT'
launch/server.sh [key=value ...]

Serves a run whose workers come from other machines. Started again, or restarted by torchrun after a crash, it goes on
from its newest checkpoint. Arguments are overrides, such as method=rennala budget.updates=10000.

  SERVER_HOST     the address of this machine that workers can reach   (the first of hostname -I)
  SERVER_PORT     the port they are told                               (29400)
  RUN_DIR         the run directory                                    (runs/cluster)
  WORKERS         the start waits for this many workers, for a while   (4)
  MAX_RESTARTS    how often torchrun brings a crashed server back      (100)
  RINGMASTER_TOKEN or RINGMASTER_TOKEN_FILE   the secret workers must know (made anew: RUN_DIR/token)
  RINGMASTER_PYTHON   an interpreter that has the package              (.venv's, made if need be)

Then, on any machine that can reach it:  RINGMASTER_TOKEN_FILE=... launch/worker.sh HOST:PORT
TEXT
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python_with_package
host=${SERVER_HOST:-$(hostname -I | cut -d' ' -f1)}
[ -n "$host" ] || { echo "launch/server.sh: this machine has no address; set SERVER_HOST" >&2; exit 2; }
say "serving at $host:${SERVER_PORT:-29400}, run directory ${RUN_DIR:-runs/cluster}"
exec "$RINGMASTER_PYTHON" -m torch.distributed.run --standalone --nproc-per-node=1 --max-restarts="${MAX_RESTARTS:-100}" \
    -m ringmaster_dist.train cluster.local_workers=0 cluster.workers="${WORKERS:-4}" cluster.profile=none \
    server.host="$host" server.port="${SERVER_PORT:-29400}" run.dir="${RUN_DIR:-runs/cluster}" resume=auto "$@"
