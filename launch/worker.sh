#!/usr/bin/env bash
usage() {
    cat <<'TEXT'
launch/worker.sh HOST:PORT [key=value ...]

Adds this machine's workers to the run served at HOST:PORT: one for each GPU, or one. Each has a torchrun agent of its
own, so that one that dies is brought back alone. They wait for a server that is not there (yet), and end with the run.
Arguments are those of python -m ringmaster_dist.worker, such as slot=3; see its --help.

  WORKERS           how many                                                    (the number of GPUs, or 1)
  MAX_RESTARTS      how often torchrun brings each of them back                 (10)
  PATIENCE_SECONDS  how long they look for a server that is away                (600)
  RINGMASTER_TOKEN or RINGMASTER_TOKEN_FILE   the run's secret (RUN_DIR/token of the server)
  RINGMASTER_PYTHON   an interpreter that has the package                       (.venv's, made if need be)
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
say "$workers worker(s) for the server at $server"
pids=()
trap 'kill "${pids[@]}" 2>/dev/null' INT TERM
for ((index = 0; index < workers; index++)); do
    [ "$gpus" -eq 0 ] || export CUDA_VISIBLE_DEVICES=$((index % gpus))
    "$RINGMASTER_PYTHON" -m torch.distributed.run --standalone --nproc-per-node=1 --max-restarts="${MAX_RESTARTS:-10}" \
        -m ringmaster_dist.worker server="$server" patience_seconds="${PATIENCE_SECONDS:-600}" "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"
