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
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.generation import token_weights
from mini_ee.lab.export.builder import OPSET, block_maps, int8_maps, parameters_of, whole_tables
from mini_ee.lab.export.card import CARD, card
from mini_ee.lab.export.graph import Graph
from mini_ee.lab.export.hugging_face import named_by, original_of, write_hugging_face
from mini_ee.lab.export.model_graph import write_model_graph
from mini_ee.lab.export.segment_graphs import segment_graphs
from mini_ee.lab.export.token_graphs import TokenGraphs
from mini_ee.lab.export.tracing import NotTraceable
from mini_ee.lab.export.verification import verify
from mini_ee.lab.export.web_page import check_page, write_page
from mini_ee.lab.rules import Never, Rule
from mini_ee.lab.segments import Segments
from mini_ee.lab.training.run_folder import Run, versions
from mini_ee.self_supervised import CALIBRATION_PROMPTS

PRECISIONS = ("float32", "float16", "int8", "int4")

OF_THE_RUN = ("task", "prompt", "prompts", "default_prompt_name", "num_labels", "settings", "base")
"""Keys that the manifest copies from config.json."""

OF_ROWS = ("unit", "pool", "head", "num_labels")
"""Attributes of a model of rows that the manifest has."""

OF_ITS_RULE = ("guarantee", "exit_counts", "curve")
"""Keys that it also copies if the rule is the run's own."""

WEB = "model_web"  # the graph of the page, see web_page.py

VERIFIED_TEXTS, ROUNDED_TEXTS = 64, 256  # compared with torch in float32, and in int8 or float16

log = logging.getLogger("mini_ee.lab.export")


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
    precision: float32, float16, or int8 for the linear maps within the layers (default float32); of a decoder int8 or
    int4 in blocks, for all matrices, and then no guarantee of the run holds. segments: also write
    one graph per segment. They are for rules that model.onnx does not contain, for servers that form new batches after
    each exit, and for recomputing caches; a decoder that was trained with "recompute" always gets them. web: also write
    a page that runs the model in a browser, see web_page.py. Warns if the tokenizer has tokens that the
    model lacks.
    Raises FileExistsError if `out` exists; WrongArguments if the rule reads hidden states and `segments` is given;
    ValueError if a weight is NaN, infinite or too large for the precision, if the rule cannot be exported, if
    the model cannot be rounded so, or if graphs differ from torch by more than verification.py allows. Then no folder
    is written.
    """
    tokens = run.unit == "tokens"
    segments = segments or tokens and run.model.missing_kv == "recompute"
    _check_run(run, segments)
    texts = texts or (CALIBRATION_PROMPTS if tokens else _built_in_texts(run))
    source = TokenGraphs(run.model) if tokens else run.segments()
    if web:
        check_page(run)
    unchanged = run.rule.to_dict() == run.config.get("rule")
    unchanged &= precision == "float32" or not tokens  # the guarantee is that of the graph that gave it
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
        manifest["verified"] = verify(run, partial_folder, [texts[row] for row in chosen], precision, seed)
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
    if segments and getattr(run.rule, "measure", None) == "saturation":
        raise WrongArguments(
            "the rule reads the saturation of hidden states, which graphs by segment do not return: export "
            "without --segments, or with another measure"
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
    settings = _rounding(model, precision)
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
    offsets = write_beside(folder / WEIGHTS, weights, len(made) > 1 or "blocks" in settings)
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


def _rounding(model: nn.Module, precision: str) -> dict:
    """What a Builder is told of a precision. Raises ValueError if the model does not have it."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if not precision.startswith("int"):
        return {"dtype": np.dtype(precision).type}
    if model.unit == "tokens":
        return {"dtype": np.float32, "blocks": block_maps(model, int(precision.removeprefix("int")))}
    if precision == "int4":
        raise ValueError("int4 is for decoders that generate text, found another model; export it in int8")
    return {"dtype": np.float32, "rounded": int8_maps(model)}


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
    manifest_costs["state_flops"] = [source.state_flops(k, "exit_logit") or 0.0 for k in range(len(source.exits))]
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
