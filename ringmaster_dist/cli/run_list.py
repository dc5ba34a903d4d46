"""``ringmaster runs``: lists runs, compares them and removes them."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster_dist.cli.parser import Parser, one_of, whole
from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from ringmaster_dist.observe.run_list import RunLine

_FOLDER = "runs"  # where train and simulate write by default
_TAKEN = {  # by each action
    "list": ("sort", "state", "method", "problem", "limit", "json"),
    "compare": ("json", "out"),
    "remove": ("yes",),
}
_STATES = ("running", "finished", "stopped", "diverged", "crashed", "damaged")
_ORDERS = ("changed", "loss", "updates", "time", "name", "state")


def runs_options(parser: Parser) -> None:
    parser.add_argument("words", metavar="[compare|remove] PATH", nargs="*", default=[],
                        help=f"folders to list (default: {_FOLDER}), or the runs to compare or to remove")  # fmt: skip
    parser.setting("sort=KEY", f"the order of the list: {', '.join(_ORDERS)} (default: {_ORDERS[0]})", one_of(*_ORDERS))
    parser.setting("state=STATE", f"list only these runs: {', '.join(_STATES)}", one_of(*_STATES))
    parser.setting("method=NAME", "list only runs of this method")
    parser.setting("problem=NAME", "list only runs of this problem")
    parser.setting("limit=N", "list at most N runs", whole(1))
    parser.switch("--json", help="write JSON, for scripts")
    parser.option("--out DIR", "compare also draws the curves and a page into this folder", Path)
    parser.switch("--yes", "-y", help="remove does not ask")


def run_runs(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster runs [compare|remove] [PATH ...] [sort=KEY] [state=STATE] [--json]

    Lists the runs in a folder and in the folders inside it, such as those of a multirun. A run is running, finished,
    stopped (by Ctrl+C or SIGTERM), diverged, crashed (its processes are gone, and resume= may continue it) or damaged.
    Only configurations, summaries and the ends of the metrics are read.

      compare RUN RUN ...   shows the configuration keys in which runs differ, and their results
      remove RUN ...        removes runs after a question. A run that is running, and a directory that is not a run, are
                            refused. Files in the directory that are not the run's own stay.

    Examples
      ringmaster runs
      ringmaster runs runs/sweep sort=loss limit=10
      ringmaster runs compare runs/sweep/0 runs/sweep/1 --out comparison
      ringmaster runs remove runs/sweep/0 --yes
    """
    action, words = "list", list(arguments.words)
    if words and words[0] in _TAKEN:
        action = words.pop(0)
    _refuse_others(action, arguments)
    paths = [Path(word) for word in words]
    if action == "compare":
        return _compare(paths, arguments.out, as_json=arguments.json)
    if action == "remove":
        return _remove(paths, asks=not arguments.yes)
    return _list(paths or [Path(_FOLDER)], arguments)


def _refuse_others(action: str, arguments: Namespace) -> None:
    """Raises UserError for an option that only another action takes."""
    for other, names in _TAKEN.items():
        for name in names:
            if getattr(arguments, name) and name not in _TAKEN[action]:
                shown = f"--{name}" if name in ("json", "out", "yes") else f"{name}="
                raise UserError(f"{shown} has no effect with runs {action}; runs {other} takes it")


def _list(folders: list[Path], arguments: Namespace) -> int:
    from ringmaster_dist.observe.run_list import describe, find_runs, in_order

    found = [describe(path) for folder in folders for path in find_runs(folder)]
    wanted = {name: getattr(arguments, name) for name in ("state", "method", "problem")}
    found = [line for line in found if all(value in (None, getattr(line, name)) for name, value in wanted.items())]
    found = in_order(found, arguments.sort or _ORDERS[0])[: arguments.limit]
    if arguments.json:
        print(json.dumps([line.to_json() for line in found], indent=2))
    elif found:
        print(_as_table(found))
    else:
        print(f"there is no such run in {', '.join(map(str, folders))}")
    return 0


