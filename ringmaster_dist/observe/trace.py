"""trace.jsonl as columns: read quickly, in pieces, also while it grows.

A trace may have millions of lines, so whole blocks are parsed at once and kept as numpy columns. A last line without
its end is left for the next look: somebody is writing it, or died while doing so.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np

from ringmaster_dist.observe.run_directory import RunDirectoryError
from ringmaster_dist.protocol import Verdict

VERDICTS = tuple(verdict.value for verdict in Verdict)  # a verdict in a column is its place here
_COLUMNS: dict[str, type[np.generic]] = {
    "time": np.float64,
    "worker": np.int32,
    "sequence": np.int64,
    "version": np.int64,
    "delay": np.int64,
    "loss": np.float64,
    "compute_seconds": np.float64,
}
_BLOCK_BYTES = 1 << 24


class Trace:
    """The arrivals so far; `look` reads what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._pieces: dict[str, list[np.ndarray]] = {name: [] for name in (*_COLUMNS, "verdict")}

    def __len__(self) -> int:
        return sum(len(piece) for piece in self._pieces["time"])

    def __getitem__(self, name: str) -> np.ndarray:
        """A column: one of the trace's numbers, or ``verdict``."""
        pieces = self._pieces[name]
        if len(pieces) > 1:
            pieces[:] = [np.concatenate(pieces)]
        return pieces[0] if pieces else np.empty(0, dtype=np.int8 if name == "verdict" else _COLUMNS[name])

    def look(self, anew: bool = False) -> None:
        """Reads on; from the start if asked to, or if the file has become shorter.

        Raises RunDirectoryError for a line that is none of a trace.
        """
        if not self._path.is_file():
            return
        if anew or self._path.stat().st_size < self._offset:
            self._forget()
        with self._path.open("rb") as file:
            file.seek(self._offset)
            rest = b""
            while block := file.read(_BLOCK_BYTES):
                block = rest + block
                end = block.rfind(b"\n") + 1
                if end:
                    self._take(block[:end])
                    self._offset += end
                rest = block[end:]

    def _take(self, block: bytes) -> None:
        import pyarrow as pa
        from pyarrow import json as pa_json

        schema = pa.schema([(name, pa.from_numpy_dtype(kind)) for name, kind in _COLUMNS.items()])
        schema = schema.append(pa.field("verdict", pa.string()))
        parsing = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        reading = pa_json.ReadOptions(block_size=len(block) + 1)
        try:
            table = pa_json.read_json(io.BytesIO(block), parse_options=parsing, read_options=reading)
        except pa.ArrowInvalid:
            raise RunDirectoryError(self._complaint(block)) from None
        codes = table["verdict"].combine_chunks().dictionary_encode()
        known = {VERDICTS.index(text) if text in VERDICTS else -1 for text in codes.dictionary.to_pylist()}
        holes = sum(table[name].null_count for name in (*_COLUMNS, "verdict") if name != "loss")
        if holes or -1 in known:
            raise RunDirectoryError(self._complaint(block))
        places = np.array([VERDICTS.index(text) for text in codes.dictionary.to_pylist()], dtype=np.int8)
        self._pieces["verdict"].append(places[codes.indices.to_numpy()] if len(places) else places)
        for name, kind in _COLUMNS.items():
            self._pieces[name].append(table[name].to_numpy().astype(kind, copy=False))

    def _complaint(self, block: bytes) -> str:
        """Which line it is that cannot be read."""
        for line in block.splitlines():
            try:
                record = json.loads(line)
                if record["verdict"] not in VERDICTS or any(
                    record[name] is None for name in _COLUMNS if name != "loss"
                ):
                    break
            except (ValueError, KeyError, TypeError):
                break
        else:
            line = block.splitlines()[0]
        shown = line[:60].decode(errors="replace")
        return f"{self._path} has a line that is not of a trace: {shown!r}; is it damaged, or another program's file?"
