"""The training of LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710v4, section 4): layer dropout, and a loss at every
exit in turn. The common part of layerskip.py and dynamic_exit_layer.py.

Symbols:   l, a layer from 0 to L - 1; t, a step from 0 to T - 1; p_max, the largest dropout.
Dropout:   p(l, t) = S(t) D(l) p_max is the probability that an example skips layer l: x_{l+1} = x_l.
           D(l) = 2^(l / (L - 1)) - 1; S(t) = 1 (constant), or 2^(t / (T - 1)) - 1 (exponential).
Loss:      sum_l e~(t, l) CE(head(x_{l+1})), where e~ is C(t, l) e(l) over its sum, and
           e(l) = scale sum_{i <= l} i below the last layer, whose e is L - 1 + scale sum_{i <= L-2} i.
Curricula: C(t, l) is 1 or 0. Rotational: every R-th exit, shifted by one at each step. Gradual: from the last layer
           down, one more exit every T / 2L steps. The last exit always learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Adapt, Backbone
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.exits.row_exits import RunLayers
from mini_ee.lab.training.stages import Batch
from mini_ee.train import task_loss

RAMPS, CURRICULA = ("constant", "exponential"), ("rotational", "gradual")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    dropout: float = option(
        0.1, "dropout probability p_max of the last layer", flag="--layer-dropout", least=0, below=1
    )
    ramp: str = option("constant", "growth S of the dropout during training", choices=RAMPS)
    scale: float = option(1.0, "weight e_scale of the losses of the exits before the last", least=0)
    curriculum: str = option("rotational", "choice C of the exits that learn at a step", choices=CURRICULA)
    rotation: int | None = option(
        None,
        "distance R between the exits that learn at a step",
        least=1,
        default_text="one exit at a time, and the last",
        unused_when=("curriculum", "gradual"),
    )


# ---- The equations ----
def layer_dropout(layer: int, layers: int, batch: Batch, config: Config) -> float:
    """p(l, t) of a layer, counted from 0."""
    depth = 2 ** (layer / max(1, layers - 1)) - 1
    time = 2 ** (batch.step / max(1, batch.steps - 1)) - 1 if config.ramp == "exponential" else 1.0
    return time * depth * config.dropout


def exit_scale(exit: int, layers: int, scale: float) -> float:
    """e of the exit after `exit` layers: l = exit - 1.

    >>> [exit_scale(exit, 4, 0.5) for exit in (1, 2, 3, 4)]
    [0.0, 0.5, 1.5, 4.5]
    """
    if exit < layers:
        return scale * exit * (exit - 1) / 2
    return layers - 1 + scale * (layers - 1) * (layers - 2) / 2


def learning(exits: Sequence[int], batch: Batch, config: Config) -> list[bool]:
    """C(t, l) of every exit: whether it is trained at this step."""
    if config.curriculum == "rotational":
        every = config.rotation or max(1, len(exits) - 1)
        is_trained = [k % every == batch.step % every for k in range(len(exits))]
    else:
        is_trained = [batch.step >= (exits[-1] - layer) * batch.steps / (2 * exits[-1]) for layer in exits]
    return [*is_trained[:-1], True]


def exit_weights(exits: Sequence[int], batch: Batch, config: Config) -> list[float]:
    """e~(t, l) of every exit; their sum is 1. If all e are 0, as with a single layer, the last exit has weight 1."""
    scales = [exit_scale(layer, exits[-1], config.scale) for layer in exits]
    weights = [scale * is_trained for scale, is_trained in zip(scales, learning(exits, batch, config))]
    return [weight / sum(weights) for weight in weights] if sum(weights) else [0.0] * (len(exits) - 1) + [1.0]


def leaving_out(backbone: Backbone, batch: Batch, config: Config) -> RunLayers:
    """run_layers with layer dropout: at each layer a random part of the rows skips it."""
    layers = backbone.config.num_hidden_layers

    def run(hidden: Tensor, context: Any, start: int, stop: int, adapt: Adapt | None = None) -> Tensor:
        for layer in range(start, stop):
            computed = torch.rand(len(hidden)) >= layer_dropout(layer, layers, batch, config)
            if computed.all():
                hidden = backbone.run_layers(hidden, context, layer, layer + 1, adapt)
            elif computed.any():
                rows = computed.nonzero()[:, 0].to(hidden.device)
                some = backbone.run_layers(hidden[rows], context.keep(rows), layer, layer + 1, adapt)
                hidden = hidden.index_copy(0, rows, some)
        return hidden

    return run


def layerskip_loss(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """The weighted losses of the exits that learn at this step; the other heads are not computed."""
    states = model.states(*batch.inputs, run=leaving_out(model.backbone, batch, config))
    weights = exit_weights(model.exits, batch, config)
    learned = [(k, weight) for k, weight in enumerate(weights) if weight]
    return sum(weight * task_loss(model.classify(k, states[k]), batch.labels) for k, weight in learned)
