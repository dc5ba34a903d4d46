#!/bin/sh
# Runs pip of the image's environment. If /wheelhouse has wheels, pip uses only those.
if ls /wheelhouse/*.whl >/dev/null 2>&1; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheelhouse
fi
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
exec /opt/ringmaster/bin/python -m pip "$@"
