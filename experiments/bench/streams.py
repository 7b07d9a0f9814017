"""The benchmark sgmv: parallel LoRA streams compared with alternatives."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

import mini_ee.lab.methods.lora_exits_sgmv as lora_exits_sgmv
import mini_ee.lora_exits as paper
from mini_ee.experiments.bench.common import BERT_BASE, inputs_of, medians, random_encoder, row_of, tensors_of
from mini_ee.lab.baselines.multi_model import MultiModel
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.methods.lora_exits_sgmv import sgmv
from mini_ee.lab.methods.lora_exits_streams import cheapest_schedule, measure_costs, parallel, restart
from mini_ee.lab.rules import Fixed, Never

REACH = {  # the share of the rows that reach each of 4 exits
    "most leave": (1.0, 0.3, 0.15, 0.05),
    "some leave": (1.0, 0.7, 0.5, 0.3),
    "few leave": (1.0, 0.95, 0.9, 0.85),
}


BARS = {  # batch, tokens -> the largest ratio to one pass per stream
    "cpu": {(1, 16): 0.75, (1, 128): 0.92},
    "cuda": {(1, 16): 0.50, (1, 128): 0.50},  # a GPU waits for launches
}


def bench_sgmv(model: Path | None, seed: int, device: str = "cpu") -> Iterator[dict]:
    """LoRA exits of BERT-base size, rank 8, 4 streams, a whole forward pass. Parallel streams are compared with

    loop           one pass per stream
    adapters       one shared product and a loop over the adapters (ForLoop of Table 5)
    backbone       the same rows without adapters
    multi-model    as many independent models; also the bytes of both (Table 2)
    memory         the bytes of adapters and heads divided by those of the backbone (Table 10); times as in multi-model

    Other cases: `ragged`, rows at four exits in one batch compared with one batch per exit; `operator`, SGMV compared
    with gather and product; `adaptive`, the adaptive schedule compared with the better of restart and parallel.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lora = LoRAExits(random_encoder(BERT_BASE, seed), (3, 6, 9, 12), num_labels=2, pool="first").eval()
        for parameter in lora.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    lora.to(device)
    for batch, tokens in ((1, 16), (1, 128), (2, 16), (4, 16), (8, 16)):
        inputs, case = inputs_of(BERT_BASE, batch, tokens, seed), f"bert-base b{batch} t{tokens}"
        parallel_streams = partial(early_exit, lora.segments(parallel(4)), Never(), inputs)
        one_by_one = partial(early_exit, lora.segments(restart(4)), Never(), inputs)
        bare, looped = partial(bare_streams, lora, inputs), partial(over_adapters, parallel_streams)
        ours, loop, floor, adapters = medians([parallel_streams, one_by_one, bare, looped], f"sgmv {case}")
        yield row_of(f"{case} loop", ours, loop, bar=BARS[device].get((batch, tokens), 1.0))
        yield row_of(f"{case} adapters", ours, adapters, bar=1.03)
        yield row_of(f"{case} backbone", ours, floor, bar=1.08 if device == "cpu" else 1.15)
    yield _ragged("bert-base b8 t16 ragged", lora, inputs_of(BERT_BASE, 8, 16, seed))
    yield from _memory(lora, seed)
    for rank in (1, 8, 64, 128):
        for layout, lengths in (("equal", [128] * 4), ("ragged", [16, 200, 40, 256]), ("short", [1] * 4)):
            yield _operator(f"operator r{rank} {layout} gather", rank, lengths, seed, device)
    for batch, tokens in ((1, 16), (1, 128)):
        yield from _adaptive(f"bert-base b{batch} t{tokens}", lora, inputs_of(BERT_BASE, batch, tokens, seed))


def _memory(lora: LoRAExits, seed: int) -> Iterator[dict]:
    models = MultiModel(lora.backbone, lora.exits, num_labels=2, pool="first").eval()
    models.to(lora.backbone.device)
    inputs = inputs_of(BERT_BASE, 1, 16, seed)
    parallel_streams = lora.segments(parallel(4))
    runs = [partial(early_exit, segments, Never(), inputs) for segments in (parallel_streams, models.segments())]
    ours, other = medians(runs, "sgmv multi-model")
    own_bytes = parallel_streams.bytes_held
    other_bytes, bare = (sum(p.nbytes for p in module.parameters()) for module in (models, lora.backbone))
    sizes = {"bytes": own_bytes, "against_bytes": other_bytes}
    yield row_of("bert-base b1 t16 multi-model", ours, other, bar=1.0) | sizes
    share = (own_bytes - bare) / bare
    yield row_of("bert-base memory", ours, other, bar=0.04) | sizes | {"ratio": share, "holds": share <= 0.04}


