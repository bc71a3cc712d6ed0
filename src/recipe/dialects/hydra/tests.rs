use std::path::{Path, PathBuf};

use super::*;
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::overrides::add_source;
use crate::recipe::syntax::diagnostic::{Diagnostic, Severity};

/// A tree of configs on disk.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new(files: &[(&str, &str)]) -> Tree {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Tree(folder)
    }

    /// The tree that most tests use.
    fn usual() -> Tree {
        Tree::new(&[
            (
                "config.yaml",
                "lr: 1\nexp: ???\ndefaults:\n- _self_\n- model: ???\n- loss: sft\nlate: 2\nrun: ${lr}/${exp}\n",
            ),
            (
                "model/base.yaml",
                "name: ???\nsize: 32\npeft: {r: 64, alpha: 1}\n",
            ),
            (
                "model/llama.yaml",
                "defaults:\n  - base\n\nname: null\nblock: Llama\n",
            ),
            ("loss/sft.yaml", "trainer: SFT\n"),
            ("loss/dpo.yaml", "trainer: DPO\nbeta: 0.1\n"),
        ])
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn compose(&self, overrides: &[&str]) -> (Config, Vec<Diagnostic>, Reading) {
        self.compose_file("config.yaml", overrides)
    }

    fn compose_file(&self, name: &str, overrides: &[&str]) -> (Config, Vec<Diagnostic>, Reading) {
        const PROGRAM: Program = Program {
            resolvers: &[],
            optional: &["loss.control"],
        };
        let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
        let mut reading = Reading::default();
        let path = self.path(name);
        let (_, root) = reading.open(&path, None).unwrap();
        let command_line = add_source(&mut reading.sources, &overrides, &[]);
        let place = TreeLocation::of(&path, &Origin::Disk);
        let config = compose(
            root,
            &place,
            &PROGRAM,
            &overrides,
            command_line,
            &mut reading,
        );
        let findings = reading.diagnostics.clone();
        (config, findings, reading)
    }

    /// A value of a config that composes without findings.
    fn value(&self, overrides: &[&str], key: &str) -> Option<Resolved> {
        let (config, findings, _) = self.compose(overrides);
        assert_eq!(findings, [], "{overrides:?}");
        config.root.get_path(key)?.resolve(Schema::OmegaConf)
    }

    /// Findings about overrides: rule, severity, message and help.
    fn findings(&self, overrides: &[&str]) -> Vec<String> {
        let (_, findings, _) = self.compose(overrides);
        findings
            .iter()
            .map(|d| format!("{}[{}] {} ({})", d.severity, d.rule, d.message, d.help))
            .collect()
    }
}

fn int(value: i128) -> Option<Resolved> {
    Some(Resolved::Int(value))
}

fn text(value: &str) -> Option<Resolved> {
    Some(Resolved::Str(value.to_owned()))
}

/// Expected layers are those of Hydra 1.3.8.
#[test]
fn layers_merge_in_the_order_of_the_lists() {
    let tree = Tree::usual();
    assert_eq!(tree.value(&["model=llama"], "model.size"), int(32));
    // `base` comes first, because the list of `llama` lacks `_self_`.
    assert_eq!(
        tree.value(&["model=llama"], "model.name"),
        Some(Resolved::Null)
    );
    assert_eq!(tree.value(&["model=llama"], "model.block"), text("Llama"));
    assert_eq!(tree.value(&["model=llama"], "loss.trainer"), text("SFT"));
    assert_eq!(
        tree.value(&["model=llama", "loss=dpo"], "loss.trainer"),
        text("DPO")
    );
    // A list in the middle of the file hides none of its keys.
    assert_eq!(tree.value(&["model=llama"], "late"), int(2));
    assert_eq!(tree.value(&["model=llama", "exp=x"], "run"), text("1/x"));

    let last = [
        (
            "config.yaml",
            "defaults:\n- model: a\n- _self_\nmodel: {x: 2}\n",
        ),
        ("model/a.yaml", "x: 1\ny: 1\n"),
    ];
    assert_eq!(Tree::new(&last).value(&[], "model.x"), int(2));
    let first = [
        (
            "config.yaml",
            "defaults:\n- _self_\n- model: a\nmodel: {x: 2}\n",
        ),
        last[1],
    ];
    assert_eq!(Tree::new(&first).value(&[], "model.x"), int(1));
    let silent = [
        ("config.yaml", "defaults:\n- model: a\nmodel: {x: 2}\n"),
        last[1],
    ];
    assert_eq!(Tree::new(&silent).value(&[], "model.x"), int(2));
}

