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
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.bert import Adapt, Bert, StackedLinear, padding_mask
from mini_ee.checkpoint import hugging_face_names, read_tensors, write_tensors
from mini_ee.decoder import Decoder
from mini_ee.early_exit import Reading, Segments
from mini_ee.exits import MultiExit, check_exits, exit_heads, first_layers
from mini_ee.files import write_bytes
from mini_ee.flops import backbone_layer_flops, head_flops
from mini_ee.sgmv import expand_, shrink

TARGETS = {  # projection -> the linear map of a layer that holds it, and which of its parts
    "query": ("qkv", 0),
    "key": ("qkv", 1),
    "value": ("qkv", 2),
    "attention_output": ("attention_output", 0),
    "gate": ("gate", 0),  # of decoders
    "up": ("up", 0),
    "down": ("down", 0),
}


class LowRank(nn.Module):
    """A B of Eq. 2. A is drawn, B is zero: an adapter begins as nothing."""

    def __init__(self, inputs: int, rank: int, outputs: int):
        super().__init__()
        self.A = nn.Parameter(torch.empty(inputs, rank))
        self.B = nn.Parameter(torch.zeros(rank, outputs))
        nn.init.uniform_(self.A, -(inputs**-0.5), inputs**-0.5)  # as nn.Linear and PEFT draw it


def check_lora(rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = ("query", "value")) -> None:
    """Raise ValueError for adapters that cannot be."""
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}")
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha must be a number above 0, got {alpha}")
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets:
        raise ValueError(f"targets must be some of {', '.join(TARGETS)}, got {', '.join(unknown) or 'none'}")
    if len(set(targets)) < len(targets):
        raise ValueError(f"targets must be different ones, got {', '.join(targets)}")


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


def columns_of(layer: nn.Module, target: str) -> slice:
    """Where in the output of the linear map that holds it a projection's own stands."""
    name, part = TARGETS[target]
    linear = getattr(layer, name)
    sizes = linear.sizes if isinstance(linear, StackedLinear) else [linear.out_features]
    return slice(sum(sizes[:part]), sum(sizes[: part + 1]))


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


# ---- Schedules: which streams start together ----


def parallel(num_exits: int) -> list[list[int]]:
    """All streams at once."""
    return [list(range(num_exits))]


def restart(num_exits: int) -> list[list[int]]:
    """One stream at a time."""
    return [[k] for k in range(num_exits)]


class Costs(NamedTuple):
    """Seconds of n streams side by side up to exit k, each (K, K) by [k, n - 1], measured or thought up."""

    fresh: np.ndarray  # from the embeddings on
    onward: np.ndarray  # from the exit before on


def expected_seconds(schedule: Sequence[Sequence[int]], costs: Costs, reach: np.ndarray) -> float:
    """Of one row. reach (K,): the chance that a row is still there before exit k: all exits before have refused it."""
    return sum(_group_seconds(group, costs, reach) for group in schedule)


def _group_seconds(group: Sequence[int], costs: Costs, reach: np.ndarray) -> float:
    first, last = group[0], group[-1]
    seconds = [(costs.fresh if k == first else costs.onward)[k, last - k] for k in group]
    return float(reach[first : last + 1] @ seconds)


def cheapest_schedule(costs: Costs, reach: np.ndarray) -> list[list[int]]:
    """The adaptive schedule: the cut of the exits into groups of neighbours with the least expected time."""
    best = [(0.0, [])]  # of the exits before `stop`: seconds, schedule
    for stop in range(1, len(reach) + 1):
        groups = [list(range(first, stop)) for first in range(stop)]
        options = [(best[group[0]][0] + _group_seconds(group, costs, reach), group) for group in groups]
        seconds, last = min(options, key=itemgetter(0))
        best.append((seconds, [*best[last[0]][1], last]))
    return best[-1][1]


