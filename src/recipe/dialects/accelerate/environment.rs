//! The environment that `accelerate launch` gives to every rank, and the DeepSpeed config that accelerate makes
//! there. What the options and the config merge into decides the variables. A setting that reaches no variable is an
//! error, because accelerate drops it.
//!
//! Source: accelerate 1.15.0 `commands/launch.py` (`_validate_launch_command`, `launch_command`),
//! `commands/config/config_args.py`, `utils/launch.py` (`prepare_*_env`), `utils/dataclasses.py`
//! (`DeepSpeedPlugin.__post_init__`).

use std::collections::BTreeMap;

use serde_json::json;

use super::options::{KEYS_ONLY, Kind, Known, OPTIONS, Pass, SWITCHES, VALUED};
use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::launch::{AccelerateLaunch, Opt};
use crate::recipe::schema::spec::MASTER_PORT;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Entry, Node};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::util::suggest::{did_you_mean, short};

/// Environment variables by their names.
pub(crate) type Variables = BTreeMap<String, String>;

/// Sections of the config: the prefix that their keys may omit, and the beginnings of the options that they
/// hold.
const SECTIONS: [(&str, &str, &[&str]); 7] = [
    ("fp8_config", "fp8_", &["fp8_"]),
    (
        "deepspeed_config",
        "",
        &["deepspeed_", "zero", "offload_", "gradient_"],
    ),
    ("fsdp_config", "fsdp_", &["fsdp_"]),
    ("parallelism_config", "", &["parallelism_config_"]),
    ("megatron_lm_config", "", &["megatron_lm_"]),
    ("mpirun_config", "", &["mpirun_"]),
    ("dynamo_config", "dynamo_", &["dynamo_"]),
];

/// Top-level keys of the config that accelerate reads. Others are Evenkeel's to decide, or count only for TPUs.
const FIELDS: [&str; 6] = [
    "debug",
    "dynamo_backend",
    "gpu_ids",
    "main_process_port",
    "mixed_precision",
    "use_cpu",
];

/// The former name of `fsdp_backward_prefetch`. HALOs' configs have it, and accelerate 0.33, which HALOs installs,
/// reads it. accelerate 1.15 drops it.
const OLD_PREFETCH: &str = "fsdp_backward_prefetch_policy";

/// Variables of a rank that uses a DeepSpeed config instead of what the launcher states: accelerate refuses a file
/// beside keys of the accelerate config, and the first variable lists these keys.
pub(crate) const FILE_VARIABLES: [(&str, &str); 2] = [
    ("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file"),
    ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "{deepspeed_config}"),
];

/// The variables of a launch with the numbers that its settings state. The reader has accepted its config.
pub(crate) fn environment(
    launch: &AccelerateLaunch,
    diagnostics: &mut Vec<Diagnostic>,
) -> Variables {
    let mut merged = Merged::of(launch);
    merged.build();
    merged.refuse_unread();
    diagnostics.append(&mut merged.problems);
    merged.variables
}

