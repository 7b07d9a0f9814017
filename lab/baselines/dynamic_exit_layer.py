"""DEL (Entezari Zarch et al. 2025, arXiv:2504.05598v2): the context chooses the exit that drafts, and for how long.

Paper: Hossein Entezari Zarch et al., DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding,
COLM 2025, arXiv:2504.05598v2. Details are from its code, github.com/hoenza/DEL (its copy 359171110/DEL at 0365a81).

DEL decodes a model that LayerSkip trained: the training is in layer_dropout.py. The text is the full model's, and the
command is `mini-ee generate RUN --lossless`; with `--layer E` the exit E always drafts, as in LayerSkip.

Symbols:   l, an exit's layer; L, the number of layers; d, the number of drafts of a round; E, the exit that drafts.
Shadows:   after a round the head reads the states of every exit l at the last accepted token and at all right drafts.
           An exit's token there is matched if it is that of the full model. Its confidence is its probability.
alpha_l:   the share of matched tokens of exit l. Both counts are multiplied by omega = .95 before a round adds to them.
tau_l:     the mean of two averages: the confidence of matched tokens, and that of the others, decayed in the same way.
TPL:       tokens per layer that is loaded, TPL(l, d) = (1 + alpha_l + ... + alpha_l^d) / (d l + L).
Round:     E and d maximise TPL. E drafts up to 18 tokens; the first one whose confidence is below tau_E is the last.
The last 32 tokens of the prompt count as a round before the first one.

Deviations: 1. the prompt is read before the first draft, so also the first round is chosen; in the code the first exit
drafts its one token; 2. if TPL is largest at d = 0, nothing is drafted in this round; the code drafts at least one
token; 3. candidates are the exits of the run, in the paper all layers; 4. texts of a batch share E, alpha and tau.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.baselines.layer_dropout import Config, layerskip_loss
from mini_ee.lab.exits.decoding import Step, gather
from mini_ee.lab.exits.generation import TokenSegments, capacity_for
from mini_ee.lab.exits.lossless import Drafter, draft_and_verify
from mini_ee.lab.exits.token_exits import SharedExits, TextData
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Stage, joint_stage
from mini_ee.lab.training.training_text import Source, agreement_rule

OMEGA = 0.95  # decay of the counts of earlier rounds
MOST = 17  # d at most, when it is chosen
DRAFTS = 18  # drafts of a round at most
CONTEXT = 32  # tokens of the prompt that count
MEASURED_TEXTS = 16  # texts that are generated at the end of a training


# ---- The equations ----
def tokens_per_layer(alpha: np.ndarray, layers: Sequence[int], most: int) -> np.ndarray:
    """TPL(l, d) for d = 0 .. most: (C,) of the C candidate exits -> (C, most + 1). layers: of all exits, L the last.

    >>> tokens_per_layer(np.array([0.5]), (2, 8), 2).round(4).tolist()
    [[0.125, 0.15, 0.1458]]
    """
    drafts = np.arange(most + 1)
    tokens = (alpha[:, None] ** drafts).cumsum(axis=1)
    return tokens / (np.outer(layers[:-1], drafts) + layers[-1])


class Acceptance:
    """alpha and tau of C exits, from the rounds so far."""

    def __init__(self, exits: int):
        self.counts, self.confidences = np.zeros((exits, 2)), np.zeros((exits, 2))  # of matched tokens, and of others

    def update(self, matched: np.ndarray, confidence: np.ndarray) -> None:
        """Add a round of N shadow tokens: (C, N) bool, (C, N)."""
        both = np.stack((matched, ~matched), axis=1)  # (C, 2, N)
        self.counts = OMEGA * self.counts + both.sum(axis=2)
        self.confidences = OMEGA * self.confidences + (both * confidence[:, None]).sum(axis=2)

    @property
    def alpha(self) -> np.ndarray:
        """(C,); 0 before the first round."""
        return self.counts[:, 0] / np.maximum(self.counts.sum(axis=1), np.finfo(float).tiny)

    @property
    def tau(self) -> np.ndarray:
        """(C,); NaN, which no confidence is below, until a token was matched and another one was not."""
        with np.errstate(invalid="ignore"):
            return (self.confidences / self.counts).mean(axis=1)


# ---- Decoding ----
class ShadowSegments(TokenSegments):
    """TokenSegments that keep the states of the end of the prompts, and compare exits with the full model."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.acceptance = Acceptance(len(self.heads))

    def run_through(self, ids: list[list[int]], rows: list[int], positions: list[list[int]]) -> None:
        hidden, block = self.embed(self.array(ids), positions), self.block(rows, positions)
        states = []
        for k in range(len(self.exits)):
            hidden = self.run(k, hidden, block)
            states.append(hidden[:, -CONTEXT:])
        real = self.array(positions)[:, -CONTEXT:] >= 0
        self.compare(states[:-1], self.decoder.lm_logits(states[-1]).argmax(-1), real)

    def compare(self, states: Sequence[Tensor], true: Tensor, counted: Tensor) -> None:
        """A round of shadow tokens. states: (B, T, D) of each exit; true (B, T): the full model's tokens; counted
        (B, T) bool."""
        shadows = [head(state[counted]).softmax(-1).max(-1) for head, state in zip(self.heads, states)]
        matched = torch.stack([shadow.indices == true[counted] for shadow in shadows])
        confidence = torch.stack([shadow.values for shadow in shadows])
        self.acceptance.update(matched.numpy(force=True), confidence.double().numpy(force=True))


