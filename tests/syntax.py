"""Python source as a tree."""

import ast


def parsed(text: str) -> ast.Module:
    """CPython 3.11 counts the depth of a tree per interpreter, not per thread: another thread that shows a traceback at
    the same time makes this one fail. Then it is done again."""
    for _ in range(5):
        try:
            return ast.parse(text)
        except SystemError as error:
            failure = error
    raise failure
