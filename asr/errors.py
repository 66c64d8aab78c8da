"""The one error a user can make: its message is one line with place, value and remedy."""


class UserError(Exception):
    """Ends a command with its message and exit code 2, without a traceback."""
