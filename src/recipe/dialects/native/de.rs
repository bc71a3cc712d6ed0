//! A serde deserializer over the [`Node`] tree. It records the place of every value and continues
//! after a problem, so it reports all problems of a file at once.
//!
//! A stand-in of the right type replaces a wrong value, so that reading continues. A spec with stand-ins is dropped.

use std::cell::RefCell;
use std::fmt;

use serde::de::value::{MapDeserializer, SeqDeserializer, StrDeserializer};
use serde::de::{self, Deserialize, DeserializeSeed, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::limits;
use crate::recipe::schema::reading::wrong_type;
use crate::recipe::schema::spec::Spec;
use crate::recipe::syntax::diagnostic::{Diagnostic, has_error};
use crate::recipe::syntax::node::{Entry, Node, Value, joined};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::{ValueSource, ValueSources};
use crate::util::suggest::{did_you_mean, short};

/// The key that names the variant of an enum with settings.
const KIND: &str = "kind";

/// Deserializes the whole spec; `None` only if a diagnostic gives the reason. After an error it may have stand-ins.
pub(super) fn spec(tree: &Node, diagnostics: &mut Vec<Diagnostic>) -> (Option<Spec>, ValueSources) {
    let record = RefCell::new(Record {
        value_sources: ValueSources::new(),
        diagnostics: std::mem::take(diagnostics),
    });
    let spec = Spec::deserialize(NodeDeserializer {
        node: tree,
        path: String::new(),
        variant: false,
        record: &record,
    });
    let record = record.into_inner();
    let unexplained = !has_error(&record.diagnostics);
    *diagnostics = record.diagnostics;
    if let Err(failure) = &spec
        && unexplained
    {
        let (message, help) = (failure.to_string(), "see the recipe reference");
        diagnostics.push(Diagnostic::error(
            "wrong-type",
            Some(tree.span),
            message,
            help,
        ));
    }
    (spec.ok(), record.value_sources)
}

/// What deserialization has found so far.
struct Record {
    value_sources: ValueSources,
    diagnostics: Vec<Diagnostic>,
}

/// A message of serde's code, which becomes a diagnostic at its node.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Failure(String);

impl de::Error for Failure {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Failure(message.to_string())
    }

    fn missing_field(field: &'static str) -> Self {
        Failure(format!("`{field}` is missing"))
    }
}

struct NodeDeserializer<'n, 'r> {
    node: &'n Node,
    /// The native path of `node`.
    path: String,
    /// The node is the content of an enum's variant, whose `kind` has been read.
    variant: bool,
    record: &'r RefCell<Record>,
}

impl<'n, 'r> NodeDeserializer<'n, 'r> {
    /// The key, as the user's file spells it.
    fn name(&self) -> &str {
        self.node.key.as_deref().unwrap_or(if self.path.is_empty() {
            "spec"
        } else {
            &self.path
        })
    }

    fn child(&self, name: &str, node: &'n Node) -> Self {
        NodeDeserializer {
            node,
            path: joined(&self.path, name),
            variant: false,
            record: self.record,
        }
    }

    /// Records the place of a value that a file states. The content of a variant shares the place
    /// of its enum.
    fn record_place(&self) {
        let Some(key) = self.node.key.as_ref().filter(|_| !self.variant) else {
            return;
        };
        let place = ValueSource {
            key: key.clone(),
            span: self.node.span,
        };
        self.record
            .borrow_mut()
            .value_sources
            .insert(self.path.clone(), place);
    }

    fn push(&self, problem: Diagnostic) {
        self.record.borrow_mut().diagnostics.push(problem);
    }

    fn wrong_type(&self, expected: &str) {
        self.push(wrong_type(self.name(), self.node, Schema::Core, expected));
    }

    /// A whole number within bounds, or 0 after a report.
    fn integer(&self, min: i128, max: i128) -> i128 {
        self.record_place();
        let Some(value) = self.node.int(Schema::Core) else {
            self.wrong_type("a whole number");
            return 0;
        };
        let help = if (min..=max).contains(&value) {
            limits::of_int(&self.path, value)
        } else {
            let range = || format!("give a whole number from {min} to {max}");
            Some(limits::help(&self.path).unwrap_or_else(range))
        };
        let Some(help) = help else { return value };
        self.out_of_range(&shown(self.node), help);
        0
    }

