//! What starts a launcher: `uv run --with trl torchrun …`, `conda run -n trl accelerate launch …`. Values
//! of its own options may be called like a launcher.
//!
//! Sources: uv 0.9 `uv run --help`; conda 25 `conda run --help`; Slurm 25.05 `srun(1)`.

use crate::recipe::command::words::Word;

/// Programs, and those of their options whose value is a word of its own.
const STARTERS: [(&[&str], &[&str]); 3] = [
    (
        &["uv", "uvx"],
        &[
            "--with",
            "-w",
            "--with-editable",
            "--with-requirements",
            "--from",
            "--extra",
            "--no-extra",
            "--group",
            "--no-group",
            "--only-group",
            "--package",
            "--env-file",
            "--python",
            "-p",
            "--python-platform",
            "--index",
            "--default-index",
            "--index-url",
            "-i",
            "--extra-index-url",
            "--find-links",
            "-f",
            "--directory",
            "--project",
            "--cache-dir",
            "--config-file",
            "--refresh-package",
            "--upgrade-package",
            "-P",
            "--reinstall-package",
            "--no-build-package",
            "--no-binary-package",
            "--no-build-isolation-package",
            "--config-setting",
            "-C",
        ],
    ),
    (
        &["conda", "mamba", "micromamba"],
        &["-n", "--name", "-p", "--prefix", "--cwd"],
    ),
    (
        &["srun", "sbatch", "salloc"],
        &[
            "-J",
            "--job-name",
            "-A",
            "--account",
            "--comment",
            "-p",
            "--partition",
            "-q",
            "--qos",
            "-D",
            "--chdir",
        ],
    ),
];

/// Whether the word at a position is the value of an option of what starts the launcher.
pub(super) fn is_value(words: &[Word], at: usize) -> bool {
    let Some((option, before)) = words[..at].split_last() else {
        return false;
    };
    before.iter().any(|word| {
        let name = word.text.rsplit('/').next().unwrap_or_default();
        let starter = STARTERS.iter().find(|(names, _)| names.contains(&name));
        starter.is_some_and(|(_, valued)| valued.contains(&option.text.as_str()))
    })
}
