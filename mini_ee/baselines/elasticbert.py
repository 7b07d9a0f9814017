"""ElasticBERT's recipe (Liu et al. 2022, arXiv:2110.07038v2): all exits at once, with gradient equilibrium.

Their losses are summed without weights. A layer below j exits would get j gradients, and the first layers the most:
gradient equilibrium (Li et al. 2019) gives every layer the mean of the gradients of the exits at or above it, and
every head its own, whole. For exit i of n, from 0, the gradient of the state is multiplied by 1 / (n - i) where exit i
and the layers above it part, and that of the layers above, before they meet, by n - i - 1.

Rows leave where the entropy is low, or when several exits in a row agree; a regression by patience alone.

Deviations: 1. heads begin drawn, not from the poolers that the published checkpoint has for each layer; 2. the rates
are those that all systems share here (theirs: 2e-5, 5 epochs, decay .1, warm-up .06); 3. on tokens the layers learn
through adapters, and each of those gets the mean.
"""

import math
from functools import partial

from torch import Tensor, nn

from mini_ee.recording import Record
from mini_ee.rules import Patience, Rule, Threshold
from mini_ee.training.default_rule import sweep
from mini_ee.training.method import Method
from mini_ee.training.stages import Batch, joint_stage, task_loss


def rescaled(x: Tensor, factor: float) -> Tensor:
    """The same values; the gradient comes back times the factor."""
    fixed = x.detach()
    return fixed + (x - fixed) * factor


def balanced(k: int, hidden: Tensor, exits: int) -> tuple[Tensor, Tensor]:
    """What exit k of so many reads, and what the layers above it do: gradient equilibrium."""
    left = exits - k
    shared = rescaled(hidden, 1 / left)
    return shared, rescaled(shared, left - 1)


def equilibrium_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the exits' losses."""
    fork = partial(balanced, exits=len(model.exits))
    return sum(task_loss(logits, batch.labels) for logits in model(*batch.inputs, fork=fork))


def entropies_and_patiences(recorded: Record) -> list[Rule]:
    """The two rules of the paper; of numbers, which have no entropy, the second."""
    regression = recorded.logits.shape[2] == 1
    entropies = () if regression else (Threshold(math.inf, "entropy"),)
    return sweep(*entropies, Patience(1))(recorded)


METHOD = Method(
    recipe=lambda model, config: [joint_stage(model, name="equilibrium", loss=equilibrium_loss)],
    candidates=entropies_and_patiences,
    exits=None,
)
