"""Run an exported folder of tokens in ONNX Runtime, for the loop of exits/decoding.py. No torch here.

OrtTokenModel      model.onnx, the graph that stops by itself: one call per token; layers that a token did not run get
                   keys and values from a copy of its state
OrtTokenSegments   one graph per segment, to recompute them instead, and for rules that model.onnx does not contain
Prompts            memory.onnx, the encoder of an encoder-decoder, which reads the prompts

The caches stay in the same memory of the device while a batch runs. For each graph a cache is input and output in one
place, and only the slots of the new tokens are written. Hidden states go through the host between graphs, D numbers per
token: the loop keeps the states of tokens whose upper layers are still missing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from mini_ee.export.manifest import GRAPHS
from mini_ee.lab.exits.decoding import CachedSegments, DecoderSegments, Tokens, TokenState, Weights, short_flops
from mini_ee.lab.export.sessions import CPU, HIDDEN, GraphRule, Session
from mini_ee.lab.rules import Rule
from mini_ee.lab.segments import BatchResult

OF_STATES = ("exit_logit", "short_list")  # outputs of model.onnx, if its rule reads them in place of logits


class Prompts:
    """memory.onnx, and the token with which the decoder starts."""

    def __init__(self, folder: Path, manifest: dict, provider: str = CPU, threads: int = 0):
        self.session = Session(folder / GRAPHS / "memory.onnx", provider, threads)
        self.decoder_start_tokens = manifest["begins_with"]
        self._device = "cpu" if self.session.provider == CPU else "cuda"

    def read(self, prompts: Sequence[Sequence[int]]) -> dict[str, ort.OrtValue]:
        """The inputs of the other graphs that depend on these prompts."""
        mask = np.arange(max(map(len, prompts))) < np.array([[len(prompt)] for prompt in prompts])
        ids = np.zeros(mask.shape, np.int64)
        ids[mask] = np.concatenate(prompts)
        outputs = self.session.run({"input_ids": ids, "attention_mask": mask.astype(np.int64)})
        return {name: ort.OrtValue.ortvalue_from_numpy(value, self._device) for name, value in outputs.items()}


class OrtTokens(DecoderSegments):
    """The base of both: an encoder may read the prompts before the first step."""

    engine = "onnxruntime"
    prompts: Prompts | None
    _caches: dict[str, ort.OrtValue]

    def begin(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        if self.prompts is None:
            return super().begin(prompts)
        self.bind_encoder_memory(self.prompts.read(prompts))
        return Tokens.of([self.prompts.decoder_start_tokens] * len(prompts))

    def wipe(self, row: int) -> None:
        for cache in self._caches.values():
            values = cache.numpy()  # on the CPU this is the same memory
            values[row] = 0
            if cache.device_name() != "cpu":
                cache.update_inplace(values)

    def bind_encoder_memory(self, memory: dict[str, ort.OrtValue]) -> None:
        """Bind the output of the encoder to the inputs of all graphs."""
        raise NotImplementedError


class OrtTokenModel(OrtTokens):
    """model.onnx, bound to the caches of one batch of texts."""

    def __init__(
        self,
        session: Session,
        graph_rule: GraphRule,
        manifest: dict,
        num_rows: int,
        capacity: int,
        prompts: Prompts | None = None,
    ):
        self.prompts, self._memory = prompts, {}
        self.exits, self.weights = tuple(manifest["exits"]), Weights(**manifest["weights"])
        self.own_layers = manifest.get("own_layers", False)
        self.short_flops = short_flops(manifest["width"], len(manifest.get("short_list", ())))
        self._session, self._graph_rule, self._vocabulary = session, graph_rule, manifest["vocab_size"]
        self._caches, self._bound = new_caches(manifest, session.provider, num_rows, capacity), {}

    def bind_encoder_memory(self, memory: dict[str, ort.OrtValue]) -> None:
        self._memory, self._bound = memory, {}

    def run_through(self, ids: list[list[int]], rows: list[int], positions: list[list[int]]) -> None:
        self._run(ids, rows, positions, {"exit_at": np.array([len(self.exits) - 1])})

    def run_batch(self, rule: Rule, inputs: Tokens) -> BatchResult:
        """One call. Raises ValueError for a rule that the graph does not contain."""
        plan = rule.plan(inputs)
        feeds = self._graph_rule.feeds(rule, plan)
        if feeds is None:
            raise self._graph_rule.unsupported(rule)
        outputs = self._run(inputs.ids, inputs.rows, inputs.positions, feeds)
        return BatchResult(outputs["logits"].copy(), *self._graph_rule.exits_of(rule, plan, outputs["layers"]))

    def read_at(self, k: int, inputs: Tokens) -> dict[str, np.ndarray]:
        """The logits (B, V) of exit k, and what the rule of the graph reads in place of them, (B,)."""
        outputs = self._run(inputs.ids, inputs.rows, inputs.positions, {"exit_at": np.array([k])})
        return {name: values.copy() for name, values in outputs.items() if name != "layers"}

    def _run(self, ids, rows, positions, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Logits (B, V), layers (B,), and exit_logit or short_list (B,) if the rule reads it. The next call overwrites
        them."""
        inputs = {"input_ids": np.array(ids, np.int64), "positions": np.array(positions, np.int64)}
        inputs |= {"rows": np.array(rows, np.int64)} | self._graph_rule.defaults | feeds
        shapes = tuple((name, value.shape) for name, value in inputs.items())
        if shapes not in self._bound:  # the next token most often has the shapes of this one
            self._bound = {shapes: self._binding(inputs)}
        binding, buffers, outputs = self._bound[shapes]
        for name, value in inputs.items():
            buffers[name][...] = value
            if self._session.provider != CPU:  # a binding reads the host's memory here and not when the graph runs
                binding.bind_cpu_input(name, buffers[name])
        self._session.run_bound(binding)
        return outputs

    def _binding(self, inputs: dict[str, np.ndarray]) -> tuple:
        binding, buffers = self._session.io_binding(), {name: value.copy() for name, value in inputs.items()}
        for name, value in buffers.items():
            binding.bind_cpu_input(name, value)
        rows = len(buffers["rows"])
        outputs = {"logits": np.empty((rows, self._vocabulary), np.float32), "layers": np.empty(rows, np.int64)}
        outputs |= {name: np.empty(rows, np.float32) for name in OF_STATES if name in self._session.widths}
        for name, value in outputs.items():
            binding.bind_output(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
        bind_caches(binding, self._caches)
        bind_inputs(binding, self._memory)
        return binding, buffers, outputs


def cache_names(exits: Sequence[int], own_layers: bool) -> list[str]:
    """The caches of all layers, from below; with own_layers the layer of an exit follows those up to this exit."""
    layers: list[int | str] = []
    for k, (start, stop) in enumerate(zip((0, *exits), exits)):
        layers += range(start, stop)
        layers += [f"exit_{k}"] if own_layers and k < len(exits) - 1 else []
    return [f"{kind}_{layer}" for layer in layers for kind in ("keys", "values")]


def new_caches(manifest: dict, provider: str, num_rows: int, capacity: int) -> dict[str, ort.OrtValue]:
    """Empty caches of all layers, on the device."""
    dtype = np.float16 if manifest["precision"] == "float16" else np.float32
    empty = np.zeros((num_rows, capacity + 1, manifest["cache_width"]), dtype)
    names = cache_names(manifest["exits"], manifest.get("own_layers", False))
    device = "cpu" if provider == CPU else "cuda"
    return {name: ort.OrtValue.ortvalue_from_numpy(empty.copy(), device) for name in names}


def bind_caches(binding: ort.IOBinding, caches: dict[str, ort.OrtValue]) -> None:
    """Bind each cache as input and output, in the same memory."""
    for name, cache in caches.items():
        binding.bind_ortvalue_input(name, cache)
        binding.bind_ortvalue_output(f"{name}_out", cache)


def bind_inputs(binding: ort.IOBinding, values: dict[str, ort.OrtValue]) -> None:
    """Bind inputs that do not change."""
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)


