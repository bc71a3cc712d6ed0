"""A script around Hugging Face's Trainer, as its examples have it: TrainingArguments from the command
line, a tiny model from a config. For the test it writes down which samples every forward pass of the
training was fed, and KubeflowCallback posts every step instead of one in five seconds, in which a
fast machine trains to the end.

    python hf_trainer.py --output_dir OUT --max_steps 40 --record FED
"""
import json
import os
from dataclasses import dataclass, field

import torch
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import KubeflowCallback


@dataclass
class Arguments:
    samples: int = field(default=504)
    record: str = field(default="")


def main():
    KubeflowCallback._MIN_UPDATE_INTERVAL = 0.0
    own, args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    args.remove_unused_columns = False
    set_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)
    )
    data = []
    for index in range(own.samples):
        ids = (torch.arange(16) * (1 + index % 5) + index) % 64
        data.append(dict(input_ids=ids, labels=ids, index=torch.tensor(index)))
    record = None
    if own.record:
        os.makedirs(own.record, exist_ok=True)
        generation = os.environ.get("EVENKEEL_GENERATION", "1")
        name = f"generation-{generation}-rank-{os.environ.get('RANK', '0')}.jsonl"
        record = open(os.path.join(own.record, name), "w", buffering=1)

    class Recording(Trainer):
        def compute_loss(self, model, inputs, *more, **named):
            indices = inputs.pop("index").tolist()
            if record and model.training:
                record.write(json.dumps(dict(step=self.state.global_step + 1, samples=indices)) + "\n")
            return super().compute_loss(model, inputs, *more, **named)

    trainer = Recording(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
