//! The hub and a bucket, by a small request to each.

use super::{Check, Checks, Next};
use crate::bucket::Bucket;
use crate::hub::{self, Cause, Repo, Settings};

pub(super) fn hub(asked: Option<&str>, checks: &mut Checks) -> anyhow::Result<()> {
    const NAME: &str = "hub";
    let settings = Settings::of_process();
    let model = asked.filter(|model| !model.is_empty());
    let endpoint = settings.endpoint.clone();
    let answer = match model {
        Some(model) => hub::readable(&settings, &Repo::model(model, None))
            .map(|()| format!("{endpoint} has {model}, and you may read it")),
        None => hub::account(&settings).map(|account| match account {
            Some(name) => format!("{endpoint} knows you as {name}"),
            None => format!("{endpoint} answers; without HF_TOKEN only public models are read"),
        }),
    };
    checks.add(match answer {
        Ok(found) => Check::works(NAME, found),
        Err(cause) => {
            let next = match (&cause, model) {
                (Cause::Token, _) => {
                    "`hf auth login`, or set HF_TOKEN to a token that is valid".into()
                }
                (Cause::Gated | Cause::Denied(_), Some(model)) => Next::Advice(format!(
                    "`hf auth login`, then {endpoint}/{model} in a browser"
                )),
                (Cause::Offline, _) => {
                    "unset HF_HUB_OFFLINE, or use models that are on this machine".into()
                }
                _ => "use models and data that are on this machine, by their folders".into(),
            };
            Check::absent(NAME, cause.to_string(), Some(next), asked.is_some())
        }
    })
}

pub(super) fn bucket(url: &str, checks: &mut Checks) -> anyhow::Result<()> {
    const NAME: &str = "bucket";
    let asked = Bucket::open(url).and_then(|bucket| {
        let key = format!("evenkeel-doctor-{}", std::process::id());
        bucket.put(&key, b"evenkeel doctor".to_vec())?;
        bucket.require(&key)?;
        bucket.delete(&key)
    });
    checks.add(match asked {
        Ok(()) => Check::works(
            NAME,
            format!("{url}: an object was written, read and deleted"),
        ),
        Err(error) => Check::fails(
            NAME,
            error.to_string(),
            "docs/checkpoints.md has the credentials and rights that a bucket needs",
        ),
    })
}
