"""Write a tiny Llama, a tiny BERT and local data in the forms that upstream's READMEs name.

    tiny_model.py FOLDER

    model/              LlamaForCausalLM, 2 layers of width 32, and a byte tokenizer with a chat template
    bert/               BertModel with the same tokenizer, without dropout, which differs between worlds
    sft/                train.jsonl: 480 conversations, `messages`
    preferences/        train.jsonl: 480 pairs, `chosen` and `rejected`
    labelled/           train.jsonl: 480 completions, `prompt`, `completion` and `label`
    texts.jsonl         480 pairs of texts, `prompt`, `chosen` and `rejected`
    splits/             1480 conversations in two splits, as the handbook's data
    text.txt            the conversations as plain text
    pairs.csv           two sentences and a label
    feedback.json       HALOs' pairwise feedback
    accuracy/           the metric that run_glue.py loads, though it does not evaluate here

480 is a multiple of the tests' global batch, so every epoch ends with a whole step.
"""

import csv
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SAMPLES = 480
# The handbook's recipe takes 1000 of both splits for its evaluation and trains on the rest.
SPLITS = {"train_sft": 1440, "test_sft": 40}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


def make_tokenizer():
    """Each byte is a token, and pieces of "hello world"."""
    bytes_of_text = Tokenizer(models.BPE(unk_token=None))
    bytes_of_text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of_text.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    bytes_of_text.train_from_iterator(["hello world"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_of_text, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=2048
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_models(folder):
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    for name in ["model", "bert"]:
        tokenizer.save_pretrained(folder / name)
    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder / "model")
    BertModel(
        BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ).save_pretrained(folder / "bert")


def turn(role, content):
    return {"role": role, "content": content}

METRIC = """import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}
"""


def question(i):
    return turn("user", f"what is {i} plus {i * 3 % 17}?")


def answer(i):
    return turn("assistant", f"it is {i + i * 3 % 17}")


def make_data(folder):
    asked = [question(i) for i in range(SAMPLES)]
    right = [answer(i) for i in range(SAMPLES)]
    wrong = [turn("assistant", f"{i} is all I know") for i in range(SAMPLES)]
    lines(folder / "sft/train.jsonl", [{"messages": [q, a]} for q, a in zip(asked, right)])
    pairs = zip(asked, right, wrong)
    lines(folder / "preferences/train.jsonl", [{"chosen": [q, a], "rejected": [q, b]} for q, a, b in pairs])
    labelled = [
        {"prompt": [q], "completion": [b if i % 3 == 1 else a], "label": i % 3 != 1}
        for i, (q, a, b) in enumerate(zip(asked, right, wrong))
    ]
    lines(folder / "labelled/train.jsonl", labelled)
    prompts = [f"Add {i} to {i * 3 % 17}, {'please, ' * (i % 3)}friend:" for i in range(SAMPLES)]
    rows = [
        {"prompt": p, "chosen": f" {a['content']}", "rejected": f" {b['content']}" * (1 + i % 2)}
        for i, (p, a, b) in enumerate(zip(prompts, right, wrong))
    ]
    lines(folder / "texts.jsonl", rows)
    first, files = 0, ""
    for split, count in SPLITS.items():
        rows = [{"messages": [question(i), answer(i)]} for i in range(first, first + count)]
        lines(folder / f"splits/{split}.jsonl", rows)
        first += count
        files += f"  - split: {split}\n    path: {split}.jsonl\n"
    header = f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
    (folder / "splits/README.md").write_text(header)
    text = [f"{q['content']} {a['content']}\n" for q, a in zip(asked, right)]
    (folder / "text.txt").write_text("".join(text))
    with open(folder / "pairs.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sentence1", "sentence2", "label"])
        for i in range(SAMPLES):
            rows.writerow([asked[i]["content"], right[i]["content"], i % 2])
    (folder / "accuracy").mkdir()
    (folder / "accuracy/accuracy.py").write_text(METRIC)
    feedback = [
        {
            "type": "pairwise_feedback",
            "split": split,
            "prompt_id": f"{split}-{i}",
            "prompt": [q],
            "output_A": [a],
            "output_B": [b],
            "reward_A": 1.0,
            "reward_B": 0.0,
            "label": 1,
        }
        for split, count in [("train", SAMPLES), ("test", 24)]
        for i, (q, a, b) in enumerate(zip(asked[:count], right, wrong))
    ]
    (folder / "feedback.json").write_text(json.dumps(feedback))


def lines(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    into = Path(sys.argv[1])
    into.mkdir(parents=True, exist_ok=True)
    make_models(into)
    make_data(into)