/// Replaces the numbers of a world by placeholders, which every generation fills in.
pub(crate) fn with_placeholders(mut variables: Variables) -> Variables {
    const ACCUMULATION: &str = "{gradient_accumulation_steps}";
    let above_1 = |axis: &str| {
        let size = variables.get(&format!("PARALLELISM_CONFIG_{axis}_SIZE"));
        size.is_some_and(|size| size != "1")
    };
    let sized = ["TP", "CP", "DP_SHARD", "DP_REPLICATE"]
        .into_iter()
        .any(above_1);
    // Sizes of 1 are no parallelism, and DeepSpeed makes the groups of its sequence parallelism itself.
    let sized = sized && !above_1("SP");
    let mut replace = |name: &str, placeholder: &str| {
        if let Some(value) = variables.get_mut(name) {
            *value = placeholder.to_owned();
        }
    };
    replace("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ACCUMULATION);
    replace("MEGATRON_LM_NUM_MICRO_BATCHES", ACCUMULATION);
    let [_, (file, placeholder)] = FILE_VARIABLES;
    replace(file, placeholder);
    if sized {
        replace("PARALLELISM_CONFIG_DP_SHARD_SIZE", "{data_shard_size}");
        replace(
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
            "{data_replicate_size}",
        );
    }
    variables
}

/// The DeepSpeed config that accelerate makes from these variables of a launch: JSON, with an accumulation of 1 in place
/// of the plan's. `None`: the launch does not use DeepSpeed, or names a file.
pub fn deepspeed_config(variables: &Variables) -> Option<String> {
    let is = |name: &str| variables.get(name).map(String::as_str);
    let [_, (file, _)] = FILE_VARIABLES;
    if is("ACCELERATE_USE_DEEPSPEED") != Some("true") || is(file).is_some() {
        return None;
    }
    let of = |name: &str| is(&format!("ACCELERATE_DEEPSPEED_{name}"));
    // accelerate's launcher passes no paths for NVMe.
    let offload = |name: &str| json!({"device": of(name).unwrap_or("none"), "nvme_path": null});
    let mut config = json!({
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": of("ZERO_STAGE").unwrap_or("2").parse::<u64>().ok()?,
            "offload_optimizer": offload("OFFLOAD_OPTIMIZER_DEVICE"),
            "offload_param": offload("OFFLOAD_PARAM_DEVICE"),
            "stage3_gather_16bit_weights_on_model_save": of("ZERO3_SAVE_16BIT_MODEL") == Some("true"),
        },
    });
    match is("ACCELERATE_GRADIENT_CLIPPING").unwrap_or("auto") {
        "auto" => config["gradient_clipping"] = json!("auto"),
        // accelerate sets no clipping of 0.
        text => match text.parse::<f64>().ok()? {
            0.0 => {}
            value => config["gradient_clipping"] = json!(value),
        },
    }
    serde_json::to_string_pretty(&config).ok()
}

/// The settings of a launch: options over the config.
struct Merged<'l> {
    launch: &'l AccelerateLaunch,
    /// The settings that are no defaults, under the option or key as written.
    given: BTreeMap<&'static str, Given<Resolved>>,
    variables: Variables,
    problems: Vec<Diagnostic>,
}

