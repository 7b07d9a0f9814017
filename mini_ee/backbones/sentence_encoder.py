"""The pooling of a sentence encoder, as sentence-transformers stores it in a Hugging Face folder.

modules.json lists the modules: the transformer, its pooling, and for some models a norm to length 1. The folder of the
pooling, often 1_Pooling, has a config.json. max_seq_length is in sentence_bert_config.json. No torch here.
"""

import json
from pathlib import Path
from typing import NamedTuple

from mini_ee.data.files import read_json, read_text
from mini_ee.data.values import shortened
from mini_ee.errors import WrongArguments

MODULES, POOLING, LENGTH = "modules.json", "1_Pooling", "sentence_bert_config.json"

POOLS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first", "pooling_mode_lasttoken": "last"}
"""Key of sentence-transformers -> our name of the pooling. Its other poolings are not supported."""


class SentencePooling(NamedTuple):
    """How the hidden states of the last layer become an embedding."""

    pool: str = "mean"  # or first, last
    normalize: bool = False  # to length 1
    max_length: int | None = None  # in tokens; None: not known


def sentence_pooling(folder: Path) -> SentencePooling:
    """The pooling of a model's folder; the mean over the tokens if no file names one.

    Raises WrongArguments for a pooling or a module that is not supported, such as a dense layer.
    """
    places, normalize = {"Pooling": POOLING}, False
    if (folder / MODULES).is_file():
        modules = json.loads(read_text(folder / MODULES))
        if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
            raise WrongArguments(f"{folder / MODULES}: expected a list of modules, found {shortened(modules)}")
        places = {str(each.get("type")).rpartition(".")[2]: str(each.get("path", "")) for each in modules}
        foreign = sorted(places.keys() - {"Transformer", "Pooling", "Normalize"})
        if foreign:
            expected = "a transformer, its pooling and a norm"
            raise WrongArguments(f"{folder / MODULES}: expected {expected}, found {', '.join(foreign)}: not supported")
        normalize = "Normalize" in places
    return SentencePooling(_pool(folder / places.get("Pooling", POOLING) / "config.json"), normalize, _length(folder))


def _pool(path: Path) -> str:
    if not path.is_file():
        return "mean"
    config = read_json(path)
    prefix = "pooling_mode_"
    chosen = [key for key, value in config.items() if key.startswith(prefix) and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLS:
        found = ", ".join(chosen) or "none"
        raise WrongArguments(f"{path}: expected one pooling of {', '.join(POOLS)}, found {found}; give --pool")
    return POOLS[chosen[0]]


def _length(folder: Path) -> int | None:
    path = folder / LENGTH
    length = read_json(path).get("max_seq_length") if path.is_file() else None
    return length if type(length) is int and length > 0 else None
