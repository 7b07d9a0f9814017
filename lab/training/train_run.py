"""Train a method: open model and data, hold examples out, train, choose the default rule, write the run."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mini_ee.lab.backbones.adapter import is_adapter, model_folder
from mini_ee.lab.backbones.backbone import UNTIED, some_of
from mini_ee.lab.backbones.hub import (
    BUILT_IN_DECODER,
    BUILT_IN_MODEL,
    backbone_sha256,
    check_generates,
    empty_backbone,
    generates,
    load_backbone,
    read_config,
    without_memory,
)
from mini_ee.lab.backbones.sentence_encoder import SentenceModules
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.files import check_folder, run_config, sole_writer
from mini_ee.lab.data.model_files import model_sha256s
from mini_ee.lab.data.settings import flag_of, unused_option
from mini_ee.lab.data.table_files import SUFFIXES, kind_of
from mini_ee.lab.data.tasks import TOY, Task, load_task, toy_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.lens import reads_much
from mini_ee.lab.exits.row_exits import check_exits, even_exits
from mini_ee.lab.recording import record
from mini_ee.lab.training import doubts, ranks
from mini_ee.lab.training.loop import Fitted, fit
from mini_ee.lab.training.method import Method, configured, load_method
from mini_ee.lab.training.policies import with_gate
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
from mini_ee.lab.training.train_settings import ENCODER_DEFAULTS, KINDS, OPTIONS, TextOptions, TrainConfig
from mini_ee.lab.training.unit import Unit, load_unit

Say = Callable[[str], None]
TOKEN_EXITS = 4  # if none are named
LENS_LR = 1e-3  # learning rate of lenses, which begin with their closed form
OF_TRAINING = "max_train", "max_loss", "confidence", "min_cosine"  # common options that `training` in config.json has
TRAINED_BY = {  # unit -> the module of functions `opened`, `config_part`, `open_tokenizer`, `data` and `conclude`
    "rows": "mini_ee.lab.training.train_rows",
    "tokens": "mini_ee.lab.training.train_tokens",
    "embeddings": "mini_ee.lab.training.train_embeddings",
}


class TrainingData(NamedTuple):
    """The data of a training."""

    train: Any
    held: Any  # held out; it chooses the best epochs
    more: Any  # for `conclude`: the examples that test the default rule, or the Source of texts
    begun_with: dict  # must be the same if the training is resumed


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
    encoder: SentenceModules | None = None  # of embeddings

    @property
    def seed(self) -> int:
        return self.train.seed

    @property
    def trainer(self) -> ModuleType:
        """The functions that train this unit."""
        return import_module(TRAINED_BY[self.unit.name])


def train(
    method: str,
    model: str | Path | None = None,
    task: str | Path | Task | None = None,
    out: str | Path = "run",
    resume: bool = False,
    say: Say = lambda line: None,
    **options,
) -> Run:
    """Train a method and write the run to `out`. Options as on the command line, `mini-ee train METHOD --help-all`.

    model: folder of a checkpoint (default a built-in one). task: a Task, or its folder (default the built-in reviews),
    or a file with split_file=SEED; TaskOptions such as text_column define how it is read. For a decoder's tokens
    "continue" or "copy". An interrupted training leaves the folder `out`.training, from which `resume` continues.
    Raises FileExistsError if `out` or its unfinished training exists; WrongArguments for options that do not fit the
    method, the model or the task; ValueError if the training diverges.
    """
    request = make_request(method, model, task, Path(out), resume, options)
    with ranks.together(request.common.device) as device:
        return _trained(replace(request, common=replace(request.common, device=device)), say)


def _trained(request: Request, say: Say) -> Run:
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
    unit, model = unit_of(method, model and Path(model), task)
    given = defaults_of(method, unit.name, model, options.get("head"))
    given |= {"kind": task} if unit.name == "tokens" and task in KINDS else {}
    given |= {key: value for key, value in options.items() if value is not None}
    parts = [TrainConfig, *OPTIONS[unit.name]]
    known = [{field.name for field in fields(part)} for part in parts]
    own_names = {field.name for field in fields(method.config)}
    foreign = given.keys() - set().union(*known, own_names)
    foreign |= {key for key in method.lacks if options.get(key) is not None}
    if foreign:
        subject = f"{name} on {unit.name}" if len(method.units) > 1 else name
        raise WrongArguments(
            f"{subject} has no option {', '.join(sorted(foreign))}; see `mini-ee train {name} --help-all`"
        )
    try:
        made = [part(**{key: given[key] for key in names & given.keys()}) for part, names in zip(parts, known)]
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    method_options = {key: given[key] for key in own_names & given.keys()}
    named = frozenset(key for key, value in options.items() if value is not None)
    config = configured(method, method_options)
    if unused := unused_option(config, named):
        raise WrongArguments(unused)
    if unit.name == "tokens" and method.own_heads and made[1].head != "own":
        raise WrongArguments(f"--head {made[1].head}: the heads of {name} are part of the method; leave it out")
    request = Request(name, method, unit, model, None, out, config, *made[:2], None, resume, named)
    check_device(request.common.device)
    return request.trainer.opened(request, task, made[2])


def defaults_of(method: Method, unit: str, model: Path, head: str | None = None) -> dict:
    """The defaults of options that differ from those of the settings classes. A built-in model has some of its own.

    head: of --head. If tokens name none, the method's own, or a lens if the LM head costs too much to be read often.
    """
    defaults = ENCODER_DEFAULTS if unit == "rows" and model == BUILT_IN_MODEL else {}
    defaults = defaults | method.defaults.get(unit, {})
    built_in = model in (BUILT_IN_MODEL, BUILT_IN_DECODER) and unit == method.units[0]
    defaults = defaults | (method.defaults.get("built-in", {}) if built_in else {})
    if unit != "tokens" or method.own_heads:
        return defaults
    config = read_config(model / "config.json").to_dict()
    with without_memory():
        head = head or ("lens" if reads_much(empty_backbone(config, lm_head=True)) else "own")
    of_lens = {"head_lr": LENS_LR} | method.defaults.get("lens", {})
    return defaults | {"head": head} | (of_lens if head == "lens" else {})


def unit_of(method: Method, model: Path | None, task: str | Path | None) -> tuple[Unit, Path]:
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
    name = next((unit for unit in method.units if _fits(unit, model_type, task)), method.units[0])
    if name == "tokens":
        _check_tokens(model, model_type, task)
    elif name == "embeddings" and generates(model_type):
        raise WrongArguments(f"{model}: expected a sentence encoder, found a {model_type}: not supported yet")
    return load_unit(name), model or (BUILT_IN_DECODER if name == "tokens" else BUILT_IN_MODEL)


def _fits(unit: str, model_type: str | None, task) -> bool:
    """Whether a unit can be trained with a model (None: not a checkpoint) and a task."""
    if unit == "tokens":
        return not is_labelled(task) and (model_type is None or generates(model_type) or task in KINDS)
    if unit == "rows":
        return is_labelled(task) or task not in KINDS and not (model_type and generates(model_type))
    return unit == "embeddings" and not generates(model_type)


def _check_tokens(model: Path | None, model_type: str | None, task) -> None:
    """Raise WrongArguments for a model or a task with which tokens cannot be trained."""
    if model_type is not None:
        check_generates(model, model_type)
    if is_labelled(task):
        raise WrongArguments("this method is for tokens of decoders: give --model a decoder, and no folder with --task")
    if task is not None and task not in KINDS:
        raise WrongArguments(
            f"--task: expected a task's folder, or for a decoder {' or '.join(KINDS[1:])}, found {task}"
        )


def is_labelled(task) -> bool:
    """Whether this is a task with labels: a Task, the built-in one, a folder, or a table."""
    if isinstance(task, Task):
        return True
    return task is not None and (str(task) == TOY or Path(task).is_dir() or kind_of(Path(task)) in SUFFIXES)


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
    texts, num_texts = run.config["task"]["texts"], len(next(iter(task.splits.values())).texts[0])
    if texts != num_texts:
        raise WrongArguments(f"{folder}: was trained on examples of {texts} texts; {task.name} has {num_texts}")
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
    trained_task = run.config["task"]
    if "train" not in task.splits:
        return False
    if trained_task.get("train_sha256") == task.split("train").sha256():
        return True
    if trained_task["name"] != task.name:
        return False
    raise WrongArguments(
        f"{run.folder}: {task.name} has other train examples than in its training, so none is known to be held out; "
        f"give the task as it was, examples under another name, or train again"
    )


def default_exits(method: Method, unit: str, num_layers: int) -> tuple[int, ...]:
    """The exits of a method, if none are named."""
    if callable(method.exits):
        return method.exits(num_layers)
    count = TOKEN_EXITS if unit == "tokens" else method.exits
    return tuple(range(1, num_layers + 1)) if count is None else even_exits(num_layers, count)


def exits_of(request: Request, num_layers: int) -> tuple[int, ...]:
    """The exits of --exits, or the method's own. Raises WrongArguments for exits that the model cannot have."""
    exits, tokens = request.common.exits, request.unit.name == "tokens"
    if exits is None:
        return default_exits(request.method, request.unit.name, num_layers)
    of_rows = "" if request.unit.name == "rows" else "which is for the examples of a classifier"
    refusal = request.method.no_exit_0 or of_rows
    if exits[0] == 0 and refusal:
        raise WrongArguments(f"{request.name} cannot have an exit 0, {refusal}: let --exits begin with 1 or more")
    if tokens and exits[-1] != num_layers:
        exits = *exits, num_layers  # the LM head is always there
    try:
        return check_exits(exits, num_layers, least=min(1, exits[0]))
    except ValueError as error:
        raise WrongArguments(str(error)) from None


