//! `accelerator_config`: the trainer's settings for accelerate, as a mapping or a JSON file. Two of
//! its keys concern the batch: `split_batches`, and `num_steps` of `gradient_accumulation_kwargs`.
//!
//! Sources: transformers 5.23.0 `training_args.py` (`__post_init__`: a text that begins with `{` is
//! JSON, any other names a file), `trainer_pt_utils.py` (`AcceleratorConfig`, which refuses unknown
//! keys), `trainer.py` (`create_accelerator_and_postprocess`: `num_steps` becomes
//! `gradient_accumulation_steps` where that is 1, and is refused beside any other). accelerate
//! 16cb6eb `data_loader.py` (`prepare_data_loader`): a split batch must be a multiple of the number
//! of processes.

use std::path::Path;

use crate::recipe::schema::reading::{Reading, wrong_type};
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;
use crate::recipe::syntax::yaml;
use crate::util::suggest::short;

use super::values::Values;

/// The key of an accumulation that the trainer takes over.
pub(crate) const NUM_STEPS: &str = "accelerator_config.gradient_accumulation_kwargs.num_steps";

/// The key that makes all processes share the batch of one loader.
pub(crate) const SPLIT_BATCHES: &str = "accelerator_config.split_batches";

/// Fields of `AcceleratorConfig`.
const KNOWN: Words = Words(
    "split_batches dispatch_batches even_batches use_seedable_sampler non_blocking \
     gradient_accumulation_kwargs use_configured_state",
);

/// Reads the config and writes its accumulation to `tree`. Returns the span of a true
/// `split_batches`.
pub(super) fn read(
    values: &Values,
    path: &Path,
    tree: &mut Tree,
    reading: &mut Reading,
) -> Option<Span> {
    // A separate argument in transformers up to 4.37.
    let old = values.bool("split_batches").filter(|given| given.value);
    let old = old.map(|given| given.span);
    let Some(config) = load(values, path, reading) else {
        return old;
    };
    for entry in config.entries().unwrap_or_default() {
        if !KNOWN.has(&entry.name) {
            let message = format!("`accelerator_config` has no key `{}`", entry.name);
            reading.unknown_key(entry, message, KNOWN.iter());
        }
    }
    if let Some(steps) = config.get_path("gradient_accumulation_kwargs.num_steps") {
        accumulation(steps, values, tree, reading);
    }
    let Some(split) = config.get("split_batches") else {
        return old;
    };
    match split.resolve(Schema::PyYaml) {
        Some(Resolved::Bool(true)) => return Some(split.span),
        Some(Resolved::Bool(false) | Resolved::Null) => {}
        _ => {
            let problem = wrong_type(SPLIT_BATCHES, split, Schema::PyYaml, "true or false");
            reading.diagnostics.push(problem);
        }
    }
    old
}

/// The mapping itself, the JSON of a text, or the file that the text names.
fn load(values: &Values, path: &Path, reading: &mut Reading) -> Option<Node> {
    let node = values.node("accelerator_config")?;
    let Some(text) = named(node) else {
        return inline(node, reading);
    };
    let Some(file) = reading.beside(path, text) else {
        reading.error(
            "unreadable-file",
            Some(node.span),
            format!("the accelerator config `{}` does not exist", short(text)),
            "put the JSON file beside the recipe: it may split batches or set the accumulation",
        );
        return None;
    };
    let (file, config) = reading.open(&file, Some(node.span))?;
    reading.refuse_more_than_json(file, "the trainer");
    Some(config)
}

/// The file that the value of a config's key names. `None`: it is the mapping itself, or its JSON.
pub(super) fn named(node: &Node) -> Option<&str> {
    node.text().filter(|text| !text.starts_with('{'))
}

/// The mapping in a config's key, as such or as JSON.
pub(super) fn inline(node: &Node, reading: &mut Reading) -> Option<Node> {
    let Some(text) = node.text() else {
        return Some(node.clone());
    };
    let mut config = yaml::parse(text, node.span.file, &mut reading.diagnostics)?;
    config.put_at(node.span);
    Some(config)
}

