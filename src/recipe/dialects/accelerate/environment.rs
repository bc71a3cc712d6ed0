//! The environment that `accelerate launch` gives to every rank. What its options and its config merge into
//! decides the variables. A setting that reaches no variable is an error, because accelerate drops it.
//!
//! Source: accelerate 1.15.0 `commands/launch.py` (`_validate_launch_command`, `launch_command`),
//! `commands/config/config_args.py`, `utils/launch.py` (`prepare_*_env`).

use std::collections::{BTreeMap, BTreeSet};

use super::options::{
    KEYS_ONLY, Kind, Known, LINEAR_PRECISION, OPTIONS, Pass, SWITCHES_GONE, VALUED_GONE,
};
use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::launch::Launch;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Entry, Node};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;
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

/// A list of three truth values.
const TRUTHS: &str = "fp8_override_linear_precision";

/// The variable that selects devices, by distributed type; CUDA's for all others.
const VISIBLE: [(&str, &str); 7] = [
    ("MULTI_XPU", "ZE_AFFINITY_MASK"),
    ("MULTI_MLU", "MLU_VISIBLE_DEVICES"),
    ("MULTI_SDAA", "SDAA_VISIBLE_DEVICES"),
    ("MULTI_MUSA", "MUSA_VISIBLE_DEVICES"),
    ("MULTI_NPU", "ASCEND_RT_VISIBLE_DEVICES"),
    ("MULTI_HPU", "HABANA_VISIBLE_MODULES"),
    ("MULTI_NEURON", "NEURON_RT_VISIBLE_CORES"),
];

/// The backends of `torch.compile` that accelerate knows.
const DYNAMO: Words = Words(
    "NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT \
     AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON",
);

/// The former name of `fsdp_backward_prefetch`. HALOs' configs have it, and accelerate 0.33, which HALOs installs,
/// reads it. accelerate 1.15 drops it.
const OLD_PREFETCH: &str = "fsdp_backward_prefetch_policy";

/// The variables of a launch with the numbers that its settings state. The reader has accepted its config.
pub(crate) fn environment(launch: &Launch, diagnostics: &mut Vec<Diagnostic>) -> Variables {
    let mut merged = Merged::of(launch);
    merged.build();
    merged.refuse_unread();
    diagnostics.append(&mut merged.problems);
    merged.variables
}

/// Replaces the numbers of a world by placeholders, which every generation fills in.
pub(crate) fn with_placeholders(mut variables: Variables) -> Variables {
    for (name, placeholder) in [
        (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "{gradient_accumulation_steps}",
        ),
        (
            "MEGATRON_LM_NUM_MICRO_BATCHES",
            "{gradient_accumulation_steps}",
        ),
        ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "{deepspeed_config}"),
    ] {
        if let Some(value) = variables.get_mut(name) {
            *value = placeholder.to_owned();
        }
    }
    let sizes = ["TP", "CP", "SP", "DP_SHARD", "DP_REPLICATE"];
    let size = |axis: &str| variables.get(&format!("PARALLELISM_CONFIG_{axis}_SIZE"));
    let above_1 = |axis: &&str| size(axis).is_some_and(|size| size != "1");
    // Sizes of 1 are no parallelism, and DeepSpeed makes the groups of its sequence parallelism itself.
    if sizes.iter().any(above_1) && !above_1(&"SP") {
        for axis in ["data_shard", "data_replicate"] {
            let name = axis.replace("data", "dp").to_uppercase();
            let value = format!("{{{axis}_size}}");
            variables.insert(format!("PARALLELISM_CONFIG_{name}_SIZE"), value);
        }
    }
    variables
}

/// One setting after the merge of options and config.
struct Setting {
    value: Resolved,
    /// The option or key as written, and its place; `None`: a default.
    given: Option<(String, Span)>,
    /// A variable depends on it.
    read: bool,
}

/// The settings of a launch: options over the config.
#[derive(Default)]
struct Merged {
    settings: BTreeMap<String, Setting>,
    /// Names on the command line.
    typed: BTreeSet<String>,
    /// The distributed type, and the setting that decides it, for messages.
    kind: String,
    decided_by: String,
    cpu: bool,
    parallelism: bool,
    /// Keys that the config states for DeepSpeed.
    deepspeed_keys: Vec<String>,
    variables: Variables,
    problems: Vec<Diagnostic>,
}

