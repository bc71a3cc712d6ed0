"""The losses of direct-preference-optimization's and HALOs' own code, step by step, on one process.

    tree_losses.py FOLDER DPO HALOS LEGACY > tree_losses.json

FOLDER is that of tiny_model.py; DPO, HALOS and LEGACY are checkouts of eric-mitchell/direct-preference-optimization f8b8c0f
and ContextualAI/HALOs 4831988 and 61b9ee6. Prints by case the losses, the rewards, and KTO's KL. Their rows, collation,
losses, optimisers and schedules are upstream's; rows come in the order of their files. Here is only the loop, and a template
that ends with the beginning of an answer, as those of chat models do.
"""

import importlib
import json
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import huggingface_hub
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, BATCH = 20, 8
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
# Modules that upstream imports for its logs, other models and data sets that are not local.
UNUSED = "wandb tensor_parallel bs4 openai pandas tqdm datasets omegaconf".split()

# By case: the loss of the tree, its settings, and the longest row and prompt.
DPO = dict(
    dpo=(dict(name="dpo", beta=0.3, label_smoothing=0.1, reference_free=False), 512, 256),
    dpo_cut=(dict(name="dpo", beta=0.3, label_smoothing=0.0, reference_free=False), 40, 20),
    ipo=(dict(name="ipo", beta=0.05), 512, 256),
)
HALOS = dict(
    dpo=("DPOTrainer", dict(beta=0.3), 512, 256),
    dpo_cut=("DPOTrainer", dict(beta=0.3), 68, 36),
    cdpo=("CDPOTrainer", dict(beta=0.3, epsilon=0.2), 512, 256),
    simpo=("SimPOTrainer", dict(beta=2.0, gamma_beta_ratio=0.3), 512, 256),
    kto=("KTOTrainer", dict(beta=0.3, desirable_weight=0.7, undesirable_weight=1.4), 512, 256),
)
# The same with passes of accumulation.
KTO = dict(beta=0.3, desirable_weight=1.4, undesirable_weight=0.1)
LEGACY = dict(
    sft=("SFTTrainer", dict(), 512, 256, 1),
    sft_cut=("SFTTrainer", dict(), 40, 20, 1),
    sft_accumulated=("SFTTrainer", dict(), 512, 256, 2),
    dpo_cut=("DPOTrainer", dict(beta=0.3), 40, 20, 1),
    kto=("KTOTrainer", KTO, 512, 256, 1),
    kto_cut=("KTOTrainer", KTO, 40, 20, 1),
)
LEGACY_LOADERS = dict(
    SFTTrainer="SFTDataLoader", DPOTrainer="PairedPreferenceDataLoader", KTOTrainer="UnpairedPreferenceDataLoader"
)


def load(checkout, *names):
    for name in UNUSED:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = MagicMock(__spec__=None, __file__=None, __path__=[])
    # Gone from newer versions, and unused here.
    huggingface_hub.HfFolder = None
    sys.path.insert(0, str(checkout))
    return [importlib.import_module(name) for name in names]


def models(folder):
    def model():
        return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

    return model(), model().eval(), AutoTokenizer.from_pretrained(folder / "model")


def dpo_steps(folder, checkout, loss, max_length, max_prompt_length):
    trainers, data = load(checkout, "trainers", "preference_datasets")
    trainer = object.__new__(trainers.BasicTrainer)
    trainer.policy, trainer.reference_model, trainer.tokenizer = models(folder)
    trainer.rank, trainer.world_size = 0, 1
    collate = data.get_collate_fn(trainer.tokenizer)
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    # As `BasicTrainer.train` has them, with `optimizer=RMSprop lr=1e-4 warmup_steps=4 max_grad_norm=10`.
    optimizer = torch.optim.RMSprop(trainer.policy.parameters(), lr=1e-4)
    scheduler = LambdaLR(optimizer, lr_lambda=lambda step: min(1.0, (step + 1) / (4 + 1)))
    found = {"loss": [], "rewards_train/chosen": [], "rewards_train/rejected": []}
    for step in range(STEPS):
        tokenized = [
            data.tokenize_batch_element(
                *(row[key] for key in ["prompt", "chosen", "rejected"]),
                "keep_start",
                trainer.tokenizer,
                max_length,
                max_prompt_length,
            )
            for row in rows[step * BATCH :][:BATCH]
        ]
        mean, metrics = trainer.get_batch_metrics(collate(tokenized), SimpleNamespace(**loss), train=True)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(trainer.policy.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found["loss"].append(mean.item())
        for key in list(found)[1:]:
            found[key].append(sum(metrics[key]) / len(metrics[key]))
    return found


def halos_steps(folder, checkout, name, loss, max_length, max_prompt_length):
    trainers, dataloader = load(checkout, "train.trainers", "train.dataloader")
    trainer = object.__new__(getattr(trainers, name))
    policy, reference, tokenizer = models(folder)
    tokenizer.chat_template = TEMPLATE
    # The default of transformers 4.
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    trainer.policy, trainer.reference_model = policy, None if name == "SimPOTrainer" else reference
    trainer.accelerator, trainer.policy_dtype = Accelerator(cpu=True), torch.float32
    trainer.config = SimpleNamespace(loss=SimpleNamespace(**loss), humanline=False, cache_reference_logprobs=False)
    random.Random.shuffle = lambda self, items: None
    loader = dataloader.UnpairedPreferenceDataLoader if name == "KTOTrainer" else dataloader.PairedPreferenceDataLoader
    batches = loader(
        [str(folder / "feedback.json")],
        tokenizer,
        microbatch_size=BATCH,
        global_batch_size=BATCH,
        max_length=max_length,
        max_prompt_length=max_prompt_length,
        n_examples=STEPS * BATCH,
    )
    # As `launch.py` has them, with `lr=1e-3 warmup=0.2`.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999))
    warmup = LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=4)
    scheduler = SequentialLR(optimizer, schedulers=[warmup, LambdaLR(optimizer, lr_lambda=lambda _: 1.0)], milestones=[4])
    keys = ["rewards_train/chosen", "rewards_train/rejected"]
    keys += ["rewards_train/KL_estimate"] * (name == "KTOTrainer")
    found = {"loss": [], **{key: [] for key in keys}}
    for batch in batches:
        mean, metrics = trainer.get_batch_metrics(batch)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found["loss"].append(mean.item())
        for key in keys:
            found[key].append(torch.as_tensor(metrics[key]).float().mean().item())
    return found


