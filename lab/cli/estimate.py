"""`mini-ee estimate`: whether early exit is worth it for a model and its data. See evaluation/savings_estimate.py."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from mini_ee.lab.cli.command_options import positive
from mini_ee.lab.cli.task_options import (
    OF_LABELS,
    WITHOUT_TASK,
    add_task,
    columns_given,
    refuse_task_options,
    task_options,
)
from mini_ee.lab.errors import WrongArguments

HELP = "estimate before any training whether early exit is worth it for a model and its data (arXiv:2603.23701)"
EXAMPLE = "mini-ee estimate bert-12x128 --task reviews"
USUAL = "--task", "--text", "--max-rows"
ROWS, TEXTS, LENS_TEXTS = 2000, 128, 192
SHARES = ("saved", "low", "high"), ("net_saved", "net_low", "net_high")  # of an estimate, with its interval


def add(sub: ArgumentParser) -> None:
    sub.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of a checkpoint, or a built-in one: bert-12x128 or llama-12x256 (default bert-12x128)",
    )
    add_task(sub, "folder of a task; its train split is read (default the built-in reviews, for bert-12x128)")
    sub.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text file for a decoder, or examples without labels for an encoder: one per line, or a table",
    )
    sub.add_argument("--max-rows", type=positive, metavar="N", help=f"maximum number of examples (default {ROWS})")
    sub.add_argument(
        "--texts",
        type=positive,
        metavar="N",
        help=f"number of texts, for a decoder (default {TEXTS}; {LENS_TEXTS} if its vocabulary is large)",
    )
    sub.add_argument("--device", default="cpu", help="device: cpu, cuda, cuda:1, ...")
    sub.add_argument(
        "--picture",
        type=Path,
        metavar="PNG",
        help="PNG file: agreement with the last layer, and the layer after which predictions stay the same",
    )


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Probe every layer and print the estimated savings."""
    from mini_ee.lab.backbones.hub import load_backbone
    from mini_ee.lab.evaluation.plots import draw_estimate
    from mini_ee.lab.evaluation.savings_estimate import suitability
    from mini_ee.lab.training.run_folder import check_device
    from mini_ee.lab.training.train_run import say_left_out
    from mini_ee.lab.training.unit import load_unit

    begin, folder = time.perf_counter(), _folder(args.model)
    check_device(args.device)
    if args.task and args.text:
        raise WrongArguments("expected --task, examples with labels, or --text, found both; give one of them")
    backbone = load_backbone(folder).to(args.device)
    say_left_out(backbone, folder, say)
    if backbone.config.num_hidden_layers < 2:
        raise WrongArguments(f"{folder}: expected at least two layers, found one")
    unit = load_unit("tokens" if backbone.generates and not args.task else "rows")
    probed, source = (_tokens if unit.generates else _rows)(backbone, folder, args)
    answer = {"model": folder.resolve().name, "unit": unit.name} | source
    answer |= suitability(probed, args.seed)
    _print_answer(answer, unit, say)
    if args.picture:
        draw_estimate(args.picture, answer)
        say(f"Picture: {args.picture}")
    return answer | {"seconds": time.perf_counter() - begin}


def _folder(model: str | None) -> Path:
    """The folder of a checkpoint; of a built-in one if no folder has its name."""
    from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, BUILT_IN_MODEL
    from mini_ee.lab.data.files import MANIFEST
    from mini_ee.lab.training.run_folder import is_run

    built_in = {folder.name: folder for folder in (BUILT_IN_MODEL, BUILT_IN_DECODER)}
    if model is None or model in built_in and not Path(model).is_dir():
        return built_in[model or BUILT_IN_MODEL.name]
    folder = Path(model)
    if (folder / MANIFEST).is_file() or is_run(folder):
        raise WrongArguments(
            f"{folder}: expected a checkpoint, found a trained run; mini-ee evaluate measures what it saves"
        )
    return folder


def _tokens(backbone, folder: Path, args: Namespace) -> tuple:
    """Probe the tokens of a decoder: (result, fields of the answer)."""
    from mini_ee.lab.backbones.adapter import tokenizer_folder
    from mini_ee.lab.data.tokenizer import Tokenizer
    from mini_ee.lab.evaluation.probes import probe_tokens, texts_to_read
    from mini_ee.lab.exits.lens import reads_much
    from mini_ee.lab.training.train_settings import TextOptions
    from mini_ee.lab.training.training_text import Source

    task_options(args)
    if args.max_rows:
        raise WrongArguments("--max-rows is for examples: give --texts N, or a --task")
    if not backbone.has_lm_head:
        raise WrongArguments(f"{folder}: has no LM head to read its layers with; give --task DIR")
    options = TextOptions(
        kind="pieces", text=args.text, texts=args.texts or (LENS_TEXTS if reads_much(backbone) else TEXTS)
    )
    texts = texts_to_read(Source(backbone, Tokenizer.from_folder(tokenizer_folder(folder), None), options, args.seed))
    probed = probe_tokens(backbone, texts)
    source = str(args.text) if args.text else "text that it generated"
    return probed, {"source": source, "texts": len(texts), "tokens": len(probed.observed.groups)}