impl Merged<'_> {
    fn of(launch: &AccelerateLaunch) -> Merged<'_> {
        let mut merged = Merged {
            launch,
            given: BTreeMap::new(),
            variables: Variables::new(),
            problems: Vec::new(),
        };
        for option in &launch.options {
            merged.option(option);
        }
        let config = launch.config.as_ref().and_then(Node::entries);
        for entry in config.unwrap_or_default() {
            merged.field(entry);
        }
        merged
    }

    fn refuse(&mut self, rule: &str, span: Option<Span>, message: String, help: impl Into<String>) {
        let problem = Diagnostic::error(rule, span, message, help);
        self.problems.push(problem);
    }

    fn option(&mut self, option: &Opt) {
        let known = OPTIONS.iter().find(|(name, ..)| *name == option.name);
        let Some((name, kind, ..)) = known else {
            return;
        };
        let text = option
            .value
            .as_ref()
            .map_or("", |value| value.text.as_str());
        let Some(value) = convert(*kind, text) else {
            let message = format!("`--{name}` is `{}`", short(text));
            let help = takes(*kind, text);
            return self.refuse("unknown-value", Some(option.at), message, help);
        };
        let written = format!("--{name} {text}");
        self.given
            .insert(name, Given::new(written.trim_end(), value, option.at));
    }

    /// Whether an option sets a setting.
    fn is_typed(&self, name: &str) -> bool {
        self.launch.options.iter().any(|option| option.name == name)
    }

    /// Lays a top-level key of the config below the options.
    fn field(&mut self, entry: &Entry) {
        let name = entry.name.as_str();
        let own = ["compute_environment", "distributed_type", RESERVED];
        if own.contains(&name) || is_replaced(name) {
            return;
        }
        if let Some(section) = SECTIONS.iter().find(|(section, ..)| *section == name) {
            self.section(section, &entry.value);
            return;
        }
        if let Some(known) = settings().find(|(known, ..)| *known == name && FIELDS.contains(known))
        {
            self.key(known, entry);
            return;
        }
        let requests = match entry.value.resolve(Schema::PyYaml) {
            Some(value) => !is_neutral(&value) && value != Resolved::Str("main".to_owned()),
            None => !entry.value.items().is_some_and(<[_]>::is_empty),
        };
        if requests {
            let text = short(entry.value.shown());
            let message = format!("accelerate reads `{name}: {text}` only for TPUs or not at all");
            let help = match name {
                "enable_cpu_affinity" => "give it as the option `--enable_cpu_affinity`",
                _ => "remove it",
            };
            self.refuse("unsupported-value", Some(entry.name_span), message, help);
        }
    }

    fn section(&mut self, (section, prefix, begins): &(&str, &str, &[&str]), node: &Node) {
        let Some(entries) = node.entries() else {
            if !node.is_null(Schema::PyYaml) {
                let message = format!("`{section}` takes a mapping, this is {}", node.kind());
                self.refuse("wrong-type", Some(node.span), message, "remove it");
            }
            return;
        };
        for entry in entries {
            let key = entry.name.as_str();
            let name = if key == OLD_PREFETCH {
                "fsdp_backward_prefetch".to_owned()
            } else if key.starts_with(prefix.trim_end_matches('_')) {
                key.to_owned()
            } else {
                format!("{prefix}{key}")
            };
            let belongs = |name: &str| begins.iter().any(|begin| name.starts_with(begin));
            if is_replaced(&name) && belongs(&name) {
                continue;
            }
            let known = settings().filter(|row| belongs(row.0));
            if let Some(known) = known.clone().find(|row| row.0 == name) {
                self.key(known, entry);
                continue;
            }
            let message = format!("accelerate drops `{key}`: `{section}` has no such key");
            let help = did_you_mean(&name, known.map(|row| row.0));
            self.refuse("unknown-key", Some(entry.name_span), message, help);
        }
    }

    /// Lays the value of a key below the option of the same name.
    fn key(&mut self, known: &'static Known, entry: &Entry) {
        let (name, kind, default, _) = *known;
        let (key, span) = (&entry.name, Some(entry.value.span));
        let Some(value) = entry.value.resolve(Schema::PyYaml) else {
            let message = format!("`{key}` takes one value, this is {}", entry.value.kind());
            return self.refuse("wrong-type", span, message, "write one value");
        };
        if value == Resolved::Null {
            if !default.is_empty() {
                let message = format!("`{key}` is empty: accelerate reads `None`, not its default");
                self.refuse("wrong-type", span, message, "remove it, or give a value");
            }
            return;
        }
        let text = value.to_string();
        if let Kind::OneOf(choices) = kind
            && !choices
                .iter()
                .any(|choice| choice.eq_ignore_ascii_case(&text))
        {
            let message = format!("`{key}` is `{}`", short(&text));
            return self.refuse("unknown-value", span, message, takes(kind, &text));
        }
        if !self.is_typed(name) {
            self.given
                .insert(name, Given::new(key, value, entry.name_span));
        }
    }

    fn value(&self, row: &Known) -> Resolved {
        let given = self.given.get(row.0);
        given.map_or_else(|| default(row), |given| given.value.clone())
    }

    /// The value of a setting by its name.
    fn named(&self, name: &str) -> Resolved {
        let row = settings().find(|row| row.0 == name);
        row.map_or(Resolved::Null, |row| self.value(row))
    }

    fn span(&self, name: &str) -> Option<Span> {
        self.given.get(name).map(|given| given.span)
    }

    fn set(&mut self, variable: &str, text: impl Into<String>) {
        self.variables.insert(variable.to_owned(), text.into());
    }

    /// Sets the variables of the settings that have a value, and that `chosen` accepts.
    fn pass(&mut self, chosen: impl Fn(&str) -> bool) {
        for row in settings() {
            let (variable, lower) = match row.3 {
                Pass::Set(variable) => (variable, false),
                Pass::Lower(variable) => (variable, true),
                _ => continue,
            };
            match self.value(row) {
                _ if !chosen(variable) => {}
                Resolved::Null => {}
                value if lower => self.set(variable, value.to_string().to_lowercase()),
                value => self.set(variable, value.to_string()),
            }
        }
    }

    fn build(&mut self) {
        let kind = self.launch.kind.as_str();
        self.common();
        if kind != "DEEPSPEED" || self.is_typed("cpu") {
            let backend = match self.named("dynamo_backend") {
                Resolved::Null => "NO".to_owned(),
                value => value.to_string().to_uppercase(),
            };
            self.set("ACCELERATE_DYNAMO_BACKEND", backend);
            self.pass(|name| name.starts_with("ACCELERATE_DYNAMO_") || name == "OMP_NUM_THREADS");
        }
        if self.is_typed("cpu") || ["NO", "MULTI_CPU"].contains(&kind) {
            self.one_process();
            return;
        }
        if self.launch.passes_sizes {
            self.sizes();
        }
        match kind {
            "FSDP" => self.fsdp(),
            "MEGATRON_LM" => {
                self.set("ACCELERATE_USE_MEGATRON_LM", "true");
                self.pass(|variable| variable.starts_with("MEGATRON_LM_"));
            }
            "DEEPSPEED" => {
                self.set("ACCELERATE_USE_DEEPSPEED", "true");
                self.set("ACCELERATE_CONFIG_DS_FIELDS", self.deepspeed_fields());
                // The launcher adds it after the paths of the surrounding environment.
                self.set("PYTHONPATH", "{working_directory}");
                let begins = ["ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_"];
                self.pass(|variable| begins.iter().any(|begin| variable.starts_with(begin)));
            }
            _ => {}
        }
    }

    fn common(&mut self) {
        self.pass(|variable| variable == MASTER_PORT);
        if self.named("debug").is_true() {
            self.set("ACCELERATE_DEBUG_MODE", "true");
        }
        let kind = self.launch.kind.as_str();
        let other = kind.starts_with("MULTI_") && !["MULTI_GPU", "MULTI_CPU"].contains(&kind);
        if let Some(Given { value, span, .. }) = self.given.remove("gpu_ids") {
            match value {
                Resolved::Str(ids) if ids == "all" => {}
                Resolved::Str(ids) if !other => self.set("CUDA_VISIBLE_DEVICES", ids),
                Resolved::Str(_) => {
                    let message = format!("`gpu_ids` is not read for `distributed_type: {kind}`");
                    let help = "remove it: evenkeel gives each rank its device";
                    self.refuse("unsupported-value", Some(span), message, help);
                }
                value => {
                    let message = format!("`gpu_ids` is `{value}`, and accelerate fails");
                    let help = format!("quote it, `\"{value}\"`");
                    self.refuse("wrong-type", Some(span), message, help);
                }
            }
        }
        let precision = match self.named("mixed_precision") {
            Resolved::Null => "no".to_owned(),
            value => value.to_string().to_lowercase(),
        };
        if precision == "fp8" {
            self.pass(|variable| variable.starts_with("ACCELERATE_FP8_"));
            for part in ["FPROP", "DGRAD", "WGRAD"] {
                self.set(&format!("ACCELERATE_FP8_OVERRIDE_{part}"), "False");
            }
        }
        self.set("ACCELERATE_MIXED_PRECISION", precision);
        if self.named("enable_cpu_affinity").is_true() {
            self.set("ACCELERATE_CPU_AFFINITY", "1");
        }
    }

    /// The variables of a script that accelerate starts as one process.
    fn one_process(&mut self) {
        let stated = self.named("use_cpu");
        if !matches!(stated, Resolved::Null | Resolved::Bool(_)) {
            let message = format!("`use_cpu` is `{stated}`");
            let help = "write `true` or `false`";
            self.refuse("wrong-type", self.span("use_cpu"), message, help);
        }
        let cpu = self.is_typed("cpu") || stated.is_true();
        self.set("ACCELERATE_USE_CPU", Resolved::Bool(cpu).to_string());
        if cpu {
            self.set("KMP_AFFINITY", "granularity=fine,compact,1,0");
            self.set("KMP_BLOCKTIME", "1");
        }
    }

    fn fsdp(&mut self) {
        self.set("ACCELERATE_USE_FSDP", "true");
        let efficient = self.named("fsdp_cpu_ram_efficient_loading").is_true();
        if efficient && !self.named("fsdp_sync_module_states").is_true() {
            self.refuse(
                "unsupported-value",
                self.span("fsdp_sync_module_states"),
                "`fsdp_cpu_ram_efficient_loading` needs `fsdp_sync_module_states`".to_owned(),
                "set `fsdp_sync_module_states: true`",
            );
        }
        self.pass(|variable| variable.starts_with("FSDP_"));
    }

    /// The keys of the config's file for DeepSpeed. The precision comes last; an option replaces it.
    fn deepspeed_fields(&self) -> String {
        let config = self.launch.config.as_ref();
        let stated = |name: &str| config.and_then(|config| config.get(name));
        let section = stated("deepspeed_config").and_then(Node::entries);
        let keys = section.unwrap_or_default().iter();
        let mut fields: Vec<String> = keys.map(|entry| entry.name.to_lowercase()).collect();
        let precision = stated("mixed_precision").is_some_and(|node| !node.is_null(Schema::PyYaml));
        if precision && !self.is_typed("mixed_precision") {
            fields.push("mixed_precision".to_owned());
        }
        fields.join(",")
    }

    /// The sizes of the parallelism config. Some settings of an axis count only above size 1.
    fn sizes(&mut self) {
        self.set("ACCELERATE_USE_PARALLELISM_CONFIG", "true");
        let [context, sequence] = ["cp", "sp"].map(|axis| {
            let size = self.named(&format!("parallelism_config_{axis}_size"));
            !matches!(size, Resolved::Int(..=1))
        });
        self.pass(
            |variable| match variable.strip_prefix("PARALLELISM_CONFIG_") {
                Some("CP_COMM_STRATEGY") => context,
                Some(name) if name.starts_with("SP_SEQ") || name.starts_with("SP_ATTN") => sequence,
                name => name.is_some(),
            },
        );
    }

    /// Refuses the settings that reached no variable.
    fn refuse_unread(&mut self) {
        let decided_by = if self.is_typed("cpu") {
            "`--cpu`".to_owned()
        } else {
            format!("`distributed_type: {}`", self.launch.kind)
        };
        for row in settings() {
            let Some(given) = self.given.get(row.0) else {
                continue;
            };
            let (message, help) = match row.3 {
                _ if is_neutral(&given.value) || given.value == default(row) => continue,
                // The reader warns of it.
                _ if given.key == "use_cpu" => continue,
                Pass::Set(variable) | Pass::Lower(variable) | Pass::Decides(variable)
                    if self.variables.contains_key(variable) =>
                {
                    continue;
                }
                Pass::Refused(why, help) => (format!("`{}` {why}", given.key), help),
                _ => (
                    format!(
                        "`{}` has no effect with {decided_by}: accelerate drops it",
                        given.key
                    ),
                    "remove it",
                ),
            };
            let problem = Diagnostic::error("unsupported-value", Some(given.span), message, help);
            self.problems.push(problem);
        }
    }
}