class DynamicExitLayer(Drafter):
    """Chooses the exit and the number of drafts of each round. One serves one call of `draft_and_verify`."""

    def __init__(self, segments: ShadowSegments, most: int = DRAFTS):
        super().__init__(most)
        self.segments, self.drafts = segments, most

    def choose(self) -> None:
        rates = tokens_per_layer(self.segments.acceptance.alpha, self.segments.exits, MOST)
        self.exit, drafts = divmod(int(rates.argmax()), MOST + 1)
        self.most = self.drafts if drafts else 0

    def limit(self, logits: Tensor, drafted: int, most: int) -> int:
        confidence = float(logits.softmax(-1).amax(-1).mean())
        return min(most, drafted + 1) if confidence < self.segments.acceptance.tau[self.exit] else most

    def observe(self, segments: TokenSegments, states: list[Tensor], true: Tensor, read: Tensor) -> None:
        self.segments.compare(states, true, read)


class DynamicExits(SharedExits):
    """A decoder that LayerSkip trains, and whose exits draft in turn."""

    chooses_drafter = True

    def generate_lossless(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        exit_layer: int | None = None,
        draft: int | None = None,
        stop: Sequence[int] | None = None,
    ) -> Iterator[Step]:
        """The full model's greedy text. exit_layer: the exit that always drafts, as in LayerSkip; None: DEL."""
        if exit_layer is not None:
            return super().generate_lossless(prompts, max_new_tokens, exit_layer, draft, stop)
        return self.draft_dynamically(prompts, max_new_tokens, draft, stop)[0]

    def draft_dynamically(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        draft: int | None = None,
        stop: Sequence[int] | None = None,
    ) -> tuple[Iterator[Step], DynamicExitLayer]:
        """(the steps, what chooses the exits)."""
        stop = self.backbone.config.stop_tokens if stop is None else stop
        capacity = capacity_for(self.backbone, prompts, max_new_tokens)
        segments = ShadowSegments(self.backbone, self.exits, self.heads, "recompute", len(prompts), capacity)
        drafter = DynamicExitLayer(segments, draft or DRAFTS)
        return draft_and_verify(segments, prompts, max_new_tokens, drafter, frozenset(stop)), drafter


# ---- Training ----
def recipe(model: nn.Module, config: Config) -> list[Stage]:
    """One stage: everything is trained at once."""
    return [joint_stage(model, name="layer dropout", loss=partial(layerskip_loss, config=config))]


def loading_rule(model: DynamicExits, source: Source, held_out: TextData) -> Chosen:
    """Thresholds at which tokens agree with the last exit; the layers that DEL loads for a token."""
    chosen, layers, tokens = agreement_rule(model, source, held_out), 0, 0
    for text in held_out.texts[:MEASURED_TEXTS]:
        steps, drafter = model.draft_dynamically([text.ids[: text.start + 1]], source.follow)
        (written,) = gather(steps, 1)
        layers, tokens = layers + drafter.layers_loaded, tokens + len(written.tokens)
    message = f"--lossless loads {layers / tokens:.2f} layers per token; the full model loads {model.exits[-1]}."
    return chosen._replace(metrics=chosen.metrics | {"layers_loaded": layers / tokens, "guaranteed": message})


METHOD = Method(
    Config,
    recipe,
    units=("tokens",),
    model=lambda backbone, exits, num_labels, pool, config: DynamicExits(backbone, exits),
    default_rule=loading_rule,
    defaults={"tokens": {"lr": 1e-3, "rank": None}, "built-in": {"texts": 1000}},
    lacks=("rank",),
)
