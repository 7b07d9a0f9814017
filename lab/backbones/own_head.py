"""The head of a fine-tuned classifier, among the tensors of its checkpoint. fine_tuned.py names its labels."""

from torch import Tensor

from mini_ee.lab.backbones.backbone import FineTunedHead, HeadLayout, Layout
from mini_ee.lab.token_tasks import LABELS, SPAN

CLASSIFIES = "ForSequenceClassification"
"""How Hugging Face ends the name of a fine-tuned classifier, or regression, in config.json."""

TOKEN_HEADS = {LABELS: "ForTokenClassification", SPAN: "ForQuestionAnswering"}
"""The same of a model that labels tokens, or finds a span of them."""

MULTI_LABEL = "multi_label_classification"
"""The problem_type of a classifier that gives an input several labels at once, by a sigmoid for each."""

POOLS = {"cls": "first"}  # Hugging Face's name of a pooling -> ours


def classification_head(plain: dict[str, Tensor], layout: Layout, config: dict) -> FineTunedHead | None:
    """The own head of a fine-tuned model; None for another model, or if a part of the head is missing.

    plain: all tensors of the checkpoint, with names without prefix. config: the content of config.json.
    """
    head, unbiased = head_layout(layout, config), set()
    if head is None or not classifies(config, True):
        return None
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
    head = head._replace(activation=activation, pool=POOLS.get(pool, pool))
    kind = token_kind(config)
    return FineTunedHead(head, weights, not kind and config.get("problem_type") == MULTI_LABEL, kind)


def head_layout(layout: Layout, config: dict) -> HeadLayout | None:
    """The layout of the head that config.json names; None if heads of this kind are not loaded for the family.

    A head for tokens is one linear map, but for a family whose classifier normalises what its dense map returns
    (ModernBERT): it has the same maps for tokens.
    """
    head, kind = layout.head, token_kind(config)
    if head is None or not kind:
        return head
    if head.pool == "last":  # of a decoder
        return None
    if head.dense_norm is not None:
        return head._replace(pool="tokens", pool_key=None)
    return HeadLayout(out="classifier" if kind == LABELS else "qa_outputs", pool="tokens")


def classifies(config: dict, unnamed: bool) -> bool:
    """Whether config.json names a classifier, of texts or tokens; `unnamed` if it names no architecture at all."""
    named, endings = _named(config), (CLASSIFIES, *TOKEN_HEADS.values())
    return any(name.endswith(endings) for name in named) if named else unnamed


def token_kind(config: dict) -> str:
    """The kind of token_tasks.py of the model that config.json names; empty if it names another."""
    return next((kind for kind, end in TOKEN_HEADS.items() if any(name.endswith(end) for name in _named(config))), "")


def _named(config: dict) -> list[str]:
    named = config.get("architectures")
    return [named] if isinstance(named, str) else list(map(str, named)) if isinstance(named, list) else []
