//! A world of one rank: every operation is complete as soon as it starts, without threads or sockets.

use super::{Collective, CommError, Kind, Operation, Pending};

#[derive(Debug, Default, Clone, Copy)]
pub struct Solo;

impl Collective for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn start(&self, operation: Operation) -> Pending {
        completed(operation)
    }

    fn start_fixed(&self, operation: Operation<i64>) -> Pending<i64> {
        completed(operation)
    }

    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(vec![message.to_vec()])
    }

    fn abort(&self, _reason: &str) {}
}

fn completed<T: Copy + Send + 'static>(mut operation: Operation<T>) -> Pending<T> {
    let result = operation.check(1).map(|()| {
        let Operation { kind, data, shard } = &mut operation;
        match kind {
            Kind::AllReduce | Kind::Broadcast { .. } => {}
            Kind::ReduceScatter => shard.copy_from_slice(data),
            Kind::AllGather => data.copy_from_slice(shard),
        }
        operation
    });
    Pending::new(|| result)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(kind: Kind, data: Vec<f32>, shard: Vec<f32>) -> Result<Operation, CommError> {
        Solo.start(Operation { kind, data, shard }).wait()
    }

    #[test]
    fn a_world_of_one_copies() {
        let scattered = start(Kind::ReduceScatter, vec![1.0, 2.0], vec![0.0; 2]);
        assert_eq!(scattered.unwrap().shard, [1.0, 2.0]);
        let gathered = start(Kind::AllGather, vec![0.0], vec![3.0]);
        assert_eq!(gathered.unwrap().data, [3.0]);
        assert_eq!(Solo.exchange(b"x").unwrap(), [b"x"]);
    }

    #[test]
    fn sizes_that_do_not_fit_are_misuse() {
        let started = start(Kind::AllGather, vec![], vec![3.0]);
        let error = started.unwrap_err().to_string();
        assert_eq!(
            error,
            "collective misuse: all-gather of 0 elements with a shard of 1, \
             but a world of 1 needs 1"
        );
    }
}
