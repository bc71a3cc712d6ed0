//! How a bucket is reached: the variables of each provider's own tools, and for Amazon S3 also their profile files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use object_store::{Certificate, ClientOptions};

use crate::util::tls;

pub type Environment = BTreeMap<String, String>;

/// The environment of this process.
pub fn environment() -> Environment {
    let variables = std::env::vars_os();
    variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// Adds what the chosen profile of the AWS files says, if the environment has no credentials.
/// <https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-files.html>
pub fn with_profile(mut environment: Environment) -> Environment {
    const OTHER_CREDENTIALS: [&str; 4] = [
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ];
    let profile = environment.get("AWS_PROFILE");
    let profile = profile.map_or("default", String::as_str).to_owned();
    let file = |variable: &str, name: &str| {
        let home = || {
            Some(
                PathBuf::from(environment.get("HOME")?)
                    .join(".aws")
                    .join(name),
            )
        };
        let named = environment.get(variable).map(PathBuf::from);
        let text = std::fs::read_to_string(named.or_else(home)?).ok()?;
        let sections = [profile.clone(), format!("profile {profile}")];
        Some(section(&text, &sections))
    };
    let credentials = file("AWS_SHARED_CREDENTIALS_FILE", "credentials").unwrap_or_default();
    let config = file("AWS_CONFIG_FILE", "config").unwrap_or_default();
    let own = OTHER_CREDENTIALS
        .iter()
        .any(|name| environment.contains_key(*name));
    let secrets = [
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
    ];
    let from_profile = secrets
        .iter()
        .filter(|_| !own)
        .chain(&["region", "endpoint_url"]);
    for key in from_profile {
        let Some(value) = credentials.get(*key).or_else(|| config.get(*key)) else {
            continue;
        };
        let name = match *key {
            "region" => "AWS_REGION".to_owned(),
            "endpoint_url" => "AWS_ENDPOINT_URL".to_owned(),
            key => key.to_ascii_uppercase(),
        };
        environment.entry(name).or_insert_with(|| value.clone());
    }
    environment
}

/// Trusts Mozilla's root certificates where the system has none, as in an image made from scratch.
pub fn with_certificates(client: ClientOptions) -> ClientOptions {
    let Some(roots) = tls::roots_in_place_of_systems() else {
        return client;
    };
    let roots = roots.filter_map(|root| Certificate::from_der(root).ok());
    roots.fold(client.with_no_system_certificates(true), |client, root| {
        client.with_root_certificate(root)
    })
}

/// The keys of the first of these sections of an INI file.
fn section(text: &str, names: &[String]) -> BTreeMap<String, String> {
    let mut inside = false;
    let mut found = BTreeMap::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            inside = names.iter().any(|wanted| wanted == name.trim());
        } else if let Some((key, value)) = line.split_once('=').filter(|_| inside) {
            found
                .entry(key.trim().to_owned())
                .or_insert_with(|| value.trim().to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Environment {
        let pairs = pairs.iter();
        pairs
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect()
    }

    #[test]
    fn a_profile_supplies_what_the_environment_lacks() {
        let home = tempfile::tempdir().unwrap();
        let aws = home.path().join(".aws");
        std::fs::create_dir(&aws).unwrap();
        let credentials = "[default]\naws_access_key_id = one\naws_secret_access_key=first\n\
                           [lab]\naws_access_key_id = two\naws_secret_access_key = second\n";
        std::fs::write(aws.join("credentials"), credentials).unwrap();
        let config = "[default]\nregion = eu-west-1\n[profile lab]\nregion = us-east-2\nendpoint_url = http://lab\n";
        std::fs::write(aws.join("config"), config).unwrap();
        let home = home.path().to_str().unwrap();
        let default = with_profile(of(&[("HOME", home)]));
        let expected = [
            ("AWS_ACCESS_KEY_ID", "one"),
            ("AWS_REGION", "eu-west-1"),
            ("AWS_SECRET_ACCESS_KEY", "first"),
            ("HOME", home),
        ];
        assert_eq!(default, of(&expected));
        let lab = with_profile(of(&[
            ("HOME", home),
            ("AWS_PROFILE", "lab"),
            ("AWS_REGION", "set"),
        ]));
        assert_eq!(
            (
                lab["AWS_ACCESS_KEY_ID"].as_str(),
                lab["AWS_REGION"].as_str()
            ),
            ("two", "set")
        );
        assert_eq!(lab["AWS_ENDPOINT_URL"], "http://lab");
        // A pod's identity is not replaced by a file's keys.
        let pod = with_profile(of(&[
            ("HOME", home),
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/token"),
        ]));
        assert_eq!(pod.get("AWS_ACCESS_KEY_ID"), None);
        assert_eq!(with_profile(Environment::new()), Environment::new());
    }
}
