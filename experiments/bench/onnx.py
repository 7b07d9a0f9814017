"""The benchmark onnx: the graph that stops by itself, compared with the model without exits, with one graph per
segment and with torch; int8 compared with float32.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mini_ee.experiments.bench.common import (
    BERT_BASE,
    inputs_of,
    load_transformers,
    medians,
    minilm_of,
    random_encoder,
    row_of,
    three_exits,
)
from mini_ee.experiments.bench.decoders import STORIES, generate_of_transformers, random_decoder
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, generates, load_backbone, read_config
from mini_ee.lab.backbones.llama import Decoder
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.evaluation.row_evaluation import REST
from mini_ee.lab.exits.decoding import Generated, decode, gather
from mini_ee.lab.exits.row_exits import RowExits, even_exits
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export.row_segments import OrtModel
from mini_ee.lab.export.sessions import CPU, PROVIDERS, GraphRule, Session
from mini_ee.lab.export.token_graphs import TokenGraphs
from mini_ee.lab.export.token_segments import OrtTokenModel, OrtTokenSegments, open_sessions
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Never, Threshold
from mini_ee.lab.segments import Segments
from mini_ee.rules import max_probability

REACHED_BY_NONE = 1.0  # no row of a random model reaches it: every head is evaluated, no row exits
NEW_TOKENS = 64
LARGE = (1, 32, 256)  # batch sizes on a GPU
FIRST_EXIT, LATER_EXIT, NEVER, MIXED, CHAIN = 1.03, 1.06, 1.06, 1.06, 1.0  # largest ratios that pass


def bench_onnx(model: Path | None, seed: int, device: str = "cpu") -> Iterator[dict]:
    """Yield these ratios; `never` is the graph if no row exits and only the last head is evaluated:

    - exits at layer e, all heads up to there evaluated, compared with e/L of `never`
    - no exit, all heads evaluated, compared with `never`; `never` compared with a model without exits (`plain`)
    - in larger batches: rows at several exits compared with the sum of the times of their layers without exits
    - the graph compared with one graph per segment; for a large model also with torch, and int8 with float32
    - for decoders: the time per token compared with one graph per segment and with transformers without exits

    model: weights of the minilm cases or, for a decoder, of the stories260k cases (default: random weights).
    device: cpu or cuda. A GPU has larger batches and no int8.
    """
    load_transformers()  # a missing library is reported before two minutes of measuring, not after
    on_cpu, provider = device == "cpu", PROVIDERS[device][0]
    stories = random_decoder(STORIES, seed)
    if model is not None and generates(read_config(model / "config.json").model_type):
        model, stories = None, load_backbone(model)
    minilm = minilm_of(model, seed)
    cases = (
        ("minilm", minilm, three_exits(minilm), 32, (1, 8, 32) if on_cpu else LARGE),
        ("bert-base", random_encoder(BERT_BASE, seed), (3, 6, 9, 12), 128, (1,) if on_cpu else LARGE),
    )
    for name, backbone, exits, tokens, sizes in cases:
        model = RowExits(backbone, exits, num_labels=2, pool="first").eval()
        plain = RowExits(backbone, exits[-1:], num_labels=2, pool="first").eval()
        with tempfile.TemporaryDirectory() as folder:
            both = ("exits", model), ("none", plain)
            graph, without = (exported(variant, Path(folder) / key, provider=provider) for key, variant in both)
            for batch in sizes:
                inputs, case = inputs_of(backbone.config, batch, tokens, seed), f"{name} b{batch} t{tokens}"
                yield from _at_one(case, graph, without, inputs) if batch == 1 else _mixed(case, graph, without, inputs)
            if name == "bert-base":
                engines = [model.to(device).segments(), graph]
                if on_cpu:
                    engines.append(exported(model, Path(folder) / "int8", "int8"))
                yield from _engines(f"{name} b1 t{tokens}", engines, inputs_of(backbone.config, 1, tokens, seed))
    yield from _decoder("stories260k", stories, even_exits(stories.config.num_hidden_layers, 3), seed, device)
    yield from _decoder("llama-12x256", load_backbone(BUILT_IN_DECODER), (4, 8, 12), seed, device)


def exported(model: RowExits, folder: Path, precision: str = "float32", provider: str = CPU) -> OrtModel:
    """The exported graph of a model with a threshold as its rule, on as many threads as torch has."""
    folder.mkdir()
    manifest = write_graphs(model, model.segments(), Threshold(REACHED_BY_NONE), folder, precision, segments=True)
    return OrtModel(folder, manifest, provider, torch.get_num_threads())


def _at_one(case: str, graph: OrtModel, without: Segments, inputs: Inputs) -> Iterator[dict]:
    exits, last = graph.exits, len(graph.exits) - 1
    chain, leaving = graph.by_segment(Never()), [exit_at(k, len(exits)) for k in range(len(exits))]
    runs = [_run(graph, Never(), inputs), *(_run(graph, rule, inputs) for rule in leaving)]
    runs += [*(_run(chain, rule, inputs) for rule in leaving), _run(without, Never(), inputs)]
    full, *seconds, plain = medians(runs, f"onnx {case}", seconds_a_case=24.0)
    for k, layer in enumerate(exits[:-1]):
        yield row_of(f"{case} e{layer} graph", seconds[k], full * layer / exits[-1], LATER_EXIT if k else FIRST_EXIT)
    yield row_of(f"{case} never graph", seconds[last], full, NEVER)
    yield row_of(f"{case} never plain", full, plain, NEVER)
    for k, layer in enumerate(exits):
        yield row_of(f"{case} e{layer} chain", seconds[k], seconds[len(exits) + k], CHAIN)


def _mixed(case: str, graph: OrtModel, without: Segments, inputs: Inputs) -> Iterator[dict]:
    """At each exit, the more confident half of the remaining rows exits."""
    logits, *_ = read_every_exit(graph, inputs)
    rule, sizes = halving(logits, len(inputs)), []
    runs = [_run(graph, rule, inputs)]
    exit_index = early_exit(graph, rule, inputs).exit_index
    for k in range(len(graph.exits)):
        sizes.append(int((exit_index >= k).sum()))
        runs.append(_run(without, Never(), inputs.take(np.arange(sizes[-1]))))
    mixed, *whole = medians(runs, f"onnx {case} mixed", seconds_a_case=24.0)
    layers = np.diff((0, *graph.exits))
    yield row_of(f"{case} mixed graph", mixed, float(np.dot(layers / graph.exits[-1], whole)), MIXED)


def _engines(case: str, engines: list[Segments], inputs: Inputs) -> Iterator[dict]:
    """engines: torch, the graph and, on a CPU, the graph in int8."""
    runs = [_run(engine, Never(), inputs) for engine in engines]
    torch_seconds, onnx_seconds, *int8_seconds = medians(runs, f"onnx {case} engines", REST)
    yield row_of(f"{case} torch", onnx_seconds, torch_seconds, bar=0.80)
    for seconds in int8_seconds:
        yield row_of(f"{case} int8", seconds, onnx_seconds, bar=0.50)


def exit_at(k: int, num_exits: int) -> Threshold:
    """A threshold that is evaluated at every exit and first reached at exit k."""
    return Threshold(tuple(-np.inf if exit >= k else REACHED_BY_NONE for exit in range(num_exits)))


def halving(logits: np.ndarray, count: int) -> Threshold:
    """Thresholds at which half of the rows that reach an exit exit there. logits (N, K, C)."""
    thresholds, remaining = [], np.arange(count)
    for k in range(logits.shape[1] - 1):
        confidence = np.sort(max_probability(logits[remaining, k]))
        thresholds.append(float(confidence[len(confidence) // 2]))
        remaining = remaining[max_probability(logits[remaining, k]) < thresholds[-1]]
    return Threshold((*thresholds, 0.0))


def _run(segments: Segments, rule, inputs: Inputs) -> Callable:
    return partial(early_exit, segments, rule, inputs)


def _decoder(name: str, decoder: Decoder, exits: tuple[int, ...], seed: int, device: str) -> Iterator[dict]:
    """Seconds per token, NEW_TOKENS after a prompt of 8, prompt included; half of the tokens reach each threshold."""
    model, random = TokenExits(decoder, exits, "copy").eval(), np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        folder, provider, threads = Path(folder), PROVIDERS[device][0], torch.get_num_threads()
        manifest = write_graphs(model, TokenGraphs(model), Threshold(REACHED_BY_NONE), folder, segments=True)
        graph = partial(
            OrtTokenModel, Session(folder / "onnx/model.onnx", provider, threads), GraphRule(folder, manifest), manifest
        )
        chain = partial(OrtTokenSegments, open_sessions(folder, manifest, provider, threads), manifest, "copy_state")
        for batch in (1, 8):
            prompts = random.integers(3, decoder.config.vocab_size, (batch, 8)).tolist()
            yield from _steps(f"{name} b{batch} step", model, (graph, chain), prompts, device)


def _steps(
    case: str, model: TokenExits, engines: tuple[Callable, Callable], prompts: list[list[int]], device: str
) -> Iterator[dict]:
    rule, stories = _halving_thresholds(model, prompts), case.startswith("stories260k")

    def written(segments: Callable) -> list[Generated]:
        return gather(decode(segments(len(prompts), 8 + NEW_TOKENS), prompts, NEW_TOKENS, rule), len(prompts))

    texts = [written(engine) for engine in engines]
    if texts[0] != texts[1]:
        raise ValueError(f"bench onnx: {case}: expected the text of the graphs by segment, found another one")
    runs = [partial(written, engine) for engine in engines]
    if stories:
        runs.append(generate_of_transformers(model.backbone, prompts, NEW_TOKENS, device))
    early, *others = medians(runs, f"onnx {case}")
    yield row_of(f"{case} chain", early / NEW_TOKENS, others[0] / NEW_TOKENS, 0.80 if stories else 1.10)
    if stories:
        run = np.mean([text.layers_run for text in texts[0]]) / model.exits[-1]
        yield row_of(f"{case} transformers", early / NEW_TOKENS, others[1] / NEW_TOKENS, float(run))


def _halving_thresholds(model: TokenExits, prompts: list[list[int]]) -> Threshold:
    """Thresholds that half of the tokens of a text without exits reach, midway between two values: engines round."""
    written = gather(model.generate(prompts, Never(), max_new_tokens=NEW_TOKENS, stop=()), len(prompts))
    ids = torch.tensor([[*prompt, *text.tokens] for prompt, text in zip(prompts, written)])
    counted = torch.arange(ids.shape[1])[None] >= len(prompts[0])
    with torch.inference_mode():
        logits = model(ids, counted.expand(ids.shape))
    largest = (exit_logits.softmax(-1).amax(-1).sort().values for exit_logits in logits)
    return Threshold(tuple(float(ordered[len(ordered) // 2 - 1 : len(ordered) // 2 + 1].mean()) for ordered in largest))
