"""A holder of the token who uses it for everything at once: the others train on, and the server does not grow."""

import os
import re
import struct
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed.rpc import internal

from ringmaster_dist.protocol import PROTOCOL_VERSION, Interruptions, JoinRequest
from ringmaster_dist.server.members import Sessions
from ringmaster_dist.transport import agent, client, identity, tensorpipe
from ringmaster_dist.transport.streams import read_frame
from ringmaster_dist.transport.tensorpipe import ProtocolError, framed
from tests.distributed import attacker
from tests.distributed.attacker import EMPTY, Pipe, descriptor
from tests.distributed.processes import LONG, Run, check_finished, until

DIM = 1_000_000  # 8 MB in double precision
SESSION = re.compile(rb"\d+\.\d+\.1\.[0-9a-f]{16}\.[0-9a-f]+\.[0-9a-f]{32}")


def call(function, *arguments):
    pickled, _ = internal.serialize(internal.PythonUDF(function, arguments, {}))
    is_async = getattr(function, "_wrapped_async_rpc_function", None) is not None
    parts = [struct.pack("<i", 0x102), struct.pack("<q", 7), bytes([is_async]) + pickled, EMPTY]
    return framed(descriptor([len(part) for part in parts])) + b"".join(map(framed, parts))


class Holder(Pipe):
    """A member that is known to the server, and reads nothing more."""

    def __init__(self, run, source):
        self._source = source
        super().__init__(run.address, run.token, name=f"mallory-{os.urandom(4).hex()}")
        self.further_all()
        self.stream.send(call(agent.join, JoinRequest(PROTOCOL_VERSION, run.token, 0)))
        self.stream.socket.settimeout(20)
        self.session = ""
        for _ in range(5):  # a descriptor and four payloads
            found = SESSION.search(read_frame(self.stream))
            self.session = found[0].decode() if found else self.session

    def _dial(self):
        host, port = self._server.rsplit(":", 1)
        connection = client.socket.create_connection((host, int(port)), timeout=20, source_address=(self._source, 0))
        stream = client.TlsStream(connection, self._context, server_side=False)
        stream.handshake_blocking()
        return stream


def pace(run, seconds):
    """Updates per second."""
    before, since = run.version(), time.monotonic()
    time.sleep(seconds)
    return (run.version() - before) / (time.monotonic() - since)


def memory(run):
    return sum(attacker.memory(pid)[1] for pid in (run.server(), *run.children("gate")))


def test_forged_sessions_and_strange_seats_are_refused(tmp_path):
    with Run(tmp_path / "run", *LONG, "problem.dim=100") as run:
        until(lambda: run.version() > 5, "the run is on")
        run.address, run.token = ((tmp_path / "run" / name).read_text() for name in ("address", "token"))
        assert oct((tmp_path / "run/sessions").stat().st_mode)[-3:] == "600"
        seat = JoinRequest(PROTOCOL_VERSION, run.token, 0).seat(0)
        forged = Sessions(run.token).issue(10**12, seat)
        peer = client.Client(run.address, token=run.token, connect_seconds=10, call_seconds=10)
        assert peer.fetch(forged, 0, -1, Interruptions()).unknown
        for strange in ({"slot": 10**9}, {"slot": -5}, {"ranks": 0}, {"ranks": 10**6}, {"host": "\x1b[2J"}):
            request = JoinRequest(PROTOCOL_VERSION, run.token, 0)._replace(**strange)
            assert not peer.join(request).session, strange
        peer.close()
        run.process.terminate()
        check_finished(run, attacked=True)


def test_a_call_that_comes_before_the_answer_ends_the_connection(tmp_path):
    """Otherwise its tensor is not counted, the next one is written into its memory, and the server is overwritten."""
    with Run(tmp_path / "run", *LONG, "problem.dim=100000") as run:
        until(lambda: run.version() > 5, "the run is on")
        address, token = ((tmp_path / "run" / name).read_text() for name in ("address", "token"))
        server, stream = run.server(), client.dial(address, identity.worker_context(token), 20)
        stream.send(tensorpipe.opening("mallory") + call(agent.leave, "x"))
        assert attacker.ends(stream)
        assert run.server() == server
        run.process.terminate()
        check_finished(run, attacked=True)


