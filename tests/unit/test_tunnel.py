"""The parts of the tunnel by themselves: certificates, streams, TensorPipe's frames, message filters."""

import socket
import ssl
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_dist.transport import AuthenticationFailed, identity, loopback, tensorpipe
from ringmaster_dist.transport.message_filter import (
    AllPasses,
    CallFilter,
    MemoryAddressFilter,
    Pipe,
    ResultFilter,
    Share,
    TensorFilter,
)
from ringmaster_dist.transport.relay import Pair, Relay, Side
from ringmaster_dist.transport.streams import Stream, TlsStream
from ringmaster_dist.transport.tensorpipe import ProtocolError, framed
from tests.distributed.attacker import CALL, descriptor, message, number
from tests.distributed.processes import until

TOKEN = "0123456789abcdef0123456789abcdef"
# As torch 2.13 wrote them between two processes of one machine, and between two machines.
ANSWER = (
    b"\xb9\x07\xbd\x02uv\xbd\x0f127.0.0.1:33785\xbb\x01\x01\x00\xbd\x04uv:*\xbb\x01\xbd\x03cma\xbc\x10\x01\0\0\0\0\0\0\0"
    b"\x02\0\0\0\0\0\0\0\xbb\x01\xbd\x03cma\xbb\x01\xb9\x02\xbd\x03cpu\x00\xbd\x05cma:x\xbb\x01\xba\x02\xb9\x02\xbd\x03cpu"
    b"\x00\xb9\x02\xbd\x03cpu\x00\xbd\x03cma"
)
BROCHURE = b"\xb9\x02\xbb\x01\xbd\x02uv\xbd\x04uv:*\xbb\x01\xbd\x05basic\xbb\x01\xb9\x02\xbd\x03cpu\x00\xbd\x03any"


def pair_of_streams(server, worker):
    """Returns the two ends of a connection after a handshake, or during one, in two threads."""
    one, other = socket.socketpair()
    one.settimeout(60)
    other.settimeout(60)
    ends = TlsStream(one, server, server_side=True), TlsStream(other, worker, server_side=False)
    errors = []

    def shake(stream):
        try:
            stream.handshake_blocking()
        except (OSError, EOFError) as error:
            errors.append(error)
            stream.socket.close()

    thread = threading.Thread(target=shake, args=(ends[0],))
    thread.start()
    shake(ends[1])
    thread.join()
    return ends, errors


def test_certificates_follow_from_the_token_alone():
    first = identity._pairs(TOKEN)
    identity._pairs.cache_clear()
    assert identity._pairs(TOKEN) == first
    other = identity._pairs(TOKEN[:-1] + "x")
    everything = [part for pairs in (first, other) for pair in pairs.values() for part in pair]
    assert len(set(everything)) == 8  # two tokens, two roles, certificate and key
    der = ssl.PEM_cert_to_DER_cert(first["server"][0].decode())
    assert identity.is_ours(der)
    assert TOKEN.encode() not in der


def test_both_ends_prove_the_token():
    (server, worker), errors = pair_of_streams(identity.server_context(TOKEN), identity.worker_context(TOKEN))
    assert not errors
    assert server.purpose == identity.TUNNEL
    data = bytes(range(256)) * 5000
    threading.Thread(target=worker.send, args=(data,)).start()
    received, buffer = b"", memoryview(bytearray(1 << 18))
    while len(received) < len(data):
        received += buffer[: server.receive_into(buffer)]
    assert received == data


def test_an_empty_token_is_no_secret():
    for make in (identity.server_context, identity.worker_context):
        with pytest.raises(AuthenticationFailed, match="empty"):
            make("")


@pytest.mark.parametrize(
    "peer", ["worker with another token", "server with another token", "peer without a certificate", "worker as server"]
)
def test_a_peer_that_does_not_prove_it_is_refused(peer):
    server, worker = identity.server_context(TOKEN), identity.worker_context(TOKEN)
    if peer == "worker with another token":
        worker = identity.worker_context("another")
        worker.verify_mode = ssl.CERT_NONE
    elif peer == "server with another token":
        server = identity.server_context("another")
    elif peer == "peer without a certificate":
        worker = identity.unverified_context()
    else:  # a worker's certificate does not make a server
        server = identity._context(ssl.PROTOCOL_TLS_SERVER, TOKEN, own="worker", other="worker")
    _, errors = pair_of_streams(server, worker)
    assert errors


def test_a_process_id_of_more_than_32_bits_is_refused():
    """TensorPipe aborts at such a number, because its process ids have 32 bits."""
    address = number(4096)
    assert tensorpipe.read_memory_address(b"\xb9\x02" + number(1000) + address) == 1000
    for process in (b"\x83" + struct.pack("<Q", 1000), number(1 << 31)):
        with pytest.raises(ProtocolError):
            tensorpipe.read_memory_address(b"\xb9\x02" + process + address)


