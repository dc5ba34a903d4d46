#!/usr/bin/env bash
usage() {
    cat <<'TEXT'
docker/up.sh [arguments of docker compose up]

Builds the image and starts a server, a fast worker and a slow one (docker/compose.yaml). You can scale during the run:

  docker/up.sh --no-recreate --scale worker-fast=3 --scale worker-slow=1

  variable        meaning                                                        default
  TRAIN           overrides for ringmaster train                                 experiment=nanochat_local budget.seconds=null
  SERVER_PORT     the port of this machine where the server's port is published  29400
  RUN             the folder of the run in the volume; an existing run resumes   current
  WORKERS         the start waits for this many workers                          2; with GPU=1 set it to GPU_WORKERS
  PROFILE         the delay profile of the workers; none is full speed           linear; with GPU=1 none
  SLOT_FAST, SLOT_SLOW    the places of the two kinds of workers in the profile  0 and 3
  WORKER_ARGS     arguments of ringmaster worker, such as target=my_problem:factory
  BASE_IMAGE, TORCH, PIP_ARGS, EXTRAS    build arguments, see docker/Dockerfile
  RINGMASTER_IMAGE        the name of the image                                  ringmaster-dist
  GPU=1           adds docker/compose.gpu.yaml
  GPU_WORKERS     the number of GPU workers                                      1
  DOCKER_COMPOSE  the compose command                                            docker compose, or docker-compose
  COMPOSE_PROJECT_NAME    the name of the compose project                        ringmaster
TEXT
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ ! -s secrets/token ]; then
    (umask 077 && mkdir -p secrets)           # only this user can enter the folder
    head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n' >secrets/token
    chmod 444 secrets/token                   # the user in the containers has to read the file
fi
export COMPOSE_PROJECT_NAME=${COMPOSE_PROJECT_NAME:-ringmaster}
compose=${DOCKER_COMPOSE:-$(docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)}
files=(-f compose.yaml)
[ "${GPU:-}" != 1 ] || { files+=(-f compose.gpu.yaml); export PROFILE=${PROFILE:-none}; }
exec $compose "${files[@]}" up --detach --build "$@"
