"""Embedding maps (Li et al. 2024, arXiv:2402.14776): exits of a frozen sentence encoder learn its embedding.

After each exit layer e_k but the last, a linear map W_k of the pooled hidden state learns the encoder's full embedding:

    loss = sum over k of mean over texts of 1 - cos(W_k s_k(x) + b_k, E(x))

Symbols:   E(x): the embedding after the last layer; s_k(x): the pooled hidden state after layer e_k.

These are self-supervised exits (methods/self_supervised.py) for vectors. The paper (Xianming Li et al., 2D Matryoshka
Sentence Embeddings) trains the whole encoder for each depth; here the encoder stays as it is, and no label is needed.

Decisions:
1. Maps start as the identity, so before training an exit returns its pooled state; in an encoder with Dense modules
   after its pooling, as their linear part.
2. The encoder is frozen: the states of all texts are computed once.
3. The default rule is a fixed depth. With a frozen encoder adaptive depth saved no layers at the same quality.
"""

from mini_ee.lab.exits.embedding_exits import EmbeddingExits
from mini_ee.lab.training.embedding_stages import maps_stage
from mini_ee.lab.training.method import Method, NoConfig
from mini_ee.lab.training.stages import Stage


def recipe(model: EmbeddingExits, config: NoConfig) -> list[Stage]:
    """One stage for all maps."""
    return [maps_stage()] if len(model.exits) > 1 else []


METHOD = Method(
    recipe=recipe,
    units=("embeddings",),
    exits=None,
    defaults={"embeddings": {"head_lr": 1e-3, "epochs": 20}},
    keeps_model=True,
    lacks=("lr", "weight_decay"),
)
