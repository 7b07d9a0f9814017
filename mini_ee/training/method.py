"""What a method is: its settings, its recipe, and what of the rest is its own.

A method's file ends with METHOD = Method(Config, recipe, ...), and registry.py names the file. Everything else is made
from that: `mini-ee train NAME --help`, the checks of its settings, the run on disk, and the rules that it is read with.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

from mini_ee.data.settings import Settings, check_options
from mini_ee.errors import WrongArguments
from mini_ee.registry import METHODS
from mini_ee.training.default_rule import Candidates


@dataclass(frozen=True, kw_only=True)
class NoConfig(Settings):
    """The settings of a method that has none of its own."""


def joint_recipe(model, config) -> list:
    """All exits at once, under Eq. 1 of ConsistentEE."""
    from mini_ee.training.stages import joint_stage  # no torch at once: the rule of a method may run without it

    return [joint_stage(model)]


@dataclass(frozen=True)
class Method:
    """How a method is trained and read."""

    config: type = NoConfig  # a frozen dataclass whose fields are made with data.options.option
    recipe: Callable = joint_recipe
    """(model, config) -> the stages of training, a list or a generator (training/loop.py); not called if `train` or
    `search` is given."""
    units: tuple[str, ...] = ("rows", "tokens")  # what can leave; the first where the model and data leave it open
    model: Callable | None = None
    """(backbone, exits, num_labels, pool, config) -> a model in place of the unit's own (registry.UNITS)."""
    policy: Callable | None = None  # (width, exits) -> a module that decides at the exits, as RowExits takes it
    candidates: Candidates | None = None  # rules among which the default one is chosen; thresholds where it is None
    exits: int | Callable[[int], tuple[int, ...]] | None = 4
    """Where none are named: of rows so many, evenly spread, or None: after every layer; of tokens four. Or a
    function of the number of layers."""
    classes_only: bool = False  # it asks how sure or how right an exit is, which a regression's is not
    defaults: dict[str, dict] = field(default_factory=dict)
    """unit -> its own defaults of whatever option; under "built-in" those of the first, for a built-in model."""
    lacks: tuple[str, ...] = ()  # options of every training that make no sense for this one
    train: Callable | None = None  # (Request, say) -> Run: a training of its own kind (RAEE's collection)
    search: Callable | None = None
    """In place of a recipe: (model, train, held, config) changes the model; returns records as of epochs."""
    controls: Callable | None = None
    """(rule, recorded, encoded, task, labels, batch_size, seed) -> name -> what must stand beside its rule's figure."""
    ablation: Callable | None = None  # the same -> points: its figure over its settings, in place of a sweep
    neighbours: Callable | None = None  # (rule, encoded, batch_size) -> a dict a row: what its rule plans by
    default_rule: Callable | None = None  # of tokens: (model, Source, held) -> Chosen, in place of training.texts' own

    @property
    def has_stages(self) -> bool:
        """Whether the training loop trains it, by its recipe."""
        return self.train is None and self.search is None


def load_method(name: str) -> Method:
    """The method of a name. Raises WrongArguments where there is none, and where Python does not find its file."""
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
    """The method's Config with these settings. Raises WrongArguments for one that it does not have, or take."""
    known = method.config.__dataclass_fields__
    foreign = [name for name in settings if name not in known]
    if foreign:
        raise WrongArguments(f"no such setting: {', '.join(foreign)}; this method has {', '.join(known) or 'none'}")
    try:
        config = method.config(**settings)
        check_options(config)  # of one that derives from nothing of ours, too
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    return config
