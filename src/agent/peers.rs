//! Asks the agents of the job's other pods for their generation. An agent in contact with the API
//! server sends no such requests.

use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::Sender;
use std::time::Duration;

use futures::{StreamExt, stream};
use tokio::sync::watch::Receiver;

use super::input::{Answer, Input};
use crate::util::http::{Connection, HttpError, Limits};

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
    port: u16,
}

impl Peers {
    /// A client for agents that listen on this port.
    pub fn on(port: u16) -> Peers {
        Peers { port }
    }

    /// Asks the agents in `whom`, round after round while the list is not empty. The first answer
    /// ends a round: one reachable peer proves contact.
    pub async fn ask(self, mut whom: Receiver<Vec<IpAddr>>, inputs: Sender<Input>) {
        loop {
            let hosts = whom.borrow_and_update().clone();
            let round = async {
                if hosts.is_empty() {
                    return std::future::pending().await;
                }
                let answer = self.first_answer(&hosts).await;
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

    async fn first_answer(&self, hosts: &[IpAddr]) -> Option<Answer> {
        let asked = stream::iter(hosts.iter().copied()).map(|host| self.answer(host));
        let answers = asked
            .buffer_unordered(AT_ONCE)
            .filter_map(std::future::ready);
        std::pin::pin!(answers).next().await
    }

    /// Any HTTP answer proves contact.
    async fn answer(&self, host: IpAddr) -> Option<Answer> {
        let generation = match generation(SocketAddr::new(host, self.port)).await {
            Ok(body) => str::from_utf8(&body)
                .ok()
                .and_then(|text| text.trim().parse().ok()),
            Err(error) if error.is_response() => None,
            Err(_) => return None,
        };
        Some(Answer { host, generation })
    }
}

/// The body of an agent's answer.
async fn generation(agent: SocketAddr) -> Result<Vec<u8>, HttpError> {
    let mut connection = Connection::open(agent, LIMITS).await?;
    connection.get("/generation").await?.body().await
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::agent::{listen, serve};
    use crate::lifecycle::agent_state::AgentState;

    /// An address that belongs to no host.
    const NOBODY: IpAddr = IpAddr::V4(Ipv4Addr::new(0, 0, 0, 1));

    #[tokio::test]
    async fn one_reachable_agent_is_enough_and_reports_its_generation() {
        let listener = listen(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, state) = tokio::sync::watch::channel(AgentState::default());
        let (heard, by_the_other) = channel();
        tokio::spawn(serve(listener, state, heard, std::path::PathBuf::new()));
        sender.send_modify(|state| state.generation = 7);

        let peers = Peers::on(port);
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let answer = peers.first_answer(&[NOBODY, here]).await;
        let generation = Some(7);
        assert_eq!(
            answer,
            Some(Answer {
                host: here,
                generation
            })
        );
        assert_eq!(peers.first_answer(&[NOBODY]).await, None);
        // An answer from a peer does not count as contact with the controller.
        assert!(by_the_other.try_recv().is_err());
    }
}
