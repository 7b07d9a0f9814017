"""`mini-ee bench`: ratios of times, measured side by side in one process."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

HELP = "measure ratios of times, side by side in one process"
EXAMPLE = "mini-ee bench exit-tax --threads 2"
USUAL = "--model", "--task", "--device"
ENCODERS = "mini_ee.experiments.bench.encoders"
BENCHES = {  # name -> the module that has bench_NAME
    "backbone": ENCODERS,
    "exit-tax": ENCODERS,
    "batch": ENCODERS,
    "onnx": "mini_ee.experiments.bench.onnx",
    "sgmv": "mini_ee.experiments.bench.streams",
    "decode": "mini_ee.experiments.bench.decoders",
    "retrieval": "mini_ee.experiments.bench.retrieval",
    "serve": "mini_ee.experiments.bench.serving",
}
ON_A_GPU = ("onnx", "sgmv")  # the benchmarks that take --device


def add(sub: ArgumentParser) -> None:
    sub.add_argument("name", choices=(*BENCHES, "all"), metavar="NAME", help=f"benchmark: {', '.join(BENCHES)} or all")
    sub.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder of the weights of MiniLM, or of stories260k for onnx; for decode of any decoder, whose exported "
        "graphs are then measured (default random weights)",
    )
    sub.add_argument(
        "--gguf", type=Path, metavar="FILE", help="file of the same decoder for llama.cpp, for decode; needs xllamacpp"
    )
    sub.add_argument(
        "--task", metavar="DIR", help="folder of a task with sentences, for serve (default built-in reviews)"
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device, for onnx and sgmv: cpu or cuda")
    sub.add_argument("--picture", type=Path, metavar="PNG", help="PNG file: times against load, for serve")
    sub.add_argument("--large", action="store_true", help="also measure a datastore of a million rows, for retrieval")


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """One benchmark, or all."""
    import torch

    from mini_ee.experiments.bench.serving import draw_loads
    from mini_ee.lab.errors import WrongArguments
    from mini_ee.lab.export.sessions import share_threads
    from mini_ee.lab.training.run_folder import check_device

    names = list(BENCHES) if args.name == "all" else [args.name]
    if args.large and "retrieval" not in names:
        raise WrongArguments(f"--large is for retrieval; {args.name} has no larger case")
    if (args.task or args.picture) and "serve" not in names:
        raise WrongArguments(f"--task and --picture are for serve; {args.name} reads no sentences")
    if args.gguf and (names != ["decode"] or not args.model):
        raise WrongArguments("--gguf is for decode with --model; leave it out")
    if args.model and names == ["sgmv"]:
        raise WrongArguments("--model: sgmv measures adapters of a random BERT-base; leave it out")
    if args.alone and {"onnx", "serve"} & set(names):
        share_threads(torch.get_num_threads())
    if args.device != "cpu" and (unable := [name for name in names if name not in ON_A_GPU]):
        raise WrongArguments(f"--device {args.device} is for {' and '.join(ON_A_GPU)}; {unable[0]} runs on a CPU")
    check_device(args.device)
    rows = []
    for name in names:
        settings = {"large": True} if args.large and name == "retrieval" else {}
        settings |= {"task": args.task} if name == "serve" else {}
        settings |= {"gguf": args.gguf} if args.gguf else {}
        settings |= {"device": args.device} if name in ON_A_GPU else {}
        bench = getattr(import_module(BENCHES[name]), f"bench_{name.replace('-', '_')}")
        for row in bench(args.model, args.seed, **settings):
            rows.append(row)
            say(
                f"{row['case']:<32} {row['seconds'] * 1e3:9.3f} ms {row['against_seconds'] * 1e3:9.3f} ms   "
                f"ratio {row['ratio']:.3f}   bar {row['bar']:.3f}   {'holds' if row['holds'] else 'MISSED'}"
            )
            for line in _more(row):
                say(f"    {line}")
    if args.picture:
        draw_loads(args.picture, rows)
    return {"bench": args.name, "rows": rows, "device": args.device}


def _more(row: dict):
    if "excess" in row:
        head = f", one head and its rule {row['head_share']:.1%}" if "head_share" in row else ""
        yield f"share of the full model's time: excess {row['excess']:.1%} (bar {row['excess_bar']:.1%}){head}"
    if "fill_seconds" in row:
        parts = ("layers", "head", "fill", "eager_fill")
        costs = (f"{part.replace('_', ' ')} {row[f'{part}_seconds'] * 1e3:.3f} ms" for part in parts)
        yield f"per token: {', '.join(costs)}"
    if "build_seconds" in row:
        built, size = row["build_seconds"], row["bytes"] / 1e6
        yield f"{row['rows']} rows: {built:.1f} s, {size:.1f} MB, {row['bytes_a_row']:.0f} bytes per row"
    from mini_ee.experiments.bench.serving import loads_table

    if "least" in row:
        yield f"at every load at least {row['least']:.2f} of the whole graph's answers in time"
    if row.get("loads"):
        yield from loads_table(row["loads"]).splitlines()
    if "loaded" in row:
        accepted, loaded = row["accepted_per_round"], row["loaded"]
        yield f"drafts accepted per round: {accepted:.2f}; layers loaded: {loaded:.2f} of those without drafts"
    if "load_seconds" in row:
        yield f"opened in {row['load_seconds']:.2f} s"
    if "against_bytes" in row:
        yield f"weights: {row['bytes'] / 1e6:.1f} MB, {row['against_bytes'] / 1e6:.1f} MB"
