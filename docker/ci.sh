#!/usr/bin/env bash
# Runs the tests of the compose cluster, with the Docker engine that is running. Without one, it installs an engine from Debian's
# packages (as root), uses it, and stops it afterwards. The base image comes from debootstrap, and the wheels from pip on this machine.
# If no engine is possible, it prints a loud message and exits with 0, or with 1 if REQUIRE_DOCKER=1.
#   docker/ci.sh prepare    only installs the packages, makes the archive of the base image and the wheels, and prints nothing. Run it
#                           during other tests, because it waits for the network most of the time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${RINGMASTER_PYTHON:-$PWD/.venv/bin/python}
place=${RINGMASTER_ENGINE:-/tmp/ringmaster-docker}   # the files of the engine; its images are reused
suite=bookworm                                       # its Python is 3.11
engine=""

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
leave_out() {
    printf '\n\033[1;31m%s\n  THE DOCKER TESTS DID NOT RUN: %s\n%s\033[0m\n\n' "$(printf '=%.0s' {1..100})" "$*" \
        "$(printf '=%.0s' {1..100})" >&2
    [ "${REQUIRE_DOCKER:-0}" != 1 ] || exit 1
    exit 0
}
finish() {
    [ -z "$engine" ] || { kill "$engine" 2>/dev/null && wait "$engine" 2>/dev/null; } || true
}
trap finish EXIT

install_engine() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    local packages=(docker.io docker-compose debootstrap)
    if ! { command -v dockerd && command -v docker-compose && command -v debootstrap; } >/dev/null; then
        say "installing ${packages[*]}"
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 install -y \
            --no-install-recommends "${packages[@]}"; } >"$place/apt.log" 2>&1 || { tail -5 "$place/apt.log" >&2; return 1; }
    fi
}

start_engine() {
    export DOCKER_HOST=unix://$place/docker.sock
    local driver
    for driver in overlay2 vfs; do
        rm -f "$place/pid"
        dockerd --data-root "$place/data" --exec-root "$place/exec" --pidfile "$place/pid" --host "$DOCKER_HOST" \
            --storage-driver "$driver" >"$place/dockerd.log" 2>&1 &
        engine=$!
        for _ in $(seq 60); do
            docker info >/dev/null 2>&1 && { say "started an engine with $driver in $place"; return; }
            kill -0 "$engine" 2>/dev/null || break
            sleep 0.5
        done
        kill "$engine" 2>/dev/null && wait "$engine" || true
        engine=""
    done
    tail -5 "$place/dockerd.log" >&2
    return 1
}

make_base_archive() {
    rm -rf "$place/root"
    debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$place/root" >"$place/debootstrap.log" 2>&1 || {
        tail -5 "$place/debootstrap.log" >&2
        return 1
    }
    tar -C "$place/root" --exclude=./var/cache/apt --exclude=./var/lib/apt --exclude=./usr/share/doc \
        --exclude=./usr/share/locale -cf "$place/base.part" .
    mv "$place/base.part" "$place/base.tar"
    rm -rf "$place/root"
}

make_base_image() {
    export BASE_IMAGE=ringmaster-base:$suite
    docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 && return
    say "making the base image with debootstrap"
    [ -s "$place/base.tar" ] || make_base_archive || return 1
    docker import "$place/base.tar" "$BASE_IMAGE" >/dev/null && rm -f "$place/base.tar"
}

fill_wheelhouse() {
    ls docker/wheelhouse/torch-*.whl >/dev/null 2>&1 && return
    say "making the wheels"
    "$python" -m pip wheel --quiet --wheel-dir docker/wheelhouse "$(grep '^torch' launch/constraints.txt)" hatchling . \
        2>"$place/wheels.log" || { tail -5 "$place/wheels.log" >&2; rm -f docker/wheelhouse/*.whl; return 1; }
    rm -f docker/wheelhouse/ringmaster_dist-*.whl
}

if [ "${1:-}" = prepare ]; then
    mkdir -p "$place" && install_engine >/dev/null 2>&1 || exit 0
    [ -s "$place/base.tar" ] || [ -d "$place/data/image" ] || make_base_archive >/dev/null 2>&1 || true
    for _ in $(seq 300); do    # launch/test.sh is making the environment
        [ ! -e .venv/installed-test-fast ] || break
        sleep 2
    done
    fill_wheelhouse >/dev/null 2>&1 || true
    exit 0
fi
if docker info >/dev/null 2>&1; then
    say "using the engine that is running"
else
    mkdir -p "$place" || leave_out "the folder $place cannot be created"
    install_engine || leave_out "no engine is running, and none can be installed (this needs root and apt-get)"
    start_engine || leave_out "dockerd does not start, see above"
    fill_wheelhouse &   # at the same time as the base image, because both wait for the network
    wheels=$!
    make_base_image || leave_out "there is no base image, see above"
    wait "$wheels" || leave_out "pip cannot make the wheels, see above"
fi
say "docker tests"
"$python" -m pytest -m docker tests/e2e/test_docker.py "$@"
