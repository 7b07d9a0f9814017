"""mini_ee: early-exit transformers from scratch. See README.md; the parts are imported by name."""

__version__ = "0.1.0"


class WrongArguments(ValueError):
    """Arguments that do not fit each other, the task or the run: the command line ends with status 2."""
