//! The conditions of a TrainingJob and the reasons that each can have: the contract with programs
//! and with `kubectl wait`. [`table`] writes them into `docs/trainingjob.md`.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::status::Phase;

/// An enum whose variants carry their documentation, so that it can be printed.
macro_rules! documented {
    (
        $(#[doc = $about:literal])+
        pub enum $name:ident { $($(#[doc = $meaning:literal])+ $variant:ident,)+ }
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[doc = $meaning])+ $variant,)+ }

        impl $name {
            /// All variants, in the order of their declaration.
            pub const ALL: &[$name] = &[$($name::$variant),+];

            /// The name, as objects have it.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => stringify!($variant),)+ }
            }

            pub const fn meaning(self) -> &'static str {
                match self { $($name::$variant => concat!($($meaning),+),)+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

documented! {
    /// The type of a condition.
    pub enum ConditionType {
        /// The recipe is read and a plan exists for at least one number of nodes.
        Planned,
        /// All pods of the newest generation run, and their agents can start the ranks.
        PodsReady,
        /// A generation trains.
        Running,
        /// The job moves to another generation, or recovers from a loss.
        Rescaling,
        /// `spec.suspend` is true and the GPUs are free.
        Suspended,
        /// Training reached its budget. `kubectl wait --for=condition=Complete` waits for it.
        Complete,
        /// The job ended without reaching its budget. `kubectl wait --for=condition=Failed` waits for it.
        Failed,
        /// The API server was restored from an older copy of its data. Absent on other jobs.
        Restored,
        /// The sample ledger was proved, as `spec.proveLedger` asked last. Absent on jobs without such a request.
        LedgerProved,
        /// The controller can read the object. Absent on jobs that were always readable.
        Readable,
    }
}

documented! {
    /// The reason of a condition.
    pub enum ConditionReason {
        /// The recipe is planned and its rules hold.
        Planned,
        /// The ConfigMap or its key does not exist. The controller tries again every 5 s.
        RecipeMissing,
        /// The recipe has errors. The message has file, line and fix. Correct the recipe and apply the job again: the controller reads the recipe after every edit of the job until the first plan.
        RecipeRefused,
        /// No plan is possible: no number of nodes splits the global batch, or a rule refuses the job. A running job keeps its plan.
        PlanRefused,
        /// The job has no plan yet.
        NotPlanned,
        /// Pods are created, scheduled or started, or unpack the job's code and run its setup command.
        Placing,
        /// Pods ended before they could train. The controller creates new ones after a pause; see `status.podFailures`.
        PodsEndedEarly,
        /// The API server refuses new objects of the job: a quota, an admission policy, a missing priority class. The message has its answer. `PodsReady` remains True while pods of the newest generation run.
        Refused,
        /// An object that the job does not own has the name of one of the job's objects. The message has its kind and name. Delete it, or create the job with another name. The controller changes nothing and tries again after growing pauses of at most a minute. `PodsReady` remains True while pods of the newest generation run.
        NameTaken,
        /// No feasible number of nodes has enough free GPUs. The job holds no GPU.
        InsufficientCapacity,
        /// The first pod reads and tokenises the data; the others wait for it.
        Preparing,
        /// The preparation of the data ended with an error. Refused data fail the job; after any other error the agent tries again every 5 s.
        PreparationFailed,
        /// The external trainer's command cannot be started with this plan. The message has the placeholder.
        CommandRefused,
        /// A pod has fewer GPUs than the plan counts on. The message has the lost GPU.
        HardwareMismatch,
        /// The checkpoint volume is full. The agents try again every 5 s.
        VolumeFull,
        /// The checkpoint volume is read-only. The agents try again every 5 s.
        VolumeReadOnly,
        /// The checkpoint volume denies access to the pods' user. The agents try again every 5 s.
        VolumeDenied,
        /// No volume is mounted at `checkpoint.path`. The agents try again every 5 s.
        VolumeMissing,
        /// Pods see different volumes at `checkpoint.path`. Use a claim with access mode ReadWriteMany.
        VolumeNotShared,
        /// The bucket of `checkpoint.path` does not exist. The agents try again every 5 s.
        BucketMissing,
        /// The bucket's server refuses region, credentials or rights of the pods. The agents try again every 5 s.
        BucketDenied,
        /// The bucket's server cannot be reached, or refuses requests for now. The agents try again every 5 s.
        BucketUnreachable,
        /// An object of the run is missing in the bucket or is not what was written. The agents try again every 5 s.
        BucketDamaged,
        /// The controller ignores what the program on port 8471 of a pod says, or a part of it. The message has the cause.
        AnswerRefused,
        /// The newest generation runs.
        Training,
        /// A rank makes no progress, and `spec.onStall` is Report. The message names it.
        Stalled,
        /// Ranks commit a checkpoint and leave.
        Draining,
        /// Ranks restore a checkpoint and take their first step, or survivors of a loss commit.
        Recovering,
        /// `spec.suspend` is true.
        Suspended,
        /// `spec.suspend` is false.
        NotSuspended,
        /// The job has not ended.
        NotFinished,
        /// Training reached its budget.
        BudgetReached,
        /// Ranks failed more than `budgets.restarts` times without progress.
        RestartBudgetExceeded,
        /// A rank failed in a way that a restart repeats: a NaN loss, refused data.
        PermanentFailure,
        /// `spec.activeDeadlineSeconds` have passed. The checkpoint is committed.
        DeadlineExceeded,
        /// A rank ran out of memory and no smaller per-device batch fits the plan.
        OutOfMemory,
        /// The agents cannot start the ranks. The message has the cause.
        CannotStart,
        /// The job failed.
        Failed,
        /// Pods or the volume had a later generation than the status. The message has both. The job continues above it, from the newest checkpoint.
        OlderStatus,
        /// Every sample of the committed history was consumed exactly once. The message has the checkpoint and the digest.
        LedgerProved,
        /// A pod recomputes the digests of all consumed samples. The message has its name.
        Proving,
        /// The ledger has a fault. The message has the first one.
        NotProved,
        /// There is nothing to prove: no committed checkpoint, or an external trainer.
        NoLedger,
        /// The pod ended without a verdict. The message has what it said.
        ProofFailed,
        /// The object can be read again.
        Readable,
        /// This version of the controller cannot read the object. Correct its spec, or delete the job and apply it again; the files on the volume stay.
        Unreadable,
    }
}

impl ConditionType {
    /// The reasons that this condition can have, by its status.
    pub fn reasons(self) -> &'static [(bool, &'static [ConditionReason])] {
        use ConditionReason as R;
        match self {
            ConditionType::Planned => &[
                (true, &[R::Planned]),
                (false, &[R::RecipeMissing, R::RecipeRefused, R::PlanRefused]),
            ],
            ConditionType::PodsReady => &[
                (true, &[R::Training, R::Draining, R::Refused, R::NameTaken]),
                (
                    false,
                    &[
                        R::NotPlanned,
                        R::Placing,
                        R::PodsEndedEarly,
                        R::Refused,
                        R::NameTaken,
                        R::InsufficientCapacity,
                        R::Preparing,
                        R::PreparationFailed,
                        R::CommandRefused,
                        R::HardwareMismatch,
                        R::VolumeFull,
                        R::VolumeReadOnly,
                        R::VolumeDenied,
                        R::VolumeMissing,
                        R::VolumeNotShared,
                        R::BucketMissing,
                        R::BucketDenied,
                        R::BucketUnreachable,
                        R::BucketDamaged,
                        R::AnswerRefused,
                        R::CannotStart,
                        R::Suspended,
                        R::BudgetReached,
                        R::Failed,
                    ],
                ),
            ],
            ConditionType::Running => &[
                (true, &[R::Training, R::Stalled]),
                (
                    false,
                    &[
                        R::NotPlanned,
                        R::Placing,
                        R::InsufficientCapacity,
                        R::Draining,
                        R::Suspended,
                        R::BudgetReached,
                        R::Failed,
                    ],
                ),
            ],
            ConditionType::Rescaling => &[
                (
                    true,
                    &[
                        R::Draining,
                        R::Placing,
                        R::InsufficientCapacity,
                        R::Recovering,
                    ],
                ),
                (
                    false,
                    &[
                        R::NotPlanned,
                        R::Placing,
                        R::InsufficientCapacity,
                        R::Training,
                        R::Draining,
                        R::Suspended,
                        R::BudgetReached,
                        R::Failed,
                    ],
                ),
            ],
            ConditionType::Suspended => &[(true, &[R::Suspended]), (false, &[R::NotSuspended])],
            ConditionType::Complete => &[
                (true, &[R::BudgetReached]),
                (false, &[R::NotFinished, R::Failed]),
            ],
            ConditionType::Failed => &[
                (
                    true,
                    &[
                        R::RestartBudgetExceeded,
                        R::DeadlineExceeded,
                        R::PermanentFailure,
                        R::OutOfMemory,
                        R::PreparationFailed,
                        R::CommandRefused,
                        R::CannotStart,
                    ],
                ),
                (false, &[R::NotFinished, R::BudgetReached]),
            ],
            ConditionType::Restored => &[(true, &[R::OlderStatus])],
            ConditionType::LedgerProved => &[
                (true, &[R::LedgerProved]),
                (
                    false,
                    &[R::Proving, R::NotProved, R::NoLedger, R::ProofFailed],
                ),
            ],
            ConditionType::Readable => &[(true, &[R::Readable]), (false, &[R::Unreadable])],
        }
    }

    /// Whether the condition can have this reason with this status.
    pub fn allows(self, holds: bool, reason: ConditionReason) -> bool {
        let mut reasons = self.reasons().iter();
        reasons.any(|(status, reasons)| *status == holds && reasons.contains(&reason))
    }
}

impl ConditionReason {
    /// The reason for an agent's problem of this name; `CannotStart` where the condition cannot have it.
    pub fn of_problem(kind: ConditionType, holds: bool, name: &str) -> ConditionReason {
        let mut all = Self::ALL.iter().copied();
        all.find(|reason| reason.name() == name && kind.allows(holds, *reason))
            .unwrap_or(ConditionReason::CannotStart)
    }
}

impl Phase {
    /// The phase that conditions amount to.
    pub fn of(conditions: &[Condition]) -> Phase {
        use ConditionType as Type;
        let find = |kind: Type| conditions.iter().find(|c| c.type_ == kind.name());
        for (kind, phase) in [
            (Type::Failed, Phase::Failed),
            (Type::Complete, Phase::Complete),
            (Type::Suspended, Phase::Suspended),
            (Type::Running, Phase::Running),
        ] {
            if find(kind).is_some_and(|condition| condition.status == "True") {
                return phase;
            }
        }
        let reason = find(Type::Running).map_or("", |running| &running.reason);
        for (waits_for, phase) in [
            (ConditionReason::Draining, Phase::Draining),
            (ConditionReason::Placing, Phase::Placing),
            (ConditionReason::InsufficientCapacity, Phase::Waiting),
        ] {
            if waits_for.name() == reason {
                return phase;
            }
        }
        Phase::Pending
    }
}

/// The conditions and their reasons, as Markdown tables.
pub fn table() -> String {
    let mut text = String::from("| condition | meaning |\n|---|---|\n");
    for kind in ConditionType::ALL {
        text += &format!("| `{kind}` | {} |\n", kind.meaning().trim());
    }
    text += "\n| condition | status | reason | meaning |\n|---|---|---|---|\n";
    for kind in ConditionType::ALL {
        for (holds, reasons) in kind.reasons() {
            let status = if *holds { "True" } else { "False" };
            for reason in *reasons {
                let meaning = reason.meaning().trim();
                text += &format!("| `{kind}` | {status} | `{reason}` | {meaning} |\n");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_belongs_to_a_condition() {
        for reason in ConditionReason::ALL {
            let mut kinds = ConditionType::ALL.iter();
            assert!(
                kinds.any(|kind| kind.allows(true, *reason) || kind.allows(false, *reason)),
                "{reason}"
            );
            assert!(reason.name().starts_with(|c: char| c.is_ascii_uppercase()));
            assert!(!reason.meaning().trim().is_empty());
        }
    }
}
