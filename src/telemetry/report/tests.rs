use super::*;
use crate::telemetry::{CoordinateTestRecord, ExternalStep, NormTestRecord, PreferenceRecord};

fn render(input: &ReportInput) -> String {
    super::render(input).expect("a page")
}

/// 40 steps over two generations; the batch grows in the middle.
fn run() -> ReportInput {
    let mut samples = 0;
    let steps = (1..=40).map(|nth: u64| {
        let batch = if nth <= 20 { 32 } else { 64 };
        samples += batch;
        StepRecord {
            generation: if nth <= 10 { 1 } else { 2 },
            step: nth,
            samples,
            batch,
            world: if nth <= 10 { 2 } else { 3 },
            loss: 2.1 + 3.0 / nth as f64,
            tokens: batch * 64,
            learning_rate: 3e-4,
            gradient_norm: 0.8,
            seconds: 0.5,
            time: 1.79e9 + nth as f64,
            norm_test: Some(NormTestRecord {
                ratio: 0.02 * (1.0 + nth as f64 / 20.0),
                threshold: 0.04,
                noise_scale: None,
                target: None,
                next_batch: batch,
                reason: "passed".to_owned(),
            }),
            preferences: None,
            external: None,
            coordinate_test: (nth % 10 == 5).then_some(CoordinateTestRecord {
                share: Some(0.5),
                undefined: None,
            }),
        }
    });
    ReportInput {
        title: "quickstart".to_owned(),
        continuations: vec![Continuation {
            begin: "To be, or".to_owned(),
            model: " not\n<to be>".to_owned(),
            data: " not to be".to_owned(),
        }],
        formula: "2 × 8 × 2 = 32".to_owned(),
        budget: Some(1_900),
        details: vec![Fact {
            label: "Model".to_owned(),
            value: "Llama, 1.31M parameters".to_owned(),
        }],
        steps: steps.collect(),
        generations: vec![
            GenerationFacts {
                generation: 1,
                world: 2,
                formula: "2 × 8 × 2 = 32".to_owned(),
                reason: "first start".to_owned(),
                start_samples: 0,
                seconds_to_first_step: Some(0.61),
            },
            GenerationFacts {
                generation: 2,
                world: 3,
                formula: "8 × (2 + 1 + 1) = 32".to_owned(),
                reason: "resized to 3 ranks".to_owned(),
                start_samples: 320,
                seconds_to_first_step: None,
            },
        ],
        evaluations: [640, 1_920]
            .map(|samples| EvaluationRecord {
                generation: 2,
                samples,
                loss: 2.2,
                tokens: 8_192,
                time: 1.79e9,
                preferences: None,
            })
            .to_vec(),
        loss_of: LossOf::CrossEntropy,
        floor: Some(2.0),
        vocabulary: 4_096,
        ledger: Some(LedgerVerdict {
            proven: true,
            text: "1,920 samples, each exactly once".to_owned(),
        }),
    }
}

/// The text of every element without markup; panics if tags do not match.
fn text_of(html: &str) -> String {
    let mut open: Vec<&str> = Vec::new();
    let mut text = String::new();
    let mut rest = html;
    while let Some(start) = rest.find('<') {
        text += &rest[..start];
        rest = &rest[start + 1..];
        let end = rest.find('>').expect("a tag ends");
        let tag = &rest[..end];
        rest = &rest[end + 1..];
        let name = tag
            .trim_start_matches('/')
            .split([' ', '/'])
            .next()
            .unwrap_or_default();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "</{name}> closes something else");
        } else if !(tag.ends_with('/') || ["!doctype", "meta", "link"].contains(&name)) {
            open.push(name);
            if name == "script" || name == "style" {
                // The content is raw text, not HTML.
                let end = rest.find(&format!("</{name}>")).expect("raw text ends");
                rest = &rest[end..];
            }
        }
        text.push(' ');
    }
    assert_eq!(open, Vec::<&str>::new(), "elements left open");
    text.replace("&#x2f;", "/")
}

fn data_of(html: &str) -> serde_json::Value {
    let start = "<script type=\"application/json\" id=\"data\">";
    let data = html.split_once(start).expect("data").1;
    let data = data.split_once("</script>").expect("an end").0;
    serde_json::from_str(data).expect("JSON")
}

fn figures_of(html: &str) -> Vec<&str> {
    html.match_indices("<figure id=\"")
        .filter_map(|(at, start)| html[at + start.len()..].split('"').next())
        .collect()
}

