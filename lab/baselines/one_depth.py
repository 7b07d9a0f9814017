"""One depth (Wang et al. 2024, arXiv:2411.17299): the first layers of a sentence encoder, trained for one depth alone.

    loss = l(E_n)

Symbols:   E_n: the embedding after layer n, the first exit; l: the loss of an exit.

Wang et al., 2D Matryoshka Training for Information Retrieval, compare 2DMSE with such models: one for each depth. The
layers above n are not run in the training, and the default rule never runs them.

Deviations:
1. l is CoSENT for pairs with scores. For texts alone it is 1 - cosine to the embedding that the full encoder returned
   before the training.
"""

from torch import Tensor

from mini_ee.lab.exits.embedding_exits import EmbeddingExits
from mini_ee.lab.rules import Fixed
from mini_ee.lab.training.embedding_stages import encoder_stage, exit_loss
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch


def one_depth_loss(model: EmbeddingExits, batch: Batch) -> Tensor:
    """The loss of the first exit. The layers above it are not run."""
    state = next(model.each_state(*batch.inputs))
    return exit_loss(model.classify(0, state).float(), batch.labels)


METHOD = Method(
    recipe=lambda model, config: [encoder_stage(one_depth_loss, lambda scores: float(scores[0]))],
    units=("embeddings",),
    exits=lambda layers: (max(1, layers // 2), layers) if layers > 1 else (1,),
    default_rule=lambda recorded, least_cosine: Fixed(0),
    trains_encoder=True,
)
