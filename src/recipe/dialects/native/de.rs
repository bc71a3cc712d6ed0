//! A serde deserializer over the [`Node`] tree. It records the place of every value and continues
//! after a problem, so it reports all problems of a file at once.
//!
//! A stand-in of the right type replaces a wrong value. No stand-in leaves this module: after one
//! error the whole spec is dropped.

use std::cell::RefCell;

use serde::de::value::{MapDeserializer, SeqDeserializer, StrDeserializer};
use serde::de::{self, Deserialize, DeserializeSeed, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::value::{Failure, NodeDeserializer, Record, shown};
use crate::recipe::schema::spec::Spec;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Entry, Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::ValueSources;
use crate::util::suggest::did_you_mean;

/// The key that names the variant of an enum with settings.
const KIND: &str = "kind";

/// Deserializes the whole spec; `None` only if a diagnostic gives the reason.
pub(super) fn spec(tree: &Node, diagnostics: &mut Vec<Diagnostic>) -> (Option<Spec>, ValueSources) {
    let record = RefCell::new(Record {
        value_sources: ValueSources::new(),
        diagnostics,
    });
    let spec = Spec::deserialize(NodeDeserializer {
        node: tree,
        path: String::new(),
        variant: false,
        record: &record,
    });
    let spec = match spec {
        Ok(spec) => Some(spec),
        Err(failure) => {
            let mut record = record.borrow_mut();
            if !record.has_error() {
                record.report(tree, "wrong-type", failure.0, "see the recipe reference");
            }
            None
        }
    };
    (spec, record.into_inner().value_sources)
}

impl<'n> NodeDeserializer<'n, '_, '_> {
    /// A struct. Unknown keys are reported here, where the known keys are available.
    pub fn visit_fields<V: Visitor<'n>>(
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
                self.record.borrow_mut().diagnostics.push(Diagnostic::error(
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
        if !self.record.borrow().has_error() {
            let help = "add every key that has no default";
            self.report(
                "mandatory-missing",
                format!("in `{}`: {failure}", self.name()),
                help,
            );
        }
        failure
    }
}

impl<'n> de::Deserializer<'n> for NodeDeserializer<'n, '_, '_> {
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
        visitor.visit_string(self.text())
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
            self.report(
                "mandatory-missing",
                format!("`{}` does not state its `kind`", self.name()),
                format!("write `kind: {first}`, or another of {}", list(variants)),
            );
            return visitor.visit_enum(stand_in);
        };
        if !variants.contains(&word) {
            self.record.borrow_mut().report(
                tag,
                "unknown-value",
                format!("`{}` is `{}`", self.name(), shown(tag)),
                did_you_mean(word, variants.iter().copied()),
            );
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

impl<'n> IntoDeserializer<'n, Failure> for NodeDeserializer<'n, '_, '_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// The name of a variant and its settings.
struct Tagged<'n, 'r, 'd> {
    word: &'n str,
    content: NodeDeserializer<'n, 'r, 'd>,
}

impl<'n, 'r, 'd> de::EnumAccess<'n> for Tagged<'n, 'r, 'd> {
    type Error = Failure;
    type Variant = NodeDeserializer<'n, 'r, 'd>;

    fn variant_seed<V: DeserializeSeed<'n>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Self::Variant), Failure> {
        let word = seed.deserialize(self.word.into_deserializer())?;
        Ok((word, self.content))
    }
}

impl<'n> de::VariantAccess<'n> for NodeDeserializer<'n, '_, '_> {
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

fn list(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|w| format!("`{w}`")).collect();
    quoted.join(", ")
}