def _as_table(lines: Sequence[RunLine]) -> str:
    from ringmaster_dist.observe.run_list import table

    columns = ("run", "state", "problem", "method", "result", "updates", "time", "changed")
    rows = [
        (str(line.path), line.state, line.problem, line.method, line.result, f"{line.updates:,}", line.time,
         time.strftime("%Y-%m-%d %H:%M", time.localtime(line.changed)))
        for line in lines if line.state != "damaged"
    ]  # fmt: skip
    damaged = [f"{line.path} is damaged: {line.note}" for line in lines if line.state == "damaged"]
    return "\n".join([*([table(columns, rows, right=("updates", "time"))] if rows else []), *damaged])


def _compare(paths: list[Path], out: Path | None, *, as_json: bool) -> int:
    """Shows keys and results in rows, with a column for each run."""
    from ringmaster_dist.config.schema import OF_THE_CALL
    from ringmaster_dist.observe.run_files import RunFiles
    from ringmaster_dist.observe.run_list import describe, differences, table, without_pages

    paths = without_pages(paths)
    if len(paths) < 2:
        raise UserError("compare needs at least two runs: ringmaster runs compare RUN RUN ...")
    differing = differences([RunFiles(path).config() for path in paths], OF_THE_CALL)
    lines = [describe(path) for path in paths]
    if damaged := next((line for line in lines if line.state == "damaged"), None):
        raise UserError(f"{damaged.path} is damaged: {damaged.note}")
    if as_json:
        print(json.dumps({"differences": differing, "runs": [line.to_json() for line in lines]}, indent=2))
    else:
        names = [f"[{number}]" for number in range(1, 1 + len(paths))]
        print("\n".join(f"{name} {path}" for name, path in zip(names, paths, strict=True)) + "\n")
        rows = [[key, *map(_shown, values)] for key, values in differing.items()]
        rows += [["the configurations are the same", *[""] * len(paths)]] if not rows else []
        rows += [["", *[""] * len(paths)]]
        rows += [[name, *(getattr(line, name) for line in lines)] for name in ("state", "result", "time")]
        rows += [["updates", *(f"{line.updates:,}" for line in lines)]]
        if any(line.best is not None for line in lines):
            rows += [["best", *("" if line.best is None else f"{line.best:.4g}" for line in lines)]]
        print(table(["", *names], rows))
    if out is not None:
        from ringmaster_dist.observe.report import write_report

        written = write_report(paths, out)
        print("\n".join(map(str, written)), file=sys.stderr if as_json else sys.stdout)
    return 0


def _shown(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _remove(paths: list[Path], *, asks: bool) -> int:
    """Checks all, says what will be removed, asks, and removes."""
    from ringmaster_dist.observe.run_directory import RunDirectory
    from ringmaster_dist.observe.run_list import describe, is_run

    if not paths:
        raise UserError("remove needs a run: ringmaster runs remove RUN ...")
    directories, total = [], 0
    for path in {path.resolve(): path for path in paths}.values():
        if not is_run(path):
            raise UserError(f"{path} is not the directory of a run, so nothing was removed")
        line = describe(path)
        if line.state == "running":
            raise UserError(f"{path} is running, so nothing was removed: stop it first")
        directory = RunDirectory.opened(path)
        directory.refuse_if_in_use()
        files, size = directory.own_files()
        total += size
        directories.append(directory)
        what = "  ".join(filter(None, (line.state, line.method, line.result, f"{line.updates:,} updates")))
        print(f"{path}: {what}, {_size(size)} in {', '.join(file.name for file in files)}")
    if asks and not _confirmed(f"remove {len(directories)} {'run' if len(directories) == 1 else 'runs'}, "
                               f"{_size(total)}? [y/N] "):  # fmt: skip
        print("nothing was removed")
        return 1
    for directory in directories:
        try:
            remaining = directory.remove()
        except OSError as error:
            raise UserError(f"{directory.path} could not be removed whole ({error})") from error
        kept = f"; {', '.join(remaining)} stays, because it is not the run's own" if remaining else ""
        print(f"{directory.path} was removed{kept}")
    return 0


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError("nothing was removed: there is no terminal to ask, so add --yes")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
