//! Overrides on the command line: values, options, sweeps.

use super::*;

#[test]
fn a_sweep_is_refused_in_every_form() {
    let tree = Tree::usual();
    for typed in [
        "--multirun",
        "-m",
        "hydra.mode=MULTIRUN",
        "loss=sft,dpo",
        "lr=range(1,3)",
    ] {
        let findings = tree.findings(&["model=llama", typed]);
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(
            findings[0].starts_with("error[override-syntax]"),
            "{findings:?}"
        );
        assert!(findings[0].contains("a recipe is one job"), "{findings:?}");
    }
    let root = [("config.yaml", "hydra: {mode: MULTIRUN}\na: 1\n")];
    assert!(Tree::new(&root).findings(&[])[0].contains("a recipe is one job"));
}

#[test]
fn overrides_of_values_follow_their_prefixes() {
    let tree = Tree::usual();
    let with = |more: &[&str], key: &str| tree.value(&[&["model=llama"], more].concat(), key);
    assert_eq!(with(&["model.size=8"], "model.size"), int(8));
    assert_eq!(with(&["++model.size=8"], "model.size"), int(8));
    assert_eq!(with(&["model.peft={r: 8}"], "model.peft.r"), int(8));
    assert_eq!(
        with(&["model.peft={r: 8}"], "model.peft.alpha"),
        int(1),
        "mappings merge"
    );
    assert_eq!(with(&["~model.peft"], "model.peft.r"), None);
    assert_eq!(with(&["~late=2"], "late"), None);
    // `+` may replace null.
    assert_eq!(with(&["+model.name=x"], "model.name"), text("x"));
    assert_eq!(with(&["+loss.control={a: b}"], "loss.control.a"), text("b"));
    // The last override counts.
    assert_eq!(with(&["lr=2", "lr=3"], "lr"), int(3));
    assert_eq!(
        with(&["evenkeel.batch.gpus=8"], "evenkeel.batch.gpus"),
        int(8)
    );
    assert_eq!(with(&["hydra.run.dir=x"], "hydra"), None);
}

#[test]
fn unknown_overrides_are_reported_with_a_suggestion() {
    let tree = Tree::usual();
    let findings = |more: &[&str]| tree.findings(&[&["model=llama"], more].concat());
    insta::assert_snapshot!(
        [
            findings(&["model.sizes=8"]),
            findings(&["++model.sizes=8"]),
            findings(&["+config.late=8"]),
            findings(&["++model.peft.rr=8"]),
            findings(&["++model.peft={r: 1, beta: 2}"]),
            findings(&["+late=3"]),
            findings(&["~nowhere"]),
            findings(&["~late=3"]),
            findings(&["late.below=3"]),
            findings(&["++late.below=3"]),
            findings(&["lose=dpo"]),
            findings(&["loss=dop"]),
            findings(&["++loss=dpo"]),
        ]
        .concat()
        .join("\n")
    );
}

#[test]
fn every_error_of_the_command_line_is_reported() {
    let tree = Tree::usual();
    let (_, findings, _) = tree.compose(&["model=llama", "a=1,2", "b", "loss=nope", "x=1"]);
    let rules: Vec<&str> = findings.iter().map(|d| d.rule.as_str()).collect();
    assert_eq!(
        rules,
        ["override-syntax", "override-syntax", "config-missing"]
    );
    assert!(findings.iter().all(|d| d.severity == Severity::Error));
    assert!(
        findings[2].help.contains("one of dpo, sft"),
        "{}",
        findings[2].help
    );
}
