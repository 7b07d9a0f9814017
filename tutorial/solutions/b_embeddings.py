"""Solutions of appendix B."""

import torch
from torch.nn.functional import normalize


def found_again(early, full):
    """The largest cosine of each row has to be on the diagonal."""
    best = (normalize(early, dim=1) @ normalize(full, dim=1).T).argmax(1)
    return (best == torch.arange(len(early))).float().mean().item()
