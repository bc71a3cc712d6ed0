//! Text of a limited width. Lines are broken between words only, so that paths and words can be copied; a word that is wider
//! than a line exceeds it.

use std::os::fd::AsFd;

/// Columns that the last column of a line needs for its text to continue below it.
const NARROWEST: usize = 24;

/// Columns up to which text continues below the text after a label such as `error:`.
const WIDEST_LABEL: usize = 16;

/// Columns of the terminal, else of the variable `COLUMNS`, as in clap. `None`: the text has no limit.
pub fn columns(stream: impl AsFd) -> Option<usize> {
    let terminal = rustix::termios::tcgetwinsize(stream).ok();
    let terminal = terminal.map(|size| usize::from(size.ws_col));
    let stated = || -> Option<usize> { std::env::var("COLUMNS").ok()?.parse().ok() };
    terminal
        .filter(|columns| *columns > 0)
        .or_else(stated)
        .filter(|columns| *columns > 0)
}

/// Columns of a text without its styles.
pub fn visible(text: &str) -> usize {
    let mut columns = 0;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            // A style: ESC [ … m.
            chars.by_ref().find(|c| c.is_ascii_alphabetic());
        } else {
            columns += 1;
        }
    }
    columns
}

/// The text in lines of at most `width` columns. A longer line continues below its last column, or indented. Code
/// in backticks and formulas stay on one line if a line has room for them. Source lines of diagnostics are not broken.
pub fn fit(text: &str, width: usize) -> String {
    let mut fitted = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let (line, end) = match line.strip_suffix('\n') {
            Some(line) => (line, "\n"),
            None => (line, ""),
        };
        if visible(line) <= width || is_source(line) {
            fitted += line;
        } else {
            fitted += &broken(line, width);
        }
        fitted += end;
    }
    fitted
}

/// The words of a table's cell in lines of at most `width` columns. Formulas are not broken, as in [`fit`].
pub fn cell(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in narrow(words(text, false), width) {
        let Some(line) = lines.last_mut() else { break };
        if line.is_empty() {
            line.push_str(word.text);
        } else if visible(line) + word.spaces + visible(word.text) <= width {
            line.push_str(&" ".repeat(word.spaces));
            line.push_str(word.text);
        } else {
            lines.push(word.text.to_owned());
        }
    }
    lines
}

/// A shell command in lines of at most `width` columns, each but the last with a backslash at its end. Quoted text is one
/// word, and a comment is not broken. The first line begins at `indent`, the others are four columns deeper.
pub fn command(text: &str, indent: usize, width: usize) -> String {
    let (words, comment) = match text.split_once("   # ") {
        Some((words, comment)) => (words, Some(format!("  # {comment}"))),
        None => (text, None),
    };
    let mut quote = None;
    let words = words.split(|c: char| {
        match quote {
            Some(open) if c == open => quote = None,
            None if c == '\'' || c == '"' => quote = Some(c),
            _ => {}
        }
        c == ' ' && quote.is_none()
    });
    let mut text = " ".repeat(indent);
    let mut column = 0;
    for word in words.map(str::to_owned).chain(comment) {
        let after = column + 1 + visible(&word);
        if column == 0 {
            column = indent + visible(&word);
        } else if after + " \\".len() <= width {
            text.push(' ');
            column = after;
        } else {
            text += &format!(" \\\n{:1$}", "", indent + 4);
            column = indent + 4 + visible(&word);
        }
        text += &word;
    }
    text
}

/// Whether this line of a diagnostic shows a file: its name, a source line, or the marks below one.
fn is_source(line: &str) -> bool {
    let plain = anstream::adapter::strip_str(line).to_string();
    let text = plain.trim_start();
    text.starts_with("--> ")
        || text
            .trim_start_matches(|c: char| c.is_ascii_digit())
            .trim_start()
            .starts_with('|')
        || text.starts_with("...")
}

/// A part of a line that is not broken, and the spaces before it.
struct Word<'a> {
    spaces: usize,
    text: &'a str,
}

