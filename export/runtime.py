"""Serve an exported folder with numpy and ONNX Runtime only: the same loop, the same rules, one session a graph.

    Runtime(folder).run(["A warm and funny film."])
    [Answer(label="positive", confidence=0.98, exit=1, layers=4, milliseconds=3.1, ...)]

ONNX Runtime cannot stop inside a graph, so the loop of early_exit.py drives one graph a segment. Hidden states stay on
the device between them; a row that has left is dropped by the Gather with which the next graph begins.
"""

import ctypes
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from mini_ee.backbones.flops import head_flops, layer_flops
from mini_ee.confidence import max_probability
from mini_ee.data.files import file_sha256, read_json
from mini_ee.data.prompts import Prompt, PromptTokenizer
from mini_ee.data.tokens import Encoded, Inputs, Tokenizer, batches
from mini_ee.early_exit import Reading, Segments, early_exit
from mini_ee.rules import Rule, rule_from_dict

FORMAT_VERSION = 2  # since graphs take `read`

MANIFEST = "manifest.json"

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

HIDDEN = "hidden_out"

READ = {True: np.array(True), False: np.array(False)}  # the input `read`

DECODER = "Decoder"  # the manifest's `model` where the folder writes text: decoder_runtime.py


class Session:
    """One graph on one device. Safe to run from several threads."""

    shares_threads = False

    def __init__(self, path: Path, provider: str, threads: int):
        options = ort.SessionOptions()
        options.use_per_session_threads = not Session.shares_threads
        if not Session.shares_threads:
            options.intra_op_num_threads = threads
            # A worker that spins on after its graph has ended holds the core that the next graph's worker needs.
            options.add_session_config_entry("session.force_spinning_stop", "1")
        # One arena for all graphs: the memory that one has just used is warm for the next, and is not held K times.
        _shared_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.log_severity_level = 3
        try:
            self._session = ort.InferenceSession(path, options, providers=list(dict.fromkeys((provider, CPU))))
        except Exception as error:  # the types that onnxruntime raises
            raise ValueError(f"{path}: ONNX Runtime cannot load this graph ({error}); export the run again") from None
        # Past the method in Python, which looks at all names and values anew: after a graph that takes 15 us.
        self._run = getattr(self._session, "_sess", self._session).run
        self.provider = self._session.get_providers()[0]
        self.inputs = {each.name for each in self._session.get_inputs()}
        self.begins = "input_ids" in self.inputs  # from the embeddings
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._unread = [HIDDEN] if HIDDEN in self._outputs else self._outputs

    def ids(self, inputs: Inputs) -> dict[str, np.ndarray]:
        """What a graph that begins takes of the rows: a decoder knows no token types."""
        ids = {"input_ids": inputs.input_ids, "token_type_ids": inputs.token_type_ids}
        return {name: value for name, value in ids.items() if name in self.inputs}

    def run(self, inputs: dict, read: bool = True) -> dict:
        """Outputs by name: hidden states as the next graph takes them, on the device; if read, the others in numpy."""
        outputs = self._outputs if read else self._unread
        if self.provider == CPU:  # shares memory, and is quicker than a binding
            return dict(zip(outputs, self._run(outputs, inputs, None)))
        binding = self._session.io_binding()
        for name, value in inputs.items():
            bind = binding.bind_cpu_input if isinstance(value, np.ndarray) else binding.bind_ortvalue_input
            bind(name, value)
        for name in outputs:
            binding.bind_output(name, "cuda" if name == HIDDEN else "cpu")
        self._session.run_with_iobinding(binding)
        values = zip(outputs, binding.get_outputs())
        return {name: value if name == HIDDEN else value.numpy() for name, value in values}

    def io_binding(self) -> ort.IOBinding:
        """For inputs and outputs whose memory the caller holds."""
        return self._session.io_binding()

    def run_bound(self, binding: ort.IOBinding) -> None:
        """Run with what is bound."""
        self._session.run_with_iobinding(binding)