    fn float(&self) -> f64 {
        self.record_place();
        let value = self.node.resolve(Schema::Core);
        let Some(value) = value.and_then(|value| value.number()) else {
            self.wrong_type("a number");
            return 0.0;
        };
        let found = if value.is_finite() {
            limits::of_float(&self.path, value).map(|help| (value.to_string(), help))
        } else {
            let odd = if value.is_nan() {
                "not a number"
            } else {
                "infinite"
            };
            let range = || "give a finite number".to_owned();
            let help = limits::help(&self.path).unwrap_or_else(range);
            Some((format!("{}, {odd}", shown(self.node)), help))
        };
        let Some((found, help)) = found else {
            return value;
        };
        self.out_of_range(&found, help);
        0.0
    }

    fn out_of_range(&self, found: &str, help: String) {
        // A default of the dialect has no place.
        let span = self.node.key.as_ref().map(|_| self.node.span);
        let message = format!("`{}` is {found}", self.name());
        let diagnostics = &mut self.record.borrow_mut().diagnostics;
        // The reader may have refused the value.
        if span.is_none() || diagnostics.iter().all(|d| d.span != span) {
            diagnostics.push(Diagnostic::error("out-of-range", span, message, help));
        }
    }

    /// The entries of a mapping; an empty value counts as an empty mapping.
    fn entries(&self) -> &'n [Entry] {
        self.record_place();
        match &self.node.value {
            Value::Mapping(entries) => entries,
            // `schedule: norm-test` is the kind alone, with default settings.
            Value::Scalar(_) if self.variant => &[],
            _ if self.node.is_null(Schema::Core) => &[],
            _ => {
                self.wrong_type("a mapping");
                &[]
            }
        }
    }

    /// A struct. Unknown keys are reported here, where the known keys are available.
    fn visit_fields<V: Visitor<'n>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Failure> {
        let entries = self.entries();
        let mut known = Vec::with_capacity(entries.len());
        for entry in entries {
            if fields.contains(&entry.name.as_str()) {
                known.push(entry);
            } else if !(self.variant && entry.name == KIND) {
                let name = self.child(&entry.name, &entry.value).name().to_owned();
                self.push(Diagnostic::error(
                    "unknown-key",
                    Some(entry.name_span),
                    format!("there is no key `{name}`"),
                    did_you_mean(&entry.name, fields.iter().copied()),
                ));
            }
        }
        self.visit_entries(known, visitor)
    }

    fn visit_entries<V: Visitor<'n>>(
        self,
        entries: Vec<&'n Entry>,
        visitor: V,
    ) -> Result<V::Value, Failure> {
        let children = entries.into_iter().map(|entry| {
            let child = self.child(&entry.name, &entry.value);
            (entry.name.as_str(), child)
        });
        visitor
            .visit_map(MapDeserializer::new(children))
            .map_err(|failure| self.locate(failure))
    }

    /// Reports a failure of serde's code at this node, unless a diagnostic below it explains it.
    fn locate(&self, failure: Failure) -> Failure {
        if !has_error(&self.record.borrow().diagnostics) {
            self.push(Diagnostic::error(
                "mandatory-missing",
                Some(self.node.span),
                format!("in `{}`: {failure}", self.name()),
                "add every key that has no default",
            ));
        }
        failure
    }
}

impl<'n> de::Deserializer<'n> for NodeDeserializer<'n, '_> {
    type Error = Failure;

    /// Values of any type (keys of a model's `config.json`).
    fn deserialize_any<V: Visitor<'n>>(self, visitor: V) -> Result<V::Value, Failure> {
        match self.node.resolve(Schema::Core) {
            Some(resolved) => {
                self.record_place();
                match resolved {
                    Resolved::Null | Resolved::Missing => visitor.visit_unit(),
                    Resolved::Bool(value) => visitor.visit_bool(value),
                    Resolved::Int(value) => match (u64::try_from(value), i64::try_from(value)) {
                        (Ok(value), _) => visitor.visit_u64(value),
                        (_, Ok(value)) => visitor.visit_i64(value),
                        _ => {
                            visitor.visit_i64(self.integer(i64::MIN.into(), i64::MAX.into()) as i64)
                        }
                    },
                    Resolved::Float(_) => visitor.visit_f64(self.float()),
                    Resolved::Str(value) => visitor.visit_string(value),
                }
            }
            None if self.node.items().is_some() => self.deserialize_seq(visitor),
            None => self.deserialize_map(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'n>>(self, visitor: V) -> Result<V::Value, Failure> {
        self.record_place();
        let value = match self.node.resolve(Schema::Core) {
            Some(Resolved::Bool(value)) => value,
            _ => {
                self.wrong_type("true or false");
                false
            }
        };
        visitor.visit_bool(value)
    }

    fn deserialize_u64<V: Visitor<'n>>(self, visitor: V) -> Result<V::Value, Failure> {
        visitor.visit_u64(self.integer(0, u64::MAX.into()) as u64)
    }

