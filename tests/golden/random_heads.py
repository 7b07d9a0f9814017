"""Random configurations of fine-tuned models of every family: our logits against those of transformers.

    pip install transformers
    python tests/golden/random_heads.py 340               ...ForSequenceClassification
    python tests/golden/random_heads.py 100 tokens        ...ForTokenClassification, ...ForQuestionAnswering

Writes random_heads.json, or random_token_heads.json: for each family the number of configurations that were drawn,
those with equal logits, and the messages of those that were refused. It fails if logits differ. The tests do not need
transformers, so it is no test.
"""

import json
import random
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch
import transformers

from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.exits.heads import TOKENS

TOLERANCE = 2e-5
"""Of a logit, relative above one."""
DECODERS = ("llama", "gemma", "phi", "mistral", "qwen2", "qwen3", "phi3")
KINDS = (
    *(
        "bert",
        "roberta",
        "xlm-roberta",
        "albert",
        "electra",
        "distilbert",
        "mpnet",
        "deberta",
        "deberta-v2",
        "modernbert",
    ),
    *DECODERS,
)
CLASSIFICATION = "ForSequenceClassification"
TOKEN_KINDS = ("bert", "roberta", "distilbert", "electra", "mpnet", "albert", "deberta-v2", "modernbert")
TOKEN_ENDINGS = ("ForTokenClassification", "ForQuestionAnswering")


def drawn(kind: str, draw: random.Random) -> dict:
    """The settings of a configuration."""
    heads, width = draw.choice((1, 2, 4)), draw.choice((4, 6, 8))
    rotary = kind in (*DECODERS, "modernbert")
    width += width % 2 if not rotary else -width % 4
    hidden, layers, inner = heads * width, draw.randint(1, 4), draw.choice((12, 20, 33))
    settings = {
        **{"vocab_size": draw.choice((40, 64)), "hidden_size": hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "intermediate_size": inner, "max_position_embeddings": draw.choice((16, 40))},
        **{"num_labels": draw.choice((1, 2, 3, 7)), "pad_token_id": draw.choice((0, 1, 3)), "initializer_range": 0.3},
    }
    activations = ("gelu", "relu", "silu", "gelu_new")
    if kind == "distilbert":
        settings |= {"dim": hidden, "n_layers": layers, "n_heads": heads, "hidden_dim": inner}
        settings |= {"activation": draw.choice(("gelu", "relu"))}
    elif kind == "modernbert":
        settings |= {"global_attn_every_n_layers": draw.randint(1, 3), "local_attention": draw.choice((2, 4, 128))}
        settings |= {"classifier_pooling": draw.choice(("cls", "mean")), "classifier_bias": draw.random() < 0.5}
        settings |= {"classifier_activation": draw.choice(activations), "mlp_bias": draw.random() < 0.3}
        settings |= {"norm_bias": draw.random() < 0.3, "attention_bias": draw.random() < 0.3}
        settings |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    elif kind in DECODERS:
        settings |= {"num_key_value_heads": draw.choice([n for n in (1, 2, 4) if heads % n == 0]), "eos_token_id": 1}
        settings |= {"bos_token_id": 2} | ({"head_dim": width} if kind in ("gemma", "qwen3") else {})
        settings |= {"tie_word_embeddings": draw.random() < 0.5} if kind == "qwen2" else {}
    else:
        settings |= {"hidden_act": draw.choice(activations)}
    if kind in ("albert", "electra"):
        settings |= {"embedding_size": draw.choice((6, hidden))}
    if kind.startswith("deberta"):
        settings |= {
            "relative_attention": True,
            "position_biased_input": draw.random() < 0.5,
            "pos_att_type": "c2p|p2c",
        }
        settings |= {"pooler_hidden_act": draw.choice(("gelu", "tanh", "relu")), "pooler_hidden_size": hidden}
        settings |= {"max_relative_positions": 8, "position_buckets": 6} if kind == "deberta-v2" else {}
    return settings


def compared(kind: str, number: int, ending: str) -> tuple[str, str]:
    """("equal" | "refused" | "different", a line about it) of one configuration."""
    draw = random.Random(f"{kind} {number}")
    torch.manual_seed(number)
    settings = drawn(kind, draw)
    if ending in TOKEN_ENDINGS:
        settings["num_labels"] = 2 if ending == TOKEN_ENDINGS[1] else max(2, settings["num_labels"])
        settings["pad_token_id"] = 1 if kind == "mpnet" else settings["pad_token_id"]
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = getattr(transformers, f"AutoModel{ending}").from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    lengths = torch.tensor([[draw.randint(1, 12)] for _ in range(draw.randint(1, 4))])
    mask = (torch.arange(int(lengths.max())) < lengths).long()
    ids = torch.randint(4, settings["vocab_size"], mask.shape).where(
        mask.bool(), torch.tensor(settings["pad_token_id"])
    )
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        outputs = model(input_ids=ids, attention_mask=mask)
        spans = ending == TOKEN_ENDINGS[1]
        theirs = torch.stack((outputs.start_logits, outputs.end_logits), -1) if spans else outputs.logits
        try:
            backbone = load_backbone(Path(folder))
            depth = backbone.config.num_hidden_layers
            pool = backbone.poolings[0] if ending == CLASSIFICATION else TOKENS
            ours = FrozenClassifier(backbone.without_heads(), (depth,), settings["num_labels"], pool).eval()
            logits = ours(*Tensors(ids, mask))[-1]
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
            return "refused", str(error).replace(folder, "FOLDER")
    if ending != CLASSIFICATION:  # the logits of padding mean nothing
        logits, theirs = logits[mask.bool()], theirs[mask.bool()]
    error = float(((logits - theirs).abs() / theirs.abs().clamp(min=1)).max())
    return ("equal" if error <= TOLERANCE else "different"), f"{number}: off by {error:.1e}: {settings}"


def main(count: int, tokens: bool) -> int:
    counts, refusals = defaultdict(Counter), Counter()
    kinds = TOKEN_KINDS if tokens else KINDS
    for number in range(count):
        kind = kinds[number % len(kinds)]
        ending = TOKEN_ENDINGS[number // len(kinds) % 2] if tokens else CLASSIFICATION
        outcome, line = compared(kind, number, ending)
        counts[kind][outcome] += 1
        if outcome == "refused":
            refusals[line] += 1
        if outcome == "different":
            print(kind, line)
    total = sum(counts.values(), Counter())
    report = {"transformers": transformers.__version__, "torch": torch.__version__, "tolerance": TOLERANCE}
    report |= {"configurations": count} | {name: total[name] for name in ("equal", "refused", "different")}
    report |= {"families": {kind: dict(outcomes) for kind, outcomes in counts.items()}, "refusals": dict(refusals)}
    name = "random_token_heads.json" if tokens else "random_heads.json"
    Path(__file__).with_name(name).write_text(json.dumps(report, indent=1) + "\n")
    print({key: report[key] for key in ("configurations", "equal", "refused", "different")})
    return int(total["different"] > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), "tokens" in sys.argv))
