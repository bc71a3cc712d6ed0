use super::*;

#[test]
fn a_missing_file_is_an_error_that_names_it() {
    let error = read(&Request {
        path: "no/such/recipe.yaml".into(),
        ..Request::default()
    })
    .unwrap_err();
    assert_eq!(error.diagnostics[0].rule, "unreadable-file");
    let text = error.to_string();
    assert!(
        text.contains("`no/such/recipe.yaml` cannot be read"),
        "{text}"
    );
}
