"""LoRAExit: each exit is a low-rank adaptation of its own of one frozen backbone.

Source: Liu et al., LoRAExit: Empowering Dynamic Modulation of LLMs in Resource-limited Settings using Low-rank
Adapters. Section 3.1 (Eq. 1, 2) and 3.3 (Eq. 6) are here; 3.2, the distillation (Eq. 3 to 5), is segd.py.

Symbols:   targets: the projections that are adapted; rank = m, A (d, m), B (m, d) as in Eq. 2; exit k sits after layer
           e_k and has adapters in the layers 1 .. e_k. A stream is the computation of one exit.

Deviations, each from a point that the paper leaves open (see the tests of the same names):
1. Eq. 2 has no scale; as in Hu et al. 2022, A B is scaled by alpha / rank.
2. The last exit has adapters too: the backbone is as it was pretrained, for all exits. Frozen, it has no dropout.
3. ALBERT's layers share one set of weights, and so one set of adapters an exit: what PEFT does.
4. Heads may read the mean over tokens, and do by default; the paper reads the first (`pool`).
5. DeBERTa, the paper's third backbone, is not here. Decoders, which the paper leaves to later work, are: as
   classifiers, over the mean of their normed states.

Cost, which the paper does not print: adapters differ from layer 1 on, so exit k + 1 cannot go on from the hidden states
of exit k. Streams either run side by side through one shared product (Eq. 6), or the next one starts anew from the
embeddings when an exit refuses. In layer passes for exits 3, 6, 9, 12:

    stops at           3    6    9   12
    parallel          12   21   27   30
    restart            3    9   18   30

A schedule says which streams start together: groups of consecutive exits. One group is parallel, as in the paper,
groups of one are restart, the default here, since a processor is bound by arithmetic. `cheapest_schedule` chooses among
all of them from measured costs and the chance of a refusal.
"""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.bert import Adapt, Bert, padding_mask
from mini_ee.backbones.hub import hugging_face_names, read_tensors, write_tensors
from mini_ee.backbones.llama import Decoder
from mini_ee.backbones.lora import TARGETS, LowRank, check_lora, columns_of
from mini_ee.backbones.sgmv import expand_, shrink
from mini_ee.data.files import write_bytes
from mini_ee.data.tokens import Encoded, batches
from mini_ee.early_exit import Segments
from mini_ee.training.fit import Batch, Stage, task_loss
from mini_ee.units.heads import exit_heads
from mini_ee.units.rows import MultiExit, check_exits, first_layers
from mini_ee.units.streams import LoRASegments, restart


