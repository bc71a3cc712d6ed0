//! The page that `evenkeel explain` prints and that `docs/rules/` contains.

use super::{Check, Example, Rule, UPSTREAM};

/// Columns of a line of text.
const WIDTH: usize = 92;

/// A rule's page, Markdown.
pub fn page(rule: &Rule) -> String {
    let (who, command) = match rule.check {
        Check::Reader => ("checked when the recipe is read", "plan"),
        Check::Plan(_) => ("checked for every plan", "plan"),
        Check::External(_) => ("checked where your program runs the plan", "plan"),
        Check::PlanWarning(_) => ("an error for `launch`, a warning in every plan", "plan"),
        Check::Trainer(_) => (
            "checked for the built-in trainer: by `launch`, the controller and `plan --trainer built-in`",
            "launch",
        ),
    };
    let mut page = format!("# {}\n\n", rule.id);
    page += &wrap(&format!("**{}**: {}", rule.severity, rule.summary));
    page += &wrap(&format!("({who})"));
    for paragraph in rule.why().split("\n\n") {
        page.push('\n');
        page += &wrap(paragraph);
    }
    page += UPSTREAM;
    page += &wrap(rule.upstream());
    page += "\n## Breaks the rule\n\n";
    page += &example(&rule.wrong, command);
    page += "\n## Satisfies it\n\n";
    page += &example(&rule.right, command);
    page
}

fn example(example: &Example, command: &str) -> String {
    let call = format!("evenkeel {command} recipe.yaml {}", example.flags);
    format!("```yaml\n# {}\n{}```\n", call.trim_end(), example.recipe())
}

/// Breaks a paragraph into lines, each ended by a line feed.
pub(super) fn wrap(text: &str) -> String {
    let mut wrapped = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > WIDTH {
            wrapped.push('\n');
            column = 0;
        } else if column > 0 {
            wrapped.push(' ');
            column += 1;
        }
        wrapped += word;
        column += length;
    }
    wrapped.push('\n');
    wrapped
}
