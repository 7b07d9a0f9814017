"""A model that runs in the browser, for the site: a run on the built-in reviews, exported with `--web`. It needs npm.

python docs/live.py site/live
"""

import sys
import tempfile
from pathlib import Path

import mini_ee
from mini_ee.lab.export.web_page import fetch_libraries, vendor_command

SETTINGS = {"epochs": 2, "max_train": 1000}


def main(out: Path) -> str | None:
    """Train, and export to the folder. Returns why the libraries of the page are missing, if they are."""
    with tempfile.TemporaryDirectory() as folder:
        run = mini_ee.train("joint", out=Path(folder) / "run", **SETTINGS)
        mini_ee.export(run, out, web=True)
    return fetch_libraries(out, print) if vendor_command(out) else None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
