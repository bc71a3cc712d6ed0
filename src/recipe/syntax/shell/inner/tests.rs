use crate::export::{Form, emit};
use crate::plan::{PlanRequest, plan};
use crate::recipe::schema::request::Request;
use crate::recipe::tests::script;
use crate::recipe::{ReadError, Recipe, read};

const TRAINER: &str = "train.py --per_device_train_batch_size 8 --gradient_accumulation_steps 2";

fn typed(words: &[&str]) -> Result<Recipe, ReadError> {
    read(&Request {
        command: words.iter().map(|word| (*word).to_owned()).collect(),
        ..Request::default()
    })
}

/// Processes, micro-batch and accumulation.
fn batch(recipe: Result<Recipe, ReadError>, from: &str) -> [Option<u64>; 3] {
    let batch = recipe
        .unwrap_or_else(|error| panic!("{from}: {error}"))
        .spec
        .batch;
    [batch.gpus, batch.per_device_batch_size, batch.accumulation]
}

fn for_two(recipe: &Recipe) -> String {
    let plan = plan(recipe, &PlanRequest::gpus(2)).unwrap();
    let emitted = emit(recipe, &plan.numbers(recipe), Form::Recipe);
    emitted.unwrap_or_else(|error| panic!("{error}")).text
}

#[test]
fn an_inline_script_is_read_as_commands() {
    let call = format!("torchrun --nproc_per_node 4 {TRAINER}");
    for text in [
        format!("bash -c \"{call}\""),
        format!("sh -c '{call}'\n"),
        format!("/bin/bash -lc '. env.sh && {call}'"),
        format!("set -e\nsrun --nodes 1 bash -eo pipefail -c \"cd x; exec {call}\" > log 2>&1"),
        format!("nohup bash -c '{}' &", call.replace(" --", " \\\n  --")),
        format!("bash -c \"{}\"", call.replace(" --", " \\\n  --")),
        format!("N=4\nbash -c \"{}\"", call.replace(" 4", " $N")),
        format!("bash -c \"{call} --host \\$HOSTNAME --name 'a b'\""),
        format!("CMD=\"{call}\"\nbash -c \"$CMD\""),
        format!("bash -c 'sh -c \"{call}\"'"),
        format!("PET_NPROC_PER_NODE=4 bash -c 'torchrun {TRAINER}'"),
        format!("sbatch --gres=gpu:4 --wrap=\"{call}\""),
        format!("sbatch --wrap '{call}' --gres gpu:4"),
        format!("echo bash -c 'torchrun --nproc_per_node 8 {TRAINER}'\n{call}"),
    ] {
        let expected = [Some(4), Some(8), Some(2)];
        assert_eq!(batch(script(&text), &text), expected, "{text}");
    }
    let name = format!("{call} --name 'a b'");
    for word in [&call, &name] {
        let expected = [Some(4), Some(8), Some(2)];
        assert_eq!(
            batch(typed(&["srun", "bash", "-c", word.as_str()]), word),
            expected
        );
    }
}

/// HALOs' Slurm scripts (4831988) hold a double-quoted inline script with escaped quotes inside.
#[test]
fn escapes_in_an_inline_script_are_read_as_the_inner_shell_reads_them() {
    let call = format!("torchrun --nproc_per_node 4 {TRAINER}");
    for text in [
        format!("bash -c \"{call} --name \\\"a b\\\"\""),
        format!(
            "bash -c \"if [ ! -d \\\"\\$DIR\\\" ]; then\n  mkdir \\\"\\$DIR\\\"\nfi\n{call}\n\""
        ),
        format!("bash -c \"A=\\`date\\`; echo \\\"é \\\\\\\" )\\\"; {call}\""),
        format!("bash -c \"bash -c \\\"echo \\\\\\\"x\\\\\\\"; {call}\\\"\""),
        format!(
            "N=4\nbash -c \"echo \\\"go\\\"; {}\"",
            call.replace(" 4", " \\\"$N\\\"")
        ),
    ] {
        let expected = [Some(4), Some(8), Some(2)];
        assert_eq!(batch(script(&text), &text), expected, "{text}");
        // A plan replaces the numbers in place.
        let written = for_two(&script(&text).unwrap());
        let expected = match text.starts_with("N=4") {
            true => text.replace("\\\"$N\\\"", "2"),
            false => text.replace("node 4", "node 2"),
        };
        assert_eq!(written.trim_end(), expected.replace("steps 2", "steps 4"));
    }
    let kept = format!("N=4\nbash -c \"echo \\\"x\\\"; torchrun --nproc_per_node \\$N {TRAINER}\"");
    assert_eq!(batch(script(&kept), &kept)[0], None);
    // Places refer to the whole text.
    let slip = "bash -c \"echo \\\"é\\\"\n  echo \\\"x\\\"; torchrun t.py --per_device_train_batch_size 2.5\"";
    let error = script(slip).unwrap_err();
    let span = error.diagnostics[0].span.unwrap();
    assert_eq!(&slip[span.start..span.end], "2.5");
    assert_eq!((span.line, span.column), (2, 59));
}

