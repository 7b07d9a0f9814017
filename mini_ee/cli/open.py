"""What the command line names, opened and checked: runs and exported folders, tasks, devices."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from mini_ee.cli.command_options import task_options
from mini_ee.cli.rule_options import refuse_settings
from mini_ee.data.columns import TaskOptions
from mini_ee.data.tasks import TOY, Task, load_task, toy_task
from mini_ee.errors import WrongArguments
from mini_ee.export.manifest import MANIFEST
from mini_ee.export.runtime import Runtime
from mini_ee.export.sessions import PROVIDERS
from mini_ee.training.run_folder import OWN_BACKBONE, Run, is_run, load_run, plain_decoder
from mini_ee.training.train_run import check_device, open_task


def open_run(folder: Path, args, plain: bool = False) -> Run:
    """A run on the device that was asked for; with `plain` also a decoder's checkpoint."""
    check_device(args.device)
    if (folder / MANIFEST).is_file():
        raise WrongArguments(f"{folder}: is exported already; give the run that it came from")
    if not plain or is_run(folder) or not (folder / "config.json").is_file():
        run = load_run(folder, args.model)
        held = run.config["backbone"]
        if args.model and ("config" in held or held["folder"] == OWN_BACKBONE):
            raise WrongArguments("--model says where a backbone is that a run does not hold; this run holds its own")
    else:
        if args.model:
            raise WrongArguments(f"--model says where the backbone of a run is now; {folder} is none")
        run = plain_decoder(folder)
    run.model.to(args.device)
    return _scheduled(run, args, getattr(args, "schedule", None))


def open_trained(folder: Path, args, plain: bool = False) -> Run | Runtime:
    """A run, or an exported folder; with `plain` also a decoder's checkpoint."""
    if not (folder / MANIFEST).is_file():
        return open_run(folder, args, plain)
    if getattr(args, "schedule", None):
        raise WrongArguments(f"{folder}: is exported under one schedule; export the run with another --schedule")
    if args.device not in ("cpu", "cuda"):
        raise WrongArguments(f"--device {args.device}: an exported folder runs on cpu or on cuda")
    if args.model:
        raise WrongArguments(f"--model says where the backbone of a run is now; {folder} is exported, and whole")
    return Runtime(folder, PROVIDERS[args.device], threads=args.threads or 0)


def _scheduled(run: Run, args, schedule: str | None) -> Run:
    if not hasattr(run.model, "streams"):
        if schedule:
            raise WrongArguments(
                f"{run.folder}: --schedule is for exits that run side by side, not those of {run.config['method']}"
            )
        return run
    if schedule == "adaptive":
        refuse_settings(args, "--schedule adaptive goes by the rule that was calibrated")
        return run._replace(schedule=adaptive_schedule(run, getattr(args, "batch_size", 1)))
    return run._replace(schedule=run.model.schedule(schedule or "restart"))


def adaptive_schedule(run: Run, batch_size: int) -> list[list[int]]:
    """The schedule that is cheapest on this machine for rows as long as those held out, that leave as those did.

    Where they left: under the run's rule, as training chose or `calibrate` wrote it.
    """
    metrics = run.metrics
    if "mean_tokens" not in metrics:
        raise WrongArguments(f"{run.folder}: does not know its held-out rows, which --schedule adaptive needs")
    left = np.array(run.config.get("exit_counts", metrics["hold_out"]["exit_counts"]))
    reach = left[::-1].cumsum()[::-1] / left.sum()
    return run.model.cheapest_schedule(batch_size, round(metrics["mean_tokens"]), reach)


def schedule_of(one: Run | Runtime) -> dict:
    """For an answer: which streams start together, of exits that have some, by the layers that they end after. An
    exported folder's graph restarts.
    """
    schedule = None if isinstance(one, Runtime) else one.schedule
    return {"schedule": [[one.exits[k] for k in group] for group in schedule]} if schedule else {}


def open_task_of(opened: list[Run | Runtime], args) -> Task:
    """The task that was named, else the one that all runs were trained on, if it is still there.

    Its files are read as the options say, else as the first run's training read them.
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
    """The task that these runs' configs are about. Raises WrongArguments if it cannot be found, or they differ."""
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
        raise WrongArguments(f"the run was trained on {name} in {folder}, where nothing is now: {advice}")
    task = load_task(folder, _read_as(others[0]))
    if "train" not in task.splits or task.split("train").sha256() != read:
        raise WrongArguments(f"the run was trained on {name}, and {folder} has other train rows now: {advice}")
    return task


def _read_as(about: dict) -> TaskOptions:
    """How a training read its task. Raises ValueError where a config says nothing that can be."""
    try:
        return TaskOptions(**about.get("options", {}))
    except TypeError as error:
        raise ValueError(f"the run says how its task was read in a way that is not known ({error})") from None


def of_rows(runs: list[Run | Runtime]) -> bool:
    """Whether these give labels; WrongArguments if some do and some generate."""
    generate = {one.generates for one in runs}
    if len(generate) > 1:
        raise WrongArguments("some of these runs are of rows and some of tokens: compare like with like")
    return not generate.pop()
