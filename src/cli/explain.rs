//! `evenkeel explain`: the requirement of a rule and its reason.

use std::process::ExitCode;

use anstyle::Style;

use super::EXIT_USAGE;
use super::output::{print, say, width};
use super::table::Table;
use crate::plan::rules::{self, RULES};
use crate::util::suggest::nearest;
use crate::util::wrap;

/// Explain a rule, or list all of them
#[derive(clap::Args)]
#[command(after_help = "Examples:
  evenkeel explain                    all rules
  evenkeel explain batch-divisible    one rule

Pages use the keys of native recipes. In an upstream dialect without such a key,
put it below `evenkeel`, as in evenkeel.batch.per_device_batch_size=4.")]
pub struct Args {
    /// Id of a rule, as in `error[batch-divisible]`
    rule: Option<String>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Some(id) = args.rule else {
        print(list(width()))?;
        return Ok(ExitCode::SUCCESS);
    };
    match rules::find(&id) {
        Some(rule) => {
            print(styled(&rules::page(rule), width()))?;
            Ok(ExitCode::SUCCESS)
        }
        None => {
            say(format_args!("error: {}\n", no_such_rule(&id)));
            Ok(ExitCode::from(EXIT_USAGE))
        }
    }
}

fn no_such_rule(id: &str) -> String {
    let ids: Vec<&str> = RULES.iter().map(|rule| rule.id).collect();
    // Part of a name counts as much as a name with a typo.
    let part = || {
        ids.iter()
            .find(|known| known.split('-').any(|word| word == id))
    };
    let meant = match nearest(id, &ids).or_else(|| part().copied()) {
        Some(rule) => format!("did you mean `{rule}`? "),
        None => String::new(),
    };
    format!("unknown rule `{id}`; {meant}`evenkeel explain` lists all rules")
}

fn list(width: Option<usize>) -> String {
    let mut table = Table::new(["RULE", "SEVERITY", ""]);
    for rule in RULES.iter() {
        let cells = [rule.id, &rule.severity.to_string(), rule.summary];
        table.row(cells.map(str::to_owned));
    }
    table.render(width)
}

/// Formats a page's Markdown for a terminal: bold headings, indented code, and paragraphs of `width` columns. `None`: the
/// lines of the page.
fn styled(page: &str, width: Option<usize>) -> String {
    let bold = Style::new().bold();
    let mut text = String::new();
    let mut paragraph = String::new();
    let mut code = false;
    for line in page.lines().chain([""]) {
        // The second line of a page says when the rule is checked.
        let begins = ["- ", "(checked", "(an error"];
        let begins = line.is_empty() || begins.iter().any(|begin| line.starts_with(begin));
        let is_prose = !code
            && !["#", "```", "|"]
                .iter()
                .any(|begin| line.starts_with(begin));
        if width.is_none() || begins || !is_prose {
            let lines = wrap::cell(&paragraph, width.unwrap_or(usize::MAX));
            let end = if paragraph.is_empty() { "" } else { "\n" };
            text += &format!("{}{end}", lines.join("\n"));
            paragraph.clear();
        }
        if line.starts_with("```") {
            code = !code;
        } else if code {
            text += &format!("    {line}\n");
        } else if let Some(heading) = line.strip_prefix('#') {
            let heading = heading.trim_start_matches('#').trim_start();
            text += &format!("{bold}{heading}{bold:#}\n");
        } else if line.is_empty() {
            text.push('\n');
        } else {
            let space = if paragraph.is_empty() { "" } else { " " };
            paragraph += &format!("{space}{}", line.replace("**", ""));
        }
    }
    // The line after the page.
    text.pop();
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_text_on_a_terminal() {
        let page = rules::page(rules::find("kto-batch-min").unwrap());
        insta::assert_snapshot!(anstream::adapter::strip_str(&styled(&page, None)).to_string());
    }

    #[test]
    fn a_paragraph_fits_the_terminal() {
        let page = "# id\n\n**error**: what\n(checked for every plan)\n\nOne and two and\n`three` and four.\n\n\
                    ```yaml\na: 1\n```\n";
        let shown = anstream::adapter::strip_str(&styled(page, Some(24))).to_string();
        assert_eq!(
            shown,
            "id\n\nerror: what\n(checked for every plan)\n\nOne and two and `three`\nand four.\n\n    a: 1\n"
        );
    }

    #[test]
    fn an_unknown_rule_suggests_the_nearest_one_and_the_list() {
        assert_eq!(
            no_such_rule("nope"),
            "unknown rule `nope`; `evenkeel explain` lists all rules"
        );
        let near = no_such_rule("batch-divisble");
        assert!(
            near.contains("did you mean `batch-divisible`? `evenkeel explain`"),
            "{near}"
        );
        let part = no_such_rule("divisible");
        assert!(part.contains("did you mean `batch-divisible`?"), "{part}");
    }

    #[test]
    fn the_list_has_one_line_per_rule() {
        assert_eq!(list(None).lines().count(), RULES.len() + 1);
    }
}
