"""A trained run -> a folder of ONNX graphs that the runtime serves, verified against torch before it takes its name.

exported/manifest.json         format_version, what the run was, unit, exits, rule, labels, costs, the graphs with their
                               inputs and outputs, where each weight stands in its file, checksums of all files, and
                               how far the graphs were from torch
exported/model.onnx            the model with its rule, which stops by itself; see model_graph.py
exported/whole.onnx            where tokens leave within a row: the same with all in all layers, for comparisons
exported/segment_{layer}.onnx  where asked for: the layers up to an exit, and of rows its head; of tokens also
                               head_{layer}.onnx, what an exit says, policy_{layer}.onnx, whether to leave, and
                               fill_{layer}.onnx, the keys and values of a segment for tokens that left below it
exported/memory.onnx           of a decoder whose prompts an encoder reads: that, once a prompt; see backbones/t5.py
exported/model.safetensors     the weights of all graphs, each once, under torch's names: the graphs point into it
exported/tokenizer.json
exported/index.html            and more, where a page is asked for: see page.py
exported/encoder.onnx          where the rule plans by embeddings, with the files that it asks, such as datastore/;
                               encoder/ holds a tokenizer of its own

What a graph computes is the project's own torch and numpy code, run on values of it: see tracing.py.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper
from torch import nn

from mini_ee.backbones.hub import write_tensors
from mini_ee.data.files import atomic_folder, file_sha256, write_json
from mini_ee.data.tasks import toy_task
from mini_ee.data.texts import CALIBRATION_PROMPTS
from mini_ee.data.tokens import Inputs
from mini_ee.errors import WrongArguments
from mini_ee.exits.decoding import MISSING_KV, DecoderSegments, decode, gather, greedy
from mini_ee.exits.generation import token_segments, token_weights
from mini_ee.export.builder import OPSET, int8_maps, parameters_of
from mini_ee.export.graph import Graph
from mini_ee.export.manifest import FORMAT_VERSION, MANIFEST, WEIGHTS, layout
from mini_ee.export.model_graph import write_model_graph
from mini_ee.export.page import check_page, write_page
from mini_ee.export.runtime import Runtime
from mini_ee.export.segment_graphs import segment_graphs
from mini_ee.export.sessions import CPU
from mini_ee.export.token_graphs import TokenGraphs
from mini_ee.export.tracing import NotTraceable
from mini_ee.recording import plan_rows, predictions, read_every_exit, record
from mini_ee.rules import STATE_MEASURES, NeverExit, Rule
from mini_ee.segments import Segments
from mini_ee.training.run import Run, versions

PRECISIONS = ("float32", "float16", "int8")

OF_THE_RUN = ("task", "prompt", "num_labels", "settings", "base")
"""What the manifest keeps of config.json."""

OF_ROWS = ("unit", "pool", "head", "num_labels")
"""What it says of a model of rows."""

OF_ITS_RULE = ("promise", "exit_counts")
"""What it keeps too where the rule is the run's own."""

WEB = "model_web"  # the graph of the page, see page.py

VERIFIED_TEXTS = 64

VERIFIED_TOKENS = 32  # written from each prompt

AGREEMENT = 0.9  # of the exits at which float32 and torch leave; a row that sits on a threshold may fall either way

log = logging.getLogger("mini_ee.export")

TOLERANCE = 1e-4  # float32 against torch, of any logit; measured at most 2e-6 on MiniLM and SST-2


