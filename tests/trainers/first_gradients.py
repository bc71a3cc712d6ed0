"""The gradients of a trainer's first step, tensor by tensor, as its AdamW has them: 1 − beta1 times the clipped gradient."""

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback


class FirstGradients(TrainerCallback):
    """Writes `exp_avg.NAME` for each parameter that trains, by the names of PEFT's and transformers' files."""

    def __init__(self, path):
        self.path = path

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step != 1:
            return
        moments = getattr(optimizer, "optimizer", optimizer).state
        found = {}
        for name, parameter in model.named_parameters():
            if parameter in moments:
                # `default` is the name of PEFT's adapter in memory, `modules_to_save` that of a module that is trained whole.
                name = name.replace(".modules_to_save.default.", ".").replace(".default.", ".")
                found[f"exp_avg.{name}"] = moments[parameter]["exp_avg"].to(torch.float32).contiguous().clone()
        save_file(found, self.path)
