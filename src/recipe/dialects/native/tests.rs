use crate::recipe::dialects::native;
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::reader::Reader;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Spec;
use crate::recipe::schema::spec::{BatchSchedule, LearningRateShape};
use crate::recipe::syntax::diagnostic::{Diagnostic, Severity};

fn build(
    spec: &str,
) -> Result<(Spec, crate::recipe::syntax::source::ValueSources), Vec<Diagnostic>> {
    let indented: String = spec.lines().map(|l| format!("  {l}\n")).collect();
    let text = format!(
        "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {{name: tiny}}\nspec:\n{indented}"
    );
    let mut reading = Reading::default();
    let built = reading.parse("tiny.yaml", text).and_then(|root| {
        let path = std::path::Path::new("tiny.yaml");
        let tree = native::translate(&root, path, &mut reading);
        native::build(&tree, &mut reading.diagnostics)
    });
    let diagnostics = reading.diagnostics;
    let refused = diagnostics.iter().any(|d| d.severity == Severity::Error);
    match built {
        Some(built) if !refused => Ok(built),
        rest => {
            assert!(refused, "{rest:?}");
            Err(diagnostics)
        }
    }
}

/// Rule, line and message of every problem of a recipe.
fn problems(spec: &str) -> Vec<String> {
    let diagnostics = build(spec).expect_err("the recipe is refused");
    let line = |d: &Diagnostic| d.span.map_or(0, |s| s.line);
    diagnostics
        .iter()
        .map(|d| format!("{}:{} {} ({})", line(d), d.rule, d.message, d.help))
        .collect()
}

#[test]
fn values_and_places_are_read() {
    let (spec, value_sources) = build(
        "batch: {global: 64, per_device_batch_size: 4}\n\
         learning_rate:\n  peak: 1e-3\n  shape: cosine\n\
         model:\n  config: {hidden_size: 64, tie_word_embeddings: true, rope: {theta: 1e4}}\n\
         data:\n  train:\n  - {path: synthetic, synthetic: {vocabulary: 512}}",
    )
    .unwrap();
    assert_eq!(spec.name, "tiny");
    assert_eq!(
        (spec.batch.global, spec.batch.per_device_batch_size),
        (Some(64), Some(4))
    );
    assert_eq!(spec.learning_rate.peak, 1e-3);
    assert_eq!(spec.learning_rate.shape, LearningRateShape::Cosine);
    assert_eq!(spec.model.config["hidden_size"], 64);
    assert_eq!(spec.model.config["tie_word_embeddings"], true);
    assert_eq!(spec.model.config["rope"]["theta"], 1e4);
    assert_eq!(
        spec.data.train[0].synthetic.as_ref().unwrap().vocabulary,
        512
    );
    let place = |path: &str| {
        let place = &value_sources[path];
        (place.key.as_str(), place.span.line, place.span.column)
    };
    assert_eq!(place("batch.global"), ("batch.global", 5, 19));
    assert_eq!(place("learning_rate.peak"), ("learning_rate.peak", 7, 11));
    assert_eq!(place("name"), ("metadata.name", 3, 18));
    assert_eq!(place("data.train.0.path").1, 13);
    assert!(
        !value_sources.contains_key("seed"),
        "the recipe has no seed"
    );
}

#[test]
fn settings_of_an_enum_are_beside_its_kind() {
    let (spec, value_sources) =
        build("schedule:\n  kind: norm-test\n  eta: 0.1\n  interval: 5").unwrap();
    let BatchSchedule::NormTest(test) = spec.schedule else {
        panic!("{:?}", spec.schedule)
    };
    assert_eq!((test.eta, test.interval, test.max_batch), (0.1, 5, 8192));
    assert_eq!(value_sources["schedule.eta"].span.line, 7);
    assert_eq!(value_sources["schedule.kind"].span.line, 6);
    let (spec, _) = build("schedule: norm-test").unwrap();
    assert_eq!(spec.schedule, BatchSchedule::NormTest(Default::default()));
    let (spec, _) = build("schedule:\n  kind: stages\n  stages: [{share: 1, batch: 8}]").unwrap();
    assert!(matches!(spec.schedule, BatchSchedule::Stages { stages } if stages[0].batch == 8));
}

#[test]
fn every_problem_is_reported_at_once() {
    let found = problems(
        "batch:\n  per_device_batch_size: many\n  acumulation: 4\n\
         learning_rate: {peak: fast, shape: cosin}\n\
         data: [1]\n\
         seed: -1\n\
         schedule: {kind: norm-test, etta: 1}\n\
         objektive: sft",
    );
    insta::assert_snapshot!(found.join("\n"));
}

#[test]
fn numbers_out_of_range_are_refused_with_their_bounds() {
    let found = problems(
        "batch: {per_device_batch_size: 0, global: 99999999999}\n\
         schedule: {kind: norm-test, interval: 1000, ema: 1}\n\
         data: {train: [{path: a, weight: 1.5}]}\n\
         learning_rate: {peak: .nan}",
    );
    insta::assert_snapshot!(found.join("\n"));
    let found = problems("batch: {per_device_batch_size: 0}\nparallel: {tensor: 0}");
    insta::assert_snapshot!(found.join("\n"));
}

#[test]
fn missing_parts_are_named() {
    insta::assert_snapshot!(
        [
            problems("schedule: {eta: 1}"),
            problems("schedule: {kind: stages, stages: [{share: 1}]}"),
            problems("schedule: {kind: constant, eta: 1}"),
        ]
        .concat()
        .join("\n")
    );
}

