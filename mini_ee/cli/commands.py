"""What each command does: open the parts, call the library, print for a reader. Each returns its JSON answer."""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mini_ee import WrongArguments
from mini_ee.backbones.hub import DECODERS, read_config
from mini_ee.calibration import check_promise
from mini_ee.cli.arguments import (
    check_device,
    check_task,
    choose_rule,
    chosen_exits,
    named_method,
    open_model,
    open_task,
    open_task_of,
    open_trained,
    refuse_model,
    schedule_of,
    training_options,
)
from mini_ee.cli.compare import run_compare
from mini_ee.cli.decoder_commands import (
    broken_line,
    calibrate_exits,
    export_precision,
    export_writer,
    holds_writer,
    refuse_text,
    train_exits,
    write_text,
)
from mini_ee.cli.demo import demo
from mini_ee.cli.writing_commands import is_for_decoders, train_writer
from mini_ee.confidence import log_softmax, max_probability
from mini_ee.data.files import read_json
from mini_ee.data.metrics import spearman
from mini_ee.data.prompts import DECODER, ENCODER, PROMPTS, Prompt, prompt_of
from mini_ee.data.tasks import Task, holdout, load_task, toy_task
from mini_ee.early_exit import early_exit, read_every_exit
from mini_ee.export.manifest import MANIFEST
from mini_ee.export.runtime import Runtime
from mini_ee.export.sessions import share_threads
from mini_ee.export.writer import export
from mini_ee.measure.bench import BENCHES
from mini_ee.measure.evaluate import evaluate, labels_of, overthinking
from mini_ee.measure.figures import can_draw, draw_ablation, table
from mini_ee.measure.texts import evaluate_decoder, holds_decoder, refuse
from mini_ee.methods.consistent import forgetting_events, hardness_correlations, hardness_of
from mini_ee.methods.raee import Retrieval, ablation, controls
from mini_ee.training.fit import TrainConfig
from mini_ee.training.methods import CONFIGURED, OF_CLASSES
from mini_ee.training.rule import calibrate_record
from mini_ee.training.run import Run, collect_run, load_run, prompt_run, split_rows, train_run, versions, write_rule
from mini_ee.units.recording import record

FEW_SHOT_LR, FEW_SHOT_EPOCHS, FEW_SHOT_BATCH = 3e-4, 15, 8  # of the built-in models; LM-BFF's are larger, lr 1e-5

PROMPT_OPTIONS = ("template", "words", "prompts", "shots", "include_embeddings")

RETRIEVAL_OPTIONS = ("k", "tau", "fallback_top", "layer", "encoder")

CALIBRATION_BATCH = 32

SWEEP_POINTS = 51  # LoRAExit, section 4


