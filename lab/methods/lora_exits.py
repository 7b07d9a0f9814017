"""LoRAExit (Liu et al. 2024, Findings of EMNLP): each exit has its own low-rank adapters on one frozen backbone.

The paper (2024.findings-emnlp.539 in the ACL Anthology), its equations and the cost of its schedules:
mini_ee/lora_exits.py. Here every family of the lab has such exits, with adapters on any projection, and a server or an
export runs them. A stream is the computation of one exit: the layers 1 .. e_k with the adapters of that exit.

Deviations besides those of the core, each with its test in tests/lab:
1. ALBERT's layers share one set of weights, and so one set of adapters per exit, as in PEFT (test_peft.py).
2. The paper leaves decoders to later work. Here they are classifiers that read the mean of their normed states
   (test_the_exits_of_decoders_compute_with_w_plus_ab).

Its other files     lora_exits_streams.py   inference: schedules, their cost, the segments that early_exit runs
                    lora_exits_sgmv.py      Eq. 6 for the linear maps of a backbone, faster than the core's loop;
                                            lora_exits_sgmv_triton.py is its kernel for a GPU
                    lora_exits_peft.py      adapters on disk, in PEFT's layout
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import mini_ee.lora_exits as paper
from mini_ee.lab.backbones.backbone import Backbone, Tensors
from mini_ee.lab.backbones.lora import check_lora, columns_of
from mini_ee.lab.backbones.targets import TARGETS
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.data.tokenizer import batches
from mini_ee.lab.exits.heads import exit_heads
from mini_ee.lab.exits.row_exits import ExitModel, RowData, RowExits, check_exits
from mini_ee.lab.methods.lora_exits_peft import load_adapters, save_adapters
from mini_ee.lab.methods.lora_exits_sgmv import Streams
from mini_ee.lab.methods.lora_exits_streams import LoRASegments, cheapest_schedule, measure_costs, parallel, restart
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage

WITHOUT_TEACHER = ("distill", "vanilla")  # the settings of distillation have no effect then

TEACHER_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method. Raises ValueError for an invalid value."""

    distill: str = option(
        "segd", "teacher of an exit: none (vanilla), the last exit (kd) or the next one (segd)", choices=paper.TEACHERS
    )
    temperature: float = option(
        paper.TEMPERATURE, "temperature T of Eq. 5; the paper tries 2, 10 and 20", above=0, unused_when=WITHOUT_TEACHER
    )
    weight: float = option(
        paper.LAMBDA,
        "weight of the distillation loss in Eq. 4",
        flag="--lambda",
        least=0,
        most=1,
        unused_when=WITHOUT_TEACHER,
    )
    t_squared: bool = option(
        False, "multiply the distillation loss by T squared, unlike the paper", unused_when=WITHOUT_TEACHER
    )
    rank: int = option(paper.RANK, "rank of the adapters", least=1)
    alpha: float = option(paper.ALPHA, "scale of the adapters: their output is multiplied by alpha / rank", above=0)
    targets: tuple[str, ...] = option(
        paper.TARGETS,
        f"projections that get adapters, some of {', '.join(TARGETS)}",
        choices=tuple(TARGETS),
    )

    def __post_init__(self):
        super().__post_init__()
        check_lora(self.rank, self.alpha, self.targets)

    def factor(self, classes: int) -> float:
        """The factor of KL in Eq. 4. A regression (one class) has no KL."""
        return self.temperature**2 if self.t_squared and classes > 1 else 1.0


