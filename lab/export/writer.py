"""Export a trained run: a folder of ONNX graphs, verified against torch before the folder gets its name.

manifest.json              format_version, the method, the unit, exits, rule, labels, costs, the inputs and outputs of
                           each graph, checksums of all files, and the largest difference between graphs and torch
onnx/model.onnx            the model with its rule, which stops by itself; see model_graph.py. Its weights stand in it,
                           because a browser cannot read them from another file
onnx/whole.onnx            if tokens exit within a row: the same without exits, for comparisons
onnx/segment_{layer}.onnx  with `segments`: the layers up to an exit, for rows with the head; for tokens also
                           head_{layer}.onnx, the head of an exit, policy_{layer}.onnx, its policy, and
                           fill_{layer}.onnx, keys and values of a segment for tokens that exited below it
onnx/memory.onnx           for an encoder-decoder that generates text: the encoder, run once per prompt
onnx/encoder.onnx          if the rule plans by embeddings: their encoder, with the files of the rule, such as
                           datastore/; encoder/ has the tokenizer of the encoder if it is another one
onnx/model.onnx_data       of several graphs, or above 100 MB: the weights of all graphs, each once
config.json                and others: by which clients of Hugging Face load the folder, see hugging_face.py
README.md                  the model card, see card.py
index.html                 with `web`: a page for the browser and its files, see web_page.py

The graphs are written by running the project's torch and numpy code on values of a graph: see tracing.py.
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

from mini_ee.export.graph import write_beside
from mini_ee.export.manifest import FORMAT_VERSION, WEIGHTS
from mini_ee.lab.data.files import MANIFEST, atomic_folder, file_sha256, write_bytes, write_json
from mini_ee.lab.data.tasks import toy_task
from mini_ee.lab.data.tokenizer import Inputs, in_order
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.decoding import MISSING_KV, DecoderSegments, decode, gather, greedy
from mini_ee.lab.exits.generation import token_segments, token_weights
from mini_ee.lab.export.builder import OPSET, int8_maps, parameters_of, whole_tables
from mini_ee.lab.export.card import CARD, card
from mini_ee.lab.export.graph import Graph
from mini_ee.lab.export.hugging_face import named_by, original_of, write_hugging_face
from mini_ee.lab.export.model_graph import write_model_graph
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.segment_graphs import segment_graphs
from mini_ee.lab.export.sessions import CPU
from mini_ee.lab.export.token_graphs import TokenGraphs
from mini_ee.lab.export.tracing import NotTraceable
from mini_ee.lab.export.web_page import check_page, write_page
from mini_ee.lab.recording import plan_rows, predictions, record
from mini_ee.lab.rules import STATE_MEASURES, Never, Rule
from mini_ee.lab.segments import Segments
from mini_ee.lab.training.run_folder import Run, versions
from mini_ee.self_supervised import CALIBRATION_PROMPTS

PRECISIONS = ("float32", "float16", "int8")

OF_THE_RUN = ("task", "prompt", "prompts", "default_prompt_name", "num_labels", "settings", "base")
"""Keys that the manifest copies from config.json."""

OF_ROWS = ("unit", "pool", "head", "num_labels")
"""Attributes of a model of rows that the manifest has."""

OF_ITS_RULE = ("guarantee", "exit_counts", "curve")
"""Keys that it also copies if the rule is the run's own."""

WEB = "model_web"  # the graph of the page, see web_page.py

VERIFIED_TEXTS, ROUNDED_TEXTS = 64, 256  # compared with torch in float32, and in int8 or float16

ROUNDED_AGREEMENT = 0.98  # share of equal predictions in int8 or float16 below which an export warns

VERIFIED_TOKENS = 32  # generated after each prompt

AGREEMENT = 0.9  # least share of equal exits, float32 compared with torch; rounding decides for a row at a threshold

log = logging.getLogger("mini_ee.lab.export")

TOLERANCE = 1e-4  # of any logit, float32 compared with torch; measured at most 2e-6 on MiniLM and SST-2

