"""The command line: arguments in, one answer out. What the commands do stands in commands.py.

Exit status 0; 1 for a failure; 2 for wrong arguments. Errors are one line on standard error.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from mini_ee import WrongArguments, __version__
from mini_ee.confidence import MEASURES
from mini_ee.data.tasks import TOY

METHODS = (
    *("joint", "two-stage", "sweet", "multi-model", "lora-exits", "self-supervised", "raee", "consistent", "calm"),
    *("deebert", "fastbert", "right-tool", "pabee", "pcee-bert", "berxit"),
)

RULES = ("never", "fixed", "threshold", "patience", "patience-confidence", "policy")

INITS, TARGETS, FILLS = ("scratch", "copy"), ("soft", "hard"), ("propagate", "recompute")

REWARDS, ESTIMATORS = ("hardness-guided", "vanilla"), ("reinforce", "exact")

DISTILL = ("vanilla", "kd", "segd")

SCHEDULES = ("restart", "parallel", "adaptive")  # of LoRA streams

DIGITS = 10  # of a whole number, at most

MAX_THREADS = 1024  # more than torch can start would end the process without a word

SERVING = ("run", "evaluate", "classify")  # graphs share threads: no torch model computes in turns with them

BENCHMARKS = ("backbone", "exit-tax", "batch", "onnx", "sgmv", "decode", "retrieval")


class Parser(argparse.ArgumentParser):
    """Errors in one line, help with a working example."""

    def __init__(self, *args, example: str = "", **kwargs):
        super().__init__(
            *args,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"example:\n  {example}" if example else None,
            **kwargs,
        )

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> Parser:
    """The whole command line."""
    main = Parser("mini-ee", description="Early-exit transformers from scratch.")
    main.add_argument("--version", action="version", version=__version__)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, example: str) -> Parser:
        sub = commands.add_parser(name, help=help, description=help, example=example)
        sub.add_argument("--json", action="store_true", help="print exactly one JSON object")
        sub.add_argument("--seed", type=_seed, default=0, help="0 by default")
        sub.add_argument("--threads", type=_threads, help="processor threads; torch's choice by default")
        return sub

    sub = command(
        "demo",
        "the main job: train exits, decide when to stop, show accuracy against measured time",
        "mini-ee demo --model ../shared/weights/all-MiniLM-L6-v2 --task ../shared/data/SST-2 --max-train 6000",
    )
    _add_training(sub)
    sub.add_argument(
        "--out",
        type=Path,
        default=Path("mini-ee-demo"),
        help="report folder, replaced if there; mini-ee-demo",
    )

    sub = command("train", "give a checkpoint exits and train them", "mini-ee train joint --out run")
    sub.add_argument("method", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    _add_training(sub)
    sub.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="RUN",
        help="folder for the trained model; must not be there",
    )
    sub.add_argument("--resume", action="store_true", help="go on with a training that was stopped")
    lora = sub.add_argument_group("lora-exits")
    lora.add_argument("--distill", choices=DISTILL, help="who teaches an exit; segd: the next one (default)")
    lora.add_argument("--temperature", type=float, help="of the soft labels, Eq. 5; 2")
    lora.add_argument("--lambda", dest="weight", type=_share, help="share of the distillation loss, Eq. 4; .95")
    lora.add_argument("--t-squared", action="store_true", help="times the temperature squared, which the paper has not")
    lora.add_argument("--rank", type=_positive, help="of the adapters; 8")
    lora.add_argument(
        "--targets",
        help="projections with adapters; query,value; also key, attention_output, up, down, a decoder's gate",
    )
    heads = sub.add_argument_group(
        "self-supervised", "--model is a decoder; --lambda: of Eq. 1, .95; --lr: 1e-3, built-in 4e-3"
    )
    heads.add_argument("--init", choices=INITS, help="heads drawn (scratch, default), or copies of the model's own")
    heads.add_argument("--target", choices=TARGETS, help="what the model says (soft, default), or its likeliest token")
    _add_texts(heads)
    retrieval = sub.add_argument_group(
        "raee", "--model is a trained run, or a checkpoint: each layer is an exit, read through a prompt"
    )
    _add_retrieval(retrieval)
    where = retrieval.add_mutually_exclusive_group()
    where.add_argument("--layer", type=_count, help="after which the model's own states are the queries; 0")
    where.add_argument("--encoder", type=Path, metavar="DIR", help="a sentence encoder for the queries instead")
    retrieval.add_argument("--shots", type=_positive, metavar="N", help="fine-tune on N rows a class first, 8 a step")
    retrieval.add_argument("--template", metavar="TEXT", help='such as "{text} It was {mask}."; decoders: no {mask}')
    retrieval.add_argument("--words", type=_words, help="label words by class: 0=terrible,1=great")
    retrieval.add_argument("--prompts", type=Path, metavar="FILE", help="JSON laid out as the built-in prompts.json")
    retrieval.add_argument("--include-embeddings", action="store_true", help="layer 0 is an exit too")
    policy = sub.add_argument_group(
        "consistent",
        "--model may be a decoder, as for calm: --task continue or copy, --text FILE, --texts N, --rank; "
        "--target hard: y is what the full model says",
    )
    policy.add_argument("--reward", choices=REWARDS, help="Eq. 4, hardness-guided, or Eq. 3, vanilla, as for tokens")
    policy.add_argument("--estimator", choices=ESTIMATORS, help="of the gradient of Eq. 5; reinforce")
    policy.add_argument("--trajectories", type=_positive, help="sampled of a row in a step; 8")
    policy.add_argument("--epsilon", type=_share, help="share of actions that a fair coin takes while training; 0")
    policy.add_argument("--rounds", type=_positive, help="of policy and task steps, at most; 3")
    policy.add_argument(
        "--alpha",
        type=float,
        help="the price of a layer, Eq. 3; .02, of a token's .1. For lora-exits: they are scaled by alpha / rank; 16",
    )

    sub = command("evaluate", "accuracy, layers saved and measured speed-up of a run", "mini-ee evaluate run --sweep")
    sub.add_argument("run", type=Path, metavar="RUN")
    _add_schedule(sub)
    _add_evaluation(sub)
    _add_rule(sub)
    sub.add_argument(
        "--sweep", action="store_true", help="also 51 thresholds evenly in (1/#labels, 1); a decoder's: over epsilon"
    )
    sub.add_argument(
        "--overthinking", action="store_true", help="also rows that an exit gets right and a later one wrong"
    )
    sub.add_argument("--hardness", action="store_true", help="also the memorized layer, with its correlations")

    decoder = sub.add_argument_group("a decoder's run, or a plain decoder", "--task: HellaSwag, MMLU, ...")
    decoder.add_argument("--max-rows", type=_positive, metavar="N", help="of the benchmark, drawn with the seed")
    decoder.add_argument(
        "--text", type=Path, metavar="FILE", help="with --sweep: also perplexity of this held-out text"
    )
    decoder.add_argument("--picture", type=Path, metavar="PNG", help="with --sweep: the paper's figures in one picture")

    sub = command("compare", "several runs in one table, on one clock", "mini-ee compare run-a run-b")
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    _add_schedule(sub, type=_schedules, metavar="S", help="LoRA exits once under each of these: restart,parallel")
    _add_evaluation(sub)
    sub.add_argument(
        "--sweep", action="store_true", help="also the curve of each, and what it saves at no and little loss"
    )
    sub.add_argument(
        "--picture",
        type=Path,
        metavar="PNG",
        help="loss and accuracy by layer; of runs of consistent alone the score over alpha; with --sweep all curves",
    )
    writers = sub.add_argument_group("decoders' runs of consistent and calm", "Rouge-L, layers saved, tokens a second")
    writers.add_argument("--text", type=Path, metavar="FILE", help="the stories, if not where they were in training")
    writers.add_argument("--max-rows", type=_positive, metavar="N", help="texts that are written; 100")
    _add_sampling(writers)

    sub = command(
        "classify",
        "one sentence through the exits, layer by layer",
        'mini-ee classify mini-ee-demo/run --text "I loved every minute of it."',
    )
    sub.add_argument("run", type=Path, metavar="RUN")
    sub.add_argument("--text", required=True, help="the sentence")
    sub.add_argument("--text-b", help="the second sentence, for tasks on pairs")
    sub.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    _add_schedule(sub)
    _add_rule(sub)

    sub = command(
        "generate",
        "text from a decoder, as it comes",
        'mini-ee generate --prompt "Once upon a time, there was a little dog." --temperature .8 --top-p .95',
    )
    sub.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="of self-supervised, or a checkpoint; the built-in Llama"
    )
    prompt = sub.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what the text begins with")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file that holds it, in UTF-8")
    sub.add_argument("--max-new-tokens", type=_positive, metavar="N", help="100, or what the context has room for")
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; may be repeated")
    _add_sampling(sub)
    sub.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: less of what is there; 1")
    sub.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    early = sub.add_argument_group("a run with exits")
    early.add_argument("--rule", choices=RULES[:3], help="instead of the run's own rule")
    early.add_argument("--threshold", type=_numbers, help="one number, or one for each exit: --threshold=.8,.8,.9,1")
    early.add_argument("--measure", choices=tuple(MEASURES), help="what the threshold is on; breaking_ties by default")
    early.add_argument("--layer", type=_positive, help="at which all leave; with --lossless: which drafts, the first")
    early.add_argument(
        "--fill",
        choices=FILLS,
        help="skipped layers: the exit's state stands in (propagate, default), or they catch up",
    )
    early.add_argument("--lossless", action="store_true", help="the full model's own text: an exit drafts, it verifies")
    early.add_argument("--draft", type=_positive, metavar="N", help="tokens drafted before they are verified; 4")
    early.add_argument(
        "--show-exits",
        action="store_true",
        help="colour tokens by the layer they left at, in a pipe too; in JSON: layers",
    )
    early.add_argument("--model", type=Path, metavar="DIR", help="where the decoder of the run is now, if it moved")

    sub = command(
        "calibrate",
        "thresholds under which exits agree with the full model as often as epsilon",
        "mini-ee calibrate run --epsilon .95 --delta .05",
    )
    sub.add_argument("run", type=Path, metavar="RUN")
    sub.add_argument("--task", metavar="DIR", help=f"task folder; may be left out for a run on the built-in {TOY}")
    sub.add_argument("--model", type=Path, metavar="DIR", help="where the backbone of the run is now, if it moved")
    sub.add_argument("--epsilon", type=float, required=True, help="the least share that agrees, above 0, at most 1")
    sub.add_argument(
        "--delta", type=float, help="the promise holds for fresh rows but for this chance; else the paper's rule"
    )
    sub.add_argument(
        "--measure",
        choices=tuple(MEASURES),
        help="what the thresholds are on; max_probability by default, of a decoder's heads breaking_ties",
    )
    sub.add_argument(
        "--sets", type=_positive, metavar="N", help="also draw N calibration sets, and tell how often a promise breaks"
    )
    _add_texts(sub.add_argument_group("a decoder's run"))

    sub = command("export", "ONNX segments, verified against torch", "mini-ee export mini-ee-demo/run --out exported")
    sub.add_argument("run", type=Path, metavar="RUN")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not be there")
    sub.add_argument("--task", metavar="DIR", help="verify on this task's sentences instead of the built-in ones")
    _add_schedule(sub)
    precision = sub.add_mutually_exclusive_group()
    precision.add_argument("--fp16", action="store_true", help="half precision, for a GPU")
    precision.add_argument("--int8", action="store_true", help="dynamic quantisation, for processors")
    _add_rule(sub)

    sub = command(
        "run",
        "sentences, or prompts for a decoder, or JSONL in, JSONL out, in batches",
        "mini-ee run exported reviews.txt --out answers.jsonl",
    )
    sub.add_argument("exported", type=Path, metavar="EXPORTED")
    sub.add_argument("file", type=Path, nargs="?", metavar="FILE", help="standard input by default")
    sub.add_argument("--out", type=Path, metavar="FILE", help="standard output by default")
    sub.add_argument("--batch-size", type=_positive, default=32, help="32 by default; 1 for answers line by line")
    sub.add_argument("--engine", choices=("onnx", "torch"), default="onnx", help="onnx by default")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="cuda where it is there by default, else cpu")
    decoder = sub.add_argument_group("a decoder", "lines are prompts; it writes the likeliest text")
    decoder.add_argument("--max-new-tokens", type=_positive, metavar="N", help="after each prompt; 100")
    decoder.add_argument("--fill", choices=FILLS, help="caches of layers that tokens skipped; propagate")

    sub = command("bench", "ratios measured side by side in one process", "mini-ee bench exit-tax --threads 2")
    sub.add_argument("name", choices=(*BENCHMARKS, "all"), metavar="NAME", help=", ".join((*BENCHMARKS, "all")))
    sub.add_argument("--model", type=Path, help="weights of the minilm cases; random ones of that shape by default")
    sub.add_argument("--large", action="store_true", help="retrieval: a datastore of a million rows too; takes long")
    return main


def _add_training(sub: Parser) -> None:
    sub.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint folder; the built-in 12-layer BERT by default"
    )
    sub.add_argument("--task", default=TOY, metavar="DIR", help=f"task folder; the built-in {TOY} by default")
    sub.add_argument(
        "--exits",
        type=_integers,
        help="layers to leave at, 2,4,6; all for joint, two-stage, raee and consistent, four even ones for others",
    )
    sub.add_argument(
        "--pool", choices=("first", "mean"), help="what heads read; mean by default, and always on decoders"
    )
    sub.add_argument("--epochs", type=_positive, help="3 by default, for the built-in model and lora-exits 5")
    sub.add_argument("--lr", type=float, help="of the backbone; 5e-5, for the built-in one 2e-4, lora-exits 1e-3")
    sub.add_argument("--head-lr", type=float, help="learning rate of the heads; 5e-4, lora-exits 1e-3")
    sub.add_argument("--batch-size", type=_positive, default=32, help="32 by default")
    sub.add_argument("--max-train", type=_positive, metavar="N", help="train on N rows at most, drawn with the seed")
    sub.add_argument("--max-length", type=_positive, metavar="TOKENS", help="longer texts are cut; 128")
    sub.add_argument("--max-loss", type=_share, help="the default rule may lose this much score; .01")
    sub.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")


def _add_texts(group) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("--text", type=Path, metavar="FILE", help="a text, cut in pieces; else the model writes some")
    source.add_argument("--prompt", action="append", metavar="TEXT", help="it goes on from this; may be repeated")
    group.add_argument("--greedy", action="store_true", help="with its likeliest tokens, once from each prompt")
    group.add_argument("--texts", type=_positive, metavar="N", help="512, of --text all pieces")
    group.add_argument("--new-tokens", type=_positive, metavar="N", help="of each text; 64")


def _add_sampling(sub) -> None:
    sub.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    sub.add_argument("--top-k", type=_positive, metavar="K", help="draw from the K likeliest tokens")
    sub.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the fewest tokens that hold P of the probability"
    )


def _add_schedule(sub: Parser, **settings) -> None:
    usual = {"choices": SCHEDULES, "help": "which LoRA streams start together; restart by default"}
    sub.add_argument("--schedule", **(settings or usual))
    sub.add_argument("--model", type=Path, metavar="DIR", help="where the backbone of LoRA exits is now, if it moved")


def _add_evaluation(sub: Parser) -> None:
    sub.add_argument("--task", metavar="DIR", help=f"task folder; may be left out for runs on the built-in {TOY}")
    sub.add_argument("--split", help="dev by default where there is one, else test")
    sub.add_argument("--batch-size", type=_positive, default=32, help="32 by default; 1 shows latency")
    sub.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")


def _add_rule(sub: Parser) -> None:
    sub.add_argument("--rule", choices=RULES, help="instead of the run's own rule")
    sub.add_argument("--threshold", type=_numbers, help="one number, or one for each exit: --threshold=.8,.8,.9")
    sub.add_argument("--measure", choices=tuple(MEASURES), help="what the threshold is on; max_probability by default")
    sub.add_argument("--patience", type=_positive, help="exits in a row, for patience and patience-confidence")
    sub.add_argument("--layer", type=_positive, help="for fixed: the layer at which all leave")
    sub.add_argument("--cut", type=_share, help="for policy: leave where its probability is above; .5")
    _add_retrieval(sub.add_argument_group("a run of raee", "instead of the settings that it was collected with"))


def _add_retrieval(group) -> None:
    group.add_argument("--k", type=_positive, help="neighbours that vote; 12")
    group.add_argument("--tau", type=_share, help="how sure a neighbour's exit must be to vote, Eq. 4; .9")
    group.add_argument("--fallback-top", type=_count, metavar="N", help="best exits of a neighbour with none; 0")


def _positive(text: str) -> int:
    value = _count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return value


def _seed(text: str) -> int:
    value = _count(text)
    if value >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a number below 2**32, found {text}")
    return value


def _threads(text: str) -> int:
    value = _positive(text)
    if value > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_THREADS} threads, found {text}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, found {text!r}")
    if len(text) > DIGITS:
        raise argparse.ArgumentTypeError(f"expected a number of at most {DIGITS} digits, found {text[:40]}")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")
    return value


def _schedules(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(SCHEDULES):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(SCHEDULES)}, with commas, found {text!r}")
    return names


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or several with commas, found {text!r}") from None


def _words(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(number.strip().isdecimal() and equals and word.strip() for number, equals, word in pairs):
        raise argparse.ArgumentTypeError(f"expected a word for each class, as 0=terrible,1=great, found {text!r}")
    return {number.strip(): word.strip() for number, _, word in pairs}


def main(argv: list[str] | None = None) -> int:
    """Run one command, of this process or as given; returns the exit status."""
    for name in ("stdout", "stderr"):  # closed, `>&-`: print(file=None) would write to the other
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    args = parser().parse_args(argv)
    prog = f"mini-ee {args.command}"
    try:
        args.alone = argv is None  # this process is the program's own
        if args.alone and args.command in SERVING and getattr(args, "engine", None) != "torch":
            from mini_ee.export.sessions import share_threads

            share_threads(args.threads or 0)
        # torch takes a second to import: wrong arguments are told before, and `run` does without it
        if args.command == "run":
            from mini_ee.cli.run import run
        else:
            from mini_ee.cli.commands import run
        answer = run(args)
        if args.json:
            print(json.dumps(answer, allow_nan=False))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _told(prog, "stopped", 1)
    except BrokenPipeError:  # whoever read has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (FileNotFoundError, FileExistsError, NotADirectoryError, WrongArguments) as error:
        return _told(prog, _line(error), 2)
    except (ValueError, OSError, MemoryError, AssertionError) as error:
        return _told(prog, _line(error), 1)
    except RuntimeError as error:  # torch's own, such as a device without memory: the first line says it
        return _told(prog, str(error).partition("\n")[0], 1)
    return 1 if answer.get("failed") else 0


def _told(prog: str, line: str, status: int) -> int:
    print(f"{prog}: {line}", file=sys.stderr)
    return status


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