def share_threads(threads: int = 0) -> None:
    """Let all sessions of this process compute on one pool of threads, instead of one a graph; 0: as many as cores.

    Then no graph waits for its own threads to wake: on MiniLM at batch 1 three graphs take 2 to 3 % less. For a program
    that alone decides what runs in its process, as `mini-ee` is, before its first session. A library must not: ONNX
    Runtime then refuses every session that does not ask for the pool (use_per_session_threads = False), and the pool's
    threads spin for some 35 ms after each run. A pool that is there already is joined as it is; `threads` of a Runtime
    is passed over then.
    """
    with suppress(Fail):  # there is one
        ort.set_global_thread_pool_sizes(threads, 1)
    Session.shares_threads = True


@cache
def _shared_arena() -> None:
    """Register an arena with ONNX Runtime's environment; only sessions that ask for it use it."""
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)


class OrtState(NamedTuple):
    """The rows still in the model."""

    inputs: Inputs
    where: np.ndarray  # (B,) int64: where they stand in the inputs
    said: dict  # what the last graph said of B' rows: hidden_out (B', T, D), logits (B', C), max_probability (B',)
    rows: np.ndarray  # (B,) int64: those of the B' that go on
    around: dict[str, np.ndarray]  # what every graph takes: attention_mask (B, T), read_at (B, 1) of prompts
    every: np.ndarray  # (B,) int64: 0, 1, 2, ..., which are all rows of what the next graph says
    heads: Container[int] | None = None  # those that will be read; None: any
    taken: dict = {}  # what the last graph took, where it passed its head over

    def keep(self, rows: np.ndarray) -> "OrtState":
        around = {name: value[rows] for name, value in self.around.items()}
        return self._replace(where=self.where[rows], rows=self.rows[rows], around=around, every=self.every[: len(rows)])


class OrtSegments(Segments):
    """The segments of an exported folder. Inputs are tasks.Inputs."""

    engine = "onnxruntime"

    def __init__(self, folder: Path, manifest: dict, provider: str = CPU, threads: int = 0):
        self.exits = tuple(manifest["exits"])
        self.sessions = [Session(folder / f"segment_{layer}.onnx", provider, threads) for layer in self.exits]
        self.provider = self.sessions[0].provider
        self._manifest = manifest

    def start(self, inputs: Inputs) -> OrtState:
        every = np.arange(len(inputs))
        return OrtState(inputs, every, {}, every, _around(inputs, self._manifest), every)

    def reading(self, heads: Container[int], state: OrtState) -> OrtState:
        return OrtState(*state[:-2], heads)

    def advance(self, k: int, state: OrtState) -> OrtState:
        session = self.sessions[k]
        if not session.begins:
            inputs = {"hidden": state.said[HIDDEN], "rows": state.rows} | state.around
        elif len(state.where) == len(state.inputs):
            inputs = session.ids(state.inputs) | state.around
        else:  # a stream that starts anew, with the rows that are left
            ids = session.ids(state.inputs)
            inputs = {name: value[state.where] for name, value in ids.items()} | state.around
        read, taken = state.heads is None or k in state.heads, {}
        if "read" in session.inputs:
            inputs["read"] = READ[read]
            taken = {} if read else inputs
        said = session.run(inputs, read)
        # _replace takes 10 us more
        return OrtState(state.inputs, state.where, said, state.every, state.around, state.every, state.heads, taken)

    def read(self, k: int, state: OrtState) -> Reading:
        said = state.said
        if state.taken:  # passed over, but a plan that came late wants it
            said = self.sessions[k].run(state.taken | {"read": READ[True]})
        reading = _reading(said)
        if len(state.rows) == len(reading.logits):
            return reading
        return Reading(*(each if each is None else each[state.rows] for each in reading))

    def layer_passes(self, k: int) -> int:
        return self._manifest["layer_passes"][k]

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        advance, read = _flops(self._manifest, self.layer_passes(k), inputs.input_ids.shape[1])
        return advance, read + (self._manifest["policy_flops"] if k < len(self.exits) - 1 else 0.0)


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
        return _flops(self._manifest, self.layer_passes(k), inputs.input_ids.shape[1])


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


