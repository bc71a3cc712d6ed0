//! Which code may open files and read the environment: that of a recipe by rule of who runs it, and that of other
//! people's files by one function of `util::input`. `tests/untrusted.rs` tests what they do.

use std::fs;
use std::path::PathBuf;

use syn::visit::Visit;

/// The files of modules, each with its name below `src`. A module is a directory or a file.
fn parsed<'m>(modules: impl IntoIterator<Item = &'m &'m str>) -> Vec<(String, syn::File)> {
    let src = source_tests::root().join("src");
    let files = |module: &&str| match src.join(module) {
        file if file.is_file() => vec![file],
        directory => source_tests::below(&directory),
    };
    let read = |file: PathBuf| {
        let name = file
            .strip_prefix(&src)
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let text = fs::read_to_string(&file).unwrap();
        (name, syn::parse_file(&text).unwrap())
    };
    modules.into_iter().flat_map(files).map(read).collect()
}

/// Modules that the controller runs on a recipe.
const READ_BY_THE_CONTROLLER: [&str; 6] =
    ["recipe", "plan", "export", "api", "lifecycle", "operator"];

/// Their files that may use the file system or the environment: `Origin::Disk`, which only the command line
/// chooses; and the faults of the cluster tests.
const EXCEPT: [&str; 2] = ["recipe/schema/origin.rs", "operator/faults.rs"];

/// Collects uses of the file system and the environment outside of tests.
#[derive(Default)]
struct Ambient(Vec<String>);

impl<'ast> Visit<'ast> for Ambient {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !source_tests::for_tests(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = source_tests::names(path);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        if matches!(
            names.as_slice(),
            ["std", "env" | "fs", ..] | ["env" | "fs" | "File", _, ..]
        ) {
            self.0.push(names.join("::"));
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if let syn::UseTree::Path(root) = &item.tree
            && root.ident == "std"
        {
            let used = match &*root.tree {
                syn::UseTree::Path(path) => vec![path.ident.to_string()],
                syn::UseTree::Name(name) => vec![name.ident.to_string()],
                _ => Vec::new(),
            };
            let ambient = used
                .into_iter()
                .filter(|name| name == "env" || name == "fs");
            self.0
                .extend(ambient.map(|name| format!("use std::{name}")));
        }
    }

    /// The methods of `Path` that ask the disk take no argument; those of `Origin` take the path.
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        const ASKS: [&str; 8] = [
            "is_file",
            "is_dir",
            "is_symlink",
            "exists",
            "try_exists",
            "canonicalize",
            "read_dir",
            "read_link",
        ];
        if call.args.is_empty() && ASKS.iter().any(|name| call.method == name) {
            self.0.push(call.method.to_string());
        }
        syn::visit::visit_expr_method_call(self, call);
    }
}

#[test]
fn the_controller_reads_no_file_and_no_variable_for_a_recipe() {
    let mut found = Vec::new();
    let one = ["external_trainer/resume.rs"];
    for (name, file) in parsed(one.iter().chain(&READ_BY_THE_CONTROLLER)) {
        let mut ambient = Ambient::default();
        ambient.visit_file(&file);
        if EXCEPT.contains(&name.as_str()) {
            assert!(!ambient.0.is_empty(), "{name} needs no exception");
        } else {
            found.extend(ambient.0.iter().map(|used| format!("{name}: {used}")));
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

/// Modules whose files come from other people. `util` has the function that opens them.
const OPENS_FOR_OTHERS: [&str; 10] = [
    "agent",
    "checkpoint",
    "cli",
    "data",
    "external_trainer",
    "host",
    "launch",
    "recipe",
    "telemetry",
    "train",
];

/// Calls that open the kernel's own files.
const OPENS_THE_KERNELS: [&str; 4] = [
    "agent/volume.rs",
    "cli/signals.rs",
    "host/oom_killer.rs",
    "train/stacks.rs",
];

/// Collects calls that open any kind of file for reading.
#[derive(Default)]
struct Opened(Vec<String>);

impl<'ast> Visit<'ast> for Opened {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !source_tests::for_tests(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = source_tests::names(path);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let opens = matches!(
            names.as_slice(),
            [.., "File", "open"] | [.., "fs", "read" | "read_to_string"]
        );
        if opens {
            self.0.push(names.join("::"));
        }
    }
}

#[test]
fn files_of_other_people_are_opened_by_one_function() {
    let mut found = Vec::new();
    for (name, file) in parsed(&OPENS_FOR_OTHERS) {
        let mut opened = Opened::default();
        opened.visit_file(&file);
        if !OPENS_THE_KERNELS.contains(&name.as_str()) {
            found.extend(opened.0.iter().map(|call| format!("{name}: {call}")));
        }
    }
    assert_eq!(found, Vec::<String>::new());
}