RELATIVE = 1e-5  # the same as a share of the largest logit, which may be a number of any scale


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

    texts: rows of one or two sentences, or prompts of a decoder (default: built-in ones). On VERIFIED_TEXTS of them the
    logits of every exit are compared with torch, in batches of one and of many, and the text that a decoder generates.
    precision: float32, float16, or int8 for the linear maps within the layers (default float32). segments: also write
    one graph per segment. They are for rules that model.onnx does not contain, for servers that form new batches after
    each exit, and for recomputing caches; a decoder that was trained with "recompute" always gets them. web: also write
    a page that runs the model in a browser, see web_page.py. Warns if the tokenizer has tokens that the
    model lacks.
    Raises FileExistsError if `out` exists; WrongArguments if the rule reads hidden states and `segments` is given;
    ValueError if a weight is NaN, infinite or too large for the precision, if the rule cannot be exported, or if
    float32 graphs differ from torch by more than TOLERANCE, or RELATIVE of large logits. Then no folder is written.
    """
    tokens = run.unit == "tokens"
    segments = segments or tokens and run.model.missing_kv == "recompute"
    _check_run(run, segments)
    texts = texts or (CALIBRATION_PROMPTS if tokens else _built_in_texts(run))
    source = TokenGraphs(run.model) if tokens else run.segments()
    if web:
        check_page(run)
    unchanged = run.rule.to_dict() == run.config.get("rule")
    keys = (*OF_THE_RUN, *OF_ITS_RULE) if unchanged else OF_THE_RUN
    if line := run.tokenizer.beyond(run.model.backbone.config.vocab_size):
        log.warning("%s: %s", run.folder, line)
    with atomic_folder(out) as partial_folder:
        manifest = {
            "format_version": FORMAT_VERSION,
            "method": run.config["method"],
            **{key: run.config[key] for key in keys if key in run.config},
            **_scores(run),
            "max_length": run.tokenizer.max_length,
            **write_graphs(run.model, source, run.rule, partial_folder, precision, segments, web),
            "versions": versions() | {"onnx": onnx.__version__},
            "original": named_by(original_of(run)),
        }
        write_hugging_face(run, partial_folder)
        if run.rule.embed is not None:
            manifest["encoder"] = _write_embedder(run.rule, partial_folder)
        if web:
            write_page(run, partial_folder, manifest, texts)
        manifest["files"] = _digests(partial_folder)
        write_json(partial_folder / MANIFEST, manifest)
        count = VERIFIED_TEXTS if tokens or precision == "float32" else ROUNDED_TEXTS
        chosen = np.random.default_rng(seed).permutation(len(texts))[:count]
        manifest["verified"] = _verify(run, partial_folder, [texts[row] for row in chosen], precision, seed)
        write_bytes(partial_folder / CARD, card(manifest).encode())
        write_json(partial_folder / MANIFEST, manifest)
    return manifest


def _scores(run: Run) -> dict:
    """The held-out accuracy of each exit, if the training measured it."""
    scores = (run.metrics or {}).get("per_exit_accuracy")
    return {"exit_scores": scores} if scores else {}


def _check_run(run: Run, segments: bool) -> None:
    """Raises ValueError or WrongArguments as `export` does, before anything is written."""
    for name, parameter in run.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"the run's {name} must be finite, found NaN or infinity; no folder was written")
    run.rule.check(len(run.exits))
    if segments and not run.generates and run.token_task is not None:
        raise WrongArguments(f"--segments is for one label of a text; {run.folder} labels tokens: leave it out")
    if segments and getattr(run.rule, "measure", None) in STATE_MEASURES:
        raise WrongArguments(
            f"the rule reads the {run.rule.measure} of hidden states, which graphs by segment do not return: export "
            f"without --segments, or with another measure"
        )


def write_graphs(
    model: nn.Module,
    source,
    rule: Rule,
    folder: Path,
    precision: str = "float32",
    segments: bool = False,
    web: bool = False,
) -> dict:
    """Write graphs and weights into an existing folder; returns their entries of the manifest.

    source: the segments of a model of rows, or the TokenGraphs of a model of tokens. web: also write model_web.onnx.
    Raises ValueError for an unknown precision, and for a rule that cannot be exported if `segments` is false.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    rounded = int8_maps(model) if precision == "int8" else ()
    settings = {"dtype": np.float16 if precision == "float16" else np.float32, "int8": rounded}
    parameters, made, tokens = parameters_of(model), {}, model.unit == "tokens"
    metadata = {} if tokens else {key: getattr(source.model, key) for key in OF_ROWS}
    metadata |= source.metadata
    encoder = rule.embed and rule.embed.states  # its states are averaged to the embeddings
    with whole_tables(model if encoder is None else nn.ModuleList((model, encoder.backbone))):
        for name, write in _graphs(source, rule, segments, web).items():
            fresh = partial(Graph, parameters, **settings, plain=tokens or name == WEB, flat=name == WEB)
            made[name] = fresh()
            try:
                write(made[name])
            except NotTraceable:
                if name not in ("model", WEB) or not segments:
                    raise
                metadata["rule_in_graph"] = False  # the rule runs outside, between graphs by segment
                made[name] = fresh()
                write_model_graph(made[name], source.in_one_graph(), Never())
        if encoder is not None:
            others = parameters_of(encoder.backbone, "encoder.backbone.")
            if parameters.keys().isdisjoint(others):
                parameters, settings = others, settings | {"dtype": np.float32}
            made["encoder"] = Graph(parameters, **settings)
            _write_encoder(encoder, made["encoder"])
    weights, graphs = {name: values for builder in made.values() for name, values in builder.weights.items()}, {}
    (folder / WEIGHTS).parent.mkdir(exist_ok=True)
    offsets = write_beside(folder / WEIGHTS, weights, len(made) > 1)
    for name, builder in made.items():
        graph, path = builder.model(name, offsets), (folder / WEIGHTS).with_name(f"{name}.onnx")
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
    }


