"""`mini-ee add-exits` on a sentence encoder: a linear map after some layers to its own full embedding, a fixed depth.

The encoder stays as it is. The chosen depth is the shallowest with the wanted mean cosine to the full embedding.
Adaptive depth did not pay on frozen encoders (results/embeddings.md). The files are those that add_exits.py lists,
without a curve.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mini_ee.lab.backbones.hub import read_config
from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.row_evaluation import TIMED_REPEATS, measure_seconds, timed_batches
from mini_ee.lab.exits.embedding_exits import full_cosines
from mini_ee.lab.exits.row_exits import even_exits
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import export
from mini_ee.lab.recording import record
from mini_ee.lab.registry import METHODS
from mini_ee.lab.rules import Fixed, Never
from mini_ee.lab.training.holdout import split_rows
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import Run, is_run, load_run, training_folder, versions
from mini_ee.lab.training.state import STATE
from mini_ee.lab.training.train_run import train
from mini_ee.lab.training.train_settings import AddOptions

MOST_EXITS = 7
"""Exits, the last among them, if none are named."""

LOWEST = 0.1  # quantile of the cosines that is reported

FOR_CLASSIFIERS = ("agreement", "max_loss", "confidence", "tolerance", "top_k")
FOR_ENCODERS = ("cosine", "prompt_name")


def check_options(options: dict, labels, encodes: bool) -> None:
    """Raise WrongArguments for options that are for the other kind of model."""
    given = {name for name, value in options.items() if value is not None} | ({"max_loss"} if labels else set())
    wrong = given & set(FOR_CLASSIFIERS if encodes else FOR_ENCODERS)
    if wrong:
        kinds = ("a classifier", "a sentence encoder")
        flag = sorted(wrong)[0].replace("_", "-")
        raise WrongArguments(f"--{flag} is for {kinds[not encodes]}; this model is {kinds[encodes]}")


def encoder_task(rows: list[tuple[str, ...]]) -> Task:
    """The texts of these rows as a task without labels; pairs become two texts."""
    texts = tuple((text,) for row in rows for text in row if text.strip())
    return Task("texts", (), ("cosine",), {"train": Split(texts, np.zeros(len(texts)))})


def exits_of_encoder(
    model: Path, task: Task, out: Path, required: AddOptions, seed: int, say: Callable[[str], None]
) -> tuple[Run, dict]:
    """Train the maps, choose the depth, export, verify, measure. Returns the run and the summary."""
    run = load_run(out / "run") if is_run(out / "run") else _trained(model, task, out, required, seed, say)
    test, layers = split_rows(task, seed, None).test, run.exits[-1]
    depth = run.exits[run.rule.exit] if isinstance(run.rule, Fixed) else layers
    texts = {"trained": run.metrics["rows"], "held_out": run.metrics["rows_held"], "tested": len(test)}
    summary = {
        "pays": depth < layers,
        "model": run.config["backbone"]["folder"],
        "exits": list(run.exits),
        "texts": texts,
        "required_cosine": run.config["training"]["min_cosine"],
        "rule": run.rule.to_dict(),
        "depth": depth,
        "layers_saved": 1 - depth / layers,
        "per_exit_cosine": run.metrics["per_exit_cosine"],
        "versions": versions(),
    }
    if summary["pays"]:
        if not (out / "exported").exists():  # a killed call may have exported
            export(run, out / "exported", texts=test.texts, seed=seed)
        summary |= _measured(Runtime(out / "exported", threads=1), test)
    return run, summary


def _trained(model: Path, task: Task, out: Path, required: AddOptions, seed: int, say) -> Run:
    suiting = (name for name in METHODS if (loaded := load_method(name)).keeps_model and "embeddings" in loaded.units)
    method = next(suiting, None)
    if method is None:
        raise WrongArguments("no method of the registry trains exits on a sentence encoder that stays as it is")
    layers = read_config(model / "config.json").num_hidden_layers
    settings = {"exits": required.exits or even_exits(layers, MOST_EXITS), "min_cosine": required.cosine, "seed": seed}
    settings["prompt_name"] = required.prompt_name
    interrupted = (training_folder(out / "run") / STATE).exists()
    return train(method, model, task, out / "run", resume=interrupted, say=say, **settings)


def _measured(runtime: Runtime, test: Split) -> dict:
    """Cosine to the full embedding and time at batch size 1 for each depth of the exported graph."""
    encoded = runtime.encode(test.texts)
    cosines = full_cosines(record(runtime.segments(), encoded, 32, "test texts").logits)
    rules = [Fixed(k) for k in range(len(runtime.exits))]
    runs = [(runtime.whole_model(), Never(), encoded), *((runtime.segments(), rule, encoded) for rule in rules)]
    full, *seconds = measure_seconds(runs, timed_batches(encoded, 1), TIMED_REPEATS).tolist()
    rows = zip(runtime.exits, cosines.mean(axis=0).tolist(), np.quantile(cosines, LOWEST, axis=0).tolist(), seconds)
    return {
        "per_exit_cosine": cosines.mean(axis=0).tolist(),
        "depths": [
            {"layers": layers, "cosine": cosine, "low_cosine": low, "speedup": full / exit_seconds}
            for layers, cosine, low, exit_seconds in rows
        ],
    }


def line_of_encoder(summary: dict) -> str:
    """The summary in one sentence or two."""
    layers, tested = summary["exits"][-1], f"{summary['texts']['tested']:,} texts"
    if not summary["pays"]:
        most = max(summary["per_exit_cosine"][:-1], default=0.0)
        reason = f"before the last layer the mean cosine to the full embedding is at most {most:.3f} on {tested}"
        return (
            f"Early exit does not pay here: {reason}, below {summary['required_cosine']:g}. The model is left as it is."
        )
    here = next(depth for depth in summary["depths"] if depth["layers"] == summary["depth"])
    return (
        f"After {summary['depth']} of {layers} layers the mean cosine to the full embedding is {here['cosine']:.3f} on "
        f"the {tested} on which this depth was chosen; for 10% of them it is below {here['low_cosine']:.3f}. It is "
        f"{here['speedup']:.2f} times as fast at batch size 1."
    )


def card_of_encoder(summary: dict) -> str:
    """The model card, as Markdown."""
    name = Path(summary["model"]).name
    if not summary["pays"]:
        return f"# {name} without exits\n\n{line_of_encoder(summary)} {summary['compared']}\n"
    rows = "\n".join(
        f"| {depth['layers']} | {depth['cosine']:.3f} | {depth['low_cosine']:.3f} | {depth['speedup']:.2f} |"
        for depth in summary["depths"]
    )
    return f"""# {name} with exits

{line_of_encoder(summary)}

The encoder is unchanged; its own embedding is the last exit. A linear map after each earlier exit learned the full
embedding from {summary["texts"]["trained"]:,} texts without labels. No cosine is guaranteed, because the texts of the
table chose the depth; `mini-ee calibrate run --cosine` guarantees one. {summary["compared"]}

| exit after layer | mean cosine to the full embedding | 10% are below | times as fast at batch size 1 |
|---|---|---|---|
{rows}

The depth is the same for all texts. `mini-ee embed exported FILE --rule fixed --layer N` takes another one; texts that
are compared with each other should have the same depth.
"""
