"""A small vocabulary of sentences such as "the film was very good", and its tokenizer."""

import tokenizers

GOOD, BAD = ("good", "great", "fine", "lovely"), ("bad", "awful", "poor", "dull")
THINGS = ("film", "meal", "book", "song", "room")
WORDS = ("the", "a", "was", "is", "very", "and", *THINGS, *GOOD, *BAD)


def words_tokenizer():
    """A tokenizer of WORDS, in BERT's way."""
    vocab = {token: i for i, token in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer
