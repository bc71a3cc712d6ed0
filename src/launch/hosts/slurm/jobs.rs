//! The jobs of a run that Evenkeel has submitted. Slurm's queue is the only state: a missing job is submitted.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::submission::{self, Submission};
use super::{HostError, JOB, Node, Step, call, field, nodes_of, restarts};
use crate::util::lock::lock;

/// Age up to which an answer of `squeue` is used again.
const FRESH: Duration = Duration::from_secs(5);

/// Shortest time between two submissions of one node's job.
const PAUSE: Duration = Duration::from_secs(30);

/// The jobs of the run that this process launches as its first job.
#[derive(Debug)]
pub struct Jobs {
    pub submission: Submission,
    /// The steps on further nodes.
    pub step: Step,
    /// This process's own job.
    own: String,
    seen: Mutex<Option<(Instant, Vec<Queued>)>>,
    /// When each further node's job was last submitted.
    submitted: Mutex<BTreeMap<u64, Instant>>,
}

/// A job in the queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Queued {
    #[serde(rename = "job")]
    pub id: String,
    pub name: String,
    /// As `squeue` writes it (`RUNNING`).
    state: String,
    /// In Slurm's short form; empty until it runs.
    #[serde(skip)]
    nodes: String,
    /// Why it waits, as `squeue` writes it (`Resources`).
    reason: String,
    /// The directory of its submission.
    #[serde(skip)]
    directory: PathBuf,
}

impl fmt::Display for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Queued {
            id, state, reason, ..
        } = self;
        write!(f, "job {id}, {state}")?;
        match reason.as_str() {
            "" | "None" => Ok(()),
            reason => write!(f, " ({reason})"),
        }
    }
}

impl Jobs {
    /// Those of a submission whose first job this process is in.
    pub fn of(submission: Submission, step: Step) -> Jobs {
        Jobs {
            submission,
            step,
            own: std::env::var(JOB).unwrap_or_default(),
            seen: Mutex::new(None),
            submitted: Mutex::default(),
        }
    }

    /// The nodes that the run can use besides those of the first job, by number.
    pub fn further_nodes(&self) -> std::ops::RangeInclusive<u64> {
        1..=self.submission.nodes.saturating_sub(self.submission.least)
    }

    /// Submits the job that takes this one's place after its end, if there is none.
    pub fn prepare_successor(&self) -> Result<(), HostError> {
        let name = &self.submission.name;
        let others = queue(Some(name))?;
        if others.iter().any(|job| job.id != self.own) {
            return Ok(());
        }
        // It waits for the end of all earlier jobs of its name, so it never runs beside a requeued one.
        sbatch(&["--dependency=singleton"], &self.submission.first()).map(drop)
    }

    /// A further node; `None` until Slurm gives it. Its job is submitted if there is none.
    pub fn node(&self, number: u64) -> Result<Option<Node>, HostError> {
        let Some(job) = self.further(number)? else {
            let mut submitted = lock(&self.submitted);
            let before = submitted.get(&number);
            // One that ends at once is not submitted again at once.
            if before.is_some_and(|at| at.elapsed() < PAUSE) {
                return Ok(None);
            }
            submitted.insert(number, Instant::now());
            drop(submitted);
            sbatch(&[], &self.submission.further(number))?;
            *lock(&self.seen) = None;
            return Ok(None);
        };
        if job.state != "RUNNING" {
            return Ok(None);
        }
        Ok(nodes_of(&job.id, &job.nodes, &self.step)?.pop())
    }

    /// Ends the job of a further node that is about to end, so that another one takes its place.
    pub fn give_up(&self, number: u64) -> Result<(), HostError> {
        let job = self.further(number)?;
        *lock(&self.seen) = None;
        cancel(job.as_slice())
    }

    /// Ends all jobs of the run but this one.
    pub fn end_others(&self) -> Result<(), HostError> {
        let mut all = queue(Some(&self.names()))?;
        all.retain(|job| job.id != self.own);
        cancel(&all)
    }

    /// Whether `scancel` ends this job now, and neither a requeue, a preemption nor its time limit.
    pub fn is_cancelled(&self) -> bool {
        let shown = call("scontrol", &["--oneliner", "show", "job", &self.own], "");
        shown.is_ok_and(|shown| is_cancelled(&shown, restarts()))
    }

    /// The first job's name, and those of the further ones.
    fn names(&self) -> String {
        let further = self
            .further_nodes()
            .map(|node| self.submission.name_of(node));
        let names = std::iter::once(self.submission.name.clone()).chain(further);
        names.collect::<Vec<_>>().join(",")
    }

    fn further(&self, number: u64) -> Result<Option<Queued>, HostError> {
        let mut seen = lock(&self.seen);
        let is_fresh = (seen.as_ref()).is_some_and(|(at, _)| at.elapsed() < FRESH);
        if !is_fresh {
            *seen = Some((Instant::now(), queue(Some(&self.names()))?));
        }
        let name = self.submission.name_of(number);
        let mut jobs = seen.iter().flat_map(|(_, jobs)| jobs);
        Ok(jobs.rfind(|job| job.name == name).cloned())
    }
}

/// Ends all jobs in the queue of runs whose first jobs have these names; false if there are none.
pub fn end_all(names: &[String]) -> Result<bool, HostError> {
    let all = queue(None)?;
    let of_run = |job: &Queued| {
        let mut rests = names.iter().filter_map(|name| job.name.strip_prefix(name));
        rests.any(|rest| rest.is_empty() || rest.starts_with("-node-"))
    };
    let of_run: Vec<Queued> = all.into_iter().filter(of_run).collect();
    cancel(&of_run)?;
    Ok(!of_run.is_empty())
}

