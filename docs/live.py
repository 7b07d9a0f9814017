"""A model that runs in the browser, for the site: a run on the built-in reviews, exported with `--web`. It needs npm.

python docs/live.py site/live
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import mini_ee
from mini_ee.lab.export.web_page import fetch_libraries, vendor_command

SETTINGS = {"epochs": 2, "max_train": 1000}


def write_live(out: Path) -> str | None:
    """Train, and export to a new folder. Without the libraries of the page, return why, and leave no folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = mini_ee.train("joint", out=Path(folder) / "run", **SETTINGS)
        mini_ee.export(run, out, web=True)
    failed = fetch_libraries(out, print) if vendor_command(out) else None
    if failed:
        shutil.rmtree(out)
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model and export it with its page into a new folder.")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out}: expected a new folder, found one that is there")
    sys.exit(write_live(args.out))
