"""A method: its settings, its recipe, and the parts of a training that it replaces.

The file of a method ends with METHOD = Method(Config, recipe, ...), and registry.py names the file. From it follow
`mini-ee train NAME --help-all`, the checks of the settings, the run on disk, and the candidates for the default rule.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from mini_ee.lab.data.settings import Settings, check_options
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.registry import METHODS

if TYPE_CHECKING:
    from torch import nn

    from mini_ee.lab.training.default_rule import Candidates


@dataclass(frozen=True, kw_only=True)
class NoConfig(Settings):
    """The settings of a method that has none of its own."""


def joint_recipe(model: "nn.Module", config: Settings) -> list:
    """All exits at once, under Eq. 1 of ConsistentEE."""
    from mini_ee.lab.training.stages import (
        joint_stage,  # imported here because the rule of a method may run without torch
    )

    return [joint_stage(model)]


@dataclass(frozen=True)
class Method:
    """How a method is trained, and how its runs are read."""

    config: type = NoConfig  # a frozen dataclass whose fields are made with data.options.option
    recipe: Callable = joint_recipe
    """(model, config) -> the stages of training, a list or a generator (training/loop.py); not called if `train` or
    `search` is given."""
    units: tuple[str, ...] = ("rows", "tokens")  # what can exit; the first one if model and data fit several
    model: Callable | None = None
    """(backbone, exits, num_labels, pool, config) -> a model in place of the unit's own (run_folder.py)."""
    policy: Callable | None = None  # (width, exits) -> a module that decides at the exits, as RowExits takes it
    candidates: "Candidates | None" = None  # candidates for the default rule; None: thresholds
    exits: int | Callable[[int], tuple[int, ...]] | None = 4
    """The exits, if none are named: their number, evenly spread; None: one after every layer; or a function of the
    number of layers. Tokens always have four."""
    own_heads: bool = False  # on tokens its heads are part of the method, so --head does not replace them
    no_exit_0: str = ""  # why it cannot have an exit before the first layer; empty if it can
    keeps_model: bool = False
    """Nothing of the model is trained. On examples: its own classification head is the last exit, and its predictions
    are the labels. On embeddings: its own embedding is the last exit."""
    classes_only: bool = False  # it needs confidences or right predictions, which a regression does not have
    defaults: dict[str, dict] = field(default_factory=dict)
    """unit -> the method's own defaults of options; "built-in" -> those for a built-in model, on the first unit;
    "lens" -> those for tokens with such heads."""
    lacks: tuple[str, ...] = ()  # common options that have no effect with this method
    train: Callable | None = None  # (Request, say) -> Run, in place of the training loop (RAEE's collection)
    search: Callable | None = None
    """In place of a recipe: (model, train, held, config) changes the model and returns records like those of epochs."""
    controls: Callable | None = None
    """(rule, recorded, encoded, task, labels, batch_size, seed) -> {name: figures to compare the rule with}."""
    ablation: Callable | None = None  # the same arguments -> points of a sweep over settings of the method
    neighbours: Callable | None = None  # (rule, encoded, batch_size) -> a dict per row: its neighbours and their votes
    default_rule: Callable | None = None
    """Tokens: (model, Source, held) -> Chosen, in place of agreement_rule. Embeddings: (Record, least mean cosine) ->
    Rule, in place of a fixed depth."""
    trained_as: str = ""
    """A name that methods share if they are trained in the same way, and differ by their rules alone; by default the
    method's own. Not on tokens if it has defaults of its own there."""
    trains_encoder: bool = False
    """Embeddings: the encoder is trained, from pairs with scores or from its own embeddings; exits have no maps."""

    @property
    def has_stages(self) -> bool:
        """Whether the training loop trains it by a recipe."""
        return self.train is None and self.search is None


def load_method(name: str) -> Method:
    """The method of a name. Raises WrongArguments for an unknown name, or if Python does not find the file."""
    if name not in METHODS:
        raise WrongArguments(f"the method must be one of {', '.join(METHODS)}, got {name!r}")
    try:
        return import_module(METHODS[name]).METHOD
    except ModuleNotFoundError as error:
        if not METHODS[name].startswith(error.name):
            raise
        raise WrongArguments(
            f"the method {name} is in {METHODS[name]}, which Python does not find; "
            f"run python -m mini_ee in the folder that holds it, or name that folder in PYTHONPATH"
        ) from None


def configured(method: Method, settings: dict):
    """The method's Config with these settings. Raises WrongArguments for an unknown setting or an invalid value."""
    known = method.config.__dataclass_fields__
    foreign = [name for name in settings if name not in known]
    if foreign:
        raise WrongArguments(f"no such setting: {', '.join(foreign)}; this method has {', '.join(known) or 'none'}")
    try:
        config = method.config(**settings)
        check_options(config)  # also for a Config that does not derive from Settings
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    return config
