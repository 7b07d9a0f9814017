"""Benchmarks: ratios of interleaved medians in one process, warm. A row is a case of DESIGN.md's list and its bar.

backbone    our forward over that of transformers, on the same weights
exit-tax    a run forced out at layer e, every head on the way read and judged, over e/L of the full model
            without heads
batch       32 rows that leave at mixed depths, over the layers alone at the batch sizes that remain
onnx        exported segments over the whole graph, over torch, and int8 over float32
sgmv        LoRA streams side by side over one pass a stream, over a loop over adapters, over the bare backbone, and
            over independent models; rows at different exits in one batch over each exit's rows apart
decode      our cached greedy decoding over that of transformers; tokens forced out at layer e over the sum of the
            parts; lossless over full decoding; all in seconds a token
retrieval   RAEE: embed, retrieve and plan over one forward pass; planned groups over row by row; recall and building
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import mini_ee.methods.lora_exits as loraexit
from mini_ee.backbones.backbone import Tensors
from mini_ee.backbones.bert import Bert, BertConfig
from mini_ee.backbones.hub import BUILT_IN_DECODER, generates, load_backbone, read_config, save_backbone
from mini_ee.backbones.llama import Cache, Decoder, DecoderConfig
from mini_ee.backbones.sgmv import sgmv, sgmv_loop
from mini_ee.baselines.multi_model import MultiModel
from mini_ee.data.tokens import Inputs
from mini_ee.early_exit import early_exit
from mini_ee.export.row_segments import OrtSegments, WholeGraph
from mini_ee.export.writer import write_graphs
from mini_ee.measure.evaluate import REST
from mini_ee.methods.datastore import Datastore, exact_search
from mini_ee.methods.encoders import OwnStates
from mini_ee.methods.lora_exits import LoRAExits
from mini_ee.methods.raee import Retrieval
from mini_ee.rules import FixedExit, NeverExit, Planned, Rule, Threshold
from mini_ee.units.decoding import FILLS, Generated, gather
from mini_ee.units.generation import generate, generate_lossless
from mini_ee.units.heads import VocabularyHead
from mini_ee.units.rows import MultiExit, TorchSegments
from mini_ee.units.streams import cheapest_schedule, measure_costs, parallel, restart

MINILM = BertConfig(
    model_type="bert",
    vocab_size=30522,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=1536,
    max_position_embeddings=512,
)

BERT_BASE = BertConfig(
    model_type="bert",
    vocab_size=30522,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    max_position_embeddings=512,
)

STORIES = DecoderConfig(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=172,
    max_position_embeddings=512,
    hidden_act="silu",
    norm_eps=1e-5,
    tie_word_embeddings=True,
)

LLAMA = DecoderConfig(
    model_type="llama",
    vocab_size=4096,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    intermediate_size=2048,
    max_position_embeddings=512,
    hidden_act="silu",
    norm_eps=1e-5,
    tie_word_embeddings=True,
)

LOSSLESS, TIMED_PROMPTS = 50, 4  # prompts of one token whose texts must be equal, and of them those timed

MIN_ROUNDS, SECONDS_A_CASE = 15, 12.0  # measured in turns until both are reached

WARM_ROUNDS = 3

REACH = {  # the chance that a row is still there before each of 4 exits
    "most leave": (1.0, 0.3, 0.15, 0.05),
    "some leave": (1.0, 0.7, 0.5, 0.3),
    "few leave": (1.0, 0.95, 0.9, 0.85),
}

SST2_ROWS, LARGE = 67_349, 1_000_000  # the first are those of train

LATENT = 32  # dimensions that synthetic embeddings vary in, in CLUSTERS

CLUSTERS = 256

QUERIES = 200  # for recall

BUILD_THREADS = 2

DISPATCH = 100e-6  # seconds that the loop may take an exit


def bench_backbone(model: Path | None, seed: int) -> Iterator[dict]:
    """`minilm bB tT`: ours over transformers (installed by the extra `bench`)."""
    ours = _minilm(model, seed)
    theirs = _from_transformers("AutoModel", ours)
    for batch, tokens in ((1, 32), (1, 128), (32, 32), (32, 128)):
        ids, mask, _ = _tensors(_inputs(ours.config, batch, tokens, seed))
        with torch.inference_mode():
            expected = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(ours(ids, mask), expected, atol=1e-5, rtol=0)
            runs = [partial(ours, ids, mask), partial(theirs, input_ids=ids, attention_mask=mask)]
            own, other = medians(runs, f"backbone b{batch} t{tokens}")
        yield _row(f"minilm b{batch} t{tokens}", own, other, bar=0.90 if (batch, tokens) == (1, 32) else 1.03)


def _from_transformers(kind: str, backbone: Bert | Decoder):
    """The same weights in transformers' own model, of its class `kind`, in eval mode."""
    try:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise ValueError("this benchmark compares with transformers: pip install 'mini-ee[bench]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_backbone(backbone, Path(folder) / "model")
        return getattr(transformers, kind).from_pretrained(Path(folder) / "model").eval()


def bench_exit_tax(model: Path | None, seed: int) -> Iterator[dict]:
    """`MODEL bB t32 eE`, heads on the first token as in the papers.

    The bar on the excess, a share of the full model's time, is printed as one on the ratio.
    """
    cases = (
        ("minilm", _minilm(model, seed), (2, 4, 6), {1: 0.05, 32: 0.03}),
        ("bert-base", _random(BERT_BASE, seed), (3, 6, 9, 12), {1: 0.03, 32: 0.03}),
    )
    for name, backbone, exits, bars in cases:
        for batch, bar in bars.items():
            yield from _exit_tax(name, backbone, exits, batch, bar, seed)


def _exit_tax(name: str, backbone: Bert, exits: tuple[int, ...], batch: int, bar: float, seed: int) -> Iterator[dict]:
    segments = TorchSegments(MultiExit(backbone, exits, num_labels=2, pool="first"))
    inputs, depth = _inputs(backbone.config, batch, 32, seed), exits[-1]
    ids, _, types = _tensors(inputs)

    @torch.inference_mode()
    def full_model():
        return backbone(ids, None, types)

    with segments.running():
        first_exit = segments.advance(0, segments.start(inputs))

    @torch.inference_mode()
    def one_head():
        return _forced_out(0, len(exits)).stop(0, segments.read(0, first_exit), {})

    forced = [partial(early_exit, segments, _forced_out(k, len(exits)), inputs) for k in range(len(exits))]
    full, head, *times = medians([full_model, one_head, *forced], f"exit-tax {name} b{batch}")
    for layer, seconds in zip(exits, times, strict=True):
        ideal = full * layer / depth
        yield _row(f"{name} b{batch} t32 e{layer}", seconds, ideal, bar=1 + bar * depth / layer) | {
            "excess": (seconds - ideal) / full,
            "excess_bar": bar,
            "head_share": head / full,
        }


def bench_batch(model: Path | None, seed: int) -> Iterator[dict]:
    """`minilm b32 t32 mixed`: 12 rows leave at layer 2, 10 at 4, 10 at 6."""
    backbone, exits = _minilm(model, seed), (2, 4, 6)
    segments = TorchSegments(MultiExit(backbone, exits, num_labels=2))
    inputs = _inputs(backbone.config, 32, 32, seed)
    ids, _, types = _tensors(inputs)
    rule = _AtExit(np.random.default_rng(seed).permutation(np.repeat([0, 1, 2], [12, 10, 10])))
    with torch.inference_mode():
        hidden = [backbone.embed(inputs.take(slice(size))) for size in (32, 20, 10)]
        around = backbone.around(inputs)

    @torch.inference_mode()
    def layers_alone():
        backbone.embed(inputs)
        for states, start, stop in zip(hidden, (0, *exits), exits):
            backbone.run_layers(states, around, start, stop)

    own, ideal = medians([lambda: early_exit(segments, rule, inputs), layers_alone], "batch")
    yield _row("minilm b32 t32 mixed", own, ideal, bar=1.10)


class _AtExit(Rule):
    """Row i leaves at exit_of_row[i]; asked, not planned, so that every head is read on the way."""

    def __init__(self, exit_of_row: np.ndarray):
        self.exit_of_row = exit_of_row

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        rows = memory.setdefault("row", np.arange(len(self.exit_of_row)))
        Threshold(0.9).stop(k, reading, memory)
        return self.exit_of_row[rows] == k


def bench_onnx(model: Path | None, seed: int) -> Iterator[dict]:
    """Segments in sequence over the whole graph; forced out at layer e, every head on the way read and judged, over
    e/L of the whole graph; the loop without its graphs, an exit; segments over torch; int8 over float32.
    """
    cases = (
        ("minilm", _minilm(model, seed), (2, 4, 6), 32, (1, 8)),
        ("bert-base", _random(BERT_BASE, seed), (3, 6, 9, 12), 128, (1, 8)),
    )
    for name, backbone, exits, tokens, sizes in cases:
        model = MultiExit(backbone, exits, num_labels=2, pool="first").eval()
        with tempfile.TemporaryDirectory() as folder:
            opened = {kind: _exported(model, Path(folder) / kind, kind) for kind in ("float32", "int8")}
            for batch in sizes:
                inputs = _inputs(backbone.config, batch, tokens, seed)
                yield from _onnx(f"{name} b{batch} t{tokens}", model, opened, inputs)


def _onnx(case: str, model: MultiExit, opened: dict, inputs: Inputs) -> Iterator[dict]:
    (segments, whole), (int8, _) = opened["float32"], opened["int8"]
    exits, base = segments.exits, case.startswith("bert-base b1 ")
    forced = [
        partial(early_exit, segments, _forced_out(k, len(exits)), inputs) for k in range(len(exits) if base else 0)
    ]
    runs = [partial(early_exit, each, NeverExit(), inputs) for each in (whole, segments)]
    full, chain, *times = medians([*runs, *forced], f"onnx {case}", seconds_a_case=24.0)
    yield _row(f"{case} segments", chain, full, bar=1.03)
    for layer, seconds in zip(exits[:-1], times):
        yield _row(f"{case} e{layer}", seconds, full * layer / exits[-1], bar=1.05)
    if base:
        yield _row(f"{case} dispatch", _dispatch(segments, inputs), DISPATCH, bar=1.0)
        compared = [partial(early_exit, each, NeverExit(), inputs) for each in (TorchSegments(model), segments, int8)]
        torch_seconds, onnx_seconds, int8_seconds = medians(compared, f"onnx {case} engines", REST)
        yield _row(f"{case} torch", onnx_seconds, torch_seconds, bar=0.80)
        yield _row(f"{case} int8", int8_seconds, onnx_seconds, bar=0.50)


def _exported(model: MultiExit, folder: Path, precision: str) -> tuple[OrtSegments, WholeGraph]:
    """The segments of a model, and its whole graph, on as many threads as torch has."""
    folder.mkdir()
    manifest = write_graphs(model, model.segments(), folder, precision)
    threads = torch.get_num_threads()
    return OrtSegments(folder, manifest, threads=threads), WholeGraph(folder, manifest, threads=threads)


def _dispatch(segments: OrtSegments, inputs: Inputs) -> float:
    """Seconds an exit of a run to the last exit that are not spent in a graph."""
    rule, inside, outside = _forced_out(len(segments.exits) - 1, len(segments.exits)), [], []

    def timed(run: Callable, *args):
        begin = time.perf_counter()
        value = run(*args)
        inside[-1] += time.perf_counter() - begin
        return value

    watched = copy(segments)
    watched.sessions = list(map(copy, segments.sessions))
    for session in watched.sessions:
        session.run = partial(timed, session.run)
    for _ in range(WARM_ROUNDS + MIN_ROUNDS):
        inside.append(0.0)
        outside.append(early_exit(watched, rule, inputs).cost.seconds - inside[-1])
    return float(np.median(outside[WARM_ROUNDS:])) / len(segments.exits)


def bench_sgmv(model: Path | None, seed: int) -> Iterator[dict]:
    """LoRA exits of BERT-base size, rank 8, 4 streams, a whole forward pass. Streams side by side over

    loop           one pass a stream
    adapters       one shared product and a loop over the adapters (ForLoop of Table 5)
    backbone       the same rows without adapters
    multi-model    as many independent models, with the bytes of both (Table 2)
    memory         bytes: those of adapters and heads over those of the backbone (Table 10), times as in multi-model

    and `ragged`: rows at four exits in one batch over each exit's rows apart; `operator`: SGMV over gather and product;
    `adaptive`: the adaptive schedule over the better of restart and parallel.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lora = LoRAExits(_random(BERT_BASE, seed), (3, 6, 9, 12), num_labels=2, pool="first").eval()
        for parameter in lora.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    for batch, tokens, bar in ((1, 16, 0.75), (1, 128, 0.92), (2, 16, None), (4, 16, None), (8, 16, None)):
        inputs, case = _inputs(BERT_BASE, batch, tokens, seed), f"bert-base b{batch} t{tokens}"
        side_by_side = partial(early_exit, lora.segments(parallel(4)), NeverExit(), inputs)
        one_by_one = partial(early_exit, lora.segments(restart(4)), NeverExit(), inputs)
        bare, over_adapters = partial(_bare_streams, lora, inputs), partial(_over_adapters, side_by_side)
        own, loop, floor, adapters = medians([side_by_side, one_by_one, bare, over_adapters], f"sgmv {case}")
        yield _row(f"{case} loop", own, loop, bar=bar or 1.0)
        yield _row(f"{case} adapters", own, adapters, bar=1.03)
        yield _row(f"{case} backbone", own, floor, bar=1.08)
    yield _ragged("bert-base b8 t16 ragged", lora, _inputs(BERT_BASE, 8, 16, seed))
    yield from _memory(lora, seed)
    for rank in (1, 8, 64, 128):
        for layout, lengths in (("equal", [128] * 4), ("ragged", [16, 200, 40, 256]), ("short", [1] * 4)):
            yield _operator(f"operator r{rank} {layout} gather", rank, lengths, seed)
    for batch, tokens in ((1, 16), (1, 128)):
        yield from _adaptive(f"bert-base b{batch} t{tokens}", lora, _inputs(BERT_BASE, batch, tokens, seed))


def _memory(lora: LoRAExits, seed: int) -> Iterator[dict]:
    models = MultiModel(lora.backbone, lora.exits, num_labels=2, pool="first").eval()
    inputs = _inputs(BERT_BASE, 1, 16, seed)
    side_by_side = lora.segments(parallel(4))
    runs = [partial(early_exit, each, NeverExit(), inputs) for each in (side_by_side, models.segments())]
    own, other = medians(runs, "sgmv multi-model")
    held = side_by_side.bytes_held
    theirs, bare = (sum(p.nbytes for p in each.parameters()) for each in (models, lora.backbone))
    sizes = {"bytes": held, "against_bytes": theirs}
    yield _row("bert-base b1 t16 multi-model", own, other, bar=1.0) | sizes
    share = (held - bare) / bare
    yield _row("bert-base memory", own, other, bar=0.04) | sizes | {"ratio": share, "holds": share <= 0.04}


def _over_adapters(run: Callable) -> None:
    """A run in which SGMV is the loop over segments."""
    loraexit.sgmv = sgmv_loop
    try:
        run()
    finally:
        loraexit.sgmv = sgmv


def _ragged(case: str, lora: LoRAExits, inputs: Inputs) -> dict:
    """Two rows at each of four exits."""
    tensors, exit_of_row = _tensors(inputs), np.arange(len(inputs)) % len(lora.exits)
    rows = [torch.from_numpy(np.flatnonzero(exit_of_row == k)) for k in range(len(lora.exits))]
    parts = [[tensor[some] for tensor in tensors] for some in rows]

    @torch.inference_mode()
    def together() -> torch.Tensor:
        return lora.ragged(exit_of_row, *tensors)

    @torch.inference_mode()
    def apart() -> list[torch.Tensor]:
        return [lora.exit_logits(k, *part) for k, part in enumerate(parts)]

    for some, expected in zip(rows, apart()):
        torch.testing.assert_close(together()[some], expected, rtol=0, atol=1e-5)
    return _row(case, *medians([together, apart], f"sgmv {case}"), bar=0.90)


@torch.inference_mode()
def _bare_streams(lora: LoRAExits, inputs: Inputs) -> None:
    """The rows that all streams are, through the layers that each needs, without adapters."""
    hidden, around = lora.backbone.embed(inputs).repeat(len(lora.exits), 1, 1), lora.backbone.around(inputs)
    for start, stop in zip(lora.starts, lora.exits):
        hidden = lora.backbone.run_layers(hidden, around, start, stop)[len(inputs) :]


def _operator(case: str, rank: int, lengths: list[int], seed: int) -> dict:
    random, width, n = torch.Generator().manual_seed(seed), BERT_BASE.hidden_size, len(lengths)
    shapes = (sum(lengths), width), (n, width, rank), (n, rank, width)
    x, A, B = (torch.randn(*shape, generator=random) for shape in shapes)
    starts = [0, *np.cumsum(lengths).tolist()]
    adapter = torch.repeat_interleave(torch.arange(n), torch.tensor(lengths))
    ours, theirs = torch.zeros_like(x), torch.zeros_like(x)

    def segments() -> torch.Tensor:
        return sgmv(ours, x, A, B, starts)

    def gather() -> torch.Tensor:
        return theirs[:, None].baddbmm_(torch.bmm(x[:, None], A[adapter]), B[adapter])[:, 0]

    with torch.inference_mode():
        torch.testing.assert_close(segments(), gather(), rtol=1e-4, atol=1e-3)
        own, other = medians([segments, gather], case, seconds_a_case=2.0)
    return _row(case, own, other, bar=1.05)


def _adaptive(case: str, lora: LoRAExits, inputs: Inputs) -> Iterator[dict]:
    """For rows of which most, some or few leave early: expected seconds over the better of restart and parallel."""
    K = len(lora.exits)
    costs = measure_costs(lora, len(inputs), inputs.input_ids.shape[1])
    chosen = {name: cheapest_schedule(costs, np.array(reach)) for name, reach in REACH.items()}
    schedules = {str(each): each for each in (restart(K), parallel(K), *chosen.values())}
    runs = [
        partial(early_exit, lora.segments(schedule), FixedExit(k), inputs)
        for schedule in schedules.values()
        for k in range(K)
    ]
    seconds = np.array(medians(runs, f"sgmv {case} adaptive", seconds_a_case=24.0)).reshape(-1, K)
    for name, reach in REACH.items():
        left = np.append(-np.diff(reach), reach[-1])
        expected = dict(zip(schedules, seconds @ left))
        best = min(expected[str(restart(K))], expected[str(parallel(K))])
        row = _row(f"{case} adaptive {name}", float(expected[str(chosen[name])]), float(best), bar=1.05)
        yield row | {"schedule": chosen[name], "seconds_of": {key: float(value) for key, value in expected.items()}}


def bench_retrieval(model: Path | None, seed: int, large: bool = False) -> Iterator[dict]:
    """`67k t32 plan|encoder`, `67k recall`, `67k build` and smaller, `minilm b256 t32 groups`; large: `1m build` too.

    The datastores hold synthetic embeddings in clusters, as many as SST-2 has rows. The encoder has no bar of its own:
    it must not cost more than the model. The ratio of recall is the share of the 12 nearest that is missed; that of
    build is seconds a row over those at 1k, which shall grow more slowly than the square root of the rows. Rows are as
    wide as the encoder's embeddings there.
    """
    bert, minilm = _random(BERT_BASE, seed), _minilm(model, seed)
    yield from _groups(minilm, seed)
    inputs = _inputs(BERT_BASE, 1, 32, seed)
    ids, _, types = _tensors(inputs)

    @torch.inference_mode()
    def full_model():
        return bert(ids, None, types)

    for name, embed, bar in (
        ("encoder", OwnStates(minilm, minilm.config.num_hidden_layers), 1.0),
        ("plan", OwnStates(bert, 0), 0.03),
    ):
        vectors = _clustered(SST2_ROWS + QUERIES, embed.backbone.config.hidden_size, seed)
        store, queries = _filled(vectors[:SST2_ROWS], seed), vectors[SST2_ROWS:]
        rule, turn = Retrieval().with_datastore(store, embed), itertools.cycle(queries)

        def plan(rule=rule, turn=turn):  # the model is random: what is looked up is like the rows instead
            rule.embed(inputs)
            return rule.chosen(rule.datastore.search(next(turn)[None], rule.k))

        own, other = medians([plan, full_model], f"retrieval {name}")
        yield _row(f"67k t32 {name}", own, other, bar)
    yield _recall(store, queries)
    del store, vectors
    yield from _building(minilm.config.hidden_size, LARGE if large else SST2_ROWS, seed)


def _groups(backbone: Bert, seed: int) -> Iterator[dict]:
    exits = tuple(range(1, backbone.config.num_hidden_layers + 1))
    segments, inputs = MultiExit(backbone, exits, num_labels=2).segments(), _inputs(backbone.config, 256, 32, seed)
    plan = np.random.default_rng(seed).integers(0, len(exits), len(inputs))
    rows = [
        Inputs(ids[None], attention[None], types[None], (text,))
        for ids, attention, types, text in zip(
            inputs.input_ids, inputs.attention_mask, inputs.token_type_ids, inputs.texts
        )
    ]

    def row_by_row():
        for row, exit in zip(rows, plan):
            early_exit(segments, FixedExit(int(exit)), row)

    own, other = medians([lambda: early_exit(segments, Planned(plan), inputs), row_by_row], "retrieval groups")
    yield _row("minilm b256 t32 groups", own, other, bar=1 / 1.5)


def _clustered(count: int, width: int, seed: int) -> np.ndarray:
    """(count, width) float32: points around CLUSTERS centres, in a plane of LATENT dimensions, as sentences lie."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(CLUSTERS, LATENT))
    latent = centres[random.integers(0, CLUSTERS, count)] + 0.5 * random.normal(size=(count, LATENT))
    return latent.astype(np.float32) @ random.normal(size=(LATENT, width)).astype(np.float32)


def _filled(vectors: np.ndarray, seed: int) -> Datastore:
    """A datastore of 12 exits with these vectors, and values that are drawn."""
    random, count = np.random.default_rng(seed), len(vectors)
    store = Datastore("synthetic", vectors.shape[1], tuple(range(1, 13)))
    values, labels = random.random((count, 12), np.float32), random.integers(0, 2, count)
    for part in tqdm(np.array_split(np.arange(count), -(-count // 1000)), desc="indexing", delay=2, leave=False):
        store.add(vectors[part], values[part], labels[part], [("",)] * len(part), threads=BUILD_THREADS)
    return store


def _recall(store: Datastore, queries: np.ndarray) -> dict:
    rows, k = store.embeddings, Retrieval.k
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    begin = time.perf_counter()
    found = store.search(unit, k).rows
    middle = time.perf_counter()
    exact = exact_search(rows, unit, k).rows
    seconds, against = middle - begin, time.perf_counter() - middle
    hits = sum(len(set(ours) & set(theirs)) for ours, theirs in zip(found.tolist(), exact.tolist()))
    missed = 1 - hits / exact.size
    row = _row(f"67k recall@{k}", seconds / len(unit), against / len(unit), bar=0.01)
    return row | {"ratio": missed, "holds": missed <= 0.01, "recall": 1 - missed}


def _building(width: int, most: int, seed: int) -> Iterator[dict]:
    vectors, first = _clustered(most, width, seed), None
    for name, count in (("1k", 1_000), ("10k", 10_000), ("67k", SST2_ROWS), ("1m", LARGE)):
        if count > most:
            return
        begin = time.perf_counter()
        store = _filled(vectors[:count], seed)
        each = (time.perf_counter() - begin) / count
        first = first or each
        with tempfile.TemporaryDirectory() as folder:
            store.save(folder)
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
        row = _row(f"{name} build", each, first, bar=(count / 1_000) ** 0.5)
        yield row | {"rows": count, "build_seconds": each * count, "bytes": size, "bytes_a_row": size / count}


def bench_decode(model: Path | None, seed: int) -> Iterator[dict]:
    """`stories260k|llama-12x768 bB transformers`, `llama-12x768 b1 eE propagate|recompute`, `llama-8x192 b1 lossless`.

    stories260k: the decoder in `model`, a random one of its shape where that is none.
    """
    is_decoder = model is not None and generates(read_config(model / "config.json").model_type)
    stories, llama = (
        load_backbone(model) if is_decoder else _random_decoder(STORIES, seed),
        _random_decoder(LLAMA, seed),
    )
    for name, decoder, new_tokens in (("stories260k", stories, 64), ("llama-12x768", llama, 12)):
        yield from _over_transformers(name, decoder, new_tokens, seed)
    for layer in (3, 6, 9):
        for fill in FILLS:
            yield _forced_decoding(f"llama-12x768 b1 e{layer} {fill}", llama, layer, fill, new_tokens=16)
    yield _lossless("llama-8x192 b1 lossless", load_backbone(BUILT_IN_DECODER), 64, seed)


def _over_transformers(name: str, decoder: Decoder, new_tokens: int, seed: int) -> Iterator[dict]:
    """Continuations of 8 random tokens, prompt included in the time; the texts must be equal."""
    theirs = _from_transformers("AutoModelForCausalLM", decoder)
    end = theirs.generation_config
    end.eos_token_id = end.bos_token_id = end.pad_token_id = None  # nobody ends early
    random = np.random.default_rng(seed)
    for batch in (1, 8):
        prompts = random.integers(3, decoder.config.vocab_size, (batch, 8)).tolist()
        ids = torch.tensor(prompts)
        settings = {"max_new_tokens": new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        runs = [partial(_decoded, decoder, prompts, new_tokens), partial(theirs.generate, ids, **settings)]
        ours, expected = [row.tokens for row in runs[0]()], runs[1]()[:, 8:].tolist()
        if ours != expected:
            raise ValueError(f"bench decode: {name} b{batch}: our greedy text is not that of transformers")
        own, other = medians(runs, f"decode {name} b{batch}")
        yield _row(f"{name} b{batch} transformers", own / new_tokens, other / new_tokens, bar=1.0)


def _decoded(decoder: Decoder, prompts: list[list[int]], new_tokens: int, **settings) -> list[Generated]:
    return gather(generate(decoder, prompts, max_new_tokens=new_tokens, **settings), len(prompts))


class _LastGoesOn(Rule):
    """All of so many tokens are judged by their confidence and leave at the first exit, but for the last."""

    def __init__(self, num_tokens: int):
        self.left, self.out, self.on = num_tokens - 1, _forced_out(0, 2), _forced_out(1, 2)

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        rule = self.out if self.left else self.on
        self.left -= 1
        return rule.stop(k, reading, memory)


def _forced_decoding(case: str, decoder: Decoder, layer: int, fill: str, new_tokens: int) -> dict:
    """Tokens forced out at `layer`, the last of them not, so that the gaps behind all others are filled and paid for.

    Over the parts, called by hand: the layers up to the exit and its head for each token; the fill, which the last
    token asks for, in one block; the layers above and the LM head for that one. Each token's head is a copy of its own:
    one that is read again and again would stay in the processor's cache, where no decoding finds it.
    """
    depth, behind = decoder.config.num_hidden_layers, list(range(new_tokens - 1))
    cache = Cache(decoder, 1, new_tokens)
    with torch.inference_mode():
        blocks = [decoder.block(torch.tensor([[position]]), cache) for position in range(new_tokens)]
        gap = decoder.block(torch.tensor([behind]), cache)
        hidden = decoder.embed(Tensors(torch.zeros(1, 1, dtype=torch.int64)))
        gaps = hidden.expand(1, len(behind), -1).contiguous()
    heads = [VocabularyHead(decoder, "copy") for _ in blocks]

    parts = {
        "layers": lambda: [decoder.run_layers(hidden, block, 0, layer) for block in blocks],
        "head": lambda: [head(hidden[:, 0]) for head in heads],
        "fill": lambda: (
            decoder.propagate(gaps, gap, layer, depth)
            if fill == "propagate"
            else decoder.run_layers(gaps, gap, layer, depth)
        ),
        "eager_fill": lambda: [
            decoder.propagate(hidden, block, layer, depth)
            if fill == "propagate"
            else decoder.run_layers(hidden, block, layer, depth)
            for block in blocks[:-1]
        ],
        "last": lambda: decoder.lm_logits(decoder.run_layers(hidden, blocks[-1], layer, depth)),
    }

    def forced_out():
        settings = {"exits": (layer, depth), "heads": heads[:1], "rule": _LastGoesOn(new_tokens), "fill": fill}
        return _decoded(decoder, [[0]], new_tokens, **settings)

    runs = [forced_out, *(torch.inference_mode()(part) for part in parts.values())]
    own, *times = medians(runs, f"decode {case}")
    seconds = {f"{name}_seconds": time / new_tokens for name, time in zip(parts, times)}
    against = sum(seconds[f"{name}_seconds"] for name in ("layers", "head", "fill", "last"))
    return _row(case, own / new_tokens, against, bar=1.10) | seconds


def _lossless(case: str, decoder: Decoder, new_tokens: int, seed: int) -> dict:
    """Drafts after half of the layers, by the copied LM head, over full decoding; with how many texts are equal."""
    depth = decoder.config.num_hidden_layers
    settings = {
        "max_new_tokens": new_tokens,
        "exit_layer": depth // 2,
        "head": VocabularyHead(decoder, "copy"),
        "draft": 2,
    }
    begins = np.random.default_rng(seed).integers(3, decoder.config.vocab_size, LOSSLESS)
    prompts = [[decoder.config.bos_token_id, int(token)] for token in begins]

    def lossless(some):
        return [gather(generate_lossless(decoder, [prompt], **settings), 1)[0] for prompt in some]

    def full(some):
        return [_decoded(decoder, [prompt], new_tokens)[0] for prompt in some]

    drafted = lossless(prompts)
    equal = sum(one.tokens == other.tokens for one, other in zip(drafted, full(prompts)))
    own, other = medians([partial(each, prompts[:TIMED_PROMPTS]) for each in (lossless, full)], f"decode {case}")
    tokens = TIMED_PROMPTS * new_tokens
    drafts = np.mean([text.layers_run.count(depth // 2) / new_tokens for text in drafted[:TIMED_PROMPTS]])
    told = {"drafted_share": float(drafts), "prompts": LOSSLESS, "equal_texts": equal}
    return _row(case, own / tokens, other / tokens, bar=1.0) | told


BENCHES = {
    "backbone": bench_backbone,
    "exit-tax": bench_exit_tax,
    "batch": bench_batch,
    "onnx": bench_onnx,
    "sgmv": bench_sgmv,
    "decode": bench_decode,
    "retrieval": bench_retrieval,
}


def medians(runs: list[Callable], name: str, rest: float = 0.0, seconds_a_case: float = SECONDS_A_CASE) -> list[float]:
    """Median seconds of each, run in turns, after a warm-up, for MIN_ROUNDS and so many seconds at least.

    Each is run twice in its turn, and timed the second time, when its own weights are in the caches that the one before
    had taken, as they are where one model serves. Before that it rests so many seconds: where engines differ, the
    threads of the one before may still be spinning.
    """
    for _ in range(WARM_ROUNDS):
        for run in runs:
            run()
    seconds = [[] for _ in runs]
    begin = time.perf_counter()
    with tqdm(desc=name, unit="round", delay=2, leave=False) as bar:
        while len(seconds[0]) < MIN_ROUNDS or time.perf_counter() - begin < seconds_a_case:
            for run, times in zip(runs, seconds):
                time.sleep(rest)
                run()
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            bar.update()
    return [float(np.median(times)) for times in seconds]


def _forced_out(k: int, num_exits: int) -> Threshold:
    """A threshold that is judged at every exit and reached at exit k only."""
    return Threshold(tuple(-np.inf if exit == k else np.inf for exit in range(num_exits)))


def _row(case: str, seconds: float, against: float, bar: float) -> dict:
    ratio = seconds / against
    return {
        "case": case,
        "seconds": seconds,
        "against_seconds": against,
        "ratio": ratio,
        "bar": bar,
        "holds": ratio <= bar,
    }


def _minilm(model: Path | None, seed: int) -> Bert:
    if model and generates(kind := read_config(model / "config.json").model_type):
        raise ValueError(f"{model}: holds a {kind}; this benchmark takes an encoder, or no --model")
    return load_backbone(model) if model else _random(MINILM, seed)


def _random(config: BertConfig, seed: int) -> Bert:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Bert(config, lm_head=False).eval()


def _random_decoder(config: DecoderConfig, seed: int) -> Decoder:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(config).eval()


def _inputs(config: BertConfig, batch: int, tokens: int, seed: int) -> Inputs:
    ids = np.random.default_rng(seed).integers(1000, config.vocab_size, (batch, tokens))
    return Inputs(ids, np.ones_like(ids), np.zeros_like(ids), (("",),) * batch)


def _tensors(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)]