def _flops(manifest: dict, layers: int, tokens: int) -> tuple[float, float]:
    config, pooled = manifest["backbone"], tokens if manifest["pool"] == "mean" else 0
    layer = layer_flops(**manifest["layer"], tokens=tokens)
    advance = layers * (layer + 2.0 * tokens * manifest["adapter_parameters"])
    return advance, head_flops(config["hidden_size"], manifest["num_labels"], pooled)


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
        tokens = self._encoded(inputs).input_ids.shape[1]
        return self._config["layers"] * layer_flops(**self._config["layer"], tokens=tokens)

    def _encoded(self, inputs: Inputs) -> Inputs:
        return inputs if self._tokenizer is None else self._tokenizer.encode(inputs.texts).batch(slice(None))


def open_tokenizer(folder: Path, manifest: dict) -> Tokenizer:
    """The tokenizer of an exported folder, which puts texts into the prompt that the model is read through, if one."""
    tokenizer = Tokenizer.from_folder(folder, manifest["max_length"])
    if "prompt" not in manifest:
        return tokenizer
    return PromptTokenizer(tokenizer.backend, manifest["max_length"], Prompt.from_dict(manifest["prompt"]))


def open_rule(folder: Path, manifest: dict, provider: str = CPU, threads: int = 0) -> Rule:
    """The rule of an exported folder, with the datastore that it asks, where it asks one."""
    if "encoder" not in manifest:
        return rule_from_dict(manifest["rule"])
    from mini_ee.methods.datastore import Datastore
    from mini_ee.methods.raee import Retrieval

    encoder = OrtEncoder(folder, manifest, provider, threads)
    settings = {key: value for key, value in manifest["rule"].items() if key != "name"}
    return Retrieval(**settings).with_datastore(Datastore.load(folder / "datastore", encoder.name), encoder)


class Answer(NamedTuple):
    """What the runtime says of one row."""

    label: str | float  # a number for regression
    confidence: float | None  # the largest probability; None for regression
    exit: int  # index into exits, from 0
    layers: int  # depth of that exit
    milliseconds: float  # of its batch, over the rows of that batch
    logits: np.ndarray  # (C,)


class Runtime:
    """An exported folder, checked and ready to run.

    providers: ONNX Runtime's names, the wanted one first; CUDA where it is there by default, else the CPU, and
    `provider` says which it became. A provider that was asked for and is not there is an error, unless allow_fallback.
    threads: of the processor, for one row or batch; ONNX Runtime's choice by default. See also share_threads.
    segments: another engine for the same folder (segments.torch_segments) instead of ONNX Runtime.

    Raises FileNotFoundError where the folder or one of its files is missing; ValueError where a file is not the one
    that was exported, or a provider cannot be had. `run` may be called from several threads.
    """

    def __init__(
        self,
        folder: str | Path,
        providers: Sequence[str] | None = None,
        *,
        threads: int = 0,
        allow_fallback: bool = False,
        segments: Segments | None = None,
    ):
        self.folder = Path(folder)
        self.config = read_manifest(self.folder)
        with blaming_manifest(self.folder):
            if self.config["model"] == DECODER:
                raise ValueError(f"{folder}: holds a decoder, which writes text and gives no label; use `mini-ee run`")
            self.tokenizer = open_tokenizer(self.folder, self.config)
            self.label_names = self.config["task"]["label_names"]  # empty for regression
            self._threads = threads
            if segments is None:
                wanted = wanted_provider(providers, allow_fallback)
                segments = OrtSegments(self.folder, self.config, wanted, threads)
                if segments.provider != wanted and providers and not allow_fallback:
                    raise ValueError(
                        f"{wanted} was asked for, it fell back to {segments.provider}; install what it needs"
                    )
            self._segments, self.exits = segments, segments.exits
            self.provider = getattr(segments, "provider", None)  # None for another engine
            self.rule = open_rule(self.folder, self.config, self.provider or CPU, threads)
            self.rule.check(len(self.exits))

    @property
    def weight_bytes(self) -> int:
        """Of the graphs and the weights that they share, as they are on disk."""
        files = [self.folder / name for name in self.config["files"] if name.endswith((".onnx", ".safetensors"))]
        return sum(path.stat().st_size for path in files if path.parent == self.folder)

    def segments(self) -> Segments:
        """What early_exit drives."""
        return self._segments

    def whole_model(self) -> WholeGraph:
        """What a speed-up is measured against: one graph without early exits, on the same device."""
        return WholeGraph(self.folder, self.config, self.provider or CPU, self._threads)

    def encode(self, texts) -> Encoded:
        """Tokenize texts of one sentence or two."""
        return self.tokenizer.encode(texts)

    def warm_up(self, batch_size: int = 1) -> None:
        """Run a sentence through every graph: the first run of a session is slower."""
        words = ("warm up",) * self.config["task"]["texts"]
        inputs = self.encode([words] * batch_size).batch(slice(None))
        with self._segments.running():
            state = self._segments.start(inputs)
            for k in range(len(self.exits)):
                state = self._segments.advance(k, state)
                self._segments.read(k, state)

    def run(self, texts: Sequence, batch_size: int = 32, rule: Rule | None = None) -> list[Answer]:
        """Answers in the order of the texts; rows of two sentences are tuples. Memory is bounded by the batch.

        Raises ValueError for a text that is empty or no string, and for rows of another number of sentences.
        """
        rule, expected = rule or self.rule, self.config["task"]["texts"]
        for number, row in enumerate(texts):
            found = 1 if isinstance(row, str) else len(row)
            if found != expected:
                raise ValueError(f"row {number}: expected {expected} texts, found {found}")
        answers: list[Answer | None] = [None] * len(texts)
        encoded = self.encode(texts)
        order = list(batches(encoded, batch_size))
        for rows, (inputs, planned) in zip(order, _planned(rule, map(encoded.batch, order))):
            begin = time.perf_counter()
            result = early_exit(self._segments, planned, inputs)
            milliseconds = (time.perf_counter() - begin) * 1e3 / len(rows)
            said = zip(rows, result.logits, result.exit_index.tolist(), result.layers_run.tolist())
            confidences = max_probability(result.logits).tolist() if self.label_names else [None] * len(rows)
            for (row, logits, exit, layers), confidence in zip(said, confidences):
                label = self.label_names[logits.argmax()] if self.label_names else float(logits[0])
                answers[row] = Answer(label, confidence, exit, layers, milliseconds, logits)
        return answers


