"""Commands that read the directory of a run: report, watch, dashboard and replay."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster_dist.cli.parser import Parser, one_of, target_setting, whole
from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from ringmaster_dist.observe.watch import Watcher


def report_options(parser: Parser) -> None:
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", type=Path, help="the run directory of ringmaster train or simulate"
    )
    parser.option("--out DIR", "where to write (default: RUN_DIR/report for one run, ./report for several)")


def run_report(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster report RUN_DIR [RUN_DIR ...] [--out DIR]

    Draws what one or several runs did. A run may be real or simulated, finished, crashed or still running. The figures
    show loss against time, updates and tokens, the share of gradients accepted, the delays, what each worker did when,
    and how much each worker contributed. Several runs are drawn over each other, named by the configuration keys in
    which they differ.

    It writes report.html, one page that needs no network, and loss.png, delays.png, workers.png.

    Examples
      ringmaster report runs/a
      ringmaster report runs/compare/* --out comparison
    """
    from ringmaster_dist.observe.report import FOLDER, write_report
    from ringmaster_dist.observe.run_list import without_pages

    runs = without_pages(arguments.run_dirs)
    folder = Path(arguments.out or (runs[0] / FOLDER if len(runs) == 1 else FOLDER))
    print("\n".join(str(path) for path in write_report(runs, folder)))
    return 0


def watch_options(parser: Parser) -> None:
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="the run directory of ringmaster train or simulate"
    )
    parser.setting("port=N", "the port to listen on; 0 takes a free one", whole(0, 65535), 0)
    parser.setting("host=ADDRESS", "the address to listen on; only this machine can reach 127.0.0.1", str, "127.0.0.1")
    parser.setting(
        "metrics=true", "also answer /metrics (for Prometheus) and /healthz", one_of("true", "false"), "false"
    )


def run_watch(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster watch RUN_DIR [port=N] [host=ADDRESS] [metrics=true]

    Serves the page of ringmaster report for a run while it continues, and keeps it up to date. It only reads the run
    directory, so it does not disturb the run. Ctrl+C ends it. ringmaster train watch=true does the same while it
    trains.

    With metrics=true the port also answers /metrics and /healthz, which docs/metrics.md defines. Nobody is asked for a
    password, so choose a host= that only those reach who may see the run.

    Examples
      ringmaster watch runs/a port=8000
      ringmaster watch runs/a port=9400 metrics=true
    """
    from ringmaster_dist.signals import stop_signals

    _require_config(arguments.run_dir, "a train or simulate")
    metrics = arguments.metrics == "true"
    watcher = open_watcher(arguments.run_dir, arguments.port, arguments.host, metrics=metrics)
    print(f"{arguments.run_dir} is shown at {watcher.url} (Ctrl+C ends this)", flush=True)
    with stop_signals() as asked:
        while not asked():
            time.sleep(0.1)
    watcher.close()
    return asked.exit_code


def open_watcher(directory: Path, port: int = 0, host: str = "127.0.0.1", *, metrics: bool = False) -> Watcher:
    """Serves the page of a run from now on. Raises UserError if the port is not available."""
    from ringmaster_dist.observe.watch import Watcher

    try:
        return Watcher(directory, port, host, metrics=metrics)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"host={host} port={port} cannot be listened on ({reason}): choose another, or port=0"
        ) from error


def dashboard_options(parser: Parser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run.dir of a run with logger=wandb")
    parser.switch("--offline", help="write the specification of the workspace to RUN_DIR/dashboard.json instead")


def run_dashboard(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster dashboard RUN_DIR [--offline]

    Makes a wandb workspace for the project of a run that logs to wandb, and prints its link. The workspace has sections
    for progress, staleness, workers and system. If wandb cannot be reached, the specification of the workspace is
    written to RUN_DIR/dashboard.json instead. Needs the extra dashboard: pip install 'ringmaster-dist[dashboard]'.
    """
    from ringmaster_dist.observe.run_files import RunFiles

    directory = arguments.run_dir
    _require_config(directory, "a run with logger=wandb")
    logger = RunFiles(directory).config().get("logger", {})
    if logger.get("name", "none") == "none":
        raise UserError(f"{directory} did not log to wandb: train with logger=wandb or logger=wandb_offline")

    from ringmaster_dist.observe.wandb_names import specification, workspace

    offline = arguments.offline or logger["name"] == "wandb_offline"
    try:
        entity, reason = ("", "") if offline else _wandb_entity(logger.get("entity"))
        made = workspace(entity or "entity", logger["project"])
    except ImportError:
        raise UserError("wandb-workspaces is missing: pip install 'ringmaster-dist[dashboard]'") from None
    if entity:
        try:
            print(made.save().url)
            return 0
        except Exception as error:  # from the network, the service, or a wrong key
            reason = _first_line(error)
    path = directory / "dashboard.json"
    path.write_text(specification(made) + "\n")
    print(f"{'wandb cannot be reached (' + reason + '): ' if reason else ''}its specification is in {path}")
    return 0


def _wandb_entity(given: str | None) -> tuple[str, str]:
    """The owner of the workspace, or an empty string and the reason why the owner is not known."""
    try:
        import wandb

        from ringmaster_dist.observe.loggers import has_key

        if not has_key():
            return "", "there is no key: wandb login, or set WANDB_API_KEY"
        return given or str(wandb.Api(timeout=10).default_entity), ""
    except Exception as error:
        return "", _first_line(error)


def replay_options(parser: Parser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run.dir of a finished ringmaster train")
    target_setting(parser)


def run_replay(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster replay RUN_DIR [target=NAME]

    Recomputes a real run from its trace in one process. The same gradients arrive in the same order, and each is
    computed again at the iterate of its version. It says whether verdicts, losses and the final iterate are the same
    bits, or where the first difference is. If an accelerator computed a part of the run, verdicts have to be the same
    and losses equal to 2 %. The progress is shown on stderr. The exit code is 0 if the run is the same and 1 if not.
    """
    if not arguments.run_dir.is_dir():
        raise UserError(f"{arguments.run_dir} is not a directory: give the run.dir of a finished ringmaster train")

    from rich.console import Console

    from ringmaster_dist.observe.console import ProgressLine
    from ringmaster_dist.observe.run_files import belong_together
    from ringmaster_dist.simulation.replay import replay

    line = ProgressLine(Console(stderr=True))
    try:
        with belong_together(arguments.run_dir):
            outcome = replay(arguments.run_dir, line.show, target=arguments.target)
    finally:
        line.close()
    verdict = "same" if outcome.same else "DIFFERENT"
    print(f"{verdict}: {outcome.updates:,} updates, {outcome.pushes:,} arrivals: {outcome.message}")
    return 0 if outcome.same else 1


def _require_config(directory: Path, what: str) -> None:
    if not (directory / "config.yaml").is_file():
        raise UserError(f"{directory} holds no run (no config.yaml): give the run.dir of {what}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
