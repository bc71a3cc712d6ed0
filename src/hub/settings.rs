//! The variables of huggingface_hub, with its defaults.
//! <https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables>

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How the hub and its cache on this machine are reached.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Directory of the cache; `None`: this user has no home directory.
    pub cache: Option<PathBuf>,
    /// URL of the hub, without a slash at its end.
    pub endpoint: String,
    pub token: Option<Token>,
    pub offline: bool,
    /// Limit of a request for the description of a file.
    pub etag_timeout: Duration,
    /// Limit of a pause within a download.
    pub download_timeout: Duration,
    /// Pause before the first repetition of a request; each further one is twice as long.
    pub pause: Duration,
}

/// A secret, which `Debug` hides.
#[derive(Clone)]
pub struct Token(pub String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

const ENDPOINT: &str = "https://huggingface.co";
/// Both timeouts of huggingface_hub.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Settings {
    /// The settings of this process. Reads the file of the token.
    pub fn of_process() -> Settings {
        let variable = |name: &str| std::env::var(name).ok();
        Settings::of(&variable)
    }

    /// The settings of these variables.
    pub fn of(variable: &dyn Fn(&str) -> Option<String>) -> Settings {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let home = set("HOME").map(PathBuf::from);
        let path = |name: &str| {
            let value = set(name)?;
            match (value.strip_prefix("~/"), &home) {
                (Some(below), Some(home)) => Some(home.join(below)),
                _ => Some(PathBuf::from(value)),
            }
        };
        let cache_home = || path("XDG_CACHE_HOME").or_else(|| Some(home.as_ref()?.join(".cache")));
        let hf_home = path("HF_HOME").or_else(|| Some(cache_home()?.join("huggingface")));
        let within = |name: &str| Some(hf_home.as_ref()?.join(name));
        let token_file = path("HF_TOKEN_PATH").or_else(|| within("token"));
        let read = || std::fs::read_to_string(token_file?).ok();
        let token = set("HF_TOKEN").or_else(read);
        let token = token.map(|text| text.trim().to_owned());
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let offline = set("HF_HUB_OFFLINE").or_else(|| set("TRANSFORMERS_OFFLINE"));
        let seconds = |name: &str| {
            let seconds = set(name).and_then(|text| text.trim().parse().ok());
            seconds.map_or(TIMEOUT, Duration::from_secs)
        };
        Settings {
            cache: path("HF_HUB_CACHE").or_else(|| within("hub")),
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.filter(|text| !text.is_empty()).map(Token),
            offline: offline.is_some_and(|value| is_true(&value)),
            etag_timeout: seconds("HF_HUB_ETAG_TIMEOUT"),
            download_timeout: seconds("HF_HUB_DOWNLOAD_TIMEOUT"),
            pause: Duration::from_secs(1),
        }
    }

    /// No cache and no connection: names of the hub mean nothing.
    pub fn none() -> Settings {
        Settings {
            offline: true,
            ..Settings::of(&|_| None)
        }
    }
}

fn is_true(value: &str) -> bool {
    let value = value.trim().to_ascii_uppercase();
    ["1", "ON", "YES", "TRUE"].contains(&value.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Settings {
        Settings::of(&|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_cache_is_where_huggingface_hub_has_it() {
        let cache = |variables: &[(&str, &str)]| of(variables).cache;
        let home = ("HOME", "/me");
        let is = |path: &str| Some(PathBuf::from(path));
        assert_eq!(cache(&[]), None);
        assert_eq!(cache(&[home]), is("/me/.cache/huggingface/hub"));
        let xdg = ("XDG_CACHE_HOME", "/x");
        assert_eq!(cache(&[home, xdg]), is("/x/huggingface/hub"));
        let hf_home = ("HF_HOME", "~/hf");
        assert_eq!(cache(&[home, xdg, hf_home]), is("/me/hf/hub"));
        let own = ("HF_HUB_CACHE", "/c");
        assert_eq!(cache(&[home, xdg, hf_home, own]), is("/c"));
    }

    #[test]
    fn the_token_is_that_of_the_variable_or_of_a_file() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("token");
        std::fs::write(&file, "hf_file\n").unwrap();
        let token = |variables: &[(&str, &str)]| of(variables).token.map(|token| token.0);
        let hf_home = ("HF_HOME", place.path().to_str().unwrap());
        assert_eq!(token(&[hf_home]).as_deref(), Some("hf_file"));
        let own = ("HF_TOKEN", "hf_own");
        assert_eq!(token(&[hf_home, own]).as_deref(), Some("hf_own"));
        assert_eq!(token(&[("HF_TOKEN_PATH", "/nowhere"), hf_home]), None);
        assert_eq!(format!("{:?}", of(&[own]).token), "Some(Token)");
    }

    #[test]
    fn offline_is_what_huggingface_hub_takes_for_true() {
        for (value, offline) in [("1", true), ("yes", true), ("0", false), ("off", false)] {
            assert_eq!(of(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value}");
            let other = of(&[("TRANSFORMERS_OFFLINE", value)]);
            assert_eq!(other.offline, offline, "{value}");
        }
        let mirror = of(&[
            ("HF_ENDPOINT", "https://hf.example/"),
            ("HF_HUB_ETAG_TIMEOUT", "3"),
        ]);
        assert_eq!(mirror.endpoint, "https://hf.example");
        assert_eq!(mirror.etag_timeout, Duration::from_secs(3));
        assert_eq!(mirror.download_timeout, TIMEOUT);
    }
}
