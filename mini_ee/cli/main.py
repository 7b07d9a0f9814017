"""The command line: arguments in, one answer out. What a command does stands in a file of its name.

Exit status 0; 1 for a failure; 2 for wrong arguments. Errors are one line on standard error. The parser starts without
torch, and a command's file imports what it needs when it runs.
"""

import json
import os
import sys
from importlib import import_module

from mini_ee import __version__
from mini_ee.cli.command_options import Parser, seed, threads
from mini_ee.data.files import STDOUT, errors_name
from mini_ee.errors import WrongArguments

GROUPS = {
    "train": ("demo", "estimate", "train"),
    "measure": ("evaluate", "compare", "classify", "generate", "bench", "reproduce"),
    "deploy": ("calibrate", "export", "run", "serve"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
SERVING = ("run", "serve", "evaluate", "classify")  # graphs share threads: no torch model computes in turns with them


def parser(argv: list[str]) -> Parser:
    """The command line. argv: where it begins with a command, that one alone is added, and of `train` one method."""
    main = Parser("mini-ee", description="Early-exit transformers from scratch. First step: mini-ee demo")
    main.add_argument("--version", action="version", version=__version__)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    lines = {}
    for name in [name for name in COMMANDS if argv[:1] == [name]] or COMMANDS:
        module = import_module(f"mini_ee.cli.{name}")
        lines[name] = f"  {name:<10} {module.HELP}"
        if name == "train":
            module.add(commands, argv)
        else:
            sub = commands.add_parser(name, description=module.HELP, example=module.EXAMPLE)
            add_common(sub)
            module.add(sub)
    if len(lines) == len(COMMANDS):
        groups = (f"{group}:\n" + "\n".join(lines[name] for name in names) for group, names in GROUPS.items())
        main.epilog = "\n\n".join(groups)
    return main


def add_common(sub: Parser) -> None:
    """What every command takes."""
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.add_argument("--seed", type=seed, default=0, help="random seed")
    sub.add_argument(
        "--threads", type=threads, help="number of CPU threads (default the choice of torch or ONNX Runtime)"
    )


def answer_of(args) -> dict:
    """Run the command that `args.command` names; returns its JSON answer, with seed, threads and versions."""
    command = import_module(f"mini_ee.cli.{args.command}")
    if args.command in ("run", "serve"):
        return command.run(args)
    import torch

    from mini_ee.evaluation.plots import check_picture
    from mini_ee.training.run_folder import versions

    if args.threads:
        torch.set_num_threads(args.threads)
    check_picture(getattr(args, "picture", None))
    say = (lambda text: print(text, file=sys.stderr)) if args.json else print
    answer = command.run(args, say)
    return answer | {"seed": args.seed, "threads": torch.get_num_threads(), "versions": versions()}


def main(argv: list[str] | None = None) -> int:
    """Run one command, of this process or as given; returns the exit status."""
    quiet = os.environ.get("RANK", "0") != "0" and "WORLD_SIZE" in os.environ  # of torchrun's the first speaks
    for name in ("stdout", "stderr"):  # closed, `>&-`: print(file=None) would write to the other
        if quiet or getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    words = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    prog = "mini-ee"
    try:
        args = parser(words).parse_args(words)
        prog = f"mini-ee {args.command}"
        args.alone = argv is None  # this process is the program's own
        if args.alone and args.command in SERVING and getattr(args, "engine", None) != "torch":
            from mini_ee.export.sessions import share_threads

            share_threads(args.threads or 0)
        answer = answer_of(args)
        status = 1 if answer.get("failed") else 0
        with errors_name(STDOUT):
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
    return status


def _told(prog: str, line: str, status: int) -> int:
    print(f"{prog}: {line}", file=sys.stderr)
    return status


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
