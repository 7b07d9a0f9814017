"""The head of a fine-tuned classifier, among the tensors of its checkpoint. fine_tuned.py names its labels."""

from torch import Tensor

from mini_ee.lab.backbones.backbone import FineTunedHead, Layout

CLASSIFIES = "ForSequenceClassification"
"""How Hugging Face ends the name of a fine-tuned classifier, or regression, in config.json."""

MULTI_LABEL = "multi_label_classification"
"""The problem_type of a classifier that gives an input several labels at once, by a sigmoid for each."""

POOLS = {"cls": "first"}  # Hugging Face's name of a pooling -> ours


def classification_head(plain: dict[str, Tensor], layout: Layout, config: dict) -> FineTunedHead | None:
    """The own head of a fine-tuned classifier; None for another model, or if a part of the head is missing.

    plain: all tensors of the checkpoint, with names without prefix. config: the content of config.json.
    """
    if layout.head is None or not classifies(config, True):
        return None
    head, unbiased = layout.head, set()
    parts = ("norm", "dense", "dense_norm", "out")
    maps = {part: name for part in parts if (name := getattr(head, part))}
    if head.pool == "last":  # transformers gives the head of a decoder no bias, and passes over one in the file
        unbiased.add("out.bias")
    if head.dense_bias_key is not None and not config.get(head.dense_bias_key):
        unbiased.add("dense.bias")
    names = {f"{ours}.{leaf}": f"{theirs}.{leaf}" for ours, theirs in maps.items() for leaf in ("weight", "bias")}
    weights = {ours: plain[name].float() for ours, name in names.items() if name in plain and ours not in unbiased}
    needed = {f"{ours}.weight" for ours in maps} | {f"{ours}.bias" for ours in maps if "norm" not in ours} - unbiased
    if not needed <= weights.keys():
        return None
    activation = config.get(head.activation_key, head.activation)
    pool = config.get(head.pool_key, head.pool)
    own = head._replace(activation=activation, pool=POOLS.get(pool, pool))
    return FineTunedHead(own, weights, config.get("problem_type") == MULTI_LABEL)


def classifies(config: dict, unnamed: bool) -> bool:
    """Whether config.json names a classifier among its architectures; `unnamed` if it names none at all."""
    named = config.get("architectures")
    named = [named] if isinstance(named, str) else named
    return any(str(each).endswith(CLASSIFIES) for each in named) if isinstance(named, list) and named else unnamed
