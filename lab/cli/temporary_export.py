"""A run in place of an export: `mini-ee run` and `serve` export it to a temporary folder. Only that needs torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mini_ee.lab.data.files import MANIFEST, run_config


@contextmanager
def as_export(folder: Path, command: str) -> Iterator[Path]:
    """The folder itself, or if it is a run, the folder of its export, which is removed at the end."""
    if (folder / MANIFEST).is_file() or run_config(folder) is None:
        yield folder
        return
    import mini_ee

    advice = f"`mini-ee export {folder} --out DIR` keeps it"
    print(f"mini-ee {command}: {folder} is a run; exporting it to a temporary folder ({advice})", file=sys.stderr)
    with TemporaryDirectory(prefix="mini-ee-") as place:
        out = Path(place) / "exported"
        mini_ee.export(mini_ee.load_run(folder), out)
        yield out