class Block(NamedTuple):
    """The places of tokens."""

    rows: np.ndarray  # (B,) int64, index of the prompt
    positions: np.ndarray  # (B, T) int64, -1 for padding


class Sessions(NamedTuple):
    """The graphs of an exported decoder, each opened once. Several batches may use them at the same time."""

    segments: list[Session]
    fills: list[Session]  # of all segments but the first
    heads: list[Session]
    policies: list[Session]  # of all exits but the last; empty if the model has no policy
    short_lists: list[Session]  # the same of lenses
    prompts: Prompts | None = None


def open_sessions(folder: Path, manifest: dict, provider: str = CPU, threads: int = 0) -> Sessions:
    """Open the graphs by segment."""

    def several(kind: str, layers: Sequence[int]) -> list[Session]:
        return [Session(folder / GRAPHS / f"{kind}_{layer}.onnx", provider, threads) for layer in layers]

    exits = manifest["exits"]
    policies = exits[:-1] if manifest["decides"] else ()
    short_lists = exits[:-1] if "short_list" in manifest else ()
    kinds = {"segment": exits, "fill": exits[1:], "head": exits, "policy": policies, "short_list": short_lists}
    prompts = Prompts(folder, manifest, provider, threads) if "begins_with" in manifest else None
    return Sessions(*(several(kind, layers) for kind, layers in kinds.items()), prompts)


