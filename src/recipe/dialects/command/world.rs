//! The number of processes where the launcher's options do not state it: Slurm and MPI start one process for each task,
//! and ms-swift and LLaMA-Factory take torchrun's options from variables.
//!
//! Sources: Slurm `srun(1)`; Open MPI `mpirun(1)`; ms-swift 01a14c1 `swift/cli/main.py` (`get_torchrun_args`);
//! LLaMA-Factory 0f53217 `src/llamafactory/cli.py` (`main`; one device without `FORCE_TORCHRUN` starts one process).

use super::launcher::{Launch, Launcher};
use super::slurm;
use crate::recipe::dialects::programs;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::shell::Line;
use crate::recipe::syntax::shell::word::{Word, values_of};
use crate::recipe::syntax::source::{FileId, Span};

/// The processes that a command starts beside its launcher's options. One process may use all GPUs of its machine
/// without a launcher, so that a single task states nothing.
pub(super) fn of(
    launch: &Launch,
    line: &Line,
    lines: &[Line],
    (text, file): (&str, FileId),
) -> Option<Given<u64>> {
    if launch.launcher != Launcher::Python {
        return None;
    }
    let program = launch.program.as_ref()?;
    if programs::takes_torchruns_variables(&program.text) {
        let by_devices = || by_devices(&program.text, line, lines);
        return by_variables(line, lines).or_else(by_devices);
    }
    let before = line.words.iter().position(|word| word.span == program.span);
    let before = &line.words[..before?];
    let world = by_slurm(before, text, file).or_else(|| by_mpi(before))?;
    (world.value > 1).then_some(world)
}

/// `srun`'s tasks, by its own options over those of the script's `#SBATCH` lines.
fn by_slurm(before: &[Word], text: &str, file: FileId) -> Option<Given<u64>> {
    let at = before.iter().position(|word| word.file_name() == "srun")?;
    let own = |names| count(&before[at + 1..], names);
    let all = own(&["--ntasks", "-n"]);
    let nodes = own(&["--nodes", "-N"]);
    let each = own(&["--ntasks-per-node"]);
    let stated = all.is_some() || nodes.is_some() || each.is_some();
    if [&all, &nodes, &each]
        .iter()
        .any(|option| matches!(option, Some(Err(()))))
    {
        return None;
    }
    let number = |option: Option<Result<(u64, Span), ()>>| option.and_then(Result::ok);
    let (all, nodes, each) = (number(all), number(nodes), number(each));
    if let Some((tasks, at)) = all {
        return Some(Given::new("--ntasks", tasks, at));
    }
    let directives = slurm::tasks(text, file);
    if !stated && let Some((tasks, at)) = directives.all {
        return Some(Given::new("--ntasks", tasks, at));
    }
    let nodes = nodes.or(directives.nodes).map_or(1, |(nodes, _)| nodes);
    let (each, at) = each.or(directives.each)?;
    Some(Given::new(
        "--ntasks-per-node",
        nodes.saturating_mul(each),
        at,
    ))
}

fn by_mpi(before: &[Word]) -> Option<Given<u64>> {
    const LAUNCHERS: [&str; 4] = ["mpirun", "mpiexec", "mpiexec.hydra", "prterun"];
    let at = before
        .iter()
        .position(|word| LAUNCHERS.contains(&word.file_name()))?;
    let found = count(&before[at + 1..], &["-np", "--np", "-n", "--n", "-c"])?;
    let (processes, at) = found.ok()?;
    Some(Given::new("-np", processes, at))
}

/// The value of the last option with one of the names: `-n 8`, `-n8`, `--ntasks=8`. An error is a value that only the
/// shell knows.
fn count(words: &[Word], names: &[&str]) -> Option<Result<(u64, Span), ()>> {
    let value = |(at, word): (usize, &Word)| {
        let name = names.iter().filter(|name| word.text.starts_with(**name));
        let name = name.max_by_key(|name| name.len())?;
        let rest = &word.text[name.len()..];
        let is_short = !name.starts_with("--") && name.len() == 2;
        let value = match rest.strip_prefix('=') {
            _ if rest.is_empty() => words.get(at + 1)?.clone(),
            Some(_) => word.after(name.len() + 1),
            None if is_short && rest.starts_with(|c: char| c.is_ascii_digit()) => {
                word.after(name.len())
            }
            None => return None,
        };
        Some(
            value
                .text
                .parse()
                .map(|number| (number, value.span))
                .map_err(|_| ()),
        )
    };
    words.iter().enumerate().rev().find_map(value)
}

