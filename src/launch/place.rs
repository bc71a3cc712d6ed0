//! Where a run goes, and the claim on that place: a directory that is chosen, checked, made and
//! locked, and of which nothing is left when the launch is refused.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::{LaunchError, RunDir};
use crate::durable::{self, FileError, Lock};
use crate::job::files;
use crate::recipe::Spec;
use crate::train::data;

/// Where runs go unless the command line or the recipe says otherwise.
pub const RUNS: &str = "runs";

/// The run's directory: `out`, else the recipe's own, else `runs/NAME`; the newest one of that name
/// to resume, a fresh one to start. Nothing is made.
pub fn choose(out: Option<&Path>, spec: &Spec, resume: bool) -> Result<RunDir, LaunchError> {
    let nothing = |path: &Path| LaunchError::Usage {
        message: format!(
            "{}: no run here to resume: `evenkeel status` lists the runs; without --resume a new \
             one starts",
            path.display()
        ),
    };
    if let Some(out) = out {
        let run = RunDir::at(out);
        if resume && !run.holds_a_run() {
            return Err(nothing(out));
        }
        if !resume && run.holds_a_run() {
            return Err(LaunchError::Usage {
                message: format!(
                    "{} holds a run already: --resume goes on with it, another --out starts a new \
                     one",
                    out.display()
                ),
            });
        }
        return Ok(run);
    }
    // Where the user's own program trains, the recipe's output is the program's.
    let output = spec.output.as_ref().filter(|_| !spec.trainer.is_own());
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
        let run = numbered(&base, number);
        // A number may be taken by a run of another recipe, which is named like that, or by a
        // launch that still prepares its run.
        if !run.holds_a_run() && !run.in_use()? {
            return Ok(run);
        }
    }
    Ok(RunDir::at(&base))
}

/// Claims the place that [`choose`] named for the same arguments. A place that was chosen for a new
/// run without a name of its own may be another launch's by now: then the next one is taken.
pub fn claim(
    chosen: RunDir,
    out: Option<&Path>,
    spec: &Spec,
    resume: bool,
) -> Result<Claim, LaunchError> {
    let mut run = chosen;
    loop {
        match Claim::take(run) {
            Ok(claim) if resume || !claim.run.holds_a_run() => return Ok(claim),
            // Another launch was here in between, and has ended.
            Ok(_) => {}
            Err(LaunchError::File(FileError::HeldBy { .. })) if out.is_none() && !resume => {}
            Err(error) => return Err(error),
        }
        run = choose(out, spec, resume)?;
    }
}

/// The place of that number: the base itself, then `BASE-2` and so on.
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

/// The numbers of the runs of the recipe `name` that stand there: some may have been deleted, so
/// that they need not be a row without a gap. A run whose name cannot be read counts.
fn numbers(base: &Path, name: &str) -> Result<Vec<u64>, LaunchError> {
    let mut found = Vec::new();
    if RunDir::at(base).holds_a_run() {
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
        let run = numbered(base, number);
        // `run-02` is no place that a launch has chosen.
        let chosen = run.path().file_name() == Some(file.as_os_str());
        if chosen && run.holds_a_run() && run.setup().map_or(true, |setup| setup.name == name) {
            found.push(number);
        }
    }
    Ok(found)
}

/// A run's directory, held by this process. When it is dropped and no run was written into it,
/// everything that was made for it goes again.
#[derive(Debug)]
pub struct Claim {
    run: RunDir,
    /// What this launch alone puts into it, and was not there before.
    own: Vec<PathBuf>,
    /// Directories that were not there before, the innermost first.
    directories: Vec<PathBuf>,
    /// `None` until nobody else can hold it.
    lock: Option<Lock>,
    /// The last request for a number of ranks that was made before.
    request: u64,
}

