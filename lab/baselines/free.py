"""FREE (Bae et al. 2023, arXiv:2310.05424v1): a shallow and a deep exit; tokens that exited early catch up later.

Paper: Sangmin Bae et al., Fast and Robust Early-Exiting Framework for Autoregressive Language Models with Synchronized
Parallel Decoding, EMNLP 2023, arXiv:2310.05424v1. Details that the paper leaves out are from its code,
github.com/raymin0223/fast_robust_early_exit at 3e503c5.

Symbols:   two exits, after layers S and L; one head after the final norm for both. h_i: the states of layer i after
           that norm, of width D; gap = p_1 - p_2 at S, the two largest probabilities; agrees: S and L predict the same.
Loss:      (S CE_S + L CE_L) / (S + L) + alpha KD, where KD is the mean over pairs of |h_s - h_t|^2 / D; h_t has no
           gradient. The teachers t are every L/S-th layer, or only the last. The students s are the layers 1 .. S in
           order (uniform), S alone with teacher L (last), or, from the last teacher down, the nearest layer below the
           student before (dynamic).
Inference: a token exits at S if its gap is at least lambda. Any other token goes on through the layers above S, in one
           block with all tokens that have exited since the last one (missing_kv="recompute"), so its text is that of
           full caches. The graphs by segment of an export recompute too; its model.onnx copies states.
lambda:    each deep pass reveals (gap, agrees) of the tokens in it. Before the next text two Beta distributions are
           fitted to all pairs so far, one for the tokens that agree. lambda is then the lowest of 10 points from .3 to
           .9 from which on P(agrees | gap) > .4. It starts at .9, and changes at most MAX_CHANGES times.
Fit:       a Beta by its moments: a = m (m (1 - m) / v - 1), b = a (1 - m) / m, of weighted mean m and variance v; the
           weight of a token in a component is .8 posterior (under the previous Betas) + .2 label.

Deviations:
1. The released code overwrites the first term of that weight, so only labels count. Here both terms count, and the
   posterior is a probability, which theirs is not.
2. The Beta of the tokens that agree is the one whose labels say so; theirs is the one with the larger mean (bmm.py,
   113). They differ if the tokens that agree have the smaller gaps.
3. At all points from lambda up agreement is likely; theirs counts the likely points wherever they are.
4. If S does not divide L, the teachers are rounded down; theirs are in a table.
5. The rule of a run is a threshold, the last lambda after the held-out texts. `generate_adapting` changes it on others.
6. On examples, which have no cache to catch up, each exit has its own head, and lambda is fitted on the held-out set:
   one candidate among thresholds on the gap.
7. The model is a decoder; theirs is the decoder of a T5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Adapt
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.exits.decoding import Generated, TokenState, decode, gather
from mini_ee.lab.exits.generation import TokenSegments
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import SharedExits, TextData
from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Rule, Threshold, confidence
from mini_ee.lab.training.default_rule import Chosen, passing, sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage, joint_stage, weighted_by_depth
from mini_ee.lab.training.training_text import Source
from mini_ee.train import task_loss

MATCHES = ("dynamic", "uniform", "last")
MEASURE = "breaking_ties"
FIRST_LAMBDA, LAMBDAS, MIN_AGREEMENT = (
    0.9,
    np.linspace(0.3, 0.9, 10),
    0.4,
)  # the first lambda; its possible values; least P(agrees)
POSTERIOR_WEIGHT = 0.8  # weight of the posterior; the label has the rest
GAP_MARGIN = 1e-4  # distance of gaps from 0 and 1, at least: there a Beta density may be infinite
MIN_VARIANCE = 1e-6  # a Beta is not fitted to a variance below this
MAX_CHANGES = 300  # changes of lambda, at most


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    shallow: int | None = option(
        None, "layer S of the first exit", least=1, metavar="LAYER", default_text="a quarter of all layers"
    )
    match: str = option(
        "dynamic",
        "matching of student layers to teacher layers in the distillation",
        choices=MATCHES,
        unused_when=("alpha", 0),
    )
    alpha: float = option(0.5, "weight of the distillation between layers", least=0)


# ---- The loss ----
def teachers(shallow: int, layers: int) -> list[int]:
    """The layers, from 1, from which `shallow` students learn.

    >>> teachers(6, 24), teachers(3, 12)
    ([4, 8, 12, 16, 20, 24], [4, 8, 12])
    """
    return [layers * (i + 1) // shallow for i in range(shallow)]


def dynamic_match(apart: Tensor) -> list[int]:
    """The student layer (from 0) of every teacher, by distances apart (T, S) of teachers and students.

    From the last teacher down, the student is the nearest layer below the previous student. Once layer 0 is reached, it
    is the student of all remaining teachers.
    """
    below, layers = apart.shape[1], []
    for distances in apart.flip(0):
        below = int(distances[:below].argmin()) if below else 0
        layers.append(below)
    return layers[::-1]


def distillation(states: Sequence[Tensor], shallow: int, match: str) -> Tensor:
    """KD. states: (N, D) of every layer, after the norm."""
    if match == "last":
        return F.mse_loss(states[shallow - 1], states[-1].detach())
    chosen = [states[layer - 1].detach() for layer in teachers(shallow, len(states))]
    apart = torch.stack([torch.stack([F.mse_loss(s, t) for s in states[:shallow]]) for t in chosen])
    students = dynamic_match(apart.detach()) if match == "dynamic" else list(range(shallow))
    return apart[range(shallow), students].mean()


def shallow_deep_loss(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """The losses of both exits, weighted by depth, and the distillation between their layers."""
    states, real = [], batch.inputs[1].bool()  # (B, T): no padding; in texts, the positions that count
    if model.unit == "tokens":
        _, real = model.backbone.read_texts(*batch.inputs)
    norm = model.heads[0].norm or nn.Identity()

    def run(hidden: Tensor, context: Any, start: int, stop: int, adapt: Adapt | None = None) -> Tensor:
        """run_layers that collects the states of each layer, for the distillation."""
        for depth in range(start, stop):
            hidden = model.backbone.run_layers(hidden, context, depth, depth + 1, adapt)
            states.append(norm(hidden[real[:, : hidden.shape[1]]]).float())
        return hidden

    losses = [task_loss(logits, batch.labels) for logits in model(*batch.inputs, run=run)]
    loss = weighted_by_depth(losses, model.exits)
    return loss + config.alpha * distillation(states, model.exits[0], config.match) if config.alpha else loss


# ---- lambda ----
class Beta(NamedTuple):
    """A Beta distribution."""

    a: float
    b: float

    def density(self, x: np.ndarray) -> np.ndarray:
        """The density at x, each above 0 and below 1."""
        log_beta = math.lgamma(self.a) + math.lgamma(self.b) - math.lgamma(self.a + self.b)
        return np.exp((self.a - 1) * np.log(x) + (self.b - 1) * np.log1p(-x) - log_beta)

    def fitted(self, x: np.ndarray, weights: np.ndarray) -> "Beta":
        """The Beta with the weighted mean and variance of x, or this one if x hardly varies."""
        m = np.average(x, weights=weights)
        v = np.average((x - m) ** 2, weights=weights)
        if v < MIN_VARIANCE:
            return self
        a = m * (m * (1 - m) / v - 1)
        return Beta(float(a), float(a * (1 - m) / m))


class Mixture(NamedTuple):
    """The gaps of tokens whose exits differ, and of tokens whose exits agree."""

    differs: Beta = Beta(1.0, 2.0)
    agrees: Beta = Beta(2.0, 1.0)

    def posterior(self, gaps: np.ndarray) -> np.ndarray:
        """P(agrees | gap), with equal prior probabilities."""
        agrees, differs = self.agrees.density(gaps), self.differs.density(gaps)
        return agrees / np.maximum(agrees + differs, np.finfo(float).tiny)

    def responsibility(self, gaps: np.ndarray, agrees: np.ndarray) -> np.ndarray:
        """The weight of each token in the component of tokens that agree, from 0 to 1."""
        return POSTERIOR_WEIGHT * self.posterior(gaps) + (1 - POSTERIOR_WEIGHT) * agrees

    def fitted(self, gaps: npt.ArrayLike, agrees: npt.ArrayLike) -> "Mixture":
        """After one more step of EM on all pairs so far: gaps (N,) and agrees (N,) bool."""
        gaps = np.clip(np.asarray(gaps, np.float64), GAP_MARGIN, 1 - GAP_MARGIN)
        weights = self.responsibility(gaps, np.asarray(agrees, bool))
        return Mixture(self.differs.fitted(gaps, 1 - weights), self.agrees.fitted(gaps, weights))

    def threshold(self) -> float:
        """lambda: the lowest point of LAMBDAS from which on agreement is likely; the highest point if there is none."""
        likely = self.posterior(LAMBDAS) > MIN_AGREEMENT
        # From the highest point down, cumprod counts the likely points without a gap.
        return float(LAMBDAS[min(len(LAMBDAS) - 1, len(LAMBDAS) - int(likely[::-1].cumprod().sum()))])


class OnlineCalibrationSegments(TokenSegments):
    """Segments of a model with two exits that record each deep pass: `gaps`, and `agrees` of the same tokens."""

    def __init__(self, model: SharedExits, num_rows: int, capacity: int):
        super().__init__(model.backbone, model.exits, model.heads, "recompute", num_rows, capacity)
        # (row, position) -> gap and token at S, until a deep pass reveals the token at L
        self._shallow: dict[tuple[int, int], tuple[float, int]] = {}
        self.gaps: list[float] = []
        self.agrees: list[bool] = []

    def read(self, k: int, state: TokenState) -> np.ndarray:
        logits = super().read(k, state)
        if k == 0:
            gaps = confidence(logits, MEASURE)
            predictions = zip(gaps.tolist(), logits.argmax(axis=1).tolist())
            places = zip(state.rows, (positions[-1] for positions in state.positions))
            self._shallow |= dict(zip(places, predictions))
        return logits

    def advance(self, k: int, state: TokenState) -> TokenState:
        # Read before super().advance empties it: the positions that exited at S since the last deep pass of each row,
        # without the current token, which is the last.
        waited = [self.pending_positions[row][0][:-1] if k else [] for row in state.rows]
        state = super().advance(k, state)
        if k:
            for row, positions, current, hidden in zip(state.rows, waited, state.positions, state.hidden):
                # The deep pass has replaced the states of the waiting tokens; the current token is still in `state`.
                deep = torch.cat((self.pending_states[row, positions], hidden[-1:]))
                tokens = self.decoder.lm_logits(deep).argmax(-1).tolist()
                for position, token in zip([*positions, current[-1]], tokens):
                    gap, shallow_token = self._shallow.pop((row, position))
                    self.gaps.append(gap)
                    self.agrees.append(shallow_token == token)
        return state


class AdaptedTexts(NamedTuple):
    """Texts that were generated while lambda changed."""

    written: list[Generated]
    thresholds: list[float]  # the lambda of each text, and the last one
    observed: int  # number of tokens whose agreement the deep passes revealed


@torch.inference_mode()
def generate_adapting(model: SharedExits, texts: Sequence[Text], new_tokens: int) -> AdaptedTexts:
    """Continue the prompt of each text (up to its `start`), one text after the other; lambda adapts to them."""
    mixture, thresholds = Mixture(), [FIRST_LAMBDA]
    written: list[Generated] = []
    gaps: list[float] = []
    agrees: list[bool] = []
    stop = model.backbone.config.stop_tokens
    for text in texts:
        prompt = text.ids[: text.start + 1]
        (begin,) = model.backbone.decoder_start_tokens([prompt])
        segments = OnlineCalibrationSegments(model, 1, len(begin) + new_tokens)
        written += gather(decode(segments, [prompt], new_tokens, Threshold(thresholds[-1], MEASURE), stop=stop), 1)
        gaps, agrees = gaps + segments.gaps, agrees + segments.agrees
        if gaps and len(thresholds) <= MAX_CHANGES:
            mixture = mixture.fitted(gaps, agrees)
            thresholds.append(mixture.threshold())
    return AdaptedTexts(written, thresholds, len(gaps))


# ---- Training ----
class FreeTokens(SharedExits):
    """Both exits of a decoder; tokens that skipped layers catch up."""

    missing_kv = "recompute"


def build(backbone: Any, exits: tuple[int, ...], num_labels: int, pool: str | None, config: Config) -> nn.Module:
    """Two exits on a decoder, or on a classifier if there is a pool. Raises ValueError if S is not below L."""
    layers = backbone.config.num_hidden_layers
    exits = (config.shallow or exits[0], layers)
    if exits[0] >= layers:
        raise ValueError(f"the shallow exit must be below the last layer, {layers}, got {exits[0]}: give --shallow")
    return FreeTokens(backbone, exits) if pool is None else RowExits(backbone, exits, num_labels, pool)


def recipe(model: nn.Module, config: Config) -> list[Stage]:
    """One stage: everything is trained at once."""
    return [joint_stage(model, name="shallow-deep", loss=partial(shallow_deep_loss, config=config))]


def gaps_of(recorded: Record) -> list[Rule]:
    """lambda, fitted to recorded examples, and thresholds at quantiles of their gaps."""
    predictions = recorded.predictions
    mixture = Mixture().fitted(recorded.confidence(MEASURE)[:, 0], predictions[:, 0] == predictions[:, 1])
    return sweep(Threshold(mixture.threshold(), MEASURE))(recorded)


def adapted_rule(model: SharedExits, source: Source, held_out: TextData) -> Chosen:
    """lambda after the held-out texts, and other thresholds for `mini-ee compare --sweep`."""
    generated = generate_adapting(model, held_out.texts, source.follow)
    rule = Threshold(generated.thresholds[-1], MEASURE)
    rules = passing(record_texts(model, held_out.texts), rule)
    metrics = {"own": {"lambda": rule.to_dict()}, "sweep": {"lambda": [candidate.to_dict() for candidate in rules]}}
    metrics |= {"thresholds": generated.thresholds, "tokens_told": generated.observed}
    layers = float(np.mean([layers for text in generated.written for layers in text.layers_run]))
    path = f"lambda changed from {FIRST_LAMBDA} to {rule.threshold:.2f} over {len(generated.thresholds) - 1} texts"
    metrics["guaranteed"] = f"{path}, whose tokens used {layers:.2f} of {model.exits[-1]} layers on average."
    return Chosen(rule, None, None, metrics)


METHOD = Method(
    Config,
    recipe,
    units=("tokens", "rows"),
    model=build,
    exits=lambda layers: (max(1, layers // 4), layers),
    candidates=gaps_of,
    default_rule=adapted_rule,
    classes_only=True,
    defaults={"tokens": {"lr": 1e-3, "rank": None}, "built-in": {"texts": 1000}},
    lacks=("exits", "rank"),
    own_heads=True,
)
