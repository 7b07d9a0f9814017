"""The protocol of the leaderboard: exams, methods, exits, epochs, rates and seeds.

What a method needs follows from its object Method, and from its stages and its model on a tiny backbone. Only AUTHORS,
CHOICES and SPARSE name methods: what their papers have and the defaults have not. A stage that has no number of epochs
of its own gets those of the exam, whatever the other stages of its method are.
"""

import functools
import math
from collections.abc import Callable, Generator, Iterable
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mini_ee.experiments.trainings import Sources
from mini_ee.lab import registry
from mini_ee.lab.backbones.backbone import Backbone
from mini_ee.lab.backbones.hub import BUILT_IN_MODEL, load_backbone, read_config
from mini_ee.lab.data.tasks import TOY, Task, load_task, subset, toy_task
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.training.method import Method, load_method
from mini_ee.lab.training.run_folder import build_model
from mini_ee.lab.training.stages import Stage
from mini_ee.lab.training.train_run import exits_of, make_request

SEEDS, FEWER_SEEDS, LONG_SECONDS = 5, 3, 900  # fewer if the training of a seed takes longer than LONG_SECONDS
SEARCH_SEEDS = 2  # number of seeds with which a rate is chosen
TINY_LAYERS = 4  # of the backbone on which stages are looked at
MOST_REPORTED = 2000  # rows of a split that an exam names, drawn with a fixed seed
MOST_STAGES = 100  # of a recipe that makes stages without end
AUTHORS: dict[str, Callable[[int], dict]] = {
    "consistent": lambda steps: {"task_epochs": 2},  # their finetune_bert.sh
    "dree": lambda steps: {"adapter_epochs": round(2100 / steps)},  # the steps of their one epoch on SST-2
}
"""What authors do in further stages, if the defaults are for more examples. steps: of an epoch, of BATCH_SIZE each."""
CHOICES = {"consistent": {"alpha": (0.07, 0.02, 0.2)}}
"""Method -> option -> its default, and the other values that the search seeds try with the chosen rates."""
SPARSE = {"sweet-every-second": ("sweet", 2)}
"""Row of the tables -> its method, and that it has an exit after every so many layers, as in its paper."""
BATCH_SIZE = 32  # the default of all methods


class Exam(NamedTuple):
    """A task, a model, and how methods are trained on them."""

    name: str  # also the folder of its records
    task: str  # folder in data/, or the built-in task
    model: str | None  # folder in weights/; None: the built-in model
    max_train: int
    epochs: int  # of every stage that has no number of its own
    factors: tuple[float, ...]  # of all default learning rates of the method; one is chosen
    reported: str | None = None  # split, of which MOST_REPORTED rows are; None: all rows of the task's default split
    timed_rows: int = 128  # drawn with a fixed seed

    def read(self, sources: Sources) -> Task:
        """The task without rows of other splits that train has."""
        folder = sources.options({"task": self.task})["task"]
        task = (load_task(folder) if isinstance(folder, Path) else toy_task()).without_seen_rows()[0]
        if self.reported is None:
            return task
        rows = subset(task.split(self.reported), MOST_REPORTED, 0)
        return replace(task, splits={"train": task.split("train"), self.reported: rows})

    def model_folder(self, sources: Sources) -> Path:
        """The folder of the checkpoint."""
        return BUILT_IN_MODEL if self.model is None else sources.find("weights", self.model)


EXAMS = (
    Exam("TREC", "TREC", "all-MiniLM-L6-v2", 1500, 4, (1.0, 4.0)),
    Exam("reviews", TOY, None, 3000, 4, (0.5, 2.0)),  # the defaults for this model are 8 times larger
    Exam("SST-2", "SST-2", "all-MiniLM-L6-v2", 1500, 4, (1.0, 4.0)),
    Exam("SICK", "SICK", "all-MiniLM-L6-v2", 1500, 4, (1.0, 4.0), "test"),
)
QUICK_EXAMS = (Exam("reviews", TOY, None, 300, 4, (1.0,), timed_rows=32),)
QUICK_METHODS = ("joint", "two-stage", "pabee", "lora-exits")
QUICK_SEEDS = 3  # the fewest with which there are intervals


def exams(quick: bool) -> tuple[Exam, ...]:
    """The exams of the leaderboard, in the order in which they are run."""
    return QUICK_EXAMS if quick else EXAMS


def seed_count(quick: bool) -> int:
    """The number of seeds of each method, if their training is not long."""
    return QUICK_SEEDS if quick else SEEDS


def method_of(row: str) -> str:
    """The method of a row of the tables."""
    return SPARSE[row][0] if row in SPARSE else row


def why_not(name: str) -> str:
    """Why a method has no row in the tables of classifiers; empty if it has one."""
    method = load_method(method_of(name))
    if "rows" not in method.units:
        return f"the exits give {' and '.join(method.units)}, which have no label"
    if method.keeps_model:
        return "the exits are added to a fine-tuned model, which stays as it is, and learn from its predictions"
    if not method.has_stages:
        return "nothing is trained; the exits are planned from the texts, which records do not contain"
    return ""


