"""All known attacks, against real runs, through every socket that listens.

Each attack ends in a refusal while training continues in the same processes. Most attacks meet the same run, one after
the other. When it has survived them all, its trace replays to the same bits.
"""

import contextlib
import os
import pickle
import re
import resource
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringmaster_dist import addresses
from ringmaster_dist.bench.peers import cpu_seconds
from ringmaster_dist.transport import client, identity, loopback, tensorpipe
from ringmaster_dist.transport.streams import TlsStream
from ringmaster_dist.transport.tensorpipe import framed
from tests.distributed import attacker
from tests.distributed.attacker import Pipe, descriptor, message
from tests.distributed.processes import LONG, QUICK, Run, alive, check_finished, until


@contextmanager
def started(directory, *overrides, prefix=()):
    """A run to be attacked. Afterwards it replays."""
    with Run(directory / "run", *LONG, *overrides, prefix=prefix) as run:
        until(lambda: run.version() > 5, "the run is on")
        run.address = (directory / "run/address").read_text()
        run.token = (directory / "run/token").read_text()
        yield run
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run, attacked=True)
        assert summary["terms"] == 1
        assert summary["num_workers"] == len(run.joined())


@contextmanager
def attacked(run):
    """Afterwards the processes of the run are the same, it continues, and its server has not grown."""
    processes = run.children()
    before = attacker.memory(run.server())
    killed = run.killed = set()  # by the test itself
    printed, run.prints_tracebacks = len(run.errors()), False
    run.news = lambda: run.errors()[printed:]  # the text on stderr since the attack began
    yield
    version = run.version()
    until(lambda: run.version() > version + 10, "training continues")
    assert all(pid in killed or alive(pid) for pid in processes), "a process of the run has died"
    grown = [now - then for now, then in zip(attacker.memory(run.server()), before, strict=True)]
    assert max(grown) < 100 << 20, f"the server has grown by {grown} bytes"
    assert run.prints_tracebacks or "Traceback" not in run.news()


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    with started(tmp_path_factory.mktemp("attacked")) as run:
        yield run


@pytest.fixture
def run(shared_run):
    with attacked(shared_run):
        yield shared_run


def public(run):
    host, _, port = run.address.rpartition(":")
    return host, int(port)


def test_what_listens(run):
    """One socket answers. The agents' sockets listen too, and nobody can connect to them."""
    found = attacker.listening(run.children())
    assert public(run) in found
    assert {host for host, _ in found} == {"127.0.0.1"}
    agents = found - {public(run)}
    assert len(agents) == 4  # the server's and three workers'
    for agent in agents:
        for source in ("127.0.0.1", "127.0.0.2"):
            with socket.socket() as other:
                other.bind((source, 0))
                other.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    other.connect(agent)


GARBAGE = {
    "leaves at once": b"",
    "a length of 2^64": b"\xff" * 64,
    "a length of 400 MB": struct.pack("<Q", 400 << 20),
    "HTTP": b"GET / HTTP/1.0\r\n\r\n",
    "a greeting without TLS": tensorpipe.opening("mallory"),
    "a client of TCPStore": b"\x00\xce\xf7\x85\x3c\x01\x06\x00\x00\x00\x00\x00\x00\x00joined\x01\x00\x00\x00x",
    "a torn TLS record": b"\x16\x03\x01\x02\x00\x01\x00",
    "noise": os.urandom(4096),
}


def test_garbage_from_unproven_peers(run):
    """A hundred of each. Any one of them would stop a bare TensorPipe agent for good."""
    listening = attacker.listening(run.children())
    for address in sorted(listening - {public(run)}):
        assert attacker.say(address, b"") is None, "an agent can be connected to"
    for name, data in GARBAGE.items():
        for _ in range(100):
            answer = attacker.say(public(run), data, wait=0.01)
            # At most a TLS alert: nothing of torch's.
            assert not answer or answer[0] == 0x15, f"{name}: {answer!r}"
    joined = run.joined()
    run.killed.add(run.workers()[0])
    os.kill(run.workers()[0], signal.SIGKILL)
    until(lambda: run.joined() - joined, "a worker can join")
    until(lambda: "refused a peer at 127.0.0.1" in run.errors(), "the server says so")
    lines = [line for line in run.news().splitlines() if "refused a peer" in line]
    assert len(lines) < 20, "refusals fill the log"


