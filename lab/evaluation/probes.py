"""What each layer of a model predicts before anything is trained, and whether it agrees with the last layer.

    logit lens         for a token              the decoder's own final norm and head, applied after every layer
    lens and gate      for a token, if the      a map in closed form before that head (exits/lens.py), and a linear gate
                       vocabulary is large      that knows when it agrees; each is fitted on other texts
    linear probe       for a row with a label   logistic regression on the frozen pooled state, fitted on other rows
    nearest neighbour  for a row without label  which of the other rows has the most similar state (centred, cosine)

Sources: the lens, nostalgebraist 2020, "interpreting GPT: the logit lens"; probes, Alain & Bengio 2016,
arXiv:1610.01644. The lens is a lower bound: trained heads agree more often with the last layer, most of all in the
first layers (results/self-supervised.md). The nearest neighbour is the strictest: the layer has to find the same one
among hundreds of rows.

Symbols:   N units (tokens or rows), L layers, D the width of a state, C classes, V words.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Backbone, padding_mask
from mini_ee.lab.calibration import Observed, observe
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.data.decoder_texts import Text, cut_text
from mini_ee.lab.data.files import read_text
from mini_ee.lab.data.metrics import majority
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tasks import Split, Task, subset
from mini_ee.lab.data.tokenizer import Encoded, batches
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.generation import token_weights
from mini_ee.lab.exits.heads import pooled
from mini_ee.lab.exits.lens import fit_in_closed_form, reads_much
from mini_ee.lab.exits.row_exits import STATES_BATCH
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TEXTS_BATCH, SharedExits, TextData
from mini_ee.lab.training.policies import agreement
from mini_ee.lab.training.training_text import Source, check_reads_on, texts_to_calibrate

MIN_PROBED = 40  # texts, or rows in each half
PROBE_TOKENS = 64  # tokens in each piece of a text
PENALTY = 0.1  # near the best of .001 to 1 on train rows, for MiniLM on TREC and SST-2 and bert-12x128 on reviews
LOGITS_AT_ONCE = 2**25


class Costs(NamedTuple):
    """FLOPs outside the layers, in units of one layer."""

    head: float  # one head
    start: float  # everything before the first layer, such as the encoder of a T5
    read_once: bool = False  # whether a gate decides, so a unit reads no head but that of its exit


class ProbeResult(NamedTuple):
    """What the layers before the last predict for N units, and the cost of such an exit."""

    probe: str
    observed: Observed
    costs: Costs
    accuracy: list[float] | None = None  # of each layer, including the last
    majority: float | None = None  # share of the most frequent label


# ---- Tokens ----


class Lens(nn.Module):
    """A decoder whose own norm and head are applied after every layer, in the form that record_texts takes."""

    policy, own_layers, head = None, False, "own"

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.backbone, self.exits = backbone, tuple(range(1, backbone.config.num_hidden_layers + 1))

    def head_input(self, k: int, hidden: Tensor, context: Any) -> Tensor:
        """The state of the layer as it is."""
        return hidden

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(N, D) of any layer -> logits (N, V)."""
        return self.backbone.lm_logits(state)


def texts_to_read(source: Source) -> list[Text]:
    """Pieces of the file, drawn with the seed; without a file, text that the decoder writes, as for `calibrate`.

    Raises WrongArguments if the file is too short.
    """
    count, path = source.options.texts, source.options.text
    if path is None:
        return texts_to_calibrate(source)
    check_reads_on(source.backbone, "no --text")
    first = source.tokenizer.ids_of("")
    length = min(PROBE_TOKENS, source.backbone.config.max_tokens - len(first))
    ids = source.tokenizer.ids_of(read_text(path), special=False)
    if len(ids) < MIN_PROBED * length:
        expected = f"{MIN_PROBED * length} tokens, {MIN_PROBED} pieces of {length}"
        raise WrongArguments(f"{path}: expected at least {expected}, found {len(ids)} tokens; give a longer text")
    pieces = cut_text(ids, length, first)
    return [pieces[at] for at in np.random.default_rng(source.seed).permutation(len(pieces))[:count]]


