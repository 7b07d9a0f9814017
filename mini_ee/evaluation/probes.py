"""What every layer of a model says, before anything is trained: of its tokens or rows, next to what the last one says.

    logit lens         a token             the decoder's own final norm and head after every layer
    linear probe       a row with a label  logistic regression on the frozen pooled state, fitted on other rows
    nearest neighbour  a row without       which of some other rows has the nearest state, by cosine, those centred

Sources: the lens, nostalgebraist 2020, "interpreting GPT: the logit lens"; probes, Alain & Bengio 2016,
arXiv:1610.01644. The lens is the low side: heads that are trained agree more often with the last layer, in the first
layers above all (results/self-supervised.md). Neighbours are the strictest: of hundreds of rows it has to be the very
same one.

Symbols:   N units, L layers, D the width of a state, C classes, V words.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.backbones.backbone import Backbone, padding_mask
from mini_ee.calibration import Observed, observe
from mini_ee.confidence import MEASURES
from mini_ee.data.decoder_texts import Text, cut_text
from mini_ee.data.files import read_text
from mini_ee.data.metrics import majority
from mini_ee.data.progress import tqdm
from mini_ee.data.tasks import Split, Task, subset
from mini_ee.data.tokenizer import Encoded, batches
from mini_ee.errors import WrongArguments
from mini_ee.exits.generation import token_weights
from mini_ee.exits.heads import pooled
from mini_ee.exits.row_exits import STATES_BATCH
from mini_ee.exits.token_exits import TEXTS_BATCH, record_texts
from mini_ee.training.training_text import Source, check_reads_on, texts_to_calibrate

MIN_PROBED = 40  # texts, or rows that are asked
PROBE_TOKENS = 64  # tokens of a text
PENALTY = 0.1  # of .001 to 1 near the best for MiniLM on TREC and SST-2 and bert-12x128 on reviews, on rows of train
LOGITS_AT_ONCE = 2**25


class Costs(NamedTuple):
    """What is computed beside the layers, in layers, by operations."""

    head: float  # one head
    start: float  # what comes before the first layer, as a T5's encoder


class ProbeResult(NamedTuple):
    """What the layers but the last say of N units, and what it costs to ask one."""

    how: str
    observed: Observed
    costs: Costs
    accuracy: list[float] | None = None  # of each layer, the last too
    majority: float | None = None  # the share of the most frequent label


# ---- Tokens ----


class Lens(nn.Module):
    """A decoder whose own norm and head are read after every layer: a model as record_texts takes it."""

    policy = None

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.backbone, self.exits = backbone, tuple(range(1, backbone.config.num_hidden_layers + 1))

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(N, D) of any layer -> logits (N, V)."""
        return self.backbone.lm_logits(state)


def texts_to_read(source: Source) -> list[Text]:
    """A file in pieces, drawn with the seed; without a file what the decoder writes itself, as for `calibrate`."""
    count, path = source.options.texts, source.options.text
    if path is None:
        return texts_to_calibrate(source)
    check_reads_on(source.backbone, "no --text")
    first = source.tokenizer.ids_of("")
    length = min(PROBE_TOKENS, source.backbone.config.max_tokens - len(first))
    ids = source.tokenizer.ids_of(read_text(path), special=False)
    if len(ids) < MIN_PROBED * length:
        wanted = f"{MIN_PROBED * length} tokens, {MIN_PROBED} pieces of {length}"
        raise WrongArguments(f"{path}: expected at least {wanted}, found {len(ids)} tokens; give a longer text")
    pieces = cut_text(ids, length, first)
    return [pieces[at] for at in np.random.default_rng(source.seed).permutation(len(pieces))[:count]]


