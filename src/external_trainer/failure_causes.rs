//! What the last lines of a program that failed tell about the failure.

use crate::util::format::with_units;

/// Messages with which PyTorch and CUDA report out-of-memory. transformers and accelerate match the same texts for their
/// back-off (accelerate 1.15, `utils/memory.py`, `should_reduce_batch_size`).
const OUT_OF_MEMORY: [&str; 3] = [
    " out of memory.",
    "CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
];

/// The number of last lines that may name a missing module or a taken port. A program may report an earlier error and continue.
const LAST: usize = 4;

/// The out-of-memory line in a log tail, with its sizes in units.
pub fn out_of_memory(log_tail: &str) -> Option<String> {
    let says = |line: &&str| {
        // The message of Rust's allocator before it aborts.
        let rust = line.starts_with("memory allocation of ") && line.ends_with(" bytes failed");
        rust || OUT_OF_MEMORY.iter().any(|words| line.contains(words))
    };
    let line = log_tail.lines().find(says)?;
    Some(with_units(line.trim()))
}

/// Why a Rust program could not start a thread: there is no memory for its stack, or no process more is allowed.
pub fn refused_thread(log_tail: &str) -> Option<String> {
    let mut lines = log_tail.lines();
    let refused = lines.any(|line| line.starts_with("failed to spawn thread: "));
    refused.then(|| {
        "a thread cannot be started; raise the limits of memory (`ulimit -v`) and of processes (`ulimit -u`, or those \
         of the container)"
            .to_owned()
    })
}

/// Errors of argparse for a command that it does not take.
const USAGE: [&str; 3] = [
    ": error: unrecognized arguments: ",
    ": error: the following arguments are required: ",
    ": error: argument ",
];

/// The line with which Python says that a module or the program's file is missing, or that it does not take the command: a
/// restart fails again.
pub fn missing(log_tail: &str) -> Option<&str> {
    let lines = log_tail.lines().map(str::trim).rev();
    let says = |line: &&str| {
        line.starts_with("ModuleNotFoundError: ")
            || line.contains(": can't open file '")
            || USAGE.iter().any(|words| line.contains(words))
    };
    lines.filter(|line| !line.is_empty()).take(LAST).find(says)
}

/// The message for [`missing`].
pub fn of_missing(line: &str) -> String {
    if line.starts_with("ModuleNotFoundError") {
        return format!(
            "{line}; install it for the Python of the command, or activate its environment"
        );
    }
    if !USAGE.iter().any(|words| line.contains(words)) {
        return format!("{line}; correct the path in the command");
    }
    let remedy = if line.contains("--per_device_train_batch_size") {
        "write the plan's numbers where the program's own arguments have them: `--batch_size {per_device_batch_size}`, \
         `{gradient_accumulation_steps}`"
    } else if line.contains("--resume_from_checkpoint") {
        "set `evenkeel.trainer.resume` to the arguments with which the program continues"
    } else {
        "correct the arguments in the command"
    };
    format!("{line}; {remedy}")
}

/// The line that says that a port is taken. A program that chooses its port may meet another program there.
pub fn taken_port(log_tail: &str) -> Option<&str> {
    let lines = log_tail.lines().map(str::trim).rev();
    let says = |line: &&str| line.to_ascii_lowercase().contains("address already in use");
    // A warning about one address may precede success with another.
    lines.filter(|line| !line.is_empty()).take(LAST).find(says)
}