def run(args: argparse.Namespace) -> dict:
    """Run the command that `args.command` names; returns its JSON answer, with seed, threads and versions."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if picture := getattr(args, "picture", None):
        if not can_draw():
            raise WrongArguments("--picture needs matplotlib: pip install mini-ee[plots]")
        if picture.is_dir() or not picture.absolute().parent.is_dir():
            raise WrongArguments(f"--picture: expected a file in a folder that is there, found {picture}")
    say = (lambda text: print(text, file=sys.stderr)) if args.json else print
    answer = COMMANDS[args.command](args, say)
    return answer | {"seed": args.seed, "threads": torch.get_num_threads(), "versions": versions()}


def run_demo(args, say) -> dict:
    """The main job, on the built-in weights and task or on others."""
    task, model_folder = open_task(args.task), open_model(args.model)
    config, options = training_options(args, model_folder)
    layers = read_config(model_folder / "config.json").num_hidden_layers
    say(
        f"Training {len(options['exits'] or range(layers))} exits on {model_folder.name} ({layers} layers) "
        f"for {task.name}: all exits at once, their losses summed with their depth as weight (ConsistentEE, Eq. 1)."
    )
    begin = time.perf_counter()
    answer = demo(model_folder, task, args.out, config, say, **options)
    say(f'Try: mini-ee classify {answer["run"]} --text "I did not expect to like it, but I did."')
    return answer | {"wall_seconds": time.perf_counter() - begin}


def run_train(args, say) -> dict:
    """Train one method and write the run."""
    if args.method == "self-supervised":
        check_device(args.device)
        return train_exits(args, say)
    if is_for_decoders(args):
        check_device(args.device)
        return train_writer(args, say)
    refuse_text(args)
    if args.method == "raee":
        return run_collect(args, say)
    refuse_prompt(args, f"{args.method} trains heads")
    refuse(args, RETRIEVAL_OPTIONS, f"is for raee; {args.method} retrieves nothing")
    task, model_folder = open_task(args.task), open_model(args.model)
    if task.regression and args.method in OF_CLASSES:
        raise WrongArguments(
            f"{args.method} asks how sure an exit is, and {task.name} is a regression; train joint or pabee"
        )
    config, options = training_options(args, model_folder)
    begin = time.perf_counter()
    method = named_method(args)
    options |= {
        "resume": args.resume,
        "build": method.build,
        "candidates": method.candidates,
        "rule": method.rule,
        "method_settings": method.settings,
    }
    trained = train_run(args.out, args.method, method.recipe, model_folder, task, config, **options)
    metrics = read_json(args.out / "metrics.json")
    held = metrics["hold_out"]
    say(
        f"Trained on {metrics['rows']} rows, "
        f"{metrics['rows_truncated']} of them cut to {trained.tokenizer.max_length} tokens."
    )
    say(_stages_table(metrics["epochs"]))
    say(
        f"On {metrics['rows_held']} rows held out: score {held['score']:.3f}, "
        f"{held['layers_saved']:.0%} of the layers saved."
    )
    say(f"Run: {args.out}")
    return {
        "method": args.method,
        "task": task.name,
        "split": "hold-out",
        **held,
        "exits": list(trained.exits),
        "per_exit_accuracy": metrics["per_exit_accuracy"],
        "rule": trained.rule.to_dict(),
        "run": str(args.out),
        "seconds": time.perf_counter() - begin,
        "rows_truncated": metrics["rows_truncated"],
    }


def _stages_table(epochs: list[dict]) -> str:
    """What each stage of a training took, and came to."""
    stages: dict[str, list[dict]] = {}
    for epoch in epochs:
        stages.setdefault(epoch["stage"], []).append(epoch)
    rows = [
        {
            "stage": name,
            "epochs": len(some),
            "loss": some[-1]["loss"],
            "score": max(epoch["score"] for epoch in some),
            "seconds": sum(epoch["seconds"] for epoch in some),
        }
        for name, some in stages.items()
    ]
    headings = {"loss": "last loss:.3f", "score": "best, held out:.3f", "seconds": "seconds:.1f"}
    return table(rows, {"stage": "stage", "epochs": "epochs"} | headings)


def run_collect(args, say) -> dict:
    """RAEE: a datastore beside the exits of a trained run, or beside every layer of a checkpoint, through a prompt."""
    check_device(args.device)
    model_folder = open_model(args.model)
    is_run = "format_version" in read_json(model_folder / "config.json")
    task = open_task_of([load_run(model_folder)], args.task) if is_run else open_task(args.task)
    settings = {"k": args.k, "tau": args.tau, "fallback_top": args.fallback_top}
    try:
        rule = Retrieval(**{name: value for name, value in settings.items() if value is not None})
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    begin = time.perf_counter()
    where = {"layer": args.layer, "encoder": args.encoder, "max_train": args.max_train, "device": args.device}
    where = {name: value for name, value in where.items() if value is not None}
    of_heads = sorted({"pool", "head_lr", "max_loss", *(name for _, known in CONFIGURED.values() for name in known)})
    refuse(args, of_heads, "is for methods that train heads, not for raee")
    if is_run:
        refuse_prompt(args, f"{model_folder} is a trained run, which has heads")
        refuse(args, ("exits", "epochs", "lr", "max_length"), f"is that of {model_folder}, a trained run")
        check_task(load_run(model_folder), task, model_folder)
        trained = collect_run(args.out, model_folder, task, rule, **where, seed=args.seed)
    else:
        trained = prompt_run(
            args.out,
            model_folder,
            choose_prompt(args, task, model_folder),
            task,
            replace(rule, include_embeddings=args.include_embeddings),
            exits=chosen_exits(args, model_folder),
            shots=args.shots or 0,
            config=few_shot_config(args),
            **where | ({"max_length": args.max_length} if args.max_length else {}),
        )
    metrics = read_json(args.out / "metrics.json")
    say(
        f"Collected {metrics['rows']} rows that the exits were not trained on; "
        f"alone, the exit after layer {metrics['best_single_exit']} is right most often."
    )
    say(f"Run: {args.out}")
    size = sum(path.stat().st_size for path in (args.out / "datastore").iterdir())
    return {
        "method": args.method,
        "task": task.name,
        "split": "hold-out",
        "exits": list(trained.exits),
        "per_exit_accuracy": metrics["per_exit_accuracy"],
        "rule": trained.rule.to_dict(),
        **({} if is_run else {"prompt": trained.config["prompt"], "shots": args.shots or 0}),
        "run": str(args.out),
        "rows": metrics["rows"],
        "datastore_bytes": size,
        "seconds": time.perf_counter() - begin,
    }


def refuse_prompt(args, instead: str) -> None:
    """Raise WrongArguments for an option of raee's prompts where nothing is read through one."""
    refuse(args, PROMPT_OPTIONS, f"is for raee on a checkpoint, read by a prompt; {instead}")


