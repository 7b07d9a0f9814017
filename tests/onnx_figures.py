"""The figures of results/onnx.md: speed, parity, heads, memory, and a trained model end to end.

    MINI_EE_SHARED=../shared python tests/onnx_figures.py [PART ...]   measures these parts, or all, writes the page
    python tests/onnx_figures.py --page                                writes the page from results/onnx.json

bench     `mini-ee bench onnx --model all-MiniLM-L6-v2 --threads 2`
price     what linear heads cost on TREC
parity    each method's run on MiniLM (400 rows, one epoch) through torch, and its model.onnx through plain onnxruntime:
          on how many rows of SST-2's dev and TREC's test, in batches of 1 and of 32, label and layers are equal
memory    size on disk over the run's safetensors, seconds to load, private and resident megabytes of a session that has
          run, in a process of its own, of a model with exits and of one without
end       a run on SST-2, exported: what `mini-ee evaluate` measures of it, ROUNDS times
decoder   the built-in decoder with heads of `mini-ee train self-supervised`: text under thresholds at which LEVEL of
          other tokens agree over text without exits, in torch and in the exported graph; lossless over full decoding
heads     leaving at each exit over its share of a model without exits, with dense and with linear heads; a model of the
          first layers alone; LoRA exits over their graphs by segment
Times want two quiet cores. Runs are kept in the work folder, so that a second call only measures.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from safetensors.torch import save_file

import mini_ee
from mini_ee.calibration import calibrate, end_to_end, observe
from mini_ee.data.tasks import load_task
from mini_ee.data.texts import Text
from mini_ee.early_exit import early_exit
from mini_ee.evaluation.texts import GRID, written_texts
from mini_ee.exits.decoding import gather
from mini_ee.exits.generation import generate, generate_lossless
from mini_ee.exits.rows import RowExits
from mini_ee.exits.tokens import record_texts
from mini_ee.experiments.bench.common import BERT_BASE, MINILM, inputs_of, medians, random_encoder
from mini_ee.experiments.bench.onnx import REACHED_BY_NONE, exported, leave_at
from mini_ee.experiments.markdown import wrapped
from mini_ee.export.row_segments import OrtModel
from mini_ee.export.runtime import Runtime
from mini_ee.export.sessions import share_threads
from mini_ee.export.writer import write_graphs
from mini_ee.methods.lora_exits import LoRAExits
from mini_ee.rules import NeverExit, Threshold
from mini_ee.weights.pretrain_llama import read_stories

METHODS = ("joint", "lora-exits", "consistent", "berxit", "pabee", "pcee-bert")
EXITS = (2, 4, 6)

THREADS, ROUNDS = 2, 3
STORIES, TIMED, BEGINNING, NEW_TOKENS = 40, 8, 12, 48  # of the decoder: stories, those timed, words given, tokens
LEVEL, MEASURE = 0.95, "breaking_ties"

RESULTS = Path(__file__).parent.parent / "results"
FIGURES, PAGE = RESULTS / "onnx.json", RESULTS / "onnx.md"

SESSION = """
import sys, time, numpy, onnxruntime
def memory(kind):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(kind))
options = onnxruntime.SessionOptions()
options.log_severity_level, options.intra_op_num_threads = 3, 2
before, begin = (memory("RssAnon"), memory("VmRSS")), time.perf_counter()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
load = time.perf_counter() - begin
ids = numpy.random.default_rng(0).integers(1000, 30000, (1, int(sys.argv[2])))
feeds = {"input_ids": ids, "attention_mask": numpy.ones_like(ids), "token_type_ids": numpy.zeros_like(ids)}
for _ in range(5):
    session.run(None, feeds)