/// The message for [`taken_port`]. `rendezvous`: the port that evenkeel chose for the generation.
pub fn of_taken_port(line: &str, rendezvous: u16) -> String {
    let rendezvous = rendezvous.to_string();
    let mut numbers = line.split(|c: char| !c.is_ascii_digit());
    if numbers.any(|number| number == rendezvous) {
        return format!(
            "{line}: another process took the port of the rendezvous, {rendezvous}; the next generation uses another"
        );
    }
    format!(
        "{line}: the program listens on a port that it chooses itself; stop the process that has it (`ss -ltnp` lists \
         them), or listen on MASTER_PORT, which is free in every generation"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_is_distinguished_from_other_failures() {
        let torch = "Traceback (most recent call last):\n  y = model(x)\n\
                     torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n";
        let line = out_of_memory(torch).unwrap();
        assert!(line.starts_with("torch.OutOfMemoryError"), "{line}");
        assert!(
            out_of_memory(
                "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 8"
            )
            .is_some()
        );
        assert_eq!(out_of_memory("ValueError: out of memory of mine"), None);
        let rust = "step 1\nmemory allocation of 134217728 bytes failed\n";
        insta::assert_snapshot!(out_of_memory(rust).unwrap(), @"memory allocation of 128 MiB failed");
    }

    #[test]
    fn a_command_that_argparse_refuses_is_not_started_again() {
        let of = |error: &str| {
            let tail = format!("usage: a.py [-h]\n            [--x X]\na.py: error: {error}\n");
            missing(&tail).map(of_missing).unwrap_or_default()
        };
        insta::assert_snapshot!(of("unrecognized arguments: --per_device_train_batch_size 8"), @"a.py: error: unrecognized arguments: --per_device_train_batch_size 8; write the plan's numbers where the program's own arguments have them: `--batch_size {per_device_batch_size}`, `{gradient_accumulation_steps}`");
        insta::assert_snapshot!(of("unrecognized arguments: --resume_from_checkpoint c/1"), @"a.py: error: unrecognized arguments: --resume_from_checkpoint c/1; set `evenkeel.trainer.resume` to the arguments with which the program continues");
        insta::assert_snapshot!(of("argument --lr: invalid float value: 'x'"), @"a.py: error: argument --lr: invalid float value: 'x'; correct the arguments in the command");
        assert_eq!(of("the loss is NaN"), "");
    }

    #[test]
    fn a_taken_port_is_found_in_the_words_of_torch_and_python() {
        for line in [
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. \
             port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            "OSError: [Errno 98] Address already in use",
        ] {
            assert_eq!(taken_port(&format!("Traceback:\n  {line}\n")), Some(line));
        }
        let line = "port: 29500, code: -98, message: address already in use";
        insta::assert_snapshot!(of_taken_port(line, 29500), @"port: 29500, code: -98, message: address already in use: another process took the port of the rendezvous, 29500; the next generation uses another");
        insta::assert_snapshot!(of_taken_port(line, 2950), @"port: 29500, code: -98, message: address already in use: the program listens on a port that it chooses itself; stop the process that has it (`ss -ltnp` lists them), or listen on MASTER_PORT, which is free in every generation");
        assert_eq!(
            taken_port("ConnectionRefusedError: [Errno 111] Connection refused"),
            None
        );
    }

    #[test]
    fn only_a_last_word_says_what_is_missing() {
        let traceback = "Traceback (most recent call last):\n  File \"train.py\", line 1\n    import trl\n\
                         ModuleNotFoundError: No module named 'trl'\n";
        assert_eq!(
            missing(traceback),
            Some("ModuleNotFoundError: No module named 'trl'")
        );
        let file =
            "python3: can't open file '/code/trian.py': [Errno 2] No such file or directory\n";
        assert_eq!(missing(file), Some(file.trim()));
        insta::assert_snapshot!(of_missing(missing(traceback).unwrap()), @"ModuleNotFoundError: No module named 'trl'; install it for the Python of the command, or activate its environment");
        insta::assert_snapshot!(of_missing(missing(file).unwrap()), @"python3: can't open file '/code/trian.py': [Errno 2] No such file or directory; correct the path in the command");
        let optional = format!(
            "{traceback}using plain attention\nstep 1\nstep 2\nstep 3\nValueError: loss is nan\n"
        );
        assert_eq!(missing(&optional), None);
    }
}