class LoRAExits(nn.Module):
    """A frozen backbone; for each exit adapters in the layers up to it, and a head."""

    def __init__(
        self,
        backbone: Bert | Decoder,
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
        there = [target for target, (linear, _) in TARGETS.items() if hasattr(backbone.layers[0], linear)]
        if strange := [target for target in targets if target not in there]:
            kind = backbone.config.model_type
            raise ValueError(f"targets of a {kind} must be some of {', '.join(there)}, got {', '.join(strange)}")
        self.exits = check_exits(exits, backbone.config.num_hidden_layers)
        self.num_labels, self.pool = num_labels, pool
        self.rank, self.alpha, self.targets = rank, alpha, tuple(targets)
        self.backbone = backbone.requires_grad_(False)
        self.adapters = nn.ModuleList(self._adapters_of(layer) for layer in self.exits)
        self.heads = exit_heads(backbone, len(exits), num_labels, pool)
        self.starts = (0, *self.exits)

    def _adapters_of(self, layer: int) -> nn.ModuleList:
        """One ModuleDict for each stored layer of 1 .. layer: target -> LowRank."""
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

    def exit_logits(self, k: int, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Logits (B, C) of exit k alone. The three inputs are (B, T) int64."""
        mask = padding_mask(attention_mask)
        hidden = self.backbone.embed(input_ids, token_type_ids)
        hidden = self.backbone.run_layers(hidden, mask, 0, self.exits[k], adapters=self.streams(k, k + 1))
        return self.heads[k](hidden, mask)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
        """Logits (B, C) of every exit."""
        return [self.exit_logits(k, input_ids, attention_mask, token_type_ids) for k in range(len(self.exits))]

    def streams(self, first: int, stop: int) -> Callable[[int], Adapt]:
        """Eq. 6 for the streams of the exits first .. stop - 1, which stand one after the other in the batch."""

        def adapters(layer: int) -> Adapt:
            stacked = {
                target: Stacked(
                    columns_of(self.backbone.layers[layer], target),
                    *(
                        torch.stack([getattr(self.adapters[k][layer][target], part) for k in range(first, stop)])
                        for part in "AB"
                    ),
                )
                for target in self.targets
            }
            return low_rank(stacked, self.scale)

        return adapters

    def graph_streams(self, g, first: int, stop: int) -> Callable[[int, str, str, str], str]:
        """streams."""

        def adapt(layer: int, name: str, x: str, y: str) -> str:
            live = [self.adapters[k][layer] for k in range(first, stop)]
            return graph_low_rank(g, self.backbone.layers[layer], live, self.scale, name, x, y)

        return adapt

    def segments(self, schedule: Sequence[Sequence[int]] | None = None) -> "LoRASegments":
        """What early_exit drives; restart by default."""
        return LoRASegments(self, schedule or restart(len(self.exits)))

    def whole(self) -> Segments:
        """The last exit alone, merged: what a speed-up is measured against."""
        return self.merged(len(self.exits) - 1).segments()

    def merged(self, k: int) -> MultiExit:
        """Exit k alone, its adapters folded into the weights: a plain model of e_k layers, at the cost of those."""
        small = first_layers(self.backbone, self.exits[k])
        with torch.no_grad():
            for layer, adapters in zip(small.layers, self.adapters[k]):
                for target, pair in adapters.items():
                    weight = getattr(layer, TARGETS[target][0]).weight[columns_of(layer, target)]
                    weight += self.scale * (pair.A @ pair.B).T
        with torch.random.fork_rng():  # what is drawn is overwritten
            model = MultiExit(small, (self.exits[k],), self.num_labels, self.pool)
        model.heads[0] = deepcopy(self.heads[k])
        return model.eval()


class Stacked(NamedTuple):
    """A projection's adapters of n streams."""

    columns: slice  # as `columns_of` says
    A: Tensor  # (n, I, r)
    B: Tensor  # (n, r, O)


def low_rank(stacked: dict[str, Stacked], scale: float) -> Adapt:
    """The second term of Eq. 6 in one layer, of n streams. stacked: by target.

    Streams carry the same tokens: the segments of SGMV are equal. Projections of one linear map shrink together.
    """
    maps: dict[str, list[Stacked]] = {}
    for target, adapters in stacked.items():
        maps.setdefault(TARGETS[target][0], []).append(adapters)
    shrinks = {linear: torch.cat([part.A for part in parts], dim=2) for linear, parts in maps.items()}

    def adapt(name: str, x: Tensor, y: Tensor) -> Tensor:
        if name not in maps:
            return y
        n, rank = len(shrinks[name]), maps[name][0].A.shape[2]
        shrunk = shrink(x.reshape(n, -1, x.shape[-1]), shrinks[name])  # (n, B T, r x projections)
        out = y.view(n, -1, y.shape[-1])
        for number, (columns, _, B) in enumerate(maps[name]):
            expand_(out[..., columns], shrunk[..., number * rank : (number + 1) * rank], B, scale)
        return y

    return adapt


def graph_low_rank(
    g, layer: nn.Module, streams: Sequence[nn.ModuleDict], scale: float, name: str, x: str, y: str
) -> str:
    """What low_rank adds to y, the output of the linear map `name` of a layer whose input is x.

    streams: the layer's adapters in each. All are put together from constants, once, when the graph is loaded: one
    batched product to the rank and one back.
    """

    def stacked(part: str) -> str:
        together = []
        for adapters in streams:
            pieces = [g.parameter(getattr(adapters[target], part)) for target in targets]
            if part == "B":  # (r, its own outputs) -> (r, outputs), zero beside its own
                pads = [g.integers(0, each.start, 0, linear.out_features - each.stop) for each in columns]
                pieces = [g.op("Pad", piece, pad) for piece, pad in zip(pieces, pads)]
            joined = g.op("Concat", *pieces, axis=1 if part == "A" else 0)
            together.append(g.op("Unsqueeze", joined, g.integers(0)))
        return g.op("Concat", *together, axis=0)

    targets = [target for target in streams[0] if TARGETS[target][0] == name]
    if not targets:
        return y
    linear, columns = getattr(layer, name), [columns_of(layer, target) for target in targets]
    shrunk = g.op("MatMul", g.op("Reshape", x, g.integers(len(streams), -1, linear.in_features)), stacked("A"))
    added = g.op("MatMul", g.op("Mul", shrunk, g.number(scale)), stacked("B"))
    return g.op("Add", y, g.flatten(added, linear.out_features))


# ---- On disk: PEFT's layout, one folder an exit ----
def save_adapters(model: LoRAExits, folder: Path, base: str) -> dict[str, str]:
    """Write exit_{e}/adapter_model.safetensors and adapter_config.json; returns the tensors' checksums by file."""
    digests = {}
    for k, layer in enumerate(model.exits):
        exit_folder = folder / f"exit_{layer}"
        exit_folder.mkdir()
        tensors = {}
        for ours, theirs in _peft_names(model, k).items():
            stored, target, part = ours
            tensors[theirs] = getattr(model.adapters[k][stored][target], part).T  # PEFT keeps A and B transposed
        name = f"exit_{layer}/adapter_model.safetensors"
        digests[name] = write_tensors(folder / name, tensors)
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": base,
            "r": model.rank,
            "lora_alpha": model.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": sorted(
                {_peft_module(model, stored, target) for stored, target, _ in _peft_names(model, k)}
            ),
            "task_type": None,
        }
        write_bytes(exit_folder / "adapter_config.json", (json.dumps(config, indent=2) + "\n").encode())
    return digests


