//! Launchers that are scripts among upstream examples: `python xla_spawn.py --num_cores 8 run_clm.py …`.
//!
//! Sources: transformers `examples/pytorch/xla_spawn.py`; optimum-habana `examples/gaudi_spawn.py`.

use super::known::SPAWN;
use super::options::{Given, options, value};
use super::{Launched, Launcher, number, program, world};
use crate::recipe::syntax::shell::word::Word;

/// The scripts, and their options for the number of processes on all machines.
const SCRIPTS: [(&str, &str); 2] = [
    ("gaudi_spawn.py", "world_size"),
    ("xla_spawn.py", "num_cores"),
];

/// Parses a call of one of the scripts. The number of processes stays unset if it is missing, or if a host
/// file may set another one.
pub(super) fn spawn(words: &[Word]) -> Option<Launched<'_>> {
    let (launcher, words) = words.split_first()?;
    let name = launcher.text.rsplit('/').next()?;
    let (_, count) = SCRIPTS.iter().find(|(script, _)| *script == name)?;
    let Given {
        options,
        unresolved,
        rest,
        ..
    } = options(words, &SPAWN);
    let hosts = value(&options, &["hostfile"]).is_some();
    let number = number(value(&options, &[count])).filter(|_| unresolved.is_none() && !hosts);
    let world = number.map(|(processes, at)| world(&format!("--{count}"), processes, at));
    Some(Launched {
        launcher: Launcher::Spawn,
        options,
        room: launcher.span.end,
        world,
        many: true,
        alone: None,
        ..program(rest)
    })
}

#[cfg(test)]
mod tests {
    use crate::recipe::tests::read_command;

    #[test]
    fn a_spawn_script_sets_the_number_of_processes() {
        for (launcher, expected) in [
            ("gaudi_spawn.py --world_size 8 --use_mpi", Some(8)),
            ("../gaudi_spawn.py --use_deepspeed --world-size=2", Some(2)),
            ("examples/pytorch/xla_spawn.py --num_cores 8", Some(8)),
            ("gaudi_spawn.py --use_mpi", None),
            (
                "gaudi_spawn.py --hostfile hosts --world_size 8 --use_deepspeed",
                None,
            ),
        ] {
            let program = "run_clm.py --per_device_train_batch_size 4 --output_dir o";
            let recipe = read_command(&format!("python {launcher} {program}")).unwrap();
            let batch = &recipe.spec.batch;
            let numbers = (batch.per_device_batch_size, batch.gpus);
            assert_eq!(numbers, (Some(4), expected), "{launcher}");
            assert_eq!(recipe.diagnostics, [], "{launcher}");
        }
    }
}
