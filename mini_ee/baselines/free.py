"""FREE: a shallow and a deep exit that learn together; tokens that left early catch up as a later one goes deep.

Paper: Sangmin Bae et al., Fast and Robust Early-Exiting Framework for Autoregressive Language Models with Synchronized
Parallel Decoding, EMNLP 2023, arXiv:2310.05424v1. What the code says and the paper does not is taken from
github.com/raymin0223/fast_robust_early_exit, read at 3e503c5.

Symbols:   two exits, S and L, in layers; one head behind the final norm for both. h_i, the states of layer i behind
           that norm, D wide; gap = p_1 - p_2 at S, the largest probabilities; agrees: S and L say the same token.
Loss:      (S CE_S + L CE_L) / (S + L) + alpha KD, where KD is the mean over pairs of |h_s - h_t|^2 / D; h_t has no
           gradient. The teachers t are every L/S-th layer, or the last one. The students s: layer by layer (uniform),
           S of L (last), or, from the last teacher down, the nearest layer below the student before (dynamic).
Inference: a token leaves at S where its gap is at least lambda. The others take all tokens that wait there with them
           through the layers above, in one block: missing_kv="recompute", whose texts are those of full caches.
           An export recomputes too, by its graphs by segment; its model.onnx copies states.
lambda:    each deep pass tells (gap, agrees) of the tokens in it. Before the next text all that was told so far is
           fitted by two Beta distributions, one of the tokens that agree; then lambda is the lowest of 10 points from
           .3 to .9 from which on P(agrees | gap) > .4. It begins at .9, and moves MOVES times at most.
Fit:       a Beta by its moments: a = m (m (1 - m) / v - 1), b = a (1 - m) / m, of weighted mean m and variance v; the
           weight of a token in a component is .8 of the posterior under the Betas before and .2 of its label.

Deviations:
1. The released code overwrites the first term of that weight, so that labels alone count; here it is there, and a
   posterior, where theirs is no probability.
2. The Beta of the tokens that agree is the one that their labels weigh in; theirs is the one with the larger mean
   (bmm.py, 113). They differ if the tokens that agree have the smaller gaps.
3. All points from lambda up are likely to agree; theirs counts the likely points wherever they are.
4. Teachers of an L that S does not divide are rounded down; theirs are a table by hand.
5. The rule of a run is a threshold, the last lambda after texts held out of training; `moved` moves it on others.
6. Rows, which wait for nobody, have a head of their own at each exit, and lambda is fitted to held-out ones, a
   candidate among thresholds on the gap.
7. A decoder, where theirs is that of a T5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.data.options import Settings, option
from mini_ee.data.texts import Text
from mini_ee.exits.decoding import Generated, TokenState, decode, gather
from mini_ee.exits.generation import TokenSegments
from mini_ee.exits.rows import RowExits
from mini_ee.exits.tokens import SharedExits, TextData, record_texts
from mini_ee.recording import Record
from mini_ee.rules import Rule, Threshold
from mini_ee.segments import Reading
from mini_ee.training.default_rule import Chosen, passing, sweep
from mini_ee.training.method import Method
from mini_ee.training.stages import Batch, Stage, depth_weighted_sum, joint_stage, task_loss
from mini_ee.training.texts import Source

MATCHES = ("dynamic", "uniform", "last")
MEASURE = "breaking_ties"
FIRST, GRID, LIKELY = 0.9, np.linspace(0.3, 0.9, 10), 0.4  # lambda before anything was told; its values; P(agrees)
TRUST = 0.8  # in the posterior; the rest in the label
EDGE = 1e-4  # gaps are kept so far from 0 and 1, where a Beta may be infinite
FLAT = 1e-6  # a variance below which there is nothing to fit
MOVES = 300


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    shallow: int | None = option(None, "S, the layer of the first exit; a quarter of all", least=1, metavar="LAYER")
    match: str = option(
        "dynamic", "which layer learns from which of those above", choices=MATCHES, unused_when=("alpha", 0)
    )
    alpha: float = option(0.5, "of the distillation from layer to layer", least=0)


# ---- The loss ----
def teachers(shallow: int, layers: int) -> list[int]:
    """The layers that `shallow` students learn from, from 1.

    >>> teachers(6, 24), teachers(3, 12)
    ([4, 8, 12, 16, 20, 24], [4, 8, 12])
    """
    return [layers * (i + 1) // shallow for i in range(shallow)]


def dynamic_match(apart: Tensor) -> list[int]:
    """Student (from 0) of every teacher: from the last teacher down the nearest below the student before, of layer 0
    that layer again. apart (T, S): how far teacher and student are."""
    below, found = apart.shape[1], []
    for distances in apart.flip(0):
        below = int(distances[:below].argmin()) if below else 0
        found.append(below)
    return found[::-1]


def distillation(states: Sequence[Tensor], shallow: int, match: str) -> Tensor:
    """KD. states: (N, D) of every layer, behind the norm."""
    if match == "last":
        return F.mse_loss(states[shallow - 1], states[-1].detach())
    chosen = [states[layer - 1].detach() for layer in teachers(shallow, len(states))]
    apart = torch.stack([torch.stack([F.mse_loss(s, t) for s in states[:shallow]]) for t in chosen])
    students = dynamic_match(apart.detach()) if match == "dynamic" else list(range(shallow))
    return apart[range(shallow), students].mean()


def shallow_deep_loss(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """Both exits' losses by depth, and the distillation between their layers."""
    states, real = [], batch.inputs[1].bool()  # where there are tokens; of texts those that count
    if model.unit == "tokens":
        _, real = model.backbone.read_texts(*batch.inputs)
    norm = model.heads[0].norm or nn.Identity()

    def run(hidden: Tensor, context, start: int, stop: int, adapt=None) -> Tensor:
        for depth in range(start, stop):
            hidden = model.backbone.run_layers(hidden, context, depth, depth + 1, adapt)
            states.append(norm(hidden[real[:, : hidden.shape[1]]]).float())
        return hidden

    losses = [task_loss(logits, batch.labels) for logits in model(*batch.inputs, run=run)]
    loss = depth_weighted_sum(losses, model.exits)
    return loss + config.alpha * distillation(states, model.exits[0], config.match) if config.alpha else loss