impl Merged {
    fn of(launch: &Launch) -> Merged {
        let mut merged = Merged::default();
        for (name, kind, default, _) in settings() {
            let value = match (kind, *default) {
                (_, "") => Resolved::Null,
                (Kind::Switch | Kind::Bool, text) => Resolved::Bool(text == "true"),
                (kind, text) => convert(*kind, text).unwrap_or(Resolved::Null),
            };
            merged.put(name, value, None);
        }
        for option in &launch.options {
            merged.option(option);
        }
        merged.choose(launch);
        if let Some(config) = &launch.config {
            let schema = if launch.json {
                Schema::Core
            } else {
                Schema::PyYaml
            };
            merged.config(config, schema);
        }
        merged
    }

    fn put(&mut self, name: &str, value: Resolved, given: Option<(String, Span)>) {
        let setting = Setting {
            value,
            given,
            read: false,
        };
        self.settings.insert(name.to_owned(), setting);
    }

    fn refuse(&mut self, rule: &str, span: Option<Span>, message: String, help: impl Into<String>) {
        let problem = Diagnostic::error(rule, span, message, help);
        self.problems.push(problem);
    }

    fn option(&mut self, option: &Given<Option<String>>) {
        let name = option.key.as_str();
        let span = Some(option.span);
        if SWITCHES_GONE.has(name) || VALUED_GONE.has(name) {
            let message =
                format!("accelerate 1.15 has no option `--{name}`, only older versions do");
            self.refuse("unknown-key", span, message, "remove it");
            return;
        }
        let Some((_, kind, ..)) = OPTIONS.iter().find(|(known, ..)| *known == name) else {
            return;
        };
        let text = option.value.as_deref().unwrap_or_default();
        let parts: Option<Vec<_>> = match kind {
            Kind::Switch => Some(vec![Resolved::Bool(true)]),
            Kind::Truths => text
                .split(',')
                .map(|text| convert(Kind::Truth, text))
                .collect(),
            kind => convert(*kind, text).map(|value| vec![value]),
        };
        let count = if matches!(kind, Kind::Truths) { 3 } else { 1 };
        let Some(parts) = parts.filter(|parts| parts.len() == count) else {
            let message = format!("`--{name}` is `{}`", short(text));
            self.refuse("unknown-value", span, message, takes(*kind, text));
            return;
        };
        self.typed.insert(name.to_owned());
        let written = format!("--{name} {text}").trim_end().to_owned();
        self.put_parts(name, parts, (written, option.span));
    }

    /// Puts one value, or three truth values.
    fn put_parts(&mut self, name: &str, parts: Vec<Resolved>, given: (String, Span)) {
        let mut given = Some(given);
        let truths = LINEAR_PRECISION.iter().map(|(part, ..)| *part);
        let names: Vec<&str> = if name == TRUTHS {
            truths.collect()
        } else {
            vec![name]
        };
        for (name, value) in names.into_iter().zip(parts) {
            self.put(name, value, given.take());
        }
    }

    /// Chooses the distributed type: the command's switch, else the config's type.
    fn choose(&mut self, launch: &Launch) {
        self.cpu = self.typed.contains("cpu");
        let mut found = super::typed::KINDS.iter();
        let typed = found.find(|(name, _)| self.typed.contains(*name));
        if let (Some((first, _)), Some((second, _))) =
            (typed, found.find(|(name, _)| self.typed.contains(*name)))
        {
            let message = format!("`--{first}` and `--{second}` choose different types");
            self.refuse(
                "unsupported-value",
                self.span(second),
                message,
                "remove one of them",
            );
        }
        let config = launch.config.as_ref();
        let section = config.and_then(|config| config.get("parallelism_config"));
        let has_sizes = section
            .and_then(Node::entries)
            .is_some_and(|e| !e.is_empty());
        (self.kind, self.decided_by) = match (typed, config) {
            (Some((switch, kind)), _) => ((*kind).to_owned(), format!("`--{switch}`")),
            (None, Some(config)) => {
                let node = config.get("distributed_type");
                // An unquoted `NO` is false.
                let text = node.and_then(Node::text).unwrap_or("NO");
                let known = super::world::TYPES.has(text);
                let kind = if known { text } else { "NO" };
                (kind.to_owned(), format!("`distributed_type: {kind}`"))
            }
            (None, None) => match self.settings.get("num_processes").map(|s| &s.value) {
                Some(Resolved::Int(..=1)) => ("NO".to_owned(), "one process".to_owned()),
                _ => (
                    "MULTI_GPU".to_owned(),
                    "a command without a type".to_owned(),
                ),
            },
        };
        if self.cpu {
            self.decided_by = "`--cpu`".to_owned();
        }
        self.parallelism = match (typed, config) {
            (None, Some(_)) => has_sizes,
            _ => self.typed.contains("use_parallelism_config"),
        };
    }

