"""Settings of every training, for all methods. No torch here, because the command line's options are made from them."""

from dataclasses import asdict, dataclass
from pathlib import Path

from mini_ee.lab.backbones.sentence_encoder import POOLS as EMBEDDING_POOLS
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.registry import HEADS, VOCABULARY_HEADS

POOLS = ("mean", "first")
PRECISIONS = ("float32", "bf16")
ENCODER_DEFAULTS = {"lr": 4e-4, "epochs": 4}  # the built-in encoder is small and needs larger and more steps
KINDS = ("pieces", "continue", "copy")  # kinds of a decoder's text, see training_text.py


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Settings):
    """Settings of the optimization. Raises ValueError for an invalid value."""

    epochs: int = option(3, "number of epochs of each stage that has no option of its own", least=1)
    lr: float = option(5e-5, "learning rate of the backbone or its adapters", least=0)
    head_lr: float = option(5e-4, "learning rate of the new parts: heads and policies", least=0)
    batch_size: int = option(32, "batch size, in examples or texts", least=1)
    warmup: float = option(0.1, "share of a stage's steps in which the learning rate rises", least=0, most=1)
    weight_decay: float = option(0.01, "weight decay, of matrices only", least=0)
    clip: float = option(1.0, "maximum norm of the gradient; a longer one is clipped", above=0)
    precision: str = option(
        "float32", "autocast precision of the forward pass; weights stay in float32", choices=PRECISIONS
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """TrainOptions with the seed, which is an option of every command."""

    seed: int = option(0, "random seed", least=0)


@dataclass(frozen=True, kw_only=True)
class CommonOptions(Settings):
    """Settings of every training."""

    exits: tuple[int, ...] | None = option(
        None,
        "exit layers, such as 2,4,6; the first may be 0, the embeddings, if examples exit",
        least=0,
        default_text="the method's own",
    )
    device: str = option("cpu", "device: cpu, cuda, cuda:1, ...")


@dataclass(frozen=True, kw_only=True)
class RowOptions(CommonOptions):
    """CommonOptions, and those of a training on the examples of a task."""

    pool: str | None = option(
        None,
        "pooling: the mean of the tokens' states, or the state of the first token",
        choices=POOLS,
        default_text="mean, if the backbone has it",
    )
    head: str = option(
        "dense",
        "exit head: a dense layer, tanh and a linear map (dense), or a linear map alone (linear)",
        choices=HEADS,
    )
    max_train: int | None = option(
        None,
        "maximum number of training examples, drawn with the seed; others test the default rule",
        least=1,
        metavar="N",
        default_text="all",
    )
    max_length: int = option(128, "maximum number of tokens of a text; a longer one is cut", least=1, metavar="TOKENS")
    max_loss: float = option(
        0.01, "maximum loss of the default rule against the full model; .01 is a point of accuracy", least=0, below=1
    )
    confidence: float = option(0.95, "confidence level of the guarantee for --max-loss", above=0, below=1)
    keep_exits: int | None = None
    """Of a model that stays as it is: number of early exits that are kept, those that save most. None: all."""
    tolerance: float | None = None
    """Of a regression that stays as it is: difference up to which two numbers agree."""
    labelled: bool = False
    """Of a model that stays as it is: the task's labels choose and test the default rule, not the model's own."""


@dataclass(frozen=True, kw_only=True)
class TokenOptions(CommonOptions):
    """CommonOptions, and that of the heads of tokens."""

    head: str = option(
        "own",
        "exit head: the method's own (own), or a linear map before the model's LM head, which is read once a token "
        "(lens)",
        choices=("own", *VOCABULARY_HEADS),
        default_text="own; lens if the vocabulary is large",
    )


@dataclass(frozen=True, kw_only=True)
class TextOptions(Settings):
    """Training text of a decoder, and its fine-tuning. None stands for the default of the kind of text."""

    text: Path | None = option(
        None, "file of training text", metavar="FILE", default_text="text that the decoder generates"
    )
    prompt: tuple[str, ...] | None = option(
        None,
        "prompt from which the decoder generates training text; may be repeated",
        metavar="TEXT",
        default_text="built-in prompts",
    )
    greedy: bool = option(False, "generate the training text greedily, once from each prompt")
    texts: int | None = option(
        None,
        "number of training texts",
        least=1,
        metavar="N",
        default_text="1024 pieces, or all pieces of a file, or 1500 stories",
    )
    new_tokens: int | None = option(
        None,
        "number of tokens of a piece, or after the beginning of a story",
        least=1,
        metavar="N",
        default_text="64 for pieces, 40 for stories",
    )
    rank: int | None = option(8, "rank of the adapters with which the decoder is fine-tuned", least=1)
    kind: str = "continue"

    def __post_init__(self):
        if self.text is not None:
            object.__setattr__(self, "text", Path(self.text))
        if isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", (self.prompt,))
        super().__post_init__()
        if self.kind not in KINDS:
            raise ValueError(f"the kind of text must be one of {', '.join(KINDS)}, found {self.kind!r}")
        if self.text is not None and (self.prompt or self.greedy):
            given = "prompt" if self.prompt else "greedy"
            raise ValueError(f"--{given} is for generated text: leave it out, or leave out --text")
        if self.kind == "copy" and self.text is None:
            raise ValueError("--task copy needs a file of text: give --text FILE")

    def to_dict(self) -> dict:
        """The `text` of a run's config.json."""
        text, prompt = self.text and str(self.text.resolve()), self.prompt and list(self.prompt)
        return asdict(self) | {"text": text, "prompt": prompt}


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(CommonOptions):
    """CommonOptions, and those of a training of embeddings."""

    pool: str | None = option(
        None,
        "pooling over the tokens",
        choices=tuple(EMBEDDING_POOLS.values()),
        default_text="the encoder's own, else mean",
    )
    normalize: bool = option(False, "scale embeddings to length 1, even when the encoder does not")
    size: int | None = option(
        None, "keep the first N numbers of an embedding (Matryoshka)", least=1, metavar="N", default_text="all"
    )
    max_train: int | None = option(
        None, "maximum number of training texts, drawn with the seed", least=1, metavar="N", default_text="all"
    )
    max_length: int | None = option(
        None,
        "maximum number of tokens of a text; a longer one is cut",
        least=1,
        metavar="TOKENS",
        default_text="the encoder's own",
    )
    min_cosine: float = option(
        0.7,
        "mean cosine to the full embedding that the default depth must have; the shallowest such exit is chosen",
        least=-1,
        most=1,
    )
    prompt_name: str | None = option(
        None,
        "prompt of the encoder that stands before each text if no other is named",
        metavar="NAME",
        default_text="the encoder's own default",
    )


@dataclass(frozen=True, kw_only=True)
class AddOptions(Settings):
    """`mini-ee add-exits`: how much must stay the same, and where heads are added."""

    agreement: float = option(0.99, "share of predictions that must equal the model's", above=0, most=1)
    max_loss: float | None = option(
        None,
        "largest loss of accuracy compared with the model; it replaces --agreement, and the texts need labels",
        least=0,
        below=1,
        default_text="none",
    )
    confidence: float = option(
        0.95, "confidence level of the guarantee, for --agreement or --max-loss", above=0, below=1
    )
    exits: tuple[int, ...] | None = option(
        None,
        "layers with a head, such as 0,2,4,6; 0 is the embeddings",
        least=0,
        default_text="the three of six that save most time",
    )
    tolerance: float | None = option(
        None,
        "difference up to which two numbers agree, if the model predicts a number",
        above=0,
        default_text="a tenth of the standard deviation of the model's numbers",
    )
    top_k: int | None = option(
        None,
        "number of best texts of a query that must stay the best, if the model is a reranker; --agreement then counts "
        "queries, which are the pairs with the same first text",
        least=1,
        metavar="K",
        default_text="none: the numbers must agree within --tolerance",
    )
    cosine: float | None = option(
        None,
        "least mean cosine to the full embedding, if the model is a sentence encoder: the shallowest such depth counts",
        least=-1,
        most=1,
        default_text=".7",
    )
    prompt_name: str | None = option(
        None,
        "prompt of a sentence encoder that stands before each text",
        metavar="NAME",
        default_text="the encoder's own default",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.agreement == 1:
            raise ValueError(
                "agreement 1 holds for the model without exits only: no test on texts guarantees it; give less, as .999"
            )


OPTIONS = {  # unit -> settings of a training, and settings of its data
    "rows": (RowOptions, TaskOptions),
    "prompts": (RowOptions, TaskOptions),
    "tokens": (TokenOptions, TextOptions),
    "embeddings": (EmbeddingOptions, TaskOptions),
}
TASK_HELP = {  # unit -> help of --task
    "rows": "folder of a task (default the built-in reviews)",
    "tokens": "kind of a decoder's training text: continue (the ends of stories) or copy (sentences)",
    "embeddings": (
        "texts without labels: a file with one text a line, a table, or the folder of a task; for methods that train "
        "the encoder also pairs with numbers as labels (default reviews)"
    ),
}
