"""LoRAExit (Liu et al. 2024, Findings of EMNLP): each exit has its own low-rank adapters on one frozen backbone.

Source: Jiacheng Liu, Peng Tang, Xiaofeng Hou, Chao Li, Pheng-Ann Heng: LoRAExit: Empowering Dynamic Modulation of LLMs
in Resource-limited Settings using Low-rank Adapters. Findings of EMNLP 2024, 2024.findings-emnlp.539 in the ACL
Anthology (it is not on arXiv). Eq. 1 is the backbone's layer, Eq. 2 to 5 are below, Eq. 6 is lora_exits_sgmv.py. The
equations as tests: tests/spec/test_1_lora_exits.py.

Symbols    W (d, d)            a projection of the backbone; `weight` below, (O, I) as torch stores it
           A (d, m), B (m, d)  the two factors of an adapter; m is `rank`
           k = 1 .. N          exits; here k = 0 .. K - 1, and exit k comes after layer e_k = exits[k]
           z^k                 logits of exit k; T their temperature
           lambda              weight of the distillation loss (`weight`)

A stream is the computation of one exit: the layers 1 .. e_k with the adapters of that exit.

Deviations from the paper, and what it leaves open, with the test that pins it:
1. Eq. 2 has no scale; as in Hu et al. 2022, A B is scaled by alpha / rank (test_eq2_an_exit_computes_with_w_plus_ab).
2. The last exit has adapters too: the backbone keeps its pretrained weights for all exits, and runs without dropout
   (test_the_backbone_is_never_trained).
3. ALBERT's layers share one set of weights, and so one set of adapters per exit, as in PEFT (test_peft.py).
4. Heads read the mean over tokens by default. The paper does not specify what its heads read; BERT's usual heads read
   the first token (test_heads_read_the_mean_by_default).
5. The paper leaves decoders to later work. Here they are classifiers that read the mean of their normed states
   (test_eq2_holds_for_the_exits_of_decoders).
6. A regression has no soft labels; it learns its teacher's value (test_a_regression_follows_its_teachers_value).

Cost, which the paper does not report: adapters differ from layer 1 on, so exit k + 1 cannot continue from the hidden
states of exit k. Either the streams run side by side through one shared product (Eq. 6; `parallel`), or an example that
does not stop at an exit starts again from the embeddings (`restart`). `restart` is the default: on a CPU the time
is spent on arithmetic, and `restart` never needs more of it. Layer passes of an example that exits after each layer:

    exits at           3    6    9   12
    parallel          12   21   27   30
    restart            3    9   18   30

Its other files     lora_exits_streams.py   inference: schedules, their cost, the segments that early_exit runs
                    lora_exits_sgmv.py      Eq. 6: the adapters of several exits in one pass through the layers;
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
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Backbone, Tensors
from mini_ee.lab.backbones.lora import LowRank, check_lora, columns_of
from mini_ee.lab.backbones.targets import TARGETS
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.data.tokenizer import batches
from mini_ee.lab.exits.heads import exit_heads
from mini_ee.lab.exits.row_exits import ExitModel, RowData, RowExits, check_exits
from mini_ee.lab.methods.lora_exits_peft import load_adapters, save_adapters
from mini_ee.lab.methods.lora_exits_sgmv import Streams
from mini_ee.lab.methods.lora_exits_streams import LoRASegments, cheapest_schedule, measure_costs, parallel, restart
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage, task_loss

DISTILL = ("vanilla", "kd", "segd")  # the three ways of Table 4
WITHOUT_TEACHER = ("distill", "vanilla")  # the settings of distillation have no effect then

TEACHER_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method. Raises ValueError for an invalid value."""

    distill: str = option(
        "segd", "teacher of an exit: none (vanilla), the last exit (kd) or the next one (segd)", choices=DISTILL
    )
    temperature: float = option(
        2.0, "temperature T of Eq. 5; the paper tries 2, 10 and 20", above=0, unused_when=WITHOUT_TEACHER
    )
    weight: float = option(
        0.95, "weight of the distillation loss in Eq. 4", flag="--lambda", least=0, most=1, unused_when=WITHOUT_TEACHER
    )
    t_squared: bool = option(
        False, "multiply the distillation loss by T squared, unlike the paper", unused_when=WITHOUT_TEACHER
    )
    rank: int = option(8, "rank of the adapters", least=1)
    alpha: float = option(16.0, "scale of the adapters: their output is multiplied by alpha / rank", above=0)
    targets: tuple[str, ...] = option(
        ("query", "value"),
        f"projections that get adapters, some of {', '.join(TARGETS)}",
        choices=tuple(TARGETS),
    )

    def __post_init__(self):
        super().__post_init__()
        check_lora(self.rank, self.alpha, self.targets)

    def teacher_of(self, k: int, last: int) -> int | None:
        """The index of the teacher of exit k, or None. last: the index of the last exit."""
        if self.distill == "vanilla" or k == last:
            return None
        return last if self.distill == "kd" else k + 1