    fn deserialize_f64<V: Visitor<'n>>(self, visitor: V) -> Result<V::Value, Failure> {
        visitor.visit_f64(self.float())
    }

    fn deserialize_string<V: Visitor<'n>>(self, visitor: V) -> Result<V::Value, Failure> {
        self.record_place();
        if self.node.text().is_none() || self.node.is_null(Schema::Core) {
            self.wrong_type("text");
        }
        visitor.visit_str(self.node.text().unwrap_or_default())
    }

    fn deserialize_option<V: Visitor<'n>>(self, visitor: V) -> Result<V::Value, Failure> {
        if self.node.is_null(Schema::Core) {
            self.record_place();
            return visitor.visit_none();
        }
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'n>>(self, visitor: V) -> Result<V::Value, Failure> {
        self.record_place();
        let items = match &self.node.value {
            Value::Sequence(items) => items.as_slice(),
            _ if self.node.is_null(Schema::Core) => &[],
            _ => {
                self.wrong_type("a list");
                &[]
            }
        };
        let children = items.iter().enumerate();
        let children = children.map(|(index, item)| self.child(&index.to_string(), item));
        visitor.visit_seq(SeqDeserializer::new(children))
    }

    fn deserialize_map<V: Visitor<'n>>(self, visitor: V) -> Result<V::Value, Failure> {
        let entries = self.entries().iter().collect();
        self.visit_entries(entries, visitor)
    }

    fn deserialize_struct<V: Visitor<'n>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Failure> {
        self.visit_fields(fields, visitor)
    }

    /// A variant's name, or a mapping whose `kind` is the name and whose other keys are the
    /// settings.
    fn deserialize_enum<V: Visitor<'n>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Failure> {
        self.record_place();
        let first = variants.first().copied().unwrap_or_default();
        // Once a problem is reported, the failure of a variant with settings is not.
        let stand_in: StrDeserializer<'_, Failure> = first.into_deserializer();
        let kind = self.node.get(KIND);
        let tag = kind.unwrap_or(self.node);
        if kind.is_some() {
            self.child(KIND, tag).record_place();
        }
        let Some(word) = tag.text() else {
            let all: Vec<String> = variants.iter().map(|word| format!("`{word}`")).collect();
            self.push(Diagnostic::error(
                "mandatory-missing",
                Some(self.node.span),
                format!("`{}` does not state its `kind`", self.name()),
                format!("write `kind: {first}`, or another of {}", all.join(", ")),
            ));
            return visitor.visit_enum(stand_in);
        };
        if !variants.contains(&word) {
            self.push(Diagnostic::error(
                "unknown-value",
                Some(tag.span),
                format!("`{}` is `{}`", self.name(), shown(tag)),
                did_you_mean(word, variants.iter().copied()),
            ));
            return visitor.visit_enum(stand_in);
        }
        visitor.visit_enum(Tagged {
            word,
            content: NodeDeserializer {
                variant: true,
                ..self
            },
        })
    }

    forward_to_deserialize_any! {
        <V: Visitor<'n>>
        i8 i16 i32 i64 i128 u8 u16 u32 u128 f32 char str bytes byte_buf unit unit_struct newtype_struct tuple
        tuple_struct identifier ignored_any
    }
}

impl<'n> IntoDeserializer<'n, Failure> for NodeDeserializer<'n, '_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// The name of a variant and its settings.
struct Tagged<'n, 'r> {
    word: &'n str,
    content: NodeDeserializer<'n, 'r>,
}

impl<'n, 'r> de::EnumAccess<'n> for Tagged<'n, 'r> {
    type Error = Failure;
    type Variant = NodeDeserializer<'n, 'r>;

    fn variant_seed<V: DeserializeSeed<'n>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Self::Variant), Failure> {
        let word = seed.deserialize(self.word.into_deserializer())?;
        Ok((word, self.content))
    }
}

impl<'n> de::VariantAccess<'n> for NodeDeserializer<'n, '_> {
    type Error = Failure;

    /// A variant without settings: keys beside `kind` are unknown.
    fn unit_variant(self) -> Result<(), Failure> {
        if self.node.entries().is_some() {
            self.visit_fields(&[], de::IgnoredAny)?;
        }
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'n>>(self, seed: T) -> Result<T::Value, Failure> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'n>>(self, _len: usize, visitor: V) -> Result<V::Value, Failure> {
        de::Deserializer::deserialize_seq(self, visitor)
    }

    fn struct_variant<V: Visitor<'n>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Failure> {
        self.visit_fields(fields, visitor)
    }
}

/// The scalar as written, truncated if it is long.
fn shown(node: &Node) -> String {
    short(node.text().unwrap_or_default())
}
