"""One graph, in ONNX Runtime or another engine, and the threads and memory that all graphs share. No torch here."""

import ctypes
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from mini_ee import __version__
from mini_ee.export.manifest import WEIGHTS
from mini_ee.lab.data.files import MANIFEST
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.registry import ENGINES
from mini_ee.lab.row_thresholds import THRESHOLD, RowThresholds
from mini_ee.lab.rule_inputs import runtime_values, served_by
from mini_ee.lab.rules import Never, Rule, rule_from_dict

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
FOR_A_GPU = (
    "pip uninstall -y onnxruntime && pip install onnxruntime-gpu"  # both in one environment overwrite each other
)
PROVIDERS = {None: None, "cpu": [CPU], "cuda": [CUDA]}  # by the value of --device

HIDDEN = "hidden_out"
CARRIED = "carried_out"
FOR_THE_NEXT = (HIDDEN, CARRIED)  # outputs that the next segment takes


def versions() -> dict[str, str]:
    """What computed an answer without torch, as JSON."""
    libraries = {"numpy": np.__version__, "onnxruntime": ort.__version__}
    libraries |= {name: version(name) for name in ENGINES if name in sys.modules}
    return {"mini_ee": __version__, "python": platform.python_version()} | libraries


class Graph:
    """One graph that an engine has opened. Safe to run from several threads."""

    engine = "onnxruntime"
    provider: str

    def __init__(self, inputs: set[str], widths: dict[str, Sequence]):
        """inputs: names, those with a default left out. widths: output -> its last size, or nothing for a scalar."""
        self.inputs, self.widths, self._outputs = inputs, widths, list(widths)
        self.ids = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in inputs]
        self._unread = [name for name in FOR_THE_NEXT if name in widths] or self._outputs

    def of_rows(self, inputs: Inputs) -> dict[str, np.ndarray]:
        """The inputs of the graph for these rows, (B, T) each: a decoder has no token types."""
        return {name: getattr(inputs, name) for name in self.ids}

    def run(self, inputs: dict, read: bool = True) -> dict:
        """Outputs by name: hidden states on the device, as the next graph takes them; if read, the others in numpy.

        Raises ValueError if the engine fails on these inputs.
        """
        raise NotImplementedError


class Session(Graph):
    """One graph in ONNX Runtime on one device."""

    shares_threads = False

    def __init__(self, path: Path, provider: str, threads: int):
        self._path, options = path, ort.SessionOptions()
        options.use_per_session_threads = not Session.shares_threads
        if not Session.shares_threads:
            options.intra_op_num_threads = threads
            # After a graph, its threads would spin for a while and take the cores from the threads of the next graph.
            options.add_session_config_entry("session.force_spinning_stop", "1")
        # One arena for all graphs: the next graph reuses memory that is warm, and it is not allocated K times.
        _shared_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.log_severity_level = 3
        self._session = _opened(path, options, provider)
        widths = {output.name: output.shape[-1:] for output in self._session.get_outputs()}
        super().__init__({graph_input.name for graph_input in self._session.get_inputs()}, widths)
        # The Python method checks all names and values at each call, which takes 15 us; call the C++ one directly.
        self._run = getattr(self._session, "_sess", self._session).run
        self.provider = self._session.get_providers()[0]
        self._is_whole = "exit_at" in {initializer.name for initializer in self._session.get_overridable_initializers()}

    def run(self, inputs: dict, read: bool = True) -> dict:
        outputs = self._outputs if read else self._unread
        # On a CPU arrays are shared, which is faster than a binding; and a binding refuses inputs that have a default.
        if self.provider == CPU or self._is_whole:
            try:
                return dict(zip(outputs, self._run(outputs, inputs, None)))
            except Exception as error:  # the types that onnxruntime raises
                raise self._failed(error) from None
        binding = self._session.io_binding()
        for name, value in inputs.items():
            bind = binding.bind_cpu_input if isinstance(value, np.ndarray) else binding.bind_ortvalue_input
            bind(name, value)
        for name in outputs:
            binding.bind_output(name, "cuda" if name in FOR_THE_NEXT else "cpu")
        self.run_bound(binding)
        values = zip(outputs, binding.get_outputs())
        return {name: value if name in FOR_THE_NEXT else value.numpy() for name, value in values}

    def io_binding(self) -> ort.IOBinding:
        """A binding for inputs and outputs in the caller's memory."""
        return self._session.io_binding()

    def run_bound(self, binding: ort.IOBinding) -> None:
        """Run with a binding. Raises ValueError as `run` does."""
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # the types that onnxruntime raises
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> ValueError:
        return ValueError(f"{self._path}: ONNX Runtime cannot run this batch: {' '.join(str(error).split())}")


def _opened(path: Path, options: ort.SessionOptions, provider: str) -> ort.InferenceSession:
    """The graph on the provider. If that fails: on the CPU, with the reason on standard error."""
    graph, weights = path, path.with_name(Path(WEIGHTS).name)
    # Without TF32, products of float32 are as exact as those of torch, and the graph stops where the run stops.
    providers = [(CUDA, {"use_tf32": "0"}), CPU] if provider == CUDA else [CPU]
    if weights.exists() and (weights.is_symlink() or weights.stat().st_nlink > 1):
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", _plain_folder(weights))
        graph = path.read_bytes()
    try:
        # enable_fallback=0: ONNX Runtime's own fallback would print the reason to standard output, among the answers.
        return ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)
    except Exception as error:  # the types that onnxruntime raises
        reason = f"{path}: ONNX Runtime cannot load this graph on {provider} ({' '.join(str(error).split())})"
        if provider == CPU:
            raise ValueError(f"{reason}; export the run again") from None
        print(f"{reason}; trying {CPU}", file=sys.stderr)
        return _opened(path, options, CPU)


