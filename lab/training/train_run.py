"""Train a method: open model and data, hold examples out, train, choose the default rule, write the run."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mini_ee.lab.backbones.adapter import is_adapter, model_folder
from mini_ee.lab.backbones.backbone import UNTIED, some_of
from mini_ee.lab.backbones.hub import (
    BUILT_IN_DECODER,
    BUILT_IN_MODEL,
    backbone_sha256,
    load_backbone,
    read_config,
)
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.files import check_folder, run_config, sole_writer
from mini_ee.lab.data.model_files import model_sha256s
from mini_ee.lab.data.settings import flag_of, unused_option
from mini_ee.lab.data.tasks import TOY, Task, load_task, toy_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.row_exits import check_exits, even_exits
from mini_ee.lab.recording import record
from mini_ee.lab.training import doubts, ranks
from mini_ee.lab.training.loop import Fitted, fit
from mini_ee.lab.training.method import Method, configured, load_method
from mini_ee.lab.training.run_folder import (
    Run,
    build_model,
    check_device,
    encode,
    is_run,
    load_run,
    save_run,
    training_folder,
)
from mini_ee.lab.training.state import STATE, NothingToResume, Saved
from mini_ee.lab.training.train_settings import TextOptions, TrainConfig
from mini_ee.lab.training.unit import TrainingData, Unit, load_unit


@dataclass(frozen=True)
class Request:
    """The method, model, data and settings of a training."""

    name: str
    method: Method
    unit: Unit
    model: Path
    task: Any  # of rows: a Task; of tokens: None
    out: Path
    config: Any  # the method's Config
    train: TrainConfig
    common: Any  # CommonOptions; of rows: RowOptions
    texts: TextOptions | None  # of tokens
    resume: bool
    given: frozenset[str]  # the names of the options that were given, not taken from defaults

    @property
    def seed(self) -> int:
        return self.train.seed


def train(
    method: str,
    model: str | Path | None = None,
    task: str | Path | Task | None = None,
    out: str | Path = "run",
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
    **options,
) -> Run:
    """Train a method and write the run to `out`. Options as on the command line, `mini-ee train METHOD --help`.

    model: folder of a checkpoint (default a built-in one). task: a Task, or its folder (default the built-in reviews),
    or a file with split_file=SEED; TaskOptions such as text_column define how it is read. For a decoder's tokens
    "continue" or "copy". An interrupted training leaves the folder `out`.training, from which `resume` continues.
    Raises FileExistsError if `out` or its unfinished training exists; WrongArguments for options that do not fit the
    method, the model or the task; ValueError if the training diverges.
    """
    request = make_request(method, model, task, Path(out), resume, options)
    with ranks.together(request.common.device) as device:
        return _trained(replace(request, common=replace(request.common, device=device)), say)


def _trained(request: Request, say: Callable[[str], None]) -> Run:
    state_folder = training_folder(request.out)
    if request.out.exists():
        done = request.resume and is_run(request.out) and (state_folder / STATE).exists()
        advice = f"this training is over: remove {state_folder}" if done else "name another folder or remove it"
        raise FileExistsError(f"{request.out}: is there already; {advice}")
    ranks.wait()  # until all ranks have checked
    for line in doubts.of_data(request.task) if request.task else ():
        say(line)
    if request.method.train is not None:
        return request.method.train(request, say)
    unfinished = (state_folder / STATE).exists()
    if unfinished and not request.resume:
        raise FileExistsError(f"{state_folder}: an unfinished training is there; go on with --resume or remove it")
    if request.resume and not unfinished:
        raise NothingToResume(f"{state_folder}: no unfinished training here; start without --resume")
    training = _fitted_run(request, state_folder, say)
    if ranks.rank() == 0:
        save_run(request.out, *training)
        if state_folder.exists():  # a method without stages has no state
            shutil.rmtree(state_folder)
    ranks.wait()
    return load_run(request.out)


# ---- The request ----


def make_request(
    name: str, model: str | Path | None, task: str | Path | None, out: Path, resume: bool, options: dict
) -> Request:
    """The Request of a method's name and options. Raises WrongArguments if they do not fit."""
    method = load_method(name)
    unit, model = _unit_of(method, model and Path(model), task)
    defaults = unit.built_in_defaults if model == unit.built_in else {}
    defaults = defaults | method.defaults.get(unit.name, {})
    if model in (BUILT_IN_MODEL, BUILT_IN_DECODER) and unit.name == method.units[0]:
        defaults = defaults | method.defaults.get("built-in", {})
    defaults = defaults | unit.implied(task)
    given = defaults | {key: value for key, value in options.items() if value is not None}
    parts = [TrainConfig, *unit.options]
    known = [{field.name for field in fields(part)} for part in parts]
    own_names = {field.name for field in fields(method.config)}
    foreign = given.keys() - set().union(*known, own_names)
    foreign |= {key for key in method.lacks if options.get(key) is not None}
    if foreign:
        about = f"{name} on {unit.name}" if len(method.units) > 1 else name
        raise WrongArguments(f"{about} has no option {', '.join(sorted(foreign))}; see `mini-ee train {name} --help`")
    try:
        made = [part(**{key: given[key] for key in names & given.keys()}) for part, names in zip(parts, known)]
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    own = {key: given[key] for key in own_names & given.keys()}
    named = frozenset(key for key, value in options.items() if value is not None)
    config = configured(method, own)
    if unused := unused_option(config, named):
        raise WrongArguments(unused)
    request = Request(name, method, unit, model, None, out, config, *made[:2], None, resume, named)
    check_device(request.common.device)
    return unit.opened(request, task, made[2])


