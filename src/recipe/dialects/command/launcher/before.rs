//! Programs that start a launcher: `uv run --with trl torchrun …`, `conda run -n trl accelerate launch …`.
//! Values of their options may equal a launcher's name.
//!
//! Sources: uv 0.9 `uv run --help`; conda 25 `conda run --help`; Slurm 25.05 `srun(1)`.

use crate::recipe::syntax::shell::word::Word;
use crate::recipe::syntax::words::Words;

/// The programs, and their options with a value as a separate word.
const STARTERS: [(Words, Words); 3] = [
    (
        Words("uv uvx"),
        Words(
            "--with -w --with-editable --with-requirements --from --extra --no-extra --group --no-group \
             --only-group --package --env-file --python -p --python-platform --index --default-index \
             --index-url -i --extra-index-url --find-links -f --directory --project --cache-dir \
             --config-file --refresh-package --upgrade-package -P --reinstall-package --no-build-package \
             --no-binary-package --no-build-isolation-package --config-setting -C",
        ),
    ),
    (
        Words("conda mamba micromamba"),
        Words("-n --name -p --prefix --cwd"),
    ),
    (
        Words("srun sbatch salloc"),
        Words("-J --job-name -A --account --comment -p --partition -q --qos -D --chdir"),
    ),
];

/// The positions of words that are not option values of a program before the launcher.
pub(crate) fn value_sources(words: &[Word]) -> impl Iterator<Item = usize> {
    let mut valued = Words("");
    (0..words.len()).filter(move |at| {
        let option = at.checked_sub(1).map(|at| words[at].text.as_str());
        if option.is_some_and(|option| valued.has(option)) {
            return false;
        }
        let name = words[*at].text.rsplit('/').next().unwrap_or_default();
        let starter = STARTERS.iter().find(|(names, _)| names.has(name));
        valued = starter.map_or(valued, |(_, options)| *options);
        true
    })
}
