"""MM (Rotem et al. 2023, arXiv:2306.02307v1): a cascade of independent models of several depths.

Source: Rotem et al. 2023; LoRAExit (see lora_exits.py), section 4, compares with it. Model k is the first e_k layers of
the pretrained backbone with its own head, fine-tuned alone. An example that does not stop at a model starts again in
the next one. The layer passes are those of LoRAExit's restart schedule; the memory is that of K models.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.row_exits import ExitModel, RowExits, RowState, check_exits
from mini_ee.lab.segments import Segments
from mini_ee.lab.training.method import Method, NoConfig
from mini_ee.lab.training.stages import Stage
from mini_ee.train import task_loss


class MultiModel(ExitModel):
    """One model for each depth in `exits`, each a RowExits with its last exit only."""

    def __init__(self, backbone: nn.Module, exits: tuple[int, ...], num_labels: int, pool: str = "mean"):
        super().__init__()
        self.exits = check_exits(exits, backbone.config.num_hidden_layers)
        self.num_labels, self.pool = num_labels, pool
        self.models = nn.ModuleList(
            RowExits(backbone.first_layers(layer), (layer,), num_labels, pool) for layer in self.exits
        )

    @property
    def backbone(self) -> nn.Module:
        """The backbone of the deepest model."""
        return self.models[-1].backbone

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
        """Logits (B, C) of every model. The three inputs are (B, T) int64."""
        return [model(input_ids, attention_mask, token_type_ids)[0] for model in self.models]

    def segments(self) -> "CascadeSegments":
        return CascadeSegments(self)


def recipe(model: MultiModel, config: NoConfig) -> list[Stage]:
    """One stage per model: plain fine-tuning."""

    def stage(k: int) -> Stage:
        return Stage(
            name=f"model {model.exits[k]}",
            trainable=lambda name: name.startswith(f"models.{k}."),
            loss=lambda model, batch: task_loss(model.models[k](*batch.inputs)[0], batch.labels),
            score=lambda scores: float(scores[k]),
        )

    return [stage(k) for k in range(len(model.exits))]


class CascadeState(NamedTuple):
    """The rows still in the cascade."""

    inputs: Inputs
    running: RowState | None  # in the model that ran last

    def keep(self, rows: np.ndarray) -> "CascadeState":
        return CascadeState(self.inputs.take(rows), self.running and self.running.keep(rows))


class CascadeSegments(Segments):
    """The models of a MultiModel in eval mode, one after the other."""

    engine = "torch"

    def __init__(self, model: MultiModel):
        self.model, self.exits = model, model.exits
        self.from_embeddings = range(len(model.exits))
        self._models = [stage.segments() for stage in model.models]

    def running(self) -> AbstractContextManager:
        return self._models[0].running()

    def start(self, inputs: Inputs) -> CascadeState:
        return CascadeState(inputs, None)

    def advance(self, k: int, state: CascadeState) -> CascadeState:
        segments = self._models[k]
        return CascadeState(state.inputs, segments.advance(0, segments.start(state.inputs)))

    def read(self, k: int, state: CascadeState) -> np.ndarray:
        return self._models[k].read(0, state.running)

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        return self._models[k].flops(0, inputs)

    def whole(self) -> Segments:
        """The deepest model alone."""
        return self._models[-1]


METHOD = Method(
    recipe=recipe,
    units=("rows",),
    model=lambda *parts: MultiModel(*parts[:4]),
    no_exit_0="its models consist of the first layers",
)
