"""Self-supervised exits (Valade 2024, arXiv:2407.21082v1): heads of a frozen decoder learn what it predicts itself.

The paper, its equations and the prompts of Table 1: mini_ee/self_supervised.py. Here they train the heads of every
decoder of the lab: with either target, from copies or from scratch, with the measures of Fig. 1 on the way. The
classifiers of `mini-ee add-exits` learn by Eq. 1 too (training/kept_model.py).

Symbols:   penalty: lambda of Eq. 1; init: "scratch" initialises the norm and the linear map of a head at random, "copy"
           copies those of the LM head. results/self-supervised.md compares the settings.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.exits.heads import INITS
from mini_ee.lab.exits.row_exits import States
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.kept_model import kept_model_stage
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage
from mini_ee.lab.training.training_text import Source, agreement_rule, texts_to_calibrate
from mini_ee.self_supervised import CALIBRATION_PROMPTS, LAMBDA, entropy, head_loss

HEAD_TARGETS = ("soft", "hard")
SPARSE = 64  # most likely tokens of the full model, from which lenses learn
SPARSE_BATCH = 512  # tokens
LEAST_REST = 1e-6  # of a head's probability of all other tokens, so that its logarithm is finite
WATCHED = 1024  # tokens from which the measures of Fig. 1 are computed, of lenses: the vocabulary is large


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    penalty: float = option(
        LAMBDA, "weight lambda of the entropy in Eq. 1; the paper tries 0, .1 and .95", flag="--lambda", least=0, most=1
    )
    target: str = option(
        "hard",
        "target of the heads: the model's most likely token (hard), or its probabilities (soft)",
        choices=HEAD_TARGETS,
    )
    init: str = option(
        "copy", "initial weights of the heads: copies of the LM head (copy), or random (scratch)", choices=INITS
    )


# ---- Training ----


def recipe(model: TokenExits, config: Config) -> list[Stage]:
    """All heads at once, by Eq. 1. On tokens the measures of Fig. 1 are recorded during training."""
    if model.unit == "rows":
        return [kept_model_stage(model, partial(head_loss, penalty=config.penalty, target=config.target))]
    training = {"loss": partial(heads_loss, config=config), "log_metrics": metrics}
    if model.head == "lens":
        training = {"loss": partial(sparse_loss, config=config), "log_metrics": partial(metrics, most=WATCHED)}
        training |= {"on_states": True, "make_targets": sparse_targets}
    return [
        Stage(
            name="heads",
            trainable=lambda name: name.startswith("heads."),
            **training,
            score=lambda scores: float(np.mean(scores[:-1])),
            settings={"weight_decay": 0.0},
        )
    ]


def heads_loss(model: TokenExits, batch: Batch, config: Config) -> Tensor:
    """The sum over heads of the mean of Eq. 1 over all positions. The decoder is the teacher: no label is needed."""
    *each_logits, full = model(*batch.inputs)
    return sum(head_loss(logits, full, config.penalty, config.target).mean() for logits in each_logits)


@torch.no_grad()
def sparse_targets(model: TokenExits, data: States) -> Tensor:
    """(N, 2, S) float32: the S = SPARSE most likely next tokens by the full model, and their probabilities."""
    device, targets = next(model.parameters()).device, []
    for rows in np.array_split(np.arange(len(data)), -(-len(data) // SPARSE_BATCH)):
        *_, last = data.batch(rows, device)[0]
        top = model.classify(len(model.heads), last).softmax(-1).topk(min(SPARSE, model.num_labels))
        targets.append(torch.stack((top.indices.float(), top.values), dim=1).cpu())  # exact up to 2^24 words
    return torch.cat(targets)


def sparse_loss(model: TokenExits, batch: Batch, config: Config) -> Tensor:
    """`heads_loss` of states, without a product of the teacher with the vocabulary: Eq. 1 over S + 1 outcomes.

    These are the S most likely tokens, and that it is another one. The entropy is that of the whole vocabulary.
    """
    assert batch.states is not None and batch.targets is not None
    ids, p = batch.targets[:, 0].long(), batch.targets[:, 1]
    rest = torch.zeros_like(p[:, :1]) if config.target == "hard" else (1 - p.sum(1, keepdim=True)).clamp(min=0)
    full, total = torch.cat((p, rest), dim=1).log(), 0.0
    for k in range(len(model.heads)):
        log_p = model.classify(k, batch.states[k]).log_softmax(-1)
        some = log_p.gather(1, ids)
        other = torch.log1p(-some.exp().sum(1, keepdim=True).clamp(max=1 - LEAST_REST))
        loss = head_loss(torch.cat((some, other), dim=1), full, target=config.target).mean()
        if config.penalty:
            loss = (1 - config.penalty) * loss - config.penalty * entropy(log_p).mean()
        total = total + loss
    return total


@torch.no_grad()
def metrics(
    model: TokenExits, held_out: TextData, batch_size: int = 16, most: int | None = None
) -> dict[str, list[float]]:
    """The measures of Fig. 1 for every head, over all positions: `agreement`, the share of predictions equal to those
    of the full model, and the mean `entropy` in nats. most: number of tokens; None: all.
    """
    held_out = held_out if most is None else held_out.first(most)
    positions, totals = 0, np.zeros((2, len(model.heads)))
    for states, labels in held_out.state_batches(model, batch_size):
        *each_state, last = states.unbind(dim=1)
        predictions = model.classify(len(model.heads), last).argmax(-1)
        positions += len(labels)
        for k, state in enumerate(each_state):
            logits = model.classify(k, state)
            totals[0, k] += float((logits.argmax(-1) == predictions).sum())
            totals[1, k] += float(entropy(logits.log_softmax(-1)).sum())
    return dict(zip(("agreement", "entropy"), (totals / positions).tolist()))


# ---- Section 3.3.1: thresholds ----


def calibrated_rule(model: TokenExits, source: Source, held_out: TextData) -> Chosen:
    """$tau_k$ of every head: the lowest confidence $c_k$ (Eq. 2) from which on a share $epsilon$ of the tokens of $D_c$
    agrees with the full model ($t_k$, Eq. 3). calibrate.tau of the core computes it.

    The confidence is breaking ties, $p_{(1)} - p_{(2)}$, and epsilon is .95. Half of the texts determine tau_k; on the
    other half the agreement is measured. A model that learned from stories is calibrated on held-out stories, one with
    lenses that learned from a file on held-out pieces of it: a large model writes D_c for hours.
    """
    if source.options.kind == "pieces" and not (model.gated and source.options.text):
        held_out = TextData(calibration_texts(source), every=True)
    return agreement_rule(model, source, held_out)


def calibration_texts(source: Source) -> list[Text]:
    """D_c: the model generates it from the prompts of Table 1, even if it learned from a file or from other prompts.

    The number and the length of the texts are those of the training, unless that is impossible (fewer than 2 texts, or
    more tokens than fit): the training is over by now and must not fail.
    """
    options, prompts = source.options, [*map(source.tokenizer.ids_of, CALIBRATION_PROMPTS)]
    texts = options.texts and max(2, options.texts)
    new_tokens = options.new_tokens and min(options.new_tokens, max(1, source.backbone.room(prompts)))
    from_prompts = replace(options, text=None, prompt=None, greedy=False, texts=texts, new_tokens=new_tokens)
    return texts_to_calibrate(source._replace(options=from_prompts))


# ---- The method ----


def build(backbone: nn.Module, exits: tuple[int, ...], num_labels: int, pool: str | None, config: Config) -> nn.Module:
    """Heads on the frozen model: on a decoder's tokens without adapters, or on the examples of a classifier."""
    if pool is not None:
        return FrozenClassifier(backbone, exits, num_labels, pool)
    return TokenExits(backbone, exits, config.init)


def regular_exits(num_layers: int) -> tuple[int, ...]:
    """Section 4: heads after 6, 12, 18 and 24 of 32 layers, here in proportion, and the LM head.

    >>> regular_exits(32), regular_exits(8)
    ((6, 12, 18, 24, 32), (2, 3, 4, 6, 8))
    """
    heads = {round(num_layers * share / 16) for share in (3, 6, 9, 12)} - {0}
    return (*sorted(heads - {num_layers}), num_layers)


METHOD = Method(
    Config,
    recipe,
    units=("tokens", "rows"),
    model=build,
    exits=regular_exits,
    default_rule=calibrated_rule,
    defaults={
        "tokens": {"head_lr": 1e-2, "epochs": 20, "kind": "pieces", "rank": None},
        "rows": {"target": "soft", "head_lr": 1e-3, "epochs": 20},
        "built-in": {"exits": (4, 8, 12), "epochs": 8, "texts": 512},
        "lens": {"epochs": 1, "target": "soft"},
    },
    keeps_model=True,
    lacks=("lr", "rank", "weight_decay"),
)
