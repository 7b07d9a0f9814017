"""The benchmarks backbone, exit-tax and batch: one encoder, with and without exits."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mini_ee.experiments.bench.common import (
    BERT_BASE,
    forced_out,
    from_transformers,
    full_model,
    inputs_of,
    medians,
    minilm_of,
    random_encoder,
    row_of,
    tensors_of,
    three_exits,
)
from mini_ee.lab.backbones.bert import Bert
from mini_ee.lab.baselines import hashee, tr_bert
from mini_ee.lab.baselines.adainfer import Svm
from mini_ee.lab.baselines.hashee import HashExits
from mini_ee.lab.baselines.tr_bert import ReducedExits
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.row_exits import RowExits, RowSegments
from mini_ee.lab.rules import Never, Patience, Policy, QExit, Rule, Threshold
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import build_model

OWN_HEADS = {  # method -> its rule; the first has plain heads, with which the others are compared
    "joint": Threshold(0.9),
    "elasticbert": Threshold(-0.1, "entropy"),
    "palbert": QExit(0.5),
    "cat": Policy(0.5),
    "dree": Patience(2),
    "adainfer": Svm((1.0,) * 3, (1.0,) * 3, (0.0,) * 3),
}
OWN_HEADS_BAR = 0.03  # allowed excess over the ratio of plain heads
TOKEN_EXIT_BARS = {1: 0.45, 32: 0.30}  # batch -> allowed excess; measured: .41, .26. Few tokens still read all weights


def bench_backbone(model: Path | None, seed: int) -> Iterator[dict]:
    """`minilm bB tT`: our forward pass compared with that of transformers (installed by the extra `bench`)."""
    ours = minilm_of(model, seed)
    theirs = from_transformers("AutoModel", ours)
    for batch, tokens in ((1, 32), (1, 128), (32, 32), (32, 128)):
        ids, mask, _ = tensors_of(inputs_of(ours.config, batch, tokens, seed))
        with torch.inference_mode():
            expected = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(ours(ids, mask), expected, atol=1e-5, rtol=0)
            runs = [partial(ours, ids, mask), partial(theirs, input_ids=ids, attention_mask=mask)]
            seconds, other = medians(runs, f"backbone b{batch} t{tokens}")
        yield row_of(f"minilm b{batch} t{tokens}", seconds, other, bar=0.90 if (batch, tokens) == (1, 32) else 1.03)


def bench_exit_tax(model: Path | None, seed: int) -> Iterator[dict]:
    """`MODEL bB t32 eE`: heads on the first token as in the papers; `MODEL bB t32 METHOD`: tokens exit;
    `bert-base b1 t32 METHOD eE`: a method's own heads and rule compared with plain heads and a threshold.

    The allowed excess is a share of the full model's time; `bar` is the same as a ratio.
    """
    minilm = minilm_of(model, seed)
    cases = (
        ("minilm", minilm, three_exits(minilm), {1: 0.05, 32: 0.03}),
        ("bert-base", random_encoder(BERT_BASE, seed), (3, 6, 9, 12), {1: 0.03, 32: 0.03}),
    )
    for name, backbone, exits, bars in cases:
        for batch, bar in bars.items():
            yield from _exit_tax(name, backbone, exits, batch, bar, seed)
        for batch in bars:
            yield from _token_exit_tax(name, backbone, batch, seed)
    yield from _own_heads_tax(*cases[-1][:3], seed)


def _exit_tax(name: str, backbone: Bert, exits: tuple[int, ...], batch: int, bar: float, seed: int) -> Iterator[dict]:
    segments = RowSegments(RowExits(backbone, exits, num_labels=2, pool="first"))
    inputs, depth = inputs_of(backbone.config, batch, 32, seed), exits[-1]
    with segments.running():
        first_exit = segments.advance(0, segments.start(inputs))

    @torch.inference_mode()
    def one_head():
        return forced_out(0, len(exits)).stop(0, segments.read(0, first_exit), {})

    forced = [partial(early_exit, segments, forced_out(k, len(exits)), inputs) for k in range(len(exits))]
    runs = [full_model(backbone, inputs), one_head, *forced]
    full, head, *times = medians(runs, f"exit-tax {name} b{batch}")
    for layer, seconds in zip(exits, times, strict=True):
        yield _tax(f"{name} b{batch} t32 e{layer}", seconds, full, layer / depth, bar) | {"head_share": head / full}


def _tax(case: str, seconds: float, full: float, share: float, bar: float) -> dict:
    """The row of a case that ran a share of the layers."""
    excess = {"excess": seconds / full - share, "excess_bar": bar}
    return row_of(case, seconds, full * share, bar=1 + bar / share) | excess


def _token_exit_tax(name: str, backbone: Bert, batch: int, seed: int) -> Iterator[dict]:
    """Methods in which tokens exit, compared with their mean share of the layers: random tables and policies."""
    inputs, depth = inputs_of(backbone.config, batch, 32, seed), backbone.config.num_hidden_layers
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hashed = HashExits(backbone, (depth,), 2, "first", hashee.Config())
        hashed.table.data = torch.randint(1, depth + 1, hashed.table.shape).float()
        reduced = ReducedExits(backbone, (depth,), 2, "first", tr_bert.Config())
        for network in reduced.selectors:
            torch.nn.init.normal_(network[2].weight)
            torch.nn.init.zeros_(network[2].bias)
    runs = [partial(early_exit, model.segments(), Never(), inputs) for model in (hashed, reduced)]
    full, *times = medians([full_model(backbone, inputs), *runs], f"exit-tax {name} b{batch} tokens")
    for method, seconds, run in zip(("hashee", "tr-bert"), times, runs):
        share = float(run().cost.depth.mean()) / depth
        yield _tax(f"{name} b{batch} t32 {method}", seconds, full, share, TOKEN_EXIT_BARS[batch])


def _own_heads_tax(name: str, backbone: Bert, exits: tuple[int, ...], seed: int) -> Iterator[dict]:
    """All rows exit after half of the layers; all heads up to there are evaluated as in the method."""
    inputs, at = inputs_of(backbone.config, 1, 32, seed), len(exits) // 2 - 1
    config = {"exits": exits, "settings": {}, "pool": "first", "num_labels": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        models = [build_model(load_method(method), "rows", backbone, config).eval() for method in OWN_HEADS]
    rules = [_ForcedExits(rule, [at]) for rule in OWN_HEADS.values()]
    runs = [partial(early_exit, model.segments(), rule, inputs) for model, rule in zip(models, rules)]
    full, plain, *others = medians([full_model(backbone, inputs), *runs], f"exit-tax {name} b1 heads")
    share = exits[at] / exits[-1]
    for method, seconds in zip(list(OWN_HEADS)[1:], others):
        yield _tax(f"{name} b1 t32 {method} e{exits[at]}", seconds, full, plain / full, OWN_HEADS_BAR * share)


class _ForcedExits(Rule):
    """A rule is evaluated at every exit, but row i exits at exit_of_row[i] in any case."""

    def __init__(self, rule: Rule, exit_of_row: Sequence[int]):
        self.rule, self.exit_of_row = rule, np.asarray(exit_of_row)
        self.needs = rule.needs

    def stop(self, k: int, read, memory: dict[str, np.ndarray]) -> np.ndarray:
        self.rule.stop(k, read, memory)
        return memory.setdefault("exit_of_row", self.exit_of_row) == k


def bench_batch(model: Path | None, seed: int) -> Iterator[dict]:
    """`minilm b32 t32 mixed`: 12 rows exit after a third of the layers, 10 after two thirds, 10 after all."""
    backbone = minilm_of(model, seed)
    exits = three_exits(backbone)
    segments = RowSegments(RowExits(backbone, exits, num_labels=2))
    inputs = inputs_of(backbone.config, 32, 32, seed)
    exit_of_row = np.random.default_rng(seed).permutation(np.repeat([0, 1, 2], [12, 10, 10]))
    rule = _ForcedExits(Threshold(0.9), exit_of_row)
    with torch.inference_mode():
        hidden = [backbone.embed(inputs.take(slice(size))) for size in (32, 20, 10)]
        context = backbone.context(inputs)

    @torch.inference_mode()
    def layers_alone():
        backbone.embed(inputs)
        for states, start, stop in zip(hidden, (0, *exits), exits):
            backbone.run_layers(states, context, start, stop)

    ours, ideal = medians([lambda: early_exit(segments, rule, inputs), layers_alone], "batch")
    yield row_of("minilm b32 t32 mixed", ours, ideal, bar=1.10)
