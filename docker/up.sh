#!/usr/bin/env bash
usage() {
    cat <<'TEXT'
docker/up.sh [arguments of docker compose up]

Builds the image and starts a server, a fast worker and a slow one (docker/compose.yaml). Scale while it runs:

  docker/up.sh --no-recreate --scale worker-fast=3 --scale worker-slow=1

  TRAIN        overrides for ringmaster train      (experiment=nanochat_local budget.seconds=null)
  SERVER_PORT  where the server's port is published on this machine   (29400)
  RUN          the run's folder in the volume      (current); a run that was begun goes on
  WORKERS      the start waits for this many       (2; with GPU=1 the same as GPU_WORKERS)
  PROFILE      whose pace the workers keep         (linear; none: as fast as they can); SLOT_FAST, SLOT_SLOW  (0, 3)
  BASE_IMAGE, TORCH, PIP_ARGS    what the image is made from, see docker/Dockerfile; RINGMASTER_IMAGE  its name
  GPU=1        lays docker/compose.gpu.yaml over it;  GPU_WORKERS  how many (1)
  DOCKER_COMPOSE   the command to use              (docker compose, or docker-compose); COMPOSE_PROJECT_NAME  (ringmaster)
TEXT
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ ! -s secrets/token ]; then
    (umask 077 && mkdir -p secrets)           # nobody else gets into the folder;
    head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n' >secrets/token
    chmod 444 secrets/token                   # the containers' user has to read the file
fi
export COMPOSE_PROJECT_NAME=${COMPOSE_PROJECT_NAME:-ringmaster}
compose=${DOCKER_COMPOSE:-$(docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)}
files=(-f compose.yaml)
[ "${GPU:-}" != 1 ] || { files+=(-f compose.gpu.yaml); export PROFILE=${PROFILE:-none}; }
exec $compose "${files[@]}" up --detach --build "$@"
