"""The methods by their names on the command line: what is built, how it is trained, and the rules it is read with."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import nn

from mini_ee import reinforce, segd
from mini_ee.baselines import RECIPES, SYSTEMS, BerxitExits, cuts
from mini_ee.evaluation import Candidates
from mini_ee.exits import MultiExit
from mini_ee.fitting import Stage
from mini_ee.lora_exits import LoRAExits, check_lora
from mini_ee.multi_model import MultiModel, multi_model
from mini_ee.reinforce import ConsistentEE, ConsistentExits
from mini_ee.rules import Policy, Rule
from mini_ee.segd import Distillation

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
    """LoRAExit. settings: those of segd.Distillation, and rank, alpha, targets of LoRAExits."""
    shape = {name: settings.pop(name) for name in LORA_SHAPE if name in settings}
    check_lora(**shape)
    how = Distillation(**settings)
    return Method(partial(segd.recipe, how=how), None, partial(LoRAExits, **shape), vars(how) | shape)


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
