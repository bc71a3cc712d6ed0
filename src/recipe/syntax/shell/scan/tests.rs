use proptest::prelude::*;

use super::*;
use crate::recipe::syntax::shell::word::join;

fn texts(text: &str, form: Form) -> Vec<Vec<String>> {
    let lines = commands(text, FileId(0), form).into_iter();
    lines
        .map(|line| line.words.into_iter().map(|word| word.text).collect())
        .collect()
}

fn words(text: &str) -> Vec<Word> {
    commands(text, FileId(0), Form::Script)[0].words.clone()
}

#[test]
fn words_are_split_as_in_a_shell() {
    let script = "#!/bin/bash\n# a comment\nN=4 torchrun \\\n  --a 'x y' --b=\"1\\\"2\" --c\\ d; echo done\n";
    assert_eq!(
        texts(script, Form::Script),
        [
            vec!["N=4", "torchrun", "--a", "x y", "--b=1\"2", "--c d"],
            vec!["echo", "done"],
        ]
    );
    let pasted = "--a 1\r\n--b '2 3' # end\n";
    assert_eq!(texts(pasted, Form::Arguments), [["--a", "1", "--b", "2 3"]]);
}

#[test]
fn an_arguments_file_is_split_as_upstream() {
    let file = "--a '1\n2' # $x \\\n";
    assert_eq!(
        texts(file, Form::ArgumentsFile),
        [["--a", "'1", "2'", "#", "$x", "\\"]]
    );
    assert!(commands(" \n", FileId(0), Form::ArgumentsFile).is_empty());
}

#[test]
fn a_word_has_its_line_and_column() {
    let text = "torchrun \\\n  --größe=\"16\" x";
    let words = words(text);
    let key = &words[1];
    assert_eq!((key.span.line, key.span.column), (2, 3));
    let value = key.after("--größe=".len());
    assert_eq!(&text[value.span.start..value.span.end], "\"16\"");
    assert_eq!((value.text.as_str(), value.span.column), ("16", 11));
    assert_eq!((words[2].span.line, words[2].span.column), (2, 16));
}

#[test]
fn a_word_ends_before_a_continued_line() {
    let text = "train.py --a 1\\\n  ; echo";
    let last = &words(text)[2];
    assert_eq!(
        (last.text.as_str(), &text[last.span.start..last.span.end]),
        ("1", "1")
    );
    let joined = &words("a\\\nb c")[0];
    assert_eq!((joined.text.as_str(), joined.span.end), ("ab", 4));
}

#[test]
fn redirections_are_no_words() {
    for script in [
        "run --a 5 > train.log 2>&1 &",
        "run --a 5 >log",
        "run --a 5 >> log </dev/null",
        "run 2>x --a 5 &> log",
        "run --a 5 &>>log",
        "run --a 5 > >(tee \"$DIR/log\") 2> >(tee err >&2)",
        "run --a 5 <<< \"$TEXT\"",
        "run --a 5 >| log 2>&-",
        "> log run --a 5",
    ] {
        assert_eq!(
            texts(script, Form::Script),
            [["run", "--a", "5"]],
            "{script}"
        );
    }
    assert_eq!(texts("run a2>x", Form::Script), [["run", "a2"]]);
    assert_eq!(texts("run '2'>x", Form::Script), [["run", "2"]]);
}

#[test]
fn here_documents_are_no_commands() {
    for script in [
        "cat > job.sh <<X\nrun 1\nX\nrun 2",
        "cat <<'X' > job.sh\nit's\nX\nrun 2",
        "cat <<-X\n\trun 1\n\tX\nrun 2",
        "cat <<X; cat <<\"Y\"\nX\nrun 1\nY\nrun 2",
    ] {
        let last = texts(script, Form::Script).pop();
        assert_eq!(last.unwrap(), ["run", "2"], "{script}");
    }
}

#[test]
fn a_command_that_a_script_may_skip_is_not_certain() {
    for (script, expected) in [
        ("run", true),
        ("x; run", true),
        ("x && y; run", true),
        ("if x; then y; fi; run", true),
        ("case $a in b) x;; esac\nrun", true),
        ("f() {\n  x\n}\nrun", true),
        ("for a in b; do x; done\nrun", true),
        ("if x; then run", false),
        ("case $a in b) run", false),
        ("f() {\n  run", false),
        ("function f {\n  run", false),
        ("while x; do run", false),
        ("(run", false),
        ("x && run", false),
        ("x | run", false),
        ("run &", false),
    ] {
        let lines = commands(script, FileId(0), Form::Script);
        let last = lines.last().unwrap();
        assert_eq!(last.words.last().unwrap().text, "run", "{script}");
        assert_eq!(last.certain, expected, "{script}");
    }
}

#[test]
fn a_word_reports_how_much_of_it_is_unresolved() {
    use crate::recipe::syntax::shell::word::UnresolvedExtent::{Number, Part, Whole};
    for (word, expected) in [
        ("$X", Some(Number)),
        ("${X}", Some(Number)),
        ("$(cat x)", Some(Number)),
        ("`cat x`", Some(Number)),
        ("$((1 + 1))", Some(Number)),
        ("\"$X\"", Some(Whole)),
        ("\"$@\"", Some(Number)),
        ("\"${A[@]}\"", Some(Number)),
        ("$X/a", Some(Part)),
        ("--a=$X", Some(Part)),
        ("a\"$@\"", Some(Number)),
        ("'$X'", None),
        ("\\$X", None),
        ("\"\\$X\"", None),
        ("5$", None),
    ] {
        let words = words(word);
        assert_eq!(words.len(), 1, "{word}");
        assert_eq!(words[0].unresolved_extent(), expected, "{word}");
    }
    let typed = commands(&join(&["$X".to_owned()]), FileId(0), Form::Typed);
    assert_eq!(typed[0].words[0].unresolved_extent(), Some(Number));
}

#[test]
fn unclosed_quotes_and_brackets_are_reported() {
    for text in ["a 'b", "a $(b", "a ${b", "a `b", "a > 'b", "A=(b", "a <(b"] {
        assert!(!words(text).last().unwrap().closed, "{text}");
    }
}

/// Each result is that of bash 5.2.
#[test]
fn a_backslash_at_the_end_of_a_script_is_removed() {
    for text in ["a b\\", "a b \\", "a b\\\n", "a b \\\n"] {
        assert_eq!(texts(text, Form::Script), [["a", "b"]], "{text:?}");
    }
    let inner = commands("bash -c 'a b\\'", FileId(0), Form::Script);
    let words = inner.iter().flat_map(|line| &line.words);
    assert!(words.clone().any(|word| !word.closed), "{inner:?}");
}

proptest! {
    #[test]
    fn joined_words_split_into_the_same_words(words in prop::collection::vec(any::<String>(), 1..6)) {
        let line = join(&words);
        prop_assert_eq!(&texts(&line, Form::Script), std::slice::from_ref(&words));
        prop_assert_eq!(texts(&line, Form::Typed), [words]);
    }

    #[test]
    fn any_text_scans_without_a_panic(text in "[a-c$(){}\\[\\]'\"`\\\\<>&|;#= \n@*!-]{0,60}") {
        for text in [format!("bash -c {text}"), text] {
            for form in [Form::Script, Form::Arguments, Form::Typed, Form::ArgumentsFile] {
                for line in commands(&text, FileId(0), form) {
                    for word in &line.words {
                        prop_assert!(text.get(word.span.start..word.span.end).is_some());
                    }
                }
            }
        }
    }
}