def test_the_answer_is_rewritten_and_nothing_else():
    answer = tensorpipe.read_answer(ANSWER)
    assert (answer.address, answer.reply) == ("127.0.0.1:33785", 0)
    assert (answer.channel, answer.numbers) == ("cma", (1, 2))
    assert answer.naming(answer.address) == ANSWER
    assert answer.naming("127.0.0.1:9") == ANSWER.replace(b"\x0f127.0.0.1:33785", b"\x0b127.0.0.1:9")


@given(st.integers(0, len(ANSWER) - 1), st.integers(0, 255))
def test_an_altered_answer_is_refused_or_still_names_one_address(position, value):
    """For any change the answer is refused, or its parts are unchanged."""
    altered = ANSWER[:position] + bytes([value]) + ANSWER[position + 1 :]
    try:
        answer = tensorpipe.read_answer(altered)
    except ProtocolError:
        return
    assert answer.naming("127.0.0.1:9").count(b"127.0.0.1:33785") == 0
    assert len(answer.naming("127.0.0.1:9")) == len(altered) - 4


def test_memory_is_shared_with_a_known_process_only():
    entry = b"\xbd\x03cma\xbb\x01\xb9\x02\xbd\x03cpu\x00\xbd\x05cma:x"
    basic = BROCHURE[16:]
    for entries in (entry + basic, basic + entry):
        both = BROCHURE[:14] + b"\xbb\x02" + entries
        assert tensorpipe.read_brochure(both)
        known = CallFilter(Pipe("w", 400, process=7))
        assert b"".join(known.filter(memoryview(framed(both)))) == framed(both)
        with pytest.raises(ProtocolError, match="memory of an unknown process"):
            list(CallFilter(Pipe("w", 400)).filter(memoryview(framed(both))))
    assert not tensorpipe.read_brochure(BROCHURE)
    for other in (BROCHURE[:14] + b"\xbb\x01" + entry, BROCHURE[:14] + b"\xbb\x02" + basic * 2, both + b"\0"):
        with pytest.raises(ProtocolError):
            tensorpipe.read_brochure(other)


@given(st.binary(max_size=200))
def test_noise_is_a_protocol_error_and_nothing_worse(noise):
    for read in (tensorpipe.read_greeting, tensorpipe.read_brochure, tensorpipe.read_answer, tensorpipe.read_descriptor,
                 tensorpipe.read_memory_address):  # fmt: skip
        for data in (noise, BROCHURE[:9] + noise, descriptor([4, 8, 5, 47])[:5] + noise):
            try:
                read(data)
            except ProtocolError:
                continue


@given(st.integers(0, 2**64 - 1))
def test_numbers_are_read_as_they_were_written(value):
    assert tensorpipe.read_greeting(b"\xb8\x01\xb9\x01" + number(value)) == value
    for width, layout in enumerate("BHIQ"):  # TensorPipe aborts at a longer form than it needs
        form = bytes([0x80 + width]) + struct.pack("<Q", value)[: struct.calcsize(layout)]
        if len(form) > len(number(value)):
            with pytest.raises(ProtocolError):
                tensorpipe.read_greeting(b"\xb8\x01\xb9\x01" + form)


@pytest.mark.parametrize("piece", [1, 3, 8, 50, 10_000])
def test_a_good_message_passes_the_filter_as_a_whole_however_it_comes(piece):
    stream = framed(BROCHURE) + message(CALL) * 3
    checked, passed = CallFilter(Pipe("w", 400, sends_tensors=True)), b""
    for start in range(0, len(stream), piece):
        passed += b"".join(checked.filter(memoryview(stream)[start : start + piece]))
        beyond = len(passed) - len(framed(BROCHURE))
        assert beyond <= 0 or beyond % len(message(CALL)) == 0, "a part of a message has passed"
    assert passed == stream


def test_nothing_of_a_bad_message_passes():
    bad = message(kind=0x100)
    for piece in (1, 7, len(bad)):
        checked, passed = CallFilter(Pipe("w", 400, sends_tensors=True)), []
        list(checked.filter(memoryview(framed(BROCHURE))))
        pieces = (memoryview(bad)[start : start + piece] for start in range(0, len(bad), piece))
        with pytest.raises(ProtocolError, match="type 0x00000100"):
            passed.extend(part for data in pieces for part in checked.filter(data))
        assert passed == []


def test_a_tensor_passes_in_pieces_once_it_was_announced():
    pipe = Pipe("w", 1 << 20, sends_tensors=True)
    pipe.calls.announce(1 << 20)
    checked, tensor = TensorFilter(pipe.calls), framed(bytes(1 << 20))
    passed = [bytes(part) for start in range(0, len(tensor), 1000)
              for part in checked.filter(memoryview(tensor)[start : start + 1000])]  # fmt: skip
    assert b"".join(passed) == tensor
    assert len(passed) > 1000