def choose_prompt(args, task: Task, model_folder: Path) -> Prompt:
    """The prompt that the command line gives, or the one of prompts.json or of --prompts for this task."""
    kind = DECODER if read_config(model_folder / "config.json").model_type in DECODERS else ENCODER
    if (args.template is None) != (args.words is None) or (args.template and args.prompts):
        raise WrongArguments("give --template and --words together, or --prompts alone, or none of them")
    try:
        if args.template is None:
            return prompt_of(task.name, kind, args.prompts or PROMPTS)
        return Prompt.from_dict({"template": args.template, "words": args.words})
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def few_shot_config(args) -> TrainConfig:
    """The settings of prompt-based fine-tuning, whose batches are small, since its rows are few."""
    try:
        return TrainConfig(
            epochs=args.epochs or FEW_SHOT_EPOCHS,
            lr=FEW_SHOT_LR if args.lr is None else args.lr,
            batch_size=min(args.batch_size, FEW_SHOT_BATCH),
            seed=args.seed,
        )
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def run_evaluate(args, say) -> dict:
    """Accuracy, layers and measured speed-up of one run."""
    if holds_decoder(args.run):
        check_device(args.device)
        return evaluate_decoder(args, say)
    if holds_writer(args.run):
        raise WrongArguments(f"{args.run}: a decoder's run of consistent or calm is measured by `mini-ee compare`")
    refuse(args, ("max_rows", "text"), f"is for a decoder's run; {args.run} holds none")
    trained = open_trained(args.run, args, args.schedule)
    refuse_model(args, [trained])
    task = open_task_of([trained], args.task)
    check_task(trained, task, args.run)
    rule = choose_rule(args, trained)
    if args.picture and not (args.sweep and isinstance(rule, Retrieval)):
        raise WrongArguments("--picture is for the --sweep of a decoder or of raee; mini-ee compare draws the others")
    split = args.split or task.default_split
    labels_of(task, split)
    encoded = trained.encode(task.split(split).texts)
    if encoded.truncated:
        say(f"{encoded.truncated} of {len(encoded)} texts cut to {trained.tokenizer.max_length} tokens")
    sweep = SWEEP_POINTS if args.sweep and not isinstance(rule, Retrieval) else 0
    segments, whole = trained.segments(), trained.whole_model()
    answer = evaluate(segments, whole, rule, task, split, encoded, args.batch_size, sweep, args.seed)
    answer = {"method": trained.config["method"], "engine": segments.engine} | schedule_of(trained) | answer
    if "schedule" in answer:
        say(f"Exits whose streams start together: {answer['schedule']}")
    say(
        table(
            [
                {"layer": layer, "score": score, "left": count}
                for layer, score, count in zip(answer["exits"], answer["per_exit_score"], answer["exit_counts"])
            ],
            {"layer": "layer", "score": "score:.3f", "left": "left here"},
        )
    )
    if sweep:
        say(
            table(
                [
                    row | {"setting": row["rule"].get("threshold", row["rule"].get("patience"))}
                    for row in answer["rows"]
                ],
                {
                    "setting": "patience" if task.regression else "threshold:.3f",
                    "score": "score:.3f",
                    "mean_layers": "mean layers:.2f",
                    "layers_saved": "layers saved:.1%",
                    "flops_ratio": "flops:.3f",
                    "speedup": "speed-up:.2f",
                },
            )
        )
    if args.overthinking:
        answer["overthinking"] = found = overthinking(record(segments, encoded, args.batch_size), task, split)
        for row in found["rows"]:
            exits = ", ".join(
                f"{each['layer']}: {each['label']} {each['confidence']:.3f} ({each['entropy']:.3f} nats)"
                for each in row["exits"]
            )
            say(f"{row['text']}\n    {row['label']}; said after layer {exits}")
        say(
            f"{found['share']:.1%} of the rows are right at an exit and wrong at a later one, "
            f"{found['share_at_the_end']:.1%} at the last."
        )
    if args.hardness:
        if task.regression:
            raise WrongArguments("--hardness: the memorized layer asks whether a prediction is right; give classes")
        recorded = record(segments, encoded, args.batch_size)
        memorized, losses = hardness_of(recorded.logits, labels_of(task, split), segments.exits)
        answer["hardness"] = found = {
            "memorized_layer": memorized.tolist(),
            "mean_memorized_layer": float(memorized.mean()),
            "spearman_loss": spearman(memorized, losses),
        }
        say(
            f"Memorized layer, Eq. 7: {found['mean_memorized_layer']:.2f} in the mean; its Spearman correlation with "
            f"the loss under Eq. 1: {found['spearman_loss']:.2f}."
        )
        if kinds := task.split(split).hardness:
            found["known"] = {kind: float(memorized[np.array(kinds) == kind].mean()) for kind in dict.fromkeys(kinds)}
            lines = [{"kind": kind, "mean": mean} for kind, mean in found["known"].items()]
            say(table(lines, {"kind": "hardness", "mean": "memorized layer:.2f"}))
        found["held_out"] = held = _hardness_in_training(args, trained, task)
        if held:
            pairs = (f"with {name} {value:.2f}" for name, value in held["spearman"].items())
            say(
                f"On the {held['rows']} rows held out in training, of which {held['forgotten']} were forgotten in "
                f"{held['epochs']} epochs: {', '.join(pairs)}."
            )
    if isinstance(rule, Retrieval):
        recorded, labels = record(segments, encoded, args.batch_size, whole=whole), labels_of(task, split)
        answer["controls"] = found = controls(rule, recorded, encoded, task, labels, args.batch_size, args.seed)
        say(_controls_table(answer, found))
        if args.sweep:
            rows = (rule, recorded, encoded, task, labels, args.batch_size, args.seed)
            answer["rows"] = ablation(*rows)
            say(_ablation_table(answer["rows"]))
            if args.picture:
                draw_ablation(args.picture, answer)
                say(f"Picture: {args.picture}")
    say(
        f"{task.name} {split}: score {answer['score']:.3f} (full model {answer['full_score']:.3f}), "
        f"{answer['mean_layers']:.2f} layers of {answer['exits'][-1]} ({answer['layers_saved']:.1%} saved), "
        f"{answer['speedup']:.2f} times as fast as the full model (measured, batch {args.batch_size}, "
        f"{answer['timed_rows']} rows)"
    )
    return answer