# ---- Equations ----
def adapted_weight(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """Eq. 2, $W + A B$ as one weight: weight (O, I), A (I, m), B (m, O) -> (O, I)."""
    return weight + scale * (A @ B).T


def exit_loss(logits: Tensor, labels: Tensor, teacher: Tensor | None, config: Config) -> Tensor:
    """The loss of one exit, the mean over examples: Eq. 3 without a teacher, else Eq. 4.

    $$CE(y, z^k)$$

    $$(1 - lambda) CE(y, z^k) + lambda KL(y^t, y^k)$$

    logits (B, C), labels (B,), teacher (B, C): the logits of the teacher.
    """
    hard = task_loss(logits, labels)
    if teacher is None:
        return hard
    soft = distillation_loss(logits, teacher, config.temperature, config.t_squared)
    return (1 - config.weight) * hard + config.weight * soft


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float, t_squared: bool = False) -> Tensor:
    """$KL(y^t, y^k)$ of Eq. 4, the mean over examples; logits (B, C) of both. A squared error if C = 1."""
    if student.shape[1] == 1:
        return F.mse_loss(student.float(), teacher.float())
    teacher, student = log_soft_label(teacher, temperature), log_soft_label(student, temperature)
    loss = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return loss * temperature**2 if t_squared else loss


def log_soft_label(logits: Tensor, temperature: float) -> Tensor:
    """The logarithm of Eq. 5, $y^k = softmax(z^k / T)$: (B, C) -> (B, C), in float32."""
    return F.log_softmax(logits.float() / temperature, dim=-1)


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
        rank: int = 8,
        alpha: float = 16.0,
        targets: Sequence[str] = ("query", "value"),
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
            nn.ModuleDict({target: self._adapter(each, target) for target in self.targets}) for each in stored
        )

    def _adapter(self, layer: nn.Module, target: str) -> LowRank:
        columns = columns_of(layer, target)
        return LowRank(getattr(layer, TARGETS[target][0]).in_features, self.rank, columns.stop - columns.start)

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
        """Exit k alone, its adapters merged into the weights: a plain model of e_k layers."""
        small = self.backbone.first_layers(self.exits[k])
        with torch.no_grad():
            for layer, adapters in zip(small.layers, self.adapters[k]):
                for target, pair in adapters.items():
                    weight = getattr(layer, TARGETS[target][0]).weight[columns_of(layer, target)]
                    weight.copy_(adapted_weight(weight, pair.A, pair.B, self.scale))
        with torch.random.fork_rng():  # its head is replaced below, and must not advance the random state
            model = RowExits(small, (self.exits[k],), self.num_labels, self.pool)
        model.heads[0] = deepcopy(self.heads[k])
        return model.eval()


# ---- Recipe ----
def recipe(model: LoRAExits, config: Config) -> list[Stage]:
    """One stage per exit, the last exit first: it has to be trained before it teaches."""
    last = len(model.exits) - 1
    return [_stage(model.exits[k], k, config.teacher_of(k, last), config) for k in range(last, -1, -1)]


def _stage(layer: int, k: int, teacher: int | None, config: Config) -> Stage:
    def loss(model: LoRAExits, batch: Batch) -> Tensor:
        return exit_loss(model.logits_of(k, *batch.inputs), batch.labels, batch.targets, config)

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