def export(
    run: Run,
    out: str | Path,
    texts: Sequence | None = None,
    precision: str = "float32",
    seed: int = 0,
    segments: bool = False,
    web: bool = False,
) -> dict:
    """Write the exported folder and return its manifest.

    texts: real rows of one sentence or two, by default built-in ones, of a decoder prompts; VERIFIED_TEXTS of them show
    that every exit says what torch says, in batches of one and of many, and that a decoder writes the same. precision:
    float32, float16, or int8 for maps inside the layers. segments: graphs by segment beside model.onnx, for rules that
    it does not hold, for servers that take rows together again after each exit, and to recompute caches; a decoder that
    learned to recompute them has them anyway.
    web: a page that shows the model in a browser, see page.py. Warns of tokens that the model does not have.
    Raises FileExistsError where `out` is there, WrongArguments where the rule reads hidden states and graphs by segment
    are asked for, ValueError where a weight is NaN, infinite or too large for the precision, where a graph cannot hold
    the rule, or where float32 graphs differ from torch by more than TOLERANCE; then there is no folder.
    """
    for name, parameter in run.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"the run's {name} must be finite, found NaN or infinity; no folder was written")
    tokens = run.unit == "tokens"
    texts = texts or (CALIBRATION_PROMPTS if tokens else _built_in_texts(run))
    source = TokenGraphs(run.model) if tokens else run.segments()
    run.rule.check(len(run.exits))
    segments = segments or tokens and run.model.missing_kv == "recompute"
    if segments and getattr(run.rule, "measure", None) in STATE_MEASURES:
        raise WrongArguments(
            f"graphs by segment hand over no hidden states to take the {run.rule.measure} from: export without them or "
            f"under another measure"
        )
    if web:
        check_page(run)
    own = run.rule.to_dict() == run.config.get("rule")
    keys = (*OF_THE_RUN, *OF_ITS_RULE) if own else OF_THE_RUN
    if line := run.tokenizer.beyond(run.model.backbone.config.vocab_size):
        log.warning("%s: %s", run.folder, line)
    with atomic_folder(out) as partial_folder:
        manifest = {
            "format_version": FORMAT_VERSION,
            "method": run.config["method"],
            **{key: run.config[key] for key in keys if key in run.config},
            "max_length": run.tokenizer.max_length,
            **write_graphs(run.model, source, run.rule, partial_folder, precision, segments, web),
            "versions": versions() | {"onnx": onnx.__version__},
        }
        run.tokenizer.save(partial_folder / "tokenizer.json")
        if run.rule.embed is not None:
            manifest["encoder"] = _write_embedder(run.rule, partial_folder)
        if web:
            write_page(run, partial_folder, manifest, texts)
        manifest["files"] = _digests(partial_folder)
        write_json(partial_folder / MANIFEST, manifest)
        chosen = np.random.default_rng(seed).permutation(len(texts))[:VERIFIED_TEXTS]
        manifest["verified"] = _verify(run, partial_folder, [texts[row] for row in chosen], precision, seed)
        write_json(partial_folder / MANIFEST, manifest)
    return manifest