def _graphs(source, rule: Rule, segments: bool, web: bool) -> dict[str, Callable]:
    """Name of a graph -> the function that writes it, given a Graph."""
    tokens, one = source.model.unit == "tokens", source.in_one_graph()
    graphs = {"model": partial(write_model_graph, segments=one, rule=rule)}
    if web:
        graphs[WEB] = partial(write_model_graph, segments=one, rule=rule, compared=True)
    if segments:
        graphs |= source.graphs() if tokens else segment_graphs(source)
    if source.tokens_exit:
        graphs["whole"] = partial(write_model_graph, segments=source.whole(), rule=Never())
    return graphs | (source.prompt_graphs() if tokens else {})


def _built_in_texts(run: Run) -> list[tuple[str, ...]]:
    """Sentences of the built-in task: one per row, or two if the run takes pairs."""
    return [(text,) * run.config["task"]["texts"] for (text,) in toy_task().split("dev").texts]


def _costs(source: Segments, segments: bool) -> dict:
    """FLOPs for the runtime, as coefficients of polynomials in the number of tokens.

    They are those of model.onnx; under `by_segment` are those of graphs by segment, if they were written.
    """

    def costs(segments: Segments, tokens: int) -> np.ndarray:
        return np.array([segments.flops(k, _row(tokens)) for k in range(len(segments.exits))])

    def whole(tokens: int) -> np.ndarray:
        exit_costs = costs(source.whole(), tokens)
        return np.array([exit_costs[:, 0].sum(), exit_costs[-1, 1]])

    def of_exits(split: Segments) -> dict:
        passes = [split.layer_passes(k) for k in range(len(split.exits))]
        return {"layer_passes": passes, "flops": _quadratic(partial(costs, split))}

    manifest_costs = of_exits(source.in_one_graph())
    manifest_costs["state_flops"] = [source.state_flops(k) or 0.0 for k in range(len(source.exits))]
    manifest_costs["whole_flops"] = _quadratic(whole)
    return manifest_costs | ({"by_segment": of_exits(source)} if segments else {})


def _row(tokens: int) -> Inputs:
    """One row with this number of tokens."""
    ones = np.ones((1, tokens), np.int64)
    return Inputs(ones, ones, ones, (("",),))


def _quadratic(of: Callable[[int], np.ndarray]) -> list[list[float]]:
    """Coefficients of 1, T and T^2 of each number that a function returns, from its values at T = 1, 2 and 3."""
    one, two, three = map(of, (1, 2, 3))
    square = (three - 2 * two + one) / 2
    slope = two - one - 3 * square
    return np.stack((one - slope - square, slope, square), axis=-1).tolist()


def _write_encoder(encoder, g: Graph) -> None:
    """input_ids, attention_mask -> embedding (B, D), with which a rule retrieves."""
    with g.tracing():
        embedding = encoder.mean(g.inputs())
    g.output("embedding", embedding.name, "batch", encoder.backbone.config.hidden_size, dtype=np.float32)


def _write_embedder(rule: Rule, folder: Path) -> dict:
    """Write the files of a rule that plans by embeddings; returns the encoder's entry of the manifest."""
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


# ---- Verification: the runtime compared with torch ----
def _verify(run: Run, folder: Path, texts: list, precision: str, seed: int) -> dict:
    """The manifest's entry `verified`. Raises ValueError if the graphs differ from torch."""
    served = Runtime(folder, [CPU])
    tokens = served.config["unit"] == "tokens"
    comparison, largest = _compare_texts(run, served, texts, seed) if tokens else _compare_rows(run, served, texts)
    difference, allowed = comparison["max_logit_difference"], max(TOLERANCE, RELATIVE * largest)
    exact = difference <= allowed and comparison["exit_agreement"] >= AGREEMENT
    if not np.isfinite(difference) or (precision == "float32" and not exact):
        raise ValueError(
            f"the {precision} graphs differ from torch by {difference:.2g} (logits; {allowed:.2g} allowed in float32), "
            f"{comparison['exit_agreement']:.1%} of the exits are equal; no folder was written"
        )
    equal = comparison.get("prediction_agreement", 1.0)
    if equal < ROUNDED_AGREEMENT:
        log.warning(
            "%.1f%% of the predictions for %d texts in %s are those in float32, fewer than %.0f%%; compare both on "
            "your own texts, and calibrate this export on them",
            *(100 * equal, comparison["texts"], precision, 100 * ROUNDED_AGREEMENT),
        )
    return comparison


