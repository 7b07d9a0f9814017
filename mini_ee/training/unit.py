"""What exits: an example ("rows"), an example read through a prompt ("prompts"), or a token ("tokens").

Each kind is one object, a Unit, which answers for itself; its file ends with UNIT, and registry.py names the file. The
name is `unit` in a run's config.json.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mini_ee.backbones.backbone import check_integer
from mini_ee.backbones.hub import write_tensors
from mini_ee.data.table_files import SUFFIXES
from mini_ee.data.tasks import TOY, Split
from mini_ee.data.values import shortened
from mini_ee.registry import UNITS


class TrainingData(NamedTuple):
    """What a training learns from, what it holds out, and what a resumed training compares."""

    train: Any
    held: Any
    more: Any  # what `conclude` needs besides: the examples that test the default rule, or where texts come from
    begun_with: dict


class Unit:
    """One kind of thing that exits. `request` is a training.train.Request."""

    name: str
    noun = "examples"  # in messages
    generates = False  # True if its models continue texts, and give no labels
    default_measure = "max_probability"  # confidence measure of a rule, if none is named
    reads_lm_head = True  # exits read the backbone's own head to words: a fine-tuned backbone is saved as a checkpoint
    built_in: Path  # the model, if none is named
    built_in_defaults: dict = {}
    options: tuple[type, ...]  # settings of every training, and those that say where the data comes from
    task_help = ""  # of --task
    options_help = ""  # of the options beside those of every training

    # ---- What is asked for ----
    def wants(self, model_type: str | None, task) -> bool:
        """Whether this model (None: it is not a checkpoint) and this task are for these, or leave it open."""
        return False

    def check_source(self, model: Path | None, model_type: str | None, task) -> None:
        """Raise WrongArguments for a model or a task that these cannot be trained on."""

    def implied(self, task) -> dict:
        """Defaults that follow from the name of the task."""
        return {}

    def opened(self, request, task, source):
        """The request with its data, checked as far as no model is needed. source: the last of `options`."""
        raise NotImplementedError

    def exit_count(self, method) -> int | None:
        """How many exits, if none are named."""
        return method.exits

    def with_last(self, exits: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
        """The exits that were named, with the last one if it is always there."""
        return exits

    # ---- Training ----
    def about(self, request) -> dict:
        """What config.json contains about a training on these."""
        raise NotImplementedError

    def training_settings(self, request) -> dict:
        """What its key `training` contains besides steps and rates."""
        return {}

    def head_settings(self, request, backbone) -> dict:
        """How exits are read: `pool` and `head`."""
        return {"pool": None, "head": None}

    def max_length(self, request, backbone) -> int | None:
        """Tokens after which a text is cut; None: it is not cut."""
        return None

    def data(self, request, backbone, tokenizer, about: dict, say: Callable[[str], None]) -> TrainingData:
        """Everything that a training reads."""
        raise NotImplementedError

    def conclude(self, request, model: nn.Module, fitted, data: TrainingData) -> tuple:
        """(Chosen, metrics): the default rule, and what metrics.json contains. fitted: training.loop.Fitted."""
        raise NotImplementedError

    # ---- A run ----
    def build(self, method, backbone, exits: tuple[int, ...], config: dict) -> nn.Module:
        """The model of a method that has none of its own."""
        raise NotImplementedError

    def shape(self, config: dict) -> tuple[int, str | None]:
        """(num_labels, pool), as a method's own model takes them."""
        return 1, None

    def saved(self, folder: Path, model: nn.Module, tokenizer) -> tuple[dict, dict[str, str]]:
        """Write what was trained. Returns what config.json contains of it, and the checksums of the files."""
        return {}, {"model.safetensors": write_tensors(folder / "model.safetensors", model.own_state())}

    def backbone_changed(self, model: nn.Module, about: dict) -> bool:
        """Whether the run has to contain the backbone."""
        return model.holds_backbone

    def check(self, config: dict) -> None:
        """Raise ValueError for values of config.json that nothing else checks before they are used."""

    def read(self, folder: Path, config: dict, backbone_folder) -> tuple:
        """(model, tokenizer) of a run."""
        raise NotImplementedError

    def held_out(self, run, task) -> Split | None:
        """The examples of a task that a training.run_folder.Run held out; None if they are not known."""
        return None


def is_labelled(task) -> bool:
    """Whether this names a task, whose examples have labels."""
    return task is not None and (str(task) == TOY or Path(task).is_dir() or Path(task).suffix.lower() in SUFFIXES)


def check_labelled(config: dict) -> None:
    """Raise ValueError for a config.json of examples with labels whose values make no sense."""
    names = config["task"]["label_names"]
    check_integer("max_length", config["max_length"])
    check_integer("texts", config["task"]["texts"], most=2)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"label_names must be a list of names, found {shortened(names)}; train the run again")


def load_unit(name: str) -> Unit:
    """The kind of this name. Raises ValueError if there is none."""
    if not isinstance(name, str) or name not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, found {name!r}; train it again")
    return import_module(UNITS[name]).UNIT
