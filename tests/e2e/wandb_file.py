"""Reads back a .wandb file: wandb's own record types in its own block format."""

import json
import struct
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 32768  # a record is cut where a block ends


def records(path: Path) -> list[Record]:
    """Returns every record of a .wandb file. Uses wandb's Python reader if there is one, else parses the format."""
    try:
        from wandb.sdk.internal.datastore import DataStore
    except ImportError:
        chunks = _chunks(path.read_bytes())
    else:
        store = DataStore()
        store.open_for_scan(str(path))
        chunks = list(iter(store.scan_data, None))
    found = []
    for chunk in chunks:
        record = Record()
        record.ParseFromString(chunk)
        found.append(record)
    return found


def _chunks(data: bytes) -> list[bytes]:
    assert data[:4] == b":W&B"
    found, place, parts = [], 7, b""
    while place + 7 <= len(data):
        if _BLOCK - place % _BLOCK < 7:
            place += _BLOCK - place % _BLOCK
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(parts)
            parts = b""
    return found


def history(found: list[Record]) -> list[dict]:
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            row: dict = {}
            for item in record.history.item:  # a histogram is three items under one name
                *outer, last = item.nested_key or [item.key]
                inner = row.setdefault(outer[0], {}) if outer else row
                inner[last] = json.loads(item.value_json)
            rows.append(row)
    return rows


def only(found: list[Record], kind: str) -> list:
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]