def legacy_steps(folder, checkout, name, loss, max_length, max_prompt_length, accumulation):
    trainers, dataloader = load(checkout, "trainers", "dataloader")
    importlib.reload(dataloader)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    trainer = object.__new__(getattr(trainers, name))
    trainer.policy, trainer.reference_model, trainer.tokenizer = models(folder)
    trainer.policy_dtype, trainer.device, trainer.rank, trainer.world_size = torch.float32, "cpu", 0, 1
    trainer.config, trainer.is_mistral = SimpleNamespace(loss=SimpleNamespace(**loss), mode="train"), False

    def rows(split, *marks):
        data = dataloader.Dataset("rows")
        for line in (folder / "texts.jsonl").read_text().splitlines():
            row = json.loads(line)
            example = data[row["prompt"]]
            example.prompt, example.generations = row["prompt"], [row["chosen"], row["rejected"]]
            example.pairs, example.sft_index = [(0, 1)], 0
        return data

    make_row = dataloader.DataLoader.tokenize_batch_element

    def cut_row(self, *given, **named):
        """The row without its tokens beyond the longest, which Evenkeel cuts off."""
        row = make_row(self, *given, **named)
        prefix = named.get("prefix", "target")
        for key in [f"{prefix}_combined_input_ids", f"{prefix}_combined_attention_mask", f"{prefix}_labels"]:
            row[key] = row[key][: self.max_length]
        return row

    dataloader.DataLoader.tokenize_batch_element = cut_row
    dataloader.get_rows = rows
    random.shuffle = lambda items: None
    batches = getattr(dataloader, LEGACY_LOADERS[name])(
        ["rows"],
        trainer.tokenizer,
        batch_size=BATCH // accumulation,
        max_length=max_length,
        max_prompt_length=max_prompt_length,
        n_examples=STEPS * BATCH,
    )
    # As `BasicTrainer.train` has them, with `lr=3e-4 warmup_steps=4`.
    optimizer = torch.optim.RMSprop(trainer.policy.parameters(), lr=3e-4)
    scheduler = LambdaLR(optimizer, lr_lambda=lambda step: min(1.0, (step + 1) / (4 + 1)))
    keys = ["rewards_train/chosen", "rewards_train/rejected"] * (name != "SFTTrainer")
    keys += ["rewards_train/KL_estimate"] * (name == "KTOTrainer")
    found, sums = {"loss": [], **{key: [] for key in keys}}, []
    for batch in batches:
        mean, metrics = trainer.get_batch_metrics(batch)
        (mean / accumulation).backward()
        sums.append(mean.item())
        if len(sums) < accumulation:
            continue
        torch.nn.utils.clip_grad_norm_(trainer.policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found["loss"].append(sum(sums) / accumulation)
        sums = []
        for key in keys:
            found[key].append(torch.as_tensor(metrics[key]).float().mean().item())
    return found


def main():
    folder, dpo, halos, legacy = map(Path, sys.argv[1:])
    sys.stdout, printed = sys.stderr, sys.stdout
    found = {f"dpo/{case}": dpo_steps(folder, dpo, *of) for case, of in DPO.items()}
    # Both checkouts have modules of these names.
    sys.path.remove(str(dpo))
    found |= {f"halos/{case}": halos_steps(folder, halos, *of) for case, of in HALOS.items()}
    sys.path.remove(str(halos))
    for name in ["trainers", "dataloader", "utils", "models"]:
        sys.modules.pop(name, None)
    found |= {f"legacy/{case}": legacy_steps(folder, legacy, *of) for case, of in LEGACY.items()}
    json.dump(found, printed, indent=1)


main()
