"""The states of many rows or tokens: in memory, or in a file, with which a killed training goes on.

Rows have a file if they do not fit in memory. Tokens always have one, in half precision: a large decoder reads them for
minutes.
"""

import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mini_ee.lab.data.files import read_json, write_json

IN_MEMORY = 0.25
"""Share of the free memory that states may take."""

SAVED = 30  # seconds between two records of how many batches a file has


class Stored:
    """States (N, K, D), to be written batch by batch; the first `done` batches are there already.

    folder: of a file for them, if they do not fit in memory, or are of half precision; None: in memory. key: the same
    for the same states. Raises OSError if they fit neither in memory nor on the disk.
    """

    def __init__(self, shape: tuple[int, ...], folder: Path | None, key: str, dtype: type = np.float32):
        self.done, self._file, size = 0, None, np.dtype(dtype).itemsize * math.prod(shape)
        if folder is None or dtype == np.float32 and size <= IN_MEMORY * free_memory():
            self.states: Tensor = torch.empty(shape)
            return
        folder.mkdir(parents=True, exist_ok=True)
        path, self._progress, self._key = folder / "states.bin", folder / "states.json", key
        begun = read_json(self._progress) if path.exists() and self._progress.exists() else {}
        same = begun.get("key") == key
        self.done = begun["batches"] if same else 0
        if not same and size > (free := shutil.disk_usage(folder).free):
            raise OSError(
                f"{folder}: expected {size / 1e9:.1f} GB for hidden states that do not fit in memory, found "
                f"{free / 1e9:.1f} GB; give fewer texts or fewer exits"
            )
        self._file = np.memmap(path, dtype, "r+" if same else "w+", shape=shape)
        self.states, self._saved = torch.from_numpy(self._file), time.monotonic()

    def wrote(self, batches: int, last: bool) -> None:
        """Record from time to time, and after the last batch, that so many are in the file."""
        if self._file is not None and (last or time.monotonic() - self._saved >= SAVED):
            self._file.flush()
            write_json(self._progress, {"key": self._key, "batches": max(batches, self.done)})
            self._saved = time.monotonic()


Allocate = Callable[[tuple[int, ...]], Stored]
"""The shape of states -> room for them."""


def in_memory(shape: tuple[int, ...]) -> Stored:
    """Room for states that are not kept on disk."""
    return Stored(shape, None, "")


def free_memory() -> float:
    """Bytes that a process can still get: what Linux calls available, at most the limit of the container."""
    try:
        (available,) = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        limit = Path("/sys/fs/cgroup/memory.max")
        most = limit.read_text().strip() if limit.exists() else "max"
        return min(1024.0 * int(available), float("inf" if most == "max" else most))
    except (OSError, ValueError):  # another system: all of its memory
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
