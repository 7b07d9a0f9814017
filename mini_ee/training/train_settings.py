"""Settings of every training, whatever the method. No torch here: the command line's options are made from them."""

from dataclasses import asdict, dataclass
from pathlib import Path

from mini_ee.data.settings import Settings, option
from mini_ee.registry import HEADS

POOLS = ("mean", "first")
PRECISIONS = ("float32", "bf16")
KINDS = ("pieces", "continue", "copy")  # of a decoder's text, see training/training_text.py


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Settings):
    """Steps and rates of a training. Raises ValueError on a value that makes no sense."""

    epochs: int = option(3, "passes over the rows or texts, of a stage that names none of its own", least=1)
    lr: float = option(5e-5, "learning rate of the backbone, or of its adapters", least=0)
    head_lr: float = option(5e-4, "learning rate of what is new: heads, policies", least=0)
    batch_size: int = option(32, "rows or texts of a step", least=1)
    warmup: float = option(0.1, "share of a stage's steps in which the rate rises", least=0, most=1)
    weight_decay: float = option(0.01, "of matrices", least=0)
    clip: float = option(1.0, "largest norm of the gradient", above=0)
    precision: str = option("float32", "of what a step computes; weights stay in float32", choices=PRECISIONS)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """The same with the seed, which every command has."""

    seed: int = option(0, "of all that is drawn", least=0)


@dataclass(frozen=True, kw_only=True)
class CommonOptions(Settings):
    """What every training takes, whatever the method."""

    exits: tuple[int, ...] | None = option(None, "layers to leave at, 2,4,6; else the method's own", least=1)
    device: str = option("cpu", "cpu, cuda, cuda:1, ...")


@dataclass(frozen=True, kw_only=True)
class RowOptions(CommonOptions):
    """What a training on rows takes besides: a task has labels, and its texts are whole."""

    pool: str | None = option(
        None,
        "what heads of rows read: the mean over tokens (the default, where there are several), or the first",
        choices=POOLS,
    )
    head: str = option("dense", "a dense layer, tanh and a linear map; or linear, that map alone", choices=HEADS)
    max_train: int | None = option(
        None, "train on so many rows at most, drawn with the seed; others test the default rule", least=1, metavar="N"
    )
    max_length: int = option(128, "longer texts are cut", least=1, metavar="TOKENS")
    max_loss: float = option(0.01, "the default rule may lose this much score", least=0, below=1)
    confidence: float = option(0.95, "with which that loss is guaranteed", above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Settings):
    """Where a decoder's text comes from, and how it is fine-tuned. None: what suits the kind of text."""

    text: Path | None = option(None, "a file of text; else the decoder writes its own", metavar="FILE")
    prompt: tuple[str, ...] | None = option(None, "it goes on from this", metavar="TEXT")
    greedy: bool = option(False, "with its likeliest tokens, once from each prompt")
    texts: int | None = option(None, "how many; 1024 pieces, of a file all; of stories 1500", least=1, metavar="N")
    new_tokens: int | None = option(None, "of each text; 64, behind the beginning of a story 40", least=1, metavar="N")
    rank: int | None = option(8, "of the adapters with which the decoder is fine-tuned", least=1)
    kind: str = "continue"

    def __post_init__(self):
        if self.text is not None:
            object.__setattr__(self, "text", Path(self.text))
        if isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", (self.prompt,))
        super().__post_init__()
        if self.kind not in KINDS:
            raise ValueError(f"a decoder learns from text that is one of {', '.join(KINDS)}, found {self.kind!r}")
        if self.text is not None and (self.prompt or self.greedy):
            given = "prompt" if self.prompt else "greedy"
            raise ValueError(f"--{given} is for text that the model writes: leave it out, or --text")
        if self.kind == "copy" and self.text is None:
            raise ValueError("--task copy: its sentences come from a text; give it with --text FILE")

    def to_dict(self) -> dict:
        """As a run's config.json has it."""
        text, prompt = self.text and str(self.text.resolve()), self.prompt and list(self.prompt)
        return asdict(self) | {"text": text, "prompt": prompt}
