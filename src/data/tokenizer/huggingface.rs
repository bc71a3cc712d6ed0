//! `tokenizer.json` and the files beside it: `tokenizer_config.json`, `chat_template.jinja`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::PostProcessorWrapper;

use super::super::error::DataError;
use super::super::manifest::Checksum;
use super::{Encoder, Piece, Tokenizer, read_text};
use crate::util::input::{CONFIG_BYTES, STATE_BYTES};

/// Usual names of special tokens, for tokenizers without a `tokenizer_config.json`.
const BEGINNINGS: [&str; 4] = ["<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>"];
const ENDS: [&str; 5] = [
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "<|im_end|>",
];

/// Loads a `tokenizer.json`, or the one in a directory. `name` and `template_key` are the recipe's names of
/// the tokenizer and of the chat template's setting.
pub(super) fn load(path: &Path, name: &str, template_key: &str) -> Result<Tokenizer, DataError> {
    let file = file_of(path)?;
    let text = read_text(&file, STATE_BYTES)?;
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(text.as_bytes()).map_err(|error| {
        DataError::source(
            &file,
            format!("it is not a tokenizer: {error}"),
            "give a tokenizer.json of the tokenizers library",
        )
    })?;
    let mut checksum = Checksum::default();
    checksum.update(text.as_bytes());
    let config = read_config(&file, &mut checksum)?;
    let chat_template = chat_template(&file, &config, template_key)?;

    let unusable = |error: tokenizers::Error| {
        DataError::source(
            &file,
            format!("it cannot encode: {error}"),
            "give another tokenizer.json",
        )
    };
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(unusable)?;
    let (start, mut end) = around(&tokenizer).map_err(unusable)?;
    // The tokens that it adds are known now; without the post-processor, offsets are those of the text.
    tokenizer.with_post_processor(None::<PostProcessorWrapper>);

    let specials = specials(&tokenizer, &config);
    if let Some(token) = specials.get("eos_token") {
        let id = tokenizer.token_to_id(token).ok_or_else(|| {
            DataError::source(
                &file,
                format!("it has no id for its eos_token {token}"),
                "repair eos_token in tokenizer_config.json",
            )
        })?;
        if end.last() != Some(&id) {
            end.push(id);
        }
    }
    let vocabulary = tokenizer.get_vocab(true);
    let cleans_up = config["clean_up_tokenization_spaces"].as_bool();
    Ok(Tokenizer {
        name: name.to_string(),
        specials,
        chat_template,
        checksum: checksum.hex(),
        start,
        end,
        vocabulary_size: vocabulary.values().max().map_or(0, |&id| u64::from(id) + 1),
        cleans_up: cleans_up.unwrap_or(true),
        encoder: Encoder::HuggingFace(Box::new(tokenizer)),
    })
}

pub(super) fn pieces(
    tokenizer: &tokenizers::Tokenizer,
    text: &str,
) -> tokenizers::Result<Vec<Piece>> {
    let encoding = tokenizer.encode(text, false)?;
    Ok(encoding
        .get_ids()
        .iter()
        .zip(encoding.get_offsets())
        .map(|(&id, &(start, end))| (id, start..end))
        .collect())
}

fn file_of(path: &Path) -> Result<PathBuf, DataError> {
    if !path.is_dir() {
        return Ok(path.to_path_buf());
    }
    let file = path.join("tokenizer.json");
    if file.is_file() {
        return Ok(file);
    }
    let help = if path.join("tokenizer.model").is_file() {
        "save it again with transformers' AutoTokenizer, which writes one beside tokenizer.model"
    } else {
        "set tokenizer.path to a directory that has one, or to byte"
    };
    Err(DataError::source(path, "it holds no tokenizer.json", help))
}

/// `tokenizer_config.json` beside the tokenizer; null when there is none.
fn read_config(file: &Path, checksum: &mut Checksum) -> Result<Value, DataError> {
    let path = file.with_file_name("tokenizer_config.json");
    if !path.is_file() {
        return Ok(Value::Null);
    }
    let text = read_text(&path, CONFIG_BYTES)?;
    checksum.update(text.as_bytes());
    serde_json::from_str(&text).map_err(|error| {
        DataError::source(
            &path,
            format!("it is not JSON: {error}"),
            "repair or remove it",
        )
    })
}

/// `chat_template.jinja`, else the configuration's template, or its one called `default`.
fn chat_template(
    file: &Path,
    config: &Value,
    template_key: &str,
) -> Result<Option<String>, DataError> {
    let path = file.with_file_name("chat_template.jinja");
    if path.is_file() {
        return Ok(Some(read_text(&path, CONFIG_BYTES)?));
    }
    let config_path = file.with_file_name("tokenizer_config.json");
    match &config["chat_template"] {
        Value::Null => Ok(None),
        Value::String(template) => Ok(Some(template.clone())),
        Value::Array(named) => named
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(|template| Some(template.to_string()))
            .ok_or_else(|| {
                DataError::source(
                    &config_path,
                    "none of its chat templates is called default",
                    format!("set {template_key} to the one you want"),
                )
            }),
        _ => Err(DataError::source(
            &config_path,
            "its chat_template is no text",
            format!("repair it, or set {template_key}"),
        )),
    }
}

/// The tokens that the tokenizer itself adds before and after a text.
fn around(tokenizer: &tokenizers::Tokenizer) -> tokenizers::Result<(Vec<u32>, Vec<u32>)> {
    let bare = tokenizer.encode_fast("a", false)?;
    let full = tokenizer.encode_fast("a", true)?;
    let (bare, full) = (bare.get_ids(), full.get_ids());
    let start = (0..=full.len().saturating_sub(bare.len()))
        .find(|&at| full[at..].starts_with(bare))
        .unwrap_or(0);
    let end = (start + bare.len()).min(full.len());
    Ok((full[..start].to_vec(), full[end..].to_vec()))
}

/// Every `…_token` of the configuration; without a configuration, well-known names that have an id.
fn specials(tokenizer: &tokenizers::Tokenizer, config: &Value) -> BTreeMap<String, String> {
    let Some(config) = config.as_object() else {
        let known = [("bos_token", &BEGINNINGS[..]), ("eos_token", &ENDS[..])];
        return known
            .iter()
            .filter_map(|(variable, names)| {
                let name = names
                    .iter()
                    .find(|name| tokenizer.token_to_id(name).is_some())?;
                Some((variable.to_string(), name.to_string()))
            })
            .collect();
    };
    config
        .iter()
        .filter(|(key, _)| key.ends_with("_token"))
        .filter_map(|(key, value)| {
            // Either the text, or an object with the text and its properties.
            let text = value.as_str().or_else(|| value["content"].as_str())?;
            Some((key.clone(), text.to_string()))
        })
        .collect()
}
