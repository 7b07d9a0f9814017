"""Examples exit, read through a prompt and the LM head of the backbone. RAEE's collection writes such runs."""

from pathlib import Path

from mini_ee.lab.data.prompt_templates import Prompt, PromptTokenizer
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.prompt_exits import PromptModel
from mini_ee.lab.training.row_unit import RowUnit
from mini_ee.lab.training.run_folder import backbone_of
from mini_ee.lab.training.unit import Unit, check_labelled


class PromptUnit(Unit):
    """An example of a task, with a template around it."""

    name = "prompts"
    options = RowUnit.options

    def saved(self, folder, model, tokenizer):
        return {"prompt": tokenizer.prompt.to_dict()}, {}

    def backbone_changed(self, model, about):
        return bool(about["training"]["shots"])

    def check(self, config):
        check_labelled(config)

    def read(self, folder: Path, config: dict, backbone_folder):
        backend = Tokenizer.from_file(folder / "tokenizer.json").backend
        tokenizer = PromptTokenizer(backend, config["max_length"], Prompt.from_dict(config["prompt"]))
        backbone = backbone_of(config["backbone"], folder, backbone_folder)
        return PromptModel(backbone, tokenizer, tuple(config["exits"])), tokenizer


UNIT = PromptUnit()