/// Reads `num_steps`, which the trainer takes for its accumulation. DeepSpeed's config takes the trainer's 1 before
/// the trainer reads this key.
fn accumulation(steps: &Node, values: &Values, tree: &mut Tree, reading: &mut Reading) {
    let Some(Resolved::Int(count @ 1..)) = steps.resolve(Schema::PyYaml) else {
        let expected = "a whole number of at least 1";
        let problem = wrong_type(NUM_STEPS, steps, Schema::PyYaml, expected);
        reading.diagnostics.push(problem);
        return;
    };
    let stated = values
        .int("gradient_accumulation_steps")
        .filter(|stated| stated.value > 1);
    let beside = match (stated, values.node("deepspeed")) {
        (Some(stated), _) => format!("a `gradient_accumulation_steps` of {}", stated.value),
        (None, Some(_)) => "`deepspeed`".to_owned(),
        (None, None) => {
            let given = Given::new(NUM_STEPS, count, steps.span);
            tree.plain("batch.accumulation", &given);
            // The trainer counts the passes of a generation with the accumulation of the arguments.
            let generates = tree.get("generation.num_generations").is_some();
            let keys = ["steps_per_generation", "generation_batch_size"];
            if generates && keys.iter().all(|key| values.int(key).is_none()) {
                tree.default("generation.steps_per_generation", 1);
            }
            return;
        }
    };
    let message = format!("`{NUM_STEPS}` is {count} beside {beside}: the trainer cannot take both");
    let help = "remove it, and write `gradient_accumulation_steps`";
    reading.error("accumulation-conflict", Some(steps.span), message, help);
}

/// The key of the per-device batch holds the samples of all devices: accelerate splits it over the
/// processes.
pub(super) fn split_batches(size: Option<Given<i128>>, split: Span, tree: &mut Tree) {
    let size = size.map_or(8, |size| size.value);
    let passes = tree.get("batch.accumulation").and_then(Node::text);
    let passes = passes.and_then(|text| text.parse().ok()).unwrap_or(1);
    let global: i128 = size.saturating_mul(passes);
    tree.plain("batch.global", &Given::new(SPLIT_BATCHES, global, split));
    tree.default("batch.division", "exact");
}

#[cfg(test)]
mod tests {
    use crate::export::{EmitError, Form, emit};
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::schema::overrides::Setting;
    use crate::recipe::schema::request::Request;
    use crate::recipe::{ReadError, Recipe, read};