/// Every setting of a launch.
fn settings() -> impl Iterator<Item = &'static Known> + Clone {
    OPTIONS.iter().chain(KEYS_ONLY)
}

/// Whether Evenkeel replaces a setting.
fn is_replaced(name: &str) -> bool {
    SWITCHES.has(name) || VALUED.has(name)
}

fn default((_, kind, text, _): &Known) -> Resolved {
    match kind {
        _ if text.is_empty() => Resolved::Null,
        Kind::Switch | Kind::Bool => Resolved::Bool(*text == "true"),
        kind => convert(*kind, text).unwrap_or(Resolved::Null),
    }
}

/// Whether a value requests nothing.
fn is_neutral(value: &Resolved) -> bool {
    match value {
        Resolved::Str(text) => ["no", "none", ""].contains(&text.to_lowercase().as_str()),
        value => !value.is_true(),
    }
}

/// Converts an option's text as its parser does; `None`: it refuses the text.
fn convert(kind: Kind, text: &str) -> Option<Resolved> {
    let number = text.trim().replace('_', "");
    match kind {
        Kind::Switch => Some(Resolved::Bool(true)),
        Kind::OneOf(choices) if !choices.contains(&text) => None,
        Kind::Text | Kind::OneOf(_) => Some(Resolved::Str(text.to_owned())),
        Kind::Int => number.parse().ok().map(Resolved::Int),
        Kind::Float => number.parse().ok().map(Resolved::Float),
        Kind::Bool => Some(Resolved::Bool(!text.is_empty())),
        Kind::Truth => match text.to_lowercase().as_str() {
            "y" | "yes" | "t" | "true" | "on" | "1" => Some(Resolved::Int(1)),
            "n" | "no" | "f" | "false" | "off" | "0" => Some(Resolved::Int(0)),
            _ => None,
        },
    }
}

