"""Run an exported folder of rows in OpenVINO on the CPU: Runtime(folder, segments=open_segments(folder)).

OpenVINO makes constants of inputs that have a default. Two of them become inputs again, in memory; a `patience` stays
the export's own, because the branches of model.onnx share its constant. No torch here.
"""

import sys
import threading
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13

from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.manifest import blaming_manifest, read_manifest
from mini_ee.lab.export.row_segments import OrtModel
from mini_ee.lab.export.sessions import Graph
from mini_ee.lab.row_thresholds import THRESHOLD

SIZES = {"exit_at": [-1], THRESHOLD: [-1, -1]}  # of the inputs that can change, -1 for any
OWN = "patience"  # the input that cannot


class OpenVinoModel(OrtModel):
    """model.onnx, and graphs by segment, in OpenVINO. A copy in another process opens the folder again."""

    def __init__(self, folder: Path, precision: str, threads: int):
        self._arguments = folder, precision, threads
        manifest = read_manifest(folder)
        if kind := _other_kind(manifest):
            expected = f"{folder}: expected a classifier or a sentence encoder for --engine openvino, found {kind}"
            raise WrongArguments(f"{expected}; leave out --engine")
        with blaming_manifest(folder):
            super().__init__(folder, manifest, "CPU", threads, partial(OpenVinoGraph, precision=precision))

    def __reduce__(self) -> tuple:
        return open_segments, self._arguments


def open_segments(folder: str | Path, precision: str = "f32", threads: int = 0) -> OpenVinoModel:
    """The engine, for the argument `segments` of Runtime. precision: f32 or bf16. threads: of a batch (0: all cores).

    Raises WrongArguments for a kind of export that OpenVINO does not run, and what read_manifest raises.
    """
    if precision == "bf16" and "BF16" not in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        print("OpenVINO emulates bf16, which this processor does not have: f32 is faster", file=sys.stderr)
    return OpenVinoModel(Path(folder), precision, threads)


def _other_kind(manifest: dict) -> str | None:
    """What an export is, if OpenVINO does not run it as ONNX Runtime does."""
    if manifest["unit"] == "tokens":
        return "a decoder"
    if "whole" in manifest["graphs"]:
        return "tokens that exit within a row, which OpenVINO orders in another way"
    return None


class OpenVinoGraph(Graph):
    """One graph. Raises ValueError if OpenVINO cannot load it."""

    engine = "openvino"

    def __init__(self, path: Path, provider: str, threads: int, precision: str):
        self._path, self.provider = path, provider
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # several processes would be pinned to the same cores
        }
        try:
            model = _core().read_model(path)
            self._defaults, self._fixed = _freed(model), _constants(model, {OWN})
            threads_hint = {"INFERENCE_NUM_THREADS": threads} if threads else {}
            self._compiled = _core().compile_model(model, provider, settings | threads_hint)
        except RuntimeError as error:
            raise ValueError(f"{path}: OpenVINO cannot load this graph: {_reason(error)}; leave out --engine") from None
        ports = [(port, list(port.get_partial_shape())[-1:]) for port in self._compiled.outputs]
        widths = {name: list(map(_size, axes)) for port, axes in ports for name in port.get_names()}  # often several
        names = {graph_input.get_any_name() for graph_input in self._compiled.inputs}
        super().__init__(names - self._defaults.keys(), widths)
        self._requests = threading.local()  # a request has buffers of its own

    def run(self, inputs: dict, read: bool = True) -> dict:
        given = self._defaults | inputs
        for name in self._defaults:
            given[name] = given[name].reshape((1,) * (len(SIZES[name]) - given[name].ndim) + given[name].shape)
        for name in self._fixed.keys() & given.keys():
            if not np.array_equal(value := given.pop(name), self._fixed[name]):
                expected = f"expected {name} {self._fixed[name].item()}, which OpenVINO keeps, found {value.item()}"
                raise ValueError(f"{self._path}: {expected}; leave out --engine")
        try:
            if not hasattr(self._requests, "request"):
                self._requests.request = self._compiled.create_infer_request()
            results = self._requests.request.infer(given, share_inputs=True)
        except RuntimeError as error:
            raise ValueError(f"{self._path}: OpenVINO cannot run this batch: {_reason(error)}") from None
        return {name: results[name] for name in (self._outputs if read else self._unread)}


@cache
def _core() -> ov.Core:
    return ov.Core()


def _constants(model: ov.Model, names: set[str]) -> dict[str, np.ndarray]:
    """The values of constants with these names."""
    return {name: constant.data.copy() for name, constant in _named(model, names)}


def _named(model: ov.Model, names: set[str]) -> list[tuple[str, Any]]:
    constants = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    return [(name, node) for node in constants for name in names & node.output(0).get_names()]


def _freed(model: ov.Model) -> dict[str, np.ndarray]:
    """Makes inputs of the constants that SIZES names, and returns their values, which are the defaults."""
    defaults = _constants(model, set(SIZES))
    for name, constant in _named(model, set(SIZES)):
        port = constant.output(0)
        parameter = opset13.parameter(ov.PartialShape(SIZES[name]), port.get_element_type(), name=name)
        port.replace(parameter.output(0))
        parameter.output(0).set_names({name})
        model.add_parameters([parameter])
    model.validate_nodes_and_infer_types()
    return defaults


def _size(axis: ov.Dimension) -> int | str:
    """As ONNX Runtime has it: a number, or a name if it is not known."""
    return axis.get_length() if axis.is_static else "unknown"


def _reason(error: RuntimeError) -> str:
    """The last line of what OpenVINO prints, without the places in its source."""
    return [line for line in map(str.strip, str(error).splitlines()) if line][-1]
