//! Numbers of things as messages say them.

/// What `number` things are called: `sample`, `samples`; `process`, `processes`; `batch`, `batches`.
pub fn noun(number: u64, thing: &str) -> String {
    let hisses = ["s", "x", "ch", "sh"]
        .iter()
        .any(|end| thing.ends_with(end));
    let ending = match (number, hisses) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{thing}{ending}")
}

/// `1 sample`, `2000 samples`.
pub fn count(number: u64, thing: &str) -> String {
    format!("{number} {}", noun(number, thing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_no_things() {
        let said = [0, 1, 2000].map(|n| count(n, "sample"));
        assert_eq!(said, ["0 samples", "1 sample", "2000 samples"]);
        let said = ["process", "batch", "GPU", "rank"].map(|thing| noun(2, thing));
        assert_eq!(said, ["processes", "batches", "GPUs", "ranks"]);
    }
}
