"""Biases by relative position (Raffel et al. 2020), as T5 and MPNet have them."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def buckets(distances: Tensor, both: bool, config: Any) -> Tensor:
    """The bucket of each distance j - i, int64 -> int64. both: j may come after i; half of the buckets are for these.

    Half of the buckets of a side have one distance each; the others grow with the logarithm up to the largest distance.
    Computed in float32 like Hugging Face's, so that distances at the edge of a bucket get the bucket of the training.
    """
    count, most = config.relative_attention_num_buckets, config.relative_attention_max_distance
    first = torch.zeros_like(distances)  # the first bucket of the side
    if both:
        count //= 2
        first, distances = (distances > 0) * count, distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    near = count // 2
    # Distances near .. most are mapped to near .. count by their logarithm; all beyond share the last bucket.
    steps = torch.log(distances.clamp(min=1).float() / near) / math.log(most / near) * (count - near)
    far = (near + steps.long()).clamp(max=count - 1)
    return first + torch.where(distances < near, distances, far)


class Biases(nn.Module):
    """The position bias of a stack, one number per bucket and head, which every layer adds to its scores.

    config: relative_attention_num_buckets, relative_attention_max_distance and num_attention_heads.
    """

    def __init__(self, config: Any, both: bool):
        super().__init__()
        self.config, self.both = config, both
        self.table = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions of queries (B, T) and keys (S,) -> (B, H, T, S)."""
        return self.of_distances(keys - queries[..., None])

    def of_distances(self, distances: Tensor) -> Tensor:
        """Distances j - i, (B, T, S) -> (B, H, T, S)."""
        most = self.config.relative_attention_max_distance  # from here on all distances share a bucket
        # A lookup of the biases of all 2 most + 1 distances, so that the logarithms are not taken for each (T, S) pair.
        possible = torch.arange(-most, most + 1, device=self.table.weight.device)
        by_distance = self.table(buckets(possible, self.both, self.config))
        return F.embedding(distances.clamp(-most, most) + most, by_distance).permute(0, 3, 1, 2)
