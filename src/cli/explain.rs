//! `evenkeel explain`: the requirement of a rule and its reason.

use std::process::ExitCode;

use anstyle::Style;

use super::EXIT_USAGE;
use super::output::{print, say};
use super::table::Table;
use crate::plan::rules::{self, RULES};
use crate::util::suggest::nearest;

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
        print(list())?;
        return Ok(ExitCode::SUCCESS);
    };
    match rules::find(&id) {
        Some(rule) => {
            print(styled(&rules::page(rule)))?;
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

fn list() -> String {
    let mut table = Table::new(["RULE", "SEVERITY", ""]);
    for rule in RULES.iter() {
        let cells = [rule.id, &rule.severity.to_string(), rule.summary];
        table.row(cells.map(str::to_owned));
    }
    table.render()
}

/// Formats a page's Markdown for a terminal: bold headings, indented code.
fn styled(page: &str) -> String {
    let bold = Style::new().bold();
    let mut text = String::new();
    let mut code = false;
    for line in page.lines() {
        if line.starts_with("```") {
            code = !code;
        } else if code {
            text += &format!("    {line}\n");
        } else if let Some(heading) = line.strip_prefix('#') {
            let heading = heading.trim_start_matches('#').trim_start();
            text += &format!("{bold}{heading}{bold:#}\n");
        } else {
            text += &format!("{}\n", line.replace("**", ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_text_on_a_terminal() {
        let page = rules::page(rules::find("kto-batch-min").unwrap());
        insta::assert_snapshot!(anstream::adapter::strip_str(&styled(&page)).to_string());
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
        assert_eq!(list().lines().count(), RULES.len() + 1);
    }
}