#[test]
fn a_report_shows_the_run_and_every_generation() {
    let html = render(&run());
    let text = text_of(&html);
    for shown in [
        "quickstart",
        "2 × 8 × 2 = 32",
        "8 × (2 + 1 + 1) = 32",
        "first start",
        "resized to 3 ranks",
        "10.0% above the floor 2.0000",
        "of 1,900 in 40 steps",
        "32 → 64",
        "2 → 3 in 2 generations",
        "1,920 samples, each exactly once",
        "&lt;to be&gt;",
        "Llama, 1.31M parameters",
        "0.61s",
    ] {
        assert!(text.contains(shown), "`{shown}` is not shown");
    }
    assert_eq!(
        figures_of(&html),
        [
            "loss",
            "batch",
            "ratio",
            "coordinates",
            "throughput",
            "learning-rate",
            "generations"
        ]
    );
}

#[test]
fn preferences_have_rewards_and_no_perplexity() {
    let mut input = run();
    input.loss_of = LossOf::Preferences;
    input.floor = None;
    for (nth, step) in (1..).zip(&mut input.steps) {
        step.preferences = Some(Box::new(PreferenceRecord {
            reward_chosen: Some(0.01 * f64::from(nth)),
            // A step of KTO may have only desirable completions.
            reward_rejected: (nth > 1).then_some(-0.5),
            kl: Some(0.25),
            ..PreferenceRecord::default()
        }));
    }
    input.evaluations[0].preferences = Some(Box::new(PreferenceRecord {
        kl: Some(0.375),
        ..PreferenceRecord::default()
    }));
    let html = render(&input);
    assert_eq!(figures_of(&html)[..4], ["loss", "rewards", "kl", "batch"]);
    assert!(text_of(&html).contains("KL 0.3750"));
    let text = text_of(&html);
    assert!(text.contains("a mean over samples") && !text.contains("perplexity"));
    let margins = &data_of(&html)["curves"]["rewards"][2]["points"];
    assert_eq!(margins.as_array().map(Vec::len), Some(39));
    assert_eq!(margins[0], serde_json::json!([64.0, 0.52]));
}

#[test]
fn pointer_values_are_the_recorded_ones() {
    let input = run();
    let data = data_of(&render(&input));
    assert_eq!(data["samples"], serde_json::json!([0.0, 1_920.0]));
    let training = data["curves"]["loss"][0]["points"]
        .as_array()
        .expect("points");
    assert_eq!(training.len(), input.steps.len());
    assert_eq!(training[0], serde_json::json!([32.0, 5.1]));
    let shares = &data["curves"]["coordinates"][0]["points"];
    assert_eq!(shares.as_array().map(Vec::len), Some(4), "every tenth step");
    assert_eq!(
        data["curves"]["batch"][0],
        serde_json::json!({
            "holds": true,
            "points": [[0.0, 32.0], [640.0, 64.0], [1_920.0, 64.0]],
        })
    );
}

#[test]
fn nothing_from_a_recipe_becomes_markup() {
    let evil = "</script><script>alert('x')</script>&\"<b>";
    let mut input = run();
    input.title = evil.to_owned();
    input.formula = evil.to_owned();
    input.details[0].label = evil.to_owned();
    input.details[0].value = evil.to_owned();
    input.generations[1].reason = evil.to_owned();
    input.generations[1].formula = evil.to_owned();
    input.ledger = Some(LedgerVerdict {
        proven: false,
        text: evil.to_owned(),
    });
    let html = render(&input);
    text_of(&html);
    assert!(!html.contains("<script>alert"));
    assert!(!html.contains("<b>\n") && !html.contains("&\"<b>"));
    let escaped = minijinja::HtmlEscape(evil).to_string();
    assert_eq!(
        html.matches(&escaped).count(),
        8,
        "each of 7 places, the title twice"
    );
    assert_eq!(html.matches("<script>").count(), 1);
}

#[test]
fn a_report_makes_no_request() {
    let html = render(&run());
    for reference in ["http:", "https:", "//", "url(", "@import", "src="] {
        let found = html.lines().find(|line| {
            // Comments of the script are excluded.
            line.contains(reference) && !line.trim_start().starts_with("// ")
        });
        assert_eq!(found, None, "`{reference}` refers to something outside");
    }
    assert!(html.contains("default-src 'none'"));
}

#[test]
fn a_run_without_steps_has_a_report() {
    let html = render(&ReportInput::default());
    assert!(text_of(&html).contains("No step has been committed yet."));
    assert_eq!(figures_of(&html), Vec::<&str>::new());

    let mut input = run();
    input.steps.clear();
    input.evaluations.clear();
    let html = render(&input);
    assert!(text_of(&html).contains("No step has been committed yet."));
    assert_eq!(figures_of(&html), ["generations"]);
}

