//! Why a repository could not be downloaded, and what to do about it.

use super::id::{Kind, MAIN, Repo};
use crate::util::durable::FileError;

/// A failed download, after all repetitions.
#[derive(Debug, thiserror::Error)]
#[error("cannot download {repo}: {cause}")]
pub struct HubError {
    pub repo: Repo,
    /// URL of the hub.
    pub endpoint: String,
    pub cause: Box<Cause>,
}

#[derive(Debug, thiserror::Error)]
pub enum Cause {
    #[error("HF_HUB_OFFLINE is set; unset it, or give a directory")]
    Offline,
    #[error("there is no directory for the cache; set HF_HOME")]
    NoCache,
    #[error("HF_ENDPOINT is not a URL with http or https: {0}; correct or unset it")]
    Endpoint(String),
    #[error("the hub cannot be reached ({0}); check the network, HF_ENDPOINT and proxies")]
    NoConnection(String),
    #[error("the connection to the hub breaks ({0}); launch again, which continues the download")]
    Broken(String),
    #[error(
        "access is restricted to accounts that accepted the licence on its page; accept it there, and set \
         HF_TOKEN to a token of that account"
    )]
    Gated,
    #[error(
        "the hub has no such {0}, or it is private; correct the name, or set HF_TOKEN to a token of an account that \
         may read it"
    )]
    Denied(Kind),
    #[error("the hub refuses the token of HF_TOKEN or `hf auth login`")]
    Token,
    #[error("the hub has no such {0}; correct the name")]
    NoRepo(Kind),
    #[error("the {0} has no such revision; name one of its branches, tags or commits")]
    NoRevision(Kind),
    #[error("the hub refuses further requests for now (429); launch again later, or set HF_TOKEN")]
    Throttled,
    #[error("the hub answers {0}; launch again later")]
    Status(u16),
    /// The answer has another form than the hub's.
    #[error("the hub's answer is unusable: {0}; check HF_ENDPOINT")]
    Answer(String),
    #[error("{file} has {found} bytes where the hub states {stated}; launch again")]
    Size {
        file: String,
        found: u64,
        stated: u64,
    },
    #[error("{file} has another SHA-256 than the hub states; its bytes were removed: launch again")]
    Checksum { file: String },
    /// The weights are in another format.
    #[error("its only weights are {0}, and safetensors are read; convert them")]
    Format(String),
    #[error(
        "it has no weights; name another model, or start from random weights (model.init=random)"
    )]
    NoWeights,
    #[error(transparent)]
    File(#[from] FileError),
    #[error("stopped")]
    Stopped,
}

impl Cause {
    /// Whether the files come from a machine with a network.
    pub fn needs_a_network(&self) -> bool {
        use Cause::{Answer, Endpoint, NoConnection, Offline, Status};
        matches!(
            self,
            Offline | NoConnection(_) | Status(_) | Answer(_) | Endpoint(_)
        )
    }

    /// Whether the same request may succeed later.
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Cause::NoConnection(_)
                | Cause::Broken(_)
                | Cause::Throttled
                | Cause::Status(_)
                | Cause::Size { .. }
                | Cause::Checksum { .. }
                | Cause::File(_)
        )
    }
}

