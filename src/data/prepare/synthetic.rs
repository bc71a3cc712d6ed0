//! Preparation of the synthetic language: writes only a manifest.

use serde_json::json;

use crate::recipe::schema::spec::Synthetic;

use super::super::error::DataError;
use super::super::manifest::{Manifest, PartRecord, Skipped, VERSION, fingerprint};
use super::super::publish::Draft;
use super::super::request::PrepareRequest;
use super::super::synthetic::Language;
use super::{Prepared, finish, reuse};

/// Writes only the manifest: samples are generated on demand. Held-out samples are the last ones of the
/// language.
pub(super) fn prepare(
    request: &PrepareRequest<'_>,
    settings: Synthetic,
) -> Result<Prepared, DataError> {
    let data = request.data;
    let key = (request.key)("data.train.0.synthetic");
    let language = Language::new(&settings, &key)?;
    let held_out = request.held_out(settings.samples)?;
    let tokens = data.sequence_length + 1;
    let part = |first_sample, samples| PartRecord {
        samples,
        tokens: samples * tokens,
        target_tokens: samples * data.sequence_length,
        longest_sample: tokens,
        first_sample,
        ..PartRecord::default()
    };
    let trained = settings.samples - held_out;
    let vocabulary = settings.vocabulary;
    let identity = json!({
        "sequence_length": data.sequence_length,
        "held_out": data.held_out,
        "synthetic": settings,
    });
    let manifest = Manifest {
        version: VERSION,
        fingerprint: fingerprint(&identity),
        identity,
        sequence_length: data.sequence_length,
        packing: false,
        tokenizer: "none".to_string(),
        vocabulary_size: vocabulary,
        used_vocabulary: vocabulary,
        sources: Vec::new(),
        train: part(0, trained),
        evaluation: (held_out > 0).then(|| part(trained, held_out)),
        skipped: Skipped::default(),
        notes: Vec::new(),
        synthetic: Some(settings),
    };
    debug_assert_eq!(language.vocabulary() as u64, vocabulary);
    if let Some(vocab_size) = request.vocab_size {
        manifest.check_vocabulary(vocab_size)?;
    }
    if let Some(prepared) = reuse(request, &manifest)? {
        return Ok(prepared);
    }
    let draft = Draft::begin(request.directory)?;
    finish(draft, manifest)
}
