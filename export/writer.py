"""Export a model of the core to a folder as the command `mini-ee export` writes, which `mini-ee run` and `serve` open.

manifest.json              exits, rule, labels, costs, inputs and outputs of each graph, SHA-256 of files
onnx/model.onnx            nested_if.py; its weights too, because a browser cannot read them from another file
onnx/segment_{layer}.onnx  with `segments`: segments.py
onnx/model.onnx_data       with `segments`, or above 100 MB: the weights of all graphs, each once
config.json                with tokenizer.json and tokenizer_config.json: by which clients of Hugging Face read all
"""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
from onnx import helper
from tokenizers import Tokenizer
from torch.nn.utils import parameters_to_vector

from mini_ee import __version__
from mini_ee.bert import Exits
from mini_ee.data import Rows
from mini_ee.export.graph import OPSET, Graph, write_beside
from mini_ee.export.manifest import FORMAT_VERSION, IDS, MANIFEST, WEIGHTS, file_sha256, rule_to_dict, write_json
from mini_ee.export.nested_if import NestedIf
from mini_ee.export.runtime import Batch, Runtime
from mini_ee.export.segments import write_segment
from mini_ee.export.torch_engine import stored_weights
from mini_ee.load import load_tokenizer, model_type
from mini_ee.loop import early_exit
from mini_ee.rules import Fixed, Never, Rule
from mini_ee.train import Options

ROWS, SINGLE = 64, 8  # compared as one batch, and each alone
TOLERANCE, RELATIVE = 1e-4, 1e-5  # of a logit, and as a share of the largest one
AGREEMENT = 0.9  # least share of equal exits: rounding decides for a row at a threshold


def export(out: str | Path, model: Exits, rule: Rule, data: Rows, source: str, segments: bool = False) -> dict:
    """Write the folder, and return its manifest.

    data: its labels' names, and rows on which the graphs are compared with torch. source: the model's folder or name,
    for its tokenizer. segments: also write a graph per segment. Raises FileExistsError; ValueError as `verify`.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out}: is there already; name another folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder, tokens = Path(temporary) / "export", len(model.bert.position.weight)
        (folder / WEIGHTS).parent.mkdir(parents=True)
        task = {"name": "rows", "texts": 1 + any(map(any, data.kinds)), "label_names": list(data.names)}
        manifest = metadata(model) | {"rule": rule_to_dict(rule), "task": task, "max_length": tokens}
        manifest |= {"graphs": write_graphs(model, rule, folder, segments)} | costs(model, segments)
        write_tokenizer(load_tokenizer(source, tokens), folder, tokens)
        labels = dict(enumerate(data.names or ("LABEL_0",)))  # the name of a regression
        config = {"id2label": labels, "label2id": {label: number for number, label in labels.items()}}
        javascript = {"dtype": "fp32", "use_external_data_format": (folder / WEIGHTS).exists()}
        config |= {"architectures": ["BertForSequenceClassification"], "transformers.js_config": javascript}
        write_json(folder / "config.json", config | model.bert.config)
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        manifest["files"] = {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
        write_json(folder / MANIFEST, manifest)
        manifest["verified"] = verify(folder, model, rule, data)
        write_json(folder / MANIFEST, manifest)
        os.rename(folder, out)
    return manifest


def run_and_export(run: Callable, options: Options) -> None:
    """A script with --out: export what it returns, a model, a rule, and rows."""
    if Path(options.out).exists():  # before the training
        raise FileExistsError(f"{options.out}: is there already; name another folder or remove it")
    if model_type(options.model) == "llama":
        raise ValueError("--out: the graph of a decoder's token is in the lab: mini-ee train, then mini-ee export")
    model, rule, data = run(options)
    verified = export(options.out, model, rule, data, options.model)["verified"]
    print(f"exported: {options.out} (logits differ from torch by {verified['max_logit_difference']:.1g})")


def write_graphs(model: Exits, rule: Rule, folder: Path, segments: bool) -> dict:
    """Write weights and graphs into a folder; returns the inputs and outputs of each graph."""
    weights = {name: tensor.numpy() for name, tensor in stored_weights(model).items()}
    names = ["model", *(f"segment_{layer}" for layer in model.exits if segments)]
    interfaces, offsets = {}, write_beside(folder / WEIGHTS, weights, segments)
    for k, name in enumerate(names, -1):
        graph, path = Graph(weights), (folder / WEIGHTS).with_name(f"{name}.onnx")
        write_segment(graph, model, k) if k >= 0 else NestedIf(graph, model, rule).write()
        written = graph.model(name, offsets)
        onnx.save(written, path)
        onnx.checker.check_model(path, full_check=True)
        interfaces[name] = {"inputs": values(written.graph.input), "outputs": values(written.graph.output)}
    return interfaces


def values(infos) -> dict:
    """Name, type and axes of inputs or outputs."""
    types = {info.name: info.type.tensor_type for info in infos}
    kinds = {name: helper.tensor_dtype_to_np_dtype(tensor.elem_type).name for name, tensor in types.items()}
    axes = {name: [axis.dim_param or axis.dim_value for axis in tensor.shape.dim] for name, tensor in types.items()}
    return {name: {"dtype": kinds[name], "axes": axes[name]} for name in types}


def metadata(model: Exits) -> dict:
    """What the manifest has about the model. Not by class: with python -m it is __main__.LoRAExits."""
    entries = {"format_version": FORMAT_VERSION, "unit": "rows", "precision": "float32", "opset": OPSET}
    method = "lora-exits" if hasattr(model, "adapters") else "consistent" if hasattr(model, "policies") else "joint"
    entries |= {"method": method, "settings": {}, "num_labels": model.classes, "pool": model.pool, "head": "dense"}
    if hasattr(model, "adapters"):
        layer = model.adapters[-1][0]
        rank = next(iter(layer.values())).A.shape[1]
        entries["settings"] = {"rank": rank, "alpha": model.scale * rank, "targets": list(layer)}
        entries["schedule"] = [[k] for k in range(len(model.exits))]  # restarts, in the words of mini_ee.lab
    more = {"exits": list(model.exits), "versions": {"mini_ee": __version__, "onnx": onnx.__version__}}
    return entries | more | {"backbone": model.bert.config}


def costs(model: Exits, segments: bool) -> dict:
    """FLOPs, each as the coefficients of 1, T and T^2 of T tokens: of the layers of each exit, and of its head."""
    D, inner = model.bert.config["hidden_size"], model.bert.config["intermediate_size"]
    restarts, numbers = hasattr(model, "adapters"), [0] * len(model.exits)  # of weights in adapters and policies
    lengths = list(model.exits) if restarts else np.diff(model.exits, prepend=0).tolist()
    adapters = [parameters_to_vector(p.parameters()).numel() for p in model.adapters] if restarts else numbers
    policies = [parameters_to_vector(p.parameters()).numel() for p in getattr(model, "policies", ())]
    read = [2.0 * (D * D + D * model.classes), float(D) if model.pool == "mean" else 0.0, 0.0]
    layers = [[0.0, 2.0 * (n * (4 * D * D + 2 * D * inner) + a), 4.0 * n * D] for n, a in zip(lengths, adapters)]
    of_exits = {"layer_passes": lengths, "flops": [[layer, read] for layer in layers]}
    whole = layers[-1] if restarts else np.sum(layers, axis=0).tolist()
    totals = of_exits | {"state_flops": [2.0 * n for n in (policies + numbers)[: len(lengths)]]}
    return totals | {"whole_flops": [whole, read]} | ({"by_segment": of_exits} if segments else {})


def write_tokenizer(tokenizer: Tokenizer, folder: Path, tokens: int) -> None:
    """Write tokenizer.json, and the tokenizer_config.json by which transformers reads it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": tokens, "model_input_names": list(IDS)}
    config |= {f"{token[1:-1].lower()}_token": token for token in ("[PAD]", "[MASK]") if token in special}
    write_json(folder / "tokenizer_config.json", config)


