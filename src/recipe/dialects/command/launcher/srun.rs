//! `srun` before a launcher: Evenkeel starts the ranks on this machine itself, so only its counts matter.
//!
//! Source: Slurm 25.05 `srun(1)`.

use crate::recipe::syntax::shell::word::Word;

/// Options that count machines or tasks. One of each is what Evenkeel starts instead.
const COUNTS: [&str; 5] = ["-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node"];

/// Options with a value that choose the allocation, its devices or the place of the output.
const VALUED: &[&str] = &[
    "-J",
    "--job-name",
    "-A",
    "--account",
    "-p",
    "--partition",
    "-q",
    "--qos",
    "-t",
    "--time",
    "-o",
    "--output",
    "-e",
    "--error",
    "-w",
    "--nodelist",
    "-c",
    "--cpus-per-task",
    "-G",
    "--gpus",
    "--gpus-per-node",
    "--gpus-per-task",
    "--gres",
    "--mem",
    "--mpi",
    "--jobid",
    "--cpu-bind",
    "--gpu-bind",
    "--comment",
];

const SWITCHES: &[&str] = &[
    "-l",
    "--label",
    "-u",
    "--unbuffered",
    "-K",
    "--kill-on-bad-exit",
    "-v",
    "--verbose",
    "-Q",
    "--quiet",
    "-O",
    "--overcommit",
    "--overlap",
    "--exact",
    "--exclusive",
];

/// An option of `srun` that evenkeel refuses.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::recipe::dialects::command) enum Refused {
    /// It starts more than one launcher.
    Count(String),
    /// It has no counterpart.
    Unknown(String),
}

/// The words after `srun` and its options. Words without `srun` stay.
pub(in crate::recipe::dialects::command) fn without(words: &[Word]) -> Result<&[Word], Refused> {
    let Some((first, mut rest)) = words.split_first() else {
        return Ok(words);
    };
    if first.text.rsplit('/').next() != Some("srun") {
        return Ok(words);
    }
    while let Some((word, after)) = rest.split_first() {
        let text = word.text.as_str();
        if !text.starts_with('-') {
            break;
        }
        rest = after;
        let long = text.starts_with("--");
        let (name, tied) = match (long, text.split_once('=')) {
            (true, Some((name, value))) => (name, Some(value)),
            (false, _) if text.len() > 2 && text.is_ascii() => (&text[..2], Some(&text[2..])),
            _ => (text, None),
        };
        if SWITCHES.contains(&name) {
            continue;
        }
        let counts = COUNTS.contains(&name);
        if !counts && !VALUED.contains(&name) {
            return Err(Refused::Unknown(text.to_owned()));
        }
        let value = match (tied, rest.split_first()) {
            (Some(value), _) => value,
            (None, Some((value, after))) => {
                rest = after;
                &value.text
            }
            (None, None) => return Err(Refused::Unknown(text.to_owned())),
        };
        if counts && value != "1" {
            return Err(Refused::Count(format!("{name} {value}")));
        }
    }
    Ok(rest)
}
