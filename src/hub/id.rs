//! Names of models and data sets on the hub.

use std::fmt;

/// A model of the hub at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    /// `Qwen/Qwen2-0.5B`, or `gpt2` of the oldest.
    pub id: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

/// The branch of a recipe that names no revision.
pub const MAIN: &str = "main";

impl Repo {
    /// `None`: [`MAIN`].
    pub fn new(id: &str, revision: Option<&str>) -> Repo {
        Repo {
            id: id.to_owned(),
            revision: revision.unwrap_or(MAIN).to_owned(),
        }
    }

    /// The options of `hf download` for its revision.
    pub fn revision_flag(&self) -> String {
        if self.revision == MAIN {
            String::new()
        } else {
            format!(" --revision {}", self.revision)
        }
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at revision {}", self.id, self.revision)
    }
}

/// Whether a revision is a whole commit hash, which never moves.
pub fn is_commit(revision: &str) -> bool {
    revision.len() == 40
        && revision
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

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
