"""The segments of an exported folder of rows, and the encoder that a rule retrieves with. No torch here."""

from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.data.tokens import Inputs, Tokenizer
from mini_ee.early_exit import Reading, Segments
from mini_ee.export.manifest import MANIFEST
from mini_ee.export.sessions import CPU, HIDDEN, Session

READ = {True: np.array(True), False: np.array(False)}  # the input `read`


class OrtState(NamedTuple):
    """The rows still in the model."""

    inputs: Inputs
    where: np.ndarray  # (B,) int64: where they stand in the inputs
    said: dict  # what the last graph said of B' rows: hidden_out (B', T, D), logits (B', C), max_probability (B',)
    rows: np.ndarray  # (B,) int64: those of the B' that go on
    around: dict[str, np.ndarray]  # what every graph takes: attention_mask (B, T), read_at (B, 1) of prompts
    every: np.ndarray  # (B,) int64: 0, 1, 2, ..., which are all rows of what the next graph says
    heads: Container[int] | None = None  # those that will be read; None: any

    def keep(self, rows: np.ndarray) -> "OrtState":
        around = {name: value[rows] for name, value in self.around.items()}
        return self._replace(where=self.where[rows], rows=self.rows[rows], around=around, every=self.every[: len(rows)])


class OrtSegments(Segments):
    """The segments of an exported folder. Inputs are data.tokens.Inputs."""

    engine = "onnxruntime"

    def __init__(self, folder: Path, manifest: dict, provider: str = CPU, threads: int = 0):
        self.exits = tuple(manifest["exits"])
        self.sessions = [Session(folder / f"segment_{layer}.onnx", provider, threads) for layer in self.exits]
        self.provider = self.sessions[0].provider
        self._manifest = manifest
        for layer, session in zip(self.exits, self.sessions):
            wanted, (found,) = manifest["num_labels"], session.widths["logits"]
            if found != wanted:
                name = f"segment_{layer}.onnx"
                says = f"{name} gives {found} logits, {MANIFEST} says {wanted}"
                raise ValueError(f"{folder}: {says}; export the run again")

    def start(self, inputs: Inputs) -> OrtState:
        every = np.arange(len(inputs))
        return OrtState(inputs, every, {}, every, _around(inputs, self._manifest), every)

    def will_read(self, heads: Container[int], state: OrtState) -> OrtState:
        return state._replace(heads=heads)

    def advance(self, k: int, state: OrtState) -> OrtState:
        session = self.sessions[k]
        if not session.begins:
            inputs = {"hidden": state.said[HIDDEN], "rows": state.rows} | state.around
        elif len(state.where) == len(state.inputs):
            inputs = session.ids(state.inputs) | state.around
        else:  # a stream that starts anew, with the rows that are left
            ids = session.ids(state.inputs)
            inputs = {name: value[state.where] for name, value in ids.items()} | state.around
        read = state.heads is None or k in state.heads
        if "read" in session.inputs:
            inputs["read"] = READ[read]
        said = session.run(inputs, read)
        # _replace takes 10 us more
        return OrtState(state.inputs, state.where, said, state.every, state.around, state.every, state.heads)

    def read(self, k: int, state: OrtState) -> Reading:
        reading = _reading(state.said)
        if len(state.rows) == len(reading.logits):
            return reading
        return Reading(*(each if each is None else each[state.rows] for each in reading))

    def layer_passes(self, k: int) -> int:
        return self._manifest["layer_passes"][k]

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        advance, read = self._manifest["flops"][k]
        tokens = inputs.input_ids.shape[1]
        return _polynomial(advance, tokens), _polynomial(read, tokens)


class WholeGraph(Segments):
    """The same model in one graph, without early exits: what a speed-up is measured against."""

    engine = "onnxruntime"

    def __init__(self, folder: Path, manifest: dict, provider: str = CPU, threads: int = 0):
        self.exits = (manifest["exits"][-1],)
        self._session = Session(folder / "full.onnx", provider, threads)
        self._manifest = manifest

    def start(self, inputs: Inputs) -> Inputs:
        return inputs

    def advance(self, k: int, state: Inputs) -> Reading:
        return _reading(self._session.run(self._session.ids(state) | _around(state, self._manifest)))

    def read(self, k: int, state: Reading) -> Reading:
        return state

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        advance, read = self._manifest["whole_flops"]
        tokens = inputs.input_ids.shape[1]
        return _polynomial(advance, tokens), _polynomial(read, tokens)


def _around(inputs: Inputs, manifest: dict) -> dict[str, np.ndarray]:
    around = {"attention_mask": inputs.attention_mask}
    if manifest["pool"] == "mask":
        around["read_at"] = (inputs.input_ids == manifest["mask_token_id"]).argmax(axis=1)[:, None]
    elif manifest["pool"] == "last":
        last = inputs.attention_mask[:, ::-1].argmax(axis=1)  # counted from the end
        around["read_at"] = inputs.attention_mask.shape[1] - 1 - last[:, None]
    return around


def _reading(said: dict[str, np.ndarray]) -> Reading:
    """Logits; where there are classes the largest probability; where there is a policy what it says."""
    return Reading(said["logits"], said.get("exit_logit"), said.get("max_probability"))


def _polynomial(coefficients: list[float], tokens: int) -> float:
    """Operations on one row of so many tokens."""
    return sum(coefficient * tokens**power for power, coefficient in enumerate(coefficients))


class OrtEncoder:
    """encoder.onnx: the embeddings that a rule retrieves with, by the name of the encoder that it was exported from."""

    def __init__(self, folder: Path, manifest: dict, provider: str = CPU, threads: int = 0):
        self.name, self._config = manifest["encoder"]["name"], manifest["encoder"]
        self._session = Session(folder / "encoder.onnx", provider, threads)
        own = folder / "encoder"  # its tokenizer, where it is not the model's
        self._tokenizer = Tokenizer.from_folder(own, self._config["max_length"]) if own.is_dir() else None

    def __call__(self, inputs: Inputs) -> np.ndarray:
        inputs = self._encoded(inputs)
        return self._session.run(self._session.ids(inputs) | {"attention_mask": inputs.attention_mask})["embedding"]

    def flops(self, inputs: Inputs) -> float:
        return _polynomial(self._config["flops"], self._encoded(inputs).input_ids.shape[1])

    def _encoded(self, inputs: Inputs) -> Inputs:
        return inputs if self._tokenizer is None else self._tokenizer.encode(inputs.texts).batch(slice(None))