#[test]
fn a_bare_spec_is_not_a_recipe() {
    let root = Reading::default().parse("x.yaml", "batch: {per_device_batch_size: 1}".to_owned());
    assert_eq!(
        native::Native.detect(
            &root.unwrap(),
            std::path::Path::new("x.yaml"),
            &Origin::Disk
        ),
        None
    );
}

#[test]
fn large_numbers_are_compared_and_shown_exactly() {
    assert_eq!(
        problems("budget: {samples: 18446744073709551615, steps: 9007199254740993}"),
        [
            "5:out-of-range `budget.samples` is 18446744073709551615 \
             (give a number from 1 to 9007199254740992)",
            "5:out-of-range `budget.steps` is 9007199254740993 \
             (give a number from 1 to 9007199254740992)",
        ]
    );
    assert!(build("budget: {samples: 9007199254740992}").is_ok());
}

#[test]
fn a_number_between_share_and_count_is_refused() {
    for (value, expected) in [
        ("1.5", "`data.held_out` is 1.5"),
        ("0", "`data.held_out` is 0"),
        ("-0.1", "`data.held_out` is -0.1"),
        ("-3", "`data.held_out` is -3"),
        (".nan", "`data.held_out` is .nan"),
        (".inf", "`data.held_out` is .inf"),
        ("1e300", "`data.held_out` is 1"),
    ] {
        let found = problems(&format!("data: {{held_out: {value}}}"));
        assert_eq!(found.len(), 1, "{found:?}");
        let (place, help) = (
            "5:out-of-range",
            "(give a share between 0 and 1, or a whole number",
        );
        assert!(
            found[0].starts_with(&format!("{place} {expected}")),
            "{found:?}"
        );
        assert!(found[0].contains(help), "{found:?}");
    }
    for value in ["0.05", "1", "1000", "1000.0"] {
        assert!(
            build(&format!("data: {{held_out: {value}}}")).is_ok(),
            "{value}"
        );
    }
}

#[test]
fn a_number_beyond_its_type_is_refused_with_its_range() {
    assert_eq!(
        problems("batch: {per_device_batch_size: -4}\nschedule: {kind: norm-test, interval: -1}"),
        [
            "5:out-of-range `batch.per_device_batch_size` is -4 (give a number from 1 to 4294967296)",
            "6:out-of-range `schedule.interval` is -1 (give a number from 1 to 100)",
        ]
    );
}

#[test]
fn the_rest_of_a_refused_recipe_lacks_only_what_is_refused() {
    let head = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n";
    let rest = |spec: &str| {
        let text = format!("{head}{spec}");
        crate::recipe::read_text(&Default::default(), text)
            .unwrap_err()
            .rest
    };
    let spec = "  batch: {global: 8, per_device_batch_size: four, size: 2}\n  model: {path: here}\n  \
                data: {train: [{path: a}, {path: 5.5}, {paht: b}]}\n";
    let spec = rest(spec).unwrap().spec;
    assert_eq!(
        (spec.batch.global, spec.batch.per_device_batch_size),
        (Some(8), None)
    );
    assert_eq!(spec.model.path.as_deref(), Some("here"));
    assert_eq!(
        rest("  model: gpt2\n"),
        None,
        "no second error that a model is missing"
    );
}

/// Rule, line, column and message of every diagnostic of a whole file.
fn reported(text: &str) -> Vec<String> {
    let request = crate::recipe::schema::request::Request {
        path: "recipes/Tiny_One.yaml".into(),
        ..Default::default()
    };
    let diagnostics = match crate::recipe::read_text(&request, text.to_owned()) {
        Ok(recipe) => recipe.diagnostics,
        Err(error) => error.diagnostics,
    };
    let place = |d: &Diagnostic| d.span.map_or((0, 0), |s| (s.line, s.column));
    let found = diagnostics.iter().map(|d| {
        let (line, column) = place(d);
        format!("{line}:{column} {} {}", d.rule, d.message)
    });
    found.collect()
}

#[test]
fn an_invalid_name_is_refused_at_its_place() {
    let head = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\n";
    for (name, flaw) in [
        ("../../x", "it contains '.'"),
        ("/tmp/x", "it contains '/'"),
        ("a/b", "it contains '/'"),
        (".", "it contains '.'"),
        ("\"\"", "it is empty"),
        ("Tiny", "it contains 'T'"),
        ("-a", "it begins with `-`"),
        ("a-", "it ends with `-`"),
    ] {
        let shown = name.trim_matches('"');
        let found = reported(&format!("{head}metadata:\n  name: {name}\nspec: {{}}\n"));
        let expected = format!("4:9 run-name `metadata.name` is `{shown}`: {flaw}");
        assert_eq!(found, [expected]);
        let found = reported(&format!("{head}spec: {{name: {name}}}\n"));
        assert_eq!(
            found,
            [format!("3:14 run-name `name` is `{shown}`: {flaw}")]
        );
    }
    assert_eq!(
        reported(&format!("{head}spec: {{output: \"\"}}\n")),
        ["3:16 run-name `output` is empty"]
    );
    assert_eq!(
        reported(&format!("{head}metadata: tiny\nspec: {{}}\n")),
        ["3:11 wrong-type `metadata` takes a mapping, this is a single value"]
    );
    assert_eq!(
        reported(&format!("{head}metadata:\nspec: {{}}\n")),
        Vec::<String>::new()
    );
}

#[test]
fn a_recipe_without_a_name_has_the_name_of_its_file() {
    let request = crate::recipe::schema::request::Request {
        path: "recipes/Tiny_One.yaml".into(),
        ..Default::default()
    };
    let text = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec: {}\n";
    let recipe = crate::recipe::read_text(&request, text.to_owned()).unwrap();
    assert_eq!(recipe.spec.name, "tiny-one");
    assert_eq!(recipe.span("name"), None);
}
