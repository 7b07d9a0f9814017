"""Starbucks (Zhuang et al. 2024, arXiv:2410.13230v3): every step trains all layers, each with its own size.

For a batch, over a fixed list of layers n_1 < .. < n_K = N and sizes d_1 <= .. <= d_K:

    loss = sum over k of l(E_k)  +  alpha T sum over k < K of KL(softmax(F_k) || softmax(E_k))

Symbols:   E_k: the first d_k numbers of the embedding after layer n_k; F_k: the first d_k numbers of the embedding
           after the last layer; l: the loss of an exit; T = .3 and alpha: weights of the alignment.

Paper: Zhuang et al., Starbucks: Improved Training for 2D Matryoshka Embeddings; code: ielab/Starbucks,
sts/starbucks_loss.py. There, T is a factor and does not divide the embeddings.

Deviations:
1. l is CoSENT for pairs with scores, as in the code for STS-B. For texts alone it is 1 - cosine to the embedding that
   the encoder returned before the training.
2. Without `sizes` every layer has the full size.
3. The teacher of the alignment, F_k, has no gradient.
4. The backbone is not pre-trained with masked autoencoding (the paper's SMAE).
"""

from dataclasses import dataclass

from torch import Tensor

from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.exits.embedding_exits import EmbeddingExits
from mini_ee.lab.training.embedding_stages import KL_TEMPERATURE, alignment, encoder_stage, exit_loss, exits_embeddings
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """The settings of Starbucks."""

    sizes: tuple[int, ...] | None = option(
        None, "size of the embedding at each exit, such as 32,64,384", least=1, default_text="the full one"
    )
    align: float = option(1.0, "weight of the alignment with the last layer", least=0)


def starbucks_loss(model: EmbeddingExits, batch: Batch, config: Config) -> Tensor:
    """The equation above."""
    embeddings = exits_embeddings(model, batch)
    last, sizes = embeddings[-1], config.sizes or (None,) * len(embeddings)
    loss = sum(exit_loss(embedding, batch.labels, size) for embedding, size in zip(embeddings, sizes))
    aligned = sum(
        alignment(embedding[:, :size], last[:, :size], 1.0) for embedding, size in zip(embeddings[:-1], sizes)
    )
    return loss + config.align * KL_TEMPERATURE * aligned


def recipe(model: EmbeddingExits, config: Config) -> list[Stage]:
    """One stage. Raises ValueError unless there is one size per exit. The best epoch has the highest mean score."""
    if config.sizes is not None and len(config.sizes) != len(model.exits):
        raise ValueError(f"expected {len(model.exits)} sizes, one per exit, found {len(config.sizes)}")
    return [encoder_stage(lambda model, batch: starbucks_loss(model, batch, config))]


METHOD = Method(Config, recipe, units=("embeddings",), exits=None, trains_encoder=True)
