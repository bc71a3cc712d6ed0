//! What is typed: values, options, sweeps.

use super::*;

#[test]
fn a_sweep_is_refused_wherever_it_is_asked_for() {
    let tree = Tree::usual();
    for typed in [
        "--multirun",
        "-m",
        "hydra.mode=MULTIRUN",
        "loss=sft,dpo",
        "lr=range(1,3)",
    ] {
        let said = tree.said(&["model=llama", typed]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("error[override-syntax]"), "{said:?}");
        assert!(said[0].contains("a recipe is one job"), "{said:?}");
    }
    let root = [("config.yaml", "hydra: {mode: MULTIRUN}\na: 1\n")];
    assert!(Tree::new(&root).said(&[])[0].contains("a recipe is one job"));
}

#[test]
fn overrides_of_values_follow_their_marks() {
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
    // Null is as good as nothing for `+`.
    assert_eq!(with(&["+model.name=x"], "model.name"), text("x"));
    assert_eq!(with(&["+loss.control={a: b}"], "loss.control.a"), text("b"));
    // What stands last counts.
    assert_eq!(with(&["lr=2", "lr=3"], "lr"), int(3));
    assert_eq!(
        with(&["evenkeel.batch.gpus=8"], "evenkeel.batch.gpus"),
        int(8)
    );
    assert_eq!(with(&["hydra.run.dir=x"], "hydra"), None);
}

#[test]
fn unknown_overrides_are_refused_or_told_with_what_was_meant() {
    let tree = Tree::usual();
    let said = |more: &[&str]| tree.said(&[&["model=llama"], more].concat());
    insta::assert_snapshot!(
        [
            said(&["model.sizes=8"]),
            said(&["++model.sizes=8"]),
            said(&["+config.late=8"]),
            said(&["++model.peft.rr=8"]),
            said(&["++model.peft={r: 1, beta: 2}"]),
            said(&["+late=3"]),
            said(&["~nowhere"]),
            said(&["~late=3"]),
            said(&["late.below=3"]),
            said(&["++late.below=3"]),
            said(&["lose=dpo"]),
            said(&["loss=dop"]),
            said(&["++loss=dpo"]),
        ]
        .concat()
        .join("\n")
    );
}

#[test]
fn every_error_of_the_command_line_is_told() {
    let tree = Tree::usual();
    let (_, said, _) = tree.compose(&["model=llama", "a=1,2", "b", "loss=nope", "x=1"]);
    let rules: Vec<&str> = said.iter().map(|d| d.rule.as_str()).collect();
    assert_eq!(
        rules,
        ["override-syntax", "override-syntax", "config-missing"]
    );
    assert!(said.iter().all(|d| d.severity == Severity::Error));
    assert!(said[2].help.contains("one of dpo, sft"), "{}", said[2].help);
}