/// `NPROC_PER_NODE` and `NNODES`, before the command or exported once by the script.
fn by_variables(line: &Line, lines: &[Line]) -> Option<Given<u64>> {
    let number = |name: &str| -> Result<Option<(u64, Span)>, ()> {
        let Some(value) = variable(name, line, lines)? else {
            return Ok(None);
        };
        let number = value.text.parse().map_err(|_| ())?;
        Ok(Some((number, value.span)))
    };
    let (each, at) = number("NPROC_PER_NODE").ok()??;
    let nodes = number("NNODES").ok()?.map_or(1, |(nodes, _)| nodes);
    Some(Given::new("NPROC_PER_NODE", nodes.saturating_mul(each), at))
}

/// The devices that `CUDA_VISIBLE_DEVICES` lists, on `NNODES` machines.
fn by_devices(program: &str, line: &Line, lines: &[Line]) -> Option<Given<u64>> {
    let stated = |name| variable(name, line, lines);
    if !programs::takes_visible_devices(program) || stated("NPROC_PER_NODE") != Ok(None) {
        return None;
    }
    let devices = stated("CUDA_VISIBLE_DEVICES").ok()??;
    let all_known = |text: &str| text.split(',').all(|device| device.parse::<u32>().is_ok());
    let each = Some(devices.text.as_str())
        .filter(|text| all_known(text))?
        .split(',')
        .count();
    let nodes = match stated("NNODES").ok()? {
        Some(nodes) => nodes.text.parse().ok()?,
        None => 1,
    };
    let all = u64::try_from(each).ok()?.saturating_mul(nodes);
    Some(Given::new("CUDA_VISIBLE_DEVICES", all, devices.span))
}

/// The value of a variable in a command's environment. An error: it depends on what other commands do.
fn variable(name: &str, line: &Line, lines: &[Line]) -> Result<Option<Word>, ()> {
    let assigned = |line: &Line| {
        let mut found = line.words.iter().filter_map(Word::assignment);
        found
            .find(|assigned| assigned.name == name)
            .map(|found| found.value)
    };
    if let Some(value) = assigned(line) {
        return Ok(Some(value));
    }
    let mentions = |other: &&Line| other.words.iter().any(|word| word.text.contains(name));
    let mut others = lines
        .iter()
        .filter(|other| !std::ptr::eq(*other, line))
        .filter(mentions);
    let Some(other) = others.next() else {
        return Ok(None);
    };
    let exports = other.certain && other.words[0].text == "export" && others.next().is_none();
    match assigned(other).filter(|_| exports) {
        Some(value) => Ok(Some(value)),
        None => Err(()),
    }
}

/// The processes for which a script computed the accumulation of its training: the variables for GPUs, processes and
/// nodes by which it divided (`$((BATCH / MICRO / GPUS))`).
pub(super) fn computed_for(arguments: &[Word]) -> Option<Given<u64>> {
    let value = values_of(arguments, "gradient_accumulation_steps").next_back()?;
    let counts = |name: &str| {
        let name = name.to_uppercase();
        let any = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        any(&[
            "GPU",
            "NPROC",
            "WORLD",
            "PROCESSES",
            "DEVICES",
            "NODES",
            "TASKS",
        ]) && !any(&["PER_GPU", "PER_DEVICE", "BATCH", "BSZ", "MICRO"])
    };
    let divisors: Vec<_> = value
        .divisors
        .iter()
        .filter(|(name, _)| counts(name))
        .collect();
    let names: Vec<&str> = divisors.iter().map(|(name, _)| name.as_str()).collect();
    let processes = divisors.iter().try_fold(1_u64, |product, (_, number)| {
        product.checked_mul(u64::try_from(*number).ok()?)
    })?;
    (!names.is_empty()).then(|| Given::new(names.join(" × "), processes, value.span))
}