# ---- Training ----


def _fitted_run(request: Request, state_folder: Path, say: Say) -> tuple:
    """Open, read, train and choose the default rule. Returns the arguments of save_run."""
    trainer, (backbone, tokenizer) = request.trainer, _opened(request)
    say_left_out(backbone, request.model, say, request.method.keeps_model and backbone.classification_head)
    say_beyond(tokenizer, backbone, request.model, say)
    known_config = _known_config(request, backbone, tokenizer, exits_of(request, backbone.config.num_hidden_layers))
    data = trainer.data(request, backbone, tokenizer, known_config, say)
    model, fitted = _fit(request, backbone, known_config, data, Saved(state_folder, data.begun_with, request.resume))
    chosen, metrics = trainer.conclude(request, model, fitted, data)
    return model, tokenizer, chosen, known_config, metrics


def _opened(request: Request) -> tuple[nn.Module, Tokenizer]:
    """The backbone, on the device, and its tokenizer, as a training reads them."""
    backbone = load_backbone(request.model)
    backbone = (backbone if request.unit.reads_lm_head else backbone.without_heads()).to(request.common.device)
    return backbone, request.trainer.open_tokenizer(request, backbone)


def original_outputs(request: Request, texts: Sequence[tuple[str, ...]]) -> tuple[Sequence[np.ndarray], int]:
    """What a model that stays as it is returns for each text, as a training would read it: (C,), for tokens (T, C); and
    the largest number of tokens that its backbone can read.
    """
    backbone, tokenizer = _opened(request)
    known_config = _known_config(request, backbone, tokenizer, (backbone.config.num_hidden_layers,))
    segments, encoded = build_checked(request, backbone, known_config).segments(), encode(tokenizer, texts, backbone)
    if segments.token_task is None:
        return record(segments, encoded, request.train.batch_size).logits[:, -1], backbone.config.max_tokens
    with segments.running():
        states = (segments.start(encoded.batch([row])) for row in range(len(encoded)))
        return [segments.read(0, segments.advance(0, state))[0] for state in states], backbone.config.max_tokens


