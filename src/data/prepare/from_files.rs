//! Preparation of files: resolves them, checks them, compares them with the existing store, builds and
//! publishes.

use serde_json::json;

use crate::recipe::schema::spec::Objective;
use crate::util::{format, memory};

use super::super::build::{Builder, Meter};
use super::super::chat::ChatTemplate;
use super::super::encode::{Encoder, answers_only};
use super::super::error::DataError;
use super::super::hold_out::hold_out;
use super::super::manifest::{Manifest, PartRecord, Skipped, VERSION, fingerprint};
use super::super::pack::Summary;
use super::super::publish::Draft;
use super::super::read::{Ids, Reading};
use super::super::request::{Phase, PrepareRequest, Progress};
use super::super::sources::{self, AllSources, Earlier, Sources};
use super::super::tokenizer::Tokenizer;
use super::super::writer::token_width;
use super::super::{Part, check_vocabulary};
use super::{Prepared, finish, reuse};

/// Vocabulary of `.bin` files if the model's is unknown.
const VOCABULARY: u64 = 1 << 16;

/// Memory of preparation beyond the size of its sources, bytes: several times what the largest tokenizers
/// take.
const MEMORY: u64 = 2 << 30;

pub(super) fn prepare(
    request: &PrepareRequest<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, DataError> {
    if !matches!(
        request.objective,
        Objective::LanguageModelling | Objective::Sft
    ) {
        return Err(request.setting(
            "objective",
            "preference pairs and rewards cannot be read from data",
            "choose language-modelling or sft",
        ));
    }
    let sources = sources::resolve(request)?;
    let mut prepared = prepare_sources(request, &sources, progress)?;
    prepared.notes.splice(0..0, sources.notes);
    Ok(prepared)
}

fn prepare_sources(
    request: &PrepareRequest<'_>,
    sources: &AllSources,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, DataError> {
    let data = request.data;
    let total = sources.train.bytes()? + sources.evaluation.bytes()?;
    let _limited = memory::limit(MEMORY.saturating_add(total));
    let tokenizer = if sources.train.only_ids() && sources.evaluation.only_ids() {
        Tokenizer::none(request.vocab_size.unwrap_or(VOCABULARY))
    } else {
        Tokenizer::load(request)?
    };
    let vocabulary_size = tokenizer.vocabulary_size();
    if let Some(vocab_size) = request.vocab_size {
        check_vocabulary(&tokenizer.described(), vocabulary_size, vocab_size)?;
    }
    let template = ChatTemplate::new(request.tokenizer.chat_template.as_deref(), &tokenizer);

    let mut state = Progress {
        phase: Phase::Checksums,
        bytes: 0,
        total,
        samples: 0,
    };
    let earlier = Earlier::of(request.began_in.into_iter().chain([request.directory]));
    let mut records =
        |sources: &Sources| sources.records(&earlier, &mut state, progress, request.stopped);
    let trained = records(&sources.train)?;
    let evaluated = records(&sources.evaluation)?;
    let identity = json!({
        "sequence_length": data.sequence_length,
        "packing": data.packing,
        "answers_only": answers_only(request),
        "seed": request.seed,
        "held_out": data.held_out,
        "tokenizer": [tokenizer.checksum, vocabulary_size],
        "chat_template": template.as_ref().ok().map(|template| &template.source),
        "training_data": sources.train.identity(&trained),
        "evaluation_data": sources.evaluation.identity(&evaluated),
    });
    let mut manifest = Manifest {
        version: VERSION,
        fingerprint: fingerprint(&identity),
        identity,
        sequence_length: data.sequence_length,
        packing: data.packing,
        tokenizer: tokenizer.name.clone(),
        vocabulary_size,
        used_vocabulary: 0,
        sources: trained.into_iter().chain(evaluated).collect(),
        train: PartRecord::default(),
        evaluation: None,
        skipped: Skipped::default(),
        notes: Vec::new(),
        synthetic: None,
    };
    if let Some(prepared) = reuse(request, &manifest)? {
        return Ok(prepared);
    }

    let encoder = Encoder::new(request, &tokenizer, &template);
    let builder = Builder {
        encoder: &encoder,
        reading: Reading {
            packing: data.packing,
            ids: Ids { vocabulary_size },
        },
        sequence_length: data.sequence_length,
        width: token_width(vocabulary_size),
        seed: request.seed,
        stopped: request.stopped,
    };
    let mut meter = Meter {
        state: Progress { bytes: 0, ..state },
        report: progress,
    };
    let mut draft = Draft::begin(request.directory)?;
    build(
        request,
        sources,
        &builder,
        &mut draft,
        &mut meter,
        &mut manifest,
    )?;
    check_unchanged(&manifest, sources)?;
    if let Some(vocab_size) = request.vocab_size {
        manifest.check_vocabulary(vocab_size)?;
    }
    manifest.notes.extend(encoder.note());
    finish(draft, manifest)
}

/// Writes both parts and records them in the manifest.
fn build(
    request: &PrepareRequest<'_>,
    sources: &AllSources,
    builder: &Builder<'_>,
    draft: &mut Draft,
    meter: &mut Meter<'_>,
    manifest: &mut Manifest,
) -> Result<(), DataError> {
    let train = draft.create(Part::Train.directory())?;
    let (record, mut summary) = builder.build(&sources.train, &train, meter)?;
    check_enough(request, "data.train", &sources.train, &record, &summary)?;
    manifest.train = record;
    if !sources.evaluation.is_empty() {
        let directory = draft.create(Part::Evaluation.directory())?;
        let (record, evaluated) = builder.build(&sources.evaluation, &directory, meter)?;
        summary.add(&evaluated);
        check_enough(
            request,
            "data.evaluation",
            &sources.evaluation,
            &record,
            &evaluated,
        )?;
        manifest.evaluation = Some(record);
    } else {
        let count = request.held_out(manifest.train.samples)?;
        if count > 0 {
            let directory = draft.create(Part::Evaluation.directory())?;
            let (kept, held) = hold_out(
                &train,
                &manifest.train,
                &directory,
                count,
                request.seed,
                manifest.vocabulary_size,
                request.stopped,
            )?;
            manifest.train = kept;
            manifest.evaluation = Some(held);
        }
    }
    manifest.used_vocabulary = summary.used_vocabulary;
    manifest.skipped = summary.skipped;
    Ok(())
}

/// Refuses a part without samples, and packed training data shorter than one sample.
fn check_enough(
    request: &PrepareRequest<'_>,
    name: &str,
    sources: &Sources,
    record: &PartRecord,
    summary: &Summary,
) -> Result<(), DataError> {
    if record.samples == 0 {
        let files: Vec<String> = sources
            .files()
            .map(|file| file.name.display().to_string())
            .collect();
        let mut problem = match files.as_slice() {
            [] => "every source is left out".to_string(),
            [file] => format!("no sample can be made of {file}"),
            [file, ..] => format!(
                "no sample can be made of {} files such as {file}",
                files.len()
            ),
        };
        let skipped = summary.skipped.to_string();
        if !skipped.is_empty() {
            problem += &format!(" ({skipped})");
        }
        let skipped = &summary.skipped;
        if skipped.truncated > 0 && skipped.without_targets > 0 {
            // All tokens with loss lie beyond the cut.
            let length = request.data.sequence_length;
            return Err(request.setting(
                "data.sequence_length",
                format!(
                    "{problem}: within {} there is nothing to learn",
                    format::count(length, "token")
                ),
                "raise it until the answers fit, or give shorter prompts",
            ));
        }
        return Err(request.setting(name, problem, "give data with at least one sample"));
    }
    if name == "data.train" && request.data.packing && summary.full == 0 {
        let length = request.data.sequence_length;
        return Err(request.setting(
            "data.sequence_length",
            format!(
                "a packed sample of {length} needs {} tokens, the whole data has {}",
                length + 1,
                summary.tokens
            ),
            format!(
                "set it to at most {}, give more data, or set packing=false",
                summary.tokens.saturating_sub(1)
            ),
        ));
    }
    Ok(())
}

/// Refuses a source whose size changed while it was read, because its checksum is outdated.
fn check_unchanged(manifest: &Manifest, sources: &AllSources) -> Result<(), DataError> {
    let files = sources.train.files().chain(sources.evaluation.files());
    for (file, record) in files.zip(&manifest.sources) {
        let bytes = file.bytes()?;
        if bytes != record.content.bytes {
            return Err(DataError::source(
                file.shown(),
                format!(
                    "it had {} bytes and has {bytes} now, it was written while it was read",
                    record.content.bytes
                ),
                "launch again when no process writes to it",
            ));
        }
    }
    Ok(())
}