# ---- lambda ----
class Beta(NamedTuple):
    """A Beta distribution."""

    a: float
    b: float

    def density(self, x: np.ndarray) -> np.ndarray:
        """At x, each above 0 and below 1."""
        log_beta = math.lgamma(self.a) + math.lgamma(self.b) - math.lgamma(self.a + self.b)
        return np.exp((self.a - 1) * np.log(x) + (self.b - 1) * np.log1p(-x) - log_beta)

    def fitted(self, x: np.ndarray, weights: np.ndarray) -> "Beta":
        """The one with the moments of x, or this one where x hardly varies."""
        m = np.average(x, weights=weights)
        v = np.average((x - m) ** 2, weights=weights)
        if v < FLAT:
            return self
        a = m * (m * (1 - m) / v - 1)
        return Beta(float(a), float(a * (1 - m) / m))


class Mixture(NamedTuple):
    """What gaps say of agreement."""

    differs: Beta = Beta(1.0, 2.0)
    agrees: Beta = Beta(2.0, 1.0)

    def posterior(self, gaps: np.ndarray) -> np.ndarray:
        """P(agrees | gap), where both are as likely before."""
        agrees, differs = self.agrees.density(gaps), self.differs.density(gaps)
        return agrees / np.maximum(agrees + differs, np.finfo(float).tiny)

    def responsibility(self, gaps: np.ndarray, agrees: np.ndarray) -> np.ndarray:
        """The weight of each token in the component of those that agree, from 0 to 1."""
        return TRUST * self.posterior(gaps) + (1 - TRUST) * agrees

    def fitted(self, gaps: np.ndarray, agrees: np.ndarray) -> "Mixture":
        """After one more step of EM on all that was told: (N,) numbers and bool."""
        gaps = np.clip(np.asarray(gaps, np.float64), EDGE, 1 - EDGE)
        weights = self.responsibility(gaps, np.asarray(agrees, bool))
        return Mixture(self.differs.fitted(gaps, 1 - weights), self.agrees.fitted(gaps, weights))

    def threshold(self) -> float:
        """lambda: the lowest point of GRID from which on all are likely to agree; the highest where it is not."""
        likely = self.posterior(GRID) > LIKELY
        return float(GRID[min(len(GRID) - 1, len(GRID) - int(likely[::-1].cumprod().sum()))])