def measure_costs(model: LoRAExits, batch_size: int, tokens: int, rounds: int = 7) -> Costs:
    """The costs of rows of so many tokens on this machine: medians over rounds in which all are run in turns."""
    K, width = len(model.exits), model.backbone.config.hidden_size
    seconds = np.zeros((1 + rounds, 2, K, K))  # the first round warms up
    with torch.inference_mode():
        runs = {}
        for k in range(K):
            for n in range(1, K - k + 1):
                adapters = model.streams(k, k + n)
                stacked = [adapters(layer) for layer in range(len(model.adapters[k]))]
                hidden = torch.randn(n * batch_size, tokens, width, device=next(model.parameters()).device)
                for place, start in enumerate((0, model.starts[k])):
                    layers = start, model.exits[k]
                    run = partial(model.backbone.run_layers, hidden, None, *layers, adapters=stacked.__getitem__)
                    runs[place, k, n - 1] = run
        for turn in seconds:
            for place, run in runs.items():
                begin = time.perf_counter()
                run().flatten()[0].item()  # waits for the device
                turn[place] = time.perf_counter() - begin
    return Costs(*np.median(seconds[1:], axis=0))


# ---- Segments ----


class LoRAState(NamedTuple):
    """The rows still in the model, in all their streams."""

    embedded: Tensor  # (B, T, D), for streams that have not begun
    hidden: Tensor | None  # (n, B, T, D), the streams that are under way, the next exit's first
    mask: Tensor | None  # (B, 1, 1, T)

    def keep(self, rows: np.ndarray) -> "LoRAState":
        index = torch.from_numpy(rows).to(self.embedded.device)
        hidden = None if self.hidden is None else self.hidden[:, index]
        return LoRAState(self.embedded[index], hidden, None if self.mask is None else self.mask[index])


class LoRASegments(Segments):
    """The segments of a LoRAExits in eval mode under a schedule. Inputs are tasks.Inputs."""

    engine = "torch"

    def __init__(self, model: LoRAExits, schedule: Sequence[Sequence[int]]):
        if [k for group in schedule for k in group] != list(range(len(model.exits))) or not all(schedule):
            raise ValueError(f"a schedule must cut the exits 0..{len(model.exits) - 1} into groups, got {schedule}")
        self.model, self.exits, self.schedule = model.eval(), model.exits, schedule
        self.device = next(model.parameters()).device
        self._group = {k: group for group in schedule for k in group}
        self._streams = {}
        for k, group in self._group.items():
            self._streams[k] = self._stack(k, group[-1] + 1)

    def _stack(self, first: int, stop: int) -> list[Adapt]:
        """What the streams first .. stop - 1 add in each stored layer of segment `first`; stacked once, not a batch."""
        with torch.inference_mode():
            adapters = self.model.streams(first, stop)
            return [adapters(layer) for layer in range(len(self.model.adapters[first]))]

    def running(self) -> torch.inference_mode:
        return torch.inference_mode()

    def start(self, inputs) -> LoRAState:
        embedded = self.model.backbone.embed(self._tensor(inputs.input_ids), self._tensor(inputs.token_type_ids))
        return LoRAState(embedded, None, padding_mask(self._tensor(inputs.attention_mask)) if inputs.padded else None)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def advance(self, k: int, state: LoRAState) -> LoRAState:
        group = self._group[k]
        begins = k == group[0]
        hidden = state.embedded.expand(len(group), *state.embedded.shape) if begins else state.hidden[1:]
        mask = None if state.mask is None else state.mask.repeat(len(hidden), 1, 1, 1)
        start = 0 if begins else self.exits[k - 1]
        flat = self.model.backbone.run_layers(
            hidden.flatten(0, 1), mask, start, self.exits[k], adapters=self._streams[k].__getitem__
        )
        return LoRAState(state.embedded, flat.view(hidden.shape), state.mask)

    def read(self, k: int, state: LoRAState) -> Reading:
        return Reading(self.model.heads[k](state.hidden[0], state.mask).float().numpy(force=True))

    def layer_passes(self, k: int) -> int:
        group = self._group[k]
        start = 0 if k == group[0] else self.exits[k - 1]
        return (self.exits[k] - start) * (group[-1] - k + 1)

    def flops(self, k: int, inputs) -> tuple[float, float]:
        backbone, tokens = self.model.backbone, inputs.input_ids.shape[1]
        layer = backbone_layer_flops(backbone, tokens)
        pairs = self.model.adapters[k][0].values()
        layer += sum(2.0 * tokens * (pair.A.numel() + pair.B.numel()) for pair in pairs)
        averaged = tokens if self.model.pool == "mean" else 0
        return self.layer_passes(k) * layer, head_flops(backbone.config.hidden_size, self.model.num_labels, averaged)
