"""results/language-model.md: exits in SmolLM2-135M-Instruct, a language model of 135 million parameters, on one thread.

decoding  `mini-ee bench decode --model`: the exported graphs, drafts, transformers, and llama.cpp on the file of 4 bits
          from which the weights were made
heads     `mini-ee train self-supervised` on a part of WikiText-2, where the heads are lenses with a gate
rounding  the share of the predictions that stay those of torch when the trained run is exported in fewer bits
rules     on the rest of WikiText-2: what rules save at each agreement of LEVELS, by the gate, by the short list and by
          confidence; and the time of decoding with each of them, and with the same readings if no token exits
"""

import math
from functools import partial
from pathlib import Path

from mini_ee.experiments.measured.add_exits_cases import stored
from mini_ee.experiments.measured.command import answer_of_command, cost_of_command
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.calibration import POLICY, calibrate_conformal
from mini_ee.lab.data.files import read_json, write_bytes
from mini_ee.lab.evaluation.token_evaluation import timed_decoding
from mini_ee.lab.exits.lens import LIKELY
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.rules import Never, Policy, Threshold
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.train_settings import TextOptions
from mini_ee.lab.training.training_text import Source, texts_to_calibrate
from mini_ee.self_supervised import CALIBRATION_PROMPTS, MEASURE

MODEL, GGUF, TEXT = "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf", "WikiText-2"
EXITS, PIECES, TRAINED = (5, 10, 15, 20, 25, 30), 3_125, 0.9  # layers; texts of 64 tokens; share of the characters
LEVELS, SEED, NEW_TOKENS = (0.8, 0.9, 0.95), 0, 48
RULES = {"gate": POLICY, "short list": "short_list", "confidence": MEASURE}
READ_ALONE = {name: Threshold(math.inf, measure) for name, measure in RULES.items() if measure != POLICY}
READ_ALONE |= {"gate": Policy(1 - 1e-6)}  # no token exits


def decoding(sources: Sources, work: Path) -> dict:
    """The rows of the benchmark decode."""
    given = "--model", sources.find("weights", MODEL), "--gguf", sources.find("weights", GGUF)
    return {"decoding": answer_of_command("bench", "decode", *given, threads=1)["rows"]}


def heads(sources: Sources, work: Path) -> dict:
    """Cost of the training, and agreement of each exit before Eq. 1 and after it."""
    (train, _), run = _parts(sources, work), work / "heads"
    command = "train", "self-supervised", "--model", sources.find("weights", MODEL), "--text", train
    settings = "--texts", PIECES, "--exits", ",".join(map(str, EXITS)), "--out", run, "--threads", 1
    cost = stored(work, "heads", partial(cost_of_command, *command, *settings))
    metrics = read_json(run / "metrics.json")
    agreement = {"closed form": metrics["history"][0]["agreement"], "trained": metrics["agreement"]}
    return {"heads": cost | {"tokens": metrics["tokens"], "agreement": agreement}}


def rounding(sources: Sources, work: Path) -> dict:
    """What `mini-ee export` finds after a few prompts, in 8 and in 4 bits."""
    shares = {}
    for precision in ("int8", "int4"):
        export = partial(answer_of_command, "export", work / "heads", f"--{precision}", "--out", work / precision)
        shares[precision] = stored(work, precision, partial(export, threads=1))["verified"]["prediction_agreement"]
    return {"rounding": shares}


def rules(sources: Sources, work: Path) -> dict:
    """Agreement, layers and seconds of decoding by rule. The first row is without exits."""
    run, (_, rest) = load_run(work / "heads"), _parts(sources, work)
    source = Source(run.model.backbone, run.tokenizer, TextOptions(kind="pieces", text=rest), SEED)
    recorded = record_texts(run.model, texts_to_calibrate(source), progress="observing")
    rows = [{"rule": "none", "level": None}, *({"rule": name, "level": None} for name in RULES)]
    ways = [Never(), *(READ_ALONE[name] for name in RULES)]
    for name, measure in RULES.items():
        for level in LEVELS:
            rule, answer = calibrate_conformal(recorded, level, measure, SEED)
            saved = 1 - answer["mean_layers"] / EXITS[-1]
            rows.append({"rule": name, "level": level, "agreement": answer["end_to_end"], "layers_saved": saved})
            ways.append(rule)
    prompts = [run.tokenizer.ids_of(prompt) for prompt in CALIBRATION_PROMPTS]
    timed = timed_decoding([(rule, "copy_state") for rule in ways], run.model, prompts, NEW_TOKENS)
    return {"rules": [row | time for row, time in zip(rows, timed)], "calibrated_tokens": len(recorded.groups)}


def _parts(sources: Sources, work: Path) -> tuple[Path, Path]:
    """The text in two files: its first lines, to train on, and the others."""
    text = (sources.find("data", TEXT) / "wiki.test.raw").read_text(encoding="utf-8")
    at, files = text.rindex("\n", 0, int(TRAINED * len(text))), (work / "train.txt", work / "rest.txt")
    for file, part in zip(files, (text[:at], text[at:])):
        write_bytes(file, part.encode())
    return files


PARTS = {"decoding": decoding, "heads": heads, "rounding": rounding, "rules": rules}


def page_figures(figures: dict) -> dict:
    """Rows of the benchmark by name, and its exit; agreement by layer; the rules at 90% agreement, by name."""
    rows = {row["case"].removeprefix(f"{MODEL} "): row for row in figures["decoding"]}
    exit_layer = next(name.split()[1] for name in rows if name.startswith("assistant_early_exit"))
    by_layer = list(zip(EXITS, *figures["heads"]["agreement"].values()))
    return {
        "decoding": rows,
        "layers": EXITS[-1],
        "short_list": LIKELY,
        "by_layer": by_layer,
        "exit_layer": exit_layer,
        "at_90": {row["rule"]: row for row in figures["rules"] if row["level"] == 0.9},
    }
