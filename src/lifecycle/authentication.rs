//! Who may ask an agent, and whose answers count: those who have the key of its job.
//!
//! The controller derives a job's key from its own key and the job's uid, and puts it into a Secret that the job's
//! pods mount. A request and its answer each carry a proof for a nonce of that request, so neither says anything
//! that helps to forge another one. What they say is not secret on the network.

use std::io;

use crate::util::http::{self, Connection, HttpError};
use crate::util::key::{Key, Nonce, from_hex, hex, nonce};

/// Header of a request: its nonce and its proof, 64 hexadecimal digits each, with a space between them.
pub const QUESTION: &str = "evenkeel-question";
/// Header of an answer: its proof, 64 hexadecimal digits.
pub const ANSWER: &str = "evenkeel-answer";
/// Name of the key's file in a job's Secret.
pub const KEY_FILE: &str = "key";

/// Name of the Secret with the key of a job with this uid.
pub fn secret_name(uid: &str) -> String {
    format!("evenkeel-{uid}")
}

/// The key of a job with this uid.
pub fn job_key(controller: &Key, uid: &str) -> Key {
    controller.derive(&[b"job", uid.as_bytes()])
}

/// The key of the ranks of one generation.
pub fn generation_key(job: &Key, number: u64) -> Key {
    job.derive(&[b"generation", &number.to_le_bytes()])
}

/// The key of the agent in the pod with this uid.
pub fn agent_key(job: &Key, pod: &str) -> Key {
    job.derive(&[b"agent", pod.as_bytes()])
}

/// A request to an agent.
#[derive(Debug, Clone)]
pub struct Question {
    key: Key,
    nonce: Nonce,
}

impl Question {
    /// A new request to the agent with this key.
    pub fn new(key: Key) -> io::Result<Question> {
        let nonce = nonce()?;
        Ok(Question { key, nonce })
    }

    /// Sends the request for a path with its query.
    pub async fn ask(self, connection: &mut Connection, path: &str) -> Result<Asked, HttpError> {
        let header = (QUESTION, self.header(path));
        let answer = connection.get(path, Some(header)).await?;
        Ok(Asked {
            question: self,
            answer,
        })
    }

    /// The value of [`QUESTION`] for a path with its query.
    pub fn header(&self, path: &str) -> String {
        let proof = self.key.prove(&[b"question", &self.nonce, path.as_bytes()]);
        format!("{} {}", hex(&self.nonce), hex(&proof))
    }

    /// Reads the value of [`QUESTION`] as the agent with this key; `None` if the proof is wrong.
    pub fn verified(key: &Key, path: &str, header: &str) -> Option<Question> {
        let (nonce, proof) = header.split_once(' ')?;
        let nonce = from_hex(nonce)?;
        let proven = key.verify(&[b"question", &nonce, path.as_bytes()], &from_hex(proof)?);
        proven.then(|| Question {
            key: key.clone(),
            nonce,
        })
    }

    /// The value of [`ANSWER`] for the answer's body.
    pub fn answer(&self, body: &[u8]) -> String {
        hex(&self.key.prove(&[b"answer", &self.nonce, body]))
    }

    /// Whether the value of [`ANSWER`] is that of the asked agent for this request and body.
    pub fn is_answered(&self, body: &[u8], header: Option<&str>) -> bool {
        let proof = header.and_then(from_hex);
        proof.is_some_and(|proof| self.key.verify(&[b"answer", &self.nonce, body], &proof))
    }
}

/// A response whose body is not read yet.
pub struct Asked {
    question: Question,
    answer: http::Answer,
}

impl Asked {
    /// Reads the body; `None` if it is not proven to be that of the asked agent for this request.
    pub async fn body(self) -> Result<Option<Vec<u8>>, HttpError> {
        let proof = self.answer.header(ANSWER);
        let body = self.answer.body().await?;
        let proven = self.question.is_answered(&body, proof.as_deref());
        Ok(proven.then_some(body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_asked_agent_understands_a_request_and_only_its_answer_counts() {
        let controller = Key::random().unwrap();
        let job = job_key(&controller, "uid");
        let agent = agent_key(&job, "pod");
        let question = Question::new(agent.clone()).unwrap();
        let header = question.header("/state?after=1");
        let heard = Question::verified(&agent, "/state?after=1", &header).unwrap();
        let answer = heard.answer(b"body");
        assert!(question.is_answered(b"body", Some(&answer)));

        for (key, path) in [
            (&agent, "/state?after=2"),
            (&agent_key(&job, "other"), "/state?after=1"),
            (
                &agent_key(&job_key(&controller, "x"), "pod"),
                "/state?after=1",
            ),
            (&generation_key(&job, 1), "/state?after=1"),
        ] {
            assert!(Question::verified(key, path, &header).is_none());
        }
        for header in ["", " ", &header[1..], &header.replace(' ', "")] {
            assert!(Question::verified(&agent, "/state?after=1", header).is_none());
        }
        assert!(!question.is_answered(b"other", Some(&answer)));
        assert!(!question.is_answered(b"body", None));
        assert!(!question.is_answered(b"body", Some("")));
        let later = Question::new(agent).unwrap();
        assert!(!later.is_answered(b"body", Some(&answer)), "an old answer");
    }
}