@pytest.mark.parametrize("kernel", ["with filters", "without filters"])
def test_a_listener_accepts_only_one_peer(kernel, monkeypatch):
    if kernel == "without filters":
        monkeypatch.setattr(loopback, "_accept_only_from", _not_permitted)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _, duplicate, key = loopback._closed(listener.fileno())
        duplicate.close()
        _check_closed(listener)
        with loopback.connect_alone(listener, key) as friend:
            accepted, _ = listener.accept()
            with accepted:
                friend.sendall(b"hello")
                assert accepted.recv(5) == b"hello"
                assert loopback.is_own_peer(accepted)
        _check_closed(listener)
        if key:
            with socket.socket() as other:
                loopback._sign(other, bytes(32))
                other.settimeout(0.3)
                with pytest.raises(TimeoutError):  # another key does not help
                    other.connect(listener.getsockname())


def _not_permitted(listener, port):
    raise PermissionError(1, "Operation not permitted")


def _check_closed(listener):
    for source in ("127.0.0.1", "127.0.0.2"):
        with socket.socket() as other:
            other.bind((source, 0))
            other.settimeout(0.3)
            with pytest.raises(TimeoutError):
                other.connect(listener.getsockname())


@pytest.mark.parametrize("big", [False, True])
def test_the_relay_carries_both_ways_and_waits_for_slow_readers(big):
    relay, ended = Relay(), threading.Event()
    outside, worker = socket.socketpair()
    inside, agent = socket.socketpair()
    passes = AllPasses(Pipe("w", 0))
    reasons = []

    def end(reason):
        reasons.append(reason)
        ended.set()

    outside.setblocking(False)  # as the gate hands it over
    pair = Pair(Side(Stream(outside), passes), Side(Stream(inside), passes), end, b"first ")
    relay.add(pair, big=big)
    data = bytes(8 << 20)
    sender = threading.Thread(target=worker.sendall, args=(data,))
    sender.start()
    agent.settimeout(60)
    received = bytearray()
    while len(received) < 6 + len(data):
        received += agent.recv(1 << 16)
    sender.join()
    assert bytes(received) == b"first " + data
    answer = threading.Thread(target=agent.sendall, args=(data,))
    answer.start()
    worker.settimeout(60)
    time.sleep(0.1)  # so that the buffers are full
    count = 0
    while count < len(data):
        count += len(worker.recv(1 << 16))
    answer.join()
    assert relay.num_open == 1
    assert relay.carried == {"received": len(data) + (0 if big else 6), "sent": len(data)}
    worker.close()
    assert agent.recv(1) == b""
    assert ended.wait(10)
    assert (reasons, relay.num_open) == ([""], 0)
    assert struct.calcsize("<Q") == tensorpipe.LENGTH_BYTES
    relay.close()
    deadline = time.monotonic() + 60
    while "relay" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < deadline, "the relay's thread does not end"
        time.sleep(0.01)


# A vector of doubles, as torch describes it: the numbers that are stored, the first one, how many, and their distance.
VECTOR = (
    b"\x80\x02ctorch.jit._pickle\nbuild_tensorlist\nq\x00(](ctorch._utils\n_rebuild_tensor_v2\nq\x01((X\x07\0\0\0storageq\x02"
    b"ctorch\nDoubleStorage\nq\x03X\x01\0\0\x000q\x04X\x03\0\0\0cpuq\x05%btQq\x06%b(%bt(%bt\x89ccollections\nOrderedDict\nq\x07)"
    b"RtRq\x08etR."
)


def results(*messages, answer=ANSWER, process=7, most=400):
    """What passes to a worker of what a server sends."""
    checked = ResultFilter(Pipe("server", most, process=process), lambda answer: answer.naming(answer.address))
    return b"".join(checked.filter(memoryview(framed(answer) + b"".join(messages))))


def test_a_worker_takes_results_of_the_announced_length_and_nothing_else():
    good = message(b"result", kind=0x203, tensors=[400], pickle=VECTOR % (b"K\x32", b"K\0", b"K\x32", b"K\1"))
    for passed in (good, message(b"no", kind=0x237), message(b"result", kind=0x203)):
        assert results(passed) == framed(ANSWER) + passed
    described = {  # a short tensor that is described as a long one would show the worker's own memory
        "longer": (b"K\x32", b"K\0", b"M\x10\x27", b"K\1"),
        "stored longer": (b"M\x10\x27", b"K\0", b"K\x32", b"K\1"),
        "beyond": (b"K\x32", b"K\x10", b"K\x32", b"K\1"),
        "far apart": (b"K\x32", b"K\0", b"K\x32", b"K\x7f"),
    }
    for name, numbers in described.items():
        with pytest.raises(ProtocolError):
            results(message(b"result", kind=0x203, tensors=[400], pickle=VECTOR % numbers)), name
    for kind in (0x102, 0x201, 0x200, 0x207, 0x20F):  # calls, results of operators, and others
        with pytest.raises(ProtocolError, match="none of this system"):
            results(message(b"result", kind=kind))
    with pytest.raises(ProtocolError, match="where the model needs"):
        results(message(b"result", kind=0x203, tensors=[1 << 60], pickle=VECTOR))
    with pytest.raises(ProtocolError, match="a message of"):
        results(message(bytes(2 << 20), kind=0x203))


