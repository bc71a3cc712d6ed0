"""Writes tokenizers.json: small tokenizers of every kind that models have, and the ids that they give for odd texts.

    python3 tests/reference/tokenizer_reference.py > tests/reference/tokenizers.json

Needs the package tokenizers (0.23.3 was used). All texts and vocabularies are made here.
"""

import json
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "hello world, this is a text with numbers 12345 and 3.14",
    "Grüße aus Köln! 日本語のテキスト 😀😃",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass",
    "it's they're we'll  double  spaces   triple",
]
TEXTS = [
    "", "hello world", " hello  world ", "\n\n\nline\r\n\ttab", "it's I'LL they’re", "    indented\n        more",
    "日本語 mixed 😀👩‍👩‍👧‍👦 \U0001f1e9\U0001f1ea", "e\u0301 é ﬁ Å Å", "\u0000\u0001\x7f", "\ufeffbom \u2028 \u00a0 \u200b",
    "<s>hi</s> <|im_start|>user\nhi<|im_end|>\n", "x <mask> y<mask>z  <mask>  w", "a<L> b <L>c <R>  after", "<N> HELLO <n>",
    "1234567890 1,000.50", "a" * 70, "▁low line _ ▁", "<0x0A> literal <0xZZ>", "password word wordy", "مرحبا עברית हिन्दी",
]
PIECES = [*"ab \n\t'’<>|/0é日😀\u0301\u200d▁", "<s>", "</s>", "<mask>", "<L>", "<R>", "<N>", "<|im_start|>", "  ", "\n\n"]
ADDED = [
    AddedToken("<s>", special=True, normalized=False), AddedToken("</s>", special=True, normalized=False),
    AddedToken("<|im_start|>", special=True, normalized=False), AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<mask>", special=True, lstrip=True, normalized=False), AddedToken("<L>", lstrip=True, normalized=True),
    AddedToken("<R>", rstrip=True, normalized=False), AddedToken("<N>", normalized=True),
    AddedToken("word", single_word=True, normalized=False),
]
# Words, numbers of up to three digits, signs, line ends and spaces, as Llama 3 and Qwen split a text.
SPLIT = (r"(?i:'s|'re|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(pre_tokenizer, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return tokenizer


def byte_fallback(normalizer, pre_tokenizer):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    special = ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=special, limit_alphabet=40))
    # The bytes are no added tokens, which text could name.
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = parts["added_tokens"][:1]
    return Tokenizer.from_str(json.dumps(parts))


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


def llama3():
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = byte_level(pre_tokenizers.Sequence([split, bytes_only]), ignore_merges=True)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def main():
    low_line = normalizers.Replace(" ", "▁")
    tokenizers = {
        "bytes, as GPT-2": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "bytes, single digits, as StarCoder2": byte_level(pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
        "bytes, split and NFC, as Llama 3 and Qwen": llama3(),
        "byte fallback, as Llama 2": byte_fallback(normalizers.Sequence([normalizers.Prepend("▁"), low_line]), None),
        "byte fallback, first word, as Mistral": byte_fallback(
            None, pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)),
        "byte fallback, as Gemma": byte_fallback(low_line, pre_tokenizers.Split(" ", "merged_with_previous")),
        "unigram, NFKC": unigram(),
    }
    draw = random.Random(0)
    texts = TEXTS + ["".join(draw.choice(PIECES) for _ in range(draw.randint(1, 30))) for _ in range(30)]
    # One tokenizer a line.
    cases = []
    for name, tokenizer in tokenizers.items():
        for token in ADDED:
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        written = tokenizer.to_str()
        read = Tokenizer.from_str(written)
        ids = [read.encode(text, add_special_tokens=False).ids for text in texts]
        case = {"name": name, "tokenizer": json.loads(written), "ids": ids}
        cases.append(json.dumps(case, ensure_ascii=False, separators=(",", ":")))
    print(f'{{"texts": {json.dumps(texts)}, "cases": [')
    print(",\n".join(cases) + "]}")


main()
