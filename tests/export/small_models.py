"""Small models of the core with random weights, whose exits differ, and rows for them."""

from functools import cache

import numpy as np
import torch

from mini_ee.bert import Bert, Exits
from mini_ee.consistent import PolicyExits
from mini_ee.data import Rows, open_task
from mini_ee.lora_exits import LoRAExits
from mini_ee.rules import MEASURES, Threshold

EXITS = (1, 3, 4)
CONFIG = {"model_type": "bert", "vocab_size": 8000, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIG |= {"intermediate_size": 64, "max_position_embeddings": 128, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
KINDS = ("joint", "first token", "policies", "lora", "regression")


@cache
def model_of(kind: str) -> Exits:
    """A model of four layers in which no weight is zero."""
    torch.manual_seed(1)
    bert, classes = Bert(CONFIG), 1 if kind == "regression" else 3
    if kind == "lora":
        model: Exits = LoRAExits(bert, EXITS, classes, rank=3, targets=("query", "value", "up", "attention_output"))
    elif kind == "policies":
        model = PolicyExits(bert, EXITS, classes)
    else:
        model = Exits(bert, EXITS, classes, pool="first" if kind == "first token" else "mean")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.3 * torch.randn_like(parameter) if not name.startswith("bert") else 0
            parameter += 0.02 * torch.randn_like(parameter)
        logits = model.eval()(rows_of(kind).batch(range(40)))
        for head, mean, spread in zip(model.heads, logits.mean(0), logits.std(0)):  # so that rows differ
            head[3].weight /= spread[:, None]
            head[3].bias.copy_((head[3].bias - mean) / spread)
    return model


@cache
def rows_of(kind: str, pairs: bool = False) -> Rows:
    """40 rows of different lengths, of three classes or of numbers."""
    _, rows = open_task("", "bert", 128, 10, 0)
    rows = rows.take(range(40))
    kinds = [[0] * 3 + [1] * (len(ids) - 3) for ids in rows.ids] if pairs else rows.kinds
    if kind == "regression":
        return Rows(rows.ids, kinds, rows.labels.float(), ())
    return Rows(rows.ids, kinds, rows.labels, ("bad", "fair", "good"))


@cache
@torch.inference_mode()
def median_threshold(kind: str, measure: str) -> Threshold:
    """A threshold at which half of the rows stop at the first exit."""
    logits = model_of(kind)(rows_of(kind).batch(range(40))).numpy()
    return Threshold(float(np.median(MEASURES[measure](logits[:, 0])).round(4)), measure)
