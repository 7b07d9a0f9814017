"""Models, records and batches that the tests of several methods share."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BAD, GOOD, THINGS, random_decoder, tensors

from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export import add_exits
from mini_ee.lab.methods.self_supervised import METHOD
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.training.policies import OneForAll
from mini_ee.lab.training.stages import Batch

GOLDEN = Path(__file__).parents[2] / "golden"
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0])
TEXTS = [
    f"{'very ' * (number % 2)}{first} {thing} is {second}"
    for number, (thing, first, second) in enumerate(product(THINGS, GOOD + BAD, GOOD + BAD))
]
"""Texts without labels, for `add_exits`."""
SEGMENTS = {
    "equal": [5, 5, 5],
    "ragged": [1, 7, 3],
    "empty first": [0, 4, 2],
    "empty last": [4, 2, 0],
    "all in one": [0, 9, 0],
    "no rows": [0, 0, 0],
    "one segment": [6],
}


@pytest.fixture(scope="module", autouse=True)
def few_epochs_and_no_picture():
    """`add_exits` trains its heads for fewer epochs than by default, and draws no curve."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(add_exits, "can_draw", lambda: False)
        patch.setitem(METHOD.defaults["rows"], "epochs", 12)
        yield


def gradients(loss, model):
    """Of every parameter that the loss reaches."""
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    derivatives = torch.autograd.grad(loss, list(learning.values()), retain_graph=True, allow_unused=True)
    return {name: gradient for name, gradient in zip(learning, derivatives) if gradient is not None}


@pytest.fixture(params=["rows", "tokens"])
def learner(request, random_model, padded_inputs):
    """(model, batch): a classifier that learns as a whole, and a decoder with heads and adapters."""
    if request.param == "rows":
        return random_model(), Batch(tensors(padded_inputs), LABELS, None, None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TokenExits(random_decoder("llama", 6), (1, 2, 4, 6), rank=2).eval()
        for parameter in model.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.from_numpy(padded_inputs.input_ids)
    counted = torch.from_numpy(padded_inputs.attention_mask).bool()
    return model, Batch((ids, counted), ids[counted], None, None)


def of_exits(logits, exit_logits=None):
    """A record of logits (N, K, C)."""
    exits, measures = tuple(range(1, logits.shape[1] + 1)), {} if exit_logits is None else {"exit_logit": exit_logits}
    return Record(Recorded(exits, logits, np.zeros((*logits.shape[:2], 2)), [1] * len(exits), measures), logits, 1.0)


def calm_model(kind="llama", exits=(1, 2, 3)):
    """Heads and classifier drawn wide, so that exits differ and tokens leave at all of them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TokenExits(load_backbone(GOLDEN / kind), exits, policy=OneForAll)
        with torch.no_grad():
            for head in model.heads:
                head.linear.weight.normal_(std=0.3)
            model.policy.linear.weight.normal_(std=0.3)
    return model.eval()


def calm_texts(count=12, tokens=9):
    random = np.random.default_rng(0)
    return [Text(random.integers(0, 40, tokens).tolist(), 2) for _ in range(count)]


def each_exit_alone(model, inputs, exit_of_row):
    """Each exit's rows, run as a batch of their own."""
    logits = np.empty((len(inputs), model.num_labels), np.float32)
    for k in set(exit_of_row):
        rows = np.flatnonzero(np.array(exit_of_row) == k)
        with torch.no_grad():
            logits[rows] = model.logits_of(k, *tensors(inputs.take(rows))).numpy()
    return logits


def segments_of(lengths, rank=8, inputs=12, outputs=10, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)
    n, rows = len(lengths), sum(lengths)

    def draw(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    starts = [0, *np.cumsum(lengths).tolist()]
    return draw(rows, inputs), draw(n, inputs, rank), draw(n, rank, outputs), starts


def zeros(x, B):
    return x.new_zeros(len(x), B.shape[2])
