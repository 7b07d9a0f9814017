"""A fine-tuned classifier in a Hugging Face folder: its head, and the names of its labels."""

from pathlib import Path

from torch import Tensor

from mini_ee.backbones.backbone import FineTunedHead, Layout
from mini_ee.backbones.sentence_encoder import POOLING, check_reranker
from mini_ee.data.files import read_json
from mini_ee.data.sentence_files import MODULES, transformer_folder
from mini_ee.data.values import shortened
from mini_ee.errors import WrongArguments

CLASSIFIES = "ForSequenceClassification"
"""How Hugging Face ends the name of a fine-tuned classifier, or regression, in config.json."""

MULTI_LABEL = "multi_label_classification"
"""The problem_type of a classifier that gives an input several labels at once, by a sigmoid for each."""

MOST_LABELS = 63  # of several at once: their sets are numbered in int64

POOLS = {"cls": "first"}  # Hugging Face's name of a pooling -> ours


def classification_head(tensors: dict[str, Tensor], layout: Layout, folder: Path) -> FineTunedHead | None:
    """The own head of a fine-tuned classifier; None for another model, or if a part of the head is missing."""
    config = read_json(folder / "config.json")
    if layout.head is None or not _classifies(config):
        return None
    plain = {
        name.removeprefix(layout.prefix).removeprefix(layout.classifier_prefix): part for name, part in tensors.items()
    }
    parts = ("norm", "dense", "dense_norm", "out")
    maps = {part: name for part in parts if (name := getattr(layout.head, part))}
    names = {f"{ours}.{leaf}": f"{theirs}.{leaf}" for ours, theirs in maps.items() for leaf in ("weight", "bias")}
    weights = {ours: plain[theirs].float() for ours, theirs in names.items() if theirs in plain}
    if any(f"{ours}.weight" not in weights for ours in maps):
        return None
    activation = config.get(layout.head.activation_key, layout.head.activation)
    pool = config.get(layout.head.pool_key, layout.head.pool)
    own = layout.head._replace(activation=activation, pool=POOLS.get(pool, pool))
    return FineTunedHead(own, weights, config.get("problem_type") == MULTI_LABEL)


def is_sentence_encoder(folder: Path) -> bool:
    """Whether a folder names a pooling of embeddings, and its model is no classifier, such as a reranker."""
    names_pooling = (folder / MODULES).is_file() or (folder / POOLING / "config.json").is_file()
    return names_pooling and not _classifies(read_json(transformer_folder(folder) / "config.json"))


def _classifies(config: dict) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and str(*named[:1]).endswith(CLASSIFIES)


def is_multi_label(folder: str | Path) -> bool:
    """Whether a fine-tuned classifier gives an input several labels at once."""
    return read_json(transformer_folder(folder) / "config.json").get("problem_type") == MULTI_LABEL


def label_names(folder: str | Path) -> tuple[str, ...]:
    """The labels of a fine-tuned classifier, in the order of its logits; empty for a regression.

    Raises WrongArguments for a model that is no classifier, one of several numbers, or of too many labels at once.
    """
    folder = Path(folder)
    check_reranker(folder)
    config = read_json(transformer_folder(folder) / "config.json")
    if not _classifies(config):
        named = config.get("architectures")
        found = shortened(named[0] if isinstance(named, list) and named else named)
        raise WrongArguments(
            f"{folder}: expected a fine-tuned classifier, architectures of config.json a ...{CLASSIFIES}, found {found}"
            f"; `mini-ee train joint` trains one"
        )
    names = config.get("id2label")
    names = [names[key] for key in sorted(names, key=int)] if isinstance(names, dict) else ["LABEL_0", "LABEL_1"]
    problem = config.get("problem_type") or ("regression" if len(names) == 1 else "single_label_classification")
    if problem == MULTI_LABEL and not 2 <= len(names) <= MOST_LABELS:
        found = f"several labels at once ({problem}) of {len(names)}"
        raise WrongArguments(f"{folder}: gives an input {found}; from 2 to {MOST_LABELS} are supported")
    if problem == "regression" and len(names) != 1:
        raise WrongArguments(f"{folder}: predicts {len(names)} numbers for an input ({problem}): not supported yet")
    return () if problem == "regression" else tuple(map(str, names))
