"""The rows of the built-in task: review sentences of known hardness, in reviews.tsv beside this file. No torch here.

An early-exit model should exit early on easy sentences and late on hard ones. Real data does not tell which are which.
Here each sentence was made by a small grammar (weights/make_reviews.py) and carries the kind that it was made as. So
the exit layer of a sentence can be compared with what a reader has to do.
"""

from pathlib import Path
from typing import NamedTuple

from mini_ee.data.table_files import table_rows

FILE = Path(__file__).with_suffix(".tsv")

HARDNESS = ("plain", "wordy", "negated", "contrasted", "misleading", "hedged", "doubly negated")
"""The kinds, from the easiest to the hardest.

plain           one polar word decides: "Terrible service!"
wordy           still one polar word (or two that agree), to be found among neutral detail
negated         one negator: does it flip the polar word, or is it beside the point?
                "The film was not good, and it was raining." / "The film was good, and it was not raining."
contrasted      two polar words that disagree: which clause is the verdict? The one after "but", not after "although"
misleading      what others said comes first, at length; then whether they were right, or how it really was
hedged          what most of the words describe did not happen:
                "It might have been a dull film if the acting had not been so superb."
doubly negated  two negators: do they cancel out, or is one beside the point?
                "Nobody could say that it was not good." / "Nobody paid me to say that it was not good."
"""


class Review(NamedTuple):
    """One sentence, or a few, with a sentiment and its kind."""

    text: str
    label: int  # 0 negative, 1 positive
    hardness: str  # one of HARDNESS


def read_reviews() -> dict[str, list[Review]]:
    """The reviews of each split, in the order of the file."""
    rows = (fields for _, fields in table_rows(FILE))
    next(rows)  # the column names
    splits: dict[str, list[Review]] = {}
    for split, hardness, label, text in rows:
        splits.setdefault(split, []).append(Review(text, int(label), hardness))
    return splits
