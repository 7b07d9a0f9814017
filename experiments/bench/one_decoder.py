"""The benchmark decode of a given decoder: its exported graphs, transformers and llama.cpp on the same weights."""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from mini_ee.experiments.bench.common import from_transformers, medians, row_of
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.decoding import Generated, decode, gather
from mini_ee.lab.exits.row_exits import even_exits
from mini_ee.lab.exits.skipped_layers import Skipper, generate_skipping, load_skipper
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export.sessions import CPU, GraphRule, Session
from mini_ee.lab.export.token_graphs import TokenGraphs
from mini_ee.lab.export.token_segments import OrtTokenModel
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.registry import SKIPPERS
from mini_ee.lab.rules import Fixed, Never, Policy, Rule
from mini_ee.self_supervised import CALIBRATION_PROMPTS

NEW_TOKENS, EXITS = 24, 5
LONGER = 64  # tokens with skipped layers: SWIFT chooses after 32 of them
NOT_REACHED = Policy(1 - 1e-6)  # by gates that have not learned
BARS = {"float16": 1.1, "int8": 0.7, "int4": 0.6}  # largest ratio to float32 that passes
NEVER, EARLIER = 1.03, 1.0  # of the graph with exits to the one without: if none is reached, and half of the layers

Run = Callable[[], list[int]]


class OpenGraph:
    """An exported graph that continues one prompt."""

    def __init__(self, model: TokenExits, rule: Rule, folder: Path, precision: str):
        folder.mkdir()
        self.manifest = write_graphs(model, TokenGraphs(model), rule, folder, precision)
        begin = time.perf_counter()
        self.session = Session(folder / "onnx/model.onnx", CPU, torch.get_num_threads())
        self.load_seconds = time.perf_counter() - begin
        self.bytes = sum(path.stat().st_size for path in (folder / "onnx").iterdir())
        self.graph_rule = GraphRule(folder, self.manifest)

    def write(self, prompt: list[int], rule: Rule) -> list[int]:
        """NEW_TOKENS tokens."""
        segments = OrtTokenModel(self.session, self.graph_rule, self.manifest, 1, len(prompt) + NEW_TOKENS)
        (written,) = gather(decode(segments, [prompt], NEW_TOKENS, rule), 1)
        return written.tokens


def bench_one_decoder(folder: Path, gguf: Path | None) -> Iterator[dict]:
    """Seconds per token after a prompt, prompt included, and the seconds that a graph takes to open.

    swift, clasp        drafts with skipped layers, compared with decoding without drafts, in torch, for LONGER tokens
    torch, float32      torch, and the graph without exits, compared with transformers' generate
    float16, int8, int4 graphs without exits, compared with float32
    never, eE           the int8 graph with exits, lenses and gates, if none is reached, and if all tokens exit after
                        layer E, compared with the graph without exits
    assistant_early_exit    transformers' drafts by its layer E, compared with its own generate
    llama.cpp           the int4 graph compared with llama.cpp on the file `gguf`, if it is given
    Raises ValueError if torch, transformers and the float32 graph write different texts.
    """
    decoder, tokenizer = load_backbone(folder), Tokenizer.from_folder(folder)
    prompt, depth = tokenizer.ids_of(CALIBRATION_PROMPTS[0]), decoder.config.num_hidden_layers
    plain, model = (TokenExits(decoder, exits).eval() for exits in ((depth,), even_exits(depth, min(depth, EXITS))))
    model.use_heads("lens")
    half, theirs = len(model.exits) // 2, _of_transformers(decoder, prompt)
    others = {} if gguf is None else {"llama.cpp": _of_llama_cpp(gguf, prompt)}  # what is missing is told first
    with tempfile.TemporaryDirectory() as place:
        made = {
            precision: OpenGraph(plain, Never(), Path(place) / precision, precision) for precision in ("float32", *BARS)
        }
        exits = OpenGraph(model.eval(), NOT_REACHED, Path(place) / "exits", "int8")
    runs: dict[str, Run] = {
        "torch": partial(_written, plain, prompt, NEW_TOKENS),
        "transformers": theirs,
        "assistant_early_exit": partial(theirs, assistant_early_exit=model.exits[half]),
        **{precision: partial(graph.write, prompt, Never()) for precision, graph in made.items()},
        "never": partial(exits.write, prompt, NOT_REACHED),
        "exits": partial(exits.write, prompt, Fixed(half)),
    } | others
    texts = {name: runs[name]() for name in ("torch", "transformers", "float32")}
    if len(set(map(tuple, texts.values()))) > 1:
        raise ValueError(f"bench decode: {folder}: expected the same greedy text of {', '.join(texts)}, found {texts}")
    yield from _skipping(folder.name, plain, prompt)
    seconds = dict(zip(runs, medians(list(runs.values()), f"decode {folder.name}")))

    def row(case: str, name: str, against: str, bar: float) -> dict:
        return row_of(f"{folder.name} {case}", *(seconds[run] / NEW_TOKENS for run in (name, against)), bar)

    def sized(timed: dict, graph: OpenGraph, other: OpenGraph) -> dict:
        return timed | {"load_seconds": graph.load_seconds, "bytes": graph.bytes, "against_bytes": other.bytes}

    yield row("torch", "torch", "transformers", 1.0)
    yield sized(row("float32", "float32", "transformers", 1.0), *[made["float32"]] * 2)
    for precision, bar in BARS.items():
        yield sized(row(precision, precision, "float32", bar), made[precision], made["float32"])
    yield sized(row("int8 never", "never", "int8", NEVER), exits, made["int8"])
    yield row(f"int8 e{model.exits[half]}", "exits", "int8", EARLIER)
    yield row(f"assistant_early_exit {model.exits[half]}", "assistant_early_exit", "transformers", 1.0)
    if gguf is not None:
        yield row("int4 llama.cpp", "int4", "llama.cpp", 1.0)


