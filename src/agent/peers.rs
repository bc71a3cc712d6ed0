//! Asks the agents of the job's other pods for their generation. An agent in contact with the API
//! server sends no such requests.

use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::time::Duration;

use futures::{StreamExt, stream};
use tokio::sync::watch::Receiver;

use super::{Answer, Input};
use crate::lifecycle::authentication::{self, Question};
use crate::lifecycle::generation::Peer;
use crate::util::http::{Connection, Limits};
use crate::util::key::Key;

/// Pause between two rounds of requests.
const ROUND: Duration = Duration::from_secs(1);
/// Limits of one request. The body is one number.
const LIMITS: Limits = Limits {
    connect: Duration::from_secs(1),
    head: Duration::from_secs(1),
    body: Duration::from_secs(1),
    bytes: 64,
};
/// Concurrent requests: a reachable agent is found quickly among many that do not answer.
const AT_ONCE: usize = 32;

/// Client for the agents of other pods.
pub struct Peers {
    /// The port on which agents listen.
    pub port: u16,
    pub key: Key,
}

impl Peers {
    /// Asks the agents in `whom`, round after round while the list is not empty. The first answer
    /// ends a round: one reachable peer proves contact.
    pub async fn ask(self, mut whom: Receiver<Vec<Peer>>, inputs: Sender<Input>) {
        loop {
            let peers = whom.borrow_and_update().clone();
            let round = async {
                if peers.is_empty() {
                    return std::future::pending().await;
                }
                let answer = self.first_answer(&peers).await;
                if let Some(answer) = answer
                    && inputs.send(Input::Peer(answer)).is_err()
                {
                    return;
                }
                tokio::time::sleep(ROUND).await;
            };
            tokio::select! {
                () = round => {}
                changed = whom.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }

    async fn first_answer(&self, peers: &[Peer]) -> Option<Answer> {
        let asked = stream::iter(peers.to_vec()).map(|peer| self.answer(peer));
        let answers = asked
            .buffer_unordered(AT_ONCE)
            .filter_map(std::future::ready);
        std::pin::pin!(answers).next().await
    }

    /// An agent's answer; `None` if none comes, or one without the proof of the job's key.
    async fn answer(&self, peer: Peer) -> Option<Answer> {
        const PATH: &str = "/generation";
        let question = Question::new(authentication::agent_key(&self.key, &peer.pod)).ok()?;
        let address = SocketAddr::new(peer.host, self.port);
        let mut connection = Connection::open(address, LIMITS).await.ok()?;
        let asked = question.ask(&mut connection, PATH).await.ok()?;
        let body = asked.body().await.ok()??;
        Some(Answer {
            host: peer.host,
            generation: str::from_utf8(&body).ok()?.trim().parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::mpsc::channel;

    use super::*;
    use crate::agent::{Service, listen, serve};
    use crate::lifecycle::agent_state::AgentState;

    /// An address that belongs to no host.
    const NOBODY: IpAddr = IpAddr::V4(Ipv4Addr::new(0, 0, 0, 1));
    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn peer(host: IpAddr, pod: &str) -> Peer {
        let pod = pod.into();
        Peer { host, pod }
    }

    #[tokio::test]
    async fn one_reachable_agent_is_enough_and_reports_its_generation() {
        let listener = listen(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, state) = tokio::sync::watch::channel(AgentState::default());
        let (heard, by_the_other) = channel();
        let key = Key::random().unwrap();
        let service = Service {
            key: authentication::agent_key(&key, "pod"),
            state,
            inputs: heard,
            run: std::path::PathBuf::new(),
        };
        tokio::spawn(serve(listener, service));
        sender.send_modify(|state| state.generation = 7);

        let peers = Peers { port, key };
        let both = [peer(NOBODY, "x"), peer(HERE, "pod")];
        let answer = peers.first_answer(&both);
        let expected = Answer {
            host: HERE,
            generation: 7,
        };
        assert_eq!(answer.await, Some(expected));
        assert_eq!(peers.first_answer(&[peer(NOBODY, "x")]).await, None);
        // It is the agent of another pod, or it has the key of another job.
        assert_eq!(peers.first_answer(&[peer(HERE, "other")]).await, None);
        let key = Key::random().unwrap();
        let strangers = Peers { port, key };
        assert_eq!(strangers.first_answer(&[peer(HERE, "pod")]).await, None);
        // An answer from a peer does not count as contact with the controller.
        assert!(by_the_other.try_recv().is_err());
    }
}