#[test]
fn a_plan_is_written_into_the_inline_script() {
    let text =
        format!("#!/bin/bash\nsrun bash -c \"torchrun --nproc_per_node 4 {TRAINER}\" # go\n");
    let written = for_two(&script(&text).unwrap());
    let expected = text
        .replace("node 4", "node 2")
        .replace("steps 2", "steps 4");
    assert_eq!(written, expected);
    // A missing argument is added.
    let short = text.replace(" --gradient_accumulation_steps 2", "");
    let written = for_two(&script(&short).unwrap());
    assert_eq!(written, text.replace("node 4", "node 2"));
}

#[test]
fn variables_between_single_quotes_belong_to_the_inner_shell() {
    let text = format!("N=4\nbash -c 'torchrun --nproc_per_node $N {TRAINER}'");
    assert_eq!(batch(script(&text), &text)[0], None);
    // The script does not export `N`.
    let kept = format!("N=4\nbash -c \"torchrun --nproc_per_node \\$N {TRAINER}\"");
    assert_eq!(batch(script(&kept), &kept)[0], None);
    let inner = format!("bash -c 'N=4; torchrun --nproc_per_node $N {TRAINER}'");
    assert_eq!(batch(script(&inner), &inner)[0], None);
}

#[test]
fn an_inline_script_with_unsupported_quoting_is_refused() {
    let call = format!("torchrun --nproc_per_node 4 {TRAINER}");
    for text in [
        format!("bash -c 'cd x; '\"{call}\""),
        format!("bash -c \"echo \"x\"; {call}\""),
        format!("bash -c $'{call}'"),
        // Another command would be taken for the training.
        format!("python prepare.py --seed 1\nbash -c 'cd x; '\"{call}\""),
    ] {
        let error = script(&text).unwrap_err();
        let problem = &error.diagnostics[0];
        assert_eq!(problem.rule, "unknown-dialect", "{text}");
        assert!(problem.message.contains("this inline script"), "{text}");
    }
    let both = format!("{call} --name 'a b' --x \"$HOME\"");
    let error = typed(&["bash", "-c", &both]).unwrap_err();
    assert!(error.diagnostics[0].message.contains("this inline script"));
    // An inline script that starts no training is ignored.
    let text = format!("bash -c \"echo \"x\"\"\n{call}");
    assert_eq!(batch(script(&text), &text)[0], Some(4));
}

#[test]
fn a_hydra_program_in_an_inline_script_is_read() {
    let Some(root) = crate::recipe::corpus::root() else {
        return;
    };
    let program = root.join("ContextualAI__HALOs/4831988636/launch.py");
    let program = program.display();
    let call = |overrides: &str| {
        format!(
            "BETA=$1\nLR=$2\nsrun --nodes=1 bash -c \"\nexport CKPT=o/dpo-${{BETA}}\n\
             accelerate launch --num_processes 4 --machine_rank \\$SLURM_PROCID \\\n  {program} \
             loss=dpo model=llama train_datasets=[ultrabin] test_datasets=[ultrabin] \
             exp_name=dpo-${{BETA}}-${{LR}} ++lr=${{LR}} ++loss.beta=${{BETA}} \\\n  \
             ++model.batch_size=32 ++model.gradient_accumulation_steps=1 {overrides}\n\n\
             python -m train.sample \\$CKPT --gpu_count 2\n\"\n"
        )
    };
    let text = call("");
    let recipe = script(&text).unwrap_or_else(|error| panic!("{error}"));
    let batch = &recipe.spec.batch;
    assert_eq!((batch.global, batch.gpus), (Some(32), Some(4)), "{batch:?}");
    let warned = recipe.diagnostics.iter();
    let warned = warned.filter(|d| d.message.contains("is unresolved"));
    let warned: Vec<&str> = warned.map(|d| d.message.as_str()).collect();
    assert_eq!(warned.len(), 2, "{warned:?}");
    for unresolved in ["++model.batch_size=$SIZE", "loss=$LOSS"] {
        let error = script(&call(unresolved)).unwrap_err();
        let message = &error.diagnostics[0].message;
        assert!(message.contains("is unresolved"), "{message}");
    }
}
