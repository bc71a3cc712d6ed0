//! The directory of a run and its run lock: chooses, checks, creates and locks the directory. A
//! refused launch leaves no files behind.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::{LaunchError, RunDir};
use crate::data;
use crate::lifecycle::files;
use crate::recipe::Spec;
use crate::recipe::schema::run_name;
use crate::util::durable::{self, FileError, Lock};

/// Default parent of run directories; the command line and the recipe override it.
pub const RUNS: &str = "runs";

/// The command line's choice of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunOptions<'a> {
    /// The run's directory (`--out`).
    pub out: Option<&'a Path>,
    /// The run's name (`--name`). Without `out`, the directory is `runs/NAME`.
    pub name: Option<&'a str>,
    /// Resume the run instead of starting one.
    pub resume: bool,
}

impl RunOptions<'_> {
    /// The only directory that the options allow; `None`: the recipe's name or output, numbered.
    fn directory(&self) -> Option<PathBuf> {
        let out = self.out.map(Path::to_path_buf);
        out.or_else(|| Some(Path::new(RUNS).join(self.name?)))
    }
}

/// The run's directory: `out`, else `runs/NAME` of the given name, else the recipe's `output`, else
/// `runs/NAME` of the recipe's name. Only the last two are numbered: a resume picks the newest run of
/// the recipe's name, a start the first unused directory. Creates no files.
pub fn choose(options: &RunOptions<'_>, spec: &Spec) -> Result<RunDir, LaunchError> {
    let resume = options.resume;
    let nothing = |path: &Path| {
        LaunchError::usage(format!(
            "{}: no run to resume; `evenkeel status` lists the runs; without --resume a new \
             run starts",
            path.display()
        ))
    };
    if let Some(name) = options.name
        && let Some(flaw) = run_name::flaw(name)
    {
        return Err(LaunchError::usage(format!(
            "`--name {name}`: {flaw}; a name has lower-case letters, digits and `-`, as `{}`",
            run_name::label(name)
        )));
    }
    if let Some(directory) = options.directory() {
        let run_dir = RunDir::at(directory);
        if resume && !run_dir.contains_run() {
            return Err(nothing(run_dir.path()));
        }
        if !resume && run_dir.contains_run() {
            let flag = if options.out.is_some() {
                "--out"
            } else {
                "--name"
            };
            return Err(LaunchError::usage(format!(
                "{} already contains a run; --resume continues it, another {flag} starts a new \
                     one",
                run_dir.path().display()
            )));
        }
        return Ok(run_dir);
    }
    // With an external trainer, the recipe's `output` belongs to the trainer.
    let output = spec.output.as_ref().filter(|_| !spec.trainer.is_external());
    let base = match output {
        Some(output) => PathBuf::from(output),
        None => Path::new(RUNS).join(&spec.name),
    };
    let newest = numbers(&base, &spec.name)?.into_iter().max();
    if resume {
        let newest = newest.ok_or_else(|| nothing(&base))?;
        return Ok(numbered(&base, newest));
    }
    for number in newest.unwrap_or(0) + 1.. {
        let run_dir = numbered(&base, number);
        // A number may belong to another recipe's run with such a name, or to a launch that still
        // prepares its run.
        if !run_dir.contains_run() && !run_dir.in_use()? {
            return Ok(run_dir);
        }
    }
    Ok(RunDir::at(&base))
}

/// The name of the chosen run. A resume by `--out` or `--name` keeps the name that the run has; a
/// `--name` that is neither that name nor the directory's is refused.
pub fn name(
    run_dir: &RunDir,
    options: &RunOptions<'_>,
    spec: &Spec,
) -> Result<String, LaunchError> {
    if !options.resume || options.directory().is_none() {
        return Ok(options.name.unwrap_or(&spec.name).to_owned());
    }
    let name = run_dir.run()?.spec.name;
    let directory = run_dir.path().file_name();
    match options.name {
        Some(asked) if asked != name && directory != Some(asked.as_ref()) => {
            Err(LaunchError::usage(format!(
                "{} contains the run `{name}`, not `{asked}`; remove --name, or set another --out",
                run_dir.path().display()
            )))
        }
        _ => Ok(name),
    }
}

/// Locks the directory that [`choose`] returns for the same arguments. Another launch may have
/// taken the numbered directory of a new run meanwhile; then the next number is used.
pub fn acquire(
    chosen: RunDir,
    options: &RunOptions<'_>,
    spec: &Spec,
) -> Result<RunLock, LaunchError> {
    let resume = options.resume;
    let numbered = options.directory().is_none();
    let mut run_dir = chosen;
    loop {
        match RunLock::take(run_dir) {
            Ok(run_lock) if resume || !run_lock.run_dir.contains_run() => return Ok(run_lock),
            // Another launch used the directory in between and has ended.
            Ok(_) => {}
            Err(LaunchError::File(FileError::HeldBy { .. })) if numbered && !resume => {}
            Err(error) => return Err(error),
        }
        run_dir = choose(options, spec)?;
    }
}

