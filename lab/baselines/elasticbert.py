"""ElasticBERT (Liu et al. 2022, arXiv:2110.07038v2): all exits at once, with gradient equilibrium.

The losses of the exits are summed without weights. A layer below j exits would get the sum of j gradients, and the
first layers the most. Gradient equilibrium (Li et al. 2019) gives each layer the mean of the gradients of the exits at
or above it; each head gets its full gradient. At exit i of n (from 0) the state goes to the head and to the layers
above: its gradient is multiplied by 1 / (n - i), and before that the part from the layers above by n - i - 1.

An example exits if the entropy is low, or if consecutive exits agree; a regression by patience only.

Deviations: 1. heads are initialised at random, not from the poolers that the published checkpoint has for each layer;
2. learning rates and epochs are those that all systems share here (theirs: 2e-5, 5 epochs, decay .1, warm-up .06);
3. on tokens the layers learn through adapters, whose gradient is the mean.
"""

import math
from functools import partial

from torch import Tensor, nn

from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Patience, Rule, Threshold
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, joint_stage
from mini_ee.train import task_loss


def rescaled(x: Tensor, factor: float) -> Tensor:
    """The same values; the gradient is multiplied by the factor."""
    fixed = x.detach()
    return fixed + (x - fixed) * factor


def balanced(k: int, hidden: Tensor, exits: int) -> tuple[Tensor, Tensor]:
    """Gradient equilibrium at exit k: the state for its head, and the state for the layers above. exits: n."""
    remaining = exits - k
    shared = rescaled(hidden, 1 / remaining)
    return shared, rescaled(shared, remaining - 1)


def equilibrium_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses of the exits, with gradient equilibrium."""
    fork = partial(balanced, exits=len(model.exits))
    return sum(task_loss(logits, batch.labels) for logits in model(*batch.inputs, fork=fork))


def entropies_and_patiences(recorded: Record) -> list[Rule]:
    """The two rules of the paper; for a regression, which has no entropy, only patience."""
    regression = recorded.logits.shape[2] == 1
    entropies = () if regression else (Threshold(math.inf, "entropy"),)
    return sweep(*entropies, Patience(1))(recorded)


METHOD = Method(
    recipe=lambda model, config: [joint_stage(model, name="equilibrium", loss=equilibrium_loss)],
    candidates=entropies_and_patiences,
    exits=None,
)