@torch.inference_mode()
def verify(folder: Path, model: Exits, rule: Rule, data: Rows) -> dict:
    """Compare every exit of model.onnx and by segment, and where the rule stops. Raises ValueError if they differ."""
    runtime, differences, largest = Runtime(folder, threads=1), list[float](), 0.0
    rows = np.random.default_rng(0).permutation(len(data))[:ROWS]
    rule = Never() if rule.needs is None else rule  # a plan is an input
    for some in (*rows[:SINGLE, None], rows):
        inputs = data.batch(some)
        batch = Batch(dict(zip(IDS, map(np.asarray, (inputs.ids, inputs.kinds, inputs.mask)))), np.arange(len(some)))
        for k in range(len(model.exits)):
            expected = early_exit(model, Fixed(k), inputs).logits
            outputs = [runtime.run_batch(batch, Fixed(k)).logits]
            if f"segment_{model.exits[0]}" in runtime.config["graphs"]:
                outputs.append(early_exit(runtime.segments, Fixed(k), batch).logits)
            differences += [float(abs(expected - logits).max()) for logits in outputs]
            largest = max(largest, float(abs(expected).max()))
    in_torch, in_graph = early_exit(model, rule, inputs), runtime.run_batch(batch, rule)
    agreement = float(np.mean(in_torch.exit_index == in_graph.exit_index))
    predictions = float(np.mean(in_torch.logits.argmax(1) == in_graph.logits.argmax(1)))
    difference, allowed = float(np.max(differences)), max(TOLERANCE, RELATIVE * largest)
    if not difference <= allowed or agreement < AGREEMENT:
        line = f"by {difference:.2g} (logits; {allowed:.2g} are allowed), {agreement:.1%} of the exits are equal"
        raise ValueError(f"graphs and torch differ {line}; no folder was written")
    shares = {"prediction_agreement": predictions, "exit_agreement": agreement}
    return {"texts": len(rows), "max_logit_difference": difference} | shares
