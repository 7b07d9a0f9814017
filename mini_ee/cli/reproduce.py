"""`mini-ee reproduce PAPER`: a paper's experiments, and the page that says what came out. Calls share the work."""

from pathlib import Path

from mini_ee.cli.options import positive

HELP = "run a paper's experiments and write the page of its results"
EXAMPLE = "mini-ee reproduce loraexit --quick"


def add(sub) -> None:
    from mini_ee.experiments.recipe import PAGES

    sub.add_argument(
        "paper", choices=PAGES, help="a paper; what the shortest commands give; or a check of `mini-ee estimate`"
    )
    sub.add_argument("--only", metavar="TABLE", help='one table, figure or claim, such as "Table 1"')
    sub.add_argument("--quick", action="store_true", help="a small part, on the built-in models and data")
    sub.add_argument(
        "--seeds", type=positive, metavar="N", help="so many of each case, from --seed on; else as many as the page has"
    )
    sub.add_argument(
        "--sources", type=Path, metavar="DIR", help="with weights/ and data/; $MINI_EE_SHARED or ../shared"
    )
    sub.add_argument("--out", type=Path, metavar="DIR", help="where pages are written; results, or results-quick")


def run(args, say) -> dict:
    """Run what is missing, then write the page."""
    from mini_ee.experiments.run import reproduce

    return reproduce(
        args.paper,
        only=args.only,
        quick=args.quick,
        seeds=(args.seed, args.seeds),
        sources=args.sources,
        out=args.out,
        say=say,
    )
