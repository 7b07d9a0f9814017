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


def main() -> None:
    """Read sentences from standard input and print their labels."""
    parser = argparse.ArgumentParser(description="Classify sentences with an exported folder, one line of JSON each.")
    parser.add_argument("folder", type=Path, help="the exported folder")
    parser.add_argument("--threshold", type=float, help="threshold of the exit rule (default: those of the run)")
    args = parser.parse_args()
    try:
        manifest = json.loads((args.folder / "manifest.json").read_text(encoding="utf-8"))
    except OSError as error:
        parser.error(str(error))
    if manifest["unit"] != "rows" or manifest["task"]["texts"] != 1 or not manifest.get("rule_in_graph", True):
        parser.error(f"{args.folder}: expected a classifier of single sentences with its rule in the graph")

    session = onnxruntime.InferenceSession(args.folder / "onnx/model.onnx", providers=["CPUExecutionProvider"])
    settings = {}
    if args.threshold is not None:  # replaces the default of the graph; (rows, exits - 1) would be one for each row
        names = {initializer.name for initializer in session.get_overridable_initializers()}
        if "threshold" not in names or np.isnan(args.threshold):
            parser.error(f"--threshold: expected a number, and a rule with a threshold; found {args.threshold}")
        settings["threshold"] = np.array(args.threshold, np.float32)  # no axes: for all exits

    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(manifest["max_length"], direction=tokenizer.truncation["direction"])  # as in training
    required, names = {graph_input.name for graph_input in session.get_inputs()}, manifest["task"]["label_names"]
    for line in filter(str.strip, sys.stdin):
        tokens = tokenizer.encode(line.rstrip("\n"))
        inputs = {"input_ids": tokens.ids, "attention_mask": tokens.attention_mask, "token_type_ids": tokens.type_ids}
        row = {name: np.array([values], np.int64) for name, values in inputs.items() if name in required}
        results = session.run(None, row | settings)
        outputs = {output.name: result[0] for output, result in zip(session.get_outputs(), results)}
        if "labels" in outputs:  # several labels at once
            chosen = [name for name, holds in zip(names, outputs["labels"]) if holds]
            answer = {"labels": chosen, "confidence": float(outputs["confidence"])}
        elif names:
            answer = {"label": names[outputs["label"]], "confidence": float(outputs["confidence"])}
        else:  # a regression
            answer = {"label": float(outputs["label"])}
        print(json.dumps(answer | {"layers": int(outputs["layers"])}), flush=True)


if __name__ == "__main__":
    main()