def load_adapters(model: LoRAExits, folder: Path, digests: dict[str, str]) -> None:
    """Read what save_adapters wrote. Raises FileNotFoundError for a missing exit, ValueError for what does not fit."""
    for k, layer in enumerate(model.exits):
        path = folder / f"exit_{layer}" / "adapter_model.safetensors"
        tensors = read_tensors(path, digests.get(f"exit_{layer}/{path.name}"))
        names = _peft_names(model, k)
        if set(tensors) != set(names.values()):
            raise ValueError(f"{path}: the tensors do not fit exit {layer} with targets {', '.join(model.targets)}")
        for (stored, target, part), theirs in names.items():
            parameter = getattr(model.adapters[k][stored][target], part)
            if tensors[theirs].shape != parameter.T.shape:
                found, wanted = tuple(tensors[theirs].shape), tuple(parameter.T.shape)
                raise ValueError(f"{path}: {theirs} must have shape {wanted}, found {found}: another backbone or rank")
            parameter.data = tensors[theirs].float().T.contiguous()  # adapters in float16 are computed in float32


def _peft_names(model: LoRAExits, k: int) -> dict[tuple[int, str, str], str]:
    """(stored layer, target, A or B) -> the tensor's name in PEFT."""
    return {
        (stored, target, part): f"base_model.model.{_peft_module(model, stored, target)}.lora_{part}.weight"
        for stored in range(len(model.adapters[k]))
        for target in model.targets
        for part in "AB"
    }


def _peft_module(model: LoRAExits, stored: int, target: str) -> str:
    linear, part = TARGETS[target]
    names = hugging_face_names(model.backbone.config.model_type, f"layers.{stored}.{linear}.weight")
    return names[part].removesuffix(".weight")


TEACHERS = ("vanilla", "kd", "segd")

TEACHER_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How the exits before the last one learn. Raises ValueError on a value that makes no sense."""

    distill: str = "segd"
    temperature: float = 2.0  # T; the paper tries 2, 10, 20
    weight: float = 0.95  # lambda; the paper tries 1, .95, .2
    t_squared: bool = False

    def __post_init__(self):
        if self.distill not in TEACHERS:
            raise ValueError(f"distill must be one of {', '.join(TEACHERS)}, got {self.distill!r}")
        if not self.temperature > 0 or not 0 <= self.weight <= 1:
            raise ValueError(
                f"temperature must be above 0 and lambda from 0 to 1, got {self.temperature} and {self.weight}"
            )

    def teacher_of(self, k: int, last: int) -> int | None:
        """The exit that teaches exit k, or None."""
        if self.distill == "vanilla" or k == last:
            return None
        return last if self.distill == "kd" else k + 1


def log_soft_label(logits: Tensor, temperature: float) -> Tensor:
    """Eq. 5, its logarithm: (B, C) -> (B, C), in float32."""
    return F.log_softmax(logits.float() / temperature, dim=-1)


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float, t_squared: bool = False) -> Tensor:
    """KL(teacher, student) of Eq. 4, the mean over rows; logits (B, C). A squared error where C = 1."""
    if student.shape[1] == 1:
        return F.mse_loss(student.float(), teacher.float())
    teacher, student = log_soft_label(teacher, temperature), log_soft_label(student, temperature)
    loss = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return loss * temperature**2 if t_squared else loss


def exit_loss(model: LoRAExits, batch: Batch, k: int, how: Distillation) -> Tensor:
    """Eq. 3 where there is no teacher, else Eq. 4."""
    logits = model.exit_logits(k, *batch.inputs)
    hard = task_loss(logits, batch.labels)
    if batch.taught is None:
        return hard
    soft = distillation_loss(logits, batch.taught, how.temperature, how.t_squared)
    return (1 - how.weight) * hard + how.weight * soft


def teach(model: LoRAExits, encoded: Encoded, k: int) -> np.ndarray:
    """What exit k, frozen, says of all rows: (N, C). Asked once: it does not change while its student learns."""
    device, said = next(model.parameters()).device, None
    model.eval()
    with torch.no_grad():
        for rows in batches(encoded, TEACHER_BATCH):
            inputs = encoded.batch(rows)
            arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
            logits = model.exit_logits(k, *(torch.from_numpy(array).to(device) for array in arrays))
            if said is None:
                said = np.empty((len(encoded), logits.shape[1]), np.float32)
            said[rows] = logits.float().cpu().numpy()
    return said


def recipe(model: LoRAExits, how: Distillation) -> list[Stage]:
    """One stage an exit, the last one first."""
    last = len(model.exits) - 1
    stages = []
    for k in range(last, -1, -1):
        teacher = how.teacher_of(k, last)
        own = (f"adapters.{k}.", f"heads.{k}.")
        stages.append(
            Stage(
                name=f"exit {model.exits[k]}",
                learns=lambda name, own=own: name.startswith(own),
                loss=partial(exit_loss, k=k, how=how),
                score=lambda scores, k=k: float(scores[k]),
                teacher=None if teacher is None else partial(teach, k=teacher),
            )
        )
    return stages
