//! `evenkeel explain`: what a rule asks for, and why.

use std::process::ExitCode;

use anstyle::Style;

use super::EXIT_USAGE;
use super::table::Table;
use crate::batch::rules::{self, RULES};
use crate::recipe::suggest::did_you_mean;

/// Explain a rule, or list all of them
#[derive(clap::Args)]
#[command(after_help = "Examples:
  evenkeel explain                    all rules
  evenkeel explain batch-divisible    one of them")]
pub struct Args {
    /// A rule's id, as in `error[batch-divisible]`
    rule: Option<String>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Some(id) = args.rule else {
        anstream::print!("{}", list());
        return Ok(ExitCode::SUCCESS);
    };
    match rules::find(&id) {
        Some(rule) => {
            anstream::print!("{}", styled(&rules::page(rule)));
            Ok(ExitCode::SUCCESS)
        }
        None => {
            let help = did_you_mean(&id, RULES.iter().map(|rule| rule.id));
            anstream::eprintln!("error: there is no rule `{id}`: {help}");
            Ok(ExitCode::from(EXIT_USAGE))
        }
    }
}

fn list() -> String {
    let mut table = Table::new(["RULE", "SEVERITY", ""]);
    for rule in RULES.iter() {
        let cells = [rule.id, &rule.severity.to_string(), rule.summary];
        table.row(cells.map(str::to_owned));
    }
    table.render()
}

/// A page's Markdown for a terminal: headings in bold, code indented.
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
    fn the_list_has_every_rule_on_a_line() {
        assert_eq!(list().lines().count(), RULES.len() + 1);
    }
}
