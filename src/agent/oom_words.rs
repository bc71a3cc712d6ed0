//! Words by which a program of somebody else's says that memory ran out. transformers' and
//! accelerate's back-off look for the same (accelerate 1.15, `utils/memory.py`,
//! `should_reduce_batch_size`).

const WORDS: [&str; 3] = [
    " out of memory.",
    "CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
];

/// The line of a program's last words that says so.
pub fn find(last_words: &str) -> Option<&str> {
    let says = |line: &&str| WORDS.iter().any(|words| line.contains(words));
    last_words.lines().find(says).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_ran_out_is_told_from_other_failures() {
        let torch = "Traceback (most recent call last):\n  y = model(x)\n\
                     torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n";
        let said = find(torch).unwrap();
        assert!(said.starts_with("torch.OutOfMemoryError"), "{said}");
        assert!(
            find("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 8")
                .is_some()
        );
        assert_eq!(find("ValueError: out of memory of mine"), None);
    }
}
