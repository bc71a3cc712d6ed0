//! Messages with which PyTorch and CUDA report out-of-memory. transformers and accelerate match the
//! same texts for their back-off (accelerate 1.15, `utils/memory.py`, `should_reduce_batch_size`).

const WORDS: [&str; 3] = [
    " out of memory.",
    "CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
];

/// The out-of-memory line in a log tail.
pub fn find(log_tail: &str) -> Option<&str> {
    let says = |line: &&str| WORDS.iter().any(|words| line.contains(words));
    log_tail.lines().find(says).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_is_distinguished_from_other_failures() {
        let torch = "Traceback (most recent call last):\n  y = model(x)\n\
                     torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n";
        let line = find(torch).unwrap();
        assert!(line.starts_with("torch.OutOfMemoryError"), "{line}");
        assert!(
            find("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 8")
                .is_some()
        );
        assert_eq!(find("ValueError: out of memory of mine"), None);
    }
}
