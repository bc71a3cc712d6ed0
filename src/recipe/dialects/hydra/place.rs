//! The place of a config in its tree: the root, or a config group.

use std::path::{Path, PathBuf};

use crate::recipe::schema::origin::Origin;

/// The file name of a tree's root, which both upstream programs pass to `hydra.main`.
const ROOT: &str = "config.yaml";

/// The deepest level of a group below the root.
const LEVELS: usize = 4;

/// The place of a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeLocation {
    /// The directory of the tree's root.
    pub folder: PathBuf,
    /// The config's path from there, without its extension: `config`, `model/llama`.
    pub name: String,
    /// The origin of these paths.
    pub origin: Origin,
}

impl TreeLocation {
    /// The place of a file. A file with a root in a parent directory belongs to a group.
    pub fn of(path: &Path, origin: &Origin) -> TreeLocation {
        let parent = path.parent().unwrap_or(Path::new(""));
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let root = TreeLocation {
            folder: parent.to_owned(),
            name: stem.into_owned(),
            origin: origin.clone(),
        };
        if path.file_name().is_some_and(|name| name == ROOT) {
            return root;
        }
        let above = parent.ancestors().skip(1).take(LEVELS);
        let found = above.into_iter().find_map(|folder| {
            let group = parent.strip_prefix(folder).ok()?;
            let is_root = |folder: &Path| origin.is_file(&folder.join(ROOT));
            (is_root(folder) && !is_root(parent)).then(|| TreeLocation {
                folder: folder.to_owned(),
                name: format!("{}/{}", group.display(), root.name),
                ..root.clone()
            })
        });
        found.unwrap_or(root)
    }

    /// The config's group; `None` at the root.
    pub fn group(&self) -> Option<&str> {
        self.name.rsplit_once('/').map(|(group, _)| group)
    }

    /// The last part of the name.
    pub fn option(&self) -> &str {
        let last = self.name.rsplit_once('/');
        last.map_or(self.name.as_str(), |(_, option)| option)
    }

    /// The root of the tree.
    pub fn root(&self) -> PathBuf {
        self.folder.join(ROOT)
    }

    /// The path of a config file of the tree. A name with its extension is the same file.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        let name = name.strip_suffix(".yaml").unwrap_or(name);
        self.folder.join(format!("{name}.yaml"))
    }

    /// Whether the tree has this group.
    pub(super) fn has_group(&self, group: &str) -> bool {
        is_inside(group) && self.origin.is_dir(&self.folder.join(group))
    }

    /// The options of a group, sorted by name.
    pub(super) fn options(&self, group: &str) -> Vec<String> {
        let files = self.origin.names(&self.folder.join(group)).into_iter();
        let options = files.filter_map(|name| Some(name.strip_suffix(".yaml")?.to_owned()));
        let mut options: Vec<String> = options.collect();
        options.sort();
        options
    }
}

/// Whether a name stays inside the tree.
pub(super) fn is_inside(name: &str) -> bool {
    !name.is_empty() && name.split('/').all(|part| !["", ".", ".."].contains(&part))
}

/// The root of the tree in a directory from the user: in it, or in its subdirectory `config`.
pub fn root_of(folder: &Path, origin: &Origin) -> Option<PathBuf> {
    let inside = [folder.join(ROOT), folder.join("config").join(ROOT)];
    inside.into_iter().find(|root| origin.is_file(root))
}