def over_adapters(run: Callable) -> None:
    """Call a function with SGMV replaced by the loop over segments."""
    lora_exits_sgmv.sgmv = paper.sgmv
    try:
        run()
    finally:
        lora_exits_sgmv.sgmv = sgmv


def _ragged(case: str, lora: LoRAExits, inputs: Inputs) -> dict:
    """Two rows at each of four exits."""
    tensors, exit_of_row = tensors_of(inputs, lora.backbone.device), np.arange(len(inputs)) % len(lora.exits)
    rows = [torch.from_numpy(np.flatnonzero(exit_of_row == k)) for k in range(len(lora.exits))]
    parts = [[tensor[some] for tensor in tensors] for some in rows]

    @torch.inference_mode()
    def together() -> torch.Tensor:
        return lora.ragged(exit_of_row, *tensors)

    @torch.inference_mode()
    def apart() -> list[torch.Tensor]:
        return [lora.logits_of(k, *part) for k, part in enumerate(parts)]

    for some, expected in zip(rows, apart()):
        torch.testing.assert_close(
            together()[some], expected, rtol=0, atol=1e-5 if expected.device.type == "cpu" else 1e-4
        )
    return row_of(case, *medians([together, apart], f"sgmv {case}"), bar=0.90)


@torch.inference_mode()
def bare_streams(lora: LoRAExits, inputs: Inputs) -> None:
    """Run the rows of all streams through the layers that each stream needs, without adapters."""
    hidden, context = lora.backbone.embed(inputs).repeat(len(lora.exits), 1, 1), lora.backbone.context(inputs)
    for k, (start, stop) in enumerate(zip(lora.starts, lora.exits)):
        streams = context.repeat(len(lora.exits) - k)
        hidden = lora.backbone.run_layers(hidden, streams, start, stop)[len(inputs) :]


def _operator(case: str, rank: int, lengths: list[int], seed: int, device: str) -> dict:
    random, width, n = torch.Generator().manual_seed(seed), BERT_BASE.hidden_size, len(lengths)
    shapes = (sum(lengths), width), (n, width, rank), (n, rank, width)
    x, A, B = (torch.randn(*shape, generator=random).to(device) for shape in shapes)
    starts = [0, *np.cumsum(lengths).tolist()]
    adapter = torch.repeat_interleave(torch.arange(n), torch.tensor(lengths)).to(device)
    ours, theirs = torch.zeros_like(x), torch.zeros_like(x)

    def segments() -> torch.Tensor:
        return sgmv(ours, x, A, B, starts)

    def gather() -> torch.Tensor:
        return theirs[:, None].baddbmm_(torch.bmm(x[:, None], A[adapter]), B[adapter])[:, 0]

    with torch.inference_mode():
        torch.testing.assert_close(segments(), gather(), rtol=1e-4, atol=1e-3)
        seconds, other = medians([segments, gather], case, seconds_a_case=2.0)
    return row_of(case, seconds, other, bar=1.05)


def _adaptive(case: str, lora: LoRAExits, inputs: Inputs) -> Iterator[dict]:
    """If most, some or few rows exit early: expected seconds compared with the better of restart and parallel."""
    K = len(lora.exits)
    costs = measure_costs(lora, len(inputs), inputs.input_ids.shape[1])
    chosen = {name: cheapest_schedule(costs, np.array(reach)) for name, reach in REACH.items()}
    schedules = {str(schedule): schedule for schedule in (restart(K), parallel(K), *chosen.values())}
    runs = [
        partial(early_exit, lora.segments(schedule), Fixed(k), inputs)
        for schedule in schedules.values()
        for k in range(K)
    ]
    seconds = np.array(medians(runs, f"sgmv {case} adaptive", seconds_a_case=24.0)).reshape(-1, K)
    for name, reach in REACH.items():
        exit_shares = np.append(-np.diff(reach), reach[-1])
        expected = dict(zip(schedules, seconds @ exit_shares))
        best = min(expected[str(restart(K))], expected[str(parallel(K))])
        row = row_of(f"{case} adaptive {name}", float(expected[str(chosen[name])]), float(best), bar=1.05)
        yield row | {"schedule": chosen[name], "seconds_of": {key: float(value) for key, value in expected.items()}}