@pytest.mark.alone
def test_a_holder_of_the_token_stops_nobody(tmp_path):
    """It comes from another address, with as many workers as it may, reads no reply, joins, and sends half tensors."""
    with Run(tmp_path / "run", *LONG, f"problem.dim={DIM}", "method=asynchronous", "cluster.unit_seconds=0.1") as run:
        until(lambda: run.version() > 20, "the run is on")
        run.address, run.token = ((tmp_path / "run" / name).read_text() for name in ("address", "token"))
        usual, size = pace(run, 10), memory(run)
        holders, stop, most = [], threading.Event(), [0]

        def attack():
            os.setpriority(os.PRIO_PROCESS, 0, 19)  # of this thread: its machine is another one
            while not stop.is_set():
                try:
                    if len(holders) < 70:
                        holders.append(Holder(run, "127.0.0.2"))
                    for holder in holders[-70:]:
                        holder.stream.send(call(agent.fetch, holder.session, 0, -1, Interruptions()))
                        half = [struct.pack("<i", 0x102), struct.pack("<q", 7), attacker.CALL + b"N.", EMPTY]
                        holder.stream.send(framed(descriptor([len(part) for part in half], [8 * DIM])))
                except (OSError, EOFError, ProtocolError, client.Unreachable):
                    holders[:] = [holder for holder in holders if not _is_over(holder)]
                most[0] = max(most[0], memory(run))
                time.sleep(0.02)

        threads = [threading.Thread(target=attack) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(5)
        attacked = max(pace(run, 10) for _ in range(3))  # other work on this machine is not the attack's
        stop.set()
        for thread in threads:
            thread.join()
        print(
            f"updates per second: {usual:.1f}, attacked {attacked:.1f}; memory {size >> 20} MB, at most {most[0] >> 20}"
        )
        assert most[0] < 1.3 * size
        assert attacked > 0.9 * usual
        run.process.terminate()
        check_finished(run, attacked=True)


def test_a_name_that_another_user_has_taken_keeps_nobody_out(tmp_path):
    """It listens where workers look for a server of their own user, and never answers."""
    with client.socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    squat = """import os, socket, sys
os.setgid(65534), os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(f"\\0ringmaster-{sys.argv[1]}"), listener.listen(1), print(flush=True), sys.stdin.read()"""
    command = [sys.executable, "-c", squat, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with Run(tmp_path / "run", *LONG, "problem.dim=100", f"server.port={port}") as run:
            until(lambda: run.version() > 5, "the run is on")
            run.process.terminate()
            check_finished(run)
        other.stdin.close()


def _is_over(holder):
    try:
        holder.stream.socket.setblocking(False)
        return holder.stream.socket.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_records_without_content_end_a_connection(tmp_path):
    """OpenSSL's own client asks for new keys again and again. Each answer would wait in the gate's memory."""
    with Run(tmp_path / "run", *LONG, "problem.dim=100") as run:
        until(lambda: run.version() > 5, "the run is on")
        address, token = ((tmp_path / "run" / name).read_text() for name in ("address", "token"))
        pair = identity._pairs(token)["worker"]
        (tmp_path / "pair.pem").write_bytes(b"".join(pair))
        (gate,) = run.children("gate")
        before = attacker.memory(gate)[1]
        command = ["openssl", "s_client", "-connect", address, "-cert", tmp_path / "pair.pem", "-alpn", identity.TUNNEL]
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(1)
        sent = 0
        try:
            while sent < 20_000:
                peer.stdin.write(b"K\n" * 100)
                peer.stdin.flush()
                sent += 100
                time.sleep(0.005)
        except BrokenPipeError:
            pass
        finally:
            peer.kill()
            peer.wait()
        assert attacker.memory(gate)[1] - before < 4 << 20
        run.process.terminate()
        check_finished(run, attacked=True)