private, resident = memory("RssAnon") - before[0], memory("VmRSS") - before[1]
print([load, private, resident])
"""


def bench(shared: Path, work: Path) -> list[dict]:
    return mini_ee_says("bench", "onnx", "--model", shared / "weights" / "all-MiniLM-L6-v2")["rows"]


def mini_ee_says(*arguments) -> dict:
    """The JSON of a command, on THREADS threads."""
    command = [sys.executable, "-m", "mini_ee", *map(str, arguments), "--threads", str(THREADS), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def parity(shared: Path, work: Path) -> list[dict]:
    found = []
    for name, split in (("SST-2", "dev"), ("TREC", "test")):
        rows = load_task(shared / "data" / name).split(split)
        for method in METHODS:
            run = trained(shared, work / f"{method}-{name}", method, name, max_train=400, epochs=1)
            with tempfile.TemporaryDirectory() as out:
                mini_ee.export(run, f"{out}/exported", texts=rows.texts)
                session = onnxruntime.InferenceSession(f"{out}/exported/model.onnx", providers=["CPUExecutionProvider"])
                for size in (1, 32):
                    about = {"task": name, "method": method, "batch": size}
                    found.append(about | compare(run, session, run.encode(rows.texts), size))
                    print(found[-1], flush=True)
    return found


def trained(shared: Path, folder: Path, method: str, task: str, **options):
    """The run in a folder; trained, where it is not there."""
    if not folder.exists():
        model = shared / "weights" / "all-MiniLM-L6-v2"
        mini_ee.train(method, model, shared / "data" / task, folder, exits=EXITS, **options)
    return mini_ee.load_run(folder)


def compare(run, session, encoded, size: int) -> dict:
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


def memory(shared: Path, work: Path) -> list[dict]:
    found = []
    for name, config, exits, tokens in (("MiniLM", MINILM, EXITS, 32), ("BERT-base", BERT_BASE, (3, 6, 9, 12), 128)):
        backbone = random_encoder(config, 0)
        for kind, chosen in (("plain", exits[-1:]), ("exits", exits)):
            model = RowExits(backbone, chosen, 2, pool="first").eval()
            with tempfile.TemporaryDirectory() as folder:
                folder = Path(folder)
                write_graphs(model, model.segments(), Threshold(REACHED_BY_NONE), folder)
                save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "run")
                files = sum((folder / each).stat().st_size for each in ("model.onnx", "model.safetensors"))
                command = [sys.executable, "-c", SESSION, str(folder / "model.onnx"), str(tokens)]
                said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                about = {"model": name, "kind": kind, "disk": files / (folder / "run").stat().st_size}
                found.append(about | dict(zip(("load", "private", "resident"), said)))
                print(found[-1], flush=True)
    return found


def heads(shared: Path, work: Path) -> dict:
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
                rules = [leave_at(k, 3) for k in range(3)] if name == "exits" else [NeverExit()]
                runs |= {(kind, name, k): partial(early_exit, graph, rule, inputs) for k, rule in enumerate(rules)}
        lora = LoRAExits(backbone, EXITS, 2, pool="first").eval()
        (Path(folder) / "lora").mkdir()
        about = write_graphs(lora, lora.segments(), Threshold(REACHED_BY_NONE), Path(folder) / "lora", segments=True)
        graph = OrtModel(Path(folder) / "lora", about, threads=THREADS)
        for name, engine in (("graph", graph), ("chain", graph.by_segment(NeverExit()))):
            runs |= {("lora", name, k): partial(early_exit, engine, leave_at(k, 3), inputs) for k in range(3)}
        seconds = dict(zip(runs, medians(list(runs.values()), "heads", seconds_a_case=20.0)))
    found = {"lora": [seconds["lora", "graph", k] / seconds["lora", "chain", k] for k in range(3)]}
    for kind in ("dense", "linear"):
        whole = seconds[kind, "plain", 0]
        found[kind] = [seconds[kind, "exits", k] / whole * 6 / layer for k, layer in enumerate(EXITS)]
        found[f"{kind} alone"] = seconds[kind, "alone", 0] / whole * 3
    return found


def evaluated(path: Path, task: Path, *options: str) -> dict:
    """What `mini-ee evaluate` says of an exported folder or a run."""
    said = mini_ee_says("evaluate", path, "--task", task, *options)
    return {key: said[key] for key in ("score", "full_score", "mean_layers", "per_exit_score", "speedup")}


def price(shared: Path, work: Path) -> dict:
    found = {}
    for head in ("dense", "linear"):
        run = trained(shared, work / f"{head}-heads", "joint", "TREC", head=head, max_train=2000, epochs=3)
        found[head] = evaluated(run.folder, shared / "data" / "TREC")
    return found


def end(shared: Path, work: Path) -> list[dict]:
    run = trained(shared, work / "end", "joint", "SST-2", max_train=6000, epochs=3)
    with tempfile.TemporaryDirectory() as out:
        mini_ee.export(run, Path(out) / "exported")
        task = shared / "data" / "SST-2"
        return [evaluated(Path(out) / "exported", task, "--batch-size", "1") for _ in range(ROUNDS)]


def decoder(shared: Path, work: Path) -> dict:
    """Under thresholds at which LEVEL of other tokens are the full model's. A text at a time; times are of a token."""
    folder = work / "decoder"
    if not folder.exists():
        mini_ee.train("self-supervised", out=folder)
    run = mini_ee.load_run(folder)
    model, backbone, middle = run.model, run.model.backbone, len(run.exits) // 2 - 1
    _, stories = read_stories(shared / "data" / "TinyStories" / "tinystories_sample.txt")
    texts = [" ".join(story.split()[:BEGINNING]) for story in stories[:STORIES]]
    prompts = [run.tokenizer.backend.encode(text).ids for text in texts]
    taken = observe(record_texts(model, written_texts(run, 0)[1]), MEASURE)
    rules = (calibrate(taken, epsilon, measure=MEASURE) for epsilon in GRID)
    rule = next(rule for rule in rules if end_to_end(taken, rule) >= LEVEL)
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
            "graph full": partial(graph, rule=NeverExit(), max_new_tokens=NEW_TOKENS),
            "graph early": partial(graph, rule=rule, max_new_tokens=NEW_TOKENS),
        }

        def written(way: Callable, prompts: list) -> list:
            return [gather(way([prompt]), 1)[0] for prompt in prompts]

        said = {name: written(way, prompts) for name, way in ways.items()}
        runs = [partial(written, way, prompts[:TIMED]) for way in ways.values()]
        times = medians(runs, "decoder", 0.1, seconds_a_case=60.0)
    of_token = {name: time / sum(len(text.tokens) for text in said[name][:TIMED]) for name, time in zip(said, times)}
    layers = {name: np.concatenate([text.layers_run for text in some]) for name, some in said.items()}

    def agreement(some: list) -> float:
        own = [Text([*prompt, *text.tokens], len(prompt) - 1) for prompt, text in zip(prompts, some)]
        return float(record_texts(model, own, last=False).logits[:, -1, 1].mean())

    found = {
        "exits": list(run.exits),
        "texts": len(texts),
        "timed": TIMED,
        "thresholds": rule.to_dict()["threshold"][:-1],
    }
    for name in ("early", "recompute", "graph early", "lossless"):
        against = of_token["graph full" if name.startswith("graph") else "full"]
        figures = {"tokens": len(layers[name]), "layers": float(layers[name].mean())}
        found[name] = figures | {"agreement": agreement(said[name]), "speedup": against / of_token[name]}
    found["lossless"]["drafted"] = float((layers["lossless"] == run.exits[middle]).mean())
    found["lossless"]["equal"] = sum(one.tokens == other.tokens for one, other in zip(said["lossless"], said["full"]))
    found["graph early"]["equal"] = sum(one == other for one, other in zip(said["graph early"], said["early"]))
    return found


