"""``python forward.py LISTEN_PORT TO_HOST TO_PORT``: forwards one port, as a NAT or a published container port does.

Prints the bytes from and to the connecting side each time they change.
"""

import socket
import sys
import threading
import time

carried = {"in": 0, "out": 0}


def pump(source: socket.socket, target: socket.socket, name: str) -> None:
    try:
        while data := source.recv(1 << 18):
            carried[name] += len(data)
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def serve(port: int, host: str, to: int) -> None:
    with socket.create_server(("0.0.0.0", port), backlog=64) as listener:
        print("ready", flush=True)
        while True:
            came, _ = listener.accept()
            try:
                went = socket.create_connection((host, to), timeout=5)
                went.settimeout(None)
            except OSError:
                came.close()
                continue
            for one in (came, went):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=pump, args=(came, went, "in"), daemon=True).start()
            threading.Thread(target=pump, args=(went, came, "out"), daemon=True).start()


threading.Thread(target=serve, args=(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])), daemon=True).start()
told: dict[str, int] = {}
while True:
    if told != carried:
        told = dict(carried)
        print(told["in"], told["out"], flush=True)
    time.sleep(0.05)