def test_a_worker_reads_the_memory_of_its_own_server_only():
    with pytest.raises(ProtocolError, match="unknown process"):
        results(process=0)
    addresses = MemoryAddressFilter(7)
    with pytest.raises(ProtocolError, match="memory of process 8"):
        list(addresses.filter(memoryview(framed(b"\xb9\x02" + number(8) + number(4096)))))


def test_what_one_address_has_on_its_way_and_joins_is_bounded():
    share = Share(most_tensors=2, most_joins=3, every=1000.0)
    pipe, other = Pipe("w", 400, share, sends_tensors=True), Pipe("v", 400, share, sends_tensors=True)
    pipe.results.announce(400)
    assert not CallFilter(other).is_waiting
    other.calls.announce(400)
    assert CallFilter(pipe).is_waiting
    assert CallFilter(other).is_waiting
    tensor = framed(bytes(400))
    list(TensorFilter(other.calls).filter(memoryview(tensor)))
    assert not CallFilter(pipe).is_waiting
    pipe.results.end()
    pipe.results.end()
    assert share.num_tensors == 0
    for _ in range(3):
        share.join()
    with pytest.raises(ProtocolError, match="more joins"):
        share.join()


def test_a_connection_for_tensors_ends_with_the_one_for_calls():
    """Its thread waits for an announcement. A peer that comes and goes would otherwise leave any number of threads."""
    pipe, reasons = Pipe("w", 400, sends_tensors=True), []
    outside, inside = socket.socketpair(), socket.socketpair()
    pair = Pair(
        Side(Stream(outside[1]), TensorFilter(pipe.calls)), Side(Stream(inside[1]), AllPasses()), reasons.append
    )
    relay = Relay()
    relay.add(pair, big=True)
    outside[0].sendall(framed(bytes(400)))
    inside[0].settimeout(60)
    pipe.calls.end()
    assert inside[0].recv(1) == b""
    until(lambda: reasons == [""] and not relay.num_open, "the pair has ended")
    relay.close()


def test_a_call_before_the_servers_answer_is_refused():
    """Its tensor would not be counted, and the next one would be written over its end."""
    checked = CallFilter(Pipe("w", 400))
    with pytest.raises(ProtocolError, match="before the server's answer"):
        list(checked.filter(memoryview(framed(BROCHURE) + message(CALL))))


def test_tensors_come_one_after_the_other():
    """Every one that is announced takes memory of the agent until its bytes are there."""
    pipe = Pipe("w", 400, sends_tensors=True)
    checked = CallFilter(pipe)
    push = message(CALL, tensors=[400], pickle=VECTOR % (b"K\x32", b"K\0", b"K\x32", b"K\1"))
    list(checked.filter(memoryview(framed(BROCHURE) + push * 2)))
    with pytest.raises(ProtocolError, match="a tensor before the bytes"):
        list(checked.filter(memoryview(push)))
    assert pipe.share.num_tensors == 2


def test_calls_whose_answers_are_not_read_end_a_connection():
    checked = CallFilter(Pipe("w", 400, sends_tensors=True))
    list(checked.filter(memoryview(framed(BROCHURE))))
    with pytest.raises(ProtocolError, match="more calls than it reads answers to"):
        list(checked.filter(memoryview(message(CALL) * 100)))


def test_calls_of_one_address_wait_when_there_are_too_many():
    """Pickles are read in Python, one at a time, also those of all others."""
    share = Share(most_tensors=8, most_joins=10)
    pipe = Pipe("w", 400, share, sends_tensors=True)
    checked = CallFilter(pipe)
    for _ in range(400):
        share.call()
    assert not checked.is_waiting
    for _ in range(800):
        share.call()
    assert checked.is_waiting
    local = Share()  # of a worker of the same user on this machine
    for _ in range(10_000):
        local.call()
    assert not local.is_used_up
    with pytest.raises(ProtocolError, match="a call of 2103 bytes; the longest have 1024"):
        list(CallFilter(pipe).filter(memoryview(framed(BROCHURE) + message(CALL + bytes(2000)))))
