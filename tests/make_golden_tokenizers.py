"""Write tests/golden/tokenizers: small tokenizers as transformers saves them, and the ids that it computes with them.

    pip install transformers
    python tests/make_golden_tokenizers.py

For each kind tokenizer.json and tokenizer_config.json by save_pretrained, and expected.json: rows of one text or two,
their ids and types with truncation=True. The tests need none of this. It imports nothing of mini_ee.
"""

import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

GOLDEN = Path(__file__).parent / "golden" / "tokenizers"
MAX_LENGTH = 12
TEXTS = (
    "The film was good.",
    "A song of the very, very old town; it was bad!",
    "Café déjà vu, ÜBER naïve 東京 2026",
    "  two  blanks\tand a tab ",
    "the film " * 20,
    "word" * 30,
    "a text with [SEP] and </s> inside",
)
ROWS = [
    *((text,) for text in TEXTS),
    ("The film was good.", "A song."),
    ("short", "the film was good " * 9),
    ("the film was good " * 9, "short"),
    ("the film was good " * 9, "a song of the town " * 9),
    ("the film was good " * 3, "a song of the town " * 9),
]


def word_pieces() -> dict:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    )
    return backend.get_vocab()


def byte_pairs(special: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def roberta() -> transformers.PreTrainedTokenizerBase:
    model = json.loads(byte_pairs(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]).to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return transformers.RobertaTokenizer(vocab=model["vocab"], merges=merges, model_max_length=MAX_LENGTH)


def xlm_roberta() -> transformers.PreTrainedTokenizerBase:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    vocab = [tuple(piece) for piece in json.loads(backend.to_str())["model"]["vocab"]]
    return transformers.XLMRobertaTokenizer(vocab=[*vocab, ("<mask>", 0.0)], model_max_length=MAX_LENGTH)


def modernbert() -> transformers.PreTrainedTokenizerBase:
    names = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    backend = byte_pairs([*names.values()])
    ids = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0", special_tokens=ids
    )
    special = {f"{part}_token": name for part, name in names.items()}
    inputs = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=MAX_LENGTH, model_input_names=inputs, **special
    )


def generic() -> transformers.PreTrainedTokenizerBase:
    """BERT's tokenizer in the class without a family, which gives no types unless model_input_names has them."""
    backend = transformers.BertTokenizer(vocab=word_pieces()).backend_tokenizer
    special = {f"{part}_token": f"[{part.upper()}]" for part in ("unk", "sep", "pad", "cls", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=MAX_LENGTH, **special)


def main() -> None:
    kinds = {
        "generic": generic(),
        "bert": transformers.BertTokenizer(vocab=word_pieces(), model_max_length=MAX_LENGTH),
        "distilbert": transformers.DistilBertTokenizer(vocab=word_pieces(), model_max_length=MAX_LENGTH),
        "roberta": roberta(),
        "xlm-roberta": xlm_roberta(),
        "modernbert": modernbert(),
    }
    for kind, tokenizer in kinds.items():
        folder = GOLDEN / kind
        tokenizer.save_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)  # what a user of the folder gets
        expected = [{"texts": row} | dict(tokenizer(*row, truncation=True)) for row in ROWS]
        golden = {"transformers": transformers.__version__, "max_length": MAX_LENGTH, "rows": expected}
        (folder / "expected.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(kind, [len(encoded["input_ids"]) for encoded in expected], type(tokenizer).__name__)


if __name__ == "__main__":
    main()
