//! Reads all sources and writes one part: documents are chosen in order, encoded in parallel in bounded
//! chunks, and appended in order, so that the bytes do not depend on the threads.

use std::collections::HashMap;
use std::path::Path;

use rayon::ThreadPool;
use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_128;

use super::chosen::Twister;
use super::dataset::{INDEX, Store};
use super::encode::{Encoder, Outcome, Piece};
use super::error::DataError;
use super::kind::Kind;
use super::manifest::PartRecord;
use super::pack::{IndexWriter, SampleWriter, Summary, token_width};
use super::read::{self, Content, Document};
use super::replies::Messages;
use super::request::{Meter, Phase, PrepareRequest, check_stopped};
use super::sources::{Source, Sources};
use super::token::Token;
use crate::recipe::schema::spec::{Conversion, Marks, PackingStrategy};
use crate::samples::Order;
use crate::util::durable::FileError;
use crate::util::random::Random;

/// Source bytes of a chunk in memory; the last document of a chunk may exceed it.
const CHUNK_BYTES: u64 = 4 << 20;
const CHUNK_DOCUMENTS: usize = 4096;

/// Key that separates the choice of held-out samples from that of shares of sources.
const HELD_OUT: u64 = 0x6865_6c64;

/// Builds a part from its sources into an existing directory.
pub(super) fn build(
    encoder: &Encoder<'_>,
    pool: &ThreadPool,
    sources: &Sources,
    directory: &Path,
    meter: &mut Meter<'_>,
) -> Result<(PartRecord, Summary), DataError> {
    let width = token_width(encoder.tokenizer.vocabulary_size);
    let data = encoder.request.data;
    let mut builder = Builder {
        encoder,
        writer: match encoder.request.kind() {
            Kind::Text => {
                SampleWriter::create(directory, width, data.sequence_length, data.extra_token)?
            }
            kind => {
                let longest = match kind == Kind::Labelled && encoder.request.decodes_rows() {
                    // What follows a label was cut by itself.
                    true => u64::from(u32::MAX),
                    false => kind.longest(encoder.request.row_limit()),
                };
                SampleWriter::create(directory, width, longest, false)?
            }
        },
        meter,
        pieces: Vec::new(),
        bytes: 0,
        pool,
    };
    for (number, source) in sources.list.iter().enumerate() {
        builder.read(source, &[sources.key, number as u64])?;
    }
    builder.flush()?;
    builder.writer.finish()
}

/// A part that is being built.
struct Builder<'a, 'm> {
    encoder: &'a Encoder<'a>,
    writer: SampleWriter,
    meter: &'a mut Meter<'m>,
    /// Documents that are encoded together.
    pieces: Vec<Piece<'a>>,
    /// Source bytes of `pieces`.
    bytes: u64,
    /// Where templates are rendered.
    pool: &'a ThreadPool,
}

