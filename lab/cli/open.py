"""Opens and checks what the command line names: runs and exports, tasks, devices."""

import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np

from mini_ee.lab.backbones.adapter import is_adapter
from mini_ee.lab.cli.command_options import task_options
from mini_ee.lab.cli.rule_options import refuse_settings
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.tasks import TOY, Task, load_task, toy_task
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.manifest import MANIFEST
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import PROVIDERS
from mini_ee.lab.training.run_folder import OWN_BACKBONE, Run, is_run, load_run, plain_decoder
from mini_ee.lab.training.train_run import check_device, open_task


def open_run(folder: Path, args: Namespace, plain: bool = False) -> Run:
    """A run on --device. With `plain` the folder may be a decoder's checkpoint."""
    check_device(args.device)
    if (folder / MANIFEST).is_file():
        raise WrongArguments(f"{folder}: expected a run, found an export; give the run that it came from")
    if not plain or is_run(folder) or not ((folder / "config.json").is_file() or is_adapter(folder)):
        run = load_run(folder, args.model)
        backbone = run.config["backbone"]
        if args.model and ("config" in backbone or backbone["folder"] == OWN_BACKBONE):
            raise WrongArguments("--model is for a run without its backbone; this run contains it: leave out --model")
    else:
        if args.model:
            raise WrongArguments(
                f"--model is for the backbone of a run, found a checkpoint, {folder}; leave out --model"
            )
        run = plain_decoder(folder)
    run.model.to(args.device)
    return _scheduled(run, args, getattr(args, "schedule", None))


def open_trained(folder: Path, args: Namespace, plain: bool = False) -> Run | Runtime:
    """A run or an export. With `plain` the folder may be a decoder's checkpoint."""
    if not (folder / MANIFEST).is_file():
        return open_run(folder, args, plain)
    if getattr(args, "schedule", None):
        raise WrongArguments(f"{folder}: an export has one schedule; export the run with another --schedule")
    if args.device not in ("cpu", "cuda"):
        raise WrongArguments(f"--device {args.device}: expected cpu or cuda for an export")
    if args.model:
        raise WrongArguments(
            f"--model is for a run without its backbone; {folder} is an export, which contains it: leave out --model"
        )
    return Runtime(folder, PROVIDERS[args.device], threads=args.threads or 0)


def _scheduled(run: Run, args: Namespace, schedule: str | None) -> Run:
    if not hasattr(run.model, "streams"):
        if schedule:
            raise WrongArguments(
                f"{run.folder}: --schedule is for runs of lora-exits, found {run.config['method']}; leave it out"
            )
        return run
    if schedule == "adaptive":
        refuse_settings(args, "--schedule adaptive uses the calibrated rule")
        return run._replace(schedule=adaptive_schedule(run, getattr(args, "batch_size", 1)))
    return run._replace(schedule=run.model.schedule(schedule or "restart"))


def adaptive_schedule(run: Run, batch_size: int) -> list[list[int]]:
    """The cheapest schedule on this machine for examples that have the length and the exits of the held-out ones.

    Their exits are those under the run's rule, which training chose or `calibrate` wrote.
    """
    metrics = run.metrics
    if "mean_tokens" not in metrics:
        raise WrongArguments(
            f"{run.folder}: --schedule adaptive needs mean_tokens in metrics.json; train the run again"
        )
    counts = np.array(run.config.get("exit_counts", metrics["hold_out"]["exit_counts"]))
    reach = counts[::-1].cumsum()[::-1] / counts.sum()  # share of examples that reach each exit
    return run.model.cheapest_schedule(batch_size, round(metrics["mean_tokens"]), reach)


def schedule_of(one: Run | Runtime) -> dict:
    """{"schedule": groups of streams that start together, by their exit layers}; empty without streams.

    Also empty for an export, whose graph restarts after each exit.
    """
    schedule = None if isinstance(one, Runtime) else one.schedule
    return {"schedule": [[one.exits[k] for k in group] for group in schedule]} if schedule else {}


def open_task_of(opened: list[Run | Runtime], args: Namespace) -> Task:
    """The task of --task, else the one that all runs were trained on, if it still exists.

    Its files are read as the options say, else as in the training of the first run.
    """
    abouts = [one.config["task"] for one in opened]
    if args.task is None:
        task_options(args)
        return _task_of_training(abouts)
    known = _read_as(abouts[0]) if Path(args.task).exists() else TaskOptions()
    if Path(args.task).is_dir() and os.path.abspath(args.task) != abouts[0].get("folder"):
        known = replace(known, split_file=None)
    return open_task(args.task, task_options(args, known))


def _task_of_training(abouts: list[dict]) -> Task:
    """The task of the trainings. Raises WrongArguments if the runs have different ones, or if it is not found."""
    digest = toy_task().split("train").sha256()
    others = [each for each in abouts if each["name"] != TOY or each.get("train_sha256", digest) != digest]
    if not others:
        return toy_task()
    name, folder, read = others[0]["name"], others[0].get("folder"), others[0].get("train_sha256")
    advice = "give that task's folder with --task"
    if len(others) < len(abouts) or any(each.get("train_sha256") != read for each in others):
        raise WrongArguments(f"the runs were trained on different tasks: {advice}")
    if not isinstance(folder, str):
        raise WrongArguments(f"the run was trained on {name}: {advice}")
    if not Path(folder).exists():
        raise WrongArguments(f"the run was trained on {name} in {folder}, which does not exist now: {advice}")
    task = load_task(folder, _read_as(others[0]))
    if "train" not in task.splits or task.split("train").sha256() != read:
        raise WrongArguments(f"the run was trained on {name}, and {folder} has other train examples now: {advice}")
    return task


def _read_as(about: dict) -> TaskOptions:
    """How a training read its task. Raises ValueError for unknown options in a config."""
    try:
        return TaskOptions(**about.get("options", {}))
    except TypeError as error:
        raise ValueError(f"the run has unknown options of its task ({error}); train it again") from None


def of_rows(runs: list[Run | Runtime]) -> bool:
    """Whether these runs predict labels. Raises WrongArguments if some do and some generate text, or embed it."""
    if any(one.embeds for one in runs):
        raise WrongArguments("expected classifiers or decoders, found a sentence encoder; use mini-ee embed")
    generate = {one.generates for one in runs}
    if len(generate) > 1:
        raise WrongArguments("expected only classifiers or only decoders, found both; compare runs of one kind")
    return not generate.pop()
