"""What the command line names, opened and checked: runs, tasks, models, methods, rules."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mini_ee import WrongArguments
from mini_ee.backbones.hub import BUILT_IN_MODEL, read_config
from mini_ee.data.files import read_json
from mini_ee.data.tasks import TOY, Task, load_task, toy_task
from mini_ee.export.manifest import MANIFEST
from mini_ee.export.runtime import Runtime
from mini_ee.export.sessions import CPU, CUDA
from mini_ee.measure.texts import is_given, refuse
from mini_ee.methods.lora_exits import LoRAExits
from mini_ee.methods.raee import Retrieval
from mini_ee.rules import FixedExit, NeverExit, Patience, PatienceConfidence, Policy, Rule, Threshold
from mini_ee.training.fit import TrainConfig
from mini_ee.training.methods import CONFIGURED, EVERY_LAYER, Method, method_of
from mini_ee.training.run import Run, load_run
from mini_ee.units.prompts import PromptModel
from mini_ee.units.rows import check_exits, even_exits
from mini_ee.units.streams import cheapest_schedule, measure_costs, parallel, restart

BUILT_IN_LR, BUILT_IN_EPOCHS = 2e-4, 5  # a small model wants larger steps, and more of them

LORA_LR, LORA_EPOCHS = 1e-3, 5

RULE_OPTIONS = ("rule", "threshold", "patience", "cut")


def open_trained(folder: Path, args, schedule: str | None) -> Run | Runtime:
    """A run, on the device that was asked for, or an exported folder."""
    if (folder / MANIFEST).is_file():
        if schedule:
            raise WrongArguments(f"{folder}: is exported under one schedule; export the run with another --schedule")
        if args.device not in ("cpu", "cuda"):
            raise WrongArguments(f"--device {args.device}: an exported folder runs on cpu or on cuda")
        return Runtime(folder, [CPU if args.device == "cpu" else CUDA], threads=args.threads or 0)
    trained = load_run(folder, args.model)
    check_device(args.device)
    trained.model.to(args.device)
    if not isinstance(trained.model, LoRAExits):
        if schedule:
            raise WrongArguments(f"{folder}: --schedule is for LoRA exits, this is a run of {trained.config['method']}")
        return trained
    if schedule == "adaptive":
        refuse(args, RULE_OPTIONS, "is not the rule that was calibrated, which --schedule adaptive goes by")
        return trained._replace(schedule=adaptive_schedule(trained, folder, getattr(args, "batch_size", 1)))
    schedules = {None: restart, "restart": restart, "parallel": parallel}
    return trained._replace(schedule=schedules[schedule](len(trained.exits)))


def adaptive_schedule(trained: Run, folder: Path, batch_size: int) -> list[list[int]]:
    """The schedule that is cheapest on this machine for rows as long as those held out, that leave as those did.

    Where they left: under the run's rule, as training chose or `calibrate` wrote it.
    """
    metrics = read_json(folder / "metrics.json")
    if "mean_tokens" not in metrics:
        raise WrongArguments(
            f"{folder}: does not know its held-out rows, which --schedule adaptive needs; train it again"
        )
    left = np.array(trained.config.get("exit_counts", metrics["hold_out"]["exit_counts"]))
    reach = left[::-1].cumsum()[::-1] / left.sum()
    return cheapest_schedule(measure_costs(trained.model, batch_size, round(metrics["mean_tokens"])), reach)


def refuse_model(args, opened: list[Run | Runtime]) -> None:
    """Raise WrongArguments for a --model that none of them asks for."""
    elsewhere = [isinstance(one, Run) and isinstance(one.model, LoRAExits | PromptModel) for one in opened]
    if args.model and not any(elsewhere):
        raise WrongArguments("--model says where a backbone is that a run does not hold; here each holds its own")


def schedule_of(one: Run | Runtime) -> dict:
    """For an answer: which streams of LoRA exits start together, by the layers that they end after."""
    schedule = one.config.get("schedule") if isinstance(one, Runtime) else one.schedule
    return {"schedule": [[one.exits[k] for k in group] for group in schedule]} if schedule else {}


def open_task(name: str) -> Task:
    """A task folder, or the built-in task where no folder has its name."""
    return toy_task() if name == TOY and not Path(name).is_dir() else load_task(name)


def open_task_of(trained: list[Run | Runtime], name: str | None) -> Task:
    """The task that was named, or the built-in one where all runs were trained on it."""
    others = [one.config["task"]["name"] for one in trained if one.config["task"]["name"] != TOY]
    if name is None and others:
        raise WrongArguments(f"the run was trained on {others[0]}: give that task's folder with --task")
    return open_task(name or TOY)


def open_model(folder: Path | None) -> Path:
    """A folder with a model, the built-in encoder by default."""
    folder = folder or BUILT_IN_MODEL
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: no such folder; expected a checkpoint with config.json and model.safetensors"
        )
    return folder


def named_method(args) -> Method:
    """The method of `train METHOD` with the settings that the command line gives it."""
    names = {name for _, known in CONFIGURED.values() for name in known}
    given = {name: getattr(args, name) for name in names if is_given(args, name)}
    if "targets" in given:
        given["targets"] = given["targets"].split(",")
    try:
        return method_of(args.method, given)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def training_options(args, model_folder: Path) -> tuple[TrainConfig, dict]:
    """The settings of a training from the command line; wrong exits are found before anything is loaded."""
    check_device(args.device)
    exits, method = chosen_exits(args, model_folder), getattr(args, "method", "joint")
    if exits is None and method not in EVERY_LAYER:
        exits = even_exits(read_config(model_folder / "config.json").num_hidden_layers, 4)
    lr, head_lr, epochs = TrainConfig.lr, TrainConfig.head_lr, TrainConfig.epochs
    if args.model is None:
        lr, epochs = BUILT_IN_LR, BUILT_IN_EPOCHS
    if method == "lora-exits":
        lr, head_lr, epochs = LORA_LR, LORA_LR, LORA_EPOCHS
    try:
        config = TrainConfig(
            epochs=epochs if args.epochs is None else args.epochs,
            lr=lr if args.lr is None else args.lr,
            head_lr=head_lr if args.head_lr is None else args.head_lr,
            batch_size=args.batch_size,
            seed=args.seed,
        )
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    names = ("pool", "max_train", "max_length", "max_loss", "device")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return config, {"exits": exits} | given


def chosen_exits(args, model_folder: Path) -> tuple[int, ...] | None:
    """The exits that the command line names, if it names some. Raises WrongArguments for those that no model has."""
    if args.exits is None:
        return None
    try:
        return check_exits(args.exits, read_config(model_folder / "config.json").num_hidden_layers)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def choose_rule(args, trained: Run | Runtime) -> Rule:
    """The rule that the command line names, or the run's own. Raises WrongArguments where the pieces do not fit."""
    one = {"threshold": "threshold", "patience": "patience", "layer": "fixed", "cut": "policy"}
    name = args.rule or next((rule for option, rule in one.items() if getattr(args, option) is not None), None)
    needs = {
        "threshold": ("threshold",),
        "patience": ("patience",),
        "patience-confidence": ("patience", "threshold"),
        "fixed": ("layer",),
    }.get(name, ())
    takes = {*needs, *(("cut",) if name == "policy" else ())}
    given = {option for option in one if getattr(args, option) is not None}
    for option in needs:
        if option not in given:
            raise WrongArguments(f"the rule {name} needs --{option}")
    if given - takes:
        raise WrongArguments(f"the rule {name} does not take --{', --'.join(sorted(given - takes))}")
    retrieval = {option: getattr(args, option) for option in ("k", "tau", "fallback_top")}
    retrieval = {option: value for option, value in retrieval.items() if value is not None}
    if retrieval and (name or not isinstance(trained.rule, Retrieval)):
        raise WrongArguments(f"--{next(iter(retrieval)).replace('_', '-')} is for a run of raee under its own rule")
    measure = args.measure or "max_probability"
    if args.measure and "threshold" not in given:
        raise WrongArguments("--measure says what a threshold is on: give --threshold too")
    threshold = args.threshold[0] if args.threshold and len(args.threshold) == 1 else args.threshold
    if name in ("threshold", "patience-confidence") and not trained.label_names:
        raise WrongArguments("a regression task has no confidence: use --rule fixed or --rule patience")
    try:
        if name == "fixed" and args.layer not in trained.exits:
            raise ValueError(f"--layer must be one of the exits {','.join(map(str, trained.exits))}, got {args.layer}")
        build = {
            None: lambda: replace(trained.rule, **retrieval),
            "never": NeverExit,
            "fixed": lambda: FixedExit(trained.exits.index(args.layer)),
            "threshold": lambda: Threshold(threshold, measure),
            "patience": lambda: Patience(args.patience),
            "patience-confidence": lambda: PatienceConfidence(args.patience, threshold, measure),
            "policy": lambda: Policy(Policy.cut if args.cut is None else args.cut),
        }
        rule = build[name]()
        rule.check(len(trained.exits))
        if rule.reads and trained.exits[0] == 0:
            raise ValueError(f"layer 0 is an exit for rules that plan only: use raee, never or fixed, not {rule.name}")
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    return rule


def check_task(trained: Run | Runtime, task: Task, folder: Path) -> None:
    """Raise WrongArguments where the run was trained for other labels or another number of texts than the task has."""
    texts, found = trained.config["task"]["texts"], len(task.split("train").texts[0])
    if texts != found:
        raise WrongArguments(f"{folder}: was trained on rows of {texts} texts; {task.name} has {found}")
    if trained.label_names != list(task.label_names):
        raise WrongArguments(
            f"{folder}: was trained on {trained.config['task']['name']} with the labels "
            f"{', '.join(trained.label_names) or '(regression)'}; {task.name} has "
            f"{', '.join(task.label_names) or '(regression)'}; give its own task with --task"
        )


def check_device(device: str) -> None:
    """Raise WrongArguments for a device that torch does not have here."""
    try:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise RuntimeError("expected cpu, cuda or cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise WrongArguments(f"--device {device}: cannot be used here ({reason}); use cpu") from None