#[test]
fn a_run_of_one_step_shows_its_points() {
    let mut input = run();
    input.steps.truncate(1);
    input.evaluations.clear();
    input.generations.truncate(1);
    let html = render(&input);
    let text = text_of(&html);
    assert!(text.contains("in 1 step") && text.contains("the same throughout"));
    // A dot on each plot of one value.
    assert_eq!(html.matches("<path class=\"dots").count(), 4);
    assert!(!html.contains("NaN") && !html.contains("inf"));
}

#[test]
fn nan_losses_are_marked_and_not_drawn() {
    let mut input = run();
    for nth in [3, 17] {
        input.steps[nth].loss = f64::NAN;
    }
    input.evaluations[1].loss = f64::INFINITY;
    let html = render(&input);
    assert!(text_of(&html).contains("2 steps gave no finite number"));
    assert!(text_of(&html).contains("not finite"));
    assert_eq!(html.matches("<path class=\"hole\"").count(), 2);
    assert_eq!(
        html.matches(" 96V100\"").count(),
        2,
        "at the bottom of the plot"
    );
    assert!(!html.contains("NaN"));
    let points = &data_of(&html)["curves"]["loss"][0]["points"];
    assert_eq!(points.as_array().map(Vec::len), Some(38));

    input.steps.iter_mut().for_each(|step| step.loss = f64::NAN);
    input.evaluations.clear();
    input.floor = None;
    let html = render(&input);
    assert!(text_of(&html).contains("40 steps gave no finite number"));
    assert!(!html.contains("NaN"));
}

#[test]
fn values_that_an_external_trainer_does_not_report_are_left_out() {
    let mut input = run();
    input.evaluations.clear();
    input.floor = None;
    for (nth, step) in input.steps.iter_mut().enumerate() {
        // One report in four steps; every second one states a loss.
        step.step = 4 * nth as u64 + 4;
        step.external = Some(ExternalStep {
            total_samples: Some(9_600),
        });
        step.norm_test = None;
        step.coordinate_test = None;
        step.learning_rate = f64::NAN;
        step.loss = if nth % 2 == 0 { 2.5 } else { f64::NAN };
        // The first report of a generation has no tokens.
        step.tokens = if [0, 10].contains(&nth) { 0 } else { 600 };
    }
    let html = render(&input);
    let text = text_of(&html);
    assert!(
        !html.contains("NaN") && !text.contains("not finite"),
        "{text}"
    );
    assert!(
        text.contains("2.5000") && text.contains("as the trainer reports it"),
        "{text}"
    );
    // 600 tokens in half a second; generation 1 reported steps 4 to 40.
    assert!(
        text.contains("1.20k tok/s") && text.contains("22.8k tokens between reports"),
        "{text}"
    );
    assert!(text.contains(" 37 "), "{text}");
    assert_eq!(
        figures_of(&html),
        ["loss", "batch", "throughput", "generations"]
    );
    let points = &data_of(&html)["curves"]["loss"][0]["points"];
    assert_eq!(points.as_array().map(Vec::len), Some(20));

    input.steps.iter_mut().for_each(|step| step.tokens = 0);
    let text = text_of(&render(&input));
    assert!(text.contains("the trainer reports no tokens"), "{text}");
}

#[test]
fn an_absurd_final_loss_is_reported() {
    let called_out = |input: &ReportInput| text_of(&render(input)).contains("has diverged");
    let mut input = run();
    assert!(!called_out(&input));
    // 2 ln 4096 is 16.6; without evaluations the last step counts.
    input.evaluations.last_mut().unwrap().loss = 40.0;
    assert!(called_out(&input));
    input.evaluations.clear();
    assert!(!called_out(&input));
    input.steps.last_mut().unwrap().loss = 40.0;
    assert!(called_out(&input));
    input.vocabulary = 0;
    assert!(!called_out(&input));
}

#[test]
fn a_long_run_stays_a_small_page() {
    let mut input = run();
    let step = input.steps[39].clone();
    input.steps = (1..=50_000)
        .map(|nth| StepRecord {
            step: nth,
            samples: nth * 64,
            loss: 2.0 + (nth % 17) as f64 / 10.0,
            seconds: 0.4 + (nth % 13) as f64 / 50.0,
            ..step.clone()
        })
        .collect();
    let html = render(&input);
    assert!(html.len() < 300_000, "{} bytes", html.len());
    assert!(text_of(&html).contains("put together in 600 columns"));
    assert!(html.contains("<path class=\"band blue\""));
}

#[test]
fn plots_have_a_text_description() {
    let html = render(&run());
    assert!(html.contains(
        "aria-label=\"Loss over samples. training: from 5.1 at 32 to 2.175 at 1920 samples, \
         lowest 2.175, highest 5.1. evaluation: from 2.2 at 640 to 2.2 at 1920 samples, lowest \
         2.2, highest 2.2. entropy of the data 2.0000 at 2.\""
    ));
}
