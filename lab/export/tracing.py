"""Run torch and numpy code on values of an ONNX graph, so that no computation is written twice.

A TensorValue stands in for a tensor, an ArrayValue for an array. torch passes each function that it calls on a
TensorValue to `__torch_function__`; numpy passes its functions to `__array_ufunc__` and `__array_function__`. LOWERINGS
maps a function to the code that writes its nodes (a lowering). So a layer, head, policy or rule runs once on values,
and the nodes of the same computation are written to the graph.

    graph = Graph(parameters_of(model))
    with graph.tracing():
        hidden = model.embed(graph.inputs())       ordinary torch code of the model

Values differ from tensors in three ways:
1. A size may be known only when the graph runs: then it is a Dim. A Dim can be compared and used in arithmetic, but not
   as an int.
2. Values may be flat. Gemm, which adds the bias in the same node, takes two axes only. So a linear map on (B, T, D)
   writes Reshape to (B T, D) and Gemm. Its result stays (B T, D) through additions, activations, norms and further
   linear maps. The Reshape back to (B, T, D) is written only when an operation needs the three axes.
3. A condition is known only when the graph runs. `torch.is_nonzero` returns False, so that the general case is
   traced; `bool()` raises NotTraceable.

A function without a lowering raises NotTraceable, whose one line names the file and the line of the call.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from onnx import helper
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mini_ee.lab.export.builder import Builder
from mini_ee.lab.export.replaced import replaced

LOWERINGS: dict[Callable, Callable] = {}
"""A function of torch or numpy -> its lowering, which is called with the same arguments and returns a Value."""

TORCH_DTYPES = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}


class Dim:
    """A size that is known only when the graph runs.

    It is the size of an axis of `source`, or the number in `source` (1,) if axis is None. Dims of the same name are
    equal. In arithmetic a Dim becomes a value.
    """

    def __init__(self, name: str, source: "Value", axis: int | None):
        self.name, self.source, self.axis = name, source, axis

    def read(self) -> str:
        """The name of the size as a value (1,) int64."""
        if self.axis is None:
            return self.source.name
        return self.source.g.op("Shape", self.source.name, start=self.axis, end=self.axis + 1)

    def value(self) -> "Value":
        """The size as a value () int64."""
        return self.source.like(self.source.g.op("Squeeze", self.read()), (), np.int64)

    def __eq__(self, other) -> bool:
        return isinstance(other, Dim) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __gt__(self, other) -> bool:
        return False  # the caller of the graph checks the largest size; small sizes are no case of their own

    __le__ = __gt__

    def __index__(self, *_) -> int:
        raise NotTraceable(f"the size {self.name} is known only when the graph runs")

    __int__ = __bool__ = __lt__ = __floordiv__ = __truediv__ = __mod__ = __index__

    def __mul__(self, other):
        return self.value() * other

    def __add__(self, other):
        return self.value() + other

    def __sub__(self, other):
        return self.value() - other

    __rmul__, __radd__ = __mul__, __add__

    def __repr__(self) -> str:
        return self.name


Size = int | Dim


def lowers(*functions: Callable) -> Callable:
    """Decorator that registers the lowering of these functions."""

    def register(lowering: Callable) -> Callable:
        LOWERINGS.update(dict.fromkeys(functions, lowering))
        return lowering

    return register


LOWERS = tuple(
    f"{__package__}.{name}" for name in ("lower_shapes", "lower_math", "replaced")
)  # the modules with lowerings


class NotTraceable(ValueError):
    """Code that cannot be exported. The message names the file and the line."""

    def __init__(self, what: str, frame: FrameType | None = None):
        frame = frame or sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].startswith((__package__ + ".tracing", *LOWERS, "torch")):
            frame = frame.f_back
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        super().__init__(f"{place}: {what}: it cannot be exported to ONNX; serve the run with --engine torch")


def _lowered(function: Callable, args: tuple, kwargs: dict | None):
    if function not in LOWERINGS:
        name = getattr(function, "__qualname__", getattr(function, "__name__", str(function)))
        raise NotTraceable(f"{name} has no lowering to ONNX")
    return LOWERINGS[function](*args, **(kwargs or {}))


class Value:
    """A value of the graph. Subclasses have the methods of tensors or of arrays.

    make(): writes the value with all its axes, and returns its name. flat(): the same as (N, last axis), if the value
    was computed so. Both run again at each use, because a name exists only in the branch where its node was written and
    in the branches within that one. The Builder writes equal nodes of a branch once.
    """

    __array_priority__ = 1000
    root: "Value | None" = None  # the value that this is a reshape of
    permuted: "tuple[Value, list[int]] | None" = None  # the value that this is a permutation of, and the order
    compared: "list[Value] | None" = None  # if a list: comparisons append what they compare this value with

    def __init__(self, g: Builder, shape: Sequence[Size], kind: type, make: Callable[[], str] | None, flat=None):
        """An axis that is a string becomes a Dim of that name: the size of this axis."""
        dims = (Dim(size, self, axis) if isinstance(size, str) else size for axis, size in enumerate(shape))
        self.g, self.shape, self.kind, self._make, self._flat = g, tuple(dims), np.dtype(kind), make, flat

    @property
    def name(self) -> str:
        return self._make() if self._make else self.g.op("Reshape", self._flat(), sizes_value(self.g, self.shape))

    @property
    def flat(self) -> str:
        """The name of the value as (N, last axis): one Reshape if it was not computed so."""
        if self._flat:
            return self._flat()
        return self.name if self.ndim == 2 else self.g.op("Reshape", self.name, self.g.integers(-1, self.shape[-1]))

    @property
    def is_flat(self) -> bool:
        """Whether it was computed as (N, last axis), but has other axes."""
        return self._flat is not None and self.ndim != 2

    def like(self, name: str, shape: Sequence[Size] | None = None, kind: type | None = None) -> "Value":
        """A value of the same class, by the name of a node's output."""
        shape = self.shape if shape is None else shape
        return type(self)(self.g, shape, self.kind if kind is None else kind, lambda: name)

    def flat_like(self, name: str, shape: Sequence[Size], kind: type | None = None) -> "Value":
        """The same, if the output of the node is (N, last axis)."""
        if len(shape) == 2:
            return self.like(name, shape, kind)
        return type(self)(self.g, shape, self.kind if kind is None else kind, None, lambda: name)

    def op(self, node: str, *inputs, shape=None, kind=None, **attributes) -> "Value":
        """One node with this value as its first input."""
        names = [name_of(operand, self) for operand in inputs]
        return self.like(self.g.op(node, self.name, *names, **attributes), shape, kind)

    def elementwise(self, node: str, *inputs, kind=None, **attributes) -> "Value":
        """One node that works element by element or along the last axis: a flat value stays flat."""
        if not self.is_flat:
            return self.op(node, *inputs, kind=kind, **attributes)
        names = [name_of(operand, self) for operand in inputs]
        return self.flat_like(self.g.op(node, self.flat, *names, **attributes), self.shape, kind)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        if isinstance(self.shape[0], Dim):
            raise NotTraceable(f"the size {self.shape[0]} is known only when the graph runs")
        return self.shape[0]

    def __bool__(self) -> bool:
        raise NotTraceable("whether a value is true is known only when the graph runs")

    def __iter__(self) -> Iterator["Value"]:
        return iter(LOWERINGS[torch.unbind](self, 0))

    def __getitem__(self, key) -> "Value":
        return LOWERINGS[Tensor.__getitem__](self, key)

    def __invert__(self) -> "Value":
        return self.elementwise("Not")

    def __neg__(self) -> "Value":
        return self.elementwise("Neg")

    def __abs__(self) -> "Value":
        return self.elementwise("Abs")

    __hash__ = object.__hash__


