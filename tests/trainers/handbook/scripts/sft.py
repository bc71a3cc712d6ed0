"""The command line of the alignment-handbook's `scripts/sft.py` (925acdf) with the TRL that is installed: `--config`
names one of the handbook's recipes, and further arguments override it. Keys that this TRL does not have are ignored.
"""
from dataclasses import dataclass

from datasets import concatenate_datasets, load_dataset
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser


@dataclass
class Data:
    dataset_mixture: dict | None = None


def main():
    parser = TrlParser((Data, SFTConfig, ModelConfig))
    data, config, model, _ = parser.parse_args_and_config(return_remaining_strings=True)
    mixture = data.dataset_mixture
    parts = [
        load_dataset(part["id"], part["config"], split=part["split"]).select_columns(part["columns"])
        for part in mixture["datasets"]
    ]
    split = concatenate_datasets(parts).train_test_split(mixture["test_split_size"], seed=mixture["seed"])
    config.model_init_kwargs = dict(attn_implementation=model.attn_implementation, dtype=model.dtype)
    # The Trainer itself resumes only if it is asked to.
    trainer = SFTTrainer(model=model.model_name_or_path, args=config, train_dataset=split["train"])
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()