impl Claim {
    /// Makes the directory, if it is not there, and locks it. One that holds other things than a
    /// run is refused: what a run writes has names that people use, too.
    pub fn take(run: RunDir) -> Result<Claim, LaunchError> {
        let path = run.path();
        if !run.holds_a_run()
            && let Some(entry) = foreign(path)?
        {
            return Err(unusable(
                path,
                format!("it holds other things than a run ({entry})"),
            ));
        }
        let own = [Lock::file(path), path.join(files::DATA)];
        let mut claim = Claim {
            own: own.into_iter().filter(|path| !path.exists()).collect(),
            directories: path
                .ancestors()
                .take_while(|ancestor| *ancestor != Path::new("") && !ancestor.exists())
                .map(Path::to_path_buf)
                .collect(),
            run,
            lock: None,
            request: 0,
        };
        let path = claim.run.path();
        fs::create_dir_all(path).map_err(|error| unusable(path, error.to_string()))?;
        claim.lock = Some(Lock::acquire(path)?);
        // A request that cannot be read is none; whoever asks again replaces it.
        let desired = claim.run.desired().ok().flatten();
        claim.request = desired.map_or(0, |desired| desired.request);
        Ok(claim)
    }

    /// The last request for a number of ranks that was made of an earlier launcher. Later ones are
    /// made of this one, which can be seen at work from here on, be it still preparing.
    pub fn earlier_request(&self) -> u64 {
        self.request
    }

    /// The directory.
    pub fn run(&self) -> &RunDir {
        &self.run
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.run.holds_a_run() {
            return;
        }
        // What cannot be removed stays: a directory into which somebody else put something.
        if self.lock.is_some() {
            for path in &self.own {
                let _ = match path.is_dir() {
                    true => fs::remove_dir_all(path),
                    false => fs::remove_file(path),
                };
            }
        }
        for directory in &self.directories {
            let _ = fs::remove_dir(directory);
        }
    }
}

fn unusable(path: &Path, problem: String) -> LaunchError {
    LaunchError::Place {
        path: path.to_path_buf(),
        problem,
    }
}

