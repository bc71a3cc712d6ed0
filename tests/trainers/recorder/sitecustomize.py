"""Record what a training step consumes, without a change of the training script: Python imports this module before
the script if its folder is on PYTHONPATH.

With RECORD=FOLDER every rank writes FOLDER/generation-G-rank-R.jsonl, two lines a micro-batch:

    {"step": 7, "samples": [checksums of the token ids]}     before the ranks exchange anything
    {"step": 7, "loss": 5.6}                                 its part of the loss of the step

The sum of a rank's parts, averaged over the ranks, is the loss of the step. Two trainers are recorded: transformers'
`Trainer` with its subclasses in TRL, and HALOs' `BasicTrainer`. A micro-batch takes PACE seconds longer: transformers
trains on for three seconds after a signal, in which a fast machine would train to the end.
"""

import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time
import zlib

RECORD = os.environ.get("RECORD")
PACE = 0.05


@functools.cache
def file():
    os.makedirs(RECORD, exist_ok=True)
    generation, rank = os.environ.get("EVENKEEL_GENERATION", "1"), os.environ.get("RANK", "0")
    return open(os.path.join(RECORD, f"generation-{generation}-rank-{rank}.jsonl"), "a", buffering=1)


def write(**line):
    file().write(json.dumps(line) + "\n")


def checksums(batch):
    """One checksum for every row of token ids. Padding depends on the other rows of a micro-batch, so it is left out."""
    found = []
    for key in batch:
        if key.endswith("input_ids") and not key.startswith("prompt"):
            ids, mask = batch[key], batch.get(key.replace("input_ids", "attention_mask"))
            for row, ids in enumerate(ids):
                ids = ids if mask is None else ids[mask[row].bool()]
                found.append(zlib.crc32(str(ids.tolist()).encode()))
    return found


def start_micro_batch(step, batch):
    time.sleep(PACE)
    write(step=step, samples=checksums(batch))


def transformers_trainer(module):
    step = module.Trainer.training_step

    @functools.wraps(step)
    def training_step(self, model, inputs, *more, **named):
        number = self.state.global_step + 1
        start_micro_batch(number, inputs)
        loss = step(self, model, inputs, *more, **named)
        write(step=number, loss=loss.item())
        return loss

    module.Trainer.training_step = training_step


def halos_trainers(module):
    def recorded(metrics):
        @functools.wraps(metrics)
        def get_batch_metrics(self, batch, mode=None):
            if not self.policy.training:
                return metrics(self, batch, mode) if mode else metrics(self, batch)
            model = self.config.model
            number = begun(model) + self.batch_counter + 1
            start_micro_batch(number, batch)
            result = metrics(self, batch)
            write(step=number, loss=result[0].item() / model.gradient_accumulation_steps)
            return result

        return get_batch_metrics

    for trainer in vars(module).values():
        if isinstance(trainer, type) and "get_batch_metrics" in vars(trainer):
            trainer.get_batch_metrics = recorded(trainer.get_batch_metrics)


def begun(model):
    """The steps before HALOs' checkpoint. Its trainer counts from 0 in every process."""
    if model.from_checkpoint is None:
        return 0
    name = os.path.basename(os.path.normpath(model.from_checkpoint))
    return int(name.removeprefix("step-")) // model.batch_size


def cpus_with_an_index(module):
    """transformers 4 loads a checkpoint to the device `cpu:0`, which torch saves to but does not load to."""
    module.register_package(50, lambda storage: None, lambda storage, at: storage if at.startswith("cpu:") else None)


def fsdp_on_cpus(module):
    """accelerate uses FSDP on GPUs only, and trains without it elsewhere. With this, its FSDP runs on gloo."""
    state, kinds = module.AcceleratorState, module.DistributedType
    begin = state.__init__

    @functools.wraps(begin)
    def __init__(self, *more, fsdp_plugin=None, **named):
        first = not state._shared_state
        begin(self, *more, fsdp_plugin=fsdp_plugin, **named)
        if first and fsdp_plugin is not None and self.distributed_type == kinds.MULTI_CPU:
            self.distributed_type = kinds.FSDP
            module.PartialState._shared_state["distributed_type"] = kinds.FSDP
            self.fsdp_plugin = fsdp_plugin

    state.__init__ = __init__


PATCHES = {
    "accelerate.state": fsdp_on_cpus,
    "torch.serialization": cpus_with_an_index,
    "transformers.trainer": transformers_trainer,
    "train.trainers": halos_trainers,
}


class Finder(importlib.abc.MetaPathFinder):
    """Patches a module after its import."""

    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        patch = PATCHES.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if RECORD:
    sys.meta_path.insert(0, Finder())