def _unit_of(method: Method, model: Path | None, task: str | Path | None) -> tuple[Unit, Path]:
    """(unit, model): the first unit of the method that fits model and task; and its built-in model if none is named."""
    model_type = None
    if model is not None:
        check_folder(model)
        run = run_config(model)
        if run is not None and method.train is None:
            raise WrongArguments(
                f"{model}: expected a checkpoint, found a run of {run.get('method')}; give a checkpoint"
            )
        model_type = read_config(model / "config.json").model_type if run is None else None
    units = [load_unit(name) for name in method.units]
    unit = next((unit for unit in units if unit.wants(model_type, task)), units[0])
    unit.check_source(model, model_type, task)
    return unit, model or unit.built_in


def open_task(name: str | Path | Task | None, options: TaskOptions = TaskOptions()) -> Task:
    """The task of a folder or file, or the built-in task if none is named, or if no folder has its name."""
    if isinstance(name, Task):
        return name
    if name is not None and (str(name) != TOY or Path(name).is_dir()):
        return load_task(name, options)
    if given := options.given():
        raise WrongArguments(f"{flag_of(next(iter(given)), {})} is for files of your own: name them with --task")
    return toy_task()


def check_task(run: Run, task: Task, folder: Path) -> None:
    """Raise WrongArguments if the run was trained with other labels or another number of texts than the task has."""
    texts, found = run.config["task"]["texts"], len(next(iter(task.splits.values())).texts[0])
    if texts != found:
        raise WrongArguments(f"{folder}: was trained on examples of {texts} texts; {task.name} has {found}")
    if run.multi_label:
        raise WrongArguments(f"{folder}: gives a text several labels at once, and an example of {task.name} has one")
    if run.label_names != list(task.label_names):
        raise WrongArguments(
            f"{folder}: was trained on {run.config['task']['name']} with the labels "
            f"{', '.join(run.label_names) or '(regression)'}; {task.name} has "
            f"{', '.join(task.label_names) or '(regression)'}; give its own task with --task"
        )


def trained_on(run: Run, task: Task) -> bool:
    """Whether a run was trained on the train split of this task, except for the held-out examples.

    Raises WrongArguments for a task of that name with other examples, because its training examples are not known.
    """
    about = run.config["task"]
    if "train" not in task.splits:
        return False
    if about.get("train_sha256") == task.split("train").sha256():
        return True
    if about["name"] != task.name:
        return False
    raise WrongArguments(
        f"{run.folder}: {task.name} has other train examples than in its training, so none is known to be held out; "
        f"give the task as it was, examples under another name, or train again"
    )


def exits_of(request: Request, num_layers: int) -> tuple[int, ...]:
    """The exits of --exits, or the method's own. Raises WrongArguments for exits that the model cannot have."""
    exits, own = request.common.exits, request.method.exits
    if exits is None:
        if callable(own):
            return own(num_layers)
        count = request.unit.exit_count(request.method)
        return tuple(range(1, num_layers + 1)) if count is None else even_exits(num_layers, count)
    refusal = request.method.no_exit_0 or request.unit.no_exit_0
    if exits[0] == 0 and refusal:
        raise WrongArguments(f"{request.name} cannot have an exit 0, {refusal}: let --exits begin with 1 or more")
    try:
        return check_exits(request.unit.with_last(exits, num_layers), num_layers, least=min(1, exits[0]))
    except ValueError as error:
        raise WrongArguments(str(error)) from None


# ---- Training ----


