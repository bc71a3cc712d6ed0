//! A world of one rank: every operation is complete as soon as it starts, without threads or sockets.

use super::{Collective, CommError, Operation, Pending};

#[derive(Debug, Default, Clone, Copy)]
pub struct Solo;

struct Done(Result<Operation, CommError>);

impl Pending for Done {
    fn wait(self: Box<Self>) -> Result<Operation, CommError> {
        self.0
    }
}

impl Collective for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn start(&self, mut operation: Operation) -> Box<dyn Pending> {
        let result = operation.check(1).map(|()| {
            match &mut operation {
                Operation::AllReduce(_) => {}
                Operation::ReduceScatter { data, shard } => shard.copy_from_slice(data),
                Operation::AllGather { shard, data } => data.copy_from_slice(shard),
            }
            operation
        });
        Box::new(Done(result))
    }

    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(vec![message.to_vec()])
    }

    fn abort(&self, _reason: &str) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_world_of_one_copies() {
        let started = Solo.start(Operation::ReduceScatter {
            data: vec![1.0, 2.0],
            shard: vec![0.0; 2],
        });
        let Ok(Operation::ReduceScatter { shard, .. }) = started.wait() else {
            panic!("a reduce-scatter comes back as one");
        };
        assert_eq!(shard, [1.0, 2.0]);
        let started = Solo.start(Operation::AllGather {
            shard: vec![3.0],
            data: vec![0.0],
        });
        let Ok(Operation::AllGather { data, .. }) = started.wait() else {
            panic!("an all-gather comes back as one");
        };
        assert_eq!(data, [3.0]);
        assert_eq!(Solo.exchange(b"x").unwrap(), [b"x"]);
    }

    #[test]
    fn sizes_that_do_not_fit_are_misuse() {
        let started = Solo.start(Operation::AllGather {
            shard: vec![3.0],
            data: vec![],
        });
        let error = started.wait().unwrap_err().to_string();
        assert_eq!(
            error,
            "collective misuse: all-gather of 0 elements with a shard of 1, \
             but a world of 1 needs 1"
        );
    }
}