class Cached:
    """A graph, bound to the caches of one batch."""

    def __init__(self, session: Session, caches: dict[str, ort.OrtValue]):
        self._session, self._binding = session, session.io_binding()
        # A binding keeps no reference to its values, so this attribute keeps the caches alive.
        self._caches = {name: cache for name, cache in caches.items() if name in session.inputs}
        bind_caches(self._binding, self._caches)

    def bind_encoder_memory(self, memory: dict[str, ort.OrtValue]) -> None:
        """Bind the output of the encoder, as far as this graph takes it."""
        bind_inputs(self._binding, {name: value for name, value in memory.items() if name in self._session.inputs})

    def run(self, hidden: np.ndarray, block: Block, out: np.ndarray | None = None) -> None:
        """Write the caches, and the hidden states to `out` (B, T, D). hidden: (B, T, D), or token ids (B, T)."""
        first = "input_ids" if hidden.ndim == 2 else "hidden"
        inputs = {first: np.ascontiguousarray(hidden)} | block._asdict()
        for name, value in inputs.items():
            self._binding.bind_cpu_input(name, value)
        if out is not None:
            self._binding.bind_output(HIDDEN, "cpu", 0, out.dtype, out.shape, out.ctypes.data)
        self._session.run_bound(self._binding)


class OrtTokenSegments(OrtTokens, CachedSegments):
    """The graphs by segment of an exported folder, for one batch of texts."""

    def __init__(self, sessions: Sessions, manifest: dict, missing_kv: str, num_rows: int, capacity: int):
        super().__init__(tuple(manifest["exits"]), missing_kv, num_rows, capacity)
        self.prompts = sessions.prompts
        self.weights, self.own_layers = Weights(**manifest["weights"]), manifest.get("own_layers", False)
        self._width = manifest["width"]
        self.short_flops = short_flops(manifest["width"], len(manifest.get("short_list", ())))
        self._heads, self._policies, self._short_lists = sessions.heads, sessions.policies, sessions.short_lists
        self._dtype = np.float16 if manifest["precision"] == "float16" else np.float32
        self._caches = new_caches(manifest, sessions.heads[0].provider, num_rows, capacity)
        graphs = sessions.segments, sessions.fills
        self._segments, self._fills = ([Cached(graph, self._caches) for graph in some] for some in graphs)
        self.pending_states = np.zeros((num_rows, capacity + 1 if len(self.exits) > 1 else 0, self._width), self._dtype)

    def wipe(self, row: int) -> None:
        super().wipe(row)
        self.pending_states[row] = 0

    def bind_encoder_memory(self, memory: dict[str, ort.OrtValue]) -> None:
        self._memory = memory  # a binding keeps no reference to its values
        for graph in (*self._segments, *self._fills):
            graph.bind_encoder_memory(memory)

    def array(self, numbers: list) -> np.ndarray:
        return np.array(numbers, np.int64)

    def join(self, earlier: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        return np.concatenate((earlier, hidden), axis=1)

    def embed(self, ids: np.ndarray, positions: list[list[int]]) -> np.ndarray:
        """The ids themselves: the first graph has the embeddings."""
        return ids

    def block(self, rows: list[int], positions: list[list[int]]) -> Block:
        return Block(self.array(rows), self.array(positions))

    def run(self, k: int, hidden: np.ndarray, block: Block) -> np.ndarray:
        out = np.empty((*block.positions.shape, self._width), self._dtype)
        self._segments[k].run(hidden, block, out)
        return out

    def copy_state(self, k: int, hidden: np.ndarray, block: Block) -> None:
        self._fills[k - 1].run(hidden, block)

    def run_all(self, hidden: np.ndarray, block: Block) -> None:
        for k in range(len(self.exits)):
            hidden = self.run(k, hidden, block)

    def read(self, k: int, state: TokenState) -> np.ndarray:
        own_layer = self.own_layers and k < len(self.exits) - 1
        return self._heads[k].run(self._with_caches(k, state) if own_layer else _newest(state))["logits"]

    def _with_caches(self, k: int, state: TokenState) -> dict:
        """The inputs of a head with a layer of its own."""
        block = state.block or self.block(state.rows, state.positions)
        caches = {name: self._caches[name] for name in (f"keys_exit_{k}", f"values_exit_{k}")}
        return {"hidden": np.ascontiguousarray(state.hidden)} | block._asdict() | caches

    def exit_logit(self, k: int, state: TokenState) -> np.ndarray:
        if not self._policies:
            return super().exit_logit(k, state)
        return self._policies[k].run(_newest(state))["exit_logit"]

    def short_list(self, k: int, state: TokenState) -> np.ndarray:
        if not self._short_lists:
            return super().short_list(k, state)
        return self._short_lists[k].run(_newest(state))["short_list"]


def _newest(state: TokenState) -> dict[str, np.ndarray]:
    return {"hidden": np.ascontiguousarray(state.hidden[:, -1])}
