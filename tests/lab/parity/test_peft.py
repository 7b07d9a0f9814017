"""PEFT loads the adapters of LoRA exits as they stand on disk, and computes what we compute."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="pip install transformers peft")
peft = pytest.importorskip("peft", reason="pip install transformers peft")

from conftest import DECODERS, all_exits, random_bert, random_decoder, tensors  # noqa: E402
from transformers import AutoModel  # noqa: E402

from mini_ee.lab.backbones.hub import load_backbone, save_backbone  # noqa: E402
from mini_ee.lab.methods.lora_exits import LoRAExits  # noqa: E402
from mini_ee.lab.methods.lora_exits_peft import save_adapters  # noqa: E402

EXITS, TARGETS = (1, 2, 4), ("query", "key", "value", "attention_output", "up", "down")
pytestmark = pytest.mark.filterwarnings("ignore")  # what peft and transformers tell each other
ATOL = 1e-5  # at most 3.1e-6 here, of logits up to 2.8


@pytest.fixture(scope="module", params=["bert", "roberta", "albert", "llama", "phi"])
def saved(request, tmp_path_factory):
    """A random model and the folder where its adapters are, and its backbone in `base`."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        save_backbone((random_decoder if kind in DECODERS else random_bert)(kind, EXITS[-1]), folder / "base")
        backbone = load_backbone(folder / "base").without_heads()
        targets = (*TARGETS, "gate") if kind == "llama" else TARGETS
        model = LoRAExits(backbone, EXITS, 3, rank=4, targets=targets).eval()
        for parameter in model.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        for head in model.heads:
            torch.nn.init.normal_(head.dense.weight, std=0.3)
            torch.nn.init.normal_(head.out.weight, std=0.3)
    save_adapters(model, folder, str(folder / "base"))
    return model, folder


def logits_through_peft(model, folder, inputs):
    """(B, K, C): each exit's adapters on transformers' own model, then our head."""
    ids, mask, types = tensors(inputs)
    logits = []
    for k, layer in enumerate(EXITS):
        base = AutoModel.from_pretrained(folder / "base").eval()
        theirs = peft.PeftModel.from_pretrained(base, str(folder / f"exit_{layer}")).eval()
        with torch.no_grad():
            if model.backbone.config.model_type in DECODERS:  # hidden_states would norm the last one
                seen = []
                base.layers[layer - 1].register_forward_hook(
                    lambda module, args, output, seen=seen: seen.append(output)
                )
                theirs(ids, attention_mask=mask)
                (hidden,) = seen
            else:
                more = {"attention_mask": mask, "token_type_ids": types, "output_hidden_states": True}
                hidden = theirs(ids, **more).hidden_states[layer]
            logits.append(model.heads[k](hidden, mask.bool()[:, None, None, :]).numpy())
    return np.stack(logits, axis=1)


def test_peft_computes_what_we_compute(saved, padded_inputs):
    model, folder = saved
    logits = logits_through_peft(model, folder, padded_inputs)
    np.testing.assert_allclose(logits, all_exits(model, padded_inputs), rtol=0, atol=ATOL)