    /// Reads arguments as JSON, with an `acfg.json` beside them, for four processes.
    fn args(more: &str, beside: &str) -> Result<Recipe, ReadError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("args.json");
        std::fs::write(&path, text(more)).unwrap();
        std::fs::write(folder.path().join("acfg.json"), beside).unwrap();
        read(&Request {
            path,
            settings: vec![Setting {
                flag: "--recipe-gpus",
                path: "batch.gpus",
                value: "4".to_owned(),
            }],
            ..Request::default()
        })
    }

    fn text(more: &str) -> String {
        format!("{{\"output_dir\": \"o\", \"per_device_train_batch_size\": 8, {more}}}")
    }

    fn command(line: &str) -> Result<Recipe, ReadError> {
        read(&Request {
            command: line.split(' ').map(str::to_owned).collect(),
            ..Request::default()
        })
    }

    /// `micro × accumulation` in a world, and the recipe written for it.
    fn planned(recipe: &Recipe, gpus: u64) -> (u64, u64, Result<String, EmitError>) {
        let plan = plan(recipe, &PlanRequest::gpus(gpus)).unwrap();
        let emitted = emit(recipe, &plan.numbers(recipe), Form::Recipe);
        (
            plan.per_device_batch_size,
            plan.gradient_accumulation_steps,
            emitted.map(|emitted| emitted.text),
        )
    }

    fn refused(result: Result<Recipe, ReadError>, rule: &str, words: &str) {
        let error = result.unwrap_err();
        let mut found = error.diagnostics.iter();
        let fits = found.any(|d| d.rule == rule && d.message.contains(words));
        assert!(fits, "{:?}", error.diagnostics);
    }

    const STEPS: &str =
        r#""accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}"#;

    #[test]
    fn num_steps_is_the_accumulation_and_is_written_in_its_own_file() {
        let recipe = args(STEPS, "").unwrap();
        let batch = &recipe.spec.batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.accumulation),
            (Some(8), Some(4))
        );
        let written = planned(&recipe, 2);
        let eight = STEPS.replace('4', "8");
        assert_eq!(written, (8, 8, Ok(text(&eight))));
        let plan = plan(&recipe, &PlanRequest::gpus(4)).unwrap();
        let error = emit(&recipe, &plan.numbers(&recipe), Form::Args).unwrap_err();
        assert!(error.to_string().contains("num_steps` in `"), "{error}");
    }

    #[test]
    fn num_steps_in_another_file_is_not_contradicted() {
        let config = r#"{"gradient_accumulation_kwargs": {"num_steps": 4}}"#;
        let named = r#""accelerator_config": "acfg.json""#;
        let recipe = args(named, config).unwrap();
        assert_eq!(recipe.spec.batch.accumulation, Some(4));
        assert_eq!(planned(&recipe, 4), (8, 4, Ok(text(named))));
        let error = planned(&recipe, 2).2.unwrap_err();
        assert!(error.to_string().contains("acfg.json"), "{error}");
        let typed = r#"--accelerator_config {"gradient_accumulation_kwargs":{"num_steps":4}}"#;
        let line =
            format!("torchrun --nproc_per_node 8 t.py --per_device_train_batch_size 4 {typed}");
        let recipe = command(&line).unwrap();
        assert_eq!(recipe.spec.batch.accumulation, Some(4));
        let error = planned(&recipe, 4).2.unwrap_err();
        assert!(
            error.to_string().contains("num_steps` in `command`"),
            "{error}"
        );
    }

    #[test]
    fn num_steps_beside_another_accumulation_is_refused() {
        let both = format!("\"gradient_accumulation_steps\": 2, {STEPS}");
        refused(args(&both, ""), "accumulation-conflict", "of 2");
        let one = format!("\"gradient_accumulation_steps\": 1, {STEPS}");
        assert_eq!(args(&one, "").unwrap().spec.batch.accumulation, Some(4));
        let deepspeed = format!("\"deepspeed\": {{\"zero_optimization\": {{}}}}, {STEPS}");
        refused(
            args(&deepspeed, ""),
            "accumulation-conflict",
            "beside `deepspeed`",
        );
        let none = STEPS.replace('4', "0");
        refused(args(&none, ""), "wrong-type", "num_steps");
    }

    #[test]
    fn split_batches_keep_the_recipes_split_in_the_recipes_world() {
        let split =
            r#""gradient_accumulation_steps": 2, "accelerator_config": {"split_batches": true}"#;
        let recipe = args(split, "").unwrap();
        assert_eq!(recipe.spec.batch.global, Some(16));
        assert_eq!(planned(&recipe, 4), (2, 2, Ok(text(split))));
        // A device never gets more than the recipe's two samples.
        let two = planned(&recipe, 2);
        assert_eq!((two.0, two.1), (2, 4));
        let expected = text(split).replace("8", "4").replace(": 2", ": 4");
        assert_eq!(two.2, Ok(expected));
    }

    #[test]
    fn a_config_in_a_file_or_a_text_is_read() {
        let named = r#""accelerator_config": "acfg.json""#;
        let recipe = args(named, r#"{"split_batches": true}"#).unwrap();
        assert_eq!(recipe.spec.batch.global, Some(8));
        assert_eq!(planned(&recipe, 4), (2, 1, Ok(text(named))));
        let within = r#""accelerator_config": "{\"split_batches\": true}""#;
        assert_eq!(args(within, "").unwrap().spec.batch.global, Some(8));
        let absent = r#""accelerator_config": "nowhere.json""#;
        refused(args(absent, ""), "unreadable-file", "nowhere.json");
        // The old argument counts beside a config that does not set the key.
        let both = r#""split_batches": true, "accelerator_config": {"even_batches": true}"#;
        assert_eq!(args(both, "").unwrap().spec.batch.global, Some(8));
        let slip = r#""accelerator_config": {"split_batch": true}"#;
        refused(args(slip, ""), "unknown-key", "split_batch");
    }
}