#[test]
fn groups_determine_where_a_file_merges() {
    let files = [
        (
            "config.yaml",
            "defaults:\n- db/inner: b\n- whole: c\n- optional db: nowhere\n- none: null\n",
        ),
        ("db/a.yaml", "x: 1\n"),
        ("db/inner/b.yaml", "x: 2\n"),
        ("whole/c.yaml", "# @package _global_\nx: 3\n"),
        ("none/d.yaml", "x: 4\n"),
    ];
    let tree = Tree::new(&files);
    assert_eq!(tree.value(&[], "db.inner.x"), int(2));
    assert_eq!(tree.value(&[], "x"), int(3));
    assert_eq!(tree.value(&["none=d"], "none.x"), int(4));
    assert_eq!(tree.value(&["~whole"], "x"), None);
    assert_eq!(tree.value(&["~whole", "whole=c"], "x"), None);
    assert_eq!(tree.value(&["db=a"], "db.x"), int(1));
    assert!(tree.findings(&["+db=a"])[0].contains("that the list already has"));
    // The list of one file overrides that of another.
    let files = [
        (
            "config.yaml",
            "defaults:\n- model: m\n- override model/part: two\n",
        ),
        ("model/m.yaml", "defaults:\n- part: one\n"),
        ("model/part/one.yaml", "x: 1\n"),
        ("model/part/two.yaml", "x: 2\n"),
    ];
    assert_eq!(Tree::new(&files).value(&[], "model.part.x"), int(2));
    assert_eq!(
        Tree::new(&files).value(&["model/part=one"], "model.part.x"),
        int(1)
    );
}

#[test]
fn a_missing_value_replaces_nothing() {
    let files = [
        (
            "config.yaml",
            "defaults:\n- _self_\n- model: a\nmodel: {x: 1, y: {z: 2}, w: ???}\n",
        ),
        ("model/a.yaml", "x: ???\ny: {z: ???, v: ???}\nw: 3\n"),
    ];
    let (config, findings, _) = Tree::new(&files).compose(&[]);
    assert_eq!(findings, []);
    let missing: Vec<&str> = config.missing.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(missing, ["model.y.v"]);
    let value = |key: &str| config.root.get_path(key)?.resolve(Schema::OmegaConf);
    assert_eq!(value("model.x"), int(1));
    assert_eq!(value("model.y.z"), int(2));
    assert_eq!(value("model.w"), int(3));
}

#[test]
fn rare_features_of_hydra_are_refused() {
    for (list, word) in [
        ("defaults:\n- db@other: a\n", "`db@other` has a package"),
        ("defaults:\n- db: [a, b]\n", "the name of one option"),
        (
            "defaults:\n- db: ${loss}\n- loss: a\n",
            "an interpolation in a defaults list",
        ),
        (
            "defaults:\n- top_${db}\n- db: a\n",
            "an interpolation in a defaults list",
        ),
        (
            "defaults:\n- db: b\n",
            "the package `model.x` of `db/b` is not supported",
        ),
        (
            "hydra: {searchpath: [x]}\ndefaults:\n- db: a\n",
            "`hydra.searchpath` is not supported",
        ),
    ] {
        let tree = Tree::new(&[
            ("config.yaml", list),
            ("db/a.yaml", "x: 1\n"),
            ("db/b.yaml", "# @package model.x\nx: 1\n"),
            ("loss/a.yaml", "x: 1\n"),
        ]);
        let findings = tree.findings(&[]);
        assert!(findings[0].contains(word), "{list}: {findings:?}");
    }
    let tree = Tree::usual();
    for (typed, word) in [
        (
            "hydra.searchpath=[file:///x]",
            "`hydra.searchpath` is not supported",
        ),
        ("model@other=llama", "`model@other` is not a key"),
        ("~loss=sft", "is not KEY=VALUE"),
        ("loss=${model}", "an interpolation in a defaults list"),
        ("loss=[sft,dpo]", "takes the name of an option"),
        ("lr=int(3)", "`int(…)` is a function"),
    ] {
        let findings = tree.findings(&["model=llama", typed]);
        assert!(findings[0].contains(word), "{typed}: {findings:?}");
    }
}

