"""A graph of opset 23 in the operators of an older opset, for older versions of ONNX Runtime: `export --opset 18`.

Nodes that the older opset lacks are replaced by several older ones; all others keep their attributes. Types and static
sizes come from ONNX's shape inference, which also reaches the branches of an If. Every node gets a name: older versions
of ONNX Runtime (1.19.2) name the nodes that they fuse after those that they replace, and refuse two equal names.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

OPSETS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11}
"""Opset that can be exported -> the IR version of the release of ONNX that brought it."""

END = np.iinfo(np.int64).max

LOWEST = np.finfo(np.float32).min  # added to the scores of keys that are not read, as ONNX Runtime's own kernel does


class Kind(NamedTuple):
    """The type of a value; its sizes, 0 if known only when the graph runs."""

    element: int
    sizes: tuple[int, ...]


def in_opset(model: ModelProto, opset: int) -> ModelProto:
    """The same model in an opset of OPSETS. Raises ValueError for another one."""
    if opset not in OPSETS:
        raise ValueError(f"expected an opset from {min(OPSETS)} to {max(OPSETS)}, got {opset}")
    if opset == model.opset_import[0].version:
        return model
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    _replace(model.graph, opset, {})
    model.opset_import[0].version, model.ir_version = opset, OPSETS[opset]
    return model


def _replace(graph: GraphProto, opset: int, outside: dict[str, Kind]) -> None:
    """Replace nodes in a graph and its branches. outside: the kinds of values that a branch can use."""
    kinds, nodes = outside | _kinds(graph), []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _replace(attribute.g, opset, kinds)
        since, write, known = REPLACED.get(node.op_type, (0, None, ()))
        if write is None or opset >= since:
            nodes.append(node)
            continue
        new = _Nodes(node, kinds)
        if more := [name for name, value in new.settings.items() if value and name not in known]:
            raise ValueError(
                f"{node.op_type} with {', '.join(more)} has no form in opset {opset}; export without --opset"
            )
        write(new)
        nodes += new.nodes
    for node in nodes:
        node.name = node.output[0]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)


def _kinds(graph: GraphProto) -> dict[str, Kind]:
    found = {each.name: Kind(each.data_type, tuple(each.dims)) for each in graph.initializer}
    for each in (*graph.input, *graph.value_info, *graph.output):
        tensor = each.type.tensor_type
        found.setdefault(each.name, Kind(tensor.elem_type, tuple(axis.dim_value for axis in tensor.shape.dim)))
    return found


class _Nodes:
    """The nodes that replace one node; the last of them has its output."""

    def __init__(self, node: NodeProto, kinds: dict[str, Kind]):
        self.inputs, self.nodes, self._output = list(node.input), [], node.output[0]
        self.kinds = [kinds.get(name) for name in node.input]
        self.settings = {each.name: helper.get_attribute_value(each) for each in node.attribute}

    def op(self, kind: str, *inputs: str, **attributes) -> str:
        """Append a node with one output; returns its name."""
        return self.several(1, kind, *inputs, **attributes)[0]

    def several(self, outputs: int, kind: str, *inputs: str, **attributes) -> list[str]:
        """Append a node with several outputs; returns their names."""
        names = [f"{self._output}_{len(self.nodes)}_{at}" for at in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def end(self, kind: str, *inputs: str, **attributes) -> None:
        """Append the last node."""
        self.nodes.append(helper.make_node(kind, inputs, [self._output], **attributes))

    def number(self, value: float, element: int) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.array(value, _numpy(element))))

    def integers(self, *values: int) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.array(values, np.int64)))

    def cast(self, x: str, element: int) -> str:
        return self.op("Cast", x, to=element)


def _numpy(element: int) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(element)


def _attention(new: _Nodes) -> None:
    """Scaled dot products. Heads that share a key are an axis of their own: (B, KV, H / KV, T, d)."""
    (query, key, value, *masks), settings = new.inputs, new.settings
    element = new.kinds[0].element
    flat = "q_num_heads" in settings  # (B, T, H d) instead of (B, H, T, d)
    if flat:
        heads, shared = settings["q_num_heads"], settings["kv_num_heads"]
    else:  # if a size is unknown, each head has its own key; MatMul refuses other sizes
        heads, shared = (kind.sizes[1] if len(kind.sizes) == 4 else 0 for kind in new.kinds[:2])
    groups = (shared, heads // shared) if heads and shared and heads != shared else (heads,)

    def split(x: str, counts: tuple[int, ...]) -> str:
        """(B, T, H d) or (B, H, T, d) -> (B, KV, H / KV, T, d), or without groups (B, H, T, d)."""
        if flat:
            x = new.op("Reshape", x, new.integers(0, 0, *counts, -1))
            return new.op("Transpose", x, perm=[0, *range(2, 2 + len(counts)), 1, 2 + len(counts)])
        if len(counts) == 1:
            return x
        ends = new.op("Shape", x, start=0, end=1), new.integers(*counts), new.op("Shape", x, start=2)
        return new.op("Reshape", x, new.op("Concat", *ends, axis=0))

    ones = () if len(groups) == 1 else (1,)
    query, key, value = split(query, groups), split(key, (shared, *ones)), split(value, (shared, *ones))
    axes = list(range(len(groups) + 3))
    scores = new.op("MatMul", query, new.op("Transpose", key, perm=[*axes[:-2], axes[-1], axes[-2]]))
    if "scale" in settings:
        scores = new.op("Mul", scores, new.number(settings["scale"], element))
    else:
        width = new.cast(new.op("Shape", query, start=-1), element)
        scores = new.op("Div", scores, new.op("Sqrt", width))
    scores = scores if element == TensorProto.FLOAT else new.cast(scores, TensorProto.FLOAT)
    for mask in masks:
        added = _added(new, mask, new.kinds[3].element)
        scores = new.op("Add", scores, new.op("Unsqueeze", added, new.integers(1)) if ones else added)
    weights = new.op("Softmax", scores, axis=-1)
    weights = weights if element == TensorProto.FLOAT else new.cast(weights, element)
    joined = "MatMul", weights, value
    if flat:
        last = len(axes) - 2
        rows = new.op("Transpose", new.op(*joined), perm=[0, last, *range(1, last), last + 1])
        new.end("Reshape", rows, new.integers(0, 0, -1))
    elif ones:
        new.end(
            "Reshape",
            new.op(*joined),
            new.op("Concat", new.op("Shape", new.inputs[0], end=3), new.integers(-1), axis=0),
        )
    else:
        new.end(*joined)


def _added(new: _Nodes, mask: str, element: int) -> str:
    """A mask, true at keys that are read, or numbers, as float32 numbers that are added to the scores."""
    if element == TensorProto.BOOL:
        return new.op("Where", mask, new.number(0, TensorProto.FLOAT), new.number(LOWEST, TensorProto.FLOAT))
    return mask if element == TensorProto.FLOAT else new.cast(mask, TensorProto.FLOAT)


def _gelu(new: _Nodes) -> None:
    (x,), element = new.inputs, new.kinds[0].element
    if new.settings.get("approximate", b"none") == b"tanh":
        cubed = new.op("Mul", new.op("Mul", new.op("Mul", x, x), x), new.number(0.044715, element))
        inner = new.op("Mul", new.op("Add", x, cubed), new.number(math.sqrt(2 / math.pi), element))
        wave = new.op("Tanh", inner)
    else:
        wave = new.op("Erf", new.op("Div", x, new.number(math.sqrt(2), element)))
    new.end("Mul", new.op("Mul", x, new.op("Add", wave, new.number(1, element))), new.number(0.5, element))


def _rms_norm(new: _Nodes) -> None:
    """The norm over the last axis, in float32."""
    (x, weight), element = new.inputs, new.kinds[0].element
    wide = x if element == TensorProto.FLOAT else new.cast(x, TensorProto.FLOAT)
    mean = new.op("ReduceMean", new.op("Mul", wide, wide), new.integers(-1), keepdims=1)
    root = new.op("Sqrt", new.op("Add", mean, new.number(new.settings.get("epsilon", 1e-5), TensorProto.FLOAT)))
    normed = new.op("Div", wide, root)
    new.end("Mul", normed if element == TensorProto.FLOAT else new.cast(normed, element), weight)


def _rotary(new: _Nodes) -> None:
    """Rotate x_i with x_{i + R/2} in each head: x (B, T, H d), cos and sin (B, T, R/2)."""
    (x, *angles), rotated, rest = new.inputs, new.settings.get("rotary_embedding_dim", 0), []
    x = new.op("Reshape", x, new.integers(0, 0, new.settings["num_heads"], -1))
    if rotated:  # the values from index R on are kept
        end, axis = new.integers(rotated), new.integers(3)
        rest = [new.op("Slice", x, end, new.integers(END), axis)]
        x = new.op("Slice", x, new.integers(0), end, axis)
    one, two = new.several(2, "Split", x, axis=3, num_outputs=2)
    cos, sin = (new.op("Unsqueeze", each, new.integers(2)) for each in angles)
    first = new.op("Sub", new.op("Mul", one, cos), new.op("Mul", two, sin))
    second = new.op("Add", new.op("Mul", two, cos), new.op("Mul", one, sin))
    new.end("Reshape", new.op("Concat", first, second, *rest, axis=3), new.integers(0, 0, -1))


def _reduce_max(new: _Nodes) -> None:
    """The largest of bools, as that of integers."""
    x, *axes = new.inputs
    if new.kinds[0].element != TensorProto.BOOL:
        return new.end("ReduceMax", x, *axes, **new.settings)
    found = new.op("ReduceMax", new.cast(x, TensorProto.INT32), *axes, **new.settings)
    new.end("Cast", found, to=TensorProto.BOOL)


def _arg_max(new: _Nodes) -> None:
    """Older versions of ONNX Runtime have none of int64."""
    (x,), element = new.inputs, new.kinds[0].element
    new.end("ArgMax", new.cast(x, TensorProto.DOUBLE) if element == TensorProto.INT64 else x, **new.settings)


SIZES = ("q_num_heads", "kv_num_heads", "scale", "softmax_precision")

REPLACED: dict[str, tuple[int, Callable[[_Nodes], None], tuple[str, ...]]] = {
    "Attention": (23, _attention, SIZES),
    "RMSNormalization": (23, _rms_norm, ("epsilon",)),
    "RotaryEmbedding": (23, _rotary, ("num_heads", "rotary_embedding_dim")),
    "Gelu": (20, _gelu, ("approximate",)),
    "ReduceMax": (20, _reduce_max, ("keepdims",)),
    "ArgMax": (23, _arg_max, ("axis", "keepdims")),
}
"""Operator -> the first opset that has it in this form, the function that writes it in older ones, and its attributes
that the function reads.
"""
