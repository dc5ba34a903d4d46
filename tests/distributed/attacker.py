"""An attacker, with or without the token. It speaks TensorPipe by hand, so that it can send what torch never sends."""

import contextlib
import os
import re
import socket
import ssl
import struct
from pathlib import Path

from ringmaster_dist.transport import client, identity, tensorpipe
from ringmaster_dist.transport.streams import read_frame
from ringmaster_dist.transport.tensorpipe import framed

EMPTY = b"\x80\x02ctorch.jit._pickle\nbuild_tensorlist\nq\x00(](etR."
# The beginning of a call, as far as the gate looks at it.
CALL = (
    b"\x00\x80\x04\x95" + bytes(8) + b"\x8c\x1etorch.distributed.rpc.internal\x94\x8c\x09PythonUDF\x94\x93\x94"
    b"\x8c\x1fringmaster_dist.transport.agent\x94\x8c\x05fetch\x94\x93\x94"
)
SECONDS = 60.0


def listening(pids):
    """Every TCP socket that these processes listen on, as (host, port). The source is /proc, not the processes."""
    found = set()
    for pid in pids:
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            with contextlib.suppress(OSError):
                inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if _is_link(link)}
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                        found.add(_address(fields[1], family))
    return found


def _is_link(link):
    try:
        os.readlink(link)
    except OSError:
        return False
    return True


def _address(text, family):
    words, _, port = text.partition(":")
    packed = struct.pack(f"={len(words) // 8}I", *(int(words[i : i + 8], 16) for i in range(0, len(words), 8)))
    return socket.inet_ntop(family, packed), int(port, 16)


def say(address, data, *, wait=0.2, close=True):
    """Connects, sends the data, and waits a moment for an answer. None if no connection was made."""
    try:
        stream = socket.create_connection(address, timeout=0.5)
    except OSError:
        return None
    stream.settimeout(wait)
    try:
        if data:
            stream.sendall(data)
        return stream.recv(1 << 16)
    except OSError:
        return b""
    finally:
        if close:
            stream.close()


def shake_hands(address, context):
    """Makes a TLS handshake and one read. Returns what was received, or the name of the error."""
    try:
        with socket.create_connection(address, timeout=2) as plain, context.wrap_socket(plain) as stream:
            stream.sendall(tensorpipe.opening("mallory"))
            return stream.recv(100)
    except ssl.SSLError as error:
        return error.reason
    except OSError as error:
        return type(error).__name__


def text(words):
    return b"\xbd" + number(len(words)) + words


def number(value):
    return tensorpipe.encoded(value)


def descriptor(payloads, tensors=(), device=b"cpu"):
    place = b"\xb9\x02" + text(device) + b"\x00"
    parts = b"".join(b"\xb9\x02" + number(size) + text(b"") for size in payloads)
    blocks = b"".join(b"\xb9\x04" + number(size) + place + place + text(b"") for size in tensors)
    return b"\xb9\x03" + text(b"") + b"\xba" + number(len(payloads)) + parts + b"\xba" + number(len(tensors)) + blocks


def message(call=CALL + b"N.", kind=0x102, tensors=(), pickle=EMPTY):
    """A whole message with its payloads as announced."""
    payloads = [struct.pack("<i", kind), struct.pack("<q", 0), call, pickle]
    return framed(descriptor([len(part) for part in payloads], tensors)) + b"".join(map(framed, payloads))


class Pipe:
    """A worker's pipe made by hand, with the right token: TLS, greeting, brochure."""

    def __init__(self, server, token, *, name="mallory", tls=True):
        self._server, self._context = server, identity.worker_context(token) if tls else None
        self.stream = self._dial()
        self.stream.send(tensorpipe.opening(name))
        self.answer = tensorpipe.read_answer(read_frame(self.stream))

    def _dial(self):
        return client.dial(self._server, self._context, SECONDS)

    def further(self, registration):
        stream = self._dial()
        stream.send(framed(b"\xb8\x01\xb9\x01" + number(registration)))
        return stream

    def further_all(self):
        """Makes all connections that the answer asks for."""
        self.reply = self.further(self.answer.reply)
        (registration,) = self.answer.numbers
        self.tensors = self.further(registration)
        return self

    def is_cut(self, stream=None):
        return ends(stream or self.stream)

    def close(self):
        self.stream.socket.close()


def ends(stream):
    """Returns whether the other side ends the connection instead of answering."""
    stream.socket.settimeout(SECONDS)
    try:
        return stream.receive_into(memoryview(bytearray(1 << 16))) == 0
    except ConnectionError:
        return True


def memory(pid):
    """The bytes that a process has allocated, and those that it uses (VmSize, VmRSS)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return [int(re.search(rf"{name}:\s+(\d+)", status)[1]) << 10 for name in ("VmSize", "VmRSS")]
