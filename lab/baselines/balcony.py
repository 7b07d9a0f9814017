"""Balcony (Jamialahmadi et al. 2025, arXiv:2503.05005v2): each exit has a transformer layer of its own.

Paper: Benyamin Jamialahmadi et al., Balcony: A Lightweight Approach to Dynamic Inference of Generative Language Models,
EMNLP 2025, arXiv:2503.05005v2. Details are from its code, github.com/benyaminjami/Balcony-LLaMA, branch finetuning, at
84faf4b.

Symbols:   h_e, the state after e layers; B_e, the layer of exit e, the balcony; p, the full model; p_e, exit e.
Exit:      p_e = softmax(W norm_e(B_e(h_e))). B_e is a decoder layer, a copy of the last layer before it is trained, and
           attends to the states h_e of all tokens up to its own. W is the LM head of the model.
Loss:      the mean over exits of KL(p, p_e), averaged over tokens. The model is frozen; B_e and norm_e learn.
Decoding:  B_e has a cache of its own: the keys and values of the states h_e of all tokens that ran e layers. A token
           that exited below e has none. They are filled in when a later token of its row runs to e, of the copied or
           of the recomputed state, as in the layers of the model; this text is then that of the definition above.

Deviations: 1. in the paper all tokens of a text use the same exit, chosen by a budget; here a rule chooses for each
token; 2. norm_e is a copy of the final norm before it is trained; in the code it is one of the norm before layer e + 1;
3. without a file it learns from text that the model generates, at a rate of 1e-3 (theirs: 5e-4); 4. the keys and values
of B_e are computed twice for a token whose exit is read: once for the cache, once in the layer.
"""

from copy import deepcopy
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.decoding import TokenState
from mini_ee.lab.exits.generation import TokenSegments
from mini_ee.lab.exits.row_exits import check_exits
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage
from mini_ee.lab.training.training_text import Source, agreement_rule, texts_to_calibrate


class Balcony(nn.Module):
    """The head of an exit: a layer and a norm of its own; the linear map is that of the decoder's LM head."""

    def __init__(self, decoder: Any):
        super().__init__()
        self.layer, self.norm = deepcopy(decoder.layers[-1]), deepcopy(decoder.norm)
        self.__dict__["decoder"] = decoder  # not as a submodule, so that its weights do not get a second name
        self.requires_grad_()

    @property
    def depth(self) -> int:
        """The depth of the last layer, of which the balcony is a copy: its window is that of this depth."""
        return self.decoder.config.num_hidden_layers - 1

    def run(self, hidden: Tensor, context: Any) -> Tensor:
        """B_e: the states (B, T, D) after e layers -> (B, T, D)."""
        return self.layer(hidden, context, self.depth)

    def write(self, hidden: Tensor, context: Any) -> None:
        """Write the keys and values of these states to the cache of the context."""
        self.layer.write_keys(hidden, context, self.depth)

    def forward(self, state: Tensor) -> Tensor:
        """The output of B_e (..., D) -> logits (..., V) float32."""
        linear = {part: self.decoder.get_parameter(name) for part, name in self.decoder.vocabulary.items()}
        return F.linear(self.norm(state), **linear).float()


class BalconySegments(TokenSegments):
    """TokenSegments whose exits have layers with caches."""

    own_layers = True
    heads: Any  # a Balcony each

    def run(self, k: int, hidden: Tensor, block: Any) -> Tensor:
        hidden = super().run(k, hidden, block)
        if k < len(self.heads):
            self.heads[k].write(hidden, block.of_exit(k))
        return hidden

    def copy_state(self, k: int, hidden: Tensor, block: Any) -> None:
        super().copy_state(k, hidden, block)
        if k < len(self.heads):
            self.heads[k].write(hidden, block.of_exit(k))

    def run_all(self, hidden: Tensor, block: Any) -> None:
        for k in range(len(self.exits)):
            hidden = self.run(k, hidden, block)

    def draft_logits(self, k: int, hidden: Tensor, block: Any) -> Tensor:
        return super().draft_logits(k, self.heads[k].run(hidden, block.of_exit(k)), block)

    def read(self, k: int, state: TokenState) -> np.ndarray:
        if k < len(self.heads):
            block: Any = state.block or self.block(state.rows, state.positions)
            state = state._replace(hidden=self.heads[k].run(state.hidden, block.of_exit(k)))
        return super().read(k, state)


class BalconyExits(TokenExits):
    """A frozen decoder with a Balcony at each exit before the last."""

    segments_class, own_layers = BalconySegments, True

    def __init__(self, backbone: Any, exits: tuple[int, ...]):
        """Raises WrongArguments for an encoder-decoder."""
        if backbone.is_encoder_decoder:
            raise WrongArguments(
                f"balcony is for decoders without an encoder, found a {backbone.config.model_type}; "
                f"give --model another one, or train self-supervised"
            )
        super().__init__(backbone, (backbone.config.num_hidden_layers,))
        self.exits = check_exits(tuple(exits), backbone.config.num_hidden_layers)
        self.heads = nn.ModuleList(Balcony(backbone) for _ in exits[:-1])

    def head_input(self, k: int, hidden: Tensor, context: Any) -> Tensor:
        return self.heads[k].run(hidden, context.of_exit(k)) if k < len(self.heads) else hidden

    def write_exit_keys(self, k: int, hidden: Tensor, context: Any) -> None:
        if k < len(self.heads):
            self.heads[k].write(hidden, context.of_exit(k))


def self_distillation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over exits of KL(p, p_e), averaged over tokens."""
    *exits, full = model(*batch.inputs)
    log_p = F.log_softmax(full.detach(), dim=-1)
    divergences = [
        F.kl_div(F.log_softmax(logits, dim=-1), log_p, reduction="batchmean", log_target=True) for logits in exits
    ]
    return sum(divergences) / len(divergences)


def recipe(model: nn.Module) -> list[Stage]:
    """One stage: all balconies at once. The best epoch is the one whose exits agree most with the full model."""
    return [
        Stage(
            name="balconies",
            trainable=lambda name: name.startswith("heads."),
            loss=self_distillation_loss,
            score=lambda scores: float(np.mean(scores[:-1])),
        )
    ]


def calibrated_rule(model: TokenExits, source: Source, held_out: TextData) -> Chosen:
    """Thresholds at which tokens agree with the full model; if it generates its texts, on other ones than the best
    epoch was chosen on."""
    if source.options.kind == "pieces" and source.options.text is None:
        held_out = TextData(texts_to_calibrate(source), every=True)
    return agreement_rule(model, source, held_out)


METHOD = Method(
    recipe=lambda model, config: recipe(model),
    units=("tokens",),
    model=lambda backbone, exits, num_labels, pool, config: BalconyExits(backbone, exits),
    default_rule=calibrated_rule,
    defaults={
        "tokens": {"head_lr": 1e-3, "epochs": 8, "kind": "pieces", "rank": None},
        "built-in": {"epochs": 4, "texts": 512},
    },
    keeps_model=True,
    lacks=("lr", "rank"),
    own_heads=True,
)