/// The directory of that number: the base itself, then `BASE-2` and so on.
fn numbered(base: &Path, number: u64) -> RunDir {
    match (number, base.file_name()) {
        (2.., Some(name)) => {
            let mut name = name.to_owned();
            name.push(format!("-{number}"));
            RunDir::at(base.with_file_name(name))
        }
        (2.., None) => RunDir::at(base.join(number.to_string())),
        _ => RunDir::at(base),
    }
}

/// The numbers of existing runs of the recipe `name`, with gaps where runs were deleted. A run with
/// an unreadable name counts.
fn numbers(base: &Path, name: &str) -> Result<Vec<u64>, LaunchError> {
    let mut found = Vec::new();
    if RunDir::at(base).contains_run() {
        found.push(1);
    }
    let Some(stem) = base.file_name().and_then(|stem| stem.to_str()) else {
        return Ok(found);
    };
    let parent = match base.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let entries = match fs::read_dir(parent) {
        Ok(entries) => Some(entries),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(unusable(parent, error.to_string())),
    };
    for entry in entries.into_iter().flatten() {
        let entry = entry.map_err(|error| unusable(parent, error.to_string()))?;
        let file = entry.file_name();
        let number = file
            .to_str()
            .and_then(|file| file.strip_prefix(stem)?.strip_prefix('-')?.parse().ok())
            .filter(|number| *number >= 2);
        let Some(number) = number else { continue };
        let run_dir = numbered(base, number);
        // A launch never chooses `run-02`.
        let chosen = run_dir.path().file_name() == Some(file.as_os_str());
        if chosen && run_dir.contains_run() && run_dir.run().map_or(true, |run| run.name == name) {
            found.push(number);
        }
    }
    Ok(found)
}

/// The run lock held by this process. An unused lock deletes the files created for it when dropped.
#[derive(Debug)]
pub struct RunLock {
    run_dir: RunDir,
    /// Files that this launch created.
    created: Vec<PathBuf>,
    /// Directories that this launch created, the innermost first.
    directories: Vec<PathBuf>,
    /// `None` until the lock is acquired.
    lock: Option<Lock>,
    /// Number of the last request made before this launch.
    request: u64,
}

impl RunLock {
    /// Creates the directory if it is missing, and locks it. A directory with unrelated files is
    /// refused, because a run could overwrite files of the same names.
    pub fn take(run_dir: RunDir) -> Result<RunLock, LaunchError> {
        let path = run_dir.path();
        if !run_dir.contains_run()
            && let Some(entry) = unrelated_entry(path)?
        {
            return Err(unusable(
                path,
                format!("it contains files that are not part of a run ({entry})"),
            ));
        }
        let created = [Lock::file(path), path.join(files::DATA)];
        let mut run_lock = RunLock {
            created: created.into_iter().filter(|path| !path.exists()).collect(),
            directories: path
                .ancestors()
                .take_while(|ancestor| *ancestor != Path::new("") && !ancestor.exists())
                .map(Path::to_path_buf)
                .collect(),
            run_dir,
            lock: None,
            request: 0,
        };
        let path = run_lock.run_dir.path();
        fs::create_dir_all(path).map_err(|error| unusable(path, error.to_string()))?;
        run_lock.lock = Some(Lock::acquire(path)?);
        // An unreadable request counts as none; the next one replaces it.
        let desired = run_lock.run_dir.desired().ok().flatten();
        run_lock.request = desired.map_or(0, |desired| desired.request);
        Ok(run_lock)
    }

    /// Number of the last request to an earlier launcher. Later requests are answered by this
    /// launcher, even while it still prepares.
    pub fn earlier_request(&self) -> u64 {
        self.request
    }

    pub fn run_dir(&self) -> &RunDir {
        &self.run_dir
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        if self.run_dir.contains_run() {
            return;
        }
        // A directory with files of others cannot be removed and stays.
        if self.lock.is_some() {
            for path in &self.created {
                let _ = if path.is_dir() {
                    fs::remove_dir_all(path)
                } else {
                    fs::remove_file(path)
                };
            }
        }
        for directory in &self.directories {
            let _ = fs::remove_dir(directory);
        }
    }
}

fn unusable(path: &Path, problem: String) -> LaunchError {
    LaunchError::Directory {
        path: path.to_path_buf(),
        problem,
    }
}

