"""Classifies sentences with an exported folder, one line of JSON each.

python classify.py DIR [--threshold .9] < sentences.txt
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


def number(text: str) -> float:
    """A number of the command line. Raises ValueError for others, and for nan."""
    value = float(text)
    if value != value:
        raise ValueError
    return value


parser = argparse.ArgumentParser(description="Classify sentences with an exported folder, one line of JSON each.")
parser.add_argument("folder", type=Path, help="the exported folder")
parser.add_argument("--threshold", type=number, help="threshold of the exit rule at all exits (default: the run's own)")
args = parser.parse_args()
try:
    manifest = json.loads((args.folder / "manifest.json").read_text(encoding="utf-8"))
except OSError as error:
    parser.error(str(error))
if manifest["unit"] != "rows" or manifest["task"]["texts"] != 1 or not manifest.get("rule_in_graph", True):
    parser.error(f"{args.folder}: expected a classifier of single sentences with its rule in the graph")

session = onnxruntime.InferenceSession(args.folder / "model.onnx", providers=["CPUExecutionProvider"])
tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
tokenizer.no_padding()
tokenizer.enable_truncation(manifest["max_length"])  # as in training
required = {each.name for each in session.get_inputs()}
settings = {}
if args.threshold is not None:  # replaces the default of the graph, one number for each exit but the last
    (shape,) = [each.shape for each in session.get_overridable_initializers() if each.name == "threshold"] or [None]
    if shape is None:
        parser.error("--threshold: this graph's rule has none; leave it out")
    settings["threshold"] = np.full(shape, args.threshold, np.float32)

for line in sys.stdin:
    if not line.strip():
        continue
    tokens = tokenizer.encode(line.rstrip("\n"))
    inputs = {"input_ids": tokens.ids, "attention_mask": tokens.attention_mask, "token_type_ids": tokens.type_ids}
    row = {name: np.array([values], np.int64) for name, values in inputs.items() if name in required}
    results = session.run(None, row | settings)
    answer = {output.name: result[0] for output, result in zip(session.get_outputs(), results)}
    if manifest["task"]["label_names"]:
        about = {"label": manifest["task"]["label_names"][answer["label"]], "confidence": float(answer["confidence"])}
    else:
        about = {"label": float(answer["label"])}  # a regression
    print(json.dumps(about | {"layers": int(answer["layers"])}), flush=True)