    /// Lays the config below the options.
    fn config(&mut self, config: &Node, schema: Schema) {
        let entries = config.entries().unwrap_or_default();
        let legacy = config.get("dynamo_backend");
        for Entry {
            name,
            value,
            name_span,
        } in entries
        {
            let section = SECTIONS.iter().find(|(section, ..)| section == name);
            let own = ["compute_environment", "distributed_type", RESERVED];
            if own.contains(&name.as_str()) || is_replaced(name) {
                continue;
            }
            if let Some((section, prefix, begins)) = section {
                // The old key replaces the section.
                if *section != "dynamo_config" || legacy.is_none() {
                    self.section((section, prefix, begins), value, schema);
                }
                continue;
            }
            let Some(found) = value.resolve(schema) else {
                // An empty list of a field that accelerate does not read requests nothing.
                let read = [
                    "debug",
                    "dynamo_backend",
                    "fp16",
                    "gpu_ids",
                    "mixed_precision",
                    "use_cpu",
                ];
                let nothing = value.items().is_some_and(<[_]>::is_empty);
                if read.contains(&name.as_str()) || !nothing {
                    self.refuse_mapping(name, value);
                }
                continue;
            };
            let given = Some((name.clone(), *name_span));
            match name.as_str() {
                "fp16" => {
                    if found.is_true() && config.get("mixed_precision").is_none() {
                        self.precision(Resolved::Str("fp16".to_owned()), given);
                    }
                }
                "mixed_precision" => self.precision(found, given),
                "dynamo_backend" if found == Resolved::Str("NO".to_owned()) => {}
                "dynamo_backend" | "gpu_ids" if self.typed.contains(name) => {}
                "debug" if self.typed.contains(name) => {}
                "debug" | "dynamo_backend" | "gpu_ids" | "use_cpu" => self.put(name, found, given),
                _ => self.unread_field(name, &found, *name_span),
            }
        }
    }

    fn precision(&mut self, value: Resolved, given: Option<(String, Span)>) {
        if self.typed.contains("mixed_precision") || value == Resolved::Null {
            return;
        }
        if let (Resolved::Bool(_), Some((_, span))) = (&value, &given) {
            let message = format!("`mixed_precision` is the boolean {value}, and accelerate fails");
            self.refuse("wrong-type", Some(*span), message, "quote it, `\"no\"`");
            return;
        }
        self.deepspeed_keys.push("mixed_precision".to_owned());
        self.put("mixed_precision", value, given);
    }

    fn section(&mut self, of: (&str, &str, &[&str]), node: &Node, schema: Schema) {
        let (section, prefix, begins) = of;
        let Some(entries) = node.entries() else {
            if node.resolve(schema) != Some(Resolved::Null) {
                let message = format!("`{section}` takes a mapping, this is {}", node.kind());
                self.refuse("wrong-type", Some(node.span), message, "remove it");
            }
            return;
        };
        let mut keys = Vec::new();
        for Entry {
            name,
            value,
            name_span,
        } in entries
        {
            let dest = match name.starts_with(prefix.trim_end_matches('_')) {
                true if name == OLD_PREFETCH => "fsdp_backward_prefetch".to_owned(),
                true => name.clone(),
                false => format!("{prefix}{name}"),
            };
            keys.push(name.to_lowercase());
            let belongs = |known: &&str| begins.iter().any(|begin| known.starts_with(begin));
            let known = OPTIONS.iter().chain(KEYS_ONLY).map(|(known, ..)| *known);
            if !known.filter(belongs).any(|known| known == dest) {
                let message = format!("accelerate drops `{name}`: `{section}` has no such key");
                let of_section = OPTIONS.iter().map(|(known, ..)| *known).filter(belongs);
                let help = did_you_mean(&dest, of_section);
                self.refuse("unknown-key", Some(*name_span), message, help);
                continue;
            }
            let (takes, help, count) = match dest.as_str() {
                TRUTHS => ("three truth values", "give `[false, false, false]`", 3),
                _ => ("one value", "write one value", 1),
            };
            let parts: Option<Vec<_>> = match (value.items(), value.resolve(schema)) {
                (Some(items), _) if count == 3 => {
                    items.iter().map(|item| item.resolve(schema)).collect()
                }
                (None, Some(Resolved::Null)) => Some(vec![Resolved::Null; count]),
                (_, value) => value.map(|value| vec![value]),
            };
            let Some(parts) = parts.filter(|parts| parts.len() == count) else {
                let message = format!("`{name}` takes {takes}, this is {}", node_text(value));
                self.refuse("wrong-type", Some(value.span), message, help);
                continue;
            };
            if !self.typed.contains(&dest) {
                self.put_parts(&dest, parts, (name.clone(), *name_span));
            }
        }
        if section == "deepspeed_config" {
            // The precision comes last.
            self.deepspeed_keys.splice(0..0, keys);
        }
    }

