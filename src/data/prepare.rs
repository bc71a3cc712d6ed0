//! Preparation: writes a token store from the recipe's sources, once, before any rank starts.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde_json::json;

use super::build::{build, hold_out};
use super::chat::ChatTemplate;
use super::check_vocabulary;
use super::dataset::{ENTRY, EVALUATION, Store, TRAIN};
use super::encode::Encoder;
use super::error::DataError;
use super::fit;
use super::kind::Kind;
use super::manifest::{Manifest, PartRecord};
use super::pack::Summary;
use super::publish::Draft;
use super::request::{Meter, Phase, PrepareRequest, Progress};
use super::sources::{self, AllSources, Sources};
use super::synthetic::Language;
use super::tokenizer::Tokenizer;
use crate::recipe::schema::spec::{Marks, Objective, PackingStrategy, Rows, Synthetic};
use crate::util::{format, large_stack, memory};

/// Upper limit of the sequence length; the store's index could not hold longer samples.
const MAX_SEQUENCE_LENGTH: u64 = 1 << 30;

/// Vocabulary of `.bin` files if the model's is unknown.
const VOCABULARY: u64 = 1 << 16;

/// Memory of preparation beyond the size of its sources, bytes: several times what the largest tokenizers
/// take.
const MEMORY: u64 = 2 << 30;

/// Data that ranks can open.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    /// Manifest of the data.
    pub manifest: Manifest,
    /// Notes on the sources and the preparation, for people, one line each.
    pub notes: Vec<String>,
    /// Whether the directory already held the same data.
    pub reused: bool,
}

impl Prepared {
    /// What packing made of whole documents, for people.
    pub fn packed(&self) -> Option<String> {
        let manifest = &self.manifest;
        manifest.train.packs_file.as_ref()?;
        let documents = manifest.train.index_file.bytes / ENTRY;
        let extra = manifest.row_limit() - manifest.sequence_length;
        let taken = manifest.train.tokens - extra * documents;
        let room = manifest.train.samples * manifest.sequence_length;
        Some(format!(
            "{} packed into {}, {:.0} % full",
            format::count(documents, "document"),
            format::count(manifest.train.samples, "sample"),
            100.0 * taken as f64 / room as f64
        ))
    }

    /// What of the data no step trains, for people.
    fn untrained(&self, request: &PrepareRequest<'_>) -> Option<String> {
        let skipped = &self.manifest.skipped;
        let counts = skipped.to_string();
        if counts.is_empty() {
            return None;
        }
        let limit = match skipped.truncated {
            0 => String::new(),
            _ => format!(
                "; `{}` is {}",
                (request.key)("data.sequence_length"),
                self.manifest.sequence_length
            ),
        };
        Some(format!("some data are not trained: {counts}{limit}"))
    }

    fn of(manifest: Manifest, reused: bool) -> Prepared {
        Prepared {
            notes: manifest.notes.clone(),
            manifest,
            reused,
        }
    }
}

