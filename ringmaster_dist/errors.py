"""The exception for a mistake of the user, raised by packages below `config`."""


class Mistake(ValueError):
    """Something that the user gave cannot be used. The message is one line that says why."""