def say_left_out(backbone: nn.Module, folder: Path, say: Say, keeps_head: Any = False) -> None:
    """Print which tensors of a checkpoint are not used, and why. keeps_head: whether its own head is used."""
    if is_adapter(folder):
        say(f"{folder}: a PEFT adapter, merged into its base model {model_folder(folder)}.")
    if backbone.foreign:
        names = some_of(backbone.foreign)
        say(f"{folder}: {len(backbone.foreign)} tensors belong to no part of the model and are ignored ({names}).")
    if backbone.left_out and not keeps_head:
        why = f"; the masked-LM head is among them, because {UNTIED}" if backbone.untied_head else ""
        names = some_of(backbone.left_out)
        say(f"{folder}: {len(backbone.left_out)} tensors of another head were left out ({names}){why}.")


def say_beyond(tokenizer: Tokenizer, backbone: nn.Module, folder: Path, say: Say) -> None:
    """Print which tokens of a tokenizer the model does not have."""
    if line := tokenizer.beyond(backbone.config.vocab_size):
        say(f"{folder}: {line}")


def _fit(
    request: Request, backbone: nn.Module, known_config: dict, data: TrainingData, saved: Saved
) -> tuple[nn.Module, Fitted]:
    """Build the model and train it. Restores the random state of the caller."""
    begun_with = (
        {key: known_config[key] for key in ("method", "unit", "exits")}
        | known_config["training"]
        | known_config["settings"]
    )
    begun_with |= {"backbone": known_config["backbone"]["sha256"], "rows": len(data.train)}
    begun_with |= {key: known_config.get(key) for key in ("pool", "head", "num_labels")}
    begun_with |= {"files": model_sha256s(request.model)}
    saved = saved._replace(settings=begun_with | saved.settings)
    with torch.random.fork_rng(), nullcontext() if ranks.rank() else sole_writer(saved.folder):
        torch.manual_seed(request.seed)
        model = build_checked(request, backbone, known_config).to(request.common.device)
        if not request.method.has_stages:
            return model, Fitted(request.method.search(model, data.train, data.held, request.config), [])
        recipe = with_gate(request.method.recipe(model, request.config), model)
        return model, fit(model, recipe, data.train, data.held, request.train, saved)


def build_checked(request: Request, backbone: nn.Module, known_config: dict) -> nn.Module:
    """The method's model. Raises WrongArguments if it cannot be built with this backbone and these settings."""
    try:
        return build_model(request.method, request.unit.name, backbone, known_config)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def _known_config(request: Request, backbone: nn.Module, tokenizer: Tokenizer, exits: tuple[int, ...]) -> dict:
    """The parts of config.json that are known before the training."""
    return {
        "method": request.name,
        "unit": request.unit.name,
        "settings": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(request.config).items()},
        "backbone": {"folder": str(request.model.resolve()), "sha256": backbone_sha256(request.model)},
        "exits": list(exits),
        "seed": request.seed,
        "training": asdict(request.train) | {key: v for key, v in vars(request.common).items() if key in OF_TRAINING},
    } | request.trainer.config_part(request, backbone, tokenizer)