PARTS = {each.__name__: each for each in (bench, price, parity, memory, end, decoder, heads)}  # the last shares threads

# ---- The page ----
PAGE_TEXT = """# One ONNX graph that stops by itself

`mini-ee export RUN --out DIR` writes `model.onnx`: see [tutorial.md](../tutorial.md), section 4.
`tests/onnx_figures.py` measures, keeps [onnx.json](onnx.json), and writes this page from it. On {cores} cores of a
shared machine, ONNX Runtime {onnxruntime} on the CPU; no GPU was at hand.

## Speed

`mini-ee bench onnx --model all-MiniLM-L6-v2 --threads 2`: ratios of what runs in turns in one process, warm, medians.
The rows of llama-12x256 are of a later run than the others.

| case | ms | against, ms | ratio | bar | |
|---|---|---|---|---|---|
{bench}

A case is a model, the batch (b), the tokens (t), the layer of an exit (e), and what is compared. The ratio is the first
time over the second:

- `eN graph`: all rows leave after N of L layers, and heads on the way are read; over N/L of the graph that reads no
  head on the way.
- `never graph`: all heads are read and nobody leaves; over the graph that reads no head on the way.
- `never plain`: the graph that reads no head on the way; over the model exported without exits.
- `mixed graph`: the surer half of the rows leaves at each exit; over the sum of its layers' times at the batch sizes
  that are left.
- `chain`: the one graph; over graphs by segment (`--segments`), which the loop drives from Python.
- `step`: a token of a decoder, of 64 behind a prompt of 8, half of which reach each threshold; over graphs by segment,
  or over transformers' `generate` without exits on the same weights, where the bar is the share of the layers run.

An exit costs its layers, the embeddings and the heads. On MiniLM at batch 1, the time to leave after N layers, over
N/6 of the time of the model exported without exits:

| heads | after 2 | after 4 | after 6 | the first two layers alone, one head |
|---|---|---|---|---|
{heads}

What `--head linear`, which leaves out the head's dense layer and tanh, costs on TREC (MiniLM, 2,000 rows, 3 epochs,
`joint`):

| heads | after 2 | after 4 | after 6 | the default rule | layers |
|---|---|---|---|---|---|
{price}

LoRA exits restart each stream in the graph; their backbone's weights are used in several branches, stand outside of
them, and are not prepacked for them: on MiniLM at batch 1 leaving at layers 2, 4 and 6 takes {lora} of the graphs by
segment.

## End to end

`joint --exits 2,4,6 --max-train 6000 --epochs 3` on SST-2 with MiniLM, exported, `mini-ee evaluate DIR --task SST-2
--batch-size 1 --threads 2`: accuracy {score} on dev (full model {full}), {layers} layers of 6. The layers promise
{promised} times the speed; measured {speedups}.

## A decoder, end to end

The built-in decoder with heads after layers {exits} by `mini-ee train self-supervised --out R`, under thresholds at
which {level} of the tokens of texts that it wrote agree with the full model. It goes on from the first {words} words of
{texts} stories that it was not trained on, a text at a time, by {new_tokens} tokens at most. The speed-up is over the
same engine without exits, timed on the first {timed} of them:

| | tokens | the full model's | layers of {deepest} | promised | measured |
|---|---|---|---|---|---|
{decoder}

In {graph_equal} of the {texts} texts the graph writes torch's tokens and leaves after torch's layers. Lossless
decoding drafts after layer {drafts_after}, four tokens at most and while the head is sure, writes the full model's text
in {lossless_equal} of the {texts}, and {drafted} of its tokens were drafts.

## Parity

MiniLM with exits after 2, 4 and 6 under {methods} (400 rows, one epoch), SST-2's dev and TREC's test, batches of 1 and
of 32, plain `onnxruntime.InferenceSession`, {cases} cases: of {rows:,} answers {labels:,} have torch's label and
{depths:,} its layers; logits are within {difference:.1e}.

## Size, memory, time to load

A model with exits beside the same without; a session that has run, in a process of its own; resident are also the pages
of the weights' file that stay mapped for the branches.

| | on disk, of its safetensors | loads in, s | private, MB | resident, MB |
|---|---|---|---|---|
{memory}
"""


