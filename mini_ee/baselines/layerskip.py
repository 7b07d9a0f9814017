"""LayerSkip: layers are left out at random, and exits learn in turns, so that one head reads every layer.

Paper: Mostafa Elhoushi et al., LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding, ACL 2024,
arXiv:2404.16710v4, section 4. Its third part, self-speculative decoding, is exits/generation.generate_lossless: an exit
drafts, the layers above verify, both on one cache. `mini-ee generate RUN --lossless --layer E --draft N`.

Symbols:   l, a layer from 0 to L - 1; t, a step from 0 to T - 1; p_max, the largest dropout.
Dropout:   p(l, t) = S(t) D(l) p_max is the chance that a row passes over layer l: x_{l+1} = x_l.
           D(l) = 2^(l / (L - 1)) - 1; S(t) = 1 (constant), or 2^(t / (T - 1)) - 1 (exponential).
Loss:      sum_l e~(t, l) CE(head(x_{l+1})), where e~ is C(t, l) e(l) over its sum, and
           e(l) = scale sum_{i <= l} i below the last layer, whose e is L - 1 + scale sum_{i <= L-2} i.
Curricula: C(t, l) is 1 or 0. Rotational: every R-th exit, the next ones at the next step. Gradual: from the last layer
           down, one more every T / 2L steps. The last exit always learns.
The head is the decoder's own, behind its final norm. All weights learn.

Deviations: 1. the paper gives every layer a loss, here the exits have one (`--exits 1,2,...` for all of them), and R
counts exits; the first layer's e is 0 as printed; 2. rows have a head of their own at each exit, and nobody to draft
for; 3. defaults are those that the paper names for fine-tuning, but for rate and length of the training; 4. a draft
ends early where the exit is unsure (generate_lossless, confidence_threshold).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.data.options import Settings, option
from mini_ee.exits.decoding import gather
from mini_ee.exits.generation import generate_lossless
from mini_ee.exits.rows import RowExits, RunLayers
from mini_ee.exits.tokens import SharedExits, TextData
from mini_ee.training.default_rule import Chosen
from mini_ee.training.method import Method
from mini_ee.training.stages import Batch, Stage, joint_stage, task_loss
from mini_ee.training.texts import Source, agreement_rule

RAMPS, CURRICULA = ("constant", "exponential"), ("rotational", "gradual")
DRAFTED_TEXTS = 16  # by each exit, where a training ends


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    dropout: float = option(0.1, "p_max, of the last layer", flag="--layer-dropout", least=0, below=1)
    ramp: str = option("constant", "S: how the dropout grows over time", choices=RAMPS)
    scale: float = option(1.0, "e_scale, of the losses of the exits below the last", least=0)
    curriculum: str = option("rotational", "C: which exits learn at a step", choices=CURRICULA)
    rotation: int | None = option(
        None, "R; else one exit below the last learns at a time", least=1, unused_when=("curriculum", "gradual")
    )


# ---- The equations ----
def layer_dropout(layer: int, layers: int, batch: Batch, config: Config) -> float:
    """p(l, t) of a layer, from 0."""
    depth = 2 ** (layer / max(1, layers - 1)) - 1
    time = 2 ** (batch.step / max(1, batch.steps - 1)) - 1 if config.ramp == "exponential" else 1.0
    return time * depth * config.dropout


def exit_scale(exit: int, layers: int, scale: float) -> float:
    """e of the exit after so many layers: l = exit - 1.

    >>> [exit_scale(exit, 4, 0.5) for exit in (1, 2, 3, 4)]
    [0.0, 0.5, 1.5, 4.5]
    """
    if exit < layers:
        return scale * exit * (exit - 1) / 2
    return layers - 1 + scale * (layers - 1) * (layers - 2) / 2


def learning(exits: Sequence[int], batch: Batch, config: Config) -> list[bool]:
    """C(t, l) of every exit."""
    if config.curriculum == "rotational":
        every = config.rotation or max(1, len(exits) - 1)
        learns = [k % every == batch.step % every for k in range(len(exits))]
    else:
        learns = [batch.step >= (exits[-1] - layer) * batch.steps / (2 * exits[-1]) for layer in exits]
    return [*learns[:-1], True]


def exit_weights(exits: Sequence[int], batch: Batch, config: Config) -> list[float]:
    """e~(t, l) of every exit: their sum is 1. A single layer has no e but 0, and learns all the same."""
    scales = [exit_scale(layer, exits[-1], config.scale) for layer in exits]
    weights = [scale * learns for scale, learns in zip(scales, learning(exits, batch, config))]
    return [weight / sum(weights) for weight in weights] if sum(weights) else [0.0] * (len(exits) - 1) + [1.0]


def leaving_out(backbone, batch: Batch, config: Config) -> RunLayers:
    """The layers, each of which some rows pass over."""
    layers = backbone.config.num_hidden_layers

    def run(hidden: Tensor, context, start: int, stop: int, adapt=None) -> Tensor:
        for layer in range(start, stop):
            drawn = torch.rand(len(hidden)) >= layer_dropout(layer, layers, batch, config)
            if drawn.all():
                hidden = backbone.run_layers(hidden, context, layer, layer + 1, adapt)
            elif drawn.any():
                rows = drawn.nonzero()[:, 0].to(hidden.device)
                some = backbone.run_layers(hidden[rows], context.keep(rows), layer, layer + 1, adapt)
                hidden = hidden.index_copy(0, rows, some)
        return hidden

    return run


def layerskip_loss(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """The weighted losses of the exits whose turn it is; the others' heads are not read."""
    states = model.states(*batch.inputs, run=leaving_out(model.backbone, batch, config))
    weights = exit_weights(model.exits, batch, config)
    told = [(k, weight) for k, weight in enumerate(weights) if weight]
    return sum(weight * task_loss(model.classify(k, states[k]), batch.labels) for k, weight in told)


# ---- Training ----
def build(backbone, exits: tuple[int, ...], num_labels: int, pool: str | None, config: Config) -> nn.Module:
    """A decoder whose head reads every exit, or a classifier, which has a pool."""
    return SharedExits(backbone, exits) if pool is None else RowExits(backbone, exits, num_labels, pool)


def recipe(model: nn.Module, config: Config) -> list[Stage]:
    """All at once."""
    return [joint_stage(model, name="layerskip", loss=partial(layerskip_loss, config=config))]


def drafting_rule(model: SharedExits, source: Source, held: TextData) -> Chosen:
    """Thresholds at which tokens agree with the last exit; and what each exit drafts of the full model's own text."""
    chosen, texts = agreement_rule(model, source, held), held.texts[:DRAFTED_TEXTS]
    prompts, drafts = [text.ids[: text.start + 1] for text in texts], []
    for layer, head in zip(model.exits, model.heads):
        settings = {"max_new_tokens": source.follow, "exit_layer": layer, "head": head}
        written = gather(generate_lossless(model.backbone, prompts, **settings), len(prompts))
        drafts.append(float(np.mean([each == layer for text in written for each in text.layers_run])))
    shares = ", ".join(f"layer {layer} {share:.0%}" for layer, share in zip(model.exits, drafts))
    said = f"Of the full model's own text (--lossless) its exits draft so much: {shares}."
    return chosen._replace(about=chosen.about | {"drafts": drafts, "promised": said})


METHOD = Method(
    Config,
    recipe,
    units=("tokens", "rows"),
    model=build,
    default_rule=drafting_rule,
    defaults={"tokens": {"lr": 1e-3, "rank": None}, "built-in": {"texts": 1000}},
    lacks=("rank",),
)
