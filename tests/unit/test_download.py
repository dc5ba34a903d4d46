"""Downloads from a server that breaks off, sends garbage, answers 404, or is slow."""

import hashlib
import multiprocessing
import threading
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest

from ringmaster_dist.problems.nanochat import corpus
from ringmaster_dist.problems.nanochat.corpus import CorpusError, DownloadError, climbmix, fetch

CONTENT = bytes(range(256)) * 4000


class Server:
    """Serves CONTENT in the way that the test sets, and records the requested ranges."""

    def __init__(self):
        self.behaviour, self.asked, self.files = [], [], {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.headers.get("Range"))
                how = outer.behaviour.pop(0) if outer.behaviour else "well"
                content = outer.files.get(self.path, CONTENT)
                start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
                if how == "missing":
                    self.send_error(404)
                    return
                if how == "busy":
                    self.send_error(503)
                    return
                if how == "ignores ranges":
                    start = 0
                body = b"<html>who are you</html>" if how == "garbage" else content[start:]
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(body)))
                etag = hashlib.sha256(content).hexdigest()
                self.send_header("ETag", f'"{"0" * 64 if how == "wrong checksum" else etag}"')
                self.end_headers()
                if how == "slow":
                    time.sleep(3)
                self.wfile.write(body[: len(body) // 2] if how == "breaks off" else body)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def get(server, path, **settings):
    return fetch(f"{server.url}/file", path, pause_seconds=0.01, **settings)


def test_several_workers_may_download_at_once(server, tmp_path):
    """One worker of a machine downloads, and the others wait for it."""
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        got = [pool.submit(fetch, f"{server.url}/file", tmp_path / "file", pause_seconds=0.01) for _ in range(4)]
        assert all(future.result().read_bytes() == CONTENT for future in got)
    assert len(server.asked) == 1


def test_a_file_arrives_and_is_not_fetched_again(server, tmp_path):
    seen = []
    path = get(server, tmp_path / "file", progress=lambda fraction, text: seen.append(fraction))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == 1.0
    get(server, tmp_path / "file")
    assert len(server.asked) == 1
    path.write_bytes(CONTENT[:-1])  # damaged since: its checksum does not fit any more
    assert get(server, tmp_path / "file").read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_a_download_resumes_where_it_broke_off(server, tmp_path):
    server.behaviour = ["breaks off", "breaks off", "busy", "well"]
    assert get(server, tmp_path / "file").read_bytes() == CONTENT
    half = len(CONTENT) // 2
    assert server.asked == [None, f"bytes={half}-", f"bytes={half + half // 2}-", f"bytes={half + half // 2}-"]


def test_a_server_without_range_support_works(server, tmp_path):
    server.behaviour = ["breaks off", "ignores ranges"]
    assert get(server, tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (["missing"], "404"),
        (["garbage"] * 3, "checksum"),
        (["wrong checksum"] * 3, "checksum"),
        (["busy"] * 3, "503"),
        (["slow"] * 3, "timed out"),
    ],
)
def test_a_failed_download_is_reported_and_leaves_no_file(behaviour, words, server, tmp_path):
    server.behaviour = list(behaviour)
    with pytest.raises(DownloadError, match=words):
        get(server, tmp_path / "file", attempts=3, timeout_seconds=0.3)
    assert not (tmp_path / "file").exists()
    assert len(server.asked) == len(behaviour)


def test_a_missing_network_is_reported(tmp_path):
    with pytest.raises(DownloadError, match=r"refused"):
        fetch("http://127.0.0.1:1/file", tmp_path / "file", attempts=2, pause_seconds=0.01)


def test_shards_become_a_corpus(server, tmp_path):
    table = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), table)
    for name in ("shard_00000", "shard_00001", "shard_06542"):
        server.files[f"/{name}.parquet"] = table.read_bytes()
    sources = climbmix(server.url, 2, tmp_path / "shards")
    assert [(s.name, s.validation) for s in sources] == [
        ("shard_00000.parquet", False), ("shard_00001.parquet", False), ("shard_06542.parquet", True)
    ]  # fmt: skip
    assert {s.sha256 for s in sources} == {hashlib.sha256(table.read_bytes()).hexdigest()}
    server.files["/shard_00002.parquet"] = b"not a table at all"
    server.behaviour = ["well"]
    with pytest.raises(CorpusError, match="not a parquet file"):
        climbmix_once(server, tmp_path)


def test_a_shard_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    """A few bytes can stand for thousands of rows that share one long text, or for one group of any size."""
    path = tmp_path / "bomb.parquet"
    texts = pyarrow.DictionaryArray.from_arrays([0] * 500, ["x" * (16 << 20)])
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, path, compression="zstd", dictionary_pagesize_limit=64 << 20)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    texts = corpus.documents(corpus.Source(path, path.name, False))
    assert sum(1 for _ in zip(range(20), texts, strict=False)) == 20
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    monkeypatch.setattr(corpus, "_MOST_GROUP_BYTES", 1 << 20)
    with pytest.raises(CorpusError, match="in one group of rows"):
        next(corpus.documents(corpus.Source(path, path.name, False)))


def climbmix_once(server, tmp_path):
    """Runs `climbmix` without the pauses between attempts."""
    from unittest import mock

    with mock.patch("time.sleep"):
        return climbmix(server.url, 3, tmp_path / "shards")
