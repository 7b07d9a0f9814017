"""A fine-tuned classifier as it is: its own head is the last exit, and heads are added after earlier layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.activations import ACTIVATIONS
from mini_ee.lab.backbones.backbone import Backbone
from mini_ee.lab.exits.heads import TOKENS, ExitHead
from mini_ee.lab.exits.row_exits import RowExits

HEAD_ACTIVATIONS = ACTIVATIONS | {"tanh": torch.tanh}


class ClassificationHead(ExitHead):
    """The own head of a fine-tuned model, of texts or of tokens, whose parts HeadLayout lists.

    Raises ValueError for a backbone without such a head, or with an activation that is not known.
    """

    replaceable = False

    def __init__(self, backbone: Backbone):
        if backbone.classification_head is None:
            raise ValueError(
                f"expected a fine-tuned classifier, a ...ForSequenceClassification in config.json, found a "
                f"{backbone.config.model_type} without classification head; `mini-ee train joint` trains one"
            )
        layout, weights, *_ = backbone.classification_head
        if layout.activation not in HEAD_ACTIVATIONS:
            known = ", ".join(HEAD_ACTIVATIONS)
            raise ValueError(f"{layout.activation_key} must be one of {known}, found {layout.activation!r}")
        if layout.pool not in ("first", "last", "mean", TOKENS):
            raise ValueError(f"{layout.pool_key} must be cls or mean, found {layout.pool!r}")
        num_labels, width = weights["out.weight"].shape
        super().__init__(width, num_labels, layout.pool, layout.norm and backbone.exit_norm())
        self.normalize = layout.normalize
        self.activation = HEAD_ACTIVATIONS[layout.activation]
        self.dense = nn.Linear(width, width, bias="dense.bias" in weights) if layout.dense else None
        self.dense_norm = backbone.exit_norm() if layout.dense_norm else None
        self.out = nn.Linear(width, num_labels, bias="out.bias" in weights)
        self.load_state_dict(weights)
        self.dropout = nn.Identity()  # nothing of it is trained
        self.requires_grad_(False)

    def inner(self, state: Tensor) -> Tensor:
        """What the last linear map reads, (B, D)."""
        if self.normalize:
            state = F.normalize(state, dim=1)
        if self.dense is None:
            return state
        inner = self.activation(self.dense(state))
        return inner if self.dense_norm is None else self.dense_norm(inner)


class FrozenClassifier(RowExits):
    """A fine-tuned classifier, or regression, whose backbone and head stay as they are; the other heads are trained.

    Raises ValueError if the checkpoint has no classification head, or one with another number of labels.
    """

    holds_backbone = False

    def __init__(self, backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str):
        super().__init__(backbone, exits, num_labels, pool)
        last_head = ClassificationHead(backbone)
        if last_head.out.out_features != num_labels:
            raise ValueError(f"expected a head of {num_labels} labels, found one of {last_head.out.out_features}")
        self.heads[-1], self.multi_label = last_head, backbone.classification_head.multi_label
        if last_head.pool == "last":
            backbone.text_end = backbone.config.pad_token_id

    def keep_exits(self, columns: list[int]) -> None:
        """Drop all exits but these, given by their places in `exits`; the last is among them."""
        self.exits = tuple(self.exits[k] for k in columns)
        self.heads = nn.ModuleList(self.heads[k] for k in columns)

    def is_trainable(self, name: str) -> bool:
        """Whether a training may change the parameter of this name."""
        return super().is_trainable(name) and not name.startswith(f"heads.{len(self.exits) - 1}.")
