"""A graph that the project's own torch and numpy code is run on. See tracing.py."""

from contextlib import AbstractContextManager

import numpy as np

from mini_ee.backbones.backbone import Tensors
from mini_ee.export import lower_math, lower_shapes  # noqa: F401  each registers its lowerings
from mini_ee.export.builder import Builder
from mini_ee.export.tracing import ArrayValue, TensorValue, tracing


class Graph(Builder):
    """A Builder that hands out values for torch code to run on."""

    def tracing(self) -> AbstractContextManager:
        """Within, torch functions of values and of the model's parameters write nodes of this graph."""
        return tracing(self)

    def tensor(self, name: str, *axes: str | int, dtype: type | None = None) -> TensorValue:
        """A value by its name as a tensor; of the graph's dtype unless it says another. Named axes are Dims."""
        return TensorValue(self, axes, dtype or self.dtype, lambda: name)

    def inputs(self) -> "GraphInputs":
        """The inputs of a batch, as embed and context take them."""
        return GraphInputs(self)

    def array(self, name: str, *axes: str | int, dtype: type = np.float32) -> ArrayValue:
        """The same as an array."""
        return ArrayValue(self, axes, dtype, lambda: name)


class GraphInputs:
    """Inputs of a graph, (B, T) int64 each, declared when they are asked for; or those rows of them."""

    def __init__(self, g: Graph, rows: TensorValue | None = None):
        self.g, self.rows = g, rows

    def __getattr__(self, name: str) -> TensorValue:
        if name not in Tensors._fields:
            raise AttributeError(f"{name} is no input of a graph")
        value = self.g.tensor(self.g.input(name, "batch", "tokens"), "batch", "tokens", dtype=np.int64)
        return value if self.rows is None else value[self.rows]

    def take(self, rows: TensorValue) -> "GraphInputs":
        return GraphInputs(self.g, rows if self.rows is None else self.rows[rows])