impl<'a> Builder<'a, '_> {
    /// Reads the documents of a source that its weight selects.
    fn read(&mut self, source: &'a Source, keys: &[u64; 2]) -> Result<(), DataError> {
        let reading = self.encoder.reading();
        let kind = self.encoder.request.kind();
        let choose_columns = |available: &[&str]| source.columns_of(available, kind);
        let messages = match source.conversion {
            Some(Conversion::RankedReplies) => {
                Some(Messages::read(source, &choose_columns, reading)?)
            }
            _ => None,
        };
        let answers = match source.conversion {
            Some(conversion) if conversion.selects(kind) => {
                let of = (source, conversion, kind);
                let request = self.encoder.request;
                let read = (messages.as_ref(), &request.data.marks, request.seed);
                Some(selected(of, read, &choose_columns, reading)?)
            }
            _ => None,
        };
        let mut selection = None;
        if let Some(weight) = source.weight {
            let total = match &answers {
                Some(answers) => answers.iter().filter(|is_answer| **is_answer).count() as u64,
                None => {
                    let counts = source.files.iter().map(|file| read::count(file, reading));
                    counts.sum::<Result<u64, DataError>>()?
                }
            };
            let keys = [self.encoder.request.seed, keys[0], keys[1]];
            // Above 1, a weight is a number of documents.
            let wanted = if weight > 1.0 {
                weight
            } else {
                total as f64 * weight
            };
            let wanted = (wanted as u64).min(total);
            selection = Some(choose(&keys, wanted, total));
        }
        let mut pending: Option<Piece> = None;
        let mut answers = answers.map(Vec::into_iter);
        for file in &source.files {
            for document in read::open(file, &choose_columns, reading)? {
                check_stopped(reading.stopped)?;
                let document = replaced(document?, messages.as_ref())?;
                let is_answer = answers.as_mut().is_none_or(|all| all.next() == Some(true));
                let chosen = is_answer && selection.as_mut().is_none_or(|is_next| is_next());
                // A piece continues a stream only if the piece before it was chosen too.
                let starts = !document.continues || pending.is_none();
                if let Some(piece) = pending.take() {
                    self.push(Piece {
                        ends: starts || !chosen,
                        ..piece
                    })?;
                }
                if !chosen {
                    self.meter.add(Phase::Tokenising, document.bytes, 0)?;
                    continue;
                }
                pending = Some(Piece {
                    document,
                    starts,
                    ends: true,
                    source,
                });
            }
        }
        pending.map_or(Ok(()), |piece| self.push(piece))
    }

    fn push(&mut self, piece: Piece<'a>) -> Result<(), DataError> {
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
        let encoder = self.encoder;
        let encode = |piece: &Piece| {
            check_stopped(encoder.request.stopped)?;
            encoder.encode(piece)
        };
        let outcomes: Vec<Result<Vec<Outcome>, DataError>> =
            (self.pool).install(|| pieces.par_iter().map(encode).collect());
        let before = self.writer.samples();
        for (piece, outcomes) in pieces.iter().zip(outcomes) {
            for outcome in outcomes? {
                self.append(piece, outcome)?;
            }
        }
        let samples = self.writer.samples() - before;
        self.meter.add(Phase::Tokenising, bytes, samples)
    }

    fn append(&mut self, piece: &Piece, outcome: Outcome) -> Result<(), DataError> {
        let data = self.encoder.request.data;
        let packing = data.wraps();
        let splits = data.packs_whole() && data.packing_strategy == PackingStrategy::BfdSplit;
        let are_ids = matches!(piece.document.content, Content::Ids(_));
        match outcome {
            Outcome::Empty => self.writer.skipped.empty += 1,
            Outcome::WithoutAnswer => self.writer.skipped.without_answer += 1,
            Outcome::WithoutTargets => self.writer.skipped.without_targets += 1,
            Outcome::Rows { tokens, is_cut } => {
                self.writer.skipped.truncated += u64::from(is_cut);
                self.writer.document(tokens)?;
            }
            Outcome::Tokens(tokens) if packing || are_ids => {
                // Token ids do not mark documents, so they are always cut like packed ones.
                if !packing && piece.starts {
                    self.writer.cut()?;
                }
                self.writer.pack(&tokens)?;
            }
            Outcome::Tokens(tokens) if splits => {
                self.writer.cut()?;
                self.writer.pack(&tokens)?;
                self.writer.cut()?;
            }
            Outcome::Tokens(tokens) => self.writer.document(tokens)?,
        }
        Ok(())
    }
}

fn replaced(document: Document, messages: Option<&Messages>) -> Result<Document, DataError> {
    match messages {
        Some(messages) => messages.replace(document),
        None => Ok(document),
    }
}