def _hardness_in_training(args, trained: Run | Runtime, task: Task) -> dict | None:
    """ConsistentEE's Table 1 on the rows held out in training; None where the run says nothing of them."""
    path = args.run / "metrics.json"
    if not path.is_file():
        return None
    metrics = read_json(path)
    wrong = [epoch["wrong"] for epoch in metrics["epochs"] if "wrong" in epoch]
    _, held = split_rows(task, trained.config["seed"], trained.config["training"].get("max_train"))
    if metrics.get("rows_held") != len(held):
        return None
    right = np.ones((len(wrong), len(held)), bool)
    for epoch, rows in enumerate(wrong):
        right[epoch, rows] = False
    events = forgetting_events(right)
    if not events.any():
        return None
    recorded = record(trained.segments(), trained.encode(held.texts), args.batch_size)
    memorized, losses = hardness_of(recorded.logits, held.labels, trained.exits)
    return {
        "rows": len(held),
        "epochs": len(wrong),
        "forgotten": int((events > 0).sum()),
        "spearman": hardness_correlations(memorized, losses, events),
    }


def _controls_table(answer: dict, found: dict[str, dict]) -> str:
    """RAEE's figure and those without which it says nothing."""
    names = {
        "knn_labels": "kNN label vote",
        "best_single_layer": f"best single layer, {found['best_single_layer']['layer']}",
        "random_layers": f"random layers, +- {found['random_layers']['spread']:.3f}",
        "oracle": "oracle: earliest right layer",
        "full_model": "full model",
    }
    rows = [answer | {"name": "RAEE"}, *(found[key] | {"name": name} for key, name in names.items())]
    return "\n" + table(rows, {"name": "what chooses", "score": "score:.3f", "mean_layers": "mean layers:.2f"}) + "\n"


