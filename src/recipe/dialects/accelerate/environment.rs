//! The environment that `accelerate launch` gives to every rank. What its options and its config merge into
//! decides the variables. A setting that reaches no variable is an error, because accelerate drops it.
//!
//! Source: accelerate 1.15.0 `commands/launch.py` (`_validate_launch_command`, `launch_command`),
//! `commands/config/config_args.py`, `utils/launch.py` (`prepare_*_env`).

use std::collections::{BTreeMap, BTreeSet};

use super::options::{Kind, OPTIONS, SWITCHES_GONE, VALUED_GONE};
use super::python::Value;
use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::launch::Launch;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Entry, Node};
use crate::recipe::syntax::scalar::Schema;
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

/// Keys of sections that are no options.
const KEYS_ONLY: [&str; 2] = ["fsdp_ignored_modules", "fp8_use_mxfp8_block_scaling"];

/// Options and keys that Evenkeel replaces: processes, rendezvous, restarts and logs.
const REPLACED: &[&str] = &[
    "compute_environment",
    "distributed_type",
    "config_file",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "rdzv_backend",
    "rdzv_conf",
    "same_network",
    "max_restarts",
    "monitor_interval",
    "tee",
    "t",
    "log_dir",
    "quiet",
    "q",
    "h",
    "help",
    "module",
    "m",
    "no_python",
    "cpu",
    "multi_gpu",
    "use_deepspeed",
    "use_fsdp",
    "use_megatron_lm",
    "use_parallelism_config",
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
];

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
const DYNAMO: &[&str] = &[
    "NO",
    "EAGER",
    "AOT_EAGER",
    "INDUCTOR",
    "AOT_TS_NVFUSER",
    "NVPRIMS_NVFUSER",
    "CUDAGRAPHS",
    "OFI",
    "FX2TRT",
    "ONNXRT",
    "TENSORRT",
    "AOT_TORCHXLA_TRACE_ONCE",
    "TORCHXLA_TRACE_ONCE",
    "TVM",
    "HPU_BACKEND",
    "NEURON",
];

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
    value: Value,
    /// The option or key as written, and its place; `None`: a default.
    given: Option<(String, Span)>,
    /// A variable depends on it.
    read: bool,
}

