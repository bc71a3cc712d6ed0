//! Names of models and data sets on the hub.

use std::fmt;

/// The kind of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Model,
    DataSet,
}

impl Kind {
    /// In the API's URLs and in the cache.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Kind::Model => "models",
            Kind::DataSet => "datasets",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Model => "model",
            Kind::DataSet => "data set",
        })
    }
}

/// A repository of the hub at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    pub kind: Kind,
    /// `Qwen/Qwen2-0.5B`, or `gpt2` of the oldest.
    pub id: String,
    /// A branch, a tag or a commit.
    pub revision: String,
    /// The folder of the repository that has the model; `None`: the repository itself.
    pub folder: Option<String>,
}

/// The branch of a recipe that names no revision.
pub const MAIN: &str = "main";
/// The branch with Parquet files that the hub makes of a data set's [`MAIN`].
/// <https://huggingface.co/docs/dataset-viewer/parquet>
const CONVERTED: &str = "refs/convert/parquet";

impl Repo {
    /// `None`: [`MAIN`].
    pub fn model(id: &str, revision: Option<&str>) -> Repo {
        Repo::of(Kind::Model, id, revision)
    }

    /// `None`: [`MAIN`].
    pub fn data_set(id: &str, revision: Option<&str>) -> Repo {
        Repo::of(Kind::DataSet, id, revision)
    }

    pub(super) fn of(kind: Kind, id: &str, revision: Option<&str>) -> Repo {
        Repo {
            kind,
            id: id.to_owned(),
            revision: revision.unwrap_or(MAIN).to_owned(),
            folder: None,
        }
    }

    /// What one of its folders has.
    pub fn within(self, folder: Option<&str>) -> Repo {
        Repo {
            folder: folder.map(str::to_owned),
            ..self
        }
    }

    /// The place of a file of its folder in the repository.
    pub(super) fn place_of(&self, name: &str) -> String {
        match &self.folder {
            Some(folder) => format!("{folder}/{name}"),
            None => name.to_owned(),
        }
    }

    /// The name within its folder of a file of the repository; `None`: it is elsewhere.
    pub(super) fn name_in<'n>(&self, file: &'n str) -> Option<&'n str> {
        match &self.folder {
            Some(folder) => file.strip_prefix(folder.as_str())?.strip_prefix('/'),
            None => Some(file),
        }
    }

    /// The Parquet files that the hub makes of a data set.
    pub fn converted(&self) -> Option<Repo> {
        let has = self.kind == Kind::DataSet && self.revision == MAIN;
        has.then(|| Repo::data_set(&self.id, Some(CONVERTED)))
    }

    /// The id without its owner.
    pub fn name(&self) -> &str {
        self.id.rsplit('/').next().unwrap_or(&self.id)
    }

    /// Its path in the URLs of the hub.
    pub(super) fn page(&self) -> String {
        match self.kind {
            Kind::Model => self.id.clone(),
            Kind::DataSet => format!("datasets/{}", self.id),
        }
    }

    /// The command that downloads it into a folder, or into the cache.
    pub fn download_command(&self, folder: Option<&str>) -> String {
        let mut command = format!("hf download {}", self.id);
        if self.kind == Kind::DataSet {
            command += " --repo-type dataset";
        }
        if self.revision != MAIN {
            command += &format!(" --revision {}", self.revision);
        }
        if let Some(folder) = &self.folder {
            command += &format!(" --include '{folder}/*'");
        }
        if let Some(folder) = folder {
            command += &format!(" --local-dir {folder}");
        }
        command
    }

    /// The command that downloads it into a folder, and the override that names the folder. A `key` of a mixture ends
    /// with the id and cannot be overridden: its folder has the name of the id.
    pub fn download_for(&self, key: &str) -> (String, Option<String>) {
        if key.ends_with(&self.id) {
            return (self.download_command(Some(&self.id)), None);
        }
        let folder = self.name();
        let named = format!("{key}={folder}");
        (self.download_command(Some(folder)), Some(named))
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == Kind::DataSet {
            write!(f, "{} ", self.kind)?;
        }
        if let Some(folder) = &self.folder {
            write!(f, "{folder} of ")?;
        }
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
