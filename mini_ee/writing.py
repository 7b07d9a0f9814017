"""Texts for a decoder to write: continuations of stories and copies of sentences, and how well they are written.

A text is its tokens and the position of the last that is given (generation.Text): what stands behind it is learned
in training, and is the reference in a test.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend

from mini_ee.decoder_exits import ExitDecoder
from mini_ee.files import read_text
from mini_ee.generation import GREEDY, Generated, Sampling, Text, gather, generate
from mini_ee.rules import NeverExit, Policy, Rule

END = "<|endoftext|>"
PAPER = Sampling(temperature=1.0, top_k=40, top_p=0.75)
"""The decoding settings of ConsistentEE; its beam is 1."""


def read_stories(path: str | Path) -> list[str]:
    """The stories of a file of text, which <|endoftext|> parts. Raises ValueError where there is none to be read."""
    stories = [story.strip() for story in read_text(Path(path)).split(END) if story.strip()]
    if not stories:
        raise ValueError(f"{path}: expected text, found none")
    return stories


def continuations(tokenizer: Backend, stories: Sequence[str], given: int, follow: int) -> list[Text]:
    """The beginnings of the stories that are long enough: `given` tokens, and as reference the `follow` after them."""
    ids = (encoding.ids[: given + follow] for encoding in tokenizer.encode_batch(list(stories)))
    return [Text(each, given - 1) for each in ids if len(each) == given + follow]


def copies(tokenizer: Backend, stories: Sequence[str], end: int, words: tuple[int, int] = (4, 10)) -> list[Text]:
    """A sentence, a new line, the sentence again and the end token; sentences of so many words, each but once."""
    sentences = dict.fromkeys(
        sentence
        for story in stories
        for sentence in re.findall(r"[^.!?\n]+[.!?]", story)
        if words[0] <= len(sentence.split()) <= words[1]
    )
    texts = []
    for sentence in map(str.strip, sentences):
        given = f"{sentence}\n"
        encoding = tokenizer.encode(given + sentence)
        start = sum(stop <= len(given) for _, stop in encoding.offsets) - 1
        texts.append(Text([*encoding.ids, end], start))
    return texts


def write(
    model: ExitDecoder,
    texts: Sequence[Text],
    rule: Rule = NeverExit(),
    *,
    new_tokens: int,
    sampling: Sampling = GREEDY,
    stop: Sequence[int] = (),
    batch_size: int = 16,
    seed: int = 0,
) -> list[Generated]:
    """What the model writes behind what each text gives, its tokens leaving where the rule says; states are copied."""
    written = []
    policies = model.policies if isinstance(rule, Policy) else ()
    for begin in range(0, len(texts), batch_size):
        prompts = [text.ids[: text.start + 1] for text in texts[begin : begin + batch_size]]
        steps = generate(
            model.decoder,
            prompts,
            max_new_tokens=new_tokens,
            exits=model.exits,
            heads=model.heads,
            policies=policies,
            rule=rule,
            fill="propagate",
            sampling=sampling,
            stop=stop,
            seed=seed + begin,
        )
        written += gather(steps, len(prompts))
    return written