def digits(values: list[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]


def listed(values: list[str]) -> str:
    return ", ".join(values[:-1]) + f" and {values[-1]}"


def decoder_words(said: dict) -> dict:
    *exits, deepest = said["exits"]
    names = {"early": "torch, gaps filled by `copy_state`", "recompute": "torch, gaps filled by `recompute`"}
    names |= {"graph early": "the exported graph, `copy_state`", "lossless": "torch, lossless"}
    rows = []
    for key, name in names.items():
        one = said[key]
        promised = "" if key == "lossless" else f"{deepest / one['layers']:.2f}"
        depth = "" if key == "lossless" else f"{one['layers']:.2f}"
        rows.append([name, f"{one['tokens']:,}", f"{one['agreement']:.3f}", depth, promised, f"{one['speedup']:.2f}"])
    return {
        "decoder": "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "exits": listed([str(layer) for layer in exits]),
        "deepest": deepest,
        "level": LEVEL,
        "words": BEGINNING,
        "texts": said["texts"],
        "timed": said["timed"],
        "new_tokens": NEW_TOKENS,
        "graph_equal": said["graph early"]["equal"],
        "drafts_after": said["exits"][len(said["exits"]) // 2 - 1],
        "drafted": f"{said['lossless']['drafted']:.3f}",
        "lossless_equal": said["lossless"]["equal"],
    }


def page(figures: dict) -> str:
    """results/onnx.md."""
    rows = {"bench": []}
    for row in figures["bench"]:
        times = [f"{row[key] * 1e3:.3f}" for key in ("seconds", "against_seconds")]
        numbers = f"{row['ratio']:.3f}", f"{row['bar']:.3f}"
        rows["bench"].append([f"`{row['case']}`", *times, *numbers, "holds" if row["holds"] else "**missed**"])
    found, end = figures["heads"], figures["end"]
    rows["heads"] = [[kind, *digits(found[kind]), f"{found[f'{kind} alone']:.3f}"] for kind in ("dense", "linear")]
    rows["price"] = [
        [head, *digits(said["per_exit_score"]), f"{said['score']:.3f}", f"{said['mean_layers']:.2f}"]
        for head, said in figures["price"].items()
    ]
    rows["memory"] = [
        [f"{each['model']}, {'with exits' if each['kind'] == 'exits' else 'without'}", f"{each['disk']:.3f}"]
        + [f"{each['load']:.2f}", f"{each['private']:.1f}", f"{each['resident']:.1f}"]
        for each in figures["memory"]
    ]
    tables = {name: "\n".join(f"| {' | '.join(row)} |" for row in some) for name, some in rows.items()}
    parity = figures["parity"]
    text = PAGE_TEXT.format(
        **tables | {"cores": figures["cores"], "onnxruntime": figures["onnxruntime"]},
        **{"lora": listed(digits(found["lora"])), "methods": listed(list(METHODS)), "cases": len(parity)},
        **{"rows": sum(each["rows"] for each in parity), "labels": sum(each["labels"] for each in parity)},
        **{"depths": sum(each["layers"] for each in parity), "difference": max(each["difference"] for each in parity)},
        **{"score": f"{end[0]['score']:.3f}", "full": f"{end[0]['full_score']:.3f}"},
        **{"layers": f"{end[0]['mean_layers']:.2f}", "promised": f"{EXITS[-1] / end[0]['mean_layers']:.2f}"},
        **decoder_words(figures["decoder"]),
        speedups=listed([f"{each['speedup']:.2f}" for each in end]),
    )
    return wrapped(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", default=list(PARTS))
    parser.add_argument("--work", type=Path, default=Path("/tmp/onnx_figures"))
    parser.add_argument("--page", action="store_true", help="write the page alone")
    given = parser.parse_args()
    torch.set_num_threads(THREADS)
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in () if given.page else given.parts:
        found = PARTS[name](Path(os.environ["MINI_EE_SHARED"]), given.work)
        figures |= {name: found, "cores": os.cpu_count(), "onnxruntime": onnxruntime.__version__}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    if PARTS.keys() <= figures.keys():
        PAGE.write_text(page(figures))
