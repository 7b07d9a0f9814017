"""Run the graphs of an exported folder of rows, and the encoder with which a rule retrieves. No torch here.

OrtModel      model.onnx, the graph that stops by itself: one call per batch
OrtSegments   one graph per segment, run by the loop, for rules that model.onnx does not contain

`opened` opens a graph: ONNX Runtime's Session, or that of another engine.
"""

from collections.abc import Callable, Container, Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.export.manifest import GRAPHS
from mini_ee.lab.data.files import MANIFEST
from mini_ee.lab.data.tokenizer import Inputs, Tokenizer
from mini_ee.lab.early_exit import run_segments
from mini_ee.lab.export.manifest import output_of
from mini_ee.lab.export.sessions import CARRIED, CPU, FOR_THE_NEXT, HIDDEN, Graph, GraphRule, Session
from mini_ee.lab.rules import Rule
from mini_ee.lab.segments import BatchResult, Segments, check_finite
from mini_ee.lab.token_tasks import TokenTask

Opened = Callable[[Path, str, int], Graph]
"""(path, provider, threads) -> the graph."""

READ = {True: np.array(True), False: np.array(False)}  # the input `read`


class OrtRows(Segments):
    """The base of both: sessions, and costs from the manifest."""

    def __init__(self, folder: Path, manifest: dict, graphs: list[str], provider: str, threads: int, opened: Opened):
        self.exits = tuple(manifest["exits"])
        self.sessions = [opened(folder / GRAPHS / f"{name}.onnx", provider, threads) for name in graphs]
        self.provider, self.engine = self.sessions[0].provider, self.sessions[0].engine
        self._manifest, self._output = manifest, output_of(manifest["unit"])
        self.has_policy = "exit_logit" in self.sessions[0].widths
        self.tokens_exit = "spent" in self.sessions[0].widths
        self.token_task = TokenTask.of(manifest)
        for name, session in zip(graphs, self.sessions):
            wanted, (width,) = manifest["num_labels"], session.widths[self._output]
            if width != wanted:
                line = f"{name}.onnx returns {width} {self._output}, expected {wanted} as in {MANIFEST}"
                raise ValueError(f"{folder}: {line}; export the run again")

    def layer_passes(self, k: int) -> int:
        return self._manifest["layer_passes"][k]

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        advance, read = self._manifest["flops"][k]
        tokens = inputs.input_ids.shape[1]
        return _polynomial(advance, tokens), _polynomial(read, tokens)


class AtExit(NamedTuple):
    """The state of an OrtModel whose exits are read one by one: the inputs and the remaining rows."""

    inputs: Inputs
    rows: np.ndarray  # (B,) int64

    def keep(self, rows: np.ndarray) -> "AtExit":
        return AtExit(self.inputs, self.rows[rows])


