"""The built-in models and real checkpoints with which the core is tested, and rows for them."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mini_ee.data import Inputs
from mini_ee.load import folder_of


def rows(count, size, vocabulary, seed=0):
    """A padded batch with kinds 0 and 1."""
    random = np.random.default_rng(seed)
    lengths = torch.from_numpy(random.integers(3, size + 1, count))
    mask = (torch.arange(size) < lengths[:, None]).long()
    mask[0] = 1
    ids = torch.from_numpy(random.integers(5, vocabulary, (count, size))) * mask
    return Inputs(ids, mask, torch.from_numpy(random.integers(0, 2, (count, size))) * mask)


BERTS = {"built-in": ("bert", (2, 4, 8, 12)), "MiniLM": ("all-MiniLM-L6-v2", (1, 2, 4, 6))}
LLAMAS = {"built-in": ("llama", (4, 8, 12)), "stories260K": ("stories260K", (1, 3, 5))}


def loaded(models, name):
    """(folder, exits) of the built-in model, or of a checkpoint that the tests with real data have."""
    folder, exits = models[name]
    if name == "built-in":
        return folder_of(folder), exits
    if "MINI_EE_SHARED" not in os.environ:
        pytest.skip(f"needs the real {folder} (2026-11)")
    return Path(os.environ["MINI_EE_SHARED"]) / "weights" / folder, exits
