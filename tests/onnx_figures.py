"""The figures of results/onnx.md that `mini-ee bench onnx` does not print: parity, memory, linear heads, LoRA exits.

    MINI_EE_SHARED=../shared python tests/onnx_figures.py [parity] [memory] [heads] [--work /tmp/onnx_figures]

parity   each method's run on MiniLM (400 rows, one epoch) through torch, and its model.onnx through plain onnxruntime:
         on how many rows of SST-2's dev and TREC's test, in batches of 1 and of 32, label and layers are equal
memory   size on disk over the run's safetensors, seconds to load, private and resident megabytes of a session that has
         run, in a process of its own, of a model with exits and of one without
heads    leaving at each exit over its share of a model without exits, with dense and with linear heads; a model of the
         first layers alone; LoRA exits over their graphs by segment
Runs are kept in the work folder, so that a second call only measures.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from safetensors.torch import save_file

import mini_ee
from mini_ee.data.tasks import load_task
from mini_ee.early_exit import early_exit
from mini_ee.export.bench import REACHED_BY_NONE, exported, leave_at
from mini_ee.export.row_segments import OrtModel
from mini_ee.export.sessions import share_threads
from mini_ee.export.writer import write_graphs
from mini_ee.measure.bench.common import BERT_BASE, MINILM, inputs_of, medians, random_encoder
from mini_ee.methods.lora_exits import LoRAExits
from mini_ee.rules import NeverExit, Threshold
from mini_ee.units.rows import RowExits

METHODS = ("joint", "lora-exits", "consistent", "berxit", "pabee", "pcee-bert")
EXITS = (2, 4, 6)

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
print(f"loads in {load:.2f} s, private {private:.1f} MB, resident {resident:.1f} MB")
"""


def parity(shared: Path, work: Path) -> None:
    for name, split in (("SST-2", "dev"), ("TREC", "test")):
        rows = load_task(shared / "data" / name).split(split)
        for method in METHODS:
            folder = work / f"{method}-{name}"
            if not folder.exists():
                options = {"exits": EXITS, "max_train": 400, "epochs": 1}
                mini_ee.train(method, shared / "weights/all-MiniLM-L6-v2", shared / "data" / name, folder, **options)
            run = mini_ee.load_run(folder)
            with tempfile.TemporaryDirectory() as out:
                mini_ee.export(run, f"{out}/exported", texts=rows.texts)
                session = onnxruntime.InferenceSession(f"{out}/exported/model.onnx", providers=["CPUExecutionProvider"])
                for size in (1, 32):
                    print(name, method, f"b{size}:", compare(run, session, run.encode(rows.texts), size), flush=True)


def compare(run, session, encoded, size: int) -> str:
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
    return f"of {len(encoded)} rows {labels} labels and {layers} depths equal, logits within {difference:.1e}"


def memory() -> None:
    for name, config, exits, tokens in (("minilm", MINILM, EXITS, 32), ("bert-base", BERT_BASE, (3, 6, 9, 12), 128)):
        backbone = random_encoder(config, 0)
        for kind, chosen in (("plain", exits[-1:]), ("exits", exits)):
            model = RowExits(backbone, chosen, 2, pool="first").eval()
            with tempfile.TemporaryDirectory() as folder:
                folder = Path(folder)
                write_graphs(model, model.segments(), Threshold(REACHED_BY_NONE), folder)
                save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "run")
                files = sum((folder / each).stat().st_size for each in ("model.onnx", "model.safetensors"))
                command = [sys.executable, "-c", SESSION, str(folder / "model.onnx"), str(tokens)]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
                print(f"{name} {kind}: {files / (folder / 'run').stat().st_size:.3f} of the safetensors, {said}")


def heads() -> None:
    torch.set_num_threads(2)
    share_threads(2)
    backbone, runs = random_encoder(MINILM, 0), {}
    inputs = inputs_of(backbone.config, 1, 32, 0)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("dense", "linear"):
            models = {"exits": (backbone, EXITS), "plain": (backbone, (6,)), "alone": (backbone.first_layers(2), (2,))}
            for name, (layers, exits) in models.items():
                model = RowExits(layers, exits, 2, pool="first")
                if kind == "linear":
                    model.linear_heads()
                graph = exported(model.eval(), Path(folder) / f"{kind}-{name}")
                rules = [leave_at(k, 3) for k in range(3)] if name == "exits" else [NeverExit()]
                runs |= {(kind, name, k): partial(early_exit, graph, rule, inputs) for k, rule in enumerate(rules)}
        lora = LoRAExits(backbone, EXITS, 2, pool="first").eval()
        (Path(folder) / "lora").mkdir()
        about = write_graphs(lora, lora.segments(), Threshold(REACHED_BY_NONE), Path(folder) / "lora", segments=True)
        graph = OrtModel(Path(folder) / "lora", about, threads=2)
        for name, engine in (("graph", graph), ("chain", graph.by_segment(NeverExit()))):
            runs |= {("lora", name, k): partial(early_exit, engine, leave_at(k, 3), inputs) for k in range(3)}
        seconds = dict(zip(runs, medians(list(runs.values()), "heads", seconds_a_case=20.0)))
    for kind in ("dense", "linear"):
        whole = seconds[kind, "plain", 0]
        exits = ", ".join(f"{seconds[kind, 'exits', k] / whole * 6 / layer:.3f}" for k, layer in enumerate(EXITS))
        print(f"{kind}: exits {exits} of their share; two layers alone {seconds[kind, 'alone', 0] / whole * 3:.3f}")
    ratios = ", ".join(f"{seconds['lora', 'graph', k] / seconds['lora', 'chain', k]:.3f}" for k in range(3))
    print(f"lora over graphs by segment: {ratios}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", default=["parity", "memory", "heads"])
    parser.add_argument("--work", type=Path, default=Path("/tmp/onnx_figures"))
    args = parser.parse_args()
    for figure in args.figures:
        if figure == "parity":
            parity(Path(os.environ["MINI_EE_SHARED"]), args.work)
        else:
            {"memory": memory, "heads": heads}[figure]()
