#!/usr/bin/env python3
"""DPO by `evenkeel launch` and by TRL's DPOTrainer on the same recipe, model and rows, A B A B …, on one process.

    python3 benches/preferences.py --python VENV/bin/python --pairs 3
    … --precompute         TRL computes the reference log-probabilities before training, too

Evenkeel's time is that of the whole command: preparation, reference log-probabilities, steps, checkpoint and report. TRL's
is that of `train()`, without its imports and its preparation. Memory is the peak of the largest process.
"""
import argparse, json, pathlib, statistics, subprocess, sys, tempfile, time

SHAPE = dict(num_hidden_layers=8, hidden_size=256, num_attention_heads=8, num_key_value_heads=8, intermediate_size=688,
             vocab_size=4096, max_position_embeddings=512)
RECIPE = """\
model_name_or_path: model
dataset_name: rows
max_length: 256
per_device_train_batch_size: 4
max_steps: {steps}
learning_rate: 1.0e-4
lr_scheduler_type: constant
train_sampling_strategy: sequential
bf16: false
gradient_checkpointing: false
save_strategy: "no"
report_to: none
output_dir: out
"""


def prepare(folder):
    """A random Llama of 8.4 M parameters, a tokenizer of words, and an epoch of pairs of rows of 256 tokens."""
    import random
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["<pad>", "<s>", "</s>"] + [f"w{i}" for i in range(SHAPE["vocab_size"] - 3)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder / "model")
    ends = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, **ends)).save_pretrained(folder / "model")
    draw = random.Random(0)
    text = lambda count: " ".join(draw.choices(words[3:], k=count))
    rows = [dict(prompt=text(100), chosen=" " + text(160), rejected=" " + text(160)) for _ in range(96)]
    (folder / "rows").mkdir()
    (folder / "rows/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def peer(folder, precompute):
    """TRL's seconds, losses and peak memory."""
    import torch, yaml
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    settings = yaml.safe_load((folder / "dpo.yaml").read_text())
    model, rows = (folder / settings.pop(key) for key in ("model_name_or_path", "dataset_name"))
    observed = dict(use_cpu=True, logging_steps=1, disable_tqdm=True, precompute_ref_log_probs=precompute)
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=DPOConfig(**settings | observed | dict(output_dir=str(folder / "out"))),
        train_dataset=load_dataset(str(rows), split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    begin = time.time()
    trainer.train()
    seconds = time.time() - begin
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps(dict(seconds=seconds, losses=losses)))


def measured(command, folder):
    """Runs a command; its output, seconds, and the peak memory of its largest process, MB."""
    wrapper = (
        "import json, resource, subprocess, sys, time; b = time.time(); "
        "p = subprocess.run(sys.argv[1:], capture_output=True, text=True); "
        "r = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024; "
        "print(json.dumps([p.returncode, p.stdout, p.stderr, time.time() - b, r]))"
    )
    run = subprocess.run([sys.executable, "-c", wrapper, *command], cwd=folder, capture_output=True, text=True, check=True)
    code, output, message, seconds, memory = json.loads(run.stdout)
    if code:
        raise SystemExit(f"{command}: {output}{message}")
    return output, seconds, memory


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--python", default=sys.executable, help="the Python that has TRL")
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--precompute", action="store_true")
    p.add_argument("--prepare", type=pathlib.Path, help=argparse.SUPPRESS)
    p.add_argument("--peer", type=pathlib.Path, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.prepare:
        return prepare(a.prepare)
    if a.peer:
        return peer(a.peer, a.precompute)
    root = pathlib.Path(__file__).resolve().parent.parent
    # The commands run in another folder.
    a.python = str(pathlib.Path(a.python).absolute())
    subprocess.run(["cargo", "build", "--release", "--locked"], cwd=root, check=True)
    own = [str(root / "target/release/evenkeel"), "launch", "dpo.yaml", "--recipe-gpus", "1", "--procs", "1", "--device",
           "cpu", "--quiet", "--dialect-version", "trl-1.16"]
    trl = [a.python, str(root / "benches/preferences.py"), *["--precompute"] * a.precompute, "--peer", "."]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        subprocess.run([a.python, __file__, "--prepare", str(folder)], check=True, capture_output=True)
        (folder / "dpo.yaml").write_text(RECIPE.format(steps=a.steps))
        ratios, memory = [], []
        for pair in range(a.pairs):
            run = folder / f"run{pair}"
            _, seconds, rss = measured([*own, "--out", run.name], folder)
            output, _, peer_rss = measured(trl, folder)
            theirs = json.loads(output.splitlines()[-1])
            steps = [json.loads(line) for line in (run / "gen-1/metrics.jsonl").read_text().splitlines()]
            losses = [step["loss"] for step in steps if step["kind"] == "step"]
            apart = max(abs(x - y) / y for x, y in zip(losses, theirs["losses"], strict=True))
            ratios.append(theirs["seconds"] / seconds)
            memory.append(rss / peer_rss)
            print(json.dumps(dict(pair=pair + 1, evenkeel_seconds=round(seconds, 1), trl_seconds=round(theirs["seconds"], 1),
                                  ratio=round(ratios[-1], 2), evenkeel_mb=round(rss), trl_mb=round(peer_rss),
                                  losses_apart=float(f"{apart:.1e}"))), flush=True)
        print(json.dumps(dict(median_ratio=round(statistics.median(ratios), 2), lowest=round(min(ratios), 2),
                              memory_ratio=round(statistics.median(memory), 3))))


main()
