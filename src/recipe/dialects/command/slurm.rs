//! The GPUs that a script requests from Slurm: its `#SBATCH` lines, and `salloc` or `sbatch` calls in
//! comments. A launcher that starts another number of processes is probably a mistake.
//!
//! Source: Slurm 25.05 `sbatch(1)`, `salloc(1)`.

use std::ops::Range;

use crate::recipe::syntax::source::{FileId, Span};
use crate::recipe::syntax::words::cut;

/// A request for GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuRequest {
    /// GPUs on all nodes.
    pub gpus: u64,
    /// The option as written.
    pub option: String,
    pub nodes: u64,
    /// Place of the option.
    pub span: Span,
}

/// An option with a number. `at`: the bytes of its first word.
struct Counted {
    count: u64,
    text: String,
    at: Range<usize>,
}

/// A word and its bytes.
type Word<'t> = (&'t str, Range<usize>);

/// The options of one request. The last value of each counts.
#[derive(Default)]
struct Request {
    nodes: Option<Counted>,
    each: Option<Counted>,
    all: Option<Counted>,
}

/// Every GPU request in a script with a resolved number.
pub(crate) fn gpu_requests(text: &str, file: FileId) -> Vec<GpuRequest> {
    let mut directives = Request::default();
    let mut found = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let comment = line.trim_start().strip_prefix('#');
        let words = words(line, start);
        match comment.map(|_| words.as_slice()) {
            Some([first, options @ ..]) if first.0 == "#SBATCH" => directives.take(options),
            Some([hash, first, options @ ..])
                if hash.0 == "#" && ["salloc", "sbatch"].contains(&first.0) =>
            {
                let mut call = Request::default();
                call.take(options);
                found.extend(call.total(text, file));
            }
            _ => {}
        }
        start += line.len();
    }
    directives
        .total(text, file)
        .into_iter()
        .chain(found)
        .collect()
}

/// The words of a line that begins at a byte offset, up to a comment.
fn words(line: &str, start: usize) -> Vec<Word<'_>> {
    let mut words = Vec::new();
    let mut at = 0;
    for text in line.split_whitespace() {
        at += line[at..].find(text).unwrap_or(0);
        if at > 0 && text.starts_with('#') && !words.is_empty() {
            break;
        }
        words.push((text, start + at..start + at + text.len()));
        at += text.len();
    }
    words
}

impl Request {
    fn take(&mut self, options: &[Word<'_>]) {
        let mut options = options.iter();
        while let Some((text, at)) = options.next() {
            let (name, tied) = cut(text, '=');
            let place = match name {
                "--nodes" | "-N" => &mut self.nodes,
                "--gres" | "--gpus-per-node" => &mut self.each,
                "--gpus" | "-G" => &mut self.all,
                _ => continue,
            };
            let value = tied.or_else(|| options.next().map(|(text, _)| *text));
            let count = value.and_then(|value| match name {
                "--nodes" | "-N" => value.parse().ok(),
                "--gres" => value
                    .split(',')
                    .find_map(|part| devices(part.strip_prefix("gpu")?)),
                _ => devices(&format!(":{value}")),
            });
            // An unresolved number or a range (`$N`, `2-4`) leaves the number unset.
            *place = count.map(|count| Counted {
                count,
                text: match tied {
                    Some(_) => (*text).to_owned(),
                    None => format!("{text} {}", value.unwrap_or_default()),
                },
                at: at.clone(),
            });
        }
    }

    fn total(self, text: &str, file: FileId) -> Option<GpuRequest> {
        let nodes = self.nodes.map_or(1, |option| option.count);
        let (count, gpus) = match (self.all, self.each) {
            (Some(all), _) => (all.count, all),
            (None, Some(each)) => (each.count.checked_mul(nodes)?, each),
            (None, None) => return None,
        };
        Some(GpuRequest {
            gpus: count,
            option: gpus.text,
            nodes,
            span: Span::of(text, gpus.at, file),
        })
    }
}

/// The number in `:8` or `:h100:8`; 1 for an empty text.
fn devices(text: &str) -> Option<u64> {
    if text.is_empty() {
        return Some(1);
    }
    text.strip_prefix(':')?.rsplit(':').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(text: &str) -> Vec<(u64, u32, u32)> {
        let asked = gpu_requests(text, FileId(0)).into_iter();
        asked
            .map(|asked| (asked.gpus, asked.span.line, asked.span.column))
            .collect()
    }

    #[test]
    fn a_request_is_nodes_times_gpus() {
        for (text, expected) in [
            ("#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:8\n", 8),
            ("#SBATCH --gres gpu:h100:4 # four\n#SBATCH -N 2\n", 8),
            ("#SBATCH --gpus-per-node=h100:8\n#SBATCH --nodes=4\n", 32),
            ("#SBATCH --gpus=6\n#SBATCH --nodes=2\n", 6),
            ("#SBATCH --gres=shard:1,gpu\n", 1),
            (
                "# salloc --nodes=2 -c 8 --mem=40G --gres=gpu:4 --partition=p\n",
                8,
            ),
        ] {
            let found: Vec<u64> = gpus(text).iter().map(|found| found.0).collect();
            assert_eq!(found, [expected], "{text}");
        }
    }

    #[test]
    fn lines_without_a_resolved_request_give_none() {
        for text in [
            "#SBATCH --gres=gpu:$N\n",
            "#SBATCH --mem=8G\n",
            "echo #SBATCH --gres=gpu:8\n",
            "# ask with --gres=gpu:8\n",
            "##SBATCH --gres=gpu:8\n",
            "",
        ] {
            assert_eq!(gpus(text), [], "{text}");
        }
        assert_eq!(gpus("\n#SBATCH --gres=gpu:8\n"), [(8, 2, 9)]);
    }
}
