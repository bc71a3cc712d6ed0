//! Diagnostics as text: the source line, the problem and the remedy.
//!
//! This module depends only on `recipe`, because the fuzz targets compile it alone.

use std::ops::Range;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use crate::recipe::syntax::diagnostic;
use crate::recipe::{Diagnostic, Severity, Sources, Span};

/// Columns of a source line, of which a longer one shows the part around its marks.
const COLUMNS: usize = 80;

/// All diagnostics in file order, with terminal colours; empty if there are none. Print with
/// `anstream`, which strips colours where they are not supported.
pub fn diagnostics(diagnostics: &[Diagnostic], sources: &Sources) -> String {
    draw(
        &Renderer::styled().term_width(COLUMNS),
        diagnostics,
        sources,
    )
}

/// A count such as `2 errors, 1 warning`, without notes.
pub fn summary(diagnostics: &[Diagnostic]) -> String {
    let count = |severity: Severity, word: &str| {
        let n = diagnostics
            .iter()
            .filter(|d| d.severity == severity)
            .count();
        match n {
            0 => None,
            1 => Some(format!("1 {word}")),
            n => Some(format!("{n} {word}s")),
        }
    };
    let counts = [
        count(Severity::Error, "error"),
        count(Severity::Warning, "warning"),
    ];
    let counts: Vec<String> = counts.into_iter().flatten().collect();
    if counts.is_empty() {
        "no problems".to_owned()
    } else {
        counts.join(", ")
    }
}

fn draw(renderer: &Renderer, diagnostics: &[Diagnostic], sources: &Sources) -> String {
    let mut ordered = diagnostics.to_vec();
    diagnostic::in_file_order(&mut ordered);
    // Drawing takes time in proportion to the line, which may have the whole file.
    diagnostic::keep_most_severe(&mut ordered);
    let mut text = String::new();
    for diagnostic in &ordered {
        text.push_str(&renderer.render(&[group(diagnostic, sources)]));
        text.push_str("\n\n");
    }
    text
}

fn group<'a>(diagnostic: &'a Diagnostic, sources: &'a Sources) -> Group<'a> {
    let level = match diagnostic.severity {
        Severity::Error => Level::ERROR,
        Severity::Warning => Level::WARNING,
        Severity::Note => Level::NOTE,
    };
    let mut group = Group::with_title(
        level
            .primary_title(diagnostic.message.as_str())
            .id(diagnostic.rule.as_str()),
    );
    let place = diagnostic
        .span
        .and_then(|span| Some((span, sources.get(span.file)?)));
    if let Some((span, file)) = place {
        let Range { start, end } = first_line(&file.text, span);
        // Only one line is drawn; a scan of the whole file per problem would be slow.
        let begin = file.text[..start].rfind('\n').map_or(0, |at| at + 1);
        let line = &file.text[begin..];
        let line = &line[..line.find('\n').map_or(line.len(), |at| at + 1)];
        group = group.element(
            Snippet::source(line)
                .line_start(span.line as usize)
                .path(file.path.display().to_string())
                .annotation(AnnotationKind::Primary.span(start - begin..end - begin)),
        );
    }
    group.element(Level::HELP.message(diagnostic.help.as_str()))
}

/// The part of a span on its first line, at least one character wide if possible. A mapping's span
/// covers several lines, and an empty value's span is empty.
fn first_line(text: &str, span: Span) -> Range<usize> {
    let start = floor(text, span.start);
    let line_end = text[start..]
        .find(['\n', '\r'])
        .map_or(text.len(), |n| start + n);
    let end = floor(text, span.end).clamp(start, line_end);
    let trimmed = start + text[start..end].trim_end().len();
    if trimmed > start {
        return start..trimmed;
    }
    let next = text[start..line_end].chars().next();
    start..start + next.map_or(0, char::len_utf8)
}

/// The nearest character boundary at or below an offset.
fn floor(text: &str, offset: usize) -> usize {
    let mut at = offset.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(file: crate::recipe::FileId, text: &str, part: &str) -> Span {
        let start = text.find(part).unwrap();
        let before = &text[..start];
        Span {
            file,
            start,
            end: start + part.len(),
            line: before.matches('\n').count() as u32 + 1,
            column: before.rsplit('\n').next().unwrap().chars().count() as u32 + 1,
        }
    }

    #[test]
    fn problems_are_drawn_at_their_lines_in_file_order() {
        let mut sources = Sources::default();
        let text = "# größe\r\nbatch:\r\n  per_device_batch_size: vier\r\n  global:\r\n";
        let file = sources.add("recipes/tiny.yaml", text);
        let line = sources.add("command line", "max_steps=1e3\n");
        let found = [
            Diagnostic::warning(
                "scalar-type",
                Some(span(line, "max_steps=1e3\n", "1e3")),
                "`max_steps` is the string `1e3`",
                "write `1000`",
            ),
            Diagnostic::error(
                "wrong-type",
                Some(span(file, text, "vier")),
                "`batch.per_device_batch_size` takes a whole number",
                "give a whole number",
            ),
            Diagnostic::error(
                "mandatory-missing",
                Some(span(file, text, "per_device_batch_size: vier\r\n  global:")),
                "there is no model",
                "give `model.path`",
            ),
            Diagnostic::error("global-batch-unknown", None, "no global batch", "say it"),
        ];
        insta::assert_snapshot!(draw(&Renderer::plain(), &found, &sources));
        assert_eq!(summary(&found), "3 errors, 1 warning");
        assert_eq!(summary(&[]), "no problems");
    }

    #[test]
    fn spans_at_the_end_or_inside_a_character_are_safe() {
        let mut sources = Sources::default();
        let file = sources.add("x", "é");
        for (start, end) in [(0, 0), (1, 1), (1, 9), (2, 2), (7, 9)] {
            let span = Span {
                file,
                start,
                end,
                line: 1,
                column: 1,
            };
            let found = [Diagnostic::error("yaml-syntax", Some(span), "m", "h")];
            assert!(draw(&Renderer::plain(), &found, &sources).contains("error[yaml-syntax]"));
        }
    }
}