/// The settings of a launch: options over the config.
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
        let mut merged = Merged {
            settings: BTreeMap::new(),
            typed: BTreeSet::new(),
            kind: String::new(),
            decided_by: String::new(),
            cpu: false,
            parallelism: false,
            deepspeed_keys: Vec::new(),
            variables: Variables::new(),
            problems: Vec::new(),
        };
        for (name, kind, default) in OPTIONS {
            let value = match (kind, *default) {
                (_, "") => Value::None,
                (Kind::Switch | Kind::Bool, text) => Value::Bool(text == "true"),
                (Kind::Truths, _) => Value::List(vec![Value::Bool(false); 3]),
                (kind, text) => convert(*kind, text).unwrap_or(Value::None),
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

    fn put(&mut self, name: &str, value: Value, given: Option<(String, Span)>) {
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
        if SWITCHES_GONE.contains(&name) || VALUED_GONE.contains(&name) {
            let message =
                format!("accelerate 1.15 has no option `--{name}`, only older versions do");
            self.refuse("unknown-key", span, message, "remove it");
            return;
        }
        let Some((_, kind, _)) = OPTIONS.iter().find(|(known, ..)| *known == name) else {
            return;
        };
        let text = option.value.as_deref().unwrap_or_default();
        let value = match kind {
            Kind::Switch => Some(Value::Bool(true)),
            kind => convert(*kind, text),
        };
        match value {
            Some(value) => {
                self.typed.insert(name.to_owned());
                let written = format!("--{name} {text}").trim_end().to_owned();
                self.put(name, value, Some((written, option.span)));
            }
            None => {
                let message = format!("`--{name}` is `{}`", short(text));
                self.refuse("unknown-value", span, message, takes(*kind, text));
            }
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
                let known = super::world::TYPES.contains(&text);
                let kind = if known { text } else { "NO" };
                (kind.to_owned(), format!("`distributed_type: {kind}`"))
            }
            (None, None) => match self.settings.get("num_processes").map(|s| &s.value) {
                Some(Value::Int(..=1)) => ("NO".to_owned(), "one process".to_owned()),
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
            if REPLACED.contains(&name.as_str()) || name == RESERVED {
                continue;
            }
            if let Some((section, prefix, begins)) = section {
                // The old key replaces the section.
                if *section != "dynamo_config" || legacy.is_none() {
                    self.section((section, prefix, begins), value, schema);
                }
                continue;
            }
            let Some(found) = Value::of(value, schema) else {
                self.refuse_mapping(name, value);
                continue;
            };
            let given = Some((name.clone(), *name_span));
            match name.as_str() {
                "fp16" => {
                    if found.is_true() && config.get("mixed_precision").is_none() {
                        self.precision(Value::Str("fp16".to_owned()), given);
                    }
                }
                "mixed_precision" => self.precision(found, given),
                "dynamo_backend" if found == Value::Str("NO".to_owned()) => {}
                "dynamo_backend" | "gpu_ids" if self.typed.contains(name) => {}
                "debug" if self.typed.contains(name) => {}
                "debug" | "dynamo_backend" | "gpu_ids" | "use_cpu" => self.put(name, found, given),
                _ => self.unread_field(name, &found, *name_span),
            }
        }
    }

    fn precision(&mut self, value: Value, given: Option<(String, Span)>) {
        if self.typed.contains("mixed_precision") || value == Value::None {
            return;
        }
        if let (Value::Bool(_), Some((_, span))) = (&value, &given) {
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
            if Value::of(node, schema) != Some(Value::None) {
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
            let mut known = OPTIONS.iter().map(|(known, ..)| *known).chain(KEYS_ONLY);
            let belongs = begins.iter().any(|begin| dest.starts_with(begin));
            if !belongs || !known.any(|known| known == dest) {
                let of_section = OPTIONS.iter().map(|(known, ..)| *known);
                let of_section =
                    of_section.filter(|known| begins.iter().any(|begin| known.starts_with(begin)));
                let message = format!("accelerate drops `{name}`: `{section}` has no such key");
                let help = did_you_mean(&dest, of_section);
                self.refuse("unknown-key", Some(*name_span), message, help);
                continue;
            }
            let Some(found) = Value::of(value, schema) else {
                self.refuse_mapping(name, value);
                continue;
            };
            if matches!(found, Value::List(_)) && dest != "fp8_override_linear_precision" {
                let message = format!("`{name}` takes one value, this is a list");
                self.refuse("wrong-type", Some(value.span), message, "write one text");
                continue;
            }
            if !self.typed.contains(&dest) {
                self.put(&dest, found, Some((name.clone(), *name_span)));
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
    fn unread_field(&mut self, name: &str, value: &Value, span: Span) {
        if is_neutral(value) || *value == Value::Str("main".to_owned()) {
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
    fn take(&mut self, name: &str) -> Value {
        let Some(setting) = self.settings.get_mut(name) else {
            return Value::None;
        };
        setting.read = true;
        setting.value.clone()
    }

    fn span(&self, name: &str) -> Option<Span> {
        let (_, span) = self.settings.get(name)?.given.as_ref()?;
        Some(*span)
    }

    fn set(&mut self, variable: impl Into<String>, text: impl Into<String>) {
        self.variables.insert(variable.into(), text.into());
    }

    /// Sets `variable` to a setting's text.
    fn pass(&mut self, name: &str, variable: &str) {
        let text = self.take(name).to_string();
        self.set(variable, text);
    }

    /// As [`Merged::pass`], in lower case.
    fn pass_lower(&mut self, name: &str, variable: &str) {
        let text = self.take(name).to_string().to_lowercase();
        self.set(variable, text);
    }

    fn is_set(&self, name: &str) -> bool {
        let setting = self.settings.get(name);
        setting.is_some_and(|setting| setting.value != Value::None)
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
            "MEGATRON_LM" => self.megatron(),
            "DEEPSPEED" => self.deepspeed(),
            _ => {}
        }
    }

    fn common(&mut self) {
        if self.take("debug").is_true() {
            self.set("ACCELERATE_DEBUG_MODE", "true");
        }
        match self.take("gpu_ids") {
            Value::None => {}
            Value::Str(ids) if ids == "all" => {}
            Value::Str(ids) => {
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
            Value::None => "no".to_owned(),
            value => value.to_string().to_lowercase(),
        };
        let known = ["no", "fp8", "fp16", "bf16"];
        if !known.contains(&precision.as_str()) {
            let message = format!("`mixed_precision` is `{}`", short(&precision));
            let help = did_you_mean(&precision, known);
            self.refuse("unknown-value", self.span("mixed_precision"), message, help);
        }
        if precision == "fp8" {
            self.fp8();
        }
        self.set("ACCELERATE_MIXED_PRECISION", precision);
        if self.take("enable_cpu_affinity").is_true() {
            self.set("ACCELERATE_CPU_AFFINITY", "1");
        }
    }

    fn fp8(&mut self) {
        let names = self.settings.keys().filter(|name| name.starts_with("fp8_"));
        let names: Vec<String> = names.cloned().collect();
        for name in names {
            match self.take(&name) {
                Value::None => {}
                Value::List(parts) if parts.len() == 3 => {
                    for (part, value) in ["FPROP", "DGRAD", "WGRAD"].into_iter().zip(parts) {
                        let variable = format!("ACCELERATE_FP8_OVERRIDE_{part}");
                        self.set(variable, value.to_string());
                    }
                }
                value if name == "fp8_override_linear_precision" => {
                    let message = format!("`{name}` is `{value}`");
                    let help = "give three values, `[false, false, false]`";
                    self.refuse("wrong-type", self.span(&name), message, help);
                }
                value => {
                    let variable = format!("ACCELERATE_{}", name.to_uppercase());
                    self.set(variable, value.to_string());
                }
            }
        }
    }

    fn dynamo(&mut self) {
        let backend = match self.take("dynamo_backend") {
            Value::None => "NO".to_owned(),
            value => value.to_string().to_uppercase(),
        };
        if !DYNAMO.contains(&backend.as_str()) {
            let message = format!("`dynamo_backend` is `{}`", short(&backend));
            let help = did_you_mean(&backend, DYNAMO.iter().copied());
            self.refuse("unknown-value", self.span("dynamo_backend"), message, help);
        }
        self.set("ACCELERATE_DYNAMO_BACKEND", backend);
        let mode = self.take("dynamo_mode");
        if !matches!(mode, Value::Str(_)) {
            let message = format!("`dynamo_mode` is `{mode}`");
            let help = "give `default`, `reduce-overhead` or `max-autotune`";
            self.refuse("wrong-type", self.span("dynamo_mode"), message, help);
        }
        for name in [
            "mode",
            "use_fullgraph",
            "use_dynamic",
            "use_regional_compilation",
        ] {
            let variable = format!("ACCELERATE_DYNAMO_{}", name.to_uppercase());
            self.pass(&format!("dynamo_{name}"), &variable);
        }
        if self.is_set("num_cpu_threads_per_process") {
            self.pass("num_cpu_threads_per_process", "OMP_NUM_THREADS");
        }
    }

    /// The variables of a script that accelerate starts as one process.
    fn one_process(&mut self) {
        let stated = self.take("use_cpu");
        if !matches!(stated, Value::None | Value::Bool(_)) {
            let message = format!("`use_cpu` is `{stated}`");
            self.refuse(
                "wrong-type",
                self.span("use_cpu"),
                message,
                "write `true` or `false`",
            );
        }
        let cpu = self.cpu || stated.is_true();
        self.set("ACCELERATE_USE_CPU", Value::Bool(cpu).to_string());
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
        for name in ["version", "sharding_strategy", "min_num_params"] {
            self.pass(
                &format!("fsdp_{name}"),
                &format!("FSDP_{}", name.to_uppercase()),
            );
        }
        for name in [
            "reshard_after_forward",
            "offload_params",
            "forward_prefetch",
            "use_orig_params",
            "cpu_ram_efficient_loading",
            "sync_module_states",
            "activation_checkpointing",
            "activation_checkpointing_offload",
        ] {
            self.pass_lower(
                &format!("fsdp_{name}"),
                &format!("FSDP_{}", name.to_uppercase()),
            );
        }
        for (name, variable) in [
            ("auto_wrap_policy", "AUTO_WRAP_POLICY"),
            ("backward_prefetch", "BACKWARD_PREFETCH"),
            ("transformer_layer_cls_to_wrap", "TRANSFORMER_CLS_TO_WRAP"),
            ("state_dict_type", "STATE_DICT_TYPE"),
            ("ignored_modules", "IGNORED_MODULES"),
        ] {
            let name = format!("fsdp_{name}");
            if self.is_set(&name) {
                self.pass(&name, &format!("FSDP_{variable}"));
            }
        }
    }

    fn megatron(&mut self) {
        self.set("ACCELERATE_USE_MEGATRON_LM", "true");
        let always = [
            "tp_degree",
            "pp_degree",
            "use_custom_fsdp",
            "gradient_clipping",
        ];
        for (option, ..) in OPTIONS {
            if let Some(name) = option.strip_prefix("megatron_lm_")
                && (always.contains(&name) || self.is_set(option))
            {
                self.pass(option, &option.to_uppercase());
            }
        }
    }

    /// The sizes of the parallelism config.
    fn sizes(&mut self) {
        self.set("ACCELERATE_USE_PARALLELISM_CONFIG", "true");
        let mut names = vec![
            "dp_replicate_size",
            "dp_shard_size",
            "tp_size",
            "cp_size",
            "cp_backend",
            "sp_size",
            "sp_backend",
        ];
        let above_1 = |merged: &Merged, axis: &str| {
            let setting = merged
                .settings
                .get(&format!("parallelism_config_{axis}_size"));
            setting.is_some_and(|s| !matches!(s.value, Value::Int(..=1)))
        };
        if above_1(self, "cp") {
            names.push("cp_comm_strategy");
        }
        if above_1(self, "sp") {
            names.extend([
                "sp_seq_length",
                "sp_seq_length_is_variable",
                "sp_attn_implementation",
            ]);
        }
        for name in names {
            let option = format!("parallelism_config_{name}");
            self.pass(&option, &option.to_uppercase());
        }
    }

    fn deepspeed(&mut self) {
        self.set("ACCELERATE_USE_DEEPSPEED", "true");
        self.set("ACCELERATE_CONFIG_DS_FIELDS", self.deepspeed_keys.join(","));
        // The launcher adds it after the paths of the surrounding environment.
        self.set("PYTHONPATH", "{working_directory}");
        for (name, variable) in [
            ("zero_stage", "DEEPSPEED_ZERO_STAGE"),
            ("gradient_accumulation_steps", "GRADIENT_ACCUMULATION_STEPS"),
            ("deepspeed_config_file", "DEEPSPEED_CONFIG_FILE"),
            (
                "deepspeed_moe_layer_cls_names",
                "DEEPSPEED_MOE_LAYER_CLS_NAMES",
            ),
        ] {
            if self.is_set(name) {
                self.pass(name, &format!("ACCELERATE_{variable}"));
            }
        }
        for (name, variable) in [
            ("gradient_clipping", "GRADIENT_CLIPPING"),
            (
                "offload_optimizer_device",
                "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
            ),
            ("offload_param_device", "DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
            ("zero3_init_flag", "DEEPSPEED_ZERO3_INIT"),
            ("zero3_save_16bit_model", "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        ] {
            if self.is_set(name) {
                self.pass_lower(name, &format!("ACCELERATE_{variable}"));
            }
        }
    }

    /// Refuses the settings that reached no variable.
    fn refuse_unread(&mut self) {
        let decided_by = self.decided_by.clone();
        let mut refused = Vec::new();
        for (name, setting) in &self.settings {
            let Some((written, span)) = &setting.given else {
                continue;
            };
            let own = REPLACED.contains(&name.as_str());
            let default = OPTIONS.iter().find(|(known, ..)| known == name);
            let is_default = default.is_some_and(|(_, kind, text)| {
                !text.is_empty() && convert(*kind, text).as_ref() == Some(&setting.value)
            });
            if setting.read || own || is_default || is_neutral(&setting.value) {
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

/// Whether a value requests nothing.
fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Str(text) => ["no", "none", ""].contains(&text.to_lowercase().as_str()),
        value => !value.is_true(),
    }
}

/// Converts an option's text as its parser does; `None`: it refuses the text.
fn convert(kind: Kind, text: &str) -> Option<Value> {
    let truth = |text: &str| {
        let text = text.to_lowercase();
        let is = |words: &[&str]| words.contains(&text.as_str());
        match is(&["y", "yes", "t", "true", "on", "1"]) {
            true => Some(Value::Int(1)),
            false => is(&["n", "no", "f", "false", "off", "0"]).then_some(Value::Int(0)),
        }
    };
    match kind {
        Kind::Switch | Kind::Text => Some(Value::Str(text.to_owned())),
        Kind::OneOf(choices) => choices.contains(&text).then(|| Value::Str(text.to_owned())),
        Kind::Int => {
            let value = text.trim().replace('_', "").parse().ok()?;
            Some(Value::Int(value))
        }
        Kind::Float => {
            let value = text.trim().replace('_', "").parse().ok()?;
            Some(Value::Float(value))
        }
        Kind::Bool => Some(Value::Bool(!text.is_empty())),
        Kind::Truth => truth(text),
        Kind::Truths => {
            let parts: Option<Vec<_>> = text.split(',').map(truth).collect();
            parts.filter(|parts| parts.len() == 3).map(Value::List)
        }
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