# ---- Model ----
class LoRAExits(ExitModel):
    """A frozen backbone; each exit has adapters in the layers up to it, and a head."""

    holds_backbone = False
    policy = None

    def __init__(
        self,
        backbone: Backbone,
        exits: tuple[int, ...],
        num_labels: int,
        pool: str = "mean",
        *,
        rank: int = paper.RANK,
        alpha: float = paper.ALPHA,
        targets: Sequence[str] = paper.TARGETS,
    ):
        super().__init__()
        check_lora(rank, alpha, targets)
        if unknown := [target for target in targets if target not in backbone.projections]:
            kind, known = backbone.config.model_type, ", ".join(backbone.projections)
            raise ValueError(f"targets of a {kind} must be some of {known}, got {', '.join(unknown)}")
        self.exits = check_exits(exits, backbone.config.num_hidden_layers)
        self.num_labels, self.pool = num_labels, pool
        self.rank, self.alpha, self.targets = rank, alpha, tuple(targets)
        self.backbone = backbone.requires_grad_(False)
        self.adapters = nn.ModuleList(self._adapters_of(layer) for layer in self.exits)
        self.heads = exit_heads(backbone, exits, num_labels, pool)
        self.starts = (0, *self.exits)

    def _adapters_of(self, layer: int) -> nn.ModuleList:
        """The adapters of one exit: a ModuleDict (target -> LowRank) for each stored layer up to the exit.

        ALBERT stores one layer, which it runs again and again: one ModuleDict then.
        """
        stored = self.backbone.layers[:layer]
        return nn.ModuleList(
            nn.ModuleDict({target: self._adapter(stored_layer, target) for target in self.targets})
            for stored_layer in stored
        )

    def _adapter(self, layer: nn.Module, target: str) -> paper.LowRank:
        columns = columns_of(layer, target)
        return paper.LowRank(getattr(layer, TARGETS[target][0]).in_features, columns.stop - columns.start, self.rank)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def streams(self, first: int, stop: int) -> Streams:
        """The streams of the exits first .. stop - 1."""
        return Streams(self, first, stop)

    def logits_of(self, k: int, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Logits (B, C) of exit k alone. The three inputs are (B, T) int64."""
        inputs = Tensors(input_ids, attention_mask, token_type_ids)
        context, hidden = self.backbone.context(inputs), self.backbone.embed(inputs)
        hidden = self.backbone.run_layers(hidden, context, 0, self.exits[k], self.streams(k, k + 1).adapt(1))
        return self.heads[k](hidden, context.padding)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
        """Logits (B, C) of every exit."""
        return [self.logits_of(k, input_ids, attention_mask, token_type_ids) for k in range(len(self.exits))]

    def ragged(
        self, exit_of_row: Sequence[int], input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> Tensor:
        """Logits (B, C) of rows that exit at different exits, exit_of_row (B,) from 0, in one pass through the layers.

        A server needs this for requests that have reached different exits. Rows are sorted by exit, so the segments of
        Eq. 6 have unequal lengths. No row runs deeper than its exit.
        """
        K, exit_index = len(self.exits), np.asarray(exit_of_row)
        if exit_index.shape != (len(input_ids),) or exit_index.min() < 0 or exit_index.max() >= K:
            raise ValueError(f"expected exits from 0 to {K - 1} of {len(input_ids)} rows, got {exit_index.tolist()}")
        # The first rows are those of the first exit. Exit k drops its rows; streams k + 1 .. K - 1 go on, in order.
        order = torch.from_numpy(exit_index.argsort(kind="stable")).to(input_ids.device)
        counts = np.bincount(exit_index, minlength=K).tolist()
        streams, logits = self.streams(0, K), []
        inputs = Tensors(input_ids[order], attention_mask[order], token_type_ids[order])
        context, hidden = self.backbone.context(inputs), self.backbone.embed(inputs)
        for k in range(exit_index.max() + 1):
            adapt = streams.adapt(K - k, [0, *accumulate(counts[k:])])
            hidden = self.backbone.run_layers(hidden, context, self.starts[k], self.exits[k], adapt)
            rows, here = torch.arange(len(hidden), device=hidden.device), counts[k]
            logits.append(self.heads[k](hidden[:here], context.keep(rows[:here]).padding))
            hidden, context = hidden[here:], context.keep(rows[here:])
        return torch.cat(logits)[order.argsort()]  # back in the order of the inputs

    def segments(self, schedule: Sequence[Sequence[int]] | None = None) -> LoRASegments:
        """The segments that early_exit runs; the schedule is restart by default."""
        return LoRASegments(self, schedule or restart(len(self.exits)))

    def schedule(self, name: str) -> list[list[int]]:
        """The schedule with this name, restart or parallel: which streams start together."""
        return {"restart": restart, "parallel": parallel}[name](len(self.exits))

    def cheapest_schedule(self, batch_size: int, tokens: int, reach: np.ndarray) -> list[list[int]]:
        """The fastest schedule on this machine for a batch of rows with that many tokens.

        reach (K,): the share of rows that reach each exit.
        """
        return cheapest_schedule(measure_costs(self, batch_size, tokens), reach)

    def own_state(self) -> dict[str, Tensor]:
        """The heads; adapters are saved in PEFT's layout (save_parts)."""
        return {name: value for name, value in self.state_dict().items() if name.startswith("heads.")}

    def save_parts(self, folder: Path, backbone: str) -> dict[str, str]:
        return save_adapters(self, folder, backbone)

    def load_parts(self, folder: Path, digests: dict[str, str]) -> None:
        load_adapters(self, folder, digests)

    def merged(self, k: int) -> RowExits:
        """Exit k alone, its adapters merged into the weights W + A B of Eq. 2: a plain model of e_k layers."""
        small = self.backbone.first_layers(self.exits[k])
        with torch.no_grad():
            for layer, adapters in zip(small.layers, self.adapters[k]):
                for target, pair in adapters.items():
                    weight = getattr(layer, TARGETS[target][0]).weight[columns_of(layer, target)]
                    weight += self.scale * (pair.A @ pair.B).T
        with torch.random.fork_rng():  # its head is replaced below, and must not advance the random state
            model = RowExits(small, (self.exits[k],), self.num_labels, self.pool)
        model.heads[0] = deepcopy(self.heads[k])
        return model.eval()


# ---- Recipe ----
def recipe(model: LoRAExits, config: Config) -> list[Stage]:
    """One stage per exit, the last exit first: it has to be trained before it teaches."""
    last = len(model.exits) - 1
    return [_stage(model.exits[k], k, paper.teacher_of(k, last, config.distill), config) for k in range(last, -1, -1)]


def _stage(layer: int, k: int, teacher: int | None, config: Config) -> Stage:
    def loss(model: LoRAExits, batch: Batch) -> Tensor:
        logits, factor = model.logits_of(k, *batch.inputs), config.factor(model.num_labels)
        return paper.exit_loss(logits, batch.labels, batch.targets, config.weight, config.temperature, factor)

    return Stage(
        name=f"exit {layer}",
        trainable=lambda name: name.startswith((f"adapters.{k}.", f"heads.{k}.")),
        loss=loss,
        score=lambda scores: float(scores[k]),
        make_targets=None if teacher is None else partial(teacher_logits, k=teacher),
    )


@torch.no_grad()
def teacher_logits(model: LoRAExits, data: RowData, k: int) -> np.ndarray:
    """The logits of exit k on all examples, (N, C). Computed once per stage, because the teacher is frozen."""
    device = next(model.parameters()).device
    logits = np.empty((len(data), model.num_labels), np.float32)
    for rows in batches(data.encoded, TEACHER_BATCH):
        inputs, _ = data.batch(rows, device)
        logits[rows] = model.logits_of(k, *inputs).float().numpy(force=True)
    return logits


def build(backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str, config: Config) -> LoRAExits:
    """The model with the adapters of the settings."""
    rank, alpha, targets = config.rank, config.alpha, config.targets
    return LoRAExits(backbone, exits, num_labels, pool, rank=rank, alpha=alpha, targets=targets)


METHOD = Method(
    Config,
    recipe,
    units=("rows",),
    model=build,
    no_exit_0="its exits differ by their adapters, which are in the layers",
    exits=2,  # under restart, each exit that does not stop a row costs all its layers again: more exits save less
    defaults={"rows": {"lr": 1e-3, "head_lr": 1e-3, "epochs": 5}},
)
