#!/usr/bin/env bash
usage() {
    cat <<'TEXT'
launch/worker.sh HOST:PORT [key=value ...]

Adds workers on this machine to the run whose server is at HOST:PORT. There is one worker for each accelerator that torch
finds, such as each GPU, or one on the CPU if there is none. device=cuda:1,cpu names other devices, which workers take in
turn. Each worker is a separate process, and a worker that dies is restarted alone. Workers wait for a server that is not
running yet, and end with the run. A mistake, such as a wrong token, ends them with code 2. Arguments are those of
ringmaster worker, such as slot=3. ringmaster worker --help lists them.

  variable            meaning                                                     default
  WORKERS             the number of workers                                       the number of devices
  MAX_RESTARTS        how often each worker is restarted                          10
  PATIENCE_SECONDS    how long workers wait for a missing server                  600
  RINGMASTER_TOKEN    the secret of the run (RUN_DIR/token of the server)
  RINGMASTER_TOKEN_FILE   a file that contains this secret
  RINGMASTER_PYTHON   an interpreter that has the package                         .venv's, which is made if needed
  GROUP               true makes one worker of WORKERS ranks, by torchrun         false
  LAUNCHER            ringmaster, or torchrun, which opens its own ports          ringmaster
                      (see docs/cluster.md)
TEXT
}
case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    *:*) server=$1; shift ;;
    *) usage >&2; exit 2 ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python_with_package
arguments=(server="$server" patience_seconds="${PATIENCE_SECONDS:-600}") named=
for word in "$@"; do
    case "$word" in
        device=*) named=${word#device=} ;;
        *) arguments+=("$word") ;;
    esac
done
if [ -z "$named" ]; then
    named=$("$RINGMASTER_PYTHON" -c 'from ringmaster_dist import devices as d
print(*d.accelerators() or [d.CPU], sep=",")')
fi
IFS=, read -ra devices <<<"$named"
workers=${WORKERS:-${#devices[@]}}
if [ "${GROUP:-false}" = true ]; then
    say "starting one worker of $workers rank(s) for the server at $server"
    exec "$RINGMASTER_PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$workers" \
        --max-restarts="${MAX_RESTARTS:-10}" -m ringmaster_dist.worker "${arguments[@]}" device="$named" group=true
fi
say "starting $workers worker(s) for the server at $server"
case "${LAUNCHER:-ringmaster}" in
    ringmaster) exec "$RINGMASTER_PYTHON" -m ringmaster_dist worker workers="$workers" device="$named" \
        restarts="${MAX_RESTARTS:-10}" "${arguments[@]}" ;;
    torchrun) ;;
    *) echo "launch/worker.sh: LAUNCHER=$LAUNCHER is not allowed; use ringmaster or torchrun" >&2; exit 2 ;;
esac
pids=()
trap 'kill "${pids[@]}" 2>/dev/null' INT TERM
for ((index = 0; index < workers; index++)); do   # one torchrun per worker, because a torchrun restarts all its processes when one dies
    "$RINGMASTER_PYTHON" -m torch.distributed.run --standalone --nproc-per-node=1 \
        --max-restarts="${MAX_RESTARTS:-10}" -m ringmaster_dist.worker \
        device="${devices[index % ${#devices[@]}]}" "${arguments[@]}" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"
