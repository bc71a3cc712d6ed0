//! The proof of a job's sample ledger: a pod of the job recomputes the digests of all consumed samples, each time that
//! `spec.proveLedger` asks for it, also after the job has ended.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ContainerStateTerminated, Pod};
use kube::ResourceExt;

use super::build;
use super::conditions::{self, Reported};
use super::context::Reconciliation;
use super::error::ReconcileError;
use super::ownership;
use super::pod_index::is_over;
use crate::api::condition::{ConditionReason as Reason, ConditionType};
use crate::api::status::TrainingJobStatus;
use crate::lifecycle::verdict::Verdict;

/// Most characters of what a pod says that gave no verdict.
const ERROR: usize = 500;

impl Reconciliation<'_> {
    /// The status with the answer to the newest request for a proof, and the pod to create for it.
    pub fn with_proof(&self, status: TrainingJobStatus) -> (TrainingJobStatus, Option<Pod>) {
        let wanted = self.job.spec.prove_ledger;
        if wanted <= status.ledger_proof {
            return (status, None);
        }
        let (answer, pod) = match self.proof(&status, wanted) {
            Proof::Answered(answer) => (answer, None),
            Proof::Runs(pod) => (Answer::proving(&pod), None),
            Proof::Missing(pod) => {
                let refused = self.state(|state| state.proof_refused.clone());
                (Answer::missing(refused), Some(*pod))
            }
        };
        let Answer {
            proved,
            reason,
            message,
        } = answer;
        let ledger_proof = match reason {
            Reason::Proving => status.ledger_proof,
            _ => wanted,
        };
        let reported: Reported = (ConditionType::LedgerProved, proved, reason, &message);
        let status = conditions::with(status, &[reported]);
        let status = TrainingJobStatus {
            ledger_proof,
            ..status
        };
        (status.bounded(), pod)
    }

    fn proof(&self, status: &TrainingJobStatus, number: u32) -> Proof {
        let job = self.job;
        if !status.command(&job.spec).is_empty() {
            return Proof::Answered(Answer::none("an external trainer records no ledger"));
        }
        let Some(checkpoint) = &status.checkpoint else {
            let why = "no checkpoint is committed yet, so no history can be proved";
            return Proof::Answered(Answer::none(why));
        };
        let name = build::proof_name(job, number);
        let Some(pod) = self.context.stores.pod_of(job, &name) else {
            return match build::proof_pod(job, name, checkpoint) {
                Ok(pod) => Proof::Missing(Box::new(pod)),
                Err(error) => Proof::Answered(Answer::failed(format!(
                    "spec.podTemplate does not give a valid pod: {error}"
                ))),
            };
        };
        if let Some(ended) = ended(&pod) {
            return Proof::Answered(Answer::of(ended, &name));
        }
        if is_over(&pod) {
            let said = pod
                .status
                .as_ref()
                .and_then(|status| status.message.as_deref());
            let said = said.unwrap_or("it ended without a verdict");
            return Proof::Answered(Answer::failed(format!("pod {name}: {said}")));
        }
        Proof::Runs(pod)
    }

    /// Creates the pod of a proof. A refusal is in the condition of the next reconciliation.
    pub async fn create_proof(&self, pod: Option<Pod>) -> Result<(), ReconcileError> {
        let Some(pod) = pod else {
            return Ok(());
        };
        let job = self.job;
        let account = build::service_account(job);
        ownership::create(&self.context.client, job, &account).await?;
        let made = ownership::create(&self.context.client, job, &pod).await;
        let refused = made.as_ref().err().and_then(ReconcileError::blocked);
        let refused = refused.map(|refused| refused.message);
        self.state(|state| state.proof_refused = refused);
        made.map(drop)
    }
}

/// How far a proof is.
enum Proof {
    Answered(Answer),
    /// This pod proves.
    Runs(Arc<Pod>),
    /// This pod is to be created.
    Missing(Box<Pod>),
}

/// The condition of a proof.
struct Answer {
    proved: bool,
    reason: Reason,
    message: String,
}

impl Answer {
    fn none(why: &str) -> Answer {
        Answer {
            proved: false,
            reason: Reason::NoLedger,
            message: why.to_owned(),
        }
    }

    fn failed(message: String) -> Answer {
        Answer {
            proved: false,
            reason: Reason::ProofFailed,
            message: message.chars().take(ERROR).collect(),
        }
    }

    fn proving(pod: &Pod) -> Answer {
        let conditions = pod.status.iter().flat_map(|status| &status.conditions);
        let scheduled = conditions.flatten().find(|c| c.type_ == "PodScheduled");
        let waits = scheduled.filter(|scheduled| scheduled.status == "False");
        let why = waits.and_then(|waits| waits.message.as_ref());
        let why = why.map_or(String::new(), |why| {
            format!(", once it is scheduled: {why}")
        });
        let name = pod.name_any();
        Answer {
            proved: false,
            reason: Reason::Proving,
            message: format!("pod {name} recomputes the digests of all samples{why}"),
        }
    }

    /// Before there is a pod. `refused`: why the API server took none.
    fn missing(refused: Option<String>) -> Answer {
        let message = "a pod is created that recomputes the digests of all samples";
        Answer {
            proved: false,
            reason: Reason::Proving,
            message: refused.unwrap_or_else(|| message.to_owned()),
        }
    }

    /// What a pod's container wrote when it ended. Its program is the job's image: it speaks only for this job.
    fn of(ended: &ContainerStateTerminated, pod: &str) -> Answer {
        let said = ended.message.clone().unwrap_or_default();
        let Ok(verdict) = serde_json::from_str::<Verdict>(&said) else {
            let code = ended.exit_code;
            let said = if said.is_empty() {
                format!("exit code {code}; its log may say more")
            } else {
                said
            };
            return Answer::failed(format!("pod {pod}: {said}"));
        };
        let digest = match verdict.digest.as_str() {
            "" => String::new(),
            digest => format!(", digest {digest}"),
        };
        Answer {
            proved: verdict.proved,
            reason: if verdict.proved {
                Reason::LedgerProved
            } else {
                Reason::NotProved
            },
            message: format!(
                "{} (checkpoint {}{digest})",
                verdict.verdict, verdict.checkpoint
            ),
        }
    }
}

/// How the trainer's container ended.
fn ended(pod: &Pod) -> Option<&ContainerStateTerminated> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let trainer = statuses
        .iter()
        .find(|status| status.name == build::TRAINER)?;
    trainer.state.as_ref()?.terminated.as_ref()
}
