"""The files by which clients of Hugging Face load an exported folder, and stop early in its graph.

config.json             the model and its labels; under `transformers.js_config` which files transformers.js takes
tokenizer.json          with tokenizer_config.json, and special_tokens_map.json if the original model has one
modules.json            of a sentence encoder, with the files that it names: by which sentence-transformers reads the
                        graph as a transformer whose first token is the embedding
"""

import json
import re
import shutil
from pathlib import Path

from mini_ee.export.manifest import WEIGHTS
from mini_ee.lab.backbones.families import layout_of
from mini_ee.lab.backbones.own_head import CLASSIFIES, TOKEN_HEADS
from mini_ee.lab.data.files import write_bytes, write_json
from mini_ee.lab.token_tasks import LABELS
from mini_ee.lab.training.run_folder import Run

SPECIAL_TOKENS = "special_tokens_map.json"
POOLING = "1_Pooling"
PROMPTS = ("prompts", "default_prompt_name")


def write_hugging_face(run: Run, folder: Path) -> None:
    """Write the files into a folder that has its graphs."""
    run.tokenizer.save_beside_model(folder)
    original = original_of(run)
    if (original / SPECIAL_TOKENS).is_file():
        shutil.copyfile(original / SPECIAL_TOKENS, folder / SPECIAL_TOKENS)
    javascript = {"dtype": "fp32", "use_external_data_format": (folder / WEIGHTS).exists()}
    write_json(folder / "config.json", _config(run) | {"transformers.js_config": javascript})
    if run.embeds:
        _write_modules(run, folder)


def _config(run: Run) -> dict:
    """The architecture, the sizes, and the names of labels."""
    backbone = run.model.backbone
    ending = {"tokens": backbone.head_architecture, "embeddings": "Model"}.get(run.unit, CLASSIFIES)
    ending = TOKEN_HEADS[run.token_task.kind] if run.token_task else ending
    config = backbone.config.to_dict()
    if ending in (CLASSIFIES, TOKEN_HEADS[LABELS]):
        names = run.label_names or ["LABEL_0"]  # the one of a regression
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: at for at, name in enumerate(names)}}
    return config | {"architectures": [layout_of(backbone.config.model_type).architecture + ending]}


def _write_modules(run: Run, folder: Path) -> None:
    """The graph gives every token the embedding of its text, so each kind of pooling gives the embedding."""
    files = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": POOLING, "type": "sentence_transformers.models.Pooling"},
        ],
        "sentence_bert_config.json": {"max_seq_length": run.tokenizer.max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {key: run.config[key] for key in PROMPTS if key in run.config},
        f"{POOLING}/config.json": {
            "word_embedding_dimension": run.model.num_labels,
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
        },
    }
    (folder / POOLING).mkdir()
    for name, content in files.items():
        write_bytes(folder / name, json.dumps(content, indent=2).encode())


def original_of(run: Run) -> Path:
    """The folder of the model that a run began with; that of the run itself if it contains its own."""
    return run.folder / run.config.get("backbone", {}).get("folder", "")


def named_by(original: Path) -> dict[str, str]:
    """The license that a model's card names, and its name on Hugging Face's Hub if it stands in the Hub's cache."""
    card = original / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    block = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    match = re.search(r"^license: *([\w.-]+) *$", block[1], re.MULTILINE) if block else None
    named = re.search(r"/models--([^/]+)--([^/]+)/snapshots/", f"{original.absolute()}/")
    base = {"base_model": f"{named[1]}/{named[2]}"} if named else {}
    return base | ({"license": match[1]} if match else {})