/// The words of a line as (start, end). With `code`, code in backticks is one word.
fn spans(line: &str, code: bool) -> Vec<(usize, usize)> {
    let mut spans = Vec::new();
    let mut start = None;
    let mut is_code = false;
    for (at, c) in line.char_indices() {
        if c == ' ' && !(is_code && code) {
            spans.extend(start.take().map(|start| (start, at)));
            continue;
        }
        is_code ^= c == '`';
        start.get_or_insert(at);
    }
    spans.extend(start.map(|start| (start, line.len())));
    spans
}

/// The words of a line. A formula is one word. With `code`, code in backticks is too.
fn words(line: &str, code: bool) -> Vec<Word<'_>> {
    let mut words: Vec<(usize, usize)> = Vec::new();
    let mut is_operand = false;
    for (start, end) in spans(line, code) {
        let text = &line[start..end];
        match words.as_mut_slice() {
            // `4 × 16 = 64`: an operator after an operand, or an operand after an operator.
            [.., left, operator]
                if OPERATORS.contains(&&line[operator.0..operator.1])
                    && is_operand
                    && is_number(text, true) =>
            {
                left.1 = end;
                words.pop();
            }
            _ => {
                is_operand = words
                    .last()
                    .is_some_and(|(start, end)| is_number(&line[*start..*end], false));
                words.push((start, end));
            }
        }
    }
    let mut before = 0;
    let words = words.into_iter().map(|(start, end)| {
        let spaces = start - before;
        before = end;
        Word {
            spaces,
            text: &line[start..end],
        }
    });
    words.collect()
}