def _plain_folder(weights: Path) -> str:
    """The folder that has the weights as a regular file: for safety ONNX Runtime follows no link.

    Raises ValueError if there is none, as with hard links and in the cache of Hugging Face's hub.
    """
    plain = weights.resolve()
    if plain.name == weights.name and plain.stat().st_nlink == 1:
        return str(plain.parent)
    fault = "has several hard links" if plain.name == weights.name else f"is a symbolic link to {plain}"
    raise ValueError(
        f"{weights}: expected a file of this name, ONNX Runtime reads no links; this one {fault}: copy the folder with "
        f"`cp -rL` and open the copy"
    )


class GraphRule:
    """The rule in model.onnx, and the inputs that make the graph stop by another rule."""

    def __init__(self, folder: Path, manifest: dict):
        self._folder, self._name, self._last = folder, manifest["rule"]["name"], len(manifest["exits"]) - 1
        self._exit_of_depth = {depth: k for k, depth in enumerate(manifest["exits"])}
        in_graph = "encoder" not in manifest and manifest.get("rule_in_graph", True)
        self._rule = rule_from_dict(manifest["rule"]) if in_graph else Never()
        given = manifest.get("graphs", {}).get("model", {}).get("inputs", {}).get(THRESHOLD)
        self._shares_threshold = bool(given and given["axes"])  # without axes it takes any, see model_graph.py
        self._latest: tuple = (None, None)
        plan = self._rule.plan(range(1))
        if plan is None:
            plan = np.array([self._last if self._rule.needs is None or not self._last else -1])
        self.defaults = {"exit_at": plan}  # the defaults of the graph's inputs
        if plan[0] < 0:
            self.defaults |= runtime_values(self._rule, self._last)

    def feeds(self, rule: Rule, plan: np.ndarray | None) -> dict[str, np.ndarray] | None:
        """Inputs that make the graph stop by a rule with this plan (B,) or None; None if no inputs can."""
        if plan is not None:
            return {"exit_at": plan}
        latest = self._latest
        if (
            latest[0] is not rule
        ):  # one rule serves many batches; `_latest` is read once, because another thread may replace it
            latest = self._latest = rule, self._settings(rule)
        return latest[1]

    def _settings(self, rule: Rule) -> dict[str, np.ndarray] | None:
        if rule.needs is None:
            return {"exit_at": np.array([self._last])}
        base, of_rows = (rule.rule, {THRESHOLD: rule.thresholds}) if isinstance(rule, RowThresholds) else (rule, {})
        if not served_by(base, self._rule):
            return None
        if of_rows and self._shares_threshold:
            raise ValueError(
                f"{self._folder}: expected a classifier for thresholds by row; a decoder takes one for all rows"
            )
        return runtime_values(base, self._last) | of_rows if self._last else {}

    def exits_of(self, rule: Rule, plan: np.ndarray | None, layers: np.ndarray) -> tuple[np.ndarray, str | None]:
        """Exit index (B,) of each depth (B,) that the graph returned, and what the rule read at the exits."""
        try:
            index = np.array([self._exit_of_depth[depth] for depth in layers.tolist()], np.int64)
        except KeyError:
            problem = f"model.onnx stopped after {np.unique(layers).tolist()} layers, which are no exits of {MANIFEST}"
            raise ValueError(f"{self._folder}: {problem}; export the run again") from None
        return index, rule.needs if plan is None else None

    def unsupported(self, rule: Rule) -> ValueError:
        """The error for a rule that the graph cannot stop by, if there are no graphs by segment."""
        return ValueError(
            f"{self._folder}: expected the rule of model.onnx, {self._name}, found {rule.to_dict()}; "
            f"export the run with that rule (--rule), or with --segments for any rule"
        )


def share_threads(threads: int = 0) -> None:
    """Let all sessions of this process share one thread pool, instead of one pool per graph; 0: a thread per core.

    Then no graph waits for its own threads to wake up: with MiniLM at batch 1, three graphs take 2 to 3% less time.
    Call this before the first session, and only in a program that owns its process, such as `mini-ee`. A library must
    not: ONNX Runtime then refuses all sessions with their own threads (use_per_session_threads = True), and the threads
    of the pool spin for about 35 ms after each run. An existing pool is used as it is. The `threads` of a Runtime then
    have no effect.
    """
    with suppress(Fail):  # a pool exists
        ort.set_global_thread_pool_sizes(threads, 1)
    Session.shares_threads = True


@cache
def _shared_arena() -> None:
    """Register an arena in ONNX Runtime's environment, for sessions that use environment allocators."""
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)


def wanted_provider(providers: Sequence[str] | None, allow_fallback: bool) -> str:
    """The provider to open sessions on. CUDA counts as available only if there is a driver."""
    known = [CUDA, CPU] if CUDA in ort.get_available_providers() and _has_cuda_driver() else [CPU]
    wanted = providers[0] if providers else CUDA if CUDA in known else CPU
    if wanted not in known:
        if not allow_fallback:
            advice = f"; for {CUDA}: {FOR_A_GPU}" if wanted == CUDA and _has_cuda_driver() else ""
            raise ValueError(
                f"expected a provider that is available here ({' or '.join(known)}), found {wanted}{advice}"
            )
        return CPU
    if wanted == CUDA:
        ort.preload_dlls()
    return wanted


def _has_cuda_driver() -> bool:
    """Whether there is a driver: onnxruntime-gpu lists CUDA without a GPU too, and falls back with many warnings."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False
