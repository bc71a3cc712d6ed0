//! Names on Hugging Face's hub.

/// Whether a path that does not exist looks like a data set or model of the hub: an owner and a name.
pub fn is_id(path: &str) -> bool {
    path.contains('/') && may_be_id(path)
}

/// Whether a model that does not exist looks like one of the hub. The oldest models there have no owner: `gpt2`,
/// `bert-base-uncased`. None of these names has a dot, unlike file names.
pub fn is_model(name: &str) -> bool {
    is_id(name) || (may_be_id(name) && !name.contains('.'))
}

/// Whether a path can be an id of the hub, with or without its owner, and not a folder of a machine.
pub fn may_be_id(path: &str) -> bool {
    path.split('/').count() <= 2 && path.split('/').all(is_name)
}

fn is_name(part: &str) -> bool {
    !part.is_empty()
        && !part.starts_with('.')
        && part
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}
