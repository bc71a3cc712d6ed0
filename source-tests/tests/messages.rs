//! Every message that a user can see, in one place: `snapshots/` lists those of each source file. A change of a text
//! changes these snapshots, so that a reviewer reads all texts of a change together (the help of each command is in
//! `tests/help.rs`). `INSTA_UPDATE=always cargo test -p source-tests` writes them.

use std::collections::BTreeMap;
use std::fs;

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
    let root = source_tests::root();
    let paths = source_tests::below(&root.join("src"));
    let mut by_file = BTreeMap::new();
    for path in paths {
        let mut found = Vec::new();
        let tokens: TokenStream = fs::read_to_string(&path).unwrap().parse().unwrap();
        texts(tokens, &mut found);
        if !found.is_empty() {
            by_file.insert(path.strip_prefix(&root).unwrap().to_owned(), found);
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
