"""The methods by their names on the command line: what is built, how it is trained, and the rules it is read with."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import nn

import mini_ee.methods.consistent as reinforce
import mini_ee.methods.lora_exits as loraexit
from mini_ee.baselines.berxit import BerxitExits, berxit
from mini_ee.baselines.fastbert import fastbert
from mini_ee.baselines.joint import joint
from mini_ee.baselines.multi_model import MultiModel, multi_model
from mini_ee.baselines.right_tool import right_tool
from mini_ee.baselines.sweet import sweet
from mini_ee.baselines.two_stage import two_stage
from mini_ee.methods.consistent import ConsistentEE, ConsistentExits
from mini_ee.methods.lora_exits import LoRAExits
from mini_ee.rules import Policy, Rule
from mini_ee.training.fit import Stage
from mini_ee.training.rule import Candidates, confident_patiences, cuts, patiences, thresholds
from mini_ee.units.rows import MultiExit


class System(NamedTuple):
    """How a system is trained and read."""

    recipe: Callable[[MultiExit], list[Stage]]
    candidates: Candidates  # of its default rule
    build: Callable[..., MultiExit] = MultiExit


OF_CLASSES = ("deebert", "fastbert", "right-tool", "pcee-bert")  # whose rules ask how sure an exit is

RECIPES = {"joint": joint, "two-stage": two_stage, "sweet": sweet}

SYSTEMS = {
    "deebert": System(two_stage, partial(thresholds, measure="entropy")),
    "fastbert": System(fastbert, partial(thresholds, measure="normalised_entropy")),
    "right-tool": System(right_tool, partial(thresholds, measure="max_probability")),
    "pabee": System(joint, patiences),
    "pcee-bert": System(joint, confident_patiences),
    "berxit": System(berxit, cuts, BerxitExits),
}

MODELS = {model.__name__: model for model in (MultiExit, LoRAExits, MultiModel, ConsistentExits, BerxitExits)}

EVERY_LAYER = ("joint", "two-stage", "consistent")  # have an exit after every layer by default, others four even ones

LORA_SHAPE = ("rank", "alpha", "targets")


class Method(NamedTuple):
    """How a method is trained and read."""

    recipe: Callable[[nn.Module], list[Stage]]
    candidates: Candidates | None = None  # of its curve, and of its default rule where it has no `rule`
    build: Callable[..., nn.Module] = MultiExit  # backbone, exits, num_labels, pool ->
    settings: dict = {}  # what recipe and build were made from
    rule: Rule | None = None  # that it is read with, where the paper says so


METHODS = {name: Method(recipe) for name, recipe in RECIPES.items()}

METHODS |= {name: Method(*system) for name, system in SYSTEMS.items()}

METHODS["multi-model"] = Method(multi_model, build=MultiModel)


def lora_exits(**settings) -> Method:
    """LoRAExit. settings: those of its Config."""
    config = loraexit.Config(**settings)
    shape = {name: getattr(config, name) for name in LORA_SHAPE}
    shape["targets"] = list(config.targets)  # as JSON has it
    return Method(partial(loraexit.recipe, config=config), None, partial(LoRAExits, **shape), vars(config) | shape)


def consistent(**settings) -> Method:
    """ConsistentEE. settings: those of reinforce.ConsistentEE."""
    how = ConsistentEE(**settings)
    return Method(partial(reinforce.recipe, how=how), cuts, ConsistentExits, vars(how), Policy())


CONFIGURED = {
    "lora-exits": (lora_exits, ("distill", "temperature", "weight", "t_squared", *LORA_SHAPE)),
    "consistent": (consistent, ("alpha", "reward", "estimator", "trajectories", "epsilon", "rounds")),
}
"""Methods with settings of their own: how to make them, and the settings' names."""


def candidates_of(name: str) -> Candidates | None:
    """The rules that a run of this method is read with, as `default_rule` takes them."""
    return METHODS[name].candidates if name in METHODS else cuts if name == "consistent" else None


def method_of(name: str, settings: dict) -> Method:
    """The method, with settings of its own. Raises ValueError for settings that it does not have or take."""
    make, known = CONFIGURED.get(name, (None, ()))
    foreign = [setting for setting in settings if setting not in known]
    if foreign:
        owners = [other for other, (_, theirs) in CONFIGURED.items() if set(foreign) <= set(theirs)]
        foreign = ["lambda" if setting == "weight" else setting for setting in foreign]
        raise ValueError(
            f"{name} has no setting {', '.join(foreign)}: that is for {' or '.join(owners) or 'no method'}"
        )
    return make(**settings) if make else METHODS[name]
