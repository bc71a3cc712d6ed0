//! The help of each command, in one snapshot. `INSTA_UPDATE=always cargo test --test help` writes it.

use std::process::Command;

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
    let wide: Vec<&str> = shown
        .lines()
        .filter(|line| line.chars().count() > 80)
        .collect();
    assert_eq!(wide, [""; 0], "lines of more than 80 columns");
    insta::assert_snapshot!("help", shown);
}