def _written(model: TokenExits, prompt: list[int], count: int) -> list[int]:
    written: list[Generated] = gather(model.generate([prompt], Never(), max_new_tokens=count, stop=()), 1)
    return written[0].tokens


def _skipped(decoder, prompt: list[int], chooser: str) -> tuple[Generated, Skipper]:
    skipper = load_skipper(chooser)()
    (written,) = gather(generate_skipping(decoder, prompt, skipper, max_new_tokens=LONGER), 1)
    return written, skipper


def _skipping(name: str, plain: TokenExits, prompt: list[int]) -> Iterator[dict]:
    """For each way to choose skipped layers, also the accepted drafts per round, and loaded layers as a share of those
    that are loaded without drafts."""
    runs: dict[str, Callable] = {"torch": partial(_written, plain, prompt, LONGER)}
    text, shares = runs["torch"](), {}
    for chooser in SKIPPERS:
        runs[chooser] = partial(_skipped, plain.backbone, prompt, chooser)
        written, skipper = runs[chooser]()
        if written.tokens != text:
            raise ValueError(f"bench decode: expected the same text with {chooser}, found {written.tokens}, not {text}")
        accepted, loaded = written.layers_run.count(0), skipper.layers_loaded / (LONGER * plain.exits[-1])
        shares[chooser] = {"accepted_per_round": accepted / (LONGER - accepted), "loaded": loaded}
    seconds = dict(zip(runs, medians(list(runs.values()), f"skipped layers {name}")))
    for chooser, counted in shares.items():
        yield row_of(f"{name} {chooser}", *(seconds[run] / LONGER for run in (chooser, "torch")), 1.0) | counted


def _of_transformers(decoder, prompt: list[int]) -> Callable[..., list[int]]:
    """Their greedy continuation; no text ends early."""
    theirs, ids = from_transformers("AutoModelForCausalLM", decoder), torch.tensor([prompt])
    end = theirs.generation_config
    end.eos_token_id = end.bos_token_id = end.pad_token_id = None

    def write(**more) -> list[int]:
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        return theirs.generate(ids, **settings, **more)[0, len(prompt) :].tolist()

    return write


def _of_llama_cpp(gguf: Path, prompt: list[int]) -> Run:
    """llama.cpp by the package xllamacpp, in this process, on as many threads as torch has."""
    try:
        import xllamacpp
    except ImportError:
        raise WrongArguments("--gguf needs llama.cpp, which is not installed: pip install xllamacpp") from None
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(gguf), 512, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(params)
    request = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "cache_prompt": False}

    def write() -> list[int]:
        answer = server.handle_completions(request | {"return_tokens": True})
        if answer.get("usage", {}).get("completion_tokens") != NEW_TOKENS:
            raise ValueError(f"{gguf}: expected {NEW_TOKENS} tokens of llama.cpp, found {str(answer)[:200]}")
        return []

    return write
