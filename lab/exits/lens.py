"""`--head lens`: a small map in front of the model's own LM head, for tokens of a decoder with a large vocabulary.

Sources: Belrose et al. 2023, arXiv:2303.08112 (tuned lens); Din et al. 2023, arXiv:2303.09435 (fitted in closed form).

A head that is a copy of the LM head has V x D weights, for SmolLM2's 49,152 words as many as eight layers. A lens has
D x D of its own. To read it still takes the product with the vocabulary, so a gate decides first: a policy, which is a
small network of the normed state and learns whether the exit agrees with the last one (training/policies.py). By the
rule Policy the vocabulary is then read once, at the exit where the token stops.

Confidence does not need the whole vocabulary either. Vincenti et al. 2024, arXiv:2410.18952, prune it anew for each
token, at one of the first layers; here all tokens share the list of those that were most frequent in training. The
measure `short_list` is breaking ties among them. A token that stops then reads the whole vocabulary.

    x_k = norm(h_k)          the state after layer k, divided by its root mean square
    logits_k = W norm_f(M_k x_k)          W, norm_f: the model's LM head and its final norm; M_k (D, D) is learned
    closed form              M_k = argmin sum |M_k x_k - x_L|^2 + RIDGE N |M_k|^2, over N tokens
    short_list_k             the difference of the two largest of softmax(logits_k of the LIKELY tokens)
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.generative import GenerativeBackbone
from mini_ee.lab.exits.decoding import short_flops

RIDGE = 0.01  # on states of mean square 1; from .001 to .1 the agreement of SmolLM2's layers is the same within .01
EPS = 1e-6  # of the norm
LIKELY = 512  # tokens of the short list; with 256 to 2,048 SmolLM2 needs nearly the same FLOPs
LARGE = 2  # layers; a vocabulary is large if to read it costs as much as so many


def reads_much(decoder: GenerativeBackbone) -> bool:
    """Whether to read the LM head costs a decoder as much as LARGE layers: then copies of it save no time."""
    return decoder.config.hidden_size * decoder.config.vocab_size >= LARGE * decoder.token_weights


class LensHead(nn.Module):
    """A linear map of a layer's normed state to the last layer's, then the decoder's own norm and LM head.

    Before it is fitted the map is the identity. Raises ValueError if the decoder has no LM head.
    """

    def __init__(self, decoder: GenerativeBackbone):
        super().__init__()
        if not decoder.has_lm_head:
            raise decoder.no_lm_head()
        self.__dict__["decoder"] = decoder  # not as a submodule, so that its weights do not get a second name
        weight, width = decoder.embeddings.weight, decoder.config.hidden_size
        self.norm = nn.RMSNorm(width, EPS, elementwise_affine=False)
        self.map = nn.Linear(width, width, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.eye_(self.map.weight)
        self.requires_grad_()
        # 1 for the tokens of the short list, 0 for others: no format rounds these, as it would their numbers.
        self.register_buffer("likely", weight.new_ones(len(weight)))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V) float32."""
        return self.decoder.lm_logits(self.mapped(hidden))

    def mapped(self, hidden: Tensor) -> Tensor:
        """What the model's own LM head reads, (..., D)."""
        return self.map(self.norm(hidden))

    @torch.no_grad()
    def shorten(self, tokens: Tensor) -> None:
        """Let the most frequent of these tokens be the short list. tokens (N,) int64."""
        counts = torch.bincount(tokens, minlength=len(self.likely)).to(self.likely)
        listed = counts.sort(descending=True, stable=True).indices[:LIKELY]
        self.likely.zero_()[listed] = 1

    def likely_rows(self) -> list[Tensor]:
        """The rows of the LM head that are the short list's."""
        return self.decoder.lm_rows(self.likely.nonzero()[:, 0])

    def short_logits(self, hidden: Tensor, rows: list[Tensor]) -> Tensor:
        """hidden (..., D) -> the logits (..., LIKELY) float32 of the short list alone. rows: `likely_rows`."""
        return self.decoder.lm_logits(self.mapped(hidden), rows=rows)

    @property
    def short_flops(self) -> float:
        """FLOPs of `short_logits` of one state."""
        return short_flops(self.map.in_features, int(self.likely.sum()))


@torch.no_grad()
def fit_in_closed_form(heads: nn.ModuleList, batches: Iterable[Tensor]) -> None:
    """Set the maps of LensHeads by ridge regression. batches: states (n, K, D) of all exits, of some tokens each."""
    width, norm = heads[0].map.in_features, heads[0].norm
    device = heads[0].map.weight.device
    squares, products = (torch.zeros(len(heads), width, width, dtype=torch.float64) for _ in range(2))
    count = 0
    for states in batches:
        *early, last = norm(states.to(device).float()).unbind(dim=1)
        for k, x in enumerate(early):
            squares[k] += (x.T @ x).cpu()
            products[k] += (x.T @ last).cpu()
        count += len(states)
    penalty = RIDGE * count * torch.eye(width, dtype=torch.float64)
    for head, square, product in zip(heads, squares, products):
        head.map.weight.copy_(torch.linalg.solve(square + penalty, product).T)
