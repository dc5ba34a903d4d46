#!/usr/bin/env bash
usage() {
    cat <<'TEXT'
launch/server.sh [key=value ...]

Starts the server of a run whose workers are on other machines. A server that crashes is restarted and resumes from its
newest checkpoint. If you call this script again, it resumes too. Arguments are overrides, such as method=rennala
budget.updates=10000. A mistake in them ends the script with code 2.

  variable            meaning                                                     default
  SERVER_HOST         the address of this machine that workers can reach          the first of hostname -I
  SERVER_PORT         the one port that workers need                              29400
  RUN_DIR             the run directory                                           runs/cluster
  WORKERS             the start waits for this many workers, but not for ever     4
  RINGMASTER_TOKEN    the secret that workers must know                           a new one in RUN_DIR/token
  RINGMASTER_TOKEN_FILE   a file that contains this secret
  RINGMASTER_PYTHON   an interpreter that has the package                         .venv's, which is made if needed
  LAUNCHER            ringmaster, or torchrun, which opens its own ports          ringmaster
                      (see docs/cluster.md)
  MAX_RESTARTS        how often torchrun restarts a crashed server                100

Then start workers on any machine that can reach the server:  RINGMASTER_TOKEN_FILE=... launch/worker.sh HOST:PORT
TEXT
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python_with_package
host=${SERVER_HOST:-$(hostname -I | cut -d' ' -f1)}
[ -n "$host" ] || { echo "launch/server.sh: hostname -I gives no address; set SERVER_HOST" >&2; exit 2; }
case "${LAUNCHER:-ringmaster}" in
    ringmaster) command=(ringmaster_dist train) ;;
    torchrun) command=(torch.distributed.run --standalone --nproc-per-node=1
        --max-restarts="${MAX_RESTARTS:-100}" -m ringmaster_dist.train) ;;
    *) echo "launch/server.sh: LAUNCHER=$LAUNCHER is not allowed; use ringmaster or torchrun" >&2; exit 2 ;;
esac
say "starting the server at $host:${SERVER_PORT:-29400}, run directory ${RUN_DIR:-runs/cluster}"
overrides=(cluster.local_workers=0 cluster.workers="${WORKERS:-4}" cluster.profile=none
    server.host="$host" server.port="${SERVER_PORT:-29400}" run.dir="${RUN_DIR:-runs/cluster}" resume=auto "$@")
# torchrun restarts whatever fails, so a mistake is looked for first.
[ "${LAUNCHER:-ringmaster}" = ringmaster ] || "$RINGMASTER_PYTHON" -m ringmaster_dist train --cfg job "${overrides[@]}" >/dev/null
exec "$RINGMASTER_PYTHON" -m "${command[@]}" "${overrides[@]}"
