//! Resolves a source of the recipe to objects of a bucket: one object, all below a prefix, or a glob.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::bucket::{self, Object, Reader};
use crate::recipe::schema::spec::DataSource;

use super::error::DataError;
use super::files::{Candidate, MAX_ENTRIES, Place, Resolved, select};
use super::pattern::fits;
use super::remote::{Cache, Remote};
use super::request::{PrepareRequest, Stopped, check_stopped};

/// Finds the objects of a source; `path` is its native path in the recipe, `data.train.0`.
pub(super) fn resolve(
    request: &PrepareRequest<'_>,
    source: &DataSource,
    path: &str,
    cache: &Arc<Cache>,
) -> Result<Resolved, DataError> {
    let key = &format!("{path}.path");
    let (url, named) = bucket::split(&source.path)?;
    let reader = Reader::open(url)?;
    let (prefix, pattern) = split(named);
    let mut objects = below(&reader, prefix, request.stopped)?;
    let candidate = |object: Object, inner: PathBuf| {
        let remote = Remote::new(&reader, object, cache);
        Candidate {
            name: PathBuf::from(remote.url()),
            place: Place::Bucket(remote),
            inner,
        }
    };
    if let Some(pattern) = pattern {
        objects.retain(|(_, inner)| fits_path(pattern, inner));
        let file_name = |inner: &Path| PathBuf::from(inner.file_name().unwrap_or_default());
        let found = objects.into_iter();
        let found = found.map(|(object, inner)| candidate(object, file_name(&inner)));
        return select(request, source, key, found.collect(), false);
    }
    if !objects.is_empty() {
        let found = objects.into_iter();
        let found = found.map(|(object, inner)| candidate(object, inner));
        return select(request, source, key, found.collect(), false);
    }
    let Some(object) = reader.object(prefix)? else {
        return Err(request.setting(
            key,
            format!("there is no object {}, and none below it", source.path),
            format!("override {}=s3://BUCKET/data.jsonl", (request.key)(key)),
        ));
    };
    let name = PathBuf::from(prefix.rsplit('/').next().unwrap_or_default());
    select(request, source, key, vec![candidate(object, name)], true)
}

/// Splits a key before its first name with a wildcard.
fn split(key: &str) -> (&str, Option<&str>) {
    let Some(wildcard) = key.find(['*', '?']) else {
        return (key.trim_end_matches('/'), None);
    };
    match key[..wildcard].rsplit_once('/') {
        None => ("", Some(key)),
        Some((prefix, _)) => (prefix, Some(&key[prefix.len() + 1..])),
    }
}

/// The objects below a prefix with their paths below it, in the order of files below a directory. Hidden ones are
/// excluded.
fn below(
    reader: &Reader,
    prefix: &str,
    stopped: Stopped<'_>,
) -> Result<Vec<(Object, PathBuf)>, DataError> {
    let mut found = Vec::new();
    let mut listed = 0;
    reader.list(prefix, |object| {
        listed += 1;
        let inner = object.key[prefix.len()..].trim_start_matches('/');
        if !inner.split('/').any(|part| part.starts_with('.')) {
            let inner = PathBuf::from(inner);
            found.push((object, inner));
        }
        listed <= MAX_ENTRIES && !stopped()
    })?;
    check_stopped(stopped)?;
    if listed > MAX_ENTRIES {
        return Err(DataError::source(
            Path::new(&reader.url(prefix)),
            format!("more than {MAX_ENTRIES} objects are below it"),
            "name a prefix with only the data, or join objects",
        ));
    }
    found.sort_by(|(_, one), (_, other)| one.cmp(other));
    Ok(found)
}

fn fits_path(pattern: &str, path: &Path) -> bool {
    let pattern: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty()).collect();
    let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy()).collect();
    let parts: Vec<&str> = parts.iter().map(AsRef::as_ref).collect();
    fits(&pattern, &parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::tests::in_memory;

    #[test]
    fn a_key_names_an_object_a_prefix_or_a_pattern() {
        for (key, expected) in [
            ("data", ("data", None)),
            ("data/", ("data", None)),
            ("*.txt", ("", Some("*.txt"))),
            ("x/**/y?.txt", ("x", Some("**/y?.txt"))),
        ] {
            assert_eq!(split(key), expected, "{key}");
        }
    }

    #[test]
    fn objects_are_read_by_the_keys_that_they_have_in_the_order_of_files() {
        let bucket = in_memory();
        let reader = Reader::of(bucket.clone());
        let keys = [
            "a.txt",
            "a/x.txt",
            "a/y/z.txt",
            "a/.hidden",
            ".git/d.txt",
            "notes~1.txt",
            "b%3A.txt",
        ];
        for key in keys {
            reader.put(&format!("data/{key}"), key.as_bytes()).unwrap();
        }
        reader.put("data/marker", b"").unwrap();
        let found = below(&reader, "data", &|| false).unwrap();
        let inner: Vec<&str> = found
            .iter()
            .map(|(_, inner)| inner.to_str().unwrap())
            .collect();
        assert_eq!(
            inner,
            ["a/x.txt", "a/y/z.txt", "a.txt", "b%3A.txt", "notes~1.txt"]
        );
        for (object, inner) in &found {
            let mut read = Vec::new();
            let sink = |piece: &[u8]| {
                read.extend_from_slice(piece);
                true
            };
            reader.download(object, sink).unwrap();
            assert_eq!(read, inner.to_str().unwrap().as_bytes());
        }
        let matched = |pattern: &str| {
            let found = found.iter().filter(|(_, inner)| fits_path(pattern, inner));
            found
                .map(|(_, inner)| inner.to_str().unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(matched("*.txt"), ["a.txt", "b%3A.txt", "notes~1.txt"]);
        assert_eq!(matched("a/**/?.txt"), ["a/x.txt", "a/y/z.txt"]);
        let odd = below(&reader, "data//x", &|| false).unwrap_err();
        assert!(odd.to_string().contains("rename"), "{odd}");
        let stopped = below(&reader, "data", &|| true).unwrap_err();
        assert!(matches!(stopped, DataError::Stopped), "{stopped}");
    }
}
