//! Programs that forward the command after `--`: `python mason.py --gpus 8 -- torchrun … train.py …`. Options
//! before `--` belong to the program, not to the trainer.
//!
//! Source: allenai/open-instruct e6c3044 `mason.py` (`parse_commands`).

use crate::recipe::syntax::shell::word::Word;

/// Words that separate forwarded commands. A script escapes them for the shell that the program starts.
const ENDS: [&str; 5] = ["--", "&&", "||", ";", "|"];

/// The commands after `--` among a program's arguments.
pub(crate) fn handed_on(arguments: &[Word]) -> impl Iterator<Item = &[Word]> {
    let at = arguments.iter().position(|word| word.text == "--");
    let forwarded = at.map_or(&[][..], |at| &arguments[at + 1..]);
    forwarded.split(|word| ENDS.contains(&word.text.as_str()))
}

#[cfg(test)]
mod tests {
    use crate::recipe::tests::script;

    /// `scripts/train/debug/oc_sft_multinode.sh` of open-instruct, shortened.
    #[test]
    fn a_program_that_forwards_a_command_is_not_the_trainer() {
        let recipe = script(
            "uv run python mason.py --num_nodes 2 --gpus 8 --env A=1 --env B=2 --seed 7 \\\n  \
             -- torchrun --nnodes=2 --nproc_per_node=8 train.py --per_device_train_batch_size 1 \\\n  \
             --gradient_accumulation_steps 4 --output_dir out\n",
        )
        .unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
        let batch = &recipe.spec.batch;
        let numbers = (batch.per_device_batch_size, batch.accumulation, batch.gpus);
        assert_eq!(numbers, (Some(1), Some(4), Some(16)));
        assert_eq!(recipe.spec.seed, 42, "`--seed` belongs to mason.py");
        assert_eq!(recipe.diagnostics, []);
    }

    #[test]
    fn forwarded_commands_are_separated() {
        let training = "python train.py --per_device_train_batch_size 2";
        let one = format!("python mason.py -- source setup.sh \\&\\& {training}\n");
        assert_eq!(
            script(&one).unwrap().spec.batch.per_device_batch_size,
            Some(2)
        );
        let two = format!("python mason.py -- python convert.py \\&\\& {training}\n");
        let error = script(&two).unwrap_err();
        let problem = &error.diagnostics[0];
        assert_eq!(problem.rule, "global-batch-unknown");
        assert!(problem.message.starts_with("`mason.py` forwards several"));
    }

    #[test]
    fn a_double_dash_that_forwards_nothing_keeps_the_command() {
        let recipe =
            script("python train.py --per_device_train_batch_size 2 --x y -- z\n").unwrap();
        assert_eq!(recipe.spec.batch.per_device_batch_size, Some(2));
    }
}