/// What an option takes, for help.
fn takes(kind: Kind, text: &str) -> String {
    match kind {
        Kind::OneOf(choices) => did_you_mean(text, choices.iter().copied()),
        Kind::Int => "give a whole number".to_owned(),
        Kind::Float => "give a number".to_owned(),
        _ => "give `true` or `false`".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use crate::recipe::launchers::stated_environment;
    use crate::recipe::schema::environment::Environment;
    use crate::recipe::schema::request::Request;
    use crate::recipe::{ReadError, read};

    /// The variables of a launch, `NAME=value`; `@` is the path of a config with the given text.
    fn variables(config: &str, launcher: &str) -> Result<Vec<String>, ReadError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yaml");
        std::fs::write(&path, config).unwrap();
        let line = format!("{launcher} train.py --per_device_train_batch_size 4");
        let line = line.replace('@', path.to_str().unwrap());
        let recipe = read(&Request {
            command: line.split_whitespace().map(str::to_owned).collect(),
            ..Request::default()
        })?;
        let variables = stated_environment(&recipe)?.into_iter();
        Ok(variables
            .map(|(name, value)| format!("{name}={value}"))
            .collect())
    }

    /// Line and message of every error.
    fn errors(config: &str, launcher: &str) -> Vec<String> {
        let diagnostics = variables(config, launcher).unwrap_err().diagnostics;
        let errors = diagnostics.iter();
        errors
            .map(|d| format!("{}: {}", d.span.map_or(0, |span| span.line), d.message))
            .collect()
    }

    const LAUNCH: &str = "accelerate launch --config_file @";
    const FSDP: &str = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n  \
                        fsdp_version: 1\n  offload_params: yes\n  fsdp_state_dict_type: FULL_STATE_DICT\n";

    #[test]
    fn fsdp_and_precision_reach_the_ranks_and_options_win() {
        let launcher = format!("{LAUNCH} --fsdp-version 2 --mixed_precision fp16 --debug");
        insta::assert_snapshot!(variables(FSDP, &launcher).unwrap().join("\n"));
    }

    #[test]
    fn the_named_port_is_the_ranks_with_any_type_and_an_option_wins() {
        let port = |config: &str, launcher: &str| {
            let found = variables(config, launcher).unwrap();
            let found = found
                .iter()
                .find_map(|variable| variable.strip_prefix("MASTER_PORT="));
            found.map(str::to_owned)
        };
        let of_config = format!("{FSDP}main_process_port: 29501\n");
        assert_eq!(port(&of_config, LAUNCH).as_deref(), Some("29501"));
        let typed = format!("{LAUNCH} --main-process-port 29502");
        assert_eq!(port(&of_config, &typed).as_deref(), Some("29502"));
        let one = "accelerate launch --num_processes 1 --main_process_port=29502";
        assert_eq!(port("", one).as_deref(), Some("29502"));
        assert_eq!(
            port(&format!("{FSDP}main_process_port: null\n"), LAUNCH),
            None
        );
        assert_eq!(
            errors(FSDP, &format!("{LAUNCH} --main_process_port here")),
            ["1: `--main_process_port` is `here`"]
        );
    }

    #[test]
    fn a_command_without_a_config_and_a_config_that_trl_ships_set_variables() {
        let has = |variables: &[String], expected: &[&str]| {
            let all = |name: &&str| variables.iter().any(|variable| variable == name);
            assert!(expected.iter().all(all), "{variables:?}");
        };
        let typed = "accelerate launch --use_deepspeed --num_processes 2 --gradient_clipping 1e-5 \
                     --offload_optimizer_device CPU";
        has(
            &variables("", typed).unwrap(),
            &[
                "ACCELERATE_USE_DEEPSPEED=true",
                "ACCELERATE_CONFIG_DS_FIELDS=",
                "ACCELERATE_GRADIENT_CLIPPING=1e-05",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu",
            ],
        );
        let line = "trl sft --model_name_or_path m --dataset_name d --accelerate_config zero3";
        has(
            &variables("", line).unwrap(),
            &[
                "ACCELERATE_CONFIG_DS_FIELDS=deepspeed_multinode_launcher,offload_optimizer_device,\
                 offload_param_device,zero3_init_flag,zero3_save_16bit_model,zero_stage,mixed_precision",
                "ACCELERATE_DEEPSPEED_ZERO3_INIT=true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE=3",
                "ACCELERATE_MIXED_PRECISION=bf16",
            ],
        );
        let halos = FSDP.replace(
            "fsdp_version: 1",
            "fsdp_backward_prefetch_policy: BACKWARD_POST",
        );
        has(
            &variables(&halos, LAUNCH).unwrap(),
            &["FSDP_BACKWARD_PREFETCH=BACKWARD_POST"],
        );
        assert_eq!(
            variables("", "torchrun --nproc_per_node 2").unwrap(),
            [""; 0]
        );
        let tied = line.replace("config zero3", "config=zero3");
        assert_eq!(
            errors("", &tied),
            ["1: TRL refuses `--accelerate_config=zero3` as an unknown argument"]
        );
        let recipe = "model_name_or_path: m\nuse_fsdp: true\n";
        let switch = "2: TRL passes `use_fsdp` to its launcher with a value, which the launcher starts as the program";
        let found = errors(recipe, "trl sft --config @ --dataset_name");
        assert!(found.iter().any(|error| error == switch), "{found:?}");
    }

    #[test]
    fn the_default_config_counts_unless_the_command_names_one_or_a_cpu() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("accelerate")).unwrap();
        std::fs::write(home.path().join("accelerate/default_config.yaml"), FSDP).unwrap();
        let variable = ("HF_HOME".to_owned(), home.path().display().to_string());
        let uses_fsdp = |launcher: &str| {
            let line = format!("{launcher} train.py --per_device_train_batch_size 4");
            let recipe = read(&Request {
                environment: Environment::Shell([variable.clone()].into()),
                command: line.split_whitespace().map(str::to_owned).collect(),
                ..Request::default()
            });
            let variables = stated_environment(&recipe.unwrap()).unwrap();
            variables.contains_key("ACCELERATE_USE_FSDP")
        };
        assert!(uses_fsdp("accelerate launch"));
        assert!(!uses_fsdp("accelerate launch --cpu"));
        assert!(!uses_fsdp("torchrun --nproc_per_node 2"));
    }

    #[test]
    fn settings_that_reach_no_rank_are_refused_at_their_place() {
        for (config, message) in [
            (
                "fsdp_config: {fsdp_backward_prefech: BACKWARD_PRE}",
                "accelerate drops `fsdp_backward_prefech`: `fsdp_config` has no such key",
            ),
            (
                "deepspeed_config: {zero_stage: 2}",
                "`zero_stage` has no effect with `distributed_type: FSDP`: accelerate drops it",
            ),
            (
                "enable_cpu_affinity: true",
                "accelerate reads `enable_cpu_affinity: true` only for TPUs or not at all",
            ),
            ("gpu_ids: 0", "`gpu_ids` is `0`, and accelerate fails"),
            (
                "fsdp_config: {fsdp_sync_module_states: false}",
                "`fsdp_cpu_ram_efficient_loading` needs `fsdp_sync_module_states`",
            ),
            (
                "dynamo_config: {dynamo_backend: nonsense}",
                "`dynamo_backend` is `nonsense`",
            ),
        ] {
            let text = format!("distributed_type: FSDP\nnum_processes: 1\n{config}\n");
            assert_eq!(errors(&text, LAUNCH), [format!("3: {message}")], "{config}");
        }
        let file = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n  \
                    offload_param_nvme_path: /nvme\n";
        let lost = "has no effect with `distributed_type: DEEPSPEED`: accelerate drops it";
        assert_eq!(
            errors(file, LAUNCH),
            [format!("5: `offload_param_nvme_path` {lost}")]
        );
        for (option, message) in [
            (
                "--zero_stage 3",
                "`--zero_stage 3` has no effect with `distributed_type: FSDP`: accelerate drops it",
            ),
            ("--fsdp_version 3", "`--fsdp_version` is `3`"),
        ] {
            let launcher = format!("{LAUNCH} {option}");
            assert_eq!(
                errors(FSDP, &launcher),
                [format!("1: {message}")],
                "{option}"
            );
        }
        // What every config of the corpus states without effect.
        let neutral = format!(
            "{FSDP}same_network: true\nrdzv_backend: static\ndowncast_bf16: 'no'\ntpu_env: []\n\
             main_training_function: main\nuse_cpu: true\ndeepspeed_config: {{}}\n"
        );
        assert!(variables(&neutral, LAUNCH).is_ok());
    }
}