class TensorValue(Value):
    """A value with the methods of a tensor."""

    device = torch.device("cpu")
    requires_grad = False
    parameter: torch.nn.Parameter | None = None  # the parameter that this is, unchanged
    rows: tuple[torch.nn.Parameter, int, int] | None = None  # the parameter of which this is the rows from .. to

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _lowered(function, args, kwargs)

    def __getattr__(self, name: str):
        """The lowering of a method of tensors."""
        if not callable(method := getattr(Tensor, name, None)):
            raise AttributeError(f"a value of a graph has no {name}")
        return lambda *args, **kwargs: _lowered(method, (self, *args), kwargs)

    @property
    def mT(self) -> "TensorValue":
        return LOWERINGS[torch.transpose](self, -2, -1)

    @property
    def T(self) -> "TensorValue":
        return LOWERINGS[torch.permute](self, *reversed(range(self.ndim)))

    @property
    def dtype(self) -> torch.dtype:
        return next(theirs for theirs, ours in TORCH_DTYPES.items() if np.dtype(ours) == self.kind)

    def numpy(self, force: bool = False) -> "ArrayValue":
        return ArrayValue(self.g, self.shape, self.kind, self._make, self._flat)

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def is_floating_point(self) -> bool:
        return self.kind.kind == "f"

    def detach(self) -> "TensorValue":
        return self

    contiguous = cpu = detach

    def to(self, *places, dtype: torch.dtype | None = None) -> "TensorValue":
        """Cast to another dtype; devices have no meaning in a graph."""
        for place in (*places, dtype):
            if isinstance(place, torch.dtype):
                return cast(self, TORCH_DTYPES[place])
            if isinstance(place, Tensor | TensorValue):
                return cast(self, TORCH_DTYPES[place.dtype])
        return self

    def type_as(self, other) -> "TensorValue":
        return self.to(other)