def _rows(backbone, folder: Path, args: Namespace) -> tuple:
    """Probe the examples of a task or of a file: (result, fields of the answer)."""
    from mini_ee.lab.backbones.adapter import tokenizer_folder
    from mini_ee.lab.backbones.hub import BUILT_IN_MODEL
    from mini_ee.lab.data.text_files import read_texts
    from mini_ee.lab.data.tokenizer import Tokenizer
    from mini_ee.lab.evaluation.probes import probe_rows, rows_to_read
    from mini_ee.lab.training.run_folder import encode
    from mini_ee.lab.training.train_run import open_task

    if args.text:
        refuse_task_options(args, WITHOUT_TASK, OF_LABELS)
    options = columns_given(args) if args.text else task_options(args)
    if args.texts:
        raise WrongArguments("--texts is for a decoder's tokens; give --max-rows N")
    if not args.task and not args.text and folder != BUILT_IN_MODEL:
        raise WrongArguments(f"{folder.name}: give --task DIR, or --text FILE with one example without label per line")
    source = read_texts([args.text], options) if args.text else open_task(args.task, options)
    rows, classes = rows_to_read(source, args.max_rows or ROWS, args.seed)
    backbone = backbone.without_heads()
    encoded = encode(
        Tokenizer.from_folder(tokenizer_folder(folder), min(128, backbone.config.max_tokens)), rows.texts, backbone
    )
    probed = probe_rows(backbone, encoded, rows.labels, classes, args.seed)
    origin = {"source": str(args.text)} if args.text else {"source": f"{source.name}, train", "task": source.name}
    return probed, origin | {"rows": len(rows), "rows_truncated": encoded.truncated}


def _print_answer(answer: dict, unit, say: Callable[[str], None]) -> None:
    from mini_ee.lab.data.text_table import table

    counts = answer["oracle_counts"]
    columns = {"layer": range(1, answer["layers"] + 1), "agreement": answer["agreement"]}
    columns |= {"accuracy": answer["accuracy"]} if "accuracy" in answer else {}
    columns |= {"settled": [count / sum(counts) for count in counts]}
    headings = {"agreement": "agrees with the last:.3f", "accuracy": "accuracy:.3f"}
    headings = {key: headings.get(key, key) for key in columns} | {"settled": f"{unit.noun} settled here:.1%"}
    size = f"{answer[unit.name]} {unit.noun}" + (f" of {answer['texts']} texts" if unit.generates else "")
    say(f"{answer['model']} by {answer['how']}, {size}: {answer['source']}")
    say(table([dict(zip(columns, values)) for values in zip(*columns.values())], headings))
    every, few, settle, layers = (answer[key] for key in ("estimate", "few_exits", "settle_layer", "layers"))
    level, start = every["agreement"], answer["start_layers"]
    once = " A gate decides, so only the head of the exit is read." if answer["read_once"] else ""
    begins = f" The part before the first layer, such as an encoder, costs {start:.2g}." if start >= 0.1 else ""
    before = f"Layer {settle} of {layers} is the first" if settle < layers else "There is no layer"
    say(
        f"{before} from which on {level:g} of the {unit.noun} agree with the last. A head costs as much as "
        f"{answer['head_layers']:.2g} layers.{once}{begins} An oracle would save {answer['oracle_saved']:.1%} of the "
        f"layers, net of heads {answer['oracle_net_saved']:.1%} of the FLOPs."
    )
    for estimate, where in ((every, "every layer"), (few, f"layers {', '.join(map(str, few['exits'][:-1]))} alone")):
        if len(estimate["exits"]) > 1:
            saved, net = (
                f"{estimate[key]:.1%} ({estimate[low]:.1%} to {estimate[high]:.1%})" for key, low, high in SHARES
            )
            say(
                f"Exits after {where} save {saved} of the layers, net of heads {net} of the FLOPs, at a threshold "
                f"at which {estimate['kept']:.3f} of the {unit.noun} agree with the last layer."
            )
    if "majority" in answer:
        say(
            f"If the most frequent label is always predicted: accuracy {answer['majority']:.3f}. The layers are frozen "
            f"here; training may improve them."
        )
    if unit.generates:
        say(
            "These are lower bounds: heads that are trained for their layer agree more often than the model's own head."
        )
    say(answer["advice"])