def _ablation_table(points: list[dict]) -> str:
    """Tables 3 and 4 in one: a line for each k, score and mean layers for each size of the datastore."""
    lines: dict[int, dict] = {}
    for point in points:
        heading = f"{point['database']} ({point['rows']})"
        lines.setdefault(point["k"], {"k": point["k"]})[heading] = f"{point['score']:.3f} {point['mean_layers']:6.2f}"
    rows = list(lines.values())
    return table(rows, {key: key for key in rows[0]}) + "\n(score and mean layers; in brackets the datastore)\n"


def run_classify(args, say) -> dict:
    """What every exit says of one text, and where it left."""
    trained = open_trained(args.run, args, args.schedule)
    refuse_model(args, [trained])
    rule = choose_rule(args, trained)
    text = (args.text,) if args.text_b is None else (args.text, args.text_b)
    expected = trained.config["task"]["texts"]
    if len(text) != expected:
        advice = "give the second one with --text-b" if expected == 2 else "leave out --text-b"
        raise WrongArguments(f"{args.run}: was trained on rows of {expected} texts, found {len(text)}; {advice}")
    encoded = trained.encode([text])
    inputs, segments = encoded.batch(np.arange(1)), trained.segments()
    logits, *_ = read_every_exit(segments, inputs)
    result = early_exit(segments, rule, inputs)
    names = trained.label_names
    words = list(trained.config.get("prompt", {}).get("words", {}).values())
    rows = []
    for layer, said in zip(segments.exits, logits[0]):
        row = {"layer": layer, **_said(said, names), "left_here": layer == int(result.layers_run[0])}
        if words:
            row["words"] = dict(zip(words, np.exp(log_softmax(said[None])[0]).tolist()))
        rows.append(row)
    say(
        table(
            [row | row.get("words", {}) | {"left_here": "<- left here" if row["left_here"] else ""} for row in rows],
            {
                "layer": "layer",
                "label": "label",
                **({"confidence": "confidence:.3f"} if names and not words else {}),
                **{word: f"{word}:.3f" for word in words},
                "left_here": " ",
            },
        )
    )
    layers = int(result.layers_run[0])
    if encoded.truncated:
        say(f"the text was cut to {trained.tokenizer.max_length} tokens")
    answer = {
        "method": trained.config["method"],
        "text": args.text,
        **_said(result.logits[0], names),
        "exit": int(result.exit_index[0]),
        "layers": layers,
        "exits": list(segments.exits),
        "layers_saved": 1 - layers / segments.exits[-1],
        "rows": rows,
        "rule": rule.to_dict(),
        "rows_truncated": encoded.truncated,
    }
    say(f"{answer['label']}, after {layers} of {segments.exits[-1]} layers")
    return answer


def run_generate(args, say) -> dict:
    """One text from a decoder, as it comes."""
    check_device(args.device)
    return write_text(args, say)


def run_calibrate(args, say) -> dict:
    """Thresholds under which exits agree with the full model as often as was asked for; they become the run's rule."""
    try:
        check_promise(args.epsilon, args.delta)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    if holds_decoder(args.run):
        return calibrate_exits(args, say)
    refuse_text(args)
    trained = load_run(args.run, args.model)
    refuse_model(args, [trained])
    if not trained.label_names:
        raise WrongArguments(f"{args.run}: a regression task has no confidence to calibrate")
    if isinstance(trained.rule, Retrieval):
        raise WrongArguments(f"{args.run}: leaves where its datastore says; calibrate the run that it was collected on")
    task = open_task_of([trained], args.task)
    check_task(trained, task, args.run)
    _, held = holdout(task.split("train"), trained.config["seed"])
    recorded = record(trained.segments(), trained.encode(held.texts), CALIBRATION_BATCH, progress="reading")
    measure = args.measure or "max_probability"
    rule, answer = calibrate_record(recorded, args.epsilon, args.delta, measure, args.seed, args.sets or 0)
    write_rule(args.run, rule, answer["exit_counts"])
    intervals = ((f"{float(low):.3f}", f"{float(high):.3f}") for low, high in answer["tau_intervals"])
    rows = [
        {
            "layer": layer,
            "threshold": f"{float(threshold):.3f}",
            "interval": " to ".join(ends),
            "agreement": "-" if share is None else f"{share:.3f}",
        }
        for layer, threshold, ends, share in zip(trained.exits, answer["thresholds"], intervals, answer["agreement"])
    ]
    headings = {"layer": "layer", "threshold": "threshold", "interval": "95 % of bootstraps", "agreement": "agreement"}
    say(table(rows, headings))
    say(
        f"On {answer['rows_fresh']} held-out rows that the thresholds were not taken from, {answer['end_to_end']:.1%} "
        f"get the full model's answer, after {answer['mean_layers']:.2f} layers of {trained.exits[-1]}."
    )
    if args.sets:
        say(broken_line(answer))
    say(f"The rule of {args.run} is now these thresholds.")
    about = {"method": trained.config["method"], "task": task.name, "exits": list(trained.exits)}
    return about | {"run": str(args.run)} | answer


