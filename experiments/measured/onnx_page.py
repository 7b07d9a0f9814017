"""results/onnx.md, the graph that stops by itself: speed, equality with torch, heads, memory, models end to end.

bench     `mini-ee bench onnx --model all-MiniLM-L6-v2 --threads 2`
price     accuracy of dense and of linear heads on TREC
parity    runs of several methods on MiniLM (400 rows, one epoch): the number of equal labels and of equal numbers of
          layers in torch and in plain onnxruntime, on SST-2's dev and TREC's test, in batches of 1 and of 32
memory    size on disk relative to the run's safetensors, seconds to load, private and resident megabytes of a session
          that has run, in its own process, for a model with exits and one without
end       a run on SST-2, exported: the result of `mini-ee evaluate`, ROUNDS times
decoder   the built-in decoder with heads of `mini-ee train self-supervised`: text with early exits compared with text
          without, in torch and in the exported graph, and lossless decoding compared with full decoding
heads     the time to exit after N layers relative to N/L of a model without exits, with dense and with linear heads; a
          model of the first layers alone; LoRA exits compared with one graph per segment
precision int8 and float16 compared with float32, see precision.py
batches   layers saved and processor time on TREC by threshold, in batches of one, 8 and 32, and in int8; one thread
The times need two cores that nothing else uses. Trained runs stay in the work folder for later calls.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from safetensors.torch import save_file

import mini_ee
from mini_ee.experiments.bench.common import BERT_BASE, MINILM, inputs_of, medians, random_encoder
from mini_ee.experiments.bench.onnx import REACHED_BY_NONE, exit_at, exported
from mini_ee.experiments.measured.command import answer_of_command, session_memory
from mini_ee.experiments.measured.precision import precision, precision_figures
from mini_ee.experiments.trainings import Sources, trained
from mini_ee.lab.calibration import calibrate, end_to_end, observe
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.evaluation.plots import can_draw, new_figure, save_figure
from mini_ee.lab.evaluation.row_evaluation import measure_seconds, timed_batches
from mini_ee.lab.evaluation.token_evaluation import EPSILON_GRID, written_texts
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.generation import generate
from mini_ee.lab.exits.lossless import generate_lossless
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.export.row_segments import OrtModel
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import share_threads
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.rules import Never, Threshold
from mini_ee.weights.pretrain_llama import read_stories

MODEL = "all-MiniLM-L6-v2"
PARITY_METHODS = ("joint", "lora-exits", "consistent", "berxit", "pabee", "pcee-bert")
PARITY_SPLITS = {"SST-2": "dev", "TREC": "test"}  # task -> its split that parity compares on
EXITS = (2, 4, 6)

THREADS, ROUNDS = 2, 3
PICTURE = "onnx-batches.png"
STORIES, TIMED_STORIES, PROMPT_WORDS, NEW_TOKENS = 40, 8, 12, 48  # of the decoder
AGREEMENT, CONFIDENCE_MEASURE = 0.95, "breaking_ties"
WAYS = {
    "one text": ("float32", 1),
    "batches of 8": ("float32", 8),
    "batches of 32": ("float32", 32),
    "one text, int8": ("int8", 1),
}
THRESHOLDS = (0.995, 0.99, 0.98, 0.95, 0.9, 0.8, 0.65, 0.5, 0.3)


def bench(sources: Sources, work: Path) -> list[dict]:
    """The rows of the benchmark onnx."""
    model = sources.find("weights", MODEL)
    return answer_of_command("bench", "onnx", "--model", model, threads=THREADS)["rows"]


def parity(sources: Sources, work: Path) -> list[dict]:
    """The exported graph compared with torch, for each method, task and batch size."""
    cases = []
    for name, split in PARITY_SPLITS.items():
        rows = load_task(sources.find("data", name)).split(split)
        for method in tqdm(PARITY_METHODS, desc=name):
            run = trained_classifier(sources, work / f"{method}-{name}", method, name, max_train=400, epochs=1)
            with tempfile.TemporaryDirectory() as out:
                mini_ee.export(run, f"{out}/exported", texts=rows.texts)
                session = onnxruntime.InferenceSession(
                    f"{out}/exported/onnx/model.onnx", providers=["CPUExecutionProvider"]
                )
                for size in (1, 32):
                    case = {"task": name, "method": method, "batch": size}
                    cases.append(case | compare(run, session, run.encode(rows.texts), size))
    return cases


def trained_classifier(sources: Sources, folder: Path, method: str, task: str, **options):
    """The run in a folder; it is trained if the folder does not exist, and an interrupted training goes on."""
    return trained(folder, {"method": method, "model": MODEL, "task": task, "exits": EXITS} | options, 0, sources)


def compare(run, session, encoded, size: int) -> dict:
    """The number of equal labels and of equal numbers of layers, and the largest difference of a logit."""
    labels = layers = 0
    difference = 0.0
    for first in range(0, len(encoded), size):
        inputs = encoded.batch(np.arange(first, min(first + size, len(encoded))))
        expected = early_exit(run.segments(), run.rule, inputs)
        feeds = {name: getattr(inputs, name) for name in ("input_ids", "attention_mask", "token_type_ids")}
        logits, label, depth = session.run(["logits", "label", "layers"], feeds)
        labels += int((label == expected.logits.argmax(axis=1)).sum())
        layers += int((depth == expected.layers_run).sum())
        difference = max(difference, float(abs(logits - expected.logits).max()))
    return {"rows": len(encoded), "labels": labels, "layers": layers, "difference": difference}


def memory(sources: Sources, work: Path) -> list[dict]:
    """Size, time to load and memory of a session, with exits and without."""
    cases = []
    for name, config, exits, tokens in (("MiniLM", MINILM, EXITS, 32), ("BERT-base", BERT_BASE, (3, 6, 9, 12), 128)):
        backbone = random_encoder(config, 0)
        for kind, chosen in (("plain", exits[-1:]), ("exits", exits)):
            model = RowExits(backbone, chosen, 2, pool="first").eval()
            with tempfile.TemporaryDirectory() as folder:
                folder = Path(folder)
                write_graphs(model, model.segments(), Threshold(REACHED_BY_NONE), folder)
                save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "run")
                files = sum(path.stat().st_size for path in (folder / "onnx").iterdir())
                session = session_memory(folder / "onnx/model.onnx", tokens)
                case = {"model": name, "kind": kind, "disk": files / (folder / "run").stat().st_size}
                cases.append(case | session)
    return cases


def heads(sources: Sources, work: Path) -> dict:
    """Times to exit, relative to the model without exits, with each kind of head; LoRA exits relative to segments."""
    share_threads(THREADS)
    backbone, runs = random_encoder(MINILM, 0), {}
    inputs = inputs_of(backbone.config, 1, 32, 0)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("dense", "linear"):
            models = {"exits": (backbone, EXITS), "plain": (backbone, (6,)), "alone": (backbone.first_layers(2), (2,))}
            for name, (layers, exits) in models.items():
                model = RowExits(layers, exits, 2, pool="first")
                if kind == "linear":
                    model.use_heads("linear")
                graph = exported(model.eval(), Path(folder) / f"{kind}-{name}")
                rules = [exit_at(k, 3) for k in range(3)] if name == "exits" else [Never()]
                runs |= {(kind, name, k): partial(early_exit, graph, rule, inputs) for k, rule in enumerate(rules)}
        lora = LoRAExits(backbone, EXITS, 2, pool="first").eval()
        (Path(folder) / "lora").mkdir()
        manifest = write_graphs(lora, lora.segments(), Threshold(REACHED_BY_NONE), Path(folder) / "lora", segments=True)
        graph = OrtModel(Path(folder) / "lora", manifest, threads=THREADS)
        for name, engine in (("graph", graph), ("chain", graph.by_segment(Never()))):
            runs |= {("lora", name, k): partial(early_exit, engine, exit_at(k, 3), inputs) for k in range(3)}
        seconds = dict(zip(runs, medians(list(runs.values()), "heads", seconds_a_case=20.0)))
    ratios = {"lora": [seconds["lora", "graph", k] / seconds["lora", "chain", k] for k in range(3)]}
    for kind in ("dense", "linear"):
        whole = seconds[kind, "plain", 0]
        ratios[kind] = [seconds[kind, "exits", k] / whole * 6 / layer for k, layer in enumerate(EXITS)]
        ratios[f"{kind} alone"] = seconds[kind, "alone", 0] / whole * 3
    return ratios


def evaluated(path: Path, task: Path, *options: str) -> dict:
    """The result of `mini-ee evaluate` on an exported folder or a run."""
    answer = answer_of_command("evaluate", path, "--task", task, *options, threads=THREADS)
    return {key: answer[key] for key in ("score", "full_score", "mean_layers", "per_exit_score", "speedup")}


def price(sources: Sources, work: Path) -> dict:
    """The result of `mini-ee evaluate` with each kind of head."""
    by_head = {}
    for head in ("dense", "linear"):
        run = trained_classifier(sources, work / f"{head}-heads", "joint", "TREC", head=head, max_train=2000, epochs=3)
        by_head[head] = evaluated(run.folder, sources.find("data", "TREC"))
    return by_head


def end(sources: Sources, work: Path) -> list[dict]:
    """The results of `mini-ee evaluate` on an exported run."""
    run = trained_classifier(sources, work / "end", "joint", "SST-2", max_train=6000, epochs=3)
    with tempfile.TemporaryDirectory() as out:
        mini_ee.export(run, Path(out) / "exported")
        task = sources.find("data", "SST-2")
        return [evaluated(Path(out) / "exported", task, "--batch-size", "1") for _ in range(ROUNDS)]


def decoder(sources: Sources, work: Path) -> dict:
    """Generation with thresholds that give AGREEMENT on other texts; one text at a time, seconds per token."""
    run = trained(work / "decoder", {"method": "self-supervised"}, 0, sources)
    model, backbone, middle = run.model, run.model.backbone, len(run.exits) // 2 - 1
    _, stories = read_stories(sources.find("data", "TinyStories") / "tinystories_sample.txt")
    texts = [" ".join(story.split()[:PROMPT_WORDS]) for story in stories[:STORIES]]
    prompts = [run.tokenizer.backend.encode(text).ids for text in texts]
    calibration = observe(record_texts(model, written_texts(run, 0)[1]), CONFIDENCE_MEASURE)
    rules = (calibrate(calibration, epsilon, measure=CONFIDENCE_MEASURE) for epsilon in EPSILON_GRID)
    rule = next(rule for rule in rules if end_to_end(calibration, rule) >= AGREEMENT)
    limits = {"max_new_tokens": NEW_TOKENS, "stop": backbone.config.stop_tokens}
    draft = {"exit_layer": run.exits[middle], "head": model.heads[middle]}
    with tempfile.TemporaryDirectory() as out:
        mini_ee.export(run, Path(out) / "exported")
        graph = Runtime(Path(out) / "exported", threads=THREADS).generate
        ways = {
            "full": partial(generate, backbone, **limits),
            "early": partial(model.generate, rule=rule, missing_kv="copy_state", **limits),
            "recompute": partial(model.generate, rule=rule, missing_kv="recompute", **limits),
            "lossless": partial(generate_lossless, backbone, **limits, **draft),
            "graph full": partial(graph, rule=Never(), max_new_tokens=NEW_TOKENS),
            "graph early": partial(graph, rule=rule, max_new_tokens=NEW_TOKENS),
        }

        def written(way: Callable, prompts: list) -> list:
            return [gather(way([prompt]), 1)[0] for prompt in prompts]

        outputs = {name: written(way, prompts) for name, way in ways.items()}
        runs = [partial(written, way, prompts[:TIMED_STORIES]) for way in ways.values()]
        times = medians(runs, "decoder", 0.1, seconds_a_case=60.0)
    tokens = (sum(len(text.tokens) for text in some[:TIMED_STORIES]) for some in outputs.values())
    per_token = {name: time / count for name, time, count in zip(outputs, times, tokens)}
    layers = {name: np.concatenate([text.layers_run for text in some]) for name, some in outputs.items()}

    def agreement(some: list) -> float:
        continued = [Text([*prompt, *text.tokens], len(prompt) - 1) for prompt, text in zip(prompts, some)]
        return float(record_texts(model, continued, last=False).logits[:, -1, 1].mean())

    decoder_figures = {"exits": list(run.exits), "texts": len(texts), "timed": TIMED_STORIES}
    decoder_figures["thresholds"] = rule.to_dict()["threshold"][:-1]
    for name in ("early", "recompute", "graph early", "lossless"):
        against = per_token["graph full" if name.startswith("graph") else "full"]
        figures = {"tokens": len(layers[name]), "layers": float(layers[name].mean())}
        decoder_figures[name] = figures | {"agreement": agreement(outputs[name]), "speedup": against / per_token[name]}
    decoder_figures["lossless"]["drafted"] = float((layers["lossless"] == run.exits[middle]).mean())
    pairs = zip(outputs["lossless"], outputs["full"])
    decoder_figures["lossless"]["equal"] = sum(one.tokens == other.tokens for one, other in pairs)
    decoder_figures["graph early"]["equal"] = sum(
        one == other for one, other in zip(outputs["graph early"], outputs["early"])
    )
    return decoder_figures


def batches(sources: Sources, work: Path) -> dict:
    """Way of WAYS -> by threshold, and at first without exits: the share of the layers saved, and the processor
    time relative to the same graph in float32 without exits in batches of this size.
    """
    torch.set_num_threads(1)
    layers = tuple(range(1, EXITS[-1] + 1))
    run = trained_classifier(sources, work / "batches", "joint", "TREC", max_train=1500, epochs=4, exits=layers)
    rows, lines = load_task(sources.find("data", "TREC")).split("test"), {}
    rules = [Never(), *map(Threshold, THRESHOLDS)]
    with tempfile.TemporaryDirectory() as out:
        opened = {}
        for precision in ("float32", "int8"):
            mini_ee.export(run, Path(out) / precision, texts=rows.texts[:100], precision=precision)
            opened[precision] = Runtime(Path(out) / precision, threads=1)
        for size in (1, 8, 32):
            ways = [way for way, (_, way_size) in WAYS.items() if way_size == size]
            runtimes = [opened[WAYS[way][0]] for way in ways]
            encoded = opened["float32"].encode(rows.texts)
            runs = [(runtime.segments(), rule, encoded) for runtime in runtimes for rule in rules]
            seconds = measure_seconds(runs, timed_batches(encoded, size), clock=time.process_time)
            seconds = seconds.reshape(len(ways), len(rules))
            for way, runtime, way_seconds in zip(ways, runtimes, seconds):
                answers = [runtime.run(rows.texts, rule=rule, batch_size=size) for rule in rules]
                depths = [float(np.mean([answer.layers for answer in some])) for some in answers]
                saved = [1 - depth / layers[-1] for depth in depths]
                lines[way] = {"saved": saved, "time": (way_seconds / seconds[0, 0]).tolist()}
    return lines


def draw(figures: dict, folder: Path) -> None:
    """Time against layers saved, a line a way, if matplotlib is installed."""
    if not can_draw():
        return
    figure, axes = new_figure()
    axes.plot([0, 100], [100, 0], ":", color="#444444", label="as many per cent of the time as of the layers")
    for way, line in figures["batches"].items():
        axes.plot(*(100 * np.array(line[name]) for name in ("saved", "time")), marker="o", markersize=4, label=way)
    axes.set(xlabel="layers saved, %", ylabel="time, % of float32 without exits", xlim=(0, 85), ylim=(0, 110))
    axes.legend(frameon=False)
    save_figure(figure, folder / PICTURE)


def _part(measure: Callable) -> Callable:
    """A measurement as a part of the page: run on THREADS threads, with the number of cores and the version."""

    def measured(sources: Sources, work: Path) -> dict:
        torch.set_num_threads(THREADS)
        figures = measure(sources, work)
        return {measure.__name__: figures, "cores": os.cpu_count(), "onnxruntime": onnxruntime.__version__}

    return measured


ORDER = (
    bench,
    price,
    parity,
    memory,
    end,
    decoder,
    precision,
    batches,
    heads,
)  # heads shares threads from then on: the last
PARTS = {measure.__name__: _part(measure) for measure in ORDER}


ENGINES = {
    "early": "torch, `copy_state`",
    "recompute": "torch, `recompute`",
    "graph early": "exported graph, `copy_state`",
    "lossless": "torch, lossless decoding",
}


def page_figures(figures: dict) -> dict:
    """What the first paragraphs compare, and the engines of the decoder; lossless decoding is the last."""
    heads, end, decoder, parity = (figures[key] for key in ("heads", "end", "decoder", "parity"))
    deepest, speedups = decoder["exits"][-1], [one["speedup"] for one in end]
    return {
        **{"ideal": EXITS[-1] / end[0]["mean_layers"], "speedup": float(np.median(speedups))},
        **{"speedups": [f"{value:.2f}" for value in speedups], "deepest": deepest, "graph": decoder["graph early"]},
        **{"predictions": sum(one["rows"] for one in parity), "equal_labels": sum(one["labels"] for one in parity)},
        "equal_depths": sum(one["layers"] for one in parity),
        "difference": max(one["difference"] for one in parity),
        "passed": sum(row["holds"] for row in figures["bench"]),
        **{
            "level": AGREEMENT,
            "words": PROMPT_WORDS,
            "new_tokens": NEW_TOKENS,
            "lora": [f"{value:.3f}" for value in heads["lora"]],
        },
        "decoders": [(name, decoder[engine]) for engine, name in ENGINES.items()],
        **precision_figures(figures["precision"]),
    }
