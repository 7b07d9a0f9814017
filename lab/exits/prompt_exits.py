"""RAEE's prompt mode: every layer is an exit with the model's own language head, and label words are the classes.

Source: RAEE (see methods/raee.py), Algorithm 3.1, lines 4 to 8; shots are drawn as in LM-BFF (Gao et al. 2021).
An encoder is read at its mask token through the masked-LM head; a decoder at the last token of the row through the
final norm and the LM head; an encoder-decoder at the first token of its answer. No head is trained. Probabilities are
normalised over the label words, as in the paper's Fig. 2; its algorithm takes the softmax over the vocabulary.
Templates and label words are in data/prompt_templates.py.

PromptModel       a backbone and its label words
PromptSegments    the same model as segments for early_exit
draw_shots        rows to fine-tune on, rows to choose the epoch on, and the others
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_ee.lab.backbones.backbone import Backbone, LayerContext, Tensors, tensor_on, token_places
from mini_ee.lab.data.prompt_templates import DECODER, ENCODER, PromptTokenizer, check_kind
from mini_ee.lab.data.tasks import Split
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.row_exits import ExitModel, RowSegments, check_exits
from mini_ee.lab.segments import check_finite

KIND_READ_AT = {"mask": ENCODER, "last": DECODER, "first": DECODER}  # Backbone.reads_prompt_at -> kind of the prompt


# ---- The model ----
class PromptModel(ExitModel):
    """A backbone whose own language head is used at every exit; logits (B, C) are those of the label words.

    exits: by default every layer. The first may be 0, the output of the embeddings, for rules that plan.
    """

    unit = "prompts"
    policy = None

    def own_state(self) -> dict[str, Tensor]:
        """Nothing: a run contains the backbone as a checkpoint, or only its name."""
        return {}

    def __init__(self, backbone: Backbone, tokenizer: PromptTokenizer, exits: tuple[int, ...] | None = None):
        """Raises ValueError if the backbone has no language head, if the prompt is of another kind, or if exits do not
        ascend to the last layer."""
        super().__init__()
        check_kind(tokenizer.prompt, KIND_READ_AT[backbone.reads_prompt_at])
        if not backbone.has_lm_head:
            raise ValueError(f"prompts need a language head, but {backbone.no_lm_head()}")
        self.backbone = backbone
        self.mask_token_id = tokenizer.mask_token_id if backbone.reads_prompt_at == "mask" else None
        layers = backbone.config.num_hidden_layers
        self.exits = exits = exits or tuple(range(1, layers + 1))
        check_exits(exits, layers, least=0)
        self.num_labels, self.pool = len(tokenizer.label_tokens), backbone.reads_prompt_at
        self.register_buffer("label_tokens", torch.tensor(tokenizer.label_tokens), persistent=False)

    def read_at(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Position of the token that the head reads, (B,): the mask, the last token without padding, or the first."""
        if self.pool == "first":
            return torch.zeros_like(input_ids[:, 0])
        if self.mask_token_id is None:
            return (attention_mask * token_places(attention_mask)).argmax(1)  # the largest position with mask 1
        masks = input_ids == self.mask_token_id
        if torch.is_nonzero((masks.sum(1) != 1).any()):
            raise ValueError("expected one mask token in every row, found another number; encode with PromptTokenizer")
        return masks.int().argmax(1)

    def label_logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        """hidden (B, T, D) of any layer, read at (B,) -> (B, C) float32: the head's logits of the label words."""
        read = hidden.gather(1, at[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        return self.backbone.lm_logits(read, self.label_tokens).float()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Logits (B, C) of the last exit. The three inputs are (B, T) int64."""
        inputs = Tensors(input_ids, attention_mask, token_type_ids)
        hidden = self.backbone.run_layers(self.backbone.embed(inputs), self.backbone.context(inputs), 0, self.exits[-1])
        return self.label_logits(hidden, self.read_at(input_ids, attention_mask))

    def segments(self) -> "PromptSegments":
        return PromptSegments(self)


class PromptState(NamedTuple):
    """The rows that have not exited."""

    hidden: Tensor  # (B, T, D)
    context: LayerContext
    at: Tensor  # (B,), position of the token that the head reads

    def keep(self, rows: np.ndarray) -> "PromptState":
        index = tensor_on(self.hidden.device, rows)
        return PromptState(self.hidden[index], self.context.keep(index), self.at[index])


class PromptSegments(RowSegments):
    """The segments of a PromptModel in eval mode. Inputs come from a PromptTokenizer."""

    def start(self, inputs: Inputs) -> PromptState:
        backbone = self.model.backbone
        at = self.model.read_at(*(tensor_on(backbone.device, x) for x in (inputs.input_ids, inputs.attention_mask)))
        return PromptState(backbone.embed(inputs), backbone.context(inputs), at)

    def read(self, k: int, state: PromptState) -> np.ndarray:
        logits = self.model.label_logits(state.hidden, state.at).numpy(force=True)
        return check_finite(logits, "the logits of the label words")

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        """As in Segments. The head is computed at one token, and only for the label words."""
        backbone = self.model.backbone
        layers = self.layer_passes(k) * backbone.layer_flops(inputs.input_ids.shape[1])
        layers += 0.0 if k else backbone.start_flops(inputs.input_ids.shape[1])
        return layers, backbone.lm_head_flops(self.model.num_labels)


def draw_shots(split: Split, num_labels: int, shots: int, seed: int) -> tuple[Split, Split, Split]:
    """(train, held_out, rest): `shots` rows per class to train on, as many to choose the best epoch, and the others.

    Raises ValueError if a class has too few rows.
    """
    order = np.random.default_rng(seed).permutation(len(split))
    part = np.zeros(len(split), np.int64)  # 0 for the rest
    for label in range(num_labels):
        rows = order[split.labels[order] == label]
        if len(rows) < 2 * shots:
            raise ValueError(f"expected {2 * shots} rows of class {label} for {shots} shots, found {len(rows)}")
        part[rows[:shots]], part[rows[shots : 2 * shots]] = 1, 2
    train, held_out, rest = (split.take(part == number) for number in (1, 2, 0))
    return train, held_out, rest
