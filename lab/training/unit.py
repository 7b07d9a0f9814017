"""What exits: an example ("rows"), an example read through a prompt ("prompts"), a token ("tokens"), or a text whose
embedding is wanted ("embeddings").

Each is an object of a class Unit. Its file ends with UNIT, and registry.py names the file. The config.json of a run
contains its name as `unit`.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mini_ee.lab.backbones.adapter import tokenizer_folder
from mini_ee.lab.backbones.backbone import check_integer
from mini_ee.lab.backbones.tensor_files import write_tensors
from mini_ee.lab.data.table_files import SUFFIXES, kind_of
from mini_ee.lab.data.tasks import TOY, Split, Task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.data.values import shortened
from mini_ee.lab.registry import UNITS


class TrainingData(NamedTuple):
    """The data of a training."""

    train: Any
    held: Any  # held out; it chooses the best epochs
    more: Any  # for `conclude`: the examples that test the default rule, or the Source of texts
    begun_with: dict  # must be the same if the training is resumed


class Unit:
    """One kind of thing that exits. `request` is a train_run.Request."""

    name: str
    noun = "examples"  # in messages
    generates = False  # True if its models continue texts, and give no labels
    embeds = False  # True if its models return embeddings, and give no labels
    default_measure = "max_probability"  # confidence measure of a rule, if none is named
    no_exit_0 = "which is for the examples of a classifier"  # as in Method
    reads_lm_head = True  # exits use the LM head, and a fine-tuned backbone is saved with it as a checkpoint
    built_in: Path  # the model, if none is named
    built_in_defaults: dict = {}
    options: tuple[type, ...]  # settings of a training, and settings of its data
    task_help = ""  # help of --task
    options_help = ""  # help of the group of the data's options

    # ---- The request ----
    def wants(self, model_type: str | None, task) -> bool:
        """Whether this unit can be trained with this model (None: not a checkpoint) and this task."""
        return False

    def check_source(self, model: Path | None, model_type: str | None, task) -> None:
        """Raise WrongArguments for a model or a task with which this unit cannot be trained."""

    def implied(self, task) -> dict:
        """Settings that follow from the name of the task."""
        return {}

    def opened(self, request, task, source):
        """The request with its data, after all checks that need no model. source: settings of the data."""
        raise NotImplementedError

    def exit_count(self, method) -> int | None:
        """The number of exits, if none are named."""
        return method.exits

    def with_last(self, exits: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
        """The named exits, with the last layer if this unit always has it."""
        return exits

    # ---- Training ----
    def about(self, request) -> dict:
        """The unit's part of config.json."""
        raise NotImplementedError

    def training_settings(self, request) -> dict:
        """The unit's part of `training` in config.json."""
        return {}

    def head_settings(self, request, backbone) -> dict:
        """`pool` and `head`: what the heads read, and their kind."""
        return {"pool": None, "head": None}

    def max_length(self, request, backbone) -> int | None:
        """Number of tokens after which a text is cut; None: it is not cut."""
        return None

    def open_tokenizer(self, request, backbone) -> Tokenizer:
        """The tokenizer of the model's folder. A unit may give the backbone what else the folder contains."""
        return Tokenizer.from_folder(tokenizer_folder(request.model), self.max_length(request, backbone))

    def data(self, request, backbone, tokenizer, about: dict, say: Callable[[str], None]) -> TrainingData:
        """All data of the training."""
        raise NotImplementedError

    def conclude(self, request, model: nn.Module, fitted, data: TrainingData) -> tuple:
        """(Chosen, metrics): the default rule, and what metrics.json contains. fitted: training.loop.Fitted."""
        raise NotImplementedError

    # ---- A run ----
    def build(self, method, backbone, exits: tuple[int, ...], config: dict) -> nn.Module:
        """The model, for a method without a model of its own."""
        raise NotImplementedError

    def shape(self, config: dict) -> tuple[int, str | None]:
        """(num_labels, pool), for a method's own model."""
        return 1, None

    def saved(self, folder: Path, model: nn.Module, tokenizer) -> tuple[dict, dict[str, str]]:
        """Write what was trained. Returns (fields of config.json, checksums of the files)."""
        return {}, {"model.safetensors": write_tensors(folder / "model.safetensors", model.own_state())}

    def backbone_changed(self, model: nn.Module, about: dict) -> bool:
        """Whether the run must contain the backbone."""
        return model.holds_backbone

    def check(self, config: dict) -> None:
        """Raise ValueError for invalid values of config.json that no other check finds."""

    def read(self, folder: Path, config: dict, backbone_folder) -> tuple:
        """(model, tokenizer) of a run."""
        raise NotImplementedError

    def held_out(self, run, task) -> Split | None:
        """The examples of a task that a training.run_folder.Run held out; None if they are not known."""
        return None


def is_labelled(task) -> bool:
    """Whether this is a task with labels: a Task, the built-in one, a folder, or a table."""
    if isinstance(task, Task):
        return True
    return task is not None and (str(task) == TOY or Path(task).is_dir() or kind_of(Path(task)) in SUFFIXES)


def check_labelled(config: dict) -> None:
    """Raise ValueError for invalid values in the config.json of a classifier or a regression."""
    names = config["task"]["label_names"]
    check_integer("max_length", config["max_length"])
    check_integer("texts", config["task"]["texts"], most=2)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"label_names must be a list of names, found {shortened(names)}; train the run again")


def load_unit(name: str) -> Unit:
    """The unit of this name. Raises ValueError for an unknown name."""
    if not isinstance(name, str) or name not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, found {name!r}; train the run again")
    return import_module(UNITS[name]).UNIT
