//! Names of files and groups in a defaults list, and the packages of their keys.
//!
//! Source: Hydra 1.3, `core/default_element.py` (`get_config_path`, `get_final_package`,
//! `get_override_key`).

/// The context of a defaults list.
#[derive(Debug, Clone, Copy)]
pub(super) struct List<'l> {
    /// The config that contains the list, from the root of the tree.
    pub name: &'l str,
    /// The package of that config, dotted.
    pub package: &'l str,
    /// An interpolation chose the config.
    pub interpolated: bool,
}

impl List<'_> {
    /// The path of an entry's file or group, from the root of the tree.
    pub fn full(&self, name: &str) -> String {
        let folder = folder_of(self.name);
        match name.strip_prefix('/') {
            Some(absolute) => absolute.to_owned(),
            None if folder.is_empty() => name.to_owned(),
            None => format!("{folder}/{name}"),
        }
    }

    /// The package of a group's files: from the list, or else from the group.
    pub fn inner(&self, group: &str, stated: Option<&str>) -> String {
        let own = dotted(group.trim_start_matches('/'));
        let own = match stated {
            None => own.as_str(),
            Some("_here_") => "",
            Some(stated) => match stated.strip_prefix("_global_") {
                Some(rest) => return rest.trim_start_matches('.').to_owned(),
                None => stated,
            },
        };
        match (self.package, own) {
            (parent, "") => parent.to_owned(),
            ("", own) => own.to_owned(),
            (parent, own) => format!("{parent}.{own}"),
        }
    }

    /// The key by which an override chooses a group: its path, and `@PACKAGE` if its package differs from
    /// the path.
    pub fn key(&self, group: &str, stated: Option<&str>) -> String {
        let (full, package) = (self.full(group), self.inner(group, stated));
        match package.as_str() {
            same if same == dotted(&full) => full,
            "" => format!("{full}@_global_"),
            other => format!("{full}@{other}"),
        }
    }
}

/// The directory of a config's name.
pub(super) fn folder_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The path of a group as a package.
pub(super) fn dotted(group: &str) -> String {
    group.replace('/', ".")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are those of `get_override_key` of Hydra 1.3.
    #[test]
    fn a_group_is_chosen_by_its_path_and_its_package() {
        let key = |name, package, group, stated| {
            let list = List {
                name,
                package,
                interpolated: false,
            };
            list.key(group, stated)
        };
        for (name, package, group, stated, expected) in [
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
            assert_eq!(key(name, package, group, stated), expected);
        }
    }
}