/// Prepares the data of a recipe into `request.directory`, or finds it there unchanged. After an error the
/// directory is unchanged.
pub fn prepare(
    request: &PrepareRequest<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, DataError> {
    let data = request.data;
    if !(1..=MAX_SEQUENCE_LENGTH).contains(&data.sequence_length) {
        return Err(request.setting(
            "data.sequence_length",
            format!("{} tokens per sample", data.sequence_length),
            format!("set 1 to {MAX_SEQUENCE_LENGTH}"),
        ));
    }
    if data.train.is_empty() {
        return Err(request.no_data());
    }
    if request.kind() != Kind::Text || request.decodes_rows() {
        refuse_for_rows(request)?;
    }
    if !data.packing && data.packing_strategy != PackingStrategy::default() {
        return Err(request.setting(
            "data.packing_strategy",
            "nothing is packed",
            format!("remove it, or set {}=true", (request.key)("data.packing")),
        ));
    }
    if let Some(language) = data.synthetic() {
        return prepare_synthetic(request, language);
    }
    if !matches!(
        request.objective,
        Objective::LanguageModelling
            | Objective::Sft
            | Objective::Dpo
            | Objective::Orpo
            | Objective::Cpo
            | Objective::Simpo
            | Objective::Kto
    ) {
        return Err(request.setting(
            "objective",
            "prompts for generation and rewards cannot be read from data",
            "choose language-modelling, sft, dpo, kto, orpo, cpo or simpo",
        ));
    }
    let sources = sources::resolve(request)?;
    let mut prepared = prepare_files(request, &sources, progress)?;
    prepared.notes.splice(0..0, sources.notes);
    prepared.notes.extend(prepared.untrained(request));
    Ok(prepared)
}

/// Refuses settings that rows of prompts and completions do not have.
fn refuse_for_rows(request: &PrepareRequest<'_>) -> Result<(), DataError> {
    let data = request.data;
    let objective = request.objective;
    if data.synthetic().is_some() {
        return Err(request.setting(
            "data.train.0.path",
            match request.kind() {
                Kind::Text => "the synthetic language has no prompts and completions".to_owned(),
                _ => format!("the synthetic language has no preferences for {objective}"),
            },
            "give JSONL or Parquet",
        ));
    }
    let without_effect = [
        ("data.packing", data.packing),
        ("data.answers_only", data.answers_only.is_some()),
        ("data.completions_only", data.completions_only.is_some()),
    ];
    let on = match request.kind() {
        Kind::Text => format!("{}=decoded", (request.key)("data.rows.tokens")),
        _ => objective.to_string(),
    };
    match without_effect.into_iter().find(|(_, is_set)| *is_set) {
        None => Ok(()),
        Some((key, _)) => Err(request.setting(
            key,
            format!("it has no effect on {on}, whose rows are not packed and carry loss on their completions"),
            "remove it",
        )),
    }
}

/// Writes only the manifest: samples are generated on demand. Held-out samples are the last ones of the
/// language.
fn prepare_synthetic(
    request: &PrepareRequest<'_>,
    settings: Synthetic,
) -> Result<Prepared, DataError> {
    let length = request.data.sequence_length;
    Language::new(&settings, &(request.key)("data.train.0.synthetic"))?;
    let held_out = request.held_out(settings.samples)?;
    let part = |first_sample, samples| PartRecord {
        samples,
        tokens: samples * (length + 1),
        target_tokens: samples * length,
        longest_sample: length + 1,
        first_sample,
        ..PartRecord::default()
    };
    let trained = settings.samples - held_out;
    let identity = json!({
        "sequence_length": length,
        "held_out": request.data.held_out,
        "synthetic": settings,
    });
    let manifest = Manifest {
        tokenizer: "none".to_string(),
        vocabulary_size: settings.vocabulary,
        used_vocabulary: settings.vocabulary,
        train: part(0, trained),
        evaluation: (held_out > 0).then(|| part(trained, held_out)),
        synthetic: Some(settings),
        ..Manifest::new(identity, length)
    };
    if let Some(vocab_size) = request.vocab_size {
        manifest.check_vocabulary(vocab_size)?;
    }
    if let Some(prepared) = reuse(request, &manifest)? {
        return Ok(prepared);
    }
    finish(Draft::begin(request.directory)?, manifest)
}

fn prepare_files(
    request: &PrepareRequest<'_>,
    sources: &AllSources,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, DataError> {
    let data = request.data;
    let total = sources.train.bytes()? + sources.evaluation.bytes()?;
    // Before the limit, which counts stacks.
    let pool = large_stack::pool()?;
    let _limited = memory::limit(MEMORY.saturating_add(total));
    let tokenizer = if sources.train.only_ids() && sources.evaluation.only_ids() {
        Tokenizer::ids(request.vocab_size.unwrap_or(VOCABULARY))
    } else {
        Tokenizer::load(request)?
    };
    let vocabulary_size = tokenizer.vocabulary_size;
    if let Some(vocab_size) = request.vocab_size {
        check_vocabulary(&tokenizer.described(), vocabulary_size, vocab_size)?;
    }
    let source = request.tokenizer.chat_template.as_deref();
    let template = pool.install(|| ChatTemplate::new(source, &tokenizer));

    let mut meter = Meter {
        state: Progress {
            phase: Phase::Checksums,
            bytes: 0,
            total,
            samples: 0,
        },
        report: progress,
        stopped: request.stopped,
    };
    let earlier = sources::earlier(request.began_in.into_iter().chain([request.directory]));
    let trained = sources.train.records(&earlier, &mut meter)?;
    let evaluated = sources.evaluation.records(&earlier, &mut meter)?;
    let answers = request.answers_only();
    let completions = request.completions_only();
    let mut identity = json!({
        "sequence_length": data.sequence_length,
        "packing": data.packing,
        // Runs of older versions know one value for both.
        "answers_only": if answers == completions { json!(answers) } else { json!([answers, completions]) },
        "seed": request.seed,
        "held_out": data.held_out,
        "tokenizer": [tokenizer.checksum, vocabulary_size],
        "chat_template": template.as_ref().ok().map(|template| &template.source),
        "training_data": sources.train.identity(&trained),
        "evaluation_data": sources.evaluation.identity(&evaluated),
    });
    if data.packs_whole() {
        identity["packing_strategy"] = json!(data.packing_strategy);
    }
    if !data.extra_token {
        identity["extra_token"] = json!(false);
    }
    if request.kind() != Kind::Text {
        identity["kind"] = json!(request.kind());
    }
    if data.rows != Rows::default() {
        identity["rows"] = json!(data.rows);
    }
    if data.marks != Marks::default() {
        identity["marks"] = json!(data.marks);
    }
    if let Some(most) = data.max_prompt_length {
        identity["max_prompt_length"] = json!(most);
    }
    let mut manifest = Manifest {
        packing: data.packing,
        kind: request.kind(),
        tokenizer: tokenizer.name.clone(),
        vocabulary_size,
        sources: trained.into_iter().chain(evaluated).collect(),
        ..Manifest::new(identity, data.sequence_length)
    };
    if let Some(prepared) = reuse(request, &manifest)? {
        return Ok(prepared);
    }

    meter.state.bytes = 0;
    let encoder = Encoder {
        request,
        tokenizer: &tokenizer,
        template,
        saw_chat: AtomicBool::new(false),
    };
    let draft = Draft::begin(request.directory)?;
    let train = draft.create(TRAIN)?;
    let (record, mut summary) = build(&encoder, &pool, &sources.train, &train, &mut meter)?;
    check_enough(request, "data.train", &sources.train, &record, &summary)?;
    manifest.train = record;
    let held_out = if sources.evaluation.is_empty() {
        request.held_out(manifest.train.samples)?
    } else {
        0
    };
    if held_out > 0 || !sources.evaluation.is_empty() {
        let directory = draft.create(EVALUATION)?;
        let evaluation = if held_out > 0 {
            let (kept, held) = hold_out(
                request,
                &train,
                &manifest.train,
                &directory,
                held_out,
                vocabulary_size,
            )?;
            manifest.train = kept;
            held
        } else {
            let (record, evaluated) =
                build(&encoder, &pool, &sources.evaluation, &directory, &mut meter)?;
            let (name, sources) = ("data.evaluation", &sources.evaluation);
            check_enough(request, name, sources, &record, &evaluated)?;
            summary.add(&evaluated);
            record
        };
        manifest.evaluation = Some(evaluation);
    }
    if data.packs_whole() {
        let sizes = (data.sequence_length, u64::from(data.extra_token));
        manifest.train = fit::pack(&train, manifest.train, sizes, request.stopped)?;
        let of_evaluation = draft.path().join(EVALUATION);
        manifest.evaluation = (manifest.evaluation.take())
            .map(|record| fit::pack(&of_evaluation, record, sizes, request.stopped))
            .transpose()?;
    }
    manifest.used_vocabulary = summary.used_vocabulary;
    manifest.skipped = summary.skipped;
    check_unchanged(&manifest, sources)?;
    if let Some(vocab_size) = request.vocab_size {
        manifest.check_vocabulary(vocab_size)?;
    }
    manifest.notes.extend(encoder.note());
    finish(draft, manifest)
}

/// Refuses a part without samples, and packed training data shorter than one sample.
fn check_enough(
    request: &PrepareRequest<'_>,
    name: &str,
    sources: &Sources,
    record: &PartRecord,
    summary: &Summary,
) -> Result<(), DataError> {
    let length = request.data.sequence_length;
    let overlap = u64::from(request.data.extra_token);
    if record.samples == 0 {
        let mut files = sources.files().map(|file| file.name.display());
        let mut problem = match (files.next(), files.count()) {
            (None, _) => "every source is left out".to_string(),
            (Some(file), 0) => format!("no sample can be made of {file}"),
            (Some(file), others) => {
                format!(
                    "no sample can be made of {} files such as {file}",
                    others + 1
                )
            }
        };
        let skipped = &summary.skipped;
        if !skipped.to_string().is_empty() {
            problem += &format!(" ({skipped})");
        }
        if skipped.truncated > 0 && skipped.without_targets > 0 {
            // All tokens with loss lie beyond the cut.
            let within = format::count(length, "token");
            return Err(request.setting(
                "data.sequence_length",
                format!("{problem}: within {within} there is nothing to learn"),
                "raise it until the answers fit, or give shorter prompts",
            ));
        }
        return Err(request.setting(name, problem, "give data with at least one sample"));
    }
    if name == "data.train" && request.data.wraps() && summary.full == 0 {
        return Err(request.setting(
            "data.sequence_length",
            format!(
                "a packed sample of {length} needs {} tokens, the whole data has {}",
                length + overlap,
                summary.tokens
            ),
            format!(
                "set it to at most {}, give more data, or set packing=false",
                summary.tokens.saturating_sub(overlap)
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

/// The prepared data in the directory, if it has the same settings and sources and is complete.
fn reuse(request: &PrepareRequest<'_>, wanted: &Manifest) -> Result<Option<Prepared>, DataError> {
    let found = Manifest::read(request.directory);
    if let Some(directory) = request.began_in {
        let recorded = Manifest::read(directory);
        refuse_other_data(request.fingerprint, directory, recorded.as_ref(), wanted)?;
    }
    let Some(found) = found.ok().filter(|m| m.fingerprint == wanted.fingerprint) else {
        return Ok(None);
    };
    let evaluation = found.evaluation.as_ref();
    for (part, record) in [(TRAIN, Some(&found.train)), (EVALUATION, evaluation)] {
        let Some(record) = record.filter(|_| found.synthetic.is_none()) else {
            continue;
        };
        let directory = request.directory.join(part);
        match Store::verify(&directory, record, request.stopped) {
            Ok(()) => {}
            Err(DataError::Stopped) => return Err(DataError::Stopped),
            Err(_) => return Ok(None),
        }
    }
    Ok(Some(Prepared::of(found, true)))
}

/// Refuses data that differs from the data with which a run began. The run records its fingerprint outside
/// the data directory, so that the check works even if the data is lost. Runs of older versions have only the
/// manifest.
fn refuse_other_data(
    fingerprint: Option<&str>,
    directory: &Path,
    found: Result<&Manifest, &DataError>,
    wanted: &Manifest,
) -> Result<(), DataError> {
    let refuse = |problem, help| Err(DataError::source(directory, problem, help));
    let began = match (fingerprint, found) {
        (Some(began), _) => began,
        (None, Ok(found)) => &found.fingerprint,
        (None, Err(error)) => {
            let why = match error {
                DataError::Store { path, problem } => format!("{}: {problem}", path.display()),
                error => error.to_string(),
            };
            return refuse(
                format!("the record of the data that the run began with is lost: {why}"),
                "put back a copy of the directory, or start a new run",
            );
        }
    };
    if began == wanted.fingerprint {
        return Ok(());
    }
    let changed = match found {
        Ok(found) if found.fingerprint == began => found.differences(wanted),
        _ => format!(
            "their fingerprint was {began}, that of the sources and settings now is {}",
            wanted.fingerprint
        ),
    };
    refuse(
        format!("the run began with other data: {changed}"),
        "undo the change, or start a new run",
    )
}

/// Writes the manifest last and publishes the directory.
fn finish(draft: Draft, manifest: Manifest) -> Result<Prepared, DataError> {
    manifest.write(draft.path())?;
    draft.publish()?;
    Ok(Prepared::of(manifest, false))
}

#[cfg(test)]
mod tests;
