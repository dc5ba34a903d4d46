"""The exception for a mistake in a problem. It is here because every room may raise or show it."""


class Mistake(ValueError):
    """The user's problem cannot be used as it is. The message is one line that says why."""
