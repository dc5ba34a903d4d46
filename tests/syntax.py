"""Parses Python source."""

import ast


def parsed(text: str) -> ast.Module:
    """Parses source, and retries a SystemError. CPython 3.11 counts the depth of a tree per interpreter, not per
    thread, so another thread that prints a traceback at the same time makes the parser fail."""
    for _ in range(5):
        try:
            return ast.parse(text)
        except SystemError as error:
            failure = error
    raise failure
