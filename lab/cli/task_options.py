"""--task and the options for reading its files, and the task that they name."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mini_ee.lab.cli.command_options import add_options, given_options
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.settings import flag_of
from mini_ee.lab.data.tasks import TOY, Task, load_task, toy_task
from mini_ee.lab.errors import WrongArguments

if TYPE_CHECKING:
    from mini_ee.lab.export.runtime import Runtime
    from mini_ee.lab.training.run_folder import Run

OF_LABELS = "label_column", "regression", "split_file"  # TaskOptions of labelled tasks
WITHOUT_TASK = "describes the files of --task: give --task too"


def add_task(parser: ArgumentParser, help: str) -> None:
    """Add --task and the options for reading its files. open_task_of opens them."""
    parser.add_argument("--task", metavar="TASK", help=help)
    add_task_files(parser)


def add_task_files(parser: ArgumentParser) -> None:
    """Add the options for reading the files of --task."""
    add_options(parser.add_argument_group("files of --task", "a folder, or one file with --split-file"), TaskOptions)


def task_options(args: Namespace, known: TaskOptions = TaskOptions()) -> TaskOptions:
    """How the files of --task are read: as `known`, with the options that were given. Raises WrongArguments."""
    given = given_options(args, TaskOptions)
    if args.task is None:
        refuse_task_options(args)
    try:
        return replace(known, **given)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def columns_given(args: Namespace) -> TaskOptions:
    """The columns of a table without --task. Raises WrongArguments if two options name the same one."""
    try:
        return TaskOptions(**given_options(args, TaskOptions))
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def refuse_task_options(args: Namespace, why: str = WITHOUT_TASK, names: Container[str] | None = None) -> None:
    """Raise WrongArguments if one of the TaskOptions was given, also with the value 0. why: as in `refuse`.

    names: those that are refused, default all.
    """
    for name in given_options(args, TaskOptions):
        if names is None or name in names:
            raise WrongArguments(f"{flag_of(name, {})} {why}")


def open_task_of(opened: "list[Run | Runtime]", args: Namespace) -> Task:
    """The task of --task, else the one that all runs were trained on, if it still exists.

    Its files are read as the options say, else as in the training of the first run.
    """
    from mini_ee.lab.training.train_run import open_task

    configs = [one.config["task"] for one in opened]
    if args.task is None:
        task_options(args)
        return _task_of_training(configs)
    known = _read_as(configs[0]) if Path(args.task).exists() else TaskOptions()
    if Path(args.task).is_dir() and os.path.abspath(args.task) != configs[0].get("folder"):
        known = replace(known, split_file=None)
    return open_task(args.task, task_options(args, known))


def _task_of_training(configs: list[dict]) -> Task:
    """The task of the trainings. Raises WrongArguments if the runs have different ones, or if it is not found."""
    digest = toy_task().split("train").sha256()
    others = [config for config in configs if config["name"] != TOY or config.get("train_sha256", digest) != digest]
    if not others:
        return toy_task()
    name, folder, read = others[0]["name"], others[0].get("folder"), others[0].get("train_sha256")
    advice = "give that task's folder with --task"
    if len(others) < len(configs) or any(config.get("train_sha256") != read for config in others):
        raise WrongArguments(f"the runs were trained on different tasks: {advice}")
    if not isinstance(folder, str):
        raise WrongArguments(f"the run was trained on {name}: {advice}")
    if not Path(folder).exists():
        raise WrongArguments(f"the run was trained on {name} in {folder}, which does not exist now: {advice}")
    task = load_task(folder, _read_as(others[0]))
    if "train" not in task.splits or task.split("train").sha256() != read:
        raise WrongArguments(f"the run was trained on {name}, and {folder} has other train examples now: {advice}")
    return task


def _read_as(task_config: dict) -> TaskOptions:
    """How a training read its task. Raises ValueError for unknown options in a config."""
    try:
        return TaskOptions(**task_config.get("options", {}))
    except TypeError as error:
        raise ValueError(f"the run has unknown options of its task ({error}); train it again") from None
