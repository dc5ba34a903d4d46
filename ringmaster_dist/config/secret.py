"""The run's token, if the user gives one: in a file or in the environment, never on a command line that others see."""

from __future__ import annotations

import os
import string
from pathlib import Path

from ringmaster_dist.config.errors import UserError

_LEAST_DIGITS, _LEAST_DIFFERENT = 32, 8


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
    """The token that a server will trust; empty if the server has to make one.

    It has to be a random number. Anybody who connects sees a certificate that follows from the token, and could try one
    chosen word after the other without connecting again.
    """
    token = given_token()
    is_number = len(token) >= _LEAST_DIGITS and not set(token) - set(string.hexdigits)
    if token and not (is_number and len(set(token)) >= _LEAST_DIFFERENT):
        raise UserError(
            "the token given by RINGMASTER_TOKEN or RINGMASTER_TOKEN_FILE must be a random number of at least "
            f"{_LEAST_DIGITS} hexadecimal digits: openssl rand -hex 16 makes one"
        )
    return token
