"""From a method's name to a run on disk: open the parts, hold units out, train, choose the default rule, write."""

import hashlib
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mini_ee import WrongArguments
from mini_ee.backbones.backbone import UNTIED, some_of
from mini_ee.backbones.hub import (
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
from mini_ee.data.columns import TaskOptions
from mini_ee.data.files import json_sha256, read_json, sole_writer
from mini_ee.data.options import flag_of, idle_option
from mini_ee.data.table_files import SUFFIXES
from mini_ee.data.tasks import TOY, Task, load_task, toy_task
from mini_ee.data.tokens import Tokenizer
from mini_ee.exits.rows import RowData, check_exits, even_exits
from mini_ee.recording import Record, exit_scores, predictions, record, summary
from mini_ee.training import doubts, ranks
from mini_ee.training.default_rule import Chosen, curves, default_rule
from mini_ee.training.holdout import split_rows
from mini_ee.training.loop import Diverged, Fitted, fit
from mini_ee.training.method import Method, configured, load_method
from mini_ee.training.options import KINDS, CommonOptions, RowOptions, TextOptions, TrainConfig
from mini_ee.training.run import Run, about_task, build_model, encode, is_run, load_run, save_run, training_folder
from mini_ee.training.state import STATE, NothingToResume, Saved
from mini_ee.training.texts import Source, agreement_rule, check_count, texts_to_learn

BUILT_IN = {"lr": 4e-4, "epochs": 4}  # the built-in encoder is small: it wants larger steps, and more of them


@dataclass(frozen=True)
class Request:
    """All that a training is asked for."""

    name: str
    method: Method
    unit: str
    model: Path
    task: Task | None  # of rows
    out: Path
    config: object  # the method's Config
    train: TrainConfig
    common: CommonOptions  # of rows: RowOptions
    texts: TextOptions | None  # of tokens
    resume: bool
    given: frozenset[str]  # the names of the options that were given, not taken from defaults

    @property
    def seed(self) -> int:
        return self.train.seed


def train(
    method: str,
    model: str | Path | None = None,
    task: str | Path | None = None,
    out: str | Path = "run",
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
    **options,
) -> Run:
    """Train a method and write the run to `out`. Options as on the command line, `mini-ee train METHOD --help`.

    model: a checkpoint's folder, by default a built-in one. task: a task's folder, by default the built-in reviews, or
    with split_file=SEED a file; text_column=... and the other TaskOptions say how it is read. For a decoder's tokens
    "continue" or "copy". A killed training leaves `out`.training behind, from which `resume` goes
    on. Raises FileExistsError where `out` or an unfinished training of it is there; WrongArguments for options that do
    not fit the method, the model or the task; ValueError where the training diverges.
    """
    request = asked(method, model, task, Path(out), resume, options)
    with ranks.together(request.common.device) as device:
        return _trained(replace(request, common=replace(request.common, device=device)), say)


def _trained(request: Request, say: Callable[[str], None]) -> Run:
    state_folder = training_folder(request.out)
    if request.out.exists():
        done = request.resume and is_run(request.out) and (state_folder / STATE).exists()
        advice = f"this training is over: remove {state_folder}" if done else "name another folder or remove it"
        raise FileExistsError(f"{request.out}: is there already; {advice}")
    ranks.wait()  # until all have looked
    for line in doubts.of_data(request.task) if request.task else ():
        say(line)
    if request.method.train is not None:
        return request.method.train(request, say)
    unfinished = (state_folder / STATE).exists()
    if unfinished and not request.resume:
        raise FileExistsError(f"{state_folder}: an unfinished training is there; go on with --resume or remove it")
    if request.resume and not unfinished:
        raise NothingToResume(f"{state_folder}: no unfinished training here; start without --resume")
    training = (_train_tokens if request.unit == "tokens" else _train_rows)(request, state_folder, say)
    if ranks.rank() == 0:
        save_run(request.out, *training)
        if state_folder.exists():  # what is not trained has no state
            shutil.rmtree(state_folder)
    ranks.wait()
    return load_run(request.out)


# ---- What is asked for ----


def asked(name: str, model, task, out: Path, resume: bool, options: dict) -> Request:
    """The request that a method's name and options make. Raises WrongArguments where they do not fit."""
    method = load_method(name)
    unit, model, task = _unit_of(method, model and Path(model), task)
    defaults = BUILT_IN if model == BUILT_IN_MODEL else {}
    defaults = defaults | method.defaults.get(unit, {})
    if model in (BUILT_IN_MODEL, BUILT_IN_DECODER) and unit == method.units[0]:
        defaults = defaults | method.defaults.get("built-in", {})
    if unit == "tokens" and task in KINDS:
        defaults = defaults | {"kind": task}
    given = defaults | {key: value for key, value in options.items() if value is not None}
    parts = [TrainConfig, *([CommonOptions, TextOptions] if unit == "tokens" else [RowOptions, TaskOptions])]
    known = [{field.name for field in fields(part)} for part in parts]
    own_names = {field.name for field in fields(method.config)}
    foreign = given.keys() - set().union(*known, own_names)
    foreign |= {key for key in method.lacks if options.get(key) is not None}
    if foreign:
        about = f"{name} on {unit}" if len(method.units) > 1 else name
        raise WrongArguments(f"{about} has no option {', '.join(sorted(foreign))}; see `mini-ee train {name} --help`")
    try:
        made = [part(**{key: given[key] for key in names & given.keys()}) for part, names in zip(parts, known)]
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    own = {key: given[key] for key in own_names & given.keys()}
    named = frozenset(key for key, value in options.items() if value is not None)
    texts = made[2] if unit == "tokens" else None
    config = configured(method, own)
    if idle := idle_option(config, named):
        raise WrongArguments(idle)
    request = Request(name, method, unit, model, None, out, config, *made[:2], texts, resume, named)
    check_device(request.common.device)
    if unit == "tokens":
        if texts.kind == "pieces" != method.defaults.get(unit, {}).get("kind"):
            raise WrongArguments(f"--task pieces: the end of a piece has no label, and {name} needs one; give continue")
        if texts.kind != "pieces" and (texts.prompt or texts.greedy):
            given = "prompt" if texts.prompt else "greedy"
            raise WrongArguments(f"--{given}: {name} learns from stories, which begin anywhere; leave it out")
        check_count(texts)
        return request
    found = open_task(task, made[2])
    if found.regression and method.classes_only:
        raise WrongArguments(
            f"{name} asks how sure or how right an exit is, and {found.name} is a regression; train joint or pabee"
        )
    return replace(request, task=found)


def _unit_of(method: Method, model: Path | None, task) -> tuple[str, Path, object]:
    """What leaves, and the model and task that it is about, where they were not named."""
    kind = None
    if model is not None:
        if not model.is_dir():
            raise FileNotFoundError(
                f"{model}: no such folder; expected a checkpoint with config.json and model.safetensors"
            )
        if method.train is None and is_run(model):
            found = read_json(model / "config.json").get("method")
            raise WrongArguments(f"{model}: holds a run of {found}; give a checkpoint")
        kind = None if is_run(model) else read_config(model / "config.json")
    writes = kind is not None and generates(kind.model_type)
    labelled = task is not None and (str(task) == TOY or Path(task).is_dir() or Path(task).suffix.lower() in SUFFIXES)
    if "tokens" not in method.units or labelled or (kind is not None and not writes and task not in KINDS):
        if "rows" not in method.units and kind is not None:
            check_generates(model, kind.model_type)
        if "rows" not in method.units:
            raise WrongArguments("this method teaches a decoder's tokens: give --model a decoder, and no --task folder")
        return "rows", model or BUILT_IN_MODEL, task
    if "rows" in method.units and kind is None and method.units[0] == "rows" and task not in KINDS:
        return "rows", BUILT_IN_MODEL, task
    if kind is not None:
        check_generates(model, kind.model_type)
    if task is not None and task not in KINDS:
        raise WrongArguments(
            f"--task: expected a task's folder, or for a decoder {' or '.join(KINDS[1:])}, found {task}"
        )
    return "tokens", model or BUILT_IN_DECODER, task


def open_task(name: str | Path | None, options: TaskOptions = TaskOptions()) -> Task:
    """A task's folder or file, or the built-in task where none is named, or no folder has its name."""
    if name is not None and (str(name) != TOY or Path(name).is_dir()):
        return load_task(name, options)
    if given := options.given():
        raise WrongArguments(f"{flag_of(next(iter(given)), {})} is for files of your own: name them with --task")
    return toy_task()


def check_device(device: str) -> None:
    """Raise WrongArguments for a device that torch does not have here."""
    try:
        if device.partition(":")[0] not in ("cpu", "cuda"):
            raise RuntimeError("expected cpu, cuda or cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise WrongArguments(f"--device {device}: cannot be used here ({reason}); use cpu") from None


def check_task(run: Run, task: Task, folder: Path) -> None:
    """Raise WrongArguments where the run was trained for other labels or another number of texts than the task has."""
    texts, found = run.config["task"]["texts"], len(next(iter(task.splits.values())).texts[0])
    if texts != found:
        raise WrongArguments(f"{folder}: was trained on rows of {texts} texts; {task.name} has {found}")
    if run.label_names != list(task.label_names):
        raise WrongArguments(
            f"{folder}: was trained on {run.config['task']['name']} with the labels "
            f"{', '.join(run.label_names) or '(regression)'}; {task.name} has "
            f"{', '.join(task.label_names) or '(regression)'}; give its own task with --task"
        )


def trained_on(run: Run, task: Task) -> bool:
    """Whether a run was trained on this task's train split, less what it held out.

    Raises WrongArguments for a task of that name with other rows: which of them it has seen is not known.
    """
    about = run.config["task"]
    if "train" not in task.splits:
        return False
    if about.get("train_sha256") == task.split("train").sha256():
        return True
    if about["name"] != task.name:
        return False
    raise WrongArguments(
        f"{run.folder}: does not say that it was trained on the rows that {task.name} has now: none is known to be "
        f"held out; give the task as it was, rows of another name, or train again"
    )


def exits_of(request: Request, num_layers: int) -> tuple[int, ...]:
    """The exits that were asked for, or the method's own. Raises WrongArguments for exits that no model has."""
    exits, own = request.common.exits, request.method.exits
    if exits is None:
        if callable(own):
            return own(num_layers)
        count = own if request.unit == "rows" else 4
        return tuple(range(1, num_layers + 1)) if count is None else even_exits(num_layers, count)
    if request.unit == "tokens" and exits[-1] != num_layers:
        exits = (*exits, num_layers)  # the LM head is always there
    try:
        return check_exits(exits, num_layers)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


# ---- Rows ----


def _train_rows(request: Request, state_folder: Path, say) -> tuple:
    """A classifier, or a regression: what save_run takes."""
    common, task = request.common, request.task
    backbone = load_backbone(request.model).without_heads()
    say_left_out(backbone, request.model, say)
    tokenizer = Tokenizer.from_folder(request.model, min(common.max_length, backbone.config.max_tokens))
    say_beyond(tokenizer, backbone, request.model, say)
    train, held, test = (
        RowData(encode(tokenizer, part.texts, backbone), part.labels, task)
        for part in split_rows(task, request.seed, common.max_train)
    )
    if (train.labels == train.labels[0]).all():
        raise ValueError(
            f"{task.name}: the {len(train)} rows to train on all have the label {train.labels[0]}, there is nothing to "
            f"learn; give rows with different labels"
        )
    exits = exits_of(request, backbone.config.num_hidden_layers)
    about = _about(request, exits) | {"num_labels": task.num_labels, "task": about_task(task)}
    begun_with = {"max_length": tokenizer.max_length, "task": task.name, "data": _sha256(train, held, test)}
    model, fitted = _fit(request, backbone, about, train, held, Saved(state_folder, begun_with, request.resume))
    recorded = _recorded(model, held, request.train.batch_size)
    tested = _recorded(model, test, request.train.batch_size) if len(test) else recorded.take(slice(0))
    wanted = {"max_loss": common.max_loss, "confidence": common.confidence}
    if task.regression:
        wanted["label_range"] = float(np.ptp(train.labels))
    chosen = default_rule(recorded, tested, task, **wanted, candidates=request.method.candidates)
    metrics = {"epochs": fitted.epochs} | _held_out(recorded, chosen, task, held.labels)
    metrics |= {
        "doubts": doubts.of_result(task, train.labels, held.labels, predictions(recorded.replay(chosen.rule).logits)),
        "rows": len(train),
        "rows_held": len(held),  # that chose
        "rows_tested": len(test),  # the default rule
        "rows_truncated": train.encoded.truncated,
        "mean_tokens": float(np.mean([len(ids) for ids in held.encoded.ids])),
    }
    return model, tokenizer, chosen, about, metrics


def _recorded(model: nn.Module, data: RowData, batch_size: int) -> Record:
    """What the exits say of the rows. Raises Diverged where that is no number."""
    recorded = record(model.segments(), data.encoded, batch_size, "held-out rows", model.segments().whole())
    if not np.isfinite(recorded.logits).all():
        raise Diverged("the logits became no numbers: the training diverged; begin anew with a smaller --lr")
    return recorded._replace(labels=data.labels)


def _held_out(recorded: Record, chosen: Chosen, task: Task, labels: np.ndarray) -> dict:
    metric = "score" if task.regression else "accuracy"
    return {
        "exits": list(recorded.segments.exits),
        "per_exit_accuracy": exit_scores(recorded, task, labels, metric),
        "hold_out": summary(recorded.replay(chosen.rule), recorded, task, labels),
        "promise": chosen.promise,
        "rows_needed": chosen.rows_needed,
        "curves": curves(recorded, task, labels, chosen.rule),
        **chosen.about,
    }


# ---- Tokens ----


def _train_tokens(request: Request, state_folder: Path, say) -> tuple:
    """A decoder that leaves early as it writes: what save_run takes."""
    backbone = load_backbone(request.model).to(request.common.device)
    say_left_out(backbone, request.model, say)
    tokenizer = Tokenizer.from_folder(request.model, None)
    say_beyond(tokenizer, backbone, request.model, say)
    source = Source(backbone, tokenizer, request.texts, request.seed)
    exits = exits_of(request, backbone.config.num_hidden_layers)
    if len(exits) < 2 and "exits" not in request.method.lacks:
        raise WrongArguments(f"expected exits before the last layer, got only {exits[0]}")
    about = _about(request, exits) | {"text": request.texts.to_dict(), "rank": request.texts.rank}
    with without_memory():  # what cannot be built is refused before texts are written
        _built(request, empty_backbone(backbone.config.to_dict(), lm_head=True), about)
    train, held = texts_to_learn(source)
    tokens = sum(len(text.ids) for text in train.texts)
    who = f"{len(exits) - 1} heads on {request.model.name} learn" if len(exits) > 1 else f"{request.model.name} reads"
    say(f"{who} {tokens} tokens of {len(train)} texts.")
    digest = json_sha256({"train": [text.ids for text in train.texts], "held": [text.ids for text in held.texts]})
    begun_with = {"text": about["text"], "data": digest}
    model, fitted = _fit(request, backbone, about, train, held, Saved(state_folder, begun_with, request.resume))
    model.fold()
    exits = model.exits
    chosen = (request.method.default_rule or agreement_rule)(model, source, held)
    metrics = {"epochs": fitted.epochs, "history": fitted.metrics, "exits": list(exits)} | chosen.about
    metrics |= {"texts": len(train), "tokens": tokens}
    for stage in request.method.recipe(model, request.config) if request.method.has_stages else ():
        metrics |= stage.log_metrics(model, held) if stage.log_metrics else {}  # of the epoch that was kept
    return model, tokenizer, chosen, about, metrics


# ---- Both ----


def say_left_out(backbone: nn.Module, folder: Path, say: Callable[[str], None]) -> None:
    """Say which tensors of a checkpoint are not used, and why."""
    if backbone.left_out:
        why = f"; the masked-LM head is among them, because {UNTIED}" if backbone.untied_head else ""
        found = some_of(backbone.left_out)
        say(f"{folder}: {len(backbone.left_out)} tensors of another head were left out ({found}){why}.")


def say_beyond(tokenizer: Tokenizer, backbone: nn.Module, folder: Path, say: Callable[[str], None]) -> None:
    """Say which tokens of a tokenizer the model does not have."""
    if line := tokenizer.beyond(backbone.config.vocab_size):
        say(f"{folder}: {line}")


def _fit(request: Request, backbone: nn.Module, about: dict, train, held, saved: Saved) -> tuple[nn.Module, Fitted]:
    """Build the model and train it. The caller's random state is kept."""
    begun_with = {key: about[key] for key in ("method", "unit", "exits")} | about["training"] | about["settings"]
    heads = {name: getattr(request.common, name, None) for name in ("pool", "head")}
    if request.unit == "rows":
        heads["pool"] = heads["pool"] or ("mean" if "mean" in backbone.poolings else backbone.poolings[0])
    begun_with |= {"backbone": about["backbone"]["sha256"], "rows": len(train)} | heads
    saved = saved._replace(settings=begun_with | saved.settings)
    with torch.random.fork_rng(), nullcontext() if ranks.rank() else sole_writer(saved.folder):
        torch.manual_seed(request.seed)
        model = _built(request, backbone, about | heads).to(request.common.device)
        if not request.method.has_stages:
            return model, Fitted(request.method.search(model, train, held, request.config), [])
        return model, fit(model, request.method.recipe(model, request.config), train, held, request.train, saved)


def _built(request: Request, backbone: nn.Module, about: dict) -> nn.Module:
    """The method's model. Raises WrongArguments where there is none of this backbone with these settings."""
    try:
        return build_model(request.method, request.unit, backbone, about)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def _about(request: Request, exits: tuple[int, ...]) -> dict:
    """What config.json says of a training."""
    training = asdict(request.train)
    if request.unit == "rows":
        training |= {name: getattr(request.common, name) for name in ("max_train", "max_loss", "confidence")}
    return {
        "method": request.name,
        "unit": request.unit,
        "settings": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(request.config).items()},
        "backbone": {"folder": str(request.model.resolve()), "sha256": backbone_sha256(request.model)},
        "exits": list(exits),
        "seed": request.seed,
        "training": training,
    }


def _sha256(*parts: RowData) -> str:
    """One digest over tokens and labels, so that a resumed training knows its data again."""
    digest = hashlib.sha256()
    for part in parts:
        for ids in part.encoded.ids:
            digest.update(ids.tobytes() + b"|")
        digest.update(part.labels.tobytes())
    return digest.hexdigest()