class OrtModel(OrtRows):
    """model.onnx. Inputs are data.tokens.Inputs. Reading exit k runs the graph from the embeddings to exit k."""

    def __init__(self, folder: Path, manifest: dict, provider: str = CPU, threads: int = 0, opened: Opened = Session):
        super().__init__(folder, manifest, ["model"], provider, threads, opened)
        self._session, self._settings = self.sessions[0], (folder, manifest, provider, threads, opened)
        self._graph_rule, self._by_segment = GraphRule(folder, manifest), None

    def run_batch(self, rule: Rule, inputs: Inputs) -> BatchResult:
        """One call. A rule that the graph does not contain runs on graphs by segment; ValueError if there are none."""
        plan = rule.plan(inputs)
        feeds = self._graph_rule.feeds(rule, plan)
        if feeds is None:
            segments = self.by_segment(rule)
            batch = run_segments(segments, rule, inputs)
            check_finite(batch.logits)
            return batch._replace(segments=segments)
        outputs = self._run(inputs, feeds)
        return BatchResult(
            check_finite(outputs[self._output]),
            *self._graph_rule.exits_of(rule, plan, outputs["layers"]),
            outputs.get("spent"),
        )

    def by_segment(self, rule: Rule) -> "OrtSegments":
        """The graphs by segment, for a rule that model.onnx does not contain. Raises ValueError if there are none."""
        folder, manifest, *settings = self._settings
        if f"segment_{self.exits[0]}" not in manifest["graphs"]:
            raise self._graph_rule.unsupported(rule)
        self._by_segment = self._by_segment or OrtSegments(folder, manifest, *settings)
        return self._by_segment

    def start(self, inputs: Inputs) -> AtExit:
        return AtExit(inputs, np.arange(len(inputs)))

    def advance(self, k: int, state: AtExit) -> AtExit:
        return state

    def read(self, k: int, state: AtExit) -> np.ndarray:
        return self._at(k, state)[self._output]

    def exit_logit(self, k: int, state: AtExit) -> np.ndarray:
        return self._at(k, state)["exit_logit"] if self.has_policy else super().exit_logit(k, state)

    def token_cost(self, k: int, state: AtExit) -> np.ndarray:
        return self._at(k, state)["spent"]

    def _at(self, k: int, state: AtExit) -> dict[str, np.ndarray]:
        return self._run(state.inputs.take(state.rows), {"exit_at": np.array([k])})

    def counted(self, state: AtExit) -> np.ndarray:
        inputs = state.inputs.take(state.rows)
        return self.token_task.counted(inputs.input_ids, inputs.attention_mask)

    def state_flops(self, k: int, needs: str) -> float | None:
        return None if self.token_task else self._manifest["state_flops"][k]  # a rule about tokens reads the logits

    def whole(self) -> "WholeModel":
        """The model without early exits."""
        return WholeModel(self, *self._settings)

    def _run(self, inputs: Inputs, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._session.run(self._session.of_rows(inputs) | feeds)


class WholeModel(Segments):
    """The model without early exits, with which a speed-up is compared.

    It is model.onnx, run to its last exit without the heads below; or whole.onnx, if tokens exit within model.onnx.
    """

    def __init__(self, model: OrtModel, folder: Path, manifest: dict, provider: str, threads: int, opened: Opened):
        self.exits, self._model, self._manifest, self.engine = model.exits[-1:], model, manifest, model.engine
        path = folder / GRAPHS / "whole.onnx"
        self._session = opened(path, provider, threads) if "whole" in manifest["graphs"] else None

    def run_batch(self, rule: Rule, inputs: Inputs) -> BatchResult:
        if self._session is not None:
            logits = check_finite(self._session.run(self._session.of_rows(inputs))["logits"])
        else:
            logits = self._model.run_batch(rule, inputs).logits
        return BatchResult(logits, np.zeros(len(logits), np.int64), None)

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        advance, read = self._manifest["whole_flops"]
        tokens = inputs.input_ids.shape[1]
        return _polynomial(advance, tokens), _polynomial(read, tokens)


class OrtState(NamedTuple):
    """The rows still in the model."""

    ids: dict[str, np.ndarray]  # the inputs of the graphs for these rows, (B, T) int64 each
    outputs: dict  # of the last graph, for B' rows: hidden_out (B', T, D), logits (B', C)
    rows: np.ndarray  # (B,) int64: those of the B' that continue
    every: np.ndarray  # (B,) int64: 0, 1, 2, ..., all rows of the next graph's outputs

    def keep(self, rows: np.ndarray) -> "OrtState":
        ids = {name: value[rows] for name, value in self.ids.items()}
        return self._replace(rows=self.rows[rows], ids=ids, every=self.every[: len(rows)])


class OrtSegments(OrtRows):
    """segment_*.onnx. Inputs are data.tokens.Inputs."""

    heads: Container[int] | None = None  # those that may be evaluated; None: any

    def __init__(self, folder: Path, manifest: dict, provider: str = CPU, threads: int = 0, opened: Opened = Session):
        graphs = [f"segment_{layer}" for layer in manifest["exits"]]
        super().__init__(folder, manifest | manifest["by_segment"], graphs, provider, threads, opened)

    def start(self, inputs: Inputs) -> OrtState:
        every = np.arange(len(inputs))
        ids = {name: value for session in self.sessions for name, value in session.of_rows(inputs).items()}
        return OrtState(ids, {}, every, every)

    def can_join(self) -> bool:
        """Whether rows of several batches can be joined to one: not if hidden states have an axis of LoRA streams."""
        graphs = self._manifest["graphs"]
        taken = [graphs[f"segment_{layer}"]["inputs"].get("hidden", {"axes": "BTD"}) for layer in self.exits]
        return all(len(hidden["axes"]) == 3 for hidden in taken)

    def joined(self, inputs: Inputs, parts: Sequence[tuple[OrtState, int]]) -> OrtState:
        """One state from rows of several states, all after the same exit.

        inputs: of these rows, padded together. parts: for each row its state and its index there.
        """
        first = parts[0][0]
        if all(state is first for state, _ in parts):
            return first.keep(np.array([row for _, row in parts]))
        state, outputs, width = self.start(inputs), {}, next(iter(first.ids.values())).shape[1]
        for name in [name for name in FOR_THE_NEXT if name in first.outputs]:
            whole = {id(some): some.outputs[name] for some, _ in parts}
            whole = {key: some if isinstance(some, np.ndarray) else some.numpy() for key, some in whole.items()}
            rows = [whole[id(some)][some.rows[row]] for some, row in parts]
            outputs[name] = _padded(rows, inputs, len(rows[0]) - width) if name == HIDDEN else np.stack(rows)
        return state._replace(outputs=outputs)

    def select_heads(self, heads: Container[int]) -> "OrtSegments":
        some = copy(self)
        some.heads = heads
        return some

    def advance(self, k: int, state: OrtState) -> OrtState:
        session = self.sessions[k]
        inputs = {name: state.ids[name] for name in session.ids}
        if "hidden" in session.inputs:
            inputs |= {"hidden": state.outputs[HIDDEN], "rows": state.rows}
        if "carried" in session.inputs:
            inputs["carried"] = state.outputs[CARRIED]
        read = self.heads is None or k in self.heads
        if "read" in session.inputs:
            inputs["read"] = READ[read]
        # _replace takes 10 us more
        return OrtState(state.ids, session.run(inputs, read), state.every, state.every)

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        """A graph that evaluates its head evaluates the policy too."""
        advance, read = super().flops(k, inputs)
        return advance, read + self._manifest["state_flops"][k]

    def read(self, k: int, state: OrtState) -> np.ndarray:
        return self._of(self._output, state)

    def exit_logit(self, k: int, state: OrtState) -> np.ndarray:
        return self._of("exit_logit", state) if self.has_policy else super().exit_logit(k, state)

    def token_cost(self, k: int, state: OrtState) -> np.ndarray:
        return self._of("spent", state)

    def _of(self, output: str, state: OrtState) -> np.ndarray:
        values = state.outputs[output]
        return values if len(state.rows) == len(values) else values[state.rows]


def _padded(rows: list[np.ndarray], inputs: Inputs, before: int) -> np.ndarray:
    """States (T', D) of each row -> (B, T, D), with zeros after its tokens. before: number of states before them."""
    batch, longest = inputs.attention_mask.shape
    out = np.zeros((batch, before + longest, rows[0].shape[1]), rows[0].dtype)
    for at, (row, tokens) in enumerate(zip(rows, (before + inputs.attention_mask.sum(axis=1)).tolist())):
        out[at, :tokens] = row[:tokens]
    return out


def _polynomial(coefficients: list[float], tokens: int) -> float:
    """FLOPs of one row with this number of tokens."""
    return sum(coefficient * tokens**power for power, coefficient in enumerate(coefficients))


class OrtEncoder:
    """encoder.onnx: the embeddings with which a rule retrieves. `name` is that of the exported encoder."""

    def __init__(self, folder: Path, manifest: dict, provider: str = CPU, threads: int = 0):
        self.name, self._config = manifest["encoder"]["name"], manifest["encoder"]
        self._session = Session(folder / GRAPHS / "encoder.onnx", provider, threads)
        encoder = folder / "encoder"  # its tokenizer, if it is not the model's
        self._tokenizer = (
            Tokenizer.from_file(encoder / "tokenizer.json", self._config["max_length"]) if encoder.is_dir() else None
        )

    def __call__(self, inputs: Inputs) -> np.ndarray:
        inputs = self._encoded(inputs)
        return self._session.run(self._session.of_rows(inputs))["embedding"]

    def flops(self, inputs: Inputs) -> float:
        return _polynomial(self._config["flops"], self._encoded(inputs).input_ids.shape[1])

    def _encoded(self, inputs: Inputs) -> Inputs:
        return inputs if self._tokenizer is None else self._tokenizer.encode(inputs.texts).batch(slice(None))
