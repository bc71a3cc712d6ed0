//! The GPUs of ranks some of which continue from another generation.

/// The GPUs of the ranks of a generation, in their order: those of the processes that continue (`kept`), then free ones, and
/// last those of processes that end. `before`: in use until now; `all`: those that work.
pub fn in_place(kept: &[String], before: &[String], all: &[String]) -> Vec<String> {
    let others = |is_used: bool| {
        let others = all.iter().filter(|gpu| !kept.contains(gpu));
        others.filter(move |gpu| before.contains(gpu) == is_used)
    };
    let gpus = kept.iter().chain(others(false)).chain(others(true));
    gpus.cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(names: &str) -> Vec<String> {
        names.chars().map(String::from).collect()
    }

    #[test]
    fn processes_keep_their_gpus_and_new_ones_take_free_ones_first() {
        let found = in_place(&gpus("CA"), &gpus("ABC"), &gpus("ABCDE"));
        assert_eq!(found, gpus("CADEB"));
        // B does not work any more.
        let found = in_place(&gpus("A"), &gpus("AB"), &gpus("AC"));
        assert_eq!(found, gpus("AC"));
        assert_eq!(in_place(&[], &[], &[]), gpus(""));
    }
}
