"""--engine and --precision of the commands that run an export. No torch here."""

import sys
from argparse import Namespace, _ActionsContainer
from pathlib import Path

from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.engine import DEFAULT, PRECISIONS, Engine
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.registry import ENGINES


def add_engine(sub: _ActionsContainer, *others: str) -> None:
    """Add --engine and --precision. others: names of further engines."""
    names = (DEFAULT, *ENGINES, *others)
    sub.add_argument("--engine", choices=names, default=DEFAULT, help="library that runs the export")
    of = f"precision of --engine {' or '.join(ENGINES)} (default {PRECISIONS[0]})"
    sub.add_argument("--precision", choices=PRECISIONS, help=of)


def chosen_engine(args: Namespace) -> Engine:
    """The engine of the arguments; that of a command without these options is the default."""
    name, precision = getattr(args, "engine", DEFAULT), getattr(args, "precision", None)
    if name in ENGINES:
        return Engine(name, precision or PRECISIONS[0])
    if precision:
        raise WrongArguments(f"--precision is for --engine {' or '.join(ENGINES)}, found --engine {name}; leave it out")
    return Engine(name)


def open_exported(args: Namespace, folder: Path, **settings) -> Runtime:
    """The export that a command runs. A guarantee that does not hold for its engine is named on standard error."""
    engine = chosen_engine(args)
    runtime = engine.open(folder, args.device, args.threads or 0, **settings)
    say_without_guarantee(args, engine, folder, runtime.config)
    return runtime


def say_without_guarantee(args: Namespace, engine: Engine, folder: Path, manifest: dict) -> None:
    """Print the line of Engine.without_guarantee, if there is one."""
    if line := engine.without_guarantee(folder, manifest):
        print(f"mini-ee {args.command}: {line}", file=sys.stderr)
