//! Reads all sources and writes one part: documents are chosen in order, encoded in parallel in bounded
//! chunks, and appended in order, so that the bytes do not depend on the threads.

use std::path::Path;

use rayon::prelude::*;

use super::encode::{Encoder, Outcome, Piece};
use super::error::DataError;
use super::manifest::PartRecord;
use super::pack::{SampleWriter, Summary};
use super::read::{self, Content, Document, Reading};
use super::request::{Phase, Progress, Stopped, check_stopped};
use super::selection::Selection;
use super::sources::{Source, Sources};

/// Source bytes of a chunk in memory; the last document of a chunk may exceed it.
const CHUNK_BYTES: u64 = 4 << 20;
const CHUNK_DOCUMENTS: usize = 4096;

/// Builds the parts of a data set.
pub(super) struct Builder<'a> {
    pub encoder: &'a Encoder<'a>,
    pub reading: Reading,
    pub sequence_length: u64,
    /// Bytes of a token id in the store.
    pub width: u64,
    /// Keys of the random numbers that choose shares of sources.
    pub seed: u64,
    pub stopped: Stopped<'a>,
}

/// Progress over all parts of the data.
pub(super) struct Meter<'a> {
    pub state: Progress,
    pub report: &'a mut dyn FnMut(Progress),
}

impl Meter<'_> {
    fn add(&mut self, bytes: u64, samples: u64) {
        self.state.phase = Phase::Tokenising;
        self.state.bytes = (self.state.bytes + bytes).min(self.state.total);
        self.state.samples += samples;
        (self.report)(self.state);
    }
}

impl Builder<'_> {
    /// Builds a part from its sources into an existing directory.
    pub fn build(
        &self,
        sources: &Sources,
        directory: &Path,
        meter: &mut Meter<'_>,
    ) -> Result<(PartRecord, Summary), DataError> {
        let mut chunk = Chunk {
            builder: self,
            sources,
            writer: SampleWriter::create(directory, self.width, self.sequence_length)?,
            meter,
            pieces: Vec::new(),
            bytes: 0,
        };
        for (number, source) in sources.list.iter().enumerate() {
            self.choose(number, source, sources, &mut chunk)?;
        }
        chunk.flush()?;
        chunk.writer.finish()
    }

    /// Passes on the documents of a source that its weight selects.
    fn choose(
        &self,
        number: usize,
        source: &Source,
        sources: &Sources,
        chunk: &mut Chunk<'_, '_>,
    ) -> Result<(), DataError> {
        let mut selection = match source.weight {
            Some(weight) => {
                let mut total = 0;
                for file in &source.files {
                    total += read::count(file, self.reading, self.stopped)?;
                }
                let wanted = (total as f64 * weight) as u64;
                let keys = [self.seed, sources.key, number as u64];
                Some(Selection::new(&keys, wanted, total))
            }
            None => None,
        };
        let mut pending: Option<Piece> = None;
        for file in &source.files {
            for document in read::open(file, &source.columns, self.reading, self.stopped)? {
                check_stopped(self.stopped)?;
                let document = document?;
                if selection
                    .as_mut()
                    .is_some_and(|chosen| !chosen.next_is_chosen())
                {
                    chunk.meter.add(document.bytes, 0);
                    if let Some(piece) = pending.take() {
                        chunk.push(Piece {
                            ends: true,
                            ..piece
                        })?;
                    }
                    continue;
                }
                // A piece continues a stream only if the piece before it was chosen too.
                let starts = !document.continues || pending.is_none();
                if let Some(piece) = pending.take() {
                    chunk.push(Piece {
                        ends: starts,
                        ..piece
                    })?;
                }
                pending = Some(Piece {
                    document,
                    starts,
                    ends: true,
                    source: number,
                });
            }
        }
        pending.map_or(Ok(()), |piece| chunk.push(piece))
    }
}

/// Documents that are encoded together.
struct Chunk<'a, 'm> {
    builder: &'a Builder<'a>,
    sources: &'a Sources,
    writer: SampleWriter,
    meter: &'a mut Meter<'m>,
    pieces: Vec<Piece>,
    bytes: u64,
}

impl Chunk<'_, '_> {
    fn push(&mut self, piece: Piece) -> Result<(), DataError> {
        self.bytes += piece.document.bytes;
        self.pieces.push(piece);
        if self.bytes >= CHUNK_BYTES || self.pieces.len() >= CHUNK_DOCUMENTS {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), DataError> {
        let pieces = std::mem::take(&mut self.pieces);
        let bytes = std::mem::take(&mut self.bytes);
        let (builder, sources) = (self.builder, self.sources);
        let encode = |piece: &Piece| {
            check_stopped(builder.stopped)?;
            let columns = &sources.list[piece.source].columns;
            builder.encoder.encode(piece, columns)
        };
        let outcomes: Vec<Result<Outcome, DataError>> = pieces.par_iter().map(encode).collect();
        let before = self.writer.samples();
        for (piece, outcome) in pieces.iter().zip(outcomes) {
            self.append(piece, outcome?)?;
        }
        let samples = self.writer.samples() - before;
        self.meter.add(bytes, samples);
        Ok(())
    }

    fn append(&mut self, piece: &Piece, outcome: Outcome) -> Result<(), DataError> {
        let Piece {
            document: Document { content, .. },
            starts,
            ..
        } = piece;
        match outcome {
            Outcome::Empty => self.writer.skipped().empty += 1,
            Outcome::WithoutAnswer => self.writer.skipped().without_answer += 1,
            Outcome::Tokens(tokens) if self.builder.reading.packing => self.writer.pack(&tokens)?,
            Outcome::Tokens(tokens) if matches!(content, Content::Ids(_)) => {
                // Token ids do not mark documents, so they are cut like packed ones.
                if *starts {
                    self.writer.cut()?;
                }
                self.writer.pack(&tokens)?;
            }
            Outcome::Tokens(tokens) => self.writer.document(tokens)?,
        }
        Ok(())
    }
}
