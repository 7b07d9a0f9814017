"""A row: one vector of a sentence or a pair, read after chosen layers of a backbone.

ExitHead            what reads hidden states: one vector a row, then a classifier
MultiExit           nn.Module: a backbone and one head an exit; its forward gives all exits' logits, for training
PolicyExits         the same, whose exits say themselves when to leave: an exit_logit beside the logits
TorchSegments       the model as segments for early_exit
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.backbones.bert import Bert, padding_mask
from mini_ee.backbones.flops import backbone_layer_flops, head_flops
from mini_ee.backbones.llama import Decoder
from mini_ee.early_exit import Reading, Segments
from mini_ee.units.heads import exit_heads


def without_heads(backbone: Bert | Decoder) -> Bert | Decoder:
    """The same backbone, without what exits do not read: poolers, the head to words and, in a decoder, its norm."""
    backbone.lm_head = None
    if isinstance(backbone, Bert):
        backbone.poolers = nn.ModuleDict()
    else:
        backbone.norm = None
    return backbone


def first_layers(backbone: Bert | Decoder, layers: int) -> Bert | Decoder:
    """A copy of the embeddings and the layers 1 .. layers."""
    kept = deepcopy(backbone.layers[:layers])
    small = without_heads(deepcopy(backbone, {id(backbone.layers): kept}))  # the other layers are not copied
    small.config = replace(backbone.config, num_hidden_layers=layers)
    return small


def even_exits(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` exits as evenly spread as whole layers allow, the last at num_layers.

    >>> even_exits(12, 4), even_exits(6, 4)
    ((3, 6, 9, 12), (2, 3, 4, 6))
    """
    count = min(count, num_layers)
    return tuple(sorted({round(num_layers * (i + 1) / count) for i in range(count)}))


