"""Write an ONNX graph node by node, and BERT's parts as nodes. A value of the graph is its name.

Weights stand once, in model.safetensors next to the graphs, each under the name that it has there. Shapes: B rows, T
tokens, D width, H heads, C classes; hidden states are (B T, D), so that every linear map is one Gemm.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import GraphProto, TensorProto, ValueInfoProto, helper, numpy_helper

OPSET, IR_VERSION = 23, 11
WEIGHTS = "model.safetensors"
INT64, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL


class Graph:
    """A graph being written. weights: name -> values, and their offset in the file of weights."""

    def __init__(self, weights: dict[str, tuple[np.ndarray, int]]):
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

    def model(self, name: str) -> onnx.ModelProto:
        """The finished graph."""
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs)
        tensors = {name: numpy_helper.from_array(values, name) for name, values in self.constants.items()}
        for weight in used(graph) & self.weights.keys():
            values, offset = self.weights[weight]
            tensors[weight] = TensorProto(
                name=weight, data_type=FLOAT, dims=values.shape, data_location=TensorProto.EXTERNAL
            )
            for key, value in (("location", WEIGHTS), ("offset", offset), ("length", values.nbytes)):
                tensors[weight].external_data.add(key=key, value=str(value))
        place(graph, tensors)
        graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in self.defaults.items())
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="mini_ee")


def branches_of(graph: GraphProto) -> list[GraphProto]:
    """The branches of a graph's own nodes."""
    return [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]


def used(graph: GraphProto) -> set[str]:
    """All names that nodes of a graph or of its branches take."""
    return {name for node in graph.node for name in node.input}.union(*map(used, branches_of(graph)))


def place(graph: GraphProto, tensors: dict[str, TensorProto]) -> None:
    """Declare each tensor where it is used; where several branches use it, in the graph that contains them.

    ONNX Runtime packs a weight for its product only if graph or branch declares it for its own nodes.
    """
    branches = [(branch, used(branch)) for branch in branches_of(graph)]
    count = Counter([name for node in graph.node for name in node.input] * 2)  # twice: as if by two branches
    count.update(name for _, names in branches for name in names)
    graph.initializer.extend(tensor for name, tensor in tensors.items() if count[name] > 1)
    for branch, names in branches:
        place(branch, {name: tensors[name] for name in names & tensors.keys() if count[name] == 1})
