"""SLEB: the layers of a decoder that a text can best do without are removed, one after the other. Nothing is trained.

Paper: Jiwon Song et al., SLEB: Streamlining LLMs through Redundancy Verification and Elimination of Transformer Blocks,
ICML 2024, arXiv:2402.09025.

Symbols:   L layers, of which n = floor(share L) go; the loss is the mean cross-entropy of the next token of a
           calibration text, in nats. The first and the last layer stay.
Search:    n times, of all layers that may go, the one without which the model that is left loses least is removed:
           in the i-th turn (from 0) that is the loss of L - 2 - i models.

A run has one exit, the last of what is left; layers saved, speed and texts are told against the full model. Its folder
holds which layers stay, and the short model as a checkpoint like any other, `checkpoint/`, for every other method.

Deviations: 1. the calibration text is the model's own, or a file (`--text`), in shorter windows than theirs (2,048
tokens of WikiText-2's train); 2. the layers below a candidate run once for all candidates, which changes no loss;
3. metrics.json tells the turns as `epochs`, minus the loss on text that was held out as score.
"""

import math
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.backbone import Backbone
from mini_ee.backbones.hub import save_backbone
from mini_ee.data.files import file_sha256
from mini_ee.data.options import Settings, option
from mini_ee.data.progress import tqdm
from mini_ee.data.tokens import Tokenizer
from mini_ee.exits.tokens import BATCH, NO_LABEL, TextData, TokenExits
from mini_ee.rules import NeverExit
from mini_ee.training.default_rule import Chosen
from mini_ee.training.method import Method

CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    share: float = option(0.2, "of the layers that are removed", flag="--remove", least=0, below=1)

    def count(self, layers: int) -> int:
        """How many of so many layers go. Raises ValueError where the first or the last had to.

        >>> Config(share=0.29).count(100), Config(share=0.6).count(32)
        (29, 19)
        """
        count = math.floor(self.share * layers + 1e-9)
        if count > max(0, layers - 2):
            raise ValueError(
                f"--remove {self.share} would take {count} of {layers} layers, of which the first and the last stay"
            )
        return count


# ---- The model ----
def kept_layers(backbone: Backbone, kept: Sequence[int]) -> Backbone:
    """The backbone with these of its layers alone (from 0), which it shares with the whole one."""
    short = copy(backbone)
    short._modules = backbone._modules | {"layers": nn.ModuleList(backbone.layers[layer] for layer in kept)}
    short.config = backbone.config_of(kept)
    return short


class ShortDecoder(TokenExits):
    """A decoder of which some layers stay; `full` is the decoder with all of them."""

    def __init__(self, backbone: Backbone):
        layers = backbone.config.num_hidden_layers
        super().__init__(backbone, (layers,))
        self.full = TokenExits(backbone, (layers,))
        self.register_buffer("stays", torch.ones(layers))  # 1 or 0 of each layer

    @property
    def whole(self) -> TokenExits:
        """The decoder with all its layers."""
        return self.full

    @property
    def kept(self) -> list[int]:
        """The layers that stay, from 0."""
        return self.stays.nonzero()[:, 0].tolist()

    def keep(self, kept: Sequence[int]) -> None:
        """Make these the layers that stay."""
        self.stays = torch.zeros_like(self.stays).index_fill(0, torch.tensor(kept, device=self.stays.device), 1.0)
        self.backbone, self.exits = kept_layers(self.full.backbone, kept), (len(kept),)

    def learns(self, name: str) -> bool:
        """Of the state, what a run holds: which layers stay."""
        return name == "stays"

    def save_parts(self, folder: Path, backbone: str) -> dict[str, str]:
        """Write the short checkpoint, with the tokenizer of the one that it was made of."""
        out = folder / CHECKPOINT
        save_backbone(self.backbone, out)
        Tokenizer.from_folder(backbone, None).save(out / "tokenizer.json")
        return {f"{CHECKPOINT}/{path.name}": file_sha256(path) for path in sorted(out.iterdir())}

    def load_parts(self, folder: Path, digests: dict[str, str]) -> None:
        """Leave out the layers that do not stay."""
        self.keep(self.kept)


# ---- The search ----
def search(model: ShortDecoder, train: TextData, held: TextData, config: Config) -> list[dict]:
    """Remove layers, one a turn; the record of each turn, before the first that of the full model."""
    kept, backbone, records = model.kept, model.full.backbone, []
    for turn in tqdm(range(config.count(len(kept)) + 1), desc="removing", unit="layer", delay=2):
        begin, name = time.perf_counter(), "all layers"
        losses = next_token_losses(backbone, train, kept, each=turn > 0)
        loss = losses[-1]
        if turn:
            least = 1 + int(np.argmin(losses[1:-2]))
            name, loss = f"without layer {kept.pop(least) + 1}", losses[least]
            model.keep(kept)
        held_loss = next_token_losses(backbone, held, kept, each=False)[-1]
        score, (exit_scores, _) = -held_loss, held.scores(model, BATCH)
        about = {"stage": name, "epoch": 1, "loss": loss, "score": score, "exit_scores": exit_scores}
        records.append(about | {"seconds": time.perf_counter() - begin})
    return records


@torch.inference_mode()
def next_token_losses(backbone: Backbone, data: TextData, kept: Sequence[int], each: bool = True) -> list[float]:
    """The mean loss of the decoder's layers `kept` without each of them in turn, and in the end with all of them.

    each: False leaves out all but the last.
    """
    totals, tokens = np.zeros(len(kept) + 1), 0
    for begin in range(0, len(data), BATCH):
        rows = np.arange(begin, min(begin + BATCH, len(data)))
        (ids, counted), labels = data.batch(rows, backbone.device)
        inputs, counted = backbone.read_texts(ids, counted)
        context, hidden = backbone.context(inputs), backbone.embed(inputs)

        def loss(hidden: Tensor, above: Sequence[int], context=context, counted=counted, labels=labels) -> float:
            for layer in above:
                hidden = backbone.run_layers(hidden, context, layer, layer + 1)
            logits = backbone.lm_logits(hidden[counted])
            return float(F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum"))

        for at, layer in enumerate(kept):
            totals[at] += loss(hidden, kept[at + 1 :]) if each and 0 < at < len(kept) - 1 else 0.0
            hidden = backbone.run_layers(hidden, context, layer, layer + 1)
        totals[-1] += loss(hidden, ())
        tokens += int((labels != NO_LABEL).sum())
    return (totals / tokens).tolist()


def own_rule(model: ShortDecoder, source, held: TextData) -> Chosen:
    """All tokens run through what is left."""
    layers = model.full.exits[-1]
    gone = [layer + 1 for layer in range(layers) if layer not in model.kept]
    said = f"{len(gone)} of {layers} layers were removed: {', '.join(map(str, gone)) or 'none'}."
    return Chosen(NeverExit(), None, None, {"own": {"what is left": NeverExit().to_dict()}, "promised": said})


def build(backbone: Backbone, exits, num_labels: int, pool: str, config: Config) -> ShortDecoder:
    """The decoder with all layers, until some are removed or a run says which stay. ValueError for too many."""
    config.count(backbone.config.num_hidden_layers)
    return ShortDecoder(backbone)


METHOD = Method(
    Config,
    units=("tokens",),
    model=build,
    exits=lambda layers: (layers,),
    search=search,
    default_rule=own_rule,
    defaults={"tokens": {"kind": "pieces", "rank": None, "texts": 128}},
    lacks=("exits", "epochs", "lr", "head_lr", "batch_size", "warmup", "weight_decay", "clip", "precision", "rank"),
)
