//! The versions of TRL and transformers that a recipe is written for.
//!
//! A key that came or went with a version tells them: a recipe is read as the versions that take most of its keys, and
//! as the newest of these. `versions.txt` lists such keys, from the wheels of all minor versions.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use crate::recipe::schema::reader::ReadAs;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Objective;
use crate::recipe::syntax::node::Node;

/// A minor version, such as 4.57.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Minor(pub u16, pub u16);

impl fmt::Display for Minor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// A version with or without a patch: `0.9` or `0.9.6`.
impl FromStr for Minor {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Minor, Self::Err> {
        let mut parts = text.splitn(3, '.');
        let mut number = || parts.next().unwrap_or_default().parse();
        Ok(Minor(number()?, number()?))
    }
}

/// The versions that a recipe is read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Versions {
    /// `None`: the recipe is not for one of TRL's trainers.
    trl: Option<Minor>,
    transformers: Minor,
}

/// A class with a field, and the versions that have it: from the first one to before the second.
struct Use {
    class: &'static str,
    since: Option<Minor>,
    until: Option<Minor>,
}

/// The content of `versions.txt`.
struct Table {
    /// TRL's versions, oldest first, each with the oldest and the newest transformers of its time.
    trl: Vec<[Minor; 3]>,
    /// transformers' versions, oldest first.
    transformers: Vec<Minor>,
    /// The fields that some version lacks.
    fields: HashMap<&'static str, Vec<Use>>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut table = Table {
        trl: Vec::new(),
        transformers: Vec::new(),
        fields: HashMap::new(),
    };
    for line in include_str!("versions.txt").lines() {
        let words: Vec<&'static str> = line.split(' ').collect();
        let version = |at: usize| words.get(at).and_then(|word| word.parse().ok());
        match words[0] {
            "trl" => table.trl.extend(
                version(1)
                    .zip(version(2))
                    .zip(version(3))
                    .map(|((trl, oldest), newest)| [trl, oldest, newest]),
            ),
            "transformers" => table.transformers.extend((1..).map_while(version)),
            class if class != "#" && words.len() == 4 => {
                let uses = table.fields.entry(words[1]).or_default();
                let (since, until) = (version(2), version(3));
                uses.push(Use {
                    class,
                    since,
                    until,
                });
            }
            _ => {}
        }
    }
    table
});

/// TRL's config class of a trainer.
fn class(objective: Objective) -> &'static str {
    match objective {
        Objective::Sft | Objective::LanguageModelling => "SFTConfig",
        Objective::Dpo => "DPOConfig",
        Objective::Kto => "KTOConfig",
        Objective::Orpo => "ORPOConfig",
        Objective::Cpo | Objective::Simpo => "CPOConfig",
        Objective::Grpo => "GRPOConfig",
        Objective::Rloo => "RLOOConfig",
        Objective::Ppo => "PPOConfig",
        Objective::Reward => "RewardConfig",
    }
}

/// The fields of a key in the classes that a recipe is parsed into.
fn uses(key: &str, objective: Option<Objective>) -> impl Iterator<Item = &'static Use> {
    let all = TABLE.fields.get(key).map_or(&[][..], Vec::as_slice);
    let own = objective.map(class);
    all.iter().filter(move |of| match of.class {
        "TrainingArguments" => true,
        "ModelConfig" => own.is_some(),
        class => Some(class) == own,
    })
}

impl Versions {
    /// Every pair of versions that were in use at one time, of transformers alone without an objective.
    fn all(of_trl: bool) -> Vec<Versions> {
        let alone = TABLE.transformers.iter().map(|&transformers| Versions {
            trl: None,
            transformers,
        });
        let pairs = TABLE.trl.iter().flat_map(|&[trl, oldest, newest]| {
            let all = TABLE.transformers.iter();
            let of_its_time = all.filter(move |version| (oldest..=newest).contains(version));
            of_its_time.map(move |&transformers| Versions {
                trl: Some(trl),
                transformers,
            })
        });
        if of_trl {
            pairs.collect()
        } else {
            alone.collect()
        }
    }

    /// The version of the package that a field belongs to.
    fn of(&self, of: &Use) -> Option<Minor> {
        match of.class {
            "TrainingArguments" => Some(self.transformers),
            _ => self.trl,
        }
    }

