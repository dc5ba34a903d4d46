"""The run's token, if the user gives one: in a file or in the environment, never on a command line that others see."""

from __future__ import annotations

import os
from pathlib import Path

from ringmaster_dist.config.errors import UserError

_LEAST_CHARACTERS = 16


def given_token(token_file: str = "") -> str:
    """The token from ``token_file``, RINGMASTER_TOKEN_FILE or RINGMASTER_TOKEN, in this order; empty if none is set."""
    path = token_file or os.environ.get("RINGMASTER_TOKEN_FILE", "")
    if not path:
        return os.environ.get("RINGMASTER_TOKEN", "").strip()
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise UserError(f"the token file {path} cannot be read: {error.strerror}") from error


def servers_token() -> str:
    """The token that a server will trust, checked for length; empty if the server has to make one."""
    token = given_token()
    if token and (len(token) < _LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token):
        raise UserError(
            f"the token given by RINGMASTER_TOKEN or RINGMASTER_TOKEN_FILE must have at least {_LEAST_CHARACTERS} "
            "letters and digits; openssl rand -hex 16 makes one"
        )
    return token
