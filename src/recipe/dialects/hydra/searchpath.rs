//! `hydra.searchpath`: more directories in which Hydra searches for a tree's files, after its own.
//!
//! Source: Hydra 1.3, `_internal/config_loader_impl.py` (`_process_config_searchpath`).

use std::path::PathBuf;

use crate::recipe::schema::environment::Environment;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::Schema;

use super::Program;
use super::interpolation;

/// The key, in the root of a tree or on the command line.
pub(super) const KEY: &str = "hydra.searchpath";

/// The directories of a list, in order.
pub(super) fn folders(list: &Node, program: &Program, reading: &mut Reading) -> Vec<PathBuf> {
    if list.is_null(Schema::OmegaConf) {
        return Vec::new();
    }
    let Some(items) = list.items() else {
        let message = format!("`{KEY}` takes a list of folders, this is {}", list.kind());
        let help = format!("write `{KEY}=[file:///FOLDER]`");
        reading.error("wrong-type", Some(list.span), message, help);
        return Vec::new();
    };
    let mut folders = Vec::new();
    for item in items {
        match folder(item, program, &reading.environment) {
            Ok(folder) => folders.push(folder),
            Err((message, help)) => {
                reading.error("unsupported-value", Some(item.span), message, help);
            }
        }
    }
    folders
}

fn folder(
    item: &Node,
    program: &Program,
    environment: &Environment,
) -> Result<PathBuf, (String, String)> {
    let Some(text) = item.text() else {
        let message = format!("`{KEY}` takes a list of folders, this is {}", item.kind());
        return Err((message, "write `file:///FOLDER`".to_owned()));
    };
    // The config does not exist yet, so only the environment resolves.
    let text = match text.contains("${") {
        true => {
            let nothing = Node::mapping(item.span);
            interpolation::name(text, &nothing, program.resolvers, environment, item.span)?
        }
        false => text.to_owned(),
    };
    match text.split_once("://") {
        None => Ok(PathBuf::from(text)),
        Some(("file", path)) => Ok(PathBuf::from(path)),
        Some((kind, _)) => Err((
            format!("`{kind}://` of `{KEY}` is not supported: only Python can resolve it"),
            "write its directory, `file:///FOLDER`".to_owned(),
        )),
    }
}
