//! Stream capture and graphs: operations with the order that streams and events gave them.
//!
//! A launch appends the operations to streams of the graph's own, one for each captured stream, with the
//! same order. So a graph runs by the rules of [`crate::stream`].

use std::collections::{HashMap, HashSet};
use std::thread::ThreadId;

use crate::status::Status;
use crate::stream::{Kind, Mark, Streams, Task};

#[derive(Debug, Clone, Default)]
pub struct Graph {
    nodes: Vec<Node>,
    /// Streams that the operations were captured from.
    lanes: usize,
}

#[derive(Debug, Clone)]
struct Node {
    lane: usize,
    /// Earlier nodes that this one waits for.
    dependencies: Vec<usize>,
    task: Task,
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct Executable {
    graph: Graph,
    /// Its streams, by the lanes of the graph.
    lanes: Vec<usize>,
    /// The end of the last launch: launches of one executable never overlap.
    last: Option<Mark>,
}

/// Which calls an open capture forbids (`CUstreamCaptureMode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureMode {
    /// Unsafe calls of every thread, unless that thread is relaxed.
    Global,
    /// Unsafe calls of the thread that began the capture.
    ThreadLocal,
    Relaxed,
}

/// The end of a stream or an event within a capture.
#[derive(Debug, Clone)]
pub struct Frontier {
    pub capture: u32,
    nodes: Vec<usize>,
}

#[derive(Debug)]
pub struct Capture {
    id: u32,
    /// The stream that began the capture.
    pub origin: usize,
    pub mode: CaptureMode,
    pub thread: ThreadId,
    /// An illegal call has ended the capture's use; only ending it is possible.
    pub invalidated: bool,
    graph: Graph,
    /// For each captured stream, its lane and the nodes that its next node waits for.
    streams: HashMap<usize, (usize, Vec<usize>)>,
}

impl Capture {
    pub fn begin(id: u32, origin: usize, mode: CaptureMode) -> Capture {
        Capture {
            id,
            origin,
            mode,
            thread: std::thread::current().id(),
            invalidated: false,
            graph: Graph {
                nodes: Vec::new(),
                lanes: 1,
            },
            streams: HashMap::from([(origin, (0, Vec::new()))]),
        }
    }

    pub fn contains(&self, stream: usize) -> bool {
        self.streams.contains_key(&stream)
    }

    /// Whether the event was recorded in this capture.
    pub fn recorded(&self, event: &Frontier) -> bool {
        event.capture == self.id
    }

    pub fn streams(&self) -> impl Iterator<Item = usize> {
        self.streams.keys().copied()
    }

    /// Adds an operation of a captured stream.
    pub fn add(&mut self, stream: usize, task: Task) -> Result<(), Status> {
        let node = self.graph.nodes.len();
        let (lane, end) = self.streams.get_mut(&stream).ok_or(Status::IllegalState)?;
        self.graph.nodes.push(Node {
            lane: *lane,
            dependencies: std::mem::replace(end, vec![node]),
            task,
        });
        Ok(())
    }

    /// The end of a captured stream, as an event stores it.
    pub fn record(&self, stream: usize) -> Option<Frontier> {
        let (_, nodes) = self.streams.get(&stream)?;
        Some(Frontier {
            capture: self.id,
            nodes: nodes.clone(),
        })
    }

    /// Lets a stream wait for an event of this capture; the stream joins the capture if it was outside.
    pub fn wait(&mut self, stream: usize, event: &Frontier) {
        let lanes = &mut self.graph.lanes;
        let (_, end) = self.streams.entry(stream).or_insert_with(|| {
            *lanes += 1;
            (*lanes - 1, Vec::new())
        });
        end.extend(&event.nodes);
        end.sort_unstable();
        end.dedup();
    }

    /// Ends the capture: every operation must be ordered before the end of the stream that began it.
    pub fn end(self) -> Result<Graph, Status> {
        if self.invalidated {
            return Err(Status::CaptureInvalidated);
        }
        let mut joined = HashSet::new();
        let mut open: Vec<usize> = self.streams[&self.origin].1.clone();
        while let Some(node) = open.pop() {
            if joined.insert(node) {
                open.extend(&self.graph.nodes[node].dependencies);
            }
        }
        if joined.len() < self.graph.nodes.len() {
            return Err(Status::CaptureUnjoined);
        }
        Ok(self.graph)
    }
}

impl Executable {
    /// `add_lane` adds a stream.
    pub fn new(graph: Graph, mut add_lane: impl FnMut() -> usize) -> Executable {
        Executable {
            lanes: (0..graph.lanes).map(|_| add_lane()).collect(),
            graph,
            last: None,
        }
    }

    /// Appends the graph to a stream.
    pub fn launch(&mut self, streams: &mut Streams, stream: usize) {
        let before: Vec<Mark> = self.last.take().into_iter().collect();
        let start = streams.push(stream, Kind::Join, &before);
        let mut marks: Vec<Mark> = Vec::with_capacity(self.graph.nodes.len());
        for node in &self.graph.nodes {
            let mut after = vec![start.clone()];
            after.extend(
                node.dependencies
                    .iter()
                    .map(|&earlier| marks[earlier].clone()),
            );
            let kind = Kind::Task(node.task.clone());
            marks.push(streams.push(self.lanes[node.lane], kind, &after));
        }
        self.last = Some(streams.push(stream, Kind::Join, &marks));
    }
}
