//! serde's access types: entries of mappings, items of lists, variants of enums.

use serde::de::{self, DeserializeSeed, IntoDeserializer, Visitor};

use super::value::{Failure, NodeDeserializer};
use crate::recipe::syntax::node::{Entry, Node};

pub(super) struct MapAccess<'p, 'n, 'r, 'd> {
    pub parent: &'p NodeDeserializer<'n, 'r, 'd>,
    pub entries: std::vec::IntoIter<&'n Entry>,
    /// The entry whose key serde has taken.
    pub value: Option<&'n Entry>,
}

impl<'n> de::MapAccess<'n> for &mut MapAccess<'_, 'n, '_, '_> {
    type Error = Failure;

    fn next_key_seed<K: DeserializeSeed<'n>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Failure> {
        self.value = self.entries.next();
        match self.value {
            Some(entry) => seed
                .deserialize(entry.name.as_str().into_deserializer())
                .map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'n>>(&mut self, seed: V) -> Result<V::Value, Failure> {
        let entry = self
            .value
            .take()
            .ok_or_else(|| Failure("a value was requested before its key".to_owned()))?;
        seed.deserialize(self.parent.child(&entry.name, &entry.value))
    }
}

pub(super) struct SequenceAccess<'p, 'n, 'r, 'd> {
    pub parent: &'p NodeDeserializer<'n, 'r, 'd>,
    pub items: std::iter::Enumerate<std::slice::Iter<'n, Node>>,
}

impl<'n> de::SeqAccess<'n> for SequenceAccess<'_, 'n, '_, '_> {
    type Error = Failure;

    fn next_element_seed<T: DeserializeSeed<'n>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Failure> {
        match self.items.next() {
            Some((index, item)) => seed
                .deserialize(self.parent.child(&index.to_string(), item))
                .map(Some),
            None => Ok(None),
        }
    }
}

pub(super) struct EnumAccess<'n, 'r, 'd> {
    pub word: &'n str,
    pub content: NodeDeserializer<'n, 'r, 'd>,
}

impl<'n, 'r, 'd> de::EnumAccess<'n> for EnumAccess<'n, 'r, 'd> {
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

/// A stand-in variant for an enum whose name was refused.
pub(super) struct StandIn(pub &'static str);

impl<'n> de::EnumAccess<'n> for StandIn {
    type Error = Failure;
    type Variant = StandIn;

    fn variant_seed<V: DeserializeSeed<'n>>(self, seed: V) -> Result<(V::Value, Self), Failure> {
        let word = seed.deserialize(self.0.into_deserializer())?;
        Ok((word, self))
    }
}

impl<'n> de::VariantAccess<'n> for StandIn {
    type Error = Failure;

    fn unit_variant(self) -> Result<(), Failure> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'n>>(self, _seed: T) -> Result<T::Value, Failure> {
        Err(refused())
    }

    fn tuple_variant<V: Visitor<'n>>(self, _len: usize, _visitor: V) -> Result<V::Value, Failure> {
        Err(refused())
    }

    fn struct_variant<V: Visitor<'n>>(
        self,
        _fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Failure> {
        Err(refused())
    }
}

/// Ends the reading of an enum whose problem has been reported.
fn refused() -> Failure {
    Failure("the kind is unknown".to_owned())
}
