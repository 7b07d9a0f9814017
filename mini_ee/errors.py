"""Errors that all floors raise. No torch here."""


class WrongArguments(ValueError):
    """Arguments that do not fit each other, the task or the run: the command line ends with status 2."""
