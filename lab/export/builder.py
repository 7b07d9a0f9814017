"""Write an ONNX graph node by node, in the standard operators of opset 23. graph.py runs torch code on its values.

A value is a name. A parameter is recognised by its identity. It keeps its name in the model and torch's layout, so that
the graph is readable and all graphs of an export share one file of weights. A weight that a single branch uses is
declared in that branch: ONNX Runtime prepacks a weight only for nodes of the same graph or branch.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import onnx
import torch
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.capi._pybind_state import quantize_matmul_4bits, quantize_matmul_8bits
from torch import Tensor, nn

from mini_ee.export.graph import stored

OPSET, IR_VERSION = 23, 11  # read by ONNX Runtime 1.23 and newer

INT8_LARGEST = np.float32(63)  # largest absolute value of an int8 weight, see linear_int8

MICROSOFT, BLOCK = "com.microsoft", 32  # domain of ONNX Runtime's own operators; weights that share a scale
IN_INT8 = 4  # accuracy_level of MatMulNBits: inputs are rounded to int8, in blocks too. With others it is slower
PACKERS = {4: quantize_matmul_4bits, 8: quantize_matmul_8bits}  # those of onnxruntime's MatMulNBitsQuantizer

Parameters = dict[int, tuple[str, Tensor]]
"""id of a parameter -> its name, and the parameter itself: while it is referenced, no other object has its id."""


def int8_maps(model: nn.Module) -> set[int]:
    """The ids of the weights that can be rounded to int8: of the linear maps that a module names in `int8_maps`."""
    modules = ((module, getattr(module, "int8_maps", ())) for module in model.modules())
    return {id(getattr(module, name).weight) for module, names in modules for name in names}


def block_maps(model: nn.Module, bits: int) -> dict[int, int]:
    """The ids of the weights of a decoder that are rounded in blocks, and to how many bits: all linear maps of its
    layers and heads, and the embeddings. The policy, which is small and decides, is not rounded.

    Embeddings and maps to the vocabulary keep 8 bits, as in llama.cpp's files of 4 bits.
    """
    embeddings, parts = model.backbone.embeddings.weight, (model.backbone, model.heads)
    maps = (module.weight for part in parts for module in part.modules() if isinstance(module, nn.Linear))
    return {id(weight): 8 if len(weight) == len(embeddings) else bits for weight in (embeddings, *maps)}


def parameters_of(model: nn.Module, prefix: str = "") -> Parameters:
    """The named parameters of a model, as a Builder takes them."""
    return {id(value): (prefix + name, value) for name, value in model.named_parameters()}


class Value(NamedTuple):
    """An output of a branch: its name, its type, and the name or size of each axis."""

    name: str
    dtype: type
    axes: tuple[str | int, ...] = ()


@contextmanager
def whole_tables(model: nn.Module) -> Iterator[None]:
    """In this context, DeBERTa maps its whole table of positions, which ONNX Runtime does when it loads the graph."""
    tables = [module for module in model.modules() if hasattr(module, "whole_table")]
    for module in tables:
        module.whole_table = True
    try:
        yield
    finally:
        for module in tables:
            module.whole_table = False


class Builder:
    """One graph.

    dtype: of all weights and hidden states. rounded: ids of the weights to round to int8, see `int8_maps`. blocks: of
    those to round in blocks, id -> 4 or 8 bits, see `block_maps`. plain: inputs with a default become required inputs,
    for callers that cannot override a default: JavaScript, and I/O binding. flat: all weights are declared in the main
    graph, because onnxruntime-web cannot load external data of a branch.
    """

    def __init__(
        self,
        parameters: Parameters,
        dtype: type = np.float32,
        rounded: Collection[int] = (),
        blocks: Mapping[int, int] = MappingProxyType({}),
        plain: bool = False,
        flat: bool = False,
    ):
        self.dtype, self.rounded, self.blocks, self.plain, self.flat = np.dtype(dtype), rounded, blocks, plain, flat
        self.weights: dict[str, np.ndarray] = {}  # those that the graph uses so far
        self._parameters, self._constants = parameters, {}
        self._nodes: list[NodeProto] = []  # of the graph or branch being written
        self._inputs, self._outputs, self._defaults, self._made = {}, {}, {}, 0
        self._written = {}  # node -> its outputs, for all nodes that are visible here

    # ---- Nodes ----
    def op(self, kind: str, *inputs: str, **attributes) -> str:
        """Append a node with one output; returns its name."""
        return self.several(1, kind, *inputs, **attributes)[0]

    def several(self, outputs: int, kind: str, *inputs: str, **attributes) -> list[str]:
        """Append a node with several outputs; returns their names. An equal visible node is used again."""
        node = outputs, kind, inputs, repr(sorted(attributes.items()))
        if kind != "If" and node in self._written:
            return self._written[node]
        self._made += 1
        names = [f"{kind.lower()}_{self._made}_{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(kind, inputs, names, **attributes))
        self._written[node] = names
        return names

    def input(self, name: str, *axes: str | int, dtype: type = np.int64) -> str:
        """Declare an input with its axes, unless it is declared already; returns its name."""
        self._inputs.setdefault(name, _info(name, dtype, axes))
        return name

    def default(self, name: str, values: np.ndarray, *axes: str | int) -> str:
        """Declare an input with these default values: an initialiser that a caller may override."""
        if not self.plain:
            self._defaults[name] = values
        self._inputs[name] = _info(name, values.dtype, axes)
        return name

    def output(self, name: str, value: str, *axes: str | int, dtype: type | None = None) -> None:
        """Declare a value as an output of the graph under this name. dtype: by default the graph's."""
        if value in self._outputs or value in self._inputs:
            value = self.op("Identity", value)
        self._outputs[value] = _info(name, dtype or self.dtype, axes)

    def value(self, name: str, *axes: str | int, dtype: type | None = None) -> Value:
        """An output of a branch. dtype: by default the graph's."""
        return Value(name, dtype or self.dtype, axes)

    def either(
        self, condition: str, then: Callable[[], Sequence[Value]], otherwise: Callable[[], Sequence[Value]]
    ) -> list[Value]:
        """An If on a condition (): each function writes a branch and returns its outputs. Returns those of the If."""
        branches, values = zip(*map(self._branch, (then, otherwise)))
        names = self.several(len(values[0]), "If", condition, then_branch=branches[0], else_branch=branches[1])
        return [value._replace(name=name) for value, name in zip(values[0], names)]

    def only_if(self, condition: str, then: Callable[[], Sequence[Value]]) -> list[Value]:
        """An If on a condition (): the values that the function writes if it is true, else the same without rows."""
        branch, values = self._branch(then)
        nothing, _ = self._branch(lambda: [self._without_rows(value) for value in values])
        names = self.several(len(values), "If", condition, then_branch=branch, else_branch=nothing)
        return [value._replace(name=name) for value, name in zip(values, names)]

    def any(self, x: str) -> str:
        """Whether any of (N,) bool is true: ()."""
        return self.op("ReduceMax", x, keepdims=0)

    def _without_rows(self, value: Value) -> Value:
        axes = (0, *value.axes[1:])
        zero = numpy_helper.from_array(np.zeros(1, value.dtype))  # OpenVINO refuses a Constant without elements
        return Value(self.op("ConstantOfShape", self.integers(*axes), value=zero), value.dtype, axes)

    def _branch(self, write: Callable[[], Sequence[Value]]) -> tuple[GraphProto, Sequence[Value]]:
        outside, self._nodes, written = self._nodes, [], dict(self._written)
        outputs, values = [], write()
        for value in values:
            made_here = any(value.name in node.output for node in self._nodes)
            name = (
                value.name if made_here else self.op("Identity", value.name)
            )  # ONNX: an output of a branch is the output of one of its nodes
            outputs.append(_info(name, value.dtype, value.axes))
        self._made += 1
        graph = helper.make_graph(self._nodes, f"branch_{self._made}", [], outputs)
        self._nodes, self._written = outside, written
        return graph, values

    # ---- Constants and weights ----
    def parameter(self, parameter: Tensor) -> str:
        """A parameter of the model as an initialiser under its name in the model."""
        name, value = self._named(parameter)
        if name not in self.weights:
            self.weights[name] = self._array(value)
        return name

    def rows_of(self, parameter: Tensor, rows: Tensor) -> str:
        """Some rows of a parameter, stored under its name and SOME_ROWS in place of the whole."""
        name, value = self._named(parameter)
        self.weights[name + SOME_ROWS] = self._array(value[rows])
        return name + SOME_ROWS

    def integers(self, *values: int) -> str:
        """A constant (len(values),) int64."""
        return self.constant("_".join(map(str, values)), np.array(values, np.int64))

    def constant(self, name: str, values: np.ndarray) -> str:
        """A constant in the graph itself, by name. Raises ValueError if the name already has other values."""
        name = f"constant_{name}_{values.dtype}"
        if not np.array_equal(self._constants.setdefault(name, values), values):
            raise ValueError(f"{name} is {self._constants[name]} already, not {values}")
        return name

    def constant_of(self, values: np.ndarray) -> str:
        """A constant, named by a digest of its values, so that equal constants are stored once."""
        digest = hashlib.sha1(values.tobytes() + repr(values.shape).encode()).hexdigest()[:12]
        text = f"scalar_{values.item()}" if values.ndim == 0 else f"{'x'.join(map(str, values.shape))}_{digest}"
        return self.constant(text, values)

    def knows(self, parameter: Tensor) -> bool:
        """Whether it is a parameter of the model."""
        return id(parameter) in self._parameters

    def _named(self, parameter: Tensor) -> tuple[str, Tensor]:
        if id(parameter) not in self._parameters:
            raise ValueError(f"expected a parameter of the model, found another one of shape {tuple(parameter.shape)}")
        return self._parameters[id(parameter)]

    def _array(self, value: Tensor) -> np.ndarray:
        with torch._C.DisableTorchFunction():  # else _Parameters of tracing.py would trace these calls
            array = value.detach().float().cpu().numpy()
        largest = np.finfo(self.dtype).max
        if np.isfinite(array).all() and (abs(array) > largest).any():
            raise ValueError(
                f"a weight of {abs(array).max():g} is too large for {self.dtype} ({largest:g}); use float32"
            )
        return array.astype(self.dtype)

    def gemm(self, x: str, weight: str, *bias: str) -> str:
        """x (N, I), weight (O, I), bias (O,) -> (N, O)."""
        return self.op("Gemm", x, weight, *bias, transB=1, name=f"{weight}_{self._made}")

    def linear_in_blocks(self, x: str, weight: Tensor, bias: str | None, rows: slice = slice(None)) -> str:
        """A linear map of some rows of a weight that is rounded in blocks: x (N, I) float32 -> (N, O)."""
        name, (outputs, inputs) = self.packed(weight, rows), weight.shape
        rest = [f"{name}_scales", f"{name}_zeros", *([] if bias is None else ["", bias])]
        sizes = {"N": len(range(outputs)[rows]), "K": inputs, "bits": self.blocks[id(weight)], "block_size": BLOCK}
        return self.op("MatMulNBits", x, name, *rest, domain=MICROSOFT, accuracy_level=IN_INT8, **sizes)

    def embedding_rounded(self, ids: str, weight: Tensor) -> str:
        """The rows of `ids` of embeddings that are rounded in blocks, which the LM head may share."""
        name, width = self.packed(weight), weight.shape[1]
        rows = self.op("Reshape", name, self.integers(len(weight), -1))
        settings = {"bits": self.blocks[id(weight)], "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        rest = f"{name}_scales", f"{name}_zeros"
        embedded = self.op("GatherBlockQuantized", rows, ids, *rest, domain=MICROSOFT, **settings)
        whole = width % BLOCK == 0  # else the last block is filled up with numbers that no row has
        return embedded if whole else self.op("Slice", embedded, *map(self.integers, (0, width, -1)))

    def packed(self, weight: Tensor, rows: slice = slice(None)) -> str:
        """The name of rows of a matrix (O, I) in blocks, as MatMulNBits reads it: (O, I / BLOCK, bytes of a block)
        uint8. With _scales (O, I / BLOCK) and _zeros, the blocks' whole numbers of 0, packed as the weights are."""
        name, weight = self._named(weight)
        bits = self.blocks[id(weight)]
        packed = f"{name}_int{bits}" if rows == slice(None) else f"{name}[{rows.start}:{rows.stop}]_int{bits}"
        if packed not in self.weights:
            matrix = self._array(weight)[rows]
            (outputs, inputs), numbers = matrix.shape, 8 // bits  # of a byte
            blocks = -(-inputs // BLOCK)
            columns = np.zeros((blocks * BLOCK, outputs), np.float32)
            columns[:inputs] = matrix.T
            values = np.zeros((outputs, blocks, BLOCK // numbers), np.uint8)
            scales = np.zeros((outputs, blocks), np.float32)
            zeros = np.zeros((outputs, -(-blocks // numbers)), np.uint8)
            PACKERS[bits](values, columns, scales, zeros, BLOCK, outputs, inputs, False)
            self.weights |= {packed: values, f"{packed}_scales": scales, f"{packed}_zeros": zeros}
        return packed

    def linear_int8(self, x: str, weight: Tensor, bias: str | None) -> str:
        """A linear map with int8 weights and a scale per output; x is quantised to uint8 when the graph runs.

        ONNX Runtime fuses these nodes. Weights are rounded to -63 .. 63: a processor without VNNI adds two products in
        16 bits, and 2 * 255 * 127 overflows.
        """
        name, weight = self._named(weight)
        whole, scale = f"{name}_int8", f"{name}_scale"
        if whole not in self.weights:
            matrix = self._array(weight)
            self.weights[scale] = np.maximum(abs(matrix).max(axis=1), np.finfo(np.float32).tiny) / INT8_LARGEST
            self.weights[whole] = np.ascontiguousarray(np.rint(matrix / self.weights[scale][:, None]).astype(np.int8).T)
        rounded, step, zero = self.several(3, "DynamicQuantizeLinear", x)
        product = self.cast(self.op("MatMulInteger", rounded, whole, zero), np.float32)
        y = self.op("Mul", product, self.op("Mul", step, scale))
        return y if bias is None else self.op("Add", y, bias)

    # ---- Parts ----
    def cast(self, x: str, dtype: type) -> str:
        """Cast x to another type."""
        return self.op("Cast", x, to=_kind(dtype))

    def shape(self, x: str, start: int, stop: int) -> str:
        """The sizes of the axes start .. stop - 1, (stop - start,) int64."""
        return self.op("Shape", x, start=start, end=stop)

    def attention(
        self,
        query: str,
        key: str,
        value: str,
        readable: str,
        heads: int,
        key_value_heads: int,
        scale: float | None = None,
    ) -> str:
        """Scaled dot products: (B, T, H d), (B, S, KV d) twice -> (B, T, H d). readable: (B, 1, T, S) bool, or added.

        scale: factor of the products; None: 1 / sqrt(d).
        """
        counts = {"q_num_heads": heads, "kv_num_heads": key_value_heads} | ({} if scale is None else {"scale": scale})
        return self.op("Attention", query, key, value, readable, softmax_precision=TensorProto.FLOAT, **counts)

    def readable(self, mask: str, queries: str) -> str:
        """mask (B, S), true where a token may be read -> (B, 1, T, S), the same for all queries (B, T, ...)."""
        ends = self.shape(queries, 0, 1), self.integers(1), self.shape(queries, 1, 2), self.shape(mask, 1, 2)
        return self.op("Expand", self.op("Unsqueeze", mask, self.integers(1, 2)), self.op("Concat", *ends, axis=0))

    # ---- The end ----
    def model(self, name: str, offsets: dict[str, int]) -> onnx.ModelProto:
        """The finished graph. offsets: of the weights in the file beside it; empty if they stand in the graph."""
        renamed = {value: info.name for value, info in self._outputs.items()}
        outputs = list(self._outputs.values())
        graph = helper.make_graph(self._nodes, name, [], outputs)
        _rename(graph, renamed)
        _prune(graph)
        used = _used(graph) | self._defaults.keys()
        graph.input.extend(info for info in self._inputs.values() if info.name in used)
        values = {name: numpy_helper.from_array(values, name) for name, values in self._constants.items()}
        values |= {weight: stored(weight, array, offsets.get(weight)) for weight, array in self.weights.items()}
        if not self.flat:
            _copy_into_branches(graph, values)
        _place(graph, values, self.weights if self.flat else ())
        graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in self._defaults.items())
        opsets = [helper.make_opsetid("", OPSET), *([helper.make_opsetid(MICROSOFT, 1)] if self.blocks else [])]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="mini_ee")


SOME_ROWS = "[rows]"


def _kind(dtype: type) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _info(name: str, dtype: type, axes: Sequence[str | int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _kind(dtype), axes)


def branches_of(graph: GraphProto) -> Iterator[GraphProto]:
    """The branches of a graph's own nodes."""
    return (attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g"))


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    """Rename values in the graph and its branches."""
    for node in graph.node:
        for wires in (node.input, node.output):
            wires[:] = [names.get(name, name) for name in wires]
    for branch in branches_of(graph):
        _rename(branch, names)


def _prune(graph: GraphProto) -> None:
    """Remove nodes whose outputs nothing uses: the trace writes some before it is known whether they are needed."""
    needed, nodes = {output.name for output in graph.output}, []
    for node in reversed(graph.node):
        if needed.isdisjoint(node.output):
            continue
        nodes.append(node)
        needed.update(node.input)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _prune(attribute.g)
                needed |= _used(attribute.g) | {output.name for output in attribute.g.output}
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(nodes)]
    del graph.node[:]
    graph.node.extend(nodes)


def _used(graph: GraphProto) -> set[str]:
    """All names that nodes of a graph or of its branches take."""
    inputs = {name for node in graph.node for name in node.input}
    return inputs.union(*map(_used, branches_of(graph)))


def _copy_into_branches(graph: GraphProto, tensors: dict[str, TensorProto]) -> None:
    """A matrix in blocks that several branches use becomes one initialiser in each, of the same bytes beside the graph.

    ONNX Runtime packs it only for nodes of the same branch, and unpacked it multiplies many times slower.
    """
    users = [(part, node) for part in _parts(graph) for node in part.node if node.op_type == "MatMulNBits"]
    count = Counter(name for _, node in users for name in {*node.input[1:4]})
    for part, node in users:
        for at, name in enumerate(node.input[1:4], start=1):
            if count[name] > 1 and part is not graph:
                node.input[at] = f"{name}@{part.name}"
                copy = TensorProto.FromString(tensors[name].SerializeToString())
                copy.name = node.input[at]
                tensors[copy.name] = copy


def _parts(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and all its branches."""
    yield graph
    for branch in branches_of(graph):
        yield from _parts(branch)


def _place(graph: GraphProto, tensors: dict[str, TensorProto], outside: Collection[str] = ()) -> None:
    """Declare an initialiser in the graph if its own nodes or several branches use it, else in the branch that does.

    Those in `outside` are declared in the graph in any case.
    """
    inputs = {name for node in graph.node for name in node.input}
    branches = list(branches_of(graph))
    used = [_used(branch) & tensors.keys() for branch in branches]
    count = Counter(name for names in used for name in names)
    here = [name for name in tensors if name in inputs or count[name] > 1 or count[name] and name in outside]
    graph.initializer.extend(tensors[name] for name in here)
    for branch, names in zip(branches, used):
        _place(branch, {name: tensors[name] for name in tensors if name in names.difference(here)})