def probe_tokens(backbone: Backbone, texts: list[Text]) -> ProbeResult:
    """Every token of the texts through the logit lens."""
    batch = max(1, min(TEXTS_BATCH, LOGITS_AT_ONCE // (PROBE_TOKENS * backbone.config.vocab_size)))
    recorded = record_texts(Lens(backbone).eval(), texts, batch)
    head = 2.0 * token_weights(backbone).head
    layer = (recorded.full_flops - head) / backbone.config.num_hidden_layers
    return ProbeResult("logit lens", observe(recorded), Costs(head / layer, 0.0))


# ---- Rows ----


def rows_to_read(source: Path | Task, count: int, seed: int) -> tuple[Split, int]:
    """(rows, classes), so many drawn with the seed: of a task's train split, or a file's lines, which have no classes.

    The split that is reported is not looked at. Raises WrongArguments for a regression, and for a task without train.
    """
    if isinstance(source, Path):
        lines = tuple((line.strip(),) for line in read_text(source).split("\n") if line.strip())
        name, rows, classes = source, Split(lines, None), 0
    else:
        if source.regression:
            raise WrongArguments(
                f"{source.name}: is a regression, which no probe here says; give its texts, --text FILE"
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
    """The mean over a row's tokens after every layer: (N, L, D), behind the norm that a decoder's states need."""
    norm, found = backbone.exit_norm(), None
    norm = nn.Identity() if norm is None else norm.to(backbone.device)
    for rows in tqdm(list(batches(encoded, STATES_BATCH)), desc="reading", unit="batch", delay=2):
        inputs = encoded.batch(rows)
        mask = padding_mask(inputs.attention_mask, backbone.device)
        layers = backbone.hidden_states(inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)[1:]
        states = torch.stack([pooled(norm(hidden), mask, "mean") for hidden in layers], dim=1)
        found = np.empty((len(encoded), *states.shape[1:]), np.float32) if found is None else found
        found[rows] = states.float().numpy(force=True)
    return found


def probe_rows(backbone: Backbone, encoded: Encoded, labels: np.ndarray | None, classes: int, seed: int) -> ProbeResult:
    """Half of the rows, drawn with the seed, through what the other half teaches.

    labels: (N,), of so many classes, for probes; None for neighbours. Raises WrongArguments for too few rows or labels.
    """
    drawn = np.random.default_rng(seed).permutation(len(encoded))
    taught, asked = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    if labels is not None and len(np.unique(labels[taught])) < 2:
        raise WrongArguments("expected rows of two labels or more, found one among those drawn; give more rows")
    states = layer_states(backbone, encoded)
    pairs = [(states[taught, k], states[asked, k]) for k in range(states.shape[1])]
    if labels is None:
        how, measure, said = "nearest neighbour", "breaking_ties_logits", [neighbours(*pair) for pair in pairs]
    else:
        how, measure = "linear probe", "max_probability"
        said = [linear_probe(*pair, labels[taught], classes) for pair in pairs]
    likeliest = np.stack([logits.argmax(axis=1) for logits in said], axis=1)  # (N, L)
    confidence = np.stack([MEASURES[measure][0](logits) for logits in said[:-1]], axis=1)
    observed = Observed(confidence, likeliest[:, :-1] == likeliest[:, -1:], np.arange(len(asked)))
    tokens, width = float(np.mean([len(ids) for ids in encoded.ids])), states.shape[2]
    head = 2 * width * classes + tokens * width
    layer = backbone.layer_flops(tokens)
    probed = ProbeResult(how, observed, Costs(head / layer, backbone.start_flops(tokens) / layer))
    if labels is None:
        return probed
    right = likeliest == labels[asked][:, None]
    return probed._replace(accuracy=right.mean(axis=0).tolist(), majority=majority(labels[asked]))


def neighbours(taught: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Cosines of asked states (N, D) with taught ones (M, D), all less the mean of the taught: (N, M)."""
    asked, taught = (each - taught.mean(axis=0) for each in (asked, taught))
    asked, taught = (each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-12) for each in (asked, taught))
    return asked @ taught.T


def linear_probe(taught: np.ndarray, asked: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Logits (N, C) of asked states (N, D), by what was learned from taught ones (M, D) and their labels (M,).

    A logistic regression of the standardised states: the mean cross-entropy, plus PENALTY / 2 times the squared
    weights, at its minimum.
    """
    mean, std = taught.mean(axis=0), np.maximum(taught.std(axis=0), 1e-6)
    taught, asked, labels = (torch.from_numpy(each) for each in ((taught - mean) / std, (asked - mean) / std, labels))
    weight = taught.new_zeros(taught.shape[1], classes, requires_grad=True)
    bias = taught.new_zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(taught @ weight + bias, labels) + PENALTY / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (asked @ weight + bias).numpy(force=True)