/// The words of a line with those split at their spaces that are wider than `width` columns.
fn narrow(words: Vec<Word<'_>>, width: usize) -> Vec<Word<'_>> {
    let mut narrow = Vec::with_capacity(words.len());
    for Word { spaces, text } in words {
        let mut before = 0;
        let spans = if visible(text) > width {
            spans(text, false)
        } else {
            vec![(0, text.len())]
        };
        for (start, end) in spans {
            narrow.push(Word {
                spaces: if start == 0 { spaces } else { start - before },
                text: &text[start..end],
            });
            before = end;
        }
    }
    narrow
}

/// The operators of formulas.
const OPERATORS: [&str; 5] = ["×", "+", "=", "≠", "%"];

/// Whether a word begins, or ends, with a number or a parenthesis around numbers.
fn is_number(word: &str, begins: bool) -> bool {
    let plain = anstream::adapter::strip_str(word).to_string();
    let mut chars = plain.chars().filter(|c| *c != '`');
    let edge = if begins {
        chars.next()
    } else {
        chars.next_back()
    };
    edge.is_some_and(|c| c.is_ascii_digit() || c == if begins { '(' } else { ')' })
}

/// The column at which the text of a line continues.
fn hang(words: &[Word<'_>], width: usize) -> usize {
    let indent = words.first().map_or(0, |word| word.spaces);
    let mut column = 0;
    let mut last = None;
    let mut is_label = false;
    for (nth, word) in words.iter().enumerate() {
        column += word.spaces;
        if nth > 0 && (word.spaces > 1 || (is_label && column <= WIDEST_LABEL)) {
            last = Some(column);
        }
        column += visible(word.text);
        // `error:`, or `= help:`.
        is_label = nth < 2
            && anstream::adapter::strip_str(word.text)
                .to_string()
                .ends_with(':');
    }
    match last {
        Some(column) if column + NARROWEST <= width => column,
        Some(_) => indent + 4,
        None => indent + 2,
    }
}

fn broken(line: &str, width: usize) -> String {
    let parts = words(line, true);
    let hang = hang(&parts, width);
    let parts = narrow(parts, width.saturating_sub(hang));
    let mut text = String::new();
    let mut column = 0;
    for word in &parts {
        let after = column + word.spaces + visible(word.text);
        // At the beginning of a line, another break would gain nothing.
        let is_first = column == 0 || column + word.spaces <= hang;
        if after <= width || is_first {
            text += &" ".repeat(word.spaces);
            column = after;
        } else {
            text.push('\n');
            text += &" ".repeat(hang);
            column = hang + visible(word.text);
        }
        text += word.text;
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_continues_below_its_last_column() {
        let text = "  learning_rate  1e-3 → 2e-3  the recipe says nothing about it, and the default is that of the trainer\n\
                    error[batch-divisible]: the batch of 128 does not split over `6 ranks`, whatever happens to them\n\
                    \x20   = help: use 1, 2, 4 or 8 GPUs, or `evenkeel plan --remainder uneven` to keep it exact\n\
                    12 | this_is: a line of the source that is longer than sixty columns, as it was\n";
        let fitted = [
            "  learning_rate  1e-3 → 2e-3  the recipe says nothing about",
            "                              it, and the default is that of",
            "                              the trainer",
            "error[batch-divisible]: the batch of 128 does not split over",
            "  `6 ranks`, whatever happens to them",
            "    = help: use 1, 2, 4 or 8 GPUs, or",
            "            `evenkeel plan --remainder uneven` to keep it",
            "            exact",
            "12 | this_is: a line of the source that is longer than sixty columns, as it was",
        ];
        assert_eq!(Vec::from_iter(fit(text, 60).lines()), fitted);
        assert_eq!(fit(text, 200), text);
    }

    #[test]
    fn a_formula_is_not_broken_where_a_line_has_room_for_it() {
        for text in [
            "the world of four keeps the global batch: 4 × 16 × 2 = 128",
            "the world of four keeps the batch: `4 × 16 × 2 = 128` samples",
            "the world keeps the batch with 16 × (3 + 3 + 2) = 128",
            "the world keeps the batch with \x1b[1m16 × (3 + 3 + 2) = 128\x1b[0m",
        ] {
            let formula = text[text.find(|c: char| c.is_ascii_digit()).unwrap()..].trim();
            let formula = &formula[..formula.find("128").unwrap() + 3];
            let whole = |line: &str| line.contains(formula);
            for width in 32..80 {
                let fitted = fit(text, width);
                assert!(fitted.lines().any(whole), "{width}: {fitted}");
                assert!(cell(text, width).iter().any(|line| whole(line)), "{width}");
            }
        }
        let narrow = fit("batch 16 × (3 + 3 + 2) = 128", 12);
        assert!(narrow.lines().all(|line| visible(line) <= 12), "{narrow}");
    }

    #[test]
    fn a_word_that_no_line_holds_is_not_moved() {
        let path = format!("  recipe      /{}", "long/".repeat(20));
        assert_eq!(fit(&path, 60), path);
        let said = format!("error: no file at /{}", "long/".repeat(20));
        assert_eq!(fit(&said, 60).lines().count(), 2);
    }

    #[test]
    fn styles_have_no_width() {
        let styled = "\x1b[1mword\x1b[0m ".repeat(12);
        assert_eq!(visible(&styled), 60);
        assert_eq!(fit(&styled, 60), styled);
    }

    #[test]
    fn a_command_has_a_backslash_at_each_break() {
        let typed = "evenkeel launch dpo.yaml --procs 2 'a b=c d' -- trl dpo --config {recipe}   # your own trainer";
        let lines = [
            r"  evenkeel launch dpo.yaml --procs 2 \",
            r"      'a b=c d' -- trl dpo --config \",
            r"      {recipe}   # your own trainer",
        ];
        assert_eq!(Vec::from_iter(command(typed, 2, 40).lines()), lines);
        assert_eq!(command(typed, 2, 200), format!("  {typed}"));
    }

    proptest! {
        #[test]
        fn no_word_is_lost_and_no_line_is_too_wide(
            text in "([a-f`:]{1,12} {1,3}){0,30}",
            width in 20_usize..90,
        ) {
            let fitted = fit(&text, width);
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            prop_assert_eq!(words(&fitted), words(&text));
            for line in fitted.lines().map(str::trim_end) {
                prop_assert!(visible(line) <= width, "{:?}", line);
            }
        }
    }
}
