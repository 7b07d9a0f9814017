"""A trained run -> a folder of ONNX segments that the runtime serves, verified against torch before it takes its name.

exported/manifest.json        format_version, what the run was, exits, rule, labels, graphs with their inputs and
                              outputs, checksums of all files, and how far the graphs were from torch
exported/segment_{layer}.onnx the layers up to an exit, and its head; full.onnx the model without exits
                              (of LoRA exits: of all streams that are live there, as the schedule says)
exported/model.safetensors    the weights of all graphs, each once: the graphs point into this file
exported/tokenizer.json
exported/encoder.onnx         and datastore/, where the rule retrieves (RAEE); encoder/ holds a tokenizer of its own
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

import mini_ee.export.graphs as graphs
from mini_ee.backbones.bert import Bert
from mini_ee.backbones.hub import empty_backbone, load_strict, read_tensors, tensor_places, write_tensors
from mini_ee.backbones.llama import Decoder
from mini_ee.backbones.lora import columns_of
from mini_ee.baselines.multi_model import MultiModel
from mini_ee.data.files import atomic_folder, file_sha256, write_json
from mini_ee.early_exit import Segments, read_every_exit
from mini_ee.export.causal_graphs import CausalGraph
from mini_ee.export.runtime import FORMAT_VERSION, MANIFEST, OrtSegments, open_rule, open_tokenizer
from mini_ee.methods.encoders import OwnStates, SentenceEncoder
from mini_ee.methods.lora_exits import LoRAExits
from mini_ee.methods.raee import Retrieval
from mini_ee.rules import Rule
from mini_ee.training.methods import MODELS
from mini_ee.training.run import Run, versions
from mini_ee.units.prompts import PromptModel
from mini_ee.units.recording import plan_rows, predictions, record
from mini_ee.units.rows import MultiExit, PolicyExits
from mini_ee.units.streams import restart

WEIGHTS = "model.safetensors"

HEADS = ("heads.", "policies.", "certainty", "backbone.lm_head.", "label_words")  # maps that int8 leaves in float32

VERIFIED_TEXTS = 64

TOLERANCE = 1e-4  # float32 against torch, of any logit; measured at most 2e-6 on MiniLM and SST-2


def export(run: Run, out: Path, texts: list[tuple[str, ...]], precision: str = "float32", seed: int = 0) -> dict:
    """Write the exported folder and return its manifest.

    texts: real sentences; VERIFIED_TEXTS of them, drawn with the seed, show that every exit says what torch says.
    Raises FileExistsError where `out` is there, ValueError where a weight is NaN or infinite, or where float32 graphs
    differ from torch by more than TOLERANCE; then there is no folder.
    """
    for name, parameter in run.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"the run's {name} must be finite, found NaN or infinity; no folder was written")
    with atomic_folder(out) as partial:
        manifest = {
            "format_version": FORMAT_VERSION,
            "method": run.config["method"],
            "rule": run.rule.to_dict(),
            "task": run.config["task"],
            "max_length": run.tokenizer.max_length,
            **({"prompt": run.config["prompt"]} if "prompt" in run.config else {}),
            **write_segments(run.model, partial, precision, run.schedule, _encoder_of(run)),
            "versions": versions() | {"onnx": onnx.__version__},
        }
        run.tokenizer.save(partial / "tokenizer.json")
        if isinstance(run.rule, Retrieval):
            manifest["encoder"] = _write_retrieval(run.rule, partial)
        chosen = np.random.default_rng(seed).permutation(len(texts))[:VERIFIED_TEXTS]
        served = OrtSegments(partial, manifest), open_rule(partial, manifest)
        manifest["verified"] = _verify(run, *served, [texts[row] for row in chosen], precision)
        names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
        manifest["files"] = {name: file_sha256(partial / name) for name in names}
        write_json(partial / MANIFEST, manifest)
    return manifest


def write_segments(
    model: MultiExit | LoRAExits | MultiModel | PromptModel,
    folder: Path,
    precision: str = "float32",
    schedule: Sequence[Sequence[int]] | None = None,
    encoder: OwnStates | SentenceEncoder | None = None,
) -> dict:
    """Write graphs and weights into a folder that is there; returns what the manifest says of them.

    schedule: which streams of LoRA exits start together; restart by default. encoder: of a rule that retrieves.
    """
    config = model.backbone.config
    parameters = {name: value.detach().cpu().numpy() for name, value in model.named_parameters()}
    if precision == "float16":
        parameters = {name: value.astype(np.float16) for name, value in parameters.items()}
    passes, adapter_parameters, lora, prompt = np.diff(model.exits, prepend=0).tolist(), 0, {}, {}
    if isinstance(model, LoRAExits):
        schedule = schedule or restart(len(model.exits))
        made = _stream_graphs(model, parameters, schedule)
        segments = model.segments(schedule)
        passes = [segments.layer_passes(k) for k in range(len(model.exits))]
        adapter_parameters = sum(value.numel() for value in model.adapters[0][0].parameters())
        shape = {"rank": model.rank, "alpha": model.alpha, "targets": list(model.targets)}
        lora = {"lora": shape, "schedule": [list(group) for group in schedule]}
    elif isinstance(model, MultiModel):
        made, passes = _cascade_graphs(model, parameters), list(model.exits)
    else:
        if isinstance(model, PromptModel):  # the graphs hold what is read, and not the head's whole vocabulary
            prompt = {"mask_token_id": model.mask_token_id}
            words = model.label_tokens.cpu().numpy()
            names = _vocabulary_names(model.backbone)
            parameters |= {f"label_words.{name}": parameters[of][words] for name, of in names.items()}
        made = _graphs(model, parameters)
    if encoder is not None:
        made["encoder"] = _encoder_graph(encoder, model, parameters)
    if precision == "int8":
        decoder = isinstance(model.backbone, Decoder)

        def kept(node: str) -> bool:
            return node.startswith(HEADS) or (decoder and has_outliers(node))

        made = {name: quantized(graph, kept) for name, graph in made.items()}
    write_graphs(made, folder)
    return {
        "opset": graphs.OPSET,
        "precision": precision,
        "model": type(model).__name__,
        "backbone": config.to_dict(),
        "exits": list(model.exits),
        "layer": model.backbone.layer_weights(),
        "layer_passes": passes,
        "adapter_parameters": adapter_parameters,
        "policy_flops": model.policy_flops if isinstance(model, PolicyExits) else 0.0,
        "pool": model.pool,
        "num_labels": model.num_labels,
        **lora,
        **prompt,
        "graphs": {name: interface(graph) for name, graph in made.items()},
    }


def torch_segments(folder: Path, manifest: dict, device: str = "cpu") -> Segments:
    """The same folder through torch, for machines on which ONNX Runtime does not run.

    Raises ValueError for an int8 folder: its weights are whole numbers that only ONNX Runtime knows to use.
    """
    check_torch_runs(folder, manifest)
    tensors = read_tensors(folder / WEIGHTS)
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith("encoder.")}
    with torch.device("meta"):
        backbone = empty_backbone(manifest["backbone"], lm_head="prompt" in manifest)
    if "prompt" in manifest:
        model = PromptModel(backbone, open_tokenizer(folder, manifest), tuple(manifest["exits"]))
        for name, of in _vocabulary_names(backbone).items():
            words = own.pop(f"label_words.{name}")
            if of not in own:  # not the embeddings, to which the head is tied
                own[of] = words.new_zeros(backbone.config.vocab_size, *words.shape[1:])  # other words are not read
                own[of][model.label_tokens] = words
    else:
        shape = tuple(manifest["exits"]), len(manifest["task"]["label_names"]) or 1, manifest["pool"]
        with torch.device("meta"):
            model = MODELS[manifest["model"]](backbone, *shape, **manifest.get("lora", {}))
    load_strict(model, own, {name: (name,) for name in model.state_dict()}, folder / WEIGHTS)
    model = model.to(device)
    return model.segments(manifest["schedule"]) if "lora" in manifest else model.segments()


def check_torch_runs(folder: Path, manifest: dict) -> None:
    """Raise ValueError for an int8 folder."""
    if manifest["precision"] == "int8":
        raise ValueError(f"{folder}: holds int8 weights, which torch does not run; export float32 for --engine torch")


def _vocabulary_names(backbone: Bert | Decoder) -> dict[str, str]:
    """Weight and bias of the map onto the vocabulary -> their names in a PromptModel."""
    if isinstance(backbone, Bert):
        return {"weight": "backbone.embeddings.word.weight", "bias": "backbone.lm_head.bias"}
    if backbone.lm_head is None:
        return {"weight": "backbone.embeddings.weight"}
    return {name: f"backbone.lm_head.{name}" for name, _ in backbone.lm_head.named_parameters()}


def _graphs(model: MultiExit | PromptModel, parameters: dict[str, np.ndarray]) -> dict[str, onnx.ModelProto]:
    """File name without suffix -> graph, with its weights inside."""
    made = {
        f"segment_{layer}": graphs.segment(_empty_graph(model.backbone, parameters), model.exits, number, model.pool)
        for number, layer in enumerate(model.exits)
    }
    return made | {"full": graphs.full(_empty_graph(model.backbone, parameters), len(model.exits) - 1, model.pool)}


def _empty_graph(backbone: Bert | Decoder, parameters: dict[str, np.ndarray], prefix: str = "") -> graphs.Graph:
    kind = CausalGraph if isinstance(backbone, Decoder) else graphs.EncoderGraph
    return kind(backbone.config, parameters, prefix)


def _stream_graphs(
    model: LoRAExits, parameters: dict[str, np.ndarray], schedule: Sequence[Sequence[int]]
) -> dict[str, onnx.ModelProto]:
    """The same of LoRA exits; the whole model is the last stream alone."""
    columns = {target: columns_of(model.backbone.layers[0], target) for target in model.targets}

    def streams(first: int, stop: int, begins: bool) -> onnx.ModelProto:
        live = graphs.Streams(first, stop, columns, model.scale)
        return graphs.streams(_empty_graph(model.backbone, parameters), model.exits, begins, live, model.pool)

    made = {f"segment_{model.exits[k]}": streams(k, group[-1] + 1, k == group[0]) for group in schedule for k in group}
    last = len(model.exits) - 1
    return made | {"full": streams(last, last + 1, True)}


def _cascade_graphs(model: MultiModel, parameters: dict[str, np.ndarray]) -> dict[str, onnx.ModelProto]:
    """The same of independent models: each from the embeddings on."""
    made = {
        f"segment_{layer}": graphs.full(_empty_graph(each.backbone, parameters, f"models.{k}."), 0, model.pool)
        for k, (layer, each) in enumerate(zip(model.exits, model.models))
    }
    return made | {"full": made[f"segment_{model.exits[-1]}"]}


def _encoder_of(run: Run) -> OwnStates | SentenceEncoder | None:
    return run.rule.embed if isinstance(run.rule, Retrieval) else None


def _encoder_graph(encoder: OwnStates | SentenceEncoder, model, parameters: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The queries of a retrieval: from the model's own weights, or from another encoder's in float32."""
    states = encoder.states
    if states.backbone is model.backbone:
        prefix = f"models.{len(model.exits) - 1}." if isinstance(model, MultiModel) else ""
        return graphs.encoder(_empty_graph(states.backbone, parameters, prefix), states.layer)
    others = {
        f"encoder.backbone.{name}": value.detach().cpu().numpy() for name, value in states.backbone.named_parameters()
    }
    return graphs.encoder(_empty_graph(states.backbone, others, "encoder."), states.layer)


