"""The page: one HTML file with everything in it, for the report and for whoever watches a run."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

_ASSETS = Path(__file__).parent / "assets"


def page(view: dict[str, Any], refresh_seconds: float = 0.0) -> str:
    """The page that shows a view. With ``refresh_seconds`` it asks for ``data.json`` that often."""
    # In a script element only "</" and "<!--" could end or change it.
    data = as_json(view).replace("<", "\\u003c")
    parts = {
        "@TITLE@": html.escape(", ".join(run["name"] for run in view["runs"])[:100]),
        "@STYLE@": _asset("style.css"),
        "@REFRESH@": f"{refresh_seconds:g}",
        "@CHARTS@": _asset("charts.js"),
        "@PAGE@": _asset("page.js"),
        "@DATA@": data,
    }
    # In one pass over the template: what is put in is not looked at again, whatever a run is called.
    return re.sub("@[A-Z]+@", lambda mark: parts[mark[0]], _asset("page.html"))


def as_json(view: dict[str, Any]) -> str:
    return json.dumps(view, allow_nan=False, separators=(",", ":"))


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text()