/// The list of one file overrides that of another, independent of their order, as in Hydra 1.3.
#[test]
fn overrides_apply_to_earlier_entries() {
    let experiment = "# @package _global_\ndefaults:\n- override /db: fast\nlr: 3\n";
    let files = |list: &'static str| {
        Tree::new(&[
            ("config.yaml", list),
            ("db/slow.yaml", "x: 1\n"),
            ("db/fast.yaml", "x: 2\n"),
            ("experiment/one.yaml", experiment),
            ("experiment/bare.yaml", "defaults:\n- override /db: fast\n"),
        ])
    };
    let tree = files("defaults:\n- db: slow\n- experiment: null\nlr: 1\n");
    assert_eq!(tree.value(&[], "db.x"), int(1));
    assert_eq!(tree.value(&["experiment=one"], "db.x"), int(2));
    assert_eq!(tree.value(&["experiment=one", "db=slow"], "db.x"), int(1));
    // An added group comes after the file itself.
    let tree = files("defaults:\n- db: slow\nlr: 1\n");
    assert_eq!(tree.value(&["+experiment=one"], "lr"), int(3));
    // Without its package the entry names another group, which no list has.
    let findings = tree.findings(&["+experiment=bare"]);
    assert!(
        findings[0].contains("no earlier entry has the config group `db@experiment.db`"),
        "{findings:?}"
    );
    let late = files("defaults:\n- experiment: one\n- db: slow\n");
    assert!(
        late.findings(&[])[0].contains("no earlier entry has the config group `db` to override")
    );
    let twice = files("defaults:\n- db: slow\n- experiment: null\n- /db: fast\n");
    assert!(
        twice.findings(&[])[0].contains("`db` is in the lists twice"),
        "{:?}",
        twice.findings(&[])
    );
}

#[test]
fn all_missing_values_are_reported() {
    let tree = Tree::usual();
    let (config, findings, reading) = tree.compose(&["model.size=3"]);
    let missing: Vec<&str> = config.missing.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(missing, ["exp"]);
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(
        findings[0].message,
        "an option of the config group `model` must be chosen"
    );
    assert_eq!(findings[0].help, "write `model=OPTION`: one of base, llama");
    let place = findings[0].locate(&reading.sources);
    assert_eq!((place.line, place.column), (Some(5), Some(10)));
    // A value that depends on a missing one is not reported as missing.
    let (config, ..) = tree.compose(&["model=llama"]);
    assert_eq!(config.missing.len(), 1);
    assert_eq!(
        config.root.get("run").unwrap().resolve(Schema::OmegaConf),
        Some(Resolved::Missing)
    );
}

#[test]
fn values_keep_their_positions_in_their_files() {
    let tree = Tree::usual();
    let (config, _, reading) = tree.compose(&["model=llama", "loss=dpo", "loss.beta=0.3"]);
    let place = |key: &str| {
        let span = config.root.get_path(key).unwrap().span;
        let file = &reading.sources.get(span.file).unwrap().path;
        let name = file.file_name().unwrap_or(file.as_os_str()).to_owned();
        (name.into_string().unwrap(), span.line, span.column)
    };
    assert_eq!(place("model.size"), ("base.yaml".into(), 2, 7));
    assert_eq!(place("model.name"), ("llama.yaml".into(), 4, 7));
    assert_eq!(place("loss.beta"), ("command line".into(), 3, 11));
    assert_eq!(place("late"), ("config.yaml".into(), 7, 7));
}

