"""The one exception for what is the user's to mend."""


class UserError(Exception):
    """A mistake of the user: the message is one helpful line, shown without traceback, exit code 2."""