def write_graphs(
    model: nn.Module,
    source,
    rule: Rule,
    folder: Path,
    precision: str = "float32",
    segments: bool = False,
    web: bool = False,
) -> dict:
    """Write graphs and weights into a folder that is there; returns what the manifest says of them.

    source: the segments of a model of rows, the TokenGraphs of a model of tokens. web: model_web.onnx as well.
    Raises ValueError for an unknown precision, and for a rule that no graph can hold if there are no segments either.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    rounded = int8_maps(model) if precision == "int8" else ()
    settings = {"dtype": np.float16 if precision == "float16" else np.float32, "int8": rounded}
    own, made, tokens = parameters_of(model), {}, model.unit == "tokens"
    metadata = {} if tokens else {key: getattr(source.model, key) for key in OF_ROWS}
    metadata |= source.metadata
    for name, write in _graphs(source, rule, segments, web).items():
        fresh = partial(Graph, own, **settings, plain=tokens or name == WEB, flat=name == WEB)
        made[name] = fresh()
        try:
            write(made[name])
        except NotTraceable:
            if name not in ("model", WEB) or not segments:
                raise
            metadata["rule_in_graph"] = False  # it decides between graphs by segment
            made[name] = fresh()
            write_model_graph(made[name], source.in_one_graph(), NeverExit())
    encoder = rule.embed and rule.embed.states  # the queries are averaged from its states
    if encoder is not None:
        others = parameters_of(encoder.backbone, "encoder.backbone.")
        if own.keys().isdisjoint(others):
            own, settings = others, settings | {"dtype": np.float32}
        made["encoder"] = Graph(own, **settings)
        _write_encoder(encoder, made["encoder"])
    write_tensors(folder / WEIGHTS, {n: torch.from_numpy(w) for g in made.values() for n, w in g.weights.items()})
    tensors, graphs = layout(folder / WEIGHTS), {}
    for name, builder in made.items():
        graph, path = builder.model(name, WEIGHTS, tensors), folder / f"{name}.onnx"
        onnx.save(graph, path)
        onnx.checker.check_model(path, full_check=True)
        graphs[name] = _interface(graph)
    return {
        "opset": OPSET,
        "precision": precision,
        "backbone": model.backbone.config.to_dict(),
        "exits": list(model.exits),
        "rule": rule.to_dict(),
        **metadata,
        **(_costs(source, segments) if not tokens else {"weights": token_weights(model.backbone)._asdict()}),
        "graphs": graphs,
        "tensors": tensors,
    }


def _graphs(source, rule: Rule, segments: bool, web: bool) -> dict[str, Callable]:
    """Name of a graph -> what writes it, given a Graph."""
    tokens, one = source.model.unit == "tokens", source.in_one_graph()
    graphs = {"model": partial(write_model_graph, segments=one, rule=rule)}
    if web:
        graphs[WEB] = partial(write_model_graph, segments=one, rule=rule, compared=True)
    if segments:
        graphs |= source.graphs() if tokens else segment_graphs(source)
    if source.tokens_exit:
        graphs["whole"] = partial(write_model_graph, segments=source.whole(), rule=NeverExit())
    return graphs | (source.prompt_graphs() if tokens else {})


def _built_in_texts(run: Run) -> list[tuple[str, ...]]:
    """Sentences of the built-in task, as many to a row as the run takes."""
    return [(text,) * run.config["task"]["texts"] for (text,) in toy_task().split("dev").texts]


def _costs(source: Segments, segments: bool) -> dict:
    """What the runtime counts operations with: coefficients of polynomials in the number of tokens. Of model.onnx, and
    under `by_segment` of graphs by segment, where they were written.
    """

    def costs(segments: Segments, tokens: int) -> np.ndarray:
        return np.array([segments.flops(k, _row(tokens)) for k in range(len(segments.exits))])

    def whole(tokens: int) -> np.ndarray:
        each = costs(source.whole(), tokens)
        return np.array([each[:, 0].sum(), each[-1, 1]])

    def of_exits(each: Segments) -> dict:
        passes = [each.layer_passes(k) for k in range(len(each.exits))]
        return {"layer_passes": passes, "flops": _quadratic(partial(costs, each))}

    found = of_exits(source.in_one_graph())
    found["state_flops"] = [source.state_flops(k) for k in range(len(source.exits))]
    found["whole_flops"] = _quadratic(whole)
    return found | ({"by_segment": of_exits(source)} if segments else {})


def _row(tokens: int) -> Inputs:
    """One row of so many tokens."""
    ones = np.ones((1, tokens), np.int64)
    return Inputs(ones, ones, ones, (("",),))


def _quadratic(of: Callable[[int], np.ndarray]) -> list[list[float]]:
    """Coefficients of 1, T and T^2 of each number that a function of T gives, from its values at 1, 2 and 3."""
    one, two, three = map(of, (1, 2, 3))
    square = (three - 2 * two + one) / 2
    slope = two - one - 3 * square
    return np.stack((one - slope - square, slope, square), axis=-1).tolist()


def _write_encoder(encoder, g: Graph) -> None:
    """input_ids, attention_mask -> embedding (B, D), by which a rule retrieves."""
    with g.tracing():
        embedding = encoder.mean(g.inputs())
    g.output("embedding", embedding.name, "batch", encoder.backbone.config.hidden_size, dtype=np.float32)


def _write_embedder(rule: Rule, folder: Path) -> dict:
    """The files that a rule asks which plans by embeddings, and what the manifest says of the encoder."""
    encoder = rule.embed
    rule.save(folder)
    tokenizer = encoder.tokenizer
    if tokenizer is not None:
        (folder / "encoder").mkdir()
        tokenizer.save(folder / "encoder" / "tokenizer.json")
    return {
        "name": encoder.name,
        "flops": _quadratic(lambda tokens: np.array([encoder.states.flops(_row(tokens))]))[0],
        "max_length": None if tokenizer is None else tokenizer.max_length,
    }


def _digests(folder: Path) -> dict[str, str]:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name: file_sha256(folder / name) for name in names if name != MANIFEST}


def _interface(graph: onnx.ModelProto) -> dict:
    """Inputs and outputs of a graph, with the name or size of each axis."""

    def values(infos) -> dict:
        return {
            info.name: {
                "dtype": helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type).name,
                "axes": [axis.dim_param or axis.dim_value for axis in info.type.tensor_type.shape.dim],
            }
            for info in infos
        }

    return {"inputs": values(graph.graph.input), "outputs": values(graph.graph.output)}


# ---- The folder through the runtime against torch ----
def _verify(run: Run, folder: Path, texts: list, precision: str, seed: int) -> dict:
    """What the manifest says of it; ValueError where the graphs say something else than torch."""
    served = Runtime(folder, [CPU])
    tokens = served.config["unit"] == "tokens"
    found = _compare_texts(run, served, texts, seed) if tokens else _compare_rows(run, served, texts)
    difference = found["max_logit_difference"]
    exact = difference <= TOLERANCE and found["exit_agreement"] >= AGREEMENT
    if not np.isfinite(difference) or (precision == "float32" and not exact):
        raise ValueError(
            f"the {precision} graphs differ from torch by {difference:.2g} (logits; {TOLERANCE} allowed in float32), "
            f"{found['exit_agreement']:.1%} of the exits are equal; no folder was written"
        )
    return found


def _compare_rows(run: Run, served: Runtime, texts: list[tuple[str, ...]]) -> dict:
    """Every exit on every row, in batches of one and of many."""
    encoded, segments, theirs = run.encode(texts), served.segments(), run.segments()
    expected, found = record(theirs, encoded, 8), record(segments, encoded, 8)
    differences = [abs(expected.logits - found.logits).max()]
    for row in range(min(8, len(texts))):
        inputs = encoded.batch([row])
        differences.append(abs(read_every_exit(theirs, inputs)[0] - read_every_exit(segments, inputs)[0]).max())
    if f"segment_{served.exits[0]}" in served.config["graphs"]:
        chained = record(segments.by_segment(NeverExit()), encoded, 8)
        differences.append(abs(expected.logits - chained.logits).max())
    rules = [plan_rows(each, encoded, 8) if each.plans_from_texts else each for each in (run.rule, served.rule)]
    results = [recorded.replay(each) for recorded, each in zip((expected, found), rules)]
    return {
        "texts": len(texts),
        "max_logit_difference": float(np.max(differences)),
        "prediction_agreement": _equal(*(each.logits for each in results)),
        "exit_agreement": float((results[0].exit_index == results[1].exit_index).mean()),
    }


def _equal(expected: np.ndarray, found: np.ndarray) -> float:
    """The share of rows (N, C) with the same prediction; of regressions, numbers that are TOLERANCE apart at most."""
    if expected.shape[1] > 1:
        return float((predictions(expected) == predictions(found)).mean())
    return float((abs(expected - found) <= TOLERANCE * max(1.0, abs(expected).max())).mean())


def _compare_texts(run: Run, served: Runtime, prompts: list[str], seed: int) -> dict:
    """The same tokens through both engines, all prompts in one batch padded on the left, for each missing_kv.

    What exits say is compared where it is drawn who leaves; texts where the rule and greed decide.
    """
    ids = [run.tokenizer.ids_of(prompt) for prompt in prompts]
    longest = max(map(len, ids))
    count = max(1, min(VERIFIED_TOKENS, served.config["max_tokens"] - longest))
    differences, equal = [], []
    for missing_kv in MISSING_KV if served.by_segment else ("copy_state",):
        engines = [
            partial(token_segments, run.model, missing_kv, len(ids), longest + count),
            partial(served.segments, len(ids), longest + count, missing_kv),
        ]
        expected, tokens = drawn_text(engines[0](), ids, count, seed)
        found, _ = drawn_text(engines[1](), ids, count, seed, tokens)
        differences += [abs(mine - theirs).max() for mine, theirs in zip(expected, found, strict=True)]
        with torch.inference_mode():
            texts = [gather(decode(engine(), ids, count, run.rule), len(ids)) for engine in engines]
        equal.append([np.array(mine) == np.array(theirs) for mine, theirs in zip(*texts)])
    tokens, layers = np.array(equal).mean(axis=(0, 1, 3))  # of (way, prompt, token or layer, step)
    return {
        "prompts": len(ids),
        "tokens": count,
        "max_logit_difference": float(np.max(differences)),
        "token_agreement": float(tokens),
        "exit_agreement": float(layers),
    }


class _Drawn(Rule):
    """Where a token leaves is drawn: nothing to be unsure about, every head is read, and there is every gap."""

    needs = None

    def __init__(self, num_exits: int, seed: int):
        self.num_exits, self.random = num_exits, np.random.default_rng(seed)

    def plan(self, inputs) -> np.ndarray:
        return self.random.integers(0, self.num_exits, len(inputs))


@torch.inference_mode()
def drawn_text(
    segments: DecoderSegments,
    prompts: list[list[int]],
    count: int,
    seed: int,
    forced: list[list[int]] | None = None,
) -> tuple[list[np.ndarray], list[list[int]]]:
    """The logits of each token, and the tokens that are taken: the likeliest, or those of another run."""
    rule, logits_of_steps = _Drawn(len(segments.exits), seed), []

    def choose(logits: np.ndarray, rows: list[int]) -> list[int]:
        logits_of_steps.append(logits)
        return greedy(logits, rows) if forced is None else forced[len(logits_of_steps) - 1]

    return logits_of_steps, [step.tokens for step in decode(segments, prompts, count, rule, choose)]