def _write_retrieval(rule: Retrieval, folder: Path) -> dict:
    """The datastore, and what the manifest says of the encoder."""
    encoder = rule.embed
    rule.datastore.save(folder / "datastore")
    tokenizer = encoder.tokenizer
    if tokenizer is not None:
        (folder / "encoder").mkdir()
        tokenizer.save(folder / "encoder" / "tokenizer.json")
    return {
        "name": encoder.name,
        "layers": encoder.states.layer,
        "layer": encoder.states.backbone.layer_weights(),
        "max_length": None if tokenizer is None else tokenizer.max_length,
    }


def interface(graph: onnx.ModelProto) -> dict:
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


def has_outliers(node: str) -> bool:
    """The input of a gated MLP's last map: with it 91.2 % of the built-in decoder's tokens stay, without it 99.7 %."""
    return ".down_" in node


def quantized(graph: onnx.ModelProto, kept: Callable[[str], bool]) -> onnx.ModelProto:
    """ONNX Runtime's dynamic quantisation: int8 weights, activations measured as they come.

    kept: whether a linear map stays as it is, by the name of its node.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    names = [node.name for node in graph.graph.node]
    small = [f"{name}_MatMul" for name in names if kept(name)]  # as it renames them
    small += [name for name in names if name.startswith("adapters")]
    helper.set_model_props(graph, {"onnx.quant.pre_process": "onnxruntime.quant"})  # nothing to simplify: no warning
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.onnx"
        kind = {"weight_type": QuantType.QInt8, "per_channel": True}
        quantize_dynamic(graph, path, op_types_to_quantize=["MatMul"], nodes_to_exclude=small, **kind)
        made = onnx.load(path)
    _put_in_order(made.graph)
    return made


def _put_in_order(graph: onnx.GraphProto) -> None:
    """Each node behind those whose outputs it takes: the quantiser does not see what the branches of an If take."""

    def taken(node: onnx.NodeProto) -> set[str]:
        branches = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        return set(node.input).union(*(taken(inner) for branch in branches for inner in branch.node))

    ordered, waiting = [], list(graph.node)
    while waiting:
        unmade = {name for node in waiting for name in node.output}
        ready = [node for node in waiting if not taken(node) & unmade]
        assert ready, "a graph has no cycles, and a branch names no value as the graph around it does"
        ordered += ready
        waiting = [node for node in waiting if taken(node) & unmade]
    del graph.node[:]
    graph.node.extend(ordered)


def write_graphs(made: dict[str, onnx.ModelProto], folder: Path) -> None:
    """Take the weights out into one file, each once, and write graphs that point there."""
    tensors = {}
    for graph in made.values():
        for tensor in graph.graph.initializer:
            if not tensor.name.startswith(graphs.CONSTANT):
                tensors[tensor.name] = torch.from_numpy(numpy_helper.to_array(tensor).copy())
    write_tensors(folder / WEIGHTS, tensors)
    places = tensor_places(folder / WEIGHTS)
    for name, graph in made.items():
        for tensor in graph.graph.initializer:
            if tensor.name in places:
                offset, length = places[tensor.name]
                kept = {"name": tensor.name, "data_type": tensor.data_type, "dims": tensor.dims}
                tensor.CopyFrom(TensorProto(**kept, data_location=TensorProto.EXTERNAL))
                for key, value in {"location": WEIGHTS, "offset": offset, "length": length}.items():
                    tensor.external_data.add(key=key, value=str(value))
        path = folder / f"{name}.onnx"
        onnx.save(graph, path)
        onnx.checker.check_model(path, full_check=True)


def _verify(run: Run, segments: OrtSegments, rule: Rule, texts: list[tuple[str, ...]], precision: str) -> dict:
    """Every exit of the graphs against torch on real sentences, in batches of one and of many."""
    encoded = run.encode(texts)
    expected, found = record(run.segments(), encoded, 8), record(segments, encoded, 8)
    difference = float(abs(expected.logits - found.logits).max())
    for row in range(min(8, len(texts))):
        inputs = encoded.batch([row])
        alone = read_every_exit(run.segments(), inputs)[0] - read_every_exit(segments, inputs)[0]
        difference = max(difference, float(abs(alone).max()))
    if not np.isfinite(difference) or (precision == "float32" and difference > TOLERANCE):
        raise ValueError(
            f"the {precision} graphs differ from torch by {difference:.2g} (logits; {TOLERANCE} allowed in float32); "
            f"no folder was written"
        )
    rules = [plan_rows(each, encoded, 8) if each.looks else each for each in (run.rule, rule)]
    left = [recorded.replay(each) for recorded, each in zip((expected, found), rules)]
    return {
        "texts": len(texts),
        "max_logit_difference": difference,
        "prediction_agreement": float((predictions(left[0].logits) == predictions(left[1].logits)).mean()),
        "exit_agreement": float((left[0].exit_index == left[1].exit_index).mean()),
    }