    fn refuse_mapping(&mut self, name: &str, node: &Node) {
        let message = format!("`{name}` takes one value, this is {}", node.kind());
        self.refuse("wrong-type", Some(node.span), message, "write one value");
    }

    /// Refuses a field that accelerate reads only from the command line or only for TPUs.
    fn unread_field(&mut self, name: &str, value: &Resolved, span: Span) {
        if is_neutral(value) || *value == Resolved::Str("main".to_owned()) {
            return;
        }
        let message = format!("accelerate reads `{name}: {value}` only for TPUs or not at all");
        let help = match name {
            "enable_cpu_affinity" => "give it as the option `--enable_cpu_affinity`",
            _ => "remove it",
        };
        self.refuse("unsupported-value", Some(span), message, help);
    }

    /// The value of a setting, which then counts as read.
    fn take(&mut self, name: &str) -> Resolved {
        let Some(setting) = self.settings.get_mut(name) else {
            return Resolved::Null;
        };
        setting.read = true;
        setting.value.clone()
    }

    fn span(&self, name: &str) -> Option<Span> {
        let (_, span) = self.settings.get(name)?.given.as_ref()?;
        Some(*span)
    }

    fn set(&mut self, variable: &str, text: impl Into<String>) {
        self.variables.insert(variable.to_owned(), text.into());
    }

    /// Sets the variables of the settings that `chosen` accepts.
    fn pass(&mut self, chosen: impl Fn(&str) -> bool) {
        for (name, _, _, pass) in settings() {
            let (Pass::Set(variable)
            | Pass::Lower(variable)
            | Pass::IfSet(variable)
            | Pass::IfSetLower(variable)) = *pass
            else {
                continue;
            };
            let always = matches!(pass, Pass::Set(_) | Pass::Lower(_));
            let value = self.settings.get(*name).map(|setting| &setting.value);
            if !chosen(variable) || (!always && value.is_none_or(|v| *v == Resolved::Null)) {
                continue;
            }
            let text = self.take(name).to_string();
            match pass {
                Pass::Lower(_) | Pass::IfSetLower(_) => self.set(variable, text.to_lowercase()),
                _ => self.set(variable, text),
            }
        }
    }

    fn build(&mut self) {
        let simple = self.cpu || ["NO", "MULTI_CPU"].contains(&self.kind.as_str());
        let kind = if simple { "" } else { self.kind.as_str() }.to_owned();
        self.common();
        if kind != "DEEPSPEED" {
            self.dynamo();
        }
        if simple {
            self.one_process();
        } else if self.parallelism {
            self.sizes();
        }
        match kind.as_str() {
            "FSDP" => self.fsdp(),
            "MEGATRON_LM" => {
                self.set("ACCELERATE_USE_MEGATRON_LM", "true");
                self.pass(|variable| variable.starts_with("MEGATRON_LM_"));
            }
            "DEEPSPEED" => {
                self.set("ACCELERATE_USE_DEEPSPEED", "true");
                self.set("ACCELERATE_CONFIG_DS_FIELDS", self.deepspeed_keys.join(","));
                // The launcher adds it after the paths of the surrounding environment.
                self.set("PYTHONPATH", "{working_directory}");
                let begins = ["ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_"];
                self.pass(|variable| begins.iter().any(|begin| variable.starts_with(begin)));
            }
            _ => {}
        }
    }