impl HubError {
    /// The commands that help, one a line. `launch` is the user's command; `key` spells the native path of a setting,
    /// and `paths` are those of the repository's name.
    pub fn next(&self, launch: &str, paths: &[&str], key: &dyn Fn(&str) -> String) -> Vec<String> {
        let Repo { id, revision, .. } = &self.repo;
        let folder = self.repo.name();
        let with = |path: &str, value: &str| format!(" {}={value}", key(path));
        let with_all = |of: &dyn Fn(&&str) -> String| {
            let mut overrides: Vec<String> = paths.iter().map(of).collect();
            overrides.dedup();
            format!("{launch}{}", overrides.concat())
        };
        let in_folder = with_all(&|path| {
            let (_, named) = self.repo.download_for(&key(path));
            named.map_or_else(String::new, |named| format!(" {named}"))
        });
        let key_of_first = paths.first().map(|path| key(path)).unwrap_or_default();
        let (download, _) = self.repo.download_for(&key_of_first);
        let token = format!(
            "export HF_TOKEN=TOKEN   # from {}/settings/tokens",
            self.endpoint
        );
        match &*self.cause {
            Cause::Gated => vec![
                format!(
                    "{token}, of an account that accepted {}/{}",
                    self.endpoint,
                    self.repo.page()
                ),
                launch.to_owned(),
            ],
            Cause::Denied(_) => vec![token, launch.to_owned()],
            // The name of a mixture is a key.
            Cause::NoRepo(_) if key_of_first.ends_with(id) => vec![launch.to_owned()],
            Cause::NoRepo(_) => vec![with_all(&|path| with(path, "OWNER/NAME"))],
            Cause::NoRevision(Kind::Model) => {
                vec![format!("{launch}{}", with("model.revision", MAIN))]
            }
            Cause::NoRevision(Kind::DataSet) => {
                let revision = |path: &&str| with(&path.replace(".path", ".revision"), MAIN);
                vec![with_all(&revision)]
            }
            Cause::NoWeights => vec![format!("{launch}{}", with("model.init", "random"))],
            Cause::Format(_) => vec![
                format!(
                    "python -c 'from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; \
                     [c.from_pretrained(\"{id}\", revision=\"{revision}\").save_pretrained(\"{folder}\") for c in (M, T)]'"
                ),
                in_folder,
            ],
            cause if cause.needs_a_network() => vec![
                format!("{download}   # where there is a network"),
                in_folder,
            ],
            Cause::NoCache | Cause::File(FileError::NoSpace { .. }) => {
                vec![format!("HF_HOME=/DIRECTORY/WITH/SPACE {launch}")]
            }
            _ => vec![launch.to_owned()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_ends_with_the_next_command() {
        let file = || "model.safetensors".to_owned();
        let causes = [
            Cause::Offline,
            Cause::NoCache,
            Cause::Endpoint("hub".to_owned()),
            Cause::NoConnection("connection refused".to_owned()),
            Cause::Broken("no answer in time".to_owned()),
            Cause::Gated,
            Cause::Denied(Kind::Model),
            Cause::NoRepo(Kind::Model),
            Cause::NoRevision(Kind::Model),
            Cause::Throttled,
            Cause::Status(503),
            Cause::Answer("no commit".to_owned()),
            Cause::Size {
                file: file(),
                found: 9,
                stated: 10,
            },
            Cause::Checksum { file: file() },
            Cause::Format("pytorch_model.bin".to_owned()),
            Cause::NoWeights,
        ];
        let shown = causes.map(|cause| {
            let error = HubError {
                repo: Repo::model("acme/tiny", Some("v2")),
                endpoint: "https://huggingface.co".to_owned(),
                cause: Box::new(cause),
            };
            let next = error.next(
                "evenkeel launch recipe.yaml",
                &["model.path"],
                &str::to_owned,
            );
            format!("{error}\n  {}", next.join("\n  "))
        });
        insta::assert_snapshot!(shown.join("\n"));
    }

    #[test]
    fn a_data_set_is_downloaded_into_the_folder_that_the_recipe_names() {
        let next = |cause: Cause, key: &str| {
            let error = HubError {
                repo: Repo::data_set("acme/chats", None),
                endpoint: "https://huggingface.co".to_owned(),
                cause: Box::new(cause),
            };
            let key = |path: &str| path.replace("data.train.0.path", key);
            let next = error.next("evenkeel launch r.yaml", &["data.train.0.path"], &key);
            format!("{error}\n  {}", next.join("\n  "))
        };
        let causes = || {
            let of = Kind::DataSet;
            let all = [
                Cause::Offline,
                Cause::Gated,
                Cause::Denied(of),
                Cause::NoRepo(of),
                Cause::NoRevision(of),
            ];
            all.into_iter()
        };
        let named = causes().map(|cause| next(cause, "dataset_name"));
        let mixed = causes()
            .take(1)
            .map(|cause| next(cause, "dataset_mixer.acme/chats"));
        let shown = named.chain(mixed).collect::<Vec<_>>();
        insta::assert_snapshot!(shown.join("\n"));
    }
}