    /// Whether a field exists in these versions.
    fn has(&self, of: &Use) -> bool {
        let is_in = |version| {
            of.since.is_none_or(|since| since <= version)
                && of.until.is_none_or(|until| version < until)
        };
        self.of(of).is_some_and(is_in)
    }

    /// Whether a key that some version takes exists in these. `objective`: of TRL's trainer.
    pub fn takes(&self, key: &str, objective: Option<Objective>) -> bool {
        let mut uses = uses(key, objective).peekable();
        uses.peek().is_none() || uses.any(|of| self.has(of))
    }

    /// What made these versions lack a key: `TRL 0.20 removed it`.
    pub fn lack(&self, key: &str, objective: Option<Objective>) -> String {
        let changes = uses(key, objective).filter_map(|of| {
            let package = match of.class {
                "TrainingArguments" => "transformers",
                _ => "TRL",
            };
            let later = of.since.filter(|since| self.of(of) < Some(*since));
            let brought = later.map(|version| format!("{package} {version} brought it"));
            brought.or_else(|| Some(format!("{package} {} removed it", of.until?)))
        });
        changes.last().unwrap_or_default()
    }

    /// Whether TRL is at least of this version.
    pub fn trl_since(&self, major: u16, minor: u16) -> bool {
        self.trl
            .is_some_and(|version| version >= Minor(major, minor))
    }

    /// Whether transformers is at least of this version.
    pub fn transformers_since(&self, major: u16, minor: u16) -> bool {
        self.transformers >= Minor(major, minor)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(trl) = self.trl {
            write!(f, "TRL {trl}, ")?;
        }
        write!(f, "transformers {}", self.transformers)
    }
}

/// The versions that a recipe is read as. `asked`: the value of `--dialect-version`, which has one or both of
/// `trl-0.9` and `transformers-4.41`; a version alone is that of the dialect's own package.
pub(crate) fn choose(
    root: &Node,
    objective: Option<Objective>,
    asked: Option<&str>,
    reading: &mut Reading,
) -> (Versions, ReadAs) {
    let mut all = Versions::all(objective.is_some());
    let newest = all.last().copied().unwrap_or(Versions {
        trl: None,
        transformers: Minor(0, 0),
    });
    if let Some(text) = asked {
        let [trl, transformers] = typed(text, newest, reading);
        all.retain(|versions| {
            (trl.is_none() || versions.trl == trl)
                && transformers.is_none_or(|asked| versions.transformers == asked)
        });
        if all.is_empty() {
            // Versions of different times.
            all.push(Versions {
                trl: trl.or(newest.trl),
                transformers: transformers.unwrap_or(newest.transformers),
            });
        }
    }
    let keys: Vec<&str> = root
        .entries()
        .unwrap_or_default()
        .iter()
        .map(|entry| entry.name.as_str())
        .filter(|key| uses(key, objective).next().is_some())
        .collect();
    // transformers 4 takes only whole steps of warm-up.
    let share = root.get("warmup_steps").and_then(Node::text);
    let share = share
        .and_then(|text| text.parse().ok())
        .is_some_and(|steps: f64| steps.fract() > 0.0);
    let taken = |versions: &Versions| {
        let taken = keys
            .iter()
            .filter(|key| versions.takes(key, objective))
            .count();
        taken + usize::from(share && versions.transformers_since(5, 0))
    };
    let best = all
        .iter()
        .copied()
        .max_by_key(|versions| (taken(versions), *versions));
    let best = best.unwrap_or(newest);
    // The keys that the next version of each package lacks.
    let next_trl = all.iter().find(|versions| versions.trl > best.trl);
    let next_trl = next_trl.map(|next| Versions {
        trl: next.trl,
        ..best
    });
    let next_transformers = all
        .iter()
        .find(|versions| versions.trl == best.trl && **versions > best);
    let next: Vec<&Versions> = next_trl.iter().chain(next_transformers).collect();
    let gone: Vec<String> = keys
        .iter()
        .filter(|key| {
            best.takes(key, objective) && next.iter().any(|next| !next.takes(key, objective))
        })
        .map(|key| format!("`{key}`"))
        .collect();
    let reason = match gone.as_slice() {
        _ if asked.is_some() => "versions: `--dialect-version`".to_owned(),
        [] => "versions: the newest known".to_owned(),
        [one] => format!("versions: the newest with {one}"),
        [one, two] => format!("versions: the newest with {one} and {two}"),
        [one, more @ ..] => format!(
            "versions: the newest with {one} and {} more keys",
            more.len()
        ),
    };
    let name = best.to_string();
    (best, ReadAs { name, reason })
}

