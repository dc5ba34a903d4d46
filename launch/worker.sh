#!/usr/bin/env bash
usage() {
    cat <<'TEXT'
launch/worker.sh HOST:PORT [key=value ...]

Adds this machine's workers to the run served at HOST:PORT: one for each GPU, or one. Each is a process of its own, and
one that dies is started again alone. They wait for a server that is not there (yet), and end with the run. A mistake, such
as a wrong token, ends them with code 2. Arguments are those of ringmaster worker, such as slot=3; see its --help.

  WORKERS           how many                                                    (the number of GPUs, or 1)
  MAX_RESTARTS      how often each of them is started again                     (10)
  PATIENCE_SECONDS  how long they look for a server that is away                (600)
  RINGMASTER_TOKEN or RINGMASTER_TOKEN_FILE   the run's secret (RUN_DIR/token of the server)
  RINGMASTER_PYTHON   an interpreter that has the package                       (.venv's, made if need be)
  LAUNCHER          torchrun: under torchrun instead, which opens ports of its own; see docs/cluster.md   (ringmaster)
TEXT
}
case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    *:*) server=$1; shift ;;
    *) usage >&2; exit 2 ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python_with_package
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || true
workers=${WORKERS:-$((gpus > 0 ? gpus : 1))}
arguments=(server="$server" patience_seconds="${PATIENCE_SECONDS:-600}" "$@")
say "$workers worker(s) for the server at $server"
case "${LAUNCHER:-ringmaster}" in
    ringmaster) exec "$RINGMASTER_PYTHON" -m ringmaster_dist worker workers="$workers" \
        restarts="${MAX_RESTARTS:-10}" "${arguments[@]}" ;;
    torchrun) ;;
    *) echo "launch/worker.sh: LAUNCHER=$LAUNCHER: must be ringmaster or torchrun" >&2; exit 2 ;;
esac
pids=()
trap 'kill "${pids[@]}" 2>/dev/null' INT TERM
for ((index = 0; index < workers; index++)); do   # a torchrun for each: it starts all its processes again when one dies
    [ "$gpus" -eq 0 ] || export CUDA_VISIBLE_DEVICES=$((index % gpus))
    "$RINGMASTER_PYTHON" -m torch.distributed.run --standalone --nproc-per-node=1 \
        --max-restarts="${MAX_RESTARTS:-10}" -m ringmaster_dist.worker "${arguments[@]}" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"
