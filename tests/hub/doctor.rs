//! What `evenkeel doctor` says of a hub.

use super::launch::{Place, model};
use super::server::{Answer, Server, Trouble};

/// The line of the hub and the one below it, with the exit code.
fn said(place: &Place, words: &[&str], token: &str) -> (Option<i32>, String) {
    let mut command = place.command(&[&["doctor"], words].concat());
    let output = command
        .env("HF_TOKEN", token)
        .env_remove("KUBECONFIG")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(|line| line[4..].starts_with("hub "));
    let at = at.unwrap_or_else(|| panic!("{text}"));
    let below = lines[at + 1].strip_prefix("                  next: ");
    let next = below.map_or_else(String::new, |next| format!(" | {next}"));
    (output.status.code(), format!("{}{next}", lines[at]))
}

#[test]
fn the_doctor_asks_the_hub() {
    let refuses: Trouble = Box::new(|asked, _, answer| match &*asked.path {
        path if path.starts_with("/api/models/acme/tiny/") => {
            Answer::of(403).with("X-Error-Code", "GatedRepo")
        }
        _ => answer,
    });
    let server = Server::with(vec![model()], refuses);
    let place = Place::with(&server.endpoint, "");
    let endpoint = &server.endpoint;

    let (code, line) = said(&place, &["--hub"], "hf_secret");
    assert_eq!(
        (code, line),
        (
            Some(0),
            format!("ok  hub           {endpoint} knows you as ada")
        )
    );
    let refused = "hub           the hub refuses the token of HF_TOKEN or `hf auth login` | `hf auth login`, or set HF_TOKEN to a token that is valid";
    // Without the option a hub that does not answer is no failure of this machine.
    assert_eq!(
        said(&place, &[], "hf_old"),
        (Some(0), format!("--  {refused}"))
    );
    assert_eq!(
        said(&place, &["--hub"], "hf_old"),
        (Some(1), format!("NO  {refused}"))
    );
    let (code, line) = said(&place, &["--hub", "acme/tiny"], "hf_secret");
    assert_eq!(code, Some(1), "{line}");
    assert!(line.contains("accepted the licence"), "{line}");
    assert!(
        line.ends_with(&format!(
            "`hf auth login`, then {endpoint}/acme/tiny in a browser"
        )),
        "{line}"
    );
}
