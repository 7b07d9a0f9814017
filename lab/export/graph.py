"""An ONNX graph whose values torch and numpy code can run on. See tracing.py."""

from contextlib import AbstractContextManager

import numpy as np

from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.export import decoder_blocks, lower_math, lower_shapes  # noqa: F401  each registers its functions
from mini_ee.lab.export.builder import Builder
from mini_ee.lab.export.tracing import ArrayValue, TensorValue, tracing


class Graph(Builder):
    """A Builder whose inputs and values are TensorValues and ArrayValues."""

    def tracing(self) -> AbstractContextManager:
        """In this context, torch functions of values and of the model's parameters write nodes of this graph."""
        return tracing(self)

    def tensor(self, name: str, *axes: str | int, dtype: type | None = None) -> TensorValue:
        """The value of this name as a tensor. Named axes are Dims. dtype: by default the graph's."""
        return TensorValue(self, axes, dtype or self.dtype, lambda: name)

    def inputs(self) -> "GraphInputs":
        """The inputs of a batch, for Backbone.embed and its context."""
        return GraphInputs(self)

    def array(self, name: str, *axes: str | int, dtype: type = np.float32) -> ArrayValue:
        """The same as an array."""
        return ArrayValue(self, axes, dtype, lambda: name)


class GraphInputs:
    """Inputs of a graph, (B, T) int64 each, or some rows of them. An input is declared at its first use."""

    def __init__(self, g: Graph, rows: TensorValue | None = None):
        self.g, self.rows = g, rows

    def __getattr__(self, name: str) -> TensorValue:
        if name not in Tensors._fields:
            raise AttributeError(f"{name} is no input of a graph")
        value = self.g.tensor(self.g.input(name, "batch", "tokens"), "batch", "tokens", dtype=np.int64)
        return value if self.rows is None else value[self.rows]

    def take(self, rows: TensorValue) -> "GraphInputs":
        return GraphInputs(self.g, rows if self.rows is None else self.rows[rows])