def _planned(rule: Rule, inputs: Iterable[Inputs]) -> Iterable[tuple[Inputs, Rule]]:
    """Each batch with its rule; a rule that retrieves plans the next batch while the model runs on this one."""
    if not rule.looks:
        return ((batch, rule) for batch in inputs)
    from mini_ee.methods.raee import plan_ahead

    return plan_ahead(rule, inputs)


def read_manifest(folder: Path) -> dict:
    """The manifest of an exported folder, every file of which is the one that was exported."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder}: no {MANIFEST} here; expected a folder that `mini-ee export` wrote")
    manifest = read_json(folder / MANIFEST, signed="format_version")
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        advice = "install a newer mini_ee" if newer else "export the run again"
        raise ValueError(f"{folder}: expected format_version {FORMAT_VERSION}, found {version!r}; {advice}")
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; export the run again")
        if file_sha256(path) != digest:
            raise ValueError(f"{path}: is not the file that was exported with {MANIFEST}; export the run again")
    return manifest


@contextmanager
def blaming_manifest(folder: Path) -> Iterator[None]:
    """ValueError where what is opened here misses a setting, or finds one of a wrong type."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{folder}: {MANIFEST} has no key {error}; export the run again") from None
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}: {MANIFEST} holds a value of a wrong type ({error}); export the run again"
        ) from None


def wanted_provider(providers: Sequence[str] | None, allow_fallback: bool) -> str:
    """The provider to ask ONNX Runtime for. CUDA counts as there only where there is a driver."""
    known = [CUDA, CPU] if CUDA in ort.get_available_providers() and _has_cuda_driver() else [CPU]
    wanted = providers[0] if providers else CUDA if CUDA in known else CPU
    if wanted not in known:
        if not allow_fallback:
            raise ValueError(f"{wanted} was asked for, there is {' and '.join(known)} here; ask for one of them")
        return CPU
    if wanted == CUDA:
        ort.preload_dlls()
    return wanted


def _has_cuda_driver() -> bool:
    """onnxruntime-gpu lists CUDA on machines without a GPU too, and then falls back with a page of warnings."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False
