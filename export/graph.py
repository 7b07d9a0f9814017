"""Write an ONNX graph node by node, and BERT's parts as nodes. A value of the graph is its name.

A weight stands in the graph, or in a file of weights beside it that several graphs share. Shapes: B rows, T tokens,
D width, H heads, C classes; hidden states are (B T, D), so that every linear map is one Gemm.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, TensorProto, ValueInfoProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from mini_ee.export.manifest import WEIGHTS

OPSET, IR_VERSION = 23, 11
MOST_INSIDE = 2_000_000_000  # bytes of weights that stand in a graph, whose file has at most 2 GiB
INT64, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL


class Graph:
    """A graph being written."""

    def __init__(self, weights: dict[str, np.ndarray]):
        self.weights, self.made, self.nodes = weights, 0, list[onnx.NodeProto]()
        self.inputs, self.outputs = list[ValueInfoProto](), list[ValueInfoProto]()
        self.constants, self.defaults = dict[str, np.ndarray](), dict[str, np.ndarray]()

    def op(self, kind: str, *inputs: str, **attributes) -> str:
        """Append a node with one output."""
        return self.several(1, kind, *inputs, **attributes)[0]

    def several(self, outputs: int, kind: str, *inputs: str, **attributes) -> list[str]:
        """Append a node with several outputs."""
        self.made += 1
        names = [f"{kind.lower()}_{self.made}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def input(self, name: str, kind: int, *axes: str | int, default: np.ndarray | None = None) -> str:
        """Declare an input. default: its value where a caller gives none."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, axes))
        if default is not None:
            self.defaults[name] = default
        return name

    def output(self, name: str, value: str, kind: int, *axes: str | int) -> None:
        """Declare an output; the graph's own values may not bear its name."""
        self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, kind, axes))

    def constant(self, values: np.ndarray | Sequence[int] | float) -> str:
        """A constant: int64 (np.int64 is numpy's default), or float32. Equal ones are stored once."""
        values = np.asarray(values, np.float32 if isinstance(values, float) else None)
        name = f"constant_{values.dtype}_{'x'.join(map(str, values.shape))}_{'_'.join(map(str, values.flat))}"
        self.constants[name] = values
        return name

    def either(self, condition: str, kinds: Sequence[int], then: Callable, otherwise: Callable) -> list[str]:
        """An If on whether any of (B,) is true: both functions write a branch, and return values of these types."""
        some = self.op("ReduceMax", condition, keepdims=0)
        yes, no = (self._branch(write, kinds) for write in (then, otherwise))
        return self.several(len(kinds), "If", some, then_branch=yes, else_branch=no)

    def _branch(self, write: Callable[[], Sequence[str]], kinds: Sequence[int]) -> GraphProto:
        outside, self.nodes = self.nodes, []
        values = [self.op("Identity", value) for value in write()]  # an output of a branch is made in the branch
        infos = [helper.make_tensor_value_info(value, kind, None) for value, kind in zip(values, kinds)]
        branch = helper.make_graph(self.nodes, f"branch_{self.made}", [], infos)
        self.nodes = outside
        return branch

    def model(self, name: str, offsets: dict[str, int]) -> onnx.ModelProto:
        """The finished graph. offsets: of the weights in the file beside it; empty if they stand in the graph."""
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs)
        tensors = {name: numpy_helper.from_array(values, name) for name, values in self.constants.items()}
        names = used(graph) & self.weights.keys() if offsets else self.weights
        tensors |= {weight: stored(weight, self.weights[weight], offsets.get(weight)) for weight in names}
        place(graph, tensors)
        graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in self.defaults.items())
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="mini_ee")


def stored(name: str, values: np.ndarray, offset: int | None) -> TensorProto:
    """A weight in the graph itself, or at an offset of the file beside it."""
    tensor = numpy_helper.from_array(values, name)
    if offset is not None:
        set_external_data(tensor, Path(WEIGHTS).name, offset, values.nbytes)
        tensor.ClearField("raw_data")
    return tensor


def write_beside(path: Path, weights: dict[str, np.ndarray], several: bool) -> dict[str, int]:
    """Write the weights of several graphs, or of a large one, beside them. Returns the offset of each, or nothing."""
    *offsets, size = accumulate((values.nbytes for values in weights.values()), initial=0)
    if not several and size <= MOST_INSIDE:
        return {}
    with open(path, "wb") as file:
        file.writelines(np.ascontiguousarray(values).data for values in weights.values())
    return dict(zip(weights, offsets))


def tensors_of(graph: GraphProto) -> list[TensorProto]:
    """The tensors of a graph and of its branches."""
    return [*graph.initializer, *(tensor for branch in branches_of(graph) for tensor in tensors_of(branch))]


def branches_of(graph: GraphProto) -> list[GraphProto]:
    """The branches of a graph's own nodes."""
    return [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]


def used(graph: GraphProto) -> set[str]:
    """All names that nodes of a graph or of its branches take."""
    return {name for node in graph.node for name in node.input}.union(*map(used, branches_of(graph)))


def place(graph: GraphProto, tensors: dict[str, TensorProto]) -> None:
    """Declare a tensor in the branch that alone uses it, where ONNX Runtime packs it for its product; else outside."""
    branches = [(branch, used(branch)) for branch in branches_of(graph)]
    count = Counter([name for node in graph.node for name in node.input] * 2)  # twice: as if by two branches
    count.update(name for _, names in branches for name in names)
    graph.initializer.extend(tensor for name, tensor in tensors.items() if count[name] != 1)
    for branch, names in branches:
        place(branch, {name: tensors[name] for name in names & tensors.keys() if count[name] == 1})
