//! Resolves a source of the recipe to objects of a bucket: one object, all below a prefix, or a glob.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::bucket::{Bucket, BucketError, Object};
use crate::recipe::schema::spec::DataSource;

use super::error::DataError;
use super::files::{Candidate, MAX_ENTRIES, Place, Resolved, select};
use super::pattern::fits;
use super::remote::{Cache, Remote};
use super::request::PrepareRequest;

/// Finds the objects of a source; `path` is its native path in the recipe, `data.train.0`.
pub(super) fn resolve(
    request: &PrepareRequest<'_>,
    source: &DataSource,
    path: &str,
    cache: &Arc<Cache>,
) -> Result<Resolved, DataError> {
    let key = &format!("{path}.path");
    let (root, pattern) = split(&source.path);
    let bucket = Bucket::open(root)?;
    let objects = match pattern {
        None => below(&bucket)?,
        Some(pattern) => matching(&bucket, pattern)?,
    };
    if objects.len() > MAX_ENTRIES {
        return Err(DataError::source(
            Path::new(&source.path),
            format!("it names more than {MAX_ENTRIES} objects"),
            "name a prefix with only the data, or join objects",
        ));
    }
    let candidate = |bucket: &Bucket, object: Object| {
        let name = object.key.rsplit('/').next().unwrap_or_default();
        let inner = PathBuf::from(match pattern {
            None => &object.key,
            Some(_) => name,
        });
        let remote = Remote::new(bucket, object, cache);
        Candidate {
            name: PathBuf::from(remote.url()),
            place: Place::Bucket(remote),
            inner,
        }
    };
    let found: Vec<Candidate> = objects
        .into_iter()
        .map(|object| candidate(&bucket, object))
        .collect();
    if !found.is_empty() || pattern.is_some() {
        return select(request, source, key, found, false);
    }
    match single(root)? {
        Some((parent, object)) => {
            let found = vec![candidate(&parent, object)];
            select(request, source, key, found, true)
        }
        None => Err(request.setting(
            key,
            format!("there is no object {root}, and none below it"),
            format!("override {}=s3://BUCKET/data.jsonl", (request.key)(key)),
        )),
    }
}

/// A URL without its part from the first name with a wildcard on, and that part.
fn split(url: &str) -> (&str, Option<&str>) {
    let begin = url.find("://").map_or(0, |at| at + 3);
    match url[begin..].find(['*', '?']) {
        None => (url.trim_end_matches('/'), None),
        Some(at) => {
            let cut = url[..begin + at].rfind('/').unwrap_or(begin);
            (&url[..cut], Some(&url[cut + 1..]))
        }
    }
}

/// The objects below a prefix, without hidden ones.
fn below(bucket: &Bucket) -> Result<Vec<Object>, BucketError> {
    let mut objects = bucket.list("")?;
    objects.retain(|object| !object.key.split('/').any(|part| part.starts_with('.')));
    Ok(objects)
}

/// The objects below a prefix whose keys match a pattern.
fn matching(bucket: &Bucket, pattern: &str) -> Result<Vec<Object>, BucketError> {
    let pattern: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty()).collect();
    let mut objects = below(bucket)?;
    objects.retain(|object| {
        let parts: Vec<&str> = object.key.split('/').collect();
        fits(&pattern, &parts)
    });
    Ok(objects)
}

/// The object of a URL, and the bucket with the rest of the URL.
fn single(url: &str) -> Result<Option<(Bucket, Object)>, BucketError> {
    let Some((parent, name)) = url
        .rsplit_once('/')
        .filter(|(parent, _)| !parent.ends_with('/'))
    else {
        return Ok(None);
    };
    let bucket = Bucket::open(parent)?;
    let object = bucket.object(name)?;
    Ok(object.map(|object| (bucket, object)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::tests::in_memory;

    fn keys(objects: Vec<Object>) -> Vec<String> {
        objects.into_iter().map(|object| object.key).collect()
    }

    #[test]
    fn a_url_names_an_object_a_prefix_or_a_pattern() {
        for (url, expected) in [
            ("s3://b/data", ("s3://b/data", None)),
            ("s3://b/data/", ("s3://b/data", None)),
            ("s3://b/*.txt", ("s3://b", Some("*.txt"))),
            ("s3://b/x/**/y?.txt", ("s3://b/x", Some("**/y?.txt"))),
        ] {
            assert_eq!(split(url), expected, "{url}");
        }
        let bucket = in_memory();
        for key in ["a.txt", "x/b.txt", "x/y/c.txt", "x/.hidden", ".git/d.txt"] {
            bucket.put(key, vec![1]).unwrap();
        }
        assert_eq!(
            keys(below(&bucket).unwrap()),
            ["a.txt", "x/b.txt", "x/y/c.txt"]
        );
        let matched = |pattern: &str| keys(matching(&bucket, pattern).unwrap());
        assert_eq!(matched("*.txt"), ["a.txt"]);
        assert_eq!(matched("x/**/?.txt"), ["x/b.txt", "x/y/c.txt"]);
    }
}