    fn common(&mut self) {
        if self.take("debug").is_true() {
            self.set("ACCELERATE_DEBUG_MODE", "true");
        }
        match self.take("gpu_ids") {
            Resolved::Null => {}
            Resolved::Str(ids) if ids == "all" => {}
            Resolved::Str(ids) => {
                let visible = VISIBLE.iter().find(|(kind, _)| *kind == self.kind);
                let name = visible.map_or("CUDA_VISIBLE_DEVICES", |(_, name)| *name);
                self.set(name, ids);
            }
            other => {
                let message = format!("`gpu_ids` is `{other}`, and accelerate fails");
                let help = format!("quote it, `\"{other}\"`");
                self.refuse("wrong-type", self.span("gpu_ids"), message, help);
            }
        }
        let precision = match self.take("mixed_precision") {
            Resolved::Null => "no".to_owned(),
            value => value.to_string().to_lowercase(),
        };
        self.require("mixed_precision", &precision, Words("no fp8 fp16 bf16"));
        if precision == "fp8" {
            self.pass(|variable| variable.starts_with("ACCELERATE_FP8_"));
        }
        self.set("ACCELERATE_MIXED_PRECISION", precision);
        if self.take("enable_cpu_affinity").is_true() {
            self.set("ACCELERATE_CPU_AFFINITY", "1");
        }
    }

    /// Refuses a value that accelerate does not know.
    fn require(&mut self, name: &str, value: &str, known: Words) {
        if !known.has(value) {
            let message = format!("`{name}` is `{}`", short(value));
            let help = did_you_mean(value, known.iter());
            self.refuse("unknown-value", self.span(name), message, help);
        }
    }

    fn dynamo(&mut self) {
        let backend = match self.take("dynamo_backend") {
            Resolved::Null => "NO".to_owned(),
            value => value.to_string().to_uppercase(),
        };
        self.require("dynamo_backend", &backend, DYNAMO);
        self.set("ACCELERATE_DYNAMO_BACKEND", backend);
        let mode = self.take("dynamo_mode");
        if !matches!(mode, Resolved::Str(_)) {
            let message = format!("`dynamo_mode` is `{mode}`");
            let help = "give `default`, `reduce-overhead` or `max-autotune`";
            self.refuse("wrong-type", self.span("dynamo_mode"), message, help);
        }
        self.pass(|variable| {
            variable.starts_with("ACCELERATE_DYNAMO_") || variable == "OMP_NUM_THREADS"
        });
    }

    /// The variables of a script that accelerate starts as one process.
    fn one_process(&mut self) {
        let stated = self.take("use_cpu");
        if !matches!(stated, Resolved::Null | Resolved::Bool(_)) {
            let message = format!("`use_cpu` is `{stated}`");
            let help = "write `true` or `false`";
            self.refuse("wrong-type", self.span("use_cpu"), message, help);
        }
        let cpu = self.cpu || stated.is_true();
        self.set("ACCELERATE_USE_CPU", Resolved::Bool(cpu).to_string());
        if cpu {
            self.set("KMP_AFFINITY", "granularity=fine,compact,1,0");
            self.set("KMP_BLOCKTIME", "1");
        }
    }

    fn fsdp(&mut self) {
        self.set("ACCELERATE_USE_FSDP", "true");
        let efficient = self.take("fsdp_cpu_ram_efficient_loading").is_true();
        if efficient && !self.take("fsdp_sync_module_states").is_true() {
            self.refuse(
                "unsupported-value",
                self.span("fsdp_sync_module_states"),
                "`fsdp_cpu_ram_efficient_loading` needs `fsdp_sync_module_states`".to_owned(),
                "set `fsdp_sync_module_states: true`",
            );
        }
        self.pass(|variable| variable.starts_with("FSDP_"));
    }