/// The job in the queue with one of these names, which trains its run or waits for that.
pub fn queued(names: &[String]) -> Result<Option<Queued>, HostError> {
    Ok(queue(Some(&names.join(",")))?.pop())
}

/// The first jobs in the queue that were submitted from a directory.
pub fn queued_from(directory: &Path) -> Result<Vec<Queued>, HostError> {
    let mut jobs = queue(None)?;
    jobs.retain(|job| submission::is_first(&job.name) && job.directory == directory);
    Ok(jobs)
}

/// Submits the first job. Returns its number.
pub fn submit(submission: &Submission) -> Result<String, HostError> {
    sbatch(&[], &submission.first())
}

/// Submits a script. Returns the number of its job.
fn sbatch(options: &[&str], script: &str) -> Result<String, HostError> {
    let said = call("sbatch", &[&["--parsable"], options].concat(), script)?;
    // With several clusters, the cluster's name follows.
    Ok(said.trim().split(';').next().unwrap_or_default().to_owned())
}

/// Whether a job is cancelled, from the output of `scontrol --oneliner show job`, which hides why it ends. `restarts`: how
/// often it had been requeued before it began.
fn is_cancelled(shown: &str, restarts: u64) -> bool {
    let value = |key| field(shown, key);
    let ends = matches!(value("JobState"), Some("COMPLETING" | "CANCELLED"));
    let is_preempted = value("PreemptTime").is_some_and(|time| time != "None");
    let ran = value("RunTime").and_then(seconds);
    let limit = value("TimeLimit").and_then(seconds);
    let is_over = ran.zip(limit).is_some_and(|(ran, limit)| ran >= limit);
    // Slurm counts a requeue at once, and shows the job as one that has not run, until that one is cancelled.
    let counted = value("Restarts").and_then(|count| count.parse::<u64>().ok());
    let is_requeued = counted.is_some_and(|counted| counted > restarts) && ran == Some(0);
    ends && !is_preempted && !is_over && !is_requeued
}

/// Seconds of a time as Slurm writes it (`1-02:03:04`); `None` if it has no end.
fn seconds(time: &str) -> Option<u64> {
    let (days, time) = time.split_once('-').unwrap_or(("0", time));
    let mut parts = time.split(':').map(|part| part.parse::<u64>().ok());
    let seconds = parts.try_fold(0, |sum: u64, part| Some(sum * 60 + part?))?;
    Some(days.parse::<u64>().ok()? * 86_400 + seconds)
}

/// The user's jobs that wait or run. `names`: of these names only, with commas between them.
fn queue(names: Option<&str>) -> Result<Vec<Queued>, HostError> {
    let named = names.map(|names| format!("--name={names}"));
    let mut options = vec!["--noheader", "--me", "--format=%i|%j|%T|%N|%r|%Z"];
    options.extend(named.as_deref());
    Ok(read_queue(&call("squeue", &options, "")?))
}

fn read_queue(said: &str) -> Vec<Queued> {
    let job = |line: &str| {
        let mut fields = line.split('|').map(|field| field.trim().to_owned());
        let mut next = || fields.next();
        Some(Queued {
            id: next()?,
            name: next()?,
            state: next()?,
            nodes: next()?,
            reason: next()?,
            directory: next()?.into(),
        })
    };
    let mut jobs: Vec<Queued> = said.lines().filter_map(job).collect();
    // One that ends gives nothing any more.
    jobs.retain(|job| job.state != "COMPLETING");
    jobs
}

fn cancel(jobs: &[Queued]) -> Result<(), HostError> {
    let ids: Vec<&str> = jobs.iter().map(|job| job.id.as_str()).collect();
    if ids.is_empty() {
        return Ok(());
    }
    call("scancel", &ids, "").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_cancelled_job_is_cancelled() {
        let cancelled = |state: &str, restarts: u64, preempted: &str, ran: &str| {
            let shown = format!(
                "JobId=7 JobName=a JobState={state} Reason=None Requeue=1 Restarts={restarts} RunTime={ran} \
                 TimeLimit=1-00:00:00 PreemptTime={preempted}"
            );
            is_cancelled(&shown, 1)
        };
        assert!(cancelled("COMPLETING", 1, "None", "00:10:00"));
        assert!(!cancelled("RUNNING", 1, "None", "00:10:00"));
        assert!(!cancelled(
            "COMPLETING",
            1,
            "2026-01-02T03:04:05",
            "00:10:00"
        ));
        assert!(!cancelled("COMPLETING", 1, "None", "1-00:00:03"));
        // Put back into the queue, and cancelled then.
        let requeued =
            "JobState=COMPLETING Restarts=1 RunTime=00:00:00 TimeLimit=UNLIMITED EndTime=Unknown";
        assert!(!is_cancelled(requeued, 0));
        assert!(cancelled("COMPLETING", 2, "None", "00:10:00"));
        assert!(is_cancelled(
            "JobState=COMPLETING RunTime=00:00:09 TimeLimit=UNLIMITED",
            0
        ));
    }

    #[test]
    fn the_queue_is_read_without_jobs_that_end() {
        let said = "12|evenkeel-a-1|RUNNING|n[1-2]|None|/a\n13|evenkeel-a-1-node-1|PENDING||Resources|/a\n\
                    14|x|COMPLETING|n3|None|/a\n\n";
        let jobs = read_queue(said);
        let shown: Vec<_> = jobs
            .iter()
            .map(|job| (&*job.id, &*job.state, &*job.nodes))
            .collect();
        assert_eq!(shown, [("12", "RUNNING", "n[1-2]"), ("13", "PENDING", "")]);
        let shown: Vec<String> = jobs.iter().map(Queued::to_string).collect();
        assert_eq!(shown, ["job 12, RUNNING", "job 13, PENDING (Resources)"]);
    }
}