def contexts():
    """Peers that speak TLS and have no token, or another one."""
    nobody = identity.unverified_context()
    other = identity.worker_context("another token, 32 letters long..")
    other.verify_mode = ssl.CERT_NONE  # it would refuse this server, too
    old = identity.unverified_context()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    return {"no certificate": nobody, "the certificate of another token": other, "TLS 1.2": old}


def test_without_the_token_tls_ends_in_an_alert(run):
    for name, context in contexts().items():
        answer = attacker.shake_hands(public(run), context)
        assert isinstance(answer, str), f"{name}: got {answer!r}"
    until(lambda: "refused a peer" in run.errors(), "the server says so")


def test_the_server_proves_the_token_too(run):
    """A worker ends with one line at a server that has another token, and sends nothing to it."""
    command = [sys.executable, "-m", "ringmaster_dist.worker", f"server={run.address}"]
    environment = {**os.environ, "RINGMASTER_TOKEN": "the token of another run"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == f"ringmaster worker: the server at {run.address} has another token: " + (
        "copy RUN_DIR/token from its machine\n"
    )


TENSOR = b"\x80\x02ctorch.jit._pickle\nbuild_tensorlist\nq\x00(](ctorch._utils\n_rebuild_tensor_v2\nq\x01((X\x07\x00\x00\x00storageq\x02ctorch\nDoubleStorage\nq\x03X\x01\x00\x00\x000q\x04X\x03\x00\x00\x00cpuq\x05%stQq\x06%s(%st(%st\x89ccollections\nOrderedDict\nq\x07)RtRq\x08etR."  # noqa: E501
DIM = 50  # of the run: a gradient has 400 bytes

_DIFFERS = "differs from what torch writes"
# What a holder of the token sends after its brochure, and the words with which it is cut off.
MESSAGES = {
    "an operator by name": (message(b"\x80\x02.", kind=0x100), "type 0x00000100"),
    "an operator as a remote reference": (message(kind=0x104), "type 0x00000104"),
    "a Python call as a remote reference": (message(kind=0x106), "type 0x00000106"),
    "an autograd context": (message(kind=0x10B), "type 0x0000010b"),
    "a call with autograd": (message(kind=0x10E), "type 0x0000010e"),
    "a reply to a call nobody made": (message(kind=0x203), "type 0x00000203"),
    "a tensor of a terabyte": (framed(descriptor([4, 8, 5, 200], [10**12])), "where the model needs 400"),
    "a tensor of one byte more": (framed(descriptor([4, 8, 5, 200], [401])), "where the model needs 400"),
    "two tensors": (framed(descriptor([4, 8, 5, 200], [8, 8])), _DIFFERS),
    "a tensor for another device": (framed(descriptor([4, 8, 5, 200], [8], b"cuda")), _DIFFERS),
    "a call of a gigabyte": (framed(descriptor([4, 8, 1 << 30, 47])), "a message of 1073741824 bytes"),
    "a call of 20 kB": (message(b"\x00" * 20_000), "a message of 20000 bytes"),
    "five payloads": (framed(descriptor([4, 8, 5, 47, 9])), _DIFFERS),
    "a long message type": (framed(descriptor([4000, 8, 5, 47])), "not one of torch RPC"),
    "a payload that is longer than announced": (
        framed(descriptor([4, 8, 5, 47])) + framed(b"12345"),
        "5 bytes",
    ),
    "a frame of 2^63": (struct.pack("<Q", 1 << 63), "9223372036854775808 bytes"),
    "an empty tensor": (
        message(tensors=[0], pickle=TENSOR % (b"K\0", b"K\0", b"K\0", b"K\1")),
        "an empty message or tensor",
    ),
    "an empty call": (message(call=b""), "an empty message or tensor"),
    "a device in a wide number": (
        framed(descriptor([4, 8, 5, 188], [400]).replace(b"cpu\x00", b"cpu\x80\x00")),
        _DIFFERS,
    ),
    "a second greeting": (framed(b"\xb8\x00\xb9\x01\xbd\x03abc"), _DIFFERS),
    "a tensor that was not sent": (message(pickle=TENSOR % (b"K\x01", b"K\x00", b"K\x01", b"K\x01")), "not sent"),
    "a pickle of something else": (message(pickle=b"\x80\x02cposix\nsystem\n."), "tensors that were not sent"),
}
for name, numbers in {
    "a size beyond its bytes": (b"K\x32", b"K\x00", b"M\x10\x27", b"K\x01"),
    "a storage beyond its bytes": (b"M\x10\x27", b"K\x00", b"K\x32", b"K\x01"),
    "strides": (b"K\x32", b"K\x00", b"K\x32", b"M\x10\x27"),
    "an offset": (b"K\x32", b"M\x10\x27", b"K\x32", b"K\x01"),
    "a negative size": (b"J\xff\xff\xff\xff", b"K\x00", b"J\xff\xff\xff\xff", b"K\x01"),
    "two dimensions": (b"K\x32", b"K\x00", b"K\x05K\x0a", b"K\x0aK\x01"),
}.items():
    MESSAGES[f"a tensor with {name}"] = (message(tensors=[8 * DIM], pickle=TENSOR % numbers), "tensor")


def test_messages_that_are_not_calls_end_the_connection_of_a_token_holder(run):
    for index, (name, (data, words)) in enumerate(MESSAGES.items()):
        pipe = Pipe(run.address, run.token, name=f"mallory-{index}")
        pipe.stream.send(data)
        assert pipe.is_cut(), f"{name} was not cut off"
        line = until(lambda index=index: _line(run, f"worker mallory-{index} "), f"{name} is reported")
        assert words in line, f"{name}: {line}"
        assert "at 127.0.0.1:" in line
        pipe.close()


def _line(run, words):
    return next((line for line in run.errors().splitlines() if words in line), "")


def test_tensor_bytes_that_were_not_announced_are_refused(run):
    """The agent has allocated memory for the announced bytes of a tensor. Not one more byte may arrive."""
    good = message(tensors=[400], pickle=TENSOR % (b"K\x32", b"K\x00", b"K\x32", b"K\x01"))
    longer = Pipe(run.address, run.token, name="longer").further_all()
    longer.stream.send(good)
    longer.tensors.send(framed(bytes(4000)))
    assert longer.is_cut(longer.tensors)
    until(
        lambda: "a tensor of 4000 bytes that was announced with 400" in _line(run, "longer"),
        "it is logged",
    )
    talks = Pipe(run.address, run.token, name="talks").further_all()
    talks.reply.send(framed(b"hello"))
    assert talks.is_cut(talks.reply)
    until(lambda: "a connection that torch does not use" in _line(run, "talks"), "it is logged")
    stray = Pipe(run.address, run.token, name="stray")
    for number in (10**6, 0):  # a number that does not exist, and one that is used already
        assert stray.is_cut(stray.further(number)), "a connection that nobody expects was accepted"
    again = Pipe(run.address, run.token, name="again").further_all()
    assert again.is_cut(again.further(again.answer.reply)), "a registration was used twice"


def brochure(transport=b"uv", channels=(b"basic",), device=b"cpu", index=b"\x00", copies=1):
    one = b"\xbb\x01\xb9\x02" + attacker.text(device) + index + attacker.text(b"any")
    transports = (attacker.text(transport) + attacker.text(b"uv:*")) * copies
    listed = b"".join(attacker.text(name) + one for name in channels)
    return b"\xb9\x02\xbb" + bytes([copies]) + transports + b"\xbb" + bytes([len(channels)]) + listed


GREETING = b"\xb8\x00\xb9\x01\xbd\x07mallory"
OPENINGS = {
    "a greeting in a wide number": (b"\xb8\x80\x00\xb9\x01\xbd\x07mallory", brochure()),
    "a greeting of a third kind": (b"\xb8\x02\xb9\x01\xbd\x07mallory", brochure()),
    "a device of another number": (GREETING, brochure(index=b"\x80\xc8")),
    "another device": (GREETING, brochure(device=b"cuda")),
    "another transport": (GREETING, brochure(transport=b"shm")),
    "a transport twice": (GREETING, brochure(copies=2)),
    "no channel": (GREETING, brochure(channels=())),
    "a channel twice": (GREETING, brochure(channels=(b"basic", b"basic"))),
    "a channel that is not known": (GREETING, brochure(channels=(b"basic", b"mpt_uv"))),
}


def test_pipe_openings_that_would_abort_torch_are_refused(run):
    """TensorPipe throws if it finds no common transport, or an unexpected encoding. Nothing catches that exception."""
    for name, (greeting, offered) in OPENINGS.items():
        stream = client.dial(run.address, identity.worker_context(run.token), attacker.SECONDS)
        stream.send(framed(greeting) + framed(offered))
        assert attacker.ends(stream), f"{name} was not cut off"
    good = Pipe(run.address, run.token).further_all()
    good.stream.send(message())
    assert not good.is_cut(), "what is good is answered"


def test_pipes_that_are_never_finished_leave_nothing_behind(run):
    """A holder of the token opens three hundred, and leaves each before its further connections are made."""
    count = lambda: len(list(Path(f"/proc/{run.server()}/fd").iterdir()))  # noqa: E731
    before = count()
    for _ in range(300):
        Pipe(run.address, run.token).close()
    until(lambda: count() < before + 40, "the agent has closed them")


def test_bytes_after_the_end_of_a_tls_stream_cost_nothing(run):
    """TLS has a closing message. A peer that continues to send after it costs neither memory nor time."""
    (gate,) = run.children("gate")
    before = attacker.memory(gate)[1]
    for connection in ("stream", "tensors"):
        pipe = Pipe(run.address, run.token, name="endless").further_all()
        stream = getattr(pipe, connection)
        with contextlib.suppress(ssl.SSLError):
            stream._object.unwrap()
        stream.socket.sendall(stream._outgoing.read())
        with contextlib.suppress(OSError):
            for _ in range(4000):
                stream.socket.sendall(b"\x17\x03\x03\x40\x00" + bytes(16384))
        assert attacker.memory(gate)[1] - before < 30 << 20
    used = cpu_seconds(gate)
    time.sleep(1.0)
    assert cpu_seconds(gate) - used < 0.6, "a thread of the gate runs without end"


def test_crowds_of_unproven_peers_keep_nobody_out(run):
    """More than are heard at once, some half-way through their handshake, from one address and from many."""
    torn = b"\x16\x03\x01\x3f\xff"
    (gate,) = run.children("gate")
    crowd = [_unproven(run, f"127.0.{1 + index % 9}.{1 + index % 200}", torn) for index in range(200)]
    for wave in range(60):  # bytes for old ones and new connections, in one look of the gate
        for stream in crowd[wave : wave + 40]:
            with contextlib.suppress(OSError):
                stream.send(b"\x00")
        crowd += [_unproven(run, f"127.1.{wave}.{1 + index}", b"") for index in range(8)]
    for _ in range(20):
        slow = socket.create_connection(public(run), timeout=60)
        crowd += [_unproven(run, f"127.2.0.{1 + index}", torn) for index in range(10)]
        stream = TlsStream(slow, identity.worker_context(run.token), server_side=False)
        stream.handshake_blocking()
        slow.close()
    assert run.children("gate") == [gate]
    for stream in crowd:
        stream.close()


def _unproven(run, source, data):
    stream = socket.create_connection(public(run), timeout=60, source_address=(source, 0))
    if data:
        stream.sendall(data)
    return stream


def test_a_greeting_in_two_tls_records_is_accepted(run):
    stream = client.dial(run.address, identity.worker_context(run.token), attacker.SECONDS)
    opening = tensorpipe.opening("halves")
    stream.socket.sendall(stream.wrapped(opening[:8]) + stream.wrapped(opening[8:20]) + stream.wrapped(opening[20:]))
    assert tensorpipe.read_answer(attacker.read_frame(stream)).channel == "basic"


def test_modules_in_the_current_folder_are_not_imported(tmp_path, monkeypatch):
    """Another user may have put it there, if a run is started in a folder that others can write to."""
    (tmp_path / "shared").mkdir()
    for name in ("resource", "selectors", "ipaddress", "cryptography"):
        (tmp_path / "shared" / f"{name}.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path / "shared")
    command = [str(Path(sys.executable).with_name("ringmaster")), "train", f"run.dir={tmp_path}/run", *QUICK]
    done = subprocess.run([*command, "budget.updates=10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "owned").exists(), (tmp_path / "owned").read_text()


def test_memory_of_other_processes_is_not_read(run):
    """With cma a worker names its own process. If it named another process, the server would read that process's
    memory. A holder of the token that has not met the server on its machine, such as one behind a proxy, names none."""
    brochure = _brochure_with_cma()
    pipe = Pipe.__new__(Pipe)
    pipe._server, pipe._context = run.address, identity.worker_context(run.token)

    def answer_to(name, *, meets):
        pipe.stream = pipe._dial()
        own = addresses.joined(*pipe.stream.socket.getsockname())
        assert loopback.greet_neighbour(public(run)[1], own if meets else "127.0.0.1:1") == meets * run.server()
        pipe.stream.send(framed(b"\xb8\x00\xb9\x01\xbd\x05" + name.encode()) + framed(brochure))

    answer_to("proxy", meets=False)
    assert pipe.is_cut()
    answer_to("forge", meets=True)
    answer = tensorpipe.read_answer(attacker.read_frame(pipe.stream))
    assert answer.channel == "cma"
    channel, _, _ = map(pipe.further, (*answer.numbers, answer.reply))
    channel.send(framed(b"\xb9\x02" + attacker.number(run.server()) + attacker.number(4096)))
    assert pipe.is_cut(channel)
    until(lambda: f"memory of process {run.server()}" in _line(run, "forge"), "it is logged")


BROCHURE = """
import os, socket, struct
import torch.distributed as dist
from torch.distributed import rpc
from ringmaster_dist.transport import agent
listener, store = socket.create_server(("127.0.0.1", 0)), dist.HashStore()
store.set("names/0", "server")
store.set("addrs/server", f"uv://127.0.0.1:{listener.getsockname()[1]}")
agent._start(store, "me", 1, 2, 4, 9.0)
rpc.rpc_async("server", agent.leave, args=("",))
connection = listener.accept()[0].makefile("rb")
read = lambda: connection.read(struct.unpack("<Q", connection.read(8))[0])
read()
print(read().hex(), flush=True)
os._exit(0)
"""


def _brochure_with_cma():
    """Returns a brochure as torch writes it here, with the domain of this machine and user."""
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    done = subprocess.run([sys.executable, "-c", BROCHURE], capture_output=True, text=True, env=environment)
    return bytes.fromhex(done.stdout.strip())


TORCH = """
import os, sys, pickle
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
import torch, torch.distributed.rpc as rpc
from ringmaster_dist.transport import agent
from ringmaster_dist.transport.client import Client
from ringmaster_dist.protocol import Interruptions, JoinRequest, Push
agent.restrict = lambda unpickler: None  # the attacker's own side is not restricted
address, token, marker = sys.argv[1:]

class Trap:
    def __reduce__(self):
        return os.system, (f"touch {marker}",)

class Big:
    def __reduce__(self):
        return bytearray, (1 << 30,)

def attempt(name, work):
    client = Client(address, token=token, connect_seconds=10, call_seconds=10)
    try:
        work(client)
    except Exception as error:
        print(name, "refused" if "refused" in str(error) else "cut off", flush=True)
    else:
        print(name, "WENT THROUGH", flush=True)
    client.close()

def call(function, *arguments):
    return lambda client: rpc.rpc_sync("server", function, args=arguments, timeout=10)

attempt("system", call(os.system, f"touch {marker}"))
attempt("eval", call(eval, f"open({marker!r}, 'w')"))
attempt("trap", call(agent.join, Trap()))
attempt("big", call(agent.join, Big()))
attempt("getattr", call(getattr, [], "append"))
attempt("import", call(__import__, "os"))
attempt("load", call(pickle.loads, pickle.dumps(1)))
attempt("operator", call(torch.add, torch.ones(2), 1))
attempt("from_file", call(torch.from_file, "/etc/passwd", False, 100))
attempt("create_file", call(torch.from_file, marker, True, 100))
attempt("rref", lambda client: rpc.remote("server", torch.ones, args=([50_000_000],)).to_here(10))
attempt("python rref", lambda client: rpc.remote("server", agent.leave, args=("",)).to_here(10))
attempt("huge tensor", call(agent.leave, torch.ones(10_000_000)))
client = Client(address, token=token, connect_seconds=10, call_seconds=10)
print("wrong token", client.join(JoinRequest(99, token, 0)).reason)
print("session", client.fetch("guess", 0, 0, Interruptions()).unknown)
sys.stdout.flush()
os._exit(0)
"""


def test_torch_rpc_with_the_token_can_do_nothing_else(run, tmp_path):
    """The attacker has the right token, and uses everything that torch RPC offers."""
    run.prints_tracebacks = True  # torch prints one for a call that it could not unpickle
    marker = tmp_path / "owned"
    command = [sys.executable, "-c", TORCH, run.address, run.token, str(marker)]
    attack = subprocess.run(command, capture_output=True, text=True)
    lines = attack.stdout.splitlines()
    for name in ("trap", "big"):
        assert f"{name} refused" in lines, attack.stdout + attack.stderr
    for name in (
        "system",
        "eval",
        "getattr",
        "import",
        "load",
        "operator",
        "from_file",
        "create_file",
        "rref",
        "python rref",
        "huge tensor",
    ):
        assert f"{name} cut off" in lines, attack.stdout + attack.stderr
    assert any(line.startswith("wrong token the worker speaks protocol 99") for line in lines)
    assert "session True" in lines
    assert not marker.exists()
    cut = set(re.findall(r"worker (\S+) at \S+ was cut off: it sent", run.news()))  # each client has a name of its own
    assert len(cut) == 11, "the attacker's own side has refused, and not the server"


def test_pickles_that_cost_memory_or_time_are_refused(run):
    """The pickle of a valid call is a bomb. The unpickler refuses it, and the answer is an error."""
    bombs = {
        "an entry of the memo": b"\x80\x04N" + b"r" + struct.pack("<I", 1 << 25) + b".",
        "many small words": b"\x80\x04" + b"N0" * 7000 + b"N.",
        "a list in a list": b"\x80\x04" + b"]" * 10_000 + b".",
        "a word longer than the message": b"\x80\x04B" + struct.pack("<I", 1 << 30) + b".",
        "a frame longer than the message": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
        "an extension": b"\x80\x04\x82\x01.",
        "a name": pickle.dumps(os.system),
    }
    used, join = cpu_seconds(run.server()), attacker.CALL.replace(b"\x05fetch", b"\x04join")  # the longest call
    for name, bomb in bombs.items():
        pipe = Pipe(run.address, run.token, name="bomber").further_all()
        pipe.stream.send(message(join + bomb.removeprefix(b"\x80\x04")))
        assert not pipe.is_cut(), name  # the server's agent answers, with an exception
        pipe.close()
    assert cpu_seconds(run.server()) - used < 10


def test_idle_connections_keep_no_worker_out(tmp_path):
    """There are 1,100 idle connections, and the server may open 256 files. It still writes checkpoints, and workers
    join."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    limited = ["prlimit", "--nofile=256:256"]
    given = ["checkpoint.every=10", "server.handshake_seconds=2"]
    with started(tmp_path, *given, prefix=limited) as run, attacked(run):
        idle = [socket.create_connection(public(run), timeout=60) for _ in range(1100)]
        saved = set(run.checkpoints(0))
        until(lambda: set(run.checkpoints(0)) - saved, "a checkpoint is written")
        command = [sys.executable, "-m", "ringmaster_dist.worker", f"server={run.address}"]
        environment = {**os.environ, "RINGMASTER_TOKEN": run.token}
        late = subprocess.Popen(command, env=environment)
        try:
            until(lambda: len(run.joined()) == 4, "a worker joins")
        finally:
            late.kill()
            late.wait()
        until(lambda: _all_hung_up(idle), "the idle are gone")
        for stream in idle:
            stream.close()


def _all_hung_up(streams):
    for stream in streams:
        stream.setblocking(False)
        try:
            if stream.recv(1):
                return False
        except BlockingIOError:
            return False
        except OSError:
            continue
    return True


def test_a_killed_gate_is_replaced_and_nothing_is_counted_twice(tmp_path):
    """The gate is killed three times during pushes, because these workers do almost nothing but push."""
    big = ["problem.dim=100000", "cluster.profile=none"]
    with Run(tmp_path / "run", *LONG, *big) as run:
        server, workers = run.server(), until(lambda: len(run.workers()) == 3 and run.workers(), "three workers")
        for _ in range(3):
            version = run.version()
            until(lambda version=version: run.version() > version + 20, "updates are made")
            (gate,) = run.children("gate")
            os.kill(gate, signal.SIGKILL)
            until(lambda gate=gate: [pid for pid in run.children("gate") if pid != gate], "another gate is there")
        version = run.version()
        until(lambda: run.version() > version + 20, "updates are made")
        assert (run.server(), run.workers()) == (server, workers)
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
    assert summary["terms"] == 1
    assert run.errors().count("the gate has died") == 3