    /// The sizes of the parallelism config. Some settings of an axis count only above size 1.
    fn sizes(&mut self) {
        self.set("ACCELERATE_USE_PARALLELISM_CONFIG", "true");
        let above_1 = |axis: &str| {
            let setting = self
                .settings
                .get(&format!("parallelism_config_{axis}_size"));
            setting.is_some_and(|s| !matches!(s.value, Resolved::Int(..=1)))
        };
        let (context, sequence) = (above_1("cp"), above_1("sp"));
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
        let decided_by = self.decided_by.clone();
        let mut refused = Vec::new();
        for (name, setting) in &self.settings {
            let Some((written, span)) = &setting.given else {
                continue;
            };
            let own = is_replaced(name);
            let default = OPTIONS.iter().find(|(known, ..)| known == name);
            let is_default = default.is_some_and(|(_, kind, text, _)| {
                !text.is_empty() && convert(*kind, text).as_ref() == Some(&setting.value)
            });
            // Three truth values request something even if all are false.
            let truths = name.starts_with("fp8_override_") && setting.value != Resolved::Null;
            let neutral = is_neutral(&setting.value) && !truths;
            if setting.read || own || is_default || neutral {
                continue;
            }
            let (message, help) = match name.as_str() {
                "mpirun_hostfile" => (
                    format!(
                        "`{written}` starts the processes with mpirun, but evenkeel starts them"
                    ),
                    "remove it",
                ),
                "deepspeed_inclusion_filter" | "deepspeed_exclusion_filter" => (
                    format!(
                        "`{written}` selects devices, but evenkeel starts a rank for each device of the plan"
                    ),
                    "remove it, and set CUDA_VISIBLE_DEVICES or `--gpus`",
                ),
                _ => (
                    format!("`{written}` has no effect with {decided_by}: accelerate drops it"),
                    "remove it",
                ),
            };
            refused.push(Diagnostic::error(
                "unsupported-value",
                Some(*span),
                message,
                help,
            ));
        }
        self.problems.append(&mut refused);
    }
}

/// Every setting of a launch.
fn settings() -> impl Iterator<Item = &'static Known> {
    OPTIONS.iter().chain(KEYS_ONLY).chain(&LINEAR_PRECISION)
}

/// Whether Evenkeel replaces a setting.
fn is_replaced(name: &str) -> bool {
    let mut options = OPTIONS.iter();
    options.any(|(known, _, _, pass)| *known == name && *pass == Pass::Replaced)
}

/// A scalar as written, or the kind of another node.
fn node_text(node: &Node) -> String {
    let text = node.text().map(|text| format!("`{}`", short(text)));
    text.unwrap_or_else(|| node.kind().to_owned())
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
        Kind::Switch | Kind::Text => Some(Resolved::Str(text.to_owned())),
        Kind::OneOf(choices) => choices
            .contains(&text)
            .then(|| Resolved::Str(text.to_owned())),
        Kind::Int => number.parse().ok().map(Resolved::Int),
        Kind::Float => number.parse().ok().map(Resolved::Float),
        Kind::Bool => Some(Resolved::Bool(!text.is_empty())),
        Kind::Truth => match text.to_lowercase().as_str() {
            "y" | "yes" | "t" | "true" | "on" | "1" => Some(Resolved::Int(1)),
            "n" | "no" | "f" | "false" | "off" | "0" => Some(Resolved::Int(0)),
            _ => None,
        },
        Kind::Truths => None,
    }
}

/// What an option takes, for help.
fn takes(kind: Kind, text: &str) -> String {
    match kind {
        Kind::OneOf(choices) => did_you_mean(text, choices.iter().copied()),
        Kind::Int => "give a whole number".to_owned(),
        Kind::Float => "give a number".to_owned(),
        Kind::Truths => "give three truth values, `false,false,false`".to_owned(),
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
                "accelerate reads `enable_cpu_affinity: True` only for TPUs or not at all",
            ),
            ("gpu_ids: 0", "`gpu_ids` is `0`, and accelerate fails"),
            (
                "fsdp_config: {fsdp_sync_module_states: false}",
                "`fsdp_cpu_ram_efficient_loading` needs `fsdp_sync_module_states`",
            ),
            (
                "dynamo_config: {dynamo_backend: nonsense}",
                "`dynamo_backend` is `NONSENSE`",
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
            (
                "--use_xpu",
                "accelerate 1.15 has no option `--use_xpu`, only older versions do",
            ),
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
             main_training_function: main\nuse_cpu: false\ndeepspeed_config: {{}}\n"
        );
        assert!(variables(&neutral, LAUNCH).is_ok());
    }
}
