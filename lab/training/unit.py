"""What exits: an example ("rows"), an example read through a prompt ("prompts"), a token ("tokens"), or a text whose
embedding is wanted ("embeddings").

The config.json of a run contains its name as `unit`. How each is trained is in train_rows.py, train_tokens.py and
train_embeddings.py; how runs are read is in run_folder.py. Only RAEE writes runs of prompts.
"""

from typing import NamedTuple


class Unit(NamedTuple):
    """One kind of thing that exits."""

    name: str
    noun: str = "examples"  # in messages
    generates: bool = False  # its models continue texts, and give no labels
    embeds: bool = False  # its models return embeddings, and give no labels
    default_measure: str = "max_probability"  # confidence measure of a rule, if none is named
    reads_lm_head: bool = True  # exits use the LM head, and a fine-tuned backbone is saved with it as a checkpoint


UNITS = (
    Unit("rows", reads_lm_head=False),
    Unit("prompts"),
    Unit("tokens", "tokens", generates=True, default_measure="breaking_ties"),
    Unit("embeddings", "texts", embeds=True),
)


def load_unit(name: str) -> Unit:
    """The unit of this name. Raises ValueError for an unknown name."""
    for unit in UNITS:
        if unit.name == name:
            return unit
    names = ", ".join(unit.name for unit in UNITS)
    raise ValueError(f"unit must be one of {names}, found {name!r}; train the run again")
