"""2DMSE (Li et al. 2024, arXiv:2402.14776v3): every step trains the last layer and one layer drawn at random.

For a batch, with a layer n < N and a size d drawn uniformly:

    loss = l(E_N^D) + l(E_n^D) + l(E_N^d) + l(E_n^d) + alpha T KL(softmax(E_N^D / T) || softmax(E_n^D / T))

Symbols:   E_n^d: the first d numbers of the embedding after layer n; N, D: the last layer and the full size; l: the
           loss of an exit; T, alpha: temperature and weight of the alignment.

Paper: Xianming Li et al., 2D Matryoshka Sentence Embeddings. The formula follows the loss Matryoshka2dLoss of
sentence-transformers, not the paper's text, which we have not compared. Layers are weighted alike; the teacher of the
alignment has no gradient, as there since 2026 (pull requests 3880 and 3901).

Deviations:
1. l is CoSENT for pairs with scores, in place of AnglE. For texts alone it is 1 - cosine to the embedding that the
   encoder returned before the training.
2. Without `sizes` only the full size is trained, and the two terms with d are left out.
3. Layers are drawn from the exits. By default these are all layers.
"""

from dataclasses import dataclass

import torch

from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.exits.embedding_exits import EmbeddingExits
from mini_ee.lab.training.embedding_stages import KL_TEMPERATURE, alignment, encoder_stage, exit_loss, exits_embeddings
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """The settings of 2DMSE."""

    sizes: tuple[int, ...] | None = option(
        None, "sizes of the embedding, of which each step draws one", least=1, default_text="only the full one"
    )
    align: float = option(1.0, "weight of the alignment with the last layer", least=0)


def drawn(count: int) -> int:
    """One of 0 .. count - 1, uniformly."""
    return int(torch.randint(count, ()))


def two_dimensional_loss(model: EmbeddingExits, batch: Batch, config: Config) -> torch.Tensor:
    """The equation above, for a layer and a size that are drawn here."""
    embeddings, labels = exits_embeddings(model, batch), batch.labels
    *early, last = embeddings
    shallow = [early[drawn(len(early))]] if early else []
    read = [last, *shallow]
    loss = sum(exit_loss(embedding, labels) for embedding in read)
    if config.sizes:
        size = config.sizes[drawn(len(config.sizes))]
        loss = loss + sum(exit_loss(embedding, labels, size) for embedding in read)
    aligned = sum(alignment(embedding, last, KL_TEMPERATURE) for embedding in shallow)
    return loss + config.align * KL_TEMPERATURE * aligned


def recipe(model: EmbeddingExits, config: Config) -> list[Stage]:
    """One stage. The best epoch has the highest mean score over the exits."""
    return [encoder_stage(lambda model, batch: two_dimensional_loss(model, batch, config))]


METHOD = Method(Config, recipe, units=("embeddings",), exits=None, trains_encoder=True)