class OnlineCalibrationSegments(TokenSegments):
    """Those of a model with two exits, that note what each deep pass tells: `gaps`, and `agrees` of the same tokens."""

    def __init__(self, model: SharedExits, num_rows: int, capacity: int):
        super().__init__(model.backbone, model.exits, model.heads, "recompute", num_rows, capacity)
        self._said: dict[tuple[int, int], tuple[float, int]] = {}  # (row, position) -> gap and token, at S
        self.gaps: list[float] = []
        self.agrees: list[bool] = []

    def read_logits(self, k: int, state: TokenState) -> Reading:
        reading = super().read_logits(k, state)
        if k == 0:
            said = zip(reading.breaking_ties.tolist(), reading.logits.argmax(axis=1).tolist())
            places = zip(state.rows, (positions[-1] for positions in state.positions))
            self._said |= dict(zip(places, said))
        return reading

    def advance(self, k: int, state: TokenState) -> TokenState:
        waited = [self.waiting[row][0][:-1] if k else [] for row in state.rows]  # without this token itself
        state = super().advance(k, state)
        if k:
            for row, positions, own, hidden in zip(state.rows, waited, state.positions, state.hidden):
                deep = torch.cat((self.left[row, positions], hidden[-1:]))
                tokens = self.decoder.lm_logits(deep).argmax(-1).tolist()
                for position, token in zip([*positions, own[-1]], tokens):
                    gap, said = self._said.pop((row, position))
                    self.gaps.append(gap)
                    self.agrees.append(said == token)
        return state


class Moved(NamedTuple):
    """Texts that were written while lambda moved."""

    written: list[Generated]
    thresholds: list[float]  # under which each was, and the last
    told: int  # tokens that deep passes told of


@torch.inference_mode()
def moved(model: SharedExits, texts: Sequence[Text], new_tokens: int) -> Moved:
    """Continue what each text gives (up to its `start`), one after the other, under a lambda that learns from them."""
    mixture, levels, written, gaps, agrees = Mixture(), [FIRST], [], [], []
    stop = model.backbone.config.stop_tokens
    for text in texts:
        prompt = text.ids[: text.start + 1]
        (begin,) = model.backbone.decoder_start_tokens([prompt])
        segments = OnlineCalibrationSegments(model, 1, len(begin) + new_tokens)
        written += gather(decode(segments, [prompt], new_tokens, Threshold(levels[-1], MEASURE), stop=stop), 1)
        gaps, agrees = gaps + segments.gaps, agrees + segments.agrees
        if gaps and len(levels) <= MOVES:
            mixture = mixture.fitted(gaps, agrees)
            levels.append(mixture.threshold())
    return Moved(written, levels, len(gaps))


# ---- Training ----
class FreeTokens(SharedExits):
    """Both exits of a decoder, whose skipped layers catch up."""

    missing_kv = "recompute"


def build(backbone, exits: tuple[int, ...], num_labels: int, pool: str | None, config: Config) -> nn.Module:
    """Two exits on a decoder, or on a classifier, which has a pool. Raises ValueError for an S that is not below L."""
    layers = backbone.config.num_hidden_layers
    exits = (config.shallow or exits[0], layers)
    if exits[0] >= layers:
        raise ValueError(f"the shallow exit must be below the last layer, {layers}, got {exits[0]}: give --shallow")
    return FreeTokens(backbone, exits) if pool is None else RowExits(backbone, exits, num_labels, pool)


def recipe(model: nn.Module, config: Config) -> list[Stage]:
    """All at once."""
    return [joint_stage(model, name="shallow-deep", loss=partial(shallow_deep_loss, config=config))]


def gaps_of(recorded: Record) -> list[Rule]:
    """The mixture's lambda on recorded rows, and thresholds at quantiles of their gaps."""
    said = recorded.predictions
    mixture = Mixture().fitted(recorded.confidence(MEASURE)[:, 0], said[:, 0] == said[:, 1])
    return sweep(Threshold(mixture.threshold(), MEASURE))(recorded)


def moved_rule(model: SharedExits, source: Source, held: TextData) -> Chosen:
    """The lambda that held-out texts move to; and for `mini-ee compare --sweep` others."""
    found = moved(model, held.texts, source.follow)
    rule = Threshold(found.thresholds[-1], MEASURE)
    rules = passing(record_texts(model, held.texts), rule)
    about = {"own": {"lambda": rule.to_dict()}, "sweep": {"lambda": [each.to_dict() for each in rules]}}
    about |= {"thresholds": found.thresholds, "tokens_told": found.told}
    layers = float(np.mean([layers for text in found.written for layers in text.layers_run]))
    path = f"lambda went from {FIRST} to {rule.threshold:.2f} over {len(found.thresholds) - 1} texts"
    about["promised"] = f"{path}, whose tokens took {layers:.2f} layers of {model.exits[-1]}."
    return Chosen(rule, None, None, about)


METHOD = Method(
    Config,
    recipe,
    units=("tokens", "rows"),
    model=build,
    exits=lambda layers: (max(1, layers // 4), layers),
    candidates=gaps_of,
    default_rule=moved_rule,
    classes_only=True,
    defaults={"tokens": {"lr": 1e-3, "rank": None}, "built-in": {"texts": 1000}},
    lacks=("exits", "rank"),
)
