"""LoRAExit at inference (section 3.3): which streams run side by side, what that costs, and the segments of early_exit.

The paper: mini_ee/lora_exits.py, with the engines of the two usual schedules. A stream is the computation of one exit.
A schedule divides the exits into groups of neighbours; the streams of a group start together. One group of all exits is
`parallel`, as in the paper; groups of one exit each are `restart`.

In a group k .. n all streams run through the layers 1 .. e_k together. Then exit k is read, and its stream ends. For
the rows that do not stop, the other streams go on to e_{k+1}. The next group starts again from the embeddings.
"""

import time
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import LayerContext, Tensors, tensor_on
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.row_exits import RowSegments
from mini_ee.lab.segments import Segments


# ---- Schedules: which streams start together ----
def parallel(num_exits: int) -> list[list[int]]:
    """All streams at once."""
    return [list(range(num_exits))]


def restart(num_exits: int) -> list[list[int]]:
    """One stream at a time."""
    return [[k] for k in range(num_exits)]


class Costs(NamedTuple):
    """Seconds of n streams side by side up to exit k. Each array is (K, K), indexed by [k, n - 1]."""

    fresh: np.ndarray  # from the embeddings
    onward: np.ndarray  # from the exit before


def _group_seconds(group: Sequence[int], costs: Costs, reach: np.ndarray) -> float:
    """Expected seconds of a group for one row. reach (K,): the probability that no exit before k stopped the row.

    Exit k runs the streams k .. last side by side: from the embeddings if it is the first of its group.
    """
    first, last = group[0], group[-1]
    seconds = [(costs.fresh if k == first else costs.onward)[k, last - k] for k in group]
    return float(reach[first : last + 1] @ seconds)


def cheapest_schedule(costs: Costs, reach: np.ndarray) -> list[list[int]]:
    """The adaptive schedule: the one with the least expected time.

    Dynamic programming: the best schedule of the exits before `stop` is some last group first .. stop - 1 after the
    best schedule of the exits before `first`.
    """
    # index `stop`: expected seconds and schedule of the exits before `stop`
    best: list[tuple[float, list[list[int]]]] = [(0.0, [])]
    for stop in range(1, len(reach) + 1):
        groups = [list(range(first, stop)) for first in range(stop)]
        options = [(best[group[0]][0] + _group_seconds(group, costs, reach), group) for group in groups]
        seconds, last = min(options, key=itemgetter(0))
        best.append((seconds, [*best[last[0]][1], last]))
    return best[-1][1]


def measure_costs(model: nn.Module, batch_size: int, tokens: int, rounds: int = 7) -> Costs:
    """Costs of a batch with that many tokens on this machine: medians over rounds; a round runs every case once."""
    K = len(model.exits)
    seconds = np.zeros((1 + rounds, 2, K, K))  # the first round warms up
    with torch.inference_mode():
        runs = {}
        for k in range(K):
            for n in range(1, K - k + 1):
                adapt = model.streams(k, k + n).adapt(n)
                inputs = Tensors(torch.zeros(n * batch_size, tokens, dtype=torch.int64, device=model.backbone.device))
                hidden = torch.randn_like(model.backbone.embed(inputs))
                context = model.backbone.context(inputs)
                for place, start in enumerate((0, model.starts[k])):
                    layers = start, model.exits[k]
                    runs[place, k, n - 1] = partial(model.backbone.run_layers, hidden, context, *layers, adapt)
        for turn in seconds:
            for case, run in runs.items():
                begin = time.perf_counter()
                run().flatten()[0].item()  # waits for the device
                turn[case] = time.perf_counter() - begin
    return Costs(*np.median(seconds[1:], axis=0))


# ---- Segments ----
class LoRAState(NamedTuple):
    """The rows still in the model, in all their streams."""

    embedded: Tensor  # (B, T, D), from which the next group starts
    hidden: Tensor | None  # (n, B, T, D), the running streams; the first is that of the exit just reached
    context: LayerContext

    def keep(self, rows: np.ndarray) -> "LoRAState":
        index = tensor_on(self.embedded.device, rows)
        hidden = None if self.hidden is None else self.hidden[:, index]
        return LoRAState(self.embedded[index], hidden, self.context.keep(index))


class LoRASegments(RowSegments):
    """The segments of a LoRAExits in eval mode under a schedule."""

    def __init__(self, model: nn.Module, schedule: Sequence[Sequence[int]]):
        if [k for group in schedule for k in group] != list(range(len(model.exits))) or not all(schedule):
            raise ValueError(f"a schedule must cut the exits 0..{len(model.exits) - 1} into groups, got {schedule}")
        super().__init__(model)
        self.schedule = schedule
        self._group = {k: group for group in schedule for k in group}
        self.from_embeddings = [group[0] for group in schedule]
        shape = {"rank": model.rank, "alpha": model.alpha, "targets": list(model.targets)}
        self.metadata = {"lora": shape, "schedule": [list(group) for group in schedule]}
        with torch.no_grad():
            self._streams = {group[0]: model.streams(group[0], group[-1] + 1) for group in schedule}

    @property
    def bytes_held(self) -> int:
        """Bytes of all weights in memory: the model's parameters, and the copies in stacked adapters."""
        stacked = (tensor for streams in self._streams.values() for tensor in streams.tensors)
        storages = [tensor.untyped_storage() for tensor in (*self.model.parameters(), *stacked)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def whole(self) -> Segments:
        """The last exit alone, its adapters merged into the weights."""
        return self.model.merged(len(self.exits) - 1).segments()

    def start(self, inputs: Inputs) -> LoRAState:
        return LoRAState(self.model.backbone.embed(inputs), None, self.model.backbone.context(inputs))

    def advance(self, k: int, state: LoRAState) -> LoRAState:
        group = self._group[k]
        if k == group[0]:  # all streams of the group start from the same embeddings, which expand does not copy
            start, hidden = 0, state.embedded.expand(len(group), *state.embedded.shape)
        else:  # the stream of exit k - 1 has ended
            assert state.hidden is not None
            start, hidden = self.exits[k - 1], state.hidden[1:]
        context = state.context.repeat(len(hidden))
        graph = not isinstance(
            hidden, Tensor
        )  # a graph knows parameters by name only, so it stacks the adapters itself
        streams = self.model.streams(group[0], group[-1] + 1) if graph else self._streams[group[0]]
        adapt = streams.adapt(len(hidden))  # the streams still running are the last ones of the group
        flat = self.model.backbone.run_layers(hidden.flatten(0, 1), context, start, self.exits[k], adapt)
        return LoRAState(state.embedded, flat.view(hidden.shape), state.context)

    def read(self, k: int, state: LoRAState) -> np.ndarray:
        assert state.hidden is not None
        return self.model.heads[k](state.hidden[0], state.context.padding).float().numpy(force=True)

    def layer_passes(self, k: int) -> int:
        return super().layer_passes(k) * (self._group[k][-1] - k + 1)

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        backbone, tokens = self.model.backbone, inputs.input_ids.shape[1]
        layer = backbone.layer_flops(tokens)
        for target, pair in self.model.adapters[k][0].items():
            layer += 2.0 * backbone.projected(target, tokens) * (pair.A.numel() + pair.B.numel())
        start = 0.0 if k else backbone.start_flops(tokens)
        return start + self.layer_passes(k) * layer, self.model.heads[k].flops(tokens)

    def in_one_graph(self) -> "LoRASegments":
        """One stream at a time: the graph runs a stream only if its head is read."""
        return LoRASegments(self.model, restart(len(self.exits)))
