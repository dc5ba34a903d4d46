"""The exception for a mistake of the user, raised by packages below `config`, and what a terminal may be shown."""


def printable(text: object) -> str:
    """A text for a terminal. It may quote a peer or a file of somebody else, so it has no control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in str(text))


class Mistake(ValueError):
    """Something that the user gave cannot be used. The message is one line that says why."""