def methods(quick: bool, only: str | None = None) -> list[str]:
    """The rows of the tables, in the order of the registry. only: this one. Raises WrongArguments if it has none."""
    rows = [*registry.METHODS, *(row for row in SPARSE if method_of(row) in registry.METHODS)]
    rows.sort(key=lambda row: [*registry.METHODS].index(method_of(row)))
    if only is not None:
        if only not in rows:
            raise WrongArguments(f"--only: expected one of {', '.join(methods(False))}; found {only}")
        if reason := why_not(only):
            raise WrongArguments(f"--only: {only} is not in the tables of the leaderboard: {reason}")
        return [only]
    return [name for name in rows if not why_not(name) and (not quick or name in QUICK_METHODS)]


# ---- What is trained ----


class Training(NamedTuple):
    """One training, and all methods that it serves: they differ by their rules alone."""

    exam: Exam
    methods: tuple[str, ...]  # the first one gives its name
    options: dict  # of `mini_ee.train`, without rates and seed
    rates: dict[str, float]  # all rates of the method, its defaults; each is multiplied by the chosen factor
    choices: dict[str, tuple] = {}  # option -> its default, and the other values that are tried

    @property
    def name(self) -> str:
        return self.methods[0]

    @property
    def settings(self) -> dict:
        """What a record of it must have been made with."""
        return {name: value for name, value in self.options.items() if name != "method"} | {"rates": self.rates}

    def at(self, factor: float, chosen: Iterable[tuple[str, float]] = ()) -> dict:
        """The options with rates, and with what was chosen otherwise."""
        rates = {name: float(f"{rate * factor:.6g}") for name, rate in self.rates.items()}
        return self.options | rates | dict(chosen)


def trainings_of(exam: Exam, sources: Sources) -> list[Training]:
    """The trainings of all methods that fit, in the order of the registry."""
    folder, trainings = exam.model_folder(sources), {}
    for name in methods(quick=False):
        alike = (name not in SPARSE and load_method(name).trained_as) or name
        if alike not in trainings:
            trainings[alike] = _planned(name, exam, folder)
        else:
            trainings[alike] = trainings[alike]._replace(methods=(*trainings[alike].methods, name))
    return [*trainings.values()]


def _planned(name: str, exam: Exam, folder: Path) -> Training:
    """The training of a row of the tables."""
    method = load_method(method_of(name))
    request = make_request(method_of(name), folder, toy_task(), Path("unused"), False, {})
    layers, own_exits = read_config(folder / "config.json").num_hidden_layers, "exits" in method.lacks
    tiny = exits_of(request, TINY_LAYERS) if own_exits else tuple(range(1, TINY_LAYERS + 1))
    model = _tiny(method, tiny, request.config)
    # If exits start again from the embeddings, each costs all its layers again, and more of them save less.
    few = own_exits or len(set(model.segments().from_embeddings)) > 1
    exits = exits_of(request, layers) if few else tuple(range(1, layers + 1))
    if not own_exits and 2 * exits[0] >= layers:  # with its head, the first exit would need more than half of the FLOPs
        exits = (layers // 3, layers)
    if name in SPARSE:
        exits = exits[SPARSE[name][1] - 1 :: SPARSE[name][1]]
    options = {"model": exam.model, "task": exam.task, "max_train": exam.max_train}
    options |= {} if own_exits else {"exits": list(exits)}
    options |= {} if "epochs" in method.lacks else {"epochs": exam.epochs}
    options |= AUTHORS[name](math.ceil(exam.max_train / BATCH_SIZE)) if name in AUTHORS else {}
    rates = {rate: getattr(request.train, rate) for rate in ("lr", "head_lr") if rate not in method.lacks}
    rates |= {name: value for name, value in asdict(request.config).items() if name.endswith("_lr")}
    choices = CHOICES.get(name, {}) if len(exam.factors) > 1 else {}
    return Training(exam, (name,), {"method": method_of(name)} | options, rates, choices)


def trained_parts(name: str) -> list[tuple[str, ...]]:
    """The parts of a classifier that each stage of a method trains, such as ("backbone", "heads")."""
    method = load_method(name)
    config = make_request(name, BUILT_IN_MODEL, toy_task(), Path("unused"), False, {}).config
    exits = method.exits(TINY_LAYERS) if callable(method.exits) else (TINY_LAYERS // 2, TINY_LAYERS)
    model, by_stage = _tiny(method, exits, config), []
    for stage in stages_of(method, model, config):
        names = [part for part, _ in model.named_parameters() if stage.trainable(part) and model.is_trainable(part)]
        by_stage.append(tuple(dict.fromkeys(part.partition(".")[0] for part in names)))
    return by_stage


@functools.cache
def _tiny_backbone() -> Backbone:
    """The first layers of the built-in model."""
    return load_backbone(BUILT_IN_MODEL).without_heads().first_layers(TINY_LAYERS)


def _tiny(method: Method, exits: tuple[int, ...], config: Any) -> nn.Module:
    """The model of a method on a tiny backbone."""
    model_config = {"exits": exits, "settings": asdict(config), "num_labels": 2, "pool": "mean", "head": "dense"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_model(method, "rows", deepcopy(_tiny_backbone()), model_config).eval()


def stages_of(method: Method, model: nn.Module, config: Any) -> list[Stage]:
    """The stages of a recipe; of a generator those that follow if every stage improves the score."""
    recipe = method.recipe(model, config)
    if not isinstance(recipe, Generator):
        return list(recipe)
    stages: list[Stage] = []
    stage = next(recipe, None)
    while stage is not None and len(stages) < MOST_STAGES:
        stages.append(stage)
        try:
            stage = recipe.send(float(len(stages)))
        except StopIteration:
            break
    return stages