def _fitted_run(request: Request, state_folder: Path, say: Callable[[str], None]) -> tuple:
    """Open, read, train and choose the default rule. Returns the arguments of save_run."""
    unit, (backbone, tokenizer) = request.unit, _opened(request)
    say_left_out(backbone, request.model, say, request.method.keeps_model and backbone.classification_head)
    say_beyond(tokenizer, backbone, request.model, say)
    about = _about(request, exits_of(request, backbone.config.num_hidden_layers))
    data = unit.data(request, backbone, tokenizer, about, say)
    model, fitted = _fit(request, backbone, about, data, Saved(state_folder, data.begun_with, request.resume))
    chosen, metrics = unit.conclude(request, model, fitted, data)
    return model, tokenizer, chosen, about, metrics


def _opened(request: Request) -> tuple[nn.Module, Tokenizer]:
    """The backbone, on the device, and its tokenizer, as a training reads them."""
    unit, backbone = request.unit, load_backbone(request.model)
    backbone = (backbone if unit.reads_lm_head else backbone.without_heads()).to(request.common.device)
    return backbone, unit.open_tokenizer(request, backbone)


def original_outputs(request: Request, texts: Sequence[tuple[str, ...]]) -> tuple[np.ndarray, int]:
    """What a model that stays as it is returns for these texts, as a training would read it: (N, C), and the largest
    number of tokens that its backbone can read.
    """
    backbone, tokenizer = _opened(request)
    about = _about(request, (backbone.config.num_hidden_layers,)) | request.unit.head_settings(request, backbone)
    segments = build_checked(request, backbone, about).segments()
    outputs = record(segments, encode(tokenizer, texts, backbone), request.train.batch_size).logits[:, -1]
    return outputs, backbone.config.max_tokens


def say_left_out(backbone: nn.Module, folder: Path, say: Callable[[str], None], keeps_head: Any = False) -> None:
    """Print which tensors of a checkpoint are not used, and why. keeps_head: whether its own head is used."""
    if is_adapter(folder):
        say(f"{folder}: a PEFT adapter, merged into its base model {model_folder(folder)}.")
    if backbone.foreign:
        found = some_of(backbone.foreign)
        say(f"{folder}: {len(backbone.foreign)} tensors belong to no part of the model and are ignored ({found}).")
    if backbone.left_out and not keeps_head:
        why = f"; the masked-LM head is among them, because {UNTIED}" if backbone.untied_head else ""
        found = some_of(backbone.left_out)
        say(f"{folder}: {len(backbone.left_out)} tensors of another head were left out ({found}){why}.")


def say_beyond(tokenizer: Tokenizer, backbone: nn.Module, folder: Path, say: Callable[[str], None]) -> None:
    """Print which tokens of a tokenizer the model does not have."""
    if line := tokenizer.beyond(backbone.config.vocab_size):
        say(f"{folder}: {line}")


def _fit(
    request: Request, backbone: nn.Module, about: dict, data: TrainingData, saved: Saved
) -> tuple[nn.Module, Fitted]:
    """Build the model and train it. Restores the random state of the caller."""
    begun_with = {key: about[key] for key in ("method", "unit", "exits")} | about["training"] | about["settings"]
    heads = request.unit.head_settings(request, backbone)
    begun_with |= {"backbone": about["backbone"]["sha256"], "rows": len(data.train)} | heads
    begun_with |= {"files": model_sha256s(request.model)}
    saved = saved._replace(settings=begun_with | saved.settings)
    with torch.random.fork_rng(), nullcontext() if ranks.rank() else sole_writer(saved.folder):
        torch.manual_seed(request.seed)
        model = build_checked(request, backbone, about | heads).to(request.common.device)
        if not request.method.has_stages:
            return model, Fitted(request.method.search(model, data.train, data.held, request.config), [])
        recipe = request.method.recipe(model, request.config)
        return model, fit(model, recipe, data.train, data.held, request.train, saved)


def build_checked(request: Request, backbone: nn.Module, about: dict) -> nn.Module:
    """The method's model. Raises WrongArguments if it cannot be built with this backbone and these settings."""
    try:
        return build_model(request.method, request.unit.name, backbone, about)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def _about(request: Request, exits: tuple[int, ...]) -> dict:
    """The parts of config.json that are known before the training."""
    return {
        "method": request.name,
        "unit": request.unit.name,
        "settings": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(request.config).items()},
        "backbone": {"folder": str(request.model.resolve()), "sha256": backbone_sha256(request.model)},
        "exits": list(exits),
        "seed": request.seed,
        "training": asdict(request.train) | request.unit.training_settings(request),
    } | request.unit.about(request)
