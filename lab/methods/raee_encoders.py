"""RAEE's query embeddings: one vector per example, from the model's own states or from a sentence encoder.

Both are callables Inputs -> (B, D) float32, the mean over the tokens of an example, with a name that is unique to the
encoder. The first token cannot be used: in a causal decoder its state is the same for every example.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mini_ee.lab.backbones.adapter import tokenizer_folder
from mini_ee.lab.backbones.backbone import Backbone, Tensors
from mini_ee.lab.backbones.hub import backbone_sha256, load_backbone
from mini_ee.lab.backbones.tensor_files import tensors_sha256
from mini_ee.lab.data.tokenizer import Inputs, Tokenizer
from mini_ee.lab.exits.heads import pooled
from mini_ee.lab.segments import check_finite


class OwnStates:
    """The states after a layer of the model itself; layer 0 is the embeddings. The model computes them again later."""

    tokenizer = None  # uses the model's

    def __init__(self, backbone: Backbone, layer: int):
        """Raises ValueError for a layer that the backbone does not have."""
        if not 0 <= layer <= backbone.text_layers:
            raise ValueError(f"the layer must be from 0 to {backbone.text_layers}, got {layer}")
        self.backbone, self.layer = backbone, layer
        self.name = f"layer {layer} of {tensors_sha256(backbone.state_dict())}"

    @property
    def states(self) -> "OwnStates":
        """The encoder whose states are averaged."""
        return self

    def __call__(self, inputs: Inputs) -> np.ndarray:
        with torch.inference_mode():
            query = self.mean(inputs).numpy(force=True)
        return check_finite(query, "the mean of the states")

    def mean(self, inputs: Tensors | Inputs) -> Tensor:
        """(B, D) float32: the mean of the states of each example."""
        return pooled(*self.backbone.text_states(inputs, self.layer), "mean").float()

    def flops(self, inputs: Inputs) -> float:
        return self.backbone.text_flops(self.layer, inputs.input_ids.shape[1])


class SentenceEncoder:
    """The last states of a checkpoint, which has its own tokenizer."""

    def __init__(self, folder: str | Path, max_length: int = 128):
        """Raises FileNotFoundError if the folder does not exist."""
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"{folder}: no sentence encoder here; expected a checkpoint with config.json, model.safetensors and "
                f"tokenizer.json; put it back, or collect again with an existing one"
            )
        backbone = load_backbone(folder)
        self.states = OwnStates(backbone, backbone.text_layers)
        self.tokenizer = Tokenizer.from_folder(tokenizer_folder(folder), min(max_length, backbone.config.max_tokens))
        self.name = f"encoder {backbone_sha256(folder)}"

    def __call__(self, inputs: Inputs) -> np.ndarray:
        return self.states(self._encode(inputs))

    def flops(self, inputs: Inputs) -> float:
        return self.states.flops(self._encode(inputs))

    def _encode(self, inputs: Inputs) -> Inputs:
        return self.tokenizer.encode(inputs.texts).batch(slice(None))


def open_encoder(source: dict, backbone: Backbone) -> OwnStates | SentenceEncoder:
    """The encoder of the queries: a layer of the model itself, or a checkpoint in a folder."""
    if source["encoder"] is None:
        return OwnStates(backbone, source["layer"])
    return SentenceEncoder(source["encoder"])
