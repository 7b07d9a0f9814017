"""A script, not a test: PEFT loads the adapters of a LoRA run, and the exits say the same as ours.

pip install peft transformers
python tests/check_peft.py RUN
"""

import sys
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModel

from mini_ee.backbones.llama import Decoder
from mini_ee.early_exit import read_every_exit
from mini_ee.training.run import load_run

TEXTS = ["a charming and often affecting journey", "unflinchingly bleak", "the lobby was awful but the room was lovely"]
ATOL = 1e-4


def main(folder: str) -> None:
    """Print the largest difference of any exit's logits; exit status 1 where it is above ATOL."""
    run = load_run(folder)
    inputs = run.encode(TEXTS).batch(slice(None))
    ours, *_ = read_every_exit(run.segments(), inputs)
    arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
    ids, mask, types = map(torch.from_numpy, arrays)
    worst = 0.0
    for k, layer in enumerate(run.exits):
        base = AutoModel.from_pretrained(run.config["backbone"]["folder"]).eval()
        theirs = PeftModel.from_pretrained(base, str(Path(folder) / f"exit_{layer}")).eval()
        with torch.no_grad():
            if isinstance(run.model.backbone, Decoder):  # hidden_states would norm the last one
                seen = []
                base.layers[layer - 1].register_forward_hook(lambda module, inputs, output: seen.append(output))
                theirs(ids, attention_mask=mask)
                (hidden,) = seen
            else:
                said = theirs(ids, attention_mask=mask, token_type_ids=types, output_hidden_states=True)
                hidden = said.hidden_states[layer]
            logits = run.model.heads[k](hidden, mask.bool()[:, None, None, :]).numpy()
        difference = float(np.abs(logits - ours[:, k]).max())
        print(f"exit after layer {layer}: logits within {difference:.2g}")
        worst = max(worst, difference)
    sys.exit(worst > ATOL)


if __name__ == "__main__":
    main(sys.argv[1])