def _compare_rows(run: Run, served: Runtime, texts: list[tuple[str, ...]]) -> tuple[dict, float]:
    """Compare the logits of every exit on every row, in batches of one and of many; also the largest logit."""
    encoded, segments, theirs = run.encode(texts), served.segments(), run.segments()
    expected, actual = record(theirs, encoded, 8), record(segments, encoded, 8)
    compared, alone = [(expected.logits, actual.logits)], [[row] for row in range(min(8, len(texts)))]
    if run.token_task is not None:  # then records have no logits
        compared, alone = [], [*in_order(len(texts), 8), *alone]
    compared += [[_logits(side, encoded.batch(rows)) for side in (theirs, segments)] for rows in alone]
    if f"segment_{served.exits[0]}" in served.config["graphs"]:
        compared.append((expected.logits, record(segments.by_segment(Never()), encoded, 8).logits))
    differences = [abs(mine - other).max() for mine, other in compared]
    rules = [plan_rows(rule, encoded, 8) if rule.plans_from_texts else rule for rule in (run.rule, served.rule)]
    results = [recorded.replay(rule) for recorded, rule in zip((expected, actual), rules)]
    largest = float(max(abs(mine).max() for mine, _ in compared))
    return {
        "texts": len(texts),
        "max_logit_difference": float(np.max(differences)),
        "prediction_agreement": _equal(*(result.logits for result in results), run),
        "exit_agreement": float((results[0].exit_index == results[1].exit_index).mean()),
    }, largest


def _logits(segments: Segments, inputs: Inputs) -> np.ndarray:
    """The logits of all exits, (N, K, C); for tokens (N, K, T, C), 0 at padding."""
    logits = []
    with segments.running():
        state = segments.start(inputs)
        for k in range(len(segments.exits)):
            state = segments.advance(k, state)
            logits.append(segments.read(k, state))
    stacked = np.stack(logits, axis=1)
    return stacked if segments.token_task is None else stacked * inputs.attention_mask[:, None, :, None]


def _equal(expected: np.ndarray, actual: np.ndarray, run: Run) -> float:
    """Share of rows (N, C) with equal predictions; without labels, of numbers at most TOLERANCE apart."""
    if run.token_task is not None:  # numbers of all decisions
        return float((expected == actual).mean())
    if run.multi_label:
        return float(((expected > 0) == (actual > 0)).all(axis=1).mean())
    if run.label_names:
        return float((predictions(expected) == predictions(actual)).mean())
    return float((abs(expected - actual) <= TOLERANCE * max(1.0, abs(expected).max())).mean())


def _compare_texts(run: Run, served: Runtime, prompts: list[str], seed: int) -> tuple[dict, float]:
    """Compare both engines on one batch of all prompts, padded on the left, with each available missing_kv.

    Logits are compared while exits are drawn at random and both engines read the same tokens; generated texts and exit
    layers are compared with the rule and greedy decoding. Also returns the largest logit.
    """
    ids = [run.tokenizer.ids_of(prompt) for prompt in prompts]
    longest = max(map(len, ids))
    count = max(1, min(VERIFIED_TOKENS, served.config["max_tokens"] - longest))
    differences, largest, equal = [], [], []
    for missing_kv in MISSING_KV if served.by_segment else ("copy_state",):
        engines = [
            partial(token_segments, run.model, missing_kv, len(ids), longest + count),
            partial(served.segments, len(ids), longest + count, missing_kv),
        ]
        expected, tokens = drawn_text(engines[0](), ids, count, seed)
        actual, _ = drawn_text(engines[1](), ids, count, seed, tokens)
        largest += [abs(mine).max() for mine in expected]
        differences += [abs(mine - theirs).max() for mine, theirs in zip(expected, actual, strict=True)]
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
    }, float(np.max(largest))


class _Drawn(Rule):
    """Exits drawn at random: every head is evaluated, and all combinations of missing keys and values occur."""

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
    """The logits of each step, and the tokens: the likeliest ones, or `forced`, those of another engine."""
    rule, drawn_logits = _Drawn(len(segments.exits), seed), []

    def choose(logits: np.ndarray, rows: list[int]) -> list[int]:
        drawn_logits.append(logits)
        return greedy(logits, rows) if forced is None else forced[len(drawn_logits) - 1]

    return drawn_logits, [step.tokens for step in decode(segments, prompts, count, rule, choose)]
