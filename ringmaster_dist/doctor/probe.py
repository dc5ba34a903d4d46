"""``python -m ringmaster_dist.doctor.probe HOST:PORT`` exits with 0 if a server of this run listens there.

It makes a TLS handshake, in which both ends prove the run's token, and leaves. It never imports torch, so that a
cluster can call it every few seconds.
"""

from __future__ import annotations

import socket
import sys

from ringmaster_dist.addresses import split
from ringmaster_dist.config.secret import given_token
from ringmaster_dist.transport import identity
from ringmaster_dist.transport.streams import TlsStream

_SECONDS = 5.0


def main(address: str) -> int:
    try:
        with socket.create_connection(split(address), _SECONDS) as connection:
            stream = TlsStream(connection, identity.worker_context(given_token()), server_side=False)
            stream.handshake_blocking()
    except OSError as error:
        print(f"there is no server of this run at {address}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
