//! Asking the agents of the job's other pods how far they are. Only while there is a reason to: an
//! agent that hears from the API server asks nobody.

use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::Sender;
use std::time::Duration;

use futures::{StreamExt, stream};
use reqwest::Client;
use tokio::sync::watch::Receiver;

use super::pod::Input;

/// Between two rounds.
const ROUND: Duration = Duration::from_secs(1);
/// An agent that can be reached answers at once.
const ANSWER: Duration = Duration::from_secs(2);
/// Asked at once: one that answers is soon found among many that do not.
const AT_ONCE: usize = 32;

/// What another pod's agent said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Its address.
    pub host: IpAddr,
    /// The newest generation whose ranks it has started; `None`: it is of a version that does not
    /// say.
    pub generation: Option<u64>,
}

/// Asks other pods' agents.
pub struct Peers {
    http: Client,
    port: u16,
}

impl Peers {
    /// Those that listen on this port.
    pub fn on(port: u16) -> reqwest::Result<Peers> {
        let http = Client::builder().timeout(ANSWER).no_proxy().build()?;
        Ok(Peers { http, port })
    }

    /// Asks those that stand in `whom`, round after round and as long as they stand there. The
    /// first answer ends a round: that one of them can be reached is all that it is about.
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

    /// Whatever it answers, it was reached.
    async fn answer(&self, host: IpAddr) -> Option<Answer> {
        let address = format!("http://{}/generation", SocketAddr::new(host, self.port));
        let response = self.http.get(address).send().await.ok()?;
        let told = match response.error_for_status() {
            Ok(response) => response.text().await.ok(),
            Err(_) => None,
        };
        let generation = told.and_then(|text| text.trim().parse().ok());
        Some(Answer { host, generation })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::agent::{listen, serve};
    use crate::job::agent_state::AgentState;

    /// Reached from nowhere: such an address is no host's.
    const NOBODY: IpAddr = IpAddr::V4(Ipv4Addr::new(0, 0, 0, 1));

    #[tokio::test]
    async fn one_agent_of_many_is_enough_and_says_how_far_it_is() {
        let listener = listen(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (told, state) = tokio::sync::watch::channel(AgentState::default());
        let (heard, by_the_other) = channel();
        tokio::spawn(serve(listener, state, heard));
        told.send_modify(|state| state.generation = 7);

        let peers = Peers::on(port).unwrap();
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
        // A peer that is cut off itself is no controller.
        assert!(by_the_other.try_recv().is_err());
    }
}
