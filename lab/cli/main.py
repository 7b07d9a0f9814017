"""The command line of mini-ee. Each command is a file of its name in this folder, or in the ring that it needs.

The exit status is 0, 1 for a failure, or 2 for wrong arguments. An error is one line on standard error. The parser
starts without torch; a command imports torch when it runs.
"""

import json
import os
import sys
from argparse import Namespace
from importlib import import_module
from importlib.util import find_spec

from mini_ee import __version__
from mini_ee.lab.cli.command_options import Parser, seed, sentence, threads
from mini_ee.lab.data.files import MANIFEST, STDOUT, errors_name
from mini_ee.lab.data.values import shortened
from mini_ee.lab.errors import WrongArguments

GROUPS = {
    "train": ("demo", "add-exits", "estimate", "train"),
    "measure": ("evaluate", "compare", "classify", "embed", "generate", "bench", "reproduce"),
    "deploy": ("calibrate", "export", "run", "batch", "serve"),
}
DESCRIPTION = (
    "Early-exit transformers from scratch. First step: mini-ee demo. Options of a command: mini-ee COMMAND --help"
)
OUTER = {"batch": "serve", "serve": "serve", "bench": "experiments", "reproduce": "experiments"}
"""Commands of rings around the lab. Without its ring a command is not there."""
RINGS = {name: ring for name, ring in OUTER.items() if find_spec(f"mini_ee.{ring}")}
COMMANDS = tuple(name for names in GROUPS.values() for name in names if name in RINGS or name not in OUTER)
SERVING = (
    "run",
    "serve",
    "evaluate",
    "classify",
    "embed",
)  # graphs share threads: no torch model computes in turns with them


def parser(argv: list[str]) -> Parser:
    """The parser. argv: if it begins with a command, only this command is added, and of `train` only the method."""
    main = Parser("mini-ee", description=DESCRIPTION)
    main.add_argument("--version", action="version", version=__version__)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    lines = {}
    for name in [name for name in COMMANDS if argv[:1] == [name]] or COMMANDS:
        module = _module(name)
        lines[name] = f"  {name:<10} {module.HELP}"
        if name == "train":
            module.add(commands, argv)
        else:
            twice = "resolve" if hasattr(module, "KINDS") else "error"  # kinds of runs share names of options
            texts = {"description": sentence(module.HELP), "example": module.EXAMPLE, "usual": module.USUAL}
            sub = commands.add_parser(name, conflict_handler=twice, **texts)
            sub.words = argv[1:]
            module.add(sub)
            add_common(sub)
    if len(lines) == len(COMMANDS):
        groups = (
            f"{group}:\n" + "\n".join(lines[name] for name in names if name in lines) for group, names in GROUPS.items()
        )
        main.epilog = "\n\n".join(groups)
    return main


def _module(command: str):
    name = command.replace("-", "_")
    ring = f"{RINGS[name]}.command_" if name in RINGS else "lab.cli."
    return import_module(f"mini_ee.{ring}{name}")


def add_common(sub: Parser) -> None:
    """Add the options that every command has."""
    count = "number of CPU threads (default the choice of torch or ONNX Runtime)"
    sub.every_command.add_argument("--json", action="store_true", help="print one JSON object")
    sub.every_command.add_argument("--seed", type=seed, default=0, help="random seed")
    sub.every_command.add_argument("--threads", type=threads, help=count)


def answer_of(args: Namespace) -> dict:
    """Run the command `args.command`. Returns its JSON answer, with seed, threads and versions."""
    command = _module(args.command)
    if args.command in ("run", "batch", "serve"):
        return command.run(args)
    say = (lambda text: print(text, file=sys.stderr)) if args.json else print
    if args.command == "calibrate" and (args.run / MANIFEST).is_file():
        return _module("calibrate_export").run(args, say) | {"seed": args.seed}
    import torch

    from mini_ee.lab.training.run_folder import versions

    if args.threads:
        torch.set_num_threads(args.threads)
    if picture := getattr(args, "picture", None):
        from mini_ee.lab.evaluation.plots import check_picture

        check_picture(picture)
    answer = command.run(args, say)
    return answer | {"seed": args.seed, "threads": torch.get_num_threads(), "versions": versions()}


def main(argv: list[str] | None = None) -> int:
    """Run one command. argv: its arguments (default those of this process). Returns the exit status."""
    quiet = os.environ.get("RANK", "0") != "0" and "WORLD_SIZE" in os.environ  # under torchrun only rank 0 prints
    for name in ("stdout", "stderr"):  # None if closed by `>&-`: print(file=None) would write to the other one
        if quiet or getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    words = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    prog = "mini-ee"
    if not words:
        parser(words).print_help()
        return 0
    try:
        args = parser(words).parse_args(words)
        prog = f"mini-ee {args.command}"
        args.alone = argv is None  # this process runs nothing else
        if args.alone and args.command in SERVING and getattr(args, "engine", None) != "torch":
            from mini_ee.lab.export.sessions import share_threads

            share_threads(args.threads or 0)
        answer = answer_of(args)
        status = 1 if answer.get("failed") else 0
        with errors_name(STDOUT):
            if args.json:
                print(json.dumps(answer, allow_nan=False))
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _print_error(prog, "stopped", 1)
    except BrokenPipeError:  # the reader has closed the pipe, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (FileNotFoundError, FileExistsError, NotADirectoryError, WrongArguments) as error:
        return _print_error(prog, _line(error), 2)
    except (ValueError, OSError, MemoryError, AssertionError) as error:
        return _print_error(prog, _line(error), 1)
    except RuntimeError as error:  # of torch, such as a device without memory: the first line names the cause
        return _print_error(prog, str(error).partition("\n")[0], 1)
    return status


def _print_error(prog: str, line: str, status: int) -> int:
    print(f"{prog}: {line}", file=sys.stderr)
    return status


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeEncodeError):  # Python represents other bytes of a file's name as surrogates
        return f"expected a name in UTF-8, found {shortened(error.object)}; rename the file"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
