//! The GPUs that a script requests from Slurm: its `#SBATCH` lines, and `salloc` or `sbatch` calls in
//! comments. A launcher that starts another number of processes is probably a mistake.
//!
//! Source: Slurm 25.05 `sbatch(1)`, `salloc(1)`.

use std::ops::Range;

use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::{FileId, Span};
use crate::recipe::syntax::words::cut;

/// An option with a number. `at`: the bytes of its first word.
struct Counted {
    count: u64,
    text: String,
    at: Range<usize>,
}

/// The options of one request. The last value of each counts.
#[derive(Default)]
struct Request {
    nodes: Option<Counted>,
    each: Option<Counted>,
    all: Option<Counted>,
    tasks: Option<Counted>,
    tasks_each: Option<Counted>,
}

/// The tasks that a script requests in its `#SBATCH` lines, which `srun` starts by default.
pub(super) struct Tasks {
    pub all: Option<(u64, Span)>,
    pub nodes: Option<(u64, Span)>,
    /// On each node.
    pub each: Option<(u64, Span)>,
}

pub(super) fn tasks(text: &str, file: FileId) -> Tasks {
    let (directives, _) = requests(text);
    let place = |option: Option<Counted>| {
        option.map(|option| (option.count, Span::of(text, option.at, file)))
    };
    Tasks {
        all: place(directives.tasks),
        nodes: place(directives.nodes),
        each: place(directives.tasks_each),
    }
}

/// Warns if the command's script requests another number of GPUs from Slurm than it starts processes.
pub(crate) fn compare(launched: Option<&Node>, reading: &mut Reading) {
    let world = launched.and_then(|launched| launched.get_path("batch.gpus")?.text());
    let Some(processes) = world.and_then(|text| text.parse::<u64>().ok()) else {
        return;
    };
    let Some((file, _)) = reading.files.command else {
        return;
    };
    let text = reading
        .sources
        .get(file)
        .map_or("", |source| &source.text)
        .to_owned();
    for (gpus, nodes, option) in gpu_requests(&text) {
        if gpus == processes {
            continue;
        }
        let on = match nodes {
            1 => String::new(),
            nodes => format!(" on each of {nodes} nodes"),
        };
        reading.warning(
            "gpu-count-conflict",
            Some(Span::of(&text, option.at, file)),
            format!(
                "the script requests {gpus} GPUs from Slurm (`{}`{on}), but its launcher starts {processes} processes",
                option.text
            ),
            format!("the plan uses {processes}: change the launcher's config or the Slurm request so that they agree"),
        );
    }
}

/// Every GPU request in a script with a resolved number: the GPUs on all nodes, the nodes, and the option.
fn gpu_requests(text: &str) -> Vec<(u64, u64, Counted)> {
    let (directives, calls) = requests(text);
    let requests = std::iter::once(directives).chain(calls);
    requests.filter_map(Request::total).collect()
}

/// The `#SBATCH` lines of a script, and the calls in its comments.
fn requests(text: &str) -> (Request, Vec<Request>) {
    let mut directives = Request::default();
    let mut calls = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("#SBATCH") => directives.take(words, line, start),
            Some("#") if matches!(words.next(), Some("salloc" | "sbatch")) => {
                let mut call = Request::default();
                call.take(words, line, start);
                calls.push(call);
            }
            _ => {}
        }
        start += line.len();
    }
    (directives, calls)
}

impl Request {
    /// Adds the options of a line, which begins at a byte offset, up to a comment.
    fn take<'t>(&mut self, words: impl Iterator<Item = &'t str>, line: &str, start: usize) {
        let mut options = words.take_while(|word| !word.starts_with('#'));
        while let Some(text) = options.next() {
            let (name, tied) = cut(text, '=');
            let place = match name {
                "--nodes" | "-N" => &mut self.nodes,
                "--gres" | "--gpus-per-node" => &mut self.each,
                "--gpus" | "-G" => &mut self.all,
                "--ntasks" | "-n" => &mut self.tasks,
                "--ntasks-per-node" => &mut self.tasks_each,
                _ => continue,
            };
            let value = tied.or_else(|| options.next()).unwrap_or_default();
            let count = match name {
                "--nodes" | "-N" | "--ntasks" | "-n" | "--ntasks-per-node" => value.parse().ok(),
                "--gres" => value
                    .split(',')
                    .find_map(|part| devices(part.strip_prefix("gpu")?)),
                _ => devices(&format!(":{value}")),
            };
            let at = start + line.find(text).unwrap_or(0);
            // An unresolved number or a range (`$N`, `2-4`) leaves the number unset.
            *place = count.map(|count| Counted {
                count,
                text: match tied {
                    Some(_) => text.to_owned(),
                    None => format!("{text} {value}"),
                },
                at: at..at + text.len(),
            });
        }
    }

    fn total(self) -> Option<(u64, u64, Counted)> {
        let nodes = self.nodes.map_or(1, |option| option.count);
        let (gpus, option) = match (self.all, self.each) {
            (Some(all), _) => (all.count, all),
            (None, Some(each)) => (each.count.checked_mul(nodes)?, each),
            (None, None) => return None,
        };
        Some((gpus, nodes, option))
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

    fn gpus(text: &str) -> Vec<(u64, &str)> {
        let found = gpu_requests(text).into_iter();
        found
            .map(|(gpus, _, option)| (gpus, &text[option.at]))
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
        assert_eq!(gpus("\n#SBATCH --gres=gpu:8\n"), [(8, "--gres=gpu:8")]);
    }
}
