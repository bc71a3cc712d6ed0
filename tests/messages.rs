//! Every text that a user can see, in one place: `tests/snapshots/` lists the messages of each source
//! file and the help of each command. A change of a text changes these snapshots, so that a reviewer
//! reads all texts of a change together. `INSTA_UPDATE=always cargo test --test messages` writes them.

mod source_files;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Collects the texts of two or more words, except doc comments and code for tests.
fn texts(tokens: TokenStream, found: &mut Vec<String>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(mark) if mark.as_char() == '#' => {
                // `#![…]` is an attribute too.
                tokens.next_if(|next| next.to_string() == "!");
                let attribute = match tokens.peek() {
                    Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Bracket => {
                        group.stream()
                    }
                    _ => continue,
                };
                tokens.next();
                let attribute_text = attribute.to_string();
                if attribute_text.starts_with("cfg (test") || attribute_text.starts_with("cfg(test")
                {
                    // The item that follows, up to its body.
                    for token in tokens.by_ref() {
                        match token {
                            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                                break;
                            }
                            TokenTree::Punct(end) if end.as_char() == ';' => break,
                            _ => {}
                        }
                    }
                } else if !attribute_text.starts_with("doc") {
                    texts(attribute, found);
                }
            }
            TokenTree::Group(group) => texts(group.stream(), found),
            TokenTree::Literal(literal) => {
                let Ok(text) = syn::parse_str::<syn::LitStr>(&literal.to_string()) else {
                    continue;
                };
                let text = text.value();
                let words = text.split_whitespace();
                let words = words.filter(|word| word.chars().any(char::is_alphabetic));
                if words.count() > 1 {
                    found.push(text);
                }
            }
            _ => {}
        }
    }
}

#[test]
fn messages_of_every_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let paths = source_files::below(&root.join("src"));
    let mut by_file = BTreeMap::new();
    for path in paths {
        let mut found = Vec::new();
        let tokens: TokenStream = fs::read_to_string(&path).unwrap().parse().unwrap();
        texts(tokens, &mut found);
        if !found.is_empty() {
            by_file.insert(path.strip_prefix(root).unwrap().to_owned(), found);
        }
    }
    // One snapshot per module.
    let mut by_module: BTreeMap<String, String> = BTreeMap::new();
    for (path, texts) in by_file {
        let module = path.components().nth(1).unwrap().as_os_str();
        let shown = by_module
            .entry(module.to_string_lossy().into_owned())
            .or_default();
        shown.push_str(&format!("# {}\n", path.display()));
        for text in texts {
            shown.push_str(&format!("- {}\n", text.trim_end().replace('\n', "\n  ")));
        }
        shown.push('\n');
    }
    for (module, shown) in by_module {
        insta::assert_snapshot!(module, shown);
    }
}

/// `--help` of a command, and of its subcommands.
fn help(command: &[&str], shown: &mut String) {
    let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .args(command)
        .arg("--help")
        .env_clear()
        .output()
        .unwrap();
    assert!(output.status.success(), "{command:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    shown.push_str(&format!(
        "$ evenkeel {}--help\n{text}\n",
        command
            .iter()
            .fold(String::new(), |all, word| all + word + " ")
    ));
    let subcommands = text
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| line.starts_with("  "))
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help");
    for name in subcommands {
        help(&[command, &[name]].concat(), shown);
    }
}

#[test]
fn help_of_every_command() {
    let mut shown = String::new();
    help(&[], &mut shown);
    insta::assert_snapshot!("help", shown);
}