#[test]
fn a_single_option_is_composed_under_its_group() {
    let tree = Tree::usual();
    let place = TreeLocation::of(&tree.path("model/llama.yaml"), &Origin::Disk);
    assert_eq!((place.group(), place.option()), (Some("model"), "llama"));
    assert_eq!(
        TreeLocation::of(&tree.path("config.yaml"), &Origin::Disk).group(),
        None
    );
    let (config, findings, _) = tree.compose_file("model/llama.yaml", &["model.size=4"]);
    assert_eq!(findings, []);
    let found = config.root.get_path("model.size").unwrap();
    assert_eq!(found.resolve(Schema::OmegaConf), int(4));
    assert_eq!(
        root_of(tree.0.path(), &Origin::Disk),
        Some(tree.path("config.yaml"))
    );
    assert_eq!(root_of(&tree.path("model"), &Origin::Disk), None);
}

#[test]
fn hostile_trees_end_in_an_error() {
    let circle = [
        ("config.yaml", "defaults:\n- model: a\n"),
        ("model/a.yaml", "defaults:\n- b\n"),
        ("model/b.yaml", "defaults:\n- a\n"),
    ];
    let findings = Tree::new(&circle).findings(&[]);
    assert!(
        findings[0].contains("model/a → model/b → model/a"),
        "{findings:?}"
    );
    let outside = Tree::new(&[("config.yaml", "defaults:\n- ../../../etc/passwd\n")]);
    assert!(outside.findings(&[])[0].contains("has no option `passwd`"));
    let list: String = (0..100).map(|_| "- model/a\n").collect();
    let many = Tree::new(&[
        ("config.yaml", &format!("defaults:\n{list}")),
        ("model/a.yaml", "x: 1\n"),
    ]);
    let twice = Tree::new(&[
        ("config.yaml", "defaults:\n- model: a\n- model: a\n"),
        ("model/a.yaml", "x: 1\n"),
    ]);
    assert!(twice.findings(&[])[0].contains("in the lists twice"));
    assert!(many.findings(&[])[0].contains("more than 64 files"));
    let values = (0..20_000).map(|n| format!("k{n}: {n}\n"));
    let large = Tree::new(&[("config.yaml", &values.collect::<String>())]);
    assert!(large.findings(&[])[0].contains("more than 20000 values"));
}

#[test]
fn the_parent_directory_of_a_tree_selects_the_tree() {
    let tree = Tree::new(&[("config/config.yaml", "a: 1\n")]);
    assert_eq!(
        root_of(tree.0.path(), &Origin::Disk),
        Some(tree.path("config/config.yaml"))
    );
    assert_eq!(root_of(Path::new("/nowhere/at/all"), &Origin::Disk), None);
}

/// As in Hydra 1.3.8.
#[test]
fn an_option_may_have_its_file_extension() {
    let value = Tree::usual().value(&["model=llama.yaml", "exp=e"], "model.block");
    assert_eq!(value, text("Llama"));
}

mod typed {
    //! Overrides on the command line: values, options, sweeps.

    use super::*;

    #[test]
    fn a_sweep_is_refused_in_every_form() {
        let tree = Tree::usual();
        for typed in ["--multirun", "-m", "hydra.mode=MULTIRUN", "loss=sft,dpo"] {
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
        assert_eq!(with(&["model.peft.r=8"], "model.peft.r"), int(8));
        assert_eq!(with(&["~model.peft"], "model.peft.r"), None);
        assert_eq!(with(&["~late"], "late"), None);
        // `+` may replace null.
        assert_eq!(with(&["+model.name=x"], "model.name"), text("x"));
        assert_eq!(with(&["+loss.control.a=b"], "loss.control.a"), text("b"));
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
                findings(&["++model.peft={r: 1}"]),
                findings(&["+late=3"]),
                findings(&["~nowhere"]),
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
}
