"""The nine tasks of GLUE (Wang et al. 2018, arXiv:1804.07461v3): labels, metrics, and columns to recognise them by."""

from typing import NamedTuple


class GlueTask(NamedTuple):
    """A task of GLUE. label_names are in Hugging Face's order; a regression has none."""

    name: str
    label_names: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    columns: tuple[str, str] | None = None  # two columns by which its files are recognised, the second is the label


GLUE = (
    GlueTask("CoLA", ("unacceptable", "acceptable"), ("matthews",), ("star", "label")),
    GlueTask("SST-2", ("negative", "positive")),
    GlueTask("MRPC", ("not_equivalent", "equivalent"), ("accuracy", "f1"), ("#1 String", "Quality")),
    GlueTask("QQP", ("not_duplicate", "duplicate"), ("accuracy", "f1"), ("question1", "is_duplicate")),
    GlueTask("STS-B", (), ("pearson", "spearman"), ("sentence1", "score")),
    GlueTask("MNLI", ("entailment", "neutral", "contradiction"), columns=("label1", "gold_label")),
    GlueTask("QNLI", ("entailment", "not_entailment")),
    GlueTask("RTE", ("entailment", "not_entailment")),
    GlueTask("WNLI", ("not_entailment", "entailment")),
)
