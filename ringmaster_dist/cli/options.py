"""The options that commands with a configuration share."""

from __future__ import annotations

from ringmaster_dist.config.errors import UserError


def parse(argv: list[str], command: str) -> tuple[list[str], str]:
    """Splits arguments into overrides and what is only to be shown: ``help``, ``cfg`` or nothing."""
    overrides, show = [], ""
    words = iter(argv)
    for word in words:
        if word in ("-h", "--help"):
            show = "help"
        elif word in ("--cfg", "-c"):
            if (what := next(words, "")) != "job":
                raise UserError(f"--cfg {what}: only --cfg job is there")
            show = "cfg"
        elif word.startswith("-"):
            raise UserError(f"there is no option {word}; see ringmaster {command} --help")
        else:
            overrides.append(word)
    return overrides, show
