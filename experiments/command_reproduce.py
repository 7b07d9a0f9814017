"""`mini-ee reproduce NAME`: the experiments of a paper, by its method, and their page. Processes share the work."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mini_ee.lab.cli.command_options import positive

LEADERBOARD = "leaderboard"
HELP = "run a paper's experiments and write the page of its results"
EXAMPLE = "mini-ee reproduce lora-exits --quick"
USUAL = "--only", "--quick", "--seeds"


def add(sub: ArgumentParser) -> None:
    from mini_ee.experiments.measured import MEASURED
    from mini_ee.experiments.recipe import METHOD_OF, PAGES, PAPERS

    names = [METHOD_OF.get(page, page) for page in PAGES]
    papers, others = names[: len(PAPERS)], (*names[len(PAPERS) :], LEADERBOARD, *MEASURED)
    sub.add_argument(
        "paper",
        choices=(*names, LEADERBOARD, *MEASURED),
        metavar="NAME",
        help=f"paper, by its method ({', '.join(papers)}), or another page: {', '.join(others)}",
    )
    sub.add_argument(
        "--measure",
        nargs="*",
        metavar="PART",
        help=f"parts of a page of measurements ({', '.join(MEASURED)}) that are measured again; all if none is named",
    )
    sub.add_argument(
        "--only",
        metavar="TABLE",
        help=f'table, figure or claim, such as "Table 1"; of the {LEADERBOARD} a method (default all)',
    )
    sub.add_argument("--quick", action="store_true", help="run a small part, on the built-in models and data")
    sub.add_argument(
        "--seeds",
        type=positive,
        metavar="N",
        help="number of seeds per case, from --seed on (default as many as the page has)",
    )
    sub.add_argument(
        "--sources",
        type=Path,
        metavar="DIR",
        help="folder of weights/ and data/ (default $MINI_EE_SHARED or ../shared)",
    )
    sub.add_argument(
        "--device",
        default="cpu",
        help="device of the trainings: cpu, cuda, cuda:1, ...; times are measured on the CPU",
    )
    sub.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the pages (default results, with --quick results-quick)"
    )


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Run the missing experiments, or measure the named parts, then write the page."""
    from mini_ee.experiments.leaderboard import make_leaderboard
    from mini_ee.experiments.measured import MEASURED, make_page
    from mini_ee.experiments.recipe import METHOD_OF
    from mini_ee.experiments.reproduce import reproduce
    from mini_ee.lab.errors import WrongArguments

    places = {"sources": args.sources, "out": args.out, "say": say}
    if args.paper in MEASURED:
        if args.only is not None or args.quick or args.seeds or args.device != "cpu":
            given = "--only, --quick, --seeds and --device"
            raise WrongArguments(f"{given} are for papers; {args.paper} has --measure PART")
        return make_page(args.paper, args.measure, **places)
    if args.measure is not None:
        raise WrongArguments(f"--measure is for {', '.join(MEASURED)}; {args.paper} runs what is missing; leave it out")
    seeds = (args.seed, args.seeds)
    page_of = {method: page for page, method in METHOD_OF.items()}
    paper = page_of.get(args.paper, args.paper)
    make = make_leaderboard if args.paper == LEADERBOARD else partial(reproduce, paper)
    return make(only=args.only, quick=args.quick, seeds=seeds, device=args.device, **places)