/// An entry of the directory that no launch created.
fn unrelated_entry(path: &Path) -> Result<Option<String>, LaunchError> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unusable(path, error.to_string())),
    };
    for entry in entries {
        let entry = entry.map_err(|error| unusable(path, error.to_string()))?;
        let ours = if entry.file_name() == files::DATA {
            data::Manifest::read(&entry.path()).is_ok()
        } else if durable::is_unfinished(&entry.path()) || is_starting(&entry.path()) {
            // Left by a launch that was killed while it wrote a file, or by an agent that closed earlier generations
            // before any of them had prepared the run.
            true
        } else {
            let data = path.join(files::DATA);
            [Lock::file(path), data::draft(&data), data::cache(&data)].contains(&entry.path())
        };
        if !ours {
            return Ok(Some(entry.file_name().display().to_string()));
        }
    }
    Ok(None)
}

/// Whether a directory is that of a generation that starts, and has nothing else yet.
fn is_starting(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let is_generation = name.and_then(files::parse_generation).is_some();
    let is_announcement = |entry: fs::DirEntry| {
        entry.file_name() == files::STARTING || durable::is_unfinished(&entry.path())
    };
    is_generation && fs::read_dir(path).is_ok_and(|entries| entries.flatten().all(is_announcement))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::testing::Launched;

    fn refused(path: &Path) -> String {
        RunLock::take(RunDir::at(path)).unwrap_err().to_string()
    }

    #[test]
    fn an_unused_run_lock_leaves_no_files() {
        let place = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(place.path().join("runs/one"));
        let run_lock = RunLock::take(run_dir.clone()).unwrap();
        assert!(run_dir.in_use().unwrap());
        fs::create_dir_all(run_dir.path().join("data/train")).unwrap();
        drop(run_lock);
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn files_that_existed_before_the_run_lock_stay() {
        let place = tempfile::tempdir().unwrap();
        fs::write(Lock::file(place.path()), "").unwrap();
        drop(RunLock::take(RunDir::at(place.path())).unwrap());
        assert!(Lock::file(place.path()).exists());
    }

    #[test]
    fn a_locked_run_stays_after_the_lock() {
        let place = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(place.path().join("run"));
        let run_lock = RunLock::take(run_dir.clone()).unwrap();
        fs::write(run_dir.path().join(files::RUN), "{}").unwrap();
        drop(run_lock);
        assert!(run_dir.contains_run() && !run_dir.in_use().unwrap());
    }

    #[test]
    fn the_loser_of_a_race_removes_no_files_of_the_winner() {
        let place = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(place.path().join("run"));
        let run_lock = RunLock::take(run_dir.clone()).unwrap();
        let message = refused(run_dir.path());
        assert!(message.contains("in use by process"), "{message}");
        assert!(run_dir.in_use().unwrap());
        drop(run_lock);
    }

    #[test]
    fn an_unusable_run_directory_is_refused_with_a_remedy() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        fs::write(&file, "mine").unwrap();
        for path in [file.clone(), file.join("below"), "/dev/null".into()] {
            let message = refused(&path);
            assert!(message.contains("Not a directory"), "{message}");
            assert!(
                message.ends_with("set another directory with --out"),
                "{message}"
            );
        }
        assert_eq!(fs::read(&file).unwrap(), b"mine");
    }

    /// The first generation of a job may end before it has prepared the run.
    #[test]
    fn a_run_may_begin_in_a_later_generation() {
        let place = tempfile::tempdir().unwrap();
        let generation = place.path().join(files::generation(2));
        fs::create_dir(&generation).unwrap();
        fs::write(generation.join(files::STARTING), "{}").unwrap();
        drop(RunLock::take(RunDir::at(place.path().to_owned())).unwrap());
        fs::write(generation.join(files::RECORD), "{}").unwrap();
        let message = refused(place.path());
        assert!(message.contains("not part of a run (gen-2)"), "{message}");
    }

    #[test]
    fn a_directory_with_unrelated_files_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let mine = place.path().join("data");
        fs::create_dir(&mine).unwrap();
        fs::write(mine.join("train.jsonl"), "mine").unwrap();
        let message = refused(place.path());
        assert!(
            message.contains("files that are not part of a run (data)"),
            "{message}"
        );
        assert_eq!(fs::read(mine.join("train.jsonl")).unwrap(), b"mine");
        assert!(!Lock::file(place.path()).exists());
    }

    #[test]
    fn run_directories_are_numbered_and_the_newest_is_resumed() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().join("run");
        let spec = Spec {
            output: Some(base.display().to_string()),
            ..Spec::default()
        };
        let at = |out, resume| {
            let options = RunOptions {
                out,
                name: None,
                resume,
            };
            choose(&options, &spec)
        };
        let chosen = |resume| at(None, resume).map(|run_dir| run_dir.path().to_path_buf());
        assert_eq!(chosen(false).unwrap(), base);
        assert!(
            chosen(true)
                .unwrap_err()
                .to_string()
                .contains("no run to resume")
        );
        for name in ["run", "run-2"] {
            fs::create_dir(place.path().join(name)).unwrap();
            fs::write(place.path().join(name).join(files::RUN), "{}").unwrap();
        }
        assert_eq!(chosen(false).unwrap(), place.path().join("run-3"));
        assert_eq!(chosen(true).unwrap(), place.path().join("run-2"));
        assert!(at(Some(&base), false).is_err());
        assert!(at(Some(&base), true).is_ok());

        fs::remove_dir_all(&base).unwrap();
        assert_eq!(chosen(true).unwrap(), place.path().join("run-2"));
        assert_eq!(chosen(false).unwrap(), place.path().join("run-3"));
    }

    #[test]
    fn concurrent_launches_get_separate_directories() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().join("run");
        let spec = Spec {
            output: Some(base.display().to_string()),
            ..Spec::default()
        };
        let options = RunOptions::default();
        let choose = || choose(&options, &spec).unwrap();
        // All four choose before the first one locks.
        let chosen = [choose(), choose(), choose(), choose()];
        let run_locks = chosen.map(|run_dir| acquire(run_dir, &options, &spec).unwrap());
        let names = run_locks
            .each_ref()
            .map(|run_lock| run_lock.run_dir().path().to_owned());
        let expected = ["run", "run-2", "run-3", "run-4"].map(|name| place.path().join(name));
        assert_eq!(names, expected);
        assert_eq!(choose().path(), place.path().join("run-5"));

        // A run that finished in between is not overwritten.
        let chosen = RunDir::at(&base);
        fs::write(base.join(files::RUN), "{}").unwrap();
        drop(run_locks);
        let next = acquire(chosen.clone(), &options, &spec).unwrap();
        assert_eq!(next.run_dir().path(), place.path().join("run-2"));
        let out = RunOptions {
            out: Some(&base),
            ..options
        };
        let message = acquire(chosen, &out, &spec).unwrap_err().to_string();
        assert!(message.contains("already contains a run"), "{message}");
    }

    #[test]
    fn a_run_of_another_recipe_is_not_resumed_by_its_number() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().join("run");
        let launched = Launched::at(
            place.path(),
            "batch: {global: 12, per_device_batch_size: 2}",
            &[],
        );
        fs::rename(launched.run_dir.path(), place.path().join("run-2")).unwrap();
        let chosen = |name: &str, resume| {
            let spec = Spec {
                name: name.to_owned(),
                output: Some(base.display().to_string()),
                ..Spec::default()
            };
            let options = RunOptions {
                resume,
                ..RunOptions::default()
            };
            choose(&options, &spec).map(|run_dir| run_dir.path().to_path_buf())
        };
        assert_eq!(chosen("run", true).unwrap(), place.path().join("run-2"));
        assert!(chosen("another", true).is_err());
        assert_eq!(chosen("another", false).unwrap(), base);
    }

    #[test]
    fn a_name_selects_one_directory_under_runs() {
        let spec = Spec {
            name: "recipe".to_owned(),
            output: Some("elsewhere".to_owned()),
            ..Spec::default()
        };
        let named = |name| RunOptions {
            name: Some(name),
            ..RunOptions::default()
        };
        let run_dir = choose(&named("first"), &spec).unwrap();
        assert_eq!(run_dir.path(), Path::new("runs/first"));
        assert_eq!(name(&run_dir, &named("first"), &spec).unwrap(), "first");
        let message = choose(&named("../first"), &spec).unwrap_err().to_string();
        assert_eq!(
            message,
            "`--name ../first`: it contains '.'; a name has lower-case letters, digits and `-`, as `first`"
        );
        let resumed = RunOptions {
            resume: true,
            ..named("no-such-run")
        };
        let message = choose(&resumed, &spec).unwrap_err().to_string();
        assert!(
            message.starts_with("runs/no-such-run: no run to resume"),
            "{message}"
        );
    }

    #[test]
    fn a_resumed_run_keeps_its_name() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(
            place.path(),
            "batch: {global: 12, per_device_batch_size: 2}",
            &[],
        );
        let spec = Spec {
            name: "recipe".to_owned(),
            ..Spec::default()
        };
        let moved = place.path().join("moved");
        fs::rename(launched.run_dir.path(), &moved).unwrap();
        let resumed = |asked| {
            let options = RunOptions {
                out: Some(&moved),
                name: asked,
                resume: true,
            };
            name(&choose(&options, &spec).unwrap(), &options, &spec).map_err(|e| e.to_string())
        };
        for asked in [None, Some("run"), Some("moved")] {
            assert_eq!(resumed(asked), Ok("run".to_owned()));
        }
        let message = resumed(Some("another")).unwrap_err();
        assert!(
            message.contains("contains the run `run`, not `another`"),
            "{message}"
        );
    }
}