class ArrayValue(Value):
    """A value with the methods of an array."""

    def tensor(self) -> TensorValue:
        return TensorValue(self.g, self.shape, self.kind, self._make, self._flat)

    def __array_ufunc__(self, ufunc, method, *args, out=None, **kwargs):
        if method == "reduce":
            return _lowered({np.add: np.sum, np.maximum: np.max, np.minimum: np.min}[ufunc], args, kwargs)
        return _lowered(ufunc, args, kwargs)

    def __array_function__(self, function, types, args, kwargs):
        return _lowered(function, args, kwargs)

    @property
    def dtype(self) -> np.dtype:
        return self.kind

    @property
    def itemsize(self) -> int:
        return self.kind.itemsize

    @property
    def T(self) -> "ArrayValue":
        return LOWERINGS[torch.permute](self, *reversed(range(self.ndim)))

    def astype(self, dtype) -> "ArrayValue":
        return cast(self, dtype)

    def __getattr__(self, name: str):
        """The lowering of a method of arrays."""
        if not hasattr(np.ndarray, name) or not callable(function := getattr(np, name, None)):
            raise AttributeError(f"a value of a graph has no {name}")
        return lambda *args, **kwargs: _lowered(function, (self, *args), kwargs)


# ---- The trace ----
class _Parameters(TorchFunctionMode):
    """Traces functions of the model's parameters alone, such as 1 + weight, which no TensorValue sees."""

    def __init__(self, g: Builder):
        self.g = g

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(leaf, TensorValue | Dim) for leaf in _leaves((args, kwargs))):
            return _lowered(function, args, kwargs)
        known = any(isinstance(leaf, torch.nn.Parameter) and self.g.knows(leaf) for leaf in _leaves(args))
        if not known or function not in LOWERINGS:  # such as its shape or its device
            return function(*args, **kwargs)
        return _lowered(function, lifted(self.g, args), kwargs)


def _leaves(tree) -> Iterator:
    if isinstance(tree, list | tuple):
        for branch in tree:
            yield from _leaves(branch)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


def lifted(g: Builder, argument):
    """A parameter of the model as a value of the graph, also within lists; anything else unchanged."""
    if isinstance(argument, list | tuple):
        return type(argument)(lifted(g, part) for part in argument)
    if isinstance(argument, torch.nn.Parameter) and g.knows(argument):
        value = TensorValue(g, argument.shape, g.dtype, lambda: g.parameter(argument))
        value.parameter = argument
        return value
    return argument


@contextmanager
def tracing(g: Builder) -> Iterator[None]:
    """In this context, torch functions of values and of the model's parameters write nodes of the graph."""
    try:
        with torch.no_grad(), _Parameters(g), replaced():
            yield
    except TypeError as error:  # from a function that torch does not pass on, such as torch.zeros of a Dim
        if "Dim" not in str(error):
            raise
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        what = f"{str(error).partition('(')[0]} takes no size that is known only when the graph runs"
        raise NotTraceable(what, frame) from None


def name_of(x, like: Value) -> str:
    """The name of the other operand of a value: a value, parameter, tensor, array or number."""
    if isinstance(x, Value):
        return x.name
    if isinstance(x, str):
        return x
    if isinstance(x, torch.nn.Parameter) and like.g.knows(x):
        return like.g.parameter(x)
    array = x.numpy(force=True) if isinstance(x, Tensor) else np.asarray(x)
    if array.dtype.kind == "f":  # a float constant takes the precision of the value
        array = array.astype(like.kind if like.kind.kind == "f" else np.float32)
    elif not isinstance(x, Tensor | np.ndarray | np.generic):
        array = array.astype(like.kind)  # so does a number of Python
    return like.g.constant_of(array)


def sizes_value(g: Builder, shape: Sequence[Size]) -> str:
    """A shape as a value (len(shape),) int64. One Shape node reads neighbouring axes of a value."""
    if all(isinstance(size, int) for size in shape):
        return g.integers(*shape)
    parts: list = []  # names, and neighbouring axes of one value: [source, start, end]
    for size in shape:
        if isinstance(size, int):
            parts.append(g.integers(size))
        elif size.axis is None:
            parts.append(size.read())
        elif parts and isinstance(parts[-1], list) and parts[-1][0] is size.source and parts[-1][2] == size.axis:
            parts[-1][2] += 1
        else:
            parts.append([size.source, size.axis, size.axis + 1])
    names = [
        part if isinstance(part, str) else g.op("Shape", part[0].name, start=part[1], end=part[2]) for part in parts
    ]
    return names[0] if len(names) == 1 else g.op("Concat", *names, axis=0)


def cast(x: Value, kind: type) -> Value:
    """Cast to another type."""
    kind = np.dtype(kind)
    return x if kind == x.kind else x.elementwise("Cast", to=helper.np_dtype_to_tensor_dtype(kind), kind=kind)


def without(shape: Sequence[Size], axis: int) -> list[Size]:
    """A shape without one axis."""
    axis %= len(shape)
    return [*shape[:axis], *shape[axis + 1 :]]


def broadcast(*shapes: Sequence[Size]) -> list[Size]:
    """The shape to which values of these shapes broadcast."""
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + tuple(shape) for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*padded)]


def shape_of(x) -> tuple[Size, ...]:
    """The shape of a value, tensor or array; () for a number."""
    return tuple(getattr(x, "shape", ()))