def run_export(args, say) -> dict:
    """ONNX segments of a run, verified on sentences of its task or on the built-in ones; of a decoder, on its text."""
    if (args.run / MANIFEST).is_file():
        raise WrongArguments(f"{args.run}: is exported already; give the run that it came from")
    args.device = "cpu"
    if holds_decoder(args.run) or holds_writer(args.run):
        return export_writer(args, say)
    trained = open_trained(args.run, args, args.schedule)
    refuse_model(args, [trained])
    rule = choose_rule(args, trained)
    precision = export_precision(args)
    if args.task is None:
        texts = [(text,) * trained.config["task"]["texts"] for (text,) in toy_task().split("dev").texts]
    else:
        task = load_task(args.task)
        check_task(trained, task, args.run)
        texts = task.split(task.default_split).texts
    begin = time.perf_counter()
    manifest = export(trained._replace(rule=rule), args.out, texts, precision, args.seed)
    verified = manifest["verified"]
    say(
        f"{len(manifest['graphs'])} graphs in {precision}, against torch on {verified['texts']} texts: "
        f"logits within {verified['max_logit_difference']:.2g}, {verified['prediction_agreement']:.1%} of the "
        f"predictions and {verified['exit_agreement']:.1%} of the exits equal."
    )
    say(f"Exported: {args.out}")
    answer = {key: manifest[key] for key in ("method", "exits", "rule", "precision", "opset", "verified")}
    size = sum(path.stat().st_size for path in args.out.iterdir())
    return answer | {"export": str(args.out), "bytes": size, "seconds": time.perf_counter() - begin}


def run_bench(args, say) -> dict:
    """One benchmark, or all."""
    names = list(BENCHES) if args.name == "all" else [args.name]
    if args.large and "retrieval" not in names:
        raise WrongArguments(f"--large is for retrieval, which builds a datastore; {args.name} has no larger case")
    if args.alone and "onnx" in names:
        share_threads(torch.get_num_threads())
    rows = []
    for name in names:
        settings = {"large": True} if args.large and name == "retrieval" else {}
        for row in BENCHES[name](args.model, args.seed, **settings):
            rows.append(row)
            say(
                f"{row['case']:<32} {row['seconds'] * 1e3:9.3f} ms {row['against_seconds'] * 1e3:9.3f} ms   "
                f"ratio {row['ratio']:.3f}   bar {row['bar']:.3f}   {'holds' if row['holds'] else 'MISSED'}"
            )
            if "excess" in row:
                excess, bar, head = (f"{row[key]:.1%}" for key in ("excess", "excess_bar", "head_share"))
                say(f"    of the full model's time: excess {excess} (bar {bar}), one head read and judged {head}")
            if "fill_seconds" in row:
                parts = ("layers", "head", "fill", "eager_fill")
                costs = ", ".join(f"{part.replace('_', ' ')} {row[f'{part}_seconds'] * 1e3:.3f} ms" for part in parts)
                say(f"    a token: {costs}")
            if "build_seconds" in row:
                built, size = row["build_seconds"], row["bytes"] / 1e6
                say(f"    {row['rows']} rows: {built:.1f} s, {size:.1f} MB, {row['bytes_a_row']:.0f} bytes each")
            if "against_bytes" in row:
                say(f"    weights: {row['bytes'] / 1e6:.1f} MB, {row['against_bytes'] / 1e6:.1f} MB")
    return {"bench": args.name, "rows": rows, "device": "cpu"}


COMMANDS = {
    "demo": run_demo,
    "train": run_train,
    "evaluate": run_evaluate,
    "compare": run_compare,
    "classify": run_classify,
    "generate": run_generate,
    "calibrate": run_calibrate,
    "export": run_export,
    "bench": run_bench,
}


def _said(logits: np.ndarray, names: list[str]) -> dict:
    if not names:
        return {"label": float(logits[0])}
    return {"label": names[int(logits.argmax())], "confidence": float(max_probability(logits[None])[0])}
