"""Runs a chapter of the tutorial as `python tutorial/NAME.py` would, cell by cell, and prints JSON about it.

    python docs/run_chapter.py tutorial/01_loop.py [--quick]
    printed    what each cell of code printed          seconds    of processor time, without the exercises
    solved     the exercises: names in tutorial/solutions/NAME.py, each with a function check_NAME in the chapter

A check has to refuse the exercise as it stands, and to accept the solution; if not, the status is 1. --quick, for
tests: trainings of the core have one epoch and few examples, so the numbers mean nothing.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
import types
from pathlib import Path

from make_tutorial import cells_of

FEW = 96  # examples of a quick training, and texts that a model writes


def train_less() -> None:
    """Before anything else imports the core's training and its examples."""
    core = importlib.import_module("mini_ee.train")  # mini_ee.train is also a function
    whole = core.train

    def train(rates, count, loss, epochs, *more, **settings):
        return whole(rates, min(count, FEW), loss, 1, *more, **settings)

    core.train = train
    from mini_ee import self_supervised
    from mini_ee.data import Rows

    split, written = Rows.split, self_supervised.written

    def split_to_few(rows: Rows, *shares: float) -> list[Rows]:
        first, *others = split(rows, *shares)
        return [first.take(slice(FEW)), *others]

    Rows.split = split_to_few
    self_supervised.written = lambda llama, prompts, count, seed: written(llama, prompts, min(count, FEW), seed)


def run_cells(path: Path, chapter: types.ModuleType) -> list[str]:
    """What each cell of code printed."""
    printed = []
    for is_code, text, line in cells_of(path.read_text()):
        if is_code:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * (line - 1) + text, str(path), "exec"), vars(chapter))
            printed.append(out.getvalue())
    return printed


def solve(chapter: types.ModuleType, solutions: Path) -> list[str]:
    """Check each exercise without and with its solution. Raises AssertionError for a check that is wrong."""
    answers = {}
    if solutions.is_file():
        exec(compile(solutions.read_text(), str(solutions), "exec"), answers)
    names = [name.removeprefix("check_") for name in vars(chapter) if name.startswith("check_")]
    for name in names:
        check = getattr(chapter, f"check_{name}")
        try:
            check()
        except Exception:  # whatever an empty function leads to
            pass
        else:
            raise AssertionError(f"check_{name} accepts the exercise as it stands")
        setattr(chapter, name, answers[name])
        check()
    return names


def main(path: Path) -> None:
    """The chapter is the module __main__, as in a script; its folder is where it imports from."""
    sys.path[0] = str(path.parent)
    chapter = sys.modules["__main__"] = types.ModuleType("__main__")
    chapter.__file__ = str(path)
    printed = run_cells(path, chapter)
    seconds = sum(os.times()[:4])
    with contextlib.redirect_stdout(io.StringIO()):
        solved = solve(chapter, path.parent / "solutions" / path.name)
    print(json.dumps({"printed": printed, "seconds": seconds, "solved": solved}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapter", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        train_less()
    main(args.chapter.resolve())
