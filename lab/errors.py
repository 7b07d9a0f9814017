"""Errors that modules of all levels raise. No torch here."""


class WrongArguments(ValueError):
    """Arguments that do not fit each other, the task or the run. The command line ends with status 2."""
