"""``ringmaster dashboard RUN_DIR``."""

from __future__ import annotations

from pathlib import Path

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.run_files import RunFiles

_HELP = """ringmaster dashboard RUN_DIR [--offline]

Makes a wandb workspace for the project of a run that logs to wandb, with sections for progress, staleness, workers and
system, and prints its link. Where wandb cannot be reached, or with --offline, its specification is written to
RUN_DIR/dashboard.json instead. Needs the extra dashboard: pip install 'ringmaster-dist[dashboard]'.
"""


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0

    from ringmaster_dist.cli.options import flags

    (word,), options = flags(argv, {"--offline": None}, "ringmaster dashboard runs/a")
    directory = Path(word)
    if not (directory / "config.yaml").is_file():
        raise UserError(f"{directory} holds no run (no config.yaml): give the run.dir of a run with logger=wandb")
    given = RunFiles(directory).config().get("logger", {})
    if given.get("name", "none") == "none":
        raise UserError(f"{directory} did not log to wandb: train with logger=wandb or logger=wandb_offline")

    from ringmaster_dist.observe.wandb_names import specification, workspace

    offline = "--offline" in options or given["name"] == "wandb_offline"
    try:
        entity, reason = ("", "") if offline else _entity(given.get("entity"))
        made = workspace(entity or "entity", given["project"])
    except ImportError:
        raise UserError("wandb-workspaces is missing: pip install 'ringmaster-dist[dashboard]'") from None
    if entity:
        try:
            print(made.save().url)
            return 0
        except Exception as error:  # whatever the network, the service or the key has to say
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    path = directory / "dashboard.json"
    path.write_text(specification(made) + "\n")
    print(f"{'wandb cannot be reached (' + reason + '): ' if reason else ''}its specification is in {path}")
    return 0


def _entity(given: str | None) -> tuple[str, str]:
    """Whose workspace it is; else why that cannot be known."""
    try:
        import wandb

        from ringmaster_dist.observe.loggers import has_key

        if not has_key():
            return "", "there is no key: wandb login, or set WANDB_API_KEY"
        return given or str(wandb.Api(timeout=10).default_entity), ""
    except Exception as error:
        return "", (str(error).strip().splitlines() or [type(error).__name__])[0]