def check_exits(exits: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The same exits, or ValueError: they must ascend within 1..L and end at L."""
    ascending = all(a < b for a, b in zip(exits, exits[1:]))
    if not exits or not ascending or exits[0] < 1 or exits[-1] != num_layers:
        raise ValueError(
            f"exits must ascend from at least 1 and end at the last layer, {num_layers}, "
            f"got {','.join(map(str, exits)) or 'none'}"
        )
    return exits


class MultiExit(nn.Module):
    """A backbone with a head after each layer in `exits`. num_labels is 1 for regression."""

    def __init__(self, backbone: Bert | Decoder, exits: tuple[int, ...], num_labels: int, pool: str = "mean"):
        super().__init__()
        self.exits = check_exits(exits, backbone.config.num_hidden_layers)
        self.num_labels, self.pool = num_labels, pool
        self.backbone = backbone
        self.heads = exit_heads(backbone, len(exits), num_labels, pool)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, detach: bool = False
    ) -> list[Tensor]:
        """Logits (B, C) of every exit. The three inputs are (B, T) int64.

        detach: no gradient flows from an exit past the one before it (SWEET).
        """
        mask = padding_mask(attention_mask)
        hidden, depth, logits = self.backbone.embed(input_ids, token_type_ids), 0, []
        for layer, head in zip(self.exits, self.heads):
            hidden, depth = self.backbone.run_layers(hidden, mask, depth, layer), layer
            logits.append(head(hidden, mask))
            hidden = hidden.detach() if detach else hidden
        return logits

    def segments(self) -> "TorchSegments":
        """What early_exit drives."""
        return TorchSegments(self)

    def whole(self) -> Segments:
        """The model without early exits, for NeverExit: what a speed-up is measured against."""
        return self.segments()


class TorchState(NamedTuple):
    """The rows still in the model."""

    hidden: Tensor  # (B, T, D)
    mask: Tensor | None  # (B, 1, 1, T)

    def keep(self, rows: np.ndarray) -> "TorchState":
        index = torch.from_numpy(rows).to(self.hidden.device)
        return TorchState(self.hidden[index], None if self.mask is None else self.mask[index])


class TorchSegments(Segments):
    """The segments of a MultiExit in eval mode. Inputs are tasks.Inputs."""

    engine = "torch"

    def __init__(self, model: MultiExit):
        self.model = model.eval()
        self.exits = model.exits
        self.device = next(model.parameters()).device
        self.starts = (0, *model.exits)

    def running(self) -> torch.inference_mode:
        """Without gradients: asked once a batch, since once a call is felt at batch 1."""
        return torch.inference_mode()

    def start(self, inputs) -> TorchState:
        hidden = self.model.backbone.embed(self._tensor(inputs.input_ids), self._tensor(inputs.token_type_ids))
        # Asked of the inputs: on a GPU the question to a tensor would wait for the device.
        return TorchState(hidden, padding_mask(self._tensor(inputs.attention_mask)) if inputs.padded else None)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def advance(self, k: int, state: TorchState) -> TorchState:
        hidden = self.model.backbone.run_layers(state.hidden, state.mask, self.starts[k], self.exits[k])
        return TorchState(hidden, state.mask)

    def read(self, k: int, state: TorchState) -> Reading:
        return Reading(self.model.heads[k](state.hidden, state.mask).float().numpy(force=True))

    def flops(self, k: int, inputs) -> tuple[float, float]:
        backbone, tokens = self.model.backbone, inputs.input_ids.shape[1]
        averaged = tokens if self.model.pool == "mean" else 0
        head = head_flops(backbone.config.hidden_size, self.model.num_labels, averaged)
        return self.layer_passes(k) * backbone_layer_flops(backbone, tokens), head

    def facts(self) -> dict:
        """What an exported folder says of the model beside its graphs."""
        return {"unit": "rows", "pool": self.model.pool, "num_labels": self.model.num_labels}

    def graphs(self) -> dict[str, Callable]:
        """ONNX graphs: name -> what writes one. A segment is `advance` and `read` of one exit."""
        segments = {f"segment_{layer}": partial(self._graph, k) for k, layer in enumerate(self.exits)}
        return segments | {"full": self.graph_whole}

    def graph_whole(self, g) -> None:
        """All layers and the last head: the model without early exits."""
        self._graph(len(self.exits) - 1, g, whole=True)

    def _graph(self, k: int, g, whole: bool = False) -> None:
        backbone, last, begins = self.model.backbone, k == len(self.exits) - 1, whole or k == 0
        width = backbone.config.hidden_size
        hidden, mask = backbone.graph_embed(g) if begins else graph_rows(g, width), graph_mask(g)
        start = 0 if begins else self.starts[k]
        hidden = backbone.graph_layers(g, hidden, backbone.graph_around(g, mask), start, self.exits[k])
        if not last:
            g.output("hidden_out", hidden, "batch", "tokens", width)
        graph_reading(g, partial(self._graph_read, k, g, hidden, mask), self.model.num_labels, optional=not last)

    def _graph_read(self, k: int, g, hidden: str, mask: str) -> tuple[str, str | None]:
        """read: logits (B, C), and the exit_logit (B,) where the exit decides."""
        head = self.model.heads[k]
        return head.graph_classify(g, head.graph_state(g, hidden, mask)), None


class PolicyExits(MultiExit):
    """What the models share whose exits decide. Subclasses give exit_logit and policy_flops."""

    policy_flops: float  # operations of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """(B, D) -> (B,): above 0 where exit k, which is not the last, would rather have the row leave."""
        raise NotImplementedError

    def graph_exit_logit(self, g, k: int, state: str) -> str:
        """exit_logit."""
        raise NotImplementedError

    def states(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
        """The pooled state of every exit, (B, D) each. The three inputs are (B, T) int64."""
        mask = padding_mask(attention_mask)
        hidden, depth, states = self.backbone.embed(input_ids, token_type_ids), 0, []
        for layer, head in zip(self.exits, self.heads):
            hidden, depth = self.backbone.run_layers(hidden, mask, depth, layer), layer
            states.append(head.state(hidden, mask))
        return states

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(B, D) -> logits (B, C) of exit k."""
        return self.heads[k].classify(state)

    def exit_logits(self, states: list[Tensor]) -> Tensor:
        """What all exits but the last say of their states: (B, K - 1), in float32."""
        return torch.stack([self.exit_logit(k, state) for k, state in enumerate(states[:-1])], dim=1).float()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
        """Logits (B, C) of every exit."""
        states = self.states(input_ids, attention_mask, token_type_ids)
        return [self.classify(k, state) for k, state in enumerate(states)]

    def segments(self) -> "PolicySegments":
        """What early_exit drives."""
        return PolicySegments(self)


class PolicySegments(TorchSegments):
    """The segments of a PolicyExits in eval mode."""

    def read(self, k: int, state: TorchState) -> Reading:
        s = self.model.heads[k].state(state.hidden, state.mask)
        logits = self.model.classify(k, s).float().numpy(force=True)
        if k == len(self.exits) - 1:
            return Reading(logits)
        return Reading(logits, self.model.exit_logit(k, s).float().numpy(force=True))

    def flops(self, k: int, inputs) -> tuple[float, float]:
        advance, read = super().flops(k, inputs)
        return advance, read + (self.model.policy_flops if k < len(self.exits) - 1 else 0.0)

    def _graph_read(self, k: int, g, hidden: str, mask: str) -> tuple[str, str | None]:
        state = self.model.heads[k].graph_state(g, hidden, mask)
        logits = self.model.heads[k].graph_classify(g, state)
        return logits, self.model.graph_exit_logit(g, k, state) if k < len(self.exits) - 1 else None


# ---- What the ONNX graphs of all segments have in common ----
def graph_mask(g) -> str:
    """The input attention_mask (B, T) of 1 and 0, as true and false."""
    return g.cast(g.input("attention_mask", "batch", "tokens"), bool)


def graph_rows(g, width: int) -> str:
    """Hidden states (B', T, D) of the graph before, and of them those `rows` (B,): compaction, on the device."""
    hidden = g.input("hidden", "rows_before", "tokens", width, dtype=g.dtype)
    return g.op("Gather", hidden, g.input("rows", "batch"))


def graph_reading(g, read: Callable[[], tuple[str, str | None]], classes: int, optional: bool) -> None:
    """What an exit says, as outputs in float32: logits; max_probability of classes; exit_logit where it decides.

    read: writes the logits (B, C) and the exit_logit (B,) or None. The head is in the graph of its segment, since a
    graph of its own costs more to call than to compute. optional: it runs where the input `read` () is true, else its
    outputs have no rows.
    """

    def said() -> list:
        logits, exit_logit = read()
        logits = g.float32(logits)
        values = [g.value(logits, "batch", classes, dtype=np.float32)]
        if classes > 1:  # judged in the graph: after a segment, numpy's code is no longer in the processor's caches
            surest = g.op("ReduceMax", g.op("Softmax", logits, axis=1), g.integers(1), keepdims=0)
            values.append(g.value(surest, "batch", dtype=np.float32))
        if exit_logit is not None:
            values.append(g.value(g.float32(exit_logit), "batch", dtype=np.float32))
        return values

    names = ["logits", *["max_probability"] * (classes > 1), "exit_logit"]
    values = g.only_if(g.input("read", dtype=bool), said) if optional else said()
    for name, value in zip(names, values):
        g.output(name, value.name, *value.axes, dtype=value.dtype)
