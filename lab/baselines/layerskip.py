"""LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710v4): layer dropout, and a loss at every exit in turn.

Paper: Mostafa Elhoushi et al., LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding, ACL 2024,
arXiv:2404.16710v4, section 4. One head can read every layer then. The third part of the paper, self-speculative
decoding, is exits/lossless.generate_lossless: an exit drafts tokens and the layers above verify them, on one cache.
The command is `mini-ee generate RUN --lossless --layer E --draft N`.

The equations of the dropout and the losses are in layer_dropout.py, with their symbols: a layer is skipped with a
probability that grows with its depth, and in each step some exits learn, with weights that grow with their depth.
The head is the LM head of the decoder, after its final norm. All weights learn.

Deviations: 1. in the paper every layer has a loss; here only exits have one (`--exits 1,2,...` for all layers), and R
counts exits; e of the first layer is 0 as printed; 2. on examples each exit has its own head, and nothing is drafted;
3. defaults are the paper's for fine-tuning, except for learning rate and epochs; 4. a draft ends early if the exit is
not confident (generate_lossless, confidence_threshold).
"""

from functools import partial
from typing import Any

import numpy as np
from torch import nn

from mini_ee.lab.baselines.layer_dropout import Config, layerskip_loss
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.lossless import generate_lossless
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.exits.token_exits import SharedExits, TextData
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Stage, joint_stage
from mini_ee.lab.training.training_text import Source, agreement_rule

DRAFTED_TEXTS = 16  # number of texts that each exit drafts at the end of a training


# ---- Training ----
def build(backbone: Any, exits: tuple[int, ...], num_labels: int, pool: str | None, config: Config) -> nn.Module:
    """A decoder whose head reads every exit, or a classifier if there is a pool."""
    return SharedExits(backbone, exits) if pool is None else RowExits(backbone, exits, num_labels, pool)


def recipe(model: nn.Module, config: Config) -> list[Stage]:
    """One stage: everything is trained at once."""
    return [joint_stage(model, name="layerskip", loss=partial(layerskip_loss, config=config))]


def drafting_rule(model: SharedExits, source: Source, held_out: TextData) -> Chosen:
    """Thresholds at which tokens agree with the last exit; the share of the full model's text that each exit drafts."""
    chosen, texts = agreement_rule(model, source, held_out), held_out.texts[:DRAFTED_TEXTS]
    prompts, drafts = [text.ids[: text.start + 1] for text in texts], []
    for layer, head in zip(model.exits, model.heads):
        settings = {"max_new_tokens": source.follow, "exit_layer": layer, "head": head}
        written = gather(generate_lossless(model.backbone, prompts, **settings), len(prompts))
        drafts.append(float(np.mean([depth == layer for text in written for depth in text.layers_run])))
    shares = ", ".join(f"layer {layer} {share:.0%}" for layer, share in zip(model.exits, drafts))
    message = f"Share of the full model's text (--lossless) that each exit drafts: {shares}."
    return chosen._replace(metrics=chosen.metrics | {"drafts": drafts, "guaranteed": message})


METHOD = Method(
    Config,
    recipe,
    units=("tokens", "rows"),
    model=build,
    no_exit_0="its loss would have the weight 0 there",
    default_rule=drafting_rule,
    defaults={"tokens": {"lr": 1e-3, "rank": None}, "built-in": {"texts": 1000}},
    lacks=("rank",),
)
