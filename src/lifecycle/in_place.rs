//! Which processes of a generation continue in the next one, and with whose state.

use super::generation::{Carried, Generation, Member};
use super::rank_status::{self, RankStatus};

/// What a state must agree with that processes bring into the next generation.
#[derive(Default)]
pub struct Terms {
    /// Samples of the newest checkpoint.
    pub committed: u64,
    /// The batch by which the next world was chosen; `None`: that of the last plan.
    pub batch: Option<u64>,
    /// The hosts share no directory. One without ranks brings its files, which may take longer than ranks wait.
    pub apart: bool,
}

/// The members of the generation after `before`, with the processes that continue in it: those of the same host or pod with
/// a complete state, the newest first. `None`: no process has one on these terms, or new ones cannot take it. `seen`: the
/// statuses of the ranks of `before`.
pub fn continued(
    before: &Generation,
    seen: &[RankStatus],
    members: Vec<Member>,
    terms: &Terms,
) -> Option<(Vec<Member>, Carried)> {
    let carriers = rank_status::carriers(seen);
    let members: Vec<Member> = (members.into_iter())
        .map(|member| {
            let here = |(_, old): &(u64, &Member)| old.slot == member.slot && old.pod == member.pod;
            let old = before.shares().find(here);
            let old = old.map_or(0..0, |(first, old)| first..first + old.ranks);
            let ranks = carriers.iter().map(|(rank, _)| *rank);
            let ranks = ranks.filter(|rank| old.contains(rank));
            let most = usize::try_from(member.ranks).unwrap_or(usize::MAX);
            Member {
                carries: ranks.take(most).collect(),
                ..member
            }
        })
        .collect();
    let place = |old: u64| {
        let mut first = 0;
        members.iter().find_map(|member| {
            let local = member.carries.iter().position(|rank| *rank == old);
            let rank = local.map(|local| first + local as u64);
            first += member.ranks;
            rank
        })
    };
    let (rank, held) = (carriers.iter()).find_map(|(old, held)| Some((place(*old)?, *held)))?;
    let are_all = members.iter().all(|it| it.carries.len() as u64 == it.ranks);
    let can_join = are_all || held.joinable;
    let is_brought = !terms.apart || members.iter().all(|it| !it.carries.is_empty());
    let batch = terms.batch.unwrap_or(before.plan.global_batch_size);
    let is_newest = held.samples >= terms.committed && held.batch == batch;
    if !(can_join && is_brought && is_newest) {
        return None;
    }
    let carried = Carried {
        from: before.number,
        rank,
        step: held.step,
        samples: held.samples,
        batch: held.batch,
    };
    Some((members, carried))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::generation::testing::record;
    use crate::lifecycle::protocol::{Ending, HeldState};
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::{self, Request};

    fn members(shares: &[(u64, u64)]) -> Vec<Member> {
        let member = |(slot, ranks): &(u64, u64)| Member {
            slot: *slot,
            ranks: *ranks,
            carries: Vec::new(),
            pod: None,
        };
        shares.iter().map(member).collect()
    }

    /// A generation of these slots and ranks.
    fn generation(shares: &[(u64, u64)]) -> Generation {
        let recipe =
            "per_device_train_batch_size: 4\nevenkeel: {objective: sft, batch: {gpus: 2}}\n";
        let recipe = recipe::read_text(&Request::default(), recipe.to_owned()).unwrap();
        record(
            3,
            members(shares),
            plan(&recipe, &PlanRequest::gpus(2)).unwrap(),
        )
    }

    fn waits(samples: u64) -> RankStatus {
        RankStatus::carrying(HeldState {
            step: samples / 8,
            samples,
            batch: 8,
            whole: true,
            joinable: true,
        })
    }

    fn killed() -> RankStatus {
        RankStatus::ended(Ending::Signal(9))
    }

    fn carries(members: &[Member]) -> Vec<&[u64]> {
        members.iter().map(|it| it.carries.as_slice()).collect()
    }

    fn in_next(
        before: &Generation,
        seen: &[RankStatus],
        members: Vec<Member>,
    ) -> Option<(Vec<Member>, Carried)> {
        continued(before, seen, members, &Terms::default())
    }

    #[test]
    fn processes_stay_on_their_hosts_and_the_newest_state_counts_wherever_it_is() {
        let before = generation(&[(0, 2), (1, 2), (2, 2)]);
        // Rank 2 has taken a step that the others have not, and rank 4 is lost.
        let seen = [
            waits(16),
            waits(16),
            killed(),
            waits(24),
            killed(),
            waits(16),
        ];
        let (next, carried) = in_next(&before, &seen, members(&[(0, 2), (1, 2), (2, 2)])).unwrap();
        assert_eq!(carries(&next), [&[0, 1][..], &[3], &[5]]);
        assert_eq!((carried.from, carried.rank, carried.samples), (3, 2, 24));
        // Without the host that has it.
        let (next, carried) = in_next(&before, &seen, members(&[(0, 2), (2, 1)])).unwrap();
        assert_eq!(carries(&next), [&[0, 1][..], &[5]]);
        assert_eq!((carried.rank, carried.samples), (0, 16));
        // A new process could not take what the others hold.
        let alone = |mut seen: RankStatus| {
            seen.kept.iter_mut().for_each(|held| held.joinable = false);
            seen
        };
        let seen = seen.map(alone);
        assert_eq!(in_next(&before, &seen, members(&[(0, 2), (1, 2)])), None);
        assert!(in_next(&before, &seen, members(&[(0, 2), (1, 1)])).is_some());
        // Other hosts bring nothing.
        assert_eq!(in_next(&before, &seen, members(&[(3, 2)])), None);
    }

    #[test]
    fn the_newest_processes_of_a_smaller_share_continue() {
        let before = generation(&[(0, 4)]);
        let seen = [waits(16), killed(), waits(24), waits(16)];
        let (next, carried) = in_next(&before, &seen, members(&[(0, 2)])).unwrap();
        assert_eq!(carries(&next), [&[2, 0][..]]);
        assert_eq!((carried.rank, carried.samples, carried.step), (0, 24, 3));
        assert_eq!(in_next(&before, &[killed()], members(&[(0, 2)])), None);
    }

    #[test]
    fn a_state_that_disagrees_with_its_terms_does_not_continue() {
        let before = generation(&[(0, 2), (1, 2)]);
        let seen = [waits(16), waits(16), killed(), killed()];
        let larger = || members(&[(0, 2), (1, 2)]);
        let on = |terms: Terms, members| continued(&before, &seen, members, &terms).is_some();
        let committed = |committed| Terms {
            committed,
            ..Terms::default()
        };
        assert!(on(committed(16), larger()) && !on(committed(17), larger()));
        let batch = |batch| Terms {
            batch,
            ..Terms::default()
        };
        assert!(on(batch(Some(8)), larger()) && !on(batch(Some(16)), larger()));
        let apart = || Terms {
            apart: true,
            ..Terms::default()
        };
        assert!(on(apart(), members(&[(0, 2)])) && !on(apart(), larger()));
    }
}