def probe_tokens(backbone: Backbone, texts: list[Text]) -> ProbeResult:
    """The logit lens at every token of the texts; if the vocabulary is large, `probe_lenses`."""
    if reads_much(backbone):
        return probe_lenses(backbone, texts)
    batch = max(1, min(TEXTS_BATCH, LOGITS_AT_ONCE // (PROBE_TOKENS * backbone.config.vocab_size)))
    recorded = record_texts(Lens(backbone).eval(), texts, batch)
    head = 2.0 * token_weights(backbone).head
    layer = (recorded.full_flops - head) / backbone.config.num_hidden_layers
    return ProbeResult("logit lens", observe(recorded), Costs(head / layer, 0.0))


def probe_lenses(backbone: Backbone, texts: list[Text]) -> ProbeResult:
    """Lenses from half of the texts, a gate from a quarter, what they predict on the last quarter.

    Raises WrongArguments if that has fewer than MIN_PROBED texts.
    """
    if len(texts) < 4 * MIN_PROBED:
        raise WrongArguments(
            f"--texts: expected at least {4 * MIN_PROBED} for a vocabulary of {backbone.config.vocab_size:,} words, a "
            f"quarter of them to measure on, found {len(texts)}; give more"
        )
    model = SharedExits(backbone, tuple(range(1, backbone.config.num_hidden_layers + 1)))
    model.use_heads("lens")
    to_fit, *others = (TextData(some, every=True) for some in (texts[::2], texts[1::4], texts[3::4]))
    fit_in_closed_form(model.eval().heads, (states for states, _ in to_fit.state_batches(model)))
    (known, agreed), (measured, agrees) = (_normed(model, some) for some in others)
    gates = (linear_probe(*pair, agreed[:, k].astype(np.int64), 2) for k, pair in enumerate(zip(known, measured)))
    confidence = np.stack([1 / (1 + np.exp(logits[:, 0] - logits[:, 1])) for logits in gates], axis=1)
    sizes = others[1].sizes()
    weights, position = token_weights(backbone), np.concatenate([np.arange(size) for size in sizes]).mean()
    layer = weights.layer + 2 * weights.attention * (position + 1)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return ProbeResult(
        "lens and gate", Observed(confidence, agrees, groups), Costs(weights.head / layer, 0.0, read_once=True)
    )


def _normed(model: SharedExits, texts: TextData) -> tuple[list[np.ndarray], np.ndarray]:
    """What a gate reads of each exit but the last, (N, D) each, and whether the exits agree, (N, K - 1) bool."""
    states = texts.states(model)
    normed = [model.heads[k].norm(states.states[:, k]).numpy(force=True) for k in range(len(model.heads))]
    return normed, agreement(model, states)


# ---- Rows ----


def rows_to_read(source: list[tuple[str, ...]] | Task, count: int, seed: int) -> tuple[Split, int]:
    """(rows, number of classes): `count` rows, drawn with the seed.

    source: a task, whose train split is read, never the reported one; or texts of a file, without classes.
    Raises WrongArguments for a regression, for a task without train split, and if there are too few rows.
    """
    if not isinstance(source, Task):
        name, rows, classes = "--text", Split(tuple(source), None), 0
    else:
        if source.regression:
            raise WrongArguments(
                f"{source.name}: is a regression, probes need classes; give only its texts, --text FILE"
            )
        if "train" not in source.splits:
            raise WrongArguments(f"{source.name}: expected a train file, on which probes are fitted; add train.tsv")
        name, rows, classes = source.name, source.split("train"), source.num_labels
    rows = subset(rows, count, seed)
    if len(rows) < 2 * MIN_PROBED:
        raise WrongArguments(f"{name}: expected at least {2 * MIN_PROBED} rows, got {len(rows)}; give more")
    return rows, classes


@torch.inference_mode()
def layer_states(backbone: Backbone, encoded: Encoded) -> np.ndarray:
    """The mean over the tokens of each row after every layer: (N, L, D), after the norm if the backbone needs one."""
    norm, probe_states = backbone.exit_norm(), None
    norm = nn.Identity() if norm is None else norm.to(backbone.device)
    for rows in tqdm(list(batches(encoded, STATES_BATCH)), desc="reading", unit="batch", delay=2):
        inputs = encoded.batch(rows)
        mask = padding_mask(inputs.attention_mask, backbone.device)
        layers = backbone.hidden_states(inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)[1:]
        states = torch.stack([pooled(norm(hidden), mask, "mean") for hidden in layers], dim=1)
        probe_states = np.empty((len(encoded), *states.shape[1:]), np.float32) if probe_states is None else probe_states
        probe_states[rows] = states.float().numpy(force=True)
    return probe_states


def probe_rows(backbone: Backbone, encoded: Encoded, labels: np.ndarray | None, classes: int, seed: int) -> ProbeResult:
    """The probes of every layer on half of the rows, drawn with the seed; they are fitted on the other half.

    labels: (N,), of `classes` classes, for linear probes; None for nearest neighbours.
    Raises WrongArguments if the rows to fit on all have the same label.
    """
    drawn = np.random.default_rng(seed).permutation(len(encoded))
    train, held_out = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    if labels is not None and len(np.unique(labels[train])) < 2:
        raise WrongArguments("expected rows of two labels or more, found one among those drawn; give more rows")
    states = layer_states(backbone, encoded)
    pairs = [(states[train, k], states[held_out, k]) for k in range(states.shape[1])]
    if labels is None:
        name, measure, logits = "nearest neighbour", "breaking_ties_logits", [neighbours(*pair) for pair in pairs]
    else:
        name, measure = "linear probe", "max_probability"
        logits = [linear_probe(*pair, labels[train], classes) for pair in pairs]
    predictions = np.stack([layer_logits.argmax(axis=1) for layer_logits in logits], axis=1)  # (N, L)
    confidence = np.stack([MEASURES[measure][0](layer_logits) for layer_logits in logits[:-1]], axis=1)
    observed = Observed(confidence, predictions[:, :-1] == predictions[:, -1:], np.arange(len(held_out)))
    tokens, width = float(np.mean([len(ids) for ids in encoded.ids])), states.shape[2]
    head = 2 * width * classes + tokens * width  # a linear map, and the mean over tokens
    layer = backbone.layer_flops(tokens)
    result = ProbeResult(name, observed, Costs(head / layer, backbone.start_flops(tokens) / layer))
    if labels is None:
        return result
    right = predictions == labels[held_out][:, None]
    return result._replace(accuracy=right.mean(axis=0).tolist(), majority=majority(labels[held_out]))


def neighbours(train: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Cosines of states (N, D) with the train states (M, D), after subtraction of the train mean: (N, M)."""
    centred = (states - train.mean(axis=0) for states in (held_out, train))
    queries, keys = (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12) for vectors in centred)
    return queries @ keys.T


def linear_probe(train: np.ndarray, held_out: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Logits (N, C) of states (N, D), from logistic regression on the train states (M, D) and their labels (M,).

    States are standardised. The loss is the mean cross-entropy plus PENALTY / 2 times the sum of squared weights.
    """
    mean, std = train.mean(axis=0), np.maximum(train.std(axis=0), 1e-6)
    x, queries, y = (torch.from_numpy(array) for array in ((train - mean) / std, (held_out - mean) / std, labels))
    weight = x.new_zeros(x.shape[1], classes, requires_grad=True)
    bias = x.new_zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(x @ weight + bias, y) + PENALTY / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (queries @ weight + bias).numpy(force=True)