/// The versions that the user asked for, TRL's and transformers'.
fn typed(text: &str, newest: Versions, reading: &mut Reading) -> [Option<Minor>; 2] {
    let known_trl: Vec<Minor> = TABLE.trl.iter().map(|[trl, ..]| *trl).collect();
    let mut found = [None, None];
    for word in text.split(',') {
        let word = word.trim();
        let digits = word
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(word.len());
        let (package, version) = word.split_at(digits);
        let package = package.trim_end_matches(['-', '=']);
        let version: Option<Minor> = version.parse().ok();
        let package = match (package, version) {
            ("", Some(version)) if newest.trl.is_some() && version.0 < 4 => "trl",
            ("", Some(_)) => "transformers",
            (package, _) => package,
        };
        let (at, name, known) = match package {
            "trl" if newest.trl.is_some() => (0, "TRL", &known_trl),
            _ => (1, "transformers", &TABLE.transformers),
        };
        let last = known.last().copied();
        let version = version.filter(|_| package == ["trl", "transformers"][at]);
        if version.is_some() && version > last {
            reading.warning(
                "version-assumed",
                None,
                format!(
                    "{name} {} is newer than those known here",
                    version.map_or_else(String::new, |v| v.to_string())
                ),
                format!(
                    "it is read as {name} {}",
                    last.map_or_else(String::new, |v| v.to_string())
                ),
            );
            found[at] = last;
        } else if let Some(version) = version.filter(|version| known.contains(version)) {
            found[at] = Some(version);
        } else {
            let span = |known: &[Minor]| match (known.first(), known.last()) {
                (Some(first), Some(last)) => format!("from {first} to {last}"),
                _ => String::new(),
            };
            let transformers = format!("`transformers-VERSION` {}", span(&TABLE.transformers));
            let help = match newest.trl {
                Some(_) => format!(
                    "give `trl-VERSION` {}, {transformers}, or both with a comma",
                    span(&known_trl)
                ),
                None => format!("give {transformers}"),
            };
            let message = format!("`--dialect-version` is `{text}`");
            reading.error("unknown-value", None, message, help);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::dialects::handbook::keys;

    const OBJECTIVES: [Objective; 10] = [
        Objective::Sft,
        Objective::LanguageModelling,
        Objective::Dpo,
        Objective::Kto,
        Objective::Orpo,
        Objective::Cpo,
        Objective::Grpo,
        Objective::Rloo,
        Objective::Ppo,
        Objective::Reward,
    ];

    fn chosen(
        text: &str,
        objective: Option<Objective>,
        asked: Option<&str>,
    ) -> (String, Vec<String>) {
        let mut reading = Reading::default();
        let root = reading.parse("recipe.yaml", text.to_owned()).unwrap();
        let (_, read_as) = choose(&root, objective, asked, &mut reading);
        let messages = reading
            .diagnostics
            .into_iter()
            .map(|d| format!("{}: {}", d.message, d.help));
        (
            format!("{}; {}", read_as.name, read_as.reason),
            messages.collect(),
        )
    }

    #[test]
    fn keys_tell_the_versions() {
        for (text, objective, expected) in [
            (
                "a: 1",
                Objective::Sft,
                "TRL 1.16, transformers 5.24; versions: the newest known",
            ),
            (
                "max_seq_length: 1",
                Objective::Sft,
                "TRL 0.19, transformers 4.54; versions: the newest with `max_seq_length`",
            ),
            (
                "max_prompt_length: 1\nmax_length: 2",
                Objective::Dpo,
                "TRL 0.28, transformers 5.2; versions: the newest with `max_prompt_length`",
            ),
            (
                "warmup_ratio: 0.1",
                Objective::Sft,
                "TRL 1.16, transformers 5.14; versions: the newest with `warmup_ratio`",
            ),
            (
                "evaluation_strategy: steps\nuse_liger: true\nneftune_noise_alpha: 5",
                Objective::Sft,
                "TRL 0.17, transformers 4.50; versions: the newest with `evaluation_strategy` and `use_liger`",
            ),
            (
                "warmup_ratio: 0.1\nlogging_dir: a\noverwrite_output_dir: true",
                Objective::Sft,
                "TRL 1.16, transformers 4.57; versions: the newest with `overwrite_output_dir`",
            ),
            // No version has both.
            (
                "max_seq_length: 1\nloss_type: dft\nuse_cache: true",
                Objective::Sft,
                "TRL 1.16, transformers 5.24; versions: the newest known",
            ),
        ] {
            assert_eq!(
                chosen(text, Some(objective), None),
                (expected.to_owned(), vec![]),
                "{text}"
            );
        }
        let alone = chosen("per_gpu_train_batch_size: 1", None, None).0;
        assert_eq!(
            alone,
            "transformers 4.57; versions: the newest with `per_gpu_train_batch_size`"
        );
    }

    #[test]
    fn the_user_may_name_the_versions() {
        let by = |text: &str| chosen("a: 1", Some(Objective::Dpo), Some(text));
        for (text, expected) in [
            ("trl-0.9.6", "TRL 0.9, transformers 4.44"),
            ("0.12", "TRL 0.12, transformers 4.47"),
            (
                "trl==0.12.1, transformers==4.46.0",
                "TRL 0.12, transformers 4.46",
            ),
            ("4.41", "TRL 0.12, transformers 4.41"),
            ("trl-0.9,transformers-5.24", "TRL 0.9, transformers 5.24"),
        ] {
            assert_eq!(
                by(text),
                (format!("{expected}; versions: `--dialect-version`"), vec![]),
                "{text}"
            );
        }
        let (name, messages) = by("trl-99.0");
        assert!(name.starts_with("TRL 1.16, "), "{name}");
        assert_eq!(
            messages,
            ["TRL 99.0 is newer than those known here: it is read as TRL 1.16"]
        );
        for text in ["trl-0.1", "head", "trl", "", "peft-0.9"] {
            let message = by(text).1.concat();
            assert!(
                message.starts_with(&format!("`--dialect-version` is `{text}`")),
                "{message}"
            );
            assert!(
                message.contains(
                    "`trl-VERSION` from 0.9 to 1.16, `transformers-VERSION` from 4.40 to"
                ),
                "{message}"
            );
        }
    }

    #[test]
    fn a_version_takes_and_lacks_keys() {
        let versions = |trl, transformers| Versions { trl, transformers };
        let now = versions(Some(Minor(1, 16)), Minor(5, 24));
        let then = versions(Some(Minor(0, 9)), Minor(4, 40));
        let sft = Some(Objective::Sft);
        assert!(!now.takes("max_seq_length", sft) && then.takes("max_seq_length", sft));
        assert_eq!(now.lack("max_seq_length", sft), "TRL 0.20 removed it");
        assert_eq!(then.lack("packing_strategy", sft), "TRL 0.19 brought it");
        assert_eq!(
            now.lack("warmup_ratio", sft),
            "transformers 5.15 removed it"
        );
        // TRL's model config had it, and then its trainers' configs.
        assert!(now.takes("trust_remote_code", sft) && then.takes("trust_remote_code", sft));
        assert!(now.takes("max_seq_length", None), "it is the script's own");
    }

    /// The table of keys and the wheels agree: a key that a wheel's class lists is known to that trainer.
    #[test]
    fn every_key_of_a_class_is_known() {
        let mut unknown = Vec::new();
        // RLOO's older fields are refused by name.
        let others = OBJECTIVES
            .into_iter()
            .filter(|objective| *objective != Objective::Rloo);
        for objective in others {
            for key in TABLE.fields.keys() {
                let mut own = uses(key, Some(objective)).filter(|of| of.class == class(objective));
                if own.any(|of| of.until.is_none_or(|until| until > Minor(0, 22)))
                    && keys::kind(key, objective).is_none()
                {
                    unknown.push(format!("{objective} {key}"));
                }
            }
        }
        assert_eq!(unknown, [""; 0]);
    }

    #[test]
    fn every_version_is_in_a_pair() {
        let pairs = Versions::all(true);
        for version in &TABLE.transformers {
            assert!(
                pairs.iter().any(|pair| pair.transformers == *version),
                "{version}"
            );
        }
        for [version, ..] in &TABLE.trl {
            assert!(
                pairs.iter().any(|pair| pair.trl == Some(*version)),
                "{version}"
            );
        }
        assert!(pairs.is_sorted());
    }
}