/// An entry of a directory that no launch has put there.
fn foreign(path: &Path) -> Result<Option<String>, LaunchError> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unusable(path, error.to_string())),
    };
    for entry in entries {
        let entry = entry.map_err(|error| unusable(path, error.to_string()))?;
        let ours = if entry.file_name() == files::DATA {
            data::Manifest::read(&entry.path()).is_ok()
        } else if durable::is_unfinished(&entry.path()) {
            // Of a launch that was killed while it wrote a file.
            true
        } else {
            entry.path() == Lock::file(path) || entry.path() == data::draft(&path.join(files::DATA))
        };
        if !ours {
            return Ok(Some(entry.file_name().display().to_string()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::testing::Launched;

    fn refused(path: &Path) -> String {
        Claim::take(RunDir::at(path)).unwrap_err().to_string()
    }

    #[test]
    fn a_claim_that_no_run_follows_leaves_nothing() {
        let place = tempfile::tempdir().unwrap();
        let run = RunDir::at(place.path().join("runs/one"));
        let claim = Claim::take(run.clone()).unwrap();
        assert!(run.in_use().unwrap());
        fs::create_dir_all(run.path().join("data/train")).unwrap();
        drop(claim);
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_was_there_before_a_claim_stays() {
        let place = tempfile::tempdir().unwrap();
        fs::write(Lock::file(place.path()), "").unwrap();
        drop(Claim::take(RunDir::at(place.path())).unwrap());
        assert!(Lock::file(place.path()).exists());
    }

    #[test]
    fn a_claim_with_a_run_stays() {
        let place = tempfile::tempdir().unwrap();
        let run = RunDir::at(place.path().join("run"));
        let claim = Claim::take(run.clone()).unwrap();
        fs::write(run.path().join(files::RUN), "{}").unwrap();
        drop(claim);
        assert!(run.holds_a_run() && !run.in_use().unwrap());
    }

    #[test]
    fn the_loser_of_a_race_takes_nothing_from_the_winner() {
        let place = tempfile::tempdir().unwrap();
        let run = RunDir::at(place.path().join("run"));
        let claim = Claim::take(run.clone()).unwrap();
        let said = refused(run.path());
        assert!(said.contains("in use by process"), "{said}");
        assert!(run.in_use().unwrap());
        drop(claim);
    }

    #[test]
    fn places_that_cannot_hold_a_run_are_refused_with_a_way_out() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        fs::write(&file, "mine").unwrap();
        for path in [file.clone(), file.join("below"), "/dev/null".into()] {
            let said = refused(&path);
            assert!(said.contains("Not a directory"), "{said}");
            assert!(said.ends_with("give another place with --out"), "{said}");
        }
        assert_eq!(fs::read(&file).unwrap(), b"mine");
    }

    #[test]
    fn a_directory_with_other_things_is_not_taken() {
        let place = tempfile::tempdir().unwrap();
        let mine = place.path().join("data");
        fs::create_dir(&mine).unwrap();
        fs::write(mine.join("train.jsonl"), "mine").unwrap();
        let said = refused(place.path());
        assert!(said.contains("other things than a run (data)"), "{said}");
        assert_eq!(fs::read(mine.join("train.jsonl")).unwrap(), b"mine");
        assert!(!Lock::file(place.path()).exists());
    }

    #[test]
    fn a_place_is_numbered_when_it_is_taken_and_the_newest_is_resumed() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().join("run");
        let spec = Spec {
            output: Some(base.display().to_string()),
            ..Spec::default()
        };
        let chosen = |resume| choose(None, &spec, resume).map(|run| run.path().to_path_buf());
        assert_eq!(chosen(false).unwrap(), base);
        assert!(
            chosen(true)
                .unwrap_err()
                .to_string()
                .contains("no run here to resume")
        );
        for name in ["run", "run-2"] {
            fs::create_dir(place.path().join(name)).unwrap();
            fs::write(place.path().join(name).join(files::RUN), "{}").unwrap();
        }
        assert_eq!(chosen(false).unwrap(), place.path().join("run-3"));
        assert_eq!(chosen(true).unwrap(), place.path().join("run-2"));
        assert!(choose(Some(&base), &spec, false).is_err());
        assert!(choose(Some(&base), &spec, true).is_ok());

        fs::remove_dir_all(&base).unwrap();
        assert_eq!(chosen(true).unwrap(), place.path().join("run-2"));
        assert_eq!(chosen(false).unwrap(), place.path().join("run-3"));
    }

    #[test]
    fn launches_at_once_have_places_of_their_own() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().join("run");
        let spec = Spec {
            output: Some(base.display().to_string()),
            ..Spec::default()
        };
        let choose = || choose(None, &spec, false).unwrap();
        // All four have chosen before the first one claims.
        let chosen = [choose(), choose(), choose(), choose()];
        let claims = chosen.map(|run| claim(run, None, &spec, false).unwrap());
        let names = claims.each_ref().map(|claim| claim.run().path().to_owned());
        let expected = ["run", "run-2", "run-3", "run-4"].map(|name| place.path().join(name));
        assert_eq!(names, expected);
        assert_eq!(choose().path(), place.path().join("run-5"));

        // One that has come and gone in between is not written over.
        let chosen = RunDir::at(&base);
        fs::write(base.join(files::RUN), "{}").unwrap();
        drop(claims);
        let next = claim(chosen.clone(), None, &spec, false).unwrap();
        assert_eq!(next.run().path(), place.path().join("run-2"));
        let said = claim(chosen, Some(&base), &spec, false)
            .unwrap_err()
            .to_string();
        assert!(said.contains("holds a run already"), "{said}");
    }

    #[test]
    fn a_run_of_another_recipe_is_not_resumed_for_its_number() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().join("run");
        let launched = Launched::at(place.path(), "batch: {global: 12, micro: 2}", &[]);
        fs::rename(launched.run.path(), place.path().join("run-2")).unwrap();
        let chosen = |name: &str, resume| {
            let spec = Spec {
                name: name.to_owned(),
                output: Some(base.display().to_string()),
                ..Spec::default()
            };
            choose(None, &spec, resume).map(|run| run.path().to_path_buf())
        };
        assert_eq!(chosen("run", true).unwrap(), place.path().join("run-2"));
        assert!(chosen("another", true).is_err());
        assert_eq!(chosen("another", false).unwrap(), base);
    }
}
