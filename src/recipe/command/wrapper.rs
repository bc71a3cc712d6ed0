//! Programs that hand on what stands behind `--`: `python mason.py --gpus 8 -- torchrun … train.py …`.
//! What stands before is theirs, and no argument of a trainer's.
//!
//! Source: allenai/open-instruct e6c3044 `mason.py` (`parse_commands`).

use super::words::Word;

/// What ends a command within words that are handed on. Written into a command they are escaped, for the
/// shell that is started elsewhere.
const ENDS: [&str; 5] = ["--", "&&", "||", ";", "|"];

/// The commands among a program's arguments.
pub(super) fn handed_on(arguments: &[Word]) -> impl Iterator<Item = &[Word]> {
    let at = arguments.iter().position(|word| word.text == "--");
    let behind = at.map_or(&[][..], |at| &arguments[at + 1..]);
    behind.split(|word| ENDS.contains(&word.text.as_str()))
}

#[cfg(test)]
mod tests {
    use crate::recipe::tests::script;

    /// `scripts/train/debug/oc_sft_multinode.sh` of open-instruct, cut short.
    #[test]
    fn a_program_that_hands_a_command_on_is_not_the_trainer() {
        let recipe = script(
            "uv run python mason.py --num_nodes 2 --gpus 8 --env A=1 --env B=2 --seed 7 \\\n  \
             -- torchrun --nnodes=2 --nproc_per_node=8 train.py --per_device_train_batch_size 1 \\\n  \
             --gradient_accumulation_steps 4 --output_dir out\n",
        )
        .unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
        let batch = &recipe.spec.batch;
        let numbers = (batch.micro, batch.accumulation, batch.gpus);
        assert_eq!(numbers, (Some(1), Some(4), Some(16)));
        assert_eq!(recipe.spec.seed, 42, "the seed was not the trainer's");
        assert_eq!(recipe.diagnostics, []);
    }

    #[test]
    fn commands_that_are_handed_on_together_are_told_apart() {
        let training = "python train.py --per_device_train_batch_size 2";
        let one = format!("python mason.py -- source setup.sh \\&\\& {training}\n");
        assert_eq!(script(&one).unwrap().spec.batch.micro, Some(2));
        let two = format!("python mason.py -- python convert.py \\&\\& {training}\n");
        let error = script(&two).unwrap_err();
        let problem = &error.diagnostics[0];
        assert_eq!(problem.rule, "global-batch-unknown");
        assert!(problem.message.starts_with("`mason.py` hands on more"));
    }

    #[test]
    fn two_dashes_that_hand_nothing_on_end_no_command() {
        let recipe =
            script("python train.py --per_device_train_batch_size 2 --x y -- z\n").unwrap();
        assert_eq!(recipe.spec.batch.micro, Some(2));
    }
}