/// Whether each document of a source is one of its prompt's that are trained on.
fn selected(
    (source, conversion, kind): (&Source, Conversion, Kind),
    (messages, marks, seed): (Option<&Messages>, &Marks, u64),
    choose: read::Choose<'_>,
    reading: read::Reading<'_>,
) -> Result<Vec<bool>, DataError> {
    let mut answers = Vec::new();
    // Of each prompt, in the order of their first documents: the documents' numbers, and the scores of their answers.
    let mut found: Vec<(Vec<usize>, Vec<f64>)> = Vec::new();
    // By the hash of the prompt.
    let mut places: HashMap<u128, usize> = HashMap::new();
    for file in &source.files {
        for document in read::open(file, choose, reading)? {
            check_stopped(reading.stopped)?;
            let document = replaced(document?, messages)?;
            let row = document.content.row();
            let converted = row.and_then(|row| conversion.convert(&row, marks));
            let converted = converted
                .map_err(|fault| DataError::record(&document.place, fault.problem, fault.help))?;
            if let Some(converted) = converted {
                let prompt = xxh3_128(converted.prompt_as_written.to_string().as_bytes());
                let place = *places.entry(prompt).or_insert(found.len());
                if place == found.len() {
                    found.push(Default::default());
                }
                let (numbers, scores) = &mut found[place];
                numbers.push(answers.len());
                scores.push(converted.score);
            }
            answers.push(false);
        }
    }
    let mut random = Twister::new(seed);
    for (numbers, scores) in found {
        for number in conversion.selected(kind, &scores, &mut random) {
            answers[numbers[number]] = true;
        }
    }
    Ok(answers)
}

/// Chooses exactly `wanted` of `total` items: those that a seeded permutation puts first. Returns whether the next item
/// is chosen; `false` after `total` calls. Different keys choose independently.
fn choose(keys: &[u64], wanted: u64, total: u64) -> impl FnMut() -> bool + use<> {
    let seed = Random::new(keys).next_u64();
    // There is no order of no items.
    let order = Order::new(seed, total, true).ok();
    let mut next = 0..total;
    move || match (&order, next.next()) {
        (Some(order), Some(item)) => order.at(item) < wanted,
        _ => false,
    }
}

/// Moves `count` samples of the part in `train` to `evaluation`, both existing directories; returns both records.
///
/// The seed chooses whole samples after all of them are written, so the count is exact. They are copied to
/// the evaluation part and removed from the training index. Their tokens stay in the training part's file,
/// where no index entry refers to them.
pub(super) fn hold_out(
    request: &PrepareRequest<'_>,
    train: &Path,
    record: &PartRecord,
    evaluation: &Path,
    count: u64,
    vocabulary_size: u64,
) -> Result<(PartRecord, PartRecord), DataError> {
    let store = Store::open(train.to_path_buf(), record.clone(), vocabulary_size)?;
    let shorter = train.join("index.shorter");
    let mut kept = IndexWriter::create(shorter.clone())?;
    // The limit is the longest sample, so nothing is cut or skipped a second time.
    let (width, longest) = (record.token_width, record.longest_sample);
    let mut held = SampleWriter::create(evaluation, width, longest, false)?;
    let mut is_held = choose(&[request.seed, HELD_OUT], count, record.samples);
    for index in 0..record.samples {
        check_stopped(request.stopped)?;
        if !is_held() {
            kept.append(store.entry(index)?)?;
            continue;
        }
        let sample = store.sample(index)?;
        let tokens = sample.tokens.iter().zip(&sample.loss_mask);
        held.document(tokens.map(|(&id, &target)| Token { id, target }).collect())?;
    }
    let kept = PartRecord {
        token_width: record.token_width,
        tokens_file: record.tokens_file.clone(),
        ..kept.finish()?
    };
    let index = train.join(INDEX);
    std::fs::rename(&shorter, &index)
        .map_err(|error| FileError::from_io("rename", &shorter, 0, error))?;
    Ok((kept, held.finish()?.0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_position_has_the_same_chance() {
        let mut counts = [0u32; 10];
        for seed in 0..20_000 {
            let mut is_chosen = choose(&[seed], 3, 10);
            for count in &mut counts {
                *count += u32::from(is_chosen());
            }
        }
        for count in counts {
            // The expected count is 6000, the standard deviation 65.
            assert!((5_700..=6_300).contains(&count), "{counts:?}");
        }
    }

    proptest! {
        #[test]
        fn the_number_chosen_is_exact(seed: u64, total in 0u64..500, wanted in 0u64..600) {
            let mut is_chosen = choose(&[seed], wanted, total);
            let chosen = (0..total + 10).filter(|_| is_chosen()).count() as u64;
            prop_assert_eq!(chosen, wanted.min(total));
        }
    }
}
