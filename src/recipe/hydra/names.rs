//! What a defaults list calls the files and groups of its tree, and where their keys are laid.
//!
//! Source: Hydra 1.3, `core/default_element.py` (`get_config_path`, `get_final_package`,
//! `get_override_key`).

/// A defaults list.
#[derive(Debug, Clone, Copy)]
pub(super) struct List<'l> {
    /// The config that it stands in, from the root of the tree.
    pub name: &'l str,
    /// Where that config is laid, dotted.
    pub package: &'l str,
    /// An interpolation has chosen the config.
    pub interpolated: bool,
}

impl List<'_> {
    /// A file or group of the list, from the root of the tree.
    pub fn full(&self, name: &str) -> String {
        let folder = folder_of(self.name);
        match name.strip_prefix('/') {
            Some(absolute) => absolute.to_owned(),
            None if folder.is_empty() => name.to_owned(),
            None => format!("{folder}/{name}"),
        }
    }

    /// Where the files of a group are laid: as the list says, or else after the group.
    pub fn inner(&self, group: &str, said: Option<&str>) -> String {
        let own = dotted(group.trim_start_matches('/'));
        let own = match said {
            None => own.as_str(),
            Some("_here_") => "",
            Some(said) => match said.strip_prefix("_global_") {
                Some(rest) => return rest.trim_start_matches('.').to_owned(),
                None => said,
            },
        };
        match (self.package, own) {
            (parent, "") => parent.to_owned(),
            ("", own) => own.to_owned(),
            (parent, own) => format!("{parent}.{own}"),
        }
    }

    /// The key by which a group is chosen: itself, and `@PACKAGE` where it is laid elsewhere than
    /// it is called.
    pub fn key(&self, group: &str, said: Option<&str>) -> String {
        let (full, package) = (self.full(group), self.inner(group, said));
        match package.as_str() {
            same if same == dotted(&full) => full,
            "" => format!("{full}@_global_"),
            other => format!("{full}@{other}"),
        }
    }
}

/// The folder of a config's name.
pub(super) fn folder_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// A group's path as a package.
pub(super) fn dotted(group: &str) -> String {
    group.replace('/', ".")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each as `get_override_key` of Hydra 1.3 has it.
    #[test]
    fn a_group_is_chosen_by_its_path_and_its_package() {
        let key = |name, package, group, said| {
            let list = List {
                name,
                package,
                interpolated: false,
            };
            list.key(group, said)
        };
        for (name, package, group, said, expected) in [
            ("config", "", "db", None, "db"),
            ("config", "", "db", Some("other"), "db@other"),
            ("config", "", "db", Some("_global_"), "db@_global_"),
            ("server/apache", "server", "db", None, "server/db"),
            (
                "server/apache",
                "server",
                "db",
                Some("main"),
                "server/db@server.main",
            ),
            ("server/apache", "server", "/db", None, "db@server.db"),
            ("server/apache", "server", "/db", Some("_global_.db"), "db"),
            ("experiment/one", "", "/db", None, "db"),
            (
                "experiment/one",
                "experiment",
                "/db",
                None,
                "db@experiment.db",
            ),
        ] {
            assert_eq!(key(name, package, group, said), expected);
        }
    }
}
