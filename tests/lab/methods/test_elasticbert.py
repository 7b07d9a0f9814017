"""ElasticBERT's recipe: gradient equilibrium against the gradient of each exit alone, and the rules of the paper."""

import numpy as np
import pytest
import torch
from conftest import tensors
from method_cases import LABELS, gradients, learner, of_exits  # noqa: F401  (learner is a fixture)

from mini_ee.lab.baselines.elasticbert import balanced, entropies_and_patiences, equilibrium_loss
from mini_ee.lab.rules import Patience, Threshold
from mini_ee.lab.training.stages import Batch


def apart(model, batch):
    """The gradient of every exit's loss alone, without a fork: a dict of parameters for each."""
    losses = (torch.nn.functional.cross_entropy(logits, batch.labels) for logits in model(*batch.inputs))
    return [gradients(loss, model) for loss in losses]


def test_a_layer_learns_from_the_mean_of_the_exits_above_it_and_a_head_from_its_own(learner):  # noqa: F811
    model, batch = learner
    gradient_of, exit_gradients = gradients(equilibrium_loss(model, batch), model), apart(model, batch)
    assert gradient_of.keys() == set().union(*exit_gradients)
    for name, gradient in gradient_of.items():
        kind, number, *_ = f"{name.removeprefix('backbone.')}.".split(".")
        if kind == "heads":
            expected = exit_gradients[int(number)][name]
        else:
            first = next(k for k, e in enumerate(model.exits) if e > int(number)) if number.isdigit() else 0
            above = range(first, len(model.exits))
            expected = sum(exit_gradients[k].get(name, torch.zeros_like(gradient)) for k in above) / len(above)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_unweighted_sum_and_equilibrium_changes_no_value(random_model, padded_inputs):
    model = random_model()
    inputs = tensors(padded_inputs)
    with torch.no_grad():
        plain, forked = model(*inputs), model(*inputs, fork=lambda k, hidden: balanced(k, hidden, 4))
    for one, other in zip(plain, forked):
        assert torch.equal(one, other)
    logits = torch.stack(plain, 1).double().numpy()
    expected = 0.0
    for row in range(7):
        for k in range(4):
            expected += (np.logaddexp.reduce(logits[row, k]) - logits[row, k, LABELS[row]]) / 7
    loss = equilibrium_loss(model, Batch(inputs, LABELS, None, None))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_row_leaves_by_entropy_or_patience_and_a_number_by_patience_alone():
    drawn = np.random.default_rng(0)
    rules = entropies_and_patiences(of_exits(drawn.normal(size=(30, 4, 3))))
    assert {rule.measure for rule in rules if isinstance(rule, Threshold)} == {"entropy"}
    assert (rules[0], rules[-1]) == (Patience(1), Patience(2))  # the rule itself comes first
    assert entropies_and_patiences(of_exits(drawn.normal(size=(30, 4, 1)))) == [Patience(1), Patience(2)]
