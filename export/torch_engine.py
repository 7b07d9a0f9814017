"""The model of an exported folder in torch, for an engine that the graphs do not have: LoRA exits side by side.

model = torch_model("exported");  early_exit(SideBySide(model), rule, inputs)      SGMV, Eq. 6 of LoRAExit
"""

import re
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from mini_ee.bert import Bert, Exits
from mini_ee.consistent import PolicyExits
from mini_ee.export.graph import tensors_of
from mini_ee.export.manifest import GRAPHS, STACKED, read_manifest
from mini_ee.lora_exits import Adapters, LoRAExits

KINDS = {"joint": Exits, "lora-exits": LoRAExits, "consistent": PolicyExits}  # by the method in the manifest
NAMES = {  # how names of weights begin, in the core and in the folder
    r"bert\.layers\.": "backbone.layers.",
    r"bert\.kind\.": "backbone.embeddings.token_type.",
    r"bert\.": "backbone.embeddings.",
    r"heads\.(\d+)\.0\.": r"heads.\1.dense.",
    r"heads\.(\d+)\.3\.": r"heads.\1.out.",
    r"policies\.": "policy.networks.",
    r"adapters\.": "adapters.",
}


def stored_name(name: str) -> str:
    """The name in the folder of a weight of the core; that of a query, key or value before it is stacked."""
    ours = next(ours for ours in NAMES if re.match(ours, name))
    return re.sub(f"^{ours}", NAMES[ours], name)


def stacks(model: Exits) -> dict[str, list[str]]:
    """Name of a stacked weight or bias -> those of its parts."""
    layers = [f"backbone.layers.{depth}" for depth in range(len(model.bert.layers))]
    return {f"{at}.qkv.{of}": [f"{at}.{name}.{of}" for name in STACKED] for at in layers for of in ("weight", "bias")}


def stored_weights(model: Exits) -> dict[str, Tensor]:
    """The weights of a model, under their names in the folder."""
    tensors = {stored_name(name): tensor.float().contiguous() for name, tensor in model.state_dict().items()}
    return tensors | {whole: torch.cat([tensors.pop(part) for part in parts]) for whole, parts in stacks(model).items()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights and constants of all graphs of an export."""
    graphs = [onnx.load(path).graph for path in (folder / GRAPHS).glob("*.onnx")]
    return {part.name: torch.tensor(numpy_helper.to_array(part)) for graph in graphs for part in tensors_of(graph)}


def torch_model(folder: str | Path) -> Exits:
    """The model of a folder that writer.py wrote, or the command `mini-ee export` from the same methods.

    Raises ValueError for a model of another kind, and what read_manifest raises.
    """
    manifest, stored = read_manifest(Path(folder)), read_weights(Path(folder))
    kind, settings, backbone = KINDS.get(manifest["method"]), manifest["settings"], manifest["backbone"]
    if kind is None or backbone.get("model_type") != "bert" or manifest["precision"] != "float32":
        raise ValueError(f"{folder}: expected a BERT in float32 of the methods {', '.join(KINDS)}")
    more = {"rank": settings["rank"], "targets": settings["targets"]} if kind is LoRAExits else {}
    model = kind(Bert(backbone), manifest["exits"], manifest["num_labels"], **more)
    model.pool = manifest["pool"]
    for part in model.modules():
        if isinstance(part, LoRAExits | Adapters):
            part.scale = settings["alpha"] / settings["rank"]
    for whole, parts in stacks(model).items():
        stored |= zip(parts, stored[whole].chunk(3))
    model.load_state_dict({name: stored[stored_name(name)] for name in model.state_dict()})
    return model.eval()
